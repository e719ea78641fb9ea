"""What kvtier saves, in one line of the log now and then.

An engine asks for a line in every step; there is one when `INTERVAL` seconds have passed and something was counted since the
last. A line speaks of that time only, so that a pool that has stopped helping shows. Scheduler thread only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

from kvtier.config import format_size
from kvtier.connector import ConnectorStats

__all__ = ["INTERVAL", "Summary"]

INTERVAL = 60.0


class Summary:
    """Turns running totals into lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._told: Counter[str] = Counter()

    def line(self, stats: ConnectorStats) -> str | None:
        """Return a line if one is due."""
        return self.last_line(stats) if self._clock() - self._since >= INTERVAL else None

    def last_line(self, stats: ConnectorStats) -> str | None:
        """Return a line about all that was not told yet; `None` if nothing happened."""
        totals = Counter(asdict(stats))
        counts, self._told = totals - self._told, totals
        now = self._clock()
        seconds, self._since = now - self._since, now
        return _describe(counts, seconds) if counts else None


def _describe(counts: Counter[str], seconds: float) -> str:
    asked, loaded = counts["asked_tokens"], counts["loaded_tokens"]
    share = f"{loaded / asked:.0%} of the {asked:,} that were not on the GPU" if asked else "no prompt needed any"
    failed = counts["loads_failed"] + counts["stores_failed"]
    return (
        f"kvtier, last {seconds:.0f} s: {loaded:,} prompt tokens loaded instead of computed ({share});"
        f" {format_size(counts['load_bytes'])} loaded, {format_size(counts['store_bytes'])} stored,"
        f" {failed} of {counts['loads'] + counts['stores']} transfers failed"
    )
