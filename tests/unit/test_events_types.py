from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvtier.events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEventBatch,
    Mark,
    blocks_of,
)

# Bytes that vLLM 0.32 wrote for these values.
GOLDEN_BATCH = bytes.fromhex(
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
GOLDEN_CLEARED = bytes.fromhex("93cb41dabe41e0a59ff49181a474797065b0416c6c426c6f636b73436c656172656400")


def stored(**changes: object) -> BlockStored:
    fields = {
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [5, 6],
        "block_size": 2,
        "lora_id": None,
        "medium": MEDIUM_GPU,
        "lora_name": None,
    }
    return BlockStored(**fields | changes)  # type: ignore[arg-type]


def batch() -> KVEventBatch:
    first = stored(block_hashes=[b"\xaa" * 4], token_ids=[1, 2], medium=MEDIUM_CPU, group_idx=0)
    return KVEventBatch(
        ts=1.5, events=[first, BlockRemoved([7], MEDIUM_CPU, group_idx=0), AllBlocksCleared()]
    )


def test_writes_the_bytes_of_vllm() -> None:
    assert msgspec.msgpack.encode(batch()) == GOLDEN_BATCH


def test_reads_the_bytes_of_vllm() -> None:
    assert msgspec.msgpack.decode(GOLDEN_BATCH, type=KVEventBatch) == batch()
    cleared = msgspec.msgpack.decode(GOLDEN_CLEARED, type=KVEventBatch)
    assert (cleared.events, cleared.data_parallel_rank) == ([AllBlocksCleared()], 0)


def test_ignores_fields_of_the_future() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "colour": "red"}
    raw = msgspec.msgpack.encode([0.0, [event], None, "more"])
    assert msgspec.msgpack.decode(raw, type=KVEventBatch).events == [BlockRemoved([1], "CPU")]


def test_fields_stand_in_the_order_of_vllm() -> None:
    assert BlockStored.__struct_fields__ == (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
        "session_id",
    )
    assert BlockRemoved.__struct_fields__ == ("block_hashes", "medium", "group_idx", "locality", "ownership")
    assert (
        EventBatch.__struct_fields__
        == KVEventBatch.__struct_fields__
        == ("ts", "events", "data_parallel_rank")
    )
    assert (MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE) == ("GPU", "CPU", "STORAGE")


EVERY_FIELD = {
    "block_hashes": [2],
    "parent_block_hash": b"p",
    "token_ids": [7],
    "block_size": 1,
    "lora_id": 3,
    "medium": "CPU",
    "lora_name": "l",
    "extra_keys": [("salt", ["image", 3])],
    "group_idx": 1,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": 8,
    "locality": "LOCAL",
    "ownership": "disk",
    "session_id": "s",
}


@pytest.mark.parametrize("name", EVERY_FIELD)
def test_every_field_counts_in_equality_and_hash(name: str) -> None:
    other = stored(**{name: EVERY_FIELD[name]})
    assert other != stored()
    assert hash(other) != hash(stored())
    assert hash(other) == hash(stored(**{name: EVERY_FIELD[name]}))


def test_events_count_in_sets() -> None:
    events: list[KVCacheEvent] = [stored(), BlockRemoved([1], "GPU"), AllBlocksCleared()]
    assert len({*events, stored(), BlockRemoved([1], "GPU"), AllBlocksCleared()}) == 3
    assert hash(BlockRemoved([1], "GPU", ownership="x")) != hash(BlockRemoved([1], "GPU"))


def test_decoded_events_hash_like_the_originals() -> None:
    event = stored(**EVERY_FIELD)
    decoded = msgspec.msgpack.decode(
        msgspec.msgpack.encode(KVEventBatch(0.0, [event])), type=KVEventBatch
    ).events[0]
    assert decoded == event
    assert hash(decoded) == hash(event)


def test_events_with_any_extra_keys_can_be_hashed() -> None:
    event = stored(extra_keys=[({"a": [1, {"b": 2}]},)])
    assert hash(event) == hash(stored(extra_keys=[({"a": [1, {"b": 2}]},)]))
    assert hash(event) != hash(stored(extra_keys=[({"a": [1, {"b": 3}]},)]))


def test_marks_compare_and_hash() -> None:
    assert len({Mark(1, 2, 3), Mark(1, 2, 3), Mark(1, 2, 4)}) == 2


FOUR = stored(
    block_hashes=[1, 2, 3, 4],
    parent_block_hash=9,
    token_ids=list(range(8)),
    extra_keys=[("a",), None, None, ("b",)],
    group_idx=3,
)


@pytest.mark.parametrize(
    ("start", "stop", "parent", "tokens", "extra"),
    [
        (0, 4, 9, [0, 1, 2, 3, 4, 5, 6, 7], [("a",), None, None, ("b",)]),
        (0, 1, 9, [0, 1], [("a",)]),
        (1, 3, 1, [2, 3, 4, 5], [None, None]),
        (3, 4, 3, [6, 7], [("b",)]),
        (2, 2, 2, [], []),
    ],
)
def test_blocks_of_an_event(start: int, stop: int, parent: int, tokens: list[int], extra: list[Any]) -> None:
    part = blocks_of(FOUR, start, stop)
    assert part == stored(
        block_hashes=[1, 2, 3, 4][start:stop],
        parent_block_hash=parent,
        token_ids=tokens,
        extra_keys=extra,
        group_idx=3,
    )


def test_tokens_that_do_not_divide_belong_to_no_block() -> None:
    """A publisher that skips blocks of a window sends more tokens than its hashes have."""
    part = blocks_of(stored(block_hashes=[1, 2], token_ids=[5, 6, 7, 8, 9, 10]), 1, 2)
    assert (part.block_hashes, part.parent_block_hash, part.token_ids, part.block_size) == ([2], 1, [], 0)
    placeholder = blocks_of(stored(block_hashes=[1, 2], token_ids=[], block_size=0), 0, 1)
    assert (placeholder.token_ids, placeholder.block_size) == ([], 0)


def test_events_do_not_change() -> None:
    with pytest.raises(AttributeError):
        stored().medium = "CPU"  # type: ignore[misc]
