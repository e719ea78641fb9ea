"""Subscribers over real sockets: joining, many sources, threads, keys, malformed frames, foreign reply
forms.
"""

from __future__ import annotations

import errno
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.chaos.stream_kit import ModelReplica, stored
from tests.ports import free_ports

from kvtier.errors import InputError, OutsideError
from kvtier.events import (
    EventEncoder,
    Kind,
    KVEventBatch,
    Limits,
    Received,
    Reset,
    SocketOptions,
    Source,
    State,
    StateChanged,
    Subscriber,
    Update,
    frame_batch,
)
from kvtier.events.config import KVEventsConfig
from kvtier.events.curve import CurveClient, CurveServer, make_keys
from kvtier.events.publisher import ZmqEventPublisher
from kvtier.events.wire import END_SEQ, NumberedPayload, read_live, read_reply

PATIENCE = 60.0
QUICK = Limits(reply_timeout=0.5, probe_interval=0.3, catch_up_delay=0.05, backoff=0.02, backoff_max=0.1)


def publish(publisher: ZmqEventPublisher, *hashes: int) -> None:
    publisher.publish(KVEventBatch(time.time(), [stored([block]) for block in hashes]))


def until(
    subscriber: Subscriber[Any], done: Callable[[], bool], replicas: dict[str, ModelReplica] | None = None
) -> list[Update]:
    """Poll until `done`; return what came meanwhile."""
    updates: list[Update] = []
    deadline = time.monotonic() + PATIENCE
    while not done():
        new = subscriber.poll(0.05)
        updates += new
        for update in new if replicas is not None else ():
            assert replicas is not None
            replicas.setdefault(update.source, ModelReplica()).apply([update])
        assert time.monotonic() < deadline, subscriber.statuses()
    return updates


def is_exact(subscriber: Subscriber[Any], name: str, seq: int = -1) -> Callable[[], bool]:
    return lambda: subscriber.status(name).state is State.EXACT and subscriber.status(name).seq >= seq


def holds(subscriber: Subscriber[Any], name: str, blocks: int) -> Callable[[], bool]:
    """Ask for a replica that is exact and has so many blocks; numbers of batches come from the clock."""
    return lambda: subscriber.status(name).state is State.EXACT and subscriber.status(name).blocks == blocks


@pytest.fixture
def publisher() -> Iterator[ZmqEventPublisher]:
    live, replay = free_ports(2)  # one test takes them again
    config = KVEventsConfig(heartbeat_interval=0.1)
    made = ZmqEventPublisher(0, f"tcp://*:{live}", f"tcp://*:{replay}", config=config)
    yield made
    made.shutdown()


def source_of(publisher: ZmqEventPublisher, name: str = "p") -> Source:
    return Source(name, publisher.endpoint, publisher.replay_endpoint)


_numbers = itertools.count()


class StockPublisher(threading.Thread):
    """Publishes and replays as engines do: PUB and ROUTER, no marks, with or without topics.

    The real ones: tests/vllm.
    """

    def __init__(self, *, has_topic: bool = True, encoding: str = "map", is_inproc: bool = False) -> None:
        super().__init__(daemon=True)
        # An id() may be that of a predecessor whose sockets are still being closed.
        self.number = next(_numbers)
        self.topic = [b"kv-events"] if has_topic else []
        self.encoder = EventEncoder(encoding)
        self.ring: list[bytes] = []
        self.context = zmq.Context.instance()
        self.pub = self.context.socket(zmq.PUB)
        self.pub.bind(f"inproc://live-{self.number}" if is_inproc else "tcp://127.0.0.1:*")
        self.endpoint: str = self.pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.router = self.context.socket(zmq.ROUTER)
        self.replay_endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.control = self.context.socket(zmq.PAIR)
        self.control.bind(f"inproc://stop-{self.number}")
        self.start()

    def publish(self, *hashes: int, is_lost: bool = False) -> None:
        self.ring.append(
            frame_batch(time.time(), [self.encoder.event(stored([block])) for block in hashes], None)
        )
        if not is_lost:
            self.send(len(self.ring) - 1, self.ring[-1])

    def send(self, seq: int, payload: bytes) -> None:
        self.pub.send_multipart([*self.topic, seq.to_bytes(8, "big"), payload])

    def run(self) -> None:
        stop = self.context.socket(zmq.PAIR)
        stop.connect(f"inproc://stop-{self.number}")
        poller = zmq.Poller()
        poller.register(stop, zmq.POLLIN)
        poller.register(self.router, zmq.POLLIN)
        while stop not in dict(poller.poll()):
            self._answer(*self.router.recv_multipart())
        stop.close(linger=0)
        self.router.close(linger=0)

    def _answer(self, client: bytes, empty: bytes, request: bytes) -> None:
        start = int.from_bytes(request, "big")
        for seq, payload in list(enumerate(self.ring))[min(start, len(self.ring)) :]:
            self.router.send_multipart([client, empty, *self.topic, seq.to_bytes(8, "big"), payload])
        self.router.send_multipart([client, empty, *(b"" for _ in self.topic), b"\xff" * 8, b""])

    def stop(self) -> None:
        self.control.send(b"")
        self.join(PATIENCE)
        self.control.close(linger=0)
        self.pub.close(linger=0)


