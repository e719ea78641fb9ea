"""Whatever bytes reach the sockets of a publisher or a subscriber, they go on with their work and do not
grow.

How many frames each test sends: see `test_fuzz_events.py`.
"""

from __future__ import annotations

import itertools
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import pytest
import zmq
from tests.fuzz.mutate import corpus, mutate
from tests.fuzz.test_fuzz_events import FRAMES, MAY_GROW, SEED, resident_bytes

from kvtier.events import BlockStored, KVEventBatch
from kvtier.events.config import KVEventsConfig
from kvtier.events.follow.link import Source
from kvtier.events.publisher import ZmqEventPublisher
from kvtier.events.subscriber import Subscriber
from kvtier.events.updates import Limits, Received
from kvtier.events.wire import decode_batch

END = b"\xff" * 8
HASTY = Limits(
    reply_timeout=0.002,
    probe_interval=0.005,
    catch_up_delay=0.001,
    tries=2,
    backoff=0.001,
    backoff_max=0.002,
)
"""So hasty that every way of failing is gone through many times."""
HELD = [2**62 + at for at in range(20)]


@pytest.fixture
def publisher() -> Iterator[ZmqEventPublisher]:
    config = KVEventsConfig(buffer_steps=4, heartbeat_interval=0.05)
    one = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=config)
    for block in HELD:
        one.publish(KVEventBatch(1.0, [BlockStored([block], None, [1, 2], 2, None, "GPU", None)], 0))
    yield one
    one.shutdown()


@contextmanager
def dealer(one: ZmqEventPublisher) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(one.replay_endpoint or "")
        yield client


def ask_for_everything(one: ZmqEventPublisher) -> set[int]:
    """Return the blocks that a replay from 0 tells of."""
    held: set[int] = set()
    with dealer(one) as client:
        client.send_multipart([b"", struct.pack(">Q", 0)])
        while client.poll(60_000):
            _, _, seq, payload = client.recv_multipart()
            if seq == END:
                return held
            held |= {
                int(block)
                for event in decode_batch(payload).events
                for block in getattr(event, "block_hashes", ())
            }
    raise AssertionError("no answer within a minute")


def request(rng: random.Random, samples: list[bytes]) -> list[bytes]:
    """Return a request that is wrong in its frames, in what it asks for, or by chance not at all."""
    what = rng.choice(
        (mutate(rng, samples), rng.randbytes(rng.randrange(12)), b"snapshot", b"kvtier:status", b"")
    )
    return rng.choice(([b"", what], [what], [b"", what, what], [what, b""], [b""] * rng.randint(1, 9)))


def send_requests(one: ZmqEventPublisher, requests: Iterator[list[bytes]]) -> int:
    """Send them as one client that reads now and then, and goes away in the middle; return how many messages
    came back.
    """
    answers = asked = 0
    with dealer(one) as client:
        for frames in requests:
            client.send_multipart(frames)
            asked += 1
            while client.poll(1):  # so that a busy publisher finds a client that reads
                client.recv_multipart()
                answers += 1
        # More than a quarter of them are answered; a busy machine may be late with that.
        while client.poll(60_000 if 4 * answers <= asked else 500):
            client.recv_multipart()
            answers += 1
    return answers


@pytest.mark.timeout(3600)
def test_the_replay_socket_takes_anything(publisher: ZmqEventPublisher) -> None:
    rng, samples = random.Random(SEED), corpus()
    requests = (request(rng, samples) for _ in range(FRAMES // 10))
    assert ask_for_everything(publisher) == set(HELD)
    answers, before = 0, 0
    while first := next(requests, None):
        answers += send_requests(publisher, itertools.chain([first], itertools.islice(requests, 499)))
        before = before or resident_bytes()
    assert answers > FRAMES // 40
    assert resident_bytes() - before < MAY_GROW
    assert ask_for_everything(publisher) == set(HELD)


@pytest.mark.timeout(3600)
def test_ports_take_anything(publisher: ZmqEventPublisher) -> None:
    """What does not even speak ZeroMQ, or stops in the middle of doing so."""
    rng, samples = random.Random(SEED), corpus()
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    for _ in range(FRAMES // 200):
        address = urlsplit(rng.choice((publisher.endpoint, publisher.replay_endpoint or "")))
        noise = b"".join(mutate(rng, samples) for _ in range(rng.randint(1, 5)))
        with closing(socket.create_connection((address.hostname, address.port), timeout=60)) as connection:
            connection.sendall(rng.choice((noise, greeting[: rng.randint(1, 64)], greeting + noise)))
    assert ask_for_everything(publisher) == set(HELD)


class Impostor:
    """Sends broken batches live, and answers whatever it is asked with broken replies.

    Belongs to the test's thread.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._rng, self._samples = random.Random(SEED), corpus()
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for end in (self._pub, self._router):
            end.linger = 0
        live, replay = (end.bind_to_random_port("tcp://127.0.0.1") for end in (self._pub, self._router))
        self.source = Source("impostor", f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}")

    def send(self, seq: int) -> None:
        """Send a batch, and answer what was asked since."""
        self._pub.send_multipart(
            self._break([b"", struct.pack(">Q", seq), mutate(self._rng, self._samples)])
        )
        while self._router.poll(0):
            identity, *_ = self._router.recv_multipart()
            for at in range(self._rng.randrange(4)):
                frames = [b"", b"", struct.pack(">Q", max(0, seq - at)), mutate(self._rng, self._samples)]
                self._router.send_multipart([identity, *self._break(frames)])
            if self._rng.random() < 0.9:
                self._router.send_multipart([identity, b"", b"", END, b""])

    def _break(self, frames: list[bytes]) -> list[bytes]:
        """Now and then leave a frame out, add one, or put anything in its place."""
        at = self._rng.randrange(len(frames))
        chance = self._rng.random()
        if chance < 0.1:
            return frames[:at] + frames[at + 1 :] or [b""]
        if chance < 0.2:
            return [*frames[:at], self._rng.randbytes(9), *frames[at + (chance < 0.15) :]]
        return frames

    def close(self) -> None:
        """Close the sockets."""
        self._pub.close()
        self._router.close()


@pytest.mark.timeout(3600)
def test_a_subscriber_takes_anything() -> None:
    """It counts what it cannot read, asks again, and stays consistent with itself."""
    with (
        zmq.Context() as context,
        closing(Impostor(context)) as impostor,
        Subscriber(context=context, limits=HASTY) as subscriber,
    ):
        subscriber.add(impostor.source)
        while not subscriber.status("impostor").connected:
            subscriber.poll(0.01)
        before, received, until = 0, 0, time.monotonic() + 60

        def has_met_everything() -> bool:
            counters = subscriber.status("impostor").counters
            return min(received, counters.bad_frames, counters.skipped_events, counters.resets) > 0

        for seq in itertools.count():
            # The threads between them may be late on a busy machine.
            if seq >= FRAMES // 10 and (has_met_everything() or time.monotonic() > until):
                break
            impostor.send(seq)
            received += sum(isinstance(update, Received) for update in subscriber.poll(0.0))
            if seq == FRAMES // 100:
                before = resident_bytes()
        subscriber.check()
        assert has_met_everything()
        assert resident_bytes() - before < MAY_GROW
