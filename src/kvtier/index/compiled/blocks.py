"""The compiled loops over blocks and their holders: sets of holders, changes by events, and lookups.

A block's holders are a row of bits that many blocks share, with a word per area for 64 workers. These
*holder sets* are interned: equal rows have equal numbers; set 0 is empty. Clearing a worker removes its bits
from every row and interns all rows again; `alias` then maps a set to its equal, or to 0 if it became empty.
`refs` counts the cells with each number; an unused number may be given to another set.

`held[worker, area]` counts a worker's blocks; its last column counts blocks that found no room. The other
arrays are described in `cells`. Not for several threads at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.index.base import Op
from kvtier.index.compiled import jit, lowest_bit
from kvtier.index.compiled.cells import (
    AGAIN,
    CELLS,
    CLOSED,
    DEAD,
    DEPTH,
    DROPPED,
    FILL,
    FREE,
    HAND,
    HARD_LIMIT,
    LIMIT,
    SECRET,
    SEGMENTS,
    UNKNOWN,
    erase,
    fill,
    find,
    mix,
    mixed_of,
    prefetch_cell,
    rehash,
    segment_at,
    segment_of,
    split,
)

WIDTH = 3
"""Words of a block's cell: its hash's halves, and the number of its holder set."""
_STORED, _CLEARED = int(Op.STORED), int(Op.CLEARED)
_ONE, _ZERO, _NO_TAG = np.uint64(1), np.uint64(0), np.uint32(0)
_NO_SET = np.int64(-1)
_AHEAD = 8  # as many loads as a core can have open at once
_WORTH = CELLS // 16  # if a sweep frees fewer cells than this, the segment is split as well


# -- holder sets -----------------------------------------------------------------------------------


@jit
def _seat(rows: Any, intern: Any, row: Any) -> Any:
    """Return the position in `intern` of a row's number, or where it belongs."""
    mixed = _ZERO
    for word in range(rows.shape[1]):
        mixed = mix(mixed ^ rows[row, word], word)
    mask = np.uint64(intern.size - 1)
    at = mixed & mask
    while intern[at] != 0:
        number, equal = intern[at], True
        for word in range(rows.shape[1]):
            if rows[number, word] != rows[row, word]:
                equal = False
                break
        if equal:
            break
        at = (at + _ONE) & mask
    return at


@jit
def toggled(
    meta: Any, rows: Any, alias: Any, intern: Any, free: Any, holders: Any, word: Any, bit: Any
) -> Any:
    """Return the set that differs from `holders` in one bit; -1 if no number is free for it."""
    scratch, empty = rows.shape[0] - 1, True
    for at in range(rows.shape[1]):
        rows[scratch, at] = rows[holders, at] ^ bit if at == word else rows[holders, at]
        empty = empty and rows[scratch, at] == 0
    if empty:
        return np.int64(0)
    seat = _seat(rows, intern, scratch)
    if intern[seat] != 0:
        return np.int64(intern[seat])
    if meta[FREE] == 0:
        return _NO_SET
    meta[FREE] -= 1
    number = free[meta[FREE]]
    rows[number] = rows[scratch]
    intern[seat] = alias[number] = number
    return np.int64(number)


@jit
def intern_all(meta: Any, rows: Any, refs: Any, alias: Any, intern: Any, free: Any) -> None:
    """Intern all sets again after rows changed: equal sets get an alias, unused numbers become free."""
    intern[:] = 0
    meta[FREE] = meta[DEAD] = 0
    for number in range(refs.size - 1, 0, -1):
        alias[number] = 0
        if refs[number] == 0:
            free[meta[FREE]] = number
            meta[FREE] += 1
            continue
        if not rows[number].any():
            meta[DEAD] += refs[number]
            continue
        seat = _seat(rows, intern, number)
        if intern[seat] == 0:
            intern[seat] = number
        alias[number] = intern[seat]


# -- changes ---------------------------------------------------------------------------------------


