"""`TierWaits`: the requests that wait for tiers below the pool. A request has one wait, phase and deadline.

    IDLE --> LOOKUP --> IDLE --> PROMOTION --> OVER          TURN may come before LOOKUP and PROMOTION

Some tiers do not know what they hold, so such a tier first looks up a prefix on its server (LOOKUP, once in
a wait). Then rows that tiers have are promoted into the pool (PROMOTION, once in a wait). A chunk without
an answer, or a row that has not come, by the deadline counts as absent. While too many other requests wait,
a request waits for its turn (TURN). A wait ends with its request, or when the request is preempted; the
request then begins again.

Beginning a lookup or a promotion only records it; `submit` starts the I/O, once in a step. An engine asks
about all its waiting requests in every step, so `must_wait` answers in O(1), and the requests and chunks
that begin to wait in a step, and that wait at a time, are bounded. The others are told to ask again, and
come first in the order in which the engine asks. Scheduler thread only; nothing blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import NamedTuple

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload.base import MissReason, ReqContext
from kvtier.offload.promotions import PromotionRequest, Promotions, TierCost, WantedRows
from kvtier.tiers.base import Tier

_NEW_CHUNKS = 2048  # chunks of the requests that are looked up in tiers in one step: some milliseconds
_MOST_CHUNKS = 4096  # chunks of all requests that wait for tiers: all of them may time out in one step
_MOST_WAITING = 256  # requests that wait for tiers; an engine does not admit more in a few steps


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


class LookupTime(NamedTuple):
    """The time that a tier took for a lookup. If `lost`, it had not answered after `seconds`."""

    tier: str
    seconds: float
    lost: bool


class WaitPhase(Enum):
    """What a request waits for."""

    IDLE = auto()
    """For nothing: the next ask may begin a lookup or a promotion."""
    TURN = auto()
    """For fewer requests to wait. A tier may help this one."""
    LOOKUP = auto()
    """For tiers to find out which chunks they have."""
    PROMOTION = auto()
    """For rows. Those that have come are pinned for its load."""
    OVER = auto()
    """For nothing, until the request is preempted."""


@dataclass(slots=True, eq=False)
class TierWait:
    """The wait of one request, from its first lookup in tiers until it ends or is preempted."""

    context: ReqContext
    phase: WaitPhase = WaitPhase.IDLE
    deadline: float = inf
    """When the current phase ends at the latest. A turn after a lookup ends with the lookup's deadline."""
    num_chunks: int = 0
    """About how many chunks the request waits for."""
    is_submitted: bool = False
    """Whether the I/O of the phase has been started."""
    began: float = 0.0
    """When the phase was submitted."""
    is_looked_up: bool = False
    """Whether tiers have been asked for this request."""
    lookups: list[RemoteLookup] = field(default_factory=list)
    """The lookups without an answer, during LOOKUP."""
    rows: WantedRows | None = None
    """The rows of its promotion, until its load begins; after the deadline, why they did not come."""

    def is_pending(self) -> bool:
        """Return whether the request still waits for tiers, before its deadline."""
        if self.phase is WaitPhase.PROMOTION:
            return not self.is_submitted or (self.rows is not None and bool(self.rows.missing))
        return self.phase is WaitPhase.LOOKUP


