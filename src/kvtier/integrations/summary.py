"""A line in the log now and then that sums up the work of kvtier.

A timer thread reads the running totals every `INTERVAL` seconds and logs the changes: so an engine that
works in bursts, or is inside one long step, is covered too. A line covers only the time since the last one,
so that it shows when a pool has stopped helping. The thread reads only totals of the scheduler; a total
read too early appears in the next line. `close` logs the rest and, for each tier below the pool, everything
that it did since the start. One thread calls all methods, not necessarily the scheduler's, except `close`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict

from kvtier.config import format_size
from kvtier.connector import ConnectorStats

INTERVAL = 60.0


class Summary:
    """Turns running totals into lines. `describe_tiers` gives the lines about tiers when it is closed."""

    def __init__(
        self,
        stats: ConnectorStats,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        describe_tiers: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._stats = stats
        self._describe_tiers = describe_tiers
        self._log = log
        self._clock = clock
        self._since = clock()
        self._logged: Counter[str] = Counter()
        self._closed = threading.Event()
        self._timer: threading.Thread | None = None

    def start(self) -> None:
        """Log the changes every `INTERVAL` seconds from now on."""
        self._timer = threading.Thread(target=self._run, name="kvtier-summary", daemon=True)
        self._timer.start()

    def log_changes(self) -> None:
        """Log all changes since the last line, if any. For callers that have not started the timer."""
        totals = Counter(asdict(self._stats))
        counts, self._logged = totals - self._logged, totals
        now = self._clock()
        seconds, self._since = now - self._since, now
        if counts:
            self._log(_describe(counts, seconds))

    def close(self) -> None:
        """End the timer and log the rest. Idempotent. On the scheduler thread, or after it has ended."""
        is_first = not self._closed.is_set()
        self._closed.set()
        if self._timer is not None:
            self._timer.join()
        self.log_changes()
        for line in self._describe_tiers() if is_first else ():
            self._log(f"kvtier, tier {line}")

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL):
            self.log_changes()


def _describe(counts: Counter[str], seconds: float) -> str:
    asked, loaded = counts["asked_tokens"], counts["loaded_tokens"]
    share = (
        f"{loaded / asked:.0%} of the {asked:,} that were not on the GPU"
        if asked
        else "no prompt needed any"
    )
    failed = counts["loads_failed"] + counts["stores_failed"]
    return (
        f"kvtier, last {seconds:.0f} s: {loaded:,} prompt tokens loaded instead of computed ({share});"
        f" {format_size(counts['load_bytes'])} loaded, {format_size(counts['store_bytes'])} stored,"
        f" {failed} of {counts['loads'] + counts['stores']} transfers failed"
    )
