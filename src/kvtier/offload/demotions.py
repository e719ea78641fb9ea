"""Demotions: rows of the pool on their way into tiers below.

A demotion is one more reader of a row. Nothing waits for it: an offer is queued, and submitted when there
is room. A row that has left the pool by then is not written. Rows that no thread has begun to write are
given back when their slots are needed (`make_room`). Both cases are counted. A row that must not leave the
pool is never written to a tier, even if it was offered.

The slots that demotions pin are bounded, and so are the rows that they put into a tier's queue: a tier that
hangs cannot keep more than that pinned. Scheduler thread only; nothing blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload.base import NO_REQUEST, ReadLease
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.residency import MissReason
from kvtier.tiers.base import Direction, RowJob, Tier, TierResult

DescribeChunks = Callable[[Sequence[OffloadKey]], Callable[[int], bytes]]
"""Takes chunks and returns a function that gives, for a chunk's number among them, its description in the
event stream as of now. Any thread may call that function later.
"""

_SHARE = 4
"""Demotions may pin one slot in this many."""
_BYTES = 128 << 20
"""The most bytes submitted to a tier at a time: enough for a disk in a long step, less than its queue holds.
"""
_ROWS = 1024
"""The most rows submitted to a tier at a time: the scheduler's thread takes some microseconds for each."""


class Demotions:
    """Owns the demotions of rows to tiers.

    Their job ids are negative, because promotions use the positive ones.
    """

    def __init__(
        self,
        pool: CPUOffloadingManager,
        row_bytes: int,
        tiers: Sequence[Tier],
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """Set up an empty queue for each tier. A tier may take `seconds` for a job."""
        self._pool, self._seconds, self._clock = pool, seconds, clock
        share = pool.num_slots // _SHARE // max(1, len(tiers))
        self._most_submitted = max(1, min(share, _BYTES // row_bytes, _ROWS))
        self._offers: dict[Tier, OrderedDict[OffloadKey, None]] = {tier: OrderedDict() for tier in tiers}
        """The rows offered to each tier and not submitted yet, the oldest offer first.

        A plain dict is slow to find its first key once many before it are deleted.
        """
        self._jobs: dict[RowJob, tuple[Tier, ReadLease]] = {}  # the jobs that are not over, oldest first
        self._newest = 0
        self.describe: DescribeChunks = lambda keys: lambda at: b""
        self.unwritten = 0
        """The rows offered that left the pool, or whose slots were needed, before they were written."""
        self._progress = float("-inf")

    # -- offering ----------------------------------------------------------------------------------

    def offer(self, tier: Tier, keys: Iterable[OffloadKey]) -> None:
        """Queue ready rows to be written to a tier.

        If there are more offers than the pool has slots, the oldest are looked at, and those whose rows have
        left the pool are dropped. So there are at most twice as many offers as slots.
        """
        offers = self._offers[tier]
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

    def offer_first(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        """Queue ready rows before all that are queued."""
        self.offer(tier, keys)
        offers = self._offers[tier]
        for key in reversed(keys):
            if key in offers:
                offers.move_to_end(key, last=False)

    def submit(self) -> None:
        """Give each tier as many of its offers as it may have at a time.

        Offers to a tier that is not open yet or is suspended wait, as long as their rows are in the pool.
        """
        for tier, offers in self._offers.items():
            if offers and tier.takes_rows():
                keys = list(islice(offers, self._most_submitted - self._num_submitted(tier)))
                for key in keys:
                    del offers[key]
                self._submit(tier, keys)

    def _num_submitted(self, tier: Tier) -> int:
        """Count the rows that are pinned for a tier's jobs."""
        return sum(len(job.lent) for job, (theirs, _) in self._jobs.items() if theirs is tier)

    def _submit(self, tier: Tier, keys: list[OffloadKey]) -> None:
        ready = self._pool.demotable(keys)
        self.unwritten += len(keys) - len(ready)
        if ready:
            for tenant, part in self._pool.by_tenant(ready).items():
                self._start(tier, part, tenant)

    def _start(self, tier: Tier, ready: list[OffloadKey], tenant: str) -> None:
        spec = self._pool.prepare_load(ready, NO_REQUEST)
        lease = ReadLease(self._pool, ready, spec)
        self._newest -= 1
        job = RowJob(
            self._newest,
            Direction.DEMOTE,
            ready,
            spec.block_ids,
            self._clock() + self._seconds,
            self.describe(ready),
            tenant,
        )
        job.lent = lease.left
        self._jobs[job] = tier, lease
        taken = tier.demote(job)
        if len(taken) < len(job):
            self._unpin(job, job.lent.difference(taken))

    # -- ending ------------------------------------------------------------------------------------

    def has_jobs(self) -> bool:
        """Return whether rows are pinned."""
        return bool(self._jobs)

    def take_result(self, result: TierResult) -> None:
        """Take in a result for some rows of a job.

        Rows that a suspension kept from the tier are offered again. If the tier was suspended while a call
        had a row, it is not known whether the row was written; the tier refuses a row that it already has.
        """
        self._progress = self._clock()
        job = result.job
        if not result.in_use:
            tier, _ = self._jobs[job]
            self._unpin(job, result.positions)
            if MissReason.SUSPENDED in (result.outcome, job.given_up):
                self.offer(tier, result.keys)

    def make_room(self, count: int) -> None:
        """Unpin rows that no thread has begun to write, the newest first, until `count` slots are unread.

        A row on its way into several tiers is withdrawn from each of them.
        """
        still_read: set[int] = set()  # the slots of rows that only some of their tiers have given back
        for job, (tier, _) in reversed(list(self._jobs.items())):
            if count <= 0:
                return
            is_next = [slot in still_read for slot in job.slots.tolist()]
            lent = sorted(job.lent, key=lambda at: (is_next[at], at))
            withdrawn = tier.withdraw(job, lent[-count:])
            self.unwritten += len(withdrawn)
            self._unpin(job, withdrawn)
            read = self._pool.read_slots(job.slots_at(withdrawn))
            still_read.update(read)
            count -= len(withdrawn) - len(read)

    def _unpin(self, job: RowJob, positions: Iterable[int]) -> None:
        """Unpin rows that a tier is done with."""
        self._jobs[job][1].release(positions)
        if not job.lent:
            del self._jobs[job]

    def reset(self) -> None:
        """Forget all offers. Rows that are being written are unpinned when their results come."""
        for offers in self._offers.values():
            offers.clear()

    def has_offers(self) -> bool:
        """Return whether offers wait, and a row was offered or written within the last second."""
        return any(self._offers.values()) and self._clock() - self._progress < 1.0

    def check(self) -> None:
        """Raise `IntegrityError` if more rows are pinned than allowed."""
        for tier in self._offers:
            found, most = self._num_submitted(tier), self._most_submitted
            if found > most:
                raise IntegrityError(f"{tier.name}: expected at most {most} rows pinned, got {found}")
