"""The indexer's metrics for Prometheus.

Names begin with `kvtier_index_`. Per model: size, budget and refusals of its index. Per worker: blocks on
each tier. Per publisher: the state that answers report, its lag, batches that were not applied, the
counters of its stream. Per path: requests and the time spent on them. Belongs to the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvtier.events.updates import State
from kvtier.index.service import Followed, Service, Worker, worst
from kvtier.metrics import Metric, MetricKind, Sample, format_family

__all__ = ["metrics_of"]

Labels = dict[str, str]


def metrics_of(
    service: Service, requests: Mapping[tuple[str, int], int], seconds: Mapping[str, float]
) -> Iterator[str]:
    """Yield all metrics in Prometheus' text format, one by one."""
    yield from _of_indexes(service)
    yield from _of_sources(service)
    answered = list(requests.items())
    calls = [({"path": path, "status": str(status)}, float(count)) for (path, status), count in answered]
    yield _family("requests", MetricKind.COUNTER, "HTTP requests answered.", calls)
    spent = [({"path": path}, value) for path, value in seconds.items()]
    yield _family("request_seconds", MetricKind.COUNTER, "Time spent on HTTP requests.", spent)
    ignored: list[Sample] = [({}, float(service.ignored))]
    yield _family("ignored_batches", MetricKind.COUNTER, "Batches that could not be applied.", ignored)


def _of_indexes(service: Service) -> Iterator[str]:
    groups = [
        ({"model": key.model, "routing_group": key.routing_group}, group.index)
        for key, group in service.groups().items()
    ]
    counts = [(labels, index.stats()._asdict()) for labels, index in groups]
    for field, kind, text in (
        ("blocks", MetricKind.GAUGE, "Blocks that somebody holds."),
        ("workers", MetricKind.GAUGE, "Workers that were heard of."),
        ("bytes", MetricKind.GAUGE, "Bytes that the table takes."),
        ("budget", MetricKind.GAUGE, "Bytes that the table may take."),
        ("dropped", MetricKind.COUNTER, "Blocks refused because the budget was spent."),
        ("unknown", MetricKind.COUNTER, "Removals of blocks that were not held."),
        ("ignored", MetricKind.COUNTER, "Blocks of groups that no prefix match can be made of."),
        (
            "refused",
            MetricKind.COUNTER,
            "Blocks of another size, with wrong tokens, or in a place too many.",
        ),
        ("orphans_dropped", MetricKind.COUNTER, "Blocks that found no room to wait for their parents."),
    ):
        yield _family(field, kind, text, [(labels, float(count[field])) for labels, count in counts])
    compiled = [(labels, float(count["form"] == "numba")) for labels, count in counts]
    text = "Whether compiled loops answer, or plain Python until they are ready."
    yield _family("compiled", MetricKind.GAUGE, text, compiled)
    held = []
    for labels, index in groups:
        for name in index.workers:
            worker = Worker.of(name)
            who = labels | {"instance": worker.instance, "rank": str(worker.rank)}
            for tier, count in index.worker_stats(name).blocks.items():
                held.append((who | {"tier": tier.name.lower()}, float(count)))
    yield _family("worker_blocks", MetricKind.GAUGE, "Blocks that a worker holds on a tier.", held)


def _of_sources(service: Service) -> Iterator[str]:
    states: list[Sample] = []
    ignored: list[Sample] = []
    lags: list[Sample] = []
    connected: list[Sample] = []
    counted: dict[str, list[Sample]] = {}
    for followed, trusts in service.followed():
        labels, state, status = _labels(followed), worst(trusts).state, service.status(followed)
        states += [(labels | {"state": name}, float(state is name)) for name in State]
        ignored.append((labels, float(followed.ignored)))
        if status is None:
            continue
        connected.append((labels, float(status.connected)))
        if status.lag is not None:
            lags.append((labels, status.lag))
        for name, value in status.counters.as_dict().items():
            counted.setdefault(name, []).append((labels, float(value)))
    yield _family(
        "source_state", MetricKind.GAUGE, "1 for the state that answers about a publisher have.", states
    )
    yield _family(
        "source_ignored_batches", MetricKind.COUNTER, "Batches that could not be applied.", ignored
    )
    yield _family("source_lag_seconds", MetricKind.GAUGE, "Age of a newest batch when it was applied.", lags)
    yield _family("source_connected", MetricKind.GAUGE, "Whether a publisher is connected.", connected)
    for name, samples in counted.items():
        text = f"Of a publisher's stream: {name.replace('_', ' ')}."
        yield _family(f"source_{name}", MetricKind.COUNTER, text, samples)


def _labels(followed: Followed) -> Labels:
    source = followed.registration
    labels = {"model": source.group.model, "routing_group": source.group.routing_group}
    return labels | {"instance": str(source.instance_id), "rank": str(source.rank or 0)}


def _family(name: str, kind: MetricKind, text: str, samples: Iterable[Sample]) -> str:
    """Return a metric with all its samples."""
    return format_family("kvtier_index_", Metric(name, kind, text), samples)
