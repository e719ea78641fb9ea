"""Replay and snapshots for clients of a publisher's ROUTER socket, in slices between live batches.

A request is one frame: up to 8 bytes are the sequence number to start at, `snapshot` asks for the state, `kvtier:status` for
the mark. Each is answered with batches and an end marker, or with an end marker that says what was wrong. Nothing is lost to a
slow client: a session waits while the client's queue is full, and ends when the client is gone or has not read for long. A
start before the ring is answered from the state, spread over the sequence numbers in between. A REQ client can read one
message only and gets everything merged into it. Sessions, requests and their sizes are bounded. One thread owns a server.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import msgspec
import zmq

from kvtier.errors import IntegrityError
from kvtier.events.config import KVEventsConfig
from kvtier.events.frames import SNAPSHOT, STATUS
from kvtier.events.publish.sender import Sender

__all__ = ["END_SEQ", "ReplayServer"]

logger = logging.getLogger(__name__)

END_SEQ = b"\xff" * 8

MAX_SESSIONS = 256
MAX_WAITING = 16  # further requests of one client while it is served
STALLED_AFTER = 30.0  # seconds without the client reading
_SLICE_BYTES = 64 << 10
_SLICE_SECONDS = 200e-6
_FIRST_PAUSE, _LAST_PAUSE = 0.5e-3, 20e-3
_REQUESTS_AT_ONCE = 64
_MAX_FRAMES = 8

_Message = tuple[int, bytes]
_read_batch = msgspec.msgpack.Decoder(tuple[float, list[msgspec.Raw], msgspec.Raw]).decode


class _Session:
    """One client and what it has asked for."""

    def __init__(self, identity: bytes, now: float) -> None:
        self.identity = identity
        self.waiting: deque[Iterator[list[bytes] | None]] = deque()
        self.pending: list[bytes] | None = None
        self.read_at = now
        self.retry_at = now
        self.pause = _FIRST_PAUSE


class ReplayServer:
    """Sessions of clients, served round robin."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        sender: Sender,
        config: KVEventsConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve from what `sender` has and `config` allows."""
        self.counters = dict.fromkeys(("requests", "malformed", "refused", "replayed", "stalled", "gone"), 0)
        self._router = router
        self._sender = sender
        self._topic = [sender.topic] if config.replay_topic_frame else []
        self._max_fillers = config.max_fillers
        self._ends_long = config.long_replay == "end"
        self._clock = clock
        self._sessions: dict[bytes, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def serve(self) -> float:
        """Take requests and give each session a slice; return the seconds until it is of use again."""
        self._take_requests()
        if not self._sessions:
            return math.inf
        now = self._clock()
        for session in list(self._sessions.values()):
            if session.retry_at <= now and not self._advance(session, now):
                del self._sessions[session.identity]
        return max(0.0, min((each.retry_at for each in self._sessions.values()), default=math.inf) - now)

    def check(self) -> None:
        """Raise `IntegrityError` where the bounds do not hold."""
        crowded = [each.identity for each in self._sessions.values() if len(each.waiting) > MAX_WAITING + 1]
        if len(self._sessions) > MAX_SESSIONS or crowded:
            raise IntegrityError(f"replay: {len(self._sessions)} sessions, too many requests of {crowded}")

    # -- requests -------------------------------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        for _ in range(_REQUESTS_AT_ONCE):
            if not self._router.get(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator,arg-type]
                return
            frames = self._receive()
            self.counters["requests"] += 1
            self._open(frames[0].bytes, frames)

    def _receive(self) -> list[zmq.Frame]:
        """Read one message; of a long one the first frames are enough to refuse it."""
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
        if session is None and len(self._sessions) >= MAX_SESSIONS:
            self.counters["refused"] += 1
            with suppress(zmq.ZMQError):
                self._send(identity, self._end("busy, try again later"))
        elif session is not None and len(session.waiting) > MAX_WAITING:
            self.counters["refused"] += 1  # a flood: it has answers enough to come
        else:
            session = session or self._sessions.setdefault(identity, _Session(identity, self._clock()))
            session.waiting.append(self._answer(frames))

    def _answer(self, frames: list[zmq.Frame]) -> Iterator[list[bytes] | None]:
        """Yield the reply to a request, message by message; `None` where it only took time."""
        if len(frames) != 3 or frames[1].bytes:
            self.counters["malformed"] += 1
            yield self._end("expected an empty frame and a start sequence number")
            return
        what = frames[2].bytes
        if what == SNAPSHOT:
            messages = self._state()
        elif what == STATUS:
            messages = self._status()
        elif len(what) <= 8:
            messages = self._replay(int.from_bytes(what, "big"))
        else:
            self.counters["malformed"] += 1
            yield self._end(f"expected a start sequence number of at most 8 bytes, got {len(what)}")
            return
        single = _is_req(frames[2])
        empty = True
        for message in self._merge(messages) if single else messages:
            empty = empty and message is None
            yield None if message is None else [*self._topic, message[0].to_bytes(8, "big"), message[1]]
        if empty or not single:
            yield self._end()

    def _end(self, problem: str = "") -> list[bytes]:
        text = f"error: {problem}".encode() if problem else b""
        return [text, END_SEQ, b""] if self._topic else [END_SEQ, text]

    # -- answers --------------------------------------------------------------------------------------------------------

    def _replay(self, start: int) -> Iterator[_Message | None]:
        """Yield all batches from `start` to the one that is newest now; from the state where the ring begins later."""
        ring = self._sender.ring
        newest = self._sender.next_seq - 1
        while start <= newest:
            if start >= ring.head:
                yield start, ring[start]
                start += 1
                continue
            snapshot = self._sender.take_snapshot()
            last = snapshot.as_of
            is_long = last - start >= self._max_fillers
            if is_long and self._ends_long:
                return
            for events in _batches(snapshot, last - start + 1):
                yield None if events is None else (start, self._sender.frame(events))
                start += events is not None
            filler = self._sender.frame([])
            for seq in range(start, start if is_long else last + 1):
                yield seq, filler
            start, newest = last + 1, max(newest, last)

    def _state(self) -> Iterator[_Message | None]:
        """Yield the state as batches, all under the number that comes after it."""
        snapshot = self._sender.take_snapshot()
        for events in _batches(snapshot):
            yield None if events is None else (snapshot.as_of + 1, self._sender.frame(events))

    def _status(self) -> Iterator[_Message | None]:
        """Yield the mark under the newest number; before the first batch there is none."""
        if self._sender.next_seq:
            yield self._sender.next_seq - 1, self._sender.frame([self._sender.mark()])

    def _merge(self, messages: Iterator[_Message | None]) -> Iterator[_Message | None]:
        """Yield all messages as one, under the last one's number."""
        events: list[bytes] = []
        seq = None
        for message in messages:
            if message is not None:
                seq = message[0]
                events += map(bytes, _read_batch(message[1])[1])
            yield None
        if seq is not None:
            yield seq, self._sender.frame(events)

    # -- sending ----------------------------------------------------------------------------------------------------------

    def _advance(self, session: _Session, now: float) -> bool:
        """Send a slice; return whether the session goes on."""
        size, deadline = 0, now + _SLICE_SECONDS
        while size < _SLICE_BYTES and self._clock() < deadline:
            if session.pending is None and not self._next_message(session):
                if not session.waiting:
                    return False
                continue
            message = session.pending
            if message is None:
                continue
            try:
                self._send(session.identity, message)
            except zmq.Again:
                return self._wait_for_client(session, now)
            except zmq.ZMQError as error:
                self.counters["gone"] += 1
                logger.debug("a replay client left: %s", error)
                return False
            session.pending, session.read_at, session.pause = None, now, _FIRST_PAUSE
            size += len(message[-1])
            self.counters["replayed"] += 1
        session.retry_at = now
        return True

    def _next_message(self, session: _Session) -> bool:
        """Fetch what is to be sent next, which may take another call; return whether the request goes on."""
        try:
            session.pending = next(session.waiting[0])
        except StopIteration:
            session.waiting.popleft()
            return False
        return True

    def _wait_for_client(self, session: _Session, now: float) -> bool:
        """Come back later to a client whose queue is full, each time a little later; give up when it does not read at all."""
        if now - session.read_at > STALLED_AFTER:
            self.counters["stalled"] += 1
            return False
        session.retry_at = now + session.pause
        session.pause = min(2 * session.pause, _LAST_PAUSE)
        return True

    def _send(self, identity: bytes, frames: list[bytes]) -> None:
        """Send a message whole or raise; a client's queue is full before the first frame or not at all."""
        send = self._router.send
        send(identity, zmq.SNDMORE | zmq.NOBLOCK)
        send(b"", zmq.SNDMORE)
        for frame in frames[:-1]:
            send(frame, zmq.SNDMORE)
        send(frames[-1])


def _batches(events: Iterable[bytes], most: int | None = None) -> Iterator[list[bytes] | None]:
    """Yield events in batches of a slice's size; if only so many batches may be made, the last has all the rest.

    `None` comes where that takes time.
    """
    some: list[bytes] = []
    size = made = 0
    for event in events:
        some.append(event)
        size += len(event)
        if size >= _SLICE_BYTES:
            size = 0
            if most is None or made + 1 < most:
                yield some
                some, made = [], made + 1
            else:
                yield None
    if some:
        yield some


def _is_req(frame: zmq.Frame) -> bool:
    """Return whether a REQ socket sent this; inproc does not tell."""
    try:
        return frame.get("Socket-Type") == "REQ"
    except (zmq.ZMQError, KeyError):
        return False
