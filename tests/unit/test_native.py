"""The switch between C and Python: one place, one variable, and no compiled loop that it does not know."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvtier import native

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "kvtier" / "native"
FORMS = """
from kvtier.keys import HASHED_BY
from kvtier.policies.slots import SLOTS_BY, PythonBook, SlotBook
from kvtier.transfer.host import COPIED_BY, store_pages, store_pages_python
print(HASHED_BY, SLOTS_BY, COPIED_BY, SlotBook is PythonBook, store_pages is store_pages_python)
"""


def run_with(value: str | None, code: str = FORMS) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != native.VARIABLE}
    environment |= {} if value is None else {native.VARIABLE: value}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def test_every_c_file_is_a_loop_that_is_built_and_described() -> None:
    assert {path.stem for path in FOLDER.glob("*.c")} == {f"_{loop}" for loop in native.LOOPS}
    assert {path.stem for path in FOLDER.glob("*.pyi")} == {f"_{loop}" for loop in native.LOOPS}
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    sources = {module["name"]: module["sources"] for module in built if ".native." in module["name"]}
    assert sources == {f"kvtier.native._{loop}": [f"src/kvtier/native/_{loop}.c"] for loop in native.LOOPS}
    for loop in native.LOOPS:
        assert f"_{loop}.c" in (native.__doc__ or "")


@pytest.mark.skipif(
    not all(map(native.is_compiled, native.LOOPS)), reason="not all loops were compiled here"
)
@pytest.mark.parametrize("value", [None, "", "c"])
def test_compiled_loops_are_used(value: str | None) -> None:
    assert run_with(value).stdout.split() == ["c", "c", "c", "False", "False"]


def test_one_variable_turns_all_of_them_off() -> None:
    assert run_with("python").stdout.split() == ["python", "python", "python", "True", "True"]


def test_the_variable_also_turns_off_what_tells_cuda() -> None:
    pytest.importorskip("torch")
    code = (
        "from kvtier.transfer.cuda import commands; print(commands.SUBMITTED_BY, commands.CompiledSubmitter)"
    )
    assert run_with("python", code).stdout.split() == ["python", "None"]


def test_another_value_is_an_error() -> None:
    done = run_with("off")
    assert done.returncode != 0
    assert "KVTIER_NATIVE: expected c or python, got 'off'" in done.stderr


def test_a_loop_that_was_not_compiled_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvtier.native._slots", None)
    native.is_compiled.cache_clear()
    try:
        assert (native.form_of("slots"), native.uses_c("slots")) == ("python", False)
    finally:
        native.is_compiled.cache_clear()


def test_the_doctor_says_that_they_are_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.cli.doctor import Status, examine

    monkeypatch.setenv(native.VARIABLE, "python")
    (found,) = (check for check in examine() if check.name == "compiled parts")
    assert (found.status, found.detail) == (
        Status.WARN,
        "KVTIER_NATIVE=python: Python does their work, slower",
    )


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.[ch]")), ids=lambda file: file.name)
def test_lines_of_c_end_before_column_110(file: Path) -> None:
    """As those of Python do, which ruff sees to."""
    assert [line for line in file.read_text().splitlines() if len(line) > 109] == []
