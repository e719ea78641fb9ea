"""What integrations share: ranges of versions, and the line that says what was saved."""

from __future__ import annotations

import threading
from queue import Queue
from threading import Semaphore

import pytest
from tests.unit.connector_kit import Clock

from kvtier.connector import ConnectorStats
from kvtier.integrations import VersionRange
from kvtier.integrations.summary import INTERVAL, Summary


@pytest.mark.parametrize("version", ["0.31", "0.31.0", "0.32.1+cpu", "0.33.0rc1", "0.33.9.post1"])
def test_versions_in_the_range(version: str) -> None:
    assert version in VersionRange("0.31", "0.34")


@pytest.mark.parametrize("version", ["0.30.9", "0.34", "0.34.0.dev1", "0.4", "1.0", "dev", ""])
def test_versions_outside_of_the_range(version: str) -> None:
    assert version not in VersionRange("0.31", "0.34")


def test_a_range_is_written_as_pip_reads_it() -> None:
    assert str(VersionRange("0.31", "0.34")) == ">=0.31,<0.34"


def test_the_summary_tells_what_has_changed_and_nothing_else() -> None:
    clock, stats, told = Clock(100.0), ConnectorStats(), list[str]()
    summary = Summary(stats, told.append, clock)
    clock.now += INTERVAL
    summary.log_changes()
    assert not told, "nothing happened"
    stats.asked_tokens, stats.loaded_tokens, stats.load_bytes, stats.store_bytes = (
        2000,
        1500,
        3 << 20,
        1 << 20,
    )
    stats.loads, stats.loads_failed, stats.stores = 7, 1, 3
    clock.now += INTERVAL
    summary.log_changes()
    assert told.pop() == (
        "kvtier, last 60 s: 1,500 prompt tokens loaded instead of computed (75% of the 2,000 that were not "
        "on the GPU); 3.0 MiB loaded, 1.0 MiB stored, 1 of 10 transfers failed"
    )
    clock.now += INTERVAL
    summary.log_changes()
    assert not told, "it was told"
    stats.stores += 1
    stats.store_bytes += 512
    summary.close()
    assert told.pop() == (
        "kvtier, last 0 s: 0 prompt tokens loaded instead of computed (no prompt needed any);"
        " 0 B loaded, 512 B stored, 0 of 1 transfers failed"
    )
    summary.close()
    assert not told


def test_a_timer_tells_the_summary_while_nobody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine calls in its steps alone: what it did before it went idle must not wait for the next one."""
    monkeypatch.setattr("kvtier.integrations.summary.INTERVAL", 0.001)
    stats, told, looks = ConnectorStats(), Queue[str](), Semaphore(0)

    def clock() -> float:
        looks.release()
        return 0.0

    summary = Summary(stats, told.put, clock)
    summary.start()
    for _ in range(10):
        assert looks.acquire(timeout=60)
    assert told.empty(), "nothing happened"
    for size in (512, 256):
        stats.store_bytes += size
        assert f" {size} B stored" in told.get(timeout=60)
    stats.stores += 1
    summary.close()
    assert told.get_nowait().endswith("0 of 1 transfers failed")
    assert not any(thread.name == "kvtier-summary" for thread in threading.enumerate())
