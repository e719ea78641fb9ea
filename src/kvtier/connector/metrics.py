"""The counts and times of the scheduler's side, and how they are shown: as metrics, and in words.

Scheduler thread only; another thread that reads `ConnectorStats` may see old totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvtier.config import OffloadingConfig, format_size
from kvtier.connector.audit import AuditJob, Audits
from kvtier.connector.cost import CostModel
from kvtier.connector.explain import Explainer, Explanation
from kvtier.connector.jobs import LoadJob, StoreJob
from kvtier.metrics import (
    SECONDS,
    Histogram,
    Metric,
    MetricKind,
    Registry,
    Sample,
    counter,
    texts_of,
)
from kvtier.offload.base import OffloadingManager
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.tiers.base import TierStats


@dataclass(slots=True)
class ConnectorStats:
    """Totals since the start. Each is a metric, too."""

    loads: int = counter("Loads from the pool that are over.")
    loads_failed: int = counter("Loads that did not deliver everything, so that the engine recomputed it.")
    load_bytes: int = counter("Bytes loaded, over all ranks.")
    stores: int = counter("Stores to the pool that are over.")
    stores_failed: int = counter("Stores that did not deliver everything.")
    store_bytes: int = counter("Bytes stored, over all ranks.")
    stored_chunks: int = counter("Chunks stored to the pool.")
    unpacked_chunks: int = counter("Chunks that were not kept because they do not pack.")
    waits: int = counter("Times that a request was asked to wait for a chunk on its way.")
    not_worth: int = counter("Times that computing was expected to be faster than a load.")
    flushes: int = counter("Stores that had to end before a step overwrote what they read.")
    expired: int = counter("Transfers that were given up because not every worker reported them.")
    audited_chunks: int = counter(
        "Chunks that were computed although they were kept, and compared with what was kept."
    )
    audit_mismatches: int = counter("Chunks of them whose kept row was not the KV that was computed.")
    namespace_departures: int = counter(
        "Times that audits made this process drop everything and leave its namespace."
    )
    asked_tokens: int = counter("Prompt tokens that the engine's own cache did not have.")
    loaded_tokens: int = counter("Prompt tokens of them that were loaded instead of computed.")
    weight_changes: int = counter("Times that a worker has found other weights in memory than before.")
    saved_seconds: float = counter(
        "Seconds of computing that loads have saved, estimated: less the seconds of the loads."
    )

    def count_load(self, job: LoadJob) -> None:
        """Count a load that is over."""
        self.loads += 1
        self.loads_failed += bool(job.failed)
        self.load_bytes += 0 if job.failed else job.num_bytes

    def count_store(self, job: StoreJob) -> None:
        """Count a store that is over. A chunk that does not pack is no fault of the store."""
        unpacked = min(job.unpacked, len(job.failed))
        self.stores += 1
        self.stores_failed += len(job.failed) > unpacked
        self.store_bytes += 0 if job.failed else job.num_bytes
        self.stored_chunks += len(job.keys) - len(job.failed)
        self.unpacked_chunks += unpacked

    def count_audit(self, job: AuditJob, num_wrong: int) -> None:
        """Count an audit that has compared all its chunks."""
        self.audited_chunks += len(job.keys)
        self.audit_mismatches += num_wrong

    def count_tokens(self, explanation: Explanation | None, cost: CostModel) -> None:
        """Count the tokens of a prompt by their source, once that is known, and the time that this saved.

        A load that took longer than computing counts as no time saved: a counter never falls.
        """
        if explanation is not None:
            loaded = sum(explanation.from_tiers.values())
            self.asked_tokens += loaded + explanation.recomputed
            self.loaded_tokens += loaded
            if explanation.load_seconds is not None:
                self.saved_seconds += max(0.0, cost.saved_seconds(loaded) - explanation.load_seconds)


_COUNTERS = texts_of(ConnectorStats, MetricKind.COUNTER)
_MISSES = {"misses": "Prompts by the reason why their first chunk that was computed was not loaded."}
_POOL_COUNTERS = {
    "evictions": "Chunks that left the pool for others.",
    "refusals": "Chunks that were offered and not taken: offered too rarely, or there was no slot.",
    "not_kept": "Chunks that requests wanted to keep, beyond the part of the pool that hints may keep.",
}
_UNWRITTEN = {"unwritten": "Chunks that left the pool, or had to, before a tier had written them."}
_AUDIT_GAUGES = {"audit_distance": "The largest distance so far between a kept chunk and its computed KV."}
_POOL_GAUGES = {
    "used_bytes": "Host memory that chunks take, those being written and read included.",
    "capacity_bytes": "Host memory for chunks.",
}
_TENANT_GAUGES = {"tenant_used_bytes": "Host memory that the chunks of each tenant take, with shares."}
_MOST_TENANTS = 64
"""The tenants with a label of their own; all others are one."""
_ENGINE_GAUGES = {
    "stale_blocks": "Blocks of the engine with KV of before a reset, from which nothing is stored.",
    "packing_ratio": "How many times the tokens the same memory keeps because rows are packed, or 1.",
}
_TRANSFER_TIMES = {
    "load_seconds": "Seconds that the slowest worker took to move the bytes of a load.",
    "store_seconds": "Seconds that the slowest worker took to move the bytes of a store.",
}
_TIER_COUNTERS = texts_of(TierStats, MetricKind.COUNTER)
_TIER_GAUGES = texts_of(TierStats, MetricKind.GAUGE)
_TIER_TIMES = {
    "promote_seconds": "Seconds of I/O of rows that were promoted together.",
    "demote_seconds": "Seconds of I/O of rows that were demoted together.",
}


def _metrics() -> Iterator[Metric]:
    for names, kind, prefix in (
        (_COUNTERS | _MISSES | _POOL_COUNTERS | _UNWRITTEN, MetricKind.COUNTER, ""),
        (_POOL_GAUGES | _TENANT_GAUGES | _ENGINE_GAUGES | _AUDIT_GAUGES, MetricKind.GAUGE, ""),
        (_TRANSFER_TIMES, MetricKind.HISTOGRAM, ""),
        (_TIER_COUNTERS, MetricKind.COUNTER, "tier_"),
        (_TIER_GAUGES, MetricKind.GAUGE, "tier_"),
        (_TIER_TIMES, MetricKind.HISTOGRAM, "tier_"),
    ):
        for name, text in names.items():
            yield Metric(prefix + name, kind, text, SECONDS if kind is MetricKind.HISTOGRAM else ())


METRICS = {metric.name: metric for metric in _metrics()}
"""All metrics of a connector, by name."""


def is_of_tiers(metric: Metric) -> bool:
    """Return whether a metric has a value for each tier below the pool, with the label `tier`."""
    return metric.name.startswith("tier_")


def label_names(metric: Metric) -> list[str]:
    """Return the names of a metric's labels: `tier`, `reason`, `tenant` or none."""
    if is_of_tiers(metric):
        return ["tier"]
    return ["reason"] if metric.name in _MISSES else ["tenant"] if metric.name in _TENANT_GAUGES else []


