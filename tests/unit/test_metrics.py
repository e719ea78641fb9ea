"""Metrics: the text is what Prometheus reads, and names that dashboards know stay as they are."""

from __future__ import annotations

import math
import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.server_kit import (
    SMALL,
    Client,
    IndexServer,
    T,
    publish,
    publishing,
    registered,
    stored,
    until,
)

from kvtier.connector import ConnectorStats
from kvtier.connector.metrics import METRICS, _add_pool, is_of_tiers
from kvtier.errors import InputError
from kvtier.keys import OffloadKey
from kvtier.metrics import SECONDS, Histogram, Metric, MetricKind, Registry, format_family
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.tiers import TierStats

INDEX = [
    "blocks",
    "workers",
    "bytes",
    "budget",
    "dropped_total",
    "unknown_total",
    "ignored_total",
    "refused_total",
    "orphans_dropped_total",
    "compiled",
    "worker_blocks",
    "source_state",
    "source_ignored_batches_total",
    "source_lag_seconds",
    "source_connected",
    "source_batches_total",
    "source_duplicates_total",
    "source_gaps_total",
    "source_lost_batches_total",
    "source_replays_total",
    "source_truncated_replays_total",
    "source_snapshots_total",
    "source_probes_total",
    "source_timeouts_total",
    "source_resets_total",
    "source_restarts_total",
    "source_reconnects_total",
    "source_digest_checks_total",
    "source_digest_mismatches_total",
    "source_skipped_events_total",
    "source_bad_frames_total",
    "source_pending_overflows_total",
    "requests_total",
    "request_seconds",
    "ignored_batches_total",
]
CONNECTOR = [
    "loads",
    "loads_failed",
    "load_bytes",
    "stores",
    "stores_failed",
    "store_bytes",
    "stored_chunks",
    "unpacked_chunks",
    "waits",
    "not_worth",
    "flushes",
    "expired",
    "audited_chunks",
    "audit_mismatches",
    "namespace_departures",
    "asked_tokens",
    "loaded_tokens",
    "weight_changes",
    "saved_seconds",
    "misses",
    "evictions",
    "refusals",
    "not_kept",
    "used_bytes",
    "capacity_bytes",
    "tenant_used_bytes",
    "stale_blocks",
    "packing_ratio",
    "audit_distance",
    "load_seconds",
    "store_seconds",
]
LINE = re.compile(r'[a-z_]+(\{[a-z_]+="(\\["\\n]|[^"\\\n])*"(,[a-z_]+="(\\["\\n]|[^"\\\n])*")*\})? \S+')


def test_a_family_has_help_type_and_samples() -> None:
    samples = [({"path": 'a"b\\c\nd', "status": "200"}, 3), ({}, 0.25)]
    assert format_family(
        "kvtier_", Metric("requests", MetricKind.COUNTER, "Two\nlines \\ and all."), samples
    ) == (
        "# HELP kvtier_requests_total Two\\nlines \\\\ and all.\n"
        "# TYPE kvtier_requests_total counter\n"
        'kvtier_requests_total{path="a\\"b\\\\c\\nd",status="200"} 3\n'
        "kvtier_requests_total 0.25\n"
    )


def test_buckets_are_cumulative_up_to_infinity() -> None:
    times = Histogram((0.1, 0.5))
    for seconds in (0.05, 0.1, 0.3, 7.0):
        times.observe(seconds)
    text = format_family(
        "", Metric("seconds", MetricKind.HISTOGRAM, "Of all.", (0.1, 0.5)), [({"tier": "disk"}, times)]
    )
    assert text.splitlines()[2:] == [
        'seconds_bucket{tier="disk",le="0.1"} 2',
        'seconds_bucket{tier="disk",le="0.5"} 3',
        'seconds_bucket{tier="disk",le="+Inf"} 4',
        'seconds_sum{tier="disk"} 7.45',
        'seconds_count{tier="disk"} 4',
    ]


