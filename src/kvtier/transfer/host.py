"""Handlers for an engine on the host, with one thread for stores and one for loads.

The engine is layer-major and the pool chunk-major, so one block is as many separate pages as its group has
refs. Where refs lie at equal distances in one allocation (K and V of a layer; all layers, if the engine
allocates its cache in one piece) they form one *span*, and are copied together:

    span.engine   (num_blocks, refs, page bytes)
    span.pool     (slots, blocks of a slot, refs, page bytes)

The pages of a group that is kept packed are no spans: `kvtier.packing` packs and unpacks its blocks whole.

Spans are views, immutable once made. `store_pages` and `load_pages` are the innermost loop. They take numpy
arrays, strided in all but the last dimension, and parallel int64 arrays of slots, indices in the slots, and
blocks. The compiled forms run without the GIL from the first byte to the last, so they and other Python
threads do not slow each other down. The Python forms also take torch tensors, on any device.

A job is copied piece by piece, leading blocks first. Each piece is copied under the job's lock, after a
check whether the job is ending. Ending a job takes the same lock. So the memory of a job with a result is
never touched again, and it is known which blocks of a load that ended early have arrived. Stores and loads
do not wait for each other. `JobHandler` says what belongs to which thread, and when jobs end.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.config import OffloadingConfig
from kvtier.errors import LayoutError
from kvtier.native import form_of, uses_c
from kvtier.packing import BlockFormat, PackedPages, PageShape
from kvtier.pool import Pool
from kvtier.transfer.base import CanonicalKVCaches
from kvtier.transfer.jobs import Clock, Ends, Job, JobHandler, Loads, Stores
from kvtier.transfer.plan import JobBounds, Plan, pair_blocks

Ints = npt.NDArray[np.int64]
BATCH_BYTES = 1 << 20
"""The bytes copied between two checks whether the job is ending.

They take a tenth of a millisecond, so ending a job is never a noticeable wait.
"""

Array = Any  # numpy where the engine is on the host, torch where it is on a device


def store_pages_python(pool: Any, engine: Any, slots: Ints, indices: Ints, blocks: Ints) -> None:
    """Copy blocks of the engine into the pool."""
    for slot, index, block in zip(slots.tolist(), indices.tolist(), blocks.tolist(), strict=True):
        pool[slot, index] = engine[block]


def load_pages_python(pool: Any, engine: Any, slots: Ints, indices: Ints, blocks: Ints) -> None:
    """Copy blocks of the pool into the engine."""
    for slot, index, block in zip(slots.tolist(), indices.tolist(), blocks.tolist(), strict=True):
        engine[block] = pool[slot, index]


if uses_c("pages"):
    from kvtier.native import _pages

    load_pages, store_pages = _pages.load, _pages.store
else:
    load_pages, store_pages = load_pages_python, store_pages_python

COPIED_BY = form_of("pages")
"""Whether C or Python copies pages of an engine on the host. C is as fast as one large memcpy."""


class Span(NamedTuple):
    """Pages of one group that are copied together."""

    engine: Array
    pool: Array


class HostMemory:
    """An engine whose tensors are in host memory: they are written when the engine's calls return."""

    def array(self, view: torch.Tensor) -> Array:
        """Return a view as an array that `store_pages` and `load_pages` take."""
        return view.numpy()

    def fence(self) -> Callable[[], object]:
        """Return a function that waits until the engine has done all writes that it was given so far."""
        return lambda: None

    def store(self, spans: list[Span], blocks: Plan) -> None:
        """Copy blocks of the engine into the pool. All bytes have arrived on return."""
        for span in spans:
            store_pages(span.pool, span.engine, blocks.slots, blocks.indices, blocks.blocks)

    def load(self, spans: list[Span], blocks: Plan) -> None:
        """Copy blocks of the pool into the engine. All bytes have arrived on return."""
        for span in spans:
            load_pages(span.pool, span.engine, blocks.slots, blocks.indices, blocks.blocks)


