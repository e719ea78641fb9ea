"""When a follower may ask again: after a pause that grows with every failure, so that nothing can spin.

Not for several threads at once.
"""

from __future__ import annotations

from kvtier.events.updates import Limits

__all__ = ["Pauses"]


class Pauses:
    """The pause before the next request, if there must be one, and the failures that it follows from."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.until: float | None = None
        self._limits = limits
        self._failures = 0
        self._mismatches = 0
        self._reset_at = now - limits.backoff

    def __bool__(self) -> bool:
        return self.until is not None

    @property
    def other_way(self) -> bool:
        """Whether another question than the last one should be asked: every second time that one fails."""
        return self._failures % 2 == 1

    def after_failure(self, now: float) -> bool:
        """Begin the pause after a request that failed; say whether it failed too often."""
        self._failures += 1
        return self._begin(self._failures, now)

    def after_mismatch(self, now: float) -> bool:
        """Begin a pause if the picture was disproved too often in a row; say whether it was."""
        self._mismatches += 1
        return self._mismatches >= self._limits.tries and self._begin(self._mismatches, now)

    def after_reset(self, now: float) -> None:
        """Begin a pause if the last reset was just now, else none: of one restart nobody should wait to learn."""
        is_flapping = now < self._reset_at + self._limits.backoff
        self.until = now + self._limits.backoff if is_flapping else None
        self._reset_at = now

    def _begin(self, times: int, now: float) -> bool:
        pause = self._limits.backoff * 2 ** min(times - 1, 16)
        self.until = now + min(pause, self._limits.backoff_max)
        return times >= self._limits.tries

    def tick(self, now: float) -> None:
        """End the pause if it is over."""
        if self.until is not None and now >= self.until:
            self.until = None

    def end(self) -> None:
        """End the pause and forget the failures."""
        self._failures, self.until = 0, None

    def forget_mismatches(self) -> None:
        """Note that the picture was proven."""
        self._mismatches = 0
