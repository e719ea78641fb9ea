"""Never a wrong token, never a stalled engine, over a pool and a disk that go wrong, against what the model
must say.

Random workloads as in `test_ranks_and_resets`, over small pools, so that most comes from the disk: rows
that come back flipped, swapped, torn or short, calls that fail, say that the disk is full or hang, and
restarts at random points, some of them without a word to the disk. The control takes the seal's check out
and must change tokens.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from tests.engine.ranked import RankedEngine
from tests.faults.test_ranks_and_resets import Player, Scenario, Windows

from kvtier.config import KVTierConfig, OffloadingConfig, TierConfig
from kvtier.engine import EngineConfig
from kvtier.offload import CPUOffloadingSpec, OffloadingSpec
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.testing.faults import with_faults
from kvtier.testing.faulty_backend import BackendFault, BackendFaultPlan, FaultyBackend
from kvtier.testing.toy_model import ToyModel
from kvtier.tiers import health, io_tier
from kvtier.tiers.base import Backend, Tier
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.seal import SealScope
from kvtier.tiers.slot_table import SlotTable

FIRST = int(os.environ.get("KVTIER_SEED", "0"))
NUM_SEEDS = int(os.environ.get("KVTIER_SEEDS", "20"))
BATCH = 10
RATES = (0.0, 0.01, 0.05, 0.1, 0.3)


class FaultyDisk(DiskTier):
    """A disk tier over a backend with faults."""

    plan = BackendFaultPlan()
    faulty: FaultyBackend | None = None

    def open_table(self, table: SlotTable, backend: Backend, scope: SealScope) -> None:
        self.faulty = FaultyBackend(backend, self.plan)
        super().open_table(table, self.faulty, scope)


@dataclass
class DiskScenario(Scenario):
    """What is drawn from a seed, over a disk in a folder of its own."""

    folder: Path = Path()
    check_seals: bool = True
    kinds: tuple[BackendFault, ...] = BackendFaultPlan().kinds
    plan: BackendFaultPlan = field(init=False)
    disk: FaultyDisk | None = None
    settings: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        random = self.random
        self.fault_rate = random.choice((0.0, 0.0, 0.1, 0.4))
        self.plan = BackendFaultPlan(self.seed, random.choice(RATES), self.kinds)
        self.windows: Windows = random.choice(((None, None), (None, None), (None, 12, None, 12)))
        self.engine_config = EngineConfig(
            num_blocks=random.randint(26, 40) * (2 if 12 in self.windows else 1),
            block_size=4,
            max_num_seqs=random.randint(2, 6),
            max_num_batched_tokens=random.choice((8, 16, 64)),
        )
        disk = {
            "path": str(self.folder),
            "capacity": random.choice((16, 64, 256)) * 4096 + (1 << 17),
            "required": True,
        }
        disk |= {
            "write": random.choice(("through", "through", "evict")),
            "policy": random.choice(("lru", "arc")),
        }
        self.settings = {
            "cpu": {"capacity": random.choice((4, 16, 24)) * 4096, "policy": random.choice(("lru", "arc"))},
            "blocks_per_chunk": random.choice((1, 1, 2)),
            "load_deadline": random.choice((0.05, 0.2)),
            "store_deadline": 0.2,
            "store_threshold": random.choice((0, 0, 0, 2)),
            "load_if_faster": random.random() < 0.2,
            "tiers": [{"disk": disk}],
        }

    def make_tier(self, tier: TierConfig, config: OffloadingConfig) -> Tier:
        more = {"description_bytes": config.description_bytes, "check_seals": self.check_seals}
        self.disk = FaultyDisk(tier, row_bytes=config.row_bytes, namespace=config.namespace_nowait, **more)
        self.disk.plan = self.plan
        assert self.disk.wait_open()
        return self.disk

    def make_spec(self, config: OffloadingConfig) -> OffloadingSpec:
        spec = CPUOffloadingSpec(config, make_tier=self.make_tier)
        plan = self.faults(100 * self.seed + config.rank, self.fault_rate)
        return with_faults(spec, plan) if self.fault_rate else spec

    def engine(self) -> RankedEngine:
        more: dict[str, Any] = {"num_ranks": self.num_ranks, "wire": self.wire, "make_spec": self.make_spec}
        settings = KVTierConfig.from_dict(self.settings)
        return RankedEngine(
            ToyModel(self.windows), self.engine_config, settings, weights_id="toy", **more, **self.host
        )


class DiskPlayer(Player):
    """Also restarts the engine, and has the disk hang: half of the time for longer than a load may take."""

    scenario: DiskScenario
    hangs_until = 0.0

    def play(self) -> None:
        try:
            super().play()
        finally:
            self._release()
            self.engine.close()

    def _disturb(self) -> None:
        random, disk = self.scenario.random, self.scenario.disk
        super()._disturb()
        if random.random() < 0.005:
            self._restart()
        elif disk is not None and disk.faulty is not None and random.random() < 0.005:
            self.counts["hangs"] += 1
            disk.faulty.hang()
            deadline = self.scenario.settings["load_deadline"]
            self.hangs_until = monotonic() + random.choice((0.0, 1.5 * deadline))
        if random.random() < 0.03 and monotonic() >= self.hangs_until:
            self._release()

    def _release(self) -> None:
        if self.scenario.disk is not None and self.scenario.disk.faulty is not None:
            self.scenario.disk.faulty.release()

    def _restart(self) -> None:
        """End the process, in a way, and start another over the same folder, with the weights of the first.

        Those may have been swapped meanwhile: KV of the others must not come back. Half of the time nothing
        is written on the way out.
        """
        self.counts["restarts"] += 1
        self._collect()
        self._release()
        if self.scenario.random.random() < 0.5 and self.scenario.disk is not None:
            self.scenario.disk.close(0.0)
        self.engine.close()
        self.scenario.wire.pipeline.clear()
        self.scenario.wire.late.clear()
        asked = [(name, self.asked[name]) for name in self.engine._requests]
        self.engine = self.scenario.engine()
        for name, (prompt, params) in asked:
            self.tainted.discard(name)
            self.engine.add_request(prompt, params, request_id=name)

    def _settle(self) -> None:
        self._release()
        super()._settle()
        self._collect()

    def _judge(self, output: Any) -> None:
        super()._judge(output)
        self.counts["from disk"] += output.source.tiers.get("disk", 0) if output.source else 0

    def _collect(self) -> None:
        manager = self.scheduler.manager
        assert isinstance(manager, TieredOffloadingManager)
        (stats,) = manager.tier_stats()
        self.counts["promoted"] += stats.promoted
        self.counts["demoted"] += stats.demoted
        self.counts["failed checks"] += stats.failed_checks
        self.counts["late"] += stats.late
        self.counts["unwritten"] += manager.unwritten


def play(scenario: DiskScenario, max_steps: int = 6000) -> Counter[str]:
    rates = {"reset_rate": 0.15, "swap_rate": 0.003, "tiers_too": 0.02}
    player = DiskPlayer(
        scenario, scenario.engine(), max_steps, num_prompts=5, num_requests=(40, 80), **rates
    )
    player.play()
    return player.counts


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload lasts a second: a tier that is suspended must come back within it."""
    monkeypatch.setattr(health, "_FIRST_PAUSE", 0.02)
    monkeypatch.setattr(io_tier, "_STUCK_AFTER", 0.05)


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("first", range(FIRST, FIRST + NUM_SEEDS, BATCH))
def test_same_tokens_over_a_disk_that_goes_wrong(first: int, totals: Counter[str], tmp_path: Path) -> None:
    for seed in range(first, first + BATCH):
        totals.update(play(DiskScenario(seed, folder=tmp_path / str(seed))))


