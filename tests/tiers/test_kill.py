"""Killed at every write: no wrong byte, and what was done before is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.kill_child import JOBS, ROW_BYTES, ROWS_PER_JOB, open_tier, row_of

from kvtier.keys import make_offload_key
from kvtier.tiers.base import Direction, RowBuffer, RowJob
from kvtier.tiers.disk import DiskTier


def fetch_all(tier: DiskTier) -> dict[int, bytes]:
    """Return the rows that can be promoted."""
    keys = {make_offload_key(b"%032d" % number, 0): number for number in range(JOBS * ROWS_PER_JOB)}
    memory = memoryview(bytearray(len(keys) * ROW_BYTES))
    tier.set_buffer(buffer := RowBuffer(memory, ROW_BYTES))
    tier.promote(RowJob(1, Direction.PROMOTE, list(keys), np.arange(len(keys)), float("inf")))
    told: dict[int, bytes] = {}
    left = len(keys)
    while left:
        assert tier.wait_any(30)
        for result in tier.poll():
            left -= len(result.keys)
            if result.outcome is None:
                told |= {at: bytes(buffer[at][0]) for at in result.positions}
    return told


@pytest.mark.parametrize(
    ("offset", "writes_at_once"), [(0, JOBS), (16, JOBS * ROWS_PER_JOB)], ids=["aligned", "unaligned"]
)
@pytest.mark.timeout(300)
def test_killed_at_every_write(tmp_path: Path, offset: int, writes_at_once: int) -> None:
    child = Path(__file__).with_name("kill_child.py")
    done = subprocess.run(
        [sys.executable, child, tmp_path, "1", "500", str(offset)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    writes = int(done.stdout)
    assert writes > 4 * writes_at_once, f"rows that are written at once take several writes; {done.stderr}"
    expected = kept = 0
    for number in range(1, writes + 1):
        lines = (tmp_path / str(number) / "log").read_text().split("\n")
        begun = max((int(line.split()[1]) for line in lines if line.startswith("begin")), default=-1)
        stored = {int(line.split()[1]) for line in lines if line.startswith("done")}
        # Two jobs fill the tier, so the third may have evicted the first by now.
        safe = {row for row in stored if row // ROWS_PER_JOB >= begun - 1}
        tier = open_tier(tmp_path / str(number))
        found = fetch_all(tier)
        tier.check()
        assert tier.stats().failed_checks == 0, "a slot that was being written is empty, not wrong"
        tier.close()
        assert all(row == row_of(name) for name, row in found.items()), number
        expected += len(safe)
        kept += len(safe & found.keys())
    assert expected > 0
    assert kept >= 0.99 * expected, f"{kept} of {expected}"
