"""vLLM's own publisher, followed by our subscriber through traffic, losses, late joins and restarts.

Its protocol has sequence numbers and a buffer, no marks. So: whenever the subscriber says exact and has the newest batch, its
picture is the truth. Where the buffer has lost what is missing, it must not say exact until the cache is cleared. What
stays unseen is a lost tail, until the stream has been silent for the probe interval.
"""

from __future__ import annotations

import importlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import zmq
from tests.chaos.stream_kit import Event, LossyLink, Picture, Workload, stored

from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    Kind,
    Limits,
    Received,
    Source,
    State,
    Subscriber,
    TierCleared,
)

PATIENCE = 30.0
LIMITS = Limits(reply_timeout=2.0, probe_interval=0.3, backoff=0.05, backoff_max=0.5)
BUFFER = 60


def kv_events() -> Any:
    """Return vLLM's module; importing it takes seconds, and warns."""
    return importlib.import_module("vllm.distributed.kv_events")


def as_vllm(events: list[Event], held: Picture) -> list[object]:
    """Return the events as vLLM's classes; it has no cleared tier, so every copy in it is removed."""
    made: list[object] = []
    for event in events:
        if isinstance(event, BlockStored):
            made.append(
                kv_events().BlockStored(
                    event.block_hashes,
                    event.parent_block_hash,
                    event.token_ids,
                    event.block_size,
                    None,
                    event.medium,
                    None,
                )
            )
        elif isinstance(event, BlockRemoved):
            made.append(kv_events().BlockRemoved(event.block_hashes, event.medium))
        elif isinstance(event, AllBlocksCleared):
            made.append(kv_events().AllBlocksCleared())
        else:
            assert isinstance(event, TierCleared)
            for (place, each), copies in held.blocks.items():
                if place[0] == event.medium:
                    made += [kv_events().BlockRemoved([each], event.medium)] * copies
        held.fold([event])
    return made


class Engine:
    """A vLLM publisher, what it has published, and a link to it that loses messages when told to."""

    def __init__(self, seed: int, buffer_steps: int) -> None:
        self.rng = random.Random(seed)
        self.buffer_steps = buffer_steps
        self.workload = Workload(self.rng)
        self.truth = Picture()
        self.newest = -1
        self.publisher = self._make("tcp://*:0", "tcp://*:0")
        config = self.publisher.get_publisher_config()
        assert config.replay_endpoint is not None
        self.endpoint, self.replay_endpoint = config.endpoint, config.replay_endpoint
        self.link = LossyLink(self.rng, self.endpoint)
        self.link.loss = 0.0

    def _make(self, endpoint: str, replay_endpoint: str) -> Any:
        return kv_events().ZmqEventPublisher(0, endpoint, replay_endpoint, buffer_steps=self.buffer_steps)

    def step(self, batches: int = 1) -> None:
        """Publish batches of random events."""
        for _ in range(batches):
            self.publish(self.workload.batch())

    def store(self, batches: int) -> None:
        """Publish batches of one new block each; unlike random events, they never clear anything."""
        for _ in range(batches):
            self.publish([stored([self.rng.getrandbits(62)])])

    def publish(self, events: list[Event]) -> None:
        self.newest += 1
        batch = kv_events().KVEventBatch(ts=time.time(), events=as_vllm(events, self.truth))
        self.publisher.publish(batch)

    def restart(self) -> None:
        """Start the publisher anew at the same addresses."""
        self.publisher.shutdown()
        self.workload.restart()
        self.truth, self.newest = Picture(), -1
        wild = [f"tcp://*:{address.rpartition(':')[2]}" for address in (self.endpoint, self.replay_endpoint)]
        until = time.monotonic() + PATIENCE
        while True:
            try:
                self.publisher = self._make(*wild)
                return
            except zmq.ZMQError:
                assert time.monotonic() < until, "the address stays in use"

    def close(self) -> None:
        self.publisher.shutdown()
        self.link.close()


class Consumer:
    """A subscriber and the picture that its updates give."""

    def __init__(self, endpoint: str, replay_endpoint: str | None) -> None:
        self.subscriber: Subscriber[DecodedBatch] = Subscriber(
            [Source("vllm", endpoint, replay_endpoint)], limits=LIMITS
        )
        self.picture = Picture()

    def serve(self) -> None:
        self.picture.apply(self.subscriber.poll(0.002))

    def is_degraded_at(self, seq: int) -> bool:
        status = self.subscriber.status("vllm")
        return status.state is State.DEGRADED and status.seq == seq

    def close(self) -> None:
        self.subscriber.check()
        self.subscriber.close()

    def says_exact_of(self, engine: Engine) -> bool:
        status = self.subscriber.status("vllm")
        return status.state is State.EXACT and status.seq == engine.newest


