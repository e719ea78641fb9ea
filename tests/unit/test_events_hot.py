"""What is written in C does what its Python form does, byte for byte and block for block."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.events import BlockRemoved, BlockStored
from kvtier.events.hot import (
    ONE_EVENT_AT,
    python_drop_leaves,
    python_frame_stored,
    python_hold,
    python_join_removals,
    python_wake,
)

_events = pytest.importorskip("kvtier._events", reason="kvtier._events was not compiled here")

edges = [0, 1, 127, 128, 255, 256, 65535, 65536, 2**30 - 1, 2**30, 2**32 - 1, 2**32, 2**60 - 1, 2**60, 2**63, 2**64 - 1]
uints = st.one_of(st.sampled_from(edges), st.integers(0, 2**64 - 1))
wild = st.one_of(
    uints, st.integers(-(2**70), 2**70), st.binary(max_size=40), st.none(), st.text(max_size=3), st.booleans()
)
texts = st.one_of(st.none(), st.text(max_size=40), st.sampled_from(["GPU", "x" * 300, "y" * 70_000, "ключ"]))
numbers = st.one_of(st.none(), uints)


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


@given(st.floats(), events(uints, uints, numbers, st.none()), st.binary(max_size=9))
@settings(deadline=None)
def test_plain_events_are_written_alike(ts: float, event: BlockStored, tail: bytes) -> None:
    written = _events.frame_stored(ts, event, tail)
    assert written == python_frame_stored(ts, event, tail)
    assert written[ONE_EVENT_AT : len(written) - len(tail)] == msgspec.msgpack.encode(event)


@given(events(wild, wild, wild, st.one_of(st.none(), st.just([("a", 1)]))))
@settings(deadline=None)
def test_other_events_are_written_alike_or_left(event: BlockStored) -> None:
    assert _events.frame_stored(1.0, event, b"\x00") in (None, python_frame_stored(1.0, event, b"\x00"))


@pytest.mark.parametrize("wrong", [object(), BlockRemoved([], None), None])
def test_what_is_no_stored_event_is_left(wrong: Any) -> None:
    assert _events.frame_stored(1.0, wrong, b"") is None


def test_long_lists_are_written_alike() -> None:
    event = BlockStored(list(range(70_000)), None, list(range(1_200_000)), 16, None, "GPU", None)
    assert _events.frame_stored(1.0, event, b"\x00") == python_frame_stored(1.0, event, b"\x00")


@given(st.lists(st.lists(wild, max_size=6), max_size=8))
@example([[1, 2], [3, 2], [4, 4]])
@settings(deadline=None)
def test_blocks_are_held_alike(names: list[list[Any]]) -> None:
    ours: dict[Any, Any] = {}
    theirs: dict[Any, Any] = {}
    for hashes in map(tuple, names):
        record = object()
        assert attempt(_events.hold, ours, hashes, record) == attempt(python_hold, theirs, hashes, record)
        assert ours == theirs


def attempt(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except TypeError:
        return TypeError


@given(
    st.dictionaries(uints, st.integers(0, 3)), st.dictionaries(uints, st.just(1)), st.lists(wild, max_size=6), st.data()
)
@settings(deadline=None)
def test_leaves_are_dropped_alike(
    held: dict[int, int], children: dict[int, int], more: list[Any], data: st.DataObject
) -> None:
    known = data.draw(st.lists(st.sampled_from(sorted(held)))) if held else []
    ours, theirs = dict(held), dict(held)
    hashes = [*known, *(each for each in more if data.draw(st.booleans()))]
    assert attempt(_events.drop_leaves, ours, children, hashes) == attempt(python_drop_leaves, theirs, children, hashes)
    assert ours == theirs


removals = st.builds(
    BlockRemoved,
    block_hashes=st.lists(wild, max_size=3),
    medium=st.sampled_from([None, "GPU", "CPU", "C" + "PU"]),
    group_idx=st.sampled_from([None, 0, 1]),
)
others = st.just(BlockStored([1], None, [], 0, None, None, None))


@given(st.lists(st.one_of(removals, removals, removals, others), min_size=1), st.data())
def test_removals_are_joined_alike(events: list[Any], data: st.DataObject) -> None:
    places = [place for place, event in enumerate(events) if isinstance(event, BlockRemoved)]
    if places:
        start = data.draw(st.sampled_from(places))
        assert _events.join_removals(events, start) == python_join_removals(events, start)


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
        lambda: _events.hold({}, [1], 0),
        lambda: _events.hold({}),
        lambda: _events.frame_stored(1, None, b""),
        lambda: _events.join_removals([], 0),
        lambda: _events.join_removals([1], -1),
    ],
)
def test_misuse_is_told(call: Any) -> None:
    with pytest.raises(TypeError):
        call()