# -- frames ----------------------------------------------------------------------------------------

SEQ = (7).to_bytes(8, "big")
END = b"\xff" * 8


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([b"t", SEQ, b"x"], NumberedPayload(7, b"x")),
        ([SEQ, b"x"], NumberedPayload(7, b"x")),
        ([b"t", b"short", b"x"], None),
        ([b"x"], None),
        ([b"", b"", SEQ, b"x"], None),
        ([], None),
    ],
)
def test_live_frames(frames: list[bytes], expected: NumberedPayload | None) -> None:
    assert read_live(frames) == expected


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([b"", b"topic", SEQ, b"x"], NumberedPayload(7, b"x")),
        ([b"", SEQ, b"x"], NumberedPayload(7, b"x")),
        ([b"", b"", END, b""], NumberedPayload(END_SEQ, b"")),
        ([b"", END, b""], NumberedPayload(END_SEQ, b"")),
        ([b"", b"error: no", END, b""], NumberedPayload(END_SEQ, b"error: no")),
        ([b"", END, b"error: no"], NumberedPayload(END_SEQ, b"error: no")),
        ([b"", b"topic", END, b""], NumberedPayload(END_SEQ, b"")),
        ([b"id", SEQ, b"x"], None),
        ([b"", b"t", b"7", b"x"], None),
        ([b""], None),
    ],
)
def test_reply_frames(frames: list[bytes], expected: NumberedPayload | None) -> None:
    assert read_reply(frames) == expected


# -- one source ------------------------------------------------------------------------------------


def test_a_late_joiner_gets_all_and_follows(publisher: ZmqEventPublisher) -> None:
    for i in range(100):
        publish(publisher, 1 << 40 | i)
    with Subscriber([source_of(publisher)]) as subscriber:
        replicas: dict[str, ModelReplica] = {}
        until(subscriber, holds(subscriber, "p", 100), replicas)
        publish(publisher, 5 << 40)
        until(subscriber, holds(subscriber, "p", 101), replicas)
        assert len(replicas["p"].held) == 101
        status = subscriber.status("p")
        assert (status.kind, status.blocks, status.connected) == (Kind.KVTIER, 101, True)
        assert status.epoch == publisher.stats().epoch
        assert status.lag is not None
        assert status.lag < PATIENCE
        subscriber.check()


def test_a_subscriber_waits_for_a_publisher_that_starts_after_it(publisher: ZmqEventPublisher) -> None:
    config = publisher.get_publisher_config()
    source = source_of(publisher)
    publisher.shutdown()
    publisher._loop.thread.join(PATIENCE)  # its addresses are free then
    with Subscriber([source], limits=QUICK) as subscriber:
        until(subscriber, is_degraded(subscriber, "p", "no connection"))
        again = ZmqEventPublisher(
            0, config.endpoint, config.replay_endpoint, config=KVEventsConfig(heartbeat_interval=0.1)
        )
        until(subscriber, is_exact(subscriber, "p"))
        again.shutdown()
        until(subscriber, is_degraded(subscriber, "p", "connection lost"))


def test_updates_are_iterated_until_the_subscriber_is_closed(publisher: ZmqEventPublisher) -> None:
    publish(publisher, 1, 2)
    seen = []
    with Subscriber([source_of(publisher)]) as subscriber:
        for update in subscriber:
            seen.append(update)
            if isinstance(update, StateChanged) and update.state is State.EXACT:
                subscriber.close()
    assert isinstance(seen[0], StateChanged)
    assert any(isinstance(update, Received) for update in seen)
    assert subscriber.poll(0) == []


