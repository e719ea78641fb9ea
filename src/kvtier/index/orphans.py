"""Stores that came before their parent wait here instead of being lost.

A block is named by its tokens and its parent's key, so a store whose parent is unknown has no key yet.
`Orphans` keeps such stores, one block each, until the parent shows up. It is bounded, in number and by an
allowance of bytes that other workers share: when it is full the one of this worker that waited longest is
dropped and counted.

Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from kvtier.errors import IntegrityError
from kvtier.index.duplicates import Allowance

__all__ = ["Orphans"]

T = TypeVar("T")
Tickets = dict[Any, int | dict[int, None]]
"""Tickets by parent or by key; nearly always there is one of them, which needs no dict."""


class _Orphan(NamedTuple, Generic[T]):
    parent: int
    key: Hashable
    item: T
    size: int


class Orphans(Generic[T]):
    """Items that wait for a parent, first in first out. An item has a key, by which it can be taken back."""

    def __init__(self, limit: int = 100_000, allowance: Allowance | None = None) -> None:
        """Keep at most `limit` items, and no more bytes than the allowance has left."""
        self.limit = limit
        self.dropped = 0
        self._allowance = allowance or Allowance(1 << 62)
        self._items: dict[int, _Orphan[T]] = {}  # by ticket, in order of arrival
        self._by_parent: Tickets = {}
        self._by_key: Tickets = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._items)

    def park(self, parent: int, key: Hashable, item: T, size: int = 0) -> None:
        """Keep `item`, which takes `size` bytes, until `parent` is there; the oldest make room."""
        while self._items and (len(self._items) >= self.limit or not self._has_room(size)):
            self._take(next(iter(self._items)))
            self.dropped += 1
        if len(self._items) >= self.limit or not self._allowance.take(size):
            self.dropped += 1
            return
        self._tickets += 1
        self._items[self._tickets] = _Orphan(parent, key, item, size)
        _add(self._by_parent, parent, self._tickets)
        _add(self._by_key, key, self._tickets)

    def _has_room(self, size: int) -> bool:
        return self._allowance.used + size <= self._allowance.limit

    def release(self, parent: int) -> list[T]:
        """Take out and return all that waits for `parent`, oldest first."""
        return [self._take(ticket) for ticket in _tickets(self._by_parent, parent)]

    def discard(self, key: Hashable) -> bool:
        """Drop the oldest item of that key; return whether there was one."""
        found = self._by_key.get(key)
        if found is None:
            return False
        self._take(found if isinstance(found, int) else next(iter(found)))
        return True

    def clear(self) -> None:
        """Drop everything, and forget what was dropped before."""
        self._allowance.give(self.bytes())
        self._items.clear()
        self._by_parent.clear()
        self._by_key.clear()
        self.dropped = 0

    def keys(self) -> set[Hashable]:
        """Return the keys of all that waits."""
        return set(self._by_key)

    def bytes(self) -> int:
        """Return what is taken of the allowance."""
        return sum(orphan.size for orphan in self._items.values())

    def _take(self, ticket: int) -> T:
        orphan = self._items.pop(ticket)
        _drop(self._by_parent, orphan.parent, ticket)
        _drop(self._by_key, orphan.key, ticket)
        self._allowance.give(orphan.size)
        return orphan.item

    def check(self) -> None:
        """Raise `IntegrityError` unless every item is found by its parent and by its key, and nothing else
        is.
        """
        expected = {ticket: (orphan.parent, orphan.key) for ticket, orphan in self._items.items()}
        by_parent = {
            ticket: parent for parent in self._by_parent for ticket in _tickets(self._by_parent, parent)
        }
        by_key = {ticket: key for key in self._by_key for ticket in _tickets(self._by_key, key)}
        if expected != {
            ticket: (by_parent.get(ticket), by_key.get(ticket)) for ticket in by_parent | by_key
        }:
            raise IntegrityError(
                f"orphans: {len(expected)} items, but {len(by_parent)} by parent, {len(by_key)} by key"
            )
        if len(expected) > self.limit:
            raise IntegrityError(f"orphans: {len(expected)} items, at most {self.limit} allowed")


def _tickets(index: Tickets, name: Hashable) -> list[int]:
    found = index.get(name, {})
    return [found] if isinstance(found, int) else list(found)


def _add(index: Tickets, name: Hashable, ticket: int) -> None:
    found = index.get(name)
    if found is None:
        index[name] = ticket
    elif isinstance(found, int):
        index[name] = {found: None, ticket: None}
    else:
        found[ticket] = None


def _drop(index: Tickets, name: Hashable, ticket: int) -> None:
    found = index[name]
    if isinstance(found, dict) and len(found) > 1:
        del found[ticket]
    else:
        del index[name]
