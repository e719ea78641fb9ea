"""One class name, one class: who reads a name need not ask which of two is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import kvtier

PACKAGE = Path(kvtier.__file__).parent


def public_classes(file: Path) -> set[str]:
    """Return the names of a module's classes that do not begin with an underscore, at any depth."""
    tree = ast.parse(file.read_text(), str(file))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def names_used_twice(root: Path = PACKAGE) -> dict[str, list[str]]:
    """Return the class names that more than one module defines, with those modules."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted(root.rglob("*.py")):
        for name in public_classes(file):
            homes[name].append(str(file.relative_to(root)))
    return {name: files for name, files in homes.items() if len(files) > 1}


def test_no_public_class_name_is_used_twice() -> None:
    assert names_used_twice() == {}


def test_a_second_class_is_found(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("class Job: ...\nclass _Own: ...\n")
    assert names_used_twice(tmp_path) == {"Job": ["one.py", "two.py"]}
