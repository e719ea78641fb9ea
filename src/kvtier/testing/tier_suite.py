"""The contract of a tier that knows what it holds as tests: subclass `TierSuite` and define `make`.

    class TestMine(TierSuite):
        def make(self, num_slots, clock, plan):
            faulty = FaultyBackend(MyBackend(), plan)
            return MyTier(num_slots, faulty, clock=clock), faulty

`shared_tier_suite` has the suite for tiers that engines share; `MovingSuite` is their common base. The
suite's clock stands still until a test moves it; threads are real, and tests wait for results. The last
tests make random calls, with faults, resets and hangs, and compare every byte and every event with a model
of a few dicts.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvtier.keys import OffloadKey
from kvtier.residency import MissReason, OffloadingEvent
from kvtier.testing.faulty_backend import BackendFaultPlan, FaultyBackend
from kvtier.testing.kit import PATIENCE, ManualClock, believed_held, content_of, key, keys
from kvtier.testing.memory_tier import LooseRows
from kvtier.tiers.base import Direction, RowJob, Tier, TierResult

ROW_BYTES = 4096


def content(number: int, version: int = 0) -> bytes:
    """Return the bytes of a chunk, computed with the weights of this version."""
    return content_of(number, version, ROW_BYTES)


@dataclass
class TierDriver:
    """A tier, its faults and clock, and a manager's knowledge of its jobs."""

    tier: Tier
    faulty: FaultyBackend
    clock: ManualClock
    results: list[TierResult] = field(default_factory=list)
    jobs: dict[int, RowJob] = field(default_factory=dict)
    memory: dict[int, dict[OffloadKey, bytearray]] = field(default_factory=dict)
    """The memory of the rows, by job."""
    events: list[OffloadingEvent] = field(default_factory=list)
    buffer: LooseRows = field(default_factory=LooseRows)

    def __post_init__(self) -> None:
        self.tier.set_buffer(self.buffer)

    def demote(
        self, *numbers: int, version: int = 0, deadline: float = 1e9, cuts: int = 1, tenant: str = ""
    ) -> tuple[int, list[OffloadKey]]:
        """Offer rows; return the job and the keys that were taken."""
        memory = {key(number): bytearray(content(number, version)) for number in numbers}
        job = self._job(Direction.DEMOTE, memory, deadline, cuts)
        job.tenant = tenant
        taken = self.tier.demote(job)
        job.lent.intersection_update(taken)
        return job.job_id, [job.keys[at] for at in taken]

    def promote(self, *numbers: int, deadline: float = 1e9) -> int:
        """Ask for rows; return the job."""
        memory = {key(number): bytearray(ROW_BYTES) for number in numbers}
        job = self._job(Direction.PROMOTE, memory, deadline)
        self.tier.promote(job)
        return job.job_id

    def withdraw(self, job_id: int, *numbers: int) -> list[OffloadKey]:
        """Take back rows of a job, or all; return the keys of those that no thread had begun."""
        job = self.jobs[job_id]
        positions = [job.keys.index(key(number)) for number in numbers] if numbers else None
        withdrawn = self.tier.withdraw(job, positions)
        job.lent.difference_update(withdrawn)
        return [job.keys[at] for at in withdrawn]

    def _job(
        self, direction: Direction, memory: dict[OffloadKey, bytearray], deadline: float, cuts: int = 1
    ) -> RowJob:
        size, names = ROW_BYTES // cuts, list(memory)
        slots = self.buffer.add(
            tuple(memoryview(row)[at : at + size] for at in range(0, ROW_BYTES, size))
            for row in memory.values()
        )
        job_id = len(self.jobs) + 1
        self.memory[job_id] = memory
        self.jobs[job_id] = RowJob(
            job_id, direction, names, np.array(slots), deadline, lambda at: b"about " + names[at]
        )
        return self.jobs[job_id]

    def poll(self) -> list[TierResult]:
        """Poll once, and record results."""
        new = self.tier.poll()
        for result in new:
            if not result.in_use:
                assert result.job.lent.issuperset(result.positions), "a row ended twice"
                result.job.lent.difference_update(result.positions)
        self.results += new
        self.events += self.tier.take_events()
        return new

    def wait(self, over: Callable[[], bool]) -> None:
        """Poll until a condition is true."""
        for _ in range(100_000):
            self.poll()
            if over():
                return
            self.tier.wait_any(0.01)
        raise AssertionError("it did not come true")

    def finish(self, *jobs: int) -> dict[OffloadKey, MissReason | None]:
        """Wait until jobs are over and return the outcomes of their rows; `None` means that a row moved."""
        self.wait(lambda: not any(self.jobs[job].lent for job in jobs))
        ended = [r for r in self.results if r.job.job_id in jobs and not r.returned]
        return {name: result.outcome for result in ended for name in result.keys}

    def store(self, *numbers: int, version: int = 0) -> None:
        """Demote rows and wait for the results."""
        job, taken = self.demote(*numbers, version=version)
        assert taken == keys(*numbers)
        assert set(self.finish(job).values()) == {None}

    def fetch(self, *numbers: int) -> dict[int, bytes | MissReason]:
        """Promote rows, wait for the results, and return the bytes, or the outcome of a failed row."""
        job = self.promote(*numbers)
        outcomes = self.finish(job)
        return {
            number: bytes(self.memory[job][key(number)]) if outcome is None else outcome
            for number in numbers
            for outcome in [outcomes[key(number)]]
        }

    def listener(self) -> set[OffloadKey]:
        """Return the chunks that a listener believes to be held."""
        return believed_held(self.events)


