"""A publisher's state at one moment, as encoded events: parents before children, removed ancestors first stored, then removed.

Taking a snapshot copies a few tables and is quick; its events are made as they are asked for, once for all who ask, while
the state goes on changing. The first is `AllBlocksCleared`, the last carries the mark; applied in order they give exactly
the state as it was. One thread owns it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvtier.errors import IntegrityError
from kvtier.events.publish.state import PublishedState, Record, runs
from kvtier.events.types import AllBlocksCleared, BlockStored, ExternalBlockHash, Mark, blocks_of
from kvtier.events.wire import Encoding, EventEncoder, Place

__all__ = ["Snapshot"]

_FIELDS = len(BlockStored.__struct_fields__)
_REMOVED_AT_ONCE = 4096
_decode_map = msgspec.msgpack.Decoder(BlockStored).decode

_Need = tuple[int, Record, int]
"""Before which place of a record it is needed, another record, and how many of its blocks must have been sent."""


class Snapshot:
    """The events that lead from anything to the state as of sequence number `as_of`."""

    def __init__(self, state: PublishedState, encoder: EventEncoder, as_of: int, epoch: int) -> None:
        """Take the state as it is now; `epoch` is the publisher's."""
        self.as_of = as_of
        self.mark = Mark(epoch, state.blocks, state.digest)
        self._encoder = encoder
        self._holdings = {holding.place: holding for holding in state.holdings()}
        self._held = {place: holding.blocks.copy() for place, holding in self._holdings.items()}
        self._records = state.records().copy()
        self._ghosts = state.ghosts().copy()
        self._sent: dict[int, int] = {}  # by number of a record: how many of its blocks were dealt with
        self._ancestors: dict[Place, dict[ExternalBlockHash, None]] = {}  # sent though not held
        self._made: list[bytes] = []
        self._making = self._make()

    def __iter__(self) -> Iterator[bytes]:
        """Yield all events; any number of readers may be at different places."""
        place = 0
        while True:
            if place == len(self._made):
                event = next(self._making, None)
                if event is None:
                    return
                self._made.append(event)
            yield self._made[place]
            place += 1

    def check(self) -> None:
        """Raise `IntegrityError` where what is held is not what the mark says."""
        held = sum(map(len, self._held.values()))
        if held != self.mark.blocks:
            raise IntegrityError(f"snapshot as of {self.as_of} holds {held} blocks, its mark says {self.mark.blocks}")

    def _make(self) -> Iterator[bytes]:
        yield self._encoder.event(AllBlocksCleared())
        for record in self._records.values():
            if self._can_go(record):
                self._sent[record.number] = record.size
                yield record.data
            else:
                yield from self._send(record)
        for place, hashes in self._ancestors.items():
            gone = list(hashes)
            for start in range(0, len(gone), _REMOVED_AT_ONCE):
                yield self._encoder.event(self._holdings[place].removal(gone[start : start + _REMOVED_AT_ONCE]))
        yield self._encoder.mark(self.mark)

    def _can_go(self, record: Record) -> bool:
        """Return whether the record is whole, was not sent, and hangs from nothing or from what was sent: so most are."""
        if record.number in self._sent or not self._is_whole(record):
            return False
        parent = None if record.parent is None else self._holder(record.place, record.parent)
        return record.parent is None or (parent is not None and self._sent.get(parent.number) == parent.size)

    def _send(self, record: Record) -> Iterator[bytes]:
        """Yield the events of a record, and before it those of the records that it hangs from."""
        path = [(record, self._end(record))]
        on_path = {record.number}  # hashes chain, so none hangs from itself; were one to, it is left hanging
        while path:
            record, stop = path[-1]
            need = next((each for each in self._needs(record, stop) if each[1].number not in on_path), None)
            if need is not None:
                place, owner, owner_stop = need
                yield from self._events(record, place)  # the owner's blocks may hang from these
                path.append((owner, owner_stop))
                on_path.add(owner.number)
                continue
            path.pop()
            on_path.discard(record.number)
            yield from self._events(record, stop)

    def _needs(self, record: Record, stop: int) -> Iterator[_Need]:
        """Yield what must be sent before this record's blocks up to `stop`, each with the place before which it must."""
        start = self._sent.get(record.number, 0)
        if start >= stop:
            return
        named = record.hashes()[start:stop] if not self._is_whole(record) else ()
        above = [] if start or record.parent is None else [(0, record.parent)]
        for place, block in [*above, *enumerate(named, start)]:
            owner = self._owner(record.place, block)
            if owner is not None and owner is not record:
                position = owner.hashes().index(block) + 1
                if self._sent.get(owner.number, 0) < position:
                    yield place, owner, owner.size if self._is_whole(owner) else position

    def _events(self, record: Record, stop: int) -> Iterator[bytes]:
        """Yield events for the record's blocks up to `stop` that are its own to send and have not been."""
        start = self._sent.get(record.number, 0)
        if start >= stop:
            return
        self._sent[record.number] = stop
        if start == 0 and self._is_whole(record):
            yield record.data
            return
        named = record.hashes()[start:stop]
        wanted = [place for place, block in enumerate(named, start) if self._is_own(record, block)]
        event = self._decode(record.data)
        for first, end in runs(wanted):
            yield self._encoder.event(blocks_of(event, first, end))

    def _is_own(self, record: Record, block: ExternalBlockHash) -> bool:
        """Return whether the block goes out with this record; note it if it must be removed again."""
        owner = self._owner(record.place, block)
        if owner is not None and owner is not record:
            return False
        if self._held[record.place].get(block) == record.number:
            return True
        ancestors = self._ancestors.setdefault(record.place, {})
        new = block not in ancestors
        ancestors[block] = None
        return new

    def _owner(self, place: Place, block: ExternalBlockHash) -> Record | None:
        """Return the record that sends a block: the one that holds it there, else elsewhere, else its ghost."""
        found = self._holder(place, block)
        if found is None:
            elsewhere = (self._holder(other, block) for other in self._held)
            found = next((record for record in elsewhere if record is not None), None) or self._ghosts.get(block)
        return found

    def _holder(self, place: Place, block: ExternalBlockHash) -> Record | None:
        """Return the record that holds a block in a place."""
        return self._records.get(self._held[place].get(block))

    def _is_whole(self, record: Record) -> bool:
        """Return whether the record holds all its blocks."""
        return self._held[record.place].count(record.hashes(), record.number) == record.size

    def _end(self, record: Record) -> int:
        """Return the place behind the last block that the record holds."""
        held, hashes = self._held[record.place], record.hashes()
        return next((n for n in range(len(hashes), 0, -1) if held.get(hashes[n - 1]) == record.number), 0)

    def _decode(self, data: bytes) -> BlockStored:
        if self._encoder.encoding is Encoding.MAP:
            return _decode_map(data)
        fields = msgspec.msgpack.decode(data)[1:]
        return BlockStored(*fields, *[None] * (_FIELDS - len(fields)))
