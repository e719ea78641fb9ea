"""Ranks that hold the same bytes: one stores, a row has one image, and all load it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from tests.unit.connector_kit import Clock, Request, make_config
from tests.unit.ranked_host import BLOCKS, PROMPT, TARGET, RankedHost

from kvtier.config import OffloadingConfig
from kvtier.connector import (
    EndOrder,
    KVConnectorOutput,
    NewRequest,
    OffloadingConnectorMetadata,
    OffloadingConnectorScheduler,
    StepView,
)
from kvtier.offload import (
    CPULoadStoreSpec,
    CPUOffloadingSpec,
    GPULoadStoreSpec,
    TransferType,
)
from kvtier.testing.faults import Fault, FaultPlan

PAGE = 4096


def replica_config(world_size: int, replicas: int) -> OffloadingConfig:
    alike = make_config(world_size=world_size, load_if_faster=False)
    groups = (replace(alike.groups[0], bytes_per_block=PAGE),)
    return replace(alike, groups=groups, engine_id=uuid.uuid4().hex, replicas=replicas)


class Replicas(RankedHost):
    """Ranks of which some hold the same bytes."""

    def __init__(self, config: OffloadingConfig, seeds: list[int], plan: FaultPlan | None = None) -> None:
        self.config = config
        configs = [replace(config, rank=rank) for rank in range(config.world_size)]
        super().__init__(configs, [plan] * config.world_size, seeds)


Make = Callable[..., Replicas]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Replicas] = []

    def make_replicas(world_size: int, replicas: int, seeds: list[int], **options: FaultPlan) -> Replicas:
        made.append(Replicas(replica_config(world_size, replicas), seeds, **options))
        return made[-1]

    yield make_replicas
    for engine in made:
        engine.close()


def test_the_first_stores_and_all_load(make: Make) -> None:
    """Ranks that hold different bytes, which they never do, show whose bytes are kept."""
    engine = make(2, 2, [1, 2])
    first, other = engine.compute("a")
    assert [len(output.reports) for output in engine.outputs] == [1, 0]
    assert not torch.equal(first, other)
    output = engine.load("b")
    assert output.finished_recving == {"b"}
    assert [len(output.reports) for output in engine.outputs] == [1, 1]
    for rank in engine.ranks:
        assert torch.equal(rank.blocks(TARGET), first)


def test_of_four_ranks_two_by_two(make: Make) -> None:
    engine = make(4, 2, [1, 1, 2, 2])
    computed = engine.compute("a")
    assert [len(output.reports) for output in engine.outputs] == [1, 0, 1, 0]
    engine.load("b")
    for rank, bytes_of in zip(engine.ranks, computed, strict=True):
        assert torch.equal(rank.blocks(TARGET), bytes_of)


def test_a_row_has_one_image_for_them() -> None:
    alike, replicas = replica_config(4, 1), replica_config(4, 4)
    assert [config.row_bytes for config in (alike, replicas)] == [4 * PAGE, PAGE]
    assert replicas.num_slots == 4 * alike.num_slots
    last = replace(replicas, rank=3).by_image()
    assert (last.rank, last.world_size, last.row_bytes) == (0, 1, PAGE)
    assert replace(alike, rank=3).by_image() == replace(alike, rank=3), "others are as they were"


def test_bytes_are_counted_as_they_are_moved(make: Make) -> None:
    engine = make(2, 2, [1, 1])
    engine.compute("a")
    engine.load("b")
    scheduler = engine.scheduler.connector_scheduler
    assert scheduler is not None
    assert scheduler.stats.store_bytes == len(BLOCKS) * PAGE
    assert scheduler.stats.load_bytes == 2 * len(BLOCKS) * PAGE


class StoresFail(FaultPlan):
    """No store arrives."""

    def choose(self, transfer_type: TransferType, job_id: int) -> tuple[Fault | None, float]:
        return (Fault.FAIL if transfer_type[0] == GPULoadStoreSpec.medium() else None), 0.0


def test_a_chunk_that_the_first_rank_could_not_store_is_absent(make: Make) -> None:
    engine = make(2, 2, [1, 1], plan=StoresFail(0, 0.0))
    engine.compute("a")
    assert engine.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (0, False)


def test_a_rank_that_does_not_store_says_nothing_of_a_step_that_was_cut_off(make: Make) -> None:
    engine = make(2, 2, [1, 1])
    orders = OffloadingConnectorMetadata(
        reqs_to_store={"a": (GPULoadStoreSpec([5]), CPULoadStoreSpec([0]))}, store_jobs={"a": 7}
    )
    for rank, reported in zip(engine.ranks, [[7], []], strict=True):
        rank.worker.bind_connector_metadata(orders)
        output = rank.step(OffloadingConnectorMetadata())
        assert [report.result.job_id for report in output.reports] == reported


def test_only_who_stores_is_asked_for_a_report_that_does_not_come() -> None:
    clock = Clock()
    config = replica_config(2, 2)
    scheduler = OffloadingConnectorScheduler(CPUOffloadingSpec(config), clock, Request.describe)
    request = Request("a", PROMPT)
    scheduler.get_num_new_matched_tokens(request, 0)
    step = StepView(new=[NewRequest("a", ([*BLOCKS, 6],), 0)], num_scheduled_tokens={"a": len(PROMPT)})
    (job_id,) = scheduler.build_connector_meta(step).store_jobs.values()
    asked: dict[int, EndOrder] = {}
    while job_id not in asked:
        clock.now += config.settings.store_deadline
        scheduler.update_connector_output(KVConnectorOutput())
        asked = scheduler.build_connector_meta(StepView()).jobs_to_end
    assert set(asked[job_id].ranks) == {0}
    scheduler.shutdown()


def test_rows_have_a_namespace_of_their_own() -> None:
    configs = [replace(replica_config(4, replicas), namespace="known") for replicas in (1, 2, 4)]
    names = [config.tier_namespace_nowait() for config in configs]
    assert names == ["known 1x4x16384", "known 1x4/2x8192", "known 1x4/4x4096"]
