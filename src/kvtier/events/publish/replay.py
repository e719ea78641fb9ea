"""Replay and snapshots for clients of a publisher's ROUTER socket, in slices between live batches.

A request is one frame: up to 8 bytes are the sequence number to start at, `snapshot` asks for the state,
`kvtier:status` for the mark. The answer is batches and an end marker, or an end marker that says what was
wrong. A slow client loses nothing: its session waits while its queue is full, and ends when the client is
gone or has not read for long. Only if others wait for the memory of a state that it reads, its answer ends
with an error. A start before the ring is answered from the state, spread over the sequence numbers in
between. A REQ client is refused, because it can read only one message.

Bounded are: sessions, requests per session, their sizes, the messages that ZeroMQ queues for a client, and
the bytes queued for all clients. If these are used up, a client still gets one message at a time, so slow
clients do not stop fast ones. One thread owns a server.
"""

from __future__ import annotations

import fcntl
import logging
import math
import termios
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any

import zmq

from kvtier.errors import IntegrityError
from kvtier.events.config import KVEventsConfig
from kvtier.events.publish.sender import Sender
from kvtier.events.publish.state import RankBatch, Snapshot, SnapshotReader
from kvtier.events.wire import SNAPSHOT, STATUS, batch_ends

logger = logging.getLogger(__name__)

END_SEQ = b"\xff" * 8

MAX_SESSIONS = 256
MAX_WAITING = 16  # further requests of one client during an answer
STALLED_AFTER = 30.0  # seconds in which the client reads nothing
# In messages: about a mebibyte of a snapshot. The rest of a replay waits as a generator, not as bytes.
CLIENT_QUEUE = 32
MAX_QUEUED = 64 << 20  # bytes that all clients together may leave unread, but for one message each
_ONE_MESSAGE = 256 << 10  # bytes; only a state under few numbers has larger ones
_MAX_FILLERS = 10_000  # as far back as vLLM's publisher goes; a restart may be a million numbers away
_TURN_SECONDS = 100e-6
_SLICE_BYTES = 64 << 10
_FIRST_BACKOFF, _LAST_BACKOFF = 0.5e-3, 20e-3
_LOOK = 10e-3  # seconds between two looks at what clients that were served have read
_REQUESTS_AT_ONCE = 64
_MAX_FRAMES = 8

_Message = tuple[int, bytes | list[RankBatch]]
"""A number and a batch; a part of a state is joined once it may be queued, because it may be large."""


class _TooSlow(Exception):
    """A state was given up before its reader had all of it."""


class _Session:
    """One client and its requests."""

    def __init__(self, identity: bytes, now: float, connection: int | None) -> None:
        self.identity = identity
        self.connection = connection  # the descriptor of its socket; libzmq owns it
        self.waiting: deque[Iterator[list[bytes] | None]] = deque()
        self.pending: list[bytes] | None = None
        self._sizes: deque[int] = deque()  # of the last messages, which may all be unread
        self.queued = 0  # their sum
        self.served_at = 0.0
        self.read_at = now
        self.retry_at = now
        self.backoff = _FIRST_BACKOFF

    def count(self, size: int) -> None:
        """Count a message that is about to be queued."""
        if len(self._sizes) > CLIENT_QUEUE:
            self.queued -= self._sizes.popleft()
        self._sizes.append(size)
        self.queued += size

    def forget_queue(self) -> None:
        """Count nothing as unread any more."""
        self._sizes.clear()
        self.queued = 0

    def wait(self, now: float) -> None:
        """Go on after a back-off, which grows."""
        self.retry_at = now + self.backoff
        self.backoff = min(2 * self.backoff, _LAST_BACKOFF)


