"""The CUDA handlers keep the contract of handlers, whatever the size of their buffers and whether or not
memory is pinned.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tests.contract.test_handlers import TestHostHandlers as HostSuite
from tests.unit import test_faults

from kvtier.config import OffloadingConfig
from kvtier.errors import TransferError
from kvtier.offload import CPULoadStoreSpec, CPUOffloadingSpec, GPULoadStoreSpec
from kvtier.pool import Pool
from kvtier.testing.caches import LAYOUTS, make_caches, make_config
from kvtier.testing.handler_suite import Handlers, HandlerSuite, Rig, finish
from kvtier.transfer.base import CanonicalKVCaches, OffloadingHandler
from kvtier.transfer.layout import canonicalize

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kvtier.transfer.cuda import CudaHandler, CudaLoadHandler, CudaMemory, CudaStoreHandler, driver
from kvtier.transfer.cuda.handlers import CudaJob
from kvtier.transfer.cuda.lanes import LoadLane, StoreLane
from kvtier.transfer.cuda.memory import Pinning


class TestCudaHandlers(HandlerSuite):
    device = "cuda"

    def make_handlers(
        self, config: OffloadingConfig, kv_caches: CanonicalKVCaches, clock: Callable[[], float]
    ) -> Handlers:
        pool = Pool.open(config.engine_id, config.num_slots, config.row_bytes)
        memory = CudaMemory(kv_caches, pool, config, **self.options(pool))
        store = CudaStoreHandler(memory, config.settings.store_deadline, clock=clock)
        load = CudaLoadHandler(memory, config.settings.load_deadline, clock=clock)
        return Handlers(store, load, pool.rows)

    def options(self, pool: Pool) -> dict[str, Any]:
        return {}

    @contextmanager
    def hold(self, handler: OffloadingHandler) -> Iterator[None]:
        assert isinstance(handler, CudaHandler)
        released = False

        def wait_for_release(job: CudaJob) -> None:
            while not released and not job.is_enqueued:
                torch.cuda._sleep(1000)
                torch.cuda.current_stream().synchronize()

        handler.probe = wait_for_release
        try:
            yield
        finally:
            released = True
            handler.probe = None


class TestSmallBuffers(TestCudaHandlers):
    """Buffers smaller than a block: blocks go in parts, and pages of 4 KiB as they are."""

    def options(self, pool: Pool) -> dict[str, Any]:
        return {"staging_bytes": 16 * 4096}


class TestDirectCopies(TestCudaHandlers):
    """Every page is copied as it is."""

    def options(self, pool: Pool) -> dict[str, Any]:
        return {"direct_bytes": 1}


class TestNothingIsShort(TestCudaHandlers):
    """Small jobs go through buffers too."""

    @pytest.fixture(autouse=True)
    def _stage_everything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for lane in (StoreLane, LoadLane):
            monkeypatch.setattr(lane, "short_bytes", 0)


class TestPacked(TestCudaHandlers):
    """Blocks are kept packed; small jobs by kernels that reach the pool itself."""

    packs = True


class TestPackedThroughBuffers(TestNothingIsShort):
    packs = True


class TestPackedInSmallBuffers(TestSmallBuffers):
    packs = True


class TestPageable(TestCudaHandlers):
    """The driver refuses to pin memory."""

    def options(self, pool: Pool) -> dict[str, Any]:
        def refuse(address: int, size: int) -> None:
            raise TransferError(f"no {size} bytes")

        return {"pinning": Pinning(pool, lambda: None, pin=refuse)}


class TestPackedPageable(TestPageable):
    packs = True


class TestHostHandlersOnCuda(HostSuite):
    """The host handlers serve a CUDA device too, where there is no Triton."""

    device = "cuda"


def stall() -> None:
    """Keep the current stream busy for about a tenth of a second."""
    torch.cuda._sleep(200_000_000)


@pytest.fixture
def suite() -> TestCudaHandlers:
    return TestCudaHandlers()


def test_a_store_reads_what_the_stream_was_told_to_write() -> None:
    """Jobs are given while the engine's kernels still run; the bytes must be those of afterwards."""
    caches = make_caches("stacked", page=4096, device="cuda")
    spec = CPUOffloadingSpec(make_config(caches))
    (_, _, store), (_, _, load) = spec.get_handlers(canonicalize(caches.layers, caches.groups))
    assert isinstance(store, CudaStoreHandler)
    with torch.cuda.stream(torch.cuda.Stream()):
        stall()
        caches.allocations[0].fill_(0x0707)
        assert store.transfer_async(0, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
    assert store.wait({0}, 30)
    assert (spec.open_pool().rows[0, : caches.groups[0].bytes_per_block] == 7).all()
    store.shutdown()
    load.shutdown()
    spec.shutdown()


def test_a_load_is_not_overwritten_by_work_from_before_it(suite: TestCudaHandlers) -> None:
    rig = Rig(suite, "kv_first", page=4096)
    rig.run_store(0, GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([0, 1]))
    rig.model.load(CPULoadStoreSpec([0, 1]), GPULoadStoreSpec([5, 6]))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        stall()
        rig.caches.layers["group0.layer0"][:, 5].fill_(3)
        assert rig.load.transfer_async(1, (CPULoadStoreSpec([0, 1]), GPULoadStoreSpec([5, 6])))
        assert rig.load.get_finished() == []
    assert finish(rig.load, 1).success
    rig.check()
    rig.close()


def test_ending_a_job_does_not_wait_for_the_engine(suite: TestCudaHandlers) -> None:
    rig = Rig(suite)
    stall()
    busy = torch.cuda.current_stream().record_event()
    assert rig.store.transfer_async(0, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
    rig.store.cancel({0})
    (result,) = rig.store.get_finished()
    assert not busy.query()
    assert (result.success, result.failed_blocks) == (False, (0,))
    rig.check()
    rig.close()


def test_transfer_async_does_not_wait_for_the_engine(suite: TestCudaHandlers) -> None:
    rig = Rig(suite, "stacked", page=1 << 15)
    stall()
    busy = torch.cuda.current_stream().record_event()
    assert rig.store.transfer_async(0, (GPULoadStoreSpec(range(1, 17)), CPULoadStoreSpec(range(16))))
    assert rig.store.get_finished() == []
    assert not busy.query()
    assert finish(rig.store, 0).success
    assert busy.query()
    rig.close()


def test_a_failed_call_fails_the_job_and_not_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(TestCudaHandlers(), blocks_per_chunk=2)
    assert isinstance(rig.store, CudaHandler)
    ways = rig.store._lane._routes
    with monkeypatch.context() as broken:
        for part, way in ways.items():
            too_many = tuple(launch._replace(threads=1 << 20) for launch in way.alone)
            broken.setitem(ways, part, way._replace(staged=too_many, alone=too_many))
        gpu, cpu = GPULoadStoreSpec([1, 2, 5, 6]), CPULoadStoreSpec([3, 9])
        assert rig.store.transfer_async(0, (gpu, cpu))
        result = finish(rig.store, 0)
        rig.store._lane._scripts.clear()
    assert (result.success, result.failed_blocks) == (False, (0, 1, 2, 3))
    assert "CUDA_ERROR_INVALID_VALUE" in caplog.text
    assert rig.run_store(1, gpu, cpu).success
    assert rig.run_load(2, cpu, gpu).success
    rig.check()
    rig.close()


def test_memory_that_cannot_be_pinned_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(TestPageable())
    assert rig.run_store(0, GPULoadStoreSpec([1]), CPULoadStoreSpec([0])).success
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pageable" in caplog.text
    rig.close()


def test_memory_is_unpinned_by_the_last_handler(suite: TestCudaHandlers) -> None:
    rig = Rig(suite)
    assert isinstance(rig.store, CudaHandler)
    address = rig.store.memory.pinning.address
    rig.store.shutdown()
    with pytest.raises(TransferError, match="ALREADY_REGISTERED"):
        driver.pin(address, 4096)
    rig.load.shutdown()
    driver.pin(address, 4096)
    driver.unpin(address)


def test_memory_that_nobody_released_is_unpinned(suite: TestCudaHandlers) -> None:
    """Else the next pool at its addresses would read and write wrong bytes."""
    rig = Rig(suite)
    assert isinstance(rig.store, CudaHandler)
    assert rig.run_store(0, GPULoadStoreSpec([1]), CPULoadStoreSpec([0])).success
    address = rig.store.memory.pinning.address
    rows = rig.rows
    del rig
    gc.collect()
    driver.pin(address, rows.nbytes)
    driver.unpin(address)


def test_any_thread_can_be_the_workers(suite: TestCudaHandlers) -> None:
    """Also one that has never heard of CUDA."""
    rig = Rig(suite)
    with ThreadPoolExecutor(1) as thread:
        gpu, cpu = GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([3, 4])
        assert thread.submit(rig.run_store, 0, gpu, cpu).result().success
        assert thread.submit(rig.run_load, 1, cpu, GPULoadStoreSpec([5, 6])).result().success
    rig.check()
    rig.close()


@pytest.mark.parametrize(
    "check",
    [
        test_faults.test_a_failed_load_leaves_poison_and_nothing_else,
        test_faults.test_short_loads_deliver_their_leading_blocks,
        test_faults.test_a_hanging_transfer_is_ended_by_the_real_deadline,
        test_faults.test_a_failed_store_poisons_its_slots,
        test_faults.test_corruption_is_reported_as_success,
        test_faults.test_without_faults_bytes_arrive,
    ],
)
def test_faults_can_be_injected(check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_faults, "make_caches", partial(make_caches, device="cuda"))
    check()


@pytest.mark.parametrize("seed", range(8))
def test_random_overlap_of_stores_loads_and_compute(seed: int) -> None:
    """Hundreds of jobs at once, on blocks and slots that no two of them share while they run, beside kernels
    that write.
    """
    rng = random.Random(seed)
    memory = {
        "staging_bytes": rng.choice([1 << 18, 1 << 22, 1 << 28]),
        "direct_bytes": rng.choice([4096, 1 << 21]),
    }
    options = {"blocks_per_chunk": rng.choice([1, 3]), "num_slots": 512, "num_groups": rng.choice([1, 2])}
    suite = TestCudaHandlers()
    suite.options = lambda pool: memory
    rig = Rig(suite, rng.choice(LAYOUTS), page=rng.choice([256, 4096, 1 << 15]), num_blocks=512, **options)
    side = torch.cuda.Stream()
    for round_ in range(12):
        running = start_jobs(rng, rig, round_)
        with torch.cuda.stream(side):
            torch.mm(*(torch.randn(512, 512, device="cuda") for _ in range(2)))
        for handler, jobs in running.items():
            assert handler.wait(jobs, 60)
            assert all(result.success for result in handler.get_finished())
        rig.check()
    rig.close()


def start_jobs(rng: random.Random, rig: Rig, round_: int) -> dict[OffloadingHandler, set[int]]:
    """Cut blocks and slots into shares and start a store or a load in each, at times after a write to its
    blocks.
    """
    per_chunk = rig.config.settings.blocks_per_chunk
    blocks = rng.sample(range(1, rig.caches.num_blocks), rig.caches.num_blocks - 1)
    slots = rng.sample(range(rig.config.num_slots), rig.config.num_slots)
    running: dict[OffloadingHandler, set[int]] = {rig.store: set(), rig.load: set()}
    for job in range(40):
        mine, mine_slots = [blocks.pop() for _ in range(12)], [slots.pop() for _ in range(12)]
        sizes = [rng.randrange(4 * per_chunk)] + [rng.randrange(3)] * (len(rig.config.groups) - 1)
        sizes = [min(size, 6) for size in sizes]
        firsts = [rng.randrange(per_chunk) for _ in sizes]
        taken = sum(
            -(-(size + first) // per_chunk) for size, first in zip(sizes, firsts, strict=True) if size
        )
        gpu = GPULoadStoreSpec(mine[: sum(sizes)], sizes, firsts)
        cpu = CPULoadStoreSpec(mine_slots[:taken])
        job_id = round_ * 100 + job
        if rng.random() < 0.5:
            if sizes[0] and rng.random() < 0.5:
                for caches in (rig.caches, rig.model.caches):
                    for page in caches.pages(0, mine[0]):
                        page.fill_(job_id)
            rig.model.store(gpu, cpu)
            assert rig.store.transfer_async(job_id, (gpu, cpu))
            running[rig.store].add(job_id)
        else:
            rig.model.load(cpu, gpu)
            assert rig.load.transfer_async(job_id, (cpu, gpu))
            running[rig.load].add(job_id)
    return running


def test_copies_of_the_engine_have_their_turn_beside_stores_without_end() -> None:
    """As many jobs are always under way as keep the bus busy; a copy of 8 bytes to the host waits for little
    of that.

    With jobs of 60 MiB there is never a break: a copy that is given no turn waits for all of them.
    """
    rig = Rig(TestCudaHandlers(), "kv_first", page=1 << 20, num_blocks=24, num_slots=24)
    spec = (GPULoadStoreSpec(range(1, 21)), CPULoadStoreSpec(range(20)))
    here, there = (
        torch.zeros(8, dtype=torch.int8).pin_memory(),
        torch.ones(8, dtype=torch.int8, device="cuda"),
    )
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    started, over, begun, copied = 0, 0, 0, None
    while over < 60 and (copied is None or not copied.query()):
        with torch.cuda.stream(side):
            while started - over < 3:
                assert rig.store.transfer_async(started, spec)
                started += 1
        over += len(rig.store.get_finished())
        if copied is None and over >= 5:
            with torch.cuda.stream(stream):
                here.copy_(there, non_blocking=True)
            copied, begun = stream.record_event(), over
    assert over - begun <= 3, "it waited until there was nothing to store"
    rig.store.wait(set(range(started)))
    assert here.tolist() == [1] * 8
    rig.close()
