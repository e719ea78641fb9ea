"""`TieredOffloadingManager`: the pool and the tiers below it, as one manager.

To the connector it is the pool's manager: only chunks in the pool can be loaded, and `lookup` is about the
pool alone. Beyond that a connector may look for chunks in all of them, and have them promoted into the pool:

    ask       promotions.lookup_prefix, costs, unknown                  change nothing and start nothing
              waits.look_up, waits.promote     begin a request's wait; must_wait then answers in O(1)
    step      begin_step            takes slots and starts I/O       (when a step's orders are built)
              end_step              processes results, writes rows   (when a step's output comes in)
    load      prepare_load          pins the rows for the load and ends the wait

Nothing is evicted or completed between an ask and its allocation, since only the two calls of a step do
that. Rows are offered to the tiers below when they become ready (`write: through`), or, the coldest rows
only, ahead of their eviction (`write: evict`). A tier's events come before the pool's, so that a row that
leaves the pool is known to be below. A reset voids all rows, in this process and in later ones. Scheduler
thread only. Only `wait_any` and `shutdown` block; and, for half a second at most, `discard` and
`reset_cache`, if a disk has to record them.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey
from kvtier.metrics import Histogram
from kvtier.offload.base import NO_REQUEST, OffloadingManager, PrepareStoreOutput, ReqContext
from kvtier.offload.demotions import Demotions, DescribeChunks
from kvtier.offload.manager import CPUOffloadingManager, ManagerStats
from kvtier.offload.promotions import Promotions
from kvtier.offload.waits import TierWaits
from kvtier.residency import MissReason, OffloadingEvent
from kvtier.tiers.base import Direction, RowBuffer, Tier, TierResult, TierStats
from kvtier.transfer.base import LoadStoreSpec

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 5.0
_AHEAD_SHARE = 16
"""With `write: evict`, one slot in this many is kept free, or holds a row that is written ahead."""
_AHEAD_MOST = 1024
"""The most rows to write ahead in a pool of any size: enough for some steps, and a bound on the search."""
_HABITS_POLLS = 1000
"""The number of steps after which the pool's policy has habits of its own."""
_AHEAD_POLLS = 8
"""The number of steps between two searches for the coldest rows."""


class ConfiguredTier(NamedTuple):
    """A tier, and when rows are written to it: when they are ready (`through`), or before they leave."""

    tier: Tier
    write: str = "through"


