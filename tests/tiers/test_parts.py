"""The small parts of tiers: seals, records, headers, health, the write limit, the queue, the books."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvtier.errors import InputError, IntegrityError
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.policies import LRUPolicy
from kvtier.residency import BoundedKeyMap, MissReason
from kvtier.slot_table import SlotTable
from kvtier.testing.memory_tier import LooseRows
from kvtier.tiers.base import Backend, BackendRow, Direction, RowJob
from kvtier.tiers.disk.format import (
    EMPTY,
    PAGE_BYTES,
    RECORD_BYTES,
    DiskHeader,
    pack_header,
    pack_record,
    read_header,
    read_records,
)
from kvtier.tiers.io_threads import IOThreads
from kvtier.tiers.io_tier import TierHealth
from kvtier.tiers.seal import SealScope, seal_of
from kvtier.tiers.slot_tier import WriteLimit


def key(number: int) -> OffloadKey:
    return make_offload_key(b"%032d" % number, 0)


# Seals


def test_a_seal_is_bound_to_everything() -> None:
    payload = random.Random(0).randbytes(10_000)
    scope = SealScope("model", 3, "suffix")
    seal = seal_of(scope, key(1), [memoryview(payload)])
    assert len(seal) == 16
    assert seal == seal_of(
        SealScope("model", 3, "suffix"), key(1), [memoryview(payload)[:7], memoryview(payload)[7:]]
    )
    flipped = bytearray(payload)
    flipped[5000] ^= 16
    others = {
        seal_of(SealScope("model2", 3, "suffix"), key(1), [memoryview(payload)]),
        seal_of(SealScope("model", 4, "suffix"), key(1), [memoryview(payload)]),
        seal_of(SealScope("model", 3, "other"), key(1), [memoryview(payload)]),
        seal_of(scope, key(2), [memoryview(payload)]),
        seal_of(scope, key(1), [memoryview(payload)[:-1]]),
        seal_of(scope, key(1), [memoryview(payload + b"\0")]),
        seal_of(scope, key(1), [memoryview(flipped)]),
    }
    assert len(others) == 7
    assert seal not in others


def test_scopes_do_not_run_into_each_other() -> None:
    scopes = [SealScope("a", 1, "2"), SealScope("a", 12, ""), SealScope("a1", 2, ""), SealScope("", 1, "a")]
    assert len({scope.number for scope in scopes}) == len({scope.text for scope in scopes}) == 4
    assert SealScope("a", 1, "2") == scopes[0] != scopes[1]


# Records and headers


def records(*numbers: int | None, scope: int = 7) -> bytearray:
    packed = [
        EMPTY
        if number is None
        else pack_record(slot, key(number), b"%016d" % number, 100 + number, scope, slot * 10)
        for slot, number in enumerate(numbers)
    ]
    return bytearray().join(packed)


def test_records_are_read_as_they_were_written() -> None:
    found = read_records(records(5, None, 6, 7), 7)
    assert found.slots.tolist() == [0, 2, 3]
    assert found.keys == [key(5), key(6), key(7)]
    assert [seal.tobytes() for seal in found.seals] == [b"%016d" % number for number in (5, 6, 7)]
    assert found.lengths.tolist() == [105, 106, 107]
    assert found.ticks.tolist() == [0, 20, 30]
    assert found.damaged.tolist() == []
    assert read_records(records(5, 6), 8).keys == [], "another scope"
    assert read_records(b"", 7).keys == []


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    whole = records(1, 2, 3)
    for bit in range(8 * 120):  # what follows is the tick
        spoilt = bytearray(whole)
        spoilt[RECORD_BYTES + bit // 8] ^= 1 << bit % 8
        found = read_records(spoilt, 7)
        assert found.keys == [key(1), key(3)], bit
        assert len(found.damaged) == 1


def test_a_record_in_another_slots_place_is_not_taken() -> None:
    content = records(1, 2)
    assert read_records(content[RECORD_BYTES:] + content[:RECORD_BYTES], 7).keys == []


def test_of_two_records_with_one_key_the_newer_counts() -> None:
    found = read_records(records(1, 2, 1, 3), 7)
    assert found.slots.tolist() == [1, 2, 3]
    assert found.keys == [key(2), key(1), key(3)]


def test_keys_of_different_lengths() -> None:
    content = pack_record(0, OffloadKey(b"short"), bytes(16), 1, 7, 0) + pack_record(
        1, key(1), bytes(16), 1, 7, 0
    )
    assert read_records(content, 7).keys == [b"short", key(1)]


def test_the_newest_whole_header_counts() -> None:
    header = DiskHeader(namespace="n", row_bytes=1, stride=4096, slots=2, description_bytes=0)
    newer = DiskHeader(
        namespace="n", row_bytes=1, stride=4096, slots=2, description_bytes=0, sequence=1, epoch=5
    )
    pages = pack_header(header) + pack_header(newer)
    assert read_header(pages) == newer
    spoilt = bytearray(pages)
    spoilt[PAGE_BYTES + 3000] ^= 1
    assert read_header(bytes(spoilt)) == header
    spoilt[30] ^= 1
    assert read_header(bytes(spoilt)) is None
    assert read_header(pages[:100]) is None
    assert read_header(bytes(2 * PAGE_BYTES)) is None


# Health


def test_failures_in_a_row_suspend_and_pauses_grow() -> None:
    now = [0.0]
    health = TierHealth("disk tier: reading", lambda: now[0])
    for _ in range(5):
        health.record_failure("EIO")
        health.record_failure("EIO")
        health.record_success()
    assert health.problem is None
    for _ in range(3):
        health.record_failure("EIO")
    assert health.problem == "EIO"
    due = []
    for now[0] in np.arange(0, 200, 0.5).tolist():
        if health.take_due():
            due.append(now[0])
    assert due[:5] == [1.0, 3.0, 7.0, 15.0, 31.0]
    assert max(np.diff(due)) == 60
    health.resume()
    assert health.problem is None
    health.suspend("again")
    assert not health.take_due(), "the pause is still long: nothing has worked since"
    health.resume()
    health.record_success()
    health.suspend("later")
    now[0] += 1
    assert health.take_due()


# The write limit


def test_a_day_has_a_limit() -> None:
    now = [1_000_000 * 3600.0]
    limit = WriteLimit(100, lambda: now[0])
    assert limit.room == 100
    limit.spend(60)
    now[0] += 3600
    limit.spend(50)
    assert limit.room == 0
    now[0] += 22 * 3600
    assert limit.room == 0
    now[0] += 3600
    assert limit.room == 50, "the first hour was a day ago"
    now[0] += 48 * 3600
    assert limit.room == 100
    assert WriteLimit(None).room is None


def test_the_count_goes_on_in_another_process() -> None:
    now = [1_000_000 * 3600.0]
    first, second = WriteLimit(100, lambda: now[0]), WriteLimit(100, lambda: now[0])
    first.spend(70)
    now[0] += 7200
    second.restore(first.save())
    assert second.room == 30
    for nonsense in ([], [1, 2, 3], [-1] * 25, [0, *[100] * 24]):
        other = WriteLimit(100, lambda: now[0])
        other.restore(nonsense)
        assert other.room == 100
    now[0] -= 7200
    assert second.room == 30, "a clock that goes back forgets nothing"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_clock_that_was_a_year_ahead_costs_a_day_at_most(restarted: bool) -> None:
    now = [1_000_000 * 3600.0]
    limit = WriteLimit(100, lambda: now[0])
    now[0] += 365 * 24 * 3600
    limit.spend(70)
    now[0] += 3600
    limit.spend(10)
    now[0] -= 365 * 24 * 3600
    if restarted:
        saved, limit = limit.save(), WriteLimit(100, lambda: now[0])
        limit.restore(saved)
    assert limit.room == 20, "what was written counts"
    now[0] += 23 * 3600
    assert limit.room == 90, "the older hour is a day ago"
    now[0] += 3600
    assert limit.room == 100


# What is remembered of keys


def test_only_the_newest_are_remembered() -> None:
    recent: BoundedKeyMap[int] = BoundedKeyMap(80)
    for number in range(1000):
        recent.record([key(number)], number)
        assert len(recent) <= 90
    assert recent.get(key(999)) == 999
    assert recent.get(key(0)) is None


# The books


@pytest.mark.parametrize("holes", [(), (0,), (3, 4, 9), tuple(range(11))])
def test_a_table_is_restored(holes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.slot_table._RESTORE_SLICE", 4)
    table = SlotTable(12, LRUPolicy(12))
    slots = np.array([slot for slot in range(12) if slot not in holes], dtype=np.int64)
    keys = [key(slot) for slot in slots.tolist()]
    ticks = np.array([100 - slot for slot in slots.tolist()], dtype=np.int64)
    assert list(table.restore(slots, keys, ticks))
    table.free_holes()
    table.check()
    assert table.ready([key(slot) for slot in range(12)]) == [slot not in holes for slot in range(12)]
    new = table.reserve([key(100 + number) for number in range(len(holes) + 1)], np.zeros(0, dtype=np.int64))
    assert sorted(new.slots.tolist())[: len(holes)] == sorted([*holes, 11])[: len(holes)]
    assert new.evicted == [key(11)], "the oldest"
    table.written(new.slots)
    table.check()


def test_a_table_says_what_is_wrong() -> None:
    with pytest.raises(InputError, match="expected one for 3 slots"):
        SlotTable(3, LRUPolicy(4))
    table = SlotTable(3, LRUPolicy(3))
    slots = table.reserve([key(1)], np.zeros(0, dtype=np.int64)).slots
    with pytest.raises(IntegrityError):
        table.pin(slots)
    with pytest.raises(IntegrityError):
        table.unpin(slots)


# The queue


class Gate(Backend):
    """A backend that notes what is asked of it, and waits until it may go on."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        self._move(rows)
        return [None] * len(rows)

    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        self._move(rows)
        return [None] * len(rows)

    def _move(self, rows: Sequence[BackendRow]) -> None:
        self.batches.append([row.place for row in rows])
        self.begun.release()
        assert self.open.acquire(timeout=30)

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        return [False] * len(rows)

    def delete(self, rows: Sequence[BackendRow]) -> None:
        return


