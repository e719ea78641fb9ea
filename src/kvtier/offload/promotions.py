"""Promotions: rows on their way from tiers into the pool, and the requests that wait for them.

    wish --submit--> under way --results--> over

A wish takes no slot; submitting it takes slots and starts I/O.

Asking is cheap and changes nothing: `is_waiting` answers in O(1). A row is promoted once, however many
requests wait for it. It stays pinned for each of them until that request's load, its end, or its deadline,
and is then an ordinary ready row. A request waits no longer than its deadline; a row that has not arrived by
then is a miss. When no request waits for a row any more, it is withdrawn if its I/O has not begun, and else
kept when it arrives. Slots that a late call may still write stay out of use until the call has returned.

The slots that promotions take of the pool are bounded: rows on their way, rows pinned, and slots that calls
have not given back. Scheduler thread only; nothing blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload.base import NO_REQUEST, MissReason, PrepareStoreOutput, ReqContext
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.tiers.base import Direction, RowJob, Tier, TierResult
from kvtier.transfer.base import CPULoadStoreSpec

__all__ = ["PromotionTime", "Promotions", "TierCost", "Wish"]

_SHARE = 2
"""Promotions may take one slot in this many; the other slots are for computed chunks."""


class TierCost(NamedTuple):
    """The bytes of a promotion from one tier, known before it begins."""

    tier: str
    num_bytes: int
    queued_bytes: int
    """The bytes of promotions that the tier has to do first."""


class PromotionTime(NamedTuple):
    """The time of a promotion. `lost`: it was given up after `seconds`, and would have taken longer."""

    tier: str
    num_bytes: int
    seconds: float
    lost: bool


class Wish(NamedTuple):
    """The chunks that a request wants in the pool.

    `needed` are all chunks of its load, the most useful first. The request waits for `patience` seconds at
    most, and a tier may take `io_seconds` for its part. `whole`: the request needs all chunks or none.
    """

    needed: list[OffloadKey]
    patience: float
    io_seconds: float
    whole: bool = False


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for rows, or whose rows are pinned."""

    context: ReqContext
    wish: Wish
    deadline: float
    is_submitted: bool = False
    is_expired: bool = False
    missing: dict[OffloadKey, None] = field(default_factory=dict)
    """The rows on their way that the request waits for, the most useful first."""
    pins: list[tuple[list[OffloadKey], CPULoadStoreSpec]] = field(default_factory=list)
    sources: dict[OffloadKey, str] = field(default_factory=dict)
    """The tier that each row has come from."""
    reasons: dict[OffloadKey, tuple[str, MissReason]] = field(default_factory=dict)
    """The rows that will not come, and why."""

    def stop_waiting_for(self, keys: Iterable[OffloadKey]) -> None:
        """Stop waiting for some rows."""
        for key in keys:
            self.missing.pop(key, None)

    def useless(self) -> list[OffloadKey]:
        """Return the awaited rows that are useless because an earlier row will not come."""
        needed = self.wish.needed
        if self.wish.whole:
            return list(self.missing)
        end = next((at for at, key in enumerate(needed) if key in self.reasons), len(needed))
        return [key for key in needed[end:] if key in self.missing]


@dataclass(slots=True, eq=False, kw_only=True)
class _PromotionJob(RowJob):
    """A job of one tier, and what is measured of it."""

    tier: Tier
    started: float
    ahead_bytes: int
    seconds: float = 0.0
    num_arrived: int = 0
    is_late: bool = False
    """Not all rows came in time, or none: the time of the whole job is not known."""


class _Arrival(NamedTuple):
    """A row on its way: the job that brings it, its position there, and the requests that wait for it."""

    job: _PromotionJob
    position: int
    waiters: set[_Waiter]


Reserve = Callable[[list[OffloadKey], ReqContext], PrepareStoreOutput | None]
"""Takes pool slots for the keys that the pool does not hold."""


