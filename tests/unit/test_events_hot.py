"""What is written in C does what its Python form does, byte for byte and block for block."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.events import BlockRemoved, BlockStored
from kvtier.events.publish.hot import PythonBlocks, python_encode_plain, python_join_removals, python_wake
from kvtier.events.wire import U64

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


@given(events(uints, uints, numbers, st.none()))
@settings(deadline=None)
def test_plain_events_are_written_alike(event: BlockStored) -> None:
    assert _events.encode_plain(event) == python_encode_plain(event) == msgspec.msgpack.encode(event)


@given(events(wild, wild, wild, st.one_of(st.none(), st.just([("a", 1)]), st.just([]))))
@settings(deadline=None)
def test_other_events_are_written_alike_or_left(event: BlockStored) -> None:
    written = _events.encode_plain(event)
    assert written is None or written == python_encode_plain(event)


@given(st.lists(uints, max_size=20), texts, numbers, texts, texts)
def test_removals_are_written_alike(hashes: list[int], medium: Any, group: Any, locality: Any, ownership: Any) -> None:
    event = BlockRemoved(hashes, medium, group, locality, ownership)
    assert _events.encode_plain(event) == python_encode_plain(event) == msgspec.msgpack.encode(event)


@pytest.mark.parametrize("encode", [_events.encode_plain, python_encode_plain])
@pytest.mark.parametrize("wrong", [b"x" * 8, -1, 2**64, True, "a", None, 1.5])
def test_hashes_that_are_no_u64_are_left(encode: Any, wrong: Any) -> None:
    assert encode(BlockRemoved([1, wrong], None)) is None
    assert encode(BlockStored([wrong], None, [], 0, None, None, None)) is None
    if wrong is not None:
        assert encode(BlockStored([1], wrong, [], 0, None, None, None)) is None


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
    ours = BlockRemoved([1], "GPU")
    for _ in range(2):
        assert _events.encode_plain(other) is None
        assert _events.join_removals([other], 0) is None
        assert _events.encode_plain(ours) == msgspec.msgpack.encode(ours)


def test_an_engines_own_class_is_as_good_as_ours() -> None:
    own = type("BlockRemoved", (BlockRemoved,), {}, tag="BlockRemoved")
    for event in (own([1, 2], "CPU", 3), BlockRemoved([1, 2], "CPU", 3), own([1, 2], "CPU", 3)):
        assert _events.encode_plain(event) == msgspec.msgpack.encode(event)
        assert _events.join_removals([event, event], 0) == ([1, 2, 1, 2], 2)


def test_long_lists_are_written_alike() -> None:
    event = BlockStored(list(range(70_000)), None, list(range(1_200_000)), 16, None, "GPU", None)
    assert _events.encode_plain(event) == msgspec.msgpack.encode(event)


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
@settings(deadline=None)
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
        lambda: _events.Blocks(1),
        lambda: _events.Blocks().hold((1,)),
        lambda: _events.Blocks().hold({1}, 1),
        lambda: _events.Blocks().hold((1,), "a"),
        lambda: _events.Blocks().drop((1,), _events.Blocks()),
        lambda: _events.Blocks().drop([1], PythonBlocks()),
        lambda: _events.Blocks().put(1),
        lambda: _events.Blocks().count(1, 1),
        lambda: _events.join_removals([], 0),
        lambda: _events.join_removals([1], -1),
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
