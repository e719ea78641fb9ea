"""Every tier in the tree runs the suite."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.keys import OffloadKey
from kvtier.testing.faulty_backend import BackendFault, BackendFaultPlan, FaultyBackend
from kvtier.testing.memory_tier import MemoryBackend, make_memory_tier
from kvtier.testing.tier_suite import ROW_BYTES, ManualClock, TierDriver, TierSuite, churn
from kvtier.tiers.base import BackendRow, Direction, RowBuffer, RowJob, Tier
from kvtier.tiers.disk import DiskConfig, DiskTier


class TestMemoryTier(TierSuite):
    def make(self, num_slots: int, clock: ManualClock, plan: BackendFaultPlan) -> tuple[Tier, FaultyBackend]:
        faulty = FaultyBackend(MemoryBackend(), plan)
        return make_memory_tier(num_slots, ROW_BYTES, backend=faulty, clock=clock), faulty


class TestDiskTier(TierSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make(self, num_slots: int, clock: ManualClock, plan: BackendFaultPlan) -> tuple[Tier, FaultyBackend]:
        config = DiskConfig(
            path=str(self.path), capacity=num_slots * (ROW_BYTES + 128 + 576) + 20480, write_limit=0
        )
        tier = DiskTier(config, row_bytes=ROW_BYTES, namespace=lambda: "suite", threads=2, clock=clock)
        assert tier.wait_open()
        assert tier._io.backend is not None
        faulty = tier._io.backend = FaultyBackend(tier._io.backend, plan)
        assert tier.stats().capacity == num_slots
        return tier, faulty


def test_without_the_check_random_calls_go_wrong() -> None:
    """The negative control of `test_random_calls`: flips are seen if nobody checks."""

    def goes_wrong(seed: int) -> bool:
        clock, plan = (
            ManualClock(1000.0),
            BackendFaultPlan(seed, 0.3, (BackendFault.FLIP, BackendFault.SWAP)),
        )
        faulty = FaultyBackend(MemoryBackend(), plan)
        tier = make_memory_tier(16, ROW_BYTES, backend=faulty, clock=clock, check_seals=False)
        try:
            churn(TierDriver(tier, faulty, clock), random.Random(seed), 200)
        except AssertionError:
            return True
        finally:
            tier.close()
        return False

    assert any(goes_wrong(seed) for seed in range(8))


@pytest.mark.parametrize("all_held", [True, False])
def test_the_scheduler_makes_no_rows(all_held: bool) -> None:
    """The thread that moves a row looks for its memory and makes its description, never the scheduler."""
    makers = set()

    class WatchedBuffer(RowBuffer):
        def __getitem__(self, slot: int) -> tuple[memoryview, ...]:
            makers.add(threading.current_thread())
            return super().__getitem__(slot)

    def describe(at: int) -> bytes:
        makers.add(threading.current_thread())
        return b"about %d" % at

    tier = make_memory_tier(8, ROW_BYTES)
    tier.set_buffer(WatchedBuffer(memoryview(bytearray(4 * ROW_BYTES)), ROW_BYTES))
    slots, stored = np.array([2, 0, 3, 1]), 4 if all_held else 3
    names = [OffloadKey(b"%036d" % number) for number in range(4)]
    job = RowJob(1, Direction.DEMOTE, names[:stored], slots[:stored], 1e9, describe)
    assert tier.demote(job) == list(range(stored))
    while tier.stats().demoted < stored:
        assert tier.wait_any(30)
        tier.poll()
    tier.promote(RowJob(2, Direction.PROMOTE, names[::-1], slots, 1e9))
    while tier.stats().promoted < stored:
        assert tier.wait_any(30)
        tier.poll()
    assert makers
    assert threading.current_thread() not in makers
    assert tier.close(30)


def test_rows_keep_their_columns_when_only_some_are_taken() -> None:
    """Key, memory, address and description belong together in a job of which every other row is refused."""
    written: dict[OffloadKey, BackendRow] = {}

    class RecordingBackend(MemoryBackend):
        def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
            written.update({row.key: row for row in rows})
            return super().write(rows)

    backend = RecordingBackend()
    tier = make_memory_tier(32, ROW_BYTES, backend=backend)
    memory = memoryview(bytearray(b"".join(bytes([number]) * ROW_BYTES for number in range(16))))
    tier.set_buffer(buffer := RowBuffer(memory, ROW_BYTES))
    names = [OffloadKey(b"%036d" % number) for number in range(16)]
    for job_id, part in enumerate((range(0, 16, 2), range(16)), 1):
        slots = np.array(part)
        job = RowJob(job_id, Direction.DEMOTE, [names[at] for at in part], slots, 1e9, lambda at: b"%d" % at)
        taken = tier.demote(job)
        while tier.stats().demoted < 8 * job_id:
            tier.wait_any(0.1)
            tier.poll()
    assert taken == list(range(1, 16, 2))
    assert [written[name].pieces for name in names] == [buffer[at] for at in range(16)]
    assert [written[names[at]].description for at in taken] == [b"%d" % at for at in taken]
    assert len({row.place for row in written.values()}) == 16
    memory[:] = bytes(len(memory))
    tier.promote(RowJob(3, Direction.PROMOTE, names[::-1], np.arange(16)[::-1].copy(), 1e9))
    while tier.stats().promoted < 16:
        tier.wait_any(0.1)
        tier.poll()
    assert [set(buffer[at][0]) for at in range(16)] == [{at} for at in range(16)]
    assert tier.close(30)


def test_the_slot_of_a_dropped_row_is_not_given_out_before_the_row_is_deleted() -> None:
    """Otherwise the deletion, which names the slot, could hit the next row in it."""
    may_delete = threading.Event()

    class SlowlyDeletingBackend(MemoryBackend):
        def delete(self, rows: Sequence[BackendRow]) -> None:
            assert may_delete.wait(60)
            super().delete(rows)

    backend = SlowlyDeletingBackend()
    tier = make_memory_tier(1, ROW_BYTES, backend=backend)
    tier.set_buffer(RowBuffer(memoryview(bytearray(2 * ROW_BYTES)), ROW_BYTES))
    first, second = OffloadKey(b"1" * 36), OffloadKey(b"2" * 36)
    assert tier.demote(RowJob(1, Direction.DEMOTE, [first], np.array([0]), 1e9)) == [0]
    while tier.stats().demoted < 1:
        assert tier.wait_any(30)
        tier.poll()
    ((_, content),) = backend.rows.values()
    content[0] ^= 1
    tier.promote(RowJob(2, Direction.PROMOTE, [first], np.array([1]), 1e9))
    while tier.stats().failed_checks < 1:
        assert tier.wait_any(30)
        tier.poll()
    assert tier.demote(RowJob(3, Direction.DEMOTE, [second], np.array([0]), 1e9)) == []
    may_delete.set()
    while not tier.demote(RowJob(4, Direction.DEMOTE, [second], np.array([0]), 1e9)):
        tier.wait_any(0.1)
        tier.poll()
    assert tier.close(30)


class CountedKey(bytes):
    """Counts how often any key is hashed."""

    hashed = 0

    def __hash__(self) -> int:
        CountedKey.hashed += 1
        return bytes.__hash__(self)


@pytest.mark.parametrize("slots", [400, 800])
def test_a_demotion_costs_as_much_as_it_has_rows(slots: int) -> None:
    """Of 800 rows, all or half of which find a slot, a key is hashed some times and not hundreds."""
    tier = make_memory_tier(slots, ROW_BYTES)
    tier.set_buffer(RowBuffer(memoryview(bytes(ROW_BYTES)), ROW_BYTES))
    names = [OffloadKey(CountedKey(b"%036d" % number)) for number in range(800)]
    CountedKey.hashed = 0
    job = RowJob(1, Direction.DEMOTE, names, np.zeros(len(names), dtype=np.int64), 1e9)
    assert len(tier.demote(job)) == slots
    assert CountedKey.hashed < 20 * len(names)
    assert tier.close(30)
