"""A connector whose transfers go wrong as planned. vLLM imports it by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from kvtier.config import OffloadingConfig
from kvtier.integrations.vllm import KVTierConnector
from kvtier.offload import GPULoadStoreSpec, OffloadingSpec, TransferType
from kvtier.testing.faults import Fault, FaultPlan, with_faults

__all__ = ["FailingStage", "FaultyConnector", "FaultyRanks", "HalfLoads", "HangingLoads"]


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


class FailingStage(KVTierConnector):
    """kvtier whose loads fail on rank 1, and there alone, while a file is there."""

    def make_spec(self, config: OffloadingConfig) -> OffloadingSpec:
        spec = super().make_spec(config)
        return with_faults(spec, LoadsFailOnDemand(0, 0.0)) if config.rank == 1 else spec


class LoadsFailOnDemand(FaultPlan):
    """All stores arrive, and all loads while there is no file of the name that the environment gives."""

    def choose(self, transfer_type: TransferType, job_id: int) -> tuple[Fault | None, float]:
        is_load = transfer_type[1] == GPULoadStoreSpec.medium()
        return (Fault.FAIL if is_load and Path(os.environ["KVTIER_TEST_FAIL"]).exists() else None), 0.0


class HangingLoads(FaultPlan):
    """All stores arrive and no load does, until its deadline."""

    def choose(self, transfer_type: TransferType, job_id: int) -> tuple[Fault | None, float]:
        return (Fault.HANG if transfer_type[1] == GPULoadStoreSpec.medium() else None), 0.0


class HalfLoads(FaultPlan):
    """All stores arrive, and of each load the first half."""

    def choose(self, transfer_type: TransferType, job_id: int) -> tuple[Fault | None, float]:
        return (Fault.SHORT if transfer_type[1] == GPULoadStoreSpec.medium() else None), 0.5
