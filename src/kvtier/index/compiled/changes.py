"""Changes of the compiled table by events: stores, removals, whole batches.

The functions take all arrays of the table; `cells` and `sets` describe them. `held[worker, area]` counts a
worker's blocks; its last column counts blocks that found no room.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.index.base import Op
from kvtier.index.compiled.cells import (
    AGAIN,
    CELLS,
    CLOSED,
    DEAD,
    DROPPED,
    FILL,
    HAND,
    HARD_LIMIT,
    LIMIT,
    SEGMENTS,
    UNKNOWN,
    erase,
    fill,
    find,
    mixed_of,
    prefetch_cell,
    rehash,
    segment_of,
    split,
)
from kvtier.index.compiled.jit import jit, lowest_bit
from kvtier.index.compiled.sets import toggled

WIDTH = 3
"""Words of a block's cell: its hash's halves, and the number of its holder set."""
_STORED, _CLEARED = int(Op.STORED), int(Op.CLEARED)
_ONE, _NO_TAG = np.uint64(1), np.uint32(0)
_AHEAD = 8  # as many loads as a core can have open at once
_WORTH = CELLS // 16  # if a sweep frees fewer cells than this, the segment is split as well


@jit
def _settle(
    meta: Any, directory: Any, cells: Any, segments: Any, refs: Any, alias: Any, segment: Any
) -> None:
    """Update a segment's blocks to their current set numbers, and drop blocks without holders."""
    base = segment * (CELLS * WIDTH)
    for place in range(base + 2, base + CELLS * WIDTH, WIDTH):
        number = cells[place]
        if number != 0 and alias[number] != number:
            holders = alias[number]
            refs[number] -= 1
            refs[holders] += holders != 0
            meta[DEAD] -= holders == 0
            cells[place] = holders
    rehash(meta, directory, cells, segments, WIDTH, False, segment)


@jit
def _make_room(
    meta: Any, directory: Any, cells: Any, segments: Any, refs: Any, alias: Any, mixed: Any
) -> Any:
    """Sweep or split the segment of a mixed hash; `False` if neither is possible."""
    if meta[DEAD] > 0:
        segment = segment_of(meta, directory, mixed)
        _settle(meta, directory, cells, segments, refs, alias, segment)
        if segments[segment, FILL] <= LIMIT - _WORTH:
            return True
    return split(meta, directory, cells, segments, WIDTH, False, mixed)


@jit
def _sweep(meta: Any, directory: Any, cells: Any, segments: Any, refs: Any, alias: Any, budget: Any) -> None:
    """Sweep some segments, in turn, for blocks without holders."""
    for _ in range(budget):
        if meta[DEAD] == 0:
            return
        meta[HAND] = (meta[HAND] + 1) % meta[SEGMENTS]
        _settle(meta, directory, cells, segments, refs, alias, meta[HAND])


@jit
def store(
    meta: Any, directory: Any, cells: Any, segments: Any,
    rows: Any, refs: Any, alias: Any, intern: Any, free: Any, held: Any,
    worker: Any, area: Any, hashes: Any, start: Any, stop: Any, fresh: Any, unique: Any,
) -> Any:  # fmt: skip
    """Add a holder to `hashes[start:stop]`; return where it stopped.

    It stops before `stop` if there is no free set number. If `unique`, it also stops at a block that the
    worker holds in that area already, and sets `meta[AGAIN]`. If `fresh` is not empty, it gets a flag for
    each block that the worker did not hold.
    """
    word, bit = area * ((held.shape[0] + 63) >> 6) + (worker >> 6), _ONE << np.uint64(worker & 63)
    drops = held.shape[1] - 1
    known, next_set = np.int64(-2), np.int64(0)
    for i in range(start, stop):
        if i + _AHEAD < stop:
            prefetch_cell(meta, directory, cells, WIDTH, hashes[i + _AHEAD], _NO_TAG)
        key = hashes[i]
        mixed = mixed_of(meta, key, _NO_TAG)
        segment = segment_of(meta, directory, mixed)
        place = find(cells, WIDTH, segment, mixed, key, _NO_TAG)
        if place < 0 and segments[segment, FILL] >= LIMIT:
            room = _make_room(meta, directory, cells, segments, refs, alias, mixed)
            segment = segment_of(meta, directory, mixed)
            if not room and segments[segment, FILL] >= HARD_LIMIT:
                meta[DROPPED] += 1
                held[worker, drops] += 1
                continue
            place = find(cells, WIDTH, segment, mixed, key, _NO_TAG)
        number = np.int64(0) if place < 0 else np.int64(cells[place + 2])
        holders = np.int64(alias[number])
        if rows[holders, word] & bit:
            if unique:
                meta[AGAIN] = 1
                return i
            continue
        if holders != known:
            next_set = toggled(meta, rows, alias, intern, free, holders, word, bit)
            if next_set < 0:
                if not meta[CLOSED]:
                    return i
                known = np.int64(-2)
                meta[DROPPED] += 1
                held[worker, drops] += 1
                continue
            known = holders
        if place < 0:
            fill(meta, cells, segments, segment, ~place, key, next_set)
        else:
            refs[number] -= 1
            meta[DEAD] -= holders == 0
            cells[place + 2] = next_set
        refs[next_set] += 1
        held[worker, area] += 1
        if fresh.size:
            fresh[i] = True
    return stop


