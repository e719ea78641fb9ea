"""`Promotions`: rows on their way from tiers into the pool, and rows that have come for requests.

    start --> on their way --results--> pinned --> ordinary ready rows

How long a request waits for its rows is decided by `offload.waits`. A row is promoted once, however many
requests want it. It stays pinned for each of them until that request releases it, and is then an ordinary
ready row. When no request wants a row any more, it is withdrawn if its I/O has not begun, and else kept
when it arrives. Slots that a late call may still write stay out of use until the call has returned.

The slots that promotions take of the pool are bounded: rows on their way, rows pinned, and slots that calls
have not given back. Scheduler thread only; nothing blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice, takewhile
from typing import NamedTuple

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload.base import (
    NO_REQUEST,
    ChunkLookup,
    PrepareStoreOutput,
    ReadLease,
    ReqContext,
    WriteLease,
)
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.policies import Slots
from kvtier.residency import MissReason
from kvtier.tiers.base import Direction, RowJob, Tier, TierResult
from kvtier.transfer.base import CPULoadStoreSpec

_SHARE = 2
"""Promotions may take one slot in this many; the other slots are for computed chunks."""
_LOOKED_UP_FIRST = 32
"""The number of chunks of a prefix that are looked up at first. It doubles each time that all are found."""


class TierCost(NamedTuple):
    """The bytes of a promotion from one tier, known before it begins."""

    tier: str
    num_bytes: int
    queued_bytes: int
    """The bytes of promotions that the tier has to do first."""


class TierTime(NamedTuple):
    """The time of a promotion or a lookup. If `lost`, it was given up, and would have taken longer."""

    tier: str
    num_bytes: int
    seconds: float
    lost: bool


class RemoteLookup(NamedTuple):
    """Chunks of a prefix, from its head on, that a tier may have; and the cost of promoting all of them."""

    tier: Tier
    keys: list[OffloadKey]
    cost: TierCost

    def is_answered(self) -> bool:
        """Return whether the tier knows of each chunk whether it has it.

        While the first key has no answer, the other keys are not looked at.
        """
        return self.tier.lookup(self.keys[0]) is not None and None not in self.tier.lookup_many(self.keys)


@dataclass(slots=True, eq=False)
class PromotionRequest:
    """The rows that a request wants in the pool, and what has become of them.

    `needed` are all chunks of its load, the most useful first. A tier may take `io_seconds` for its part. If
    `whole`, the request needs all chunks or none.
    """

    context: ReqContext
    needed: list[OffloadKey]
    io_seconds: float
    whole: bool = False
    missing: dict[OffloadKey, None] = field(default_factory=dict)
    """The rows on their way that the request waits for, the most useful first."""
    pins: list[ReadLease] = field(default_factory=list)
    """The rows that have come."""
    sources: dict[OffloadKey, str] = field(default_factory=dict)
    """The tier that each row has come from."""
    reasons: dict[OffloadKey, tuple[str, MissReason]] = field(default_factory=dict)
    """The rows that will not come: the tier, and why."""

    def miss(self, keys: Iterable[OffloadKey], reason: MissReason, tier: str = "cpu") -> None:
        """Record rows that will not come. The first reason of a row counts."""
        self.reasons = dict.fromkeys(keys, (tier, reason)) | self.reasons

    def useless(self) -> list[OffloadKey]:
        """Return the awaited rows that are useless because an earlier row will not come."""
        if self.whole:
            return list(self.missing)
        end = next((at for at, key in enumerate(self.needed) if key in self.reasons), len(self.needed))
        return [key for key in self.needed[end:] if key in self.missing]


@dataclass(slots=True, eq=False, kw_only=True)
class _PromotionJob(RowJob):
    """A job of one tier, the requests that want its rows, and its measurements."""

    tier: Tier
    lease: WriteLease
    started: float
    ahead_bytes: int
    wanted_by: dict[PromotionRequest, None] = field(default_factory=dict)
    """The requests that wait for rows of the job, in the order in which they began to."""
    seconds: float = 0.0
    num_arrived: int = 0
    is_late: bool = False
    """Not all rows came in time, or none: the time of the whole job is not known."""


Reserve = Callable[[list[OffloadKey], ReqContext], PrepareStoreOutput | None]
"""Takes pool slots for the keys that the pool does not hold."""


class Promotions(ChunkLookup):
    """Promotes rows from `tiers` into slots that `reserve` gives.

    A row comes from the first tier that has it. As a `ChunkLookup` it finds chunks that can be loaded from
    the pool or, after a promotion, from a tier. `None` means that the chunk is being stored in the pool, or
    that a tier that could be asked may have it.
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
        self._arriving: dict[OffloadKey, _PromotionJob] = {}
        """The job that brings each row on its way."""
        self._jobs: set[_PromotionJob] = set()
        self._pinned: dict[OffloadKey, int] = {}
        """How many requests have each row pinned."""
        self._newest = 0
        self._times: list[TierTime] = []

    # -- asking ------------------------------------------------------------------------------------

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        found = self._pool.lookup_many(keys, req_context)
        for index in [index for index, is_ready in enumerate(found) if is_ready is None]:
            if keys[index] in self._arriving:
                found[index] = True
        absent = [index for index, is_ready in enumerate(found) if is_ready is False]
        for tier in self._tiers:
            left = [index for index in absent if not found[index]]
            for index, is_held in zip(left, tier.lookup_many([keys[index] for index in left]), strict=True):
                if is_held is not False:
                    found[index] = is_held
        return found

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, wait: bool = True
    ) -> int | None:
        """Count the leading keys that can be loaded. Keys far behind the first gap are not looked up."""
        hits, size = self._pool.lookup_prefix(keys, req_context, wait=False) or 0, _LOOKED_UP_FIRST
        while hits < len(keys):
            found = self.lookup_many(list(islice(keys, hits, hits + size)), req_context)
            for is_there in found:
                if not is_there:
                    return None if is_there is None and wait else hits
                hits += 1
            size *= 2
        return hits

    def is_promoting(self, key: OffloadKey) -> bool:
        """Return whether a row is on its way."""
        return key in self._arriving

    def tier_of(self, key: OffloadKey) -> str:
        """Return the tier that a row on its way comes from."""
        return self._arriving[key].tier.name

    def absent(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that the pool does not have and that are not on their way into it."""
        found = self._pool.lookup_many(keys, NO_REQUEST)
        return [key for key, is_ready in zip(keys, found, strict=True) if is_ready is False]

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
        holders = self.find(self.absent(needed))
        busy = {self._arriving[key].tier for key in needed if key in self._arriving}
        return [
            TierCost(tier.name, holders.count(tier) * self._row_bytes, tier.promotion_bytes)
            for tier in self._tiers
            if tier in holders or tier in busy
        ]

    def unknown(self, keys: Sequence[OffloadKey]) -> list[RemoteLookup]:
        """Return, for each tier, the chunks that it may have and that no other tier is known to have."""
        keys = self.absent(keys)
        answers = [tier.lookup_many(keys) for tier in self._tiers]
        known = [any(found) for found in zip(*answers, strict=True)]
        lookups = []
        for tier, answer in zip(self._tiers, answers, strict=True):
            found = zip(keys, answer, known, strict=True)
            left = [key for key, is_held, is_known in found if is_held is None and not is_known]
            if left:
                cost = TierCost(tier.name, len(left) * self._row_bytes, tier.promotion_bytes)
                lookups.append(RemoteLookup(tier, left, cost))
        return lookups

    def has_room(self, request: PromotionRequest) -> bool:
        """Return whether rows that a request wants can be promoted, at least the leading part of them."""
        absent, room = self.absent(request.needed), self._room()
        if absent and (room == 0 or (request.whole and room < len(absent))):
            request.miss(absent, MissReason.NO_ROOM)
            return False
        return True

    def _room(self) -> int:
        return max(0, self.max_rows - self._num_lent() - len(self._pinned))

    def _num_lent(self) -> int:
        """Count the slots that tiers may still write."""
        return sum(len(job.lent) for job in self._jobs)

    # -- starting ----------------------------------------------------------------------------------

    def start(self, request: PromotionRequest) -> None:
        """Take slots for rows that a request wants, as far as there is room, and have tiers fill them."""
        self._pool.touch(request.needed, request.context)  # so that they stay until the others have come
        absent = self.absent(request.needed)
        holders = {
            key: tier for key, tier in zip(absent, self.find(absent), strict=True) if tier is not None
        }
        wanted = list(holders) if request.whole else list(takewhile(holders.__contains__, absent))
        wanted = wanted[: self._room()]
        taken, slots = self._take_slots(request, wanted, set(absent))
        if request.whole and len(taken) < len(absent):
            self._pool.abandon_store(taken, slots)
            WriteLease(self._pool, taken, CPULoadStoreSpec(slots)).abandon()
            request.miss(absent, MissReason.NO_ROOM)
            return
        if len(taken) < len(absent):
            request.miss(set(absent).difference(taken), MissReason.NO_ROOM)
        self._start_jobs(request, taken, slots, holders)
        self._join(request, [key for key in request.needed if key in self._arriving])

    def _take_slots(
        self, request: PromotionRequest, wanted: list[OffloadKey], absent: set[OffloadKey]
    ) -> tuple[list[OffloadKey], Slots]:
        """Take slots for rows, as many as there are; evict other rows, but none that the request needs."""
        chosen = set(wanted)
        offer = [key for key in request.needed if key in chosen or key not in absent]
        output = self._reserve(offer, request.context) if wanted else None
        if output is None or not isinstance(output.store_spec, CPULoadStoreSpec):
            return [], np.empty(0, dtype=np.int64)
        return output.keys_to_store, output.store_spec.block_ids

    def _start_jobs(
        self,
        request: PromotionRequest,
        keys: list[OffloadKey],
        slots: Slots,
        holders: Mapping[OffloadKey, Tier],
    ) -> None:
        now = self._clock()
        for tier in self._tiers:
            positions = [at for at, key in enumerate(keys) if holders[key] is tier]
            if not positions:
                continue
            self._newest += 1
            theirs, spec = [keys[at] for at in positions], CPULoadStoreSpec(slots[positions])
            job = _PromotionJob(
                self._newest,
                Direction.PROMOTE,
                theirs,
                spec.block_ids,
                now + request.io_seconds,
                tier=tier,
                lease=WriteLease(self._pool, theirs, spec),
                started=now,
                ahead_bytes=tier.promotion_bytes,
            )
            job.lent = job.lease.left
            self._jobs.add(job)
            self._arriving.update(dict.fromkeys(job.keys, job))
            tier.promote(job)

    def _join(self, request: PromotionRequest, keys: list[OffloadKey]) -> None:
        """Have a request wait for rows on their way."""
        request.missing = dict.fromkeys(keys)
        for job in {self._arriving[key] for key in keys}:
            job.wanted_by[request] = None

    def _free(self, job: _PromotionJob, positions: list[int]) -> None:
        """Give back slots that no call writes, and make their chunks absent."""
        self._pool.abandon_store(job.keys_at(positions), job.slots_at(positions))
        job.lease.abandon(positions)

    # -- results -----------------------------------------------------------------------------------

    def take_result(self, result: TierResult) -> None:
        """Process a result for some rows of a job."""
        job, keys, positions = result.job, result.keys, result.positions
        if not isinstance(job, _PromotionJob):
            raise IntegrityError(f"promotions: expected a result of their own job, got one of {job.job_id}")
        job.seconds += result.seconds
        if result.returned:
            job.lease.abandon(positions)
        elif result.outcome is None:
            job.num_arrived += len(keys)
            job.lease.commit(positions)
            self._deliver(job, keys)
        else:
            job.is_late |= result.outcome is MissReason.TOO_SLOW
            if result.in_use:
                self._pool.abandon_store(keys, job.slots_at(positions))
            else:
                self._free(job, positions)
            self._miss(job, keys, result.outcome)
        self._end_if_over(job)

    def _deliver(self, job: _PromotionJob, keys: list[OffloadKey]) -> None:
        """Pin arrived rows for each request that waits for them."""
        for request, theirs in self._take_arrived(job, keys):
            found = self._pool.lookup_many(theirs, request.context)
            ready = list(compress(theirs, found))  # none after a reset
            if ready:
                spec = self._pool.prepare_load(ready, request.context)
                request.pins.append(ReadLease(self._pool, ready, spec))
                request.sources.update(dict.fromkeys(ready, job.tier.name))
                for key in ready:
                    self._pinned[key] = self._pinned[key] + 1 if key in self._pinned else 1

    def _miss(self, job: _PromotionJob, keys: list[OffloadKey], reason: MissReason) -> None:
        """Record that rows will not come. Requests stop waiting for them, and for useless rows behind."""
        for request, theirs in self._take_arrived(job, keys):
            request.miss(theirs, reason, job.tier.name)
            self._stop_waiting(request, request.useless())

    def drop(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Stop waiting for rows on their way whose bytes are wrong, and return their keys.

        Their slots become free later.
        """
        dropped = [key for key in keys if key in self._arriving]
        for key in dropped:
            if key in self._arriving:  # else it was withdrawn with an earlier row
                self._miss(self._arriving[key], [key], MissReason.FAILED)
        return dropped

    def _take_arrived(
        self, job: _PromotionJob, keys: Iterable[OffloadKey]
    ) -> list[tuple[PromotionRequest, list[OffloadKey]]]:
        """Remove rows from those on their way; return each request that waited for some, and which."""
        ended = {key for key in keys if key in self._arriving and self._arriving[key] is job}
        for key in ended:
            del self._arriving[key]
        waited = [(each, list(each.missing.keys() & ended)) for each in job.wanted_by if each.missing]
        for request, theirs in waited:
            for key in theirs:
                del request.missing[key]
        return [(request, theirs) for request, theirs in waited if theirs]

    def _end_if_over(self, job: _PromotionJob) -> None:
        """Forget a job whose slots are all given back, and measure its time."""
        if job.lent or job not in self._jobs:
            return
        self._jobs.discard(job)
        waited, arrived_bytes = self._clock() - job.started, job.num_arrived * self._row_bytes
        if job.is_late:
            num_bytes = len(job) * self._row_bytes + job.ahead_bytes
            self._times.append(TierTime(job.tier.name, num_bytes, waited, lost=True))
        elif arrived_bytes:
            # The calls' sum counts parallel threads; the whole wait includes queue and steps. Use the less.
            share = arrived_bytes / (arrived_bytes + job.ahead_bytes)
            seconds = min(job.seconds, waited * share) or waited * share
            self._times.append(TierTime(job.tier.name, arrived_bytes, seconds, lost=False))

    def take_times(self) -> list[TierTime]:
        """Take the times of the promotions that ended since the last call."""
        times, self._times = self._times, []
        return times

    # -- ending ------------------------------------------------------------------------------------

    def give_up(self, request: PromotionRequest) -> None:
        """Stop waiting for rows at a request's deadline. Rows that have come are no longer pinned."""
        for job in {self._arriving[key] for key in request.missing}:
            job.is_late |= not job.num_arrived
            late = [key for key in request.missing if self._arriving[key] is job]
            request.miss(late, MissReason.TOO_SLOW, job.tier.name)
        self.release(request)

    def release(self, request: PromotionRequest) -> None:
        """Let go of a request's rows: its load has begun, or it has ended.

        The rows that have come for it become ordinary ready rows.
        """
        self._stop_waiting(request, list(request.missing))
        pins, request.pins = request.pins, []
        for lease in pins:
            lease.release()
            for key in lease.keys:
                if self._pinned[key] > 1:
                    self._pinned[key] -= 1
                else:
                    del self._pinned[key]

    def reset(self) -> None:
        """Forget all rows on their way, which no request wants. They arrive in slots that hold no chunk."""
        self._arriving.clear()

    def _stop_waiting(self, request: PromotionRequest, keys: list[OffloadKey]) -> None:
        """End a request's wait for rows; withdraw the rows that no request waits for."""
        ended: dict[_PromotionJob, list[OffloadKey]] = {}
        for key in keys:
            del request.missing[key]
            ended.setdefault(self._arriving[key], []).append(key)
        for job, theirs in ended.items():
            if not request.missing:
                del job.wanted_by[request]
            unwanted = [key for key in theirs if not any(key in each.missing for each in job.wanted_by)]
            if unwanted and (withdrawn := job.tier.withdraw(job, job.positions_of(unwanted))):
                self._take_arrived(job, job.keys_at(withdrawn))
                self._free(job, withdrawn)
                self._end_if_over(job)

    def check(self, requests: Sequence[PromotionRequest]) -> None:
        """Raise `IntegrityError` if the records do not agree with those of all requests."""
        pinned = Counter(key for request in requests for lease in request.pins for key in lease.keys)
        awaited = {key for request in requests for key in request.missing}
        coming = {key for job in self._jobs for key in job.keys_at(sorted(job.lent))}
        for holds, rule in (
            (pinned == self._pinned, "every pin belongs to a request"),
            (awaited <= self._arriving.keys(), "awaited rows come"),
            (
                all(each in self._arriving[key].wanted_by for each in requests for key in each.missing),
                "a job knows the requests that wait for its rows",
            ),
            (coming.issuperset(self._arriving), "rows come into their slots"),
            (self._num_lent() + len(self._pinned) <= self.max_rows, "promotions keep to their share"),
        ):
            if not holds:
                raise IntegrityError(f"promotions: expected that {rule}")
