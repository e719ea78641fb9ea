"""The published state against a naive model: what goes out is set-like, adds up, and comes again as a
snapshot.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.event_kit import Consumer, removed, stored

from kvtier.errors import IntegrityError
from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    EventBatch,
    EventEncoder,
    Mark,
    blocks_of,
    change_of,
    frame_batch,
    place_of,
)
from kvtier.events.config import KVEventsConfig
from kvtier.events.publish.outbox import Overflow
from kvtier.events.publish.sender import Sender
from kvtier.events.publish.snapshot import Snapshot
from kvtier.events.publish.state import SHARDS, PublishedState, Record, runs
from kvtier.events.wire import U64, batch_ends, decode_batch
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


DRAFT = Sender(None, KVEventsConfig(), 0, None).draft  # type: ignore[arg-type]
"""As a publisher brings events into the form in which they leave."""


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
            self.state = PublishedState(self.encoder, self.counting)
            out.append(self.encoder.event(event))
        else:
            state = self.state
            (state.store if hasattr(event, "parent_block_hash") else state.remove)(
                event, self.encoder.event(event), out
            )

    def snapshot(self, number: int = 1) -> Snapshot:
        return Snapshot(
            {0: self.state}, self.encoder, 3, Mark(9, self.state.blocks, self.state.digest), number
        )


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
    return finish(
        Snapshot({0: state}, state._encoder, 3, Mark(9, state.blocks, state.digest), next(numbers))
    )


numbers = count(2)


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
def test_what_goes_out_is_set_like_and_adds_up(counting: str, events: list[Any]) -> None:
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
    published, model = Published(), Model("count")
    for event in before:
        published.apply(event, [])
        model.apply(event)
    snapshot = published.snapshot()
    for event in after:
        for _ in range(steps):
            next(snapshot._making, None)
        published.apply(event, [])
    assert consume(finish(snapshot)).held == model.held()
    published.state.check()
    later = consume(snapshot_of(published.state))
    for event in after:
        model.apply(event)
    assert later.held == model.held()


@pytest.mark.parametrize("counting", ["count", "set"])
@given(events, st.lists(events, max_size=4))
def test_an_overflow_does_what_its_batches_would(
    counting: str, before: list[Any], batches: list[list[Any]]
) -> None:
    state, model, _ = run(before, counting)
    overflow = Overflow(counting, DRAFT)
    for some in batches:
        overflow.add(ranked(some))
        for event in some:
            model.apply(event)
    overflow.check()
    if overflow.cleared:
        state = PublishedState(EventEncoder(), counting)
    overflow.apply(0, state)
    state.check()
    assert overflow.batches == len(batches)
    assert consume(snapshot_of(state)).held == model.held()
    last = [(key, count) for key, count in model.counts.items() if count]
    assert [(key, counts_of(state, key)) for key, _ in last] == last


def counts_of(state: PublishedState, key: tuple[Any, int]) -> int:
    (medium, group, ownership, locality), block = key
    like = removed([block], medium, group_idx=group, ownership=ownership or None, locality=locality or None)
    return state.count_of(like, block)


def ranked(events: list[Any], rank: int = 0) -> EventBatch:
    return EventBatch(1.0, events, rank)


def test_an_overflow_is_of_ranks() -> None:
    overflow = Overflow("count", DRAFT)
    for events, rank in (([stored([1, 2])], 0), ([stored([1])], 1), ([AllBlocksCleared(), stored([3])], 0)):
        overflow.add(ranked(events, rank))
    assert (overflow.ranks(), overflow.cleared) == ({0, 1}, {0})
    states = [PublishedState(EventEncoder()) for _ in range(2)]
    for rank, state in enumerate(states):
        overflow.apply(rank, state)
    assert [consume(snapshot_of(state)).held for state in states] == [{(GPU, 3)}, {(GPU, 1)}]


def test_an_overflow_converts_hashes() -> None:
    state = PublishedState(EventEncoder())
    overflow = Overflow("count", DRAFT)
    overflow.add(ranked([stored([b"\xff" * 8, b"\x01" * 8])]))
    overflow.apply(0, state)
    assert consume(snapshot_of(state)).held == {(GPU, U64), (GPU, 0x0101010101010101)}


def test_an_overflow_survives_what_it_cannot_read() -> None:
    state = PublishedState(EventEncoder())
    overflow = Overflow("count", DRAFT)
    junk: list[Any] = [object(), stored([2], lora_name=object()), BlockRemoved(7, None)]  # type: ignore
    overflow.add(ranked([stored([1]), *junk]))
    overflow.add(ranked([stored([1])], rank=[]))  # type: ignore[arg-type]
    overflow.apply(0, state)
    assert (state.blocks, overflow.unreadable) == (0, 2)
    state.check()


@pytest.mark.parametrize("wrong", ["a", None, 1.5])
def test_an_overflow_survives_what_is_no_hash(wrong: Any) -> None:
    """It ended the turn, and with it the whole overflow, once hashes were converted."""
    state = PublishedState(EventEncoder())
    overflow = Overflow("count", DRAFT)
    for block in (1, wrong):
        overflow.add(ranked([stored([block], token_ids=[], block_size=0)]))
    overflow.apply(0, state)
    assert (state.blocks, overflow.unreadable) == (1, 1)
    state.check()


def test_partly_known_events_go_out_in_parts() -> None:
    _, _, out = run([stored([2, 4], None), stored([1, 2, 3, 4, 5], 9)])
    parts = decode_batch(frame_batch(0.0, out[1:], 0)).events
    whole = stored([1, 2, 3, 4, 5], 9)
    assert parts == [blocks_of(whole, 0, 1), blocks_of(whole, 2, 3), blocks_of(whole, 4, 5)]


def test_ancestors_that_are_gone_come_and_go() -> None:
    state, _, _ = run([stored([1, 2]), stored([3], 2), stored([4], 3), removed([1, 2, 3])])
    sent = decode_batch(frame_batch(0.0, snapshot_of(state), 0)).events
    assert sent == [AllBlocksCleared(), stored([1, 2]), stored([3], 2), stored([4], 3), removed([1, 2, 3])]
    assert state.ghost_count == 2


def test_ancestors_leave_with_their_last_child() -> None:
    state, _, _ = run(
        [stored([1]), stored([2], 1), stored([3], 2), removed([1]), removed([2]), removed([3])]
    )
    assert (state.blocks, state.ghost_count) == (0, 0)


def test_a_dead_tail_is_left_out_of_a_snapshot() -> None:
    state, _, _ = run([stored([1, 2, 3, 4]), removed([4, 3])])
    sent = decode_batch(frame_batch(0.0, snapshot_of(state), 0)).events
    assert sent == [AllBlocksCleared(), stored([1, 2])]


def test_what_a_snapshot_keeps_is_no_work_for_the_collector() -> None:
    """It went through hundreds of batches at once, and held the interpreter for a millisecond."""
    state, _, _ = run([stored([1, 2]), stored([3], 2)])
    snapshot = Snapshot({0: state}, state._encoder, 3, Mark(9, state.blocks, state.digest), next(numbers))
    snapshot.advance(60.0)
    assert snapshot.is_made
    assert not any(map(gc.is_tracked, snapshot.batches))


def test_ghosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.events.publish.state._LEAST_GHOSTS", 5)
    state, _, _ = run(
        [event for n in range(1, 50) for event in (stored([n], n - 1 or None), removed([n - 1]))]
    )
    assert state.ghost_count == 5


def test_records_that_ended_are_let_go() -> None:
    """Those that nothing uses any more are few beside those that are, also after a snapshot during which
    none goes.
    """
    state = PublishedState(EventEncoder())
    for n in range(200):
        state.store(stored([n]), b"", [])
    snapshot = Snapshot({0: state}, state._encoder, 3, Mark(9, state.blocks, state.digest))
    for n in range(200, 5_200):
        if n == 3_000:
            snapshot.advance(60.0)
            assert snapshot.is_made
        state.store(stored([n]), b"", [])
        state.remove(removed([n - 200]), b"", [])
    assert (state.blocks, len(state._records) < 600) == (200, True)
    state.check()


def test_chains_of_any_length_are_freed() -> None:
    """Records that referred to each other crashed the interpreter when a long chain of them was freed."""
    encoder = EventEncoder()
    state = PublishedState(encoder)
    for n in range(1, 100_000):
        state.store(stored([n], n - 1 or None), b"", [])
    for n in range(1, 100_000):
        state.remove(removed([n]), b"", [])
    assert (state.blocks, state.ghost_count) == (0, 0)


@pytest.mark.parametrize("wrong", [None, ["a"], [1.5], [None], [1, "a"]])
def test_what_is_no_hash_changes_nothing(wrong: Any) -> None:
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


def required(record: Record | None) -> Record:
    assert record is not None
    return record


BREAKERS: list[Callable[[PublishedState], None]] = [
    lambda state: setattr(state, "blocks", 7),
    lambda state: setattr(state.holdings()[0], "total", 7),
    lambda state: state.ghosts.add_all([5], required(state.holdings()[0].blocks.get(1))),
    lambda state: setattr(state.holdings()[0].blocks.get(1), "uses", 1),
    lambda state: state.holdings()[0].blocks.pop(3),
    lambda state: state._children[hash(2) % SHARDS].pop(2),
    lambda state: state._records.pop(),
    lambda state: state.holdings()[0].counts.update({99: 2}),
]


@pytest.mark.parametrize("breaker", BREAKERS)
def test_check_notices(breaker: Callable[[PublishedState], None]) -> None:
    state, _, _ = run([stored([1, 2]), stored([3], 2)])
    breaker(state)
    with pytest.raises(IntegrityError):
        state.check()


def test_a_ghost_behind_the_end_of_a_record_comes_before_its_child() -> None:
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
    tables = [piece for piece in state.take_apart() if isinstance(piece, dict)]
    assert sum(map(len, tables)) == 20_000 + 19_999
    assert max(map(len, tables)) < 20_000 // 50
