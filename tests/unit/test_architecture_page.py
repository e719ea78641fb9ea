"""docs/architecture.md agrees with the code: its table has every module and no other, its walks name only
functions that exist, and it stays short.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier

PACKAGE = Path(kvtier.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
MOST_WORDS = 3500


def named_modules(page: str) -> Iterator[str]:
    """Yield the modules in the first column of the page's table, with their folders.

    In a row, a name without a folder has that of the name before it.
    """
    table = page.split("## Modules\n", 1)[1].split("\n\n", 1)[0]
    for row in table.splitlines()[2:]:
        folder = ""
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
            folder = name.rpartition("/")[0] or folder
            yield f"{folder}/{name.rpartition('/')[2]}" if folder else name


def modules_of(package: Path) -> set[str]:
    """Return the modules of a package, each with its folder; a package that has none is one itself."""
    found = set()
    for file in package.rglob("*.py"):
        is_alone = file.name == "__init__.py" and len(list(file.parent.rglob("*.py"))) == 1
        if is_alone or not file.name.startswith("__"):
            found.add(str((file.parent if is_alone else file.with_suffix("")).relative_to(package)))
    return found


def folders_of(module: str) -> set[str]:
    """Return the packages that a module is in."""
    parts = module.split("/")[:-1]
    return {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}


def missing_modules(page: str, package: Path) -> set[str]:
    """Return the modules that the page names neither themselves nor by a package they are in."""
    named = set(named_modules(page))
    return {module for module in modules_of(package) if not ({module} | folders_of(module)) & named}


def unknown_modules(page: str, package: Path) -> set[str]:
    """Return the modules that the page names and that do not exist."""
    existing = modules_of(package)
    return set(named_modules(page)) - existing - set().union(*map(folders_of, existing))


def test_table_names_every_module_and_no_other() -> None:
    page = PAGE.read_text()
    assert (missing_modules(page, PACKAGE), unknown_modules(page, PACKAGE)) == (set(), set())


def test_page_is_short() -> None:
    assert len(PAGE.read_text().split()) <= MOST_WORDS


def test_table_names_no_module_twice() -> None:
    named = list(named_modules(PAGE.read_text()))
    assert sorted(named) == sorted(set(named))


def test_missing_and_unknown_modules_are_found(tmp_path: Path) -> None:
    for name in ("a/one.py", "a/two.py", "b/three.py", "c/__init__.py", "four.py", "__init__.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    rows = ["| module | one line |", "|---|---|", "| `a/one`, `gone` | text `a/two` |", "| `b` | text |"]
    page = "\n".join(["## Modules", *rows, "", ""])
    assert missing_modules(page, tmp_path) == {"a/two", "c", "four"}
    assert unknown_modules(page, tmp_path) == {"a/gone"}


class Names:
    """The names that a package defines: modules, functions, classes, and the members of each class."""

    def __init__(self, package: Path) -> None:
        self.anywhere: set[str] = {"manager"}  # an abbreviation that the page explains
        self.members: dict[str, set[str]] = {}
        self.bases: dict[str, list[str]] = {}
        for file in package.rglob("*.py"):
            self.anywhere |= {file.stem, file.parent.name}
            for node in ast.walk(ast.parse(file.read_text(), str(file))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    self.anywhere.add(node.name)
                if isinstance(node, ast.ClassDef):
                    self.members[node.name] = set(_names_in(node))
                    self.bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def has(self, name: str) -> bool:
        """Return whether a name exists: as a member if its class is named, else anywhere."""
        owner, _, last = name.replace("/", ".").rpartition(".")
        owner = owner.rpartition(".")[2]
        return (
            self._has_member(owner, last) if owner in self.members else last in self.anywhere | self._all()
        )

    def _has_member(self, owner: str, name: str) -> bool:
        return name in self.members.get(owner, ()) or any(
            self._has_member(base, name) for base in self.bases.get(owner, ())
        )

    def _all(self) -> set[str]:
        return set().union(*self.members.values())


def _names_in(node: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.attr


def hops_of(page: str) -> Iterator[str]:
    """Yield the names on the page's walks. `…Scheduler` and `…Worker` are the connector's two sides."""
    walks = page.split("## Three walks\n", 1)[1].split("\n## ", 1)[0]
    for name in re.findall(r"`([\w./…]+)`", walks):
        yield name.replace("…", "OffloadingConnector")


@pytest.fixture(scope="module")
def names() -> Names:
    return Names(PACKAGE)


def test_walks_name_existing_functions(names: Names) -> None:
    assert [hop for hop in hops_of(PAGE.read_text()) if not names.has(hop)] == []


def test_unknown_functions_in_walks_are_found(names: Names) -> None:
    hops = hops_of(
        "## Three walks\n`…Scheduler.build_connector_meta` → `tiers/io_threads.IOThreads.nowhere`, `nowhere`"
        "\n## "
    )
    assert [hop for hop in hops if not names.has(hop)] == ["tiers/io_threads.IOThreads.nowhere", "nowhere"]
