"""Every backend that engines share runs the suite of shared tiers: in memory, asked in batches or one by
one."""

from __future__ import annotations

import pytest

from kvtier.testing.memory_tier import MemoryServer
from kvtier.testing.shared_tier_suite import SharedTierSuite
from kvtier.tiers.base import Backend


class TestInBatches(SharedTierSuite):
    @pytest.fixture(autouse=True)
    def server(self) -> None:
        self.memory = MemoryServer()

    def make_backend(self) -> Backend:
        return self.memory


class TestOneByOne(TestInBatches):
    @pytest.fixture(autouse=True)
    def server(self) -> None:
        self.memory = MemoryServer(contains_batch=1)
