"""Handlers over real lanes, commands in both forms, and a driver that copies on the host: every byte
arrives, and alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from tests.unit.cuda_kit import FakeDriver, compiled_only, cut_small

from kvtier.config import OffloadingConfig
from kvtier.pool import Pool
from kvtier.testing.handler_suite import Handlers, HandlerSuite, Rig, random_job
from kvtier.transfer.base import CanonicalKVCaches, CPULoadStoreSpec, GPULoadStoreSpec, OffloadingHandler
from kvtier.transfer.cuda import (
    CudaHandler,
    CudaLoadHandler,
    CudaMemory,
    CudaStoreHandler,
    commands,
    handlers,
    lanes,
)
from kvtier.transfer.cuda.commands import PythonSubmitter
from kvtier.transfer.cuda.handlers import CudaJob
from kvtier.transfer.cuda.lanes import Begun, LoadLane, StoreLane
from kvtier.transfer.cuda.memory import Pinning
from kvtier.transfer.cuda.pieces import Piece, PoolMap, group_sizes


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(copies=True)
    fake.use(monkeypatch)
    return fake


class TestLanes(HandlerSuite):
    """Small jobs begin in one call."""

    options: ClassVar[dict[str, Any]] = {}

    def make_handlers(
        self, config: OffloadingConfig, kv_caches: CanonicalKVCaches, clock: Callable[[], float]
    ) -> Handlers:
        pool = Pool.open(config.engine_id, config.num_slots, config.row_bytes)
        pinning = Pinning(pool, lambda: None, pin=lambda address, size: None, unpin=lambda address: None)
        memory = CudaMemory(
            kv_caches, pool, config, pinning=pinning, **({"staging_bytes": 1 << 20} | self.options)
        )
        store = CudaStoreHandler(memory, config.settings.store_deadline, clock=clock)
        load = CudaLoadHandler(memory, config.settings.load_deadline, clock=clock)
        return Handlers(store, load, pool.rows)

    @contextmanager
    def hold(self, handler: OffloadingHandler) -> Iterator[None]:
        assert isinstance(handler, CudaHandler)
        released = False

        def wait_for_release(job: CudaJob) -> None:
            while not job.is_enqueued and not released:
                handler.wait_ending(job, 0.001)

        handler.probe = wait_for_release
        try:
            yield
        finally:
            released = True
            handler.probe = None


class TestManyPieces(TestLanes):
    """Jobs are cut, and staged: nothing is short, and blocks go in parts."""

    options: ClassVar[dict[str, Any]] = {"staging_bytes": 1 << 16}

    @pytest.fixture(autouse=True)
    def _stage_everything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cut_small(monkeypatch, 64)
        for lane in (StoreLane, LoadLane):
            monkeypatch.setattr(lane, "short_bytes", 0)


class TestDirect(TestLanes):
    """Every page is copied as it is."""

    options: ClassVar[dict[str, Any]] = {"direct_bytes": 1}


class TestPacked(TestLanes):
    """Blocks are packed and unpacked by kernels that reach the pool itself."""

    packs = True


class TestPackedPieces(TestManyPieces):
    """Packed blocks go through buffers, one at a time."""

    packs = True


class TestPythonSubmitter(TestManyPieces):
    """No command is compiled."""

    @pytest.fixture(autouse=True)
    def _compile_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(commands, "CompiledSubmitter", None)


@pytest.mark.parametrize(("alignment", "is_short"), [(16, True), (8, False)])
def test_packed_blocks_off_their_alignment_go_through_buffers(
    alignment: int, is_short: bool, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a rank behind another one whose images have an odd length."""
    monkeypatch.setattr(PoolMap, "alignment", lambda *part: alignment)
    rig = Rig(TestPacked())
    fake.calls.clear()
    assert rig.run_store(0, GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([0, 1])).success
    copies = [name for name, *_ in fake.calls if name.startswith("cuMemcpy")]
    assert (not copies) == is_short
    rig.check()
    rig.close()


