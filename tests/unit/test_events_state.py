"""The published state against a naive model: what goes out is set-like, adds up, and comes again as a snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.event_kit import Consumer, removed, stored

from kvtier.errors import IntegrityError
from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    EventEncoder,
    TierCleared,
    blocks_of,
    change_of,
    frame_batch,
    place_of,
)
from kvtier.events.publish.fold import Fold
from kvtier.events.publish.formats import HashFormat
from kvtier.events.publish.hot import Blocks, PythonBlocks, sum_of
from kvtier.events.publish.snapshot import Snapshot
from kvtier.events.publish.state import PublishedState, runs
from kvtier.events.wire import U64, decode_batch

settings.register_profile("state", deadline=None)
settings.load_profile("state")
PARENT = {block: block // 2 or None for block in range(1, 40)}
"""A tree of blocks, as hashes of prefixes make one: what hangs from what never changes."""


def chain(last: int, length: int) -> list[int]:
    """Return up to `length` blocks that end with `last`, each the next one's parent."""
    found = [last]
    while len(found) < length and (parent := PARENT[found[0]]) is not None:
        found.insert(0, parent)
    return found


def make_stored(last: int, length: int, medium: str, group: int | None) -> Any:
    blocks = chain(last, length)
    return stored(blocks, PARENT[blocks[0]], medium=medium, group_idx=group)


media = st.sampled_from(["GPU", "CPU", "STORAGE"])
groups = st.sampled_from([None, 0, 1])
blocks = st.integers(1, 39)
stores = st.builds(make_stored, blocks, st.integers(1, 5), media, groups)
odd_stores = st.builds(
    lambda hashes, parent, medium: stored(hashes, parent, medium=medium), st.lists(blocks), blocks, media
)
removals = st.builds(
    lambda hashes, medium, group: removed(hashes, medium, group_idx=group), st.lists(blocks), media, groups
)
clears = st.sampled_from([AllBlocksCleared(), TierCleared("CPU"), TierCleared("GPU")])
events = st.lists(st.one_of(stores, stores, removals, removals, clears), max_size=40)
wild_events = st.lists(st.one_of(stores, odd_stores, removals, clears), max_size=40)


class Model:
    """Counts of blocks, in ten lines."""

    def __init__(self, counting: str) -> None:
        self.counts: Counter[Any] = Counter()
        self.counting = counting

    def apply(self, event: Any) -> None:
        if isinstance(event, (AllBlocksCleared, TierCleared)):
            medium = getattr(event, "medium", None)
            self.counts = Counter({k: n for k, n in self.counts.items() if medium is not None and k[0][0] != medium})
            return
        step = 1 if hasattr(event, "parent_block_hash") else -1
        for block in event.block_hashes:
            key = (place_of(event), block)
            most = 1 if self.counting == "set" else 10**9
            self.counts[key] = min(most, max(0, self.counts[key] + step))

    def held(self) -> set[Any]:
        return {key for key, count in self.counts.items() if count}


def apply(state: PublishedState, encoder: EventEncoder, event: Any, out: list[bytes]) -> None:
    if isinstance(event, AllBlocksCleared):
        state.clear()
        out.append(encoder.event(event))
    elif isinstance(event, TierCleared):
        state.clear_medium(event.medium, out)
    else:
        (state.store if hasattr(event, "parent_block_hash") else state.remove)(event, encoder.event(event), out)


def run(
    events: Iterable[Any], counting: str = "count", encoding: str = "map", table: Any = Blocks
) -> tuple[PublishedState, Model, list[bytes]]:
    encoder = EventEncoder(encoding)
    state, model, out = PublishedState(encoder, counting, table), Model(counting), []
    for event in events:
        apply(state, encoder, event, out)
        model.apply(event)
    state.check()
    return state, model, out


def consume(events: list[bytes]) -> Consumer:
    consumer = Consumer()
    consumer.apply(frame_batch(0.0, events, 0))
    return consumer


@pytest.mark.parametrize("table", [Blocks, PythonBlocks])
@pytest.mark.parametrize("counting", ["count", "set"])
@given(wild_events)
def test_what_goes_out_is_set_like_and_adds_up(counting: str, table: Any, events: list[Any]) -> None:
    state, model, out = run(events, counting, table=table)
    assert consume(out).held == model.held()
    change = change_of(decode_batch(frame_batch(0.0, out, 0)).events)
    assert (state.blocks, state.digest) == (change.blocks, change.digest)