@jit
def _remove(
    meta: Any, directory: Any, cells: Any, segments: Any,
    rows: Any, refs: Any, alias: Any, intern: Any, free: Any, held: Any,
    worker: Any, area: Any, hashes: Any, start: Any, stop: Any,
) -> Any:  # fmt: skip
    """Remove a holder from `hashes[start:stop]`; return where it stopped, as `store` does.

    If no smaller set can be made, the block is forgotten completely: an index may know too little, never
    too much.
    """
    word, bit = area * ((held.shape[0] + 63) >> 6) + (worker >> 6), _ONE << np.uint64(worker & 63)
    known, next_set = np.int64(-2), np.int64(0)
    for i in range(start, stop):
        if i + _AHEAD < stop:
            prefetch_cell(meta, directory, cells, WIDTH, hashes[i + _AHEAD], _NO_TAG)
        key = hashes[i]
        mixed = mixed_of(meta, key, _NO_TAG)
        segment = segment_of(meta, directory, mixed)
        place = find(cells, WIDTH, segment, mixed, key, _NO_TAG)
        number = np.int64(0) if place < 0 else np.int64(cells[place + 2])
        holders = np.int64(alias[number])
        if not rows[holders, word] & bit:
            meta[UNKNOWN] += 1
            continue
        if holders != known:
            next_set = toggled(meta, rows, alias, intern, free, holders, word, bit)
            if next_set < 0:
                if not meta[CLOSED]:
                    return i
                _forget(meta, rows, held, holders)
                next_set = np.int64(0)
                held[worker, area] += 1  # undone below
            known = holders if next_set else np.int64(-2)
        refs[number] -= 1
        held[worker, area] -= 1
        if next_set:
            cells[place + 2] = next_set
            refs[next_set] += 1
        else:
            erase(meta, cells, segments, WIDTH, False, segment, place)
    return stop


@jit
def _forget(meta: Any, rows: Any, held: Any, holders: Any) -> None:
    """Subtract a block from the counts of all its holders."""
    words = (held.shape[0] + 63) >> 6
    meta[DROPPED] += 1
    for at in range(rows.shape[1]):
        bits = rows[holders, at]
        while bits:
            worker = lowest_bit(bits) + 64 * (at % words)
            held[worker, at // words] -= 1
            held[worker, held.shape[1] - 1] += 1
            bits &= bits - _ONE


@jit
def apply(
    meta: Any, directory: Any, cells: Any, segments: Any,
    rows: Any, refs: Any, alias: Any, intern: Any, free: Any, held: Any,
    worker: Any, edits: Any, hashes: Any, edit: Any, done: Any, unique: Any,
) -> Any:  # fmt: skip
    """Apply events from `edit` on; the first `done` hashes of that edit are already applied.

    Returns `(edit, done)`: at the end `(len(edits), 0)`; at a clear, which the caller handles; or where
    `store` stopped.
    """
    nothing = np.empty(0, np.bool_)
    first = np.int64(0)
    for at in range(edit):
        first += edits[at, 2]
    while edit < edits.shape[0]:
        op, area, count = edits[edit, 0], edits[edit, 1], edits[edit, 2]
        if op == _CLEARED:
            return edit, np.int64(0)
        start, stop = first + done, first + count
        if op == _STORED:
            end = store(
                meta, directory, cells, segments, rows, refs, alias, intern, free, held,
                worker, area, hashes, start, stop, nothing, unique,
            )  # fmt: skip
        else:
            end = _remove(
                meta, directory, cells, segments, rows, refs, alias, intern, free, held,
                worker, area, hashes, start, stop,
            )  # fmt: skip
        if end < stop:
            return edit, end - first
        first, done = stop, np.int64(0)
        edit += 1
    _sweep(meta, directory, cells, segments, refs, alias, 1 + hashes.size // 64)
    return edit, np.int64(0)