@jit
def _settle(
    meta: Any, directory: Any, cells: Any, segments: Any, refs: Any, alias: Any, segment: Any
) -> None:
    """Update a segment's blocks to their current set numbers, and drop blocks without holders."""
    base = segment * (CELLS * WIDTH)
    for offset in range(base + 2, base + CELLS * WIDTH, WIDTH):
        number = cells[offset]
        if number != 0 and alias[number] != number:
            holders = alias[number]
            refs[number] -= 1
            refs[holders] += holders != 0
            meta[DEAD] -= holders == 0
            cells[offset] = holders
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
        offset = find(cells, WIDTH, segment, mixed, key, _NO_TAG)
        if offset < 0 and segments[segment, FILL] >= LIMIT:
            room = _make_room(meta, directory, cells, segments, refs, alias, mixed)
            segment = segment_of(meta, directory, mixed)
            if not room and segments[segment, FILL] >= HARD_LIMIT:
                meta[DROPPED] += 1
                held[worker, drops] += 1
                continue
            offset = find(cells, WIDTH, segment, mixed, key, _NO_TAG)
        number = np.int64(0) if offset < 0 else np.int64(cells[offset + 2])
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
        if offset < 0:
            fill(meta, cells, segments, segment, ~offset, key, next_set)
        else:
            refs[number] -= 1
            meta[DEAD] -= holders == 0
            cells[offset + 2] = next_set
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
        offset = find(cells, WIDTH, segment, mixed, key, _NO_TAG)
        number = np.int64(0) if offset < 0 else np.int64(cells[offset + 2])
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
            cells[offset + 2] = next_set
            refs[next_set] += 1
        else:
            erase(meta, cells, segments, WIDTH, False, segment, offset)
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


# -- lookups ---------------------------------------------------------------------------------------


@jit
def _record(out: Any, column: Any, word: Any, bits: Any, depth: Any) -> None:
    """Record how far the workers of `bits` came."""
    while bits:
        out[word * 64 + lowest_bit(bits), column] = depth
        bits &= bits - _ONE


@jit
def _holders_of(meta: Any, directory: Any, cells: Any, alias: Any, key: Any) -> Any:
    """Return a block's holder set, 0 if it has no holder."""
    mixed = mixed_of(meta, key, _NO_TAG)
    offset = find(cells, WIDTH, segment_of(meta, directory, mixed), mixed, key, _NO_TAG)
    return alias[cells[offset + 2]] if offset >= 0 else np.uint32(0)


@jit
def _look_up(meta: Any, directory: Any, cells: Any, alias: Any, hashes: Any, found: Any) -> Any:
    """Put holder sets into `found`, up to the first block without a holder; return how many."""
    # Read once: the compiler must not assume that a write to `found` changes them.
    secret, depth = meta[SECRET], meta[DEPTH]
    for i in range(hashes.size):
        mixed = mix(hashes[i], secret)
        offset = find(cells, WIDTH, segment_at(directory, depth, mixed), mixed, hashes[i], _NO_TAG)
        found[i] = alias[cells[offset + 2]] if offset >= 0 else 0
        if found[i] == 0:
            return i
    return hashes.size


@jit
def _on_tiers(rows: Any, areas: Any, needed: Any, words: Any, holders: Any, word: Any) -> Any:
    """Return the bits of 64 workers that hold a block on each tier, in every group that they need."""
    gpu = cpu = storage = ~_ZERO
    anything = _ZERO
    for group in range(needed.shape[0]):
        wants = needed[group, word]
        if wants == 0:
            continue
        on_gpu = on_cpu = on_storage = _ZERO
        for area in range(areas.shape[0]):
            if areas[area, 1] == group:
                bits = rows[holders, area * words + word]
                on_gpu |= bits if areas[area, 0] == 0 else _ZERO
                on_cpu |= bits if areas[area, 0] == 1 else _ZERO
                on_storage |= bits if areas[area, 0] == 2 else _ZERO
        gpu &= on_gpu | ~wants
        cpu &= on_cpu | ~wants
        storage &= on_storage | ~wants
        anything |= wants
    return gpu & anything, cpu & anything, storage & anything


