"""Every manager in the tree runs the suite, with each policy."""

from __future__ import annotations

from tests.contract.test_policies import FIFO

from kvtier.offload import CPUOffloadingManager, OffloadingManager
from kvtier.testing.manager_suite import ManagerSuite


class TestCPUWithLRU(ManagerSuite):
    def make(self, num_slots: int) -> OffloadingManager:
        return CPUOffloadingManager(num_slots, "lru")


class TestCPUWithARC(ManagerSuite):
    def make(self, num_slots: int) -> OffloadingManager:
        return CPUOffloadingManager(num_slots, "arc")


class TestCPUWithAPolicyFromOutside(ManagerSuite):
    def make(self, num_slots: int) -> OffloadingManager:
        return CPUOffloadingManager(num_slots, FIFO(num_slots))