@pytest.mark.parametrize("encoding", ["map", "array"])
@given(wild_events)
def test_a_snapshot_is_the_state(encoding: str, events: list[Any]) -> None:
    state, model, _ = run(events, encoding=encoding)
    snapshot = Snapshot(state, EventEncoder(encoding), as_of=3, epoch=9)
    snapshot.check()
    sent = list(snapshot)
    consumer = consume(sent)
    assert consumer.held == model.held()
    assert (consumer.mark.epoch, consumer.mark.blocks, consumer.mark.digest) == (9, state.blocks, state.digest)
    change = change_of(decode_batch(frame_batch(0.0, sent, 0)).events)
    assert change == (True, state.blocks, state.digest)


@given(events)
@example([make_stored(36, 3, "GPU", None), removed([18]), make_stored(18, 1, "GPU", None)])  # each hangs from the other
def test_a_snapshot_brings_parents_first(events: list[Any]) -> None:
    """Tree-building consumers drop orphans: a block that found its parent in the stream finds it in the snapshot."""
    state, model, out = run(events)
    linked = consume(list(Snapshot(state, EventEncoder(), 0, 0))).linked
    assert (consume(out).linked & model.held()) - linked == set()


@given(events, events)
def test_a_snapshot_stays_as_it_was(before: list[Any], after: list[Any]) -> None:
    encoder = EventEncoder()
    state, model, _ = run(before)
    snapshot = Snapshot(state, encoder, 0, 0)
    early = iter(snapshot)
    next(early)
    for event in after:
        apply(state, encoder, event, [])
    assert consume(list(snapshot)).held == model.held()
    assert [next(iter(snapshot)), *early] == list(snapshot)


@pytest.mark.parametrize("counting", ["count", "set"])
@given(events, st.lists(events, max_size=4))
def test_a_fold_does_what_its_batches_would(counting: str, before: list[Any], batches: list[list[Any]]) -> None:
    state, model, _ = run(before, counting)
    fold = Fold(counting)
    for batch in batches:
        fold.add(batch)
        for event in batch:
            model.apply(event)
    fold.check()
    assert fold.apply(state, HashFormat()) == 0
    state.check()
    assert fold.batches == len(batches)
    assert consume(list(Snapshot(state, EventEncoder(), 0, 0))).held == model.held()
    last = [(key, count) for key, count in model.counts.items() if count]
    assert [(key, counts_of(state, key)) for key, _ in last] == last


def counts_of(state: PublishedState, key: tuple[Any, int]) -> int:
    (medium, group, ownership, locality), block = key
    like = removed([block], medium, group_idx=group, ownership=ownership or None, locality=locality or None)
    return state.count_of(like, block)


def test_a_fold_converts_hashes() -> None:
    state = PublishedState(EventEncoder())
    fold = Fold()
    fold.add([stored([b"\xff" * 8, b"\x01" * 8])])
    fold.apply(state, HashFormat("i64"))
    assert [sorted(state.held(holding)) for holding in state.holdings()] == [[-1, 0x0101010101010101]]


def test_a_fold_survives_what_it_cannot_read() -> None:
    state = PublishedState(EventEncoder())
    fold = Fold()
    fold.add([stored([1]), object(), stored([2], lora_name=object()), BlockRemoved(7, None)])  # type: ignore[arg-type]
    assert fold.apply(state, HashFormat()) == 1
    assert state.blocks == 1
    state.check()


@pytest.mark.parametrize("wrong", ["a", None, 1.5])
def test_a_fold_survives_what_is_no_hash(wrong: Any) -> None:
    """It ended the turn, and with it the whole fold, once hashes were converted."""
    state = PublishedState(EventEncoder(), table=Blocks)
    fold = Fold()
    fold.add([stored([1]), stored([wrong], token_ids=[], block_size=0)])
    assert fold.apply(state, HashFormat("u64")) == 1
    assert state.blocks == 1
    state.check()


