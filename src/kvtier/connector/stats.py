"""What the scheduler's side counts. Scheduler thread only; whoever reads a total elsewhere may read an old one."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.connector.explain import Explanation
from kvtier.connector.jobs import LoadJob, StoreJob

__all__ = ["ConnectorStats"]


@dataclass(slots=True)
class ConnectorStats:
    """Totals since the start."""

    loads: int = 0
    loads_failed: int = 0
    load_bytes: int = 0
    stores: int = 0
    stores_failed: int = 0
    store_bytes: int = 0
    waits: int = 0
    not_worth: int = 0
    flushes: int = 0
    expired: int = 0
    """Transfers that were given up because not every rank reported them."""
    asked_tokens: int = 0
    """Prompt tokens that the engine did not have, of requests that have run."""
    loaded_tokens: int = 0
    """Those of them that need not be computed."""

    def count_load(self, job: LoadJob) -> None:
        """Count a load that is over."""
        self.loads += 1
        self.loads_failed += bool(job.failed)
        self.load_bytes += 0 if job.failed else job.num_bytes

    def count_store(self, job: StoreJob) -> None:
        """Count a store that is over."""
        self.stores += 1
        self.stores_failed += bool(job.failed)
        self.store_bytes += 0 if job.failed else job.num_bytes

    def count_tokens(self, explanation: Explanation | None) -> None:
        """Count where a prompt came from, once that is known."""
        if explanation is not None:
            loaded = sum(explanation.from_tiers.values())
            self.asked_tokens += loaded + explanation.recomputed
            self.loaded_tokens += loaded
