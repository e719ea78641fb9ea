"""What a publisher has published: which blocks consumers hold now, and the events that told them so.

The stream is set-like: per place (medium, group, ownership, locality) a block goes out as stored when its count leaves 0
and as removed when it returns there. An event that is known in part goes out in parts. The state keeps one record per event
that went out, under a number: its bytes, and its parent's hash. A snapshot is those bytes again, parent before child. Each
place has a table of the numbers of its blocks.

A removed block that others still hang from is a *ghost*: its record stays, so that a snapshot can give tree-building consumers
the way to its children. Ghosts are counted, bounded, and leave with their last child. `blocks` and `digest` always equal the
sum of `change_of` over all that went out. Records refer to each other by hash only: chains of any length are freed flat, and
nothing here costs the garbage collector a visit. One thread owns a state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Protocol

import msgspec

from kvtier.errors import IntegrityError
from kvtier.events.publish.hot import BlockTable, PythonBlocks, python_read_stored, read_stored, sum_of
from kvtier.events.types import BlockRemoved, BlockStored, ExternalBlockHash, blocks_of
from kvtier.events.wire import U64, EventEncoder, Place, hash_sum, place_of, place_weight

__all__ = ["Holding", "PublishedState", "Record"]

_REMOVED_AT_ONCE = 4096
_where = attrgetter("medium", "group_idx", "ownership", "locality")
_LEAST_GHOSTS = 10_000


class Out(Protocol):
    """Where events go that are news: a message, or a list."""

    def append(self, data: bytes, /) -> None:
        """Add an event."""


class Record(msgspec.Struct, gc=False, eq=False):
    """An event of `size` blocks that went out as stored, with its bytes, or a piece of a message that has them.

    `uses` counts the blocks that are held or ghosts.
    """

    number: int
    place: Place
    data: bytes
    parent: ExternalBlockHash | None
    size: int
    uses: int

    def hashes(self) -> list[ExternalBlockHash]:
        """Read the hashes of all its blocks, held or not; they are nowhere else."""
        found = read_stored(self.data)
        return python_read_stored(self.data) if found is None else found


class Holding:
    """The blocks of one place: each with its record's number, and with its count where that is more than 1."""

    __slots__ = ("blocks", "counts", "like", "place", "weight")

    def __init__(self, event: BlockStored | BlockRemoved, blocks: BlockTable) -> None:
        self.place = place_of(event)
        self.weight = place_weight(self.place)
        self.like = BlockRemoved([], event.medium, event.group_idx, event.locality, event.ownership)
        self.blocks = blocks
        self.counts: dict[ExternalBlockHash, int] = {}

    def removal(self, hashes: Sequence[ExternalBlockHash]) -> BlockRemoved:
        """Return the event that removes blocks from here."""
        return msgspec.structs.replace(self.like, block_hashes=list(hashes))

    def held(self, record: Record) -> Sequence[ExternalBlockHash]:
        """Return the blocks that a record holds here."""
        hashes, number = record.hashes(), record.number
        if self.blocks.count(hashes, number) == len(hashes):
            return hashes
        return [block for block in hashes if self.blocks.get(block) == number]