def test_a_publisher_that_sends_as_little_as_any_is_followed() -> None:
    stock = StockPublisher(has_topic=False, encoding="array")
    for i in range(20):
        stock.publish(i)
    replicas: dict[str, ModelReplica] = {}
    with Subscriber([Source("s", stock.endpoint, stock.replay_endpoint)], limits=QUICK) as subscriber:
        until(subscriber, is_exact(subscriber, "s", 19), replicas)
        stock.publish(100)
        stock.publish(101, is_lost=True)
        stock.publish(102)
        until(subscriber, is_exact(subscriber, "s", 22), replicas)
        stock.publish(103, is_lost=True)  # the tail: found by asking
        until(subscriber, is_exact(subscriber, "s", 23), replicas)
        assert {block for _, block in replicas["s"].held} == {*range(20), 100, 101, 102, 103}
        assert subscriber.status("s").kind is Kind.STOCK
        assert subscriber.status("s").counters.lost_batches == 0
    stock.stop()


def test_a_topic_selects_and_no_replay_endpoint_means_live_only() -> None:
    stock = StockPublisher()
    with Subscriber([Source("s", stock.endpoint, topic="kv")], limits=QUICK) as subscriber:
        until(subscriber, lambda: subscriber.status("s").connected)
        deadline = time.monotonic() + PATIENCE
        while subscriber.status("s").seq < 0:
            stock.publish(1)  # the subscription takes a moment to arrive
            subscriber.poll(0.01)
            assert time.monotonic() < deadline
        assert subscriber.status("s").state in (State.DEGRADED, State.EXACT)
    with Subscriber([Source("s", stock.endpoint, topic="other")], limits=QUICK) as subscriber:
        until(subscriber, lambda: subscriber.status("s").connected)
        stock.publish(2)
        assert not any(isinstance(update, Received) for update in subscriber.poll(0.05))
    stock.stop()


def test_malformed_messages_are_counted_and_skipped(publisher: ZmqEventPublisher) -> None:
    context = zmq.Context.instance()
    pub = context.socket(zmq.PUB)
    port = pub.bind_to_random_port("tcp://127.0.0.1")
    with Subscriber(
        [Source("p", f"tcp://127.0.0.1:{port}", publisher.replay_endpoint)], limits=QUICK
    ) as subscriber:
        until(subscriber, is_exact(subscriber, "p"))
        deadline = time.monotonic() + PATIENCE
        while subscriber.status("p").counters.bad_frames < 40:
            for frames in (
                [b""],
                [b"", b"", b""],
                [b"a", b"b", b"c", b"d"],
                [b"", SEQ],
                [b"", b"\0" * 9, b"x"],
            ):
                pub.send_multipart(frames)
            subscriber.poll(0.01)
            assert time.monotonic() < deadline
        until(subscriber, is_exact(subscriber, "p"))
    pub.close(linger=0)


def test_a_dead_replay_endpoint_degrades_and_live_batches_still_come(publisher: ZmqEventPublisher) -> None:
    publish(publisher, 1)
    deadline = time.monotonic() + PATIENCE
    while publisher.stats().blocks < 1:
        assert time.monotonic() < deadline
    with Subscriber([Source("p", publisher.endpoint, "tcp://127.0.0.1:1")], limits=QUICK) as subscriber:
        until(subscriber, lambda: subscriber.status("p").state is State.DEGRADED)
        assert "no answer" in subscriber.status("p").reason
        publish(publisher, 2)
        before = subscriber.status("p").seq
        until(subscriber, lambda: subscriber.status("p").seq > before)


def test_inproc_addresses_work() -> None:
    publisher = ZmqEventPublisher(
        0, "inproc://live-test", "inproc://replay-test", config=KVEventsConfig(heartbeat_interval=0.1)
    )
    publish(publisher, 1, 2, 3)
    with Subscriber([Source("p", "inproc://live-test", "inproc://replay-test")], limits=QUICK) as subscriber:
        until(subscriber, holds(subscriber, "p", 3))
        assert subscriber.status("p").blocks == 3
    publisher.shutdown()


# -- many sources, several threads -----------------------------------------------------------------