@jit
def match_depths(
    rows: Any, areas: Any, needed: Any, words: Any, found: Any, count: Any, word: Any, out: Any
) -> None:
    """Find how far each of 64 workers comes. A block with the same holders as the one before is skipped."""
    everywhere = cpus = storages = walk_gpu = ~_ZERO
    walk_cpu = walk_storage = _ZERO
    last = np.uint32(0)
    one_group, wants = areas.shape[0] == 3, needed[0, word]
    for depth in range(count + 1):
        holders = found[depth] if depth < count else np.uint32(0)
        if holders == last and depth < count:
            continue
        last = holders
        if one_group:  # and one area per tier, nearly always
            gpu, cpu, storage = (
                rows[holders, word],
                rows[holders, words + word],
                rows[holders, 2 * words + word],
            )
            gpu, cpu, storage = gpu & wants, cpu & wants, storage & wants
        else:
            gpu, cpu, storage = _on_tiers(rows, areas, needed, words, holders, word)
        held = gpu | cpu | storage
        if depth == 0:  # workers that do not hold the first block keep their zeros
            everywhere, cpus, storages = held, cpu, storage
            walk_gpu, walk_cpu, walk_storage = gpu, cpu & ~gpu, storage & ~gpu & ~cpu
            continue
        fell = everywhere & ~held
        if fell:
            _record(out, 0, word, fell, depth)
            everywhere &= held
        fell = cpus & ~cpu
        if fell:
            _record(out, 2, word, fell, depth)
            cpus &= cpu
        fell = storages & ~storage
        if fell:
            _record(out, 3, word, fell, depth)
            storages &= storage
        # a worker that leaves the GPU tries the CPU at the same block, one that leaves the CPU tries the
        # storage
        fell = walk_gpu & ~gpu
        if fell:
            _record(out, 1, word, fell, depth)
            _record(out, 4, word, fell, depth)
            walk_gpu &= gpu
            walk_cpu |= fell
        fell = walk_cpu & ~cpu
        if fell:
            _record(out, 5, word, fell, depth)
            walk_cpu &= cpu
            walk_storage |= fell
        fell = walk_storage & ~storage
        if fell:
            _record(out, 6, word, fell, depth)
            walk_storage &= storage
        if everywhere == 0:
            return


@jit
def state_depths(
    rows: Any, areas: Any, needed: Any, states: Any, some: Any, words: Any,
    found: Any, count: Any, word: Any, out: Any,
) -> None:  # fmt: skip
    """Find how far `some` of 64 workers come, those with state groups: at most to the last states."""
    for column in range(out.shape[1]):
        _record(out, column, word, some, 0)
    gpus = cpus = storages = below = walk_cpu = some
    walk_storage = _ZERO
    for depth in range(1, count + 1):
        holders = found[depth - 1]
        if depth < count and found[depth] == holders:  # only the last block of equal ones can be an end
            continue
        gpu, cpu, storage = _on_tiers(rows, areas, needed, words, holders, word)
        gpus, cpus, storages, below = gpus & gpu, cpus & cpu, storages & storage, below & (cpu | storage)
        walk_storage = (walk_storage | (walk_cpu & ~cpu)) & storage
        walk_cpu &= cpu
        if gpus | cpus | storages | below == 0:
            return
        gpu, cpu, storage = _on_tiers(rows, areas, states, words, holders, word)
        _record(out, 0, word, below & (cpu | storage), depth)
        _record(out, 2, word, cpus & cpu, depth)
        _record(out, 3, word, storages & storage, depth)
        _record(out, 5, word, walk_cpu & cpu, depth)
        _record(out, 6, word, (walk_cpu | walk_storage) & (cpu | storage), depth)
        # where a prefix on the GPU ends, the tiers below may go on
        ends = gpus & gpu
        if ends:
            for column in (0, 1, 4, 5, 6):
                _record(out, column, word, ends, depth)
            below, walk_cpu, walk_storage = below | ends, walk_cpu | ends, walk_storage & ~ends


@jit
def match(
    meta: Any, directory: Any, cells: Any, rows: Any, alias: Any, areas: Any, needed: Any,
    hashes: Any, out: Any,
) -> None:  # fmt: skip
    """Look the blocks up, then find how far each worker comes, 64 workers at a time."""
    words = out.shape[0] >> 6
    found = np.empty(hashes.size, np.uint32)
    count = _look_up(meta, directory, cells, alias, hashes, found)
    for word in range(words):
        match_depths(rows, areas, needed[0], words, found, count, word, out)
        some = _ZERO
        for group in range(needed.shape[1]):
            some |= needed[1, group, word]
        if some:
            state_depths(rows, areas, needed[0], needed[1], some, words, found, count, word, out)


@jit
def holds_one(
    meta: Any, directory: Any, cells: Any, rows: Any, alias: Any, words: Any, worker: Any, key: Any
) -> Any:
    """Return whether a worker holds a block in any area."""
    holders = _holders_of(meta, directory, cells, alias, key)
    bits = _ZERO
    for at in range(worker >> 6, rows.shape[1], words):
        bits |= rows[holders, at]
    return (bits >> np.uint64(worker & 63)) & _ONE != 0


@jit
def find_all(meta: Any, directory: Any, cells: Any, alias: Any, hashes: Any) -> Any:
    """Return each hash's holder set, 0 if it has no holder."""
    found = np.zeros(hashes.size, np.uint32)
    for i in range(hashes.size):
        found[i] = _holders_of(meta, directory, cells, alias, hashes[i])
    return found
