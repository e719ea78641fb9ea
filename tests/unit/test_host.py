"""What the contract of handlers leaves open and the host handlers promise: pieces, locks,
refusals, threads.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvtier.errors import IntegrityError, PoolError, TransferError
from kvtier.pool import Pool
from kvtier.testing.caches import Caches, make_caches, make_config
from kvtier.testing.kit import ManualClock
from kvtier.transfer.base import NULL_BLOCK, CPULoadStoreSpec, GPULoadStoreSpec, TransferResult
from kvtier.transfer.host import HostHandler, HostJob, HostLoadHandler, HostStoreHandler, Span, Spans
from kvtier.transfer.layout import canonicalize
from kvtier.transfer.plan import Plan

PATIENCE = 30.0


class Rig:
    """Two handlers over caches of one layout. The pool's bytes are all 1, the engine's all 0."""

    def __init__(self, layout: str = "kv_first", num_groups: int = 1, blocks_per_chunk: int = 1) -> None:
        self.caches: Caches = make_caches(layout, num_groups=num_groups)
        for allocation in self.caches.allocations:
            allocation.zero_()
        config = make_config(self.caches, blocks_per_chunk=blocks_per_chunk)
        self.pool = Pool.open(config.engine_id, config.num_slots, config.row_bytes)
        self.pool.rows[:] = 1
        self.clock = ManualClock()
        self.spans = Spans(canonicalize(self.caches.layers, self.caches.groups), self.pool, config)
        self.store = HostStoreHandler(self.spans, 10.0, clock=self.clock, max_jobs=4)
        self.load = HostLoadHandler(self.spans, 10.0, clock=self.clock, max_jobs=4)

    def arrived(self, group: int, block: int) -> bool | None:
        """Return whether all (`True`), none (`False`) or some (`None`) of a block's bytes have arrived."""
        pages = [page.view(torch.int16) == 0x0101 for page in self.caches.pages(group, block)]
        if all(bool(page.all()) for page in pages):
            return True
        return None if any(bool(page.any()) for page in pages) else False


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    end(rig)


def end(rig: Rig) -> None:
    for handler in (rig.store, rig.load):
        handler.check()
        handler.shutdown()
        handler.check()


def finish(handler: HostHandler, job_id: int) -> TransferResult:
    assert handler.wait({job_id}, PATIENCE)
    (result,) = handler.get_finished()
    assert result.job_id == job_id
    return result


def hang(job: HostJob) -> None:
    assert job.over.wait(PATIENCE)


def fail_after(blocks: int) -> Callable[[HostJob], None]:
    def probe(job: HostJob) -> None:
        if job.blocks_done >= blocks:
            raise TransferError("no more")

    return probe


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("arriving", range(6))
def test_a_load_that_breaks_off_names_what_did_not_arrive(arriving: int, blocks_per_chunk: int) -> None:
    rig = Rig("stacked", num_groups=2, blocks_per_chunk=blocks_per_chunk)
    rig.load.piece_bytes = 1
    rig.load.probe = fail_after(arriving)
    blocks = [4, 9, NULL_BLOCK, 5, 7, 8, 3]
    gpu = GPULoadStoreSpec(blocks, (4, 3))
    cpu = CPULoadStoreSpec(range(7 if blocks_per_chunk == 1 else 4))
    assert rig.load.transfer_async(0, (cpu, gpu))
    result = finish(rig.load, 0)
    real = [position for position, block in enumerate(blocks) if block != NULL_BLOCK]
    assert result.failed_blocks == tuple(real[arriving:])
    assert not result.success
    assert result.transfer_size == sum(rig.spans.block_bytes[position > 3] for position in real[:arriving])
    for position in real:
        assert rig.arrived(int(position > 3), blocks[position]) is (position not in result.failed_blocks)
    end(rig)


def test_leading_blocks_arrive_first_in_a_job_of_many_pieces() -> None:
    rig = Rig("blocks_first")
    rig.load.piece_bytes = 5 * rig.spans.block_bytes[0]
    rig.load.probe = fail_after(10)
    assert rig.load.transfer_async(0, (CPULoadStoreSpec(range(16)), GPULoadStoreSpec(range(23, 7, -1))))
    assert finish(rig.load, 0).failed_blocks == tuple(range(10, 16))
    assert [rig.arrived(0, block) for block in range(23, 7, -1)] == [True] * 10 + [False] * 6
    end(rig)


