"""The compiled hash table: extendible hashing over one flat array of 32-bit words.

The blocks and the names of an index are each kept in such a table.

The table grows by segments of 1,024 cells. A directory, indexed by the leading bits of the mixed hash,
gives the segment; inside a segment, linear probing finds the cell. A full segment is split in two, so
growth never copies the table or needs it twice. A cell has `width` words: the two halves of the hash, a
word that is 0 only in an empty cell, and further words of the owner. A removal shifts the following cells
back, so there are no tombstones.

    blocks (width 3)    hash, hash, number of the holder set
    names  (width 5)    engine's hash, hash, the worker's tag, key, key

If the third word is a tag, it is part of the hash; otherwise the tag argument of functions is 0. Hashes are
mixed with a secret, so that no client can choose hashes that all fall into one segment. Not for several
threads at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.index.compiled import jit, prefetch

CELLS = 1024
LIMIT = CELLS * 4 // 5
"""A segment this full is split."""
HARD_LIMIT = CELLS * 15 // 16
"""A segment may become this full when the budget allows no more segments."""

# Fields of `meta`: first those of every table, then those of the table of blocks.
USED, SEGMENTS, MAX_SEGMENTS, DEPTH, MAX_DEPTH, SECRET = range(6)
DEAD, FREE, DROPPED, UNKNOWN, HAND, CLOSED, AGAIN, _META = range(6, 14)
# Columns of `segments`: the number of used cells, and how many leading bits identify the segment.
FILL, _LOCAL = 0, 1

_M1, _M2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_ONE, _LOW = np.uint64(1), np.uint64(0xFFFFFFFF)
_S29, _S32, _S33 = np.uint64(29), np.uint64(32), np.uint64(33)
_MASK = np.uint64(CELLS - 1)


@jit
def mix(key: Any, secret: Any) -> Any:
    """Spread a hash over 64 bits; the result depends on a secret of this process."""
    key = (key ^ np.uint64(secret)) * _M1
    key = (key ^ (key >> _S33)) * _M2
    return key ^ (key >> _S29)


@jit
def mixed_of(meta: Any, key: Any, tag: Any) -> Any:
    return mix(key ^ (np.uint64(tag) * _SPREAD), meta[SECRET])


@jit
def segment_at(directory: Any, depth: Any, mixed: Any) -> Any:
    return np.int64(directory[mixed >> np.uint64(64 - depth)])


@jit
def segment_of(meta: Any, directory: Any, mixed: Any) -> Any:
    return segment_at(directory, meta[DEPTH], mixed)


@jit
def word_at(cells: Any, offset: Any) -> Any:
    """Return the 64 bits at an offset: a cell's hash, or a key."""
    return np.uint64(cells[offset]) | (np.uint64(cells[offset + 1]) << _S32)


@jit
def put_word(cells: Any, offset: Any, word: Any) -> None:
    cells[offset], cells[offset + 1] = np.uint32(word & _LOW), np.uint32(word >> _S32)


@jit
def find(cells: Any, width: Any, segment: Any, mixed: Any, key: Any, tag: Any) -> Any:
    """Return the offset of a hash in its segment, or `~offset` of the empty cell where it belongs."""
    low, high = np.uint32(key & _LOW), np.uint32(key >> _S32)
    base, at = segment * (CELLS * width), mixed & _MASK
    while True:
        offset = base + np.int64(at) * width
        if cells[offset + 2] == 0:
            return ~offset
        if cells[offset] == low and cells[offset + 1] == high and (tag == 0 or cells[offset + 2] == tag):
            return offset
        at = (at + _ONE) & _MASK


@jit
def prefetch_cell(meta: Any, directory: Any, cells: Any, width: Any, key: Any, tag: Any) -> None:
    """Prefetch the cell of a hash that is needed soon: tables are larger than caches."""
    mixed = mixed_of(meta, key, tag)
    prefetch(cells, (segment_of(meta, directory, mixed) * CELLS + np.int64(mixed & _MASK)) * width)


@jit
def fill(meta: Any, cells: Any, segments: Any, segment: Any, offset: Any, key: Any, mark: Any) -> None:
    """Put a hash and its third word into an empty cell."""
    put_word(cells, offset, key)
    cells[offset + 2] = np.uint32(mark)
    segments[segment, FILL] += 1
    meta[USED] += 1


@jit
def rehash(
    meta: Any, directory: Any, cells: Any, segments: Any, width: Any, tagged: Any, segment: Any
) -> None:
    """Move a segment's entries to the segments that the directory now gives.

    Cells whose third word was set to 0 are dropped.
    """
    base, size = segment * (CELLS * width), CELLS * width
    old = cells[base : base + size].copy()
    cells[base : base + size] = 0
    meta[USED] -= segments[segment, FILL]
    segments[segment, FILL] = 0
    for offset in range(0, size, width):
        if old[offset + 2] == 0:
            continue
        key, tag = word_at(old, offset), old[offset + 2] if tagged else np.uint32(0)
        mixed = mixed_of(meta, key, tag)
        target = segment_of(meta, directory, mixed)
        to = ~find(cells, width, target, mixed, key, tag)
        for word in range(width):
            cells[to + word] = old[offset + word]
        segments[target, FILL] += 1
        meta[USED] += 1


