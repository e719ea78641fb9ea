"""The sending half of a publisher: batches in, numbered messages out, and the state that they add up to.

Every batch that leaves is in the ring before it is on the wire, and the state is exactly what all of them together say. An
event is encoded once, into the message that it leaves with, and the state refers to it there. Where many batches wait, several
travel as one: their events in order, under one number. One thread owns a sender.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from operator import attrgetter, index
from typing import Any

import zmq

from kvtier.events.config import KVEventsConfig
from kvtier.events.publish.fold import Fold
from kvtier.events.publish.formats import HashFormat
from kvtier.events.publish.hot import (
    Blocks,
    Draft,
    Express,
    Message,
    PythonBlocks,
    PythonExpress,
    PythonMessage,
    make_message,
)
from kvtier.events.publish.ring import Ring
from kvtier.events.publish.sequence import SequenceFile
from kvtier.events.publish.snapshot import Snapshot
from kvtier.events.publish.state import PublishedState
from kvtier.events.types import AllBlocksCleared, BlockRemoved, Mark, blocks_of
from kvtier.events.wire import EventEncoder, batch_ends, frame_batch

__all__ = ["Sender"]

logger = logging.getLogger(__name__)

_UNENCODABLE = (AttributeError, OverflowError, RecursionError, TypeError, ValueError)
_SHARED_FOR = 0.25  # seconds that a snapshot serves newcomers
_JOINED_BATCHES, _JOINED_BYTES = 32, 128 << 10  # ZeroMQ's cost is per message up to about there
_MORE = int(zmq.SNDMORE)
_hashes, _place = attrgetter("block_hashes"), attrgetter("medium", "group_idx", "locality", "ownership")


class Sender:
    """Encodes, filters, numbers and sends; `next_seq` is the number of the next batch."""

    def __init__(self, pub: zmq.Socket[bytes], config: KVEventsConfig, rank: int, numbers: SequenceFile | None) -> None:
        self.topic = config.topic.encode()
        self.epoch = secrets.randbits(63)
        self.rank = rank
        self.encoder = EventEncoder(config.encoding, config.array_version)
        is_u64 = config.hash_format in ("u64", "u63")
        self.state = PublishedState(self.encoder, config.counting, Blocks if is_u64 else PythonBlocks)
        self.next_seq = numbers.start if numbers is not None else 0
        self.ring = Ring(config.buffer_steps, config.buffer_bytes, self.next_seq)
        self.counters = dict.fromkeys(
            ("sent", "joined", "events", "filtered", "unencodable", "heartbeats", "snapshots"), 0
        )
        self._pub = pub
        self._numbers = numbers
        self._reserved: float = numbers.start if numbers is not None else float("inf")
        self._formats = HashFormat(config.hash_format)
        is_plain = config.encoding == "map" and config.hash_format in ("as_is", "u64")
        self._short = (Express if is_plain else PythonExpress)(self.state)
        self._make_message = make_message if is_plain else PythonMessage
        self._most_blocks = config.max_blocks_per_event
        self._waiting: Message = self._make_message()  # the events of batches that are to leave together
        self._waiting_rank = rank
        self._interval = config.heartbeat_interval
        self._mark_due = False
        self._spoke_at = self._marked_at = time.monotonic()
        self._spoken = False
        self._snapshot: Snapshot | None = None
        self._snapshot_at = 0.0

    # -- out ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Send the first batch: whatever an earlier process said is void."""
        self._say(self.encoder.event(AllBlocksCleared()), self._mark())

    def send(self, batch: Any, more: bool = False) -> None:
        """Send what of a batch is news. One that cannot be encoded is logged; it changes nothing and takes no number.

        If there is `more` to come it may wait for the next one, or for `flush`, to travel with it.
        """
        given = batch.data_parallel_rank
        try:
            rank = self.rank if given is None else self._encodable(given)
        except _UNENCODABLE as error:
            self._refuse(error)
        else:
            if rank != self._waiting_rank:
                self.flush()
                self._waiting_rank = rank
            self._take_in(batch)
        if not more or self._is_full(self._waiting):
            self.flush()

    def send_joined(self, queue: deque[Any], most: int) -> int:
        """Send up to `most` batches from the front of a queue as one message, which may wait; return how many.

        The first that cannot go the short way at all stays in the queue.
        """
        if self._most_blocks is not None:
            return 0
        waiting = self._waiting
        before = waiting.batches
        room = min(most, _JOINED_BATCHES - before)
        begun = self._short.join(queue, room, _JOINED_BYTES, self._waiting_rank, waiting)
        sent = waiting.batches - before
        if begun is not None:
            self._finish(*begun)
            sent += 1
        if self._is_full(waiting):
            self.flush()
        return sent

    def flush(self) -> None:
        """Send the batches that wait for others, as one; nothing if there are none."""
        message = self._waiting
        if not message.batches:
            if not message.events:
                return
            message.batches, message.ts = (
                1,
                time.time(),
            )  # one that failed halfway, say without memory, has changed the state
        self.counters["joined"] += message.batches - 1
        self._waiting = self._make_message()
        if self._mark_due:
            message.append(self._mark())
        self._emit(message, self._waiting_rank)

    def _is_full(self, message: Message) -> bool:
        return message.batches >= _JOINED_BATCHES or len(message) >= _JOINED_BYTES

    def _encodable(self, given: Any) -> int:
        """Return a rank as the int that it is, or fail."""
        rank = index(given)
        if rank != self._waiting_rank:
            batch_ends(0.0, 0, rank)
        return rank

    def _take_in(self, batch: Any) -> None:
        """Bring a batch into the state, and what of it is news to the message that waits."""
        waiting = self._waiting
        before = waiting.events
        try:
            ts, events = float(batch.ts), batch.events
            if self._most_blocks is not None:
                events = [part for event in events for part in _cut_event(event, self._most_blocks)]
            drafts = self._short.take(events, waiting)
            if drafts is None:
                drafts = [self._draft(event) for event in _join_removals(events)]
        except _UNENCODABLE as error:
            self._refuse(error)
        else:
            self._finish(ts, before, drafts, is_empty=not events)

    def _refuse(self, error: Exception) -> None:
        self.counters["unencodable"] += 1
        logger.error("a batch of events cannot be encoded and is dropped whole: %s", error)

    def _finish(self, ts: float, before: int, drafts: list[Draft], is_empty: bool = False) -> None:
        """Do what is left of a batch, and count it in the message that waits if there is news in it, or nothing at all."""
        waiting = self._waiting
        for draft in drafts:
            self._apply(draft, waiting)
        if waiting.events > before or is_empty:
            waiting.batches += 1
            waiting.ts = ts
        else:
            self.counters["filtered"] += 1

    def absorb(self, fold: Fold) -> None:
        """Take over what batches did that found no room. Their numbers stay unused, so that everybody sees a gap."""
        self.flush()
        lost = fold.apply(self.state, self._formats)
        logger.warning("%d batches found no room and were not sent; replay gives their effect", fold.batches)
        if lost:
            logger.error("%d blocks of batches that found no room cannot be encoded and are dropped", lost)
        self.next_seq += fold.batches
        self.ring.restart(self.next_seq)
        if self._interval is not None:
            self._say(self._mark())

    def beat(self, now: float) -> float:
        """Do what time alone makes due: a heartbeat, a mark, an old snapshot; return the seconds until there may be more."""
        wait = math.inf
        if self._snapshot is not None:
            wait = self._snapshot_at + _SHARED_FOR - now
            if wait <= 0:
                self._snapshot, wait = None, math.inf
        if self._interval is None:
            return wait
        if self._spoken:
            self._spoken, self._spoke_at = False, now
        if now - self._spoke_at >= self._interval:
            self.counters["heartbeats"] += 1
            self._say(self._mark())
            self._spoken, self._spoke_at = False, now
        self._mark_due = now - self._marked_at >= self._interval
        return min(wait, self._spoke_at + self._interval - now)

    def _say(self, *events: bytes) -> None:
        """Send a batch of now."""
        message = self._make_message()
        for event in events:
            message.append(event)
        message.batches, message.ts = 1, time.time()
        self._emit(message, self.rank)

    def _emit(self, message: Message, rank: int) -> None:
        """Number a message, keep it, send it."""
        message.seal(*batch_ends(message.ts, message.events, rank))
        payload = message.payload()  # a small ring forgets the message at once
        seq = self.next_seq
        if seq >= self._reserved:
            self._reserve(seq)
        self.ring.append(message, message.batches)
        self.next_seq = seq + 1
        self._spoken = True
        send = self._pub.send
        send(self.topic, _MORE)
        send(seq.to_bytes(8, "big"), _MORE)
        send(payload)
        self.counters["sent"] += 1
        self.counters["events"] += message.events

    def _mark(self) -> bytes:
        self._mark_due, self._marked_at = False, time.monotonic()
        return self.encoder.mark(Mark(self.epoch, self.state.blocks, self.state.digest))

    def _reserve(self, seq: int) -> None:
        if self._numbers is not None:
            self._numbers.reserve(seq)
            self._reserved = self._numbers.reserved

    # -- events ---------------------------------------------------------------------------------------------------------

    def _draft(self, event: Any) -> Draft:
        kind = type(event).__name__  # not the class: an engine's own events are as good as ours
        if kind in ("BlockStored", "BlockRemoved"):
            event = self._formats.event(event)
        return kind, event, self.encoder.event(event)

    def _apply(self, draft: Draft, out: Message) -> None:
        kind, event, data = draft
        try:
            if kind == "BlockStored":
                self.state.store(event, data, out)
            elif kind == "BlockRemoved":
                self.state.remove(event, data, out)
            elif kind == "TierCleared":
                self.state.clear_medium(event.medium, out)
            else:
                if kind == "AllBlocksCleared":
                    self.state.clear()
                out.append(data)
        except _UNENCODABLE as error:
            self.counters["unencodable"] += 1
            logger.error("a %s has fields of the wrong type and is dropped: %s", kind, error)

    # -- replay's sources -------------------------------------------------------------------------------------------------

    def frame(self, events: Sequence[bytes]) -> bytes:
        """Return encoded events as a batch of now."""
        return frame_batch(time.time(), events, self.rank)

    def mark(self) -> bytes:
        """Return the mark of the present state, encoded."""
        return self.encoder.mark(Mark(self.epoch, self.state.blocks, self.state.digest))

    def take_snapshot(self) -> Snapshot:
        """Return the state as of the newest batch, or as of one shortly before that the ring still follows on."""
        if self._snapshot is None or self._snapshot.as_of + 1 < self.ring.head:
            self._snapshot = Snapshot(self.state, self.encoder, self.next_seq - 1, self.epoch)
            self._snapshot_at = time.monotonic()
            self.counters["snapshots"] += 1
        return self._snapshot

    def check(self) -> None:
        """Raise `IntegrityError` where state, ring or numbers are broken."""
        self.state.check()
        self.ring.check()


def _join_removals(events: Iterable[Any]) -> list[Any]:
    """Return the events with each run of removals from one place as one; engines send them block by block."""
    joined: list[Any] = []
    for kind, run in groupby(events, type):
        if kind.__name__ == "BlockRemoved":
            joined += chain.from_iterable(_join(place, list(removals)) for place, removals in groupby(run, _place))
        else:
            joined += run
    return joined


def _join(place: tuple[Any, ...], removals: list[Any]) -> list[Any]:
    """Return removals from one place as one, or as they are if there is one only or one has no list of hashes."""
    lists = list(map(_hashes, removals))
    if len(lists) == 1 or set(map(type, lists)) != {list}:
        return removals
    return [BlockRemoved(list(chain.from_iterable(lists)), *place)]


def _cut_event(event: Any, most: int) -> Iterable[Any]:
    """Return a stored event in parts of at most so many blocks, others whole."""
    if type(event).__name__ != "BlockStored" or len(event.block_hashes) <= most:
        return (event,)
    return [blocks_of(event, start, start + most) for start in range(0, len(event.block_hashes), most)]
