"""The CUDA handlers' own work (jobs, pieces, deadlines, the thread) over a lane that copies on the host, so
without a device.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvtier.config import OffloadingConfig, parse_size
from kvtier.errors import LayoutError, TransferError
from kvtier.pool import Pool
from kvtier.testing.caches import make_caches, make_config
from kvtier.testing.handler_suite import Handlers, HandlerSuite, Rig, finish
from kvtier.transfer.base import (
    CanonicalKVCaches,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
)
from kvtier.transfer.cuda import CudaHandler, CudaLoadHandler, CudaMemory, CudaStoreHandler
from kvtier.transfer.cuda.handlers import CudaJob
from kvtier.transfer.cuda.lanes import RUN_AHEAD
from kvtier.transfer.cuda.memory import BUFFERS, Pinning
from kvtier.transfer.cuda.pieces import Ints, Piece, Rows
from kvtier.transfer.layout import canonicalize


class HostLane:
    """Does what a lane does: pieces arrive in order, some time after they were enqueued, here when somebody
    looks.
    """

    def __init__(self, memory: CudaMemory, *, to_pool: bool) -> None:
        self._memory, self._to_pool = memory, to_pool
        self._lock = threading.RLock()
        self._copies: list[list[tuple[int, int, int]]] = []
        self._arrived = 0
        self.engine_is_idle = threading.Event()
        self.engine_is_idle.set()
        self.broken: TransferError | None = None

    def enter_thread(self) -> None: ...

    def fence(self) -> threading.Event:
        return self.engine_is_idle

    def timer(self) -> None: ...

    def recycle(self, fence: threading.Event, timer: None) -> None: ...

    def is_over(self, fence: threading.Event) -> bool:
        return fence.is_set()

    def wait_over(self, fence: threading.Event) -> None:
        fence.wait()

    def is_simple(self, blocks: Ints, slots: Ints) -> bool:
        return False

    has_simple_jobs = False

    def enqueue(
        self, piece: Piece, blocks: Ints, rows: Rows, timer: None, oldest: int | None, *, is_last: bool
    ) -> int:
        if self.broken is not None:
            raise self.broken
        part, first, last, _ = piece
        ranges = self._memory.pool_map.ranges(part.pages, blocks[first:last], rows.addresses(first, last))
        with self._lock:
            assert len(self._copies) - self._arrived < RUN_AHEAD
            assert self._arrived >= (len(self._copies) if oldest is None else oldest)
            self._copies.append(list(zip(*(column.tolist() for column in ranges), strict=True)))
            return len(self._copies) - 1

    def is_done(self, number: int) -> bool:
        with self._lock:
            assert number >= len(self._copies) - RUN_AHEAD, "its event has been used again"
            if self._arrived <= number and random.random() < 0.5:
                self._arrive()
            return self._arrived > number

    def wait_done(self, number: int) -> None:
        with self._lock:
            while self._arrived <= number:
                self._arrive()

    def drain(self) -> None:
        self.wait_done(len(self._copies) - 1)

    def seconds(self, timer: None, number: int) -> float:
        assert len(self._copies) - RUN_AHEAD <= number < self._arrived
        return 0.001

    def _arrive(self) -> None:
        for device, host, size in self._copies[self._arrived]:
            ctypes.memmove(*((host, device) if self._to_pool else (device, host)), size)
        self._arrived += 1


class HostStore(CudaStoreHandler):
    lane_type: Any = staticmethod(lambda memory: HostLane(memory, to_pool=True))


class HostLoad(CudaLoadHandler):
    lane_type: Any = staticmethod(lambda memory: HostLane(memory, to_pool=False))


def pretend_to_pin(pool: Pool) -> Pinning:
    return Pinning(pool, lambda: None, pin=lambda address, size: None, unpin=lambda address: None)


class TestJobs(HandlerSuite):
    staging_bytes = 1 << 20

    def make_handlers(
        self, config: OffloadingConfig, kv_caches: CanonicalKVCaches, clock: Callable[[], float]
    ) -> Handlers:
        pool = Pool.open(config.engine_id, config.num_slots, config.row_bytes)
        memory = CudaMemory(
            kv_caches,
            pool,
            config,
            staging_bytes=self.staging_bytes,
            pinning=self.pinning(pool),
        )
        store = HostStore(memory, config.settings.store_deadline, clock=clock)
        load = HostLoad(memory, config.settings.load_deadline, clock=clock)
        return Handlers(store, load, pool.rows)

    def pinning(self, pool: Pool) -> Pinning:
        return pretend_to_pin(pool)

    @contextmanager
    def hold(self, handler: OffloadingHandler) -> Iterator[None]:
        assert isinstance(handler, CudaHandler)
        released = threading.Event()

        def wait_for_release(job: CudaJob) -> None:
            while not job.is_enqueued and not released.wait(0.001):
                pass

        handler.probe = wait_for_release
        try:
            yield
        finally:
            handler.probe = None
            released.set()


class TestJobsInManyPieces(TestJobs):
    """Buffers of 64 bytes: the thread has to wait for room."""

    staging_bytes = 1024


class TestJobsByTheThreadAlone(TestJobs):
    """Memory that is not pinned: nothing is enqueued on the caller's thread, since that could wait."""

    def pinning(self, pool: Pool) -> Pinning:
        def refuse(address: int, size: int) -> None:
            raise TransferError("no")

        return Pinning(pool, lambda: None, pin=refuse)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(TestJobs())
    yield rig
    rig.check()
    rig.close()


