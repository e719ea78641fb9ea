"""Valid event batches, and a thousand ways to break them. Everything comes from a seed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import msgspec

from kvtier.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, Mark
from kvtier.events.wire import Encoding, EventEncoder, frame_batch

Mutation = Callable[[random.Random, bytes, list[bytes]], bytes]

_BOMBS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
)
_ODD_VALUES = (
    None,
    True,
    -1,
    0,
    2**63,
    2**64 - 1,
    -(2**63),
    1.5,
    float("nan"),
    "",
    "GPU",
    b"",
    b"\x00" * 32,
    [],
    {},
    [[]],
    {"type": "BlockStored"},
)


def corpus() -> list[bytes]:
    """Return valid batches in both encodings: all events, marks, both forms of hashes, extra keys, many and
    no events.
    """
    return [payload for encoding in Encoding for payload in _batches(EventEncoder(encoding))]


def _batches(encoder: EventEncoder) -> list[bytes]:
    ints, digests = [2**63 + at for at in range(6)], [bytes([at]) * 32 for at in range(6)]
    mark = encoder.mark(Mark(epoch=2**63 + 1, blocks=12, digest=99))
    small = [encoder.event(event) for event in (_stored(ints[:1]), BlockRemoved(ints[:1], "GPU"))]
    events = [
        [],
        [mark],
        [encoder.event(AllBlocksCleared()), mark],
        small,
        [encoder.event(_stored(ints, extra_keys=[("lora", ("image", 3)), *[None] * 5])), mark],
        [encoder.event(_stored(digests, group_idx=1, kv_cache_spec_kind="mla_attention", session_id="s"))],
        [encoder.event(BlockRemoved(digests, "CPU", 0, "LOCAL", "disk"))],
        small * 20,
    ]
    return [frame_batch(1.5, part, 0) for part in events]


def _stored(hashes: list[int] | list[bytes], **more: object) -> KVCacheEvent:
    fields: dict[str, object] = {
        "parent_block_hash": hashes[0],
        "token_ids": list(range(4 * len(hashes))),
        "block_size": 4,
    }
    fields |= {"lora_id": None, "medium": "GPU", "lora_name": None} | more
    return msgspec.convert({"type": "BlockStored", "block_hashes": hashes} | fields, BlockStored)


def mutate(rng: random.Random, samples: list[bytes]) -> bytes:
    """Return one broken frame, most often a valid one with one to three mutations."""
    payload = rng.choice(samples)
    for mutation in rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=rng.choice((1, 1, 1, 2, 3))):
        payload = mutation(rng, payload, samples)
    return payload


def _flip_bits(rng: random.Random, payload: bytes, samples: list[bytes]) -> bytes:
    data = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _truncate(rng: random.Random, payload: bytes, samples: list[bytes]) -> bytes:
    return payload[: rng.randint(0, len(payload))]


def _splice(rng: random.Random, payload: bytes, samples: list[bytes]) -> bytes:
    other = rng.choice(samples)
    return payload[: rng.randint(0, len(payload))] + other[rng.randint(0, len(other)) :]


def _repeat(rng: random.Random, payload: bytes, samples: list[bytes]) -> bytes:
    start, end = sorted(rng.randint(0, len(payload)) for _ in range(2))
    return payload[:start] + payload[start:end] * rng.randint(2, 5) + payload[end:]


def _plant_length(rng: random.Random, payload: bytes, samples: list[bytes]) -> bytes:
    at = rng.randint(0, len(payload))
    return payload[:at] + rng.choice(_BOMBS) + payload[at:]


def _nest(rng: random.Random, payload: bytes, samples: list[bytes]) -> bytes:
    """Hide the batch, or one of its events, below up to ten thousand levels."""
    level = rng.choice((b"\x91", b"\x81\xa1k", b"\xdd\x00\x00\x00\x01"))
    tower = level * rng.choice((1, 10, 500, 10_000)) + b"\xc0"
    head = b"\x93\xcb" + struct.pack(">d", 1.0)
    return rng.choice((tower, head + b"\x91" + tower + b"\x00", head + tower + b"\x00"))


def _odd_value(rng: random.Random, payload: bytes, samples: list[bytes]) -> bytes:
    """Put a value of another type where a field was, and keep the frame valid msgpack."""
    try:
        batch = msgspec.msgpack.decode(payload)
    except (ValueError, RecursionError):
        return payload
    holder = batch[1] if isinstance(batch, list) and len(batch) > 1 and isinstance(batch[1], list) else batch
    holder = rng.choice(holder) if isinstance(holder, list) and holder and rng.random() < 0.8 else holder
    if isinstance(holder, list) and holder:
        holder[rng.randrange(len(holder))] = rng.choice(_ODD_VALUES)
    elif isinstance(holder, dict) and holder:
        holder[rng.choice(list(holder))] = rng.choice(_ODD_VALUES)
    return msgspec.msgpack.encode(batch)


def _random_msgpack(rng: random.Random, payload: bytes, samples: list[bytes]) -> bytes:
    return msgspec.msgpack.encode(_random_value(rng, 4))


def _random_value(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [_random_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 7:
        return {
            rng.choice(("type", "block_hashes", "medium", "kvtier", "k")): _random_value(rng, depth - 1)
            for _ in range(4)
        }
    return (
        None,
        rng.random(),
        rng.getrandbits(64),
        -rng.getrandbits(63),
        rng.choice(("BlockStored", "GPU")),
        rng.randbytes(9),
    )[kind]


def _random_bytes(rng: random.Random, payload: bytes, samples: list[bytes]) -> bytes:
    return rng.randbytes(rng.randrange(200))


_WEIGHTS: dict[Mutation, int] = {
    _flip_bits: 8,
    _odd_value: 8,
    _truncate: 2,
    _splice: 2,
    _repeat: 2,
    _plant_length: 2,
    _nest: 1,
    _random_msgpack: 1,
    _random_bytes: 1,
}
"""What leaves much of a frame intact comes more often: it is what gets deep into a decoder."""