def make_registry(
    stats: ConnectorStats,
    times: TransferTimes,
    explainer: Explainer,
    manager: OffloadingManager,
    audits: Audits,
    config: OffloadingConfig,
    stale_blocks: set[int],
) -> Registry:
    """Return the metrics of a connector, named `kvtier_...`. Reading the pool's metrics counts its slots."""
    registry = Registry("kvtier_")
    registry.add(_named(_AUDIT_GAUGES), lambda: {"audit_distance": [({}, audits.largest_distance)]})

    def read_connector() -> dict[str, list[Sample]]:
        samples: dict[str, list[Sample]] = {name: [({}, getattr(stats, name))] for name in _COUNTERS}
        samples["stale_blocks"] = [({}, len(stale_blocks))]
        samples["packing_ratio"] = [({}, config.packing_ratio)]
        return samples | {"load_seconds": [({}, times.loads)], "store_seconds": [({}, times.stores)]}

    def read_misses() -> dict[str, list[Sample]]:
        return {"misses": [({"reason": reason.value}, count) for reason, count in explainer.misses.items()]}

    registry.add(_named(_COUNTERS, _ENGINE_GAUGES, _TRANSFER_TIMES), read_connector)
    registry.add(_named(_MISSES), read_misses)
    if isinstance(manager, CPUOffloadingManager | TieredOffloadingManager):
        _add_pool(registry, manager, config.row_bytes)
    if isinstance(manager, TieredOffloadingManager):
        _add_tiers(registry, manager)
    return registry


def _named(*groups: Iterable[str], prefix: str = "") -> list[Metric]:
    return [METRICS[prefix + name] for names in groups for name in names]


