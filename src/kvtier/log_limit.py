"""`LogLimit` keeps lines that a client or a peer can cause as often as it likes from flooding the log.

One line of each kind is logged in a minute; the next one says how many were withheld. Any thread
may call it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class LogLimit:
    """Limits one kind of line: `if (more := limit.admit()) is not None: logger.warning(...)`."""

    def __init__(self, interval: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval, self._clock = interval, clock
        self._lock = threading.Lock()
        self._quiet_until = float("-inf")
        self._withheld = 0

    def admit(self) -> str | None:
        """Return the end of a line that may be logged now, or `None` if the line must be withheld.

        A withheld line is counted. The end says how many lines were withheld, and is empty if none was.
        """
        with self._lock:
            if (now := self._clock()) < self._quiet_until:
                self._withheld += 1
                return None
            withheld, self._withheld = self._withheld, 0
            self._quiet_until = now + self._interval
        return f"; and {withheld:,} more since the last such line" if withheld else ""
