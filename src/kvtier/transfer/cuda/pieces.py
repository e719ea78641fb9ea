"""The pieces that a job is cut into on its way over the bus, and the ranges of bytes that each piece copies.

The pages of a block are divided into *parts*: small pages that are staged, up to a buffer full of them, or
large pages that are copied directly. A block that is packed is one part. A *piece* is one part of some
consecutive blocks of a job. A block has arrived with the piece of its last part.

The bytes of a piece are dense in the staging buffer, block after block, and so are the blocks of a chunk in
the pool. Ranges that are neighbours at both ends are joined into one.

These are pure functions over numpy arrays of addresses; any thread may call them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.config import OffloadingConfig
from kvtier.errors import LayoutError
from kvtier.packing import BlockFormat, PageShape, shape_check
from kvtier.transfer.base import CanonicalKVCaches
from kvtier.transfer.plan import Plan

Ints = npt.NDArray[np.int64]

# docs/cuda-constants.md has the measurements for these.
MOST_BLOCKS = 4096
"""The most blocks in one piece: the kernel's arguments are kept in pinned memory."""
UNIT_ALIGNMENT = 8
"""The kernels that pack and unpack read and write four values at a time."""
ROW_ALIGNMENT = 16
"""Packed blocks that the kernels reach are at multiples of this many bytes."""
SHORT_STORE, SHORT_LOAD = 4 << 20, 2 << 20
"""Up to these sizes, one kernel copies a piece that is alone over the bus faster than a buffer would.

Jobs up to these sizes are not cut, and a long store begins with such a piece if nothing is packed.
"""
FIRST_PACKED = 2 << 20
"""The bytes of the first piece of a long store that is packed: the bus waits for it."""
LAST_LOAD = 1 << 20
"""The bytes of the last piece of a long load, which is scattered after the bus is done."""
STORE_GROWTH, PACKED_GROWTH, LOAD_GROWTH = 3, 2, 8
"""The growth from piece to piece, so that a kernel ends before the bus has carried the piece before its own.
"""


class Pages(NamedTuple):
    """The pages of a block, in the order of its image.

    Page r of block b is `size[r]` bytes at `base[r] + b * stride[r]`.
    """

    base: Ints
    stride: Ints
    size: Ints
    offset: Ints
    """The offset of each page in the image of its block."""

    def select(self, first: int, last: int) -> Pages:
        """Return pages `[first, last)`."""
        return Pages(*(column[first:last] for column in self))


class PackedUnits(NamedTuple):
    """Where the units of a group's blocks are. Unit n of block b is at `base[n] + b * stride[n]`."""

    form: BlockFormat
    check: int
    """What tells blocks of this shape from others, in their heads."""
    base: Ints
    stride: Ints
    channels: Ints


class Part(NamedTuple):
    """Consecutive pages of a block that are copied in the same way.

    `offset` and `bytes` are those in the block's image. With `units` it is a whole block that is packed.
    """

    pages: Pages
    offset: int
    bytes: int
    direct: bool
    units: PackedUnits | None = None


class Piece(NamedTuple):
    """One part of blocks `[first, last)` of a job's plan, all of one group."""

    part: Part
    first: int
    last: int
    completes: int

    @property
    def bytes(self) -> int:
        return (self.last - self.first) * self.part.bytes


class Rows(NamedTuple):
    """The addresses of a job's blocks: block i is at `base + ids[i] * stride` in the pool.

    Without `ids` the blocks lie one after the other in a buffer.
    """

    ids: Ints | None
    base: int
    stride: int

    def addresses(self, first: int, last: int) -> Ints:
        """Return the addresses of blocks `[first, last)` of a job."""
        ids = np.arange(last - first) if self.ids is None else self.ids[first:last]
        addresses: Ints = ids * self.stride + self.base
        return addresses


class Ranges(NamedTuple):
    """Ranges of bytes to copy: the addresses on the device and on the host, and the sizes."""

    device: Ints
    host: Ints
    size: Ints


