"""Whatever order streams run in, as far as events leave it open, every byte is where it should be, and no
job is lost.

The handlers are the real ones, over lanes and commands in both forms; the driver is a simulation whose
streams run later.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.cuda_kit import compiled_only, cut_small
from tests.unit.cuda_sim import SimDriver
from tests.unit.test_cuda_lanes import TestLanes as Lanes

from kvtier.testing.handler_suite import PATIENCE, Rig, finish
from kvtier.transfer.base import CPULoadStoreSpec, GPULoadStoreSpec, OffloadingHandler, TransferResult
from kvtier.transfer.cuda import CudaHandler, commands, lanes
from kvtier.transfer.cuda.lanes import Lane, LoadLane, StoreLane

PAGE = 4096
BLOCK = 3 * PAGE
SMALL = {"staging_bytes": 8 * 4 * BLOCK}
OPTIONS: list[dict[str, Any]] = [{}, SMALL, {"staging_bytes": 8 * BLOCK}, {"direct_bytes": 1}]


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> SimDriver:
    sim = SimDriver(laziness=1.0)  # nothing runs unless somebody waits for it
    sim.use(monkeypatch)
    return sim


def lane_of(handler: OffloadingHandler) -> Lane:
    assert isinstance(handler, CudaHandler)
    return handler._lane


class Soak:
    """Random jobs both ways at once.

    Stores have the first blocks and slots, loads the others, and no two share any.
    """

    def __init__(self, seed: int, sim: SimDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng, self.sim = random.Random(seed), sim
        sim.rng, sim.laziness = random.Random(seed + 1), self.rng.choice([0.3, 0.6, 0.9, 0.97])
        sim.engine_is_busy = self.rng.random() < 0.5
        size = self.rng.choice([1, 2, 5]) * BLOCK
        cut_small(monkeypatch, size)
        monkeypatch.setattr(commands, "SMALL_RANGE", self.rng.choice([1, 2048, 1 << 20]))
        monkeypatch.setattr(lanes, "BURST_BYTES", self.rng.choice([1, 2 * size, 1 << 30]))
        for lane in (StoreLane, LoadLane):
            monkeypatch.setattr(lane, "short_bytes", self.rng.choice([0, size, size, 2 * size]))
        suite = Lanes()
        suite.packs = self.rng.random() < 0.3
        self.rig = Rig(suite, "kv_first", page=PAGE, num_blocks=60, num_slots=60)
        half = self.rig.config.num_slots // 2
        count = min(half, 29)
        first = GPULoadStoreSpec(range(1, 1 + count)), CPULoadStoreSpec(range(half, half + count))
        assert self.rig.run_store(-1, *first).success
        self.ways = {"store": self.rig.store, "load": self.rig.load}
        self.blocks = {"store": set(range(1, 30)), "load": set(range(30, 60))}
        self.slots = {"store": set(range(half)), "load": set(range(half, half + count))}
        self.jobs: dict[int, tuple[str, GPULoadStoreSpec, CPULoadStoreSpec]] = {}
        self.started = 0

    def start(self) -> bool:
        """Start a job, if there is room; return whether it was accepted, or there was none."""
        way = self.rng.choice(list(self.ways))
        blocks, slots = self.blocks[way], self.slots[way]
        most = min(len(blocks), len(slots))
        if not most:
            return True
        count = min(self.rng.randint(1, most), self.rng.choice([3, most]))
        chosen = [self.rng.sample(sorted(some), count) for some in (blocks, slots)]
        if self.rng.random() < 0.3:
            chosen = [sorted(some) for some in chosen]
        gpu, cpu = GPULoadStoreSpec(chosen[0]), CPULoadStoreSpec(chosen[1])
        self.started += 1
        handler = self.ways[way]
        if not handler.transfer_async(self.started, (gpu, cpu) if way == "store" else (cpu, gpu)):
            return False
        self.jobs[self.started] = way, gpu, cpu
        blocks -= set(chosen[0])
        if way == "store":  # slots may be read by many
            slots -= set(chosen[1])
        return True

    def some_job(self) -> Iterator[tuple[OffloadingHandler, int]]:
        if self.jobs:
            job = self.rng.choice(list(self.jobs))
            yield self.ways[self.jobs[job][0]], job

    def settle(self) -> int:
        """Take results, and hold what arrived against what was sent; return how many jobs failed."""
        failed = 0
        for handler in self.ways.values():
            for result in handler.get_finished():
                way, gpu, cpu = self.jobs.pop(result.job_id)
                self.blocks[way] |= set(gpu.block_ids.tolist())
                self.slots[way] |= set(cpu.block_ids.tolist())
                self._expect_arrived(result, gpu, cpu)
                self._follow(way, gpu, cpu)
                failed += not result.success
            assert isinstance(handler, CudaHandler)
            assert not handler._closed, "a handler broke"
            handler.check()
        return failed

    def _expect_arrived(self, result: TransferResult, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> None:
        for position, (block, slot) in enumerate(
            zip(gpu.block_ids.tolist(), cpu.block_ids.tolist(), strict=True)
        ):
            if result.success or position not in (result.failed_blocks or ()):
                image = self.rig.model.image(self.rig.caches, 0, block)
                assert self.rig.rows[slot, : len(image)].tobytes() == image, f"block {block}"

    def _follow(self, way: str, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> None:
        """Let the model be as it is now: whoever writes after a result is found out in the end."""
        model = self.rig.model
        for slot in cpu.block_ids.tolist() if way == "store" else ():
            model.rows[slot][:] = self.rig.rows[slot].tobytes()
        for block in gpu.block_ids.tolist() if way == "load" else ():
            for there, here in zip(
                model.caches.pages(0, block), self.rig.caches.pages(0, block), strict=True
            ):
                there.copy_(here)

    def close(self) -> None:
        for handler in self.ways.values():
            assert handler.wait(set(self.jobs), PATIENCE)
        self.settle()
        assert not self.jobs
        self.rig.check()
        self.rig.close()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", [pytest.param("c", marks=compiled_only), "python"])
@pytest.mark.parametrize("seed", range(12))
def test_bytes_arrive_in_any_order_of_streams(
    seed: int, form: str, options: dict[str, Any], sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "python":
        monkeypatch.setattr(commands, "CompiledSubmitter", None)
    monkeypatch.setattr(Lanes, "options", options)
    soak = Soak(seed, sim, monkeypatch)
    for _ in range(50):
        assert soak.start()
        if soak.rng.random() < 0.2:
            for handler, job in soak.some_job():
                assert handler.wait({job}, PATIENCE)
        if soak.rng.random() < 0.5:
            assert soak.settle() == 0
    soak.close()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_jobs_that_are_ended_or_fail_leave_nothing_behind(
    seed: int, fails: bool, options: dict[str, Any], sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lanes, "options", options)
    soak = Soak(seed, sim, monkeypatch)
    for _ in range(60):
        if fails and soak.rng.random() < 0.2:
            sim.calls_until_failure = soak.rng.randrange(12)
        assert soak.start() or fails
        sim.calls_until_failure = None
        if soak.rng.random() < 0.2:
            for handler, job in soak.some_job():
                handler.cancel({job})
        if soak.rng.random() < 0.5:
            soak.settle()
    soak.close()


def test_polling_sees_the_pieces_that_have_arrived(sim: SimDriver) -> None:
    rig = Rig(Lanes(), page=PAGE)
    assert rig.store.transfer_async(0, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
    assert not rig.store.wait({0}, 0)
    sim.run(*sim.streams)
    assert rig.store.wait({0}, 0)
    rig.close()


@compiled_only
def test_a_job_that_was_ended_takes_no_other_jobs_time(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended while the piece of another job before it, on another stream, is still under way."""
    cut_small(monkeypatch, 4 * BLOCK)
    monkeypatch.setattr(Lanes, "options", {"direct_bytes": PAGE})
    rig = Rig(Lanes(), "blocks_first", page=PAGE, num_groups=2)
    lane = lane_of(rig.store)

    def start(job: int, direct: list[int], small: list[int]) -> None:
        gpu = GPULoadStoreSpec([*direct, *small], [len(direct), len(small)], [0, 0])
        slots = CPULoadStoreSpec(range(4 * job, 4 * job + len(direct) + len(small)))
        assert rig.store.transfer_async(job, (gpu, slots))

    start(0, [], [1, 2, 3])
    start(1, [4], [])
    sim.frozen = {lane._kernels}
    rig.store.cancel({1})
    assert sim.streams[lane._kernels], "the piece of the first job is still under way"
    rig.store.get_finished()
    start(2, [5], [])
    sim.frozen = {lane._args_stream, lane._copies, lane._side}
    sim.run(lane._kernels)
    assert [result.job_id for result in rig.store.get_finished()] == [0]
    sim.frozen = set()
    assert finish(rig.store, 2).success
    rig.close()


