"""Engines over a pool and a tier below it: in memory, with faults on request, on disk, or on a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.config import KVTierConfig, OffloadingConfig, TierConfig
from kvtier.engine import Engine, EngineConfig
from kvtier.engine.config import LayerKind
from kvtier.offload import CPUOffloadingSpec
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.testing.faulty_backend import FaultyBackend
from kvtier.testing.memory_tier import MemoryBackend, MemoryServer, make_memory_tier, make_shared_tier
from kvtier.testing.toy_model import ToyModel
from kvtier.tiers.base import Backend, Tier

ROW = 4096
ONE_GROUP: tuple[LayerKind, ...] = (None, None)
PATIENCE = 60.0
"""How long a busy machine may take. Loads have as long, unless a test is about those that are late."""


@dataclass
class MemoryTiers:
    """Makes tiers in memory for specs, all over one backend."""

    num_slots: int = 256
    backend: FaultyBackend = field(default_factory=lambda: FaultyBackend(MemoryBackend()))
    options: dict[str, Any] = field(default_factory=dict)
    made: list[Tier] = field(default_factory=list)

    def make(self, tier: TierConfig, config: OffloadingConfig) -> Tier:
        made = make_memory_tier(self.num_slots, config.row_bytes, backend=self.backend, **self.options)
        self.made.append(made)
        return made

    def spec(self, config: OffloadingConfig) -> CPUOffloadingSpec:
        return CPUOffloadingSpec(config, make_tier=self.make)


@dataclass
class SharedTiers:
    """Makes tiers for the specs of one engine, over a server that others may use too."""

    server: Backend = field(default_factory=MemoryServer)
    options: dict[str, Any] = field(default_factory=dict)
    made: list[Tier] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backend = FaultyBackend(self.server)

    def make(self, tier: TierConfig, config: OffloadingConfig) -> Tier:
        made = make_shared_tier(config.row_bytes, backend=self.backend, **self.options)
        self.made.append(made)
        return made

    def spec(self, config: OffloadingConfig) -> CPUOffloadingSpec:
        return CPUOffloadingSpec(config, make_tier=self.make)


def shared_engine(
    tiers: SharedTiers,
    layers: Sequence[LayerKind] = ONE_GROUP,
    *,
    rows: int = 64,
    settings: dict[str, Any] | None = None,
    **engine: Any,
) -> Engine:
    """Make a toy engine with a pool of `rows` chunks over a server in memory."""
    kvtier = {
        "cpu": {"capacity": rows * ROW},
        "load_if_faster": False,
        "load_deadline": PATIENCE,
        "tiers": [{"valkey": {"url": "valkey://in.memory"}}],
    } | (settings or {})
    return Engine(
        ToyModel(layers), _engine_config(engine), KVTierConfig.from_dict(kvtier), spec_factory=tiers.spec
    )


def server_engine(tier: dict[str, Any], layers: Sequence[LayerKind] = ONE_GROUP, **settings: Any) -> Engine:
    """Make an engine over a pool and a real server; all that are made so have one namespace."""
    kvtier = {
        "cpu": {"capacity": 64 * ROW},
        "load_if_faster": False,
        "load_deadline": PATIENCE,
        "tiers": [tier],
    } | settings
    return Engine(ToyModel(layers), _engine_config({}), KVTierConfig.from_dict(kvtier), weights_id="toy")


def _engine_config(settings: dict[str, Any]) -> EngineConfig:
    return EngineConfig(
        **{"num_blocks": 65, "block_size": 4, "max_num_batched_tokens": 16, "kv_events": True} | settings
    )


def tiered_engine(
    tiers: MemoryTiers,
    layers: Sequence[LayerKind] = ONE_GROUP,
    *,
    rows: int = 64,
    write: str = "through",
    settings: dict[str, Any] | None = None,
    **engine: Any,
) -> Engine:
    """Make a toy engine with a pool of `rows` chunks over a tier.

    Nothing is too slow to be worth it, or late, unless told so.
    """
    kvtier = {
        "cpu": {"capacity": rows * ROW},
        "load_if_faster": False,
        "load_deadline": PATIENCE,
        "tiers": [{"disk": {"path": "in memory", "capacity": tiers.num_slots * ROW, "write": write}}],
    } | (settings or {})
    return Engine(
        ToyModel(layers), _engine_config(engine), KVTierConfig.from_dict(kvtier), spec_factory=tiers.spec
    )


def disk_engine(
    folder: Path,
    layers: Sequence[LayerKind] = ONE_GROUP,
    *,
    load_deadline: float = PATIENCE,
    **engine: Any,
) -> Engine:
    """Make an engine over a pool and a real folder; all that are made so have one namespace.

    Its start does not wait for the disk.
    """
    kvtier = {
        "cpu": {"capacity": 64 * ROW},
        "load_if_faster": False,
        "load_deadline": load_deadline,
        "tiers": [{"disk": {"path": str(folder), "capacity": "4MiB"}}],
    }
    config = EngineConfig(**{"num_blocks": 65, "block_size": 4, "kv_events": True} | engine)
    return Engine(ToyModel(layers), config, KVTierConfig.from_dict(kvtier), weights_id="toy")


def manager_of(engine: Engine) -> TieredOffloadingManager:
    """Return an engine's manager."""
    assert engine.connector is not None
    assert engine.connector.connector_scheduler is not None
    manager = engine.connector.connector_scheduler.manager
    assert isinstance(manager, TieredOffloadingManager)
    return manager


def num_unwritten(engine: Engine) -> int:
    """Count the rows that were offered to a tier and that nothing has become of, once for each tier."""
    demotions = manager_of(engine)._demotions
    offered = sum(len(offers) for offers in demotions._offers.values())
    return offered + sum(len(job.lent) for job in demotions._jobs)


def settle(engine: Engine) -> None:
    """Step until all that was offered to tiers is written. A drain ends when nothing has moved for a second,
    which on a busy machine says nothing.
    """
    until = time.monotonic() + PATIENCE
    engine.drain()
    while unwritten := num_unwritten(engine):
        assert time.monotonic() < until, f"{unwritten} rows are not written"
        engine.step()
