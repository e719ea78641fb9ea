"""The sending half of a publisher: batches in, numbered messages out, and the resulting states.

Every message is in the ring before it is on the wire, and the states, one per rank, are exactly the sum of
all messages. If many batches wait, several of one rank travel as one: their events in order, under one
number. If too many wait, they are not sent, but the states include their effect: their numbers stay unused,
so every consumer sees a gap and asks for the state. One thread owns everything here.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import Any

import zmq

from kvtier.errors import InputError, IntegrityError, LogLimit, OutsideError
from kvtier.events.config import KVEventsConfig
from kvtier.events.publish.encoder import UNENCODABLE, BatchEncoder, EncodedEvent
from kvtier.events.publish.state import PublishedState, Snapshot
from kvtier.events.types import AllBlocksCleared, Mark
from kvtier.events.wire import U64, EventEncoder, batch_ends

logger = logging.getLogger(__name__)

_SHARED_FOR = 0.25  # seconds in which new clients share a snapshot
# Older snapshots that slow clients still read: these many, and more while they have no more bytes than that.
_USED, _USED_BYTES = 2, 64 << 20
_READ_SECONDS, _READ_RATE = 1.0, 16 << 20  # if others wait, clients must read so fast after these seconds
_JOINED_BATCHES, _JOINED_BYTES = 32, 128 << 10  # ZeroMQ's cost is per message up to about there
_LARGEST_BYTES = 64 << 10  # of a message, without its last event: decoding one holds the interpreter, too
_BLOCKS_A_NUMBER = 64
_FREED_AT_ONCE = 16
_MORE = int(zmq.SNDMORE)
_COUNTERS = "sent", "joined", "events", "filtered", "unencodable", "overflowed", "heartbeats", "snapshots"


class Sender:
    """Encodes, filters, numbers and sends."""

    def __init__(
        self, pub: zmq.Socket[bytes], config: KVEventsConfig, rank: int, numbers: SequenceFile | None
    ) -> None:
        self.topic = config.topic.encode()
        self.epoch = secrets.randbits(63)
        self.rank = rank
        self.encoder = EventEncoder(config.encoding, config.array_version)
        self.first_seq = numbers.start if numbers is not None else number_from_clock()
        self.ring = Ring(config.buffer_steps, config.buffer_bytes, self.first_seq)
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._encode = BatchEncoder(config, self.encoder).encode
        self._unencodable = LogLimit()
        self._gap = 0  # batches that were not sent since the last message
        self._pub = pub
        self.clock = time.monotonic
        """Times the readers of snapshots."""
        self._numbers = numbers
        self._counting = config.counting
        self._states = {rank: self._make_state()}
        # The batches that leave together: their events, their number, their rank, the time of the last one.
        self._events: list[bytes] = []
        self._batches = self._bytes = 0
        self._batch_rank = rank
        self._ts = 0.0
        self._interval = config.heartbeat_interval
        self._mark_due = True  # the first message has one: it shows that another process sends
        self._spoke_at, self._marked_at = time.monotonic(), -math.inf
        self._snapshot: Snapshot | None = None
        self._used: list[Snapshot] = []  # snapshots that serve no new clients, the oldest first
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
        encoded = self._encode_batch(batch)
        if encoded is not None:
            rank, ts, events = encoded
            if rank != self._batch_rank:
                self.flush()
                self._batch_rank = rank
            if self._take_in(events, ts) or not batch.events:
                self._batches += 1
                self._ts = ts
            else:
                self.counters["filtered"] += 1
        if not more or self._batches >= _JOINED_BATCHES or self._bytes >= _JOINED_BYTES:
            self.flush()

    def _encode_batch(self, batch: Any) -> tuple[int, float, list[EncodedEvent]] | None:
        """Return the rank, the time and the encoded events of a batch; `None` if it cannot be encoded."""
        try:
            rank, ts = batch.data_parallel_rank, float(batch.ts)
            if rank is None:
                batch.data_parallel_rank = rank = self.rank
            if type(rank) is not int or rank not in self._states:
                rank = _checked_rank(rank)
            events, problems = self._encode(batch.events)
        except UNENCODABLE as error:
            self.counters["unencodable"] += 1
            if (more_lines := self._unencodable.admit()) is not None:
                line = "a batch of events cannot be encoded and is dropped whole: %s%s"
                logger.error(line, error, more_lines)
            return None
        if problems:
            self.counters["unencodable"] += len(problems)
            if (more_lines := self._unencodable.admit()) is not None:
                logger.error("%d events are dropped: %s%s", len(problems), "; ".join(problems), more_lines)
        return rank, ts, events

    def _take_in(self, events: list[EncodedEvent], ts: float) -> bool:
        """Apply a batch to the state and put its new events into `_events`; return whether there are any.

        A batch that is too large for one message leaves in several.
        """
        out, rank = self._events, self._batch_rank
        before = len(out)
        for encoded in events:
            if self._bytes >= _LARGEST_BYTES and len(out) > before:
                self._batches, self._ts = self._batches + 1, ts
                self.flush()
                out, before = self._events, 0
            self._bytes += len(encoded[2])
            self._apply(rank, encoded, out)
        return len(out) > before

    def _apply(self, rank: int, encoded: EncodedEvent, out: list[bytes]) -> None:
        """Apply an event to the state of a rank, and append what is new in it to `out`."""
        kind, event, data = encoded
        state = self._states.get(rank) or self._states.setdefault(rank, self._make_state())
        if kind == "BlockStored":
            state.store(event, data, out)
        elif kind == "BlockRemoved":
            state.remove(event, data, out)
        else:
            if kind == "AllBlocksCleared":
                self._clear(rank)
            out.append(data)

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

    def leave_out(self, batch: Any) -> None:
        """Apply a batch to the state without sending it.

        Its number stays unused and the ring begins after it, so every consumer sees a gap. Call `end_gap`
        after the last such batch.
        """
        self.flush()
        self.ring.restart(self.next_seq + 1)  # before the state changes, which could fail
        self.counters["overflowed"] += 1
        self._gap += 1
        encoded = self._encode_batch(batch)
        if encoded is not None:
            rank, _, events = encoded
            for event in events:
                self._apply(rank, event, [])

    def end_gap(self) -> None:
        """Show consumers the gap in the numbers."""
        if not self._gap:
            return
        logger.warning("%d batches waited too long and were not sent; replay gives their effect", self._gap)
        # Enough numbers for a replay of the state, in messages of moderate size and of one rank each.
        wanted = max(len(self._states), self.blocks // _BLOCKS_A_NUMBER)
        self.ring.restart(self.next_seq + max(wanted - self._gap, 0))
        self._gap = 0
        if self._interval is not None:
            self._say(self.take_mark())

    def forget_all(self, lost: int) -> None:
        """Begin again with empty states after some batches were lost, and tell consumers to do the same.

        The effect of the lost batches is not known. A state without a block that is cached costs a hit;
        a state with a block that is not cached would be wrong.
        """
        self.end_gap()
        self.flush()
        logger.error("%d batches found no room and are lost: consumers are told to forget all blocks", lost)
        self.counters["overflowed"] += lost
        self.ring.restart(self.next_seq + max(lost, len(self._states)))
        for rank in list(self._states):
            self._clear(rank)
        cleared = self.encoder.event(AllBlocksCleared())
        for rank in self._states:
            if rank != self.rank:
                self._emit(time.time(), [cleared], rank, 1)
        self._say(cleared, self.take_mark())

    def beat(self, now: float) -> float:
        """Send a heartbeat, plan a mark and retire an old snapshot if they are due.

        Return the seconds until something is due again.
        """
        wait = math.inf
        if self._snapshot is not None and not self._is_crowded():
            wait = max(self._snapshot.begun_at + _SHARED_FOR - now, 0.0)
            if wait == 0.0 and self._snapshot.is_made:
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

    def _make_state(self, before: PublishedState | None = None) -> PublishedState:
        return PublishedState(self.encoder, self._counting, before.groups if before else None)

    def _clear(self, rank: int) -> None:
        """Empty the state of a rank; an unfinished snapshot keeps the old state."""
        old = self._states.get(rank)
        self._states[rank] = self._make_state(old)
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
    def ancestors(self) -> int:
        """Return how many removed events are kept because others hang from them."""
        return sum(state.ancestors for state in list(self._states.values()))

    def mark(self) -> Mark:
        """Return the mark: the epoch, and what all ranks hold."""
        return Mark(self.epoch, self.blocks, self.digest)

    # -- snapshots ---------------------------------------------------------------------------------

    def take_snapshot(self) -> Snapshot | None:
        """Return the state as of the newest message, or of an earlier one from which the ring continues.

        `None` means that the caller should ask again: another snapshot is being made, or too many are being
        read. The oldest of these that is read too slowly is given up.
        """
        found = self._snapshot
        if found is not None and found.as_of + 1 >= self.ring.head:
            return found
        if found is not None and not found.is_made:
            return None
        if self._is_crowded():
            now = self.clock()
            slow = next((used for used in self._used if not _is_read_fast(used, now)), None)
            if slow is None:
                return None
            self._free_snapshot(slow)
        self._retire_snapshot()
        self.counters["snapshots"] += 1
        self._snapshot = Snapshot(self._states, self.encoder, self.next_seq - 1, self.mark())
        return self._snapshot

    def _is_crowded(self) -> bool:
        """Return whether slow clients read as many older snapshots as may be kept."""
        return len(self._used) >= _USED and sum(one.num_bytes for one in self._used) >= _USED_BYTES

    def _free_snapshot(self, used: Snapshot) -> None:
        """Forget an older snapshot; if it still has readers, they find it given up."""
        self._used.remove(used)
        self._waste.append(deque(used.batches))
        used.batches.clear()
        used.is_given_up = True

    @property
    def is_making_snapshot(self) -> bool:
        """Return whether the current snapshot is unfinished."""
        return self._snapshot is not None and not self._snapshot.is_made

    def work(self, seconds: float) -> bool:
        """Make snapshots and free unused memory, for about `seconds`. Return whether there is more to do."""
        snapshot = self._snapshot
        if snapshot is not None and not snapshot.is_made:
            snapshot.advance(seconds)
            return True
        for used in [used for used in self._used if not used.readers]:
            self._free_snapshot(used)
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


def _is_read_fast(snapshot: Snapshot, now: float) -> bool:
    """Return whether a reader of a snapshot keeps up with `_READ_RATE`."""
    return any(
        reader.num_bytes >= (now - reader.began - _READ_SECONDS) * _READ_RATE for reader in snapshot.readers
    )


def _checked_rank(rank: Any) -> int:
    """Return a rank as an int, or raise."""
    number: int = index(rank)
    batch_ends(0.0, 0, number)
    return number


# -- numbers and what was sent under them ----------------------------------------------------------


class Ring:
    """Keeps the last messages, with numbers `[head, next)`, within a count of batches and of bytes.

    Batches that travelled together count one by one, so that the ring reaches back equally far in both
    cases. A message is kept in its parts, because the state shares most of them.
    """

    def __init__(self, capacity: int, max_bytes: int, start: int) -> None:
        """Begin empty; the first message will have number `start`. `capacity` counts batches."""
        self.head = self.next = start
        self.batches = self.bytes = 0
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._messages: dict[int, tuple[int, int, Sequence[bytes]]] = {}  # batches, bytes, parts

    def append(self, parts: Sequence[bytes], batches: int = 1) -> None:
        """Keep the message of number `next`, which carries `batches` batches.

        The newest stays, however large.
        """
        while self.head < self.next and self.batches + batches > self._capacity:
            self._forget_oldest()
        size = sum(map(len, parts))
        self._messages[self.next] = batches, size, parts
        self.next += 1
        self.batches += batches
        self.bytes += size
        while self.bytes > self._max_bytes:
            self._forget_oldest()

    def __getitem__(self, seq: int) -> bytes:
        """Return the message of a number in `[head, next)`."""
        return b"".join(self._messages[seq][2])

    def __len__(self) -> int:
        return len(self._messages)

    def restart(self, start: int) -> None:
        """Forget everything; the next message has number `start`."""
        self._messages.clear()
        self.batches = self.bytes = 0
        self.head = self.next = start

    def check(self) -> None:
        """Raise `IntegrityError` if a bound does not hold or the bytes do not add up."""
        held = sum(len(part) for *_, parts in self._messages.values() for part in parts)
        batches = sum(batches for batches, *_ in self._messages.values())
        is_full = batches > self._capacity and len(self) > 1
        numbers = list(self._messages) == list(range(self.head, self.next))
        if (held, batches) != (self.bytes, self.batches) or is_full or held > self._max_bytes or not numbers:
            raise IntegrityError(
                f"ring [{self.head}, {self.next}) of {self._capacity}: {batches} batches and {held} bytes, "
                f"kept {self.batches} and {self.bytes}"
            )

    def _forget_oldest(self) -> None:
        batches, size, _ = self._messages.pop(self.head)
        self.batches -= batches
        self.bytes -= size
        self.head += 1


def number_from_clock() -> int:
    """Return a number above all numbers of earlier processes: microseconds since 1970.

    No publisher sends a million messages a second, so a process begins above all numbers of the one before
    it unless the clock was set back. The numbers stay below 2^53 until the year 2255, so consumers with
    signed 64-bit ints and with doubles can use them.
    """
    return time.time_ns() // 1000


class SequenceFile:
    """Keeps in a file which numbers were used: `start` is the first free one, `reserve` takes more.

    The file holds one number: no message was ever sent under it or a higher one. It is moved ahead in
    portions before numbers are used, so a process that dies leaves a gap, never a number used twice; a clean
    end writes the exact number. One process at a time may have the file open.
    """

    def __init__(self, path: str | Path, reserve_size: int = 10_000) -> None:
        """Open or create the file."""
        self.path = Path(path)
        self._reserve_size = reserve_size
        self._file: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._drop()
            raise OutsideError(
                f"{path}: another publisher has this sequence file open; give each its own"
            ) from None
        except OSError as error:
            self._drop()
            raise OutsideError(f"{path}: cannot open the sequence file: {error.strerror}") from error
        self.start = self.reserved = self._read(self._file)

    def reserve(self, seq: int) -> None:
        """Make sure that numbers up to `seq` may be used.

        A failed write is logged, and tried again later.
        """
        if seq < self.reserved:
            return
        self.reserved = seq + self._reserve_size
        self._write(self.reserved)

    def close(self, next_seq: int) -> None:
        """Write the next number, and close the file."""
        if self._file is not None:
            self._write(next_seq)
            self.reserved = next_seq
            self._drop()

    def check(self) -> None:
        """Raise `IntegrityError` if the number in the file is below the reserved one."""
        if self._file is not None and self._read(self._file) < self.reserved:
            raise IntegrityError(
                f"{self.path}: holds {self._read(self._file)}, reserved up to {self.reserved}"
            )

    def _read(self, file: int) -> int:
        text = os.pread(file, 64, 0).decode("ascii", "replace").strip()
        if text and not text.isdecimal():
            self._drop()
            raise InputError(
                f"{self.path}: expected one number, got {text!r}; "
                "is it a sequence file? Remove it to start at 0"
            )
        return int(text or 0)

    def _write(self, number: int) -> None:
        # One sector, fixed width, no rename: a torn write is impossible, and the lock stays on the same
        # file.
        assert self._file is not None
        try:
            os.pwrite(self._file, b"%020d\n" % number, 0)
            os.fdatasync(self._file)
        except OSError as error:
            logger.error(
                "%s: cannot write the sequence number (%s): a restart may repeat numbers", self.path, error
            )

    def _drop(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
