"""Keys made of tokens: the scheme that Dynamo and Mooncake share, and events translated into it."""

from __future__ import annotations

import random
import struct
from collections import Counter
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import InputError
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored
from kvtier.events.wire import EventEncoder, frame_batch
from kvtier.index import PrefixIndex
from kvtier.index.prefix import FORMS
from kvtier.index.xxh3 import chain_keys, extra_hashes, local_hashes, lora_of, salt_of, seed_of, token_array

MiB = 1 << 20
IMAGE = "0123456789abcdef" * 4


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    if request.param == "numba":
        pytest.importorskip("numba")
    return str(request.param)


def tokens_of(*ids: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array(ids, np.uint32)


def test_dynamos_own_numbers() -> None:
    """What `compute_block_hash_for_seq(range(16), 16)` of ai-dynamo-runtime 1.6.1 gives."""
    assert local_hashes(tokens_of(*range(16)), 16).tolist() == [15310707395893867146]
    assert local_hashes(tokens_of(0, 1, 2, 3), 4).tolist() == [9143094415614847814]


def test_keys_are_chained_local_hashes() -> None:
    local = local_hashes(tokens_of(*range(12)), 4)
    second = xxhash.xxh3_64_intdigest(struct.pack("<QQ", int(local[0]), int(local[1])), 1337)
    third = xxhash.xxh3_64_intdigest(struct.pack("<QQ", second, int(local[2])), 1337)
    assert chain_keys(local).tolist() == [int(local[0]), second, third]
    assert chain_keys(local[2:], second).tolist() == [third]


def test_adapter_and_salt_change_the_seed() -> None:
    seeds = [seed_of(), seed_of("a"), seed_of(None, "a"), seed_of("a", "a"), seed_of("a", "b")]
    assert seed_of("", "") == 1337
    assert len(set(seeds)) == 5
    assert seeds[1] == (1337 + xxhash.xxh3_64_intdigest(b"a", 0)) % (1 << 64)


def test_images_and_salts_among_extra_keys() -> None:
    assert extra_hashes([IMAGE, (IMAGE[::-1], 3)], None) == [0x0123456789ABCDEF, 0xFEDCBA9876543210]
    assert extra_hashes(["lora", "tenant"], "lora", "tenant") == extra_hashes(None, None) == []
    assert extra_hashes(["dynamo-cache-salt:tenant"], None, "tenant") == []
    others = ["cat.png", ("cat.png", 0), ("cat.png", 1), ["dog.png", 0], b"cat.png", 5, "lora", 5.0, None]
    assert len({*extra_hashes(others, None)}) == len(others)
    assert [lora_of("x", 3), lora_of(None, 3), lora_of(None, 0), lora_of(None, None)] == [
        "x",
        "lora_id=3",
        None,
        None,
    ]
    assert salt_of([["lora", "tenant"]], "lora") == "tenant"
    assert salt_of([["dynamo-cache-salt:tenant"]], None) == "tenant"
    assert salt_of([["lora", IMAGE]], "lora") is None
    assert salt_of([None, ["tenant"]], None) is None
    plain, image = local_hashes(tokens_of(1, 2), 2), local_hashes(tokens_of(1, 2), 2, extra=[[5, 4]])
    assert plain.tolist() != image.tolist()
    assert image.tolist() == [xxhash.xxh3_64_intdigest(struct.pack("<IIQQ", 1, 2, 4, 5), 1337)]


@pytest.mark.parametrize("bad", [[-1], [1 << 32], ["x"], [[1]], [None]])
def test_no_tokens(bad: list[Any]) -> None:
    with pytest.raises(InputError, match="tokens"):
        token_array(bad)


def test_compiled_hashes_are_those_of_the_library() -> None:
    """Block sizes through all branches of the algorithm: up to 16, 128, 240 bytes, and beyond a thousand."""
    kernels = pytest.importorskip("kvtier.index.compiled.hashing")
    rng = np.random.default_rng(1)
    for size in (*range(1, 66), 127, 128, 255, 256, 257, 300, 512, 1040):
        tokens = rng.integers(0, 1 << 32, 2 * size, dtype=np.uint32)
        for seed in (0, 1337, (1 << 64) - 1):
            found = kernels.hash_blocks(tokens, size, np.uint64(seed))
            assert found.tolist() == local_hashes(tokens, size, seed).tolist(), size
    assert kernels.chain(found, np.uint64(9), True).tolist() == chain_keys(found, 9).tolist()


# -- events ----------------------------------------------------------------------------------------


def stored(
    hashes: list[int], parent: int | None, tokens: list[int], medium: str = "GPU", **more: Any
) -> BlockStored:
    fields: dict[str, Any] = {"block_size": 4, "lora_id": None, "lora_name": None} | more
    return BlockStored(hashes, parent, tokens, medium=medium, **fields)


class Feed:
    """An index, and a way to send it events over the wire."""

    def __init__(self, form: str, **options: Any) -> None:
        options = {"budget": 4 * MiB, "counting": "set"} | options
        self.index = PrefixIndex(form=form, keys="xxh3", block_size=4, **options)
        self._encoder, self._decode = EventEncoder(), self.index.decoder()

    def send(self, worker: str, *events: Any) -> None:
        self.index.apply(
            worker, self._decode(frame_batch(1.0, [self._encoder.event(event) for event in events], 0))
        )
        self.index.check()

    def reach(self, tokens: list[int], **more: Any) -> dict[str | None, list[int]]:
        match = self.index.match_tokens(tokens, **more)
        return dict(zip(match.workers, match.down_to_tier.tolist(), strict=True))


T = list(range(100, 140))


def test_engines_with_other_hashes_meet_in_one_index(form: str) -> None:
    feed = Feed(form)
    feed.send("a", stored([11, 12], None, T[:8]), stored([13], 12, T[8:12], "CPU"))
    feed.send("b", stored([91], None, T[:4]), stored([92, 93], 91, T[4:12], "STORAGE"))
    assert feed.reach(T[:15]) == {"a": [2, 3, 3], "b": [1, 1, 3]}
    feed.send("a", BlockRemoved([12], "GPU"))
    feed.send("b", BlockRemoved([12], "GPU"))  # its own name for nothing
    assert feed.reach(T[:15]) == {"a": [1, 1, 1], "b": [1, 1, 3]}


def test_the_same_hash_may_mean_other_tokens_elsewhere(form: str) -> None:
    feed = Feed(form)
    feed.send("a", stored([1], None, T[:4]))
    feed.send("b", stored([1], None, T[4:8]))
    feed.send("b", BlockRemoved([1], "GPU"))
    assert feed.reach(T[:4]) == {"a": [1, 1, 1], "b": [0, 0, 0]}


def test_orphans_wait_for_their_parent(form: str) -> None:
    feed = Feed(form)
    feed.send("a", stored([3, 4], 2, T[8:16]), stored([5], 4, T[16:20], "CPU"))
    assert feed.index.worker_stats("a").waiting == 3
    feed.send("a", BlockRemoved([4], "GPU"))
    feed.send("a", stored([1, 2], None, T[:8]))
    assert feed.reach(T[:20]) == {"a": [3, 3, 3]}
    assert feed.index.worker_stats("a").waiting == 1
    feed.send("a", stored([4], 3, T[12:16]))
    assert feed.reach(T[:20]) == {"a": [4, 5, 5]}


def test_a_long_chain_of_orphans(form: str) -> None:
    feed = Feed(form, budget=8 * MiB)
    for block in range(600, 0, -1):
        feed.send("a", stored([block], block - 1 or None, [block] * 4))
    assert feed.reach([token for block in range(1, 601) for token in [block] * 4]) == {"a": [600, 600, 600]}


def test_stores_without_tokens_take_the_blocks_name(form: str) -> None:
    feed = Feed(form)
    feed.send("a", stored([1], None, [], "CPU", block_size=0))
    assert feed.reach(T[:4]) == {"a": [0, 0, 0]}
    feed.send("a", stored([1, 2], None, T[:8]))
    feed.send("a", stored([2], None, [], "CPU", block_size=0), BlockRemoved([1, 2], "GPU"))
    assert feed.reach(T[:8]) == {"a": [0, 2, 2]}


@pytest.mark.parametrize("counting", ["set", "count"])
def test_a_waiting_block_is_not_forgotten(form: str, counting: str) -> None:
    """A store without tokens once replaced what waited, and a removal elsewhere took the tokens with it."""
    bare, parent = stored([2], None, [], "CPU", block_size=0), stored([1], None, T[:4])
    waiting = stored([2], 1, T[4:8])
    for events, reach in (
        ([waiting, stored([2], None, [], block_size=0)], [2, 2, 2]),
        ([waiting, bare, BlockRemoved([2], "GPU")], [1, 2, 2]),
        ([bare, waiting, BlockRemoved([2], "GPU")], [1, 2, 2]),
        ([waiting, bare, BlockRemoved([2], "CPU")], [2, 2, 2]),
    ):
        feed = Feed(form, counting=counting)
        for event in (*events, parent):
            feed.send("a", event)
        assert feed.reach(T[:8]) == {"a": reach}
        assert feed.index.stats().waiting == 0


@pytest.mark.parametrize("counting", ["set", "count"])
def test_a_chain_that_arrives_in_any_order_is_known_as_far_as_it_came(form: str, counting: str) -> None:
    """Three blocks on two tiers, with and without tokens: once one is told with tokens, it is known wherever
    it is held, and it stays so as long as it is held anywhere.
    """
    for seed in range(400):
        rng, feed = random.Random(seed), Feed(form, counting=counting)
        held: Counter[tuple[str, int]] = Counter()
        known: set[int] = set()
        for _ in range(rng.randrange(3, 10)):
            medium, first = rng.choice(["GPU", "CPU"]), rng.randrange(1, 4)
            blocks = list(range(first, rng.randrange(first, 4) + 1))
            tokens = [block for block in blocks for _ in range(4)] if rng.random() < 0.6 else []
            if rng.random() < 0.6:
                size = 4 if tokens else 0
                feed.send("a", stored(blocks, first - 1 or None, tokens, medium, block_size=size))
                held.update((medium, block) for block in blocks)
                known |= set(blocks) if tokens else set()
            else:
                feed.send("a", BlockRemoved(blocks, medium))
                held -= Counter((medium, block) for block in blocks)
            if counting == "set":
                held = Counter(set(held))
            known &= {block for _, block in held}
            reach, at = [], 0
            for tier in ("GPU", "CPU"):
                while at + 1 in known and held[tier, at + 1]:
                    at += 1
                reach.append(at)
            found = feed.reach([block for block in (1, 2, 3) for _ in range(4)])["a"][:2]
            # more may be known: names are kept for a while after blocks are gone
            assert all(mine >= least for mine, least in zip(found, reach, strict=True)), (seed, found, reach)
            assert all(held["GPU", block] for block in range(1, found[0] + 1)), (seed, found)
            assert all(held["CPU", block] for block in range(found[0] + 1, found[1] + 1)), (seed, found)


def test_blocks_of_another_size_are_refused(form: str) -> None:
    feed = Feed(form)
    feed.send(
        "a",
        stored([1], None, T[:8], block_size=8),
        stored([2, 3], None, T[:4]),
        stored([4], None, [1 << 32] * 4),
    )
    assert feed.index.stats().blocks == 0
    assert feed.index.stats().refused == 4
    assert (
        "events have blocks of 8 tokens, the index has 4: register with block_size 8"
        in feed.index.incomplete()["a"]
    )
    assert "3 blocks came with tokens" in feed.index.incomplete()["a"]


def test_adapters_salts_and_images_are_kept_apart(form: str) -> None:
    """A salt is named with the first block only; the blocks behind it belong to it all the same."""
    feed = Feed(form)
    feed.send("plain", stored([1, 2], None, T[:8]))
    feed.send("lora", stored([1], None, T[:4], lora_name="x"), stored([2], 1, T[4:8], lora_name="x"))
    feed.send("salt", stored([1], None, T[:4], extra_keys=[["y"]]), stored([2], 1, T[4:8]))
    feed.send("image", stored([1, 2], None, T[:8], extra_keys=[None, [(IMAGE, 0)]]))
    nothing = [0, 0, 0]
    assert feed.reach(T[:8]) == {"plain": [2] * 3, "lora": nothing, "salt": nothing, "image": [1] * 3}
    assert feed.reach(T[:8], lora="x") == {
        "plain": nothing,
        "lora": [2] * 3,
        "salt": nothing,
        "image": nothing,
    }
    assert feed.reach(T[:8], salt="y") == {
        "plain": nothing,
        "lora": nothing,
        "salt": [2] * 3,
        "image": nothing,
    }
    feed.send("salt", BlockRemoved([2], "GPU"))
    assert feed.reach(T[:8], salt="y")["salt"] == [1] * 3


def test_a_key_named_as_the_adapter_or_the_salt_counts_all_the_same(form: str) -> None:
    """The seed has the adapter once, and the salt of the first block once; anything more is an image's."""
    feed = Feed(form)
    feed.send("a", stored([1, 2], None, T[:8], lora_name="x", extra_keys=[["x"], ["x", "x"]]))
    feed.send("b", stored([1, 2], None, T[:8], extra_keys=[["y"], ["y"]]))
    feed.send("c", stored([1, 2], None, T[:8], extra_keys=[["y", "y"], None]))
    assert feed.reach(T[:8], lora="x")["a"] == [1, 1, 1]
    assert feed.reach(T[:8], salt="y") == {"a": [0, 0, 0], "b": [1, 1, 1], "c": [0, 0, 0]}


def test_a_clear_forgets_names_too(form: str) -> None:
    feed = Feed(form)
    feed.send("a", stored([1, 2], None, T[:8]), AllBlocksCleared(), stored([2], 1, T[4:8]))
    assert feed.index.worker_stats("a").waiting == 1
    assert feed.index.stats().blocks == 0
    feed.send("a", stored([1], None, T[:4]))
    assert feed.reach(T[:8]) == {"a": [2, 2, 2]}


def test_copies_are_counted(form: str) -> None:
    feed = Feed(form, counting="count")
    feed.send("a", stored([1], None, T[:4]), stored([1], None, T[:4]), BlockRemoved([1], "GPU"))
    assert feed.reach(T[:4]) == {"a": [1, 1, 1]}
    feed.send("a", BlockRemoved([1], "GPU"))
    assert feed.reach(T[:4]) == {"a": [0, 0, 0]}


def test_names_of_removed_blocks_are_forgotten(form: str) -> None:
    """Blocks come and go for ever; the names must not pile up, and those of held blocks must stay."""
    feed = Feed(form, budget=3 * MiB)
    feed.send("a", stored([1, 2], None, T[:8]))
    sizes = []
    for turn in range(200):
        hashes = list(range(1000 + 200 * turn, 1200 + 200 * turn))
        feed.index.apply(
            "a", feed._decode(frame_batch(1.0, [feed._encoder.event(stored(hashes, 2, hashes * 4))], 0))
        )
        feed.index.apply(
            "a", feed._decode(frame_batch(1.0, [feed._encoder.event(BlockRemoved(hashes, "GPU"))], 0))
        )
        sizes.append(feed.index.stats().bytes)
    assert feed.index.stats().blocks == 2
    assert feed.index.stats().dropped == 0
    assert max(sizes[100:]) <= max(sizes[:100])
    feed.send("a", BlockRemoved([2], "GPU"))
    assert feed.reach(T[:8]) == {"a": [1, 1, 1]}


def test_the_budget_holds_for_names_too(form: str) -> None:
    feed, rng = Feed(form, budget=800 << 10), random.Random(1)
    for _ in range(300):
        hashes = [rng.getrandbits(64) for _ in range(64)]
        event = stored(hashes, None, [rng.getrandbits(32) for _ in range(256)])
        feed.index.apply("a", feed._decode(frame_batch(1.0, [feed._encoder.event(event)], 0)))
        assert feed.index.stats().bytes <= 800 << 10
    assert feed.index.worker_stats("a").dropped > 0
    feed.index.check()


chains_st = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.integers(0, 5),
        st.integers(0, 3),
        st.sampled_from(["GPU", "CPU"]),
        st.integers(0, 3),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(chains_st)
def test_both_forms_agree_on_random_trees(edits: list[tuple[str, int, int, str, int]]) -> None:
    """Blocks of a small tree are stored and removed in any order, so that parents come late, twice, or
    never.
    """
    pytest.importorskip("numba")
    feeds = [Feed(form, counting="count") for form in FORMS]
    for worker, node, length, medium, what in edits:
        hashes = [node + 10 * depth for depth in range(length + 1)]
        tokens = [token for block in hashes for token in (block, block, block, block)]
        parent = hashes[0] - 10 if hashes[0] >= 10 else None
        events = {
            0: BlockRemoved(hashes, medium),
            1: stored(hashes[1:], hashes[0], tokens[4:], medium) if length else BlockRemoved(hashes, medium),
            2: stored(hashes, parent, tokens, medium),
            3: stored(hashes, None, [], medium, block_size=0),
        }
        for feed in feeds:
            feed.send(worker, events[what])
    for node in range(6):
        query = [token for depth in range(4) for token in [node + 10 * depth] * 4]
        assert feeds[0].reach(query) == feeds[1].reach(query)
    assert set(feeds[0].index.entries()) == set(feeds[1].index.entries())
