"""The publishers of vLLM and SGLang, followed by our subscriber through traffic, losses, late joins and
restarts.

Their protocol has sequence numbers and a buffer, no marks. So: whenever the subscriber says exact and has
the newest batch, its replica is the truth. Where the buffer has lost what is missing, it must not say exact
until the cache is cleared. What stays unseen is a lost tail, until the stream has been silent for the probe
interval.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import msgspec
import pytest
from tests.vllm.stock import PATIENCE, STOCK, Consumer, Engine, as_engine, serve_until

from kvtier.events import AllBlocksCleared, BlockRemoved, BlockStored, Kind, Received, State
from kvtier.index import PrefixIndex

pytestmark = pytest.mark.newest_vllm

BUFFER = 60

Start = Callable[..., Engine]
Follow = Callable[..., Consumer]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture(params=STOCK)
def start(request: pytest.FixtureRequest, stack: ExitStack) -> Start:
    """Start a publisher of each engine."""
    return lambda *args, **options: stack.enter_context(closing(Engine(request.param, *args, **options)))


@pytest.fixture
def follow(stack: ExitStack) -> Follow:
    """Start a consumer."""
    return lambda *args: stack.enter_context(closing(Consumer(*args)))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_subscriber_has_the_truth_whenever_the_traffic_pauses(
    seed: int, start: Start, follow: Follow
) -> None:
    """A buffer that holds everything, lost messages, a restart, late joins: all ends exact."""
    engine = start(seed)
    consumers = [
        follow(endpoint, engine.replay_endpoint) for endpoint in (engine.link.endpoint, engine.endpoint)
    ]
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
        serve_until(engine, consumers, lambda: all(consumer.says_exact_of(engine) for consumer in consumers))
        for consumer in consumers:
            assert consumer.replica.blocks == engine.truth.blocks
        consumers.append(follow(engine.endpoint, engine.replay_endpoint))
    counters = consumers[0].status.counters
    assert counters.gaps
    assert counters.lost_batches == counters.skipped_events == counters.bad_frames == 0
    assert consumers[0].status.kind is Kind.STOCK
    assert consumers[1].status.counters.restarts == 1  # whoever shows it first, an answer or the live stream


def test_batches_lost_from_the_buffer_are_known_to_be_missing(start: Start, follow: Follow) -> None:
    """Late join and a gap beyond the buffer: degraded, until the cache is cleared."""
    engine = start(7, buffer_steps=BUFFER)
    follower = follow(engine.link.endpoint, engine.replay_endpoint)
    engine.store(1)
    serve_until(engine, [follower], lambda: follower.says_exact_of(engine))
    engine.link.loss = 1.0
    engine.store(3 * BUFFER)
    both = [follower, follow(engine.endpoint, engine.replay_endpoint)]
    serve_until(engine, both, lambda: all(consumer.is_degraded_at(engine.newest) for consumer in both))
    engine.link.loss = 0.0
    for consumer in both:
        assert "buffer begins at batch" in consumer.status.reason
        assert consumer.status.counters.truncated_replays >= 1
    engine.store(20)
    serve_until(engine, both, lambda: all(consumer.is_degraded_at(engine.newest) for consumer in both))
    engine.publish([AllBlocksCleared()])
    engine.store(5)
    serve_until(engine, both, lambda: all(consumer.says_exact_of(engine) for consumer in both))
    assert all(consumer.replica.blocks == engine.truth.blocks for consumer in both)


def test_a_long_history_is_replayed_whole(start: Start, follow: Follow) -> None:
    """It is longer than what a socket queues, so a publisher that does not wait for its reader may drop a
    part of it.
    """
    engine = start(11)
    engine.store(4_000)
    consumer = follow(engine.endpoint, engine.replay_endpoint)
    serve_until(engine, [consumer], lambda: consumer.says_exact_of(engine))
    assert consumer.replica.blocks == engine.truth.blocks
    assert consumer.status.counters.lost_batches == 0


def test_a_lost_tail_is_found_after_the_probe_interval(start: Start, follow: Follow) -> None:
    engine = start(3, buffer_steps=BUFFER)
    consumer = follow(engine.link.endpoint, engine.replay_endpoint)
    engine.step(3)
    serve_until(engine, [consumer], lambda: consumer.says_exact_of(engine))
    engine.link.loss = 1.0
    engine.step(4)
    before = consumer.status.counters.replays
    serve_until(engine, [consumer], lambda: consumer.says_exact_of(engine))
    assert consumer.replica.blocks == engine.truth.blocks
    assert consumer.status.counters.replays > before


def test_without_a_replay_endpoint_nothing_is_claimed_that_was_not_seen(
    start: Start, follow: Follow
) -> None:
    engine = start(5, buffer_steps=BUFFER)
    engine.store(2)
    witness = follow(engine.endpoint, engine.replay_endpoint)
    serve_until(engine, [witness], lambda: witness.says_exact_of(engine))
    consumer = follow(engine.endpoint, None)
    serve_until(engine, [consumer], lambda: consumer.status.connected)
    deadline = time.monotonic() + PATIENCE
    while consumer.status.seq < 0:
        engine.store(1)
        consumer.serve()
        assert time.monotonic() < deadline
    assert consumer.status.state is State.DEGRADED
    assert "joined at batch" in consumer.status.reason
    engine.publish([AllBlocksCleared()])
    engine.store(1)
    serve_until(engine, [consumer], lambda: consumer.replica.blocks == engine.truth.blocks)
    # The replica is right, but a publisher that sends marks could speak for other ranks too.
    assert consumer.status.state is State.DEGRADED


def test_the_bytes_are_read_whole(start: Start, follow: Follow) -> None:
    """No event is skipped, and none is changed but for the fields that the engine does not have."""
    engine = start(9)
    events = [
        BlockStored(
            [1 << 63, -2], 7, [1, 2, 3, 4], 2, None, "GPU", "a", [("salt",), None], 1, "full_attention", 8
        ),
        BlockRemoved([b"\1" * 32], "CPU_PINNED"),
        AllBlocksCleared(),
    ]
    made = [as_engine(engine.module, event) for event in events]
    engine.publish_own(made, rank=3)
    consumer = follow(engine.endpoint, engine.replay_endpoint)
    serve_until(engine, [consumer], lambda: consumer.says_exact_of(engine))
    (batch,) = [update.batch for update in consumer.updates if isinstance(update, Received)]
    lacking = {*events[0].__struct_fields__} - {*made[0].__struct_fields__}
    assert batch.events == [msgspec.structs.replace(events[0], **dict.fromkeys(lacking)), *events[1:]]
    assert (batch.data_parallel_rank, batch.skipped) == (3, 0)


def test_sglangs_salt_keeps_prompts_apart(stack: ExitStack, follow: Follow) -> None:
    """It has a field of its own.

    An index that hashes tokens must not offer such blocks to prompts without the salt.
    """
    engine = stack.enter_context(closing(Engine("sglang-0.5.23", 10)))
    salted = [stored([-1, -2], None, [1, 2, 3, 4]), stored([-3], -2, [5, 6])]
    engine.publish_own([as_engine(engine.module, event, cache_salt="tenant") for event in salted])
    engine.publish_own([as_engine(engine.module, stored([4], None, [1, 2]))])
    consumer = follow(engine.endpoint, engine.replay_endpoint)
    serve_until(engine, [consumer], lambda: consumer.says_exact_of(engine))
    index = PrefixIndex(keys="xxh3", block_size=2, counting="count", form="python")
    for update in consumer.updates:
        index.follow(update)
    prompt = [1, 2, 3, 4, 5, 6]
    matches = [index.match_tokens(prompt, salt=salt) for salt in ("tenant", None, "other")]
    assert [match.on_any_tier.tolist() for match in matches] == [[3], [1], [0]]


def stored(hashes: list[int], parent: int | None, tokens: list[int]) -> BlockStored:
    return BlockStored(hashes, parent, tokens, 2, None, "GPU", None)  # type: ignore[arg-type]
