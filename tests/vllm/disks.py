"""A disk tier seen from outside of the engine that owns it: when it is open, and what has been written."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.tiers.disk.folder import RECORDS
from kvtier.tiers.disk.format import EMPTY, HEADER_BYTES, RECORD_BYTES

__all__ = ["PROBE", "disk_tier", "num_rows", "wait_first_miss", "wait_open", "wait_rows"]

PROBE = {"kvtier": {"explain": True}, "max_offload_tokens": 0}
"""What a request asks for that is to be explained and to leave nothing behind."""

_SEEDS = itertools.count(1000)
"""Of prompts that nobody has seen: several engines of one server may be asked."""


def disk_tier(folder: Path) -> dict[str, Any]:
    """Return settings of kvtier with a disk, and with patience: machines that test are busy."""
    return {"tiers": [{"disk": {"path": str(folder), "capacity": "64MiB"}}], "load_deadline": "30s"}


def wait_open(explain: Callable[[int], dict[str, Any]]) -> None:
    """Ask about one new prompt after the other until the tier below the pool knows that it never had one.

    `explain` runs a prompt of a block or more, made of a seed, with `PROBE`, and returns what is explained.
    """
    wait_first_miss("never stored", explain, after=["namespace not known yet", "not open yet"])


def wait_first_miss(reason: str, explain: Callable[[int], dict[str, Any]], after: list[str]) -> None:
    """Ask about one new prompt after the other until this is why it is missing; others may precede it."""
    while (found := explain(next(_SEEDS))["first_miss"]) != reason:
        assert found in after


def wait_rows(folder: Path, count: int) -> None:
    """Block until so many rows have been written. An engine with nothing else to do writes them, too."""
    while num_rows(folder) < count:
        time.sleep(0.02)


def num_rows(folder: Path) -> int:
    """Count the rows that are on the disk, by their records."""
    records = [file.read_bytes()[HEADER_BYTES:] for file in folder.glob(f"*/*/{RECORDS}")]
    return sum(
        content[at : at + RECORD_BYTES] != EMPTY
        for content in records
        for at in range(0, len(content), RECORD_BYTES)
    )
