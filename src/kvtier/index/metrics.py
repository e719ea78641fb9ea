"""The metrics of an indexer, for Prometheus.

Names begin with `kvtier_index_`. Each model has the size, budget and refusals of its index; each worker its
blocks on each tier; each publisher its state, its lag, and the counters of its stream; each path its
requests and a histogram of their times. Everything belongs to the event loop's thread.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import fields

from kvtier.events.updates import Counters, State
from kvtier.index.service import Followed, Service, Worker, worst
from kvtier.metrics import Histogram, Metric, MetricKind, Registry, Sample

Samples = Mapping[str, list[Sample]]

_REQUEST_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE
_INDEX = (
    Metric("blocks", _GAUGE, "Blocks that some worker holds."),
    Metric("workers", _GAUGE, "Workers that were heard of."),
    Metric("bytes", _GAUGE, "Bytes that the table takes."),
    Metric("budget", _GAUGE, "Bytes that the table may take."),
    Metric("dropped", _COUNTER, "Blocks refused because the budget was spent."),
    Metric("unknown", _COUNTER, "Removals of blocks that were not held."),
    Metric("ignored", _COUNTER, "Blocks of groups that no prefix match can be made of."),
    Metric("refused", _COUNTER, "Blocks of another size, with wrong tokens, or in a place too many."),
    Metric("orphans_dropped", _COUNTER, "Blocks that found no room to wait for their parents."),
    Metric("compiled", _GAUGE, "Whether compiled loops answer, or plain Python until they are ready."),
    Metric("worker_blocks", _GAUGE, "Blocks that a worker holds on a tier."),
)
_STREAM = {
    counter.name: Metric(
        f"source_{counter.name}",
        _COUNTER,
        f"Of a publisher's stream: {counter.name.replace('_', ' ')}.",
    )
    for counter in fields(Counters)
}
_SOURCES = (
    Metric("source_state", _GAUGE, "1 for the state that answers about a publisher have."),
    Metric("source_ignored_batches", _COUNTER, "Batches that could not be applied."),
    Metric("source_lag_seconds", _GAUGE, "Age of a newest batch when it was applied."),
    Metric("source_connected", _GAUGE, "Whether a publisher is connected."),
    *_STREAM.values(),
)
_TRAFFIC = (
    Metric("requests", _COUNTER, "HTTP requests answered."),
    Metric("request_seconds", MetricKind.HISTOGRAM, "Times of HTTP requests.", _REQUEST_SECONDS),
    Metric("ignored_batches", _COUNTER, "Batches that could not be applied."),
)


class Traffic:
    """The HTTP requests that were answered, by path and status, and their times by path."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(_REQUEST_SECONDS))

    def note(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self.requests[path, status] += 1
        self.seconds[path].observe(seconds)


def make_registry(service: Service, traffic: Traffic) -> Registry:
    """Return the metrics of a service and of its HTTP traffic."""
    registry = Registry("kvtier_index_")
    registry.add(_INDEX, lambda: _read_indexes(service))
    registry.add(_SOURCES, lambda: _read_sources(service))
    registry.add(_TRAFFIC, lambda: _read_traffic(service, traffic))
    return registry


def _read_indexes(service: Service) -> Samples:
    samples: dict[str, list[Sample]] = {metric.name: [] for metric in _INDEX}
    for key, group in service.groups().items():
        labels = {"model": key.model, "routing_group": key.routing_group}
        stats = group.index.stats()._asdict()
        stats["compiled"] = stats["form"] == "numba"
        for name in samples.keys() & stats.keys():
            samples[name].append((labels, float(stats[name])))
        for name in group.index.workers:
            worker = Worker.of(name)
            who = labels | {"instance": worker.instance, "rank": str(worker.rank)}
            for tier, count in group.index.worker_stats(name).blocks.items():
                samples["worker_blocks"].append((who | {"tier": tier.name.lower()}, float(count)))
    return samples


def _read_sources(service: Service) -> Samples:
    samples: dict[str, list[Sample]] = {metric.name: [] for metric in _SOURCES}
    for followed, trusts in service.followed():
        labels, state, status = _labels(followed), worst(trusts).state, service.status(followed)
        samples["source_state"] += [(labels | {"state": name}, float(state is name)) for name in State]
        samples["source_ignored_batches"].append((labels, float(followed.ignored)))
        if status is None:
            continue
        samples["source_connected"].append((labels, float(status.connected)))
        if status.lag is not None:
            samples["source_lag_seconds"].append((labels, status.lag))
        for name, value in status.counters.as_dict().items():
            samples[_STREAM[name].name].append((labels, float(value)))
    return samples


def _read_traffic(service: Service, traffic: Traffic) -> Samples:
    return {
        "requests": [
            ({"path": path, "status": str(status)}, float(count))
            for (path, status), count in traffic.requests.items()
        ],
        "request_seconds": [({"path": path}, seconds) for path, seconds in traffic.seconds.items()],
        "ignored_batches": [({}, float(service.ignored))],
    }


def _labels(followed: Followed) -> dict[str, str]:
    source = followed.registration
    labels = {"model": source.group.model, "routing_group": source.group.routing_group}
    return labels | {"instance": str(source.instance_id), "rank": str(source.rank or 0)}
