"""`Promotions`: rows on their way from tiers into the pool, and rows that have come for requests.

    start --> on their way --results--> pinned --> ordinary ready rows

Which requests want rows, and until when, is known to `offload.waits`; here a request is its `WantedRows`. A
row is promoted once, however many requests want it. It stays pinned for each of them until that request
releases it, and is then an ordinary ready row. When no request wants a row any more, it is withdrawn if its
I/O has not begun, and else kept when it arrives. Slots that a late call may still write stay out of use
until the call has returned.

The slots that promotions take of the pool are bounded: rows on their way, rows pinned, and slots that calls
have not given back. Scheduler thread only; nothing blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload.base import NO_REQUEST, PrepareStoreOutput, ReqContext
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.policies import Slots
from kvtier.residency import MissReason
from kvtier.tiers.base import Direction, RowJob, Tier, TierResult
from kvtier.transfer.base import CPULoadStoreSpec

_SHARE = 2
"""Promotions may take one slot in this many; the other slots are for computed chunks."""


class TierCost(NamedTuple):
    """The bytes of a promotion from one tier, known before it begins."""

    tier: str
    num_bytes: int
    queued_bytes: int
    """The bytes of promotions that the tier has to do first."""


class PromotionTime(NamedTuple):
    """The time of a promotion. If `lost`, it was given up after `seconds`, and would have taken longer."""

    tier: str
    num_bytes: int
    seconds: float
    lost: bool


class PromotionRequest(NamedTuple):
    """The chunks that a request wants in the pool.

    `needed` are all chunks of its load, the most useful first. The request waits for `wait_budget` seconds
    at most, and a tier may take `io_seconds` for its part. If `whole`, the request needs all chunks or none.
    """

    needed: list[OffloadKey]
    wait_budget: float
    io_seconds: float
    whole: bool = False


@dataclass(slots=True, eq=False)
class WantedRows:
    """The rows of one request's promotion: those on their way, those pinned, and those that do not come."""

    request: PromotionRequest
    context: ReqContext
    missing: dict[OffloadKey, None] = field(default_factory=dict)
    """The rows on their way that the request waits for, the most useful first."""
    pins: list[tuple[list[OffloadKey], CPULoadStoreSpec]] = field(default_factory=list)
    sources: dict[OffloadKey, str] = field(default_factory=dict)
    """The tier that each row has come from."""
    reasons: dict[OffloadKey, tuple[str, MissReason]] = field(default_factory=dict)
    """The rows that will not come: the tier, and why."""

    def miss(self, keys: Iterable[OffloadKey], reason: MissReason, tier: str = "cpu") -> None:
        """Record rows that will not come. The first reason of a row counts."""
        self.reasons = dict.fromkeys(keys, (tier, reason)) | self.reasons

    def useless(self) -> list[OffloadKey]:
        """Return the awaited rows that are useless because an earlier row will not come."""
        needed = self.request.needed
        if self.request.whole:
            return list(self.missing)
        end = next((at for at, key in enumerate(needed) if key in self.reasons), len(needed))
        return [key for key in needed[end:] if key in self.missing]


