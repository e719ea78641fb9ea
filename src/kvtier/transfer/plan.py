"""`Plan`: the two ends of a job, paired block by block: each block with its index in a slot.

    blocks_per_chunk = 4, block_indices = (6,):
        blocks of the request   6  7 | 8  9 10 11 | 12
        slot                    first   second      third
        index in the slot       2  3 | 0  1  2  3 | 0

Each group with blocks begins a new slot, so it takes `ceil((size + skipped) / blocks_per_chunk)` slots. Null
blocks take an index in a slot but have no bytes. Everything is checked before any memory is touched. These
are pure functions over numpy arrays, without torch. Every handler uses them; any thread may call them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError
from kvtier.transfer.base import NULL_BLOCK, CPULoadStoreSpec, GPULoadStoreSpec

Ints = npt.NDArray[np.int64]

_FEW = 64
# All small plans share these, because making arrays takes most of a small plan's time.
_COUNT, _ZEROS = np.arange(4096), np.zeros(4096, np.int64)
_COUNT.flags.writeable = _ZEROS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class JobBounds:
    """The upper bounds of the numbers in a job."""

    num_groups: int
    num_blocks: int
    num_slots: int
    blocks_per_chunk: int


@dataclass(slots=True, eq=False)
class Plan:
    """The blocks of a job that have bytes, in the order of the job: parallel arrays, never changed.

    `positions` are indices into the GPU end's `block_ids`. Block i has index `indices[i]` in slot
    `slots[i]`.
    """

    positions: Ints
    groups: Ints
    blocks: Ints
    slots: Ints
    indices: Ints

    def __len__(self) -> int:
        return len(self.positions)

    def part(self, which: slice | npt.NDArray[np.bool_]) -> Plan:
        """Return some of the blocks."""
        return Plan(*(getattr(self, column.name)[which] for column in fields(self)))

    def pieces(self, longest: Sequence[int]) -> Iterator[tuple[int, Plan]]:
        """Yield all blocks in order, in parts of one group and at most `longest[group]` blocks."""
        bounds = np.flatnonzero(np.diff(self.groups, prepend=-1, append=-1)).tolist()
        for start, stop in pairwise(bounds):
            group = int(self.groups[start])
            for first in range(start, stop, longest[group]):
                yield group, self.part(slice(first, min(stop, first + longest[group])))


def pair_blocks(gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, bounds: JobBounds) -> Plan:
    """Check the ends of a job against each other and the bounds, and pair them."""
    if bounds.num_groups == bounds.blocks_per_chunk == len(gpu.group_sizes) == 1:
        return _pair_one_to_one(gpu, cpu, bounds)
    skipped, taken = _read_groups(gpu, bounds)
    if sum(taken) != len(cpu.block_ids):
        wants = (
            f"{len(gpu.block_ids)} blocks in groups of {gpu.group_sizes}, first indices {gpu.block_indices}"
        )
        raise InputError(f"expected {sum(taken)} slots for {wants}, got {len(cpu.block_ids)}")
    _check_range("block ids", gpu.block_ids, bounds.num_blocks)
    _check_range("slots", cpu.block_ids, bounds.num_slots)
    # Offsets count through all of the job's slots, block by block.
    per_chunk = bounds.blocks_per_chunk
    firsts = [sum(taken[:group]) * per_chunk + skip for group, skip in enumerate(skipped)]
    sizes = gpu.group_sizes
    offsets = _join([np.arange(first, first + size) for first, size in zip(firsts, sizes, strict=True)])
    groups = _join([np.full(size, group) for group, size in enumerate(sizes)])
    there = gpu.block_ids != NULL_BLOCK
    positions = np.arange(len(offsets))
    if not there.all():
        positions, offsets, groups = positions[there], offsets[there], groups[there]
    slots, indices = np.divmod(offsets, per_chunk)
    return Plan(positions, groups, gpu.block_ids[positions], cpu.block_ids[slots], indices)


def pair_simple(blocks: Ints, slots: Ints) -> Plan:
    """Pair blocks with as many slots, for one group whose chunks are single blocks, with no null block."""
    count = len(blocks)
    if count > len(_COUNT):
        return Plan(np.arange(count), np.zeros(count, np.int64), blocks, slots, np.zeros(count, np.int64))
    return Plan(_COUNT[:count], _ZEROS[:count], blocks, slots, _ZEROS[:count])


def _pair_one_to_one(gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, bounds: JobBounds) -> Plan:
    """Pair the ends of a job of one group whose chunks are single blocks, as most small jobs are."""
    blocks, slots = gpu.block_ids, cpu.block_ids
    if len(blocks) != len(slots):
        raise InputError(f"expected {len(blocks)} slots for as many blocks, got {len(slots)}")
    if gpu.block_indices is not None and gpu.block_indices[0] < 0:
        raise InputError(f"expected no negative block_indices, got {gpu.block_indices}")
    least = _check_range("block ids", blocks, bounds.num_blocks)
    _check_range("slots", slots, bounds.num_slots)
    if least != NULL_BLOCK:
        return pair_simple(blocks, slots)
    positions = (blocks != NULL_BLOCK).nonzero()[0]
    nothing = np.zeros(len(positions), np.int64)
    return Plan(positions, nothing, blocks[positions], slots[positions], nothing)


def _read_groups(gpu: GPULoadStoreSpec, bounds: JobBounds) -> tuple[list[int], list[int]]:
    """Return for each group its number of skipped blocks in the first slot, and its number of slots."""
    sizes, per_chunk = gpu.group_sizes, bounds.blocks_per_chunk
    indices = gpu.block_indices or (0,) * len(sizes)
    if len(sizes) != bounds.num_groups:
        raise InputError(f"group_sizes: expected one per group ({bounds.num_groups}), got {gpu.group_sizes}")
    if min(sizes) < 0 or min(indices) < 0:
        got = f"{gpu.group_sizes}, {gpu.block_indices}"
        raise InputError(f"expected no negative group_sizes or block_indices, got {got}")
    skipped = [index % per_chunk for index in indices]
    taken = [
        -(-(size + skip) // per_chunk) if size else 0 for size, skip in zip(sizes, skipped, strict=True)
    ]
    return skipped, taken


def _join(arrays: list[Ints]) -> Ints:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _check_range(what: str, ids: Ints, limit: int) -> int | None:
    """Raise `InputError` if ids are not in `[0, limit)`; return the smallest.

    For few ids a list is several times as fast as numpy.
    """
    if not len(ids):
        return None
    few = ids.tolist() if len(ids) <= _FEW else None
    least, most = (min(few), max(few)) if few else (int(ids.min()), int(ids.max()))
    if not 0 <= least <= most < limit:
        raise InputError(f"{what}: expected numbers from 0 to {limit - 1}, got {least} to {most}")
    return least
