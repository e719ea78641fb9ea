"""What the tests of failing tiers share: an engine over a pool and a tier, and a player that restarts it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.engine.ranked import RankedEngine
from tests.faults.test_ranks_and_resets import INTERVALS, Layers, Player, Scenario

from kvtier.config import KVTierConfig, OffloadingConfig, TierConfig
from kvtier.engine import EngineConfig
from kvtier.offload import CPUOffloadingSpec, OffloadingSpec
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.testing.faults import with_faults
from kvtier.testing.faulty_backend import BackendFault, BackendFaultPlan
from kvtier.testing.toy_model import ToyModel
from kvtier.tiers import io_tier
from kvtier.tiers.base import Tier

FIRST = int(os.environ.get("KVTIER_SEED", "0"))
NUM_SEEDS = int(os.environ.get("KVTIER_SEEDS", "20"))
BATCH = 10
RATES = {"reset_rate": 0.15, "swap_rate": 0.003, "tiers_too": 0.02}
"""How often a player resets, swaps weights, and means the tiers too."""
WRONG_BYTES = (BackendFault.FLIP, BackendFault.SWAP, BackendFault.TORN)


@dataclass
class TieredScenario(Scenario):
    """What is drawn from a seed for an engine over a pool and a tier."""

    layers: Layers = (None, None)
    check_seals: bool = True
    kinds: tuple[BackendFault, ...] = BackendFaultPlan().kinds
    engine_config: EngineConfig = field(init=False)
    settings: dict[str, Any] = field(init=False)

    def make_tier(self, tier: TierConfig, config: OffloadingConfig) -> Tier:
        raise NotImplementedError

    def draw_engine(self) -> None:
        """Draw an engine whose cache is small."""
        random = self.random
        self.engine_config = EngineConfig(
            num_blocks=random.randint(26, 40) * len(set(self.layers)),
            block_size=4,
            state_interval=random.choice(INTERVALS),
            max_num_seqs=random.randint(2, 6),
            max_num_batched_tokens=random.choice((8, 16, 64)),
        )

    def make_spec(self, config: OffloadingConfig) -> OffloadingSpec:
        spec = CPUOffloadingSpec(config, make_tier=self.make_tier)
        plan = self.faults(100 * self.seed + config.rank, self.fault_rate)
        return with_faults(spec, plan) if self.fault_rate else spec

    def engine(self) -> RankedEngine:
        more: dict[str, Any] = {"num_ranks": self.num_ranks, "wire": self.wire, "make_spec": self.make_spec}
        settings = KVTierConfig.from_dict(self.settings)
        return RankedEngine(
            ToyModel(self.layers), self.engine_config, settings, weights_id="toy", **more, **self.host
        )


class TieredPlayer(Player):
    """Also restarts the engine. `tier_name` is what answers call the tier that tokens come from."""

    scenario: TieredScenario
    tier_name: str

    def _mend(self) -> None:
        """End what befell the tier."""
        raise NotImplementedError

    def _restart(self) -> None:
        """End the process, in a way, and start another over the same tier, with the weights of the first.

        Those may have been swapped meanwhile: KV of the others must not come back.
        """
        self.counts["restarts"] += 1
        self._collect()
        self._mend()
        self._end_tier()
        self.engine.close()
        self.scenario.wire.pipeline.clear()
        self.scenario.wire.late.clear()
        asked = [(name, self.asked[name]) for name in self.engine._requests]
        self.engine = self.scenario.engine()
        for name, (prompt, params) in asked:
            self.tainted.discard(name)
            self.engine.add_request(prompt, params, request_id=name)

    def _end_tier(self) -> None:
        """End the tier before its engine does, if that is to be."""

    def _settle(self) -> None:
        self._mend()
        super()._settle()
        self._collect()

    def _judge(self, output: Any) -> None:
        super()._judge(output)
        self.counts["from the tier"] += output.source.tiers.get(self.tier_name, 0) if output.source else 0

    def _collect(self) -> None:
        """Add what the tier has counted."""
        manager = self.scheduler.manager
        assert isinstance(manager, TieredOffloadingManager)
        (stats,) = manager.tier_stats()
        for what in ("promoted", "demoted", "failed_checks", "evicted", "questions", "late"):
            self.counts[what] += getattr(stats, what)
        self.counts["unwritten"] += manager.unwritten


def shorten_backoff(patch: pytest.MonkeyPatch) -> None:
    """Have a tier that is suspended come back within a workload, which lasts a second."""
    patch.setattr(io_tier, "_FIRST_PROBE", 0.02)
    patch.setattr(io_tier, "_STUCK_AFTER", 0.05)
