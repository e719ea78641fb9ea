"""Event bytes against vLLM's own code: it reads what we write, we read what it writes, and equal events are
equal bytes.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventEncoder,
    KVEventAggregator,
    Mark,
    decode_batch,
    frame_batch,
)

KINDS = (BlockStored, BlockRemoved, AllBlocksCleared)
NEWER = {"BlockStored": ("lookahead_token_ids",)}
"""Fields from 0.33 on that a vLLM with a connector never fills."""


def theirs(event: Any) -> Any:
    """Return vLLM's event with the same values."""
    from vllm.distributed import kv_events

    return getattr(kv_events, type(event).__name__)(*msgspec.structs.astuple(event))


def random_events(rng: Random, count: int) -> list[Any]:
    return [
        rng.choice([_stored, _stored, _removed, lambda _: AllBlocksCleared()])(rng) for _ in range(count)
    ]


def _hash(rng: Random) -> bytes | int:
    return rng.choice([rng.randbytes(32), rng.getrandbits(64), rng.getrandbits(8)])


def _maybe(rng: Random, value: Any) -> Any:
    return rng.choice([None, value])


def _stored(rng: Random) -> BlockStored:
    count, size = rng.randrange(4), rng.choice([1, 16])
    return BlockStored(
        [_hash(rng) for _ in range(count)],
        _maybe(rng, _hash(rng)),
        [rng.randrange(1 << 17) for _ in range(count * size)],
        size,
        lora_id=_maybe(rng, 3),
        medium=_maybe(rng, "CPU"),
        lora_name=_maybe(rng, "adapter"),
        extra_keys=_maybe(
            rng, [rng.choice([None, ("salt", ("image", -3)), (b"digest",)]) for _ in range(count)]
        ),
        group_idx=_maybe(rng, 0),
        kv_cache_spec_kind=_maybe(rng, "full_attention"),
        kv_cache_spec_sliding_window=_maybe(rng, 64),
        locality=_maybe(rng, "LOCAL"),
        ownership=_maybe(rng, "disk"),
        session_id=_maybe(rng, "session"),
    )


def _removed(rng: Random) -> BlockRemoved:
    hashes = [_hash(rng) for _ in range(rng.randrange(4))]
    return BlockRemoved(
        hashes, _maybe(rng, "GPU"), _maybe(rng, 1), _maybe(rng, "REMOTE"), _maybe(rng, "disk")
    )


def as_lists(value: Any) -> Any:
    """Return a value as it comes out of untyped bytes: tuples are lists."""
    return [as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def values_of(event: Any) -> tuple[str, Any]:
    """Return the kind of an event, and the values of our fields of it."""
    kind = next(kind for kind in KINDS if kind.__name__ == type(event).__name__)
    return kind.__name__, as_lists([getattr(event, name) for name in kind.__struct_fields__])


def newer_fields(kind: type[Any]) -> tuple[str, ...]:
    """Return the fields that vLLM's event of this kind has and ours has not."""
    from vllm.distributed import kv_events

    other = getattr(kv_events, kind.__name__)
    return tuple(other.__struct_fields__[len(kind.__struct_fields__) :])


@pytest.mark.parametrize("seed", range(50))
def test_equal_events_are_equal_bytes(seed: int) -> None:
    from vllm.distributed import kv_events

    rng = Random(seed)
    events, rank = random_events(rng, rng.randrange(20)), rng.choice([None, 0, 7])
    encode = EventEncoder().event
    ours = frame_batch(rng.random(), [encode(event) for event in events], rank)
    ts = msgspec.msgpack.decode(ours)[0]
    others = msgspec.msgpack.encode(kv_events.KVEventBatch(ts, [*map(theirs, events)], rank))
    if newer_fields(BlockStored):  # of 16 fields msgspec writes the same map with a longer header
        assert msgspec.msgpack.decode(others) == msgspec.msgpack.decode(ours)
    else:
        assert others == ours


@pytest.mark.parametrize("seed", range(20))
def test_vllm_reads_our_batches_with_and_without_a_mark(seed: int) -> None:
    from vllm.distributed import kv_events

    rng, encoder = Random(seed), EventEncoder()
    events = random_events(rng, 8)
    raw = [encoder.event(event) for event in events]
    read = msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode
    plain = read(frame_batch(1.5, raw, 0))
    assert [*map(values_of, plain.events)] == [*map(values_of, events)]
    marked = read(frame_batch(1.5, [*raw, encoder.mark(Mark(1 << 63, 2, 3))], 0))
    assert marked.events[:-1] == plain.events
    assert marked.events[-1].block_hashes == [], "to vLLM a mark removes nothing"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tokens", [True, False])
def test_we_read_the_batches_of_vllm(seed: int, tokens: bool) -> None:
    from vllm.distributed import kv_events

    events = random_events(Random(seed), 8)
    payload = msgspec.msgpack.encode(kv_events.KVEventBatch(1.5, [*map(theirs, events)], 3))
    batch = decode_batch(payload, tokens)
    assert (batch.ts, batch.data_parallel_rank, batch.mark, batch.skipped) == (1.5, 3, None, 0)
    if not tokens:
        events = [
            msgspec.structs.replace(e, token_ids=[]) if isinstance(e, BlockStored) else e for e in events
        ]
    assert [*map(values_of, batch.events)] == [*map(values_of, events)]


def test_fields_and_defaults_are_those_of_vllm() -> None:
    from vllm.distributed import kv_events

    for kind in KINDS:
        other, newer = getattr(kv_events, kind.__name__), newer_fields(kind)
        assert newer in ((), NEWER.get(kind.__name__))
        assert (*kind.__struct_fields__, *newer) == other.__struct_fields__
        assert (*kind.__struct_defaults__, *[None] * len(newer)) == other.__struct_defaults__


def test_we_read_the_publisher_of_vllm_live() -> None:
    import zmq
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

    events = random_events(Random(0), 5)
    publisher = ZmqEventPublisher(0, endpoint="inproc://event-bytes")
    listener = zmq.Context.instance().socket(zmq.SUB)
    try:
        listener.setsockopt(zmq.SUBSCRIBE, b"")
        listener.connect("inproc://event-bytes")
        frames: list[bytes] = []
        while not frames:  # what is published before the subscription arrives is lost
            publisher.publish(KVEventBatch(1.5, [*map(theirs, events)]))
            frames = listener.recv_multipart() if listener.poll(100) else []
    finally:
        listener.close(linger=0)
        publisher.shutdown()
    topic, seq, payload = frames
    assert (topic, len(seq)) == (b"", 8)
    batch = decode_batch(payload)
    assert (batch.ts, batch.data_parallel_rank, batch.skipped) == (1.5, 0, 0)
    assert [*map(values_of, batch.events)] == [*map(values_of, events)]


def test_our_aggregator_keeps_what_that_of_vllm_loses() -> None:
    """Guards against a fix in vLLM that makes the difference, which the docs speak of, untrue."""
    from vllm.distributed import kv_events

    stored = BlockStored([1], None, [1], 1, None, "CPU", None)
    ours, other = KVEventAggregator(2), kv_events.KVEventAggregator(2)
    for _ in range(2):
        ours.add_events([stored, stored])
        other.add_events([theirs(stored), theirs(stored)])
    assert (len(ours.get_common_events()), len(other.get_common_events())) == (2, 0)
    ours.add_events([AllBlocksCleared()])
    with pytest.raises(TypeError, match="unhashable"):
        other.add_events([kv_events.AllBlocksCleared()])