def lane_of(handler: OffloadingHandler) -> HostLane:
    assert isinstance(handler, CudaHandler)
    assert isinstance(handler._lane, HostLane)
    return handler._lane


def test_a_small_job_needs_no_thread(rig: Rig) -> None:
    before = threading.active_count()
    assert rig.run_store(0, GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([3, 4])).success
    assert threading.active_count() <= before, "others may end meanwhile"


def test_nothing_is_enqueued_before_the_engine_is_done(rig: Rig) -> None:
    lane = lane_of(rig.store)
    lane.engine_is_idle.clear()
    gpu, cpu = GPULoadStoreSpec([1]), CPULoadStoreSpec([3])
    assert rig.store.transfer_async(0, (gpu, cpu))
    assert not rig.store.wait({0}, 0.005)
    assert lane._copies == []
    lane.engine_is_idle.set()
    rig.model.store(gpu, cpu)
    assert finish(rig.store, 0).success


def test_a_job_that_waits_for_the_engine_can_be_ended(rig: Rig) -> None:
    lane = lane_of(rig.store)
    lane.engine_is_idle.clear()
    assert rig.store.transfer_async(0, (GPULoadStoreSpec([1]), CPULoadStoreSpec([3])))
    rig.store.cancel({0})
    (result,) = rig.store.get_finished()
    assert (result.success, result.failed_blocks) == (False, (0,))
    lane.engine_is_idle.set()
    assert rig.run_store(1, GPULoadStoreSpec([1]), CPULoadStoreSpec([4])).success


def test_a_piece_that_cannot_be_enqueued_fails_its_job_alone(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    lane = lane_of(rig.load)
    lane.broken = TransferError("out of order")
    assert rig.load.transfer_async(0, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
    assert not finish(rig.load, 0).success
    assert "out of order" in caplog.text
    lane.broken = None
    assert rig.run_load(1, CPULoadStoreSpec([0]), GPULoadStoreSpec([2])).success


def test_a_device_that_does_not_answer_fails_all_jobs_and_no_more_are_taken(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: int) -> bool:
        raise TransferError("an illegal address was met")

    monkeypatch.setattr(lane_of(rig.load), "is_done", fail)
    assert rig.load.transfer_async(0, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
    assert [result.success for result in rig.load.get_finished()] == [False]
    assert not rig.load.transfer_async(2, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
    assert "illegal address" in caplog.text


def test_caches_that_do_not_fit_the_config_are_refused() -> None:
    config = make_config(make_caches("kv_first", page=64))
    other = make_caches("kv_first", page=128)
    pool = Pool.open("test", config.num_slots, config.row_bytes)
    with pytest.raises(LayoutError, match="192"):
        CudaMemory(canonicalize(other.layers, other.groups), pool, config, pinning=pretend_to_pin(pool))


@pytest.mark.parametrize("staging", ["1MiB", "256MiB"])
def test_buffers_take_what_the_settings_say(staging: str) -> None:
    caches = make_caches("kv_first", page=4096)
    config = make_config(caches)
    config = replace(config, settings=replace(config.settings, staging=staging))
    pool = Pool.open("test", config.num_slots, config.row_bytes)
    memory = CudaMemory(
        canonicalize(caches.layers, caches.groups), pool, config, pinning=pretend_to_pin(pool)
    )
    assert memory.staging_bytes == 2 * BUFFERS * memory.piece_bytes == parse_size(staging)
    pool.close()
