"""Lookups in the compiled table: the holders of a prefix, the holders of a block, and all blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.index.compiled.cells import DEPTH, SECRET, find, mix, mixed_of, segment_at, segment_of
from kvtier.index.compiled.changes import WIDTH
from kvtier.index.compiled.jit import jit, lowest_bit

_NO_TAG = np.uint32(0)
_ONE, _ZERO = np.uint64(1), np.uint64(0)


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
    place = find(cells, WIDTH, segment_of(meta, directory, mixed), mixed, key, _NO_TAG)
    return alias[cells[place + 2]] if place >= 0 else np.uint32(0)


@jit
def _look_up(meta: Any, directory: Any, cells: Any, alias: Any, hashes: Any, found: Any) -> Any:
    """Put holder sets into `found`, up to the first block without a holder; return how many."""
    # Read once: the compiler must not assume that a write to `found` changes them.
    secret, depth = meta[SECRET], meta[DEPTH]
    for i in range(hashes.size):
        mixed = mix(hashes[i], secret)
        place = find(cells, WIDTH, segment_at(directory, depth, mixed), mixed, hashes[i], _NO_TAG)
        found[i] = alias[cells[place + 2]] if place >= 0 else 0
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
def _race(
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
def match(
    meta: Any, directory: Any, cells: Any, rows: Any, alias: Any, areas: Any, needed: Any,
    hashes: Any, out: Any,
) -> None:  # fmt: skip
    """Look the blocks up, then find how far each worker comes, 64 workers at a time."""
    words = out.shape[0] >> 6
    found = np.empty(hashes.size, np.uint32)
    count = _look_up(meta, directory, cells, alias, hashes, found)
    for word in range(words):
        _race(rows, areas, needed, words, found, count, word, out)


@jit
def holds_one(
    meta: Any, directory: Any, cells: Any, rows: Any, alias: Any, words: Any, worker: Any, key: Any
) -> Any:
    """Say whether a worker holds a block in any area."""
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
