"""Bounds of an index: blocks that it cannot take are reported, and it never claims more than it was sent."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from typing import Any

import numpy as np
import pytest

from kvtier.errors import LogLimit
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored
from kvtier.events.wire import DecodedBatch, EventEncoder, frame_batch
from kvtier.index import PrefixIndex, StorageTier
from kvtier.index.prefix import FORMS

MiB = 1 << 20
KEYS: list[Any] = ["engine", "xxh3"]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    if request.param == "numba":
        pytest.importorskip("numba")
    return str(request.param)


def stored(
    hashes: list[int], parent: int | None = None, *, size: int = 4, medium: str = "GPU", **more: Any
) -> BlockStored:
    tokens = [number % 50_000 for number in hashes for _ in range(size)]
    fields: dict[str, Any] = {"lora_id": None, "lora_name": None} | more
    return BlockStored(list(hashes), parent, tokens, size, medium=medium, **fields)


def tokens_of(hashes: list[int], size: int = 4) -> list[int]:
    return [number % 50_000 for number in hashes for _ in range(size)]


def send(index: PrefixIndex, worker: str, *events: Any) -> None:
    encoder = EventEncoder()
    index.apply(worker, index.decoder()(frame_batch(1.0, [encoder.event(event) for event in events], 0)))
    index.check()


def depth(index: PrefixIndex, hashes: list[int], **more: Any) -> int:
    match = index.match(hashes) if index.keys == "engine" else index.match_tokens(tokens_of(hashes), **more)
    return int(match.on_any_tier[0])


FULL = {"kv_cache_spec_kind": "full_attention"}


@pytest.mark.parametrize("keys", KEYS)
def test_a_block_counts_if_all_groups_of_full_attention_hold_it(form: str, keys: Any) -> None:
    index = PrefixIndex(form=form, keys=keys, block_size=4, budget=4 * MiB, counting="set")
    blocks = [1, 2, 3, 4]
    send(index, "a", stored(blocks, group_idx=0, **FULL), stored(blocks, group_idx=1, **FULL))
    assert depth(index, blocks) == 4
    send(index, "a", BlockRemoved([2, 3, 4], "GPU", group_idx=1))
    assert depth(index, blocks) == 1
    assert {entry[1:] for part in index.dump() for entry in part} == {(1, StorageTier.GPU)}
    assert index.worker_stats("a").blocks[StorageTier.GPU] == 1
    send(index, "a", stored(blocks, medium="CPU", group_idx=0))
    assert index.match(
        index.hash_tokens(tokens_of(blocks)) if keys == "xxh3" else blocks
    ).down_to_tier.tolist() == [[1, 1, 1]]
    # Known by now, though the event does not say what it is.
    send(index, "a", stored(blocks, medium="CPU", group_idx=1))
    assert index.match(
        index.hash_tokens(tokens_of(blocks)) if keys == "xxh3" else blocks
    ).down_to_tier.tolist() == [[1, 4, 4]]


@pytest.mark.parametrize("keys", KEYS)
def test_groups_with_a_window_stay_left_out_in_events_without_their_kind(form: str, keys: Any) -> None:
    index = PrefixIndex(form=form, keys=keys, block_size=4, budget=4 * MiB, counting="set")
    window = {"kv_cache_spec_kind": "sliding_window"}
    send(index, "a", stored([1, 2], group_idx=0))  # counts, until it is known what the group is
    send(index, "a", stored([1], group_idx=0, **window), stored([1], group_idx=6, **FULL))
    send(index, "a", stored([1, 2], group_idx=0, medium="CPU"))
    assert depth(index, [1, 2]) == 1
    assert {entry[1:] for part in index.dump() for entry in part} == {(1, StorageTier.GPU)}
    index.clear("a")
    send(index, "a", stored([1, 2], group_idx=0))
    assert depth(index, [1, 2]) == 2


def test_a_group_of_unknown_kind_is_left_out_and_reported_until_it_is_known(form: str) -> None:
    index = PrefixIndex(form=form, budget=4 * MiB, block_size=4, keys="engine", counting="set")
    send(index, "a", stored([1]), stored([1], group_idx=1), stored([1], group_idx=2))
    assert "blocks of group 1 were left out" in index.incomplete()["a"]
    send(index, "a", stored([1], group_idx=1, kv_cache_spec_kind="sliding_window"))
    assert "group 1" not in index.incomplete()["a"]
    send(
        index, "a", stored([2], group_idx=2, kv_cache_spec_kind="mamba")
    )  # the first state counts, but is lost
    assert "1 blocks of group 2" in index.incomplete()["a"]


OTHER_KEYS: list[Any] = [[("cat.png", 0)], ["cat.png"], [b"a digest of embeddings"], [["0123", 0]], [7]]


@pytest.mark.parametrize("extra", OTHER_KEYS)
def test_a_block_with_an_image_is_not_the_block_without(form: str, extra: list[Any]) -> None:
    index = PrefixIndex(form=form, keys="xxh3", block_size=4, budget=4 * MiB, counting="set")
    send(index, "a", stored([1, 2, 3], extra_keys=[None, tuple(extra), None]))
    assert depth(index, [1, 2, 3]) == 1


def test_an_adapter_without_a_name_is_not_the_model_without_it(form: str) -> None:
    index = PrefixIndex(form=form, keys="xxh3", block_size=4, budget=4 * MiB, counting="set")
    send(index, "a", stored([1, 2], lora_id=3), stored([3], lora_id=0))
    assert depth(index, [1, 2]) == 0
    assert depth(index, [1, 2], lora="lora_id=3") == 2
    assert depth(index, [3]) == 1


def test_extra_keys_of_another_number_of_blocks_are_refused(form: str) -> None:
    index = PrefixIndex(form=form, keys="xxh3", block_size=4, budget=4 * MiB, counting="set")
    send(index, "a", stored([1, 2], extra_keys=[("cat.png", 0)]))
    assert depth(index, [1, 2]) == 0
    assert "2 blocks came with tokens or extra keys" in index.incomplete()["a"]


@pytest.mark.parametrize("keys", KEYS)
def test_the_block_size_is_learnt_from_the_first_store(form: str, keys: Any) -> None:
    index = PrefixIndex(form=form, keys=keys, block_size=None, budget=4 * MiB, counting="set")
    assert index.block_size is None
    assert index.match_tokens(list(range(64))).on_any_tier.tolist() == []
    # what says nothing of it, or is of a group that does not count, teaches nothing
    send(index, "a", BlockStored([9], None, [], 0, None, "CPU", None), BlockRemoved([9], "CPU"))
    send(index, "a", stored([8], size=7, group_idx=3, kv_cache_spec_kind="sliding_window"))
    assert index.block_size is None
    send(index, "a", stored([1, 2], size=8))
    assert index.block_size == 8
    assert index.incomplete() == {}
    if keys == "xxh3":
        assert index.match_tokens(tokens_of([1, 2], 8)).on_any_tier.tolist() == [2]


@pytest.mark.parametrize("keys", KEYS)
def test_another_block_size_is_refused_loudly(
    form: str, keys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    index = PrefixIndex(form=form, keys=keys, block_size=16, budget=4 * MiB, counting="set")
    with caplog.at_level(logging.WARNING, "kvtier.index"):
        for n in range(5):
            send(index, "a", stored([n + 1], size=32))
        send(index, "b", stored([1], size=16))
    assert index.incomplete() == {
        "a": "events have blocks of 32 tokens, the index has 16: register with block_size 32"
    }
    assert len([record for record in caplog.records if "'a'" in record.message]) == 1
    assert (index.stats().refused, index.stats().blocks) == (5, 1)
    send(index, "a", AllBlocksCleared(), stored([1], size=16))
    assert index.incomplete() == {}
    assert index.stats().refused == 5
    send(index, "a", stored([1], size=32))
    index.clear("a")
    assert index.incomplete() == {}
    send(index, "a", stored([1], size=32))
    index.remove_worker("a")
    assert index.incomplete() == {}
    assert index.stats().refused == 7


@pytest.mark.parametrize("keys", KEYS)
def test_too_many_places_are_reported(form: str, keys: Any) -> None:
    index = PrefixIndex(form=form, keys=keys, block_size=4, budget=4 * MiB, counting="set")
    send(index, "a", *(stored([1], medium="OBJ", ownership=f"tier{n}") for n in range(20)))
    assert "7 blocks are in places beyond the 16" in index.incomplete()["a"]
    assert index.stats().refused == 7


def test_orphans_are_within_the_budget_and_dropped_ones_are_reported(form: str, caplog: Any) -> None:
    index = PrefixIndex(form=form, keys="xxh3", block_size=16, budget=8 * MiB, counting="set")
    with caplog.at_level(logging.WARNING, "kvtier.index"):
        for n in range(400):
            events = [stored([10 + 5 * n + i], 3 + 10_000 * n + i, size=16) for i in range(5)]
            index.apply("a", DecodedBatch(1.0, events, 0))
            assert index.stats().bytes <= index.stats().budget
    index.check()
    stats = index.stats()
    assert stats.orphans_dropped == 2000 - stats.waiting > 0
    assert f"{stats.orphans_dropped} blocks whose parent is unknown found no room" in index.incomplete()["a"]
    assert len(caplog.records) == 1
    index.clear("a")
    assert index.incomplete() == {}
    assert index.stats().orphans_dropped == stats.orphans_dropped
    assert index.stats().waiting == 0


@pytest.mark.parametrize(("size", "areas"), [(16, 1), (128, 1), (16, 14)])
def test_an_orphan_weighs_no_more_than_is_counted(size: int, areas: int) -> None:
    """Blocks that wait, as the garbage collector sees them: in all sizes of the dicts that they are in."""
    index = PrefixIndex(form="python", keys="xxh3", block_size=size, budget=256 * MiB, counting="set")
    owners: list[Any] = [{"ownership": f"tier{n}" if n else None, "medium": "STORAGE"} for n in range(areas)]
    index.apply("a", DecodedBatch(1.0, [stored([1], size=size, **owner) for owner in owners], 0))
    tracemalloc.start()
    try:
        gc.collect()
        before, counted = tracemalloc.get_traced_memory()[0], index.stats().bytes
        for n in range(1500 // areas):
            hashes, parent = [(7 << 60) + 8 * n + i for i in range(8)], (3 << 60) + n
            for owner in owners:
                event = stored(hashes, parent, size=size, extra_keys=[(("cat", 0),)] * 8, **owner)
                index.apply("a", DecodedBatch(1.0, [event], 0))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert index.stats().waiting == 1500 // areas * 8
    assert taken <= index.stats().bytes - counted


def test_salted_names_and_duplicates_take_of_the_budget(form: str) -> None:
    index = PrefixIndex(form=form, keys="xxh3", block_size=4, budget=2 * MiB, counting="count")
    for n in range(2000):
        event = stored([10 + n], extra_keys=[("tenant",)])
        index.apply("a", DecodedBatch(1.0, [event, event], 0))
        assert index.stats().bytes <= index.stats().budget
    index.check()
    assert "found no room" in index.incomplete()["a"]
    index.remove_worker("a")
    index.check()


# -- dumps and names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", KEYS)
def test_the_index_may_change_between_two_parts_of_a_dump(form: str, keys: Any) -> None:
    """What stays comes once, however the table grows and shrinks meanwhile."""
    index = PrefixIndex(form=form, keys=keys, block_size=1, budget=64 * MiB, counting="set")
    rng = np.random.default_rng(1)
    stays, goes, comes = rng.integers(1, 1 << 63, (3, 20_000)).tolist()

    def store(hashes: list[int]) -> None:
        for start in range(0, len(hashes), 500):
            index.apply("a", DecodedBatch(1.0, [stored(hashes[start : start + 500], size=1)], 0))

    store(stays)
    store(goes)
    told: list[Any] = []
    for number, part in enumerate(index.dump()):
        assert len(part) <= 1024
        told += part
        if number < 20:
            store(comes[number * 1000 : (number + 1) * 1000])
            index.apply(
                "a", DecodedBatch(1.0, [BlockRemoved(goes[number * 1000 : (number + 1) * 1000], "GPU")], 0)
            )
    assert len(told) == len(set(told))
    hashes = {engine_hash for _, engine_hash, _ in told}
    assert set(stays) <= hashes <= {*stays, *goes, *comes}


def test_a_full_book_of_names_keeps_those_of_the_batch_under_way() -> None:
    """The book makes room by forgetting what the table does not hold: by then it must hold the batch's first
    stores.
    """
    index = PrefixIndex(
        form="python", keys="xxh3", block_size=1, budget=1_200_000, counting="set"
    )  # 3,281 names
    gone, kept, first, second = range(1, 1601), range(2001, 3601), range(4001, 4061), range(5001, 5061)
    send(index, "a", stored(list(gone), size=1))
    send(index, "a", BlockRemoved(list(gone), "GPU"))  # their names stay for a while
    send(index, "a", stored(list(kept), size=1))
    send(index, "a", stored(list(first), size=1), stored(list(second), size=1))
    assert index.stats().blocks == len(kept) + len(first) + len(second)
    assert index.incomplete() == {}
    for blocks in (kept, first, second):
        send(index, "a", BlockRemoved(list(blocks), "GPU"))
    assert index.stats().blocks == 0
    assert depth(index, list(first)[:1]) == 0


def test_a_dump_has_salted_blocks_in_parts_too(form: str) -> None:
    index = PrefixIndex(form=form, keys="xxh3", block_size=1, budget=16 * MiB, counting="set")
    blocks = list(range(1, 3001))
    send(index, "a", stored(blocks, size=1, extra_keys=[("salt",)] + [None] * (len(blocks) - 1)))
    parts = list(index.dump())
    assert max(map(len, parts)) <= 1024
    assert sorted(block for part in parts for _, block, _ in part) == blocks


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_a_block_has_one_name_as_long_as_it_is_held(form: str, medium: str) -> None:
    """Under a second one, no removal would find the first: what was said twice is refused, and
    that is said.
    """
    index = PrefixIndex(form=form, keys="xxh3", block_size=1, budget=4 * MiB, counting="set")
    other = BlockStored([7], None, [8], 1, None, medium, None)
    send(index, "a", stored([7], size=1))
    send(index, "a", other)
    assert depth(index, [8]) == 0
    assert "not those that they had before" in index.incomplete()["a"]
    send(index, "a", BlockRemoved([7], "GPU"), BlockRemoved([7], medium))
    assert index.stats().blocks == 0
    send(index, "a", other)  # it is gone, so the name is free
    assert depth(index, [8]) == 1


def test_two_blocks_of_one_hash_are_refused(form: str) -> None:
    index = PrefixIndex(form=form, keys="xxh3", block_size=1, budget=4 * MiB, counting="set")
    send(index, "a", stored([5], size=1), BlockStored([7, 7], 5, [7, 8], 1, None, "GPU", None))
    assert depth(index, [5, 7]) == 1
    assert "not those that they had before" in index.incomplete()["a"]
    send(index, "a", BlockRemoved([7, 7, 5], "GPU"))
    assert index.stats().blocks == 0


def test_losses_after_a_clear_are_logged_again(form: str, caplog: pytest.LogCaptureFixture) -> None:
    index = PrefixIndex(form=form, block_size=4, budget=270 << 10, keys="engine", counting="set")
    with caplog.at_level(logging.WARNING, "kvtier.index"):
        for turn in range(2):
            for n in range(200):
                send(index, "a", stored([1 + turn + 2 * (100 * n + i) for i in range(100)]))
            assert index.worker_stats("a").dropped
            assert len(caplog.records) == turn + 1
            send(index, "a", AllBlocksCleared())
            assert index.incomplete() == {}
            index._workers["a"].log_limit = LogLimit()  # as if a minute had passed


def test_a_worker_that_clears_and_loses_again_and_again_is_one_line(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    index = PrefixIndex(form=form, block_size=4, keys="engine", counting="set")
    with caplog.at_level(logging.WARNING, "kvtier.index"):
        for _ in range(20):
            send(index, "a", stored([1], size=8))
            send(index, "a", AllBlocksCleared())
    assert len(caplog.records) == 1
