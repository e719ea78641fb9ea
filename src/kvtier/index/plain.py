"""The table and the names in plain Python: dicts. Same answers as the compiled ones, no compiler needed.

A block costs more here: 128 bytes in the worst case (its hash, its entry in a dict that has just doubled,
and the old dict that is being copied). The budget counts that. A block that finds no room is refused and
counted. Not for several threads at once: `PrefixIndex` ensures that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError
from kvtier.index.base import (
    AREAS,
    MAX_AREAS,
    MAX_WORKERS,
    SLACK,
    Columns,
    Edits,
    Hashes,
    IndexArea,
    NamePart,
    Op,
    StorageTier,
    Table,
    TableStats,
    parts_of,
    tiers_of,
)

_BLOCK_BYTES = 128
_NAME_BYTES = 192  # two ints and their entry in a dict that has just doubled
_SET_BYTES = 512  # a set's object, its mask, and its entries in two dicts
_AREA_BITS = (1 << MAX_AREAS) - 1
_SLICE = 1024
"""Blocks per slice."""


_Span = tuple[dict[int, int], dict[int, int], int]
"""A run of blocks with equal holders: the workers that hold the blocks and the tiers on which they do (one
bit each), the same for the blocks' states, and the end of the run.
"""


class _Holders:
    """A holder set: bit `worker * MAX_AREAS + area` of `mask` per holder; `blocks` counts its blocks."""

    __slots__ = ("blocks", "mask")

    def __init__(self, mask: int) -> None:
        self.mask, self.blocks = mask, 0


class PlainTable:
    """A table in a dict. See `kvtier.index.base.Table`."""

    form = "python"

    def __init__(self, budget: int) -> None:
        """Hold as many blocks as surely fit into `budget` bytes."""
        self.areas = [IndexArea(StorageTier(number), 0) for number in range(AREAS)]
        self._budget = budget
        self._blocks: dict[int, _Holders] = {}
        self._sets: dict[int, _Holders] = {}  # by mask
        self._all: dict[_Holders, None] = {}  # also sets that became empty or equal to another by a clear
        self._dead = 0  # entries of `_blocks` without holders
        self._needed: list[int] = []
        self._states: dict[int, int] = {}  # of workers that have any
        self._held: list[list[int]] = []
        self._drops: list[int] = []
        self._dropped = self._unknown = 0

    def grow(self, workers: int) -> bool:
        if workers > MAX_WORKERS:
            return False
        while len(self._held) < workers:
            self._held.append([0] * MAX_AREAS)
            self._needed.append(0)
            self._drops.append(0)
        return True

    def add_area(self, area: IndexArea) -> int | None:
        if len(self.areas) == MAX_AREAS:
            return None
        self.areas.append(area)
        return len(self.areas) - 1

    def require(self, worker: int, groups: int, states: int = 0) -> None:
        self._needed[worker] = groups
        self._states.pop(worker, None)
        if states:
            self._states[worker] = states

    # -- changes -----------------------------------------------------------------------------------

    def apply(
        self, worker: int, edits: Edits, hashes: Hashes, unique: bool = False
    ) -> tuple[int, int] | None:
        keys, start = hashes.tolist(), 0
        for edit, (op, area, count) in enumerate(edits[:, :3].tolist()):
            part = keys[start : start + count]
            start += count
            if op == Op.CLEARED:
                self.clear(worker)
            elif op == Op.REMOVED:
                self._remove(worker, area, part)
            elif (done := len(self._store(worker, area, part, unique))) < count:
                return edit, done
        return None

    def store(self, worker: int, area: int, hashes: Hashes) -> npt.NDArray[np.bool_]:
        return np.array(self._store(worker, area, hashes.tolist()), np.bool_)

    def _store(self, worker: int, area: int, keys: list[int], unique: bool = False) -> list[bool]:
        """Store blocks; return which of them are new. If `unique`, stop at the first that is not."""
        bit = 1 << (worker * MAX_AREAS + area)
        fresh = []
        for key in keys:
            old = self._blocks.get(key)
            if old is not None and old.mask & bit:
                if unique:
                    break
                fresh.append(False)
                continue
            new = self._sets.get(bit if old is None else old.mask | bit)
            if (new is None or old is None) and not self._has_room(old is None, new is None):
                self.refuse(worker, 1)
                fresh.append(False)
                continue
            old = self._blocks.get(key)  # a sweep may have removed it if it had no holder
            self._replace(key, old, new or self._new_set(bit if old is None else old.mask | bit))
            self._held[worker][area] += 1
            fresh.append(True)
        return fresh

    def _remove(self, worker: int, area: int, keys: list[int]) -> None:
        bit = 1 << (worker * MAX_AREAS + area)
        for key in keys:
            old = self._blocks.get(key)
            if old is None or not old.mask & bit:
                self._unknown += 1
                continue
            self._held[worker][area] -= 1
            rest = old.mask ^ bit
            new = self._sets.get(rest)
            if rest and new is None and self._has_room(False, True):
                new = self._new_set(rest)
            if rest and new is None:
                self._forget(rest)
            self._replace(key, old, new)

    def refuse(self, worker: int, count: int) -> None:
        self._dropped += count
        self._drops[worker] += count

    def _forget(self, mask: int) -> None:
        """Subtract a block from the counts of its holders: an index may know too little, never too much."""
        self._dropped += 1
        for worker, area in _holders(mask):
            self._held[worker][area] -= 1
            self._drops[worker] += 1

    def _has_room(self, for_block: bool, for_set: bool) -> bool:
        """Return whether one more block or set fits into the budget; sweep first if that helps."""
        most = self._budget - for_block * _BLOCK_BYTES - for_set * _SET_BYTES
        if self._bytes() <= most:
            return True
        if self._dead:
            self._sweep()
        return self._bytes() <= most

    def _new_set(self, mask: int) -> _Holders:
        new = self._sets[mask] = _Holders(mask)
        self._all[new] = None
        return new

    def _replace(self, key: int, old: _Holders | None, new: _Holders | None) -> None:
        """Give a block another holder set; `None` removes it."""
        if new is None:
            del self._blocks[key]
        else:
            new.blocks += 1
            self._blocks[key] = new
        if old is not None:
            self._dead -= not old.mask
            self._release(old)

    def _release(self, holders: _Holders) -> None:
        holders.blocks -= 1
        if holders.blocks == 0:
            del self._all[holders]
            if self._sets.get(holders.mask) is holders:
                del self._sets[holders.mask]

    def clear(self, worker: int) -> None:
        self._held[worker] = [0] * MAX_AREAS
        self._drops[worker] = 0
        keep = ~(_AREA_BITS << (worker * MAX_AREAS))
        self._sets.clear()
        for holders in self._all:
            holders.mask &= keep
            self._sets.setdefault(holders.mask, holders)
        self._sets.pop(0, None)
        self._dead = sum(holders.blocks for holders in self._all if not holders.mask)
        if 2 * self._dead > len(self._blocks):
            self._sweep()

    def _sweep(self) -> None:
        """Remove the entries without holders.

        Runs when they are half of all, so that each entry is visited a few times only.
        """
        for key in [key for key, holders in self._blocks.items() if not holders.mask]:
            self._release(self._blocks.pop(key))
        self._dead = 0

    # -- questions ---------------------------------------------------------------------------------

    def match(self, hashes: Hashes) -> Columns:
        out = np.zeros((len(self._held), 7), np.int32)
        spans = self._spans(hashes.tolist())
        for worker in spans[0][0] if spans else ():
            if worker in self._states:
                mine = [(on.get(worker, 0), states.get(worker, 0), end) for on, states, end in spans]
                out[worker] = _depths_with_states(mine)
            else:
                out[worker] = _depths([(on.get(worker, 0), end) for on, _, end in spans])
        return out

    def _spans(self, keys: list[int]) -> list[_Span]:
        """Return the holders of the leading blocks, up to the first block without holders."""
        spans: list[_Span] = []
        on: dict[int, int] = {}
        states: dict[int, int] = {}
        last: _Holders | None = None
        for depth, key in enumerate(keys):
            holders = self._blocks.get(key)
            if holders is None:
                break
            if holders is last:
                spans[-1] = on, states, depth + 1
                continue
            on = self._tiers_of(holders.mask)
            if not on:
                break
            states = self._states_of(holders.mask) if self._states else states
            spans.append((on, states, depth + 1))
            last = holders
        return spans

    def _tiers_of(self, mask: int) -> dict[int, int]:
        """Return the workers that hold a block on any tier, and those tiers (one bit each)."""
        return tiers_of(_holders(mask), self._needed.__getitem__, self.areas)

    def _states_of(self, mask: int) -> dict[int, int]:
        """Return the workers that hold a block's states on any tier, and those tiers (one bit each)."""
        return tiers_of(_holders(mask), lambda worker: self._states.get(worker, 0), self.areas)

    def holds(self, worker: int, hashes: Hashes) -> npt.NDArray[np.bool_]:
        bits = _AREA_BITS << (worker * MAX_AREAS)
        masks = (self._blocks[key].mask if key in self._blocks else 0 for key in hashes.tolist())
        return np.array([bool(mask & bits) for mask in masks], np.bool_)

    def holdings(self) -> int:
        return sum(map(sum, self._held))

    def held(self, worker: int) -> list[int]:
        return self._held[worker][: len(self.areas)]

    def dropped(self, worker: int) -> int:
        return self._drops[worker]

    def hashes(self) -> Iterator[Hashes]:
        keys = list(self._blocks)
        for start in range(0, len(keys), _SLICE):
            yield np.array([key for key in keys[start : start + _SLICE] if key in self._blocks], np.uint64)

    def usable(self, hashes: Hashes) -> list[Mapping[int, int]]:
        masks = [self._blocks[key].mask if key in self._blocks else 0 for key in hashes.tolist()]
        on = {mask: self._tiers_of(mask) for mask in set(masks)}
        return [on[mask] for mask in masks]

    def _bytes(self) -> int:
        return len(self._blocks) * _BLOCK_BYTES + len(self._all) * _SET_BYTES

    def stats(self) -> TableStats:
        blocks = len(self._blocks) - self._dead
        return TableStats(blocks, len(self._all), self._bytes(), self._budget, self._dropped, self._unknown)

    def check(self) -> None:
        counted = Counter(place for holders in self._blocks.values() for place in _holders(holders.mask))
        held = {(w, area): n for w, areas in enumerate(self._held) for area, n in enumerate(areas) if n}
        wrong = {
            "blocks of a set": Counter(self._blocks.values())
            != Counter({known: known.blocks for known in self._all}),
            "sets by mask": any(
                known.mask != mask or known not in self._all for mask, known in self._sets.items()
            ),
            "dead entries": sum(not known.mask for known in self._blocks.values()) != self._dead,
            "blocks per worker": counted != held,
            "bytes": self._bytes() > self._budget,
        }
        if any(wrong.values()):
            raise IntegrityError(
                f"index table: wrong {', '.join(name for name, bad in wrong.items() if bad)}"
            )


