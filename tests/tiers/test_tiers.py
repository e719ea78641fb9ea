"""Every tier in the tree runs the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.testing.faulty_backend import BackendFaultPlan, FaultyBackend
from kvtier.testing.memory_tier import MemoryBackend, make_memory_tier
from kvtier.testing.tier_suite import ROW_BYTES, ManualClock, TierSuite
from kvtier.tiers.base import Tier
from kvtier.tiers.disk import DiskConfig, DiskTier


class TestMemoryTier(TierSuite):
    def make(self, num_slots: int, clock: ManualClock, plan: BackendFaultPlan) -> tuple[Tier, FaultyBackend]:
        faulty = FaultyBackend(MemoryBackend(), plan)
        return make_memory_tier(num_slots, ROW_BYTES, backend=faulty, clock=clock), faulty


class TestDiskTier(TierSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make(self, num_slots: int, clock: ManualClock, plan: BackendFaultPlan) -> tuple[Tier, FaultyBackend]:
        config = DiskConfig(path=str(self.path), capacity=num_slots * (ROW_BYTES + 128 + 576) + 20480, write_limit=0)
        tier = DiskTier(config, row_bytes=ROW_BYTES, namespace=lambda: "suite", threads=2, clock=clock)
        assert tier.wait_open()
        assert tier._io.backend is not None
        faulty = tier._io.backend = FaultyBackend(tier._io.backend, plan)
        assert tier.stats().capacity == num_slots
        return tier, faulty
