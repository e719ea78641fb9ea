"""`RecentKeys`: a value for each of the most recent keys. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from kvtier.keys import OffloadKey

__all__ = ["RecentKeys"]

V = TypeVar("V")


class RecentKeys(Generic[V]):
    """Remembers a value for each of the `limit` keys that were noted last, or an eighth more.

    Trimmed in batches: removing the first key of a dict again and again would walk over ever more holes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[OffloadKey, V] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._values)

    def note(self, keys: Iterable[OffloadKey], value: V) -> None:
        """Remember a value for these keys."""
        self.update(dict.fromkeys(keys, value))

    def update(self, values: dict[OffloadKey, V], *, renew: bool = True) -> None:
        """Remember a value for each key. Without `renew`, which is faster, known keys keep their age."""
        if renew:
            for key in values:
                self._values.pop(key, None)
        self._values.update(values)
        excess = len(self._values) - self._limit
        if excess > self._limit // 8:
            for key in list(islice(self._values, excess)):
                del self._values[key]

    def get(self, key: OffloadKey) -> V | None:
        """Return the last value; `None`: there is none, or it is too old."""
        return self._values.get(key)

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
