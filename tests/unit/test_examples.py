"""The examples run as their docstrings say, and are short enough to read. vLLM's own suite runs the one that
needs vLLM.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.policies import CachePolicy
from kvtier.testing import PolicySuite

FOLDER = Path(__file__).parents[2] / "examples"
ELSEWHERE = {"vllm_offline.py"}
EXAMPLES = sorted({file.name for file in FOLDER.glob("*.py")} - ELSEWHERE)
MOST_LINES = 60
SETTINGS = {"KVTIER_INDEX": "python"}  # nothing to compile first
"""What the examples are run with."""


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, FOLDER / name, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | SETTINGS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short_and_tested_here(name: str) -> None:
    assert len((FOLDER / name).read_text().splitlines()) <= MOST_LINES
    assert Path(__file__).read_text().count(name.removesuffix(".py")) > 0


def test_index_in_process_names_the_worker_with_the_longest_prefix() -> None:
    before, after = run("index_in_process.py").splitlines()
    assert before.endswith("{'worker-1': 8, 'worker-2': 5}; best: worker-1 with 128 tokens")
    assert after.endswith("{'worker-1': 2, 'worker-2': 5}; best: worker-2 with 80 tokens")


def test_manager_alone_compares_policies() -> None:
    """Half of the prompts come once: a policy that counts uses keeps the others, LRU does not."""
    shares = {line.rpartition(": ")[0]: line.split()[-5] for line in run("manager_alone.py").splitlines()}
    found = {policy: float(share.rstrip("%")) for policy, share in shares.items()}
    assert found["own_policy:FewestUses"] > 1.5 * found["lru"] > 0


def load_policy() -> Any:
    spec = importlib.util.spec_from_file_location("own_policy", FOLDER / "own_policy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestOwnPolicy(PolicySuite):
    def make(self, capacity: int) -> CachePolicy:
        policy: CachePolicy = load_policy().FewestUses(capacity)
        return policy


@contextmanager
def publishing() -> Iterator[list[str]]:
    """Run the publisher on free ports, and yield its addresses."""
    any_port = "tcp://127.0.0.1:0"
    command = [sys.executable, FOLDER / "publish_events.py", "--endpoint", any_port]
    command += ["--replay-endpoint", any_port, "--prompts", "10000", "--interval", "0.01"]
    publisher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert publisher.stdout is not None
        yield re.findall(r"tcp://[\d.:]+", publisher.stdout.readline())
    finally:
        publisher.terminate()
        publisher.communicate()


def test_follow_events_sees_what_publish_events_holds() -> None:
    """The follower joins late. Once it is exact, it counts what the publisher holds: eight prompts of four
    blocks.
    """
    with publishing() as addresses:
        lines = run("follow_events.py", *addresses, "--batches", "60").splitlines()
    assert "engine is exact" in lines
    assert lines[-1].endswith(": 32 blocks")
