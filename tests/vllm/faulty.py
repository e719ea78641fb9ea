"""A connector whose transfers go wrong as planned. vLLM imports it by name."""

from __future__ import annotations

from typing import ClassVar

from kvtier.config import OffloadingConfig
from kvtier.integrations.vllm import KVTierConnector
from kvtier.offload import GPULoadStoreSpec, OffloadingSpec, TransferType
from kvtier.testing.faults import Fault, FaultPlan, with_faults

__all__ = ["FaultyConnector", "FaultyRanks", "HalfLoads", "HangingLoads"]


class FaultyConnector(KVTierConnector):
    """kvtier with faults."""

    plan: ClassVar[FaultPlan]

    def make_spec(self, config: OffloadingConfig) -> OffloadingSpec:
        return with_faults(super().make_spec(config), self.plan)


class FaultyRanks(KVTierConnector):
    """kvtier with faults that each rank has for itself: one fails a load at once, another late or not at
    all.
    """

    def make_spec(self, config: OffloadingConfig) -> OffloadingSpec:
        kinds = (Fault.REFUSE, Fault.FAIL, Fault.HANG, Fault.SHORT, Fault.SLOW)
        return with_faults(super().make_spec(config), FaultPlan(config.rank, 0.25, kinds))


class HangingLoads(FaultPlan):
    """All stores arrive and no load does, until its deadline."""

    def choose(self, transfer_type: TransferType, job_id: int) -> tuple[Fault | None, float]:
        return (Fault.HANG if transfer_type[1] == GPULoadStoreSpec.medium() else None), 0.0


class HalfLoads(FaultPlan):
    """All stores arrive, and of each load the first half."""

    def choose(self, transfer_type: TransferType, job_id: int) -> tuple[Fault | None, float]:
        return (Fault.SHORT if transfer_type[1] == GPULoadStoreSpec.medium() else None), 0.5
