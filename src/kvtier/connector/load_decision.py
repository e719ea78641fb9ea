"""Load, wait or compute: the choice for each request, and how long a request waits.

`LoadDecision` is about the pool: a request waits only for chunks that are on their way, and for no longer
than computing them would take.

`PromotionDecision` is about the tiers below. A request wishes for chunks once per admission. It is then
answered in O(1) until its rows have come or its patience is over; it computes the rows that have not come. A
promotion is compared with computing its tokens *plus the prefill that is queued ahead*, and its time
includes the bytes that the tier has to move first. Patience bounds the whole wait. `load_deadline` bounds a
batch of I/O beyond the time that it is known to take, so that a tier that hangs costs one deadline. Without
prices, patience is that deadline.

Some tiers do not know what they hold. Such a tier is asked first, once per admission, if it may have chunks
that neither the pool nor another tier is known to have. A request waits for the answers no longer than
computing all of these chunks would take, and no longer than `load_deadline`. It does not ask at all if
answers and bytes are known to take longer than computing.

An engine asks about all its waiting requests in every step. So that a step takes no longer when thousands
wait, only a bounded number of requests, and of their chunks, begins to wait for tiers in a step, and waits
for them at a time. The others are told to ask again, in O(1), and come first in the order in which the
engine asks. Their patience begins when their own wait begins.

Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from kvtier.config import KVTierConfig
from kvtier.connector.cost import CostModel, PrefillQueue
from kvtier.connector.jobs import LoadJob, RunningJobs
from kvtier.connector.lookup import PrefixMatch, match_prefix
from kvtier.connector.state import ChunkGeometry, RequestState
from kvtier.keys import OffloadKey
from kvtier.offload.promotions import Wish
from kvtier.offload.tiered import TieredOffloadingManager

__all__ = ["LoadDecision", "PromotionDecision"]

_UNKNOWN_PATIENCE = 0.05  # seconds to wait for a chunk while the price of computing it is not known
_LEAST_PATIENCE = 0.05  # seconds; an arrival is seen only when a step ends, and no step is much shorter
_STEPS = 3  # the running step, the step that orders the load, and the step after which its end is seen
_PATIENCE = 4  # in times of computing: a load expected to be faster that takes this long has gone wrong
_NEW_CHUNKS = 2048  # chunks of the requests that are looked up in tiers in one step: some milliseconds
_MOST_CHUNKS = 4096  # chunks of all requests that wait for tiers: all of them may time out in one step
_MOST_WAITING = 256  # requests that wait for tiers; an engine does not admit more in a few steps
_LEARN_EVERY = 64  # promotions between two writes of the learnt price to the tiers


class LoadDecision:
    """The choice between loading from the pool, waiting and computing.

    It rests on the past cost of loads and steps, and on the loads that run.
    """

    def __init__(
        self,
        settings: KVTierConfig,
        geometry: ChunkGeometry,
        cost: CostModel,
        running: RunningJobs,
        prefill: PrefillQueue,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._geometry = settings, geometry
        self._cost, self._running, self._prefill, self._clock = cost, running, prefill, clock

    def should_wait(self, state: RequestState, match: PrefixMatch) -> bool:
        """Say whether the request should wait, because a chunk is on its way and worth the wait."""
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
        patience = min(self._settings.load_deadline, _UNKNOWN_PATIENCE if compute is None else compute)
        return known_to_take <= patience and now - state.waiting_since < patience

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
        expected = self._cost.load_seconds(job.num_bytes)
        return 0.0 if expected is None else max(0.0, expected - (self._clock() - job.started))

    def patience(self, state: RequestState, end: int) -> float:
        """Return the seconds that a load up to `end` may take before computing is the better choice."""
        deadline, compute = self._settings.load_deadline, self._cost.compute_seconds(end - state.local)
        if compute is None or not self._settings.load_if_faster:
            return deadline
        waits = self._bus_wait() + _STEPS * self._cost.slowest_step
        return min(deadline, max(_LEAST_PATIENCE, waits + _PATIENCE * compute))

    def is_worth_loading(self, state: RequestState, match: PrefixMatch) -> bool:
        """Say whether a load, behind the running loads, should beat computing, behind the prompts ahead."""
        if not self._settings.load_if_faster or match.end == state.local:
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
            free_at = max(free_at, job.started) + (self._cost.load_seconds(job.num_bytes) or 0.0)
        return max(0.0, free_at - self._clock())


class PromotionDecision:
    """The choice between promoting from a tier below the pool and computing."""

    def __init__(
        self,
        settings: KVTierConfig,
        geometry: ChunkGeometry,
        cost: CostModel,
        prefill: PrefillQueue,
        manager: TieredOffloadingManager,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._geometry = settings, geometry
        self._cost, self._prefill, self._manager, self._clock = cost, prefill, manager, clock
        self._promotions, self._inquiries = manager.promotions, manager.inquiries
        self._learnt: set[str] = set()
        self._times = 0
        self._lookups_left = _NEW_CHUNKS  # chunks that this step may still look up in tiers
        self._requests_left, self._chunks_left = _MOST_WAITING, _MOST_CHUNKS  # that may still begin to wait

    # -- asking ------------------------------------------------------------------------------------

    def admit_next(self) -> None:
        """Let the next requests be looked up in tiers, as many as one step and all waits together allow.

        Call it once in a step, when waits have ended.
        """
        requests, chunks = map(sum, zip(self._inquiries.load(), self._promotions.load(), strict=True))
        self._requests_left, self._chunks_left = _MOST_WAITING - requests, _MOST_CHUNKS - chunks
        self._lookups_left = _NEW_CHUNKS

    def must_wait(self, state: RequestState | None) -> bool:
        """Say whether a request waits for answers or chunks of a tier, or for its turn.

        `None`: a request that nobody has asked about. Takes constant time. A request is looked up within a
        few steps; only one that a tier may help then waits until fewer others wait for tiers, for as long as
        computing would take at most.
        """
        if state is None:
            return self._lookups_left <= 0
        if not state.may_ask and self._inquiries.is_waiting(state.context):
            return True
        if not state.may_promote:
            return self._promotions.is_waiting(state.context)
        if state.turn_until is not None and self._is_full():
            return self._await_turn(state)
        return self._lookups_left <= 0 and state.may_load

    def _is_full(self) -> bool:
        return self._requests_left <= 0 or self._chunks_left <= 0

    def _await_turn(self, state: RequestState, tokens: int = 0) -> bool:
        """Say whether a request waits until fewer requests wait for tiers; else it does without tiers.

        The first call decides how long: no longer than computing `tokens` would take.
        """
        if state.turn_until is None:
            compute = self._cost.compute_seconds(tokens) if self._settings.load_if_faster else None
            patience = self._settings.load_deadline
            state.turn_until = self._clock() + (patience if compute is None else min(patience, compute))
        if self._clock() < state.turn_until:
            return True
        state.may_ask = state.may_promote = False
        return False

    def start_waiting(self, state: RequestState, here: PrefixMatch, limit: int) -> bool:
        """Say whether a request should wait for chunks beyond those of the pool's match `here`.

        If so, note its inquiry or its wish.
        """
        if not state.may_promote or limit <= here.end or state.context.stays_in_pool:
            return False  # a row below the pool that has the key of a chunk that stays may be of another
        self._lookups_left -= 1 + sum(len(group.keys) for group in state.groups)
        there = match_prefix(self._geometry, self._manager.anywhere, state, limit)
        if there.pending and state.may_ask and self._start_asking(state, there, limit):
            return True
        if there.end <= here.end:
            return False
        if self._is_full():
            return self._await_turn(state, there.end - here.end)
        state.may_promote = False
        wish = self._choose(state, here, there)
        if wish is None or not self._promotions.wish(wish, state.context):
            return False
        self._requests_left -= 1
        self._chunks_left -= len(wish.needed)
        return True

    def _start_asking(self, state: RequestState, there: PrefixMatch, limit: int) -> bool:
        """Say whether a request should wait for tiers to find out which chunks beyond `there` they have."""
        end = limit // self._geometry.alignment * self._geometry.alignment
        inquiries = self._inquiries.unknown(self._chunks(state, there.end, end))
        if not inquiries:
            return False
        if self._is_full():
            return self._await_turn(state, end - there.end)
        state.may_ask = False
        wait, ahead = self._settings.load_deadline, self._prefill.ahead_of(state.view.request_id)
        compute = self._cost.compute_seconds(end - there.end + ahead)
        if self._settings.load_if_faster and compute is not None:
            tiers = [inquiry.tier.name for inquiry in inquiries]
            answer = self._cost.inquiry_seconds(tiers)
            bring = self._cost.promotion_seconds([inquiry.cost for inquiry in inquiries])
            if answer is not None and not self._cost.worth_asking(tiers, answer + (bring or 0.0), compute):
                return False
            wait = min(wait, compute)
        self._inquiries.note(inquiries, wait, state.context)
        self._requests_left -= 1
        self._chunks_left -= sum(len(group.keys) for group in state.groups)
        return True

    def _chunks(self, state: RequestState, start: int, end: int) -> list[OffloadKey]:
        """Return the chunks that could extend a match from `start` to `end`, from head to tail.

        Of a windowed group these are all chunks that the GPU does not have, because the end of the match is
        not known.
        """
        spans = []
        for group in state.groups:
            size = group.geometry.chunk_size
            first = (start if group.geometry.window is None else state.local) // size
            spans.append({key: first + at for at, key in enumerate(group.keys[first : -(-end // size)])})
        return state.head_to_tail(spans)

    def without_arrivals(self, match: PrefixMatch) -> PrefixMatch:
        """Return a match that is not pending because of a row from a tier.

        Whether to wait for such a row has been decided here.
        """
        if match.pending and match.missing is not None and self._promotions.is_arriving(match.missing):
            return match._replace(pending=False)
        return match

    def _choose(self, state: RequestState, here: PrefixMatch, there: PrefixMatch) -> Wish | None:
        """Return the wish of a request; `None`: computing is expected to be faster."""
        needed = self._needed(state, there)
        costs = self._promotions.costs(needed)
        expected = self._cost.promotion_seconds(costs)
        ahead = self._prefill.ahead_of(state.view.request_id)
        compute = self._cost.compute_seconds(there.end - here.end + ahead)
        patience = deadline = self._settings.load_deadline + (expected or 0.0)
        if self._settings.load_if_faster and expected is not None and compute is not None:
            load = self._cost.load_seconds(self._geometry.load_bytes(here.end, there.end)) or 0.0
            if not self._cost.worth_promoting([cost.tier for cost in costs], expected + load, compute):
                return None
            patience = max(_LEAST_PATIENCE, compute)
        return Wish(needed, patience, deadline, whole=bool(self._geometry.windowed))

    def _needed(self, state: RequestState, match: PrefixMatch) -> list[OffloadKey]:
        """Return the chunks of a match, those of windowed groups first."""
        spans = []
        for group in state.groups:
            size = group.geometry.chunk_size
            first = group.geometry.first_needed(state.local, match.end) // size
            last = -(-match.reach // size)
            spans.append({key: first + at for at, key in enumerate(group.keys[first:last])})
        windows = [window.index for window in self._geometry.windowed]
        windowed = [key for index in windows for key in spans[index]]
        full = [{} if index in windows else span for index, span in enumerate(spans)]
        return windowed + state.head_to_tail(full)

    # -- loading -----------------------------------------------------------------------------------

    def sources(self, state: RequestState) -> Mapping[OffloadKey, str]:
        """Return the tier of each row that was promoted for a request."""
        return self._promotions.sources(state.context)

    def tokens_by_tier(self, state: RequestState, end: int) -> dict[str, int]:
        """Count by tier the promoted tokens among those to be loaded up to `end`."""
        sources = self.sources(state)
        if not sources:
            return {}
        group = state.groups[self._geometry.main_group]
        size = group.geometry.chunk_size
        keys = group.keys[group.geometry.first_needed(state.local, end) // size : -(-end // size)]
        counts = Counter(sources[key] for key in keys if key in sources)
        return {tier: (end - state.local) * count // len(keys) for tier, count in counts.items()}

    # -- prices ------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Learn the cost of the promotions and inquiries that ended since the last call."""
        for time in self._promotions.take_times():
            price = self._cost.price_of(time.tier)
            (price.note_lost if time.lost else price.note)(time.num_bytes, time.seconds)
            self._times += 1
            if self._times % _LEARN_EVERY == 0:
                self.keep_prices()
        for answer in self._inquiries.take_times():
            price = self._cost.inquiry_price_of(answer.tier)
            (price.note_lost if answer.lost else price.note)(1, answer.seconds)
        self._recall_prices()

    def _recall_prices(self) -> None:
        """Begin with the prices that an earlier process has learnt, unless this one knows better."""
        if len(self._learnt) == len(self._manager.tiers):
            return
        for tier in self._manager.tiers:
            if tier.name not in self._learnt and (prices := tier.learnt()):
                self._learnt.add(tier.name)
                self._cost.price_of(tier.name).recall(prices.get("seconds_per_byte"))

    def keep_prices(self) -> None:
        """Have the tiers keep the learnt prices for a later process."""
        for tier in self._manager.tiers:
            seconds = self._cost.price_of(tier.name).seconds_per_byte
            if seconds is not None:
                self._learnt.add(tier.name)
                tier.learn({"seconds_per_byte": seconds})
