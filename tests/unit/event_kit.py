"""What the tests of the event stream's publishing side share: short events, a naive consumer, clients of
real sockets.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import zmq

from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CurveClient,
    KVEventBatch,
    KVEventsConfig,
    Mark,
    Place,
    ZmqEventPublisher,
    decode_batch,
    place_of,
)
from kvtier.events.publish.loop import _Task
from kvtier.events.types import ExternalBlockHash

END = b"\xff" * 8
DEADLINE = 60.0

Held = set[tuple[Place, ExternalBlockHash]]


def stored(
    hashes: Sequence[ExternalBlockHash], parent: ExternalBlockHash | None = None, **changes: Any
) -> BlockStored:
    """Return an event of blocks of two tokens, each block's made from its hash."""
    tokens = [token for block in hashes for token in (hash(block) % 1000, 7)]
    fields = {"token_ids": tokens, "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None}
    return BlockStored(block_hashes=list(hashes), parent_block_hash=parent, **fields | changes)


def removed(hashes: Sequence[ExternalBlockHash], medium: str = "GPU", **changes: Any) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(hashes), medium=medium, **changes)


def batch(*events: Any, ts: float = 1.0) -> KVEventBatch:
    return KVEventBatch(ts=ts, events=list(events))


class Consumer:
    """A consumer that holds the publisher to its word: no block is stored twice or removed without being
    held.

    `linked` are the held blocks whose parent was held when they came.
    """

    def __init__(self) -> None:
        self.held: Held = set()
        self.linked: Held = set()
        self.mark: Mark | None = None
        self._copies: Counter[ExternalBlockHash] = Counter()

    def apply(self, payload: bytes) -> None:
        received = decode_batch(payload)
        assert received.skipped == 0
        for event in received.events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
                self.linked.clear()
                self._copies.clear()
                continue
            blocks = [(place_of(event), block) for block in event.block_hashes]
            assert len(set(blocks)) == len(blocks), "a block is named twice in one event"
            if isinstance(event, BlockStored):
                self._store(event.parent_block_hash, blocks)
            else:
                assert self.held.issuperset(blocks), "removed though not held"
                self.held -= set(blocks)
                self.linked -= set(blocks)
                self._copies.subtract(event.block_hashes)
        self.mark = received.mark or self.mark

    def _store(
        self, parent: ExternalBlockHash | None, blocks: list[tuple[Place, ExternalBlockHash]]
    ) -> None:
        assert self.held.isdisjoint(blocks), "stored though held"
        found = parent is None or self._copies[parent] > 0
        self.linked |= set(blocks if found else blocks[1:])
        self.held |= set(blocks)
        self._copies.update(block for _, block in blocks)


def wait_until(reached: Callable[[], object], what: str = "it") -> None:
    """Return once a condition holds; fail when it never does."""
    limit = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < limit, f"waited {DEADLINE} s for {what}"
        time.sleep(0.001)


def receive(sock: zmq.Socket[bytes]) -> list[bytes]:
    assert sock.poll(DEADLINE * 1000), "nothing came"
    return sock.recv_multipart()


class Client:
    """Sockets of a subscriber, in a context of its own."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def open(
        self, kind: int, endpoint: str | None, curve: CurveClient | None = None, **options: Any
    ) -> zmq.Socket[bytes]:
        """Return a connected socket; it is closed with the client at the latest."""
        sock = self.context.socket(kind)
        self._sockets.append(sock)
        if curve is not None:
            curve.apply(sock)
        for name, value in options.items():
            setattr(sock, name, value)
        assert endpoint is not None
        sock.connect(endpoint)
        return sock

    def subscribe(self, publisher: ZmqEventPublisher, topic: bytes = b"") -> zmq.Socket[bytes]:
        """Return a SUB socket that receives already: messages without a number were sent until
        one arrived.
        """
        sock = self.open(zmq.SUB, publisher.endpoint, rcvhwm=0)
        sock.subscribe(topic)
        wait_until(lambda: (probe(publisher, topic, b"probe"), sock.poll(5))[1], "the subscription")
        probe(publisher, topic, b"last probe")
        while receive(sock)[1] != b"last probe":
            pass
        return sock

    def close(self) -> None:
        for sock in self._sockets:
            sock.close(linger=0)
        self.context.term()


def in_thread(publisher: ZmqEventPublisher, function: Callable[[], object]) -> None:
    """Let the publisher's thread do something next, and do not wait for it."""
    publisher._loop.outbox.call(_Task(function))  # type: ignore[arg-type]


def probe(publisher: ZmqEventPublisher, topic: bytes, text: bytes) -> None:
    pub = publisher._loop._sockets[0]
    in_thread(publisher, lambda: pub.send_multipart([topic, text, b""]))


def ask(dealer: zmq.Socket[bytes], what: bytes | int) -> Iterator[list[bytes]]:
    """Send a request and yield the replies, `[topic, seq, payload]`, up to the end marker; an error reply
    fails.
    """
    dealer.send_multipart([b"", what if isinstance(what, bytes) else what.to_bytes(8, "big")])
    while True:
        empty, *frames = receive(dealer)
        assert empty == b""
        if frames[-2] == END:
            assert frames == [b"", END, b""], frames
            return
        yield frames


def replay(publisher: ZmqEventPublisher, what: bytes | int, client: Client) -> list[tuple[int, bytes]]:
    """Return what a request gives once everything that was published before has been sent."""
    publisher.check()
    dealer = client.open(zmq.DEALER, publisher.replay_endpoint, rcvhwm=0)
    found = [(int.from_bytes(seq, "big"), payload) for _, seq, payload in ask(dealer, what)]
    dealer.close()
    return found


def consume(messages: Iterable[tuple[int, bytes]]) -> Consumer:
    consumer = Consumer()
    for _, payload in messages:
        consumer.apply(payload)
    return consumer


@contextmanager
def publisher(rank: int = 0, first: int = 0, **changes: Any) -> Iterator[ZmqEventPublisher]:
    """Run a publisher on ports that the system gives, by a clock that says `first`; what is broken shows at
    the end.
    """
    options = {
        "endpoint": "tcp://127.0.0.1:0",
        "replay_endpoint": "tcp://127.0.0.1:0",
        "heartbeat_interval": None,
    }
    with mock.patch("kvtier.events.publish.sender.number_from_clock", return_value=first):
        made = ZmqEventPublisher(rank, config=KVEventsConfig(**options | changes))
    try:
        yield made
        made.check()
        assert made.stats().errors == 0
    finally:
        made.shutdown()
        made._loop.thread.join(DEADLINE)  # a busy machine may let it end later than a shutdown waits
        assert not made._loop.thread.is_alive()
