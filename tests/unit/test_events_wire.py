"""The bytes of the event stream: vLLM's exactly going out, whatever the field sends coming in, and the
digest.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Change,
    DecodedBatch,
    Encoding,
    EventEncoder,
    KVEventBatch,
    Mark,
    array_fields,
    change_of,
    decode_batch,
    frame_batch,
    hash_sum,
    place_of,
    place_weight,
    to_u64,
)

U64 = (1 << 64) - 1
ENCODINGS = list(Encoding)
TS = b"\xcb" + struct.pack(">d", 1.5)


def stored(hashes: list[Any], parent: Any = None, **more: Any) -> BlockStored:
    values: dict[str, Any] = {"token_ids": [5] * 2 * len(hashes), "block_size": 2} | more
    return BlockStored(
        hashes, parent, lora_id=None, medium=values.pop("medium", "GPU"), lora_name=None, **values
    )


def frame(
    events: list[Any], *, encoding: str = "map", mark: Mark | None = None, version: str = "0.32"
) -> bytes:
    encoder = EventEncoder(encoding, version)
    marks = [] if mark is None else [encoder.mark(mark)]
    return frame_batch(1.5, [*map(encoder.event, events), *marks], 0)


def pack(*events: Any, rank: Any = 0) -> bytes:
    """Return a batch of events as plain lists and maps."""
    return msgspec.msgpack.encode([1.5, events, rank])


# -- out -------------------------------------------------------------------------------------------

EVENTS = [
    BlockStored([b"\xaa" * 4], None, [1, 2], 2, lora_id=None, medium="CPU", lora_name=None, group_idx=0),
    BlockRemoved([7], "CPU", group_idx=0),
    AllBlocksCleared(),
]
AS_MAPS = bytes.fromhex(
    "93 cb3ff8000000000000 93"
    "89 a474797065 ab426c6f636b53746f726564  ac626c6f636b5f686173686573 91c404aaaaaaaa"
    "   b1706172656e745f626c6f636b5f68617368 c0  a9746f6b656e5f696473 920102"
    "   aa626c6f636b5f73697a65 02  a76c6f72615f6964 c0  a66d656469756d a3435055"
    "   a96c6f72615f6e616d65 c0  a967726f75705f696478 00"
    "84 a474797065 ac426c6f636b52656d6f766564 ac626c6f636b5f686173686573 9107 a66d656469756d a3435055"
    "   a967726f75705f696478 00"
    "81 a474797065 b0416c6c426c6f636b73436c6561726564"
    "c0"
)
AS_ARRAYS = bytes.fromhex(  # of vLLM 0.10.2
    "93 cb3ff8000000000000 93"
    "97 ab426c6f636b53746f726564 91c404aaaaaaaa c0 920102 02 c0 a3435055"
    "93 ac426c6f636b52656d6f766564 9107 a3435055"
    "91 b0416c6c426c6f636b73436c6561726564"
    "00"
)


def test_maps_are_the_bytes_of_vllm() -> None:
    encode = EventEncoder().event
    assert frame_batch(1.5, [encode(event) for event in EVENTS], None) == AS_MAPS
    assert msgspec.msgpack.encode(KVEventBatch(1.5, EVENTS)) == AS_MAPS


def test_arrays_are_the_bytes_of_vllm() -> None:
    assert frame(EVENTS, encoding="array", version="0.10.2") == AS_ARRAYS


@pytest.mark.parametrize("count", [0, 15, 16, 65_535, 65_536])
def test_a_batch_of_any_length_is_framed_as_msgpack_does(count: int) -> None:
    assert frame_batch(1.5, [b"\x01"] * count, 3) == msgspec.msgpack.encode([1.5, [1] * count, 3])


FIELDS = [
    ("0.8", 5, 1),
    ("0.9.2", 5, 1),
    ("0.10.2", 6, 2),
    ("0.14", 7, 2),
    ("0.17.1", 8, 2),
    ("0.20", 9, 3),
    ("0.22", 11, 3),
    ("0.23", 11, 3),
    ("0.26", 12, 4),
    ("0.32", 14, 5),
]


def test_arrays_of_an_engines_own_classes_have_those_fields_too() -> None:
    """They had those of a removal, whatever they were."""
    encoder = EventEncoder("array", "0.10.2")
    own = msgspec.defstruct(
        "BlockStored", [(name, object) for name in BlockStored.__struct_fields__], tag=True
    )
    event = BlockStored([1], None, [2, 3], 2, None, "GPU", None)
    assert encoder.event(own(*msgspec.structs.astuple(event))) == encoder.event(event)


@pytest.mark.parametrize(("version", "of_stored", "of_removed"), FIELDS)
def test_arrays_have_the_fields_of_their_version(version: str, of_stored: int, of_removed: int) -> None:
    assert array_fields(version) == (of_stored, of_removed)
    encoder = EventEncoder("array", version)
    for event, count in (
        (stored([1], session_id="s"), of_stored),
        (BlockRemoved([1], "GPU", ownership="o"), of_removed),
    ):
        name, *values = msgspec.msgpack.decode(encoder.event(event))
        expected = [
            list(value) if isinstance(value, tuple) else value for value in msgspec.structs.astuple(event)
        ]
        assert (name, values) == (type(event).__name__, expected[:count])


@pytest.mark.parametrize("version", ["0.7", "", "new", "0.23rc1"])
def test_a_version_without_events_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match="vLLM"):
        EventEncoder("array", version)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encoding_a_wrong_type_raises(encoding: str) -> None:
    for bad in (object(), 1 << 64):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            EventEncoder(encoding).event(BlockRemoved([bad], "GPU"))  # type: ignore[list-item]


# -- in --------------------------------------------------------------------------------------------

hashes_of = st.integers(-(1 << 63), U64) | st.binary(min_size=1, max_size=32)
names = st.none() | st.text(max_size=8)
stored_events = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes_of, max_size=4),
    parent_block_hash=st.none() | hashes_of,
    token_ids=st.lists(st.integers(0, (1 << 32) - 1), max_size=20),
    block_size=st.integers(0, 64),
    lora_id=st.none() | st.integers(0, 9),
    medium=names,
    lora_name=names,
    extra_keys=st.none()
    | st.lists(st.none() | st.tuples(st.just("kvtier") | st.text(max_size=3)), max_size=3),
    group_idx=st.none() | st.integers(0, 9),
    kv_cache_spec_kind=names,
    kv_cache_spec_sliding_window=st.none() | st.integers(0, 999),
    locality=names,
    ownership=names,
    session_id=names,
)
removed_events = st.builds(
    BlockRemoved,
    block_hashes=st.lists(hashes_of, max_size=4),
    medium=names,
    group_idx=st.none() | st.integers(0, 9),
    locality=names,
    ownership=names,
)
marks = st.builds(Mark, st.integers(0, U64), st.integers(0, U64), st.integers(0, U64))


def without_tokens(event: Any) -> Any:
    return msgspec.structs.replace(event, token_ids=[]) if isinstance(event, BlockStored) else event


@given(
    st.sampled_from(ENCODINGS),
    st.lists(stored_events | removed_events | st.just(AllBlocksCleared()), max_size=5),
    st.none() | marks,
)
def test_encoded_events_are_decoded(encoding: Encoding, events: list[Any], mark: Mark | None) -> None:
    payload = frame(events, encoding=encoding, mark=mark)
    assert decode_batch(payload) == DecodedBatch(1.5, events, 0, mark)
    assert decode_batch(payload, tokens=False) == DecodedBatch(1.5, [*map(without_tokens, events)], 0, mark)


def test_the_publics_batch_is_read() -> None:
    assert decode_batch(AS_MAPS) == DecodedBatch(1.5, EVENTS, None)
    bare = [
        msgspec.structs.replace(event, group_idx=None) if hasattr(event, "group_idx") else event
        for event in EVENTS
    ]
    assert decode_batch(AS_ARRAYS) == DecodedBatch(1.5, bare, 0)


REMOVED = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}
STORED = ["BlockStored", [1, 2], None, [5, 6], 1, None]


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize(
    "bad",
    [
        {"type": "BlockMoved", "block_hashes": [2]},
        {"type": "OneBlockCleared", "medium": "CPU"},
        {"block_hashes": [2]},
        {"type": "BlockStored", "block_hashes": ["text"]},
        {"type": "BlockStored", "block_hashes": [1.5]},
        {"type": "BlockRemoved", "block_hashes": None, "medium": "CPU"},
        {"type": "BlockRemoved", "block_hashes": [2], "medium": 5},
        ["BlockMoved", [2]],
        ["BlockStored"],
        ["BlockRemoved", [1 << 63, None]],
        [],
        {},
        None,
        7,
        "BlockRemoved",
        msgspec.msgpack.Ext(5, b"x"),
    ],
)
def test_one_bad_event_is_counted_and_the_rest_lives(bad: Any, tokens: bool) -> None:
    batch = decode_batch(pack(REMOVED, bad, STORED), tokens)
    assert batch.skipped == 1
    assert [event.block_hashes for event in batch.events] == [[1], [1, 2]]  # type: ignore[union-attr]


def test_unknown_fields_are_ignored() -> None:
    event = REMOVED | {"colour": {"deep": [1, {"er": None}]}}
    assert decode_batch(pack(event)) == DecodedBatch(1.5, [BlockRemoved([1], "CPU")], 0)
    longer = ["BlockRemoved", [1], "CPU", None, None, None, "new", {"and": "newer"}]
    assert decode_batch(pack(longer)) == DecodedBatch(1.5, [BlockRemoved([1], "CPU")], 0)


@pytest.mark.parametrize("tokens", [True, False])
def test_tokens_that_a_hash_looks_ahead_to_are_ignored(tokens: bool) -> None:
    """vLLM 0.33 sends them where a draft head sees the token after a block, unless there is a connector."""
    plain = BlockStored([1, 2], None, [5, 300, 7, 70_000], 2, None, "GPU", None)
    event = msgspec.to_builtins(plain) | {"lookahead_token_ids": [[7], [70_000]]}
    batch = decode_batch(pack(event), tokens)
    assert batch == decode_batch(pack(msgspec.to_builtins(plain)), tokens)
    assert [event.block_hashes for event in batch.events] == [[1, 2]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("payload", "rank"),
    [
        (msgspec.msgpack.encode([1.5, [REMOVED]]), None),
        (msgspec.msgpack.encode([1.5, [REMOVED], 3]), 3),
        (msgspec.msgpack.encode([1.5, [REMOVED], None, "more", {}]), None),
    ],
)
def test_batches_of_other_lengths_are_read(payload: bytes, rank: int | None) -> None:
    assert decode_batch(payload) == DecodedBatch(1.5, [BlockRemoved([1], "CPU")], rank)


def test_a_whole_number_is_a_time_too() -> None:
    batch = decode_batch(msgspec.msgpack.encode([2, [], 0]))
    assert (batch.ts, type(batch.ts)) == (2.0, float)


def test_fewer_fields_than_the_newest_are_understood() -> None:
    """The first vLLM with events and the first SGLang, as arrays; a map of what there must be."""
    values = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": 9,
        "token_ids": [5, 6],
        "block_size": 1,
    }
    for first in (values, [*values.values(), None]):
        batch = decode_batch(pack(first, ["BlockRemoved", [1]], ["AllBlocksCleared"]))
        event = BlockStored([1, 2], 9, [5, 6], 1, None, None, None)
        assert batch == DecodedBatch(1.5, [event, BlockRemoved([1], None), AllBlocksCleared()], 0)


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("slot", [["full", "swa"], {"salt": "s"}, 5])
def test_sglang_goes_its_own_way_behind_the_medium(slot: Any, tokens: bool) -> None:
    batch = decode_batch(
        pack([*STORED, "CPU_PINNED", slot], ["BlockRemoved", [3], "DISK", slot, "x"]), tokens
    )
    first, second = batch.events
    assert batch.skipped == 0
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.medium, first.block_size, first.lora_name) == (
        [1, 2],
        "CPU_PINNED",
        1,
        None,
    )
    assert first.token_ids == ([5, 6] if tokens else [])
    assert isinstance(second, BlockRemoved)
    assert (second.block_hashes, second.medium) == ([3], "DISK")


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize(("besides", "keys"), [({}, ("s",)), ({"lora_name": "a"}, ("a", "s"))])
def test_sglangs_salt_is_an_extra_key_of_a_chains_first_block(
    besides: dict[str, str], keys: tuple[str, ...], tokens: bool
) -> None:
    """As a field of maps (since 0.5.20) and behind the medium of arrays (0.5.18 and 0.5.19)."""
    names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
    as_map = dict(zip(names, STORED, strict=True)) | {"medium": "GPU", "cache_salt": "s"}
    begins = [as_map | besides] if besides else [as_map, [*STORED, "GPU", {"cache_salt": "s"}]]
    for first in begins:
        batch = decode_batch(
            pack(first, as_map | {"parent_block_hash": 2}, as_map | {"cache_salt": 5}), tokens
        )
        assert [event.extra_keys for event in batch.events if isinstance(event, BlockStored)] == [
            [keys, None],
            None,
            None,
        ]
        assert batch.events[0].token_ids == ([5, 6] if tokens else [])  # type: ignore[union-attr]
        assert batch.skipped == 0


@pytest.mark.parametrize("form", [list, dict])
def test_pairs_for_tokens_cost_the_tokens_only(form: type) -> None:
    pairs = [[1, 2], [2, 3]]
    values = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": 9,
        "token_ids": pairs,
        "block_size": 2,
    }
    event = values if form is dict else list(values.values())
    assert decode_batch(pack(event)) == DecodedBatch(1.5, [BlockStored([1], 9, [], 2, None, None, None)], 0)


def test_hashes_come_in_every_form() -> None:
    hashes = [0, 5, -5, -(1 << 63), 1 << 63, U64, b"\x01" * 8, b"\x02" * 32]
    for event in (REMOVED | {"block_hashes": hashes}, ["BlockRemoved", hashes, "CPU"]):
        assert decode_batch(pack(event)).events == [BlockRemoved(hashes, "CPU")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x00",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode([None, [], 0]),
        msgspec.msgpack.encode([1.5, {}, 0]),
        msgspec.msgpack.encode([1.5, None, 0]),
        msgspec.msgpack.encode([1.5, [], "rank"]),
        msgspec.msgpack.encode([1.5, [], 0]) + b"\x00",
        AS_MAPS[:-1],
        AS_MAPS[:40],
        b"\x93" + TS + b"\xdd\xff\xff\xff\xff",
        b"\x93" + TS + b"\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes\xdd\xff\xff\xff\xff",
        b"\x93" + TS + b"\x91\xc6\xff\xff\xff\xff",
        b"\x93" + TS + b"\x91" + b"\x91" * 1_000_000,
        b"\x94" + TS + b"\x90\xc0" + b"\x81" * 1_000_000,
    ],
)
def test_payloads_that_are_no_batch_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not an event batch"):
        decode_batch(payload)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("tokens", [True, False])
def test_mutated_bytes_never_crash(encoding: str, tokens: bool) -> None:
    rng = random.Random(0)
    good = frame(
        [stored([1, U64], 3), *EVENTS, BlockRemoved([b"x" * 32], None)],
        encoding=encoding,
        mark=Mark(1, 2, 3),
    )
    read = 0
    for _ in range(4000):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.choice([0, 1, 1, 1, 5])] = rng.randbytes(rng.choice([0, 1, 1, 1, 5]))
        try:
            batch = decode_batch(bytes(raw), tokens)
        except ValueError:
            continue
        batch.change()
        read += 1
    assert 100 < read < 4000, "most mutations break the frame, some do not"


# -- marks -----------------------------------------------------------------------------------------

MARK = Mark(epoch=U64, blocks=12, digest=1 << 63)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_mark_is_an_event_that_removes_nothing(encoding: str) -> None:
    raw = msgspec.msgpack.decode(EventEncoder(encoding).mark(MARK))
    values = list(raw.values()) if encoding == "map" else raw
    assert values[:2] == ["BlockRemoved", []]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_last_mark_of_a_batch_counts(encoding: str) -> None:
    encoder = EventEncoder(encoding)
    events = [encoder.mark(Mark(1, 2, 3)), encoder.event(BlockRemoved([1], None)), encoder.mark(MARK)]
    batch = decode_batch(frame_batch(0.0, events, 0))
    assert (batch.mark, batch.events, batch.skipped) == (MARK, [BlockRemoved([1], None)], 0)


def test_only_an_event_of_no_blocks_carries_a_mark() -> None:
    mark = {"epoch": 1, "blocks": 2, "digest": 3}
    for carrier in (
        REMOVED | {"kvtier": mark},
        ["BlockRemoved", [1], "CPU", None, None, None, {"kvtier": mark}],
    ):
        batch = decode_batch(pack(carrier))
        assert (batch.mark, batch.events) == (None, [BlockRemoved([1], "CPU")])


@pytest.mark.parametrize("mark", [None, {}, {"epoch": "x", "blocks": 1, "digest": 2}, [1, 2, 3]])
def test_a_mark_that_cannot_be_read_is_none(mark: Any) -> None:
    empty = REMOVED | {"block_hashes": [], "kvtier": mark}
    assert decode_batch(pack(empty)) == DecodedBatch(1.5, [BlockRemoved([], "CPU")], 0)


def test_text_that_looks_like_a_mark_is_text() -> None:
    events = [stored([1], extra_keys=[("kvtier",)]), BlockRemoved([1], "kvtier")]
    for encoding in ENCODINGS:
        assert decode_batch(frame(events, encoding=encoding)).events == events


# -- digest ----------------------------------------------------------------------------------------

HASH = 0x1234_5678_9ABC_DEF0


def test_every_form_of_a_hash_is_the_same_number() -> None:
    high = 0xF000_0000_0000_0001
    assert to_u64(high) == to_u64(high - (1 << 64)) == to_u64(b"\xff" * 24 + high.to_bytes(8, "big")) == high
    assert hash_sum([HASH, high - (1 << 64)]) & U64 == hash_sum([HASH, high]) & U64
    assert hash_sum([b"\x00" * 31 + b"\x05", 2]) == 7


@given(st.lists(st.one_of(st.integers(-(2**63), 2**64 - 1), st.binary(min_size=8, max_size=32))))
def test_sums_are_of_the_low_64_bits(hashes: list[Any]) -> None:
    low = [int.from_bytes(h[-8:], "big") if isinstance(h, bytes) else h for h in hashes]
    assert hash_sum(hashes) & U64 == sum(low) & U64


@given(st.lists(stored_events | removed_events, max_size=6), st.randoms())
def test_order_does_not_matter_to_the_digest(events: list[Any], rng: random.Random) -> None:
    shuffled = rng.sample(events, len(events))
    assert change_of(shuffled) == change_of(events)


@given(st.lists(stored_events, max_size=6))
def test_a_removal_takes_its_store_back(events: list[Any]) -> None:
    removals = [BlockRemoved(e.block_hashes, e.medium, e.group_idx, e.locality, e.ownership) for e in events]
    assert change_of([*events, *removals]) == Change(False, 0, 0)


@settings(max_examples=30)
@given(
    st.lists(stored_events | removed_events, max_size=4),
    st.lists(stored_events | removed_events, max_size=4),
)
def test_changes_add_up_and_a_clear_starts_over(before: list[Any], after: list[Any]) -> None:
    one, other, both = change_of(before), change_of(after), change_of([*before, *after])
    assert both == (False, one.blocks + other.blocks, (one.digest + other.digest) & U64)
    assert change_of([*before, AllBlocksCleared(), *after]) == other._replace(cleared=True)


PLACES: list[dict[str, Any]] = [
    {},
    {"medium": "CPU"},
    {"group_idx": 1},
    {"ownership": "disk"},
    {"locality": "REMOTE"},
]


def test_the_same_hash_in_another_place_is_another_block() -> None:
    assert len({change_of([stored([HASH], **place)]).digest for place in PLACES}) == len(PLACES)
    assert len({place_of(stored([HASH], **place)) for place in PLACES}) == len(PLACES)


def test_absent_fields_have_their_default() -> None:
    spelt_out = stored([HASH], medium="GPU", group_idx=0, ownership="", locality="")
    assert change_of([spelt_out]) == change_of([stored([HASH], medium=None)])
    assert place_of(BlockRemoved([1], None)) == ("GPU", 0, "", "")
    assert place_weight(place_of(spelt_out)) % 2 == 1, "an even weight would lose bits"


def test_the_digest_of_known_events() -> None:
    """Publishers and subscribers of different versions compare it: it never changes."""
    assert change_of([stored([1, 2]), stored([3], medium="CPU")]).digest == 0xABEBA372B3F29ECA
