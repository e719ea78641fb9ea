"""The worker's side: real tensors, a real pool, two ranks, in one process and in two."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.connector_kit import Request, make_config
from tests.unit.rank_process import Rank, RemoteRank, serve

from kvtier.config import OffloadingConfig
from kvtier.connector import (
    ConnectorRole,
    EndOrder,
    KVConnectorOutput,
    NewRequest,
    OffloadingConnector,
    OffloadingConnectorMetadata,
    StepView,
    merge_outputs,
)
from kvtier.errors import InputError
from kvtier.offload import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
)
from kvtier.transfer.base import AuditLoadStoreSpec

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
    process.join(60)
    assert process.exitcode == 0


def step_all(
    scheduler: OffloadingConnector, ranks: Ranks, metadata: OffloadingConnectorMetadata
) -> KVConnectorOutput:
    output = merge_outputs([rank.step(metadata) for rank in ranks])
    scheduler.update_connector_output(output)
    return output


def test_two_ranks_store_and_load_the_bytes_of_their_own(config: OffloadingConfig, ranks: Ranks) -> None:
    scheduler = OffloadingConnector(config, ConnectorRole.SCHEDULER)
    for rank, owner in enumerate(ranks):
        owner.fill(rank + 1)
    first = Request("a", PROMPT)
    assert scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
    blocks = [3, 9, 4, 8, 5, 7, 6]
    meta = scheduler.build_connector_meta(
        StepView(new=[NewRequest("a", (blocks,), 0)], num_scheduled_tokens={"a": 26})
    )
    kept = [owner.blocks(blocks[:6]) for owner in ranks]
    step_all(scheduler, ranks, meta)
    assert scheduler.request_finished(first) == (False, None)
    for owner in ranks:
        owner.fill(99)
    again = Request("b", PROMPT)
    assert scheduler.get_num_new_matched_tokens(again, 0) == (24, True)
    target = [20, 14, 15, 21, 11, 10]
    scheduler.update_state_after_alloc(again, (target,), 24)
    output = step_all(scheduler, ranks, scheduler.build_connector_meta(StepView()))
    assert output.finished_recving == {"b"}
    assert not output.invalid_block_ids
    for owner, bytes_of in zip(ranks, kept, strict=True):
        assert torch.equal(owner.blocks(target), bytes_of)
    assert not torch.equal(kept[0], kept[1]), "ranks hold different bytes, or this shows nothing"
    scheduler.shutdown()


def test_a_finished_request_is_named_when_its_stores_are_over_on_every_rank(
    config: OffloadingConfig, ranks: Ranks
) -> None:
    scheduler = OffloadingConnector(config, ConnectorRole.SCHEDULER)
    request = Request("a", PROMPT)
    scheduler.get_num_new_matched_tokens(request, 0)
    meta = scheduler.build_connector_meta(
        StepView(new=[NewRequest("a", ([1, 2, 3, 4, 5, 6, 7],), 0)], num_scheduled_tokens={"a": 26})
    )
    assert scheduler.request_finished(request) == (True, None)
    first = step_all(scheduler, ranks, meta)
    named = set(first.finished_sending)
    ending = scheduler.build_connector_meta(StepView(finished_req_ids={"a"}))
    named |= step_all(scheduler, ranks, ending).finished_sending
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
    assert output.failed_recving == {"a"}
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


class Unruly(OffloadingHandler):
    """A handler that takes a job and raises what no handler should."""

    def __init__(self) -> None:
        self.jobs: set[int] = set()

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self.jobs.add(job_id)
        raise ZeroDivisionError("somebody else's bug")

    def get_finished(self) -> list[TransferResult]:
        return [TransferResult(job_id, success=True) for job_id in self.jobs]

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        return True

    def cancel(self, job_ids: set[int]) -> None:
        self.jobs -= job_ids

    def shutdown(self) -> None:
        self.jobs.clear()


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_handler_that_raises_costs_its_job_and_not_the_step(
    config: OffloadingConfig, direction: str
) -> None:
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    assert rank.worker.connector_worker is not None
    handlers = rank.worker.connector_worker._handlers
    real = dict(handlers)
    handlers.update(dict.fromkeys(handlers, Unruly()))
    gpu, cpu = GPULoadStoreSpec([5]), CPULoadStoreSpec([0])
    metadata = OffloadingConnectorMetadata(reqs_to_load={"a": (cpu, gpu)}, load_jobs={"a": 7})
    if direction == "store":
        metadata = OffloadingConnectorMetadata(reqs_to_store={"a": (gpu, cpu)}, store_jobs={"a": 7})
    output = rank.step(metadata)
    assert [(report.result.job_id, report.result.success) for report in output.reports] == [(7, False)]
    assert output.invalid_block_ids == ({5} if direction == "load" else set())
    handlers.update(real)
    rank.close()


def test_jobs_of_a_step_that_was_cut_off_are_reported_with_the_next(config: OffloadingConfig) -> None:
    """A forward pass that raises: the stores behind it were never started, and nobody may wait for them."""
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    gpu, cpu = GPULoadStoreSpec([5]), CPULoadStoreSpec([0])
    cut = OffloadingConnectorMetadata(
        reqs_to_load={"b": (cpu, GPULoadStoreSpec([6]))}, load_jobs={"b": 1},
        reqs_to_store={"a": (gpu, cpu)}, store_jobs={"a": 2}, reqs_to_hold={"a"},
    )  # fmt: skip
    rank.worker.bind_connector_metadata(cut)
    rank.worker.start_load_kv()
    # The first does not wait for the load.
    outputs = [rank.step(OffloadingConnectorMetadata()) for _ in range(3)]
    reports = [report.result for output in outputs for report in output.reports]
    assert {(result.job_id, result.success) for result in reports} == {(1, True), (2, False)}
    sending = [req_id for output in outputs for req_id in output.finished_sending]
    recving = [req_id for output in outputs for req_id in output.finished_recving]
    assert (len(reports), sending, recving) == (2, ["a"], ["b"])
    assert not any(output.invalid_block_ids for output in outputs)
    rank.close()


def test_an_unknown_job_is_reported_as_failed_when_asked_for(config: OffloadingConfig) -> None:
    """It never came here.

    Its request is named once, however often the order stands: some engines count that.
    """
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    orders = {
        7: EndOrder("a", frozenset({0}), (5, 6), void=True),
        8: EndOrder("b", frozenset({0}), (), void=True),
        9: EndOrder("c", frozenset({1}), (7,), void=True),
    }
    first = rank.step(OffloadingConnectorMetadata(jobs_to_end=orders))
    assert [(report.result.job_id, report.result.success) for report in first.reports] == [
        (7, False),
        (8, False),
    ]
    assert (first.finished_recving, first.invalid_block_ids) == ({"a"}, {5, 6})
    again = rank.step(OffloadingConnectorMetadata(jobs_to_end=orders))
    assert (len(again.reports), again.finished_recving, again.invalid_block_ids) == (2, set(), set())
    rank.close()


def test_an_order_that_crosses_a_report_names_nobody_twice(config: OffloadingConfig) -> None:
    """An engine that schedules ahead orders the end of a load whose report is on its way."""
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    spec = (CPULoadStoreSpec([0]), GPULoadStoreSpec([5]))
    first = rank.step(OffloadingConnectorMetadata(reqs_to_load={"a": spec}, load_jobs={"a": 1}))
    assert first.finished_recving == {"a"}
    order = EndOrder("a", frozenset({0}), (5,), void=True)
    again = rank.step(OffloadingConnectorMetadata(jobs_to_end={1: order}))
    assert ([report.result.success for report in again.reports], again.finished_recving) == ([False], set())
    assert not again.invalid_block_ids
    rank.close()


def test_a_void_load_has_failed_whatever_has_arrived(config: OffloadingConfig) -> None:
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    spec = (CPULoadStoreSpec([0, 1]), GPULoadStoreSpec([5, 6]))
    order = {1: EndOrder("a", frozenset({0}), (5, 6), void=True)}
    together = OffloadingConnectorMetadata(reqs_to_load={"a": spec}, load_jobs={"a": 1}, jobs_to_end=order)
    rank.fill(1)
    before = rank.blocks([5, 6])
    output = rank.step(together)
    assert (output.finished_recving, output.invalid_block_ids) == ({"a"}, {5, 6})
    assert torch.equal(rank.blocks([5, 6]), before), "it was never started"
    rank.worker.bind_connector_metadata(
        OffloadingConnectorMetadata(reqs_to_load={"a": spec}, load_jobs={"a": 2})
    )
    rank.worker.start_load_kv()
    rank.worker.wait_for_transfers(10.0)
    rank.worker.clear_connector_metadata()
    late = rank.step(OffloadingConnectorMetadata(jobs_to_end={2: order[1]}))
    assert (late.finished_recving, late.invalid_block_ids) == ({"a"}, {5, 6})
    assert [report.result.success for report in late.reports] == [False]
    rank.close()


def test_loads_that_a_worker_voids_have_failed_and_later_ones_have_not(config: OffloadingConfig) -> None:
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    spec = (CPULoadStoreSpec([0, 1]), GPULoadStoreSpec([5, 6]))
    rank.worker.bind_connector_metadata(
        OffloadingConnectorMetadata(reqs_to_load={"a": spec}, load_jobs={"a": 1})
    )
    rank.worker.start_load_kv()
    rank.worker.void_loads()
    rank.worker.wait_for_transfers(10.0)
    output = rank.worker.take_output()
    assert (output.failed_recving, output.invalid_block_ids) == ({"a"}, {5, 6})
    rank.worker.clear_connector_metadata()
    later = rank.step(OffloadingConnectorMetadata(reqs_to_load={"b": spec}, load_jobs={"b": 2}))
    assert (later.finished_recving, later.failed_recving) == ({"b"}, set())
    rank.close()


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_step_that_is_run_again_starts_no_job_twice(config: OffloadingConfig, direction: str) -> None:
    """A job under way was refused, and so reported as failed while it still copied: its blocks went to
    somebody else.
    """
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    gpu, cpu, released = GPULoadStoreSpec([5]), CPULoadStoreSpec([0]), threading.Event()
    assert rank.worker.connector_worker is not None
    for handler in rank.worker.connector_worker._handlers.values():
        handler.probe = lambda job: released.wait(30)  # type: ignore[attr-defined]
    metadata = OffloadingConnectorMetadata(reqs_to_load={"a": (cpu, gpu)}, load_jobs={"a": 7})
    if direction == "store":
        metadata = OffloadingConnectorMetadata(reqs_to_store={"a": (gpu, cpu)}, store_jobs={"a": 7})
    for _ in range(3):
        rank.worker.bind_connector_metadata(metadata)
        rank.worker.start_load_kv()
        rank.worker.wait_for_save()
    assert rank.worker.get_finished(set()) == (set(), set())
    assert rank.worker.take_output() == KVConnectorOutput()
    released.set()
    rank.worker.clear_connector_metadata()
    output = rank.step(OffloadingConnectorMetadata())
    assert [(report.result.job_id, report.result.success) for report in output.reports] == [(7, True)]
    rank.close()


def test_results_that_a_handler_lost_are_reported_as_failed_when_asked_for(config: OffloadingConfig) -> None:
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    assert rank.worker.connector_worker is not None
    store = rank.worker.connector_worker._handlers["GPU", "CPU"]
    metadata = OffloadingConnectorMetadata(
        reqs_to_store={"a": (GPULoadStoreSpec([5]), CPULoadStoreSpec([0]))}, store_jobs={"a": 7}
    )
    rank.worker.bind_connector_metadata(metadata)
    rank.worker.start_load_kv()
    rank.worker.wait_for_save()
    rank.worker.clear_connector_metadata()
    assert store.wait({7}, 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "get_finished", lambda: [store._results.clear(), 1 / 0])
        assert rank.step(OffloadingConnectorMetadata()).reports == []
    order = OffloadingConnectorMetadata(jobs_to_end={7: EndOrder("a", frozenset({0}), (), void=True)})
    reports = [report for _ in range(2) for report in rank.step(order).reports]
    assert [(report.result.job_id, report.result.success) for report in reports] == [(7, False)]
    rank.close()


def test_failed_blocks_that_a_job_does_not_have_are_all_of_its_blocks(config: OffloadingConfig) -> None:
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    assert rank.worker.connector_worker is not None
    handler = rank.worker.connector_worker._handlers["CPU", "GPU"]
    spec = (CPULoadStoreSpec([0]), GPULoadStoreSpec([5]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "transfer_async", lambda job_id, spec: True)
        patch.setattr(handler, "get_finished", lambda: [TransferResult(7, False, failed_blocks=(3,))])
        output = rank.step(OffloadingConnectorMetadata(reqs_to_load={"a": spec}, load_jobs={"a": 7}))
    assert output.invalid_block_ids == {5}
    assert output.reports[0].result.failed_blocks is None
    rank.close()


@pytest.mark.parametrize(
    "result",
    [
        TransferResult(7, False, failed_blocks=()),
        TransferResult(7, True, failed_blocks=(0,)),
        TransferResult(7, True, failed_blocks=np.array([0, 1])),
        TransferResult(7, False, failed_blocks=(0.5,)),
        TransferResult(7, False, failed_blocks=1),
    ],
)
def test_a_result_that_contradicts_itself_is_a_failure_of_all_blocks(
    config: OffloadingConfig, result: TransferResult
) -> None:
    """A failed load that names no block was taken for one of which everything had arrived."""
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    assert rank.worker.connector_worker is not None
    handler = rank.worker.connector_worker._handlers["CPU", "GPU"]
    spec = (CPULoadStoreSpec([0, 1]), GPULoadStoreSpec([5, 6]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "transfer_async", lambda job_id, spec: True)
        patch.setattr(handler, "get_finished", lambda: [result])
        output = rank.step(OffloadingConnectorMetadata(reqs_to_load={"a": spec}, load_jobs={"a": 7}))
    assert (output.failed_recving, output.invalid_block_ids) == ({"a"}, {5, 6})
    assert output.reports[0].result == result._replace(success=False, failed_blocks=None)
    rank.close()


@pytest.mark.parametrize("results", [None, [None], [TransferResult([7], True)]])
def test_a_result_of_another_type_is_lost_and_costs_no_step(config: OffloadingConfig, results: Any) -> None:
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    assert rank.worker.connector_worker is not None
    handler = rank.worker.connector_worker._handlers["CPU", "GPU"]
    spec = (CPULoadStoreSpec([0]), GPULoadStoreSpec([5]))
    good = TransferResult(7, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "transfer_async", lambda job_id, spec: True)
        patch.setattr(handler, "get_finished", lambda: results)
        meta = OffloadingConnectorMetadata(reqs_to_load={"a": spec}, load_jobs={"a": 7})
        assert rank.step(meta) == KVConnectorOutput()
        patch.setattr(handler, "get_finished", lambda: [None, good])
        assert [report.result for report in rank.step(OffloadingConnectorMetadata()).reports] == [good]
    rank.close()


def test_a_request_that_was_named_is_not_in_the_rest_of_the_output(config: OffloadingConfig) -> None:
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    spec = (CPULoadStoreSpec([10**6]), GPULoadStoreSpec([5]))
    rank.worker.bind_connector_metadata(
        OffloadingConnectorMetadata(reqs_to_load={"a": spec}, load_jobs={"a": 7})
    )
    rank.worker.start_load_kv()
    assert rank.worker.get_finished(set()) == (set(), {"a"})
    rest = rank.worker.take_output()
    assert (rest.finished_recving, rest.failed_recving, rest.invalid_block_ids) == (set(), {"a"}, {5})
    assert [report.result.job_id for report in rest.reports] == [7]
    rank.worker.clear_connector_metadata()
    rank.close()


# Engines that write to blocks before they say so.


class Late(OffloadingHandler):
    """A handler whose jobs end as the test says, and that records how it was called."""

    def __init__(self) -> None:
        self.results: list[TransferResult] = []
        self.calls: list[tuple[str, set[int]]] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        return True

    def get_finished(self) -> list[TransferResult]:
        taken, self.results = self.results, []
        return taken

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        self.calls.append(("wait", set(job_ids)))
        return True

    def cancel(self, job_ids: set[int]) -> None:
        self.calls.append(("cancel", set(job_ids)))

    def shutdown(self) -> None:
        self.results.clear()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_flushed_store_counts_as_failed_if_the_engine_has_written_before_the_fence(
    config: OffloadingConfig, is_late: bool
) -> None:
    """Its handler cannot know that some of the bytes that it has read were those of the next request."""
    rank = Rank(replace(config, world_size=1, writes_before_fence=is_late), NUM_BLOCKS)
    assert rank.worker.connector_worker is not None
    handlers, late = rank.worker.connector_worker._handlers, Late()
    real = dict(handlers)
    handlers.update(dict.fromkeys(handlers, late))
    rank.step(
        OffloadingConnectorMetadata(
            reqs_to_store={
                "a": (GPULoadStoreSpec([5]), CPULoadStoreSpec([0])),
                "b": (GPULoadStoreSpec([6]), CPULoadStoreSpec([1])),
            },
            store_jobs={"a": 7, "b": 8},
        )
    )
    late.calls.clear()
    rank.worker.handle_preemptions(OffloadingConnectorMetadata(jobs_to_flush={7, 99}, handed_out={5}))
    assert late.calls == [("cancel" if is_late else "wait", {7})], "nobody waits for bytes of no use"
    late.results = [TransferResult(job_id, success=True) for job_id in (7, 8)]
    reports = [report.result for report in rank.step(OffloadingConnectorMetadata()).reports]
    assert {(result.job_id, result.success) for result in reports} == {(7, not is_late), (8, True)}
    handlers.update(real)
    rank.close()


def test_a_store_keeps_the_blocks_that_the_engine_has_not_written(config: OffloadingConfig) -> None:
    """Else a prompt of many steps is never stored where each step takes windows of the step before."""
    rank = Rank(replace(config, world_size=1, writes_before_fence=True), NUM_BLOCKS)
    assert rank.worker.connector_worker is not None
    handlers, late = rank.worker.connector_worker._handlers, Late()
    real = dict(handlers)
    handlers.update(dict.fromkeys(handlers, late))
    stores = {
        name: (GPULoadStoreSpec(blocks), CPULoadStoreSpec(range(4 * job, 4 * job + len(blocks))))
        for job, (name, blocks) in enumerate({"a": [5, 6, 7], "b": [8, 9], "c": [10, 11]}.items())
    }
    jobs = dict(zip(stores, (7, 8, 9), strict=True))
    rank.step(OffloadingConnectorMetadata(reqs_to_store=stores, store_jobs=jobs))
    late.calls.clear()
    rank.worker.handle_preemptions(
        OffloadingConnectorMetadata(jobs_to_flush={7, 8, 9}, handed_out={6, 8, 10, 11, 20})
    )
    assert late.calls == [("cancel", {9})], "nobody waits, and the last one has no block left"
    late.results = [
        TransferResult(7, success=True),
        TransferResult(8, success=False, failed_blocks=(1,), corrupt=False),
        TransferResult(9, success=True),
    ]
    reports = [report.result for report in rank.step(OffloadingConnectorMetadata()).reports]
    assert [(result.job_id, result.success, result.failed_blocks) for result in reports] == [
        (7, False, (1,)),
        (8, False, (0, 1)),
        (9, False, None),
    ]
    handlers.update(real)
    rank.close()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_store_that_was_over_before_its_fence_and_is_not_reported(
    config: OffloadingConfig, is_late: bool
) -> None:
    rank = Rank(replace(config, world_size=1, writes_before_fence=is_late), NUM_BLOCKS)
    assert rank.worker.connector_worker is not None
    store = (GPULoadStoreSpec([5]), CPULoadStoreSpec([0]))
    rank.worker.bind_connector_metadata(
        OffloadingConnectorMetadata(reqs_to_store={"a": store}, store_jobs={"a": 7})
    )
    rank.worker.start_load_kv()
    rank.worker.wait_for_save()
    assert rank.worker.connector_worker._handlers["GPU", "CPU"].wait({7}, 30)
    rank.worker.clear_connector_metadata()
    flushed = rank.step(OffloadingConnectorMetadata(jobs_to_flush={7}, handed_out={5}))
    assert [(report.result.job_id, report.result.success) for report in flushed.reports] == [
        (7, not is_late)
    ]
    rank.close()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_flushed_audit_finds_no_wrong_row_if_the_engine_has_written_before_the_fence(
    config: OffloadingConfig, is_late: bool
) -> None:
    rank = Rank(replace(config, world_size=1, writes_before_fence=is_late), NUM_BLOCKS)
    assert rank.worker.connector_worker is not None
    handlers, late = rank.worker.connector_worker._handlers, Late()
    real = dict(handlers)
    handlers["GPU", AuditLoadStoreSpec.medium()] = late
    audit = (GPULoadStoreSpec([5, 6]), AuditLoadStoreSpec([0, 1], [2, 3]))
    rank.step(OffloadingConnectorMetadata(audits={7: ("a", audit)}))
    late.results = [TransferResult(7, False, failed_blocks=(1,), corrupt=True, distance=0.9)]
    (report,) = rank.step(OffloadingConnectorMetadata(jobs_to_flush={7})).reports
    assert not report.result.success
    assert report.result.corrupt is not is_late
    assert report.result.failed_blocks == (None if is_late else (1,))
    handlers.clear()
    handlers.update(real)


def results_of(output: KVConnectorOutput) -> dict[int, bool]:
    return {report.result.job_id: report.result.success for report in output.reports}


def test_transfers_end_before_the_tensors_are_unmapped(config: OffloadingConfig) -> None:
    """And nothing of the handlers is left that could touch them."""
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    assert rank.worker.connector_worker is not None
    handlers = set(rank.worker.connector_worker._handlers.values())
    copying = threading.Event()

    def hang(handler: Any, job: Any) -> None:
        copying.set()
        handler.wait_ending(job, 60)

    for handler in handlers:
        getattr(handler, "stores", handler).probe = partial(hang, getattr(handler, "stores", handler))
    gone = [weakref.ref(handler) for handler in handlers]
    gpu, cpu = GPULoadStoreSpec([5]), CPULoadStoreSpec([0])
    rank.worker.bind_connector_metadata(
        OffloadingConnectorMetadata(reqs_to_store={"a": (gpu, cpu)}, store_jobs={"a": 1})
    )
    rank.worker.wait_for_save()
    rank.worker.clear_connector_metadata()
    assert copying.wait(60)
    handlers.clear()
    del handler
    rank.worker.unregister_kv_caches()
    rank.worker.unregister_kv_caches()
    gc.collect()
    assert [handler() for handler in gone] == [None] * len(gone)
    assert results_of(rank.step(OffloadingConnectorMetadata())) == {1: False}
    rank.close()


def test_a_job_that_is_ordered_while_the_tensors_are_unmapped_has_failed(config: OffloadingConfig) -> None:
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    rank.worker.unregister_kv_caches()
    gpu, cpu = GPULoadStoreSpec([5]), CPULoadStoreSpec([0])
    output = rank.step(
        OffloadingConnectorMetadata(
            reqs_to_load={"a": (cpu, gpu)},
            load_jobs={"a": 1},
            reqs_to_store={"b": (gpu, cpu)},
            store_jobs={"b": 2},
        )
    )
    assert results_of(output) == {1: False, 2: False}
    assert (output.failed_recving, output.invalid_block_ids) == ({"a"}, {5})
    rank.close()


def test_the_pool_keeps_its_rows_while_the_tensors_are_unmapped(config: OffloadingConfig) -> None:
    rank = Rank(replace(config, world_size=1), NUM_BLOCKS)
    rank.fill(1)
    before = rank.blocks([5])
    gpu, cpu = GPULoadStoreSpec([5]), CPULoadStoreSpec([0])
    stored = rank.step(OffloadingConnectorMetadata(reqs_to_store={"a": (gpu, cpu)}, store_jobs={"a": 1}))
    assert results_of(stored) == {1: True}
    rank.worker.unregister_kv_caches()
    rank.fill(2)
    rank.worker.register_kv_caches({config.groups[0].layer_names[0]: rank.kv})
    loaded = rank.step(OffloadingConnectorMetadata(reqs_to_load={"a": (cpu, gpu)}, load_jobs={"a": 2}))
    assert results_of(loaded) == {2: True}
    assert torch.equal(rank.blocks([5]), before)
    rank.close()
