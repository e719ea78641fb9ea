"""Owns the sockets of one source: SUB for the live stream, its monitor, and a DEALER during a request.

A link moves messages between sockets and the source's `Follower`, and opens or closes the DEALER as the
follower wants. It never blocks. Any thread may make a link; then it belongs to the polling thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvtier.errors import InputError, OutsideError
from kvtier.events.config import expect_port
from kvtier.events.curve import CurveClient
from kvtier.events.follow.follower import Follower
from kvtier.events.follow.state import StreamRequest
from kvtier.events.wire import END_SEQ, Batch, read_live, read_reply, reply_topic

B = TypeVar("B", bound=Batch)
Socket = zmq.Socket[bytes]

_NOBLOCK = int(zmq.NOBLOCK)
_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_DOWN: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "connection lost",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the publisher closed the connection (does it expect CURVE keys?)",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the publisher does not speak the same security protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the publisher does not accept our key",
}
_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
"""After these libzmq gives the connection up for good; a lost connection it makes anew by itself."""
_REDIAL_AFTER = 2.0
"""Seconds until a refused connection is tried again, because the publisher may have our key by then."""
_WATCHED = _UP | sum(_DOWN)  # each event is one bit


@dataclass(frozen=True, slots=True)
class Source:
    """One publisher to follow. Updates carry its `name`; `topic` is a prefix, empty for all topics.

    An `endpoint` with a `*` is bound, for publishers that connect. Without a `replay_endpoint` gaps cannot
    be repaired.
    """

    name: str
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    curve: CurveClient | None = None


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """The options of every socket.

    There is room for `hwm` messages of `max_message` bytes; `keep_alive` is in seconds.
    """

    hwm: int = 100_000
    max_message: int = 256 << 20
    keep_alive: float = 5.0

    def apply(self, sock: Socket, curve: CurveClient | None) -> None:
        """Set the options; call it before the socket is connected."""
        sock.linger = 0
        sock.rcvhwm = self.hwm
        sock.setsockopt(zmq.MAXMSGSIZE, self.max_message)
        sock.setsockopt(zmq.HEARTBEAT_IVL, int(self.keep_alive * 1000))
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self.keep_alive * 3000))
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if curve is not None:
            curve.apply(sock)


class Link(Generic[B]):
    """Owns the sockets of a source, and drives its follower.

    `watch` and `unwatch` are called for new and closed sockets.
    """

    def __init__(
        self,
        source: Source,
        follower: Follower[B],
        context: zmq.Context[Any],
        options: SocketOptions,
        now: float,
    ) -> None:
        """Connect the live stream. `InputError` or `OutsideError` if an address cannot be used."""
        self.source = source
        self.follower = follower
        self.scheduled = float("inf")  # the time of the next tick
        self.watch: Callable[[Socket], None] = lambda sock: None
        self.unwatch: Callable[[Socket], None] = lambda sock: None
        self._context = context
        self._options = options
        self._sent: StreamRequest | None = None
        self._dealer: Socket | None = None
        self._redial_at = float("inf")
        self._sub = self._socket(zmq.SUB)
        self._monitor: Socket | None = None
        try:
            try:
                self._monitor = self._sub.get_monitor_socket(_WATCHED)
            except zmq.ZMQError as error:
                raise self._no_socket(error) from None
            self._sub.subscribe(source.topic)
            self._open(self._sub, source.endpoint, bind="*" in source.endpoint)
            if source.replay_endpoint is not None:  # better to fail now than when it is needed
                self._dial(source.replay_endpoint)
                self._hang_up()
        except BaseException:
            self.close()
            raise
        if source.endpoint.startswith("inproc://"):
            follower.connected(now)  # no monitor reports it

    @property
    def deadline(self) -> float:
        """When `tick` must be called, if nothing else happens before."""
        return min(self.follower.deadline, self._redial_at)

    def tick(self, now: float) -> None:
        """Handle the passing of time."""
        if now >= self._redial_at:
            self._redial_at = float("inf")
            with contextlib.suppress(zmq.ZMQError):  # libzmq may have forgotten the refused connection
                self._sub.disconnect(self.source.endpoint)
            with contextlib.suppress(zmq.ZMQError):
                self._sub.connect(self.source.endpoint)
        if now >= self.follower.deadline:
            self.follower.tick(now)

    @property
    def sockets(self) -> list[Socket]:
        """The sockets that are open."""
        return [sock for sock in (self._sub, self._monitor, self._dealer) if sock is not None]

    def turn(self, now: float, budget: int) -> bool:
        """Move waiting messages, at most `budget` per socket; return whether there may be more."""
        messages = _receive(self._sub, budget)
        self._watch_connection(now)  # before the messages, which may come from the connection it reports
        for frames in messages:
            self._take_live(frames, now)
        replies = self._serve_dealer(now, budget)
        return self.send_request(now) or len(messages) == budget or replies == budget

    def send_request(self, now: float) -> bool:
        """Send the follower's request if it is new; return whether it was."""
        wanted = self.follower.request
        if wanted is not None and wanted is self._sent:
            return False
        if wanted is None or self._sent is not None:
            self._hang_up()  # late answers to the old request could be mistaken for new ones
        if wanted is None or self.source.replay_endpoint is None:
            return False
        try:
            dealer = self._dealer or self._dial(self.source.replay_endpoint)
            dealer.send_multipart((b"", wanted.data), zmq.NOBLOCK)
        except (OutsideError, zmq.ZMQError) as error:
            self._hang_up()
            self.follower.end(wanted, now, f"cannot ask: {error}")
            return False
        self._sent = wanted
        return True

    def close(self) -> None:
        """Close every socket."""
        self._hang_up()
        if self._monitor is not None:
            self._sub.disable_monitor()
        for sock in self.sockets:
            self.unwatch(sock)
            sock.close(linger=0)

    def _take_live(self, frames: list[bytes], now: float) -> None:
        message = read_live(frames)
        if message is None:
            self.follower.bad_frame()
        else:
            self.follower.live(message.seq, message.payload, now)

    def _serve_dealer(self, now: float, budget: int) -> int:
        """Hand over replies until the request changes: nothing waits for later ones."""
        count = 0
        while (
            self._dealer is not None
            and count < budget
            and self._sent is not None
            and self.follower.request is self._sent
        ):
            replies = _receive(self._dealer, 1)
            if not replies:
                break
            self._take_reply(self._sent, replies[0], now)
            count += 1
        return count

    def _take_reply(self, sent: StreamRequest, frames: list[bytes], now: float) -> None:
        message = read_reply(frames)
        if message is None:
            self.follower.bad_frame()
        elif message.seq != END_SEQ and not self._is_wanted(frames):
            pass  # the live stream leaves such batches out too
        elif message.seq == END_SEQ:
            self._sent = None  # the answer is complete, so the connection can be reused
            text = message.payload.decode(errors="replace")[:200]
            self.follower.end(sent, now, text and f"the publisher answered: {text}")
        else:
            self.follower.reply(sent, message.seq, message.payload, now)

    def _is_wanted(self, frames: list[bytes]) -> bool:
        topic = self.source.topic.encode()
        return reply_topic(frames, absent=topic).startswith(topic)

    def _watch_connection(self, now: float) -> None:
        assert self._monitor is not None
        while reports := _receive(self._monitor, 64):
            for frames in reports:
                event = parse_monitor_message(frames)["event"]
                if event == _UP:
                    self.follower.connected(now)
                elif event != zmq.EVENT_DISCONNECTED or self.follower.is_connected:  # else reported already
                    self.follower.disconnected(now, _DOWN[event])
                if event in _REFUSED and "*" not in self.source.endpoint:
                    self._redial_at = now + _REDIAL_AFTER

    def _dial(self, endpoint: str) -> Socket:
        self._dealer = dealer = self._socket(zmq.DEALER)
        self.watch(dealer)
        self._open(dealer, endpoint, bind=False)
        return dealer

    def _hang_up(self) -> None:
        if self._dealer is not None:
            self.unwatch(self._dealer)
            self._dealer.close(linger=0)
        self._dealer = self._sent = None

    def _socket(self, kind: int) -> Socket:
        try:
            sock: Socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise self._no_socket(error) from None
        return sock

    def _no_socket(self, error: zmq.ZMQError) -> OutsideError:
        return OutsideError(
            f"source {self.source.name}: cannot open a socket: {error.strerror}; "
            "expected room for three more: raise the limit of open files (ulimit -n)"
        )

    def _open(self, sock: Socket, endpoint: str, *, bind: bool) -> None:
        expect_port(endpoint)
        self._options.apply(sock, self.source.curve)
        try:
            sock.bind(endpoint) if bind else sock.connect(endpoint)
        except zmq.ZMQError as error:
            kind = InputError if error.errno == zmq.EINVAL else OutsideError
            raise kind(
                f"source {self.source.name}: cannot use address {endpoint!r}: {error.strerror}"
            ) from None


def _receive(sock: Socket, budget: int) -> list[list[bytes]]:
    """Return the waiting messages, at most `budget`."""
    messages: list[list[bytes]] = []
    receive = sock.recv
    try:
        while len(messages) < budget:
            frames = [receive(_NOBLOCK, False)]
            while frames[-1].more:  # the frame knows; asking the socket takes longer
                frames.append(receive(_NOBLOCK, False))
            messages.append([frame.bytes for frame in frames])
    except zmq.Again:
        pass
    return messages
