"""What kvtier counts, in vLLM's log and at its /metrics.

Counted on the scheduler's side and carried by vLLM to the process that shows it. Not for several threads at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvtier.config import format_size
from kvtier.connector import ConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["COUNTERS", "Counts", "KVTierMetrics", "KVTierStats"]

COUNTERS = {
    "loads": "Loads from the pool that are over.",
    "loads_failed": "Loads that did not deliver everything, so that vLLM recomputed it.",
    "load_bytes": "Bytes loaded, over all ranks.",
    "stores": "Stores to the pool that are over.",
    "stores_failed": "Stores that did not deliver everything.",
    "store_bytes": "Bytes stored, over all ranks.",
    "waits": "Times that a request was asked to wait for a chunk on its way.",
    "not_worth": "Times that computing was expected to be faster than a load.",
    "flushes": "Stores that had to end before a step overwrote what they read.",
    "expired": "Transfers that were given up because not every worker reported them.",
    "asked_tokens": "Prompt tokens that vLLM's own cache did not have.",
    "loaded_tokens": "Prompt tokens of them that were loaded instead of computed.",
}
"""What vLLM's /metrics shows of kvtier, as `vllm:kvtier_<name>_total`."""
_get_totals: Callable[[ConnectorStats], tuple[int, ...]] = attrgetter(*COUNTERS)


class KVTierStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted since the last step; aggregated, since the last line in the log."""

    def aggregate(self, other: KVConnectorStats) -> KVTierStats:
        """Return the sum of both."""
        return KVTierStats(dict(Counter(self.data) + Counter(other.data)))

    def reset(self) -> None:
        """Count from zero again."""
        self.data: dict[str, int] = {}

    def reduce(self) -> dict[str, Any]:
        """Return what vLLM writes to its log, which is to be read by people."""
        return {
            f"kvtier {name}": format_size(count) if name.endswith("_bytes") else count
            for name, count in self.data.items()
        }

    def is_empty(self) -> bool:
        """Say whether nothing was counted."""
        return not self.data


class Counts:
    """How far the totals were when they were last looked at."""

    def __init__(self) -> None:
        self._totals = _get_totals(ConnectorStats())

    def take_changes(self, stats: ConnectorStats) -> KVTierStats | None:
        """Take what was counted since the last call: as a rule nothing."""
        if (totals := _get_totals(stats)) == self._totals:
            return None
        changes = zip(COUNTERS, self._totals, totals, strict=True)
        self._totals = totals
        return KVTierStats({name: now - then for name, then, now in changes if now > then})


class KVTierMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters for vLLM's /metrics."""

    def __init__(
        self, vllm_config: VllmConfig, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:kvtier_{name}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
