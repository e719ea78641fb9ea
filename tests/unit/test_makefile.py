"""The Makefile: what it offers, and that no C file is forgotten when what they are built into is out of date."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed here")


def make(*arguments: str) -> str:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["install", "demo", "test", "vllm", "test-vllm", "check", "bench", "dist", "clean"])
def test_help_lists_every_target(target: str) -> None:
    assert any(line.split()[:2] == ["make", target] for line in make("help").splitlines())


def test_every_c_file_rebuilds_the_environments() -> None:
    sources = {
        str(path.relative_to(ROOT)) for path in (ROOT / "src" / "kvtier").iterdir() if path.suffix in (".c", ".h")
    }
    assert sources
    assert sources <= set(make("--eval=print: ; @echo $(BUILD)", "print").split())
