"""What the compiled table is asked: who holds a prefix, who holds a block, and all there is."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.index.compiled.jit import jit, lowest_bit
from kvtier.index.compiled.slots import (
    DEPTH,
    SECRET,
    SEGMENTS,
    SLOT_WORDS,
    SLOTS,
    USED,
    find,
    key_at,
    mix,
    segment_of,
)

__all__ = ["export", "find_all", "holds", "holds_one", "match"]

_ONE, _ZERO = np.uint64(1), np.uint64(0)


@jit
def _record(out: Any, query: Any, column: Any, word: Any, bits: Any, depth: Any) -> None:
    """Write down for the workers of `bits` how far they came."""
    while bits:
        out[query, word * 64 + lowest_bit(bits), column] = depth
        bits &= bits - _ONE


@jit
def _look_up(meta: Any, directory: Any, slots: Any, alias: Any, hashes: Any, found: Any) -> Any:
    """Put each block's holder set into `found`, up to the first block that nobody holds; return how many there are."""
    secret, depth = meta[SECRET], meta[DEPTH]
    for i in range(hashes.size):
        mixed = mix(hashes[i], secret)
        place = find(slots, segment_of(directory, depth, mixed), mixed, hashes[i])
        found[i] = alias[slots[place + 2]] if place >= 0 else 0
        if found[i] == 0:
            return i
    return hashes.size


@jit
def _race(rows: Any, lane_tiers: Any, words: Any, found: Any, count: Any, query: Any, word: Any, out: Any) -> None:
    """Find how far each of 64 workers comes. A block with the same holders as the one before changes nothing."""
    everywhere = cpus = storages = walk_gpu = ~_ZERO
    walk_cpu = walk_storage = _ZERO
    last = np.uint32(0)
    for depth in range(count + 1):
        holders = found[depth] if depth < count else np.uint32(0)
        if holders == last and depth < count:
            continue
        last = holders
        gpu, cpu, storage = rows[holders, word], rows[holders, words + word], rows[holders, 2 * words + word]
        for lane in range(3, lane_tiers.size):
            bits = rows[holders, lane * words + word]
            gpu |= bits if lane_tiers[lane] == 0 else _ZERO
            cpu |= bits if lane_tiers[lane] == 1 else _ZERO
            storage |= bits if lane_tiers[lane] == 2 else _ZERO
        held = gpu | cpu | storage
        if depth == 0:  # who does not hold the first block keeps the zeros that are there
            everywhere, cpus, storages = held, cpu, storage
            walk_gpu, walk_cpu, walk_storage = gpu, cpu & ~gpu, storage & ~gpu & ~cpu
            continue
        fell = everywhere & ~held
        if fell:
            _record(out, query, 0, word, fell, depth)
            everywhere &= held
        fell = cpus & ~cpu
        if fell:
            _record(out, query, 2, word, fell, depth)
            cpus &= cpu
        fell = storages & ~storage
        if fell:
            _record(out, query, 3, word, fell, depth)
            storages &= storage
        # who falls off the GPU tries the CPU at the same block, who falls off that the storage
        fell = walk_gpu & ~gpu
        if fell:
            _record(out, query, 1, word, fell, depth)
            _record(out, query, 4, word, fell, depth)
            walk_gpu &= gpu
            walk_cpu |= fell
        fell = walk_cpu & ~cpu
        if fell:
            _record(out, query, 5, word, fell, depth)
            walk_cpu &= cpu
            walk_storage |= fell
        fell = walk_storage & ~storage
        if fell:
            _record(out, query, 6, word, fell, depth)
            walk_storage &= storage
        if everywhere == 0:
            return


@jit
def match(
    meta: Any, directory: Any, slots: Any, rows: Any, alias: Any, lane_tiers: Any, hashes: Any, offsets: Any, out: Any
) -> None:
    """Answer each query: look its blocks up, then race 64 workers at a time along them."""
    words = out.shape[1] >> 6
    found = np.empty(hashes.size, np.uint32)
    for query in range(offsets.size - 1):
        count = _look_up(meta, directory, slots, alias, hashes[offsets[query] : offsets[query + 1]], found)
        for word in range(words):
            _race(rows, lane_tiers, words, found, count, query, word, out)


@jit
def holds_one(meta: Any, directory: Any, slots: Any, rows: Any, alias: Any, words: Any, worker: Any, key: Any) -> Any:
    """Tell whether a worker holds a block in any lane."""
    mixed = mix(key, meta[SECRET])
    place = find(slots, segment_of(directory, meta[DEPTH], mixed), mixed, key)
    holders = alias[slots[place + 2]] if place >= 0 else np.uint32(0)
    bits = _ZERO
    for at in range(worker >> 6, rows.shape[1], words):
        bits |= rows[holders, at]
    return (bits >> np.uint64(worker & 63)) & _ONE != 0


@jit
def holds(meta: Any, directory: Any, slots: Any, rows: Any, alias: Any, words: Any, worker: Any, hashes: Any) -> Any:
    """Tell of each block whether a worker holds it."""
    found = np.empty(hashes.size, np.bool_)
    for i in range(hashes.size):
        found[i] = holds_one(meta, directory, slots, rows, alias, words, worker, hashes[i])
    return found


@jit
def find_all(meta: Any, directory: Any, slots: Any, alias: Any, hashes: Any) -> Any:
    """Return each hash's holder set, 0 where nobody holds it."""
    found = np.zeros(hashes.size, np.uint32)
    for i in range(hashes.size):
        mixed = mix(hashes[i], meta[SECRET])
        place = find(slots, segment_of(directory, meta[DEPTH], mixed), mixed, hashes[i])
        if place >= 0:
            found[i] = alias[slots[place + 2]]
    return found


@jit
def export(meta: Any, slots: Any) -> Any:
    """Return all entries, dead ones too: hashes and set numbers as they are in the slots."""
    keys, numbers = np.empty(meta[USED], np.uint64), np.empty(meta[USED], np.uint32)
    count = 0
    for place in range(0, meta[SEGMENTS] * SLOTS * SLOT_WORDS, SLOT_WORDS):
        if slots[place + 2] != 0:
            keys[count], numbers[count] = key_at(slots, place), slots[place + 2]
            count += 1
    return keys[:count], numbers[:count]
