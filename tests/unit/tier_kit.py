"""A tier by hand: it holds what the test says, and its jobs end when and how the test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tests.unit.connector_kit import Clock

from kvtier.keys import OffloadKey
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.offload.promotions import PromotionRequest, RemoteLookup
from kvtier.offload.tiered import ConfiguredTier, TieredOffloadingManager
from kvtier.offload.waits import TierWait
from kvtier.residency import MEDIUM_STORAGE, MissReason, OffloadingEvent
from kvtier.testing.manager_suite import key, keys
from kvtier.tiers.base import RowBuffer, RowJob, Tier, TierResult, TierStats

ROW = 4096


class TickingClock(Clock):
    """A clock that goes on when it is looked at."""

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


class HandTier(Tier):
    """Counts what it is asked. `promotions` and `demotions` are jobs that are not over, by id."""

    medium = MEDIUM_STORAGE

    def __init__(self, name: str = "disk") -> None:
        self.name = name
        self.held: set[OffloadKey] = set()
        self.unknown: set[OffloadKey] = set()
        """Keys of which it does not know whether it holds them, until `answer`."""
        self.asked: list[tuple[list[OffloadKey], float]] = []
        """What it was asked, and until when."""
        self.has_opened = True
        self.buffer: RowBuffer | None = None
        self.misses: dict[OffloadKey, MissReason] = {}
        self.refuses: set[OffloadKey] = set()
        """Keys that it does not want."""
        self.begun: set[OffloadKey] = set()
        """Rows that a thread works on: they cannot be withdrawn."""
        self.promotions: dict[int, RowJob] = {}
        self.demotions: dict[int, RowJob] = {}
        self.lookups = self.keys_looked_up = 0
        self.queued_bytes = 0
        self.suffixes: list[str] = []
        self.prices: dict[str, float] = {}
        self.closed: list[float] = []
        self.discarded: list[OffloadKey] = []
        self._left: dict[int, set[OffloadKey]] = {}
        self._late: dict[RowJob, list[int]] = {}
        self._results: list[TierResult] = []
        self._events: list[OffloadingEvent] = []

    def lookup_many(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        self.lookups += 1
        self.keys_looked_up += len(keys)
        return [None if key in self.unknown else key in self.held for key in keys]

    def ask(self, keys: Sequence[OffloadKey], deadline: float) -> None:
        self.asked.append((list(keys), deadline))

    def answer(self) -> None:
        """Know of everything that was asked whether it is held."""
        for asked, _ in self.asked:
            self.unknown -= set(asked)

    def is_open(self) -> bool:
        return self.has_opened

    def set_buffer(self, buffer: RowBuffer) -> None:
        assert self.buffer is None, "it is set once"
        self.buffer = buffer

    def explain(self, key: OffloadKey) -> MissReason | None:
        return None if key in self.held | self.unknown else self.misses.get(key, MissReason.NEVER_STORED)

    @property
    def promotion_bytes(self) -> int:
        return self.queued_bytes

    def promote(self, job: RowJob) -> None:
        self.promotions[job.job_id] = job
        self._left[job.job_id] = set(job.keys)

    def demote(self, job: RowJob) -> list[int]:
        taken = [at for at, key in enumerate(job.keys) if key not in self.held | self.refuses]
        if taken:
            self.demotions[job.job_id] = job
            self._left[job.job_id] = {job.keys[at] for at in taken}
        return taken

    def withdraw(self, job: RowJob, positions: Sequence[int] | None = None) -> list[int]:
        left = self._left.get(job.job_id, set()) - self.begun
        wanted = range(len(job)) if positions is None else positions
        given = [at for at in wanted if job.keys[at] in left]
        self._end(job, [job.keys[at] for at in given])
        return given

    def finish(
        self, job_id: int, *numbers: int, outcome: MissReason | None = None, in_use: bool = False
    ) -> None:
        """End some rows of a job, or all that are left."""
        job = self.promotions.get(job_id) or self.demotions[job_id]
        left = [key for key in job.keys if key in self._left[job_id]]
        self.finish_rows(job, keys(*numbers) if numbers else left, outcome, in_use)

    def finish_rows(
        self, job: RowJob, ended: list[OffloadKey], outcome: MissReason | None = None, in_use: bool = False
    ) -> None:
        """End rows of a job."""
        positions = [job.keys.index(key) for key in ended]
        self._results.append(TierResult(job, positions, outcome, in_use, seconds=0.001))
        if job.job_id in self.demotions and outcome is None:
            self.held |= set(ended)
            self._events.append(OffloadingEvent(list(ended), self.medium, removed=False))
        if job.job_id in self.promotions and outcome is MissReason.FAILED:
            self.held -= set(ended)
        if in_use:
            job.given_up = outcome
            self._late.setdefault(job, []).extend(positions)
        self._end(job, ended)

    def return_rows(self, job: RowJob, *positions: int) -> None:
        """Give back the memory of late rows of a job, or of all."""
        ended = list(positions) or self._late[job]
        self._late[job] = [at for at in self._late[job] if at not in ended]
        self._results.append(TierResult(job, ended, None, returned=True))

    def _end(self, job: RowJob, ended: Sequence[OffloadKey]) -> None:
        left = self._left.get(job.job_id)
        if left is not None:
            left.difference_update(ended)
            if not left:
                del self._left[job.job_id]
                self.promotions.pop(job.job_id, None)
                self.demotions.pop(job.job_id, None)

    def poll(self) -> list[TierResult]:
        results, self._results = self._results, []
        return results

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self.discarded += keys
        self.held -= set(keys)

    def reset(self, suffix: str) -> None:
        self.suffixes.append(suffix)
        gone, self.held = list(self.held), set()
        if gone:
            self._events.append(OffloadingEvent(gone, self.medium, removed=True))

    def take_events(self) -> list[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def stats(self) -> TierStats:
        raise NotImplementedError

    def has_pending_work(self) -> bool:
        return False

    def wait_any(self, timeout: float) -> bool:
        return bool(self._results)

    def check(self) -> None:
        return

    def close(self, timeout: float = 5.0) -> bool:
        self.closed.append(timeout)
        return True


def context(name: str = "a", stays_in_pool: bool = False) -> ReqContext:
    """Return the context of a request."""
    return ReqContext(None, name, stays_in_pool)


@dataclass
class Tiered:
    """A manager over `num_slots` slots and tiers by hand."""

    num_slots: int = 16
    write: str = "through"
    num_tiers: int = 1
    clock: Clock = field(default_factory=Clock)
    tiers: list[HandTier] = field(init=False)
    manager: TieredOffloadingManager = field(init=False)

    def __post_init__(self) -> None:
        self.tiers = [HandTier(name) for name in ("disk", "object")[: self.num_tiers]]
        self.pool = CPUOffloadingManager(self.num_slots)
        self.rows = np.zeros((self.num_slots, ROW), np.uint8)
        configured = [ConfiguredTier(tier, self.write) for tier in self.tiers]
        self.manager = TieredOffloadingManager(self.pool, self.rows, configured, clock=self.clock)

    @property
    def tier(self) -> HandTier:
        """The first tier."""
        return self.tiers[0]

    def store(self, *numbers: int, name: str = "a", stays_in_pool: bool = False) -> None:
        """Store chunks in the pool."""
        output = self.manager.prepare_store(keys(*numbers), context(name, stays_in_pool))
        assert output is not None
        self.manager.complete_store(output.keys_to_store, True, output.store_spec)
        self.manager.check()

    def promote(
        self, *numbers: int, name: str = "a", wait_budget: float = 10.0, whole: bool = False
    ) -> bool:
        """Begin the promotion of chunks for a request."""
        request = PromotionRequest(context(name), keys(*numbers), wait_budget, whole)
        return self.manager.waits.promote(self.wait(name), request, wait_budget)

    def look_up(self, lookups: list[RemoteLookup], name: str = "a") -> None:
        """Begin lookups in tiers for a request."""
        self.manager.waits.look_up(self.wait(name), lookups, 1, 1.0)

    def wait(self, name: str = "a") -> TierWait:
        """Return the wait of a request, a new one if its last one is over, as after a preemption."""
        wait = self.manager.waits.open(context(name), 0)
        if wait is None:
            self.manager.waits.forget(context(name))
            wait = self.manager.waits.open(context(name), 0)
            assert wait is not None
        return wait

    def submit(self) -> RowJob | None:
        """Begin a step's promotions; return the newest job."""
        self.manager.begin_step()
        self.manager.check()
        return list(self.tier.promotions.values())[-1] if self.tier.promotions else None

    def poll(self) -> None:
        """End a step."""
        self.manager.end_step()
        self.manager.check()

    def ready(self, *numbers: int) -> list[bool | None]:
        """Look chunks up in the pool."""
        return [self.manager.lookup(key(number), context()) for number in numbers]

    def is_waiting(self, name: str = "a") -> bool:
        """Return whether a request waits."""
        return self.manager.waits.is_waiting(context(name))

    def can_evict(self, *numbers: int) -> bool:
        """Return whether the pool would let all of these chunks go."""
        return set(keys(*numbers)) <= set(self.pool.coldest(self.num_slots))
