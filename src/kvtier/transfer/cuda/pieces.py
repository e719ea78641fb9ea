"""What a job is made of on its way over the bus: pieces, and the ranges of bytes that each piece copies.

The pages of a block fall into *parts*: pages small enough to be staged, up to a buffer full of them, or large ones that are
copied as they are. A *piece* is one part of some consecutive blocks of a job; of its blocks those count as arrived whose last
part it is. A load may also come layer by layer: in *stages*, each with parts of its own.

The bytes of a piece are dense in the staging buffer, block after block, and so are the blocks of a chunk in the pool: ranges
that are neighbours at both ends are one.

Pure functions over numpy arrays of addresses; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.config import OffloadingConfig
from kvtier.transfer.base import CanonicalKVCaches
from kvtier.transfer.plan import Plan, stage_bounds

__all__ = [
    "MOST_BLOCKS",
    "Pages",
    "Part",
    "Piece",
    "PoolMap",
    "Ranges",
    "cut_by_layer",
    "cut_job",
    "find_pages",
    "find_stages",
    "split_pages",
]

Ints = npt.NDArray[np.int64]

MOST_BLOCKS = 4096
"""In one piece: what the kernel is told of them is kept in pinned memory."""
_LEAST_BYTES = 8 << 20  # takes the bus longer than it takes us to enqueue the next piece


class Pages(NamedTuple):
    """The pages of a block, in the order of its image: page r of block b is `size[r]` bytes at `base[r] + b * stride[r]`."""

    base: Ints
    stride: Ints
    size: Ints
    offset: Ints
    """Where the page is in the image of its block."""

    def select(self, first: int, last: int) -> Pages:
        """Return pages `[first, last)`."""
        return Pages(*(column[first:last] for column in self))


class Part(NamedTuple):
    """Consecutive pages of a block that are copied alike."""

    pages: Pages
    offset: int
    bytes: int
    direct: bool


class Piece(NamedTuple):
    """One part of blocks `[first, last)` of a job's plan, all of one group."""

    part: Part
    first: int
    last: int
    completes: int

    @property
    def bytes(self) -> int:
        return (self.last - self.first) * self.part.bytes


class Ranges(NamedTuple):
    """Bytes to copy: addresses of the device's and the host's end, and sizes."""

    device: Ints
    host: Ints
    size: Ints


def find_pages(kv_caches: CanonicalKVCaches, group: int, first: int = 0, last: int | None = None) -> Pages:
    """Return the pages of a group, or of its refs `[first, last)`. Pages that are neighbours in every block are one."""
    found: list[list[int]] = []
    refs = kv_caches.group_data_refs[group]
    offset = sum(ref.page_size_bytes for ref in refs[:first])
    for ref in refs[first:last]:
        tensor = kv_caches.tensors[ref.tensor_idx].tensor
        base, stride, size = tensor.data_ptr(), tensor.stride(0), ref.page_size_bytes
        if found and found[-1][:2] == [base - found[-1][2], stride]:
            found[-1][2] += size
        else:
            found.append([base, stride, size, offset])
        offset += size
    return Pages(*np.array(found, np.int64).T.copy())


def split_pages(pages: Pages, part_bytes: int, direct_bytes: int) -> tuple[Part, ...]:
    """Split the pages of a block: those of `direct_bytes` or more apart from the rest, in parts of at most `part_bytes`.

    A part of large pages may be larger, since it takes no buffer. `part_bytes` is not below `direct_bytes`.
    """
    direct = pages.size >= direct_bytes
    starts, total = [0], 0
    for index, size in enumerate(pages.size.tolist()):
        full = not direct[index] and total + size > part_bytes
        if index and (full or direct[index] != direct[index - 1]):
            starts.append(index)
            total = 0
        total += size
    ends = [*starts[1:], len(pages.size)]
    return tuple(_part(pages.select(*span), bool(direct[span[0]])) for span in zip(starts, ends, strict=True))


def find_stages(kv_caches: CanonicalKVCaches, group: int) -> tuple[list[Pages | None], dict[str, int]]:
    """Return the pages of each stage of a group, `None` for an empty one, and the stage after which each layer is in."""
    layers = kv_caches.layer_ends[group]
    ends = sorted(set(layers.values()))
    bounds = [ends[count - 1] if count else 0 for count in stage_bounds(len(ends))]
    spans = pairwise([0, *bounds])
    pages = [find_pages(kv_caches, group, first, last) if first < last else None for first, last in spans]
    return pages, {name: next(i for i, bound in enumerate(bounds) if bound >= end) for name, end in layers.items()}


def _part(pages: Pages, direct: bool) -> Part:
    return Part(pages, int(pages.offset[0]), int(pages.size.sum()), direct)


def cut_job(plan: Plan, parts: Sequence[Sequence[Part]], piece_bytes: int) -> Iterator[Piece]:
    """Return the pieces of a job in order: at most `piece_bytes`, or one part of one block where that is more.

    Pieces are small at both ends: the bus waits for the first gather, and whoever wants the bytes for the last scatter.
    """
    if len(parts) == len(parts[0]) == 1 and 0 < len(plan) <= MOST_BLOCKS:
        (part,) = parts[0]
        if len(plan) * part.bytes <= min(2 * _LEAST_BYTES, piece_bytes):
            return iter((Piece(part, 0, len(plan), len(plan)),))
    return _cut_large_job(plan, parts, piece_bytes)


