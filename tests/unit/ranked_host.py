"""Ranks over one pool, each a worker with real tensors, and their scheduler's side: driven by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tests.unit.connector_kit import Request
from tests.unit.rank_process import Rank

from kvtier.config import OffloadingConfig
from kvtier.connector import (
    ConnectorRole,
    KVConnectorOutput,
    NewRequest,
    OffloadingConnector,
    StepView,
    merge_outputs,
)
from kvtier.offload import CPUOffloadingSpec
from kvtier.testing.faults import FaultPlan, with_faults

__all__ = ["BLOCKS", "PROMPT", "TARGET", "RankedHost"]

NUM_BLOCKS = 32
PROMPT = list(range(26))
BLOCKS, TARGET = [3, 9, 4, 8, 5, 7], [20, 14, 15, 21, 11, 10]


class RankedHost:
    """One prompt goes through all ranks at a time. `seeds` fill the ranks' blocks."""

    def __init__(
        self,
        configs: Sequence[OffloadingConfig],
        plans: Sequence[FaultPlan | None],
        seeds: Sequence[int],
    ) -> None:
        self.seeds = seeds
        self.ranks = [
            Rank(config, NUM_BLOCKS, None if plan is None else with_faults(CPUOffloadingSpec(config), plan))
            for config, plan in zip(configs, plans, strict=True)
        ]
        self.scheduler = OffloadingConnector(configs[0], ConnectorRole.SCHEDULER)
        self.outputs: list[KVConnectorOutput] = []

    def step(self, step: StepView) -> KVConnectorOutput:
        """Run a step on all ranks; `outputs` are what each of them says."""
        orders = self.scheduler.build_connector_meta(step)
        self.outputs = [rank.step(orders) for rank in self.ranks]
        output = merge_outputs(self.outputs)
        self.scheduler.update_connector_output(output)
        return output

    def compute(self, req_id: str) -> list[torch.Tensor]:
        """Compute the prompt into `BLOCKS`, forget it, and return what each rank had."""
        request = Request(req_id, PROMPT)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        for seed, rank in zip(self.seeds, self.ranks, strict=True):
            rank.fill(seed)
        self.step(StepView(new=[NewRequest(req_id, ([*BLOCKS, 6],), 0)], num_scheduled_tokens={req_id: 26}))
        assert self.scheduler.request_finished(request) == (False, None)
        computed = [rank.blocks(BLOCKS) for rank in self.ranks]
        for rank in self.ranks:
            rank.fill(99)
        return computed

    def load(self, req_id: str) -> KVConnectorOutput:
        """Load the prompt into `TARGET`."""
        request = Request(req_id, PROMPT)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (24, True)
        self.scheduler.update_state_after_alloc(request, (TARGET,), 24)
        output = self.step(StepView())
        self.scheduler.request_finished(request)
        return output

    def loaded(self) -> list[torch.Tensor]:
        """Return what each rank has in `TARGET`."""
        return [rank.blocks(TARGET) for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.scheduler.shutdown()