class PlainNames:
    """Names in dicts. See `kvtier.index.base.Names`."""

    def __init__(self, table: Table, budget: int) -> None:
        """Name blocks of `table`, in at most `budget` bytes."""
        self._table = table
        self._most = budget // _NAME_BYTES
        self._names: dict[int, dict[int, int]] = {}
        self._count = 0
        self._untidy = SLACK

    def get(self, worker: int, engine_hash: int) -> int | None:
        names = self._names.get(worker)
        return None if names is None else names.get(engine_hash)

    def put(self, worker: int, hashes: Sequence[int], keys: Hashes) -> bool:
        if self._count + len(hashes) > self._most:
            return False
        names = self._names.setdefault(worker, {})
        before = len(names)
        names.update(zip(hashes, keys.tolist(), strict=True))
        self._count += len(names) - before
        return True

    def clear(self, worker: int) -> None:
        self._count -= len(self._names.pop(worker, ()))

    def tidy(self) -> None:
        if self._count > self._untidy:
            if self._count > 2 * self._table.holdings() + SLACK:
                self.sweep()
            self._untidy = max(SLACK, self._count * 5 // 4)

    def sweep(self) -> None:
        for worker, names in self._names.items():
            held = self._table.holds(worker, np.fromiter(names.values(), np.uint64, len(names)))
            for name in [name for name, is_held in zip(names, held.tolist(), strict=True) if not is_held]:
                del names[name]
        self._count = sum(map(len, self._names.values()))

    def parts(self) -> Iterator[NamePart]:
        for worker in list(self._names):
            yield from parts_of(worker, list(self._names.get(worker, ())), partial(self.get, worker))

    def bytes(self) -> int:
        return self._count * _NAME_BYTES

    def check(self) -> None:
        if self._count != sum(map(len, self._names.values())):
            raise IntegrityError("index names: the count is not that of the names")


def _holders(mask: int) -> Iterator[tuple[int, int]]:
    """Yield `(worker, area)` of each bit."""
    while mask:
        lowest = mask & -mask
        yield divmod(lowest.bit_length() - 1, MAX_AREAS)
        mask ^= lowest


def _depths(spans: list[tuple[int, int]]) -> list[int]:
    """Return a worker's seven columns. Each span has the tiers on which the worker holds it, and its end."""

    def lead(start: int, tiers: int) -> int:
        for on, end in spans:
            if end > start:
                if not on & tiers:
                    break
                start = end
        return start

    reach = [lead(0, 1)]
    reach.append(lead(reach[0], 2))
    reach.append(lead(reach[1], 4))
    return [lead(0, 7), reach[0], lead(0, 2), lead(0, 4), *reach]


def _depths_with_states(spans: list[tuple[int, int, int]]) -> list[int]:
    """Return the columns of a worker with state groups. Each span also has the tiers of its states."""

    def last(start: int, states: int, *walk: int) -> int:
        """Walk from `start` by each of these sets of tiers in turn, while it has the blocks.

        Return the last end of a span on the way whose states are on one of the tiers `states`.
        """
        found, rest = start, list(walk)
        for on, states_on, end in spans:
            if end <= start:
                continue
            while rest and not on & rest[0]:
                del rest[0]
            if not rest:
                break
            found = end if states_on & states else found
        return found

    gpu = last(0, 1, 1)
    return [last(gpu, 6, 6), gpu, last(0, 2, 2), last(0, 4, 4), gpu, last(gpu, 2, 2), last(gpu, 6, 2, 4)]