class DeviceMemory(HostMemory):
    """An engine whose tensors are on a CUDA device: simple copies through pageable memory, on its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def array(self, view: torch.Tensor) -> Array:
        return view

    def fence(self) -> Callable[[], object]:
        written: Callable[[], object] = torch.cuda.current_stream(self._device).record_event().synchronize
        return written

    def store(self, spans: list[Span], blocks: Plan) -> None:
        for span in spans:
            store_pages_python(span.pool, span.engine, blocks.slots, blocks.indices, blocks.blocks)
        torch.cuda.current_stream(self._device).synchronize()

    def load(self, spans: list[Span], blocks: Plan) -> None:
        for span in spans:
            load_pages_python(span.pool, span.engine, blocks.slots, blocks.indices, blocks.blocks)
        torch.cuda.current_stream(self._device).synchronize()


class Spans:
    """The two memories, as a handler needs them.

    `batches[group]` are the spans of a group in batches. A batch has at most `BATCH_BYTES` of a block, or a
    single larger page. `packed[group]` are the pages of a group that is kept packed, else `None`.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, pool: Pool, config: OffloadingConfig) -> None:
        self.pool = pool
        groups = range(len(config.groups))
        expected = [group.bytes_per_block for group in config.groups]
        found = [kv_caches.block_bytes(group) for group in range(len(kv_caches.group_data_refs))]
        if found != expected:
            raise LayoutError(f"expected groups with blocks of {expected} bytes, got {found}")
        self.block_bytes = [config.kept_bytes(group) for group in groups]
        """The bytes of a block in the pool."""
        first = kv_caches.tensors[0].tensor
        self.memory = DeviceMemory(first.device) if first.is_cuda else HostMemory()
        self.bounds = JobBounds(len(groups), len(first), pool.num_slots, config.settings.blocks_per_chunk)
        self._image_offset = config.rank * config.max_image_bytes
        self.packed = [self._packed_pages(kv_caches, group, config.packed_format(group)) for group in groups]
        self.batches = [list(_batches(self._spans(kv_caches, group))) for group in groups]

    def _packed_pages(
        self, kv_caches: CanonicalKVCaches, group: int, form: BlockFormat | None
    ) -> PackedPages | None:
        if form is None:
            return None
        refs = kv_caches.group_data_refs[group]
        if kv_caches.tensors[0].tensor.is_cuda:
            raise LayoutError(
                "packing on a GPU: expected Triton, got none: install it, or set packing to off"
            )
        pages = [kv_caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes].numpy() for ref in refs]
        shapes = [PageShape(ref.page_size_bytes, ref.token_values) for ref in refs]
        return PackedPages(self.pool.rows, self._image_offset, form, pages, shapes)

    def _spans(self, kv_caches: CanonicalKVCaches, group: int) -> Iterator[Span]:
        if self.packed[group] is not None:
            return
        offset = 0
        for stack in _stack_refs(kv_caches, group):
            yield Span(self.memory.array(stack), self.memory.array(self._pool_view(group, offset, stack)))
            offset += stack[0].numel()

    def _pool_view(self, group: int, offset: int, stack: torch.Tensor) -> torch.Tensor:
        """Return a view of a stack's bytes in all rows, `offset` bytes into each block."""
        _, refs, page = stack.shape
        shape = (self.pool.num_slots, self.bounds.blocks_per_chunk, refs, page)
        strides = (self.pool.slot_bytes, self.block_bytes[group], page, 1)
        return torch.from_numpy(
            np.ndarray(shape, np.int8, self.pool.rows, self._image_offset + offset, strides)
        )


def _stack_refs(kv_caches: CanonicalKVCaches, group: int) -> list[torch.Tensor]:
    """Return the refs of a group in order, as `(num_blocks, refs, page bytes)` views of as many as fit
    together.
    """
    stacks: list[list[torch.Tensor]] = []
    for ref in kv_caches.group_data_refs[group]:
        tensor = kv_caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes]
        if stacks and _continues(stacks[-1], tensor):
            stacks[-1].append(tensor)
        else:
            stacks.append([tensor])
    return [_view_as_one(stack) for stack in stacks]


def _continues(stack: list[torch.Tensor], tensor: torch.Tensor) -> bool:
    """Return whether a tensor continues a stack: same allocation, same shape, and the same distance."""
    last = stack[-1]
    alike = tensor.shape == last.shape and tensor.stride() == last.stride()
    together = tensor.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    distance = tensor.data_ptr() - last.data_ptr()
    fits = (len(stack) + 1) * tensor.shape[1] <= BATCH_BYTES
    return alike and together and fits and distance > 0 and distance == (_distance(stack) or distance)


def _distance(stack: list[torch.Tensor]) -> int | None:
    return stack[1].data_ptr() - stack[0].data_ptr() if len(stack) > 1 else None


