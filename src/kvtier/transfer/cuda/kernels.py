"""The kernel that moves pages between an engine's cache and rows, in a staging buffer or in the pool, in
either direction.

    rows      tile t of block i:  address[i] + offset[t],          size[t] words
    engine    tile t of block i:  base[t] + block[i] * stride[t],  as many

A *tile* is a page or a part of one. A table on the device has the addresses of the tiles of any block. The
arguments of a launch are block ids and, behind them, as many addresses of rows. A program copies some tiles
at once, so that small pages too keep many loads in flight, and goes on with the next tiles until there are
none.

This needs Triton, on a CUDA device or in Triton's interpreter. One thread at a time may use an object.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier.transfer.cuda import driver
from kvtier.transfer.cuda.pieces import Part


class Shape(NamedTuple):
    """A copy's share of the device: at most `programs`, each with `warps` and `program_bytes` in flight."""

    programs: int
    program_bytes: int
    warps: int


# docs/cuda-constants.md has the measurements for these.
STAGED = Shape(programs=64, program_bytes=32768, warps=4)
"""For copies within HBM beside the engine's kernels: more programs slow those down, fewer slow the bus."""
SHORT = Shape(programs=16, program_bytes=16384, warps=8)
"""For copies over the bus, of pieces too short to be staged: more programs move no more bytes."""
TILE_BYTES = 16384
"""The part of a page that a program copies at a time: large pages are shared among programs."""

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["num_blocks", "num_tiles"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    table, args, num_blocks, num_tiles,
    WORD: tl.constexpr, ALIGN: tl.constexpr, WORDS: tl.constexpr, TILES: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Copy all tiles of some blocks to (`GATHER`) or from their rows.

    Addresses are multiples of `ALIGN` bytes.
    """
    WHOLE: tl.constexpr = 2 if ALIGN == 16 else 1
    word = tl.arange(0, WORDS)[None, :]
    count = num_blocks * num_tiles
    for first in range(tl.program_id(0) * TILES, count, tl.num_programs(0) * TILES):
        tiles = first + tl.arange(0, TILES)
        there = tiles < count
        index, tile = tiles // num_tiles, tiles % num_tiles
        block = tl.load(args + index, mask=there, other=0)
        address = tl.load(args + num_blocks + index, mask=there, other=0)
        base = tl.load(table + tile, mask=there, other=0)
        stride = tl.load(table + num_tiles + tile, mask=there, other=0)
        offset = tl.load(table + 2 * num_tiles + tile, mask=there, other=0)
        size = tl.load(table + 3 * num_tiles + tile, mask=there, other=0)
        engine = (
            tl.multiple_of((base + block * stride).to(tl.pointer_type(WORD), bitcast=True), ALIGN)[:, None]
            + word
        )
        row = (
            tl.multiple_of((address + offset).to(tl.pointer_type(WORD), bitcast=True), ALIGN)[:, None] + word
        )
        mask = word < tl.multiple_of(size.to(tl.int32), WHOLE)[:, None]
        # These bytes are not needed again soon, so they leave the L2 cache to the engine.
        if GATHER:
            pages = tl.load(engine, mask=mask, eviction_policy="evict_first")
            tl.store(row, pages, mask=mask, eviction_policy="evict_first")
        else:
            pages = tl.load(row, mask=mask, eviction_policy="evict_first")
            tl.store(engine, pages, mask=mask, eviction_policy="evict_first")


class PageCopy:
    """The kernel that copies the pages of one part of any blocks, one way.

    It is compiled when it is made.
    """

    def __init__(
        self, part: Part, device: torch.device | str, shape: Shape, *, gather: bool, row_align: int = 16
    ) -> None:
        """Compile the kernel. `row_align` divides all addresses of rows that it will get."""
        rows, word, align = _cut_tiles(part, row_align)
        self._table = torch.from_numpy(np.stack(rows)).to(device)
        self._num_tiles = len(rows[0])
        words = triton.next_power_of_2(int(rows[3].max()))
        self._tiles = max(1, shape.program_bytes // (int(words) * word))
        self._constants = (_WORDS[word], align, words, self._tiles, gather)
        self._shape = shape
        compiled = self._launch_jit(torch.zeros(2, dtype=torch.int64, device=device), 0)
        # A launch by Triton takes twice as long as a launch by the driver.
        self.launches: driver.Launches = ()
        """The launch by the driver; none in Triton's interpreter."""
        if compiled is not None:
            sizes = (32 * shape.warps, compiled.metadata.shared, shape.programs, self._tiles)
            launch = driver.Launch(compiled.function, *sizes, self._table.data_ptr(), self._num_tiles)
            self.launches = (launch,)

    def __call__(self, args: torch.Tensor, num_blocks: int, stream: int) -> None:
        """Enqueue a copy. `args` holds block ids and addresses of rows, on the device or pinned."""
        if not self.launches:
            self._launch_jit(args, num_blocks)
        for launch in self.launches:
            launch.start(args.data_ptr(), num_blocks, stream)

    def _num_programs(self, num_blocks: int) -> int:
        return max(1, min(self._shape.programs, -(-num_blocks * self._num_tiles // self._tiles)))

    def _launch_jit(self, args: torch.Tensor, num_blocks: int) -> Any:
        """Compile the kernel if need be, and launch it on the current stream.

        Return the compiled kernel; `None` in the interpreter.
        """
        grid = (self._num_programs(num_blocks), 1, 1)
        counts = (num_blocks, self._num_tiles)
        return _copy[grid](self._table, args, *counts, *self._constants, num_warps=self._shape.warps)


def _cut_tiles(part: Part, row_align: int) -> tuple[list[np.ndarray[Any, np.dtype[np.int64]]], int, int]:
    """Return base, stride, offset and number of words of each tile, the bytes of a word, and the alignment
    of all addresses.
    """
    pages = part.pages
    align = math.gcd(16, row_align, *pages.base.tolist(), *pages.stride.tolist(), *pages.size.tolist())
    word = min(align, 8)
    counts = -(-pages.size // TILE_BYTES)
    page = np.repeat(np.arange(len(counts)), counts)
    at = (np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE_BYTES
    size = np.minimum(pages.size[page] - at, TILE_BYTES)
    tiles = [pages.base[page] + at, pages.stride[page], pages.offset[page] - part.offset + at, size // word]
    return tiles, word, align
