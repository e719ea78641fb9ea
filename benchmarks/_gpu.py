"""Shared by the benchmarks of CUDA transfers: caches, handlers, bare copies, and a stopwatch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from kvtier.config import CPUConfig, GroupConfig, KVTierConfig, OffloadingConfig
from kvtier.pool import Pool
from kvtier.transfer.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
)
from kvtier.transfer.cuda import CudaLoadHandler, CudaMemory, CudaStoreHandler, driver
from kvtier.transfer.cuda.kernels import PageCopy, Shape
from kvtier.transfer.cuda.memory import DIRECT_BYTES
from kvtier.transfer.cuda.pieces import Ints, Part

WAYS = ("store", "load")
DEVICE = torch.device("cuda")


def new_stream() -> torch.cuda.Stream:
    """Return a stream."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def new_timer() -> torch.cuda.Event:
    """Return an event that records the device's time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def is_over(event: torch.cuda.Event) -> bool:
    """Return whether all work before an event is done."""
    return bool(event.query())  # type: ignore[no-untyped-call]


class Timing(NamedTuple):
    """Seconds that a caller waits, and seconds that the device works."""

    wall: float
    device: float


class Rig:
    """A cache of `refs` tensors with pages of `page` bytes, a pool for a job, and handlers over both.

    The cache holds normal values in bfloat16, up to 1,024 for a token in a page. `packs`: its blocks are
    kept packed.
    """

    def __init__(
        self,
        page: int,
        refs: int,
        job_bytes: int,
        *,
        pool_jobs: int = 1,
        direct_bytes: int = DIRECT_BYTES,
        packs: bool = False,
    ) -> None:
        self.block_bytes = page * refs
        self.blocks = max(1, job_bytes // self.block_bytes)
        num_blocks = 1 + 2 * self.blocks
        tensors = [torch.empty((num_blocks, page), dtype=torch.int8, device=DEVICE) for _ in range(refs)]
        for tensor in tensors:
            tensor.view(torch.bfloat16).normal_()
        token_values = min(page // 32, 1024)
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page) for tensor in tensors],
            [[CanonicalKVCacheRef(index, page, token_values) for index in range(refs)]],
        )
        group = GroupConfig(block_size=16, bytes_per_block=self.block_bytes, layer_names=("all",))
        capacity = (2 * pool_jobs * self.blocks) * max(self.block_bytes, 4096)
        settings = KVTierConfig(cpu=CPUConfig(capacity=capacity), store_deadline=600, load_deadline=600)
        engine_id = f"benchmark-{packs}"
        config = OffloadingConfig(
            settings=settings,
            groups=(group,),
            hash_block_size=16,
            engine_id=engine_id,
            packed_groups=(packs,),
        )
        self.pool = Pool.open(engine_id, config.num_slots, config.row_bytes)
        self.memory = CudaMemory(caches, self.pool, config, direct_bytes=direct_bytes)
        self.handlers: dict[str, OffloadingHandler] = {
            "store": CudaStoreHandler(self.memory, 600),
            "load": CudaLoadHandler(self.memory, 600),
        }
        self.rng = np.random.default_rng(0)
        self._job = 0

    @property
    def job_bytes(self) -> int:
        """The bytes of a job of all `blocks`."""
        return self.blocks * self.block_bytes

    def fill(self) -> None:
        """Give every slot a block, so that any of them can be loaded."""
        slots, most = np.arange(self.pool.num_slots), 2 * self.blocks
        for first in range(0, len(slots), most):
            some = slots[first : first + most]
            self.run("store", GPULoadStoreSpec(1 + np.arange(len(some))), CPULoadStoreSpec(some))

    def ends(self, blocks: int, *, scattered: bool) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
        """Draw scattered blocks, and slots side by side or scattered too."""
        ids = 1 + self.rng.permutation(2 * self.blocks)[:blocks]
        slots = self.rng.permutation(self.pool.num_slots)[:blocks] if scattered else np.arange(blocks)
        return GPULoadStoreSpec(ids), CPULoadStoreSpec(slots)

    def start(self, way: str, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> int:
        """Start a job and return its id."""
        self._job += 1
        spec = (gpu, cpu) if way == "store" else (cpu, gpu)
        if not self.handlers[way].transfer_async(self._job, spec):
            raise RuntimeError(f"the {way} was refused")
        return self._job

    def finish(self, way: str, job: int) -> float:
        """Wait for a job and return the device's seconds."""
        self.handlers[way].wait({job})
        (result,) = self.handlers[way].get_finished()
        if not result.success or result.transfer_time is None:
            raise RuntimeError(f"the {way} failed: {result}")
        return result.transfer_time

    def run(self, way: str, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> Timing:
        """Run one job and time it from the call to its result only, since some jobs take 20 us."""
        self._job += 1
        job, handler = self._job, self.handlers[way]
        spec = (gpu, cpu) if way == "store" else (cpu, gpu)
        begin = time.perf_counter()
        accepted = handler.transfer_async(job, spec)
        handler.wait({job})
        results = handler.get_finished()
        end = time.perf_counter()
        if not accepted or not results[0].success or results[0].transfer_time is None:
            raise RuntimeError(f"the {way} failed: {results}")
        return Timing(end - begin, results[0].transfer_time)

    def run_new(self, way: str, blocks: int, *, scattered: bool) -> Timing:
        """Run one job with newly drawn blocks and slots, and time it."""
        return self.run(way, *self.ends(blocks, scattered=scattered))

    def close(self) -> None:
        """Release everything."""
        for handler in self.handlers.values():
            handler.shutdown()
        self.pool.close()
        torch.cuda.empty_cache()


class BareCopies:
    """Bare copies of a rig's job: one large copy, one DMA per page, and a kernel on some SMs."""

    def __init__(self, rig: Rig, blocks: int) -> None:
        self._rig, self._count = rig, blocks
        self._bytes = blocks * rig.block_bytes
        self.stream = new_stream()
        self._buffer = torch.empty(self._bytes, dtype=torch.int8, device=DEVICE)
        pages = [part.pages for part in rig.memory.parts[0]]
        base, stride, size, offset = (np.concatenate(column) for column in zip(*pages, strict=True))
        self._part = Part(type(pages[0])(base, stride, size, offset), 0, rig.block_bytes, True)
        self.set_blocks(1 + rig.rng.permutation(2 * rig.blocks)[:blocks])

    def set_blocks(self, ids: Ints) -> None:
        """Choose the blocks to copy, to or from the first slots."""
        places = self._rig.pool.rows.ctypes.data + np.arange(self._count) * self._rig.pool.slot_bytes
        self._args = torch.from_numpy(np.concatenate([ids, places])).pin_memory()
        self._ranges = self._rig.memory.pool_map.ranges(self._part.pages, ids, places)

    def large(self, way: str) -> None:
        """Enqueue one large copy of the same bytes. Pinned memory has seams, which a copy may not cross."""
        seam, host = self._rig.memory.pinning.seam, self._rig.memory.pinning.address
        for at in range(0, self._bytes, seam):
            ends = (host + at, self._buffer.data_ptr() + at)
            dst, src = ends if way == "store" else ends[::-1]
            driver.copy_range(dst, src, min(seam, self._bytes - at), self.stream.cuda_stream)

    def batched(self, way: str) -> None:
        """Enqueue one DMA for each page."""
        device, host, size = self._ranges
        dst, src = (host, device) if way == "store" else (device, host)
        driver.copy_ranges(dst, src, size, self.stream.cuda_stream)

    def kernel(self, way: str, programs: int = 12) -> Callable[[], None]:
        """Return a function that enqueues a kernel on `programs` SMs, which copies pages itself."""
        shape = Shape(programs, program_bytes=65536, warps=32)
        copy = PageCopy(self._part, DEVICE, shape, gather=way == "store")
        return partial(copy, self._args, self._count, self.stream.cuda_stream)

    def run(self, enqueue: Callable[[], None]) -> Timing:
        """Run the enqueued work and time it."""
        begin, end = new_timer(), new_timer()
        start = time.perf_counter()
        begin.record(self.stream)
        enqueue()
        end.record(self.stream)
        end.synchronize()
        return Timing(time.perf_counter() - start, begin.elapsed_time(end) / 1000)


def medians(runs: Mapping[str, Callable[[], Timing]], repetitions: int) -> dict[str, Timing]:
    """Repeat all runs in turns, and return the median of each time.

    In its turn each runs twice, and the second run counts.

    A machine whose memory others use as well drifts by more than the measured difference; and a run after
    another one finds caches full of the other's data.
    """
    timings = [{name: (run(), run())[1] for name, run in runs.items()} for _ in range(repetitions)]
    return {
        name: Timing(*map(statistics.median, zip(*(turn[name] for turn in timings), strict=True)))
        for name in runs
    }