class TieredOffloadingManager(OffloadingManager):
    """The manager of the chunks in the pool and in the tiers.

    `rows` are the pool's bytes, `(num_slots, slot_bytes)`. A row is the first `row_bytes` of its slot, by
    default the whole slot.
    """

    def __init__(
        self,
        pool: CPUOffloadingManager,
        rows: npt.NDArray[np.uint8],
        tiers: Sequence[ConfiguredTier],
        *,
        row_bytes: int | None = None,
        store_deadline: float = 30.0,
        is_namespace_known: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool, self.tiers = pool, [tier for tier, _ in tiers]
        row_bytes = rows.shape[1] if row_bytes is None else row_bytes
        self._buffer = RowBuffer(rows.reshape(-1).data, rows.shape[1], row_bytes)
        self._write_through_tiers = [tier for tier, write in tiers if write == "through"]
        self._write_ahead_tiers = [tier for tier, write in tiers if write == "evict"]
        self._is_namespace_known, self._clock = is_namespace_known, clock
        self.promotions = Promotions(pool, row_bytes, self.tiers, self.reserve, clock)
        self.waits = TierWaits(self.promotions, clock)
        self._demotions = Demotions(pool, row_bytes, self.tiers, store_deadline, clock)
        self._offered_ahead: set[OffloadKey] = set()
        """The coldest chunks of the last search: a tier that did not take them is not asked again."""
        self.tier_times = {way: {tier.name: Histogram() for tier in self.tiers} for way in Direction}
        """Seconds of I/O of rows that were moved together, by direction and tier."""
        self._polls = 0
        self._has_habits = not tiers
        self._is_closed = False
        for tier in self.tiers:
            tier.set_buffer(self._buffer)

    def describe_with(self, describe: DescribeChunks) -> None:
        """Have tiers keep the event stream's description of each chunk."""
        self._demotions.describe = describe

    # -- the pool's manager ------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.pool.lookup(key, req_context)

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return self.pool.lookup_many(keys, req_context)

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, wait: bool = True
    ) -> int | None:
        return self.pool.lookup_prefix(keys, req_context, wait=wait)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin ready chunks for a load. The request's wait, and the pins of its promotion, end."""
        spec = self.pool.prepare_load(keys, req_context)
        self.waits.end(req_context)
        return spec

    def complete_load(self, keys: Iterable[OffloadKey], spec: LoadStoreSpec | None = None) -> None:
        self.pool.complete_load(keys, spec)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.pool.touch(keys, req_context)
        for tier in self.tiers:
            tier.touch(keys, req_context.ending)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Take the chunks of an offer that can be stored. Demotions that have not begun give way to them."""
        offered = list(keys)
        self._withdraw_demotions(offered)
        return self.pool.prepare_store(offered, req_context)

    def reserve(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Take slots for a promotion or an audit. Demotions that have not begun give way to them."""
        offered = list(keys)
        self._withdraw_demotions(offered)
        return self.pool.reserve(offered, req_context)

    def _withdraw_demotions(self, keys: list[OffloadKey]) -> None:
        if self._demotions.has_jobs() and len(keys) > self.pool.num_free:
            self._demotions.make_room(self.pool.shortfall(keys))

    def complete_store(
        self, keys: Iterable[OffloadKey], success: bool = True, spec: LoadStoreSpec | None = None
    ) -> None:
        """End the writing of chunks. Chunks that are ready now are offered to tiers."""
        keys = list(keys)
        self.pool.complete_store(keys, success, spec)
        if success and self._write_through_tiers:
            ready = self.pool.demotable(keys)
            for tier in self._write_through_tiers:
                self._demotions.offer(tier, ready)

    def discard(self, keys: Iterable[OffloadKey], reason: MissReason = MissReason.FAILED) -> None:
        """Make chunks absent whose bytes are wrong, or whose transfers fail (`IO_FAILED`).

        A chunk with wrong bytes that was ready may have been written to tiers, so the tiers discard it too.
        They also discard a chunk that is on its way from them. A chunk that is being stored has not come
        from a tier, so the tiers keep theirs. A transfer that failed says nothing against the rows below.
        """
        keys = list(keys)
        ready = compress(keys, self.pool.lookup_many(keys, NO_REQUEST))
        wrong = list(ready) + self.promotions.drop(keys)
        self.pool.discard(keys, reason)
        if wrong and reason is MissReason.FAILED:
            for tier in self.tiers:
                tier.discard(wrong)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.waits.forget(req_context)

    def reset_cache(self) -> None:
        """Make all chunks absent in the pool and all tiers; none comes back, not even after a restart."""
        for tier in self.tiers:  # first, so that their rows are void whatever happens next
            tier.reset(secrets.token_hex(8))
        self.waits.reset()
        self._demotions.reset()
        self._offered_ahead.clear()
        self.pool.reset_cache()

    # -- one step ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Submit the lookups and promotions that began in this step: ask tiers, take slots, start I/O."""
        self.waits.submit()

    def end_step(self) -> None:
        """Process the tiers' results, end waits that are over, and submit demotions."""
        for tier in self.tiers:
            for result in tier.poll():
                self._measure(tier, result)
                job = result.job
                if not job.lent.issuperset(result.positions):
                    logger.error("%s: a result of rows of job %d that are over", tier.name, job.job_id)
                elif job.direction is Direction.PROMOTE:
                    self.promotions.take_result(result)
                else:
                    self._demotions.take_result(result)
        self.waits.poll()
        if not self._has_habits:
            self._take_habits()
        self._write_ahead()
        self._demotions.submit()

    def _take_habits(self) -> None:
        """Let the pool's policy begin with what the policy of a tier had learnt before this start."""
        habits = [data for tier in self.tiers if (data := tier.habits())]
        self._has_habits = any(map(self.pool.take_habits, habits)) or self._polls > _HABITS_POLLS

    def _measure(self, tier: Tier, result: TierResult) -> None:
        if result.outcome is None and not result.returned:
            self.tier_times[result.job.direction][tier.name].observe(result.seconds)

    def _write_ahead(self) -> None:
        """Offer the rows that will be evicted next to the tiers with `write: evict`."""
        self._polls += 1
        if not self._write_ahead_tiers or self._polls % _AHEAD_POLLS:
            return
        margin = max(1, min(self.pool.num_slots // _AHEAD_SHARE, _AHEAD_MOST))
        if self.pool.num_free >= margin:
            return
        coldest = self.pool.demotable(self.pool.coldest(margin))
        new = [key for key in coldest if key not in self._offered_ahead]
        self._offered_ahead = set(coldest)
        for tier in self._write_ahead_tiers:
            self._demotions.offer(tier, self._absent(tier, new))

    @staticmethod
    def _absent(tier: Tier, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return those of the chunks that a tier does not have."""
        held = tier.lookup_many(keys)
        return [key for key, is_held in zip(keys, held, strict=True) if not is_held]

    # -- reports -----------------------------------------------------------------------------------

    def explain(self, key: OffloadKey) -> MissReason | None:
        """Return why a chunk cannot be loaded now, that is, why the pool does not have it."""
        return self.pool.explain(key)

    def explain_tiers(self, key: OffloadKey, req_context: ReqContext) -> dict[str, MissReason]:
        """Return, for each tier that has ever had a chunk, why it did not give it to a request."""
        in_pool = self.pool.explain(key)
        if in_pool is None:
            return {}
        reasons: dict[str, MissReason] = {"cpu": in_pool} | {
            tier.name: self._explain(tier, key) for tier in self.tiers
        }
        failure = self.waits.failure(key, req_context)
        if failure is not None:
            name, reason = failure
            reasons = {other: why for other, why in reasons.items() if other != name} | {name: reason}
        known = [name for name, why in reasons.items() if why is not MissReason.NEVER_STORED]
        return {name: reasons[name] for name in known or ["cpu"]}

    def _explain(self, tier: Tier, key: OffloadKey) -> MissReason:
        miss = tier.explain(key)
        if miss is None:
            return MissReason.NOT_WORTH_LOADING
        if miss is MissReason.NOT_OPEN and not self._is_namespace_known():
            return MissReason.NAMESPACE_UNKNOWN
        return miss

    def take_events(self) -> list[OffloadingEvent]:
        """Drain the changes of all tiers and the pool, the lowest tier first."""
        below = [event for tier in reversed(self.tiers) for event in tier.take_events()]
        return below + self.pool.take_events()

    def stats(self) -> ManagerStats:
        """Return the pool's slots by state, and its totals so far."""
        return self.pool.stats()

    def tier_stats(self) -> list[TierStats]:
        """Return what each tier holds, and its totals so far."""
        return [tier.stats() for tier in self.tiers]

    @property
    def unwritten(self) -> int:
        """The offered rows that left the pool, or whose slots were needed, before they were written."""
        return self._demotions.unwritten

    def has_pending_work(self) -> bool:
        """Return whether an idle engine should step: rows are being written, and one has moved recently."""
        return (
            any(tier.has_pending_work() for tier in self.tiers)
            or self._demotions.has_offers()
            or self.pool.has_pending_work()
        )

    def _is_writing(self) -> bool:
        """Return whether rows are being written, and one has moved recently. Other work may stay undone."""
        busy = self._demotions.has_jobs() and any(tier.has_pending_work() for tier in self.tiers)
        return busy or self._demotions.has_offers()

    def wait_any(self, timeout: float) -> bool:
        """Block until a tier may have a result, for an engine that has nothing to do.

        Return whether a tier was busy at all.
        """
        busy = [tier for tier in self.tiers if tier.promotion_bytes] or self.waits.busy_tiers()
        for tier in busy[:1]:
            tier.wait_any(timeout)
        return bool(busy)

    def check(self) -> None:
        self.pool.check()
        self.waits.check()
        self._demotions.check()
        for tier in self.tiers:
            tier.check()

    # -- ending ------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Write rows that tiers do not have, the hottest first, for a few seconds; then close the tiers."""
        if self._is_closed:
            return
        self._is_closed = True
        until = self._clock() + _SHUTDOWN_SECONDS
        self.waits.reset()
        hot = self.pool.demotable(self.pool.hottest())
        for tier in self.tiers:
            self._demotions.offer_first(tier, self._absent(tier, hot))
        self.end_step()
        while self._is_writing() and self._clock() < until:
            for tier in self.tiers:
                tier.wait_any(0.05)
            self.end_step()
        ended = [tier.close(max(0.0, until - self._clock())) for tier in self.tiers]
        if all(ended):
            # Else a call still uses the memory, which is freed with the process.
            self._buffer.release()
