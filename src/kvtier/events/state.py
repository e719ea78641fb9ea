"""What a publisher has published: which blocks consumers hold now, and the events that told them so.

The stream is set-like: per place (medium, group, ownership, locality) a block goes out as stored when its count leaves 0
and as removed when it returns there. An event that is known in part goes out in parts. The state keeps one record per event
that went out: its bytes, its hashes and its parent's hash. A snapshot is those bytes again, parent before child.

A removed block that others still hang from is a *ghost*: its record stays, so that a snapshot can give tree-building consumers
the way to its children. Ghosts are counted, bounded, and leave with their last child. `blocks` and `digest` always equal the
sum of `change_of` over all that went out. Records refer to each other by hash only: chains of any length are freed flat, and
nothing here costs the garbage collector a visit. One thread owns a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice

import msgspec

from kvtier.errors import IntegrityError
from kvtier.events.hot import drop_leaves, hold, sum_of
from kvtier.events.types import BlockRemoved, BlockStored, ExternalBlockHash, blocks_of
from kvtier.events.wire import U64, EventEncoder, Place, hash_sum, place_of, place_weight

__all__ = ["Holding", "PublishedState", "Record"]

_REMOVED_AT_ONCE = 4096
_LEAST_GHOSTS = 10_000


class Record(msgspec.Struct, gc=False, eq=False):
    """An event that went out as stored: the bytes `[start, stop)` of `data`. `uses` counts its blocks that are held or ghosts."""

    place: Place
    data: bytes
    hashes: tuple[ExternalBlockHash, ...]
    parent: ExternalBlockHash | None
    uses: int
    start: int
    stop: int

    def encoded(self) -> bytes:
        """Return the event's bytes."""
        return self.data[self.start : self.stop]


class Holding:
    """The blocks of one place: each with its record, and with its count where that is more than 1."""

    __slots__ = ("blocks", "counts", "like", "place", "weight")

    def __init__(self, event: BlockStored | BlockRemoved) -> None:
        self.place = place_of(event)
        self.weight = place_weight(self.place)
        self.like = BlockRemoved([], event.medium, event.group_idx, event.locality, event.ownership)
        self.blocks: dict[ExternalBlockHash, Record] = {}
        self.counts: dict[ExternalBlockHash, int] = {}

    def removal(self, hashes: Sequence[ExternalBlockHash]) -> BlockRemoved:
        """Return the event that removes blocks from here."""
        return msgspec.structs.replace(self.like, block_hashes=list(hashes))