def _cut_large_job(plan: Plan, parts: Sequence[Sequence[Part]], piece_bytes: int) -> Iterator[Piece]:
    bounds = np.searchsorted(plan.groups, np.arange(len(parts) + 1)).tolist() if len(parts) > 1 else [0, len(plan)]
    spans = [(some, start, end) for some, (start, end) in zip(parts, pairwise(bounds), strict=True)]
    left = sum((end - start) * sum(part.bytes for part in some) for some, start, end in spans)
    least = min(_LEAST_BYTES, piece_bytes)
    limit = min(max(least, left // 4), 2 * least)
    for some, first, end in spans:
        largest, block = max(part.bytes for part in some), sum(part.bytes for part in some)
        while first < end:
            limit = min(left if left <= 2 * least else limit, piece_bytes)
            last = min(first + max(1, limit // largest), first + MOST_BLOCKS, end)
            for part in some:
                yield Piece(part, first, last, last - first if part is some[-1] else 0)
            left -= (last - first) * block
            first, limit = last, max(min(4 * limit, 3 * left // 4), least)


def cut_by_layer(
    plan: Plan, stages: Sequence[Sequence[Sequence[Part]]], piece_bytes: int
) -> tuple[list[Piece], list[int]]:
    """Return the pieces of a job stage after stage, and how many of them there are up to the end of each stage.

    A stage has parts for each group. No block has arrived before the last piece.
    """
    spans = list(pairwise(np.searchsorted(plan.groups, np.arange(len(stages[0]) + 1)).tolist()))
    pieces: list[Piece] = []
    ends = []
    for stage in stages:
        for parts, (start, end) in zip(stage, spans, strict=True):
            for part in parts:
                most = max(1, min(piece_bytes // part.bytes, MOST_BLOCKS))
                step = -(-(end - start) // -(-(end - start) // most)) if end > start else 1  # all about as long
                pieces += [Piece(part, first, min(first + step, end), 0) for first in range(start, end, step)]
        ends.append(len(pieces))
    if pieces:
        pieces[-1] = pieces[-1]._replace(completes=len(plan))
    return pieces, ends


class PoolMap:
    """Where blocks are in the pool. No range crosses a multiple of `seam` bytes: memory is pinned in pieces of that size."""

    def __init__(self, address: int, row_bytes: int, seam: int, config: OffloadingConfig) -> None:
        self._address = address
        self._seam = seam
        self._num_seams = (config.num_slots * row_bytes - 1) // seam
        self._first = address + config.rank * config.max_image_bytes
        self._row_bytes = row_bytes
        self._per_chunk = config.settings.blocks_per_chunk
        self._block_bytes = np.array([group.bytes_per_block for group in config.groups], np.int64)

    def places(self, plan: Plan) -> Ints:
        """Return the address of each block of a job."""
        places: Ints = self._first + plan.slots * self._row_bytes
        if self._per_chunk > 1:
            places += plan.indices * self._block_bytes[plan.groups]
        return places

    def alignment(self, part: Part, group: int) -> int:
        """Return what divides all places of a part of a group's blocks, at most 16."""
        return math.gcd(16, self._first, self._row_bytes, int(self._block_bytes[group]), part.offset)

    def staged_ranges(self, piece: Piece, places: Ints, staging: int) -> Ranges:
        """Return the ranges between the staging buffer and the pool."""
        host, size = places[piece.first : piece.last], piece.part.bytes
        if piece.part.offset:
            host = host + piece.part.offset
        starts = self._starts(host, size)
        if len(starts) == 1:
            return Ranges(np.array([staging]), host[:1], np.array([size * len(host)]))
        ends = np.append(starts[1:], len(host))
        return Ranges(staging + starts * size, host[starts], (ends - starts) * size)

    def direct_ranges(self, piece: Piece, places: Ints, blocks: Ints) -> Ranges:
        """Return the ranges between the engine's pages and the pool."""
        pages, some = piece.part.pages, slice(piece.first, piece.last)
        device = (pages.base + blocks[some, None] * pages.stride).ravel()
        host = (places[some, None] + pages.offset).ravel()
        size = np.tile(pages.size, piece.last - piece.first)
        starts = self._starts(host, size[:-1], device)
        return Ranges(device[starts], host[starts], np.add.reduceat(size, starts))

    def _starts(self, host: Ints, size: int | Ints, device: Ints | None = None) -> Ints:
        """Return where ranges begin that do not just go on from the one before, at either end."""
        starts = np.ones(len(host), np.bool_)
        np.not_equal(host[1:] - host[:-1], size, out=starts[1:])
        if device is not None:
            starts[1:] |= device[1:] - device[:-1] != size
        if self._num_seams:
            seam = (host - self._address) // self._seam
            starts[1:] |= seam[1:] != seam[:-1]
        return starts.nonzero()[0]
