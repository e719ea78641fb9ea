"""Counters, gauges and histograms: their names, how to read their values, and their text for Prometheus.

Each part of kvtier keeps its totals in plain attributes, which cost nothing to count; a registry reads them
on request. So nothing is counted twice, and the same metrics go into a text (`Registry.text`) and to an
engine that shows its own metrics (`Registry.collect`). The names of counters end in `_total` in the text
only.

A registry and its histograms belong to the thread of the part that they measure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import accumulate
from typing import Any

from kvtier.errors import InputError

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Buckets of transfers: a chunk takes less than a millisecond, and `store_deadline` is 30 s."""
_MOST_RECENT = 1024


class MetricKind(Enum):
    """The type of a metric, as Prometheus knows it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric without its values. `buckets` are the upper bounds of a histogram's buckets."""

    name: str
    kind: MetricKind
    text: str
    buckets: tuple[float, ...] = ()


def counter(text: str) -> Any:
    """Return a field of a dataclass: a total so far, and the text of its metric."""
    return field(default=0, metadata={"kind": MetricKind.COUNTER, "text": text})


def gauge(text: str) -> Any:
    """Return a field of a dataclass: a value now, and the text of its metric."""
    return field(metadata={"kind": MetricKind.GAUGE, "text": text})


def texts_of(stats: type, kind: MetricKind) -> dict[str, str]:
    """Return the texts of a dataclass's counters or gauges, by the names of their fields."""
    return {one.name: one.metadata["text"] for one in fields(stats) if one.metadata.get("kind") is kind}


class Histogram:
    """Counts observations by size, and sums them.

    The newest observations are also kept as they came, for engines whose histograms take single values only.
    """

    def __init__(self, buckets: Sequence[float] = SECONDS) -> None:
        self.buckets = tuple(buckets)
        self.counts = [0] * (len(self.buckets) + 1)
        """The count of each bucket, not cumulative; the last counts values above all bounds."""
        self.sum = 0.0
        self._recent: deque[float] = deque(maxlen=_MOST_RECENT)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.sum += value
        self._recent.append(value)

    def take_recent(self) -> list[float]:
        """Take the values since the last call, or only the newest if there were very many."""
        taken = list(self._recent)
        self._recent.clear()
        return taken


Sample = tuple[Mapping[str, str], float | Histogram]
"""A value and its labels."""


Read = Callable[[], Mapping[str, Iterable[Sample]]]
"""Reads the values of some metrics, by name."""


class Registry:
    """Holds the metrics of one part, whose names begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._groups: list[tuple[tuple[Metric, ...], Read]] = []

    def add(self, metrics: Iterable[Metric], read: Read) -> None:
        """Add metrics. `read` returns their current values; a metric that it leaves out has no samples."""
        known = {metric.name for group, _ in self._groups for metric in group}
        group = tuple(metrics)
        for metric in group:
            if metric.name in known:
                raise InputError(f"metrics: expected one metric of each name, got a second {metric.name}")
            known.add(metric.name)
        self._groups.append((group, read))

    def collect(self) -> Iterator[tuple[Metric, list[Sample]]]:
        """Read all values, metric after metric."""
        for group, read in self._groups:
            values = read()
            for metric in group:
                yield metric, list(values.get(metric.name, ()))

    def texts(self) -> Iterator[str]:
        """Yield the metrics in Prometheus' text format, one after the other."""
        for metric, samples in self.collect():
            yield format_family(self.prefix, metric, samples)

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return "".join(self.texts())


def format_family(prefix: str, metric: Metric, samples: Iterable[Sample]) -> str:
    """Return one metric with all its samples in Prometheus' text format."""
    name = f"{prefix}{metric.name}" + ("_total" if metric.kind is MetricKind.COUNTER else "")
    text = metric.text.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {metric.kind.value}"]
    for labels, value in samples:
        if isinstance(value, Histogram):
            lines += _histogram_lines(name, labels, value)
        else:
            lines.append(_line(name, labels, value))
    return "\n".join(lines) + "\n"


def _histogram_lines(name: str, labels: Mapping[str, str], value: Histogram) -> Iterator[str]:
    bounds = [*map(_number, value.buckets), "+Inf"]
    for bound, count in zip(bounds, accumulate(value.counts), strict=True):
        yield _line(f"{name}_bucket", {**labels, "le": bound}, count)
    yield _line(f"{name}_sum", labels, value.sum)
    yield _line(f"{name}_count", labels, sum(value.counts))


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    text = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
    return f"{name}{{{text}}} {_number(value)}" if text else f"{name} {_number(value)}"


def _number(value: float) -> str:
    """Return a number as Prometheus reads it. A publisher's clock can give any value, even infinity."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