class TierWaits:
    """Owns the waits of all requests. `promotions` moves the rows that they wait for."""

    def __init__(
        self, promotions: Promotions, tiers: Sequence[Tier], row_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._promotions, self._tiers, self._row_bytes, self._clock = promotions, tiers, row_bytes, clock
        self._waits: dict[str, TierWait] = {}
        self._active: dict[str, TierWait] = {}
        """Those in LOOKUP or PROMOTION: the work of a step does not depend on how many others there are."""
        self._unsubmitted: list[TierWait] = []
        self._lookup_times: list[LookupTime] = []
        self._admit()

    # -- asking ------------------------------------------------------------------------------------

    def must_wait(self, req_id: str) -> bool:
        """Return whether a request waits for tiers or for its turn. Takes constant time.

        Every request is looked up within a few steps. Only a request that a tier may help then waits until
        fewer others wait.
        """
        wait = self._waits.get(req_id)
        if wait is None:
            return self._lookups_left <= 0
        phase = wait.phase
        if phase is WaitPhase.OVER:
            return False
        if phase is WaitPhase.PROMOTION:
            return wait.is_pending() and self._clock() < wait.deadline
        if phase is WaitPhase.LOOKUP:
            if self._clock() < wait.deadline:
                return True
            self._end_lookup(wait)
        elif phase is WaitPhase.TURN and self.is_full():
            return self._keep_turn(wait)
        return self._lookups_left <= 0

    def is_full(self) -> bool:
        """Return whether no further request can begin to wait in this step."""
        return self._requests_left <= 0 or self._chunks_left <= 0

    def may_begin(self, context: ReqContext) -> bool:
        """Return whether a request may begin to wait for a lookup or a promotion."""
        wait = self._waits.get(context.req_id)
        return wait is None or wait.phase in (WaitPhase.IDLE, WaitPhase.TURN)

    def may_look_up(self, context: ReqContext) -> bool:
        """Return whether tiers have not yet been asked for a request."""
        wait = self._waits.get(context.req_id)
        return wait is None or not wait.is_looked_up

    def count_chunks(self, num_chunks: int) -> None:
        """Count the chunks of a request that is looked up in tiers in this step."""
        self._lookups_left -= 1 + num_chunks

    def unknown(self, keys: Sequence[OffloadKey]) -> list[RemoteLookup]:
        """Return, for each tier, the chunks that it may have and that no other tier is known to have.

        This changes nothing.
        """
        keys = self._promotions.absent(keys)
        answers = [(tier, tier.lookup_many(keys)) for tier in self._tiers]
        known = [any(found) for found in zip(*(answer for _, answer in answers), strict=True)]
        lookups = []
        for tier, answer in answers:
            open_keys = [
                key
                for key, found, is_known in zip(keys, answer, known, strict=True)
                if found is None and not is_known
            ]
            if open_keys:
                cost = TierCost(tier.name, len(open_keys) * self._row_bytes, tier.promotion_bytes)
                lookups.append(RemoteLookup(tier, open_keys, cost))
        return lookups

    # -- beginning ---------------------------------------------------------------------------------

    def await_turn(self, context: ReqContext, wait_budget: float) -> bool:
        """Let a request wait for its turn; return `False` if its time for that is over.

        The first call decides how long: for `wait_budget` seconds, but not beyond the deadline of a lookup.
        """
        wait = self._get(context)
        if wait.phase is WaitPhase.IDLE:
            wait.phase = WaitPhase.TURN
            wait.deadline = min(wait.deadline, self._clock() + wait_budget)
        return self._keep_turn(wait)

    def _keep_turn(self, wait: TierWait) -> bool:
        if self._clock() < wait.deadline:
            return True
        wait.phase = WaitPhase.OVER
        return False

    def look_up(
        self, lookups: list[RemoteLookup], num_chunks: int, wait_budget: float, context: ReqContext
    ) -> None:
        """Have tiers asked for a request, which waits for the answers for `wait_budget` seconds at most."""
        wait = self._begin(context, WaitPhase.LOOKUP, num_chunks, wait_budget)
        wait.lookups, wait.is_looked_up = lookups, True

    def promote(self, request: PromotionRequest, context: ReqContext) -> bool:
        """Have rows promoted for a request; return `False` if there is no room, so that it need not wait."""
        rows = WantedRows(request, context)
        if not self._promotions.has_room(rows):
            wait = self._get(context)
            self._end(wait)
            wait.rows = rows  # which say why
            return False
        self._begin(context, WaitPhase.PROMOTION, len(request.needed), request.wait_budget).rows = rows
        return True

    def skip_lookup(self, context: ReqContext) -> None:
        """Record that asking tiers is not worth it for a request."""
        self._get(context).is_looked_up = True

    def skip_promotion(self, context: ReqContext) -> None:
        """Record that no promotion is worth it for a request."""
        self._get(context).phase = WaitPhase.OVER

    def _get(self, context: ReqContext) -> TierWait:
        wait = self._waits.get(context.req_id)
        if wait is None:
            wait = self._waits[context.req_id] = TierWait(context)
        return wait

    def _begin(self, context: ReqContext, phase: WaitPhase, num_chunks: int, wait_budget: float) -> TierWait:
        wait = self._get(context)
        self._drop(wait)
        wait.phase, wait.deadline = phase, self._clock() + wait_budget
        wait.num_chunks, wait.is_submitted = num_chunks, False
        self._active[context.req_id] = wait
        self._unsubmitted.append(wait)
        self._requests_left -= 1
        self._chunks_left -= num_chunks
        return wait

    # -- one step ----------------------------------------------------------------------------------

    def submit(self) -> None:
        """Start the lookups and promotions that began in this step, unless their wait is over."""
        begun, self._unsubmitted = self._unsubmitted, []
        now = self._clock()
        for wait in begun:
            if wait.is_submitted or self._active.get(wait.context.req_id) is not wait:
                continue
            wait.is_submitted, wait.began = True, now
            for tier, keys, _ in wait.lookups:
                tier.ask(keys, wait.deadline)
            if wait.rows is not None:
                self._promotions.start(wait.rows)

    def poll(self) -> None:
        """End the phases that are over, and let the next requests begin to wait."""
        now = self._clock()
        for wait in list(self._active.values()):
            if wait.phase is WaitPhase.LOOKUP:
                if wait.is_submitted:
                    self._poll_lookup(wait, now)
            elif now >= wait.deadline and wait.rows is not None:
                self._promotions.give_up(wait.rows)
                self._leave(wait, WaitPhase.OVER)
        self._admit()

    def _poll_lookup(self, wait: TierWait, now: float) -> None:
        if now >= wait.deadline:
            self._end_lookup(wait)
            return
        left = [lookup for lookup in wait.lookups if not lookup.is_answered()]
        self._record_times([lookup for lookup in wait.lookups if lookup not in left], now - wait.began)
        wait.lookups = left
        if not left:
            self._leave(wait, WaitPhase.IDLE)

    def _end_lookup(self, wait: TierWait) -> None:
        """End a lookup at its deadline."""
        if wait.is_submitted:
            self._record_times(wait.lookups, self._clock() - wait.began, lost=True)
        wait.lookups = []
        self._leave(wait, WaitPhase.IDLE)

    def _record_times(self, lookups: list[RemoteLookup], seconds: float, *, lost: bool = False) -> None:
        self._lookup_times += [LookupTime(lookup.tier.name, seconds, lost) for lookup in lookups]

    def _leave(self, wait: TierWait, phase: WaitPhase) -> None:
        wait.phase = phase
        self._active.pop(wait.context.req_id, None)

    def _admit(self) -> None:
        """Let as many requests begin to wait as one step and all waits together allow."""
        waiting = [wait.num_chunks for wait in self._active.values() if wait.is_pending()]
        self._requests_left, self._chunks_left = _MOST_WAITING - len(waiting), _MOST_CHUNKS - sum(waiting)
        self._lookups_left = _NEW_CHUNKS

    def take_lookup_times(self) -> list[LookupTime]:
        """Take the times of the lookups that ended since the last call."""
        times, self._lookup_times = self._lookup_times, []
        return times

    # -- ending ------------------------------------------------------------------------------------

    def end(self, context: ReqContext) -> None:
        """End the wait of a request whose load has begun. Its rows become ordinary ready rows."""
        wait = self._waits.get(context.req_id)
        if wait is not None:
            self._end(wait)

    def _end(self, wait: TierWait) -> None:
        self._leave(wait, WaitPhase.OVER)
        self._drop(wait)

    def _drop(self, wait: TierWait) -> None:
        """Drop the lookups and rows of a wait."""
        wait.lookups, rows, wait.rows = [], wait.rows, None
        if rows is not None:
            self._promotions.release(rows)

    def forget(self, context: ReqContext) -> None:
        """Forget a request that has ended or was preempted. Tiers still remember the answers of lookups."""
        wait = self._waits.pop(context.req_id, None)
        if wait is not None:
            self._end(wait)

    def reset(self) -> None:
        """End all lookups and promotions of requests, and forget all rows on their way."""
        for wait in list(self._active.values()):
            self._leave(wait, WaitPhase.IDLE if wait.phase is WaitPhase.LOOKUP else WaitPhase.OVER)
            self._drop(wait)
        self._promotions.reset()

    # -- reports -----------------------------------------------------------------------------------

    def is_waiting(self, context: ReqContext) -> bool:
        """Return whether a request waits for a lookup or for rows."""
        wait = self._waits.get(context.req_id)
        return wait is not None and wait.is_pending() and self._clock() < wait.deadline

    def sources(self, context: ReqContext) -> Mapping[OffloadKey, str]:
        """Return the tier of each row that was promoted for a request, until its load."""
        wait = self._waits.get(context.req_id)
        return {} if wait is None or wait.rows is None else wait.rows.sources

    def failure(self, key: OffloadKey, context: ReqContext) -> tuple[str, MissReason] | None:
        """Return which tier did not bring a row for a request, and why.

        A row that is still on its way when the request stops waiting is too slow.
        """
        wait = self._waits.get(context.req_id)
        if wait is None or wait.rows is None:
            return None
        if key in wait.rows.missing and not self.is_waiting(context):
            return self._promotions.tier_of(key), MissReason.TOO_SLOW
        return wait.rows.reasons.get(key)

    def busy_tiers(self) -> list[Tier]:
        """Return the tiers whose lookups a request waits for."""
        asked = {lookup.tier for wait in self._active.values() for lookup in wait.lookups}
        return [tier for tier in self._tiers if tier in asked]

    def check(self) -> None:
        """Raise `IntegrityError` if the records of waits and promotions do not agree."""
        phases = (WaitPhase.LOOKUP, WaitPhase.PROMOTION)
        active = {req_id: wait for req_id, wait in self._waits.items() if wait.phase in phases}
        rows = [wait.rows for wait in self._waits.values() if wait.rows is not None]
        for holds, rule in (
            (active == self._active, "exactly the waits for lookups and rows are active"),
            (
                all(w.is_submitted or w in self._unsubmitted for w in self._active.values()),
                "every active wait is submitted, or is about to be",
            ),
            (
                all(w.phase is WaitPhase.LOOKUP or not w.lookups for w in self._waits.values()),
                "only a wait for a lookup has open lookups",
            ),
        ):
            if not holds:
                raise IntegrityError(f"waits: expected that {rule}")
        self._promotions.check(rows)
