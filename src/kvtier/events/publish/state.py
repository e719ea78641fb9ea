"""What one rank of a publisher has published: which blocks consumers hold now, and the events that told them
so.

The stream is set-like: per place (medium, group, ownership, locality) a block goes out as stored when its
count leaves 0 and as removed when it returns there. An event that is known in part goes out in parts. The
state keeps one record per event that went out: its bytes, its hashes and its parent's hash. A snapshot is
those bytes again, parents first. Each place has `SHARDS` dicts that find a block's record: a dict stops all
threads while it grows, one of 700,000 blocks for 45 ms, each of these for less than one.

A removed block that others still hang from is a *ghost*: its record stays, so that a snapshot can give
tree-building consumers the way to its children. Ghosts are counted, bounded, and leave with their last
child. `blocks` and `digest` always equal the sum of `change_of` over all that went out. Between `freeze` and
`thaw` the tables can also be read as they were at `freeze`. One thread owns a state.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec.structs import replace

from kvtier.errors import IntegrityError
from kvtier.events.types import BlockRemoved, BlockStored, ExternalBlockHash, blocks_of
from kvtier.events.wire import U64, EventEncoder, Place, hash_sum, place_of, place_weight

__all__ = ["BlockMap", "Holding", "PublishedState", "Record", "runs"]

Hashes = Sequence[ExternalBlockHash]

SHARDS = 127  # a prime: shares no bits of a block's hash with the slots that the dicts choose by them
_LEAST_GHOSTS = 10_000
_SWEPT_AT_ONCE = 64
_UNCHANGED: Any = object()


class Record(msgspec.Struct, gc=False, eq=False):
    """An event that went out as stored. `uses` counts the blocks that are held or ghosts.

    `snapshot`, `sent` and `walked` belong to the snapshot that is being made: its number, how many blocks it
    has sent, and its number again once it has sent all that the record held.
    """

    place: Place
    hashes: tuple[ExternalBlockHash, ...]
    parent: ExternalBlockHash | None
    data: bytes
    uses: int
    snapshot: int = 0
    sent: int = 0
    walked: int = 0


class BlockMap:
    """Records by block hash, and between `freeze` and `thaw` also the records as they were at `freeze`.

    Which of the tables has a block, its hash modulo their number says.
    """

    __slots__ = ("before", "tables")

    def __init__(self, tables: Sequence[dict[ExternalBlockHash, Record]]) -> None:
        self.tables = tables
        self.before: dict[ExternalBlockHash, Record | None] | None = None

    def get(self, block: ExternalBlockHash) -> Record | None:
        """Return a block's record."""
        return self.tables[hash(block) % len(self.tables)].get(block)

    def items(self) -> Iterator[tuple[ExternalBlockHash, Record]]:
        """Return all blocks with their records."""
        return chain.from_iterable(table.items() for table in self.tables)

    def add_all(self, blocks: Hashes, record: Record) -> bool:
        """Give blocks a record if none has one and each is named once, and return whether that is so."""
        tables, number = self.tables, len(self.tables)
        for block in blocks:
            table = tables[hash(block) % number]
            if block in table:
                self._undo(blocks, record)
                return False
            table[block] = record
        if self.before is not None:
            for block in blocks:
                self.before.setdefault(block, None)
        return True

    def _undo(self, blocks: Hashes, record: Record) -> None:
        for block in blocks:
            if self.get(block) is record:
                del self.tables[hash(block) % len(self.tables)][block]

    def pop(self, block: ExternalBlockHash) -> Record | None:
        """Take a block out; return its record."""
        found = self.tables[hash(block) % len(self.tables)].pop(block, None)
        if self.before is not None:
            self.before.setdefault(block, found)
        return found

    def freeze(self) -> None:
        """Remember from now on what was there before each change."""
        self.before = {}

    def thaw(self) -> None:
        """Forget what was there before."""
        self.before = None

    def was(self, block: ExternalBlockHash) -> Record | None:
        """Return the record that a block had at `freeze`; of a table that is not frozen, the one it has."""
        found = _UNCHANGED if self.before is None else self.before.get(block, _UNCHANGED)
        return self.get(block) if found is _UNCHANGED else found


