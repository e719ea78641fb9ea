"""What is written in C does what its Python form does, byte for byte and block for block."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections import deque
from itertools import chain, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.event_kit import batch, removed, stored

from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventEncoder,
    KVEventBatch,
    KVEventsConfig,
    TierCleared,
    decode_batch,
)
from kvtier.events.publish.fold import Fold
from kvtier.events.publish.hot import PythonBlocks, PythonExpress, PythonMessage, python_read_stored, python_wake
from kvtier.events.publish.sender import Sender
from kvtier.events.publish.snapshot import Snapshot
from kvtier.events.publish.state import PublishedState
from kvtier.events.wire import U64

_events = pytest.importorskip("kvtier._events", reason="kvtier._events was not compiled here")

settings.register_profile("hot", deadline=None)
settings.load_profile("hot")
edges = [0, 1, 127, 128, 255, 256, 65535, 65536, 2**30 - 1, 2**30, 2**32 - 1, 2**32, 2**60 - 1, 2**60, 2**63, 2**64 - 1]
uints = st.one_of(st.sampled_from(edges), st.integers(0, 2**64 - 1))
wild = st.one_of(
    uints, st.integers(-(2**70), 2**70), st.binary(max_size=40), st.none(), st.text(max_size=3), st.booleans()
)
texts = st.one_of(st.none(), st.text(max_size=40), st.sampled_from(["GPU", "x" * 300, "y" * 70_000, "ключ"]))
numbers = st.one_of(st.none(), uints)


# -- the express lane: how events are written ------------------------------------------------------------------------------


def events(hashes: Any, tokens: Any, parents: Any, extra: Any) -> Any:
    return st.builds(
        BlockStored,
        block_hashes=st.one_of(st.lists(hashes, max_size=20), st.lists(hashes, min_size=16, max_size=17)),
        parent_block_hash=parents,
        token_ids=st.lists(tokens, max_size=40),
        block_size=uints,
        lora_id=numbers,
        medium=texts,
        lora_name=texts,
        extra_keys=extra,
        group_idx=numbers,
        kv_cache_spec_kind=texts,
        kv_cache_spec_sliding_window=numbers,
        locality=texts,
        ownership=texts,
        session_id=texts,
    )


def lane(*places: Any) -> Any:
    """Return a lane to an empty state that knows the places of these events."""
    state = PublishedState(EventEncoder(), table=_events.Blocks)
    for event in places:
        state.count_of(event, 0)
    return _events.Express(state)


def write(event: Any) -> bytes | None:
    """Return an event's bytes from the express lane, whether it did the rest too or not; `None` if it left the event alone."""
    out = _events.Message()
    rest = lane(event).take([event], out)
    return None if rest is None else b"".join([out, *(data for _, _, data in rest)])


@given(events(uints, uints, numbers, st.none()))
def test_plain_events_are_written_alike(event: BlockStored) -> None:
    assert write(event) == (msgspec.msgpack.encode(event) if event.block_hashes else b"")


@given(events(wild, wild, wild, st.one_of(st.none(), st.just([("a", 1)]), st.just([]))))
def test_other_events_are_written_alike_or_left(event: BlockStored) -> None:
    written = write(event)
    assert written is None or written == (msgspec.msgpack.encode(event) if event.block_hashes else b"")


@given(st.lists(uints, min_size=1, max_size=20), texts, numbers, texts, texts)
def test_removals_are_written_alike(hashes: list[int], medium: Any, group: Any, locality: Any, ownership: Any) -> None:
    event = BlockRemoved(hashes, medium, group, locality, ownership)
    assert write(event) == msgspec.msgpack.encode(event)


@pytest.mark.parametrize("wrong", [b"x" * 8, -1, 2**64, True, "a", None, 1.5])
def test_hashes_that_are_no_u64_are_left(wrong: Any) -> None:
    assert write(BlockRemoved([1, wrong], None)) is None
    assert write(BlockStored([wrong], None, [], 0, None, None, None)) is None
    if wrong is not None:
        assert write(BlockStored([1], wrong, [], 0, None, None, None)) is None