@dataclass(slots=True, eq=False, kw_only=True)
class _PromotionJob(RowJob):
    """A job of one tier, who wants its rows, and what is measured of it."""

    tier: Tier
    started: float
    ahead_bytes: int
    wanted_by: dict[WantedRows, None] = field(default_factory=dict)
    """The requests that have waited for rows of the job, in the order in which they began to."""
    seconds: float = 0.0
    num_arrived: int = 0
    is_late: bool = False
    """Not all rows came in time, or none: the time of the whole job is not known."""


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
        self._arriving: dict[OffloadKey, _PromotionJob] = {}
        """The job that brings each row on its way."""
        self._awaited: dict[OffloadKey, int] = {}
        """How many requests wait for each row on its way, if any does."""
        self._jobs: set[_PromotionJob] = set()
        self._pinned: dict[OffloadKey, int] = {}
        """How many requests have each row pinned."""
        self._lent = 0  # slots of all jobs
        self._newest = 0
        self._times: list[PromotionTime] = []

    # -- asking ------------------------------------------------------------------------------------

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

    def has_room(self, rows: WantedRows) -> bool:
        """Return whether rows that a request wants can be promoted, at least the leading part of them."""
        absent, room = self.absent(rows.request.needed), self._room()
        if absent and (room == 0 or (rows.request.whole and room < len(absent))):
            rows.miss(absent, MissReason.NO_ROOM)
            return False
        return True

    def _room(self) -> int:
        return max(0, self.max_rows - self._lent - len(self._pinned))

    # -- starting ----------------------------------------------------------------------------------

    def start(self, rows: WantedRows) -> None:
        """Take slots for rows that a request wants, as far as there is room, and have tiers fill them."""
        needed, whole = rows.request.needed, rows.request.whole
        self._pool.touch(needed, rows.context)  # so that they stay until the others have come
        absent = self.absent(needed)
        holders = {
            key: tier for key, tier in zip(absent, self.find(absent), strict=True) if tier is not None
        }
        wanted = _leading(absent, holders) if not whole else list(holders)
        wanted = wanted[: self._room()]
        taken, slots = self._take_slots(rows, wanted, set(absent))
        if whole and len(taken) < len(absent):
            self._free(taken, slots)
            rows.miss(absent, MissReason.NO_ROOM)
            return
        if len(taken) < len(absent):
            rows.miss(set(absent).difference(taken), MissReason.NO_ROOM)
        self._start_jobs(rows.request, taken, slots, holders)
        self._join(rows, [key for key in needed if key in self._arriving])

    def _take_slots(
        self, rows: WantedRows, wanted: list[OffloadKey], absent: set[OffloadKey]
    ) -> tuple[list[OffloadKey], Slots]:
        """Take slots for rows, as many as there are; evict other rows, but none that the request needs."""
        chosen = set(wanted)
        offer = [key for key in rows.request.needed if key in chosen or key not in absent]
        output = self._reserve(offer, rows.context) if wanted else None
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
            job = _PromotionJob(
                self._newest,
                Direction.PROMOTE,
                [keys[at] for at in positions],
                slots[positions],
                now + request.io_seconds,
                tier=tier,
                started=now,
                ahead_bytes=tier.promotion_bytes,
            )
            self._jobs.add(job)
            self._lent += len(job)
            self._arriving.update(dict.fromkeys(job.keys, job))
            tier.promote(job)

    def _join(self, rows: WantedRows, keys: list[OffloadKey]) -> None:
        """Have a request wait for rows on their way."""
        rows.missing = dict.fromkeys(keys)
        for key in keys:
            self._awaited[key] = self._awaited[key] + 1 if key in self._awaited else 1
        for job in {self._arriving[key] for key in keys}:
            job.wanted_by[rows] = None

    def _free(self, keys: list[OffloadKey], slots: Slots) -> None:
        """Give back slots that no call writes, and make their chunks absent."""
        spec = CPULoadStoreSpec(slots)
        self._pool.abandon_store(keys, spec)
        self._pool.complete_store(keys, success=False, spec=spec)

    # -- results -----------------------------------------------------------------------------------

    def take_result(self, result: TierResult) -> None:
        """Process a result for some rows of a job."""
        job, keys = result.job, result.keys
        if not isinstance(job, _PromotionJob):
            raise IntegrityError(f"promotions: expected a result of their own job, got one of {job.job_id}")
        slots = job.slots_at(result.positions)
        job.seconds += result.seconds
        if result.returned:
            self._pool.complete_store(keys, success=False, spec=CPULoadStoreSpec(slots))
        elif result.outcome is None:
            job.num_arrived += len(keys)
            self._pool.complete_store(keys, spec=CPULoadStoreSpec(slots))
            self._deliver(job, keys)
        else:
            job.is_late |= result.outcome is MissReason.TOO_SLOW
            if result.in_use:
                self._pool.abandon_store(keys, CPULoadStoreSpec(slots))
            else:
                self._free(keys, slots)
            self._miss(job, keys, result.outcome)
        if not result.in_use:
            self._forget(job, result.positions)

    def _deliver(self, job: _PromotionJob, keys: list[OffloadKey]) -> None:
        """Pin arrived rows for each request that waits for them."""
        for rows, theirs in self._take_arrived(job, keys):
            found = self._pool.lookup_many(theirs, rows.context)
            ready = list(compress(theirs, found))  # none after a reset
            if ready:
                rows.pins.append((ready, self._pool.prepare_load(ready, rows.context)))
                rows.sources.update(dict.fromkeys(ready, job.tier.name))
                for key in ready:
                    self._pinned[key] = self._pinned[key] + 1 if key in self._pinned else 1

    def _miss(self, job: _PromotionJob, keys: list[OffloadKey], reason: MissReason) -> None:
        """Record that rows will not come. Requests stop waiting for them, and for useless rows behind."""
        for rows, theirs in self._take_arrived(job, keys):
            rows.miss(theirs, reason, job.tier.name)
            self._stop_waiting(rows, rows.useless())

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
    ) -> list[tuple[WantedRows, list[OffloadKey]]]:
        """Remove rows from those on their way; return each request that waited for some, and which."""
        ended = {key for key in keys if key in self._arriving and self._arriving[key] is job}
        for key in ended:
            del self._arriving[key]
            if key in self._awaited:
                del self._awaited[key]
        waited = [(rows, list(rows.missing.keys() & ended)) for rows in job.wanted_by if rows.missing]
        for rows, theirs in waited:
            for key in theirs:
                del rows.missing[key]
        return [(rows, theirs) for rows, theirs in waited if theirs]

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

    def give_up(self, rows: WantedRows) -> None:
        """Stop waiting for rows at a request's deadline. Rows that have come are no longer pinned."""
        for job in {self._arriving[key] for key in rows.missing}:
            job.is_late |= not job.num_arrived
            late = [key for key in rows.missing if self._arriving[key] is job]
            rows.miss(late, MissReason.TOO_SLOW, job.tier.name)
        self.release(rows)

    def release(self, rows: WantedRows) -> None:
        """Let go of a request's rows: its load has begun, or it has ended.

        The rows that have come for it become ordinary ready rows.
        """
        self._stop_waiting(rows, list(rows.missing))
        pins, rows.pins = rows.pins, []
        for keys, spec in pins:
            self._pool.complete_load(keys, spec)
            for key in keys:
                if self._pinned[key] > 1:
                    self._pinned[key] -= 1
                else:
                    del self._pinned[key]

    def reset(self) -> None:
        """Forget all rows on their way, which no request wants. They arrive in slots that hold no chunk."""
        self._arriving.clear()

    def _stop_waiting(self, rows: WantedRows, keys: list[OffloadKey]) -> None:
        """End a request's wait for rows; withdraw the rows that no request waits for."""
        unwanted: dict[_PromotionJob, list[OffloadKey]] = {}
        for key in keys:
            del rows.missing[key]
            if self._awaited[key] > 1:
                self._awaited[key] -= 1
            else:
                del self._awaited[key]
                unwanted.setdefault(self._arriving[key], []).append(key)
        for job, theirs in unwanted.items():
            withdrawn = job.tier.withdraw(job, job.positions_of(theirs))
            if withdrawn:
                keys = job.keys_at(withdrawn)
                self._take_arrived(job, keys)
                self._free(keys, job.slots_at(withdrawn))
                self._forget(job, withdrawn)

    def check(self, wanted: Sequence[WantedRows]) -> None:
        """Raise `IntegrityError` if the records do not agree. `wanted` are the rows of all requests."""
        pinned = Counter(key for rows in wanted for keys, _ in rows.pins for key in keys)
        awaited = Counter(key for rows in wanted for key in rows.missing)
        lent = sum(len(job.lent) for job in self._jobs)
        coming = {key for job in self._jobs for key in job.keys_at(sorted(job.lent))}
        for holds, rule in (
            (pinned == self._pinned, "every pin belongs to a request"),
            (awaited == self._awaited, "requests that wait for a row are counted"),
            (awaited.keys() <= self._arriving.keys(), "awaited rows come"),
            (
                all(rows in self._arriving[key].wanted_by for rows in wanted for key in rows.missing),
                "a job knows the requests that wait for its rows",
            ),
            (lent == self._lent >= len(self._arriving), "slots lent to tiers are counted"),
            (coming.issuperset(self._arriving), "rows come into their slots"),
            (self._lent + len(self._pinned) <= self.max_rows, "promotions keep to their share"),
        ):
            if not holds:
                raise IntegrityError(f"promotions: expected that {rule}")


def _leading(keys: list[OffloadKey], holders: Mapping[OffloadKey, Tier]) -> list[OffloadKey]:
    """Return the leading keys that some tier holds."""
    for count, key in enumerate(keys):
        if key not in holders:
            return keys[:count]
    return keys
