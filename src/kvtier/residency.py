"""What a cache holds, and why it lacks a chunk: words that the pool, the tiers and the events share.

Every part that holds chunks reports its changes as `OffloadingEvent`, and the reason of every miss as
`MissReason`. `BoundedKeyMap` remembers such reasons for the most recent keys. Only `kvtier.keys` is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Generic, TypeVar

from kvtier.keys import OffloadKey

MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"
"""The words for the pool and for the tiers below it in events."""


@dataclass(slots=True)
class OffloadingEvent:
    """Chunks that became loadable in a tier, or (`removed`) that are no longer loadable."""

    keys: list[OffloadKey]
    medium: str
    removed: bool
    descriptions: tuple[bytes, ...] | None = None
    """The tier's own description of each chunk, if there is no other: after a restart. An empty entry means
    that the tier does not have it either.
    """


class MissReason(Enum):
    """The reason why a chunk cannot be loaded, or why a row was not moved."""

    NEVER_STORED = "never stored"
    EVICTED = "evicted"
    REFUSED = "refused"
    """It was not written: the queue was full, the slot was needed first, or the write limit was reached."""
    WRITING = "still being written"
    FAILED = "failed its check"
    CLEARED = "cleared by a reset"
    NOT_WORTH_LOADING = "not worth loading"
    IO_FAILED = "could not be read or written"
    TOO_SLOW = "too slow"
    SUSPENDED = "suspended"
    NOT_OPEN = "not open yet"
    """The namespace is not known, records are being read, or another process is the owner."""
    NAMESPACE_UNKNOWN = "namespace not known yet"
    LOST = "lost with its files"
    NO_ROOM = "no room in the pool to promote it"
    LIMITED = "beyond what the request may load"
    AUDITED = "computed for an audit"
    NO_STATE = "no state at this boundary"
    """The attention layers have their chunks, but a recurrent layer's state was never stored there."""
    STALE_PREFIX = "follows KV of before a reset"


V = TypeVar("V")


class BoundedKeyMap(Generic[V]):
    """Maps the `limit` keys that were recorded last, or up to an eighth more, to a value each.

    It is trimmed in batches: removing the first key of a dict again and again would walk over ever more
    holes. One thread at a time.
    """

    get: Callable[[OffloadKey], V | None]
    """Return the last value of a key; `None` if there is none or it was trimmed. This is the dict's own."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[OffloadKey, V] = {}
        self.get = self._values.get

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._values)

    def record(self, keys: Iterable[OffloadKey], value: V) -> None:
        """Record one value for these keys."""
        self.update(dict.fromkeys(keys, value))

    def update(self, values: dict[OffloadKey, V], *, renew: bool = True) -> None:
        """Record a value for each key. Without `renew`, which is faster, known keys keep their age."""
        if renew:
            for key in values:
                self._values.pop(key, None)
        self._values.update(values)
        excess = len(self._values) - self._limit
        if excess > self._limit // 8:
            for key in list(islice(self._values, excess)):
                del self._values[key]

    def clear(self) -> None:
        """Remove all keys."""
        self._values.clear()
