"""The kernel that moves pages between an engine's cache and a staging buffer, in either direction, at HBM speed.

    staging   [ tile 0 | tile 1 | ... of the first block | tile 0 | ... of the second | ... ]     as in the pool's rows
    engine    tile t of block b:  base[t] + b * stride[t],  size[t] words

A *tile* is a page or a part of one. Where the tiles of any block are is a table that stays on the device; a launch takes
block ids and a buffer. A program copies `TILES` tiles at once, so that small pages too keep many loads in flight, and goes
on to the next ones until there are none: the grid is small, and most of the device is left to the engine.

Needs Triton, on a CUDA device or in Triton's interpreter. One thread at a time for each object.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier.transfer.cuda.pieces import Part

__all__ = ["PageCopy"]

# TB/s read, and as many written, on an H200 for pages of 4 and 64 KiB: 0.5 and 1.2 by 32 programs, 1.0 and 1.7 by 64, 1.8 and
# 1.9 by 128. The bus needs 0.05; what is beyond that shortens the wait for the first piece of a store and the last of a load.
PROGRAMS = 64
TILE_BYTES = 16384
PROGRAM_BYTES = 65536
WARPS = 8

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["num_blocks", "num_tiles", "block_bytes"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    table, block_ids, staging, num_blocks, num_tiles, block_bytes,
    WORD: tl.constexpr, WORDS: tl.constexpr, TILES: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Copy all tiles of some blocks to (`GATHER`) or from the staging buffer."""
    word = tl.arange(0, WORDS)[None, :]
    count = num_blocks * num_tiles
    for first in range(tl.program_id(0) * TILES, count, tl.num_programs(0) * TILES):
        each = first + tl.arange(0, TILES)
        there = each < count
        index, tile = each // num_tiles, each % num_tiles
        block = tl.load(block_ids + index, mask=there, other=0)
        base = tl.load(table + tile, mask=there, other=0)
        stride = tl.load(table + num_tiles + tile, mask=there, other=0)
        offset = tl.load(table + 2 * num_tiles + tile, mask=there, other=0)
        size = tl.load(table + 3 * num_tiles + tile, mask=there, other=0)
        engine = (base + block * stride).to(tl.pointer_type(WORD), bitcast=True)[:, None] + word
        row = staging + index.to(tl.int64) * block_bytes + offset
        staged = row.to(tl.pointer_type(WORD), bitcast=True)[:, None] + word
        mask = word < size[:, None]
        if GATHER:
            tl.store(staged, tl.load(engine, mask=mask), mask=mask)
        else:
            tl.store(engine, tl.load(staged, mask=mask), mask=mask)


class PageCopy:
    """Copies the pages of one part of any blocks, one way. Compiled when it is made."""

    def __init__(self, part: Part, device: torch.device | str, *, gather: bool) -> None:
        rows, word = _cut_tiles(part)
        self._table = torch.from_numpy(np.stack(rows)).to(device)
        self._num_tiles = len(rows[0])
        self._block_bytes = part.bytes
        words = triton.next_power_of_2(int(rows[3].max()))
        self._tiles = max(1, PROGRAM_BYTES // (words * word))
        self._constants = (_WORDS[word], words, self._tiles, gather)
        nothing = torch.zeros(2, dtype=torch.int64, device=device)
        # Calling Triton's compiled kernel takes a third of the time of finding it again by its arguments.
        self._compiled = self._launch_jit(nothing, 0, nothing.view(torch.int8))

    def __call__(self, block_ids: torch.Tensor, num_blocks: int, staging: torch.Tensor, stream: int) -> None:
        """Enqueue a copy."""
        if self._compiled is None:
            self._launch_jit(block_ids, num_blocks, staging)
            return
        pointers = (self._table.data_ptr(), block_ids.data_ptr(), staging.data_ptr())
        counts = (num_blocks, self._num_tiles, self._block_bytes)
        self._compiled[self._grid(num_blocks)](*pointers, *counts, *self._constants, stream=stream)

    def _grid(self, num_blocks: int) -> tuple[int, int, int]:
        return max(1, min(PROGRAMS, -(-num_blocks * self._num_tiles // self._tiles))), 1, 1

    def _launch_jit(self, block_ids: torch.Tensor, num_blocks: int, staging: torch.Tensor) -> Any:
        """Compile if need be and launch on the current stream. Returns the compiled kernel; the interpreter has none."""
        counts = (num_blocks, self._num_tiles, self._block_bytes)
        grid = self._grid(num_blocks)
        return _copy[grid](self._table, block_ids, staging, *counts, *self._constants, num_warps=WARPS)


def _cut_tiles(part: Part) -> tuple[list[np.ndarray[Any, np.dtype[np.int64]]], int]:
    """Return base, stride, offset and number of words of each tile, and the bytes of a word, which divides them all."""
    pages = part.pages
    word = math.gcd(8, *pages.base.tolist(), *pages.stride.tolist(), *pages.size.tolist())
    counts = -(-pages.size // TILE_BYTES)
    page = np.repeat(np.arange(len(counts)), counts)
    at = (np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE_BYTES
    size = np.minimum(pages.size[page] - at, TILE_BYTES)
    return [pages.base[page] + at, pages.stride[page], pages.offset[page] - part.offset + at, size // word], word
