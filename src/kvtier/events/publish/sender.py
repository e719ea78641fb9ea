"""The sending half of a publisher: batches in, numbered messages out, and the resulting states.

Every message is in the ring before it is on the wire, and the states, one per rank, are exactly the sum of
all messages. If many batches wait, several of one rank travel as one: their events in order, under one
number. One thread owns a sender.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Sequence
from operator import index
from typing import Any

import zmq

from kvtier.events.config import KVEventsConfig
from kvtier.events.publish.drafts import UNENCODABLE, Draft, Drafter
from kvtier.events.publish.outbox import Overflow
from kvtier.events.publish.ring import Ring
from kvtier.events.publish.sequence import SequenceFile, number_from_clock
from kvtier.events.publish.snapshot import Snapshot
from kvtier.events.publish.state import PublishedState
from kvtier.events.types import AllBlocksCleared, Mark
from kvtier.events.wire import U64, EventEncoder, batch_ends
from kvtier.log_limit import LogLimit

__all__ = ["Sender"]

logger = logging.getLogger(__name__)

_SHARED_FOR = 0.25  # seconds in which new clients share a snapshot
_MOST_USED = 2  # older snapshots that slow clients still read, each as large as the state
_JOINED_BATCHES, _JOINED_BYTES = 32, 128 << 10  # ZeroMQ's cost is per message up to about there
_LARGEST_BYTES = 64 << 10  # of a message, but for its last event: who reads it holds the interpreter, too
_BLOCKS_A_NUMBER = 64
_FREED_AT_ONCE = 16
_MORE = int(zmq.SNDMORE)


class Sender:
    """Encodes, filters, numbers and sends."""

    def __init__(
        self, pub: zmq.Socket[bytes], config: KVEventsConfig, rank: int, numbers: SequenceFile | None
    ) -> None:
        self.topic = config.topic.encode()
        self.epoch = secrets.randbits(63)
        self.rank = rank
        self.encoder = EventEncoder(config.encoding, config.array_version)
        self.draft = Drafter(config, self.encoder).draft
        self.first_seq = numbers.start if numbers is not None else number_from_clock()
        self.ring = Ring(config.buffer_steps, config.buffer_bytes, self.first_seq)
        self.counters = dict.fromkeys(
            ("sent", "joined", "events", "filtered", "unencodable", "left_out", "heartbeats", "snapshots"), 0
        )
        self._unencodable = LogLimit()
        self._pub = pub
        self._numbers = numbers
        self._counting = config.counting
        self._states = {rank: self._make_state()}
        # The batches that leave together: their events, their number, their rank, the time of the last one.
        self._events: list[bytes] = []
        self._batches = self._bytes = 0
        self._batch_rank = rank
        self._ts = 0.0
        self._interval = config.heartbeat_interval
        self._mark_due = True  # the first message has one: it tells that another process speaks
        self._spoke_at, self._marked_at = time.monotonic(), -math.inf
        self._snapshot: Snapshot | None = None
        self._snapshot_at = 0.0
        self._used: list[Snapshot] = []  # snapshots that serve no new clients
        self._waste: list[dict[Any, Any] | deque[Any]] = []  # to be freed step by step

    # -- out ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Send the first batch: it voids everything from an earlier process."""
        self._say(self.encoder.event(AllBlocksCleared()), self.take_mark())

    def send(self, batch: Any, more: bool = False) -> None:
        """Send the events of a batch that are new.

        A batch that cannot be encoded is logged and gets no number.

        If there is `more` to come, the batch may wait and travel with the next one, or leave at `flush`.
        """
        try:
            rank, ts = batch.data_parallel_rank, float(batch.ts)
            if rank is None:
                batch.data_parallel_rank = rank = self.rank
            if type(rank) is not int or rank not in self._states:
                rank = _checked_rank(rank)
            drafts, problems = self.draft(batch.events)
        except UNENCODABLE as error:
            self.counters["unencodable"] += 1
            if (more_lines := self._unencodable.admit()) is not None:
                line = "a batch of events cannot be encoded and is dropped whole: %s%s"
                logger.error(line, error, more_lines)
        else:
            if problems:
                self.counters["unencodable"] += len(problems)
                if (more_lines := self._unencodable.admit()) is not None:
                    logger.error(
                        "%d events are dropped: %s%s", len(problems), "; ".join(problems), more_lines
                    )
            if rank != self._batch_rank:
                self.flush()
                self._batch_rank = rank
            if self._take_in(drafts, ts) or not batch.events:
                self._batches += 1
                self._ts = ts
            else:
                self.counters["filtered"] += 1
        if not more or self._batches >= _JOINED_BATCHES or self._bytes >= _JOINED_BYTES:
            self.flush()

    def _take_in(self, drafts: list[Draft], ts: float) -> bool:
        """Apply a batch to the state and put its new events into `_events`; return whether there are any.

        A batch that is too large for one message leaves in several.
        """
        out, rank = self._events, self._batch_rank
        state = self._state(rank)
        before = len(out)
        for kind, event, data in drafts:
            if self._bytes >= _LARGEST_BYTES and len(out) > before:
                self._batches, self._ts = self._batches + 1, ts
                self.flush()
                out, before = self._events, 0
            self._bytes += len(data)
            if kind == "BlockStored":
                state.store(event, data, out)
            elif kind == "BlockRemoved":
                state.remove(event, data, out)
            else:
                if kind == "AllBlocksCleared":
                    self._clear(rank)
                    state = self._state(rank)
                out.append(data)
        return len(out) > before

    def flush(self) -> None:
        """Send the waiting batches as one message, if there are any."""
        if not self._batches and not self._events:
            return
        if self._mark_due:
            self._events.append(self.take_mark())
        # Events without a batch: a batch failed halfway (no memory?), but it has changed the state.
        batches = self._batches or 1
        self.counters["joined"] += batches - 1
        ts = self._ts if self._batches else time.time()
        events, self._events, self._batches, self._bytes = self._events, [], 0, 0
        self._emit(ts, events, self._batch_rank, batches)

    def absorb(self, overflow: Overflow) -> None:
        """Apply the effect of batches that found no room.

        Their numbers stay unused, so every consumer sees a gap.
        """
        self.flush()
        for rank in overflow.ranks():
            try:
                rank = _checked_rank(rank)
            except UNENCODABLE as error:
                logger.error("batches that found no room have a rank that cannot be encoded: %s", error)
                continue
            if rank in overflow.cleared:
                self._clear(rank)
            overflow.apply(rank, self._state(rank))
        logger.warning(
            "%d batches found no room and were not sent; replay gives their effect", overflow.batches
        )
        if overflow.unreadable:
            self.counters["unencodable"] += overflow.unreadable
            logger.error("%d batches or events of them cannot be encoded", overflow.unreadable)
        # Enough numbers for a replay of the state, in messages of moderate size and of one rank each.
        unused = max(overflow.batches, len(self._states), self.blocks // _BLOCKS_A_NUMBER)
        self.ring.restart(self.next_seq + unused)
        if self._interval is not None:
            self._say(self.take_mark())

    def beat(self, now: float) -> float:
        """Do the work that time makes due: a heartbeat, a mark, an old snapshot.

        Return the seconds until the next.
        """
        wait = math.inf
        if self._snapshot is not None:
            wait = max(self._snapshot_at + _SHARED_FOR - now, 0.0)
            if wait == 0.0 and self._snapshot.is_made and len(self._used) < _MOST_USED:
                self._retire_snapshot()
                wait = math.inf
        if self._interval is None:
            return wait
        if now - self._spoke_at >= self._interval:
            self.counters["heartbeats"] += 1
            self._say(self.take_mark())
        self._mark_due = now - self._marked_at >= self._interval
        return min(wait, self._spoke_at + self._interval - now)

    def _say(self, *events: bytes) -> None:
        """Send a batch with the current time."""
        self._emit(time.time(), events, self.rank, 1)

    def _emit(self, ts: float, events: Sequence[bytes], rank: int, batches: int) -> None:
        """Number a message, keep it, and send it."""
        head, tail = batch_ends(ts, len(events), rank)
        parts = (head, *events, tail)
        seq = self.next_seq
        if self._numbers is not None:
            self._numbers.reserve(seq)
        self.ring.append(parts, batches)
        self._spoke_at = time.monotonic()
        send = self._pub.send
        send(self.topic, _MORE)
        send(seq.to_bytes(8, "big"), _MORE)
        send(b"".join(parts))
        self.counters["sent"] += 1
        self.counters["events"] += len(events)

    def take_mark(self) -> bytes:
        """Return the mark of the present state, encoded; the next one is due after the interval."""
        self._mark_due, self._marked_at = False, time.monotonic()
        return self.encoder.mark(self.mark())

    @property
    def next_seq(self) -> int:
        """Return the number of the next message."""
        return self.ring.next

    # -- states ------------------------------------------------------------------------------------

    def _make_state(self) -> PublishedState:
        return PublishedState(self.encoder, self._counting)

    def _state(self, rank: int) -> PublishedState:
        return self._states.get(rank) or self._states.setdefault(rank, self._make_state())

    def _clear(self, rank: int) -> None:
        """Empty the state of a rank; an unfinished snapshot keeps the old state."""
        old = self._states.get(rank)
        self._states[rank] = self._make_state()
        if old is not None:
            self._waste += old.take_apart()

    @property
    def blocks(self) -> int:
        """Return how many blocks all ranks hold."""
        return sum(state.blocks for state in list(self._states.values()))

    @property
    def digest(self) -> int:
        """Return the digest of all blocks of all ranks."""
        return sum(state.digest for state in list(self._states.values())) & U64

    @property
    def ghosts(self) -> int:
        """Return how many removed blocks are kept because others hang from them."""
        return sum(state.ghost_count for state in list(self._states.values()))

    def mark(self) -> Mark:
        """Return the mark: the epoch, and what all ranks hold."""
        return Mark(self.epoch, self.blocks, self.digest)

    # -- snapshots ---------------------------------------------------------------------------------

    def take_snapshot(self) -> Snapshot | None:
        """Return the state as of the newest message, or of an earlier one from which the ring continues.

        `None` while another snapshot is being made, or too many are being read: ask again.
        """
        found = self._snapshot
        if found is not None and found.as_of + 1 >= self.ring.head:
            return found
        if len(self._used) >= _MOST_USED or (found is not None and not found.is_made):
            return None
        self._retire_snapshot()
        self.counters["snapshots"] += 1
        number = self.counters["snapshots"]
        self._snapshot = Snapshot(self._states, self.encoder, self.next_seq - 1, self.mark(), number)
        self._snapshot_at = time.monotonic()
        return self._snapshot

    @property
    def is_making_snapshot(self) -> bool:
        """Return whether the current snapshot is unfinished."""
        return self._snapshot is not None and not self._snapshot.is_made

    def work(self, seconds: float) -> bool:
        """Make snapshots and free unused memory, for about `seconds`. Return whether there is more to do."""
        snapshot = self._snapshot
        if snapshot is not None and not snapshot.is_made:
            snapshot.advance(seconds)
            if snapshot.is_made:
                self.counters["left_out"] += snapshot.left_out
            return True
        for used in [used for used in self._used if not used.readers]:
            self._used.remove(used)
            self._waste.append(deque(used.batches))
            used.batches.clear()
        deadline = time.monotonic() + seconds
        while self._waste and time.monotonic() < deadline:
            piece = self._waste[-1]
            pop = piece.popitem if isinstance(piece, dict) else piece.pop
            for _ in range(min(len(piece), _FREED_AT_ONCE)):
                pop()
            if not piece:
                self._waste.pop()
        return bool(self._waste)

    def _retire_snapshot(self) -> None:
        if self._snapshot is not None:
            self._used.append(self._snapshot)
            self._snapshot = None

    def check(self) -> None:
        """Raise `IntegrityError` if states, snapshots or ring are broken."""
        for state in self._states.values():
            state.check()
        for snapshot in (*self._used, *([self._snapshot] if self._snapshot else ())):
            snapshot.check()
        self.ring.check()


def _checked_rank(rank: Any) -> int:
    """Return a rank as an int, or raise."""
    number: int = index(rank)
    batch_ends(0.0, 0, number)
    return number