class PublishedState:
    """The set of published blocks, as a filter that events pass on their way out.

    `store`, `remove` and `clear_medium` take an event (with its bytes, where it has some) and append to `out` what of it is
    news. They raise before they change anything.
    """

    def __init__(self, encoder: EventEncoder, counting: str = "count") -> None:
        """Hold nothing. `counting` is `count` or `set`, see `KVEventsConfig`."""
        self.blocks = 0
        self.digest = 0
        self._encoder = encoder
        self._counted = counting == "count"
        self._by_event: dict[tuple[object, ...], Holding] = {}
        self._holdings: dict[Place, Holding] = {}
        self._children: dict[ExternalBlockHash, int] = {}  # how many records hang from a block
        self._ghosts: dict[ExternalBlockHash, Record] = {}

    # -- events ------------------------------------------------------------------------------------------------------

    def store(self, event: BlockStored, data: bytes, out: list[bytes]) -> None:
        """Take blocks in; `data` is the whole event's bytes."""
        if self.store_whole(event, data, 0, len(data)):
            out.append(data)
        elif event.block_hashes:  # some are held, or named twice
            out += self._store_new(self._holding(event), event)

    def store_whole(self, event: BlockStored, data: bytes, start: int, stop: int) -> bool:
        """Take in the blocks of an event, whose bytes are `data[start:stop]`, if all are new; return whether they were."""
        hashes = tuple(event.block_hashes)
        if not hashes:
            return False
        holding = self._holding(event)
        record = Record(holding.place, data, hashes, event.parent_block_hash, len(hashes), start, stop)
        total = hold(holding.blocks, hashes, record)
        if total is None:
            return False
        self._admit(holding, record, total)
        return True

    def _store_new(self, holding: Holding, event: BlockStored) -> list[bytes]:
        """Take in the blocks of an event that are new, each once; count the others."""
        new, again = [], []
        met: set[ExternalBlockHash] = set()
        for place, each in enumerate(event.block_hashes):
            if each in met or each in holding.blocks:
                again.append(each)
            else:
                met.add(each)
                new.append(place)
        parts = self._parts(event, new)
        for part, data in parts:
            self._add(holding, part, data)
        if self._counted:
            for each in again:
                holding.counts[each] = holding.counts.get(each, 1) + 1
        return [data for _, data in parts]

    def _parts(self, event: BlockStored, wanted: list[int]) -> list[tuple[BlockStored, bytes]]:
        """Return the event's blocks at the wanted places as events of their own, one for each run, with their bytes."""
        parts = [blocks_of(event, start, stop) for start, stop in runs(wanted)]
        return [(part, self._encoder.event(part)) for part in parts]

    def _add(self, holding: Holding, event: BlockStored, data: bytes) -> None:
        hashes = tuple(event.block_hashes)
        record = Record(holding.place, data, hashes, event.parent_block_hash, len(hashes), 0, len(data))
        holding.blocks.update(dict.fromkeys(hashes, record))
        self._admit(holding, record, sum_of(hashes))

    def _admit(self, holding: Holding, record: Record, total: int) -> None:
        """Account for a record whose blocks are held now."""
        self.blocks += record.uses
        self.digest = (self.digest + total * holding.weight) & U64
        parent = record.parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        if self._ghosts and not self._ghosts.keys().isdisjoint(record.hashes):
            for each in record.hashes:
                ghost = self._ghosts.pop(each, None)
                if ghost is not None:
                    self._unuse(ghost)

    def remove(self, event: BlockRemoved, data: bytes, out: list[bytes]) -> None:
        """Let blocks go; `data` is the whole event's bytes."""
        holding = self._holding(event)
        hashes = event.block_hashes
        found = None if holding.counts else drop_leaves(holding.blocks, self._children, hashes)
        if found is None:
            total = sum_of(hashes)
            gone = [block for block in hashes if self._drop(holding, block)]
        else:
            total, gone = found[0], self._let_go(hashes, found[1])
        if not gone:
            return
        if len(gone) != len(hashes):
            data, total = self._encoder.event(msgspec.structs.replace(event, block_hashes=gone)), sum_of(gone)
        self.blocks -= len(gone)
        self.digest = (self.digest - total * holding.weight) & U64
        out.append(data)

    def _let_go(self, hashes: list[ExternalBlockHash], records: list[Record | None]) -> list[ExternalBlockHash]:
        """Account for blocks that nothing hung from, by the records that held them; return those that were held."""
        for record, same in groupby(records):
            if record is not None:
                self._unuse(record, len(list(same)))
        if None not in records:
            return hashes
        return [block for block, record in zip(hashes, records, strict=True) if record is not None]

    def _drop(self, holding: Holding, block: ExternalBlockHash) -> bool:
        """Take one from a block's count and return whether that was the last."""
        if holding.counts and block in holding.counts:
            left = holding.counts.pop(block) - 1
            if left > 1:
                holding.counts[block] = left
            return False
        record = holding.blocks.pop(block, None)
        if record is None:
            return False
        if block in self._children and not self._is_elsewhere(block):
            self._ghosts[block] = record
            self._bound_ghosts()
        elif record.uses > 1:
            record.uses -= 1
        else:
            self._unuse(record)
        return True

    def _is_elsewhere(self, block: ExternalBlockHash) -> bool:
        """Return whether some place holds a block that was just let go in another."""
        return len(self._holdings) > 1 and any(block in each.blocks for each in self._holdings.values())

    def clear(self) -> None:
        """Hold nothing."""
        for holding in self._holdings.values():
            holding.blocks, holding.counts = {}, {}
        self._children, self._ghosts = {}, {}
        self.blocks = self.digest = 0

    def clear_medium(self, medium: str, out: list[bytes]) -> None:
        """Let go all that a medium holds, as removals."""
        for holding in self._holdings.values():
            if holding.place[0] == medium:
                holding.counts.clear()
                names = iter(list(holding.blocks))
                while some := list(islice(names, _REMOVED_AT_ONCE)):
                    event = holding.removal(some)
                    self.remove(event, self._encoder.event(event), out)

    # -- what consumers were not told -----------------------------------------------------------------------------------

    def count_of(self, event: BlockStored | BlockRemoved, block: ExternalBlockHash) -> int:
        """Return how often a block is held where the event is."""
        holding = self._holding(event)
        return holding.counts.get(block, 1) if block in holding.blocks else 0

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
        places, met = [], set(holding.blocks.keys() & wanted)
        for place, each in enumerate(event.block_hashes):
            if each in wanted and each not in met:
                met.add(each)
                places.append(place)
        for part, data in self._parts(event, places):
            self._add(holding, part, data)

    # -- reading ------------------------------------------------------------------------------------------------------

    def holdings(self) -> Iterable[Holding]:
        """Return what each place holds."""
        return self._holdings.values()

    def ghosts(self) -> dict[ExternalBlockHash, Record]:
        """Return the records of removed blocks that others hang from."""
        return self._ghosts

    def check(self) -> None:
        """Raise `IntegrityError` where counts, digest, records and ghosts do not agree."""
        held = [holding for holding in self._holdings.values() if holding.blocks]
        _expect(sum(len(each.blocks) for each in held), self.blocks, "blocks held")
        _expect(sum(hash_sum(list(h.blocks)) * h.weight for h in held) & U64, self.digest, "digest")
        _expect(
            [h.place for h in self._holdings.values() if h.counts.keys() - h.blocks.keys()],
            [],
            "counts of absent blocks",
        )
        _expect([h.place for h in held if any(n < 2 for n in h.counts.values())], [], "counts below 2")
        uses: dict[int, int] = {}
        records: dict[int, Record] = {}
        for record in [r for h in held for r in h.blocks.values()] + list(self._ghosts.values()):
            uses[id(record)] = uses.get(id(record), 0) + 1
            records[id(record)] = record
        _expect([r.uses for r in records.values()], list(uses.values()), "uses of records")
        children: dict[ExternalBlockHash, int] = {}
        for record in records.values():
            if record.parent is not None:
                children[record.parent] = children.get(record.parent, 0) + 1
        _expect(children, self._children, "children")
        _expect(self._ghosts.keys() - self._children.keys(), set(), "ghosts without children")
        _expect([g for g in self._ghosts if any(g in h.blocks for h in held)], [], "ghosts that are held")

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _holding(self, event: BlockStored | BlockRemoved) -> Holding:
        key = (event.medium, event.group_idx, event.ownership, event.locality)
        holding = self._by_event.get(key)
        if holding is None:
            holding = self._holdings.setdefault(place_of(event), Holding(event))
            self._by_event[key] = holding
        return holding

    def _unuse(self, record: Record, times: int = 1) -> None:
        """Take uses from a record; with its last use it lets its parent go, and so on up."""
        current: Record | None = record
        while current is not None:
            current.uses -= times
            times = 1
            parent = current.parent
            if current.uses or parent is None:
                return
            left = self._children.get(parent, 0) - 1
            if left > 0:
                self._children[parent] = left
                return
            del self._children[parent]
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
