"""Which block goes with which part of which slot: the two ends of a job, paired block by block.

    blocks_per_chunk = 4, block_indices = (6,):
        blocks of the request   6  7 | 8  9 10 11 | 12
        slot                    first   second      third
        index in the slot       2  3 | 0  1  2  3 | 0

Each group with blocks begins a new slot, so it takes `ceil((size + skipped) / blocks_per_chunk)` of them. Null blocks
take their place but have no bytes. Everything is checked before any memory is touched. Pure functions over numpy
arrays, no torch: any thread may call them, and every handler does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError
from kvtier.transfer.base import NULL_BLOCK, CPULoadStoreSpec, GPULoadStoreSpec

__all__ = ["Geometry", "Plan", "pair_blocks"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What bounds the numbers in a job."""

    num_groups: int
    num_blocks: int
    num_slots: int
    blocks_per_chunk: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks of a job that have bytes, in the order of the job: parallel arrays.

    `positions` count into the GPU end's `block_ids`. Block i is `indices[i]`-th in `slots[i]`.
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


def pair_blocks(gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, geometry: Geometry) -> Plan:
    """Check the ends of a job against each other and the geometry, and pair them."""
    per_chunk = geometry.blocks_per_chunk
    sizes, skipped = _read_groups(gpu, geometry)
    slots_taken = -(-(sizes + skipped) // per_chunk) * (sizes > 0)
    if slots_taken.sum() != len(cpu.block_ids):
        wants = f"{len(gpu.block_ids)} blocks in groups of {gpu.group_sizes}, first indices {gpu.block_indices}"
        raise InputError(f"expected {slots_taken.sum()} slots for {wants}, got {len(cpu.block_ids)}")
    _check_range("block ids", gpu.block_ids, geometry.num_blocks)
    _check_range("slots", cpu.block_ids, geometry.num_slots)
    positions = np.flatnonzero(gpu.block_ids != NULL_BLOCK)
    groups = np.repeat(np.arange(len(sizes)), sizes)[positions]
    first_block, first_slot = np.cumsum(sizes) - sizes, np.cumsum(slots_taken) - slots_taken
    in_group = positions - first_block[groups] + skipped[groups]
    slots = cpu.block_ids[first_slot[groups] + in_group // per_chunk]
    return Plan(positions, groups, gpu.block_ids[positions], slots, in_group % per_chunk)


def _read_groups(gpu: GPULoadStoreSpec, geometry: Geometry) -> tuple[Ints, Ints]:
    """Return each group's number of blocks, and how many leading blocks of its first slot are skipped."""
    sizes = np.asarray(gpu.group_sizes, dtype=np.int64)
    indices = np.asarray(gpu.block_indices or [0] * len(sizes), dtype=np.int64)
    if len(sizes) != geometry.num_groups:
        raise InputError(f"group_sizes: expected one per group ({geometry.num_groups}), got {gpu.group_sizes}")
    if (sizes < 0).any() or (indices < 0).any():
        got = f"{gpu.group_sizes}, {gpu.block_indices}"
        raise InputError(f"expected no negative group_sizes or block_indices, got {got}")
    return sizes, indices % geometry.blocks_per_chunk


def _check_range(what: str, ids: Ints, limit: int) -> None:
    if len(ids) and not 0 <= ids.min() <= ids.max() < limit:
        raise InputError(f"{what}: expected numbers from 0 to {limit - 1}, got {ids.min()} to {ids.max()}")
