"""The published state of one rank, the blocks that consumers hold now, and snapshots of all ranks' states.

The stream behaves like a set: per place (medium, group, ownership, locality) a block is published as stored
when its count leaves 0 and as removed when it returns to 0. If only some blocks of an event are new, it is
published in parts.

A state is a log of records, one for each published store, in the order of publication. A record has a birth
number, and its blocks have death numbers. A snapshot at number n consists of the records born at or before
n, with the blocks that were not dead at n; it sends the records' own bytes again. So the state goes on
changing while a snapshot of it is being made: a dead record stays in the log until the running snapshot is
made.

A record without blocks also stays while other records hang from it, so that a snapshot can give
tree-building consumers the path to its children: a snapshot stores such *ancestors* and removes them again.
They are bounded, and leave with their last child. Births are in the order of the stream, so every block
that found its parent in the stream also finds it in a snapshot.

A snapshot also announces the groups that hold no block, by a store without blocks: a consumer that joins
late must know that a model has recurrent layers, even while none of their states is held.

`blocks` and `digest` always equal the sum of `change_of` over all published events. One thread owns a state
and its snapshots.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec.structs import replace

from kvtier.errors import IntegrityError
from kvtier.events.types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalBlockHash,
    Mark,
    blocks_of,
)
from kvtier.events.wire import U64, EventEncoder, Place, decode_event, hash_sum, place_of, place_weight

Hashes = Sequence[ExternalBlockHash]

SHARDS = 127  # a prime: so the choice of a shard is independent of the dicts' own use of the hash bits
_SEGMENT_BITS = 12
_LEAST_ANCESTORS = 10_000
_BATCH_BYTES = 32 << 10  # of a snapshot
_REMOVED_AT_ONCE = 4096
_MOST_GROUPS = 64  # that are announced


class Record(msgspec.Struct, gc=False, eq=False):
    """An event published as stored.

    `parent` is the birth number of the record that held the parent block when this one was born, or 0.
    `children` counts the records in the log with this one as parent. `held` counts the blocks that consumers
    hold. `deaths` has the numbers at which blocks died while a snapshot was being made; of a block that died
    earlier nothing is kept, because the tables no longer have it.

    Records refer to each other by number: a long chain of objects would overflow the stack when it is freed.
    """

    birth: int
    place: Place
    hashes: tuple[ExternalBlockHash, ...]
    data: bytes
    held: int
    parent: int = 0
    children: int = 0
    deaths: dict[ExternalBlockHash, int] | None = None


_NO_RECORDS: dict[int, Record] = {}


class PlacedBlocks:
    """Maps the blocks that consumers hold in one place to their records, and to their counts above 1.

    The hash modulo `SHARDS` selects a block's table. A dict stops all threads while it grows, one of 700,000
    blocks for 45 ms, each of these for less than one.
    """

    __slots__ = ("counts", "like", "place", "tables", "total")

    def __init__(self, event: BlockStored | BlockRemoved) -> None:
        self.place = place_of(event)
        self.total = 0  # the sum of the hashes
        self.like = BlockRemoved([], event.medium, event.group_idx, event.locality, event.ownership)
        self.tables: list[dict[ExternalBlockHash, Record]] = [{} for _ in range(SHARDS)]
        self.counts: dict[ExternalBlockHash, int] = {}

    def get(self, block: ExternalBlockHash) -> Record | None:
        """Return a block's record."""
        return self.tables[hash(block) % SHARDS].get(block)

    def items(self) -> Iterator[tuple[ExternalBlockHash, Record]]:
        """Return all blocks with their records."""
        return chain.from_iterable(table.items() for table in self.tables)

    def add_all(self, blocks: Hashes, record: Record) -> bool:
        """Give blocks a record, if none has one and each is named once; return whether that was done."""
        tables = self.tables
        for block in blocks:
            table = tables[hash(block) % SHARDS]
            if block in table:
                self._undo(blocks, record)
                return False
            table[block] = record
        return True

    def _undo(self, blocks: Hashes, record: Record) -> None:
        for block in blocks:
            if self.get(block) is record:
                del self.tables[hash(block) % SHARDS][block]

    def count_down(self, block: ExternalBlockHash) -> None:
        """Subtract one from the count of a block that has a count."""
        left = self.counts.pop(block) - 1
        if left > 1:
            self.counts[block] = left

    def removal(self, hashes: Hashes) -> BlockRemoved:
        """Return the event that removes blocks from here."""
        return replace(self.like, block_hashes=list(hashes))


