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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload.base import ReqContext
from kvtier.offload.promotions import PromotionRequest, Promotions, RemoteLookup, TierTime
from kvtier.residency import MissReason
from kvtier.tiers.base import Tier

_NEW_CHUNKS = 2048  # chunks of the requests that are looked up in tiers in one step: some milliseconds
_MOST_CHUNKS = 4096  # chunks of all requests that wait for tiers: all of them may time out in one step
_MOST_WAITING = 256  # requests that wait for tiers; an engine does not admit more in a few steps


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
    """The wait of one request, from its first lookup in tiers until it ends or is preempted.

    Others may read it; only `TierWaits` changes it.
    """

    req_id: str
    phase: WaitPhase = WaitPhase.IDLE
    deadline: float = inf
    """When the current phase ends at the latest. A turn after a lookup ends with the lookup's deadline."""
    num_chunks: int = 0
    """About how many chunks the request waits for."""
    began: float | None = None
    """When the I/O of the phase was submitted; `None` if it was not yet."""
    is_looked_up: bool = False
    """Whether tiers have been asked for this request, or are not worth asking."""
    lookups: list[RemoteLookup] = field(default_factory=list)
    """The lookups without an answer, during LOOKUP."""
    promotion: PromotionRequest | None = None
    """The rows that it wanted, until its load begins. After the deadline they tell why rows did not come."""

    def is_pending(self) -> bool:
        """Return whether the request still waits for answers or rows, before its deadline."""
        if self.phase is WaitPhase.PROMOTION and self.promotion is not None:
            return self.began is None or bool(self.promotion.missing)
        return self.phase is WaitPhase.LOOKUP