def make_threads(backend: Backend, *, size: int = 2 << 20, **options: Any) -> IOThreads:
    """Return threads that move rows of this size, all of them in the same memory."""
    memory = LooseRows()
    memory.add([(memoryview(bytearray(size)),)])
    return IOThreads(backend, row_bytes=size, buffer=memory, **options)


def submit(
    threads: IOThreads, direction: Direction, job_id: int, *addresses: int, deadline: float = float("inf")
) -> None:
    """Submit a job of rows at these addresses."""
    slots = np.zeros(len(addresses), dtype=np.int64)
    job = RowJob(job_id, direction, [key(at) for at in addresses], slots, deadline)
    job.addresses = np.array(addresses, dtype=np.int64)
    threads.submit(job, range(len(job)))


@pytest.mark.parametrize(
    ("direction", "call_rows", "sizes"),
    [
        (Direction.DEMOTE, 8, [8, 8]),
        (Direction.DEMOTE, 3, [3, 3, 3, 3, 3, 1]),
        (Direction.PROMOTE, 8, [4, 3, 3, 2, 1, 1, 1, 1]),
        (Direction.PROMOTE, 3, [3, 3, 3, 2, 2, 1, 1, 1]),
    ],
)
def test_calls_that_nobody_waits_for_are_few(direction: Direction, call_rows: int, sizes: list[int]) -> None:
    """A call costs the engine's thread a change of hands of the GIL, whatever it moves."""
    gate = Gate()
    gate.call_bytes = call_rows << 10
    gate.open.release(100)
    threads = make_threads(gate, size=1 << 10, threads=4)
    threads.hold(direction)
    submit(threads, direction, 1, *range(16))
    threads.resume(direction)
    assert threads.wait_any(30)
    while threads.open_bytes(direction):
        threads.wait_any(0.1)
        threads.poll()
    batches = sorted(gate.batches)
    assert [len(batch) for batch in batches] == sizes
    assert [place for batch in batches for place in batch] == list(range(16))
    assert threads.close(30)


