"""The table with compiled loops: numpy arrays, and the compiled loops of this package over them.

Memory is bounded by construction. Address space for the whole budget is reserved at the start; the system
provides memory for a part of it only when that part is first written, and the table takes it segment by
segment. `stats().bytes` counts the taken bytes; it never exceeds the budget, not even for a moment. A block
that finds no room is refused and counted. The smallest budget is 256 KiB. Not for several threads at once:
`PrefixIndex` ensures that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError
from kvtier.index.base import (
    AREAS,
    MAX_AREAS,
    MAX_WORKERS,
    Columns,
    Edits,
    Hashes,
    IndexArea,
    Op,
    StorageTier,
    TableStats,
    tiers_of,
)
from kvtier.index.compiled import blocks
from kvtier.index.compiled.cells import (
    AGAIN,
    CLOSED,
    DEAD,
    DROPPED,
    FREE,
    MAX_SEGMENTS,
    SEGMENTS,
    UNKNOWN,
    USED,
    Cells,
    words_of,
)

_FIRST_SETS = 64
_SEGMENT_BYTES = Cells.segment_bytes(blocks.WIDTH)
# A set's reference count, alias, two positions in `intern`, and entry of the free list; its row is extra.
_SET_BYTES = 8 + 4 + 2 * 4 + 4


class CompiledTable:
    """A table of arrays. See `kvtier.index.base.Table`."""

    form = "numba"

    def __init__(self, budget: int) -> None:
        """Reserve address space for `budget` bytes and take the first few of them."""
        self._budget = budget
        self._cells = Cells.reserve(budget // _SEGMENT_BYTES, blocks.WIDTH)
        self._meta = self._cells.meta
        self.areas = [IndexArea(StorageTier(number), 0) for number in range(AREAS)]
        self._needed = np.zeros((2, MAX_AREAS, 1), np.uint64)  # for a block, and for the end of a prefix
        self._held = np.zeros((64, MAX_AREAS + 1), np.int64)
        self._words = 1
        self._refs = np.zeros(1, np.int64)
        self._make_sets(_FIRST_SETS, np.zeros((1, AREAS, 1), np.uint64))

    # -- shape -------------------------------------------------------------------------------------

    def grow(self, workers: int) -> bool:
        have = len(self._held)
        if workers <= have:
            return True
        wanted = max(-(-workers // 64) * 64, min(2 * have, MAX_WORKERS))
        if workers > MAX_WORKERS or not self._fits(self._room, len(self.areas), wanted // 64):
            return False
        held = np.zeros((wanted, MAX_AREAS + 1), np.int64)
        held[:have] = self._held
        needed = np.zeros((2, MAX_AREAS, wanted // 64), np.uint64)
        needed[:, :, : self._words] = self._needed
        rows = self._grid()
        self._held, self._needed, self._words = held, needed, wanted // 64
        self._make_sets(self._room, rows)
        return True

    def add_area(self, area: IndexArea) -> int | None:
        number = len(self.areas)
        if number == MAX_AREAS or not self._fits(self._room, number + 1, self._words):
            return None
        rows = self._grid()
        self.areas.append(area)
        self._make_sets(self._room, rows)
        return number

    def require(self, worker: int, groups: int, states: int = 0) -> None:
        word, bit = worker >> 6, np.uint64(1 << (worker & 63))
        for needed, bits in zip(self._needed, (groups, states), strict=True):
            for group in range(MAX_AREAS):
                needed[group, word] &= ~bit
                if bits >> group & 1:
                    needed[group, word] |= bit

    @property
    def _room(self) -> int:
        """The number of set numbers, including 0, the empty set."""
        return len(self._refs)

    def _grid(self) -> npt.NDArray[np.uint64]:
        """Return the sets' rows as `[set, area, word]`."""
        return self._rows[: self._room].reshape(self._room, len(self.areas), self._words)

    def _sets_bytes(self, room: int, areas: int, words: int) -> int:
        workers = words * (64 * (MAX_AREAS + 1) * 8 + 2 * MAX_AREAS * 8)
        return room * _SET_BYTES + (room + 1) * areas * words * 8 + workers

    def _fits(self, room: int, areas: int, words: int) -> bool:
        """Return whether sets of that shape fit beside the present ones."""
        return self._bytes() + self._sets_bytes(room, areas, words) <= self._budget

    def _make_sets(self, room: int, rows: npt.NDArray[np.uint64]) -> None:
        """Allocate sets in the present shape, and copy the existing rows."""
        self._areas = np.array(self.areas, np.int64)
        areas, words = len(self.areas), self._words
        have, old_areas, old_words = rows.shape
        grid = np.zeros((room + 1, areas, words), np.uint64)  # the last row is scratch
        grid[:have, :old_areas, :old_words] = rows
        refs = np.zeros(room, np.int64)
        refs[:have] = self._refs
        self._rows, self._refs = grid.reshape(room + 1, areas * words), refs
        self._alias, self._free = np.zeros(room, np.uint32), np.zeros(room, np.uint32)
        self._intern = np.zeros(2 * room, np.uint32)
        self._meta[MAX_SEGMENTS] = (self._budget - self._sets_bytes(room, areas, words)) // _SEGMENT_BYTES
        self._intern_all()

    def _intern_all(self) -> None:
        blocks.intern_all(self._meta, self._rows, self._refs, self._alias, self._intern, self._free)

    def _more_sets(self) -> None:
        """Provide numbers for new sets: unused ones, else more; close the table if the budget is spent."""
        self._intern_all()
        if self._meta[FREE] >= self._room // 4:
            return
        if self._fits(2 * self._room, len(self.areas), self._words):
            self._make_sets(2 * self._room, self._grid())
        elif not self._meta[FREE]:
            self._meta[CLOSED] = 1

    # -- changes -----------------------------------------------------------------------------------

    @property
    def _state(self) -> tuple[npt.NDArray[Any], ...]:
        return (*self._cells, self._rows, self._refs, self._alias, self._intern, self._free, self._held)

    def apply(
        self, worker: int, edits: Edits, hashes: Hashes, unique: bool = False
    ) -> tuple[int, int] | None:
        edit, done = 0, 0
        while edit < len(edits):
            edit, done = blocks.apply(*self._state, worker, edits, hashes, edit, done, unique)
            if edit == len(edits):
                break
            if edits[edit, 0] == Op.CLEARED:
                self.clear(worker)
                edit, done = edit + 1, 0
            elif self._meta[AGAIN]:
                self._meta[AGAIN] = 0
                return edit, done
            else:
                self._more_sets()
        return None

    def store(self, worker: int, area: int, hashes: Hashes) -> npt.NDArray[np.bool_]:
        fresh = np.zeros(len(hashes), np.bool_)
        start = 0
        while (
            start := blocks.store(*self._state, worker, area, hashes, start, len(hashes), fresh, False)
        ) < len(hashes):
            self._more_sets()
        return fresh

    def refuse(self, worker: int, count: int) -> None:
        self._meta[DROPPED] += count
        self._held[worker, MAX_AREAS] += count

    def clear(self, worker: int) -> None:
        self._held[worker] = 0
        self._meta[CLOSED] = 0
        self._grid()[:, :, worker >> 6] &= ~np.uint64(1 << (worker & 63))
        self._intern_all()

    # -- questions ---------------------------------------------------------------------------------

    def match(self, hashes: Hashes) -> Columns:
        out = np.zeros((len(self._held), 7), np.int32)
        blocks.match(*self._cells[:3], self._rows, self._alias, self._areas, self._needed, hashes, out)
        return out

    @property
    def holders_state(self) -> tuple[Any, ...]:
        """The arguments of `blocks.holds_one` for this table."""
        return (*self._cells[:3], self._rows, self._alias, self._words)

    def holds(self, worker: int, hashes: Hashes) -> npt.NDArray[np.bool_]:
        numbers = blocks.find_all(*self._cells[:3], self._alias, hashes)
        bits = np.bitwise_or.reduce(self._grid()[numbers, :, worker >> 6], axis=1)
        found: npt.NDArray[np.bool_] = (bits >> np.uint64(worker & 63)) & np.uint64(1) != 0
        return found

    def holdings(self) -> int:
        return int(self._held[:, :MAX_AREAS].sum())

    def held(self, worker: int) -> list[int]:
        counts: list[int] = self._held[worker, : len(self.areas)].tolist()
        return counts

    def dropped(self, worker: int) -> int:
        return int(self._held[worker, MAX_AREAS])

    def hashes(self) -> Iterator[Hashes]:
        for part in self._cells.parts(blocks.WIDTH):
            yield words_of(part, 0)

    def usable(self, hashes: Hashes) -> list[Mapping[int, int]]:
        numbers = blocks.find_all(*self._cells[:3], self._alias, hashes).tolist()
        on = {number: self._tiers_of(number) for number in set(numbers)}
        return [on[number] for number in numbers]

    def _tiers_of(self, number: int) -> dict[int, int]:
        """Return the workers of a set that hold its blocks on any tier, and the tiers (one bit each)."""
        return tiers_of(self._holders(number), self._needs, self.areas)

    def _needs(self, worker: int) -> int:
        bits = (self._needed[0, :, worker >> 6] >> np.uint64(worker & 63)) & np.uint64(1)
        return sum(int(bit) << group for group, bit in enumerate(bits))

    def _holders(self, number: int) -> list[tuple[int, int]]:
        bits = np.unpackbits(self._grid()[number].view(np.uint8), axis=1, bitorder="little")
        return [(int(worker), int(area)) for area, worker in zip(*np.nonzero(bits), strict=True)]

    def _bytes(self) -> int:
        return int(self._meta[SEGMENTS]) * _SEGMENT_BYTES + self._sets_bytes(
            self._room, len(self.areas), self._words
        )

    def stats(self) -> TableStats:
        meta = self._meta
        sets = int(np.count_nonzero(self._refs))
        return TableStats(
            int(meta[USED] - meta[DEAD]),
            sets,
            self._bytes(),
            self._budget,
            int(meta[DROPPED]),
            int(meta[UNKNOWN]),
        )

    def check(self) -> None:
        parts = list(self._cells.parts(blocks.WIDTH))
        keys = np.concatenate([words_of(part, 0) for part in parts])
        numbers = np.concatenate([part[:, 2] for part in parts])
        meta, alias = self._meta, self._alias
        found = blocks.find_all(*self._cells[:3], alias, keys)
        counted = np.zeros_like(self._held[:, :MAX_AREAS])
        for number, count in zip(*np.unique(alias[numbers], return_counts=True), strict=True):
            for worker, area in self._holders(int(number)):
                counted[worker, area] += count
        wrong = {
            "entries": len(keys) != meta[USED],
            "a hash twice": len(np.unique(keys)) != len(keys),
            "dead entries": np.count_nonzero(alias[numbers] == 0) != meta[DEAD],
            "segment fills": not self._cells.fills(blocks.WIDTH),
            "a hash in the wrong cell": (found != alias[numbers]).any(),
            "reference counts": (np.bincount(numbers, minlength=self._room) != self._refs).any(),
            "blocks per worker": (counted != self._held[:, :MAX_AREAS]).any(),
            "bytes": self._bytes() > self._budget,
        }
        if any(wrong.values()):
            raise IntegrityError(
                f"index table: wrong {', '.join(name for name, bad in wrong.items() if bad)}"
            )
