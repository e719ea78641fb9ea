"""Ranks whose images differ in length, as pipeline stages have them: one row, one scheduler's side, and a
worker for each with real tensors over one pool.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.unit.connector_kit import make_config
from tests.unit.ranked_host import BLOCKS, TARGET, RankedHost

from kvtier.config import OffloadingConfig
from kvtier.offload import CPUOffloadingSpec, GPULoadStoreSpec, TransferType
from kvtier.testing.faults import Fault, FaultPlan


class FirstLoadFails(FaultPlan):
    """All stores arrive, and all loads but the first."""

    def choose(self, transfer_type: TransferType, job_id: int) -> tuple[Fault | None, float]:
        if self.injected or transfer_type[1] != GPULoadStoreSpec.medium():
            return None, 0.0
        self.injected[Fault.FAIL] += 1
        return Fault.FAIL, 0.0


def stage_configs(sizes: list[int]) -> list[OffloadingConfig]:
    """Return a config for each stage, of which a block has so many bytes there."""
    alike = replace(make_config(world_size=len(sizes), load_if_faster=False), engine_id=uuid.uuid4().hex)
    (group,) = alike.groups
    return [
        replace(
            alike,
            rank=rank,
            groups=(replace(group, bytes_per_block=size, layer_names=(f"layers.{rank}",)),),
            bytes_by_rank=tuple((size,) for size in sizes),
        )
        for rank, size in enumerate(sizes)
    ]


class Stages(RankedHost):
    """An engine of stages."""

    def __init__(self, sizes: list[int], plans: dict[int, FaultPlan] | None = None) -> None:
        ranks = range(len(sizes))
        super().__init__(stage_configs(sizes), [(plans or {}).get(rank) for rank in ranks], ranks)


@pytest.fixture(params=[[128, 64], [64, 128], [5000, 64, 3000]], ids=str)
def sizes(request: pytest.FixtureRequest) -> list[int]:
    return list(request.param)


@pytest.fixture
def stages(sizes: list[int]) -> Iterator[Stages]:
    made = Stages(sizes)
    yield made
    made.close()


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(first, second, strict=True)]


def test_each_stage_gets_its_own_bytes_back(stages: Stages, sizes: list[int]) -> None:
    computed = stages.compute("a")
    output = stages.load("b")
    assert output.finished_recving == {"b"}
    assert not output.invalid_block_ids
    assert equal(stages.loaded(), computed) == [True] * len(sizes)
    scheduler = stages.scheduler.connector_scheduler
    assert scheduler is not None
    assert scheduler.stats.store_bytes == scheduler.stats.load_bytes == len(BLOCKS) * sum(sizes)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_load_that_fails_on_one_stage_has_failed_and_the_next_arrives(stage: int) -> None:
    stages = Stages([128, 64], {stage: FirstLoadFails(0, 0.0)})
    computed = stages.compute("a")
    output = stages.load("b")
    assert output.finished_recving == {"b"}
    assert output.invalid_block_ids == set(TARGET)
    assert equal(stages.loaded(), computed) == [rank != stage for rank in range(2)]
    assert not stages.load("c").invalid_block_ids
    assert equal(stages.loaded(), computed) == [True, True]
    stages.close()


def test_a_reset_empties_the_rows_of_all_stages(stages: Stages, sizes: list[int]) -> None:
    stages.compute("a")
    assert stages.scheduler.reset_cache()
    computed = stages.compute("b")
    stages.load("c")
    assert equal(stages.loaded(), computed) == [True] * len(sizes)


def test_images_of_stages_lie_apart(stages: Stages, sizes: list[int]) -> None:
    """Each has a place as long as the longest, so that no stage's bytes come into another's."""
    computed = stages.compute("a")
    configs = stage_configs(sizes)
    assert {config.max_image_bytes for config in configs} == {max(sizes)}
    assert {config.row_bytes for config in configs} == {-(-len(sizes) * max(sizes) // 4096) * 4096}
    worker = stages.ranks[0].worker.connector_worker
    assert worker is not None
    assert isinstance(worker.spec, CPUOffloadingSpec)
    rows = worker.spec.open_pool().rows.view("int8")
    for rank, size in enumerate(sizes):
        kept = {rows[slot, rank * max(sizes) :][:size].tobytes() for slot in range(len(rows))}
        assert {block.numpy().tobytes() for block in computed[rank]} <= kept