def test_one_job_spreads_over_the_threads_first_rows_first() -> None:
    gate = Gate()
    threads = make_threads(gate, threads=4)
    submit(threads, Direction.PROMOTE, 1, *range(8))
    for _ in range(4):
        assert gate.begun.acquire(timeout=30)
    assert sorted(gate.batches) == [[0], [1], [2], [3]]
    for _ in range(100):
        gate.open.release()
    assert threads.close(30)
    assert sorted(gate.batches) == [[place] for place in range(8)]


def test_small_rows_travel_together() -> None:
    gate = Gate()
    gate.open.release(100)
    threads = make_threads(gate, size=512 << 10, threads=1)
    submit(threads, Direction.DEMOTE, 1, *range(10))
    assert threads.close(30)
    assert [len(batch) for batch in gate.batches] == [4, 4, 2]


def test_a_demotion_wakes_no_more_threads_than_it_needs() -> None:
    """A few small rows are one call of one thread; a promotion, for which somebody waits, is spread."""
    for direction, batches in (
        (Direction.DEMOTE, [[0, 1, 2, 3]]),
        (Direction.PROMOTE, [[0], [1], [2], [3]]),
    ):
        gate = Gate()
        gate.open.release(100)
        threads = make_threads(gate, size=4096, threads=4)
        submit(threads, direction, 1, *range(4))
        assert threads.close(30)
        assert sorted(gate.batches) == batches


def test_writes_that_do_not_return_leave_a_thread_for_questions() -> None:
    """Two writes at a dead server kept both threads, and the next question cost its whole deadline."""
    gate, asked = Gate(), threading.Event()
    threads = make_threads(gate, threads=3)
    for job in range(3):
        submit(threads, Direction.DEMOTE, job, job)
    for _ in range(2):
        assert gate.begun.acquire(timeout=30)
    threads.call(asked.set, lambda _value, _error: None)
    assert asked.wait(30)
    assert sorted(gate.batches) == [[0], [1]]
    gate.open.release(100)
    assert threads.close(30)
    assert sorted(gate.batches) == [[0], [1], [2]]


