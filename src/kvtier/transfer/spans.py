"""The engine's pages and the pool's rows as pairs of arrays, so that one call copies many pages.

The engine is layer-major and the pool chunk-major, so one block is as many separate pages as its group has
refs. Where refs lie at equal distances in one allocation (K and V of a layer; all layers, if the engine
allocates its cache in one piece) they form one *span*, and are copied together:

    span.engine   (num_blocks, refs, page bytes)
    span.pool     (slots, blocks of a slot, refs, page bytes)

Spans are views, immutable once made; the handlers that copy decide about threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.config import OffloadingConfig
from kvtier.errors import LayoutError
from kvtier.pool import Pool
from kvtier.transfer import pages
from kvtier.transfer.base import CanonicalKVCaches
from kvtier.transfer.plan import JobBounds, Plan

__all__ = ["BATCH_BYTES", "DeviceMemory", "HostMemory", "Span", "Spans"]

BATCH_BYTES = 1 << 20
"""The bytes copied between two checks whether the job is ending.

They take a tenth of a millisecond, so ending a job is never a noticeable wait.
"""

Array = Any  # numpy where the engine is on the host, torch where it is on a device


class Span(NamedTuple):
    """Pages of one group that are copied together."""

    engine: Array
    pool: Array


class HostMemory:
    """An engine whose tensors are in host memory: they are written when the engine's calls return."""

    def array(self, view: torch.Tensor) -> Array:
        """Return a view as an array that `store` and `load` take."""
        return view.numpy()

    def fence(self) -> Callable[[], object]:
        """Return a function that waits until the engine has done all writes it was told to do so far."""
        return lambda: None

    def store(self, spans: list[Span], blocks: Plan) -> None:
        """Copy blocks of the engine into the pool. All bytes have arrived on return."""
        for span in spans:
            pages.store(span.pool, span.engine, blocks.slots, blocks.indices, blocks.blocks)

    def load(self, spans: list[Span], blocks: Plan) -> None:
        """Copy blocks of the pool into the engine. All bytes have arrived on return."""
        for span in spans:
            pages.load(span.pool, span.engine, blocks.slots, blocks.indices, blocks.blocks)


class DeviceMemory(HostMemory):
    """An engine whose tensors are on a CUDA device: plain copies through pageable memory, on its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def array(self, view: torch.Tensor) -> Array:
        return view

    def fence(self) -> Callable[[], object]:
        written: Callable[[], object] = torch.cuda.current_stream(self._device).record_event().synchronize
        return written

    def store(self, spans: list[Span], blocks: Plan) -> None:
        for span in spans:
            pages.store_python(span.pool, span.engine, blocks.slots, blocks.indices, blocks.blocks)
        torch.cuda.current_stream(self._device).synchronize()

    def load(self, spans: list[Span], blocks: Plan) -> None:
        for span in spans:
            pages.load_python(span.pool, span.engine, blocks.slots, blocks.indices, blocks.blocks)
        torch.cuda.current_stream(self._device).synchronize()


class Spans:
    """The two memories, as a handler needs them.

    `batches[group]` are the spans of a group in batches. A batch has at most `BATCH_BYTES` of a block, or a
    single larger page.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, pool: Pool, config: OffloadingConfig) -> None:
        self.pool = pool
        groups = range(len(config.groups))
        self.block_bytes = [group.bytes_per_block for group in config.groups]
        found = [kv_caches.block_bytes(group) for group in range(len(kv_caches.group_data_refs))]
        if found != self.block_bytes:
            raise LayoutError(f"expected groups with blocks of {self.block_bytes} bytes, got {found}")
        first = kv_caches.tensors[0].tensor
        self.memory = DeviceMemory(first.device) if first.is_cuda else HostMemory()
        self.bounds = JobBounds(len(groups), len(first), pool.num_slots, config.settings.blocks_per_chunk)
        self._image_offset = config.rank * config.max_image_bytes
        self.batches = [list(_batches(self._spans(kv_caches, group))) for group in groups]

    def _spans(self, kv_caches: CanonicalKVCaches, group: int) -> Iterator[Span]:
        offset = 0
        for stack in _stack_refs(kv_caches, group):
            yield Span(self.memory.array(stack), self.memory.array(self._pool_view(group, offset, stack)))
            offset += stack[0].numel()

    def _pool_view(self, group: int, offset: int, stack: torch.Tensor) -> torch.Tensor:
        """Return a view of a stack's place in all rows, `offset` bytes into each block."""
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
    """Say whether a tensor continues a stack: in its allocation, shaped alike, and at the same distance."""
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
