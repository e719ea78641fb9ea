"""How long transfers took, from their order until every rank had reported, for whoever shows it.

What arrived is noted, not what failed. Scheduler thread only.
"""

from __future__ import annotations

from kvtier.connector.jobs import LoadJob, StoreJob
from kvtier.metrics import Histogram

__all__ = ["TransferTimes"]


class TransferTimes:
    """Seconds of loads and of stores."""

    def __init__(self) -> None:
        self.loads, self.stores = Histogram(), Histogram()

    def note(self, job: LoadJob | StoreJob, now: float) -> None:
        """Note that a job is over."""
        if not job.failed:
            times = self.loads if isinstance(job, LoadJob) else self.stores
            times.observe(now - job.started)
