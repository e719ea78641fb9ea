"""Publishers over real sockets: what consumers of vLLM's publisher rely on, and what is promised beyond
that.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.unit.event_kit import (
    DEADLINE,
    Client,
    Consumer,
    batch,
    consume,
    in_thread,
    publisher,
    receive,
    removed,
    replay,
    stored,
    wait_until,
)

from kvtier.errors import ConfigError, InputError, OutsideError
from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    EventPublisherFactory,
    KVEventBatch,
    KVEventsConfig,
    Limits,
    NullEventPublisher,
    Received,
    Reset,
    Source,
    State,
    Subscriber,
    ZmqEventPublisher,
    change_of,
    decode_batch,
)
from kvtier.events.config import check_ports
from kvtier.events.publish.loop import Loss, Outbox

PLAIN: dict[str, Any] = {"clear_on_start": False, "heartbeat_interval": None}
LATE = 30.0  # seconds that a busy machine may let a thread wait


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client()
    yield made
    made.close()


def numbers(messages: list[tuple[int, bytes]]) -> list[int]:
    return [seq for seq, _ in messages]


# -- as vLLM's -------------------------------------------------------------------------------------


def test_batches_come_in_order_from_zero(client: Client) -> None:
    with publisher(topic="kv", **PLAIN) as made:
        sub = client.subscribe(made, b"kv")
        for n in range(6):
            made.publish(batch(stored([n + 1]), ts=float(n)))
        for n in range(6):
            topic, seq, payload = receive(sub)
            assert (topic, seq) == (b"kv", n.to_bytes(8, "big"))
            if n:  # the first one has a mark, too
                assert payload == msgspec.msgpack.encode(KVEventBatch(float(n), [stored([n + 1])], 0))


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("interval", [None, 60.0])
def test_the_first_batch_of_every_process_has_a_mark(
    client: Client, tmp_path: Path, clears: bool, interval: float | None
) -> None:
    """With a sequence file its number says nothing: only the mark tells that another process speaks."""
    options: dict[str, Any] = {
        "clear_on_start": clears,
        "heartbeat_interval": interval,
        "sequence_file": str(tmp_path / "sequence"),
    }
    epochs = []
    for _ in range(2):
        with publisher(**options) as made:
            made.publish(batch(stored([1])))
            made.flush()
            first = made.stats().next_seq - 1 - clears
            batches = [decode_batch(payload) for _, payload in replay(made, first, client)]
            assert [one.mark is not None for one in batches] == [True, False][: 1 + clears]
            assert batches[0].mark is not None
            epochs.append(batches[0].mark.epoch)
    assert epochs[0] != epochs[1]


def test_other_topics_are_not_heard(client: Client) -> None:
    with publisher(topic="foo", **PLAIN) as made:
        foo, bar = client.subscribe(made, b"foo"), client.subscribe(made, b"bar")
        made.publish(batch(stored([1])))
        assert receive(foo)[0] == b"foo"
        assert bar.poll(50) == 0


def test_events_of_other_kinds_pass_through(client: Client) -> None:
    class Custom(msgspec.Struct, tag=True):
        number: int

    with publisher(**PLAIN) as made:
        sub = client.subscribe(made)
        for ts in (1.0, 2.0):
            made.publish(EventBatch(ts=ts, events=[Custom(5)]))
        receive(sub)  # the first one has a mark, too
        assert msgspec.msgpack.decode(receive(sub)[2]) == [2.0, [{"type": "Custom", "number": 5}], 0]


@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_have_addresses_and_stamps_of_their_own(client: Client, rank: int, tmp_path: Path) -> None:
    with publisher(
        rank, endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=f"ipc://{tmp_path}/replay", **PLAIN
    ) as made:
        assert made.endpoint == f"ipc://{tmp_path}/pub" + (f"_dp{rank}" if rank else "")
        mine, other = batch(stored([1])), EventBatch(1.0, [stored([2])], 7)
        made.publish(mine)
        made.publish(other)
        ranks = [decode_batch(payload).data_parallel_rank for _, payload in replay(made, 0, client)]
        assert (ranks, mine.data_parallel_rank) == ([rank, 7], rank)


def test_inproc_is_reached_through_the_common_context() -> None:
    with publisher(
        endpoint="inproc://kvtier-test", replay_endpoint="inproc://kvtier-test-replay", **PLAIN
    ) as made:
        sub = zmq.Context.instance().socket(zmq.SUB)
        sub.connect(made.endpoint)
        sub.subscribe(b"")
        made.check()
        wait_until(lambda: (made.publish(batch()), sub.poll(5))[1], "the subscription")
        sub.close()


def test_a_hundred_events_in_each_of_many_batches_all_arrive(client: Client) -> None:
    with publisher(**PLAIN) as made:
        sub = client.subscribe(made)
        for n in range(1000):
            made.publish(batch(*(stored([100 * n + k + 1]) for k in range(100))))
        seqs, blocks = [], []
        while len(blocks) < 100_000:
            _, seq, payload = receive(sub)
            seqs.append(int.from_bytes(seq, "big"))
            blocks += [block for event in decode_batch(payload).events for block in event.block_hashes]
        assert seqs == list(range(len(seqs)))
        assert blocks == list(range(1, 100_001))


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        (None, 3, None),
        ("", 3, ""),
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 2, "tcp://[::1]:5559"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        ("ipc:///run/kv", 2, "ipc:///run/kv_dp2"),
    ],
)
def test_offsets(endpoint: str | None, rank: int, expected: str | None) -> None:
    assert ZmqEventPublisher.offset_endpoint_port(endpoint, rank) == expected


@pytest.mark.parametrize("endpoint", ["tcp://host", "tcp://*:port", "tcp://*:65535", "http://x"])
def test_addresses_that_cannot_be(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"port|address"):
        ZmqEventPublisher.offset_endpoint_port(endpoint, 1)


# -- the factory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        None,
        KVEventsConfig(),
        KVEventsConfig(publisher="zmq"),
        KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    ],
)
def test_no_events_no_publisher(config: KVEventsConfig | None) -> None:
    made = EventPublisherFactory.create(config, 3)
    assert isinstance(made, NullEventPublisher)
    made.publish(batch())
    made.shutdown()
    assert made.get_publisher_config() is None


def test_the_factory_follows_the_config() -> None:
    config = KVEventsConfig(
        True, endpoint="tcp://127.0.0.1:0", topic="t", heartbeat_interval=5, max_queue_size=7
    )
    made = EventPublisherFactory.create(config, 2)
    try:
        assert isinstance(made, ZmqEventPublisher)
        found = made.get_publisher_config()
        assert (found.topic, found.heartbeat_interval, found.max_queue_size, found.publisher) == (
            "t",
            5,
            7,
            "zmq",
        )
        assert not found.endpoint.endswith(":0")
    finally:
        made.shutdown()


def test_registered_publishers_get_vllms_fields_and_a_changed_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EventPublisherFactory, "_registry", dict(EventPublisherFactory._registry))
    given: dict[str, Any] = {}

    class Mine(NullEventPublisher):
        def __init__(self, data_parallel_rank: int, **settings: Any) -> None:
            super().__init__(data_parallel_rank)
            given.update(settings)

    EventPublisherFactory.register_publisher("mine", Mine)
    EventPublisherFactory.create(KVEventsConfig(True, publisher="mine", topic="t"), 1)
    vllms = {"endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic"}
    assert (given.keys(), given["topic"]) == (vllms, "t")
    config = KVEventsConfig(True, publisher="mine", hash_format="as_is")
    EventPublisherFactory.create(config, 1)
    assert (given.keys(), given["config"]) == (vllms | {"config"}, config)
    with pytest.raises(KeyError, match="mine"):
        EventPublisherFactory.register_publisher("mine", Mine)
    with pytest.raises(ValueError, match=r"unknown event publisher 'other'.*null, zmq, mine"):
        EventPublisherFactory.create(KVEventsConfig(True, publisher="other"))


def test_the_factory_takes_an_engines_own_config() -> None:
    class Foreign:
        enable_kv_cache_events, publisher = True, "zmq"
        endpoint, replay_endpoint, topic = "tcp://127.0.0.1:0", None, ""
        buffer_steps, hwm, max_queue_size = 10, 10, 10

    made = EventPublisherFactory.create(Foreign())
    made.shutdown()
    assert isinstance(made, EventPublisher)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("buffer_steps", 0),
        ("hwm", -1),
        ("hwm", True),
        ("max_queue_size", 0),
        ("topic", 5),
        ("encoding", "json"),
        ("array_version", "0.1"),
        ("array_version", "x" * 1000),
        ("hash_format", "hex"),
        ("counting", "maybe"),
        ("hash_format", "u63"),
        ("bind", 1),
        ("heartbeat_interval", 0),
        ("heartbeat_interval", float("inf")),
        ("max_blocks_per_event", 0),
        ("clear_on_start", 1),
        ("curve", "key"),
        ("sequence_file", ""),
        ("hwm", 10**400),
        ("buffer_bytes", 10**400),
        ("max_blocks_per_event", -(10**5000)),
        ("heartbeat_interval", 10**400),
        ("topic", "\ud800"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else type(value).__name__,
)
def test_a_bad_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        KVEventsConfig(**{field: value})
    assert caught.value.path == field
    assert len(str(caught.value)) < 250


# -- addresses -------------------------------------------------------------------------------------


def test_an_address_in_use_is_named_and_nothing_stays_open() -> None:
    with publisher() as made:
        before = os.listdir("/proc/self/fd")
        for taken in (
            {"endpoint": bound(made.endpoint)},
            {"endpoint": "tcp://*:0", "replay_endpoint": bound(made.replay_endpoint)},
        ):
            with pytest.raises(
                OutsideError, match=rf"rank 0 cannot bind .*{port(list(taken.values())[-1])}.*in use"
            ):
                ZmqEventPublisher(0, **taken)  # type: ignore[arg-type]
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= len(before), "sockets to close")


def bound(endpoint: str | None) -> str:
    assert endpoint is not None
    return endpoint.replace("127.0.0.1", "*")


def port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


@pytest.mark.parametrize(
    ("replay_port", "rank", "collides"),
    [(5557, 0, True), (5558, 0, False), (5558, 1, True), (5555, 2, True)],
)
def test_ports_that_meet_those_of_lower_ranks(replay_port: int, rank: int, collides: bool) -> None:
    if collides:
        with pytest.raises(InputError, match="5557"):
            check_ports("tcp://*:5557", f"tcp://*:{replay_port}", rank)
    else:
        check_ports("tcp://*:5557", f"tcp://*:{replay_port}", rank)


def test_a_publisher_can_connect(client: Client) -> None:
    sub = client.context.socket(zmq.SUB)
    sub.subscribe(b"")
    where = f"tcp://127.0.0.1:{sub.bind_to_random_port('tcp://127.0.0.1')}"
    with publisher(endpoint=where, replay_endpoint=None, **PLAIN) as made:
        wait_until(lambda: (made.publish(batch()), sub.poll(5))[1], "the connection")
        sub.close()
        assert (made.endpoint, made.replay_endpoint) == (where, None)


# -- beyond ----------------------------------------------------------------------------------------


def test_the_first_batch_clears_and_has_the_epoch(client: Client) -> None:
    with publisher() as made:
        made.check()
        [(seq, payload)] = replay(made, 0, client)
        first = decode_batch(payload)
        assert (seq, first.events) == (0, [AllBlocksCleared()])
        assert first.mark is not None
        assert (first.mark.epoch, first.mark.blocks, first.mark.digest) == (made.stats().epoch, 0, 0)


def test_a_silent_publisher_is_heard_and_a_busy_one_marks(client: Client) -> None:
    with publisher(heartbeat_interval=0.02, clear_on_start=False) as made:
        sub = client.subscribe(made)
        idle = decode_batch(receive(sub)[2])
        assert (idle.events, idle.mark is not None) == ([], True)
        made.publish(batch(stored([1])))
        consumer = Consumer()
        wait_until(
            lambda: (consumer.apply(receive(sub)[2]), consumer.mark and consumer.mark.blocks == 1)[1],
            "a mark",
        )
        stats = made.stats()
        assert consumer.mark is not None
        assert (consumer.mark.blocks, consumer.mark.digest) == (stats.blocks, stats.digest)
        marks, n = 0, 1
        while marks < 2:
            n += 1
            made.publish(batch(stored([n])))
            received = decode_batch(receive(sub)[2])
            marks += bool(received.events) and received.mark is not None


def test_only_news_is_sent(client: Client) -> None:
    with publisher(**PLAIN) as made:
        for events in (
            [stored([1, 2])],
            [stored([1, 2])],
            [removed([1])],
            [],
            [removed([9])],
            [removed([1]), removed([2])],
        ):
            made.publish(batch(*events))
        sent = [decode_batch(payload).events for _, payload in replay(made, 0, client)]
        assert sent == [[stored([1, 2])], [], [removed([1])]]
        assert made.stats().filtered == 3


def test_removals_in_a_row_travel_as_one(client: Client) -> None:
    with publisher(**PLAIN) as made:
        made.publish(batch(stored([1, 2, 3]), stored([1], medium="CPU")))
        made.publish(batch(removed([2]), removed([3]), removed([1], "CPU"), removed([1]), stored([3], 2)))
        sent = decode_batch(replay(made, 1, client)[0][1]).events
        assert sent == [removed([2, 3]), removed([1], "CPU"), removed([1]), stored([3], 2)]


def test_large_events_are_cut_on_request(client: Client) -> None:
    with publisher(max_blocks_per_event=2, **PLAIN) as made:
        made.publish(batch(stored([1, 2, 3])))
        assert decode_batch(replay(made, 0, client)[0][1]).events == [stored([1, 2]), stored([3], 2)]


@pytest.mark.parametrize(
    ("form", "expected"),
    [("as_is", b"\xff" * 31 + b"\x05"), ("u64", 2**64 - 251)],
)
def test_hashes_in_the_form_that_is_asked_for(client: Client, form: str, expected: object) -> None:
    given = b"\xff" * 31 + b"\x05"
    with publisher(hash_format=form, **PLAIN) as made:
        made.publish(batch(stored([b"\x11" * 32], given), stored([given])))
        made.publish(batch(removed([given])))
        first, second = (decode_batch(payload).events for _, payload in replay(made, 0, client))
        assert first[0].parent_block_hash == expected
        assert (first[1].block_hashes, second) == ([expected], [removed([expected])])


def test_hashes_are_u64_by_default(client: Client) -> None:
    """Dynamo reads no others; vLLM's ints pass unchanged."""
    with publisher(**PLAIN) as made:
        made.publish(batch(stored([b"\xff" * 32, 5, 2**64 + 7, -1 - 1], b"\x00" * 31 + b"\x09")))
        made.publish(batch(removed([b"\xff" * 32]), removed([5])))
        first, second = (decode_batch(payload).events for _, payload in replay(made, 0, client))
        assert (first[0].block_hashes, first[0].parent_block_hash) == ([2**64 - 1, 5, 7, 2**64 - 2], 9)
        assert second == [removed([2**64 - 1, 5])]