def join(subscriber: Subscriber[Any], stocks: list[StockPublisher]) -> None:
    """Publish until everybody is heard: a subscription takes a moment to arrive."""

    def is_heard(number: int) -> bool:
        return subscriber.status(str(number)).seq == len(stocks[number].ring) - 1 >= 0

    deadline = time.monotonic() + PATIENCE
    while unheard := [number for number in range(len(stocks)) if not is_heard(number)]:
        for number in unheard:
            stocks[number].publish(0)
        subscriber.poll(0.01)
        assert time.monotonic() < deadline, unheard


def test_many_sources_are_served_fairly() -> None:
    """One that has thousands of messages waiting must not keep the others waiting behind them.

    All messages are there before the first poll, and nothing is asked of the publishers: when a thread of
    theirs answers is for the machine to say. In every round a source gives 64 messages at most, and nobody
    is left out.
    """
    stocks = [StockPublisher(is_inproc=True) for _ in range(20)]
    with Subscriber(
        [Source(str(i), stock.endpoint) for i, stock in enumerate(stocks)], max_updates=64
    ) as subscriber:
        join(subscriber, stocks)
        for _ in range(3000):
            stocks[0].publish(1)
        for stock in stocks[1:]:
            stock.publish(2)
        served: Counter[str] = Counter()
        for _ in range(2):
            served.update(
                update.source for update in subscriber.poll(PATIENCE) if isinstance(update, Received)
            )
        assert len(served) == 20
        assert served["0"] <= 2 * 64
    for stock in stocks:
        stock.stop()


def test_sources_come_and_go_while_another_thread_polls(publisher: ZmqEventPublisher) -> None:
    publish(publisher, 1)
    subscriber: Subscriber[Any] = Subscriber(limits=QUICK)
    seen: list[Update] = []
    thread = threading.Thread(target=lambda: seen.extend(subscriber))
    thread.start()
    deadline = time.monotonic() + PATIENCE
    for name in ("a", "b"):
        subscriber.add(source_of(publisher, name))
    while any(status.state is not State.EXACT for status in subscriber.statuses().values()):
        assert time.monotonic() < deadline
    subscriber.remove("a")
    while Reset("a") not in seen:
        assert time.monotonic() < deadline
    subscriber.add(source_of(publisher, "a"))
    while subscriber.status("a").state is not State.EXACT:
        assert time.monotonic() < deadline
    subscriber.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    subscriber.close()


def test_misuse_is_an_input_error() -> None:
    with Subscriber([Source("a", "tcp://127.0.0.1:1")]) as subscriber:
        with pytest.raises(InputError, match="'a' is followed already"):
            subscriber.add(Source("a", "tcp://127.0.0.1:2"))
        with pytest.raises(InputError, match="no source is called 'b'"):
            subscriber.remove("b")
        with pytest.raises(InputError, match="no source is called 'b'"):
            subscriber.status("b")
        with pytest.raises(InputError, match="source c: cannot use address"):
            subscriber.add(Source("c", "tcp://no port"))
        with pytest.raises(InputError, match="source c: cannot use address 'tcp://nowhere'"):
            subscriber.add(Source("c", "tcp://127.0.0.1:2", "tcp://nowhere"))
        assert list(subscriber.statuses()) == ["a"]
    with pytest.raises(InputError, match="closed"):
        subscriber.add(Source("d", "tcp://127.0.0.1:1"))


def test_a_source_removed_before_the_first_poll_leaves_nothing_behind() -> None:
    with Subscriber([Source("a", "tcp://127.0.0.1:1")]) as subscriber:
        subscriber.remove("a")
        assert subscriber.poll(0.01) == [Reset("a")]
        assert subscriber.statuses() == {}


# -- keys ------------------------------------------------------------------------------------------


def is_degraded(subscriber: Subscriber[Any], name: str, reason: str) -> Callable[[], bool]:
    def is_so() -> bool:
        status = subscriber.status(name)
        return status.state is State.DEGRADED and re.search(reason, status.reason) is not None

    return is_so


