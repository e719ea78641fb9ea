"""`TierHealth`: suspends a direction of a tier, says when a probe is due, and takes it back.

Some calls in a row that fail suspend the direction that they were for (a disk that turned read-only can
still be read); one call that is stuck suspends both. While suspended, a probe falls due after a pause that
doubles each time it is of no use. A probe that works ends the suspension; only real work that succeeds
makes the next pause short again. Scheduler thread only.
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
    """Whether one direction of a tier works. `what` names it in the log."""

    def __init__(
        self, what: str, clock: Callable[[], float], longest_backoff: float = _LONGEST_BACKOFF
    ) -> None:
        self._what, self._clock, self._longest_backoff = what, clock, longest_backoff
        self.problem: str | None = None
        """Why it is suspended; `None`: it is not."""
        self._failures = 0
        self._backoff = _FIRST_BACKOFF
        self._due = 0.0

    def note_success(self) -> None:
        """Note that a call has done its work."""
        self._failures = 0
        if self.problem is None:
            self._backoff = _FIRST_BACKOFF

    def note_failure(self, why: str) -> None:
        """Note that a call has failed; enough of them in a row suspend."""
        self._failures += 1
        if self._failures >= _FAILURES:
            self.suspend(why)

    def suspend(self, why: str) -> None:
        """Give up for a while. One line in the log, not one for each failure."""
        if self.problem is None:
            self.problem = why
            self._due = self._clock() + self._backoff
            logger.warning("%s is suspended: %s; next try in %g s", self._what, why, self._backoff)

    def take_due(self) -> bool:
        """Say whether it is time for a probe; the next one is then due after twice the pause."""
        if self.problem is None or self._clock() < self._due:
            return False
        self._backoff = min(2 * self._backoff, self._longest_backoff)
        self._due = self._clock() + self._backoff
        return True

    def resume(self) -> None:
        """End the suspension: a probe has worked."""
        if self.problem is not None:
            logger.warning("%s works again (it was suspended: %s)", self._what, self.problem)
            self.problem, self._failures = None, 0