class PublishedState:
    """Keeps the set of published blocks, and filters events so that the stream behaves like a set.

    `store` and `remove` take an event with its bytes and append its new parts to `out`. They raise before
    they change anything.
    """

    def __init__(
        self, encoder: EventEncoder, counting: str = "count", groups: dict[int, BlockStored] | None = None
    ) -> None:
        """Begin without blocks. `counting` is `count` or `set`, see `KVEventsConfig`.

        `groups` are those of the state before a clear, which forgets blocks only.
        """
        self.blocks = 0
        self.groups = groups if groups is not None else {}
        """A store without blocks for each group whose kind is known, by `group_idx`."""
        self._encoder = encoder
        self._counted = counting == "count"
        self._places: dict[Place, PlacedBlocks] = {}
        # All records by birth, in segments: a single dict would stop all threads while it grows.
        self._log: dict[int, dict[int, Record]] = {}
        self._number = 0  # of the newest birth or snapshot
        self._ancestors: OrderedDict[int, Record] = OrderedDict()  # the one that ended first goes first
        self._read_at: int | None = None  # the number of the snapshot that is being made
        self._dying: deque[Record] = deque()  # records with deaths, until the snapshot is made

    # -- events ------------------------------------------------------------------------------------

    def store(self, event: BlockStored, data: bytes, out: list[bytes]) -> None:
        """Add blocks; `data` holds the bytes of the whole event."""
        hashes = tuple(event.block_hashes)
        is_new = event.kv_cache_spec_kind is not None and self._learn_group(event)
        if not hashes:
            if is_new:
                out.append(data)
            return
        placed = self._placed(event)
        if self._add(placed, hashes, event.parent_block_hash, data):
            out.append(data)
        else:
            out += self._store_new(placed, event)

    def _learn_group(self, event: BlockStored) -> bool:
        """Keep the kind of an event's group; return whether it was unknown or has changed."""
        group = event.group_idx or 0
        known = self.groups.get(group)
        if known is None and len(self.groups) == _MOST_GROUPS:
            return False
        if known is not None and known.kv_cache_spec_kind == event.kv_cache_spec_kind:
            return False
        self.groups[group] = BlockStored(
            [], None, [], event.block_size, None, event.medium, None,
            group_idx=event.group_idx,
            kv_cache_spec_kind=event.kv_cache_spec_kind,
            kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
        )  # fmt: skip
        return True

    def _store_new(self, placed: PlacedBlocks, event: BlockStored) -> list[bytes]:
        """Add the new blocks of an event, one part for each run of them; count the others."""
        new, again = [], []
        met: set[ExternalBlockHash] = set()
        for index, block in enumerate(event.block_hashes):
            if block in met or placed.get(block) is not None:
                again.append(block)
            else:
                met.add(block)
                new.append(index)
        parts = [blocks_of(event, start, stop) for start, stop in runs(new)]
        encoded = [self._encoder.event(part) for part in parts]
        for part, data in zip(parts, encoded, strict=True):
            self._add(placed, tuple(part.block_hashes), part.parent_block_hash, data)
        if self._counted:
            for block in again:
                placed.counts[block] = placed.counts.get(block, 1) + 1
        return encoded

    def _add(
        self,
        placed: PlacedBlocks,
        hashes: tuple[ExternalBlockHash, ...],
        parent: ExternalBlockHash | None,
        data: bytes,
    ) -> bool:
        """Make a record of blocks if all of them are new; return whether they were."""
        total = hash_sum(hashes)
        above = placed.tables[hash(parent) % SHARDS].get(parent) if parent is not None else None
        if above is None and parent is not None and len(self._places) > 1:
            above = self._find_holder(parent)
        birth = self._number + 1
        record = Record(birth, placed.place, hashes, data, len(hashes))
        if not placed.add_all(hashes, record):
            return False
        self._number = birth
        if above is not None:
            above.children += 1
            record.parent = above.birth
        segment = self._log.get(birth >> _SEGMENT_BITS)
        if segment is None:
            segment = self._log[birth >> _SEGMENT_BITS] = {}
        segment[birth] = record
        self.blocks += len(hashes)
        placed.total += total
        return True

    def _find_holder(self, block: ExternalBlockHash) -> Record | None:
        """Return a record that holds a block in any place."""
        holders = (placed.get(block) for placed in self._places.values())
        return next((record for record in holders if record is not None), None)

    def remove(self, event: BlockRemoved, data: bytes, out: list[bytes]) -> None:
        """Remove blocks; `data` holds the bytes of the whole event."""
        hashes = event.block_hashes
        total = hash_sum(hashes)
        placed = self._placed(event)
        gone = self._drop(placed, hashes)
        if not gone:
            return
        if len(gone) != len(hashes):
            data, total = self._encoder.event(replace(event, block_hashes=gone)), hash_sum(gone)
        self.blocks -= len(gone)
        placed.total -= total
        out.append(data)

    def _drop(self, placed: PlacedBlocks, hashes: Hashes) -> list[ExternalBlockHash]:
        """Subtract one from each block's count; return the blocks whose count is now 0."""
        counts, tables = placed.counts, placed.tables
        gone = []
        for block in hashes:
            if counts and block in counts:
                placed.count_down(block)
                continue
            record = tables[hash(block) % SHARDS].pop(block, None)
            if record is None:
                continue
            gone.append(block)
            record.held -= 1
            if self._read_at is not None and record.birth <= self._read_at:
                self._record_death(record, block)
            elif not record.held and record.deaths is None:
                self._end(record)
        return gone

    # -- the log -----------------------------------------------------------------------------------

    def _record_death(self, record: Record, block: ExternalBlockHash) -> None:
        """Keep the number at which a block died, for the snapshot that is being made."""
        if record.deaths is None:
            record.deaths = {}
            self._dying.append(record)
        record.deaths[block] = self._number

    def _end(self, record: Record) -> None:
        """Drop a record without blocks, or keep it as an ancestor while others hang from it.

        Beyond the limit the oldest ancestors are dropped, and their children are orphans.
        """
        if not record.children:
            self._forget(record)
            return
        self._ancestors[record.birth] = record
        while len(self._ancestors) > max(self.blocks, _LEAST_ANCESTORS):
            self._forget(self._ancestors.popitem(last=False)[1])

    def _forget(self, record: Record) -> None:
        """Drop a record from the log, and with it each ancestor whose last child it was."""
        log, found = self._log, record
        while True:
            key = found.birth >> _SEGMENT_BITS
            segment = log[key]
            del segment[found.birth]
            left = len(segment)
            if not left:
                del log[key]
            elif not left & (left - 1) and key != self._number >> _SEGMENT_BITS:
                log[key] = dict(segment)  # a dict never shrinks; at each halving the cost is small
            above = log.get(found.parent >> _SEGMENT_BITS, _NO_RECORDS).get(found.parent)
            if above is None:
                return
            above.children -= 1
            if above.children or above.birth not in self._ancestors:
                return
            found = self._ancestors.pop(above.birth)

    # -- snapshots ---------------------------------------------------------------------------------

    def begin_snapshot(self) -> int:
        """Keep the present state readable for `snapshot_events`, and return its number.

        Only one snapshot can be unfinished: an earlier one must not be continued.
        """
        self._read_at = self._number
        self._number += 1
        return self._read_at

    def snapshot_events(self) -> Iterator[bytes | None]:
        """Yield the events that turn any state into the one at `begin_snapshot`, without a mark.

        The state may change between two steps. `None` is a step without an event.
        """
        number = self._read_at
        assert number is not None
        try:
            yield self._encoder.event(AllBlocksCleared())
            held = {placed.place[1] for placed in self._places.values() if any(placed.tables)}
            for group in self.groups.keys() - held:
                yield self._encoder.event(self.groups[group])
            yield from self._walk(number)
        finally:
            self._read_at = None
        while self._dying:
            record = self._dying.popleft()
            record.deaths = None
            if not record.held:
                self._end(record)
            yield None

    def _walk(self, number: int) -> Iterator[bytes | None]:
        """Yield the events of all records in the order of birth, and the removals of ancestors."""
        passing: dict[Place, dict[ExternalBlockHash, None]] = {}  # blocks that were stored though not held
        for key in list(self._log):
            for record in list(self._log.get(key, _NO_RECORDS).values()):
                if record.birth > number:
                    break
                if record.held == len(record.hashes) and not passing:
                    yield record.data
                else:
                    yield from self._events_of(record, number, passing)
        for place, blocks in passing.items():
            gone = list(blocks)
            for start in range(0, len(gone), _REMOVED_AT_ONCE):
                yield self._removal(place, gone[start : start + _REMOVED_AT_ONCE])

    def _events_of(
        self, record: Record, number: int, passing: dict[Place, dict[ExternalBlockHash, None]]
    ) -> Iterator[bytes | None]:
        """Yield the events of a record up to the last block that was held or that others hang from.

        Dead blocks before that one are stored too, because the later ones hang from them. They are removed
        at the end, or before another record stores them again.
        """
        dead = self._dead_blocks(record, number)
        stop = len(record.hashes)
        while stop and record.hashes[stop - 1] in dead and not record.children:
            stop -= 1
        if not stop:
            yield None
            return
        data, stop = (record.data, stop) if stop == len(record.hashes) else self._cut(record, stop)
        stored = record.hashes[:stop]
        here = passing.setdefault(record.place, {})
        again = [block for block in stored if block in here]
        if again:
            yield self._removal(record.place, again)
            for block in again:
                del here[block]
        yield data
        here.update((block, None) for block in stored if block in dead)
        if not here:
            del passing[record.place]

    def _dead_blocks(self, record: Record, number: int) -> set[ExternalBlockHash]:
        """Return the blocks of a record that were dead at a number."""
        if record.held == len(record.hashes):
            return set()
        get, deaths = self._places[record.place].get, record.deaths or {}
        return {
            block for block in record.hashes if get(block) is not record and deaths.get(block, 0) <= number
        }

    def _cut(self, record: Record, stop: int) -> tuple[bytes, int]:
        """Return the event of a record's first blocks, and how many they are.

        They are all blocks if the event cannot be encoded again: extra keys may hold anything.
        """
        event = decode_event(record.data)
        try:
            if isinstance(event, BlockStored):
                return self._encoder.event(blocks_of(event, 0, stop)), stop
        except (OverflowError, TypeError, ValueError):
            pass
        return record.data, len(record.hashes)

    def _removal(self, place: Place, blocks: Hashes) -> bytes:
        return self._encoder.event(self._places[place].removal(blocks))

    # -- reading -----------------------------------------------------------------------------------

    @property
    def digest(self) -> int:
        """Return the digest of all held blocks."""
        return sum(one.total * place_weight(one.place) for one in self.places()) & U64

    @property
    def ancestors(self) -> int:
        """Return how many records without blocks are kept because others hang from them."""
        return len(self._ancestors)

    def places(self) -> list[PlacedBlocks]:
        """Return the blocks of each place."""
        return list(self._places.values())

    def _placed(self, event: BlockStored | BlockRemoved) -> PlacedBlocks:
        place = place_of(event)
        return self._places.get(place) or self._places.setdefault(place, PlacedBlocks(event))

    def take_apart(self) -> list[dict[Any, Any] | deque[Any]]:
        """Return all parts of the state, to be freed step by step: all at once takes half a second."""
        pieces: list[dict[Any, Any] | deque[Any]] = [*self._log.values(), self._ancestors, self._dying]
        for placed in self._places.values():
            pieces += [*placed.tables, placed.counts]
        return pieces

    def check(self) -> None:
        """Raise `IntegrityError` if counts, digest, tables and log do not agree."""
        held = {placed.place: dict(placed.items()) for placed in self._places.values()}
        _expect(sum(map(len, held.values())), self.blocks, "blocks held")
        for placed in self._places.values():
            place = placed.place
            _expect(placed.counts.keys() - held[place].keys(), set(), f"counts of absent blocks in {place}")
            _expect([n for n in placed.counts.values() if n < 2], [], f"counts below 2 in {place}")
        digest = sum(hash_sum(list(blocks)) * place_weight(place) for place, blocks in held.items())
        _expect(digest & U64, self.digest, "digest")
        self._check_log([record for blocks in held.values() for record in blocks.values()], held)

    def _check_log(self, holders: list[Record], held: dict[Place, dict[ExternalBlockHash, Record]]) -> None:
        records = {birth: record for segment in self._log.values() for birth, record in segment.items()}
        _expect(list(records), sorted(records), "births in order")
        _expect([birth for birth, one in records.items() if one.birth != birth], [], "misplaced records")
        strangers = [one.birth for one in holders if records.get(one.birth) is not one]
        _expect(strangers, [], "records that no snapshot would meet")
        for blocks in held.values():
            wrong = [block for block, one in blocks.items() if block not in one.hashes]
            _expect(wrong, [], "blocks of other records")
        uses = Counter(one.birth for one in holders)
        _expect(
            {birth: one.held for birth, one in records.items() if one.held}, dict(uses), "blocks of records"
        )
        children = Counter(one.parent for one in records.values() if one.parent in records)
        kept = {birth: one.children for birth, one in records.items() if one.children}
        _expect(kept, dict(children), "children")
        dying = {one.birth for one in self._dying}
        ended = {birth for birth, one in records.items() if not one.held} - dying
        _expect(ended, set(self._ancestors), "records without blocks")
        _expect({b for b in ended if not records[b].children}, set(), "ancestors without children")
        _expect({b for b, one in records.items() if one.deaths is not None}, dying, "records with deaths")