class Holding:
    """The blocks of one place: each with its record, and with its count where that is more than 1."""

    __slots__ = ("blocks", "counts", "like", "place", "total")

    def __init__(self, event: BlockStored | BlockRemoved) -> None:
        self.place = place_of(event)
        self.total = 0  # the sum of the hashes
        self.like = BlockRemoved([], event.medium, event.group_idx, event.locality, event.ownership)
        self.blocks = BlockMap([{} for _ in range(SHARDS)])
        self.counts: dict[ExternalBlockHash, int] = {}

    def count_down(self, block: ExternalBlockHash) -> None:
        """Take one from the count of a block that has one."""
        left = self.counts.pop(block) - 1
        if left > 1:
            self.counts[block] = left

    def removal(self, hashes: Hashes) -> BlockRemoved:
        """Return the event that removes blocks from here."""
        return replace(self.like, block_hashes=list(hashes))


class PublishedState:
    """The set of published blocks, as a filter that events pass on their way out.

    `store` and `remove` take an event with its bytes and append to `out` what of it is news. They raise
    before they change anything.
    """

    def __init__(self, encoder: EventEncoder, counting: str = "count") -> None:
        """Hold nothing. `counting` is `count` or `set`, see `KVEventsConfig`."""
        self.blocks = 0
        self._ghosts: OrderedDict[ExternalBlockHash, Record] = OrderedDict()  # the oldest goes first
        self.ghosts = BlockMap([self._ghosts])
        self._encoder = encoder
        self._counted = counting == "count"
        self._holdings: dict[Place, Holding] = {}
        # How many records hang from a block, in shards as the blocks.
        self._children: list[dict[ExternalBlockHash, int]] = [{} for _ in range(SHARDS)]
        self._records: deque[Record] = deque()  # all with uses, and a few without
        self._ended = 0  # records, since the last sweep
        self._is_frozen = False

    # -- events ------------------------------------------------------------------------------------

    def store(self, event: BlockStored, data: bytes, out: list[bytes]) -> None:
        """Take blocks in; `data` is the whole event's bytes."""
        hashes = tuple(event.block_hashes)
        if not hashes:
            return
        holding = self._holding(event)
        if self._add(holding, hashes, event.parent_block_hash, data):
            out.append(data)
        else:
            out += self._store_new(holding, event)

    def _store_new(self, holding: Holding, event: BlockStored) -> list[bytes]:
        """Take in the blocks of an event that are new, each once; count the others."""
        new, again = [], []
        met: set[ExternalBlockHash] = set()
        for place, block in enumerate(event.block_hashes):
            if block in met or holding.blocks.get(block) is not None:
                again.append(block)
            else:
                met.add(block)
                new.append(place)
        sent = self._add_parts(holding, event, new)
        if self._counted:
            for block in again:
                holding.counts[block] = holding.counts.get(block, 1) + 1
        return sent

    def _add_parts(self, holding: Holding, event: BlockStored, wanted: list[int]) -> list[bytes]:
        """Take in the blocks at the wanted places, one part for each run of them.

        Return the parts' bytes.
        """
        parts = [blocks_of(event, start, stop) for start, stop in runs(wanted)]
        encoded = [self._encoder.event(part) for part in parts]
        for part, data in zip(parts, encoded, strict=True):
            self._add(holding, tuple(part.block_hashes), part.parent_block_hash, data)
        return encoded

    def _add(
        self,
        holding: Holding,
        hashes: tuple[ExternalBlockHash, ...],
        parent: ExternalBlockHash | None,
        data: bytes,
    ) -> bool:
        """Make a record of blocks if all of them are new; return whether they were."""
        total = hash_sum(hashes)
        children = self._children[hash(parent) % SHARDS]
        record = Record(holding.place, hashes, parent, data, len(hashes))
        if not holding.blocks.add_all(hashes, record):
            return False
        self._records.append(record)
        if parent is not None:
            children[parent] = children.get(parent, 0) + 1
        self.blocks += len(hashes)
        holding.total += total
        if self._ghosts:
            for block in hashes:
                self._forget_ghost(block)
        return True

    def remove(self, event: BlockRemoved, data: bytes, out: list[bytes]) -> None:
        """Let blocks go; `data` is the whole event's bytes."""
        hashes = event.block_hashes
        total = hash_sum(hashes)
        holding = self._holding(event)
        gone = self._drop(holding, hashes)
        if not gone:
            return
        if len(gone) != len(hashes):
            data, total = self._encoder.event(replace(event, block_hashes=gone)), hash_sum(gone)
        self.blocks -= len(gone)
        holding.total -= total
        out.append(data)

    def _drop(self, holding: Holding, hashes: Hashes) -> list[ExternalBlockHash]:
        """Take one from each block's count; return the blocks of which that was the last."""
        counts, children = holding.counts, self._children
        tables, before = holding.blocks.tables, holding.blocks.before
        gone = []
        for block in hashes:
            if counts and block in counts:
                holding.count_down(block)
                continue
            shard = hash(block) % SHARDS
            record = tables[shard].pop(block, None)
            if record is None:
                continue
            gone.append(block)
            if before is not None:
                before.setdefault(block, record)
            if block in children[shard] and not self._is_elsewhere(block):
                self._add_ghost(block, record)
            elif record.uses > 1:
                record.uses -= 1
            else:
                self._end(record)
        return gone

    def _is_elsewhere(self, block: ExternalBlockHash) -> bool:
        """Return whether some place holds a block that was just let go in another."""
        return any(holding.blocks.get(block) is not None for holding in self._holdings.values())

    # -- what consumers were not told --------------------------------------------------------------

    def count_of(self, event: BlockStored | BlockRemoved, block: ExternalBlockHash) -> int:
        """Return how often a block is held where the event is."""
        holding = self._holding(event)
        return 0 if holding.blocks.get(block) is None else holding.counts.get(block, 1)

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
        met = {block for block in wanted if holding.blocks.get(block) is not None}
        places = []
        for place, block in enumerate(event.block_hashes):
            if block in wanted and block not in met:
                met.add(block)
                places.append(place)
        self._add_parts(holding, event, places)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def digest(self) -> int:
        """Return the digest of all blocks that are held."""
        return sum(one.total * place_weight(one.place) for one in self.holdings()) & U64

    @property
    def ghost_count(self) -> int:
        """Return how many removed blocks are kept."""
        return len(self._ghosts)

    def holdings(self) -> list[Holding]:
        """Return what each place holds."""
        return list(self._holdings.values())

    def freeze(self) -> int:
        """Keep what is there readable, as `BlockMap.was`, while it changes.

        Return after how many calls of `next_record` all records have come that are of use to it.
        """
        self._is_frozen = True
        for table in self._tables():
            table.freeze()
        return len(self._records)

    def thaw(self) -> None:
        """Stop keeping what was there."""
        self._is_frozen = False
        for table in self._tables():
            table.thaw()

    def next_record(self) -> Record:
        """Return the record that was looked at longest ago, and let it go if nothing uses it."""
        record = self._records.popleft()
        if record.uses:
            self._records.append(record)
        return record

    def _sweep(self) -> None:
        """Look at two records for each that has ended, so that about half of them at most are of no use."""
        records = self._records
        for _ in range(min(2 * _SWEPT_AT_ONCE, len(records))):
            record = records.popleft()
            if record.uses:
                records.append(record)
        self._ended -= _SWEPT_AT_ONCE

    def _tables(self) -> list[BlockMap]:
        return [self.ghosts, *(holding.blocks for holding in self._holdings.values())]

    def take_apart(self) -> list[dict[Any, Any] | deque[Any]]:
        """Return all that the state consists of, to be freed bit by bit: at once takes half a second."""
        pieces: list[dict[Any, Any] | deque[Any]] = [self._records, *self._children, self._ghosts]
        for holding in self._holdings.values():
            pieces += [*holding.blocks.tables, holding.counts]
        return pieces

    def check(self) -> None:
        """Raise `IntegrityError` where counts, digest, records and ghosts do not agree."""
        held = {holding.place: dict(holding.blocks.items()) for holding in self._holdings.values()}
        _expect(sum(map(len, held.values())), self.blocks, "blocks held")
        for holding in self._holdings.values():
            place = holding.place
            _expect(holding.counts.keys() - held[place].keys(), set(), f"counts of absent blocks in {place}")
            _expect([n for n in holding.counts.values() if n < 2], [], f"counts below 2 in {place}")
        digest = sum(hash_sum(list(blocks)) * place_weight(place) for place, blocks in held.items())
        _expect(digest & U64, self.digest, "digest")
        ghosts = dict(self._ghosts)
        self._check_records(held, ghosts)
        is_held = {block for blocks in held.values() for block in blocks}
        _expect(ghosts.keys() & is_held, set(), "ghosts that are held")

    def _check_records(
        self, held: dict[Place, dict[ExternalBlockHash, Record]], ghosts: dict[ExternalBlockHash, Record]
    ) -> None:
        blocks = [
            (block, record) for by_block in (*held.values(), ghosts) for block, record in by_block.items()
        ]
        records = {id(record): record for _, record in blocks}
        named = {key: set(record.hashes) for key, record in records.items()}
        _expect(
            [block for block, record in blocks if block not in named[id(record)]],
            [],
            "blocks of other records",
        )
        uses = Counter(id(record) for _, record in blocks)
        _expect(uses, {key: record.uses for key, record in records.items()}, "uses of records")
        children = Counter(record.parent for record in records.values() if record.parent is not None)
        kept = {block: count for shard in self._children for block, count in shard.items()}
        _expect(kept, dict(children), "children")
        _expect(records.keys() - set(map(id, self._records)), set(), "records that no snapshot would meet")
        _expect(ghosts.keys() - children.keys(), set(), "ghosts without children")

    # -- inside ------------------------------------------------------------------------------------

    def _holding(self, event: BlockStored | BlockRemoved) -> Holding:
        place = place_of(event)
        return self._holdings.get(place) or self._holdings.setdefault(place, Holding(event))

    def _end(self, record: Record) -> None:
        """Note that nothing uses a record any more: it lets its parent go."""
        record.uses = 0
        self._ended += 1
        if self._ended >= _SWEPT_AT_ONCE and not self._is_frozen:
            self._sweep()
        if record.parent is not None:
            self._let_go(record.parent)

    def _let_go(self, parent: ExternalBlockHash) -> None:
        """Take a child from a block.

        With its last child a ghost goes, and may let go its own parent, and so on up.
        """
        above: ExternalBlockHash | None = parent
        while above is not None:
            children = self._children[hash(above) % SHARDS]
            left = children.pop(above) - 1
            if left:
                children[above] = left
                return
            ghost = self.ghosts.pop(above) if self._ghosts else None
            if ghost is None:
                return
            ghost.uses -= 1
            above = None if ghost.uses else ghost.parent

    def _add_ghost(self, block: ExternalBlockHash, record: Record) -> None:
        """Keep a removed block's record.

        With too many ghosts the oldest are forgotten, and their children are orphans.
        """
        self.ghosts.add_all((block,), record)
        while len(self._ghosts) > max(self.blocks, _LEAST_GHOSTS):
            self._forget_ghost(next(iter(self._ghosts)))

    def _forget_ghost(self, block: ExternalBlockHash) -> None:
        """Let a removed block's record go, if it is kept."""
        record = self.ghosts.pop(block)
        if record is None:
            return
        if record.uses > 1:
            record.uses -= 1
        else:
            self._end(record)


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