def find_pages(kv_caches: CanonicalKVCaches, group: int) -> Pages:
    """Return the pages of a group. Pages that are neighbours in every block are joined into one."""
    found: list[list[int]] = []
    offset = 0
    for ref in kv_caches.group_data_refs[group]:
        tensor = kv_caches.tensors[ref.tensor_idx].tensor
        base, stride, size = tensor.data_ptr(), tensor.stride(0), ref.page_size_bytes
        if found and found[-1][:2] == [base - found[-1][2], stride]:
            found[-1][2] += size
        else:
            found.append([base, stride, size, offset])
        offset += size
    return Pages(*np.array(found, np.int64).T.copy())


def split_pages(pages: Pages, part_bytes: int, direct_bytes: int) -> tuple[Part, ...]:
    """Split the pages of a block into parts of at most `part_bytes`.

    Pages of `direct_bytes` or more are in parts of their own, which may be larger, since they take no
    buffer. `part_bytes` must not be below `direct_bytes`.
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
    return tuple(
        _part(pages.select(*span), bool(direct[span[0]])) for span in zip(starts, ends, strict=True)
    )


def _part(pages: Pages, direct: bool) -> Part:
    return Part(pages, int(pages.offset[0]), int(pages.size.sum()), direct)


def find_units(kv_caches: CanonicalKVCaches, group: int, form: BlockFormat) -> PackedUnits:
    """Return the units of a group's pages."""
    rows, refs = form.unit_tokens, kv_caches.group_data_refs[group]
    shapes = [PageShape(ref.page_size_bytes, ref.token_values) for ref in refs]
    columns: list[npt.NDArray[np.int64]] = []
    for ref, shape in zip(refs, shapes, strict=True):
        tensor = kv_caches.tensors[ref.tensor_idx].tensor
        base, stride, channels = tensor.data_ptr(), tensor.stride(0), shape.channels(rows)
        if base % UNIT_ALIGNMENT or stride % UNIT_ALIGNMENT:
            raise LayoutError(
                f"group {group}: expected pages at multiples of {UNIT_ALIGNMENT} bytes, to pack them,"
                f" got one at {base} and every {stride} bytes: set packing to off"
            )
        starts = np.arange(base, base + shape.bytes, 2 * rows * channels)
        columns.append(np.stack([starts, np.full_like(starts, stride), np.full_like(starts, channels)]))
    return PackedUnits(form, shape_check(form, shapes), *np.concatenate(columns, axis=1))


def packed_part(pages: Pages, units: PackedUnits) -> Part:
    """Return the one part of blocks that are packed."""
    return Part(pages, 0, units.form.bytes, direct=False, units=units)


def cut_store(sizes: Sequence[int], parts: Sequence[Sequence[Part]], piece_bytes: int) -> Iterator[Piece]:
    """Return the pieces of a store with `sizes[group]` blocks of each group, in order.

    A piece has at most `piece_bytes`, or one part of one block if that is more. The first pieces are small:
    the bus waits until the first piece is gathered, and carries it while the next one is gathered.
    """
    packs = any(part.units is not None for some in parts for part in some)
    limit, growth = (FIRST_PACKED, PACKED_GROWTH) if packs else (SHORT_STORE, STORE_GROWTH)
    first = 0
    for some, size in zip(parts, sizes, strict=True):
        limit = _whole_limit(some, size, limit, SHORT_STORE)
        counts, limit = _count_blocks(some, size, limit, piece_bytes, growth)
        yield from _lay_out(some, first, counts)
        first += size


def cut_load(sizes: Sequence[int], parts: Sequence[Sequence[Part]], piece_bytes: int) -> Iterator[Piece]:
    """Return the pieces of a load.

    The last pieces are small: the engine waits until the last is scattered.
    """
    last, limit, backwards = sum(sizes), LAST_LOAD, []
    for some, size in zip(reversed(parts), reversed(sizes), strict=True):
        limit = _whole_limit(some, size, limit, SHORT_LOAD)
        counts, limit = _count_blocks(some, size, limit, piece_bytes, LOAD_GROWTH)
        last -= size
        backwards.append((some, last, counts[::-1]))
    for group in reversed(backwards):
        yield from _lay_out(*group)