def _view_as_one(stack: list[torch.Tensor]) -> torch.Tensor:
    num_blocks, page = stack[0].shape
    return stack[0].as_strided(
        (num_blocks, len(stack), page), (stack[0].stride(0), _distance(stack) or page, 1)
    )


def _batches(spans: Iterator[Span]) -> Iterator[list[Span]]:
    batch: list[Span] = []
    total = 0
    for span in spans:
        size = span.engine.shape[1] * span.engine.shape[2]
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(span)
        total += size
    yield batch


@dataclass(slots=True, eq=False, kw_only=True)
class HostJob(Job):
    """A job on its way.

    `over` is set under `lock`; a thread that holds the lock while it is not set may touch memory. `ending`
    is set by a thread that is about to take the lock to end the job. Locks are not fair: without `ending`,
    the copying thread could take the lock again and again before that thread.
    """

    fence: Callable[[], object]
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    started: float | None = None


class HostHandler(JobHandler[HostJob]):
    """The common base of both directions. A subclass copies a batch of spans."""

    wait_tick = 0.01

    def __init__(
        self, spans: Spans, deadline: float, *, clock: Clock = time.monotonic, max_jobs: int = 1024
    ) -> None:
        super().__init__(spans.pool, spans.bounds, BATCH_BYTES, deadline, clock=clock, max_jobs=max_jobs)
        self.spans = spans

    @abstractmethod
    def _copy(self, spans: list[Span], blocks: Plan) -> None:
        """Copy blocks between the engine and the pool."""

    @abstractmethod
    def _convert(self, pages: PackedPages, blocks: Plan) -> npt.NDArray[np.bool_]:
        """Pack or unpack blocks, and return which of them have arrived."""

    def _make_job(self, job_id: int, ends: Ends, deadline: float) -> HostJob:
        plan = pair_blocks(*ends, self._bounds)
        return HostJob(job_id=job_id, plan=plan, deadline=deadline, fence=self.spans.memory.fence())

    def _begin(self, job: HostJob) -> None:
        self._queue.append(job)
        self._wake_thread()

    def _wait_a_little(self, job_ids: set[int], seconds: float) -> None:
        with self._changed:
            if not self._jobs.keys().isdisjoint(job_ids):
                self._changed.wait(seconds)

    def _run(self, job: HostJob) -> None:
        with self._changed:
            if job not in self._queue:
                return  # the job was ended meanwhile
            self._queue.remove(job)
        job.fence()
        job.started = self._clock()
        longest = [max(1, self.piece_bytes // size) for size in self.spans.block_bytes]
        for group, piece in job.plan.pieces(longest):
            if self.probe is not None:
                self.probe(job)
            job.blocks_begun += len(piece)
            if not self._move(job, group, piece):
                return
            job.bytes_done += len(piece) * self.spans.block_bytes[group]
            job.blocks_done += len(piece)
        self._end(job, success=True)

    def _move(self, job: HostJob, group: int, piece: Plan) -> bool:
        """Move a piece of a job, unless the job is ending; return whether it was moved."""
        if (packed := self.spans.packed[group]) is not None:
            with job.lock:
                if not job.ending:
                    arrived = self._convert(packed, piece)
                    job.lost += tuple(piece.positions[~arrived].tolist())
                return not job.ending
        for batch in self.spans.batches[group]:
            with job.lock:
                if job.ending:
                    return False
                self._copy(batch, piece)
        return True

    def _end(self, job: HostJob, *, success: bool = False) -> bool:
        self._mark_ending(job)
        with job.lock:
            if job.over.is_set():
                return False
            job.over.set()
        seconds = None if job.started is None else self._clock() - job.started
        with self._changed:
            self._finish(job, seconds, success=success)
        return True


class HostStoreHandler(Stores, HostHandler):
    """Copies blocks into the pool."""

    def _copy(self, spans: list[Span], blocks: Plan) -> None:
        self.spans.memory.store(spans, blocks)

    def _convert(self, pages: PackedPages, blocks: Plan) -> npt.NDArray[np.bool_]:
        return pages.store(blocks.slots, blocks.indices, blocks.blocks)


class HostLoadHandler(Loads, HostHandler):
    """Copies blocks out of the pool."""

    def _copy(self, spans: list[Span], blocks: Plan) -> None:
        self.spans.memory.load(spans, blocks)

    def _convert(self, pages: PackedPages, blocks: Plan) -> npt.NDArray[np.bool_]:
        return pages.load(blocks.slots, blocks.indices, blocks.blocks)