def _add_pool(
    registry: Registry, manager: CPUOffloadingManager | TieredOffloadingManager, row_bytes: int
) -> None:
    shown: dict[str, None] = {}  # the tenants with a label, for good: a gauge must be able to fall to 0

    def read() -> dict[str, list[Sample]]:
        pool = manager.stats()
        used = dict.fromkeys(shown, 0)
        for tenant, slots in pool.by_tenant.items():
            name = tenant or "none"
            if name not in shown:
                name = name if len(shown) < _MOST_TENANTS else "other"
                shown[name] = None
            used[name] = used.get(name, 0) + slots * row_bytes
        return {
            "not_kept": [({}, pool.not_kept)],
            "tenant_used_bytes": [({"tenant": name}, value) for name, value in used.items()],
            "evictions": [({}, pool.evicted)],
            "refusals": [({}, pool.refused)],
            "used_bytes": [({}, (pool.slots - pool.free) * row_bytes)],
            "capacity_bytes": [({}, pool.slots * row_bytes)],
        }

    registry.add(_named(_POOL_COUNTERS, _POOL_GAUGES, _TENANT_GAUGES), read)


def _add_tiers(registry: Registry, manager: TieredOffloadingManager) -> None:
    def read() -> dict[str, list[Sample]]:
        samples: dict[str, list[Sample]] = {}
        for tier in manager.tier_stats():
            labels = {"tier": tier.name}
            for name in (*_TIER_COUNTERS, *_TIER_GAUGES):
                value = tier.suspended is not None if name == "suspended" else getattr(tier, name)
                if value is not None:  # else only the tier's server knows it
                    samples.setdefault(f"tier_{name}", []).append((labels, int(value)))
            for direction, times in manager.tier_times.items():
                samples.setdefault(f"tier_{direction.name.lower()}_seconds", []).append(
                    (labels, times[tier.name])
                )
        return samples

    registry.add(_named(_UNWRITTEN), lambda: {"unwritten": [({}, manager.unwritten)]})
    registry.add(_named(_TIER_COUNTERS, _TIER_GAUGES, _TIER_TIMES, prefix="tier_"), read)


def describe_tiers(manager: TieredOffloadingManager) -> list[str]:
    """Describe each tier in one line; the first line also counts the rows that no tier has written."""
    lines = [describe_tier(tier) for tier in manager.tier_stats()]
    if lines and manager.unwritten:
        lines[0] += f"; {manager.unwritten:,} rows left the pool, or had to, before they were written"
    return lines


def _held(tier: TierStats) -> list[str]:
    if tier.used is None or tier.used_bytes is None or tier.capacity_bytes is None:
        return []
    return [f"{tier.used:,} rows ({format_size(tier.used_bytes)} of {format_size(tier.capacity_bytes)})"]


def _moved(rows: int, how: str, num_bytes: int, seconds: float) -> str:
    return f"{rows:,} {how} ({format_size(num_bytes)} in {seconds:.2f} s of I/O)"


def describe_tier(tier: TierStats) -> str:
    """Describe in one line what a tier holds, what it moved, and what went wrong, if anything did."""
    parts = [
        *_held(tier),
        _moved(tier.promoted, "promoted", tier.promoted_bytes, tier.promote_seconds),
        _moved(tier.demoted, "demoted", tier.demoted_bytes, tier.demote_seconds),
    ]
    for name in ("evicted", "refused", "dropped", "failed_checks", "failed", "late", "stuck"):
        if count := getattr(tier, name):
            parts.append(f"{count:,} {name.replace('_', ' ')}")
    if tier.suspended is not None:
        parts.append(f"suspended: {tier.suspended}")
    elif tier.state not in ("open", "closed"):
        parts.append(tier.state)
    return f"{tier.name}: {', '.join(parts)}"


class TransferTimes:
    """The seconds of loads and stores that succeeded, as the slowest rank has measured the transfer itself.

    The time from the order to the last report would contain whole steps: a store waits for the pass that
    computes its blocks, and reports travel with steps.
    """

    def __init__(self) -> None:
        self.loads, self.stores = Histogram(), Histogram()

    def add(self, job: LoadJob | StoreJob) -> None:
        """Add the time of a job that is over. A job that no rank has timed is left out."""
        if not job.failed and job.seconds is not None:
            times = self.loads if isinstance(job, LoadJob) else self.stores
            times.observe(job.seconds)
