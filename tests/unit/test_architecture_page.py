"""The map of the house is true: docs/architecture.md names every module that there is, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import kvtier

PACKAGE = Path(kvtier.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


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


def left_out(page: str, package: Path) -> set[str]:
    """Return the modules that the page names neither themselves nor by a package they are in."""
    named = set(named_modules(page))
    return {module for module in modules_of(package) if not ({module} | folders_of(module)) & named}


def made_up(page: str, package: Path) -> set[str]:
    """Return what the page names and is not there."""
    there = modules_of(package)
    return set(named_modules(page)) - there - set().union(*map(folders_of, there))


def test_the_table_has_every_module_and_no_other() -> None:
    page = PAGE.read_text()
    assert (left_out(page, PACKAGE), made_up(page, PACKAGE)) == (set(), set())


def test_nothing_is_named_twice() -> None:
    named = list(named_modules(PAGE.read_text()))
    assert sorted(named) == sorted(set(named))


def test_a_module_too_few_and_one_too_many_are_found(tmp_path: Path) -> None:
    for name in ("a/one.py", "a/two.py", "b/three.py", "c/__init__.py", "four.py", "__init__.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    rows = ["| module | one line |", "|---|---|", "| `a/one`, `gone` | text `a/two` |", "| `b` | text |"]
    page = "\n".join(["## Modules", *rows, "", ""])
    assert left_out(page, tmp_path) == {"a/two", "c", "four"}
    assert made_up(page, tmp_path) == {"a/gone"}
