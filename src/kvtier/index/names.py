"""What each worker's engine calls the blocks of an index whose keys are hashes of tokens.

Removals and parents name blocks by the engine's hash. A name is remembered as long as the worker holds the block, and a
little longer: names of blocks that are gone are tidied away when they become as many as the others. A book of names is
bounded; what does not fit is refused. Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvtier.index.base import Hashes, Table

__all__ = ["SLACK", "Names", "PlainNames"]

_NAME_BYTES = 192  # two ints and their place in a dict that has just doubled
SLACK = 4096
"""How many names of blocks that are gone never matter."""


class Names(Protocol):
    """Engine hashes and the keys they stand for, per worker."""

    def get(self, worker: int, engine_hash: int) -> int | None:
        """Return the key that a worker calls by this hash."""

    def put(self, worker: int, hashes: Sequence[int], keys: Hashes) -> bool:
        """Remember names; `False` where there is no room for all of them."""

    def clear(self, worker: int) -> None:
        """Forget a worker's names."""

    def tidy(self) -> None:
        """Forget names of blocks that are gone, if they are many. Call it only between batches."""

    def sweep(self) -> None:
        """Forget all names of blocks that are gone."""

    def items(self, worker: int) -> dict[int, int]:
        """Return a worker's names: engine hash to key."""

    def bytes(self) -> int:
        """Return how many bytes the names take."""


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
            self.sweep()
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
            for engine_hash in [each for each, is_held in zip(names, held.tolist(), strict=True) if not is_held]:
                del names[engine_hash]
        self._count = sum(map(len, self._names.values()))

    def items(self, worker: int) -> dict[int, int]:
        return dict(self._names.get(worker, {}))

    def bytes(self) -> int:
        return self._count * _NAME_BYTES
