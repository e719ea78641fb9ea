"""What an indexer says of itself to Prometheus.

Names begin with `kvtier_index_`. Per model: size, budget and refusals of its index. Per worker: blocks on each tier. Per
publisher: its state, its lag, and the counters of its stream. Per path: requests and the time spent on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from kvtier.events.updates import State
from kvtier.index.service import Registration, Service, Worker

__all__ = ["metrics_of"]

Labels = dict[str, str]
Sample = tuple[Labels, float]


def metrics_of(service: Service, requests: Mapping[tuple[str, int], int], seconds: Mapping[str, float]) -> str:
    """Return all metrics in Prometheus' text format."""
    lines: list[str] = []
    _add_indexes(lines, service)
    _add_sources(lines, service)
    calls = [({"path": path, "status": str(status)}, float(count)) for (path, status), count in requests.items()]
    _add(lines, "requests_total", "counter", "HTTP requests answered.", calls)
    spent = [({"path": path}, value) for path, value in seconds.items()]
    _add(lines, "request_seconds_total", "counter", "Time spent on HTTP requests.", spent)
    _add(lines, "ignored_batches_total", "counter", "Batches that could not be applied.", [({}, service.ignored)])
    return "\n".join(lines) + "\n"


def _add_indexes(lines: list[str], service: Service) -> None:
    groups = service.groups()
    stats = [
        ({"model": key.model, "routing_group": key.routing_group}, each.index.stats()) for key, each in groups.items()
    ]
    for field, kind, text in (
        ("blocks", "gauge", "Blocks that somebody holds."),
        ("workers", "gauge", "Workers that were heard of."),
        ("bytes", "gauge", "Bytes that the table takes."),
        ("budget", "gauge", "Bytes that the table may take."),
        ("dropped", "counter", "Blocks refused because the budget was spent."),
        ("unknown", "counter", "Removals of blocks that were not held."),
        ("ignored", "counter", "Blocks of no use for prefix matches."),
    ):
        name = f"{field}_total" if kind == "counter" else field
        _add(lines, name, kind, text, [(labels, getattr(each, field)) for labels, each in stats])
    held = []
    for key, group in groups.items():
        for name in group.index.workers:
            worker = Worker.of(name)
            labels = {"model": key.model, "routing_group": key.routing_group}
            labels |= {"instance": worker.instance, "rank": str(worker.rank)}
            for tier, count in group.index.worker_stats(name).blocks.items():
                held.append((labels | {"tier": tier.name.lower()}, float(count)))
    _add(lines, "worker_blocks", "gauge", "Blocks that a worker holds on a tier.", held)


def _add_sources(lines: list[str], service: Service) -> None:
    sources = [(each, service.status(each)) for each in service.registrations()]
    states = [(_labels(each) | {"state": state}, float(each.state is state)) for each, _ in sources for state in State]
    _add(lines, "source_state", "gauge", "1 for the state that a publisher's picture is in.", states)
    lags = [(_labels(each), status.lag) for each, status in sources if status is not None and status.lag is not None]
    _add(lines, "source_lag_seconds", "gauge", "Age of a publisher's newest batch when it was applied.", lags)
    up = [(_labels(each), float(status.connected)) for each, status in sources if status is not None]
    _add(lines, "source_connected", "gauge", "Whether a publisher is connected.", up)
    counted: dict[str, list[Sample]] = {}
    for each, status in sources:
        for name, value in status.counters.as_dict().items() if status is not None else ():
            counted.setdefault(name, []).append((_labels(each), float(value)))
    for name, samples in counted.items():
        _add(lines, f"source_{name}_total", "counter", f"Of a publisher's stream: {name.replace('_', ' ')}.", samples)


def _labels(source: Registration) -> Labels:
    labels = {"model": source.group.model, "routing_group": source.group.routing_group}
    return labels | {"instance": str(source.instance_id), "rank": str(source.rank)}


def _add(lines: list[str], name: str, kind: str, text: str, samples: Iterable[Sample]) -> None:
    full = f"kvtier_index_{name}"
    lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
    for labels, value in samples:
        said = ",".join(f'{key}="{_escape(each)}"' for key, each in labels.items())
        lines.append(f"{full}{{{said}}} {_number(value)}" if said else f"{full} {_number(value)}")


def _number(value: float) -> str:
    """Return a number as Prometheus reads it. A publisher's clock can say anything, infinity included."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
