"""`CostModel`: is a load faster than recomputing? It learns from past steps, loads and promotions.

`StepTimer` measures how long each step took, even if an engine schedules a step while the step before it
still runs. `CostEstimate` is a running average of seconds per byte, of loads and of each tier's promotions;
or of seconds per remote lookup, where a lookup counts as one byte. A transfer that was given up would have
taken at least as long as the wait for it, so the average is at least that until a transfer arrives.
`CostModel` compares these estimates with the seconds per token of prefill-sized steps. Until both are known
every load is worth doing. A refusal is not permanent: every `_RETRY_AFTER`-th refusal goes ahead, so that a
stale average is corrected. After a transfer that was given up the next try comes earlier, since a bus or
tier that stood still may move again. The scheduler's side of the connector uses this on its thread.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

from kvtier.connector.metadata import ReqId
from kvtier.errors import IntegrityError
from kvtier.offload.promotions import TierCost

_WEIGHT = 0.2
_MIN_PREFILL_TOKENS = 32  # a decode is bound by latency and does not show the cost of a prefill token
_RETRY_AFTER = 64
_FIRST_RETRY_AFTER = 4  # doubled after each retry that fails
_MAX_IN_FLIGHT = 16
_HALF_LIFE = 64  # steps
_FADING = 0.5 ** (1 / _HALF_LIFE)


def prefill_tokens(num_scheduled_tokens: Mapping[ReqId, int]) -> int | None:
    """Count the tokens of a step that computes a prompt; 0 if its requests, however many, only decode.

    `None` means that the step computes nothing.
    """
    if not num_scheduled_tokens:
        return None
    tokens = num_scheduled_tokens.values()
    return sum(tokens) if max(tokens) >= _MIN_PREFILL_TOKENS else 0


class StepTimer:
    """Times steps that begin and end in one order, with several of them in flight.

    step 1   |=========|
    step 2        |....=========|      the wait (.) for step 1 does not count as time of step 2
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[float, int | None]] = deque(maxlen=_MAX_IN_FLIGHT)
        self._last_end = float("-inf")

    def begin(self, now: float, num_tokens: int | None) -> None:
        """Record that a step has been scheduled, of `num_tokens` tokens as `prefill_tokens` counts them."""
        self._in_flight.append((now, num_tokens))

    def end(self, now: float) -> tuple[int | None, float] | None:
        """End the oldest step and return its tokens and seconds, or `None` if none is in flight."""
        if not self._in_flight:
            return None
        begun, num_tokens = self._in_flight.popleft()
        begun, self._last_end = max(begun, self._last_end), now
        return num_tokens, now - begun


class CostEstimate:
    """The learnt seconds per byte of one kind of transfer."""

    def __init__(self) -> None:
        self.seconds_per_byte: float | None = None
        self._refusals, self._retry_after = 0, _RETRY_AFTER
        self.is_bound = False
        """Whether the estimate is only a lower bound: the last transfer was given up."""

    def learn(self, num_bytes: int, seconds: float) -> None:
        """Learn from a transfer that arrived."""
        if num_bytes > 0 and seconds > 0:
            # A transfer that arrives disproves the bound of a lost one.
            known = None if self.is_bound else self.seconds_per_byte
            self.seconds_per_byte = _blend(known, seconds / num_bytes)
            self.is_bound, self._retry_after = False, _RETRY_AFTER

    def learn_lost(self, num_bytes: int, seconds: float) -> None:
        """Learn from a transfer that was given up after `seconds`: it would have taken longer."""
        if num_bytes > 0 and seconds > 0:
            self.seconds_per_byte = max(self.seconds_per_byte or 0.0, seconds / num_bytes)
            self._retry_after = min(
                _RETRY_AFTER, 2 * self._retry_after if self.is_bound else _FIRST_RETRY_AFTER
            )
            self.is_bound, self._refusals = True, 0

    def recall(self, seconds_per_byte: float | None) -> None:
        """Begin with an estimate learnt by another process, unless one is known."""
        if self.seconds_per_byte is None and seconds_per_byte is not None and 0.0 < seconds_per_byte < 1.0:
            self.seconds_per_byte = seconds_per_byte

    def seconds(self, num_bytes: int) -> float | None:
        """Estimate the seconds of a transfer; `None` means that nothing is known yet."""
        return None if self.seconds_per_byte is None else num_bytes * self.seconds_per_byte

    def is_due(self) -> bool:
        """Count a refusal, and return whether it is time to try anyway."""
        self._refusals += 1
        return self._refusals % self._retry_after == 0


