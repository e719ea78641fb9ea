"""Imports point one way, and what a router or a scheduler needs imports without torch or an engine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier

PACKAGE = Path(kvtier.__file__).parent

BASE = {"config", "errors", "keys", "namespace", "config_fields", "packing", "residency", "tier_config"}
BELOW_TRANSFER = BASE | {"hints", "machine", "policies", "pool", "slot_table"}
BELOW_OFFLOAD = BELOW_TRANSFER | {"transfer", "tiers", "events", "metrics"}
BELOW_CONNECTOR = BELOW_OFFLOAD | {"offload"}
BELOW_ENGINE = BELOW_CONNECTOR | {"connector"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config_fields": {"errors"},
    "tier_config": {"errors", "config_fields"},
    "config": {"errors", "namespace", "config_fields", "packing", "tier_config"},
    "digests": {"errors", "file_hasher", "machine"},
    "file_hasher": set(),
    "machine": {"config_fields", "errors"},
    "namespace": {"digests", "errors"},
    "native": {"errors"},
    "keys": {"errors", "native"},
    "packing": {"native"},
    "residency": {"keys"},
    "policies": BASE | {"native"},
    "hints": {"config_fields", "errors", "policies"},
    "slot_marks": BASE | {"hints", "policies"},
    "slot_table": BASE | {"hints", "policies", "slot_marks"},
    "rendezvous": {"errors"},
    "pool": BASE | {"machine", "rendezvous"},
    "events": {"config_fields", "errors", "keys", "residency"},
    "metrics": {"errors"},
    "index": {"errors", "events", "keys", "metrics"},
    "transfer": BELOW_TRANSFER | {"native"},
    "tiers": BELOW_TRANSFER | {"metrics"},
    "offload": BELOW_OFFLOAD,
    "connector": BELOW_CONNECTOR,
    "engine": BELOW_ENGINE,
    "integrations": BELOW_ENGINE | {"__version__"},
}
"""What each part of kvtier may import from the others, lazily or not.

Below are those that may import anything.
"""
ON_TOP = {"__main__", "bench", "cli", "demo", "report", "simulate", "testing"}

NEED_TORCH = (
    "kvtier.engine",
    "kvtier.integrations.vllm",
    "kvtier.transfer.cuda",
    "kvtier.transfer.host",
    "kvtier.transfer.layout",
    "kvtier.testing",
)
ENGINES = {"vllm", "sglang", "transformers"}


def module_name(file: Path, root: Path = PACKAGE) -> str:
    parts = ("kvtier", *file.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path, root: Path = PACKAGE) -> Iterator[tuple[int, str]]:
    """Yield `(line, module)` of every import in a file, at any depth. `from a import b` counts as `a.b`."""
    package = module_name(file, root).split(".")
    package = package if file.name == "__init__.py" else package[:-1]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join(start + (node.module.split(".") if node.module else []))
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def part_of(module: str) -> str:
    return [*module.split("."), ""][1]


def broken_rules(root: Path = PACKAGE) -> list[str]:
    """Return one line for each import that points the wrong way."""
    found = []
    for file in sorted(root.rglob("*.py")):
        part = part_of(module_name(file, root))
        if part in ON_TOP:
            continue
        allowed = MAY_IMPORT.get(part, set()) | {part}
        for line, module in imports_of(file, root):
            wrong_way = module.split(".")[0] == "kvtier" and part_of(module) not in allowed
            foreign = module.split(".")[0] in ENGINES and part != "integrations"
            if wrong_way or foreign:
                found.append(f"{file.relative_to(root)}:{line}: {part or 'kvtier'} may not import {module}")
    return found


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_imports_point_one_way() -> None:
    assert broken_rules() == []


def test_every_part_has_a_place() -> None:
    parts = {part_of(module_name(file)) for file in PACKAGE.rglob("*.py")} - {""}
    assert parts - MAY_IMPORT.keys() - ON_TOP == set()


@pytest.mark.parametrize(
    "statement",
    [
        "import kvtier.offload.base",
        "from kvtier.offload import base",
        "from kvtier import offload",
        "from ..offload import base",
        "from .. import offload",
        "def later():\n    from kvtier.connector import metadata",
        "if TYPE_CHECKING:\n    import kvtier.engine",
        "import vllm.config",
        "def later():\n    from transformers import AutoModel",
    ],
)
def test_the_rule_catches(tmp_path: Path, statement: str) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "bad.py").write_text(statement)
    assert len(broken_rules(tmp_path)) == 1


@pytest.mark.parametrize(
    "statement",
    ["from kvtier.keys import OffloadKey", "from .lru import x", "import torch", "from ..errors import y"],
)
def test_the_rule_allows(tmp_path: Path, statement: str) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "good.py").write_text(statement)
    assert broken_rules(tmp_path) == []


def test_importing_kvtier_loads_no_engine() -> None:
    run_python("""
        import sys
        import kvtier
        loaded = {"torch", "transformers", "vllm"} & sys.modules.keys()
        assert not loaded, f"import kvtier loaded {loaded}"
    """)


def test_the_connector_loads_no_sockets() -> None:
    """A scheduler makes events; whoever publishes or follows them loads ZeroMQ."""
    run_python("""
        import sys
        import kvtier.connector
        assert "zmq" not in sys.modules
        loaded = {name for name in sys.modules if name.startswith("kvtier.events")}
        expected = {"kvtier.events", "kvtier.events.tracker", "kvtier.events.types"}
        assert loaded == expected, f"import kvtier.connector loaded {sorted(loaded - expected)}"
    """)


def test_lazy_names_of_the_event_package_are_found() -> None:
    run_python("""
        import kvtier.events
        assert set(kvtier.events.__all__) <= set(dir(kvtier.events))
        assert all(hasattr(kvtier.events, name) for name in kvtier.events.__all__)
        assert not hasattr(kvtier.events, "no_such_name")
    """)


def test_all_but_the_engine_imports_without_torch() -> None:
    modules = sorted(module_name(file) for file in PACKAGE.rglob("*.py"))
    modules = [m for m in modules if not m.startswith(NEED_TORCH) and not m.endswith("__main__")]
    assert "kvtier.connector.connector" in modules
    run_python(f"""
        import importlib, sys
        sys.modules.update(dict.fromkeys(["torch", "transformers", "vllm", "safetensors"]))
        for module in {modules!r}:
            importlib.import_module(module)
    """)


def test_a_source_tree_knows_its_version() -> None:
    """Nothing but the source may be needed: without site-packages there is no metadata, and no dependency
    either.
    """
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import kvtier; print(kvtier.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == kvtier.__version__, done.stderr


def test_the_version_is_written_once() -> None:
    """What is installed is named after the source, and the source asks nobody else what it is."""
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kvtier.__version__"}
    for file in PACKAGE.rglob("*.py"):
        assert not re.search(r"version\([\"']kvtier", file.read_text()), file