class MovingSuite:
    """The tests for every tier: rows move, late is not freed, failures suspend, and resets are final."""

    def make(self, num_slots: int, clock: ManualClock, plan: BackendFaultPlan) -> tuple[Tier, FaultyBackend]:
        """Return an open, empty tier of `num_slots` rows of `ROW_BYTES`, with two threads and faults.

        A tier that engines share has no slots.
        """
        raise NotImplementedError

    @pytest.fixture
    def drivers(self) -> Iterator[list[TierDriver]]:
        drivers: list[TierDriver] = []
        yield drivers
        for driver in drivers:
            driver.faulty.release()
            driver.tier.check()
            until = time.monotonic() + PATIENCE
            while not driver.tier.close(PATIENCE):  # one that was closed before waits for no thread
                assert time.monotonic() < until, "a thread has not ended"

    def drive(
        self, drivers: list[TierDriver], num_slots: int = 8, plan: BackendFaultPlan | None = None
    ) -> TierDriver:
        """Make a tier that is closed when the test ends."""
        clock = ManualClock(1000.0)
        tier, faulty = self.make(num_slots, clock, plan or BackendFaultPlan())
        drivers.append(TierDriver(tier, faulty, clock))
        return drivers[-1]

    def expect_held(self, driver: TierDriver, *numbers: int) -> None:
        """Expect that a listener believes exactly these chunks to be held."""
        raise NotImplementedError

    # Rows

    def test_a_chunk_twice_in_a_promotion(self, drivers: list[TierDriver]) -> None:
        """The memory of each row is filled, also beside a row that is not held."""
        driver = self.drive(drivers)
        driver.store(1)
        rows = [bytearray(ROW_BYTES) for _ in range(3)]
        slots = np.array(driver.buffer.add((memoryview(row),) for row in rows))
        driver.jobs[7] = RowJob(7, Direction.PROMOTE, keys(1, 2, 1), slots, 1e9)
        driver.tier.promote(driver.jobs[7])
        assert driver.finish(7)[key(2)] is MissReason.EVICTED
        assert [bytes(rows[at]) for at in (0, 2)] == [content(1)] * 2

    def test_rows_of_several_pieces(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        job, _ = driver.demote(1, cuts=4)
        driver.finish(job)
        assert driver.fetch(1) == {1: content(1)}

    def test_rows_not_held_are_results(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.store(1)
        assert driver.fetch(7, 1, 8) == {7: MissReason.EVICTED, 1: content(1), 8: MissReason.EVICTED}

    def test_discarded_rows_are_gone(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers, 2)
        driver.store(1, 2)
        driver.tier.discard(keys(1, 9))
        assert driver.tier.lookup_many(keys(1, 2)) == [False, True]
        assert driver.tier.explain(key(1)) is MissReason.FAILED
        driver.poll()
        self.expect_held(driver, 2)
        driver.wait(lambda: bool(driver.demote(1, version=1)[1]))
        driver.wait(lambda: driver.tier.lookup(key(1)) is True)
        assert driver.fetch(1) == {1: content(1, 1)}

    # Order and bounds

    def test_promotions_go_first(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.store(1, 2, 3)
        driver.faulty.hang()
        busy = [driver.promote(3) for _ in range(2)]  # both threads
        driver.wait(lambda: driver.faulty.num_hanging == 2)
        late, _ = driver.demote(4)
        first, second = driver.promote(2), driver.promote(1)
        driver.faulty.release_one()  # two threads take rows in order, but need not begin them in order
        driver.finish(late, first, second)
        moved = [name for name in driver.faulty.moved[3:] if name != key(3)]
        assert moved == keys(2, 1, 4), "a promotion before a demotion, which was there first"
        driver.faulty.release()
        driver.finish(*busy)

    def test_withdrawn_rows_are_free_at_once(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.store(9)
        driver.faulty.hang()
        busy = [driver.promote(9) for _ in range(2)]
        driver.wait(lambda: driver.tier.stats().queued_bytes == 0)
        job, taken = driver.demote(1, 2, 3)
        assert driver.withdraw(job, 2) == keys(2)
        assert not driver.tier.lookup(key(2))
        assert driver.tier.explain(key(2)) is MissReason.REFUSED
        assert driver.tier.stats().dropped == 1
        wanted = driver.promote(9)
        assert driver.withdraw(wanted) == keys(9)
        assert driver.withdraw(wanted) == []
        driver.faulty.release()
        assert driver.finish(job, *busy) == dict.fromkeys([*keys(1, 3), key(9)])
        assert driver.withdraw(job) == [], "it is over"
        assert len(taken) == 3

    # Late, stuck, failing

    def test_late_is_failed_and_not_freed(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.store(1, 2)
        driver.faulty.hang()
        job = driver.promote(1, deadline=driver.clock.now + 2)
        assert driver.faulty.hanging.wait(PATIENCE)
        driver.clock.now += 2
        (result,) = driver.poll()
        assert (result.outcome, result.in_use) == (MissReason.TOO_SLOW, True)
        assert driver.tier.stats().stuck == 1
        driver.faulty.release()
        driver.finish(job)
        assert driver.results[-1].returned
        assert driver.tier.stats().stuck == 0

    def test_a_late_demotion_may_still_arrive(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.faulty.hang()
        job, _ = driver.demote(1, deadline=driver.clock.now + 1)
        assert driver.faulty.hanging.wait(PATIENCE)
        driver.clock.now += 1
        driver.poll()
        driver.faulty.release()
        assert driver.finish(job) == {key(1): MissReason.TOO_SLOW}
        assert (driver.results[-1].returned, driver.results[-1].outcome) == (True, None)
        self._wait_resumed(driver)
        assert driver.fetch(1) == {1: content(1)}
        self.expect_held(driver, 1)

    def test_a_hang_costs_one_deadline_then_nothing(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.store(1, 2, 3)
        driver.faulty.hang()
        first = driver.promote(1, deadline=driver.clock.now + 2)
        assert driver.faulty.hanging.wait(PATIENCE)
        driver.clock.now += 2
        driver.poll()
        assert driver.tier.stats().suspended is not None
        assert driver.tier.lookup_many(keys(2, 3)) == [False] * 2, "nobody is promised anything"
        assert driver.tier.explain(key(2)) is MissReason.SUSPENDED
        assert driver.fetch(2) == {2: MissReason.SUSPENDED}
        assert driver.demote(5)[1] == []
        for _ in range(100):  # probes come and hang too
            driver.clock.now += 10
            driver.poll()
            assert not driver.tier.has_pending_work(), "an idle engine sleeps"
        driver.faulty.release()
        driver.finish(first)
        self._wait_resumed(driver)
        assert driver.fetch(2, 3) == {2: content(2), 3: content(3)}
        self.expect_held(driver, 1, 2, 3)  # suspension announces nothing

    def _wait_resumed(self, driver: TierDriver) -> None:
        def resumed() -> bool:
            driver.clock.now += 1
            return driver.tier.stats().suspended is None

        driver.wait(resumed)

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
    def test_failing_calls_suspend_and_a_probe_ends_it(self, drivers: list[TierDriver], code: int) -> None:
        driver = self.drive(drivers)
        driver.store(1, 2, 3, 4)
        driver.faulty.broken = OSError(code, os.strerror(code))
        tried = 0
        while driver.tier.stats().suspended is None:
            tried += 1
            (outcome,) = driver.fetch(1 + tried % 4).values()
            assert outcome is MissReason.IO_FAILED
        assert tried <= 5
        assert os.strerror(code) in (driver.tier.stats().suspended or "")
        driver.faulty.broken = None
        self._wait_resumed(driver)
        assert driver.fetch(1, 2, 3, 4) == {number: content(number) for number in (1, 2, 3, 4)}, (
            "nothing was lost"
        )

    def test_a_disk_that_takes_nothing_can_still_be_read(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.store(1)
        driver.faulty.full = True
        while driver.tier.stats().suspended is None:
            job, _ = driver.demote(2)
            assert driver.finish(job) == {key(2): MissReason.IO_FAILED}
        assert driver.tier.explain(key(2)) is MissReason.IO_FAILED
        assert driver.demote(3)[1] == []
        assert driver.fetch(1) == {1: content(1)}
        driver.faulty.full = False
        self._wait_resumed(driver)
        driver.store(2)

    def test_a_row_that_fails_its_check_is_dropped_alone(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.store(1, 2)
        driver.faulty.flip_next = True
        assert driver.fetch(1) == {1: MissReason.FAILED}
        assert driver.tier.explain(key(1)) is MissReason.FAILED
        assert driver.tier.stats().failed_checks == 1
        assert driver.fetch(2) == {2: content(2)}
        self.expect_held(driver, 2)
        driver.wait(lambda: bool(driver.demote(1)[1]))

    def test_pending_work(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        assert not driver.tier.has_pending_work()
        driver.faulty.hang()
        job, _ = driver.demote(1)
        assert driver.tier.has_pending_work()
        driver.clock.now += 1.5
        assert not driver.tier.has_pending_work(), "nothing has moved for a second"
        driver.faulty.release()
        driver.finish(job)
        assert not driver.tier.has_pending_work()

    # Resets

    def test_nothing_survives_a_reset(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.store(1, 2)
        driver.faulty.hang()
        reading = driver.promote(1)
        assert driver.faulty.hanging.wait(PATIENCE)
        writing, _ = driver.demote(3)
        driver.tier.reset("first")
        assert not any(driver.tier.lookup_many(keys(1, 2, 3)))
        assert driver.tier.explain(key(1)) is MissReason.CLEARED
        driver.poll()
        assert {r.outcome for r in driver.results if r.job.job_id in (reading, writing)} == {
            MissReason.CLEARED
        }
        driver.faulty.release()
        driver.finish(reading, writing)
        self.expect_held(driver)
        driver.wait(lambda: bool(driver.demote(1, version=1)[1]))
        driver.wait(lambda: driver.tier.lookup(key(1)) is True)
        assert driver.fetch(1, 2, 3) == {1: content(1, 1), 2: MissReason.EVICTED, 3: MissReason.EVICTED}
        driver.tier.check()

    # Ends

    def test_close_writes_what_is_queued(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers, 64)
        job, taken = driver.demote(*range(64))
        assert driver.tier.close(PATIENCE)
        assert set(driver.finish(job).values()) == {None}
        assert len(taken) == 64
        assert driver.demote(99)[1] == []
        assert driver.tier.lookup(key(1)) is False
        assert driver.tier.close()

    def test_close_does_not_wait_for_a_hang(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.faulty.hang()
        job, _ = driver.demote(1)
        assert driver.faulty.hanging.wait(PATIENCE)
        assert driver.tier.close(0.05) is False, "a call still uses the memory"
        assert [(result.outcome, result.in_use) for result in driver.poll()] == [(MissReason.TOO_SLOW, True)]
        driver.faulty.release()
        driver.finish(job)

    # Everything at once

    @pytest.mark.parametrize("rate", [0.0, 0.01, 0.3])
    @pytest.mark.parametrize("seed", range(8))
    def test_random_calls(self, drivers: list[TierDriver], seed: int, rate: float) -> None:
        source = random.Random(seed)
        driver = self.drive(drivers, source.choice((1, 3, 16)), BackendFaultPlan(seed, rate))
        churn(driver, source, 200)
        if driver.tier.stats().suspended is None:
            self.expect_held(driver, *[number for number in range(24) if driver.tier.lookup(key(number))])


class TierSuite(MovingSuite):
    """The tests for every tier that knows what it holds."""

    def expect_held(self, driver: TierDriver, *numbers: int) -> None:
        assert driver.listener() == set(keys(*numbers))

    def test_rows_come_back(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        assert driver.tier.lookup_many(keys(1, 2)) == [False] * 2
        assert driver.tier.explain(key(1)) is MissReason.NEVER_STORED
        driver.store(1, 2, 3)
        assert driver.tier.lookup_many(keys(1, 2, 3, 4)) == [True, True, True, False]
        assert driver.tier.lookup_many(keys(4, 3, 2)) == [False, True, True]
        assert driver.tier.explain(key(1)) is None
        assert driver.fetch(3, 1) == {3: content(3), 1: content(1)}
        assert driver.listener() == set(keys(1, 2, 3))
        stats = driver.tier.stats()
        assert (stats.used, stats.demoted, stats.promoted) == (3, 3, 2)

    def test_rows_held_or_being_written_are_not_taken(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.store(1)
        driver.faulty.hang()
        job, taken = driver.demote(2)
        assert taken == keys(2)
        part, taken = driver.demote(1, 2, 3, version=1)
        assert taken == keys(3)
        assert driver.tier.lookup(key(2)) is False, "it is being written"
        assert driver.tier.explain(key(2)) is MissReason.WRITING
        driver.faulty.release()
        driver.finish(job, part)
        assert driver.tier.lookup(key(2)) is True
        assert driver.fetch(1, 2, 3) == {1: content(1), 2: content(2), 3: content(3, 1)}

    def test_a_full_tier_announces_the_eviction_first(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers, 4)
        driver.store(1, 2)
        driver.store(3, 4)
        driver.tier.touch(keys(1, 2))
        driver.store(5, 6)
        assert driver.tier.lookup_many(keys(1, 2, 3, 4, 5, 6)) == [True, True, False, False, True, True]
        assert driver.tier.explain(key(3)) is MissReason.EVICTED
        assert driver.listener() == set(keys(1, 2, 5, 6))
        assert driver.tier.stats().evicted == 2

    def test_no_row_of_the_offer_is_evicted_for_it(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers, 3)
        driver.store(1, 2, 3)
        assert driver.demote(1, 2, 3, 4)[1] == []
        assert driver.tier.lookup_many(keys(1, 2, 3)) == [True] * 3

    def test_a_row_that_is_read_stays(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers, 2)
        driver.store(1, 2)
        driver.faulty.hang()
        job = driver.promote(1, 2)
        assert driver.demote(3)[1] == []
        driver.faulty.release()
        driver.finish(job)
        assert bytes(driver.memory[job][key(1)]) == content(1)
        driver.store(3)

    def test_a_slot_that_spoils_rows_is_not_used_again(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers, 1)
        for _ in range(2):
            driver.wait(
                lambda: bool(driver.demote(1)[1]) or driver.tier.explain(key(1)) is MissReason.WRITING
            )
            driver.wait(lambda: driver.tier.lookup(key(1)) is True)
            driver.faulty.flip_next = True
            assert driver.fetch(1) == {1: MissReason.FAILED}
        for _ in range(20):
            driver.poll()
            assert driver.demote(1)[1] == []
            driver.tier.wait_any(0.01)


def churn(driver: TierDriver, source: random.Random, calls: int, version: int = 0) -> int:
    """Make random calls and compare all results with what was stored. Returns the final version."""
    tier, clock, jobs = driver.tier, driver.clock, dict[int, int]()
    for call in range(calls):
        numbers = source.sample(range(24), source.randint(1, 6))
        match source.randrange(12):
            case 0 | 1 | 2 | 3:
                driver.demote(*numbers, version=version, deadline=clock.now + source.choice((1, 50)))
            case 4 | 5 | 6:
                jobs[driver.promote(*numbers, deadline=clock.now + source.choice((1, 50)))] = version
            case 7:
                tier.touch(keys(*numbers))
            case 8:
                tier.discard(keys(*numbers[:2]))
            case 9 if source.random() < 0.2:
                version += 1
                tier.reset(f"{version}")
            case 10:
                clock.now += source.choice((0.1, 2.0))
            case 11 if driver.jobs:
                driver.withdraw(source.choice(list(driver.jobs)))
        driver.poll()
        _expect_right(driver, jobs)
        if call % 10 == 0:
            tier.wait_any(0.01)
    driver.wait(lambda: not any(job.lent for job in driver.jobs.values()))
    _expect_right(driver, jobs)
    tier.check()
    return version


def _expect_right(driver: TierDriver, jobs: dict[int, int]) -> None:
    """Check that every successful promotion has the bytes of its chunk, in the requested version."""
    for result in driver.results:
        job = result.job.job_id
        if result.outcome is None and not result.returned and job in jobs:
            for name in result.keys:
                assert driver.memory[job][name] == content(int(name[:32]), jobs[job])
    driver.results.clear()
