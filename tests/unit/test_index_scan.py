"""The scanner agrees with the decoder on every payload, whole or damaged."""

from __future__ import annotations

import ast
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, Mark
from kvtier.events.wire import (
    Change,
    DecodedBatch,
    EventEncoder,
    decode_batch,
    frame_batch,
    place_of,
    to_u64,
)
from kvtier.index.base import PLACES, Op
from kvtier.index.compiled import COMPILED_IN, stamp_of
from kvtier.index.compiled.blocks import apply
from kvtier.index.compiled.scan import ScannedBatch, Scanner, integer, skip_integers

SCANNERS = {tokens: Scanner(tokens) for tokens in (False, True)}
ENCODERS = [
    EventEncoder("map"),
    *(EventEncoder("array", version) for version in ("0.8", "0.14", "0.23", "0.32")),
]

hash_st = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(-40, 300)
token_st = st.integers(0, (1 << 32) - 1) | st.integers(0, 200)
stored_st = st.builds(
    BlockStored,
    st.lists(hash_st, max_size=20) | st.lists(st.binary(min_size=8, max_size=32), max_size=2),
    st.none() | hash_st,
    st.lists(token_st, max_size=40),
    st.integers(0, 1 << 20),
    st.none() | st.integers(0, 5),
    st.sampled_from([None, "GPU", "CPU", "STORAGE", "", "DISK"]),
    st.none() | st.text(max_size=40),
    group_idx=st.sampled_from([None, 0, 1]),
    kv_cache_spec_kind=st.sampled_from([None, "full_attention", "mamba"]),
    locality=st.sampled_from([None, None, "LOCAL"]),
    session_id=st.sampled_from([None, "s" * 40]),
)
removed_st = st.builds(
    BlockRemoved, st.lists(hash_st, max_size=5), st.sampled_from([None, "GPU", "CPU", "FS"])
)
batches_st = st.builds(
    lambda encoder, events, rank: frame_batch(1.5, [encoder.event(event) for event in events], rank),
    st.sampled_from(ENCODERS),
    st.lists(stored_st | removed_st | st.just(AllBlocksCleared()), max_size=20),
    st.none() | st.integers(-3, 70000),
)


def told(read: Any) -> tuple[Any, ...]:
    """Return all that a batch says, in the same form for both kinds."""
    events = list(read.events()) if isinstance(read, ScannedBatch) else read.events
    said = [
        ("cleared",)
        if isinstance(event, AllBlocksCleared)
        else (type(event).__name__, place_of(event), [to_u64(block) for block in event.block_hashes])
        for event in events
    ]
    ts = None if math.isnan(read.ts) else read.ts
    return said, read.change(), read.data_parallel_rank, read.mark, read.skipped, ts


def read_by(decode: Any, payload: bytes) -> tuple[Any, ...] | None:
    try:
        return told(decode(payload))
    except ValueError:
        return None


@settings(max_examples=300, deadline=None)
@given(batches_st, st.booleans())
def test_scanning_is_decoding(payload: bytes, tokens: bool) -> None:
    assert read_by(SCANNERS[tokens], payload) == read_by(lambda data: decode_batch(data, tokens), payload)


@settings(max_examples=200, deadline=None)
@given(batches_st)
def test_scanned_tokens_and_parents_are_those_sent(payload: bytes) -> None:
    scanned = SCANNERS[True](payload)
    if isinstance(scanned, ScannedBatch):
        for event, found in zip(decode_batch(payload).events, scanned.events(), strict=True):
            if isinstance(event, BlockStored) and isinstance(found, BlockStored):
                parent = None if event.parent_block_hash is None else to_u64(event.parent_block_hash)
                assert (found.parent_block_hash, found.token_ids) == (parent, event.token_ids)
                assert found.block_size == event.block_size


@pytest.mark.parametrize("tokens", [True, False])
def test_tokens_that_a_hash_looks_ahead_to_are_skipped(tokens: bool) -> None:
    """vLLM 0.33 sends them where a draft head sees the token after a block, unless there is a connector."""
    plain = msgspec.to_builtins(BlockStored([1, 2], None, [5, 300, 7, 70_000], 2, None, "GPU", None))
    event = plain | {"lookahead_token_ids": [[7], [70_000]]}
    found, expected = (
        told(SCANNERS[tokens](msgspec.msgpack.encode([1.5, [one, one], 0]))) for one in (event, plain)
    )
    assert found == expected
    assert [blocks for _, _, blocks in found[0]] == [[1, 2], [1, 2]]


