"""The names that each worker's engine has for the blocks of an index whose keys are hashes of tokens.

Removals and parents name blocks by the engine's hash. A name is remembered as long as the worker holds the
block, and a little longer: names of removed blocks are swept when there are as many as others. A book of
names is bounded; names that do not fit are refused. Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError
from kvtier.index.base import Hashes, Table

SLACK = 4096
"""A number of stale names that never matters."""
_NAME_BYTES = 192  # two ints and their place in a dict that has just doubled
_PART = 1024  # names per part


class NamePart(NamedTuple):
    """Some names: their workers, the engine's hashes of the blocks, and the keys."""

    workers: npt.NDArray[np.uint32]
    hashes: Hashes
    keys: Hashes


def parts_of(worker: int, hashes: Sequence[int], key_of: Callable[[int], int | None]) -> Iterator[NamePart]:
    """Yield a worker's names in parts; `key_of` gives the key at that time, and `None` leaves a name out."""
    for start in range(0, len(hashes), _PART):
        keys = [(name, key_of(name)) for name in hashes[start : start + _PART]]
        found = np.array([(name, key) for name, key in keys if key is not None], np.uint64).reshape(-1, 2)
        yield NamePart(np.full(len(found), worker, np.uint32), found[:, 0].copy(), found[:, 1].copy())


class Names(Protocol):
    """Engine hashes and the keys they stand for, per worker."""

    def get(self, worker: int, engine_hash: int) -> int | None:
        """Return the key that a worker's engine names by this hash."""

    def put(self, worker: int, hashes: Sequence[int], keys: Hashes) -> bool:
        """Store names; `False` if there is no room for all, until a `sweep` makes room."""

    def clear(self, worker: int) -> None:
        """Forget a worker's names."""

    def tidy(self) -> None:
        """Forget names of removed blocks, if there are many. Call it only between batches."""

    def sweep(self) -> None:
        """Forget all names of removed blocks. The table must already hold every block named before."""

    def parts(self) -> Iterator[NamePart]:
        """Yield all names in parts. The book may change meanwhile: a name that stays comes once."""

    def bytes(self) -> int:
        """Return how many bytes the names take."""

    def check(self) -> None:
        """Raise `IntegrityError` if the book contradicts itself."""


class PlainNames:
    """Names in dicts."""

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
