"""The published state against a naive model: what goes out is set-like, adds up, and comes again as a
snapshot.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.event_kit import Consumer, removed, stored

from kvtier.errors import IntegrityError
from kvtier.events import (
    AllBlocksCleared,
    BlockStored,
    EventEncoder,
    Mark,
    blocks_of,
    change_of,
    frame_batch,
    place_of,
)
from kvtier.events.publish.state import PublishedState, Record, Snapshot, runs
from kvtier.events.wire import batch_ends, decode_batch
from kvtier.events.wire_structs import OUTER

settings.register_profile("state", deadline=None)
settings.load_profile("state")
GPU = ("GPU", 0, "", "")
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
clears = st.just(AllBlocksCleared())
events = st.lists(st.one_of(stores, stores, removals, removals, clears), max_size=40)
wild_events = st.lists(st.one_of(stores, odd_stores, removals, clears), max_size=40)


class Model:
    """Counts of blocks, in ten lines."""

    def __init__(self, counting: str) -> None:
        self.counts: Counter[Any] = Counter()
        self.counting = counting

    def apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.counts.clear()
            return
        step = 1 if hasattr(event, "parent_block_hash") else -1
        for block in event.block_hashes:
            key = (place_of(event), block)
            most = 1 if self.counting == "set" else 10**9
            self.counts[key] = min(most, max(0, self.counts[key] + step))

    def held(self) -> set[Any]:
        return {key for key, count in self.counts.items() if count}


class Published:
    """A state that is cleared as a publisher does it: by another one in its place."""

    def __init__(self, counting: str = "count", encoding: str = "map") -> None:
        self.encoder = EventEncoder(encoding)
        self.counting = counting
        self.state = PublishedState(self.encoder, counting)

    def apply(self, event: Any, out: list[bytes]) -> None:
        if isinstance(event, AllBlocksCleared):
            self.state = PublishedState(self.encoder, self.counting, self.state.groups)
            out.append(self.encoder.event(event))
        else:
            state = self.state
            (state.store if hasattr(event, "parent_block_hash") else state.remove)(
                event, self.encoder.event(event), out
            )

    def snapshot(self) -> Snapshot:
        return Snapshot({0: self.state}, self.encoder, 3, Mark(9, self.state.blocks, self.state.digest))


def finish(snapshot: Snapshot) -> list[bytes]:
    """Return all events of a snapshot of one rank."""
    snapshot.advance(60.0)
    snapshot.check()
    assert {batch.rank for batch in snapshot.batches} == {0}
    payload = b"".join(
        (
            *batch_ends(0.0, sum(batch.number for batch in snapshot.batches), 0)[:1],
            *(batch.events for batch in snapshot.batches),
            b"\0",
        )
    )
    return list(map(bytes, OUTER.decode(payload).events))


def snapshot_of(state: PublishedState) -> list[bytes]:
    return finish(Snapshot({0: state}, state._encoder, 3, Mark(9, state.blocks, state.digest)))


def run(
    events: Iterable[Any], counting: str = "count", encoding: str = "map"
) -> tuple[PublishedState, Model, list[bytes]]:
    published, model, out = Published(counting, encoding), Model(counting), []
    for event in events:
        published.apply(event, out)
        model.apply(event)
    published.state.check()
    return published.state, model, out


def consume(events: list[bytes]) -> Consumer:
    consumer = Consumer()
    consumer.apply(frame_batch(0.0, events, 0))
    return consumer


@pytest.mark.parametrize("counting", ["count", "set"])
@given(wild_events)
def test_published_events_are_set_like_and_add_up(counting: str, events: list[Any]) -> None:
    state, model, out = run(events, counting)
    assert consume(out).held == model.held()
    change = change_of(decode_batch(frame_batch(0.0, out, 0)).events)
    assert (state.blocks, state.digest) == (change.blocks, change.digest)


@pytest.mark.parametrize("encoding", ["map", "array"])
@given(wild_events)
def test_a_snapshot_is_the_state(encoding: str, events: list[Any]) -> None:
    state, model, _ = run(events, encoding=encoding)
    sent = snapshot_of(state)
    consumer = consume(sent)
    assert consumer.held == model.held()
    assert (consumer.mark.epoch, consumer.mark.blocks, consumer.mark.digest) == (
        9,
        state.blocks,
        state.digest,
    )
    change = change_of(decode_batch(frame_batch(0.0, sent, 0)).events)
    assert change == (True, state.blocks, state.digest)


@given(events)
# Each hangs from the other.
@example([make_stored(36, 3, "GPU", None), removed([18]), make_stored(18, 1, "GPU", None)])
def test_a_snapshot_brings_parents_first(events: list[Any]) -> None:
    """Tree-building consumers drop orphans: a block that found its parent in the stream finds it in the
    snapshot.
    """
    state, model, out = run(events)
    linked = consume(snapshot_of(state)).linked
    assert (consume(out).linked & model.held()) - linked == set()


@given(wild_events, wild_events, st.integers(0, 10))
def test_a_snapshot_stays_as_it_was(before: list[Any], after: list[Any], steps: int) -> None:
    """The state goes on changing while the events of its snapshot are made, some before and some after each
    change.
    """
    published, model, out = Published(), Model("count"), list[bytes]()
    for event in before:
        published.apply(event, out)
        model.apply(event)
    snapshot = published.snapshot()
    for event in after:
        for _ in range(steps):
            next(snapshot._making, None)
        published.apply(event, [])
    published.state.check()
    consumer = consume(finish(snapshot))
    assert consumer.held == model.held()
    assert consume(out).linked - consumer.linked == set()
    published.state.check()
    later = consume(snapshot_of(published.state))
    for event in after:
        model.apply(event)
    assert later.held == model.held()


def test_partly_known_events_go_out_in_parts() -> None:
    _, _, out = run([stored([2, 4], None), stored([1, 2, 3, 4, 5], 9)])
    parts = decode_batch(frame_batch(0.0, out[1:], 0)).events
    whole = stored([1, 2, 3, 4, 5], 9)
    assert parts == [blocks_of(whole, 0, 1), blocks_of(whole, 2, 3), blocks_of(whole, 4, 5)]


def test_ancestors_that_are_gone_come_and_go() -> None:
    state, _, _ = run([stored([1, 2]), stored([3], 2), stored([4], 3), removed([1, 2, 3])])
    sent = decode_batch(frame_batch(0.0, snapshot_of(state), 0)).events
    assert sent == [AllBlocksCleared(), stored([1, 2]), stored([3], 2), stored([4], 3), removed([1, 2, 3])]
    assert state.ancestors == 2


def test_ancestors_leave_with_their_last_child() -> None:
    state, _, _ = run(
        [stored([1]), stored([2], 1), stored([3], 2), removed([1]), removed([2]), removed([3])]
    )
    assert (state.blocks, state.ancestors) == (0, 0)


def test_a_dead_tail_is_left_out_of_a_snapshot() -> None:
    state, _, _ = run([stored([1, 2, 3, 4]), removed([4, 3])])
    sent = decode_batch(frame_batch(0.0, snapshot_of(state), 0)).events
    assert sent == [AllBlocksCleared(), stored([1, 2])]


def test_the_batches_of_a_snapshot_are_not_tracked_by_the_collector() -> None:
    """It went through hundreds of batches at once, and held the interpreter for a millisecond."""
    state, _, _ = run([stored([1, 2]), stored([3], 2)])
    snapshot = Snapshot({0: state}, state._encoder, 3, Mark(9, state.blocks, state.digest))
    snapshot.advance(60.0)
    assert snapshot.is_made
    assert not any(map(gc.is_tracked, snapshot.batches))


def test_ancestors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.events.publish.state._LEAST_ANCESTORS", 5)
    state, _, _ = run(
        [event for n in range(1, 50) for event in (stored([n], n - 1 or None), removed([n - 1]))]
    )
    assert state.ancestors == 5


def test_records_that_ended_are_let_go() -> None:
    """Of the records that nothing uses any more, the log has only those that a running snapshot needs."""
    state = PublishedState(EventEncoder())
    for n in range(200):
        state.store(stored([n]), b"", [])
    snapshot = Snapshot({0: state}, state._encoder, 3, Mark(9, state.blocks, state.digest))
    for n in range(200, 5_200):
        if n == 3_000:
            assert records_in(state) == 400  # the snapshot's own, and those that are held
            snapshot.advance(60.0)
            assert snapshot.is_made
        state.store(stored([n]), b"", [])
        state.remove(removed([n - 200]), b"", [])
    assert (state.blocks, records_in(state)) == (200, 200)
    state.check()


def records_in(state: PublishedState) -> int:
    return sum(map(len, state._log.values()))


def test_a_block_that_came_back_is_removed_and_stored_again_in_a_snapshot() -> None:
    """Its child was born before it came back, so the snapshot needs the block before the child, too."""
    state, _, _ = run([stored([1]), stored([2], 1), removed([1]), stored([1], lora_name="other")])
    sent = decode_batch(frame_batch(0.0, snapshot_of(state), 0)).events
    back = stored([1], lora_name="other")
    assert sent == [AllBlocksCleared(), stored([1]), stored([2], 1), removed([1]), back]


def test_an_event_that_cannot_be_decoded_is_sent_whole() -> None:
    """A dead tail needs another encoding of the event; without one it is stored and removed again."""
    state = PublishedState(EventEncoder())
    data = b"\xc1"
    state.store(stored([1, 2]), data, [])
    state.remove(removed([2]), b"", [])
    state.begin_snapshot()
    *_, whole, removal = [event for event in state.snapshot_events() if event is not None]
    assert (whole, removal) == (data, EventEncoder().event(removed([2])))


def test_a_snapshot_that_fails_does_not_keep_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    state, _, _ = run([stored([1]), stored([2]), stored([3])])
    snapshot = Snapshot({0: state}, state._encoder, 3, Mark(9, state.blocks, state.digest))
    state.remove(removed([1]), b"", [])
    with monkeypatch.context() as patch:
        patch.setattr(PublishedState, "_dead_blocks", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            snapshot.advance(60.0)
    state.remove(removed([2]), b"", [])
    state.check()
    assert consume(snapshot_of(state)).held == {(GPU, 3)}
    assert records_in(state) == 1


def test_deaths_are_recorded_only_while_a_snapshot_is_made() -> None:
    state, _, _ = run([stored([1, 2, 3, 4])])
    record = record_of(state, 1)
    state.remove(removed([4]), b"", [])
    assert record.deaths is None
    snapshot = Snapshot({0: state}, state._encoder, 3, Mark(9, state.blocks, state.digest))
    state.remove(removed([3]), b"", [])
    assert list(record.deaths or ()) == [3]
    state.check()
    assert consume(finish(snapshot)).held == {(GPU, block) for block in (1, 2, 3)}
    assert record.deaths is None


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_long_log_is_walked_in_the_order_of_births(encoding: str) -> None:
    """Records in several segments, most of them gone, and changes between any two steps of a snapshot."""
    source, published = random.Random(3), Published(encoding=encoding)
    held: list[int] = []
    for n in range(1, 20_000):
        published.apply(stored([n], source.choice(held) if held else None), [])
        held.append(n)
        if len(held) > 300:
            gone = held.pop(source.randrange(300))
            published.apply(removed([gone]), [])
    expected = {(GPU, block) for block in held}
    snapshot = published.snapshot()
    for n in range(20_000, 21_000):
        next(snapshot._making, None)
        published.apply(stored([n], held[-1]), [])
        published.apply(removed([held.pop(source.randrange(len(held)))]), [])
        held.append(n)
    published.state.check()
    assert consume(finish(snapshot)).held == expected
    published.state.check()
    assert records_in(published.state) == published.state.blocks + published.state.ancestors


def test_chains_of_any_length_are_freed() -> None:
    """Records that referred to each other crashed the interpreter when a long chain of them was freed."""
    encoder = EventEncoder()
    state = PublishedState(encoder)
    for n in range(1, 100_000):
        state.store(stored([n], n - 1 or None), b"", [])
    for n in range(1, 100_000):
        state.remove(removed([n]), b"", [])
    assert (state.blocks, state.ancestors) == (0, 0)


@pytest.mark.parametrize("wrong", [None, ["a"], [1.5], [None], [1, "a"]])
def test_wrong_hashes_change_nothing(wrong: Any) -> None:
    state, _, _ = run([stored([1, 2])])
    for event in (stored([3]), removed([1])):
        bad = type(event)(
            **{f: getattr(event, f) for f in event.__struct_fields__} | {"block_hashes": wrong}
        )
        with pytest.raises(TypeError):
            apply_raw(state, bad)
    state.check()
    assert state.blocks == 2


def apply_raw(state: PublishedState, event: Any) -> None:
    (state.store if hasattr(event, "parent_block_hash") else state.remove)(event, b"", [])


@given(st.sets(st.integers(0, 30)))
def test_runs(places: set[int]) -> None:
    found = list(runs(sorted(places)))
    assert {place for start, stop in found for place in range(start, stop)} == places
    assert all(before[1] < after[0] for before, after in pairwise(found))


def record_of(state: PublishedState, block: int) -> Record:
    record = state.places()[0].get(block)
    assert record is not None
    return record


BREAKERS: list[Callable[[PublishedState], None]] = [
    lambda state: setattr(state, "blocks", 7),
    lambda state: setattr(state.places()[0], "total", 7),
    lambda state: setattr(record_of(state, 1), "held", 1),
    lambda state: setattr(record_of(state, 1), "children", 0),
    lambda state: setattr(record_of(state, 3), "parent", 0),
    lambda state: setattr(record_of(state, 3), "deaths", {}),
    lambda state: setattr(record_of(state, 3), "birth", 7),
    lambda state: state._ancestors.update({1: record_of(state, 1)}),
    lambda state: state.places()[0].add_all([5], record_of(state, 1)) and None,
    lambda state: state._log[0].pop(record_of(state, 3).birth) and None,
    lambda state: state.places()[0].counts.update({99: 2}),
]


@pytest.mark.parametrize("breaker", BREAKERS)
def test_check_notices(breaker: Callable[[PublishedState], None]) -> None:
    state, _, _ = run([stored([1, 2]), stored([3], 2)])
    breaker(state)
    with pytest.raises(IntegrityError):
        state.check()


def test_an_ancestor_behind_the_end_of_a_record_comes_before_its_child() -> None:
    """The walk took a record for dealt with as a whole once its held blocks were sent."""
    state, _, _ = run([stored([1, 2, 3]), stored([4], 3), removed([3])])
    sent = decode_batch(frame_batch(0.0, snapshot_of(state), 0)).events
    assert sent[0] == AllBlocksCleared()
    assert sent[-1] == removed([3])
    assert consume(snapshot_of(state)).linked == {(GPU, block) for block in (1, 2, 4)}


@pytest.mark.parametrize("as_bytes", [False, True])
def test_no_table_of_many_blocks_is_large(as_bytes: bool) -> None:
    """A dict stops all threads while it grows: 45 ms with 700,000 blocks in one."""
    source = random.Random(0)
    state = PublishedState(EventEncoder())
    parent: Any = None
    for _ in range(20_000):
        block: Any = source.randbytes(32) if as_bytes else source.getrandbits(64)
        state.store(stored([block], parent), b"", [])
        parent = block
    [placed] = state.places()
    assert sum(map(len, placed.tables)) == 20_000
    assert max(map(len, placed.tables)) < 20_000 // 50
    assert max(map(len, state._log.values())) <= 4096
    pieces = state.take_apart()
    assert sum(map(len, pieces)) == 2 * 20_000  # each block in a table, each record in the log


def announced(sent: list[bytes]) -> list[tuple[int | None, str | None]]:
    """Return the groups and kinds of the stores without blocks."""
    events = decode_batch(frame_batch(0.0, sent, 0)).events
    return [
        (event.group_idx, event.kv_cache_spec_kind)
        for event in events
        if isinstance(event, BlockStored) and not event.block_hashes
    ]


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_snapshot_announces_groups_without_blocks(encoding: str) -> None:
    """A consumer that joined while no state was held took a hybrid model for one of attention alone."""
    published, out = Published(encoding=encoding), list[bytes]()
    attention = stored([1, 2], kv_cache_spec_kind="full_attention")
    state = stored([2], 1, group_idx=1, kv_cache_spec_kind="mamba")
    for event in (attention, state, removed([2], group_idx=1)):
        published.apply(event, out)
    assert announced(finish(published.snapshot())) == [(1, "mamba")]
    published.apply(state, out)
    assert announced(finish(published.snapshot())) == [], "its block names the kind"


def test_a_store_without_blocks_is_published_if_its_kind_is_new() -> None:
    published, out = Published(), list[bytes]()
    for kind in (None, "mamba", "mamba", "full_attention"):
        published.apply(stored([], None, group_idx=1, kv_cache_spec_kind=kind), out)
    assert announced(out) == [(1, "mamba"), (1, "full_attention")]
    published.apply(AllBlocksCleared(), out)
    assert announced(finish(published.snapshot())) == [(1, "full_attention")], "a clear forgets blocks only"


def test_only_some_groups_are_announced() -> None:
    published, out = Published(), list[bytes]()
    for group in range(1000):
        published.apply(stored([], None, group_idx=group, kv_cache_spec_kind="mamba"), out)
    assert len(published.state.groups) == len(out) < 100