@jit
def split(meta: Any, directory: Any, cells: Any, segments: Any, width: Any, tagged: Any, mixed: Any) -> Any:
    """Split the segment of a mixed hash; `False` if no further segment is available."""
    segment = segment_of(meta, directory, mixed)
    local = segments[segment, _LOCAL]
    if meta[SEGMENTS] >= meta[MAX_SEGMENTS] or local >= meta[MAX_DEPTH]:
        return False
    if local == meta[DEPTH]:
        for at in range((1 << meta[DEPTH]) - 1, -1, -1):
            directory[2 * at] = directory[2 * at + 1] = directory[at]
        meta[DEPTH] += 1
    new = meta[SEGMENTS]
    meta[SEGMENTS] += 1
    segments[segment, _LOCAL] = segments[new, _LOCAL] = local + 1
    span = 1 << (meta[DEPTH] - local - 1)
    first = (np.int64(mixed >> np.uint64(64 - local)) * 2 + 1) * span
    for at in range(first, first + span):
        directory[at] = new
    rehash(meta, directory, cells, segments, width, tagged, segment)
    return True


@jit
def erase(meta: Any, cells: Any, segments: Any, width: Any, tagged: Any, segment: Any, offset: Any) -> None:
    """Empty a cell and move later entries of its run back, so that probing never stops early."""
    base = segment * (CELLS * width)
    hole = np.uint64((offset - base) // width)
    at = hole
    while True:
        at = (at + _ONE) & _MASK
        source = base + np.int64(at) * width
        if cells[source + 2] == 0:
            break
        home = mixed_of(meta, word_at(cells, source), cells[source + 2] if tagged else np.uint32(0)) & _MASK
        if ((at - home) & _MASK) >= ((at - hole) & _MASK):
            target = base + np.int64(hole) * width
            for word in range(width):
                cells[target + word] = cells[source + word]
            hole = at
    cells[base + np.int64(hole) * width + 2] = 0
    segments[segment, FILL] -= 1
    meta[USED] -= 1


class Cells(NamedTuple):
    """The arrays of a table."""

    meta: npt.NDArray[np.int64]
    directory: npt.NDArray[np.uint32]
    cells: npt.NDArray[np.uint32]
    segments: npt.NDArray[np.int32]

    @staticmethod
    def segment_bytes(width: int) -> int:
        """Return the bytes of a segment: cells, its row in `segments`, at most eight directory entries."""
        return CELLS * width * 4 + 2 * 4 + 8 * 4

    @classmethod
    def reserve(cls, most: int, width: int) -> Cells:
        """Reserve address space for `most` segments, and begin with two of them."""
        meta = np.zeros(_META, np.int64)
        meta[[DEPTH, SEGMENTS, MAX_SEGMENTS]] = 1, 2, most
        meta[[MAX_DEPTH, SECRET]] = most.bit_length() + 2, secrets.randbits(63)
        directory, segments = np.zeros(1 << int(meta[MAX_DEPTH]), np.uint32), np.zeros((most, 2), np.int32)
        directory[1] = 1
        segments[:2, _LOCAL] = 1
        return cls(meta, directory, np.zeros(most * CELLS * width, np.uint32), segments)

    def parts(self, width: int) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the used cells, `[cell, word]`, one segment at a time. The table may change meanwhile.

        Segments come in the order of the directory: a segment that is split later is visited as two at the
        same position, so an entry that stays in the table comes once.
        """
        done = 0  # position in the space of mixed hashes, 64 bits wide
        while done < 1 << 64:
            segment = int(self.directory[done >> (64 - int(self.meta[DEPTH]))])
            done += 1 << (64 - int(self.segments[segment, _LOCAL]))
            part = self.cells[segment * CELLS * width : (segment + 1) * CELLS * width].reshape(CELLS, width)
            yield part[part[:, 2] != 0]

    def fills(self, width: int) -> bool:
        """Return whether the counts agree with the cells."""
        used = self.cells[2::width][: int(self.meta[SEGMENTS]) * CELLS].reshape(-1, CELLS)
        fills = np.count_nonzero(used, axis=1)
        return bool(fills.sum() == self.meta[USED] and (fills == self.segments[: len(fills), FILL]).all())


def words_of(part: npt.NDArray[np.uint32], at: int) -> npt.NDArray[np.uint64]:
    """Return the 64 bits at word `at` of each cell."""
    return part[:, at].astype(np.uint64) | (part[:, at + 1].astype(np.uint64) << _S32)
