"""What kvtier counts, in vLLM's log and at its /metrics.

Counted on the scheduler's side and carried by vLLM to the process that shows it. Not for several threads at
once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvtier.config import format_size
from kvtier.connector import ConnectorStats, OffloadingConnectorScheduler
from kvtier.offload import CPUOffloadingManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "POOL_COUNTERS", "Counts", "KVTierMetrics", "KVTierStats"]

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
POOL_COUNTERS = {
    "evictions": "Chunks that left the pool for others.",
    "refusals": "Chunks that were offered and not taken: below the threshold, or no place.",
}
GAUGES = {
    "used_bytes": "Host memory that chunks take, those being written and read included.",
    "capacity_bytes": "Host memory for chunks.",
}
HISTOGRAMS = {
    "load_seconds": "Seconds from the order of a load until every worker had reported it.",
    "store_seconds": "Seconds from the order of a store until every worker had reported it.",
}
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Of seconds: a chunk takes less than a millisecond, and `store_deadline` is 30 s."""
_POOL_INTERVAL = 1.0  # seconds between two looks at the pool, whose slots have to be counted
_get_totals: Callable[[ConnectorStats], tuple[int, ...]] = attrgetter(*COUNTERS)


class KVTierStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted since the last step; aggregated, since the last line in the log."""

    def aggregate(self, other: KVConnectorStats) -> KVTierStats:
        """Return both: counts and seconds of both, and of what has a level the later."""
        data = self.data | {name: value for name, value in other.data.items() if name in GAUGES}
        for name in other.data.keys() - GAUGES.keys():
            data[name] = self.data[name] + other.data[name] if name in self.data else other.data[name]
        return KVTierStats(data)

    def reset(self) -> None:
        """Count from zero again."""
        self.data: dict[str, Any] = {}

    def reduce(self) -> dict[str, Any]:
        """Return what vLLM writes to its log, which is to be read by people."""
        reduced = {}
        for name, value in self.data.items():
            if name in HISTOGRAMS:
                reduced[f"kvtier {name} median"] = f"{median(value):.4f}"
            else:
                reduced[f"kvtier {name}"] = format_size(value) if name.endswith("_bytes") else value
        return reduced

    def is_empty(self) -> bool:
        """Say whether nothing was counted."""
        return not self.data


class Counts:
    """How far the totals were when they were last looked at."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._totals = _get_totals(ConnectorStats())
        self._clock = clock
        self._next_look = float("-inf")
        self._pool = dict.fromkeys(POOL_COUNTERS, 0)
        self._levels: dict[str, int] = {}

    def take_changes(self, scheduler: OffloadingConnectorScheduler) -> KVTierStats | None:
        """Take what was counted since the last call: as a rule nothing."""
        data: dict[str, Any] = {}
        if (totals := _get_totals(scheduler.stats)) != self._totals:
            changes = zip(COUNTERS, self._totals, totals, strict=True)
            self._totals = totals
            data = {name: now - then for name, then, now in changes if now > then}
            seconds = zip(HISTOGRAMS, scheduler.times.take(), strict=True)
            data |= {name: values for name, values in seconds if values}
        if self._is_time_to_look(scheduler, changed=bool(data)):
            data |= self._look_at_pool(scheduler)
        return KVTierStats(data) if data else None

    def _is_time_to_look(self, scheduler: OffloadingConnectorScheduler, changed: bool) -> bool:
        """Say yes once a second and, as an idle engine makes no steps, when the last transfer is over."""
        now = self._clock()
        if self._levels and not (changed and (now >= self._next_look or not scheduler.has_pending_push_work())):
            return False
        self._next_look = now + _POOL_INTERVAL
        return True

    def _look_at_pool(self, scheduler: OffloadingConnectorScheduler) -> dict[str, int]:
        """Return what has changed in the pool, if it is one that counts its slots."""
        manager = scheduler.manager
        if not isinstance(manager, CPUOffloadingManager):
            return {}
        stats, size = manager.stats(), scheduler.spec.config.row_bytes
        totals = {"evictions": stats.evicted, "refusals": stats.refused}
        levels = {"used_bytes": (stats.slots - stats.free) * size, "capacity_bytes": stats.slots * size}
        changes = {name: total - self._pool[name] for name, total in totals.items() if total > self._pool[name]}
        changes |= {name: level for name, level in levels.items() if self._levels.get(name) != level}
        self._pool, self._levels = totals, levels
        return changes


class KVTierMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters, levels and histograms for vLLM's /metrics."""

    def __init__(
        self, vllm_config: VllmConfig, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def make(kind: Any, names: dict[str, str], **more: Any) -> dict[str, dict[int, Any]]:
            made = {
                name: kind(name=f"vllm:kvtier_{name}", documentation=text, labelnames=labelnames, **more)
                for name, text in names.items()
            }
            return {name: create_metric_per_engine(metric, per_engine_labelvalues) for name, metric in made.items()}

        self._counters = make(self._counter_cls, COUNTERS | POOL_COUNTERS)
        self._gauges = make(self._gauge_cls, GAUGES, multiprocess_mode="mostrecent")
        self._histograms = make(self._histogram_cls, HISTOGRAMS, buckets=BUCKETS)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in what was counted."""
        for name, value in transfer_stats_data.items():
            if name in GAUGES:
                self._gauges[name][engine_idx].set(value)
            elif name in HISTOGRAMS:
                for seconds in value:
                    self._histograms[name][engine_idx].observe(seconds)
            else:
                self._counters[name][engine_idx].inc(value)