class CostModel:
    """Estimates the time of loads, of promotions and remote lookups by tier, and of recomputation.

    Callers read and teach the estimates of transfers.
    """

    def __init__(self) -> None:
        self.loads = CostEstimate()
        self.promotions: defaultdict[str, CostEstimate] = defaultdict(CostEstimate)
        self.lookups: defaultdict[str, CostEstimate] = defaultdict(CostEstimate)
        self._seconds_per_token: float | None = None
        self._more_per_token: float | None = None  # as above, beyond the time of a step that only decodes
        self._decode_seconds: float | None = None
        self.slowest_step = 0.0
        """Seconds of the slowest recent step; this maximum falls by half in `_HALF_LIFE` steps."""

    def learn_step(self, num_tokens: int | None, seconds: float) -> None:
        """Learn from a step of `num_tokens` tokens, as `prefill_tokens` counts them."""
        self.slowest_step = max(seconds, self.slowest_step * _FADING)
        if num_tokens is None or seconds <= 0:
            return
        if num_tokens >= _MIN_PREFILL_TOKENS:
            more = max(0.0, seconds - (self._decode_seconds or 0.0))
            self._seconds_per_token = _blend(self._seconds_per_token, seconds / num_tokens)
            self._more_per_token = _blend(self._more_per_token, more / num_tokens)
        else:
            self._decode_seconds = _blend(self._decode_seconds, seconds)

    def promotion_seconds(self, costs: Iterable[TierCost]) -> float | None:
        """Estimate how long promotions take behind those that are queued. Tiers work in parallel.

        `None` means that nothing is known yet of some tier.
        """
        longest = 0.0
        for cost in costs:
            seconds = self.promotions[cost.tier].seconds(cost.num_bytes + cost.queued_bytes)
            if seconds is None:
                return None
            longest = max(longest, seconds)
        return longest

    def lookup_seconds(self, tiers: Iterable[str]) -> float | None:
        """Estimate how long tiers take to answer in parallel; `None` means that this is not known yet."""
        seconds = [self.lookups[tier].seconds(1) for tier in tiers]
        known = [second for second in seconds if second is not None]
        return max(known, default=0.0) if len(known) == len(seconds) else None

    def compute_seconds(self, num_tokens: int) -> float | None:
        """Estimate how long it takes to compute tokens; `None` means that nothing is known yet."""
        return None if self._seconds_per_token is None else num_tokens * self._seconds_per_token

    def saved_seconds(self, num_tokens: int) -> float:
        """Estimate the time of computing tokens in steps that would have run anyway.

        Where only the ends of prompts are computed, that is far less than `compute_seconds`: a short step
        takes about as long as one that only decodes.
        """
        return num_tokens * (self._more_per_token or 0.0)

    def worth_loading(self, num_bytes: int, num_tokens: int, wait: float = 0.0) -> bool:
        """Return whether waiting and then loading should be faster than computing the tokens."""
        load, compute = self.loads.seconds(num_bytes), self.compute_seconds(num_tokens)
        return load is None or compute is None or is_worth_trying([self.loads], wait + load, compute)


def is_worth_trying(estimates: Iterable[CostEstimate], expected: float, compute: float) -> bool:
    """Return whether something that takes `expected` seconds should be faster than computing.

    Also if not, every so often: then the estimates that say so are put to the test.
    """
    if expected <= compute:
        return True
    due = [estimate.is_due() for estimate in estimates]  # each counts the refusal
    return any(due)


def _blend(average: float | None, sample: float) -> float:
    return sample if average is None else average + _WEIGHT * (sample - average)


class PrefillQueue:
    """Keeps the prompt tokens that requests have yet to compute, in the order in which the engine asked.

    A prompt that is computed instead of loaded has to wait behind these. An entry begins when the engine
    asks about a request. It ends when the engine has scheduled the last prompt token, or with its request.
    """

    def __init__(self) -> None:
        self._left: dict[ReqId, int] = {}

    def put(self, req_id: ReqId, tokens: int) -> None:
        """Record the tokens that a request has to compute.

        A request that is asked about again keeps its place.
        """
        self._left[req_id] = tokens

    def discard(self, req_id: ReqId) -> None:
        """Forget a request that has ended."""
        self._left.pop(req_id, None)

    def take_step(self, num_scheduled_tokens: Mapping[ReqId, int]) -> None:
        """Subtract the tokens that a step computes. Most steps compute no prompt."""
        for req_id in self._left.keys() & num_scheduled_tokens.keys() if self._left else ():
            self._left[req_id] -= num_scheduled_tokens[req_id]
            if self._left[req_id] <= 0:
                del self._left[req_id]

    def ahead_of(self, req_id: ReqId) -> int:
        """Count the tokens of the requests before this one."""
        total = 0
        for other, tokens in self._left.items():
            if other == req_id:
                break
            total += tokens
        return total

    def check(self) -> None:
        """Raise `IntegrityError` if a request is kept that has no tokens left."""
        if done := [req_id for req_id, tokens in self._left.items() if tokens <= 0]:
            raise IntegrityError(f"expected requests with tokens to compute, got {done[:5]} with none")
