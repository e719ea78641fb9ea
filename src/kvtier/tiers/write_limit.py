"""`WriteLimit`: bounds the bytes that a tier writes in any 24 hours, counted by the hour.

Flash wears out, and an engine can write more in a day than a disk is made for in a month. Hours are those
of the wall clock, because the count outlives the process. If the clock goes back, writes count into the
newest hour; if the clock was more than a day ahead, the old counts are treated as written just now.
Scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

__all__ = ["WriteLimit"]

_HOURS = 24


class WriteLimit:
    """Counts the bytes written in the last 24 hours against a limit; `None`: no limit."""

    def __init__(self, limit: int | None, wall_clock: Callable[[], float] = time.time) -> None:
        self.limit = limit
        self._wall_clock = wall_clock
        self._hour = 0
        self._written = [0] * _HOURS

    @property
    def room(self) -> int | None:
        """The bytes that may be written now; `None`: any number."""
        if self.limit is None:
            return None
        self._turn()
        return max(0, self.limit - sum(self._written))

    def spend(self, nbytes: int) -> None:
        """Count written bytes."""
        self._turn()
        self._written[self._hour % _HOURS] += nbytes

    def give_back(self, nbytes: int) -> None:
        """Count no more what was to be written and was not, as far as that was in this hour."""
        self._turn()
        at = self._hour % _HOURS
        self._written[at] = max(0, self._written[at] - nbytes)

    def save(self) -> list[int]:
        """Return the state for a later process: the hour, and the bytes of each of 24 hours."""
        return [self._hour, *self._written]

    def restore(self, saved: Sequence[int]) -> None:
        """Continue the count of an earlier process. Ignores invalid values."""
        if len(saved) == _HOURS + 1 and saved[0] > 0 and min(saved) >= 0:
            self._hour, self._written = saved[0], list(saved[1:])
        self._turn()

    def _turn(self) -> None:
        """Forget the hours that are more than a day ago."""
        if (now := int(self._wall_clock() // 3600)) == self._hour:
            return
        if (ahead := self._hour - now) > _HOURS:  # else nothing would be forgotten until that hour
            self._written = [self._written[(hour + ahead) % _HOURS] for hour in range(_HOURS)]
            self._hour = now
        for hour in range(max(self._hour, now - _HOURS) + 1, now + 1):
            self._written[hour % _HOURS] = 0
        self._hour = max(self._hour, now)
