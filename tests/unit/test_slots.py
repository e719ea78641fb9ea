"""The structures in C do what those in Python do, whatever is asked of them, and refuse what would break them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.keys import OffloadKey
from kvtier.policies.slots import ABSENT, PythonGhosts, PythonIndex, PythonRecency, SlotIndex

_slots = pytest.importorskip("kvtier._slots", reason="kvtier._slots was not compiled here")

CAPACITY = 12
UNIVERSE = [OffloadKey(b"k" * (n % 5) * 9 + b"%d" % n) for n in range(40)]
"""Short and long keys, and one that begins like another: all that a map of bytes must tell apart."""

keys = st.lists(st.sampled_from(UNIVERSE), max_size=2 * CAPACITY)
many_keys = st.lists(st.sampled_from(UNIVERSE), max_size=150)
slots = st.lists(st.integers(0, CAPACITY - 1), max_size=CAPACITY, unique=True)
any_slots = st.lists(st.integers(0, CAPACITY - 1), max_size=2 * CAPACITY)
masks = st.lists(st.booleans(), min_size=CAPACITY, max_size=CAPACITY)


def array(values: list[int]) -> Any:
    return np.array(values, dtype=np.int64)


def filled(structure: Any, method: str, *arguments: Any, room: int, dtype: type = np.int64) -> tuple[Any, list[int]]:
    """Return what a method returns and what it put into an array."""
    out = np.full(room, 7, dtype=dtype)
    return getattr(structure, method)(*arguments, out), out.tolist()


class TestIndex:
    @given(st.lists(st.tuples(st.sampled_from(("add", "add", "remove")), keys, slots, many_keys), max_size=30))
    @settings(max_examples=150, deadline=None)
    def test_c_and_python_agree(self, calls: list[tuple[str, list[OffloadKey], list[int], list[OffloadKey]]]) -> None:
        both = _slots.Index(CAPACITY), PythonIndex(CAPACITY)
        for call, new, places, asked in calls:
            if call == "add":
                fresh = [index.missing(new)[: len(places)] for index in both]
                assert fresh[0] == fresh[1]
                for index in both:
                    index.add(fresh[0], array(places[: len(fresh[0])]))
            else:
                first, second = (index.remove(array(places)) for index in both)
                assert first == second
            self.compare(*both, asked, places)

    def compare(self, one: Any, other: Any, asked: list[OffloadKey], places: list[int]) -> None:
        assert len(one) == len(other)
        for method in ("find_into", "leading_into", "held_into"):
            (count, found), (expected, others) = (filled(i, method, asked, room=len(asked)) for i in (one, other))
            assert count == expected
            assert found == others if method == "find_into" else found[:count] == others[:count]
        assert one.missing(asked) == other.missing(asked)
        assert one.keys(array(places)) == other.keys(array(places))
        assert [one.get(key) for key in UNIVERSE] == [other.get(key) for key in UNIVERSE]
        assert [key in one for key in UNIVERSE] == [key in other for key in UNIVERSE]

    @given(any_slots, masks)
    def test_counting_agrees(self, places: list[int], allowed: list[bool]) -> None:
        counts = {i.count(array(places), np.array(allowed)) for i in (_slots.Index(CAPACITY), PythonIndex(CAPACITY))}
        assert len(counts) == 1

    def test_keys_that_differ_in_one_byte_only_are_told_apart(self) -> None:
        """Guards the hash: keys that count up in any byte once fell into one place and took a millisecond each."""
        for size in (8, 36, 40):
            for place in range(size):
                batch = [OffloadKey(bytes(place) + bytes([n]) + bytes(size - place - 1)) for n in range(1, 256)]
                index = SlotIndex(255)
                index.add(batch, np.arange(255))
                assert index.find(batch).tolist() == list(range(255))

    def test_a_key_is_kept_alive_exactly_while_it_is_held(self) -> None:
        key = OffloadKey(bytes(range(64)))
        before = sys.getrefcount(key)
        index = SlotIndex(2)
        index.add([key], array([1]))
        assert sys.getrefcount(key) == before + 1
        index.add([OffloadKey(b"other")], array([1]))
        assert sys.getrefcount(key) == before
        index.add([key], array([0]))
        del index
        assert sys.getrefcount(key) == before

    @pytest.mark.parametrize("index", [_slots.Index(4), PythonIndex(4)])
    def test_a_key_has_one_slot(self, index: Any) -> None:
        index.add([b"a"], array([1]))
        with pytest.raises(ValueError, match="without a slot"):
            index.add([b"a"], array([2]))
        with pytest.raises(ValueError, match="without a slot"):
            index.add([b"b", b"b"], array([2, 3]))

    def test_nonsense_is_refused(self) -> None:
        index = _slots.Index(4)
        room = np.empty(4, dtype=np.int64)
        for slot in (-1, 4):
            with pytest.raises(IndexError, match="slots from 0 to 3"):
                index.add([b"a"], array([slot]))
            with pytest.raises(IndexError, match="slots from 0 to 3"):
                index.remove(array([slot]))
        for bad in ("a", 1, None):
            with pytest.raises(TypeError):
                index.find_into([bad], room)
        with pytest.raises(ValueError, match="room"):
            index.find_into([b"a"] * 5, room)
        with pytest.raises(ValueError, match="a slot for each key"):
            index.add([b"a"], array([0, 1]))
        with pytest.raises(ValueError, match="one dimension"):
            index.find_into([b"a"], np.empty(4, dtype=np.int32))
        with pytest.raises(ValueError, match="capacity"):
            _slots.Index(-1)
        assert len(index) == 0


class TestRecency:
    @given(st.lists(st.tuples(st.sampled_from(("use", "use", "drop", "take")), any_slots, masks), max_size=40))
    @settings(deadline=None)
    def test_c_and_python_agree(self, calls: list[tuple[str, list[int], list[bool]]]) -> None:
        both = _slots.Recency(CAPACITY), PythonRecency(CAPACITY)
        for call, places, allowed in calls:
            if call == "take":
                count = len(places) // 2
                one, other = (filled(r, "take_into", count, np.array(allowed), room=CAPACITY) for r in both)
                assert one == other
            else:
                for recency in both:
                    getattr(recency, call)(array(places))
            one, other = (filled(recency, "slots_into", room=CAPACITY) for recency in both)
            assert one == other
            assert len(both[0]) == len(both[1]) == one[0]
            one, other = (filled(r, "holds_into", array(places), room=len(places), dtype=bool) for r in both)
            assert one == other

    def test_arrays_may_be_views(self) -> None:
        recency = _slots.Recency(8)
        recency.use(np.arange(8)[::-2])
        assert filled(recency, "slots_into", room=4)[1] == [1, 3, 5, 7]

    def test_nonsense_is_refused(self) -> None:
        recency = _slots.Recency(4)
        recency.use(array([0, 1, 2, 3]))
        with pytest.raises(IndexError, match="slots from 0 to 3"):
            recency.use(array([0, 4]))
        with pytest.raises(ValueError, match="every slot"):
            recency.take_into(1, np.ones(3, dtype=bool), np.empty(1, dtype=np.int64))
        with pytest.raises(ValueError, match="every slot"):
            recency.take_into(2, np.ones(4, dtype=bool), np.empty(1, dtype=np.int64))
        assert len(recency) == 4


class TestGhosts:
    @given(st.integers(0, 4), st.lists(st.tuples(st.sampled_from((0, 1, 2)), keys), max_size=40))
    @settings(deadline=None)
    def test_c_and_python_agree(self, capacity: int, calls: list[tuple[int, list[OffloadKey]]]) -> None:
        both = _slots.Ghosts(capacity), PythonGhosts(capacity)
        for which, batch in calls:
            if which < 2:
                for ghosts in both:
                    ghosts.remember(which, batch)
            else:
                one, other = (filled(ghosts, "recall_into", batch, room=len(batch)) for ghosts in both)
                assert one == other
            assert both[0].sizes() == both[1].sizes()
            assert max(both[0].sizes()) <= capacity

    @pytest.mark.parametrize("ghosts", [_slots.Ghosts(2), PythonGhosts(2)])
    def test_the_oldest_is_forgotten_and_a_key_comes_back_once(self, ghosts: Any) -> None:
        ghosts.remember(0, [b"a", b"b", b"c"])
        ghosts.remember(1, [b"d"])
        assert ghosts.sizes() == (2, 1)
        assert filled(ghosts, "recall_into", [b"a", b"b", b"d", b"b"], room=4) == (2, [ABSENT, 0, 1, ABSENT])
        assert ghosts.sizes() == (1, 0)
        ghosts.clear()
        assert ghosts.sizes() == (0, 0)


def test_everything_works_without_a_compiler() -> None:
    program = """
        import sys
        sys.modules["kvtier._slots"] = None
        from kvtier.offload.base import ReqContext
        from kvtier.offload.manager import CPUOffloadingManager
        from kvtier.policies.slots import SLOTS_BY
        assert SLOTS_BY == "python"
        for policy in ("lru", "arc"):
            manager, context = CPUOffloadingManager(4, policy), ReqContext(req_id="a")
            for keys in ([b"a", b"b", b"c"], [b"a", b"d", b"e"], [b"b", b"c"]):
                output = manager.prepare_store(keys, context)
                manager.complete_store(output.keys_to_store)
                manager.touch(keys, context)
                manager.check()
            assert manager.lookup_prefix([b"b", b"c", b"x"], context) == 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
