"""The published state of one rank: the blocks that consumers hold now, and the events that said so.

The stream behaves like a set: per place (medium, group, ownership, locality) a block is published as stored
when its count leaves 0 and as removed when it returns to 0. If only some blocks of an event are new, it is
published in parts. The state keeps one record per published event: its bytes, its hashes and its parent's
hash. A snapshot sends those bytes again, parents first. Each place has `SHARDS` dicts that find a block's
record: a dict stops all threads while it grows, one of 700,000 blocks for 45 ms, each of these for less
than one.

A *ghost* is a removed block that others still hang from: its record stays, so that a snapshot can give
tree-building consumers the path to its children. Ghosts are counted, bounded, and leave with their last
child. `blocks` and `digest` always equal the sum of `change_of` over all published events. Between `freeze`
and `thaw` the tables can also be read as they were at `freeze`. One thread owns a state.
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

SHARDS = 127  # a prime: so the choice of a shard is independent of the dicts' own use of the hash bits
_LEAST_GHOSTS = 10_000
_SWEPT_AT_ONCE = 64
_UNCHANGED: Any = object()


class Record(msgspec.Struct, gc=False, eq=False):
    """An event published as stored. `uses` counts its blocks that are held or ghosts.

    `snapshot`, `sent` and `walked` belong to the unfinished snapshot: its number, how many blocks it has
    sent, and its number again once it has sent all blocks that the record held.
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
    """Records by block hash; between `freeze` and `thaw` also the records as they were at `freeze`.

    The hash modulo the number of tables selects a block's table.
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
        """Give blocks a record, if none has one and each is named once; return whether that was done."""
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
        """Remove a block; return its record."""
        found = self.tables[hash(block) % len(self.tables)].pop(block, None)
        if self.before is not None:
            self.before.setdefault(block, found)
        return found

    def freeze(self) -> None:
        """From now on, remember each entry as it was before its first change."""
        self.before = {}

    def thaw(self) -> None:
        """Forget the remembered entries."""
        self.before = None

    def was(self, block: ExternalBlockHash) -> Record | None:
        """Return the record that a block had at `freeze`; if the table is not frozen, the current one."""
        found = _UNCHANGED if self.before is None else self.before.get(block, _UNCHANGED)
        return self.get(block) if found is _UNCHANGED else found


class Holding:
    """The blocks of one place: each with its record, and with its count if that is more than 1."""

    __slots__ = ("blocks", "counts", "like", "place", "total")

    def __init__(self, event: BlockStored | BlockRemoved) -> None:
        self.place = place_of(event)
        self.total = 0  # the sum of the hashes
        self.like = BlockRemoved([], event.medium, event.group_idx, event.locality, event.ownership)
        self.blocks = BlockMap([{} for _ in range(SHARDS)])
        self.counts: dict[ExternalBlockHash, int] = {}

    def count_down(self, block: ExternalBlockHash) -> None:
        """Subtract one from the count of a block that has a count."""
        left = self.counts.pop(block) - 1
        if left > 1:
            self.counts[block] = left

    def removal(self, hashes: Hashes) -> BlockRemoved:
        """Return the event that removes blocks from here."""
        return replace(self.like, block_hashes=list(hashes))


class PublishedState:
    """The set of published blocks, as a filter for events to publish.

    `store` and `remove` take an event with its bytes and append its new parts to `out`. They raise before
    they change anything.
    """

    def __init__(self, encoder: EventEncoder, counting: str = "count") -> None:
        """Begin empty. `counting` is `count` or `set`, see `KVEventsConfig`."""
        self.blocks = 0
        self._ghosts: OrderedDict[ExternalBlockHash, Record] = OrderedDict()  # the oldest goes first
        self.ghosts = BlockMap([self._ghosts])
        self._encoder = encoder
        self._counted = counting == "count"
        self._holdings: dict[Place, Holding] = {}
        # How many records hang from a block, in shards like the blocks.
        self._children: list[dict[ExternalBlockHash, int]] = [{} for _ in range(SHARDS)]
        self._records: deque[Record] = deque()  # all records in use, and a few unused ones
        self._ended = 0  # records ended since the last sweep
        self._is_frozen = False

    # -- events ------------------------------------------------------------------------------------

    def store(self, event: BlockStored, data: bytes, out: list[bytes]) -> None:
        """Add blocks; `data` holds the bytes of the whole event."""
        hashes = tuple(event.block_hashes)
        if not hashes:
            return
        holding = self._holding(event)
        if self._add(holding, hashes, event.parent_block_hash, data):
            out.append(data)
        else:
            out += self._store_new(holding, event)

    def _store_new(self, holding: Holding, event: BlockStored) -> list[bytes]:
        """Add the new blocks of an event, each once; count the others."""
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
        """Add the blocks at the wanted places, one part for each run of them. Return the parts' bytes."""
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
        """Remove blocks; `data` holds the bytes of the whole event."""
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
        """Subtract one from each block's count; return the blocks whose count is now 0."""
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
        """Return whether another place holds a block that was just removed from one."""
        return any(holding.blocks.get(block) is not None for holding in self._holdings.values())

    # -- changes that are not published ------------------------------------------------------------

    def count_of(self, event: BlockStored | BlockRemoved, block: ExternalBlockHash) -> int:
        """Return the count of a block in the event's place."""
        holding = self._holding(event)
        return 0 if holding.blocks.get(block) is None else holding.counts.get(block, 1)

    def set_count(self, event: BlockStored | BlockRemoved, block: ExternalBlockHash, count: int) -> None:
        """Set the count of a held block; 0 removes it. Nothing is published."""
        holding = self._holding(event)
        holding.counts.pop(block, None)
        if count == 0:
            self.remove(holding.removal([block]), b"", [])
        elif count > 1:
            holding.counts[block] = count

    def adopt(self, event: BlockStored, wanted: set[ExternalBlockHash]) -> None:
        """Add the wanted blocks of the event that are not held. Nothing is published."""
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
        """Return the digest of all held blocks."""
        return sum(one.total * place_weight(one.place) for one in self.holdings()) & U64

    @property
    def ghost_count(self) -> int:
        """Return how many ghosts are kept."""
        return len(self._ghosts)

    def holdings(self) -> list[Holding]:
        """Return the holding of each place."""
        return list(self._holdings.values())

    def freeze(self) -> int:
        """Keep the present state readable through `BlockMap.was`, while it changes.

        Return the number of `next_record` calls after which all of its records have come.
        """
        self._is_frozen = True
        for table in self._tables():
            table.freeze()
        return len(self._records)

    def thaw(self) -> None:
        """Stop keeping the frozen state."""
        self._is_frozen = False
        for table in self._tables():
            table.thaw()

    def next_record(self) -> Record:
        """Return the record that was visited longest ago, and drop it if it is unused."""
        record = self._records.popleft()
        if record.uses:
            self._records.append(record)
        return record

    def _sweep(self) -> None:
        """Visit two records for each ended one, so that at most about half of the records are unused."""
        records = self._records
        for _ in range(min(2 * _SWEPT_AT_ONCE, len(records))):
            record = records.popleft()
            if record.uses:
                records.append(record)
        self._ended -= _SWEPT_AT_ONCE

    def _tables(self) -> list[BlockMap]:
        return [self.ghosts, *(holding.blocks for holding in self._holdings.values())]

    def take_apart(self) -> list[dict[Any, Any] | deque[Any]]:
        """Return all parts of the state, to be freed step by step: all at once takes half a second."""
        pieces: list[dict[Any, Any] | deque[Any]] = [self._records, *self._children, self._ghosts]
        for holding in self._holdings.values():
            pieces += [*holding.blocks.tables, holding.counts]
        return pieces

    def check(self) -> None:
        """Raise `IntegrityError` if counts, digest, records and ghosts do not agree."""
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
        """Note that a record is unused: it releases its parent."""
        record.uses = 0
        self._ended += 1
        if self._ended >= _SWEPT_AT_ONCE and not self._is_frozen:
            self._sweep()
        if record.parent is not None:
            self._let_go(record.parent)

    def _let_go(self, parent: ExternalBlockHash) -> None:
        """Remove a child from a block.

        A ghost leaves with its last child, and may then release its own parent, and so on.
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

        Beyond the limit the oldest ghosts are forgotten, and their children are orphans.
        """
        self.ghosts.add_all((block,), record)
        while len(self._ghosts) > max(self.blocks, _LEAST_GHOSTS):
            self._forget_ghost(next(iter(self._ghosts)))

    def _forget_ghost(self, block: ExternalBlockHash) -> None:
        """Forget a ghost and release its record, if there is one."""
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
