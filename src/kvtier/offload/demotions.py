"""Demotions: rows of the pool on their way into tiers below.

A demotion is one more reader of a row. Nothing waits for it: an offer is noted and submitted when there is
room, a row that has left the pool by then is lost to the tier, and rows that no thread has begun to write
are given back when their slots are needed (`make_room`). Both are counted. What must not leave the pool is
no tier's, whoever has offered it.

What demotions take of the pool is bounded, and so is what is in a tier's queue on our behalf. A hung tier
keeps no more than that pinned. Scheduler thread only; nothing blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload.base import NO_REQUEST
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.tiers.base import LentRows, Outcome, Tier, TierJob, TierResult
from kvtier.transfer.base import CPULoadStoreSpec

__all__ = ["Demotions", "DescribeChunks"]

DescribeChunks = Callable[[Sequence[OffloadKey]], Callable[[int], bytes]]
"""Returns what says of each of some chunks, by its number, what the event stream tells of it now. That may
be called later, by any thread.
"""

_SHARE = 4
"""One slot in so many may be pinned by demotions."""
_BYTES = 128 << 20
"""With a tier at a time: enough for a disk during a long step, less than a tier's queue takes."""


@dataclass(slots=True, eq=False)
class _DemotionJob:
    """Rows that a tier is to write, and the slots of those that are still pinned for it."""

    job_id: int
    queue: _TierQueue
    slots: dict[OffloadKey, int]
    spec: CPULoadStoreSpec
    """The slots of all its rows."""
    was_suspended: bool = False
    """Its tier was when a call had rows of it: whether they were written is not known."""


@dataclass(slots=True, eq=False)
class _TierQueue:
    """What goes to one tier: rows offered and not submitted yet, and how many are submitted."""

    tier: Tier
    offers: OrderedDict[OffloadKey, None] = field(default_factory=OrderedDict)
    """The oldest first: of a dict, the first is dear to find when many before it have gone."""
    num_submitted: int = 0


class Demotions:
    """Offers rows of the pool to tiers. Job ids are negative, so that promotions may have the others."""

    def __init__(
        self,
        pool: CPUOffloadingManager,
        piece_of: Callable[[int], memoryview],
        row_bytes: int,
        tiers: Sequence[Tier],
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`seconds`: how long a tier may take over a job."""
        self._pool, self._piece_of = pool, piece_of
        self._seconds, self._clock = seconds, clock
        self.max_rows = max(1, pool.num_slots // _SHARE)
        self._most_submitted = max(1, min(self.max_rows // max(1, len(tiers)), _BYTES // row_bytes))
        self._queues = {tier.name: _TierQueue(tier) for tier in tiers}
        self._jobs: dict[int, _DemotionJob] = {}
        self._newest = 0
        self.describe: DescribeChunks = lambda keys: lambda at: b""
        self.unwritten = 0
        """Rows that were offered and left the pool, or were needed, before they were written."""
        self._progress = float("-inf")

    def __len__(self) -> int:
        """Return how many rows are pinned, once for each tier."""
        return sum(len(job.slots) for job in self._jobs.values())

    # -- offering ----------------------------------------------------------------------------------

    def offer(self, tier: Tier, keys: Iterable[OffloadKey]) -> None:
        """Note that ready rows may be written to a tier.

        Where there are more than the pool has slots, the oldest are looked at: those go whose rows have left
        it. So there are twice as many at most.
        """
        offers = self._queues[tier.name].offers
        before = len(offers)
        offers.update(dict.fromkeys(keys))
        if len(offers) == before:
            return
        for _ in range(2 * (len(offers) - before)):
            if len(offers) <= self._pool.num_slots:
                break
            key, _ = offers.popitem(last=False)
            if self._pool.demotable([key]):
                offers[key] = None
            else:
                self.unwritten += 1
        self._progress = self._clock()

    def submit(self) -> None:
        """Give each tier as many of its offers as it may have at a time.

        Offers wait for one that is not open yet or is suspended, as long as their rows are in the pool.
        """
        for queue in self._queues.values():
            room = self._most_submitted - queue.num_submitted
            if queue.offers and room > 0 and queue.tier.takes_rows():
                keys = list(islice(queue.offers, room))
                for key in keys:
                    del queue.offers[key]
                self._submit(queue, keys)

    def _submit(self, queue: _TierQueue, keys: list[OffloadKey]) -> None:
        ready = self._pool.demotable(keys)
        self.unwritten += len(keys) - len(ready)
        if not ready:
            return
        spec = self._pool.prepare_load(ready, NO_REQUEST)
        self._newest -= 1
        slots = spec.block_ids.tolist()
        job = _DemotionJob(self._newest, queue, dict(zip(ready, slots, strict=True)), spec)
        rows = LentRows(ready, slots, self._piece_of, self.describe(ready))
        self._jobs[job.job_id] = job
        queue.num_submitted += len(ready)
        taken = queue.tier.demote(TierJob(job.job_id, rows, self._clock() + self._seconds))
        if len(taken) < len(ready):
            distinct = set(taken)
            self._unpin(job, [key for key in ready if key not in distinct])

    # -- ending ------------------------------------------------------------------------------------

    def has_jobs(self) -> bool:
        """Say whether rows are pinned."""
        return bool(self._jobs)

    def has_job(self, job_id: int) -> bool:
        """Say whether a job is a demotion that is not over."""
        return job_id in self._jobs

    def take_result(self, result: TierResult) -> None:
        """Take in what has become of rows of a job. Those that a suspension has kept from it wait again."""
        self._progress = self._clock()
        job = self._jobs[result.job_id]
        job.was_suspended |= result.outcome is Outcome.SUSPENDED
        if not result.in_use:
            self._unpin(job, list(result.keys))
            if job.was_suspended:  # a tier takes no row that it has
                self.offer(job.queue.tier, result.keys)

    def make_room(self, count: int) -> None:
        """Give back up to `count` slots whose rows no thread has begun to write, the last first."""
        for job in reversed(list(self._jobs.values())):
            if count <= 0:
                return
            withdrawn = job.queue.tier.withdraw(job.job_id, list(job.slots)[-count:])
            self.unwritten += len(withdrawn)
            count -= len(withdrawn)
            self._unpin(job, withdrawn)

    def _unpin(self, job: _DemotionJob, keys: list[OffloadKey]) -> None:
        """Let go of rows that a tier is done with."""
        if len(keys) == len(job.spec.block_ids):  # all of them, be it in another order
            self._pool.complete_load(list(job.slots), job.spec)
            job.slots.clear()
        elif keys:
            self._pool.complete_load(keys, CPULoadStoreSpec([job.slots.pop(key) for key in keys]))
        job.queue.num_submitted -= len(keys)
        if not job.slots:
            self._jobs.pop(job.job_id, None)

    def reset(self) -> None:
        """Forget what was offered. Rows that are being written are unpinned when their results come."""
        for queue in self._queues.values():
            queue.offers.clear()

    def has_offers(self) -> bool:
        """Say whether offers wait, and something was offered or written a moment ago."""
        waiting = any(queue.offers for queue in self._queues.values())
        return waiting and self._clock() - self._progress < 1.0

    def check(self) -> None:
        """Raise `IntegrityError` if the books do not agree."""
        for queue in self._queues.values():
            submitted = sum(len(job.slots) for job in self._jobs.values() if job.queue is queue)
            if submitted != queue.num_submitted or submitted > self._most_submitted:
                found = f"{queue.num_submitted} noted of at most {self._most_submitted}"
                raise IntegrityError(f"demotions to {queue.tier.name}: {submitted} rows are pinned, {found}")
