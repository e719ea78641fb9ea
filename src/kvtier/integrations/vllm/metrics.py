"""kvtier's messages in vLLM's log, and its counts there and at /metrics.

Counts are made on the scheduler's side, and vLLM carries them to the process that shows them. Not for
several threads at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.config import format_size
from kvtier.connector import ConnectorStats, OffloadingConnectorScheduler
from kvtier.connector.metrics import METRICS, label_names
from kvtier.metrics import Histogram, Metric, MetricKind, Registry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.logging import LoggingConfig

_INTERVAL = 1.0  # seconds between two reads of pool and tiers, whose slots have to be counted
_TOTALS = tuple(field.name for field in fields(ConnectorStats))
_TIMES = {"load_seconds": "loads", "store_seconds": "stores"}
_EVERY_STEP = {*_TOTALS, *_TIMES}
_get_totals: Callable[[ConnectorStats], tuple[float, ...]] = attrgetter(*_TOTALS)
_OURS, _VLLM = logging.getLogger("kvtier"), logging.getLogger("vllm")


def _metric_of(key: str) -> Metric:
    """Return the metric of an entry in `KVTierStats`: `loads`, or with a label `tier_promoted:disk`."""
    return METRICS[key.partition(":")[0]]


class KVTierStats(KVConnectorStats):  # type: ignore[misc]
    """The counts since the last step or, if aggregated, since the last line in the log."""

    def aggregate(self, other: KVConnectorStats) -> KVTierStats:
        """Return both: the sums of counts and the joined lists of seconds; of gauges the later value."""
        data = dict(self.data)
        for key, value in other.data.items():
            adds_up = key in data and _metric_of(key).kind is not MetricKind.GAUGE
            data[key] = data[key] + value if adds_up else value
        return KVTierStats(data)

    def reset(self) -> None:
        """Count from zero again."""
        self.data: dict[str, Any] = {}

    def reduce(self) -> dict[str, Any]:
        """Return the text for vLLM's log, for people."""
        reduced = {}
        for key, value in self.data.items():
            metric = _metric_of(key)
            if metric.kind is MetricKind.HISTOGRAM:
                reduced[f"kvtier {key} median"] = f"{median(value):.4f}"
            elif metric.name.endswith("_seconds"):
                reduced[f"kvtier {key}"] = f"{value:.4f}"
            else:
                reduced[f"kvtier {key}"] = format_size(value) if metric.name.endswith("_bytes") else value
        return reduced

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class Counts:
    """The last reported values."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._totals = _get_totals(ConnectorStats())
        self._clock = clock
        self._next_look = float("-inf")
        self._was_idle = True
        self._seen: dict[str, float] = {}

    def take_changes(self, scheduler: OffloadingConnectorScheduler) -> KVTierStats | None:
        """Take the counts since the last call; usually there are none."""
        data: dict[str, Any] = {}
        if (totals := _get_totals(scheduler.stats)) != self._totals:
            changes = zip(_TOTALS, self._totals, totals, strict=True)
            self._totals = totals
            data = {name: now - then for name, then, now in changes if now > then}
            seconds = {name: getattr(scheduler.times, kind).take_recent() for name, kind in _TIMES.items()}
            data |= {name: values for name, values in seconds.items() if values}
        if self._is_time_to_look(scheduler, changed=bool(data)):
            data |= self._look(scheduler.metrics)
        return KVTierStats(data) if data else None

    def _is_time_to_look(self, scheduler: OffloadingConnectorScheduler, changed: bool) -> bool:
        """Return True once a second, and when the engine becomes idle, as it then makes no steps."""
        now, is_idle = self._clock(), scheduler.is_idle()
        becomes_idle = is_idle and (changed or not self._was_idle)
        self._was_idle = is_idle
        if now < self._next_look and not becomes_idle:
            return False
        self._next_look = now + _INTERVAL
        return True

    def _look(self, registry: Registry) -> dict[str, Any]:
        """Return the changes in pool and tiers; a gauge is reported if its value changed."""
        changes: dict[str, Any] = {}
        for metric, samples in registry.collect():
            for labels, value in samples if metric.name not in _EVERY_STEP else ():
                key = ":".join((metric.name, *labels.values()))
                if isinstance(value, Histogram):
                    if recent := value.take_recent():
                        changes[key] = recent
                    continue
                before, self._seen[key] = self._seen.get(key), value
                if metric.kind is MetricKind.GAUGE and value != before:
                    changes[key] = value
                elif metric.kind is MetricKind.COUNTER and value > (before or 0):
                    changes[key] = value - (before or 0)
        return changes


class KVTierMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Metrics for vLLM's /metrics: `vllm:kvtier_<name>`; those of tiers have a `tier`, misses a `reason`."""

    def __init__(
        self, vllm_config: VllmConfig, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = {
            MetricKind.COUNTER: self._counter_cls,
            MetricKind.GAUGE: partial(self._gauge_cls, multiprocess_mode="mostrecent"),
            MetricKind.HISTOGRAM: self._histogram_cls,
        }
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            self._metrics[name] = kinds[metric.kind](
                name=f"vllm:kvtier_{name}",
                documentation=metric.text,
                labelnames=[*labelnames, *label_names(metric)],
                **({"buckets": metric.buckets} if metric.buckets else {}),
            )
        for name in METRICS:
            # Counts are shown as 0 before anything is counted; a gauge has no value before it is read.
            if not label_names(METRICS[name]) and METRICS[name].kind is not MetricKind.GAUGE:
                for index in per_engine_labelvalues:
                    self._child(name, index)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts to the metrics."""
        for key, value in transfer_stats_data.items():
            kind, child = _metric_of(key).kind, self._child(key, engine_idx)
            if kind is MetricKind.GAUGE:
                child.set(value)
            elif kind is MetricKind.COUNTER:
                child.inc(value)
            else:
                for seconds in value:
                    child.observe(seconds)

    def _child(self, key: str, engine_idx: int) -> Any:
        name, *label = key.split(":")
        return self._metrics[name].labels(*self.per_engine_labelvalues[engine_idx], *label)


class _ToVllm(logging.Handler):
    """Passes messages to the handlers that vLLM's logger has then: vLLM replaces them at each start."""

    def emit(self, record: logging.LogRecord) -> None:
        _VLLM.handle(record)


def show_messages(config: LoggingConfig) -> None:
    """Show kvtier's messages as vLLM shows its own, unless the user configures logging. Idempotent.

    vLLM gives handlers to loggers below `vllm` only. Messages of kvtier's own modules, which log below
    `kvtier`, go to the same handlers, with vLLM's level and format. The root logger is left alone. So are
    users who configure logging themselves: those who tell vLLM so, and those who have given the logger
    `kvtier` a handler or cut it off (`propagate`).
    """
    if not config.configure_logging or config.pylogging_config_file:
        return
    if _OURS.handlers or not _OURS.propagate:
        return
    _OURS.addHandler(_ToVllm())
    _OURS.propagate = False  # a handler of the root logger would show messages a second time
    if _OURS.level == logging.NOTSET:
        _OURS.setLevel(_VLLM.getEffectiveLevel())