def test_partly_known_events_go_out_in_parts() -> None:
    _, _, out = run([stored([2, 4], None), stored([1, 2, 3, 4, 5], 9)])
    parts = decode_batch(frame_batch(0.0, out[1:], 0)).events
    whole = stored([1, 2, 3, 4, 5], 9)
    assert parts == [blocks_of(whole, 0, 1), blocks_of(whole, 2, 3), blocks_of(whole, 4, 5)]


def test_ancestors_that_are_gone_come_and_go() -> None:
    state, _, _ = run([stored([1, 2]), stored([3], 2), stored([4], 3), removed([1, 2, 3])])
    sent = decode_batch(frame_batch(0.0, list(Snapshot(state, EventEncoder(), 0, 0)), 0)).events
    assert sent == [AllBlocksCleared(), stored([1, 2]), stored([3], 2), stored([4], 3), removed([1, 2, 3])]
    assert len(state.ghosts()) == 2


def test_ancestors_leave_with_their_last_child() -> None:
    state, _, _ = run([stored([1]), stored([2], 1), stored([3], 2), removed([1]), removed([2]), removed([3])])
    assert (state.blocks, len(state.ghosts())) == (0, 0)


def test_a_dead_tail_is_left_out_of_a_snapshot() -> None:
    state, _, _ = run([stored([1, 2, 3, 4]), removed([4, 3])])
    sent = decode_batch(frame_batch(0.0, list(Snapshot(state, EventEncoder(), 0, 0)), 0)).events
    assert sent == [AllBlocksCleared(), stored([1, 2])]


def test_ghosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.events.publish.state._LEAST_GHOSTS", 5)
    state, _, _ = run([event for n in range(1, 50) for event in (stored([n], n - 1 or None), removed([n - 1]))])
    assert len(state.ghosts()) == 5


def test_chains_of_any_length_are_freed() -> None:
    """Records that referred to each other crashed the interpreter when a long chain of them was freed."""
    encoder = EventEncoder()
    state = PublishedState(encoder, table=Blocks)
    for n in range(1, 100_000):
        state.store(stored([n], n - 1 or None), b"", [])
    for n in range(1, 100_000):
        state.remove(removed([n]), b"", [])
    assert (state.blocks, state.ghosts()) == (0, {})


@pytest.mark.parametrize("table", [Blocks, PythonBlocks])
@pytest.mark.parametrize("wrong", [None, ["a"], [1.5], [None], [1, "a"]])
def test_what_is_no_hash_changes_nothing(wrong: Any, table: Any) -> None:
    state, _, _ = run([stored([1, 2])], table=table)
    for event in (stored([3]), removed([1])):
        bad = type(event)(**{f: getattr(event, f) for f in event.__struct_fields__} | {"block_hashes": wrong})
        with pytest.raises(TypeError):
            apply_raw(state, bad)
    state.check()
    assert state.blocks == 2


def apply_raw(state: PublishedState, event: Any) -> None:
    (state.store if hasattr(event, "parent_block_hash") else state.remove)(event, b"", [])


@given(st.lists(st.one_of(st.integers(-(2**63), 2**64 - 1), st.binary(min_size=8, max_size=32))))
def test_sums_are_those_of_the_digest(hashes: list[Any]) -> None:
    low = [int.from_bytes(h[-8:], "big") if isinstance(h, bytes) else h for h in hashes]
    assert sum_of(hashes) & U64 == sum(low) & U64


@given(st.sets(st.integers(0, 30)))
def test_runs(places: set[int]) -> None:
    found = list(runs(sorted(places)))
    assert {place for start, stop in found for place in range(start, stop)} == places
    assert all(before[1] < after[0] for before, after in pairwise(found))


BREAKERS: list[Callable[[PublishedState], None]] = [
    lambda state: setattr(state, "blocks", 7),
    lambda state: setattr(state, "digest", 7),
    lambda state: state.ghosts().update({5: state.records()[1]}),
    lambda state: state.records().pop(1),
    lambda state: next(iter(state.holdings())).blocks.pop(3),
    lambda state: next(iter(state.holdings())).counts.update({99: 2}),
]


@pytest.mark.parametrize("breaker", BREAKERS)
def test_check_notices(breaker: Callable[[PublishedState], None]) -> None:
    state, _, _ = run([stored([1, 2]), stored([3], 2)])
    breaker(state)
    with pytest.raises(IntegrityError):
        state.check()
