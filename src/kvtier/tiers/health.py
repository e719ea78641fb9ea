"""`TierHealth`: suspends one direction of a tier, schedules probes, and ends the suspension.

Several failed calls in a row suspend their direction (a disk that turned read-only can still be read); one
stuck call suspends both. During a suspension a probe is due after a pause, which doubles after each probe.
A successful probe ends the suspension; only successful real work makes the next pause short again.
Scheduler thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["TierHealth"]

logger = logging.getLogger(__name__)

_FAILURES = 3
"""One bad sector is no reason to give up a disk."""
_FIRST_BACKOFF = 1.0
_LONGEST_BACKOFF = 60.0


class TierHealth:
    """The health of one direction of a tier. `what` names the direction in the log."""

    def __init__(
        self, what: str, clock: Callable[[], float], longest_backoff: float = _LONGEST_BACKOFF
    ) -> None:
        self._what, self._clock, self._longest_backoff = what, clock, longest_backoff
        self.problem: str | None = None
        """Why the direction is suspended; `None` if it is not."""
        self._failures = 0
        self._backoff = _FIRST_BACKOFF
        self._due = 0.0

    def note_success(self) -> None:
        """Note that a call has succeeded."""
        self._failures = 0
        if self.problem is None:
            self._backoff = _FIRST_BACKOFF

    def note_failure(self, why: str) -> None:
        """Note that a call has failed; enough failures in a row suspend the direction."""
        self._failures += 1
        if self._failures >= _FAILURES:
            self.suspend(why)

    def suspend(self, why: str) -> None:
        """Suspend the direction. Logs one line, not one for each failure."""
        if self.problem is None:
            self.problem = why
            self._due = self._clock() + self._backoff
            logger.warning("%s is suspended: %s; next try in %g s", self._what, why, self._backoff)

    def take_due(self) -> bool:
        """Say whether a probe is due; if so, schedule the next one after twice the pause."""
        if self.problem is None or self._clock() < self._due:
            return False
        self._backoff = min(2 * self._backoff, self._longest_backoff)
        self._due = self._clock() + self._backoff
        return True

    def resume(self) -> None:
        """End the suspension after a successful probe."""
        if self.problem is not None:
            logger.warning("%s works again (it was suspended: %s)", self._what, self.problem)
            self.problem, self._failures = None, 0