def group_sizes(plan: Plan, num_groups: int) -> list[int]:
    """Return the number of blocks of each group in a job."""
    return [len(plan)] if num_groups == 1 else np.bincount(plan.groups, minlength=num_groups).tolist()


def _whole_limit(parts: Sequence[Part], size: int, limit: int, short: int) -> int:
    """Return the limit of a group's first pieces, with which a group of up to `short` bytes is not cut."""
    return max(limit, short) if size * max(part.bytes for part in parts) <= short else limit


def most_blocks(part: Part, piece_bytes: int) -> int:
    """Return the most blocks of a piece of a part."""
    return min(max(1, piece_bytes // part.bytes), MOST_BLOCKS)


def scratch_bytes(units: PackedUnits, num_blocks: int) -> int:
    """Return the bytes of scratch that packing so many blocks at once takes."""
    return 4 * num_blocks * len(units.base) * (1 + most_kept(units))


def most_kept(units: PackedUnits) -> int:
    """Return how many exceptions of a unit are kept in scratch: all that its block may have."""
    return min(units.form.max_exceptions, units.form.unit_tokens * int(units.channels.max()))


def _count_blocks(
    parts: Sequence[Part], left: int, limit: int, piece_bytes: int, growth: int
) -> tuple[list[int], int]:
    """Cut the blocks of a group so that pieces grow from `limit`, and return the next limit."""
    counts, largest = [], max(part.bytes for part in parts)
    while left:
        counts.append(min(max(1, min(limit, piece_bytes) // largest), MOST_BLOCKS, left))
        left, limit = left - counts[-1], growth * limit
    return counts, limit


def _lay_out(parts: Sequence[Part], first: int, counts: Iterable[int]) -> Iterator[Piece]:
    for count in counts:
        for part in parts:
            yield Piece(part, first, first + count, count if part is parts[-1] else 0)
        first += count


class PoolMap:
    """The addresses of blocks in the pool.

    No range crosses a multiple of `seam` bytes: memory is pinned in pieces of that size.
    """

    def __init__(self, address: int, slot_bytes: int, seam: int, config: OffloadingConfig) -> None:
        self.address, self.seam = address, seam
        self.first = address + config.rank * config.max_image_bytes
        """The address of this rank's image in the first slot."""
        self.slot_bytes = slot_bytes
        self._per_chunk = config.settings.blocks_per_chunk
        self._block_bytes = np.array([config.kept_bytes(i) for i in range(len(config.groups))], np.int64)

    def rows(self, plan: Plan) -> Rows:
        """Return the addresses of a job's blocks."""
        if self._per_chunk == 1:
            return Rows(plan.slots, self.first, self.slot_bytes)
        return Rows(
            plan.slots * self.slot_bytes + plan.indices * self._block_bytes[plan.groups], self.first, 1
        )

    def alignment(self, part: Part, group: int) -> int:
        """Return the alignment of all addresses of a part of a group's blocks, at most 16."""
        return math.gcd(16, self.first, self.slot_bytes, int(self._block_bytes[group]), part.offset)

    def ranges(self, pages: Pages, blocks: Ints, rows: Ints) -> Ranges:
        """Return the ranges to copy between pages on the device and rows in the pool, given by address.

        Ranges that are neighbours at both ends are joined.
        """
        device = (pages.base + blocks[:, None] * pages.stride).ravel()
        host = (rows[:, None] + pages.offset).ravel()
        size = np.tile(pages.size, len(blocks))
        seam = (host - self.address) // self.seam
        goes_on = (np.diff(host) == size[:-1]) & (np.diff(device) == size[:-1]) & (np.diff(seam) == 0)
        starts = np.flatnonzero(np.concatenate([[True], ~goes_on]))
        return Ranges(device[starts], host[starts], np.add.reduceat(size, starts))