def test_a_job_that_hangs_halfway_is_ended_by_its_deadline(rig: Rig) -> None:
    halfway = threading.Event()

    def hang_halfway(job: HostJob) -> None:
        if job.blocks_done == 2:
            halfway.set()
            hang(job)

    rig.load.piece_bytes, rig.load.probe = 1, hang_halfway
    assert rig.load.transfer_async(0, (CPULoadStoreSpec(range(4)), GPULoadStoreSpec([1, 2, 3, 4])))
    assert rig.load.transfer_async(1, (CPULoadStoreSpec([5]), GPULoadStoreSpec([9])))
    assert halfway.wait(PATIENCE)
    rig.clock.now = 10.5
    late = {result.job_id: result for result in rig.load.get_finished()}
    assert late[0].failed_blocks == (2, 3)
    assert late[0].transfer_time == 10.5
    assert late[1].failed_blocks == (0,)
    assert late[1].transfer_time is None
    rig.load.probe = None
    assert rig.load.transfer_async(2, (CPULoadStoreSpec([6]), GPULoadStoreSpec([10])))
    assert finish(rig.load, 2).success
    assert [rig.arrived(0, block) for block in (1, 2, 3, 4, 9, 10)] == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_a_thread_of_its_own(rig: Rig) -> None:
    """It took the parent's for its own, and every job of it hung until its deadline."""
    assert rig.load.transfer_async(0, (CPULoadStoreSpec([5]), GPULoadStoreSpec([9])))
    assert finish(rig.load, 0).success
    if (child := os.fork()) == 0:
        try:
            assert rig.load.transfer_async(1, (CPULoadStoreSpec([6]), GPULoadStoreSpec([10])))
            done = finish(rig.load, 1).success and rig.arrived(0, 10)
            end(rig)
            os._exit(0 if done else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rig.load.transfer_async(2, (CPULoadStoreSpec([7]), GPULoadStoreSpec([11])))
    assert finish(rig.load, 2).success
    assert [rig.arrived(0, block) for block in (9, 10, 11)] == [True, False, True]


class SlowLoad(HostLoadHandler):
    """A load that stays inside a copy until it is let go."""

    def __init__(self, spans: Spans) -> None:
        super().__init__(spans, 10.0)
        self.inside, self.go = threading.Event(), threading.Event()

    def _copy(self, spans: list[Span], blocks: Plan) -> None:
        self.inside.set()
        assert self.go.wait(PATIENCE)
        super()._copy(spans, blocks)


def test_a_job_is_over_as_soon_as_the_piece_being_copied_is(rig: Rig) -> None:
    load = SlowLoad(rig.spans)
    load.piece_bytes = 1
    assert load.transfer_async(0, (CPULoadStoreSpec([0, 1]), GPULoadStoreSpec([1, 2])))
    assert load.inside.wait(PATIENCE)
    job = load._jobs[0]
    cancel = threading.Thread(target=load.cancel, args=({0},))
    cancel.start()
    while not job.ending:
        cancel.join(0.001)
    assert not job.over.is_set(), "over although the copy goes on"
    assert load.get_finished() == []
    load.go.set()
    cancel.join(PATIENCE)
    (result,) = load.get_finished()
    assert not result.success
    assert 1 in (result.failed_blocks or ())
    load.shutdown()
    assert [rig.arrived(0, block) for block in (1, 2)] == [True, False]


def test_stores_and_loads_do_not_wait_for_each_other(rig: Rig) -> None:
    rig.store.probe = hang
    assert rig.store.transfer_async(0, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
    assert rig.load.transfer_async(1, (CPULoadStoreSpec([2]), GPULoadStoreSpec([3])))
    assert finish(rig.load, 1).success
    rig.store.cancel({0})


def test_a_full_handler_refuses_until_a_job_is_over(rig: Rig) -> None:
    rig.store.probe = hang
    for job_id in range(4):
        assert rig.store.transfer_async(job_id, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
    assert not rig.store.transfer_async(4, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
    rig.store.cancel({2})
    assert rig.store.transfer_async(4, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
    assert not rig.store.transfer_async(5, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))


def test_a_bug_in_the_copy_is_a_failed_job_and_the_thread_lives(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(job: HostJob) -> None:
        raise ZeroDivisionError("a bug")

    rig.load.probe = explode
    assert rig.load.transfer_async(0, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
    assert not finish(rig.load, 0).success
    assert "a bug" in caplog.text
    rig.load.probe = None
    assert rig.load.transfer_async(1, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
    assert finish(rig.load, 1).success


def test_failures_are_logged_in_one_line(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.load.probe = fail_after(0)
    assert rig.load.transfer_async(3, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
    finish(rig.load, 3)
    rig.load.probe = hang
    assert rig.load.transfer_async(4, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
    rig.clock.now += 11
    assert len(rig.load.get_finished()) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "CPU to GPU job 3 failed: no more",
        "CPU to GPU job 4 was not over after 10 s",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_nothing_moves_before_every_party_has_attached(tmp_path: Path) -> None:
    caches = make_caches("blocks_first")
    config = make_config(caches)
    pools = [Pool.open("engine", config.num_slots, config.row_bytes, 2, directory=tmp_path)]
    store = HostStoreHandler(Spans(canonicalize(caches.layers, caches.groups), pools[0], config), 10.0)
    with pytest.raises(PoolError, match="not every process has attached"):
        store.transfer_async(0, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
    pools.append(Pool.open("engine", config.num_slots, config.row_bytes, 2, party=1, directory=tmp_path))
    assert store.transfer_async(0, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
    assert finish(store, 0).success
    assert pools[1].rows[0].any()
    store.shutdown()
    for pool in pools:
        pool.close()


def test_a_thread_lives_from_the_first_job_to_the_shutdown(rig: Rig) -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "kvtier CPU to GPU"]

    before = threads()
    handler = HostLoadHandler(rig.spans, 10.0)
    assert threads() == before
    assert handler.transfer_async(0, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
    (thread,) = set(threads()) - set(before)
    assert thread.daemon
    handler.shutdown()
    assert threads() == before


def test_check_notices_a_job_in_two_states(rig: Rig) -> None:
    rig.load.probe = hang
    assert rig.load.transfer_async(0, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
    rig.load._results.append(TransferResult(0, True))
    with pytest.raises(IntegrityError, match="over and under way"):
        rig.load.check()
    rig.load._results.clear()
