"""Every manager in the tree runs the suite, with each policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.contract.test_policies import FIFO

from kvtier.keys import OffloadKey
from kvtier.offload import (
    CPUOffloadingManager,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
)
from kvtier.offload.tiered import ConfiguredTier, TieredOffloadingManager
from kvtier.testing.manager_suite import ManagerSuite
from kvtier.testing.memory_tier import make_memory_tier
from kvtier.tiers.base import Tier


class TestCPUWithLRU(ManagerSuite):
    def make(self, num_slots: int) -> OffloadingManager:
        return CPUOffloadingManager(num_slots, "lru")


class TestCPUWithARC(ManagerSuite):
    def make(self, num_slots: int) -> OffloadingManager:
        return CPUOffloadingManager(num_slots, "arc")


class TestCPUWithAPolicyFromOutside(ManagerSuite):
    def make(self, num_slots: int) -> OffloadingManager:
        return CPUOffloadingManager(num_slots, FIFO(num_slots))


ROW = 4096


class Stepped(TieredOffloadingManager):
    """A manager whose tiers have a turn at every call that changes something. It tells of the pool alone."""

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._turn()
        return super().prepare_store(keys, req_context)

    def complete_store(self, *args: Any, **kwargs: Any) -> None:
        super().complete_store(*args, **kwargs)
        self._turn()

    def discard(self, *args: Any, **kwargs: Any) -> None:
        super().discard(*args, **kwargs)
        self._turn()

    def reset_cache(self) -> None:
        super().reset_cache()
        self._turn()

    def _turn(self) -> None:
        """Have everything written that is on its way: the suite counts the chunks that nobody reads."""
        self.end_step()
        while self._demotions.has_jobs():
            for tier in self.tiers:
                tier.wait_any(1.0)
            self.end_step()

    def take_events(self) -> list[OffloadingEvent]:
        return [event for event in super().take_events() if event.medium == "CPU"]


class TieredSuite(ManagerSuite):
    tiers: list[Tier]

    @pytest.fixture(autouse=True)
    def _close_tiers(self) -> Iterator[None]:
        self.tiers = []
        yield
        for tier in self.tiers:
            tier.check()
            assert tier.close()

    def make_tier(self, write: str = "through") -> ConfiguredTier:
        tier = make_memory_tier(16, ROW, name=f"tier {len(self.tiers)}")
        self.tiers.append(tier)
        return ConfiguredTier(tier, write)


def make_rows(num_slots: int) -> np.ndarray[Any, Any]:
    return np.zeros((num_slots, ROW), np.uint8)


class TestTieredBetweenSteps(TieredSuite):
    """Offers pile up, and no tier has a turn."""

    def make(self, num_slots: int) -> OffloadingManager:
        return TieredOffloadingManager(
            CPUOffloadingManager(num_slots), make_rows(num_slots), [self.make_tier()]
        )


class TestTieredWrittenThrough(TieredSuite):
    def make(self, num_slots: int) -> OffloadingManager:
        return Stepped(
            CPUOffloadingManager(num_slots), make_rows(num_slots), [self.make_tier(), self.make_tier()]
        )


class TestTieredWrittenAhead(TieredSuite):
    def make(self, num_slots: int) -> OffloadingManager:
        return Stepped(
            CPUOffloadingManager(num_slots, "arc"), make_rows(num_slots), [self.make_tier("evict")]
        )
