"""How long transfers took, from their order until every rank had reported, for whoever shows it.

What arrived is noted, not what failed. Of what nobody takes, only the newest is kept. Scheduler thread only.
"""

from __future__ import annotations

from collections import deque

from kvtier.connector.jobs import LoadJob, StoreJob

__all__ = ["TransferTimes"]

_MOST = 1024


class TransferTimes:
    """Seconds of loads and of stores since they were last taken."""

    def __init__(self) -> None:
        self._loads: deque[float] = deque(maxlen=_MOST)
        self._stores: deque[float] = deque(maxlen=_MOST)

    def note(self, job: LoadJob | StoreJob, now: float) -> None:
        """Note that a job is over."""
        if not job.failed:
            times = self._loads if isinstance(job, LoadJob) else self._stores
            times.append(now - job.started)

    def take(self) -> tuple[list[float], list[float]]:
        """Take the seconds of loads and those of stores."""
        taken = list(self._loads), list(self._stores)
        self._loads.clear()
        self._stores.clear()
        return taken