class TierWaits:
    """Owns the waits of all requests. `promotions` moves the rows that they wait for."""

    def __init__(self, promotions: Promotions, clock: Callable[[], float]) -> None:
        self._promotions, self._clock = promotions, clock
        self._waits: dict[str, TierWait] = {}
        self._active: dict[str, TierWait] = {}
        """Those in LOOKUP or PROMOTION: the work of a step does not depend on how many others there are."""
        self._lookup_times: list[TierTime] = []
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

    def open(self, context: ReqContext, num_chunks: int) -> TierWait | None:
        """Return the wait of a request whose `num_chunks` chunks are looked up in tiers now.

        `None` means that it may begin neither a lookup nor a promotion.
        """
        wait = self._waits.get(context.req_id)
        if wait is None:
            wait = self._waits[context.req_id] = TierWait(context.req_id)
        elif wait.phase not in (WaitPhase.IDLE, WaitPhase.TURN):
            return None
        self._lookups_left -= 1 + num_chunks
        return wait

    # -- beginning ---------------------------------------------------------------------------------

    def await_turn(self, wait: TierWait, wait_budget: float) -> bool:
        """Let a request wait for its turn; return `False` if its time for that is over.

        The first call decides how long: for `wait_budget` seconds, but not beyond the deadline of a lookup.
        """
        wait.phase, wait.deadline = WaitPhase.TURN, min(wait.deadline, self._clock() + wait_budget)
        return self._keep_turn(wait)

    def _keep_turn(self, wait: TierWait) -> bool:
        if self._clock() < wait.deadline:
            return True
        wait.phase = WaitPhase.OVER
        return False

    def look_up(
        self, wait: TierWait, lookups: list[RemoteLookup], num_chunks: int, wait_budget: float
    ) -> None:
        """Have tiers asked for a request, which waits for the answers for `wait_budget` seconds at most."""
        self._begin(wait, WaitPhase.LOOKUP, num_chunks, wait_budget)
        wait.lookups, wait.is_looked_up = lookups, True

    def skip_lookup(self, wait: TierWait) -> None:
        """Record that asking tiers is not worth it for a request."""
        wait.is_looked_up = True

    def promote(self, wait: TierWait, promotion: PromotionRequest, wait_budget: float) -> bool:
        """Have rows promoted for a request, which waits for them for `wait_budget` seconds at most.

        Return `False` if there is no room for them, so that the request need not wait.
        """
        if not self._promotions.has_room(promotion):
            self.skip_promotion(wait)
            wait.promotion = promotion
            return False
        self._begin(wait, WaitPhase.PROMOTION, len(promotion.needed), wait_budget)
        wait.promotion = promotion
        return True

    def skip_promotion(self, wait: TierWait) -> None:
        """End the wait of a request for which nothing can be promoted, or is not worth it."""
        self._end(wait, WaitPhase.OVER)

    def _begin(self, wait: TierWait, phase: WaitPhase, num_chunks: int, wait_budget: float) -> None:
        self._end(wait, phase)
        wait.deadline, wait.began, wait.num_chunks = self._clock() + wait_budget, None, num_chunks
        self._active[wait.req_id] = wait
        self._requests_left -= 1
        self._chunks_left -= num_chunks

    # -- one step ----------------------------------------------------------------------------------

    def submit(self) -> None:
        """Start the lookups and promotions that began in this step."""
        now = self._clock()
        for wait in list(self._active.values()):
            if wait.began is None:
                wait.began = now
                for tier, keys, _ in wait.lookups:
                    tier.ask(keys, wait.deadline)
                if wait.promotion is not None:
                    self._promotions.start(wait.promotion)

    def poll(self) -> None:
        """End the phases that are over, and let the next requests begin to wait."""
        now = self._clock()
        for wait in list(self._active.values()):
            if now >= wait.deadline:
                self._expire(wait)
            elif wait.phase is WaitPhase.LOOKUP and wait.began is not None:
                left = [lookup for lookup in wait.lookups if not lookup.is_answered()]
                self._record_times(
                    [lookup for lookup in wait.lookups if lookup not in left], now - wait.began
                )
                wait.lookups = left
                if not left:
                    self._leave(wait, WaitPhase.IDLE)
        self._admit()

    def _expire(self, wait: TierWait) -> None:
        if wait.phase is WaitPhase.LOOKUP:
            self._end_lookup(wait)
        elif wait.promotion is not None:
            self._promotions.give_up(wait.promotion)
            self._leave(wait, WaitPhase.OVER)

    def _end_lookup(self, wait: TierWait) -> None:
        """End a lookup at its deadline."""
        if wait.began is not None:
            self._record_times(wait.lookups, self._clock() - wait.began, lost=True)
        self._end(wait, WaitPhase.IDLE)

    def _record_times(self, lookups: list[RemoteLookup], seconds: float, *, lost: bool = False) -> None:
        self._lookup_times += [TierTime(lookup.tier.name, 1, seconds, lost) for lookup in lookups]

    def _leave(self, wait: TierWait, phase: WaitPhase) -> None:
        wait.phase = phase
        self._active.pop(wait.req_id, None)

    def _admit(self) -> None:
        """Let as many requests begin to wait as one step and all waits together allow."""
        waiting = [wait.num_chunks for wait in self._active.values() if wait.is_pending()]
        self._requests_left, self._chunks_left = _MOST_WAITING - len(waiting), _MOST_CHUNKS - sum(waiting)
        self._lookups_left = _NEW_CHUNKS

    def take_lookup_times(self) -> list[TierTime]:
        """Take the times of the lookups that ended since the last call. A lookup counts as one byte."""
        times, self._lookup_times = self._lookup_times, []
        return times

    # -- ending ------------------------------------------------------------------------------------

    def end(self, context: ReqContext) -> None:
        """End the wait of a request whose load has begun. Its rows become ordinary ready rows."""
        wait = self._waits.get(context.req_id)
        if wait is not None:
            self._end(wait, WaitPhase.OVER)

    def _end(self, wait: TierWait, phase: WaitPhase) -> None:
        """Leave a phase, and drop its lookups and rows."""
        self._leave(wait, phase)
        wait.lookups, promotion, wait.promotion = [], wait.promotion, None
        if promotion is not None:
            self._promotions.release(promotion)

    def forget(self, context: ReqContext) -> None:
        """Forget a request that has ended or was preempted. Tiers still remember the answers of lookups."""
        wait = self._waits.pop(context.req_id, None)
        if wait is not None:
            self._end(wait, WaitPhase.OVER)

    def reset(self) -> None:
        """End all lookups and promotions of requests, and forget all rows on their way."""
        for wait in list(self._active.values()):
            self._end(wait, WaitPhase.IDLE if wait.phase is WaitPhase.LOOKUP else WaitPhase.OVER)
        self._promotions.reset()

    # -- reports -----------------------------------------------------------------------------------

    def is_waiting(self, context: ReqContext) -> bool:
        """Return whether a request waits for answers or rows."""
        wait = self._waits.get(context.req_id)
        return wait is not None and wait.is_pending() and self._clock() < wait.deadline

    def sources(self, context: ReqContext) -> Mapping[OffloadKey, str]:
        """Return the tier of each row that was promoted for a request, until its load."""
        wait = self._waits.get(context.req_id)
        return {} if wait is None or wait.promotion is None else wait.promotion.sources

    def failure(self, key: OffloadKey, context: ReqContext) -> tuple[str, MissReason] | None:
        """Return which tier did not bring a row for a request, and why.

        A row that is still on its way when the request stops waiting is too slow.
        """
        wait = self._waits.get(context.req_id)
        if wait is None or wait.promotion is None:
            return None
        if key in wait.promotion.missing and not self.is_waiting(context):
            return self._promotions.tier_of(key), MissReason.TOO_SLOW
        return wait.promotion.reasons.get(key)

    def busy_tiers(self) -> list[Tier]:
        """Return the tiers whose answers a request waits for."""
        return list({lookup.tier: None for wait in self._active.values() for lookup in wait.lookups})

    def check(self) -> None:
        """Raise `IntegrityError` if the records of waits and promotions do not agree."""
        phases = (WaitPhase.LOOKUP, WaitPhase.PROMOTION)
        waits = self._waits.values()
        for holds, rule in (
            (
                {wait.req_id: wait for wait in waits if wait.phase in phases} == self._active,
                "exactly the waits for lookups and rows are active",
            ),
            (
                all(bool(wait.lookups) == (wait.phase is WaitPhase.LOOKUP) for wait in waits),
                "exactly the waits for lookups have open lookups",
            ),
        ):
            if not holds:
                raise IntegrityError(f"waits: expected that {rule}")
        self._promotions.check([wait.promotion for wait in waits if wait.promotion is not None])