class PublishedState:
    """The set of published blocks, as a filter that events pass on their way out.

    `store`, `remove` and `clear_medium` take an event (with its bytes, where it has some) and append to `out` what of it is
    news. They raise before they change anything. `hot.Express` does the same for what is plain.
    """

    make_record = Record

    def __init__(
        self, encoder: EventEncoder, counting: str = "count", table: Callable[[], BlockTable] = PythonBlocks
    ) -> None:
        """Hold nothing. `counting` is `count` or `set`, see `KVEventsConfig`; a `table` must take all hashes that come."""
        self.blocks = 0
        self.digest = 0
        self._encoder = encoder
        self._counted = counting == "count"
        self._table = table
        self._records: dict[int, Record] = {}  # oldest first
        self._free: list[int] = []  # numbers that were given back
        self._by_event: dict[tuple[object, ...], Holding] = {}
        self._holdings: dict[Place, Holding] = {}
        self._children = table()  # how many records hang from a block
        self._ghosts: dict[ExternalBlockHash, Record] = {}

    # -- events ------------------------------------------------------------------------------------------------------

    def store(self, event: BlockStored, data: bytes, out: Out) -> None:
        """Take blocks in; `data` is the whole event's bytes."""
        hashes = tuple(event.block_hashes)
        if not hashes:
            return
        holding = self._holding(event)
        if self._add(holding, hashes, event.parent_block_hash, data):
            out.append(data)
        else:  # some are held, or named twice
            for part in self._store_new(holding, event):
                out.append(part)

    def _store_new(self, holding: Holding, event: BlockStored) -> list[bytes]:
        """Take in the blocks of an event that are new, each once; count the others."""
        new, again = [], []
        met: set[ExternalBlockHash] = set()
        for place, each in enumerate(event.block_hashes):
            if each in met or holding.blocks.get(each):
                again.append(each)
            else:
                met.add(each)
                new.append(place)
        parts = self._parts(event, new)
        for part, data in parts:
            self._add(holding, tuple(part.block_hashes), part.parent_block_hash, data)
        if self._counted:
            for each in again:
                holding.counts[each] = holding.counts.get(each, 1) + 1
        return [data for _, data in parts]

    def _parts(self, event: BlockStored, wanted: list[int]) -> list[tuple[BlockStored, bytes]]:
        """Return the event's blocks at the wanted places as events of their own, one for each run, with their bytes."""
        parts = [blocks_of(event, start, stop) for start, stop in runs(wanted)]
        return [(part, self._encoder.event(part)) for part in parts]

    def _add(
        self,
        holding: Holding,
        hashes: tuple[ExternalBlockHash, ...],
        parent: ExternalBlockHash | None,
        data: bytes,
    ) -> bool:
        """Make a record of blocks if all of them are new; return whether they were."""
        number = self._free[-1] if self._free else len(self._records) + 1
        siblings = 0 if parent is None else self._children.get(parent)
        total = holding.blocks.hold(hashes, number)
        if total is None:
            return False
        if self._free:
            self._free.pop()
        self._records[number] = Record(number, holding.place, data, parent, len(hashes), len(hashes))
        self.blocks += len(hashes)
        self.digest = (self.digest + total * holding.weight) & U64
        if parent is not None:
            self._children.put(parent, siblings + 1)
        if self._ghosts and not self._ghosts.keys().isdisjoint(hashes):
            for each in hashes:
                ghost = self._ghosts.pop(each, None)
                if ghost is not None:
                    self._unuse(ghost)
        return True

    def remove(self, event: BlockRemoved, data: bytes, out: Out) -> None:
        """Let blocks go; `data` is the whole event's bytes."""
        holding = self._holding(event)
        hashes = event.block_hashes if type(event.block_hashes) is list else list(event.block_hashes)
        counted = holding.counts and not holding.counts.keys().isdisjoint(hashes)
        found = None if counted else holding.blocks.drop(hashes, self._children)
        if found is None:
            sum_of(hashes)  # raises for what is none before anything changes
            gone = [block for block in hashes if self._drop(holding, block)]
            total = sum_of(gone)
        else:
            total, gone, runs_of_numbers = found
            for number, times in runs_of_numbers:
                self._unuse(self._records[number], times)
        if not gone:
            return
        if len(gone) != len(hashes):
            data = self._encoder.event(msgspec.structs.replace(event, block_hashes=gone))
        self.blocks -= len(gone)
        self.digest = (self.digest - total * holding.weight) & U64
        out.append(data)

    def _drop(self, holding: Holding, block: ExternalBlockHash) -> bool:
        """Take one from a block's count and return whether that was the last."""
        if holding.counts and block in holding.counts:
            left = holding.counts.pop(block) - 1
            if left > 1:
                holding.counts[block] = left
            return False
        number = holding.blocks.pop(block)
        if not number:
            return False
        record = self._records[number]
        if self._children.get(block) and not self._is_elsewhere(block):
            self._ghosts[block] = record
            self._bound_ghosts()
        else:
            self._unuse(record)
        return True

    def _is_elsewhere(self, block: ExternalBlockHash) -> bool:
        """Return whether some place holds a block that was just let go in another."""
        return len(self._holdings) > 1 and any(each.blocks.get(block) for each in self._holdings.values())

    def clear(self) -> None:
        """Hold nothing."""
        for holding in self._holdings.values():
            holding.blocks, holding.counts = self._table(), {}
        self._children = self._table()
        for kept in (self._ghosts, self._records, self._free):  # `Express` knows them
            kept.clear()
        self.blocks = self.digest = 0

    def clear_medium(self, medium: str, out: Out) -> None:
        """Let go all that a medium holds, as removals."""
        for holding in self._holdings.values():
            if holding.place[0] == medium:
                holding.counts.clear()
                names = iter(self.held(holding))
                while some := list(islice(names, _REMOVED_AT_ONCE)):
                    event = holding.removal(some)
                    self.remove(event, self._encoder.event(event), out)

    # -- what consumers were not told -----------------------------------------------------------------------------------

    def count_of(self, event: BlockStored | BlockRemoved, block: ExternalBlockHash) -> int:
        """Return how often a block is held where the event is."""
        holding = self._holding(event)
        return holding.counts.get(block, 1) if holding.blocks.get(block) else 0

    def set_count(self, event: BlockStored | BlockRemoved, block: ExternalBlockHash, count: int) -> None:
        """Set the count of a held block, 0 to let it go. Nothing goes out."""
        holding = self._holding(event)
        holding.counts.pop(block, None)
        if count == 0:
            self.remove(holding.removal([block]), b"", [])
        elif count > 1:
            holding.counts[block] = count

    def adopt(self, event: BlockStored, wanted: set[ExternalBlockHash]) -> None:
        """Take in those blocks of the event that are wanted and not held. Nothing goes out."""
        holding = self._holding(event)
        places, met = [], {block for block in wanted if holding.blocks.get(block)}
        for place, each in enumerate(event.block_hashes):
            if each in wanted and each not in met:
                met.add(each)
                places.append(place)
        for part, data in self._parts(event, places):
            self._add(holding, tuple(part.block_hashes), part.parent_block_hash, data)

    # -- reading ------------------------------------------------------------------------------------------------------

    def holdings(self) -> Iterable[Holding]:
        """Return what each place holds."""
        return self._holdings.values()

    def held(self, holding: Holding) -> list[ExternalBlockHash]:
        """Return all blocks of a place, those that were stored first mostly first."""
        records = [record for record in self._records.values() if record.place == holding.place]
        return [block for record in records for block in holding.held(record)]

    def records(self) -> dict[int, Record]:
        """Return all records by number, the oldest first."""
        return self._records

    def ghosts(self) -> dict[ExternalBlockHash, Record]:
        """Return the records of removed blocks that others hang from."""
        return self._ghosts

    def check(self) -> None:
        """Raise `IntegrityError` where counts, digest, records and ghosts do not agree."""
        held = {holding.place: self.held(holding) for holding in self._holdings.values()}
        _expect(sum(map(len, held.values())), self.blocks, "blocks held")
        for each in self._holdings.values():
            _expect(len(held[each.place]), len(each.blocks), f"blocks in {each.place}")
            _expect(each.counts.keys() - set(held[each.place]), set(), f"counts of absent blocks in {each.place}")
            _expect([n for n in each.counts.values() if n < 2], [], f"counts below 2 in {each.place}")
        _expect(sum(hash_sum(names) * place_weight(p) for p, names in held.items()) & U64, self.digest, "digest")
        uses = {n: len(self._holdings[record.place].held(record)) for n, record in self._records.items()}
        for ghost in self._ghosts.values():
            uses[ghost.number] = uses.get(ghost.number, 0) + 1
        _expect(uses, {n: record.uses for n, record in self._records.items()}, "uses of records")
        _expect(sorted([*uses, *self._free]), list(range(1, len(uses) + len(self._free) + 1)), "numbers")
        children = Counter(record.parent for record in self._records.values() if record.parent is not None)
        _expect({each: self._children.get(each) for each in children}, children, "children")
        _expect(len(self._children), len(children), "parents")
        _expect(self._ghosts.keys() - children.keys(), set(), "ghosts without children")
        _expect(
            self._ghosts.keys() & {block for names in held.values() for block in names}, set(), "ghosts that are held"
        )

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _holding(self, event: BlockStored | BlockRemoved) -> Holding:
        key = _where(event)
        holding = self._by_event.get(key)
        if holding is None:
            holding = self._holdings.setdefault(place_of(event), Holding(event, self._table()))
            self._by_event[key] = holding
        return holding

    def _unuse(self, record: Record, times: int = 1) -> None:
        """Take uses from a record; with its last use it lets its parent go, and so on up."""
        current: Record | None = record
        while current is not None:
            current.uses -= times
            times = 1
            if current.uses:
                return
            del self._records[current.number]
            self._free.append(current.number)
            parent = current.parent
            if parent is None:
                return
            left = self._children.get(parent) - 1
            if left > 0:
                self._children.put(parent, left)
                return
            self._children.pop(parent)
            current = self._ghosts.pop(parent, None)

    def _bound_ghosts(self) -> None:
        """Forget the oldest ghosts where there are more than blocks; their children are then orphans in a snapshot."""
        while len(self._ghosts) > max(self.blocks, _LEAST_GHOSTS):
            self._unuse(self._ghosts.pop(next(iter(self._ghosts))))


def runs(places: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield `[start, stop)` for each run of consecutive numbers."""
    start = stop = -1
    for place in places:
        if place != stop:
            if stop > start:
                yield start, stop
            start = place
        stop = place + 1
    if stop > start:
        yield start, stop


def _expect(found: object, kept: object, what: str) -> None:
    if found != kept:
        raise IntegrityError(f"published state: {what}: counted {found!r}, kept {kept!r}")