class Other:
    """Classes that share a name with ours and nothing else, or have one field more."""

    class BlockStored(msgspec.Struct, tag=True):
        block_hashes: list[int]

    class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
        block_hashes: list[int]
        medium: str | None
        group_idx: int | None = None
        locality: str | None = None
        tenant: str | None = None


@pytest.mark.parametrize(
    "other",
    [object(), None, Other.BlockStored([1]), Other.BlockRemoved([1], None, tenant="x"), type("BlockStored", (), {})()],
)
def test_other_classes_are_left(other: Any) -> None:
    ours = removed([1])
    for _ in range(2):
        assert lane(ours).take([ours, other], _events.Message()) is None
        assert write(ours) == msgspec.msgpack.encode(ours)


def test_an_engines_own_class_is_as_good_as_ours() -> None:
    own = type("BlockRemoved", (BlockRemoved,), {}, tag="BlockRemoved")
    for event in (own([1, 2], "CPU", 3), BlockRemoved([1, 2], "CPU", 3), own([1, 2], "CPU", 3)):
        assert write(event) == msgspec.msgpack.encode(event)
        (kind, joined, data), *more = lane(event).take([event, event], _events.Message())
        assert (kind, joined, more) == ("BlockRemoved", type(event)([1, 2, 1, 2], "CPU", 3), [])
        assert data == msgspec.msgpack.encode(joined)


def test_long_lists_are_written_alike() -> None:
    event = BlockStored(list(range(70_000)), None, list(range(1_200_000)), 16, None, "GPU", None)
    assert write(event) == msgspec.msgpack.encode(event)


published = st.one_of(uints, st.integers(-(2**63), -1), st.binary(max_size=40))


@given(st.lists(st.one_of(uints, uints, published), max_size=20))
def test_the_hashes_of_stores_are_read_alike(hashes: list[Any]) -> None:
    data = msgspec.msgpack.encode(stored(hashes))
    assert python_read_stored(data) == hashes
    is_plain = all(type(block) is int and block >= 0 for block in hashes)
    assert _events.read_stored(data) == (hashes if is_plain else None)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65535, 65536])
def test_many_hashes_are_read_alike(count: int) -> None:
    event = stored([edges[n % len(edges)] for n in range(count)])
    data = msgspec.msgpack.encode(event)
    assert python_read_stored(data) == event.block_hashes
    assert _events.read_stored(data) == (event.block_hashes if count < 65536 else None)
    whole = len(msgspec.msgpack.encode(event.block_hashes)) + 31
    for stop in range(max(0, whole - 40), whole):
        assert _events.read_stored(data[:stop]) is None or count == 0


@pytest.mark.parametrize("other", [b"", b"\x80", b"x" * 100, "a" * 100, EventEncoder("array").event(stored([1, 2]))])
def test_what_is_no_map_of_a_store_is_not_read(other: Any) -> None:
    assert _events.read_stored(other) is None


# -- the express lane: what it does ------------------------------------------------------------------------------------------


