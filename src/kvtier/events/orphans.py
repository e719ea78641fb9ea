"""Stores that came before their parent wait here instead of being lost.

A block can be matched only behind its parent, so a store whose parent is unknown is of no use yet: a tree of blocks has
no place for it. `Orphans` keeps such stores, one block each, until the parent shows up. It is bounded: when it is full
the one that waited longest is dropped and counted. `OrphanFilter` does this for one publisher's events: what it lets
through has every parent before its children.

Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from kvtier.errors import IntegrityError
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, blocks_of
from kvtier.events.wire import Place, place_of, to_u64

__all__ = ["OrphanFilter", "Orphans"]

T = TypeVar("T")
KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Orphans(Generic[T]):
    """Items that wait for a parent, first in first out. An item has a key, by which it can be taken back."""

    def __init__(self, limit: int = 100_000) -> None:
        """Keep at most `limit` items."""
        self.limit = limit
        self.dropped = 0
        self._items: dict[int, tuple[int, Hashable, T]] = {}  # by ticket, in order of arrival
        self._by_parent: dict[int, dict[int, None]] = {}
        self._by_key: dict[Hashable, dict[int, None]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._items)

    def park(self, parent: int, key: Hashable, item: T) -> None:
        """Keep `item` until `parent` is there; drops the oldest where there is no room."""
        self._tickets += 1
        self._items[self._tickets] = parent, key, item
        self._by_parent.setdefault(parent, {})[self._tickets] = None
        self._by_key.setdefault(key, {})[self._tickets] = None
        while len(self._items) > self.limit:
            self._take(next(iter(self._items)))
            self.dropped += 1

    def release(self, parent: int) -> list[T]:
        """Take out and return all that waits for `parent`, oldest first."""
        return [self._take(ticket) for ticket in list(self._by_parent.get(parent, ()))]

    def discard(self, key: Hashable) -> bool:
        """Drop the oldest item of that key; return whether there was one."""
        tickets = self._by_key.get(key)
        if not tickets:
            return False
        self._take(next(iter(tickets)))
        return True

    def clear(self) -> None:
        """Drop everything."""
        self._items.clear()
        self._by_parent.clear()
        self._by_key.clear()

    def _take(self, ticket: int) -> T:
        parent, key, item = self._items.pop(ticket)
        for index, name in ((self._by_parent, parent), (self._by_key, key)):
            tickets = index[name]  # type: ignore[index]
            del tickets[ticket]
            if not tickets:
                del index[name]  # type: ignore[arg-type]
        return item

    def check(self) -> None:
        """Raise `IntegrityError` unless every item is found by its parent and by its key, and nothing else is."""
        expected = {ticket: (parent, key) for ticket, (parent, key, _) in self._items.items()}
        by_parent = {ticket: parent for parent, tickets in self._by_parent.items() for ticket in tickets}
        by_key = {ticket: key for key, tickets in self._by_key.items() for ticket in tickets}
        if expected != {ticket: (by_parent.get(ticket), by_key.get(ticket)) for ticket in by_parent | by_key}:
            raise IntegrityError(
                f"orphans: {len(expected)} items, but {len(by_parent)} by parent, {len(by_key)} by key"
            )
        if len(expected) > self.limit:
            raise IntegrityError(f"orphans: {len(expected)} items, at most {self.limit} allowed")


class OrphanFilter:
    """Puts one publisher's events in an order in which every parent comes before its children.

    It remembers which hashes are held, at about a hundred bytes each.
    """

    def __init__(self, limit: int = 100_000) -> None:
        """Let at most `limit` blocks wait."""
        self.waiting: Orphans[BlockStored] = Orphans(limit)
        self.parked = 0
        self._held: dict[int, int] = {}  # hash -> in how many places, or copies

    def admit(self, events: Iterable[KVEvent]) -> list[KVEvent]:
        """Return what can be applied now: `events` less those that must wait, plus those that waited for them."""
        return [admitted for event in events for admitted in self._admit(event)]

    def clear(self) -> None:
        """Forget what is held and what waits."""
        self._held.clear()
        self.waiting.clear()

    def _admit(self, event: KVEvent) -> Iterator[KVEvent]:
        if isinstance(event, BlockStored):
            yield from self._store(event)
        elif isinstance(event, BlockRemoved):
            yield from self._remove(event)
        else:
            self.clear()
            yield event

    def _store(self, event: BlockStored) -> Iterator[BlockStored]:
        parent = event.parent_block_hash
        if parent is not None and to_u64(parent) not in self._held:
            self._park(event)
            return
        ready = [event]
        while ready:
            stored = ready.pop()
            yield stored
            hashes = [to_u64(each) for each in stored.block_hashes]
            for each in hashes:
                self._held[each] = self._held.get(each, 0) + 1
            ready.extend(child for each in hashes for child in self.waiting.release(each))

    def _park(self, event: BlockStored) -> None:
        """Park every block on its own, behind the one before it: any of them may be removed meanwhile."""
        place = place_of(event)
        for i in range(len(event.block_hashes)):
            block = blocks_of(event, i, i + 1)
            assert block.parent_block_hash is not None
            self.waiting.park(to_u64(block.parent_block_hash), _key(place, block.block_hashes[0]), block)
            self.parked += 1

    def _remove(self, event: BlockRemoved) -> Iterator[BlockRemoved]:
        place = place_of(event)
        gone = [each for each in event.block_hashes if not self.waiting.discard(_key(place, each))]
        for each in map(to_u64, gone):
            left = self._held.get(each, 0) - 1
            if left > 0:
                self._held[each] = left
            else:
                self._held.pop(each, None)
        if len(gone) == len(event.block_hashes):
            yield event
        elif gone:
            yield BlockRemoved(gone, event.medium, event.group_idx, event.locality, event.ownership)

    def check(self) -> None:
        """Raise `IntegrityError` where something waits for a block that is held."""
        self.waiting.check()
        if late := [parent for parent in self.waiting._by_parent if parent in self._held]:
            raise IntegrityError(f"orphans: {len(late)} parents are held, and their children still wait")


def _key(place: Place, block_hash: bytes | int) -> tuple[Place, int]:
    return place, to_u64(block_hash)
