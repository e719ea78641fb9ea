"""Is a load faster than recomputing? Learned from what the engine and the bus have done so far.

`StepTimer` tells how long each step took, also where an engine schedules a step while the one before it still runs. `CostModel`
keeps two running averages: seconds per byte of finished loads, and seconds per token of prefill-sized steps. A load that was
given up would have taken at least as long as it was waited for: the first average is no less than that, until a load arrives.
Until both are known every load is worth doing. A refusal is not for ever: every `_RETRY_AFTER`-th load goes ahead, so that a
stale average heals; after a load that was given up the next try comes sooner, since a bus that stood still may move again.
Used by the scheduler's side of the connector, on its thread.
"""

from __future__ import annotations

from collections import deque

__all__ = ["CostModel", "StepTimer"]

_WEIGHT = 0.2
_MIN_STEP_TOKENS = 32  # a decode step is bound by latency and says nothing about the price of a prefill token
_RETRY_AFTER = 64
_FIRST_RETRY_AFTER = 4  # doubled each time that it is in vain
_MAX_IN_FLIGHT = 16
_HALF_LIFE = 64  # steps
_FADING = 0.5 ** (1 / _HALF_LIFE)


class StepTimer:
    """Times steps that begin and end in one order, with several of them in flight.

    step 1   |=========|
    step 2        |....=========|      it waits (.) for step 1, and that is not its own time
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[float, int]] = deque(maxlen=_MAX_IN_FLIGHT)
        self._last_end = float("-inf")

    def begin(self, now: float, num_tokens: int) -> None:
        """Note that a step of `num_tokens` tokens has been scheduled."""
        self._in_flight.append((now, num_tokens))

    def end(self, now: float) -> tuple[int, float] | None:
        """End the oldest step and return its tokens and seconds; `None` if none is in flight."""
        if not self._in_flight:
            return None
        begun, num_tokens = self._in_flight.popleft()
        begun, self._last_end = max(begun, self._last_end), now
        return num_tokens, now - begun


class CostModel:
    """Estimates the time of loads and of recomputation."""

    def __init__(self) -> None:
        self._seconds_per_byte: float | None = None
        self._seconds_per_token: float | None = None
        self.slowest_step = 0.0
        """Seconds of the slowest step of late: half of it is forgotten in `_HALF_LIFE` steps."""
        self._refusals, self._retry_after = 0, _RETRY_AFTER
        self._has_lost = False  # the last load that said anything of the bus was given up

    def note_load(self, num_bytes: int, seconds: float) -> None:
        """Learn from a load that arrived."""
        if num_bytes > 0 and seconds > 0:
            known = (
                None if self._has_lost else self._seconds_per_byte
            )  # a bound that was just disproved counts for nothing
            self._seconds_per_byte = _blend(known, seconds / num_bytes)
            self._has_lost, self._retry_after = False, _RETRY_AFTER

    def note_lost_load(self, num_bytes: int, seconds: float) -> None:
        """Learn from a load that was given up after so long: it would have taken longer."""
        if num_bytes > 0 and seconds > 0:
            self._seconds_per_byte = max(self._seconds_per_byte or 0.0, seconds / num_bytes)
            self._retry_after = min(_RETRY_AFTER, 2 * self._retry_after if self._has_lost else _FIRST_RETRY_AFTER)
            self._has_lost, self._refusals = True, 0

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that computed `num_tokens` tokens."""
        self.slowest_step = max(seconds, self.slowest_step * _FADING)
        if num_tokens >= _MIN_STEP_TOKENS and seconds > 0:
            self._seconds_per_token = _blend(self._seconds_per_token, seconds / num_tokens)

    def load_seconds(self, num_bytes: int) -> float | None:
        """Estimate how long a load takes; `None`: not known yet."""
        return None if self._seconds_per_byte is None else num_bytes * self._seconds_per_byte

    def compute_seconds(self, num_tokens: int) -> float | None:
        """Estimate how long it takes to compute tokens; `None`: not known yet."""
        return None if self._seconds_per_token is None else num_tokens * self._seconds_per_token

    def worth_loading(self, num_bytes: int, num_tokens: int, wait: float = 0.0) -> bool:
        """Say whether loading bytes after a wait of so many seconds is expected to beat computing so many tokens."""
        load, compute = self.load_seconds(num_bytes), self.compute_seconds(num_tokens)
        if load is None or compute is None or wait + load <= compute:
            return True
        self._refusals += 1
        return self._refusals % self._retry_after == 0


def _blend(average: float | None, sample: float) -> float:
    return sample if average is None else average + _WEIGHT * (sample - average)