def test_the_workloads_exercised_what_they_claim(totals: Counter[str]) -> None:
    """Guards the test above: without promotions, restarts, failed checks and hangs it would show nothing."""
    if not totals:
        pytest.skip("runs after test_same_tokens_over_a_disk_that_goes_wrong in the same session only")
    for what in ("judged", "from disk", "promoted", "demoted", "restarts", "swaps", "hangs"):
        assert totals[what] > NUM_SEEDS // 2, (what, totals)
    for what in ("failed checks", "late", "unwritten"):
        assert totals[what] > NUM_SEEDS // 20, (what, totals)


def test_without_the_check_tokens_change(tmp_path: Path) -> None:
    """With no seal checked, flips of rows that were read are noticed: the test above would notice them."""
    kinds = (BackendFault.FLIP, BackendFault.SWAP, BackendFault.TORN)
    for seed in range(300):
        scenario = DiskScenario(seed, folder=tmp_path / str(seed), check_seals=False, kinds=kinds)
        if scenario.plan.rate < 0.1:
            continue
        try:
            play(scenario, max_steps=600)
        except (
            AssertionError,
            RuntimeWarning,
        ):  # wrong tokens, ranks that disagree, or numbers that no page holds
            return
    raise AssertionError("wrong bytes of a disk were not noticed")