class RankBatch(msgspec.Struct, frozen=True, gc=False):
    """Events of one rank, joined.

    The garbage collector does not track it: a collection would walk all batches of a large snapshot at
    once.
    """

    rank: int
    number: int
    events: bytes


class SnapshotReader:
    """One client's way through a snapshot: when it began, and the bytes that were sent to it."""

    def __init__(self, began: float) -> None:
        self.began, self.num_bytes = began, 0


class Snapshot:
    """Makes the events that turn any state into the states as of number `as_of`, in batches of one rank.

    Beginning a snapshot copies nothing: `advance` makes the events step by step, once for all readers. The
    first event of every rank is `AllBlocksCleared`; the last event of all carries the mark.
    """

    def __init__(
        self, states: Mapping[int, PublishedState], encoder: EventEncoder, as_of: int, mark: Mark
    ) -> None:
        """Begin a snapshot of the states as they are now."""
        self.as_of = as_of
        self.mark = mark
        self.begun_at = time.monotonic()
        self.ranks = len(states)
        self.batches: list[RankBatch] = []
        self.num_bytes = 0
        self.is_made = False
        self.is_given_up = False
        """Whether the batches are gone before all readers had them."""
        self.readers: set[SnapshotReader] = set()
        self._encoder = encoder
        self._left = deque(states.items())
        for state in states.values():
            state.begin_snapshot()
        self._making = self._make()

    def advance(self, seconds: float) -> None:
        """Make some of the events, for about `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.is_made and time.monotonic() < deadline:
            self.is_made = next(self._making, self) is self

    def check(self) -> None:
        """Raise `IntegrityError` if a finished snapshot is incomplete."""
        if self.is_made and (not self.batches or self._left):
            raise IntegrityError(
                f"snapshot as of {self.as_of}: {len(self.batches)} batches, {len(self._left)} unfinished"
            )

    def _make(self) -> Iterator[None]:
        """Fill `batches`; yield often, so that the caller can check the clock."""
        while self._left:
            rank, state = self._left[0]
            events: list[bytes] = []
            size = 0
            for event in state.snapshot_events():
                if event is not None:
                    events.append(event)
                    size += len(event)
                if size >= _BATCH_BYTES:
                    self._add(rank, events)
                    events, size = [], 0
                yield
            self._left.popleft()
            if not self._left:
                events.append(self._encoder.mark(self.mark))
            self._add(rank, events)

    def _add(self, rank: int, events: list[bytes]) -> None:
        batch = RankBatch(rank, len(events), b"".join(events))
        self.batches.append(batch)
        self.num_bytes += len(batch.events)


def runs(indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield `[start, stop)` for each run of consecutive numbers."""
    start = stop = -1
    for index in indices:
        if index != stop:
            if stop > start:
                yield start, stop
            start = index
        stop = index + 1
    if stop > start:
        yield start, stop


def _expect(found: object, kept: object, what: str) -> None:
    if found != kept:
        raise IntegrityError(f"published state: {what}: counted {found!r}, kept {kept!r}")