def test_damaged_payloads_are_read_alike() -> None:
    rng = random.Random(7)
    events = [
        BlockStored([rng.getrandbits(64) for _ in range(3)], 5, [1, 300, 70000] * 4, 4, None, "CPU", None),
        BlockRemoved([1, 2], None),
        AllBlocksCleared(),
    ]
    payloads = [frame_batch(1.0, [encoder.event(event) for event in events], 0) for encoder in ENCODERS]
    scanner, seen = SCANNERS[False], SCANNERS[False].scanned
    for _ in range(8000):
        payload = damaged(rng, rng.choice(payloads))
        assert read_by(scanner, payload) == read_by(lambda data: decode_batch(data, False), payload), (
            payload.hex()
        )
    assert scanner.scanned - seen > 500, "the scanner must have read some of them itself"


def damaged(rng: random.Random, payload: bytes) -> bytes:
    data = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(3):
            case 0 if at < len(data):
                data[at] = rng.choice((rng.getrandbits(8), 0xC0, 0x90, 0x80, 0xCF, 0xA0, 0xDC, 0xDD, 0xDF))
            case 1:
                del data[at : at + rng.randrange(5)]
            case _:
                data[at:at] = rng.randbytes(rng.randrange(3))
    return bytes(data)


@pytest.mark.parametrize(
    "cut", ["93cb3ff00000000000009", "93cb3ff0000000000000dd7fffffff", "93cb3ff0000000000000dcffff"]
)
def test_short_payloads_are_no_batches(cut: str) -> None:
    payload = bytes.fromhex(cut[: len(cut) // 2 * 2])
    assert read_by(SCANNERS[False], payload) is None


def test_batches_of_publishers_are_scanned_not_decoded() -> None:
    """vLLM's usual events must take the fast way, or the index is slow without anybody noticing."""
    scanner = Scanner()
    usual = BlockStored(
        [1 << 63], None, [1] * 16, 16, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
    )
    for encoder in ENCODERS:
        read = scanner(frame_batch(1.0, [encoder.event(usual), encoder.event(BlockRemoved([4], "CPU"))], 3))
        assert isinstance(read, ScannedBatch)
        assert read.edits[:, :3].tolist() == [
            [Op.STORED, 0, 1],
            [Op.REMOVED, 0 if encoder is ENCODERS[1] else 1, 1],
        ]
        assert read.hashes.tolist() == [1 << 63, 4]
        assert read.data_parallel_rank == 3
    assert (scanner.scanned, scanner.decoded) == (len(ENCODERS), 0)


def test_a_mark_is_left_to_the_decoder() -> None:
    mark = Mark(7, 1, 99)
    read = Scanner()(frame_batch(1.0, [ENCODERS[0].mark(mark)], 0))
    assert isinstance(read, DecodedBatch)
    assert read.mark == mark


def test_a_clear_starts_the_change_anew() -> None:
    events = [
        BlockStored([1, 2], None, [], 0, None, "CPU", None),
        AllBlocksCleared(),
        BlockRemoved([5], "GPU"),
    ]
    read = Scanner()(frame_batch(1.0, [ENCODERS[0].event(event) for event in events], 0))
    assert isinstance(read, ScannedBatch)
    assert (
        read.change()
        == decode_batch(frame_batch(1.0, [ENCODERS[0].event(event) for event in events], 0)).change()
    )
    assert read.change()[:2] == Change(True, -1, 0)[:2]


def test_big_batches_make_the_arrays_grow() -> None:
    hashes = list(range(1 << 60, (1 << 60) + 20_000))
    events = [BlockStored(hashes, None, [7] * 200_000, 5, None, "GPU", None)] + [
        BlockRemoved([1], "GPU")
    ] * 1000
    for tokens in (False, True):
        read = Scanner(tokens)(frame_batch(1.0, [ENCODERS[0].event(event) for event in events], 0))
        assert isinstance(read, ScannedBatch)
        assert read.hashes[:20_000].tolist() == hashes
        assert next(read.events()).token_ids == ([7] * 200_000 if tokens else [])


def stores(number: int, tokens: int = 4) -> list[bytes]:
    """Return batches of one store each, and each with other hashes and tokens."""
    return [
        frame_batch(
            1.0,
            [
                ENCODERS[0].event(
                    BlockStored([n, -n], None, list(range(n, n + tokens)), 2, None, "GPU", None)
                )
            ],
            0,
        )
        for n in range(1, number + 1)
    ]


@pytest.mark.parametrize("tokens", [False, True])
def test_joined_neighbours_have_the_same_events(tokens: bool) -> None:
    """Enough batches for several rooms: those of one room become one, in order, and nobody's arrays are
    written again.
    """
    scanner = Scanner(tokens)
    batches = [scanner(payload) for payload in stores(600)]
    expected = [
        read_event for payload in stores(600) for read_event in decode_batch(payload, tokens=tokens).events
    ]
    joined = list(batches[0].join(batches))  # type: ignore[union-attr, arg-type]
    assert 1 < len(joined) < 10
    for parts in (batches, joined):
        events = [event for part in parts for event in part.events()]  # type: ignore[union-attr]
        assert [event.token_ids for event in events] == [event.token_ids for event in expected]
        assert [event.block_hashes for event in events] == [
            [to_u64(b) for b in event.block_hashes] for event in expected
        ]  # type: ignore[union-attr]


def test_a_batch_that_was_left_out_is_not_joined_in() -> None:
    scanner = Scanner()
    first, _, third, fourth = (scanner(payload) for payload in stores(4))
    joined = list(first.join([first, third, fourth]))  # type: ignore[union-attr, list-item]
    assert [part.hashes[::2].tolist() for part in joined] == [[1], [3, 4]]


def test_an_unscannable_batch_leaves_no_trace_in_the_buffers() -> None:
    scanner = Scanner()
    good, half = stores(2)
    first = scanner(good)
    with pytest.raises(ValueError, match=r".+"):
        scanner(half[:-3])
    second = scanner(half)
    assert [part.hashes[::2].tolist() for part in first.join([first, second])] == [[1, 2]]


def test_long_lists_of_integers_are_skipped_like_one_by_one() -> None:
    """Guessed places may be inside a token, behind the list or in damage: none of it may show."""
    rng = random.Random(5)
    for _ in range(3000):
        count, top = rng.choice([63, 64, 65, 100, 300]), rng.choice([1, 128, 300, 70_000, 128_000, 1 << 40])
        body = bytearray(b"".join(msgspec.msgpack.encode(rng.randrange(-3, top)) for _ in range(count)))
        body += rng.randbytes(rng.choice([0, 1, 5, 300]))
        for _ in range(rng.choice([0, 0, 1, 3])):
            body[rng.randrange(len(body))] = rng.choice([0xC1, 0xCC, 0xCD, 0xCE, 0xCF, 0, 0xFF])
        data, wanted = (
            np.frombuffer(bytes(body[: rng.choice([len(body), rng.randrange(1, len(body))])]), np.uint8),
            0,
        )
        count += rng.choice([-1, 0, 0, 1])
        for _ in range(count):
            wanted = integer(data, wanted)[1] if wanted >= 0 else -1
        assert skip_integers(data, 0, count) == wanted


def test_compiled_code_is_kept_only_while_nothing_that_is_compiled_changes(tmp_path: Path) -> None:
    """What is kept on disk has what it calls, and the layout of arrays, compiled in; numba looks at one file
    only.

    A module that takes no part, as the one that serves HTTP, must not cost a minute of compiling.
    """
    callee = tmp_path / "callee.py"
    callee.write_text("LAYOUT = 1")
    before = stamp_of([callee])
    callee.write_text("LAYOUT = 2")
    assert stamp_of([callee]) != before
    folder = Path(apply.py_func.__code__.co_filename).parent
    files = {*folder.glob("*.py"), *(folder.parent / f"{name}.py" for name in COMPILED_IN)}
    assert apply._cache._cache_file._source_stamp[0] == stamp_of(files)
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtier.index."):
                path = (node.module or "").split(".")[2:]
                assert path[0] in (*COMPILED_IN, "compiled"), f"{file.name} imports {node.module}"


def test_the_first_places_are_the_areas() -> None:
    assert [place[0] for place in PLACES] == ["GPU", "CPU", "STORAGE"]