@compiled_only
@pytest.mark.parametrize("options", [{}, {"staging_bytes": 1 << 16}, {"direct_bytes": 1}])
@pytest.mark.parametrize("seed", range(4))
def test_both_forms_make_the_same_calls(
    seed: int, options: dict[str, Any], fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to the numbers of streams and events; addresses differ."""
    cut_small(monkeypatch, 1 << 12)
    monkeypatch.setattr(StoreLane, "short_bytes", 1 << 13)
    monkeypatch.setattr(lanes, "BURST_BYTES", 1 << 14)
    suite = TestLanes()
    monkeypatch.setattr(TestLanes, "options", options)
    calls = []
    for compiled in (commands.CompiledSubmitter, None):
        monkeypatch.setattr(commands, "CompiledSubmitter", compiled)
        fake.kernels.clear()
        rig = Rig(suite, "kv_first", page=4096, blocks_per_chunk=1 + seed % 2)
        fake.calls.clear()
        for handler in (rig.store, rig.load):
            assert isinstance(handler, CudaHandler)
            assert isinstance(handler._lane._submitter, PythonSubmitter) == (compiled is None)
            enqueue_some(random.Random(seed), rig, handler)
        rig.close()
        calls.append([(name, small_numbers(args)) for name, *args in fake.calls])
    assert calls[0] == calls[1]
    assert ("cuLaunchKernel" in {name for name, _ in calls[0]}) == ("direct_bytes" not in options)


def enqueue_some(rng: random.Random, rig: Rig, handler: CudaHandler) -> None:
    """Enqueue the pieces of some jobs, at times with others before them."""
    for _ in range(8):
        gpu, cpu = random_job(rng, rig.config, rig.caches, range(rig.config.num_slots))
        plan = handler.plan((gpu, cpu) if handler is rig.store else (cpu, gpu))
        rows, timer, oldest = handler.memory.pool_map.rows(plan), handler._lane.timer(), None
        parts = handler.memory.parts
        for piece in handler._cut(group_sizes(plan, len(parts)), parts, handler.piece_bytes):
            is_last = piece.last == len(plan)
            number = handler._lane.enqueue(piece, plan.blocks, rows, timer, oldest, is_last=is_last)
            timer, oldest = None, rng.choice([None, number, max(0, number - 6)])


class CopyEngine:
    """Reads from the driver's calls what a copy engine finds: copies on streams, and what their streams wait
    for.
    """

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.bursts: list[tuple[int, int]] = []
        """Streams and bytes, in order; a stream that goes on is one."""
        waited: dict[int, set[int]] = {}
        ended: dict[int, int] = {}
        for name, *args in calls:
            match name, args:
                case "cuStreamWaitEvent", [stream, event, _]:
                    waited.setdefault(stream, set()).add(event)
                case "cuEventRecord", [event, stream]:
                    ended[stream] = event
                case "cuMemcpyAsync", [_, _, size, stream]:
                    self._record(stream, size, waited, ended)
                case "cuMemcpyBatchAsync", [_, _, sizes, *_, stream]:
                    self._record(stream, sum(sizes), waited, ended)

    def _record(self, stream: int, size: int, waited: dict[int, set[int]], ended: dict[int, int]) -> None:
        if self.bursts and self.bursts[-1][0] == stream:
            size += self.bursts.pop()[1]
        elif self.bursts:
            assert ended[self.bursts[-1][0]] in waited[stream], "it begins before the other stream has ended"
        self.bursts.append((stream, size))


@pytest.mark.parametrize("options", [{"staging_bytes": 1 << 16}, {"direct_bytes": 1}])
@pytest.mark.parametrize(
    ("way", "burst", "changes"), [("store", 1 << 14, True), ("store", 1 << 30, False), ("load", 1, False)]
)
def test_stores_give_way_to_the_copies_of_others(
    way: str,
    burst: int,
    changes: bool,
    options: dict[str, Any],
    fake: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever copies to the host has a turn when a stream ends and the next one begins."""
    cut_small(monkeypatch, 1 << 12)
    monkeypatch.setattr(lanes, "BURST_BYTES", burst)
    monkeypatch.setattr(commands, "SMALL_RANGE", 1)
    monkeypatch.setattr(TestLanes, "options", options)
    rig = Rig(TestLanes(), "kv_first", page=1024, num_blocks=40, num_slots=40)
    handler = rig.store if way == "store" else rig.load
    assert isinstance(handler, CudaHandler)
    lane = handler._lane
    args_stream, oldest, piece_bytes = lane._args_stream, None, 0
    fake.calls.clear()
    for _ in range(3):
        gpu, cpu = GPULoadStoreSpec(range(1, 30)), CPULoadStoreSpec(range(29))
        plan = handler.plan((gpu, cpu) if way == "store" else (cpu, gpu))
        rows, timer = handler.memory.pool_map.rows(plan), handler._lane.timer()
        for piece in handler._cut([len(plan)], handler.memory.parts, handler.piece_bytes):
            number = lane.enqueue(piece, plan.blocks, rows, timer, oldest, is_last=False)
            oldest, timer, piece_bytes = max(0, number - 3), None, max(piece_bytes, piece.bytes)
    copies = CopyEngine([call for call in fake.calls if call[-1] != args_stream])
    assert (len({stream for stream, _ in copies.bursts}) > 1) == changes
    assert max(size for _, size in copies.bursts) <= max(burst, piece_bytes) or not changes
    rig.close()


@compiled_only
def test_a_store_that_finds_the_bus_idle_waits_for_nobody(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much was copied before; also if a short piece comes first."""
    monkeypatch.setattr(lanes, "BURST_BYTES", 1 << 13)
    monkeypatch.setattr(StoreLane, "short_bytes", 1 << 13)
    cut_small(monkeypatch, 1 << 13)
    rig = Rig(TestLanes(), "blocks_first", page=4096, num_blocks=40, num_slots=40)
    assert isinstance(rig.store, CudaHandler)
    before = rig.store._lane._copies
    for job in range(3):
        assert rig.run_store(job, GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([0, 1])).success
        assert rig.store._lane._copies == before
    rig.close()


def small_numbers(args: Any) -> list[Any]:
    """Leave addresses out."""
    if isinstance(args, int):
        return [args] if args < 1 << 32 else []
    return [number for arg in args for number in small_numbers(arg)]


@compiled_only
@pytest.mark.parametrize("way", ["store", "load"])
@pytest.mark.parametrize("options", [{}, {"direct_bytes": 1}])
@pytest.mark.parametrize(
    ("blocks", "slots", "begins"),
    [
        ([1], [0], True),
        ([3, 1, 2], [5, 0, 9], True),
        ([3, 0, 2], [5, 0, 9], False),
        (list(range(1, 11)), list(range(10)), True),
    ],
)
def test_a_simple_job_begins_before_it_is_recorded(
    blocks: list[int],
    slots: list[int],
    begins: bool,
    options: dict[str, Any],
    way: str,
    fake: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_small(monkeypatch, 6 * 3 * 4096)
    monkeypatch.setattr(TestLanes, "options", options)
    rig = Rig(TestLanes(), page=4096)
    handler, run = (
        (rig.store, rig.run_store)
        if way == "store"
        else (rig.load, lambda job, *ends: rig.run_load(job, *ends[::-1]))
    )
    assert isinstance(handler, CudaHandler)
    begun, cuts = [], []
    begin = handler._lane.begin

    def watch(pieces: Sequence[Piece], *ends: Any) -> Begun | None:
        cuts.append(len(pieces))
        begun.append(begin(pieces, *ends))
        return begun[-1]

    monkeypatch.setattr(handler._lane, "begin", watch)
    gpu, cpu = GPULoadStoreSpec(blocks), CPULoadStoreSpec(slots)
    for job in range(20):  # all positions in the ring, and more
        assert run(job, gpu, cpu).success
        assert (begun[-1] is not None) == begins
        assert not begins or (cuts[-1] > 1) == (len(blocks) > 6)
        rig.check()
    fake.failing = {"cuStreamQuery": 600}  # the engine is busy, and its fence is over at once
    assert run(20, gpu, cpu).success
    assert begun[-1] is None
    rig.check()
    rig.close()


@compiled_only
def test_sizes_of_jobs_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_MOST_SIZES", 2)
    rig = Rig(TestLanes(), page=4096)
    assert isinstance(rig.store, CudaHandler)
    for job, size in enumerate([1, 2, 1, 3, 4, 1]):
        assert rig.run_store(
            job, GPULoadStoreSpec(range(1, size + 1)), CPULoadStoreSpec(range(size))
        ).success
        assert len(rig.store._cuts) <= 2
    rig.check()
    rig.close()


@compiled_only
def test_a_device_that_is_broken_refuses_jobs(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(TestLanes(), page=4096)
    fake.failing = {"cuStreamQuery": 719}
    assert not rig.store.transfer_async(0, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
    assert "refused" in caplog.text
    assert rig.store.get_finished() == []
    rig.close()


@compiled_only
def test_a_job_that_cannot_begin_fails_and_the_next_does_not(
    fake: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(TestLanes(), page=4096)
    fake.failing = {"cuLaunchKernel": 719}
    assert rig.store.transfer_async(0, (GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([0, 1])))
    (result,) = rig.store.get_finished()
    assert (result.success, result.failed_blocks) == (False, (0, 1))
    assert "CUDA_ERROR_719" in caplog.text
    fake.failing = {}
    assert rig.run_store(1, GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([0, 1])).success
    rig.check()
    rig.close()
