"""Load, wait or compute: the answer to an engine that asks about a request, and how long a request waits.

`match_prefix` finds how far a request's prefix can be loaded: up to the last end that every group can
serve. A full-attention group serves an end if all chunks up to it are ready. A windowed group serves it if
the chunks in the window before it are ready, a state group if the state at this very end is. If the end lies
inside a chunk, all tokens of that chunk must be the request's. A lookup pins nothing and changes nothing.

`LoadDecision` gives the answer. A request waits for chunks on their way into the pool for no longer than
computing them would take.

`PromotionDecision` is about the tiers below; `offload.waits` has the waits themselves. Rows are promoted
once per admission. A request is then answered in O(1) until its rows have come or its wait budget is spent;
it computes the rows that have not come. A promotion is compared with computing its tokens *plus the prefill
that is queued ahead*, and its time includes the bytes that the tier has to move first. The wait budget
bounds the whole wait for rows. `load_deadline` bounds a batch of I/O beyond the time that it is known to
take, so that a tier that hangs costs one deadline. Without cost estimates, the wait budget is that
deadline.

Some tiers do not know what they hold. Such a tier is asked first, once per admission, if it may have chunks
that neither the pool nor another tier is known to have. A request waits for the answers no longer than
computing all of these chunks would take, and no longer than `load_deadline`. It does not ask at all if
answers and bytes are known to take longer than computing. A request that waits for its turn does so no
longer than either. Its own wait begins afterwards.

Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtier.config import KVTierConfig
from kvtier.connector.cost import CostEstimate, CostModel, PrefillQueue, is_worth_trying
from kvtier.connector.jobs import LoadJob, RunningJobs
from kvtier.connector.metadata import ReqId
from kvtier.connector.state import ChunkGeometry, GroupGeometry, GroupState, RequestState
from kvtier.keys import OffloadKey
from kvtier.offload.base import ChunkLookup, OffloadingManager
from kvtier.offload.promotions import PromotionRequest, TierTime
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.offload.waits import TierWait
from kvtier.tiers.base import Tier

_UNKNOWN_BUDGET = 0.05  # seconds to wait for a chunk while the cost of computing it is not known
_LEAST_BUDGET = 0.05  # seconds; an arrival is seen only when a step ends, and no step is much shorter
_STEPS = 3  # the running step, the step that orders the load, and the step after which its end is seen
_SLOWDOWN = 4  # in times of computing: a load expected to be faster that takes this long has gone wrong


class PrefixMatch(NamedTuple):
    """The part of a request's prefix that can be loaded now."""

    end: int
    """The prefix can be loaded up to this token; equal to the local hit if nothing can be loaded."""
    pending: bool
    """Whether a chunk that is still on its way could make the match longer."""
    missing: OffloadKey | None
    """The key of the first chunk that stops the match, if the tokens left fill a chunk."""
    reach: int
    """The found chunks reach up to this token: beyond `end` if a lookahead must be covered."""


