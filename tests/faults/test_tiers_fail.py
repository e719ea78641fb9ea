"""Never a wrong token, never a stalled engine, over a pool and a disk that go wrong, against what the model
must say.

Random workloads as in `test_ranks_and_resets`, over small pools, so that most comes from the disk: rows
that come back flipped, swapped, torn or short, calls that fail, say that the disk is full or hang, and
restarts at random points, some of them without a word to the disk. The control takes the seal's check out
and must change tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import pytest
from tests.faults.test_ranks_and_resets import MODELS
from tests.faults.tiered_player import (
    BATCH,
    FIRST,
    NUM_SEEDS,
    RATES,
    WRONG_BYTES,
    TieredPlayer,
    TieredScenario,
    shorten_backoff,
)

from kvtier.config import OffloadingConfig, TierConfig
from kvtier.slot_table import SlotTable
from kvtier.testing.faulty_backend import BackendFaultPlan, FaultyBackend
from kvtier.tiers.base import Backend, Tier
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.seal import SealScope

FAULT_RATES = (0.0, 0.01, 0.05, 0.1, 0.3)


class FaultyDisk(DiskTier):
    """A disk tier over a backend with faults."""

    plan = BackendFaultPlan()
    faulty: FaultyBackend | None = None

    def open_table(self, table: SlotTable, backend: Backend, scope: SealScope) -> None:
        self.faulty = FaultyBackend(backend, self.plan)
        super().open_table(table, self.faulty, scope)


@dataclass
class DiskScenario(TieredScenario):
    """What is drawn from a seed, over a disk in a folder of its own."""

    folder: Path = Path()
    plan: BackendFaultPlan = field(init=False)
    disk: FaultyDisk | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        random = self.random
        self.fault_rate = random.choice((0.0, 0.0, 0.1, 0.4))
        self.plan = BackendFaultPlan(self.seed, random.choice(FAULT_RATES), self.kinds)
        self.layers = random.choice(MODELS)
        self.draw_engine()
        disk = {
            "path": str(self.folder),
            "capacity": random.choice((16, 64, 256)) * 4096 + (1 << 17),
            "required": True,
        }
        disk |= {
            "write": random.choice(("through", "through", "evict")),
            "policy": random.choice(("lru", "arc", "gittins")),
        }
        self.settings = {
            "cpu": {
                "capacity": random.choice((4, 16, 24)) * 4096,
                "policy": random.choice(("lru", "arc", "gittins")),
            },
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


class DiskPlayer(TieredPlayer):
    """Also has the disk hang: half of the time for longer than a load may take."""

    scenario: DiskScenario
    tier_name = "disk"
    hangs_until = 0.0

    def play(self) -> None:
        try:
            super().play()
        finally:
            self._mend()
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
            self._mend()

    def _mend(self) -> None:
        if self.scenario.disk is not None and self.scenario.disk.faulty is not None:
            self.scenario.disk.faulty.release()

    def _end_tier(self) -> None:
        """Half of the time nothing is written on the way out."""
        if self.scenario.random.random() < 0.5 and self.scenario.disk is not None:
            self.scenario.disk.close(0.0)


def play(scenario: DiskScenario, max_steps: int = 6000) -> Counter[str]:
    player = DiskPlayer(
        scenario, scenario.engine(), max_steps, num_prompts=5, num_requests=(40, 80), **RATES
    )
    player.play()
    return player.counts


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_backoff(monkeypatch)


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
    for what in ("judged", "from the tier", "promoted", "demoted", "restarts", "swaps", "hangs"):
        assert totals[what] > NUM_SEEDS // 2, (what, totals)
    if NUM_SEEDS >= 100:  # what befalls few of them depends on how fast they run
        for what in ("failed_checks", "late", "unwritten"):
            assert totals[what] > NUM_SEEDS // 20, (what, totals)


def test_without_the_check_tokens_change(tmp_path: Path) -> None:
    """With no seal checked, flips of rows that were read are noticed: the test above would notice them."""
    for seed in range(300):
        scenario = DiskScenario(seed, folder=tmp_path / str(seed), check_seals=False, kinds=WRONG_BYTES)
        if scenario.plan.rate < 0.1:
            continue
        try:
            play(scenario, max_steps=600)
        except (AssertionError, RuntimeWarning):
            return  # wrong tokens, ranks that disagree, or numbers that no page holds
    raise AssertionError("wrong bytes of a disk were not noticed")