def test_with_keys_only_those_who_have_them_are_served(tmp_path: Path) -> None:
    make_keys(tmp_path, "server")
    (tmp_path / "clients").mkdir()
    for name in ("friend", "stranger"):
        make_keys(tmp_path, name)
    (tmp_path / "friend.key").rename(tmp_path / "clients" / "friend.key")
    server = CurveServer(str(tmp_path / "server.key_secret"), str(tmp_path / "clients"))
    publisher = ZmqEventPublisher(
        0, "tcp://*:0", "tcp://*:0", config=KVEventsConfig(curve=server, heartbeat_interval=0.1)
    )
    publish(publisher, 1, 2, 3)

    def source(name: str) -> Source:
        keys = CurveClient(str(tmp_path / f"{name}.key_secret"), str(tmp_path / "server.key"))
        return Source(name, publisher.endpoint, publisher.replay_endpoint, curve=keys)

    plain = Source("plain", publisher.endpoint, publisher.replay_endpoint)
    with Subscriber([source("friend"), source("stranger"), plain], limits=QUICK) as subscriber:
        until(subscriber, holds(subscriber, "friend", 3))
        until(subscriber, is_degraded(subscriber, "stranger", "does not accept our key"))
        until(subscriber, is_degraded(subscriber, "plain", "CURVE|security"))
        assert subscriber.status("friend").blocks == 3
        assert subscriber.status("stranger").seq == subscriber.status("plain").seq == -1
    publisher.shutdown()


def test_socket_options_reach_the_sockets(publisher: ZmqEventPublisher) -> None:
    with Subscriber([source_of(publisher)], sockets=SocketOptions(hwm=7, max_message=1234)) as subscriber:
        sub = subscriber._links["p"].sockets[0]
        assert (sub.rcvhwm, sub.getsockopt(zmq.MAXMSGSIZE)) == (7, 1234)


def test_a_refused_source_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq gives up a connection whose key was refused; its key may come to the publisher later."""
    monkeypatch.setattr("kvtier.events.follow.link._REDIAL_AFTER", 0.1)
    for name in ("server", "late"):
        make_keys(tmp_path, name)
    (tmp_path / "clients").mkdir()
    server = CurveServer(str(tmp_path / "server.key_secret"), str(tmp_path / "clients"))
    publisher = ZmqEventPublisher(
        0,
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:0",
        config=KVEventsConfig(curve=server, heartbeat_interval=0.1),
    )
    publish(publisher, 1, 2, 3)
    keys = CurveClient(str(tmp_path / "late.key_secret"), str(tmp_path / "server.key"))
    source = Source("late", publisher.endpoint, publisher.replay_endpoint, curve=keys)
    with Subscriber([source], limits=QUICK) as subscriber:
        until(subscriber, is_degraded(subscriber, "late", "does not accept our key"))
        (tmp_path / "late.key").rename(tmp_path / "clients" / "late.key")
        until(subscriber, holds(subscriber, "late", 3))
    publisher.shutdown()


def test_the_topic_counts_for_replayed_batches_too() -> None:
    publisher = ZmqEventPublisher(
        0,
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:0",
        topic="kv-a",
        config=KVEventsConfig(heartbeat_interval=0.1),
    )
    publish(publisher, 1, 2, 3)
    address = publisher.endpoint, publisher.replay_endpoint
    sources = [Source("a", *address, topic="kv"), Source("b", *address, topic="kv-b")]
    with Subscriber(sources, limits=QUICK) as subscriber:
        seen: list[str] = []
        limit = time.monotonic() + 60.0
        while subscriber.status("a").blocks != 3 or subscriber.status("b").state is not State.EXACT:
            seen += [update.source for update in subscriber.poll(0.05) if isinstance(update, Received)]
            assert time.monotonic() < limit, subscriber.statuses()
        assert "b" not in seen
        assert "a" in seen
    publisher.shutdown()


@pytest.mark.parametrize("which", ["endpoint", "replay_endpoint"])
def test_a_port_that_cannot_be_is_refused(which: str) -> None:
    address = {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": None, which: "tcp://127.0.0.1:71093"}
    with Subscriber() as subscriber, pytest.raises(InputError, match="port from 0 to 65535, got 71093"):
        subscriber.add(Source("p", **address))  # type: ignore[arg-type]


def test_without_descriptors_left_a_source_is_refused_and_can_come_later(
    publisher: ZmqEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Subscriber(limits=QUICK) as subscriber:
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Context, "socket", _no_descriptors)
            with pytest.raises(OutsideError, match=r"raise the limit of open files"):
                subscriber.add(source_of(publisher))
        subscriber.add(source_of(publisher))
        until(subscriber, lambda: subscriber.status("p").state is State.EXACT)


def _no_descriptors(*_: object) -> None:
    raise zmq.ZMQError(errno.EMFILE)