def test_the_order_of_jobs() -> None:
    gate = Gate()
    threads = make_threads(gate, threads=1)
    submit(threads, Direction.DEMOTE, 1, 0)
    assert gate.begun.acquire(timeout=30)
    for job, direction in (
        (2, Direction.DEMOTE),
        (3, Direction.PROMOTE),
        (4, Direction.PROMOTE),
        (5, Direction.DEMOTE),
    ):
        submit(threads, direction, job, job)
    gate.open.release(100)
    assert threads.close(30)
    assert gate.batches == [[0], [3], [4], [2], [5]]


def test_bytes_in_flight_are_bounded() -> None:
    gate = Gate()
    threads = make_threads(gate, threads=8, max_in_flight=4 << 20)
    submit(threads, Direction.DEMOTE, 1, *range(6))
    for _ in range(2):
        assert gate.begun.acquire(timeout=30)
    assert not gate.begun.acquire(timeout=0.1), "a third would be too much"
    threads.check()
    gate.open.release()
    assert gate.begun.acquire(timeout=30)
    gate.open.release(100)
    assert threads.close(30)
    assert len(gate.batches) == 6


def test_rows_that_are_late_are_not_begun() -> None:
    gate, now = Gate(), [0.0]
    threads = make_threads(gate, threads=1, clock=lambda: now[0])
    submit(threads, Direction.DEMOTE, 1, 0, deadline=10.0)
    assert gate.begun.acquire(timeout=30)
    submit(threads, Direction.DEMOTE, 2, 1, deadline=5.0)
    now[0] = 6.0
    gate.open.release(100)
    submit(threads, Direction.DEMOTE, 3, 2, deadline=10.0)
    outcomes: dict[int, MissReason | None] = {}
    while len(outcomes) < 3:
        assert threads.wait_any(30)
        outcomes |= {report.job.job_id: report.outcome for report in threads.poll()}
    assert outcomes == {1: None, 2: MissReason.TOO_SLOW, 3: None}
    assert gate.batches == [[0], [2]]
    threads.check()
    assert threads.close(30)


def test_jobs_that_are_late_on_hold_do_not_pile_up() -> None:
    """As with a disk that does not take the epoch of a reset."""
    now = [0.0]
    threads = make_threads(Gate(), size=8, threads=1, clock=lambda: now[0])
    threads.hold(Direction.DEMOTE)
    for number in range(20):
        submit(threads, Direction.DEMOTE, number, number, deadline=now[0] + 1.0)
        now[0] += 2.0
        assert [report.outcome for report in threads.poll()] == [MissReason.TOO_SLOW]
    until = time.monotonic() + 30
    while len(threads._queues[Direction.DEMOTE]) > 1 and time.monotonic() < until:
        time.sleep(0.001)
    assert len(threads._queues[Direction.DEMOTE]) <= 1
    threads.check()
    assert threads.close(30)


def test_one_number_one_job() -> None:
    gate = Gate()
    threads = make_threads(gate, threads=1)
    submit(threads, Direction.DEMOTE, 1, 0)
    with pytest.raises(InputError, match="expected one that no open job of this tier has, got 1"):
        submit(threads, Direction.PROMOTE, 1, 0)
    gate.open.release(10)
    assert threads.close(30)


def test_exceptions_of_a_backend_are_failures_of_its_rows(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Gate):
        def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
            raise ZeroDivisionError("a bug")

        def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
            return []

    threads = make_threads(Broken(), threads=1)
    submit(threads, Direction.DEMOTE, 1, 0)
    submit(threads, Direction.PROMOTE, 2, 0)
    assert threads.close(30)
    told = {report.job.job_id: (report.outcome, report.why) for report in threads.poll()}
    assert told[1] == (MissReason.IO_FAILED, "ZeroDivisionError: a bug")
    assert told[2] == (MissReason.IO_FAILED, "expected 1 answers of the backend, got 0")
    assert "the backend raised" in caplog.text


def test_a_panic_of_compiled_code_ends_no_thread() -> None:
    """It is no `Exception`. A thread that it ended would leave its rows, or the tier's opening, for ever."""

    class Panic(BaseException):
        pass

    class Panicking(Gate):
        def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
            raise Panic("unwrap")

    def open_backend() -> None:
        raise Panic("unwrap")

    threads = make_threads(Panicking(), threads=1)
    answers: list[BaseException | None] = []
    threads.call(open_backend, lambda _value, error: answers.append(error))
    submit(threads, Direction.DEMOTE, 1, 0)
    assert threads.close(30)
    (report,) = threads.poll()
    assert (report.outcome, report.why) == (MissReason.IO_FAILED, "Panic: unwrap")
    assert [type(answer) for answer in answers] == [Panic]
