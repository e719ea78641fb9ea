"""The prefix index, in both forms: the same answers as a model that keeps a set per worker."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import InputError
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, Mark
from kvtier.events.updates import Received, Reset, State, StateChanged
from kvtier.events.wire import DecodedBatch, EventEncoder, frame_batch, place_of
from kvtier.index import PrefixIndex, StorageTier
from kvtier.index.base import tier_of
from kvtier.index.prefix import FORMS
from kvtier.keys import hash_blocks, hash_to_u64, lora_key, salt_key

KiB, MiB = 1 << 10, 1 << 20


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    if request.param == "numba":
        pytest.importorskip("numba")
    return str(request.param)


def stored(hashes: list[int], medium: str | None = "GPU", **fields: Any) -> BlockStored:
    values: dict[str, Any] = {
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "lora_name": None,
    }
    return BlockStored(block_hashes=list(hashes), medium=medium, **(values | fields))


def removed(hashes: list[int], medium: str | None = "GPU", **fields: Any) -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, **fields)


def batch(*events: Any) -> DecodedBatch:
    return DecodedBatch(1.0, list(events), 0)


def held_by(index: PrefixIndex, worker: str) -> set[tuple[int, StorageTier]]:
    return {(key, tier) for name, key, tier in index.entries() if name == worker}


class Model:
    """Per worker, how often it holds each block in each place."""

    def __init__(self, counting: str) -> None:
        self.counting = counting
        self.workers: dict[str, Counter[tuple[Any, int]]] = {}

    def apply(self, worker: str, events: list[Any]) -> None:
        held = self.workers.setdefault(worker, Counter())
        for event in events:
            if isinstance(event, AllBlocksCleared):
                held.clear()
                continue
            for block in event.block_hashes:
                self._change(held, (place_of(event), block), isinstance(event, BlockStored))

    def _change(self, held: Counter[Any], block: Any, is_stored: bool) -> None:
        count = held[block] + (1 if is_stored else -1)
        if self.counting == "set":
            count = int(is_stored)
        held[block] = max(count, 0)
        held += Counter()  # drops zeros

    def depths(self, worker: str, hashes: list[int]) -> tuple[int, list[int], list[int]]:
        tiers = {
            (tier_of(place[0]), block) for (place, block), count in self.workers[worker].items() if count
        }

        def lead(start: int, wanted: Callable[[int], bool]) -> int:
            return start + len(list(takewhile(wanted, hashes[start:])))

        everywhere = lead(0, lambda block: any((tier, block) in tiers for tier in StorageTier))
        alone = [lead(0, lambda block, tier=tier: (tier, block) in tiers) for tier in StorageTier]
        reach, at = [], 0
        for tier in StorageTier:
            at = lead(at, lambda block, tier=tier: (tier, block) in tiers)
            reach.append(at)
        return everywhere, alone, reach


hashes_st = st.lists(st.integers(0, 11) | st.sampled_from([1 << 63, (1 << 64) - 1]), max_size=6)
places_st = st.fixed_dictionaries(
    {
        "medium": st.sampled_from([None, "GPU", "CPU", "STORAGE", "DISK"]),
        "ownership": st.sampled_from([None, "fs"]),
    }
)
events_st = st.one_of(
    st.builds(lambda hashes, place: stored(hashes, **place), hashes_st, places_st),
    st.builds(lambda hashes, place: removed(hashes, **place), hashes_st, places_st),
    st.just(AllBlocksCleared()),
)
edits_st = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.lists(events_st, max_size=3) | st.sampled_from(["clear", "remove"]),
    ),
    max_size=25,
)


def run(index: PrefixIndex, model: Model, edits: list[Any], decode: Callable[[Any], Any]) -> None:
    for worker, what in edits:
        if what == "clear":
            index.clear(worker)
            model.workers.get(worker, Counter()).clear()
        elif what == "remove":
            index.remove_worker(worker)
            model.workers.pop(worker, None)
        else:
            index.apply(worker, decode(what))
            model.apply(worker, what)


def assert_same(index: PrefixIndex, model: Model, hashes: list[int]) -> None:
    match = index.match(np.array(hashes, np.uint64))
    assert {name for name in match.workers if name is not None} == model.workers.keys()
    for row, name in enumerate(match.workers):
        if name is not None:
            found = (
                int(match.on_any_tier[row]),
                match.on_tier[row].tolist(),
                match.down_to_tier[row].tolist(),
            )
            assert found == model.depths(name, hashes)
        else:
            assert not match.on_any_tier[row]


@pytest.mark.parametrize("counting", ["set", "count"])
@settings(max_examples=150, deadline=None)
@given(edits=edits_st, query=st.lists(st.integers(0, 11), max_size=8), raw=st.booleans())
def test_answers_are_those_of_the_model(counting: Any, edits: Any, query: list[int], raw: bool) -> None:
    for form in FORMS:
        if form == "numba":
            pytest.importorskip("numba")
        index, model = PrefixIndex(form=form, budget=MiB, counting=counting, keys="engine"), Model(counting)
        encoder, decoder = EventEncoder(), index.decoder()

        def decode(events: list[Any], encoder: Any = encoder, decoder: Any = decoder) -> Any:
            return (
                decoder(frame_batch(1.0, [encoder.event(event) for event in events], 0))
                if raw
                else batch(*events)
            )

        run(index, model, edits, decode)
        index.check()
        assert_same(index, model, query)
        for name in model.workers:
            tiers = {
                (block, tier_of(place[0])) for (place, block), count in model.workers[name].items() if count
            }
            assert held_by(index, name) == tiers
        assert index.stats().dropped == 0


def test_many_workers_and_blocks(form: str) -> None:
    """Over 64 workers, so that holder sets take two words, and enough blocks for segments to split many
    times.
    """
    rng, index, model = (
        random.Random(3),
        PrefixIndex(form=form, budget=8 * MiB, keys="engine", counting="set"),
        Model("set"),
    )
    keys = [rng.getrandbits(64) for _ in range(6000)]
    for _ in range(150):
        worker, start = f"w{rng.randrange(100)}", rng.randrange(5900)
        part = keys[start : start + rng.randrange(400)]
        events = [stored(part), stored(part[:50], "CPU"), removed(part[::3])]
        index.apply(worker, batch(*events))
        model.apply(worker, events)
    index.check()
    for _ in range(10):
        start = rng.randrange(5900)
        assert_same(index, model, keys[start : start + 100])


def test_the_walk_goes_down_the_tiers(form: str) -> None:
    index = PrefixIndex(form=form, budget=MiB, keys="engine", counting="set")
    index.apply("a", batch(stored([1, 2]), stored([3], "CPU"), stored([4], "STORAGE"), stored([5], "GPU")))
    match = index.match([1, 2, 3, 4, 5])
    assert match.workers == ("a",)
    assert match.down_to_tier.tolist() == [[2, 3, 4]]
    assert match.on_tier.tolist() == [[2, 0, 0]]
    assert match.on_any_tier.tolist() == [5]


def test_negative_hashes_are_the_same_bits(form: str) -> None:
    index = PrefixIndex(form=form, budget=MiB, keys="engine", counting="set")
    index.apply("a", batch(stored([-1, 5])))
    assert index.match([(1 << 64) - 1, 5]).on_any_tier.tolist() == [2]
    assert index.match([-1]).on_any_tier.tolist() == [1]
    with pytest.raises(InputError, match="expected integers"):
        index.match(["x"])


def test_a_freed_number_is_used_again_and_starts_empty(form: str) -> None:
    """Clearing takes the worker out of shared holder sets; a newcomer in its place must inherit nothing."""
    index = PrefixIndex(form=form, budget=MiB, keys="engine", counting="set")
    for worker in "abc":
        index.apply(worker, batch(stored([1, 2, 3]), stored([1], "CPU")))
    index.remove_worker("b")
    assert index.match([1, 2]).workers == ("a", None, "c")
    index.add_worker("d")
    match = index.match([1, 2])
    assert (match.workers, match.on_any_tier.tolist()) == (("a", "d", "c"), [2, 0, 2])
    index.check()


def test_workers_come_and_go_without_end(form: str) -> None:
    index = PrefixIndex(form=form, budget=MiB, keys="engine", counting="set")
    index.apply("stays", batch(stored(list(range(100)))))
    for turn in range(300):
        index.apply(f"w{turn}", batch(stored(list(range(turn, turn + 200)))))
        index.remove_worker(f"w{turn}")
    index.check()
    assert index.match([0]).workers == ("stays", None)
    assert index.stats().blocks == 100
    assert index.stats().bytes < 200 * KiB


def test_the_budget_is_never_exceeded(form: str) -> None:
    index = PrefixIndex(form=form, budget=310 * KiB, keys="engine", counting="set")
    rng = random.Random(1)
    held: set[int] = set()
    for _ in range(400):
        part = [rng.getrandbits(64) for _ in range(100)]
        index.apply("a", batch(stored(part)))
        held |= set(part)
        assert index.stats().bytes <= 310 * KiB
    stats = index.stats()
    assert stats.dropped == len(held) - stats.blocks > 0
    assert stats.blocks > 310 * KiB // 150
    assert index.worker_stats("a").dropped == stats.dropped
    assert index.incomplete() == {"a": f"{stats.dropped} blocks found no room: raise the index's budget"}
    index.check()
    assert {key for _, key, _ in index.entries()} <= held
    index.clear("a")
    index.apply("b", batch(stored([1, 2, 3])))
    assert index.match([1, 2, 3]).on_any_tier.tolist() == [0, 3]
    assert index.worker_stats("a").dropped == 0
    assert index.incomplete() == {}
    index.check()


def test_a_full_index_never_claims_what_was_removed(form: str) -> None:
    """With ever new combinations of holders the budget goes to holder sets, and those too may run out."""
    rng, index, model = (
        random.Random(2),
        PrefixIndex(form=form, budget=268 * KiB, keys="engine", counting="set"),
        Model("set"),
    )
    keys = [rng.getrandbits(64) for _ in range(3000)]
    for _ in range(600):
        worker, some = f"w{rng.randrange(60)}", rng.sample(keys, 40)
        events = [stored(some[:30], rng.choice(["GPU", "CPU"])), removed(some[30:])]
        index.apply(worker, batch(*events))
        model.apply(worker, events)
    assert index.stats().dropped > 0
    assert index.stats().bytes <= 268 * KiB
    index.check()
    for name in model.workers:
        truth = {
            (block, tier_of(place[0])) for (place, block), count in model.workers[name].items() if count
        }
        assert held_by(index, name) <= truth


def test_removed_blocks_leave_no_trace(form: str) -> None:
    """A cache that turns over for ever must not grow: the room of removed blocks is used again."""
    index, rng = PrefixIndex(form=form, budget=4 * MiB, keys="engine", counting="set"), random.Random(5)
    window: list[int] = []
    sizes = []
    for turn in range(300):
        new = [rng.getrandbits(64) for _ in range(100)]
        index.apply("a", batch(stored(new), removed(window[:100]) if len(window) >= 2000 else stored([])))
        window = (window[100:] if len(window) >= 2000 else window) + new
        if turn % 50 == 49:
            sizes.append(index.stats().bytes)
    assert index.stats().blocks == len(window)
    assert sizes[-1] <= sizes[1] * 1.5
    index.check()


def test_groups_without_full_attention_are_left_out(form: str) -> None:
    index = PrefixIndex(form=form, budget=MiB, keys="engine", counting="set")
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    index.apply(
        "a", batch(stored([1, 2], **window), stored([1], group_idx=0, kv_cache_spec_kind="full_attention"))
    )
    index.apply("a", batch(removed([1], group_idx=1), stored([7], group_idx=2)))
    assert index.match([1, 2]).on_any_tier.tolist() == [1]
    assert index.stats().ignored == 3


def test_places_beyond_the_last_area_are_refused_and_reported(form: str) -> None:
    index = PrefixIndex(form=form, budget=MiB, keys="engine", counting="set")
    index.apply("a", batch(*(stored([n], "OBJ", ownership=f"tier{n}") for n in range(100))))
    assert index.stats().blocks == 13
    assert index.stats().refused == 87
    assert "87 blocks are in places beyond the 16" in index.incomplete()["a"]
    index.check()


def test_tokens_are_hashed_as_the_engine_does(form: str) -> None:
    index = PrefixIndex(form=form, budget=MiB, block_size=4, seed="s", keys="engine", counting="set")
    tokens = list(range(14))
    plain = [hash_to_u64(block) for block in hash_blocks(tokens, 4, seed="s")]
    special = [
        hash_to_u64(block)
        for block in hash_blocks(tokens, 4, seed="s", extra_keys={0: [lora_key("x"), salt_key("y")]})
    ]
    index.apply("a", batch(stored(plain)))
    index.apply("b", batch(stored(special[:2])))
    assert index.match_tokens(tokens).on_any_tier.tolist() == [3, 0]
    assert index.match_tokens(np.array(tokens), lora="x", salt="y").on_any_tier.tolist() == [0, 2]
    with pytest.raises(InputError, match="tokens"):
        index.match_tokens([-1, 2, 3, 4])


def test_a_subscribers_updates_are_followed(form: str) -> None:
    index = PrefixIndex(form=form, budget=MiB, keys="engine", counting="set")
    index.follow(Received("a", 0, batch(stored([1, 2]))))
    index.follow(StateChanged("a", State.EXACT))
    assert index.match([1, 2]).on_any_tier.tolist() == [2]
    index.follow(Reset("a"))
    assert index.match([1, 2]).on_any_tier.tolist() == [0]
    assert index.workers == ("a",)


def test_wrong_settings_say_what_was_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="engine or xxh3"):
        PrefixIndex(keys="sha")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least 1 token"):
        PrefixIndex(block_size=0)
    monkeypatch.setenv("KVTIER_INDEX", "rust")
    with pytest.raises(InputError, match="numba, python, auto"):
        PrefixIndex()
    monkeypatch.setenv("KVTIER_INDEX", "python")
    assert PrefixIndex().form == "python"


def test_too_many_workers_are_refused(form: str) -> None:
    index = PrefixIndex(form=form, budget=64 * MiB, keys="engine", counting="set")
    for number in range(4096):
        index.add_worker(f"w{number}")
    with pytest.raises(InputError, match="no room for more than 4096"):
        index.add_worker("one more")
    index.apply("w4095", batch(stored([1, 2]), stored([3], "CPU")))
    assert index.match([1, 2, 3]).down_to_tier[4095].tolist() == [2, 3, 3]
    index.check()


@pytest.mark.parametrize("keys", ["engine", "xxh3"])
def test_batches_applied_together_are_batches_applied_one_by_one(form: str, keys: Any) -> None:
    """With a mark among them, which is decoded and not scanned; tokens of later batches must not be taken
    for earlier ones'.
    """
    rng = random.Random(4)
    together, singly = (
        PrefixIndex(form=form, keys=keys, block_size=2, budget=4 * MiB, counting="count") for _ in range(2)
    )
    encoder, decode = EventEncoder(), together.decoder()
    batches, parent = [], None
    for _ in range(30):
        hashes = [rng.getrandbits(64) for _ in range(3)]
        tokens = [rng.randrange(9) for _ in range(6)]
        events = [encoder.event(stored(hashes, parent_block_hash=parent, token_ids=tokens, block_size=2))]
        events += [encoder.event(removed(hashes[2:]))] if rng.random() < 0.3 else []
        events += [encoder.mark(Mark(1, 2, 3))] if rng.random() < 0.2 else []
        batches.append(decode(frame_batch(1.0, events, 0)))
        parent = hashes[1] if rng.random() < 0.8 else None
    together.apply_all("a", batches)
    for batch in batches:
        singly.apply("a", batch)
    assert set(together.entries()) == set(singly.entries()) != set()
    together.check()