class ReplayServer:
    """Serves the sessions of clients in turn."""

    def __init__(self, router: zmq.Socket[bytes], sender: Sender, config: KVEventsConfig) -> None:
        """Serve from the data of `sender`, as `config` allows."""
        self.counters = dict.fromkeys(("requests", "malformed", "refused", "replayed", "stalled", "gone"), 0)
        self._router = router
        self._sender = sender
        self._topic = [sender.topic] if config.replay_topic_frame else []
        self._clock = time.monotonic
        self._sessions: dict[bytes, _Session] = {}
        self._served: dict[bytes, _Session] = {}  # sessions that are done, but whose bytes may be queued yet
        self._looked_at = 0.0

    def __len__(self) -> int:
        return len(self._sessions)

    def serve(self) -> float:
        """Take requests and send a slice for each session, as time allows.

        Return the seconds until the next call.
        """
        self._take_requests()
        if not self._sessions:
            return math.inf
        now = self._clock()
        deadline = now + _TURN_SECONDS
        due = [session for session in self._sessions.values() if session.retry_at <= now]
        for session in sorted(due, key=attrgetter("served_at")):
            session.served_at = now
            if not self._advance(session, now, deadline):
                del self._sessions[session.identity]
                if session.queued > _SLICE_BYTES:
                    self._served[session.identity] = session
            if self._clock() >= deadline:
                break
        return max(
            0.0, min((session.retry_at for session in self._sessions.values()), default=math.inf) - now
        )

    def queued_bytes(self) -> int:
        """Return the most bytes that clients may have left unread.

        A client that was served and has nothing under way has read everything. TCP drops a client that has
        not read for long.
        """
        now = self._clock()
        for session in list(self._served.values()):
            if now - session.read_at > STALLED_AFTER or _has_sent_all(session.connection):
                self._served.pop(session.identity, None)
        self._looked_at = now
        return self._counted_bytes()

    def _counted_bytes(self) -> int:
        return sum(session.queued for session in (*self._sessions.values(), *self._served.values()))

    def check(self) -> None:
        """Raise `IntegrityError` if a bound does not hold."""
        crowded = [one.identity for one in self._sessions.values() if len(one.waiting) > MAX_WAITING + 1]
        if len(self._sessions) > MAX_SESSIONS or crowded:
            raise IntegrityError(f"replay: {len(self._sessions)} sessions, too many requests of {crowded}")

    # -- requests ----------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        for _ in range(_REQUESTS_AT_ONCE):
            if not self._router.get(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator,arg-type]
                return
            frames = self._receive()
            self.counters["requests"] += 1
            self._open(frames[0].bytes, frames)

    def _receive(self) -> list[zmq.Frame]:
        """Read one message; the first frames of a long one are enough to refuse it."""
        frames = [self._router.recv(copy=False)]
        while frames[-1].more:
            frame = self._router.recv(copy=False)
            if len(frames) < _MAX_FRAMES:
                frames.append(frame)
            else:
                frames[-1] = frame
        return frames

    def _open(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        session = self._sessions.get(identity)
        if session is None and (len(self._sessions) >= MAX_SESSIONS or self.queued_bytes() >= MAX_QUEUED):
            self.counters["refused"] += 1
            with suppress(zmq.ZMQError):
                self._send(identity, self._end("busy, try again later"))
        elif session is not None and len(session.waiting) > MAX_WAITING:
            self.counters["refused"] += 1  # a flood: enough answers are on their way
        else:
            session = session or self._served.pop(identity, None)
            session = session or _Session(identity, self._clock(), _connection_of(frames[-1]))
            session.read_at = self._clock()
            self._sessions[identity] = session
            session.waiting.append(self._answer(session, frames))

    def _answer(self, session: _Session, frames: list[zmq.Frame]) -> Iterator[list[bytes] | None]:
        """Yield the reply to a request, message by message; `None` if there is no message yet."""
        if len(frames) != 3 or frames[1].bytes:
            self.counters["malformed"] += 1
            yield self._end("expected an empty frame and a start sequence number")
            return
        if _is_req(frames[2]):
            self.counters["malformed"] += 1
            yield self._end("a REQ socket can read one message only: ask with a DEALER socket")
            return
        what = frames[2].bytes
        if what == SNAPSHOT:
            messages = self._state(session)
        elif what == STATUS:
            messages = self._status()
        elif len(what) <= 8:
            messages = self._replay(session, int.from_bytes(what, "big"))
        else:
            self.counters["malformed"] += 1
            yield self._end(f"expected a start sequence number of at most 8 bytes, got {len(what)}")
            return
        try:
            yield from self._in_turn(session, messages)
        except _TooSlow:
            self.counters["stalled"] += 1
            yield self._end("the answer was read too slowly, and others wait: try again")

    def _in_turn(
        self, session: _Session, messages: Iterator[_Message | None]
    ) -> Iterator[list[bytes] | None]:
        """Yield the frames of each message once it may be queued, and the end marker."""
        for message in messages:
            if message is None:
                yield None
                continue
            seq, batch = message
            size = len(batch) if isinstance(batch, bytes) else sum(len(one.events) for one in batch)
            until = self._clock() + STALLED_AFTER
            while not self._may_queue(session, size):
                if self._clock() > until:
                    self.counters["refused"] += 1
                    yield self._end("busy, try again later")
                    return
                session.wait(self._clock())
                yield None
            session.count(size)
            payload = batch if isinstance(batch, bytes) else _frame(batch)
            yield [*self._topic, seq.to_bytes(8, "big"), payload]
        yield self._end()

    def _may_queue(self, session: _Session, size: int) -> bool:
        """Return whether a message may be queued for a client now."""
        if session.queued + size <= _ONE_MESSAGE or self._counted_bytes() < MAX_QUEUED:
            return True
        if self._clock() - self._looked_at > _LOOK:
            self.queued_bytes()
        if session.connection is None or _has_sent_all(session.connection):
            session.forget_queue()
        return self._counted_bytes() < MAX_QUEUED or (not session.queued and size <= _ONE_MESSAGE)

    def _end(self, problem: str = "") -> list[bytes]:
        text = f"error: {problem}".encode() if problem else b""
        return [text, END_SEQ, b""] if self._topic else [END_SEQ, text]

    # -- answers -----------------------------------------------------------------------------------

    def _replay(self, session: _Session, start: int) -> Iterator[_Message | None]:
        """Yield all batches from `start` to the newest; from the state, if the ring begins later."""
        ring = self._sender.ring
        newest = self._sender.next_seq - 1
        while start <= newest:
            if start >= ring.head:
                yield start, ring[start]
                start += 1
                continue
            snapshot = self._sender.take_snapshot()
            if snapshot is None:
                self._wait_for_snapshot(session)
                yield None
                continue
            last = snapshot.as_of
            is_long = last - start >= _MAX_FILLERS
            for batches in _spread(_read(snapshot, self._sender.clock()), last - start + 1, snapshot.ranks):
                yield None if batches is None else (min(start, last), batches)
                start += batches is not None
            filler = _frame([RankBatch(self._sender.rank, 0, b"")])
            for seq in range(start, start if is_long else last + 1):
                yield seq, filler
            start, newest = last + 1, max(newest, last)

    def _state(self, session: _Session) -> Iterator[_Message | None]:
        """Yield the state as batches, all under the number that follows it."""
        while (snapshot := self._sender.take_snapshot()) is None:
            self._wait_for_snapshot(session)
            yield None
        for batch in _read(snapshot, self._sender.clock()):
            yield None if batch is None else (snapshot.as_of + 1, [batch])

    def _wait_for_snapshot(self, session: _Session) -> None:
        """Ask again after a back-off, if no snapshot can be made before others have read theirs."""
        if not self._sender.is_making_snapshot:
            session.wait(self._clock())

    def _status(self) -> Iterator[_Message | None]:
        """Yield the mark under the newest number that was used, if only by an earlier process.

        Before number 0 there is none.
        """
        sender = self._sender
        if sender.next_seq > 0:
            yield sender.next_seq - 1, [RankBatch(sender.rank, 1, sender.encoder.mark(sender.mark()))]

    # -- sending -----------------------------------------------------------------------------------

    def _advance(self, session: _Session, now: float, deadline: float) -> bool:
        """Send a slice; return whether the session goes on."""
        size = 0
        while size < _SLICE_BYTES and self._clock() < deadline:
            if session.pending is None and not self._next_message(session):
                if not session.waiting:
                    return False
                continue
            message = session.pending
            if message is None:
                if session.retry_at > now:
                    return True
                if self._sender.is_making_snapshot:
                    break  # there may be nothing to send before the next turn
                continue
            try:
                self._send(session.identity, message)
            except zmq.Again:
                return self._wait_for_client(session, now)
            except zmq.ZMQError as error:
                self.counters["gone"] += 1
                logger.debug("a replay client left: %s", error)
                session.forget_queue()
                return False
            session.pending, session.read_at, session.backoff = None, now, _FIRST_BACKOFF
            size += len(message[-1])
            self.counters["replayed"] += 1
        session.retry_at = now
        return True

    def _next_message(self, session: _Session) -> bool:
        """Fetch the next message, which may take another call; return whether the request goes on."""
        try:
            session.pending = next(session.waiting[0])
        except StopIteration:
            session.waiting.popleft()
            return False
        return True

    def _wait_for_client(self, session: _Session, now: float) -> bool:
        """Retry a client with a full queue later, with a growing back-off.

        Give up if it does not read at all.
        """
        if now - session.read_at > STALLED_AFTER:
            self.counters["stalled"] += 1
            return False
        session.wait(now)
        return True

    def _send(self, identity: bytes, frames: list[bytes]) -> None:
        """Send a whole message or raise; only the first frame can find the client's queue full."""
        send = self._router.send
        send(identity, zmq.SNDMORE | zmq.NOBLOCK)
        send(b"", zmq.SNDMORE)
        for frame in frames[:-1]:
            send(frame, zmq.SNDMORE)
        send(frames[-1])


def _frame(batches: list[RankBatch]) -> bytes:
    """Return the bytes of one batch with the events of some batches of one rank, with the current time."""
    head, tail = batch_ends(time.time(), sum(one.number for one in batches), batches[0].rank)
    return b"".join((head, *(one.events for one in batches), tail))


def _read(snapshot: Snapshot, now: float) -> Iterator[RankBatch | None]:
    """Yield a snapshot's batches as they are made; `None` while the next one is not ready.

    Raise `_TooSlow` once it is given up.
    """
    reader = SnapshotReader(now)
    snapshot.readers.add(reader)
    try:
        done = 0
        while snapshot.is_given_up or done < len(snapshot.batches) or not snapshot.is_made:
            if snapshot.is_given_up:
                raise _TooSlow
            if done < len(snapshot.batches):
                batch = snapshot.batches[done]
                yield batch
                done += 1
                reader.num_bytes += len(batch.events)
            else:
                yield None
    finally:
        snapshot.readers.remove(reader)


def _spread(
    batches: Iterable[RankBatch | None], numbers: int, ranks: int
) -> Iterator[list[RankBatch] | None]:
    """Yield the batches that travel under one number, for at most `numbers` numbers.

    If numbers run short, all remaining batches of a rank have its last one. If there are fewer numbers than
    ranks, there is still one message per rank. `None` comes while no batch is ready.
    """
    waiting: list[RankBatch] = []  # of one rank
    for batch in batches:
        if batch is None:
            yield None
        elif not waiting:
            waiting.append(batch)
        elif batch.rank != waiting[0].rank or numbers > ranks:
            yield waiting
            numbers -= 1
            ranks -= batch.rank != waiting[0].rank
            waiting = [batch]
        else:
            waiting.append(batch)
            yield None
    if waiting:
        yield waiting


def _connection_of(frame: zmq.Frame) -> int | None:
    """Return the descriptor of the socket through which a message came; `None` if it is not known."""
    try:
        connection: Any = frame.get(zmq.SRCFD)
    except (zmq.ZMQError, KeyError, ValueError):
        return None
    return int(connection) if connection >= 0 else None


def _has_sent_all(connection: int | None) -> bool:
    """Return whether the system has nothing left to send on a connection, or the connection is gone.

    libzmq hands over what it has queued as soon as the system takes it. So if the system has nothing,
    neither has libzmq.
    """
    if connection is None:
        return False
    try:
        return not any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    except OSError:
        return True


def _is_req(frame: zmq.Frame) -> bool:
    """Return whether a REQ socket sent this; unknown for inproc."""
    try:
        return frame.get("Socket-Type") == "REQ"
    except (zmq.ZMQError, KeyError):
        return False
