"""A publisher's state at one moment, as encoded events: parents before children; removed ancestors are
stored, then removed again.

Taking a snapshot copies nothing: the states are frozen and go on changing, and `advance` makes the events
step by step, once for all readers. The first event of every rank is `AllBlocksCleared`; the last event of
all carries the mark. Applied in order, the events give exactly the frozen state. A record that cannot be
encoded again is left out, counted and logged. One thread owns a snapshot; a state can be in one unfinished
snapshot at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping

import msgspec

from kvtier.errors import IntegrityError
from kvtier.events.publish.state import PublishedState, Record, runs
from kvtier.events.types import AllBlocksCleared, BlockStored, ExternalBlockHash, Mark, blocks_of
from kvtier.events.wire import EventEncoder, Place
from kvtier.events.wire_structs import Encoding

__all__ = ["RankBatch", "Snapshot"]

logger = logging.getLogger(__name__)

_BATCH_BYTES = 32 << 10
_REMOVED_AT_ONCE = 4096
_NAMES = BlockStored.__struct_fields__

_Need = tuple[int, Record, int]
"""A dependency of a record: before which of its places it applies, the other record, and how many of that
record's blocks must be sent first.
"""


class RankBatch(msgspec.Struct, frozen=True, gc=False):
    """Events of one rank, joined.

    The garbage collector does not track it: a collection would walk all batches of a large snapshot at
    once.
    """

    rank: int
    number: int
    events: bytes


class Snapshot:
    """The events that turn any state into the state as of number `as_of`, in batches of one rank."""

    def __init__(
        self,
        states: Mapping[int, PublishedState],
        encoder: EventEncoder,
        as_of: int,
        mark: Mark,
        number: int = 1,
    ) -> None:
        """Freeze the states as they are now. `number` is unique among all snapshots of these states."""
        self.as_of = as_of
        self.mark = mark
        self.ranks = len(states)
        self.batches: list[RankBatch] = []
        self.is_made = False
        self.left_out = 0
        self.readers = 0
        self._encoder = encoder
        self._number = number
        self._walks = [_Walk(self, rank, state) for rank, state in states.items()]
        self._making = self._make()

    def advance(self, seconds: float) -> None:
        """Make some of the events, for about `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.is_made and time.monotonic() < deadline:
            self.is_made = next(self._making, self) is self

    def check(self) -> None:
        """Raise `IntegrityError` if a finished snapshot is incomplete."""
        if self.is_made and (not self.batches or self._walks):
            raise IntegrityError(
                f"snapshot as of {self.as_of}: {len(self.batches)} batches, {len(self._walks)} unfinished"
            )

    def _make(self) -> Iterator[None]:
        """Fill `batches`; yield often, so that the caller can check the clock."""
        while self._walks:
            walk = self._walks[0]
            events: list[bytes] = []
            size = 0
            for event in walk.events():
                if event is not None:
                    events.append(event)
                    size += len(event)
                if size >= _BATCH_BYTES:
                    self.batches.append(RankBatch(walk.rank, len(events), b"".join(events)))
                    events, size = [], 0
                yield
            walk.state.thaw()
            self._walks.pop(0)
            if not self._walks:
                events.append(self._encoder.mark(self.mark))
            self.batches.append(RankBatch(walk.rank, len(events), b"".join(events)))


class _Walk:
    """A walk through the state of one rank."""

    def __init__(self, snapshot: Snapshot, rank: int, state: PublishedState) -> None:
        self.rank = rank
        self.state = state
        self._snapshot = snapshot
        self._number = snapshot._number
        self._encoder = snapshot._encoder
        self._holdings = {holding.place: holding for holding in state.holdings()}
        self._ancestors: dict[Place, dict[ExternalBlockHash, None]] = {}  # sent though not held
        self._records = state.freeze()

    def events(self) -> Iterator[bytes | None]:
        """Yield all events of the rank except the mark; `None` for a step without an event."""
        yield self._encoder.event(AllBlocksCleared())
        for _ in range(self._records):
            record = self.state.next_record()
            if record.walked == self._number:
                yield None
            else:
                yield from self._send(record)
        for place, hashes in self._ancestors.items():
            gone = list(hashes)
            for start in range(0, len(gone), _REMOVED_AT_ONCE):
                removal = self._holdings[place].removal(gone[start : start + _REMOVED_AT_ONCE])
                yield self._encoder.event(removal)

    def _send(self, record: Record) -> Iterator[bytes | None]:
        """Yield the events of a record, after those of the records that it hangs from.

        Most records are whole and hang from whole ones: they are sent unchanged. Others are sent in parts.
        """
        path, on_path = [record], {id(record)}
        while path:
            record = path[-1]
            parent = None if record.parent is None else self._holder(record.place, record.parent)
            is_plain = self._sent(record) == 0 and self._is_whole(record)
            if is_plain and parent is not None and self._sent(parent) == 0 and id(parent) not in on_path:
                path.append(parent)
                on_path.add(id(parent))
                yield None
                continue
            path.pop()
            record.walked = self._number
            if is_plain and (record.parent is None or (parent and self._sent(parent) == len(parent.hashes))):
                self._set_sent(record, len(record.hashes))
                yield record.data
            else:
                yield from self._send_parts(record)

    def _send_parts(self, record: Record) -> Iterator[bytes | None]:
        """Yield the events of a record if it, or a record that it hangs from, is not whole."""
        path = [(record, self._end(record))]
        on_path = {id(record)}  # hashes form a chain, so cycles are not expected; one would stay unresolved
        while path:
            record, stop = path[-1]
            need = next((need for need in self._needs(record, stop) if id(need[1]) not in on_path), None)
            if need is not None:
                place, owner, owner_stop = need
                yield from self._events(record, place)  # the other record's blocks may hang from these
                path.append((owner, owner_stop))
                on_path.add(id(owner))
                yield None
                continue
            path.pop()
            on_path.discard(id(record))
            yield from self._events(record, stop)

    def _needs(self, record: Record, stop: int) -> Iterator[_Need]:
        """Yield the records to send before this record's blocks up to `stop`, and before which block."""
        start = self._sent(record)
        if start >= stop:
            return
        named = record.hashes[start:stop] if not self._is_whole(record) else ()
        above = [] if start or record.parent is None else [(0, record.parent)]
        for place, block in [*above, *enumerate(named, start)]:
            owner = self._owner(record.place, block)
            if owner is not None and owner is not record:
                position = owner.hashes.index(block) + 1
                if self._sent(owner) < position:
                    yield place, owner, len(owner.hashes) if self._is_whole(owner) else position

    def _events(self, record: Record, stop: int) -> Iterator[bytes]:
        """Yield events for the record's own, unsent blocks up to `stop`."""
        start = self._sent(record)
        if start >= stop:
            return
        self._set_sent(record, stop)
        if start == 0 and self._is_whole(record):
            yield record.data
            return
        named = record.hashes[start:stop]
        wanted = [place for place, block in enumerate(named, start) if self._is_own(record, block)]
        try:
            event = self._decode(record.data)
            yield from [self._encoder.event(blocks_of(event, first, end)) for first, end in runs(wanted)]
        except (OverflowError, TypeError, ValueError) as error:
            self._snapshot.left_out += len(wanted)
            for place in wanted:
                self._ancestors.get(record.place, {}).pop(record.hashes[place], None)
            logger.error(
                "%d blocks cannot be encoded and are left out of a snapshot: %s", len(wanted), error
            )

    def _is_own(self, record: Record, block: ExternalBlockHash) -> bool:
        """Return whether the block is sent with this record; note it if it must be removed again."""
        owner = self._owner(record.place, block)
        if owner is not None and owner is not record:
            return False
        if self._holder(record.place, block) is record:
            return True
        ancestors = self._ancestors.setdefault(record.place, {})
        new = block not in ancestors
        ancestors[block] = None
        return new

    def _owner(self, place: Place, block: ExternalBlockHash) -> Record | None:
        """Return the record that sends a block: its record in this place or another, else its ghost."""
        found = self._holder(place, block)
        if found is None:
            elsewhere = (self._holder(other, block) for other in self._holdings)
            found = next(
                (record for record in elsewhere if record is not None), None
            ) or self.state.ghosts.was(block)
        return found

    def _holder(self, place: Place, block: ExternalBlockHash) -> Record | None:
        """Return the record that held a block in a place."""
        return self._holdings[place].blocks.was(block)

    def _is_whole(self, record: Record) -> bool:
        """Return whether the record held all its blocks."""
        was = self._holdings[record.place].blocks.was
        return all(was(block) is record for block in record.hashes)

    def _end(self, record: Record) -> int:
        """Return the place after the last block that the record held."""
        was, hashes = self._holdings[record.place].blocks.was, record.hashes
        return next((n for n in range(len(hashes), 0, -1) if was(hashes[n - 1]) is record), 0)

    def _sent(self, record: Record) -> int:
        return record.sent if record.snapshot == self._number else 0

    def _set_sent(self, record: Record, sent: int) -> None:
        record.snapshot, record.sent = self._number, sent

    def _decode(self, data: bytes) -> BlockStored:
        """Read a record's event, whatever types its fields have."""
        fields = msgspec.msgpack.decode(data)
        if self._encoder.encoding is Encoding.MAP:
            return BlockStored(*(fields.get(name) for name in _NAMES))
        return BlockStored(*fields[1:], *[None] * (len(_NAMES) - len(fields) + 1))
