"""`HandlerSuite`: the contract of every pair of handlers.

Subclass it, define how to make a pair, and run it with pytest.

    class TestMyHandlers(HandlerSuite):
        def make_handlers(self, config, kv_caches, clock): ...
        def hold(self, handler): ...

Bytes are compared with `kvtier.testing.caches.ReferenceTransfer`, in every layout. Time is a `ManualClock`:
nothing here sleeps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.config import OffloadingConfig
from kvtier.errors import InputError
from kvtier.testing.caches import LAYOUTS, Caches, ReferenceTransfer, make_caches, make_config
from kvtier.testing.kit import PATIENCE, ManualClock, cover_pairs
from kvtier.transfer.base import (
    NULL_BLOCK,
    CanonicalKVCaches,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
)
from kvtier.transfer.layout import canonicalize

DEADLINE = 10.0  # seconds of the manual clock


class Handlers(NamedTuple):
    """A pair under test. `rows`: the pool's bytes, if the pair keeps rows in the documented layout."""

    store: OffloadingHandler
    load: OffloadingHandler
    rows: npt.NDArray[np.uint8] | None = None


class Rig:
    """A pair of handlers over small caches, with a model that gets the same jobs."""

    def __init__(self, suite: HandlerSuite, layout: str = "blocks_first", **options: Any) -> None:
        geometry = {
            name: options.pop(name) for name in ("page", "num_blocks", "num_groups") if name in options
        }
        if suite.packs:  # the smallest page of which every part of every layout can be packed
            geometry["page"] = max(geometry.get("page", 0), 8192)
        self.caches, twin = (
            make_caches(layout, device=suite.device, bfloat16=suite.packs, **geometry) for _ in range(2)
        )
        self.config = make_config(self.caches, deadline=DEADLINE, packs=suite.packs, **options)
        self.model = ReferenceTransfer(twin, self.config)
        self.clock = ManualClock()
        canonical = canonicalize(self.caches.layers, self.caches.groups, num_blocks=self.caches.num_blocks)
        self.store, self.load, self.rows = suite.make_handlers(self.config, canonical, self.clock)

    def run_store(self, job_id: int, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> TransferResult:
        """Store with the handler and in the model."""
        self.model.store(gpu, cpu)
        assert self.store.transfer_async(job_id, (gpu, cpu))
        return finish(self.store, job_id)

    def run_load(self, job_id: int, cpu: CPULoadStoreSpec, gpu: GPULoadStoreSpec) -> TransferResult:
        """Load with the handler and in the model."""
        self.model.load(cpu, gpu)
        assert self.load.transfer_async(job_id, (cpu, gpu))
        return finish(self.load, job_id)

    def check(self) -> None:
        """Compare every byte with the model, and let the handlers check themselves."""
        assert self.caches.contents() == self.model.caches.contents()
        if self.rows is not None:
            assert self.rows.tobytes() == b"".join(self.model.rows)
        for handler in (self.store, self.load):
            getattr(handler, "check", lambda: None)()

    def close(self) -> None:
        """Shut both handlers down."""
        self.store.shutdown()
        self.load.shutdown()


def finish(handler: OffloadingHandler, job_id: int) -> TransferResult:
    """Wait for a job and take its result, the only one there is."""
    assert handler.wait({job_id}, PATIENCE)
    (result,) = handler.get_finished()
    assert result.job_id == job_id
    return result


def random_job(
    rng: random.Random, config: OffloadingConfig, caches: Caches, slots: Sequence[int]
) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    """Draw distinct blocks and their slots for every group, with unaligned ends and some null blocks."""
    per_chunk = config.settings.blocks_per_chunk
    free_blocks = rng.sample(range(1, caches.num_blocks), caches.num_blocks - 1)
    free_slots = list(slots)
    if rng.random() < 0.5:  # neighbours, so that runs are exercised too
        free_blocks.sort()
        free_slots.sort()
    sizes, indices, blocks, used = [], [], [], []
    for _ in config.groups:
        first = rng.randrange(3 * per_chunk)
        size = rng.randrange(
            min(len(free_blocks), (len(free_slots) - 1) * per_chunk // len(config.groups)) // 2 + 1
        )
        taken = -(-(size + first % per_chunk) // per_chunk) if size else 0
        blocks += [free_blocks.pop(0) if rng.random() < 0.9 else NULL_BLOCK for _ in range(size)]
        used += [free_slots.pop(0) for _ in range(taken)]
        sizes.append(size)
        indices.append(first)
    return GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(used)


class HandlerSuite:
    """The contract of `OffloadingHandler`, for a pair that stores to and loads from the same place."""

    device = "cpu"
    packs = False
    """Whether the caches are in bfloat16, and kept packed."""

    def make_handlers(
        self, config: OffloadingConfig, kv_caches: CanonicalKVCaches, clock: Callable[[], float]
    ) -> Handlers:
        """Make a new pair whose deadlines are the config's, measured by `clock`."""
        raise NotImplementedError

    def hold(self, handler: OffloadingHandler) -> AbstractContextManager[None]:
        """Keep the jobs of a handler from making progress while the context lasts, unless they are ended."""
        raise NotImplementedError

    @pytest.fixture
    def rig(self) -> Any:
        """A rig with the simplest caches. Bytes are compared when the test ends."""
        rig = Rig(self)
        yield rig
        rig.check()
        rig.close()

    @pytest.mark.parametrize(
        ("layout", "blocks_per_chunk", "page", "num_groups"),
        cover_pairs(LAYOUTS, [1, 2, 5], [32, 4096], [1, 2]),
    )
    def test_bytes_arrive_and_no_others_change(
        self, layout: str, page: int, blocks_per_chunk: int, num_groups: int
    ) -> None:
        rng = random.Random(f"{layout} {page} {blocks_per_chunk} {num_groups}")
        rig = Rig(self, layout, page=page, num_groups=num_groups, blocks_per_chunk=blocks_per_chunk)
        for job_id in range(0, 12, 2):
            gpu, cpu = random_job(rng, rig.config, rig.caches, range(rig.config.num_slots))
            assert rig.run_store(job_id, gpu, cpu).success
            anywhere = np.where(
                gpu.block_ids == NULL_BLOCK, NULL_BLOCK, rng.sample(range(1, 24), 23)[: len(gpu.block_ids)]
            )
            elsewhere = GPULoadStoreSpec(anywhere, gpu.group_sizes, gpu.block_indices)
            assert rig.run_load(job_id + 1, cpu, elsewhere).success
            rig.check()
        rig.close()

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_each_rank_has_its_place_in_a_row(self, rank: int) -> None:
        """Runs only if `make_handlers` can make a pair of several ranks in one process."""
        rig = Rig(self, "kv_first", world_size=3, rank=rank, blocks_per_chunk=2)
        gpu, cpu = GPULoadStoreSpec([3, 9, 4]), CPULoadStoreSpec([7, 2])
        assert rig.run_store(0, gpu, cpu).success
        assert rig.run_load(1, cpu, GPULoadStoreSpec([11, 12, 13])).success
        rig.check()
        rig.close()

    @pytest.mark.parametrize(("page", "blocks"), [(1 << 15, 24), (1 << 19, 4)])
    def test_a_large_job_arrives_whole(self, page: int, blocks: int) -> None:
        rig = Rig(self, "stacked", page=page, num_blocks=blocks + 1, num_slots=blocks)
        ids = random.Random(0).sample(range(1, blocks + 1), blocks)
        assert rig.run_store(0, GPULoadStoreSpec(ids), CPULoadStoreSpec(range(blocks))).success
        assert rig.run_load(1, CPULoadStoreSpec(range(blocks)), GPULoadStoreSpec(ids[::-1])).success
        rig.check()
        rig.close()

    def test_part_of_a_chunk_can_be_loaded(self) -> None:
        rig = Rig(self, blocks_per_chunk=4)
        rig.run_store(0, GPULoadStoreSpec(range(1, 9)), CPULoadStoreSpec([5, 3]))
        rig.run_load(1, CPULoadStoreSpec([5, 3]), GPULoadStoreSpec([20, 21, 22], (3,), (2,)))
        rig.run_load(2, CPULoadStoreSpec([3]), GPULoadStoreSpec([15], (1,), (7,)))
        rig.check()
        rig.close()

    def test_a_result_says_what_was_moved(self, rig: Rig) -> None:
        result = rig.run_store(7, GPULoadStoreSpec([1, NULL_BLOCK, 2]), CPULoadStoreSpec([0, 1, 2]))
        moved = 2 * rig.config.kept_bytes(0)
        assert result == TransferResult(7, True, moved, result.transfer_time, ("GPU", "CPU"))
        assert result.transfer_time is not None
        assert rig.run_load(8, CPULoadStoreSpec([2]), GPULoadStoreSpec([5])).transfer_type == ("CPU", "GPU")

    def test_results_come_exactly_once(self, rig: Rig) -> None:
        jobs = set(range(10))
        for job_id in jobs:
            gpu, cpu = GPULoadStoreSpec([job_id + 1]), CPULoadStoreSpec([job_id])
            rig.model.store(gpu, cpu)
            assert rig.store.transfer_async(job_id, (gpu, cpu))
        assert rig.store.wait(jobs, PATIENCE)
        assert rig.store.wait(jobs, 0)  # waiting takes nothing away
        assert sorted(result.job_id for result in rig.store.get_finished()) == sorted(jobs)
        assert rig.store.get_finished() == []
        # An id may be used again once it is over.
        rig.run_store(0, GPULoadStoreSpec([1]), CPULoadStoreSpec([0]))

    def test_an_empty_job_succeeds(self, rig: Rig) -> None:
        assert rig.run_store(0, GPULoadStoreSpec([]), CPULoadStoreSpec([])).transfer_size == 0
        assert rig.run_load(1, CPULoadStoreSpec([0]), GPULoadStoreSpec([NULL_BLOCK])).success

    def test_unknown_jobs_are_over(self, rig: Rig) -> None:
        assert rig.store.wait({1, 2, 3})
        rig.store.cancel({1, 2, 3})
        assert rig.store.get_finished() == []

    def test_wait_gives_up_after_its_timeout(self, rig: Rig) -> None:
        gpu, cpu = GPULoadStoreSpec([1]), CPULoadStoreSpec([0])
        rig.model.store(gpu, cpu)
        with self.hold(rig.store):
            assert rig.store.transfer_async(0, (gpu, cpu))
            assert not rig.store.wait({0}, 0.001)
            assert rig.store.get_finished() == []
        assert finish(rig.store, 0).success

    def test_a_late_job_is_ended_and_the_next_one_runs(self, rig: Rig) -> None:
        with self.hold(rig.load):
            assert rig.load.transfer_async(0, (CPULoadStoreSpec([0, 1]), GPULoadStoreSpec([1, 2])))
            rig.clock.now += DEADLINE - 1
            assert rig.load.get_finished() == []
            rig.clock.now += 2
            (result,) = rig.load.get_finished()
            assert (result.job_id, result.success, result.failed_blocks) == (0, False, (0, 1))
        rig.run_store(1, GPULoadStoreSpec([3]), CPULoadStoreSpec([0]))
        assert rig.run_load(2, CPULoadStoreSpec([0]), GPULoadStoreSpec([4])).success

    def test_wait_is_over_at_the_deadline(self, rig: Rig) -> None:
        with self.hold(rig.load):
            assert rig.load.transfer_async(0, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
            rig.clock.now += DEADLINE + 1
            assert rig.load.wait({0}, PATIENCE)
            assert [result.success for result in rig.load.get_finished()] == [False]

    def test_a_job_is_late_by_the_time_it_was_given(self, rig: Rig) -> None:
        """A queued job has no more time than a running one."""
        with self.hold(rig.store):
            for job_id in (0, 1):
                assert rig.store.transfer_async(job_id, (GPULoadStoreSpec([1]), CPULoadStoreSpec([job_id])))
            rig.clock.now += DEADLINE + 1
            assert [result.success for result in rig.store.get_finished()] == [False, False]

    def test_a_cancelled_job_fails_once_and_is_over(self, rig: Rig) -> None:
        with self.hold(rig.load):
            assert rig.load.transfer_async(0, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
            rig.load.cancel({0})
            assert rig.load.wait({0}, 0)
            rig.load.cancel({0})
            (result,) = rig.load.get_finished()
            assert (result.success, result.failed_blocks) == (False, (0,))

    @pytest.mark.parametrize("end", ["cancel", "deadline", "shutdown"])
    def test_nothing_is_touched_once_a_job_is_over(self, end: str) -> None:
        """Race the end of a large load against its copy, then overwrite its destination and look again."""
        rig = Rig(self, "kv_first", page=1 << 16, num_blocks=32)
        rig.run_store(0, GPULoadStoreSpec(range(1, 17)), CPULoadStoreSpec(range(16)))
        for job_id in range(1, 6):
            if not rig.load.transfer_async(
                job_id, (CPULoadStoreSpec(range(16)), GPULoadStoreSpec(range(1, 17)))
            ):
                break
            if end == "cancel":
                rig.load.cancel({job_id})
            elif end == "deadline":
                rig.clock.now += DEADLINE + 1
            else:
                rig.load.shutdown()
            (result,) = rig.load.get_finished()
            for allocation in rig.caches.allocations:
                allocation.fill_(job_id)
            before = rig.caches.contents()
            if rig.load.transfer_async(100, (CPULoadStoreSpec([0]), GPULoadStoreSpec([NULL_BLOCK]))):
                assert finish(rig.load, 100).success  # by now the thread has left the job behind
            assert rig.caches.contents() == before, result
        rig.close()

    @pytest.mark.parametrize("blocks_per_chunk", [1, 3])
    def test_blocks_not_reported_as_failed_have_arrived(self, blocks_per_chunk: int) -> None:
        rig = Rig(
            self,
            "blocks_first",
            page=1 << 14,
            num_blocks=64,
            blocks_per_chunk=blocks_per_chunk,
            num_slots=40,
        )
        slots = CPULoadStoreSpec(range(30 // blocks_per_chunk))
        rig.run_store(0, GPULoadStoreSpec(range(1, 31)), slots)
        for job_id in range(1, 12):
            for allocation in rig.caches.allocations:
                allocation[31:].zero_()
            assert rig.load.transfer_async(job_id, (slots, GPULoadStoreSpec(range(31, 61))))
            rig.load.cancel({job_id})
            (result,) = rig.load.get_finished()
            failed = set(
                range(30)
                if result.failed_blocks is None and not result.success
                else result.failed_blocks or ()
            )
            for position in set(range(30)) - failed:
                pairs = zip(
                    rig.caches.pages(0, 1 + position), rig.caches.pages(0, 31 + position), strict=True
                )
                assert all(bool((source == arrived).all()) for source, arrived in pairs)
        rig.close()

    def test_shutdown_ends_everything(self, rig: Rig) -> None:
        with self.hold(rig.store):
            for job_id in (0, 1):
                assert rig.store.transfer_async(job_id, (GPULoadStoreSpec([1]), CPULoadStoreSpec([job_id])))
            rig.store.shutdown()
            rig.store.shutdown()
            assert rig.store.wait({0, 1}, 0)
            assert [result.success for result in rig.store.get_finished()] == [False, False]
            assert not rig.store.transfer_async(2, (GPULoadStoreSpec([1]), CPULoadStoreSpec([2])))
            assert rig.store.get_finished() == []

    @pytest.mark.parametrize(
        ("gpu", "cpu"),
        [
            (GPULoadStoreSpec([24]), CPULoadStoreSpec([0])),
            (GPULoadStoreSpec([-1]), CPULoadStoreSpec([0])),
            (GPULoadStoreSpec([1]), CPULoadStoreSpec([16])),
            (GPULoadStoreSpec([1]), CPULoadStoreSpec([-1])),
            (GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([0])),
            (GPULoadStoreSpec([1]), CPULoadStoreSpec([0, 1])),
            (GPULoadStoreSpec([1, 2], (1, 1)), CPULoadStoreSpec([0, 1])),
            (GPULoadStoreSpec([1], (1,), (-1,)), CPULoadStoreSpec([0])),
        ],
    )
    def test_a_job_that_makes_no_sense_is_misuse(
        self, rig: Rig, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec
    ) -> None:
        with pytest.raises(InputError):
            rig.store.transfer_async(0, (gpu, cpu))
        with pytest.raises(InputError):
            rig.load.transfer_async(0, (cpu, gpu))
        assert rig.store.get_finished() == rig.load.get_finished() == []

    def test_a_job_in_the_wrong_direction_is_misuse(self, rig: Rig) -> None:
        with pytest.raises(InputError, match="GPU to CPU"):
            rig.store.transfer_async(0, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
        with pytest.raises(InputError, match="CPU to GPU"):
            rig.load.transfer_async(0, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))

    def test_an_id_in_use_is_misuse(self, rig: Rig) -> None:
        gpu, cpu = GPULoadStoreSpec([1]), CPULoadStoreSpec([0])
        rig.model.store(gpu, cpu)
        with self.hold(rig.store):
            assert rig.store.transfer_async(0, (gpu, cpu))
            with pytest.raises(InputError, match="under way"):
                rig.store.transfer_async(0, (gpu, cpu))
        assert finish(rig.store, 0).success

    @pytest.mark.parametrize("seed", range(5))
    def test_every_accepted_job_has_one_result(self, seed: int) -> None:
        rng = random.Random(seed)
        rig = Rig(self, "kv_first", blocks_per_chunk=2)
        accepted, over = [], []
        for job_id in range(60):
            gpu, cpu = random_job(rng, rig.config, rig.caches, range(rig.config.num_slots))
            if rig.store.transfer_async(job_id, (gpu, cpu)):
                accepted.append(job_id)
            action = rng.randrange(6)
            if action == 0:
                rig.store.cancel({job_id, rng.randrange(60)})
            elif action == 1:
                assert rig.store.wait({job_id}, PATIENCE)
            elif action == 2:
                rig.clock.now += rng.choice([DEADLINE / 2, DEADLINE * 2])
            elif action == 3:
                over += rig.store.get_finished()
        assert rig.store.wait(set(accepted), PATIENCE)
        over += rig.store.get_finished()
        assert sorted(result.job_id for result in over) == accepted
        rig.close()