class Wire:
    """A socket that keeps what it is given."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send(self, frame: Any, flags: int = 0) -> None:
        self.frames.append(bytes(frame))


def senders(**settings: Any) -> list[tuple[Sender, Wire]]:
    """Return two that are the same but that the first does in C what can be done there, and the second nothing."""
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", heartbeat_interval=None, **settings)
    made = [(Sender(wire, config, 0, None), wire) for wire in (Wire(), Wire())]  # type: ignore[arg-type]
    tables = (_events.Blocks if config.hash_format == "u64" else PythonBlocks, PythonBlocks)
    ways = (_events.Express, _events.Message), (PythonExpress, PythonMessage)
    for (sender, _), table, (lane_to, make_message) in zip(made, tables, ways, strict=True):
        sender.state = PublishedState(sender.encoder, config.counting, table)
        sender._short = lane_to(sender.state)
        sender._make_message, sender._waiting = make_message, make_message()
    return made


def everything(sender: Sender) -> Any:
    """Return what a sender knows, in an order that does not matter to it left out."""
    state = sender.state
    records = [
        msgspec.structs.astuple(msgspec.structs.replace(record, data=bytes(record.data)))
        for record in state.records().values()
    ]
    ghosts = {block: record.number for block, record in state.ghosts().items()}
    counts = {holding.place: holding.counts for holding in state.holdings()}
    return records, ghosts, counts, state._free, state.blocks, state.digest, sender.counters, sender.ring.bytes


tree = {block: block // 2 or None for block in range(1, 64)}


def store(last: int, length: int, medium: str, group: int | None) -> BlockStored:
    """Return a store of blocks that hang from each other, as those of a prompt do."""
    blocks = [last]
    while len(blocks) < length and (parent := tree[blocks[0]]) is not None:
        blocks.insert(0, parent)
    return stored(blocks, tree[blocks[0]], medium=medium, group_idx=group)


media, groups = st.sampled_from(["GPU", "CPU"]), st.sampled_from([None, None, 1])
stores = st.builds(store, st.integers(1, 63), st.integers(1, 6), media, groups)
removals = st.builds(
    lambda hashes, medium, group: removed(hashes, medium, group_idx=group),
    st.lists(st.integers(1, 63), max_size=4),
    media,
    groups,
)
ends = st.builds(
    lambda last, medium: [removed([last >> step], medium) for step in range(last.bit_length())],
    st.integers(1, 63),
    media,
)
"""A prompt that is removed from its end, block by block."""
odd = st.one_of(
    st.sampled_from([AllBlocksCleared(), TierCleared("CPU"), stored([b"x" * 32]), removed([b"y" * 32])]),
    st.sampled_from([stored([70], lora_name=object()), removed([1, "a"]), object(), stored([71, 71])]),
)
each = st.one_of(stores, stores, stores, removals, removals, odd).map(lambda event: [event])
batches = st.lists(st.lists(st.one_of(each, each, ends), max_size=5).map(lambda some: [*chain(*some)]), max_size=12)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"counting": "set"},
        {"max_blocks_per_event": 2},
        {"hash_format": "as_is"},
        {"buffer_steps": 1},
        {"buffer_bytes": 1},  # what is sent is forgotten before
    ],
)
@given(st.data())
def test_batches_go_the_same_way_with_and_without_the_lane(settings: dict[str, Any], data: st.DataObject) -> None:
    (ours, wire), (theirs, other_wire) = senders(**settings)
    for events in data.draw(batches):
        more = data.draw(st.booleans())
        for sender in (ours, theirs):
            sender.send(batch(*events), more)
            sender.check()
        assert everything(ours) == everything(theirs)
    assert wire.frames == other_wire.frames


def ranked(*events: Any, ts: float = 1.0, rank: int = 0) -> KVEventBatch:
    """Return a batch as `publish` hands it over."""
    return KVEventBatch(ts=ts, events=list(events), data_parallel_rank=rank)


ranks = st.sampled_from([0, 0, 0, 0, None, 1, True, np.int64(1), 1.0, 2**64, -1])
times = st.sampled_from([1.5, 1.5, 1.5, 2.5, 3])


@pytest.mark.parametrize("settings", [{}, {"counting": "set"}, {"max_blocks_per_event": 2}, {"hash_format": "as_is"}])
@given(st.data())
def test_batches_that_wait_go_the_same_way_together(settings: dict[str, Any], data: st.DataObject) -> None:
    (ours, wire), (theirs, other_wire) = senders(**settings)
    waiting = [
        KVEventBatch(data.draw(times), events, data_parallel_rank=data.draw(ranks)) for events in data.draw(batches)
    ]
    queue = deque(waiting)
    while queue:
        before = len(queue)
        sent = ours.send_joined(queue, data.draw(st.integers(1, len(queue))))
        assert len(queue) == before - sent
        if not sent:
            ours.send(queue.popleft(), more=True)
        ours.check()
    for each in waiting:
        theirs.send(each, more=True)
    for sender in (ours, theirs):
        sender.flush()
    assert everything(ours) == everything(theirs)
    assert wire.frames == other_wire.frames


def test_a_message_takes_so_many_batches_and_no_more() -> None:
    (sender, wire), _ = senders()
    sender.send(batch(stored([1])))
    small = deque(ranked(stored([block])) for block in range(2, 102))
    assert [sender.send_joined(small, len(small)) for _ in range(4)] == [32, 32, 32, 4]
    sender.flush()
    assert (not small, len(wire.frames) // 3, sender.counters["joined"]) == (True, 5, 96)
    tokens = list(range(10_000, 30_000))
    large = deque(ranked(stored([block], token_ids=tokens)) for block in range(200, 210))  # 60 kB each, of 131
    assert [sender.send_joined(large, len(large)) for _ in range(4)] == [3, 3, 3, 1]
    sender.check()


@pytest.mark.parametrize("rank", [2**64, object(), [1], "one", 1.0])
def test_a_rank_that_cannot_be_encoded_costs_its_batch_and_no_other(rank: Any) -> None:
    for sender, wire in senders():
        sender.send(ranked(stored([1])), more=True)
        sender.send(ranked(stored([2]), rank=rank), more=True)
        sender.send(ranked(stored([3])), more=True)
        sender.flush()
        sender.check()
        assert (sender.counters["unencodable"], sender.state.blocks, len(wire.frames)) == (1, 2, 3)


def test_a_rank_is_sent_as_the_int_that_it_is() -> None:
    for sender, wire in senders():
        for number, rank in enumerate([1, True, np.int64(1), 1, False, 0], start=1):
            sender.send(ranked(stored([number]), rank=rank), more=True)
        sender.flush()
        assert [msgspec.msgpack.decode(payload)[2] for payload in wire.frames[2::3]] == [1, 0]
        assert all(type(decode_batch(payload).data_parallel_rank) is int for payload in wire.frames[2::3])


def test_what_a_batch_did_that_failed_halfway_is_sent() -> None:
    """Else the state would hold what nobody was told."""
    (sender, wire), _ = senders()
    sender.send(ranked(stored([1])))
    assert sender._short.take([stored([2])], sender._waiting) == []
    sender.flush()
    sender.check()
    assert (len(wire.frames), sender.ring.batches, sender.counters["joined"]) == (6, 2, 0)
    assert decode_batch(wire.frames[-1]).events[0].block_hashes == [2]


def test_what_is_no_batch_stays_in_the_queue() -> None:
    express, out = lane(stored([1])), _events.Message()
    fold, task = Fold("count"), object()
    for item in (fold, task, ranked(stored([2]), rank=1), ranked(AllBlocksCleared())):
        queue = deque([ranked(stored([1])), item])
        express.take([removed([1])], out)
        assert express.join(queue, 2, 1000, 0, out) is None
        assert list(queue) == [item]
        assert express.join(queue, 1, 1000, "a rank", out) is None
    assert (out.batches, out.events) == (4, 7)


def test_a_batch_that_is_begun_is_not_lost() -> None:
    express, out = lane(stored([1])), _events.Message()
    plain, begun, known = ([stored([1])], [stored([2]), stored([2, 3])], [stored([])])
    queue = deque(ranked(*events, ts=ts) for ts, events in ((1.0, plain), (2.0, begun), (3.0, known)))
    ts, before, left = express.join(queue, 3, 1000, 0, out)
    assert (ts, before, [event for _, event, _ in left]) == (2.0, 1, [begun[1]])
    assert (out.batches, out.ts, out.events, len(queue)) == (1, 1.0, 2, 1)
    assert express.join(queue, 1, 1000, 0, out) == (3.0, 2, [])
    with pytest.raises(IndexError):
        express.join(queue, 1, 1000, 0, out)


def test_what_is_plain_is_done_and_nothing_is_left() -> None:
    express, out = lane(stored([1])), _events.Message()
    steps = [
        [stored([1, 2]), stored([3], 2), stored([4, 5], 3)],
        [stored([6], 5), *(removed([n]) for n in (6, 5, 4)), removed([3, 2])],  # parents, until the one before is gone
        [removed([1]), removed([], "GPU"), stored([]), stored([1, 2])],
    ]
    for events in steps:
        assert express.take(events, out) == []
    out.seal(b"\x97", b"")
    sent = [event["block_hashes"] for event in msgspec.msgpack.decode(out)]
    assert out.events == 7
    assert sent == [[1, 2], [3], [4, 5], [6], [6, 5, 4, 3, 2], [1], [1, 2]]


@pytest.mark.parametrize(
    "unusual",
    [
        [stored([9, 1])],  # held
        [stored([9, 9])],
        [removed([9])],  # not held
        [removed([2, 2])],
        [removed([1, 2])],  # 2 has a child
        [removed([4, 3])],  # counted
        [stored([9], medium="DISK")],
    ],
)
def test_what_is_unusual_is_left_as_it_is(unusual: list[Any]) -> None:
    state, out = PublishedState(EventEncoder(), table=_events.Blocks), _events.Message()
    out.append(b"before")
    express = _events.Express(state)
    for event in (stored([1, 2]), stored([3, 4], 2), stored([4])):
        state.store(event, msgspec.msgpack.encode(event), [])
    before = state.blocks, state.digest, dict(state.records())
    rest = express.take([*unusual, stored([8])], out)
    if unusual[0].medium == "DISK":
        assert rest is None
    else:
        assert [(event, data) for _, event, data in rest] == [
            (event, msgspec.msgpack.encode(event)) for event in (*unusual, stored([8]))
        ]
    assert (bytes(out), out.events) == (b"before", 1)
    assert (state.blocks, state.digest, dict(state.records())) == before
    state.check()


def test_the_lane_keeps_no_reference_that_is_not_its_own() -> None:
    """Nor do records: the hashes that an engine made are its own once the batch is published."""
    medium, hashes = "".join(["G", "PU"]), [2**40 + n for n in range(8)]
    events = [
        [stored(hashes[:4], medium=medium), stored(hashes[4:], hashes[3], medium=medium)],
        [stored(hashes[2:5], medium=medium)],  # left to Python
        [removed([block], medium) for block in reversed(hashes)],
        [removed([block, -1], medium) for block in hashes],  # not plain
    ]
    sender = senders()[0][0]
    sender.send(batch(stored([1], medium="".join(["G", "PU"]))))
    watched = [medium, *hashes, *chain(*events), *(event.block_hashes for event in chain(*events))]

    def count() -> list[int]:
        return [sys.getrefcount(each) for each in watched]

    before = count()
    sender.send(batch(*events[0]))
    held = count()
    assert held[1:4] == before[1:4]  # a hash that is a parent's is in its child's record
    for _ in range(3):
        for some in (events[2], events[3], events[1], events[2], events[0], events[1], events[2]):
            sender.send(batch(*some))
    sender.send(batch(AllBlocksCleared()))
    sender.ring.restart(sender.next_seq)
    assert (sender.state.blocks, count()) == (0, before)


def test_the_lane_does_not_leak() -> None:
    express = lane(stored([1]))
    round_trip = [[stored(range(n, n + 50))] for n in range(1, 2000, 50)]
    round_trip += [[removed([n]) for n in range(start, start + 50)] for start in range(1, 2000, 50)]
    odd = [[stored([2**64])], [removed([1]), object()], [stored([3, 3])]]

    def run(times: int) -> int:
        for _ in range(times):
            out = _events.Message()
            for events in (*round_trip, *odd):
                express.take(events, out)
            out.seal(b"", b"")
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = run(2)
        assert run(20) < first + 20_000
    finally:
        tracemalloc.stop()


# -- messages ----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=20), max_size=8), st.binary(max_size=20), st.binary(max_size=3))
@example([b"x" * 30_000] * 3, b"head", b"tail")  # large
def test_messages_are_put_together_alike(events: list[bytes], head: bytes, tail: bytes) -> None:
    for message in (_events.Message(), PythonMessage()):
        for count, event in enumerate(events):
            assert (message.events, len(message)) == (count, len(b"".join(events[:count])))
            message.append(event)
        message.seal(head, tail)
        assert (message.events, len(message)) == (len(events), len(b"".join([head, *events, tail])))
        assert bytes(message.payload()) == b"".join([head, *events, tail])
        message.forget()


def test_a_sealed_message_takes_nothing_more() -> None:
    message = _events.Message()
    with pytest.raises(ValueError, match="not sealed"):
        message.forget()
    with memoryview(message), pytest.raises(ValueError, match="reads"):
        message.append(b"abc")
    message.seal(b"head", b"tail")
    for call in (lambda: message.append(b"abc"), lambda: message.seal(b"", b""), lambda: lane().take([], message)):
        with pytest.raises(ValueError, match="is sealed"):
            call()
    assert bytes(message) == b"headtail"


@given(st.data())
def test_what_records_and_snapshots_have_outlives_the_ring(data: st.DataObject) -> None:
    both = [sender for sender, _ in senders(buffer_steps=1)]
    snapshots = []
    for events in data.draw(batches):
        for sender in both:
            sender.send(batch(*events), more=True)
        if data.draw(st.booleans()):
            for sender in both:
                sender.flush()
            snapshots.append([Snapshot(sender.state, sender.encoder, 0, epoch=0) for sender in both])
    for ours, theirs in snapshots:
        assert list(map(bytes, ours)) == list(theirs)
    assert everything(both[0]) == everything(both[1])


def publish_and_remove(batches: int, kept_of: int) -> Sender:
    """Send stores of 5 kB that travel together, and remove all but one of so many again."""
    sender, wire = senders(buffer_steps=64)[0]
    for number in range(1, batches + 1):
        wire.frames.clear()
        sender.send(batch(stored(range(64 * number, 64 * number + 64), token_ids=[70_000] * 900)), more=True)
        if number % kept_of:
            sender.send(batch(removed(range(64 * number, 64 * number + 64))), more=True)
    sender.flush()
    sender.check()
    return sender


def test_a_forgotten_message_is_not_kept_whole() -> None:
    sender = publish_and_remove(1_000, kept_of=20)
    pieces = [record.data for record in sender.state.records().values()]
    messages = {id(piece.message): piece.message for piece in pieces if not isinstance(piece, bytes)}
    in_use, held = sum(map(len, pieces)), sum(map(sys.getsizeof, messages.values()))
    assert len(pieces) == 50
    assert in_use < held < 2 * in_use + sender.ring.bytes + 4096 * len(messages)
    assert held < 800_000  # of 5 MB that were sent


def test_what_is_in_use_is_what_takes_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    publish_and_remove(500, kept_of=20)
    before = resident()
    sender = publish_and_remove(20_000, kept_of=20)
    assert resident() - before < 24 << 20  # of 100 MB; 5 MB are in use, and what the ring keeps
    assert len(sender.state.records()) == 1_000


def test_what_is_read_stays_where_it_is() -> None:
    state, message = PublishedState(EventEncoder(), table=_events.Blocks), _events.Message()
    events = [stored([block], token_ids=[block] * 9_000) for block in range(1, 11)]
    state.count_of(events[0], 0)
    assert _events.Express(state).take(events, message) == []
    message.seal(b"head", b"tail")
    pieces = [record.data for record in state.records().values()]
    assert list(map(bytes, pieces)) == list(map(msgspec.msgpack.encode, events))
    size = sys.getsizeof(message)
    with memoryview(pieces[4]) as view:
        state.clear()
        del pieces[:4], pieces[1:]
        message.forget()
        assert (sys.getsizeof(message), bytes(view)) == (size, msgspec.msgpack.encode(events[4]))
    assert sys.getsizeof(message) < size / 5
    assert bytes(pieces[0]) == msgspec.msgpack.encode(events[4])


def test_the_hashes_of_a_very_long_store_are_read_from_its_piece() -> None:
    sender = senders()[0][0]
    sender.send(batch(stored([1])))
    sender.send(batch(stored(range(2, 70_000))))
    sender.check()
    assert list(sender.state.records().values())[1].hashes() == list(range(2, 70_000))


# -- blocks --------------------------------------------------------------------------------------------------------------------

crowded = [n * pow(0x9E3779B97F4A7C15, -1, 2**64) & U64 for n in range(40)]
"""Hashes whose home in a small table is the same place: its first."""
some = st.sampled_from([*range(12), *crowded, U64])
hash_lists = st.lists(some, max_size=6)
steps = st.one_of(
    st.tuples(st.just("hold"), hash_lists.map(tuple), st.integers(1, 3)),
    st.tuples(st.just("drop"), hash_lists, st.lists(some, max_size=2)),
    st.tuples(st.just("put"), some, st.integers(1, 3)),
    st.tuples(st.just("count"), hash_lists, st.integers(1, 3)),
    st.tuples(st.sampled_from(["get", "pop"]), some),
)


@given(st.lists(steps, max_size=60))
@example([("hold", tuple(crowded), 1), ("drop", crowded[:20], []), ("count", crowded, 1)])
@example([("hold", (1, 2), 1), ("hold", (3, 2), 2), ("hold", (4, 4), 2), ("count", [1, 2, 3, 4], 1)])
def test_blocks_are_held_alike(steps: list[Any]) -> None:
    ours, theirs = _events.Blocks(), PythonBlocks()
    for name, *arguments in steps:
        if name == "drop":
            children = _events.Blocks(), PythonBlocks()
            for table, block in product(children, arguments.pop()):
                table.put(block, 1)
            assert ours.drop(*arguments, children[0]) == theirs.drop(*arguments, children[1])
        else:
            assert getattr(ours, name)(*arguments) == getattr(theirs, name)(*arguments)
        assert len(ours) == len(theirs)
    before = [theirs.get(each) for each in [*range(12), *crowded, U64]]
    kept = ours.copy()
    for each in range(12):
        ours.pop(each)
    assert [kept.get(each) for each in [*range(12), *crowded, U64]] == before


def test_tables_grow_and_shrink_alike() -> None:
    ours, theirs = _events.Blocks(), PythonBlocks()
    hashes = [(n * 0xD1342543DE82EF95 + 1) & U64 for n in range(20_000)]
    for start in range(0, 20_000, 50):
        part = tuple(hashes[start : start + 50])
        assert ours.hold(part, start + 1) == theirs.hold(part, start + 1)
    for start in range(0, 20_000, 70):
        some = hashes[start : start + 60]
        assert ours.drop(some, _events.Blocks()) == theirs.drop(some, PythonBlocks())
    assert list(map(ours.get, hashes)) == list(map(theirs.get, hashes))
    assert 2_000 < len(ours) == len(theirs) < 3_000


@pytest.mark.parametrize("wrong", [-1, 2**64, b"x" * 8, None, "a", True, 1.5])
def test_what_is_no_u64_changes_nothing(wrong: Any) -> None:
    blocks = _events.Blocks()
    blocks.hold((1,), 1)
    for call in (
        lambda: blocks.hold((2, wrong), 2),
        lambda: blocks.drop([1, wrong], _events.Blocks()),
        lambda: blocks.put(wrong, 1),
        lambda: blocks.count([wrong], 1),
        lambda: blocks.get(wrong),
        lambda: blocks.pop(wrong),
    ):
        with pytest.raises(TypeError, match="block hash"):
            call()
    assert (len(blocks), blocks.get(1), blocks.get(2)) == (1, 1, 0)


@pytest.mark.parametrize("wake", [_events.wake, python_wake])
def test_waking(wake: Any) -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    assert wake(fd)
    assert os.eventfd_read(fd) == 1
    os.close(fd)
    assert not wake(fd)


@pytest.mark.parametrize(
    "call",
    [
        lambda: _events.Blocks(1),
        lambda: _events.Blocks().hold((1,)),
        lambda: _events.Blocks().hold({1}, 1),
        lambda: _events.Blocks().hold((1,), "a"),
        lambda: _events.Blocks().drop((1,), _events.Blocks()),
        lambda: _events.Blocks().drop([1], PythonBlocks()),
        lambda: _events.Blocks().put(1),
        lambda: _events.Blocks().count(1, 1),
        lambda: _events.Express(),
        lambda: lane().take([]),
        lambda: lane().take([], []),
        lambda: lane().take([], PythonMessage()),
        lambda: _events.Message(1),
        lambda: _events.Message().append("text"),
        lambda: _events.Message().seal(b"head"),
        lambda: _events.Message().seal(b"head", None),
        lambda: _events.Piece(),
    ],
)
def test_misuse_is_told(call: Any) -> None:
    with pytest.raises(TypeError):
        call()


@pytest.mark.parametrize("number", [0, 2**32, -1])
def test_numbers_that_do_not_fit_are_told(number: int) -> None:
    with pytest.raises(OverflowError):
        _events.Blocks().hold((1,), number)


def test_the_python_form_can_be_asked_for() -> None:
    code = "import kvtier.events.publish.hot as hot; print(hot.HOT_BY, hot.Blocks is hot.PythonBlocks)"
    environment = {**os.environ, "KVTIER_EVENTS": "python"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "python True\n"