@given(st.lists(st.floats(min_value=0, max_value=100), max_size=40))
def test_a_histogram_agrees_with_a_plain_count(values: list[float]) -> None:
    times = Histogram()
    for value in values:
        times.observe(value)
    text = format_family("", Metric("seconds", MetricKind.HISTOGRAM, ""), [({}, times)])
    found = dict(re.findall(r'bucket\{le="(.*)"\} (\d+)', text))
    assert [int(count) for count in found.values()] == [
        sum(value <= bound for value in values) for bound in (*SECONDS, math.inf)
    ]
    assert times.sum == pytest.approx(sum(values))
    assert times.take_recent() == values
    assert times.take_recent() == []


def test_times_that_nobody_takes_are_bounded() -> None:
    times = Histogram()
    for number in range(5000):
        times.observe(float(number))
    assert times.take_recent() == [float(number) for number in range(5000 - 1024, 5000)]
    assert sum(times.counts) == 5000


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (1e3, "1000")]
)
def test_numbers_are_written_for_prometheus(value: float, text: str) -> None:
    assert format_family("", Metric("lag", MetricKind.GAUGE, ""), [({}, value)]).endswith(f"lag {text}\n")


def test_a_registry_reads_a_group_once_and_names_are_single() -> None:
    reads = []
    registry = Registry("kvtier_")
    metrics = [
        Metric("used", MetricKind.GAUGE, "Used."),
        Metric("moved", MetricKind.COUNTER, "Moved."),
        Metric("no", MetricKind.GAUGE, ""),
    ]
    registry.add(metrics, lambda: reads.append(1) or {"used": [({}, 2)], "moved": [({"tier": "disk"}, 3)]})
    samples = [line for line in registry.text().splitlines() if line[0] != "#"]
    assert samples == ["kvtier_used 2", 'kvtier_moved_total{tier="disk"} 3']
    assert len(reads) == 1
    with pytest.raises(InputError, match="expected one metric of each name, got a second moved"):
        registry.add([Metric("moved", MetricKind.GAUGE, "")], dict)


def test_names_of_the_index_stay() -> None:
    with IndexServer(settings=SMALL) as server, publishing() as publisher:
        client = Client(server.url)
        client("POST", "/register", registered(publisher))
        publish(publisher, stored([1, 2], None, T[:8]))
        until(lambda: client.query(T)["scores"] != {})
        text = client.raw("GET", "/metrics")[2].decode()
    names = re.findall("^# TYPE kvtier_index_([a-z_]+) ", text, re.MULTILINE)
    assert names == INDEX
    assert re.findall("^# HELP kvtier_index_([a-z_]+) .", text, re.MULTILINE) == INDEX
    assert all(LINE.fullmatch(line) for line in text.splitlines() if line[0] != "#")


def test_names_of_the_connector_stay() -> None:
    """vLLM shows them as `vllm:kvtier_<name>`."""
    assert [
        name for name, metric in METRICS.items() if not is_of_tiers(metric) and name != "unwritten"
    ] == CONNECTOR
    assert CONNECTOR[:19] == [total.name for total in fields(ConnectorStats)]
    assert all(metric.text.endswith(".") for metric in METRICS.values())


def test_the_labels_of_tenants_are_bounded_and_fall_to_zero() -> None:
    manager = CPUOffloadingManager(200, share=0.5)
    registry = Registry("")
    _add_pool(registry, manager, 10)

    def store(*tenants: int) -> dict[str, float]:
        for tenant in tenants:
            key = OffloadKey(bytes([tenant]) * 36)
            manager.prepare_store([key], ReqContext(tenant=f"{tenant}"))
            manager.complete_store([key])
        (samples,) = [
            samples for metric, samples in registry.collect() if metric.name == "tenant_used_bytes"
        ]
        return {labels["tenant"]: value for labels, value in samples if not isinstance(value, Histogram)}

    assert store(0, 1) == {"0": 10, "1": 10}
    used = store(*range(2, 100))
    assert (len(used), used["other"], sum(used.values())) == (65, 360, 1000)
    manager.reset_cache()
    assert set(store().values()) == {0}
    assert store(99)["other"] == 10


def test_all_that_a_tier_counts_is_shown() -> None:
    shown = {name.removeprefix("tier_") for name, metric in METRICS.items() if is_of_tiers(metric)}
    counted = {counter.name for counter in fields(TierStats)}
    beside = {"name", "medium", "state", "used", "capacity"}
    assert counted - beside == shown