def serve_until(engine: Engine, consumers: list[Consumer], done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        engine.link.pump()
        for consumer in consumers:
            consumer.serve()
        assert time.monotonic() < deadline, [each.subscriber.statuses() for each in consumers]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.mark.parametrize("seed", [0, 1])
def test_a_subscriber_has_the_truth_whenever_the_traffic_pauses(seed: int, stack: ExitStack) -> None:
    """A buffer that holds everything, lost messages, a restart, late joins: all ends exact."""
    engine = stack.enter_context(closing(Engine(seed, buffer_steps=10_000)))
    endpoints = [engine.link.endpoint, engine.endpoint]
    consumers = [stack.enter_context(closing(Consumer(each, engine.replay_endpoint))) for each in endpoints]
    for turn in range(5):
        engine.link.loss = 0.3
        if turn == 3:
            engine.restart()
            engine.step(engine.rng.choice((1, 80)))
        for _ in range(40):
            engine.step(engine.rng.randint(0, 4))
            engine.link.pump()
            for consumer in consumers:
                consumer.serve()
        engine.link.loss = 0.0
        serve_until(engine, consumers, lambda: all(each.says_exact_of(engine) for each in consumers))
        for consumer in consumers:
            assert consumer.picture.blocks == engine.truth.blocks
        consumers.append(stack.enter_context(closing(Consumer(engine.endpoint, engine.replay_endpoint))))
    counters = consumers[0].subscriber.status("vllm").counters
    assert counters.gaps
    assert counters.lost_batches == 0
    assert consumers[0].subscriber.status("vllm").kind is Kind.STOCK
    assert consumers[1].subscriber.status("vllm").counters.restarts == 1


def test_what_the_buffer_has_lost_is_known_to_be_missing(stack: ExitStack) -> None:
    """Late join and a gap beyond the buffer: degraded, until the cache is cleared."""
    engine = stack.enter_context(closing(Engine(7, buffer_steps=BUFFER)))
    follower = stack.enter_context(closing(Consumer(engine.link.endpoint, engine.replay_endpoint)))
    engine.store(1)
    serve_until(engine, [follower], lambda: follower.says_exact_of(engine))
    engine.link.loss = 1.0
    engine.store(3 * BUFFER)
    late = stack.enter_context(closing(Consumer(engine.endpoint, engine.replay_endpoint)))
    both = [follower, late]
    serve_until(engine, both, lambda: all(each.is_degraded_at(engine.newest) for each in both))
    engine.link.loss = 0.0
    for consumer in both:
        status = consumer.subscriber.status("vllm")
        assert "buffer begins at batch" in status.reason
        assert status.counters.truncated_replays >= 1
    engine.store(20)
    serve_until(engine, both, lambda: all(each.is_degraded_at(engine.newest) for each in both))
    engine.publish([AllBlocksCleared()])
    engine.store(5)
    serve_until(engine, both, lambda: all(each.says_exact_of(engine) for each in both))
    assert all(each.picture.blocks == engine.truth.blocks for each in both)


def test_a_lost_tail_is_found_after_the_probe_interval(stack: ExitStack) -> None:
    engine = stack.enter_context(closing(Engine(3, buffer_steps=BUFFER)))
    consumer = stack.enter_context(closing(Consumer(engine.link.endpoint, engine.replay_endpoint)))
    engine.step(3)
    serve_until(engine, [consumer], lambda: consumer.says_exact_of(engine))
    engine.link.loss = 1.0
    engine.step(4)
    before = consumer.subscriber.status("vllm").counters.replays
    serve_until(engine, [consumer], lambda: consumer.says_exact_of(engine))
    assert consumer.picture.blocks == engine.truth.blocks
    assert consumer.subscriber.status("vllm").counters.replays > before


def test_without_a_replay_endpoint_nothing_is_claimed_that_was_not_seen(stack: ExitStack) -> None:
    engine = stack.enter_context(closing(Engine(5, buffer_steps=BUFFER)))
    engine.store(2)
    witness = stack.enter_context(closing(Consumer(engine.endpoint, engine.replay_endpoint)))
    serve_until(engine, [witness], lambda: witness.says_exact_of(engine))
    consumer = stack.enter_context(closing(Consumer(engine.endpoint, None)))
    serve_until(engine, [consumer], lambda: consumer.subscriber.status("vllm").connected)
    deadline = time.monotonic() + PATIENCE
    while consumer.subscriber.status("vllm").seq < 0:
        engine.store(1)
        consumer.serve()
        assert time.monotonic() < deadline
    assert consumer.subscriber.status("vllm").state is State.DEGRADED
    assert "joined at batch" in consumer.subscriber.status("vllm").reason
    engine.publish([AllBlocksCleared()])
    serve_until(engine, [consumer], lambda: consumer.says_exact_of(engine))
    assert consumer.picture.blocks == engine.truth.blocks


def test_the_bytes_of_vllm_are_read_whole(stack: ExitStack) -> None:
    """No event of vLLM's publisher is skipped, and none is changed."""
    engine = stack.enter_context(closing(Engine(9, buffer_steps=BUFFER)))
    events = [
        BlockStored(
            [1 << 63, 2], 7, [1, 2, 3, 4], 2, None, "GPU", "adapter", [("salt",), None], 1, "full_attention", 8
        ),
        BlockRemoved([b"\1" * 32], "CPU"),
        AllBlocksCleared(),
    ]
    made = [
        kv_events().BlockStored(
            [1 << 63, 2], 7, [1, 2, 3, 4], 2, None, "GPU", "adapter", [("salt",), None], 1, "full_attention", 8
        ),
        kv_events().BlockRemoved([b"\1" * 32], "CPU"),
        kv_events().AllBlocksCleared(),
    ]
    engine.publisher.publish(kv_events().KVEventBatch(ts=time.time(), events=made))
    with Subscriber([Source("vllm", engine.endpoint, engine.replay_endpoint)], limits=LIMITS) as subscriber:
        deadline = time.monotonic() + PATIENCE
        received: list[Received] = []
        while not received:
            received = [update for update in subscriber.poll(0.1) if isinstance(update, Received)]
            assert time.monotonic() < deadline
        assert received[0].batch.events == events
        assert received[0].batch.data_parallel_rank == 0
        assert subscriber.status("vllm").counters.skipped_events == 0
