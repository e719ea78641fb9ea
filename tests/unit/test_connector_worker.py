"""The worker's side: real tensors, a real pool, two ranks, in one process and in two."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from tests.unit.connector_kit import Request, make_config
from tests.unit.rank_process import Rank, RemoteRank, serve

from kvtier.config import OffloadingConfig
from kvtier.connector import (
    ConnectorRole,
    KVConnectorOutput,
    NewRequest,
    OffloadingConnector,
    OffloadingConnectorMetadata,
    OutputAggregator,
    StepView,
)
from kvtier.errors import InputError
from kvtier.offload import CPULoadStoreSpec, GPULoadStoreSpec

NUM_BLOCKS = 32
PROMPT = list(range(26))

Ranks = list[Rank | RemoteRank]


@pytest.fixture
def config() -> OffloadingConfig:
    import uuid

    return replace(make_config(world_size=2, load_if_faster=False), engine_id=uuid.uuid4().hex)


@pytest.fixture(params=["one process", "two processes"])
def ranks(request: pytest.FixtureRequest, config: OffloadingConfig) -> Iterator[Ranks]:
    if request.param == "one process":
        pair: Ranks = [Rank(replace(config, rank=rank), NUM_BLOCKS) for rank in range(2)]
        yield pair
        for rank in pair:
            rank.close()
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, replace(config, rank=1), NUM_BLOCKS))
    process.start()
    local, remote = Rank(replace(config, rank=0), NUM_BLOCKS), RemoteRank(ours)
    yield [local, remote]
    remote.close()
    local.close()
    process.join(10)
    assert process.exitcode == 0


def step_all(ranks: Ranks, aggregator: OutputAggregator, metadata: OffloadingConnectorMetadata) -> KVConnectorOutput:
    return aggregator.aggregate([rank.step(metadata) for rank in ranks])


def test_two_ranks_store_and_load_the_bytes_of_their_own(config: OffloadingConfig, ranks: Ranks) -> None:
    scheduler = OffloadingConnector(config, ConnectorRole.SCHEDULER)
    aggregator = OutputAggregator(2)
    for rank, owner in enumerate(ranks):
        owner.fill(rank + 1)
    first = Request("a", PROMPT)
    assert scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
    blocks = [3, 9, 4, 8, 5, 7, 6]
    meta = scheduler.build_connector_meta(StepView(new=[NewRequest("a", (blocks,), 0)], num_scheduled_tokens={"a": 26}))
    kept = [owner.blocks(blocks[:6]) for owner in ranks]
    scheduler.update_connector_output(step_all(ranks, aggregator, meta))
    assert scheduler.request_finished(first) == (False, None)
    for owner in ranks:
        owner.fill(99)
    again = Request("b", PROMPT)
    assert scheduler.get_num_new_matched_tokens(again, 0) == (24, True)
    target = [20, 14, 15, 21, 11, 10]
    scheduler.update_state_after_alloc(again, (target,), 24)
    output = step_all(ranks, aggregator, scheduler.build_connector_meta(StepView()))
    assert output.finished_recving == {"b"}
    assert not output.invalid_block_ids
    scheduler.update_connector_output(output)
    for owner, bytes_of in zip(ranks, kept, strict=True):
        assert torch.equal(owner.blocks(target), bytes_of)
    assert not torch.equal(kept[0], kept[1]), "ranks hold different bytes, or this shows nothing"
    scheduler.shutdown()


def test_a_finished_request_is_named_when_its_stores_are_over_on_every_rank(
    config: OffloadingConfig, ranks: Ranks
) -> None:
    scheduler = OffloadingConnector(config, ConnectorRole.SCHEDULER)
    aggregator = OutputAggregator(2)
    request = Request("a", PROMPT)
    scheduler.get_num_new_matched_tokens(request, 0)
    meta = scheduler.build_connector_meta(
        StepView(new=[NewRequest("a", ([1, 2, 3, 4, 5, 6, 7],), 0)], num_scheduled_tokens={"a": 26})
    )
    assert scheduler.request_finished(request) == (True, None)
    outputs = [rank.step(meta) for rank in ranks]
    first = aggregator.aggregate(outputs)
    scheduler.update_connector_output(first)
    named = set(first.finished_sending)
    second = step_all(ranks, aggregator, scheduler.build_connector_meta(StepView(finished_req_ids={"a"})))
    named |= second.finished_sending
    assert named == {"a"}
    assert not scheduler.has_pending_push_work()
    scheduler.shutdown()


def test_a_job_that_no_handler_takes_is_reported_as_failed(config: OffloadingConfig) -> None:
    alone = replace(config, world_size=1)
    rank = Rank(alone, NUM_BLOCKS)
    metadata = OffloadingConnectorMetadata(
        reqs_to_load={"a": (CPULoadStoreSpec([10**6]), GPULoadStoreSpec([5]))}, load_jobs={"a": 7}
    )
    output = rank.step(metadata)
    assert output.finished_recving == {"a"}
    assert output.invalid_block_ids == {5}
    assert rank.worker.take_failed_loads() == {"a"}
    assert rank.worker.take_failed_loads() == set()
    assert [(report.result.job_id, report.result.success) for report in output.reports] == [(7, False)]
    rank.close()


def test_misuse_is_said_clearly(config: OffloadingConfig) -> None:
    scheduler = OffloadingConnector(config, ConnectorRole.SCHEDULER)
    worker = OffloadingConnector(config, ConnectorRole.WORKER)
    for call, message in (
        (lambda: scheduler.get_finished(set()), "belongs to the worker's side"),
        (lambda: worker.take_events(), "belongs to the scheduler's side"),
        (lambda: worker.start_load_kv(), "call bind_connector_metadata first"),
    ):
        expect_input_error(call, message)
    worker.bind_connector_metadata(
        OffloadingConnectorMetadata(
            reqs_to_load={"a": (CPULoadStoreSpec([0]), GPULoadStoreSpec([1]))}, load_jobs={"a": 1}
        )
    )
    expect_input_error(worker.start_load_kv, "call register_kv_caches")
    worker.shutdown()
    scheduler.shutdown()


def expect_input_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_outputs_are_merged_when_every_rank_has_spoken() -> None:
    aggregator = OutputAggregator(2)
    one = aggregator.aggregate([KVConnectorOutput({"a"}, {"b"}, {3}), KVConnectorOutput()])
    assert (one.finished_sending, one.finished_recving, one.invalid_block_ids) == (set(), set(), {3})
    two = aggregator.aggregate([KVConnectorOutput(), KVConnectorOutput({"a"}, {"b"})])
    assert (two.finished_sending, two.finished_recving) == ({"a"}, {"b"})