def match_prefix(
    geometry: ChunkGeometry, lookup: ChunkLookup, state: RequestState, num_tokens: int
) -> PrefixMatch:
    """Find how far a request can be loaded from the chunks that `lookup` finds.

    Where KV depends on the tokens after it (`OffloadingConfig.lookahead`), other tokens may have followed a
    stored chunk than follow it in this request. So the load ends early enough that the found chunks beyond
    its end cover the lookahead: the last chunk found is computed again. A state depends on no later token,
    so that attention's chunks alone cover the lookahead.
    """
    if not geometry.lookahead:
        return _match_chunks(geometry, lookup, state, num_tokens, geometry.sparse, geometry.alignment)
    attention = geometry.windowed if geometry.full or geometry.windowed else geometry.states
    step = geometry.reach_alignment
    found = _match_chunks(geometry, lookup, state, num_tokens, attention, step)
    if found.reach == state.local:
        return found
    last = found.reach - geometry.lookahead
    covered = _match_chunks(geometry, lookup, state, last, geometry.sparse, geometry.alignment)
    if not geometry.states:
        return found._replace(end=covered.end)
    missing = found.missing if covered.missing is None else covered.missing
    reach = min(found.reach, -(-(covered.end + geometry.lookahead) // step) * step)
    return PrefixMatch(covered.end, found.pending or covered.pending, missing, reach)


def _match_chunks(
    geometry: ChunkGeometry,
    lookup: ChunkLookup,
    state: RequestState,
    num_tokens: int,
    sparse: Sequence[GroupGeometry],
    alignment: int,
) -> PrefixMatch:
    """Find the last end beyond `state.local` that full attention and the `sparse` groups can serve."""
    keyed = min(num_tokens, *(state.groups[group.index].num_keyed for group in (*geometry.full, *sparse)))
    end = keyed // alignment * alignment
    pending, missing = False, None
    for group in geometry.full:
        reach, waits, gap = _reach(lookup, state, state.groups[group.index], end)
        if reach < end:
            end, missing = reach, gap
        pending |= waits
    end = state.full_reach = end // alignment * alignment
    if sparse and end > state.local:
        found = [_Window(lookup, state, group, end) for group in sparse]
        best = _last_served(found, state.local, end, alignment, optimistic=False)
        pending |= _last_served(found, state.local, end, alignment, optimistic=True) > best
        if best < end:
            missing = next(window.last_gap() for window in found if not window.serves(end, optimistic=False))
            end = best
    end = max(end, state.local)
    return PrefixMatch(end, pending, missing, reach=end)


def _reach(
    lookup: ChunkLookup, state: RequestState, group: GroupState, end: int
) -> tuple[int, bool, OffloadKey | None]:
    """Return how far a full-attention group reaches, whether that may grow, and the key that stops it."""
    size = group.geometry.chunk_size
    start = state.local // size
    keys = group.keys[start : -(-end // size)]
    hits = lookup.lookup_prefix(keys, state.context)
    waits = hits is None
    if hits is None:
        hits = lookup.lookup_prefix(keys, state.context, wait=False) or 0
    return (start + hits) * size, waits, keys[hits] if hits < len(keys) else None


class _Window:
    """The chunks of a windowed group, or the states of a state group, between the local hit and `end`, with
    the runs of those that are ready.
    """

    def __init__(self, lookup: ChunkLookup, state: RequestState, group: GroupGeometry, end: int) -> None:
        self._group = group
        self._local = state.local
        self._start = state.local // group.chunk_size
        self._keys = state.groups[group.index].keys[self._start : -(-end // group.chunk_size)]
        found = lookup.lookup_many(self._keys, state.context)
        self._ready = _run_lengths([hit is True for hit in found])
        self._possible = _run_lengths([hit is not False for hit in found])

    def serves(self, end: int, optimistic: bool) -> bool:
        """Return whether all chunks needed to compute at `end` are ready or, `optimistic`, may be soon."""
        size = self._group.chunk_size
        stop = -(-end // size)
        runs = self._possible if optimistic else self._ready
        return runs[stop - 1 - self._start] >= stop - self._group.first_needed(self._local, end) // size

    def last_gap(self) -> OffloadKey | None:
        """Return the rightmost key that is not ready."""
        return next((self._keys[i] for i in reversed(range(len(self._keys))) if not self._ready[i]), None)


def _run_lengths(flags: Sequence[bool]) -> list[int]:
    """For each position, count the flags set in a row up to and including it."""
    runs, run = [], 0
    for flag in flags:
        run = run + 1 if flag else 0
        runs.append(run)
    return runs


def _last_served(windows: list[_Window], local: int, end: int, alignment: int, optimistic: bool) -> int:
    """Return the last aligned end that all windows serve, or `local` if there is none."""
    while end > local and not all(window.serves(end, optimistic) for window in windows):
        end -= alignment
    return max(end, local)


class LoadDecision:
    """Chooses between loading from the pool, waiting and computing.

    The choice rests on the past cost of loads and steps, and on the loads that run. `promotion` decides
    about the tiers below the pool, if there are any.
    """

    def __init__(
        self,
        settings: KVTierConfig,
        geometry: ChunkGeometry,
        cost: CostModel,
        running: RunningJobs,
        prefill: PrefillQueue,
        manager: OffloadingManager,
        promotion: PromotionDecision | None,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._geometry = settings, geometry
        self._cost, self._running, self._prefill, self._clock = cost, running, prefill, clock
        self._manager, self._promotion = manager, promotion

    def decide(self, state: RequestState, limit: int) -> tuple[int | None, PrefixMatch]:
        """Decide whether a request waits, loads its prefix up to a token before `limit`, or computes it.

        Returns the token up to which it loads, which is the local hit if it computes, or `None` if it waits;
        and its match in the pool. A wait for tiers begins here. Nothing is pinned, and the call may be
        repeated.
        """
        match = match_prefix(self._geometry, self._manager, state, limit)
        if self._promotion is not None:
            if self._promotion.begin_wait(state, match, limit):
                return None, match
            match = self._promotion.ignore_promoting(match)
        if self._should_wait(state, match):
            return None, match
        state.waiting_since = None
        is_load = match.end > state.local and self._is_worth_loading(state, match)
        return match.end if is_load else state.local, match

    def _should_wait(self, state: RequestState, match: PrefixMatch) -> bool:
        """Return whether the request should wait, because a chunk is on its way and worth the wait."""
        tokens, known_to_take = 0, 0.0
        if match.pending:
            tokens = state.view.num_tokens - match.end
        elif (job := self._shared_load(state, match.end)) is not None:
            tokens = match.end - state.local
            known_to_take = self._seconds_left(job)
        if tokens == 0:
            return False
        now = self._clock()
        if state.waiting_since is None:
            state.waiting_since = now
        compute = self._cost.compute_seconds(tokens)
        budget = min(self._settings.load_deadline, _UNKNOWN_BUDGET if compute is None else compute)
        return known_to_take <= budget and now - state.waiting_since < budget

    def _shared_load(self, state: RequestState, end: int) -> LoadJob | None:
        """Return another request's running load that brings the first chunk this request needs."""
        if end <= state.local:
            return None
        for group in state.groups:
            first = group.geometry.first_needed(state.local, end) // group.geometry.chunk_size
            if (job := self._running.load_of(group.keys[first])) is not None:
                return job
        return None

    def _seconds_left(self, job: LoadJob) -> float:
        expected = self._cost.loads.seconds(job.num_bytes)
        return 0.0 if expected is None else max(0.0, expected - (self._clock() - job.started))

    def wait_budget(self, state: RequestState, end: int) -> float:
        """Return the seconds that a load up to `end` may take before computing is the better choice."""
        deadline, compute = self._settings.load_deadline, self._cost.compute_seconds(end - state.local)
        if compute is None or not self._settings.load_if_faster:
            return deadline
        waits = self._bus_wait() + _STEPS * self._cost.slowest_step
        return min(deadline, max(_LEAST_BUDGET, waits + _SLOWDOWN * compute))

    def _is_worth_loading(self, state: RequestState, match: PrefixMatch) -> bool:
        """Return whether a load behind the running loads should beat computing behind the prompts ahead."""
        if not self._settings.load_if_faster:
            return True
        num_bytes = self._geometry.load_bytes(state.local, match.end)
        tokens = self._prefill.ahead_of(state.view.request_id) + match.end - state.local
        return self._cost.worth_loading(num_bytes, tokens, self._bus_wait())

    def _bus_wait(self) -> float:
        """Estimate how long the running loads keep the bus busy.

        A load that should have arrived by now has probably only not been reported yet.
        """
        free_at = 0.0
        for job in self._running.loads():
            free_at = max(free_at, job.started) + (self._cost.loads.seconds(job.num_bytes) or 0.0)
        return max(0.0, free_at - self._clock())


class PromotionDecision:
    """Chooses between promoting from a tier below the pool and computing."""

    def __init__(
        self,
        settings: KVTierConfig,
        geometry: ChunkGeometry,
        cost: CostModel,
        prefill: PrefillQueue,
        manager: TieredOffloadingManager,
    ) -> None:
        self._settings, self._geometry = settings, geometry
        self._cost, self._prefill, self.manager = cost, prefill, manager
        self._promotions, self._waits = manager.promotions, manager.waits

    # -- asking ------------------------------------------------------------------------------------

    def must_wait(self, req_id: ReqId, state: RequestState | None) -> bool:
        """Return whether a request waits for tiers, or for its turn. Takes constant time.

        The engine need not have asked about the request before; it then has no state.
        """
        return (state is None or state.may_load) and self._waits.must_wait(req_id)

    def begin_wait(self, state: RequestState, here: PrefixMatch, limit: int) -> bool:
        """Return whether a request should wait for chunks beyond those of the pool's match `here`.

        If so, its wait for its turn, for a lookup or for a promotion begins.
        """
        if limit <= here.end or state.context.stays_in_pool:
            return False  # a row below the pool that has the key of a chunk that stays may be of another
        wait = self._waits.open(state.context, state.num_chunks)
        if wait is None:
            return False
        there = match_prefix(self._geometry, self._promotions, state, limit)
        if there.pending and not wait.is_looked_up and self._begin_lookup(state, wait, there, limit):
            return True
        if there.end <= here.end:
            return False
        if self._waits.is_full():
            return self._waits.await_turn(wait, self._turn_budget(there.end - here.end))
        return self._begin_promotion(state, wait, here, there)

    def _turn_budget(self, tokens: int) -> float:
        """Return how long a request waits for its turn: no longer than computing `tokens` would take."""
        compute = self._cost.compute_seconds(tokens) if self._settings.load_if_faster else None
        deadline = self._settings.load_deadline
        return deadline if compute is None else min(deadline, compute)

    def _begin_lookup(self, state: RequestState, wait: TierWait, there: PrefixMatch, limit: int) -> bool:
        """Return whether a request should wait for tiers to find out which chunks beyond `there` they have.

        If so, that wait, or the wait for its turn, begins.
        """
        end = limit // self._geometry.reach_alignment * self._geometry.reach_alignment
        lookups = self._promotions.unknown(self._chunks(state, there.end, end))
        if not lookups:
            return False
        if self._waits.is_full():
            return self._waits.await_turn(wait, self._turn_budget(end - there.end))
        budget, ahead = self._settings.load_deadline, self._prefill.ahead_of(state.view.request_id)
        compute = self._cost.compute_seconds(end - there.end + ahead)
        if self._settings.load_if_faster and compute is not None:
            tiers = [lookup.tier.name for lookup in lookups]
            answer = self._cost.lookup_seconds(tiers)
            bring = self._cost.promotion_seconds([lookup.cost for lookup in lookups])
            estimates = [self._cost.lookups[tier] for tier in tiers]
            if answer is not None and not is_worth_trying(estimates, answer + (bring or 0.0), compute):
                self._waits.skip_lookup(wait)
                return False
            budget = min(budget, compute)
        self._waits.look_up(wait, lookups, state.num_chunks, budget)
        return True

    def _chunks(self, state: RequestState, start: int, end: int) -> list[OffloadKey]:
        """Return the chunks that could extend a match from `start` to `end`, from head to tail.

        Of a windowed group or a state group these are all chunks that the GPU does not have, because the end
        of the match is not known.
        """
        spans = []
        for group in state.groups:
            size = group.geometry.chunk_size
            first = (state.local if group.geometry in self._geometry.sparse else start) // size
            last = end // size if group.geometry.is_state else -(-end // size)
            spans.append({key: first + at for at, key in enumerate(group.keys[first:last])})
        return state.head_to_tail(spans)

    def ignore_promoting(self, match: PrefixMatch) -> PrefixMatch:
        """Return a match that is not pending because of a row on its way from a tier.

        `begin_wait` has decided whether to wait for such a row.
        """
        if match.pending and match.missing is not None and self._promotions.is_promoting(match.missing):
            return match._replace(pending=False)
        return match

    def _begin_promotion(
        self, state: RequestState, wait: TierWait, here: PrefixMatch, there: PrefixMatch
    ) -> bool:
        """Return whether a request should wait for rows; not if computing is expected to be faster."""
        needed = self._needed(state, there)
        costs = self._promotions.costs(needed)
        expected = self._cost.promotion_seconds(costs)
        ahead = self._prefill.ahead_of(state.view.request_id)
        compute = self._cost.compute_seconds(there.end - here.end + ahead)
        budget = deadline = self._settings.load_deadline + (expected or 0.0)
        if self._settings.load_if_faster and expected is not None and compute is not None:
            load = self._cost.loads.seconds(self._geometry.load_bytes(here.end, there.end)) or 0.0
            estimates = [self._cost.promotions[cost.tier] for cost in costs]
            if not is_worth_trying(estimates, expected + load, compute):
                self._waits.skip_promotion(wait)
                return False
            budget = max(_LEAST_BUDGET, compute)
        request = PromotionRequest(state.context, needed, deadline, whole=bool(self._geometry.sparse))
        return self._waits.promote(wait, request, budget)

    def _needed(self, state: RequestState, match: PrefixMatch) -> list[OffloadKey]:
        """Return the chunks of a match, those of windowed groups and the states first."""
        spans = []
        for group in state.groups:
            size = group.geometry.chunk_size
            first = group.geometry.first_needed(state.local, match.end) // size
            last = -(-(match.end if group.geometry.is_state else match.reach) // size)
            spans.append({key: first + at for at, key in enumerate(group.keys[first:last])})
        indices = [group.index for group in self._geometry.sparse]
        sparse = [key for index in indices for key in spans[index]]
        full = [{} if index in indices else span for index, span in enumerate(spans)]
        return sparse + state.head_to_tail(full)

    # -- loading -----------------------------------------------------------------------------------

    def tokens_by_tier(self, state: RequestState, end: int) -> dict[str, int]:
        """Count by tier the promoted tokens among those to be loaded up to `end`."""
        sources = self._waits.sources(state.context)
        if not sources:
            return {}
        group = state.groups[self._geometry.main_group]
        size = group.geometry.chunk_size
        keys = group.keys[group.geometry.first_needed(state.local, end) // size : -(-end // size)]
        counts = Counter([sources[key] for key in keys if key in sources])
        return {tier: (end - state.local) * count // len(keys) for tier, count in counts.items()}

    # -- cost estimates ----------------------------------------------------------------------------

    def learn(self) -> None:
        """Learn the cost of the promotions and lookups that ended since the last call."""
        for time in self._promotions.take_times():
            _learn(self._cost.promotions[time.tier], time)
        for time in self._waits.take_lookup_times():
            _learn(self._cost.lookups[time.tier], time)
        for tier in self.manager.tiers:
            self._share_estimate(tier)

    def _share_estimate(self, tier: Tier) -> None:
        """Begin with the estimate of an earlier process, which a tier has kept, or have it keep ours."""
        estimate = self._cost.promotions[tier.name]
        if (seconds := estimate.seconds_per_byte) is None:
            estimate.recall(tier.prices.get("seconds_per_byte"))
        elif not estimate.is_bound:  # a later process should not begin with what one stall has cost
            tier.prices = {"seconds_per_byte": seconds}


def _learn(estimate: CostEstimate, time: TierTime) -> None:
    (estimate.learn_lost if time.lost else estimate.learn)(time.num_bytes, time.seconds)