@compiled_only
def test_a_job_takes_as_long_as_the_last_of_its_pieces(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be the first one, if it is short and the engine's kernels keep it from running."""
    cut_small(monkeypatch, BLOCK)
    rig = Rig(Lanes(), "blocks_first", page=PAGE)
    lane = lane_of(rig.store)
    asked: list[int] = []
    seconds = lane.seconds
    monkeypatch.setattr(
        lane, "seconds", lambda timer, number: asked.append(number) or seconds(timer, number)
    )
    sim.frozen = {lane._side}
    blocks = range(1, 17)
    assert rig.store.transfer_async(0, (GPULoadStoreSpec(blocks), CPULoadStoreSpec(range(len(blocks)))))
    sim.run(lane._args_stream, lane._kernels, lane._copies)
    sim.frozen = set()
    assert finish(rig.store, 0).success
    assert 0 in asked
    rig.close()


@compiled_only
def test_the_rest_of_a_failed_beginning_is_done_before_the_usual_way(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same buffers and arguments are used again."""
    cut_small(monkeypatch, BLOCK)
    monkeypatch.setattr(LoadLane, "short_bytes", 0)
    rig = Rig(Lanes(), page=PAGE)
    gpu, cpu = GPULoadStoreSpec(range(1, 9)), CPULoadStoreSpec(range(8))
    assert rig.run_store(0, gpu, cpu).success
    lane = lane_of(rig.load)
    enqueue, waiting = lane.enqueue, []

    def watch(*args: Any, **options: Any) -> int:
        waiting.append(sum(map(len, sim.streams.values())))
        return enqueue(*args, **options)

    monkeypatch.setattr(lane, "enqueue", watch)
    sim.calls_until_failure = 2  # a timer and a copy are enqueued
    assert rig.run_load(1, cpu, gpu).success
    assert waiting[:2] == [0, 0]
    rig.check()
    rig.close()


def test_a_call_that_fails_loses_no_event(sim: SimDriver) -> None:
    rig = Rig(Lanes(), page=PAGE)
    sim.failing = {"cuLaunchKernel": 701}
    made = []
    for job in range(5):
        assert rig.store.transfer_async(job, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
        assert not finish(rig.store, job).success
        made.append(lane_of(rig.store)._device._handles)  # type: ignore[attr-defined]
    assert made[-1] == made[0]
    rig.close()


def test_an_odd_error_fails_its_job_and_says_what_has_not_arrived(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cut_small(monkeypatch, BLOCK)
    rig = Rig(Lanes(), page=PAGE)
    lane = lane_of(rig.store)
    enqueue, calls = lane.enqueue, iter(range(100))

    def fail_once(*args: Any, **options: Any) -> int:
        if next(calls) == 1:
            raise MemoryError("no room")
        return enqueue(*args, **options)

    monkeypatch.setattr(lane, "enqueue", fail_once)
    assert rig.store.transfer_async(0, (GPULoadStoreSpec(range(1, 9)), CPULoadStoreSpec(range(8))))
    assert finish(rig.store, 0).failed_blocks == tuple(range(1, 8))
    assert "no room" in caplog.text
    rig.close()


def test_pieces_are_no_larger_than_the_handler_says(sim: SimDriver) -> None:
    rig = Rig(Lanes(), page=PAGE)
    assert isinstance(rig.store, CudaHandler)
    rig.store.piece_bytes = 1
    assert rig.store.transfer_async(0, (GPULoadStoreSpec([1, 2, 3]), CPULoadStoreSpec([0, 1, 2])))
    assert len(rig.store._jobs[0].pieces) == 3
    assert finish(rig.store, 0).success
    rig.close()