class Promotions:
    """The promotions of rows from `tiers` into slots that `reserve` gives.

    A row comes from the first tier that has it.
    """

    def __init__(
        self,
        pool: CPUOffloadingManager,
        row_bytes: int,
        tiers: Sequence[Tier],
        reserve: Reserve,
        clock: Callable[[], float],
    ) -> None:
        self._pool, self._row_bytes = pool, row_bytes
        self._tiers, self._reserve, self._clock = tiers, reserve, clock
        self.max_rows = max(1, pool.num_slots // _SHARE)
        self._wishes: list[_Waiter] = []
        self._waiters: dict[str, _Waiter] = {}
        self._arrivals: dict[OffloadKey, _Arrival] = {}
        self._jobs: set[_PromotionJob] = set()
        self._pinned: Counter[OffloadKey] = Counter()
        self._lent = 0  # rows whose memory tiers may use
        self._newest = 0
        self._times: list[PromotionTime] = []

    # -- asking ------------------------------------------------------------------------------------

    def is_arriving(self, key: OffloadKey) -> bool:
        """Say whether a row is on its way."""
        return key in self._arrivals

    def is_waiting(self, context: ReqContext) -> bool:
        """Say whether a request should go on waiting for its rows."""
        waiter = self._waiters.get(context.req_id)
        if waiter is None or (waiter.is_submitted and not waiter.missing):
            return False
        return self._clock() < waiter.deadline

    def load(self) -> tuple[int, int]:
        """Return how many requests wait for rows, and for how many rows, those that have come included."""
        waiting = [len(w.wish.needed) for w in self._waiters.values() if w.missing or not w.is_submitted]
        return len(waiting), sum(waiting)

    def find(self, keys: Sequence[OffloadKey]) -> list[Tier | None]:
        """Return for each key the first tier that can give it now."""
        found: list[Tier | None] = [None] * len(keys)
        for tier in self._tiers:
            left = [index for index, holder in enumerate(found) if holder is None]
            for index, is_held in zip(left, tier.lookup_many([keys[index] for index in left]), strict=True):
                if is_held:
                    found[index] = tier
        return found

    def costs(self, needed: Sequence[OffloadKey]) -> list[TierCost]:
        """Return the bytes to promote from each tier so that these chunks are in the pool.

        Chunks on their way cost nothing more.
        """
        absent = [key for key in needed if self._pool.lookup(key, NO_REQUEST) is False]
        counts = Counter(tier.name for tier in self.find(absent) if tier is not None)
        counts.update({self._arrivals[key].job.tier.name: 0 for key in needed if key in self._arrivals})
        return [
            TierCost(tier.name, counts[tier.name] * self._row_bytes, tier.promotion_bytes)
            for tier in self._tiers
            if tier.name in counts
        ]

    def sources(self, context: ReqContext) -> Mapping[OffloadKey, str]:
        """Return the tier of each row that was promoted and pinned for a request."""
        waiter = self._waiters.get(context.req_id)
        return {} if waiter is None else waiter.sources

    def failure(self, key: OffloadKey, context: ReqContext) -> tuple[str, MissReason] | None:
        """Say which tier did not bring a row for a request, and why.

        A row that is still on its way when the request stops waiting is too slow.
        """
        waiter = self._waiters.get(context.req_id)
        if waiter is None:
            return None
        if key in waiter.missing and key in self._arrivals and not self.is_waiting(context):
            return self._arrivals[key].job.tier.name, MissReason.TOO_SLOW
        return waiter.reasons.get(key)

    # -- wishing and submitting --------------------------------------------------------------------

    def wish(self, wish: Wish, context: ReqContext) -> bool:
        """Note that a request wants rows.

        `False`: there is no room for them, and the request need not wait.
        """
        absent = [key for key in wish.needed if self._pool.lookup(key, context) is False]
        room = self._room()
        self.release(context)
        waiter = self._waiters[context.req_id] = _Waiter(context, wish, self._clock() + wish.patience)
        if absent and (room == 0 or (wish.whole and room < len(absent))):
            waiter.is_submitted = True
            self._note_missed(waiter, absent, MissReason.NO_ROOM)
            return False
        self._wishes.append(waiter)
        return True

    def submit(self) -> None:
        """Take slots for the wished rows, as far as there is room, and have the tiers fill them."""
        wishes, self._wishes = self._wishes, []
        for waiter in wishes:
            if self._waiters.get(waiter.context.req_id) is waiter:
                self._submit(waiter)

    def _room(self) -> int:
        return max(0, self.max_rows - self._lent - len(self._pinned))

    def _submit(self, waiter: _Waiter) -> None:
        waiter.is_submitted = True
        needed = waiter.wish.needed
        self._pool.touch(needed, waiter.context)  # so that they stay until the others have come
        absent = [key for key in needed if self._pool.lookup(key, waiter.context) is False]
        holders = {
            key: tier for key, tier in zip(absent, self.find(absent), strict=True) if tier is not None
        }
        wanted = _leading(absent, holders) if not waiter.wish.whole else list(holders)
        wanted = wanted[: self._room()]
        taken = self._take_slots(waiter, wanted, set(absent))
        if waiter.wish.whole and len(taken) < len(absent):
            self._put_back(taken)
            self._note_missed(waiter, absent, MissReason.NO_ROOM)
            return
        self._note_missed(waiter, [key for key in absent if key not in taken], MissReason.NO_ROOM)
        self._start_jobs(waiter, taken, holders)
        joined = [key for key in needed if key in self._arrivals]
        waiter.missing.update(dict.fromkeys(joined))
        for key in joined:
            self._arrivals[key].waiters.add(waiter)

    def _take_slots(
        self, waiter: _Waiter, wanted: list[OffloadKey], absent: set[OffloadKey]
    ) -> dict[OffloadKey, int]:
        """Take slots for rows; evict other rows, but none that the request needs."""
        chosen = set(wanted)
        offer = [key for key in waiter.wish.needed if key in chosen or key not in absent]
        output = self._reserve(offer, waiter.context) if wanted else None
        if output is None or not isinstance(output.store_spec, CPULoadStoreSpec):
            return {}
        return dict(zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True))

    def _start_jobs(
        self, waiter: _Waiter, taken: dict[OffloadKey, int], holders: dict[OffloadKey, Tier]
    ) -> None:
        now = self._clock()
        deadline = now + waiter.wish.io_seconds
        for tier in self._tiers:
            slots = {key: slot for key, slot in taken.items() if holders[key] is tier}
            if not slots:
                continue
            self._newest += 1
            job = _PromotionJob(
                self._newest,
                Direction.PROMOTE,
                list(slots),
                np.fromiter(slots.values(), dtype=np.int64, count=len(slots)),
                deadline,
                tier=tier,
                started=now,
                ahead_bytes=tier.promotion_bytes,
            )
            self._jobs.add(job)
            self._lent += len(job)
            self._arrivals.update({key: _Arrival(job, at, set()) for at, key in enumerate(job.keys)})
            tier.promote(job)

    def _put_back(self, taken: dict[OffloadKey, int]) -> None:
        self._free(list(taken), CPULoadStoreSpec(list(taken.values())))

    def _free(self, keys: list[OffloadKey], spec: CPULoadStoreSpec) -> None:
        """Give back slots that no call writes, and make their chunks absent."""
        self._pool.abandon_store(keys, spec)
        self._pool.complete_store(keys, success=False, spec=spec)

    # -- results -----------------------------------------------------------------------------------

    def take_result(self, result: TierResult) -> None:
        """Take in a result for some rows of a job."""
        job, keys = result.job, result.keys
        if not isinstance(job, _PromotionJob):
            raise IntegrityError(f"promotions: expected a result of their own job, got one of {job.job_id}")
        spec = CPULoadStoreSpec(job.slots_at(result.positions))
        job.seconds += result.seconds
        if result.returned:
            self._pool.complete_store(keys, success=False, spec=spec)
        elif result.outcome is None:
            job.num_arrived += len(keys)
            self._pool.complete_store(keys, spec=spec)
            self._deliver(job, keys)
        else:
            job.is_late |= result.outcome is MissReason.TOO_SLOW
            if result.in_use:
                self._pool.abandon_store(keys, spec)
            else:
                self._free(keys, spec)
            self._miss(job, keys, result.outcome)
        if not result.in_use:
            self._forget(job, result.positions)

    def _deliver(self, job: _PromotionJob, keys: list[OffloadKey]) -> None:
        """Pin arrived rows for each request that waits for them."""
        for waiter, theirs in self._take_arrivals(job, keys).items():
            ready = [key for key in theirs if self._pool.lookup(key, waiter.context)]  # not after a reset
            waiter.stop_waiting_for(theirs)
            if ready:
                waiter.pins.append((ready, self._pool.prepare_load(ready, waiter.context)))
                waiter.sources.update(dict.fromkeys(ready, job.tier.name))
                self._pinned.update(ready)

    def _miss(self, job: _PromotionJob, keys: list[OffloadKey], reason: MissReason) -> None:
        """Note that rows will not come. Requests stop waiting for them, and for useless rows behind them."""
        for waiter, theirs in self._take_arrivals(job, keys).items():
            self._note_missed(waiter, theirs, reason, job.tier.name)
            self._end_wait(waiter, waiter.useless())

    def drop(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Stop waiting for rows on their way whose bytes are wrong, and return their keys.

        Their slots become free later.
        """
        dropped = [key for key in keys if key in self._arrivals]
        for key in dropped:
            if key in self._arrivals:  # else it was withdrawn with an earlier row
                self._miss(self._arrivals[key].job, [key], MissReason.FAILED)
        return dropped

    def _take_arrivals(self, job: _PromotionJob, keys: list[OffloadKey]) -> dict[_Waiter, list[OffloadKey]]:
        """Remove rows from the arrivals, and return for each waiting request its rows."""
        by_waiter: dict[_Waiter, list[OffloadKey]] = {}
        for key in keys:
            arrival = self._arrivals.get(key)
            if arrival is not None and arrival.job is job:
                del self._arrivals[key]
                for waiter in arrival.waiters:
                    by_waiter.setdefault(waiter, []).append(key)
        return by_waiter

    @staticmethod
    def _note_missed(
        waiter: _Waiter, keys: Iterable[OffloadKey], reason: MissReason, tier: str = "cpu"
    ) -> None:
        missed = dict.fromkeys(keys, (tier, reason))
        waiter.reasons = missed | waiter.reasons
        waiter.stop_waiting_for(missed)

    def _forget(self, job: _PromotionJob, positions: list[int]) -> None:
        """Remove rows from a job once their memory is ours again; measure the time of a job that is over."""
        job.lent.difference_update(positions)
        self._lent -= len(positions)
        if job.lent:
            return
        self._jobs.discard(job)
        waited, arrived_bytes = self._clock() - job.started, job.num_arrived * self._row_bytes
        if job.is_late:
            num_bytes = len(job) * self._row_bytes + job.ahead_bytes
            self._times.append(PromotionTime(job.tier.name, num_bytes, waited, lost=True))
        elif arrived_bytes:
            # The calls' sum counts parallel threads; the whole wait includes queue and steps. Use the less.
            share = arrived_bytes / (arrived_bytes + job.ahead_bytes)
            seconds = min(job.seconds, waited * share) or waited * share
            self._times.append(PromotionTime(job.tier.name, arrived_bytes, seconds, lost=False))

    def take_times(self) -> list[PromotionTime]:
        """Take the times of the promotions that ended since the last call."""
        times, self._times = self._times, []
        return times

    # -- ending ------------------------------------------------------------------------------------

    def expire(self) -> None:
        """End the waits whose deadline has passed."""
        now = self._clock()
        late_ones = [w for w in self._waiters.values() if not w.is_expired and now >= w.deadline]
        for waiter in late_ones:
            waiter.is_expired, late = True, list(waiter.missing)
            for job in {self._arrivals[key].job for key in late}:
                job.is_late |= not job.num_arrived
            for key in late:
                self._note_missed(waiter, [key], MissReason.TOO_SLOW, self._arrivals[key].job.tier.name)
            self._end_wait(waiter, late)
            self._unpin(waiter)

    def release(self, context: ReqContext) -> None:
        """Forget a request: its load has begun, or it has ended.

        The rows that have come for it become ordinary ready rows.
        """
        waiter = self._waiters.pop(context.req_id, None)
        if waiter is not None:
            self._end_wait(waiter, list(waiter.missing))
            self._unpin(waiter)

    def reset(self) -> None:
        """Forget all requests and all rows on their way. Those rows arrive in slots that hold no chunk."""
        for waiter in list(self._waiters.values()):
            self.release(waiter.context)
        self._wishes.clear()
        self._arrivals.clear()

    def _unpin(self, waiter: _Waiter) -> None:
        pins, waiter.pins = waiter.pins, []
        for keys, spec in pins:
            self._pool.complete_load(keys, spec)
            self._pinned -= Counter(keys)

    def _end_wait(self, waiter: _Waiter, keys: list[OffloadKey]) -> None:
        """End a request's wait for rows; withdraw the rows that no request waits for."""
        waiter.stop_waiting_for(keys)
        unwanted: dict[_PromotionJob, list[int]] = {}
        for key in keys:
            arrival = self._arrivals.get(key)
            if arrival is not None:
                arrival.waiters.discard(waiter)
                if not arrival.waiters:
                    unwanted.setdefault(arrival.job, []).append(arrival.position)
        for job, theirs in unwanted.items():
            withdrawn = job.tier.withdraw(job, theirs)
            if withdrawn:
                gone = job.keys_at(withdrawn)
                self._take_arrivals(job, gone)
                self._free(gone, CPULoadStoreSpec(job.slots_at(withdrawn)))
                self._forget(job, withdrawn)

    def check(self) -> None:
        """Raise `IntegrityError` if the records do not agree."""
        pinned = Counter(key for waiter in self._waiters.values() for keys, _ in waiter.pins for key in keys)
        lent = sum(len(job.lent) for job in self._jobs)
        arrivals = self._arrivals.items()
        for holds, what in (
            (pinned == self._pinned, "every pin belongs to a request"),
            (lent == self._lent >= len(self._arrivals), "what is lent is counted"),
            (
                all(key in self._arrivals for w in self._waiters.values() for key in w.missing),
                "awaited rows come",
            ),
            (
                all(a.position in a.job.lent and a.job.keys[a.position] == key for key, a in arrivals),
                "rows come into their slots",
            ),
            (self._lent + len(self._pinned) <= self.max_rows, "promotions keep to their share"),
        ):
            if not holds:
                raise IntegrityError(f"promotions: expected that {what}")


def _leading(keys: list[OffloadKey], holders: Mapping[OffloadKey, Tier]) -> list[OffloadKey]:
    """Return the leading keys that some tier holds."""
    for count, key in enumerate(keys):
        if key not in holders:
            return keys[:count]
    return keys
