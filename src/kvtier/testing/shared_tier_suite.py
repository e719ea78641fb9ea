"""The contract of a tier that engines share as tests, over any backend that goes by key.

    class TestMine(SharedTierSuite):
        def make_backend(self):
            return MyBackend(...)

Backends made within one test are clients of one server, which is empty when the test begins. Tiers over
them are engines; a bare backend is a stranger who evicts and forges. The suite's clock stands still until a
test moves it; threads are real.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvtier.keys import OffloadKey
from kvtier.residency import MissReason
from kvtier.testing.faulty_backend import BackendFaultPlan, FaultyBackend
from kvtier.testing.kit import PATIENCE, ManualClock, key, keys
from kvtier.testing.memory_tier import MemoryServer, make_shared_tier
from kvtier.testing.tier_suite import ROW_BYTES, MovingSuite, TierDriver, churn, content
from kvtier.tiers import shared_tier
from kvtier.tiers.base import Backend, BackendRow, RowBuffer, Tier
from kvtier.tiers.seal import SealScope, seal_of

_SCOPE = SealScope("suite")


class SharedTierSuite(MovingSuite):
    """The tests that every backend of a shared tier passes."""

    def make_backend(self) -> Backend:
        """Return a new client of this test's server, for rows of `ROW_BYTES`."""
        raise NotImplementedError

    def make(self, num_slots: int, clock: ManualClock, plan: BackendFaultPlan) -> tuple[Tier, FaultyBackend]:
        faulty = FaultyBackend(self.make_backend(), plan)
        return make_shared_tier(ROW_BYTES, backend=faulty, namespace="suite", clock=clock), faulty

    @pytest.fixture
    def stranger(self) -> Iterator[Backend]:
        stranger = self.make_backend()
        yield stranger
        stranger.close()

    def expect_held(self, driver: TierDriver, *numbers: int) -> None:
        """Expect that nothing was announced: nothing about a shared tier is exact."""
        assert driver.events == []

    def ask(self, driver: TierDriver, *numbers: int, seconds: float = 5.0) -> list[bool | None]:
        """Ask a tier about chunks, wait for its answer, and return it."""
        driver.tier.ask(keys(*numbers), driver.clock.now + seconds)
        driver.wait(lambda: None not in driver.tier.lookup_many(keys(*numbers)))
        return driver.tier.lookup_many(keys(*numbers))

    # Asking

    def test_another_engine_finds_written_rows(self, drivers: list[TierDriver]) -> None:
        first, second = self.drive(drivers), self.drive(drivers)
        first.store(1, 2, 3)
        assert first.tier.lookup_many(keys(1, 2, 3)) == [True] * 3, "it knows what it has written"
        assert second.tier.lookup_many(keys(1, 2, 3, 4)) == [None] * 4
        assert self.ask(second, 1, 2, 3, 4) == [True, True, True, False]
        assert second.fetch(1, 2, 3) == {number: content(number) for number in (1, 2, 3)}
        assert second.tier.explain(key(1)) is None
        assert second.tier.explain(key(4)) is MissReason.NEVER_STORED
        self.expect_held(second)

    def test_asking_is_done_once_and_remembered_for_a_while(self, drivers: list[TierDriver]) -> None:
        first, second = self.drive(drivers), self.drive(drivers)
        first.store(1)
        second.faulty.hang()
        second.tier.ask(keys(1, 2), second.clock.now + 5)
        second.tier.ask(keys(1, 2), second.clock.now + 5)
        assert second.tier.lookup_many(keys(1, 2)) == [None, None]
        second.faulty.release()
        assert self.ask(second, 1, 2) == [True, False]
        assert second.tier.stats().questions == 1
        second.clock.now += 2
        assert second.tier.lookup_many(keys(1, 2)) == [True, None], "a no is forgotten earlier"
        first.store(2)
        assert self.ask(second, 1, 2) == [True, True]
        second.clock.now += 60
        assert second.tier.lookup_many(keys(1, 2)) == [None, None]

    def test_long_prefixes_take_few_round_trips(self, drivers: list[TierDriver]) -> None:
        first, second = self.drive(drivers), self.drive(drivers)
        first.store(*range(40))
        assert self.ask(second, *range(100)) == [True] * 40 + [False] * 60
        assert second.tier.stats().round_trips <= 5
        third = self.drive(drivers)
        assert self.ask(third, *range(1000, 1100)) == [False] * 100
        assert third.tier.stats().round_trips == 1, "most prompts are new"

    # Others' eviction

    def test_a_stale_yes_costs_one_promotion(self, drivers: list[TierDriver], stranger: Backend) -> None:
        driver = self.drive(drivers)
        driver.store(1, 2)
        stranger.delete([_row(1)])
        assert driver.tier.lookup_many(keys(1, 2)) == [True, True]
        assert driver.fetch(1, 2) == {1: MissReason.EVICTED, 2: content(2)}
        assert driver.tier.lookup_many(keys(1, 2)) == [False, True]
        assert driver.tier.explain(key(1)) is MissReason.EVICTED
        assert driver.tier.stats().suspended is None
        driver.store(1)
        assert driver.fetch(1) == {1: content(1)}

    def test_evicted_rows_are_written_again(self, drivers: list[TierDriver], stranger: Backend) -> None:
        driver = self.drive(drivers)
        driver.store(1)
        assert driver.demote(1)[1] == [], "it is there"
        stranger.delete([_row(1)])
        driver.clock.now += 60
        assert driver.demote(1)[1] == [], "nobody knows better"
        assert self.ask(driver, 1) == [False]
        assert driver.tier.explain(key(1)) is MissReason.EVICTED
        driver.store(1)

    def test_a_row_that_is_gone_puts_the_others_in_doubt(
        self, drivers: list[TierDriver], stranger: Backend
    ) -> None:
        """A server comes back empty: rows not read since, e.g. behind a gap, are written again."""
        driver = self.drive(drivers)
        driver.store(1, 2, 3)
        stranger.delete([_row(number) for number in (1, 2, 3)])
        driver.clock.now += 0.1
        assert driver.fetch(1) == {1: MissReason.EVICTED}
        assert driver.tier.lookup_many(keys(1, 2, 3)) == [False, None, None]
        driver.store(1, 2, 3)
        assert driver.fetch(1, 2, 3) == {number: content(number) for number in (1, 2, 3)}

    # Writes

    def test_a_row_is_written_once(self, drivers: list[TierDriver], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared_tier, "_LARGE_ROW", ROW_BYTES)
        first, second = self.drive(drivers), self.drive(drivers)
        first.store(1, 2)
        second.store(1, 2, 3)
        assert second.faulty.moved == keys(3), "the server has said that it has the others"
        assert second.demote(1, 2, 3)[1] == []
        assert second.fetch(1, 2, 3) == {number: content(number) for number in (1, 2, 3)}

    def test_both_write_the_same_row(self, drivers: list[TierDriver]) -> None:
        engines = [self.drive(drivers) for _ in range(2)]
        for engine in engines:
            engine.faulty.hang()
        jobs = [engine.demote(1)[0] for engine in engines]
        for engine in engines:
            assert engine.faulty.hanging.wait(PATIENCE)
        for engine in engines:
            engine.faulty.release()
        for engine, job in zip(engines, jobs, strict=True):
            assert engine.finish(job) == {key(1): None}
        for engine in engines:  # a server may say that it has a row which the other is still writing
            assert engine.fetch(1) == {1: content(1)}

    def test_rows_being_written_are_not_read(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.faulty.hang()
        writing, _ = driver.demote(1)
        assert driver.tier.explain(key(1)) is MissReason.WRITING
        assert driver.fetch(1) == {1: MissReason.EVICTED}
        assert driver.demote(1)[1] == []
        driver.tier.discard(keys(1))  # it is deleted when it has been written
        driver.faulty.release()
        assert driver.finish(writing) == {key(1): None}
        assert not driver.tier.lookup(key(1))
        driver.wait(lambda: bool(driver.demote(1, version=1)[1]))
        driver.wait(lambda: driver.tier.lookup(key(1)) is True)
        assert driver.fetch(1) == {1: content(1, 1)}

    # Namespaces

    @pytest.mark.parametrize("forge", ["seal", "bytes", "swapped", "short", "long"])
    def test_forged_rows_are_misses(
        self, drivers: list[TierDriver], stranger: Backend, forge: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_tier, "_LARGE_ROW", ROW_BYTES)  # it is not written where one is
        driver = self.drive(drivers)
        stranger.delete([_row(1)])
        stranger.write([_forged(forge)])
        assert self.ask(driver, 1) == [True]
        (outcome,) = driver.fetch(1).values()
        assert outcome in (MissReason.FAILED, MissReason.EVICTED)
        assert driver.tier.lookup(key(1)) is False
        driver.wait(lambda: bool(driver.demote(1)[1]))
        driver.wait(lambda: driver.tier.lookup(key(1)) is True)
        assert driver.fetch(1) == {1: content(1)}, "the good row has taken its place"

    def test_a_kill_before_a_bad_row_is_deleted_leaves_a_miss(
        self, drivers: list[TierDriver], stranger: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A deletion is only queued: if the row stays, the next engine finds it wrong and deletes it."""
        stranger.delete([_row(1)])
        stranger.write([_forged("bytes")])
        killed, other = self.drive(drivers), self.drive(drivers)
        with monkeypatch.context() as patch:
            patch.setattr(killed.faulty, "delete", lambda rows: None)  # as if it had been killed before
            assert killed.fetch(1) == {1: MissReason.FAILED}
            killed.tier.discard(keys(1))
            self._wait_idle(killed)
        assert stranger.contains([_row(1)]) == [True]
        assert self.ask(other, 1) == [True]
        assert other.fetch(1) == {1: MissReason.FAILED}
        self._wait_idle(other)
        assert stranger.contains([_row(1)]) == [False]
        other.store(1)
        assert other.fetch(1) == {1: content(1)}

    def _wait_idle(self, driver: TierDriver) -> None:
        """Wait until the tier's own calls are over."""
        tier = driver.tier
        assert isinstance(tier, shared_tier.SharedTier)
        driver.wait(lambda: not tier.has_open_calls())

    def test_a_reset_gives_an_engine_names_of_its_own(self, drivers: list[TierDriver]) -> None:
        first, second = self.drive(drivers), self.drive(drivers)
        first.store(1, 2)
        first.tier.reset("other weights")
        assert self.ask(first, 1, 2) == [False, False]
        first.store(1, version=1)
        assert first.fetch(1) == {1: content(1, 1)}
        assert self.ask(second, 1, 2) == [True, True]
        assert second.fetch(1, 2) == {1: content(1), 2: content(2)}, "what is others' stays theirs"
        second.tier.reset("others again")
        assert self.ask(second, 1) == [False]

    def test_answers_from_before_a_reset_say_nothing(self, drivers: list[TierDriver]) -> None:
        first, second = self.drive(drivers), self.drive(drivers)
        first.store(1)
        second.faulty.hang()
        second.tier.ask(keys(1), second.clock.now + 5)
        assert second.faulty.hanging.wait(PATIENCE)
        second.tier.reset("other weights")
        assert second.tier.lookup(key(1)) is None, "it is not being asked under its new name"
        second.faulty.release()
        assert isinstance(second.tier, shared_tier.SharedTier)
        second.wait(lambda tier=second.tier: not tier.has_open_calls())  # type: ignore[misc]
        assert second.tier.lookup(key(1)) is None
        assert self.ask(second, 1) == [False]

    # Servers that do not answer

    def test_no_answer_costs_one_deadline_then_nothing(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.store(1)
        driver.faulty.hang()
        driver.tier.ask(keys(5, 6), driver.clock.now + 2)
        assert driver.faulty.hanging.wait(PATIENCE)
        driver.poll()
        assert driver.tier.lookup_many(keys(5, 6)) == [None, None]
        driver.clock.now += 2
        assert driver.tier.lookup_many(keys(5, 6)) == [False, False], "before anybody polls"
        driver.poll()
        assert driver.tier.explain(key(5)) is MissReason.TOO_SLOW
        assert driver.tier.lookup_many(keys(7, 8)) == [False, False], "nobody else is held up"
        driver.tier.ask(keys(7, 8), driver.clock.now + 2)
        assert driver.tier.lookup_many(keys(7, 8)) == [False, False]
        assert driver.tier.stats().suspended is not None
        for _ in range(100):
            driver.clock.now += 10
            driver.poll()
            assert driver.tier.lookup(key(9)) is False
            assert not driver.tier.has_pending_work()
        driver.faulty.release()
        self._wait_resumed(driver)
        assert self.ask(driver, 1, 7) == [True, False]

    def test_a_slow_answer_holds_nobody_up_and_counts(self, drivers: list[TierDriver]) -> None:
        first, driver = self.drive(drivers), self.drive(drivers)
        first.store(1)
        driver.faulty.hang()
        driver.tier.ask(keys(1, 2), driver.clock.now + 0.1)
        assert driver.faulty.hanging.wait(PATIENCE)
        driver.clock.now += 0.2
        driver.poll()
        assert driver.tier.lookup_many(keys(1, 3)) == [False, False]
        assert driver.tier.stats().suspended is None, "it may be slow, not dead"
        driver.faulty.release()
        driver.wait(lambda: driver.tier.lookup(key(1)) is True)
        assert driver.tier.lookup(key(3)) is None, "it can be asked again"

    def test_one_slow_failure_is_enough(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.faulty.hang()
        driver.tier.ask(keys(1), driver.clock.now + 5)
        assert driver.faulty.hanging.wait(PATIENCE)
        driver.clock.now += 0.5
        driver.faulty.broken = TimeoutError(110, "Connection timed out")
        driver.faulty.release()
        driver.wait(lambda: driver.tier.stats().suspended == "Connection timed out")
        assert driver.tier.lookup(key(2)) is False

    def test_a_server_that_is_down_is_taken_back_within_seconds(self, drivers: list[TierDriver]) -> None:
        driver = self.drive(drivers)
        driver.store(1)
        driver.faulty.broken = ConnectionRefusedError(111, "Connection refused")
        for number in range(10, 14):
            if driver.tier.stats().suspended is None:
                assert self.ask(driver, number) == [False]
        assert driver.tier.stats().suspended == "Connection refused"
        assert driver.tier.explain(key(1)) is MissReason.SUSPENDED
        for _ in range(50):  # for minutes
            driver.clock.now += 5
            driver.poll()
            driver.tier.wait_any(0.01)
        driver.faulty.broken = None
        down_at = driver.clock.now
        self._wait_resumed(driver, seconds=0.5)
        assert driver.clock.now - down_at <= 6.0
        assert driver.fetch(1) == {1: content(1)}

    def _wait_resumed(self, driver: TierDriver, seconds: float = 1.0) -> None:
        """Let time pass only while no call is running, so that only the pauses are measured."""
        while driver.tier.stats().suspended is not None:
            driver.clock.now += seconds
            driver.poll()
            driver.wait(lambda: not driver.tier._probing.is_running)  # type: ignore[attr-defined]

    # Opening

    def test_a_server_that_cannot_be_opened_is_a_miss_and_retried(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        clock, attempts = ManualClock(1000.0), 0

        def open_backend() -> Backend:
            nonlocal attempts
            attempts += 1
            if attempts < 4:
                raise ConnectionRefusedError(111, "Connection refused")
            return self.make_backend()

        tier = shared_tier.SharedTier(
            "valkey", ROW_BYTES, open_backend, namespace=lambda: "suite", threads=2, clock=clock
        )
        driver = TierDriver(tier, FaultyBackend(MemoryServer()), clock)
        driver.wait(lambda: tier.problem is not None)
        assert tier.lookup_many(keys(1, 2)) == [False, False]
        assert tier.explain(key(1)) is MissReason.NOT_OPEN
        assert driver.fetch(1) == {1: MissReason.NOT_OPEN}
        assert driver.demote(1)[1] == []
        assert tier.stats().state == "valkey tier: Connection refused"

        def opens() -> bool:
            clock.now += 1
            return tier.is_open()

        driver.wait(opens)
        driver.store(1)
        assert caplog.text.count("running without it") == 1
        assert caplog.text.count("can be used now") == 1
        tier.check()
        assert tier.close(PATIENCE)

    def test_a_lookup_finds_a_namespace_known_meanwhile(self, drivers: list[TierDriver]) -> None:
        """An idle engine does not poll after its start, while the weights are read."""
        self.drive(drivers).store(1)
        names: list[str] = []
        tier = shared_tier.SharedTier(
            "valkey", ROW_BYTES, self.make_backend, namespace=lambda: names[0] if names else None, threads=2
        )
        assert tier.wait_open(PATIENCE)
        assert tier.lookup_many(keys(1)) == [None], "a request may wait for it"
        assert tier.lacks_namespace()
        assert tier.explain(key(1)) is MissReason.NOT_OPEN
        names.append("suite")
        until = time.monotonic() + PATIENCE
        while not tier.is_open() and time.monotonic() < until:
            assert tier.lookup_many(keys(1)) == [None], "a request may still wait, or ask about it"
            tier.wait_any(0.01)
        assert tier.explain(key(1)) is None
        tier.check()
        assert tier.close(PATIENCE)

    def test_questions_from_before_it_is_open_are_asked_then(self, drivers: list[TierDriver]) -> None:
        """A server may answer only after the first request has come."""
        self.drive(drivers).store(1)
        names: list[str] = []
        may_open, clock = threading.Event(), ManualClock(1000.0)

        def open_backend() -> Backend:
            may_open.wait(PATIENCE)
            return self.make_backend()

        tier = shared_tier.SharedTier(
            "valkey",
            ROW_BYTES,
            open_backend,
            namespace=lambda: names[0] if names else None,
            threads=2,
            clock=clock,
        )
        driver = TierDriver(tier, FaultyBackend(MemoryServer()), clock)
        tier.ask(keys(1, 2), clock.now + 1.0)
        names.append("suite")
        may_open.set()
        driver.wait(lambda: tier.lookup_many(keys(1, 2)) == [True, False])
        tier.check()
        assert tier.close(PATIENCE)

    def test_a_server_that_does_not_open_is_awaited_for_a_while(self) -> None:
        may_open, clock = threading.Event(), ManualClock(1000.0)
        tier = shared_tier.SharedTier(
            "valkey",
            ROW_BYTES,
            lambda: self.make_backend() if may_open.wait(PATIENCE) else MemoryServer(),
            namespace=lambda: "suite",
            threads=2,
            clock=clock,
        )
        assert tier.lookup_many(keys(1)) == [False], "it opens when it has the memory of the rows"
        tier.set_buffer(RowBuffer(memoryview(bytearray(ROW_BYTES)), ROW_BYTES))
        assert tier.lookup_many(keys(1)) == [None]
        clock.now += 10.0
        assert tier.lookup_many(keys(1)) == [False]
        may_open.set()
        assert tier.close(PATIENCE)

    # Everything at once

    @pytest.mark.parametrize("rate", [0.0, 0.1])
    @pytest.mark.parametrize("seed", range(4))
    def test_random_calls_of_two_engines(
        self, drivers: list[TierDriver], stranger: Backend, seed: int, rate: float
    ) -> None:
        source = random.Random(seed)
        engines = [self.drive(drivers, plan=BackendFaultPlan(seed + 10 * at, rate)) for at in range(2)]
        versions = [0, 0]
        for _ in range(8):
            at = source.randrange(2)
            versions[at] = churn(engines[at], source, 20, versions[at])
            engines[at].tier.ask(keys(*range(24)), engines[at].clock.now + source.choice((0.5, 5.0)))
            stranger.delete([_row(number) for number in source.sample(range(24), 6)])
            if source.random() < 0.5:
                engines[at].clock.now += 2
        for engine in engines:
            self.expect_held(engine)


def _row(number: int, payload: bytes = b"", seal: bytes = b"") -> BackendRow:
    name: OffloadKey = key(number)
    return BackendRow(name, (memoryview(bytearray(payload)),), scope=_SCOPE.number, seal=seal)


def _seal(number: int, payload: bytes) -> bytes:
    return seal_of(_SCOPE, key(number), (memoryview(payload),))


_FORGERIES: dict[str, Callable[[], BackendRow]] = {
    "seal": lambda: _row(1, content(1), bytes(16)),
    "bytes": lambda: _row(1, content(7), _seal(1, content(1))),
    "swapped": lambda: _row(1, content(2), _seal(2, content(2))),
    "short": lambda: _row(1, content(1)[:-1], _seal(1, content(1))),
    "long": lambda: _row(1, content(1) + b"x", _seal(1, content(1))),
}


def _forged(how: str) -> BackendRow:
    """Return a row as an attacker with write access to the server could make it."""
    return _FORGERIES[how]()