@pytest.mark.parametrize("version", ["0.10.2", "0.23"])
def test_events_as_arrays(client: Client, version: str) -> None:
    with publisher(encoding="array", array_version=version, buffer_steps=1, **PLAIN) as made:
        made.publish(batch(stored([1, 2, 3])))
        made.publish(batch(removed([3])))
        made.publish(batch(stored([4], 2)))
        assert consume(replay(made, 0, client)).held == {(("GPU", 0, "", ""), block) for block in (1, 2, 4)}


def test_a_batch_that_cannot_be_encoded_takes_no_number(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with publisher(hash_format="as_is", **PLAIN) as made:
        made.publish(batch(stored([1])))
        made.publish(batch(stored([2]), stored([3], lora_name=object())))
        made.publish(batch(stored([2**70])))
        made.publish(EventBatch(ts="now", events=[stored([4])]))  # type: ignore[arg-type]
        made.publish(batch(stored([5]), BlockRemoved(["x"], None)))  # type: ignore[list-item]
        sent = replay(made, 0, client)
        assert [decode_batch(payload).events for _, payload in sent] == [[stored([1])], [stored([5])]]
        assert (numbers(sent), made.stats().unencodable) == ([0, 1], 4)
    assert "cannot be encoded" in caplog.text


def test_events_that_cannot_be_encoded_are_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """A client's text goes into events: extra keys, the names of adapters."""
    with publisher(hash_format="as_is", **PLAIN) as made:
        for number in range(50):
            made.publish(batch(stored([number], lora_name=object())))
        wait_until(lambda: made.stats().unencodable == 50, "all batches")
    assert len(caplog.records) == 1


def test_the_engines_own_classes_are_as_good_as_ours(client: Client) -> None:
    """A publisher registered with vLLM gets vLLM's structs: same names and fields, other classes."""
    fields = [(name, Any) for name in ("block_hashes", "medium", "group_idx", "locality", "ownership")]
    foreign = msgspec.defstruct("BlockRemoved", fields, tag=True)
    with publisher(**PLAIN) as made:
        made.publish(batch(stored([1, 2])))
        made.publish(batch(foreign([1], "GPU", None, None, None), foreign([2], "GPU", None, None, None)))
        assert consume(replay(made, 0, client)).held == set()


# -- a full queue ----------------------------------------------------------------------------------


class BusyThread:
    """Keeps a publisher's thread busy while it is open."""

    def __init__(self, made: ZmqEventPublisher) -> None:
        self.gate, self.inside = threading.Event(), threading.Event()
        self.made = made

    def __enter__(self) -> None:
        in_thread(self.made, lambda: (self.inside.set(), self.gate.wait()))
        assert self.inside.wait(DEADLINE)

    def __exit__(self, *_: object) -> None:
        self.gate.set()


def test_a_full_queue_leaves_a_gap_that_replay_fills(client: Client) -> None:
    with publisher(max_queue_size=3, heartbeat_interval=60.0, clear_on_start=False) as made:
        sub = client.subscribe(made)
        with BusyThread(made):
            for n in range(1, 11):
                made.publish(batch(stored([n], n - 1 or None)))
            made.publish(batch(removed([2, 9])))
            made.publish(batch(stored([11], 10)))
        made.check()
        made.publish(batch(stored([12], 11)))
        live = [receive(sub) for _ in range(2)]
        assert [int.from_bytes(seq, "big") for _, seq, _ in live] == [12, 13]
        again = replay(made, 0, client)
        assert numbers(again) == list(range(14))
        consumer = consume(again)
        assert {block for _, block in consumer.held} == set(range(1, 13)) - {2, 9}
        stats = made.stats()
        assert (stats.overflowed, stats.next_seq) == (12, 14)
        mark = decode_batch(live[0][2]).mark
        assert mark is not None
        assert mark.blocks == 9


# -- batches that wait -----------------------------------------------------------------------------


def test_up_to_64_batches_that_wait_keep_their_numbers(client: Client) -> None:
    with publisher(**PLAIN) as made:
        with BusyThread(made):
            for n in range(64):
                made.publish(batch(stored([n + 1])))
        assert numbers(replay(made, 0, client)) == list(range(64))
        assert made.stats().joined == 0


def test_more_batches_that_wait_travel_together(client: Client) -> None:
    with publisher(**PLAIN) as made:
        with BusyThread(made):
            for n in range(300):
                made.publish(batch(stored([n + 1], n or None), ts=float(n)))
        sent = replay(made, 0, client)
        batches = [decode_batch(payload) for _, payload in sent]
        assert numbers(sent) == list(range(len(sent)))
        assert [event for message in batches for event in message.events] == [
            stored([n + 1], n or None) for n in range(300)
        ]
        sizes = [len(message.events) for message in batches]
        assert (max(sizes), sizes[0], set(sizes[-60:])) == (32, 32, {1})
        assert all(message.ts == float(message.events[-1].block_hashes[0] - 1) for message in batches)
        assert (made.stats().joined, made.stats().sent) == (300 - len(sent), len(sent))


def test_a_joined_message_is_not_large(client: Client) -> None:
    with publisher(**PLAIN) as made:
        with BusyThread(made):
            for n in range(100):
                made.publish(batch(stored([1000 * n + k + 1 for k in range(1000)])))
        sizes = [len(payload) for _, payload in replay(made, 0, client)]
        assert 128 << 10 < max(sizes) < 144 << 10


def test_joined_batches_keep_ranks_clears_and_faults_apart(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.events.publish.loop._BEHIND", 0)
    with publisher(heartbeat_interval=60.0, clear_on_start=False) as made:
        with BusyThread(made):
            made._loop.sender._mark_due = True
            made.publish(batch(stored([1, 2])))
            made.publish(batch(stored([3], lora_name=object())))
            made.publish(batch(stored([1, 2])))  # no news
            made.publish(batch())
            made.publish(batch(AllBlocksCleared(), stored([4])))
            made.publish(batch(removed([4]), stored([5])))
            made.publish(EventBatch(2.0, [stored([6])], 7))
            made.publish(EventBatch(3.0, [stored([7])], 7))
        one, two = (decode_batch(payload) for _, payload in replay(made, 0, client))
        assert one.events == [stored([1, 2]), AllBlocksCleared(), stored([4]), removed([4]), stored([5])]
        assert (two.events, two.ts, two.data_parallel_rank) == ([stored([6]), stored([7])], 3.0, 7)
        assert one.mark is not None
        assert (one.mark.blocks, one.mark.digest, two.mark) == (1, change_of([stored([5])]).digest, None)
        stats = made.stats()
        assert (stats.unencodable, stats.filtered, stats.joined) == (1, 1, 4)


def test_batches_that_wait_too_long_are_not_sent_but_their_effect_is_replayed(client: Client) -> None:
    with publisher(max_queue_size=100, **PLAIN) as made:
        with BusyThread(made):
            for n in range(150):
                made.publish(batch(stored([n + 1])))
        made.flush()
        made.publish(batch(stored([151])))
        sent = replay(made, 0, client)
        assert {block for _, block in consume(sent).held} == set(range(1, 152))
        assert (made.stats().overflowed, made.stats().next_seq) == (150, 151)


def test_publishing_never_waits_and_a_full_queue_ends_in_a_clear(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the lost batches would have changed is not known, so consumers must not hold anything."""
    monkeypatch.setattr("kvtier.events.publish.loop._LEAST_CAPACITY", 100)
    with publisher(max_queue_size=10, **PLAIN) as made:
        made.publish(batch(stored([1_000_000])))
        made.flush()
        sub = client.subscribe(made)
        with BusyThread(made):
            start = time.monotonic()
            for n in range(20_000):
                made.publish(batch(stored([n + 1])))
            assert time.monotonic() - start < DEADLINE
            assert len(made._loop.outbox) == 101  # with the loss
        made.check()
        _, seq, payload = receive(sub)
        cleared = decode_batch(payload)
        assert (cleared.events, int.from_bytes(seq, "big")) == ([AllBlocksCleared()], 20_001)
        assert cleared.mark is not None
        assert (cleared.mark.blocks, made.stats().blocks, made.stats().overflowed) == (0, 0, 20_000)
        made.publish(batch(removed([1_000_000]), stored([7])))
        assert {block for _, block in consume(replay(made, 0, client)).held} == {7}
        assert {block for _, block in consume(replay(made, b"snapshot", client)).held} == {7}


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_follower_of_an_overloaded_publisher_is_exact_and_holds_nothing_that_is_gone(
    client: Client, monkeypatch: pytest.MonkeyPatch, seed: int, loses: bool
) -> None:
    """Bursts are sent, or applied without being sent, or lost, depending on their length."""
    monkeypatch.setattr("kvtier.events.publish.loop._LEAST_CAPACITY", 100)
    monkeypatch.setattr("kvtier.events.publish.sender._SHARED_FOR", 0.0)
    source, truth, replica = random.Random(seed), set[int](), set[int]()
    until = time.monotonic() + DEADLINE
    limits = Limits(probe_interval=0.3, catch_up_delay=0.02, backoff=0.02, backoff_max=0.1)
    with publisher(max_queue_size=20, buffer_steps=30, heartbeat_interval=0.05) as made:
        where = Source("one", made.endpoint, made.replay_endpoint)
        with Subscriber([where], limits=limits) as subscriber:
            for size in source.choices((5, 15, 60, 90, 300 if loses else 60), k=10):
                with BusyThread(made):
                    for _ in range(size):
                        made.publish(batch(*change(truth, source)))
                made.flush()
                made.publish(batch(*change(truth, source)))
                made.flush()
                newest = made.stats().next_seq - 1
                while not follow(subscriber, replica, newest):
                    assert time.monotonic() < until, "the replica did not become exact"
                assert replica == {block for _, block in consume(replay(made, b"snapshot", client)).held}
                assert replica <= truth
                assert loses or replica == truth
        assert made.stats().overflowed > 0


def change(truth: set[int], source: random.Random) -> list[Any]:
    """Store a few blocks, or remove some."""
    blocks = sorted(set(source.choices(range(1, 400), k=3)))
    there, new = [b for b in blocks if b in truth], [b for b in blocks if b not in truth]
    truth.symmetric_difference_update(blocks)
    return ([removed(there)] if there else []) + [stored([block]) for block in new]


def follow(subscriber: Subscriber[Any], replica: set[int], seq: int) -> bool:
    """Apply updates; return whether the replica is exact as of a number or a later one."""
    for update in subscriber.poll(0.01):
        if isinstance(update, Reset):
            replica.clear()
        elif isinstance(update, Received):
            for event in update.batch.events:
                if isinstance(event, AllBlocksCleared):
                    replica.clear()
                elif isinstance(event, BlockStored):
                    replica.update(event.block_hashes)
                else:
                    replica.difference_update(event.block_hashes)
    status = subscriber.status("one")
    return status.state is State.EXACT and status.seq >= seq


# -- the end ---------------------------------------------------------------------------------------


def test_shutdown_sends_waiting_batches_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ZmqEventPublisher, "SHUTDOWN_TIMEOUT", DEADLINE)
    with publisher(**PLAIN) as made:
        sub = client.subscribe(made)
        for n in range(2000):
            made.publish(batch(stored([n + 1])))
        start = time.monotonic()
        made.shutdown()
        made.shutdown()
        assert time.monotonic() - start < ZmqEventPublisher.SHUTDOWN_TIMEOUT
        found = [receive(sub) for _ in range(made.stats().next_seq)]
        assert [int.from_bytes(seq, "big") for _, seq, _ in found] == list(range(len(found)))
        assert {block for _, block in consume((0, payload) for *_, payload in found).held} == set(
            range(1, 2001)
        )
        with pytest.raises(RuntimeError, match="Publisher is closed"):
            made.publish(batch())


def test_shutdown_returns_when_the_thread_is_stuck_and_the_queue_full() -> None:
    made = ZmqEventPublisher(0, "tcp://127.0.0.1:0", max_queue_size=2)
    busy = BusyThread(made)
    busy.__enter__()
    for n in range(9):
        made.publish(batch(stored([n + 1])))
    start = time.monotonic()
    made.shutdown()
    assert time.monotonic() - start < ZmqEventPublisher.SHUTDOWN_TIMEOUT + LATE
    busy.gate.set()
    made._loop.thread.join(DEADLINE)
    assert not made._loop.thread.is_alive()


def test_shutdown_returns_when_a_subscriber_does_not_read(client: Client) -> None:
    with publisher(hwm=0, **PLAIN) as made:
        sub = client.open(zmq.SUB, made.endpoint, rcvhwm=1)
        sub.subscribe(b"")
        big = [stored(list(range(n, n + 4000))) for n in range(1, 1_000_000, 4000)]
        for event in big:
            made.publish(batch(event))
        start = time.monotonic()
        made.shutdown()
        assert time.monotonic() - start < ZmqEventPublisher.SHUTDOWN_TIMEOUT + LATE


def test_a_failing_turn_is_logged_and_survived(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    made = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=KVEventsConfig(**PLAIN))
    try:
        in_thread(made, lambda: setattr(made._loop.sender, "beat", None))  # a fault of ours
        wait_until(lambda: made.stats().errors > 0, "the fault")
        in_thread(made, lambda: delattr(made._loop.sender, "beat"))
        made.publish(batch(stored([1])))
        wait_until(lambda: made.stats().sent == 1, "the next batch")
        assert len(replay(made, made.stats().next_seq - 1, client)) == 1
    finally:
        made.shutdown()
    assert "a turn of the publisher's thread failed" in caplog.text


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_forgotten_publisher_does_not_hold_the_process() -> None:
    done = run_python("""
        from kvtier.events import KVEventBatch, ZmqEventPublisher
        made = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        made.publish(KVEventBatch(ts=1.0, events=[]))
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_has_a_closed_publisher() -> None:
    done = run_python("""
        import os
        from kvtier.events import KVEventBatch, ZmqEventPublisher
        made = ZmqEventPublisher(0, "tcp://127.0.0.1:0")
        child = os.fork()
        if not child:
            try:
                made.publish(KVEventBatch(ts=1.0, events=[]))
            except RuntimeError:
                made.shutdown()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        made.publish(KVEventBatch(ts=1.0, events=[]))
        made.check()
        assert made.stats().sent == 2
        made.shutdown()
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_collected_publisher_ends() -> None:
    made = ZmqEventPublisher(0, "tcp://127.0.0.1:0")
    thread = made._loop.thread
    del made
    thread.join(DEADLINE)
    assert not thread.is_alive()


# -- ranks -----------------------------------------------------------------------------------------


def test_ranks_have_states_of_their_own(client: Client) -> None:
    """Two ranks' events through one publisher: the second store was filtered, and a clear was of both."""
    with publisher(buffer_steps=1, **PLAIN) as made:
        made.publish(EventBatch(1.0, [stored([1, 2])], 0))
        made.publish(EventBatch(1.0, [stored([1, 2, 3])], 1))
        made.check()
        stats = made.stats()
        digest = change_of([stored([1, 2]), stored([1, 2, 3])]).digest
        assert (stats.filtered, stats.blocks, stats.digest) == (0, 5, digest)
        assert of_ranks(replay(made, b"snapshot", client)) == {0: {1, 2}, 1: {1, 2, 3}}
        assert of_ranks(replay(made, 0, client)) == {0: {1, 2}, 1: {1, 2, 3}}
        made.publish(EventBatch(1.0, [AllBlocksCleared(), stored([4])], 0))
        made.check()
        made._loop.sender._retire_snapshot()
        got = replay(made, b"snapshot", client)
        assert of_ranks(got) == {0: {4}, 1: {1, 2, 3}}
        mark = decode_batch(got[-1][1]).mark
        assert mark is not None
        assert (mark.blocks, mark.digest) == (4, change_of([stored([4]), stored([1, 2, 3])]).digest)


def of_ranks(messages: list[tuple[int, bytes]]) -> dict[int | None, set[Any]]:
    """Return the blocks of each rank; every rank begins with a clear of its own."""
    found: dict[int | None, set[Any]] = {}
    for _, payload in messages:
        received = decode_batch(payload)
        for event in received.events:
            if isinstance(event, AllBlocksCleared):
                found[received.data_parallel_rank] = set()
            elif hasattr(event, "parent_block_hash"):
                found[received.data_parallel_rank] |= set(event.block_hashes)
            else:
                found[received.data_parallel_rank] -= set(event.block_hashes)
    return {rank: blocks for rank, blocks in found.items() if blocks}


def test_an_overflow_leaves_numbers_for_a_state_of_several_ranks(client: Client) -> None:
    with publisher(max_queue_size=1, **PLAIN) as made:
        with BusyThread(made):
            for rank in (0, 1, 2, 3):
                made.publish(EventBatch(1.0, [stored([rank + 1])], rank))
        made.check()
        got = replay(made, 0, client)
        assert numbers(got) == list(range(made.stats().next_seq))
        assert of_ranks(got) == {rank: {rank + 1} for rank in (0, 1, 2, 3)}


# -- fields of the wrong type ----------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"lora_name": 7},
        {"block_size": "2"},
        {"medium": 5},
        {"extra_keys": 3},
        {"token_ids": "x"},
        {"group_idx": "0"},
    ],
)
def test_an_ill_typed_event_is_refused_and_snapshots_go_on(
    client: Client, caplog: pytest.LogCaptureFixture, wrong: dict[str, Any], encoding: str
) -> None:
    """A lora_name of 7 went out, and every snapshot after its first removal failed."""
    with publisher(encoding=encoding, **PLAIN) as made:
        made.publish(batch(stored([1, 2, 3]), stored([4, 5, 6], **wrong)))
        made.publish(batch(removed([2, 5])))
        made.check()
        assert {block for _, block in consume(replay(made, b"snapshot", client)).held} == {1, 3}
        assert made.stats().unencodable == 1
        [name] = wrong
    assert f"{name}: expected" in caplog.text


# -- where numbers begin ---------------------------------------------------------------------------


def test_without_a_file_numbers_begin_at_the_clock(client: Client) -> None:
    """A restart began again at 0, which Dynamo takes for batches of before and drops for good."""
    found = []
    for _ in range(2):
        made = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        made.publish(batch(stored([1])))
        made.check()
        found.append([seq for seq, _ in replay(made, made.stats().next_seq - 2, client)])
        made.shutdown()
    first, second = found
    assert len(first) == 2
    assert first[-1] < second[0] < 2**53
    assert abs(second[0] / 1e6 - time.time()) < 600


def test_a_replay_across_a_quick_restart_does_not_fill_every_number(client: Client) -> None:
    """Half a second of clock is half a million numbers: empty batches for them took minutes."""
    with publisher(first=1_700_000_000_500_000, buffer_steps=5, **PLAIN) as made:
        made.publish(batch(stored([1])))
        got = replay(made, 1_700_000_000_000_000, client)
        assert len(got) < 10
        assert {block for _, block in consume(got).held} == {1}


def test_a_replay_from_0_has_the_state_and_later_batches(client: Client) -> None:
    with publisher(first=1_700_000_000_000_000, buffer_steps=5, **PLAIN) as made:
        [(newest, _)] = replay(made, b"kvtier:status", client)
        assert newest == 1_700_000_000_000_000 - 1
        for n in range(1, 21):
            made.publish(batch(stored([n], n - 1 or None)))
        got = replay(made, 0, client)
        assert numbers(got)[0] == 0
        assert len(got) < 10
        assert {block for _, block in consume(got).held} == set(range(1, 21))
        assert numbers(replay(made, b"kvtier:status", client)) == [1_700_000_000_000_019]


def test_a_full_outbox_loses_batches_until_the_loss_is_taken() -> None:
    outbox = Outbox(capacity=1)
    for n in range(4):
        outbox.queue_or_lose(EventBatch(float(n), []))
    outbox.check()
    assert outbox.take().ts == 0.0
    outbox.queue_or_lose(EventBatch(4.0, []))  # there is room, but it would overtake what is lost
    loss = outbox.take()
    assert isinstance(loss, Loss)
    assert loss.batches == 4
    outbox.queue_or_lose(EventBatch(5.0, []))
    assert (loss.batches, outbox.take().ts, outbox.take()) == (4, 5.0, None)


def test_an_outbox_that_is_closed_stays_so() -> None:
    """The thread goes on to take what waits, a loss too, after which there is room again."""
    outbox = Outbox(capacity=1)
    outbox.queue_or_lose(EventBatch(1.0, []))
    outbox.queue_or_lose(EventBatch(2.0, []))
    outbox.close()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="closed"):
            outbox.queue_or_lose(EventBatch(3.0, []))
        outbox.take()
    assert len(outbox) == 0


def test_a_subscriber_that_reads_nothing_costs_a_bounded_number_of_bytes(client: Client) -> None:
    """Only messages were bounded: 100,000 of any size."""
    total, size = 800, 200_000
    with publisher(buffer_bytes=8 << 20, hwm=10_000, **PLAIN) as made:
        sub = client.open(zmq.SUB, made.endpoint, rcvhwm=1, rcvbuf=4096)
        sub.subscribe(b"")
        wait_until(lambda: (made.publish(batch()), sub.poll(5))[1], "the subscription")
        for n in range(total):
            made.publish(batch(stored([n + 1], lora_name="x" * size)))
            if n % 50 == 0:
                made.flush()
        made.flush()
        taken = 0
        while sub.poll(500):
            taken += len(sub.recv_multipart()[2])
        assert taken < 40 << 20, "most of it waited, though the system's own buffers are small"


def test_a_subscriber_reads_on_after_large_messages(client: Client) -> None:
    """A bound that was lowered after the connection was made stopped it for ever."""
    with publisher(buffer_bytes=4096, hwm=10_000, **PLAIN) as made:
        sub = client.open(zmq.SUB, made.endpoint)
        sub.subscribe(b"")
        wait_until(lambda: (made.publish(batch()), sub.poll(5))[1], "the subscription")
        for n in range(500):
            made.publish(batch(stored([n + 1], lora_name="x" * 5000)))
            made.flush()
            assert sub.poll(10_000), f"nothing came after {n} messages"
            while sub.poll(0):
                sub.recv_multipart()


@pytest.mark.parametrize("tokens", [0, 16])
def test_a_huge_event_leaves_in_parts(client: Client, tokens: int) -> None:
    """One call on a million blocks would hold the interpreter for 100 ms, here and in every consumer."""
    hashes = list(range(1, 100_001))
    event = BlockStored(hashes, None, [7] * (tokens * len(hashes)), tokens, None, "GPU", None)
    with publisher(buffer_bytes=1 << 30, **PLAIN) as made:
        made.publish(batch(event))
        made.publish(batch(*(removed(hashes[start : start + 30_000]) for start in range(0, 90_000, 30_000))))
        made.check()
        sent = replay(made, 0, client)
        parts = [decode_batch(payload) for _, payload in sent]
        counts = [len(part.block_hashes) for one in parts for part in one.events]
        assert max(counts) <= 1024
        assert sum(counts) == 190_000
        assert max(len(payload) for _, payload in sent) < 1 << 20
        assert len(consume(sent).held) == made.stats().blocks == 10_000
        assert {one.ts for one in parts} == {1.0}
