"""The structures in C do what those in Python do, whatever is asked of them, and refuse what would break
them.
"""

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
from kvtier.policies.slots import (
    ABSENT,
    CHUNK,
    WRITING,
    PythonBook,
    PythonGhosts,
    PythonRecency,
    PythonReuseLists,
)

_slots = pytest.importorskip("kvtier.native._slots", reason="kvtier.native._slots was not compiled here")

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


def plain(answer: Any) -> Any:
    """Return an answer as something that can be compared."""
    return answer.tolist() if isinstance(answer, np.ndarray) else answer


def book(kind: Any, num_slots: int = CAPACITY) -> tuple[Any, tuple[Any, ...]]:
    """Return a book and its arrays."""
    arrays = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.bool_), np.zeros(num_slots, np.int64)
    return kind(*arrays), arrays


BOOK_CALLS = (
    "reserve",
    "reserve",
    "complete",
    "complete",
    "pin",
    "pin",
    "unpin",
    "release",
    "remove",
    "free",
)


class TestBook:
    @given(st.lists(st.tuples(st.sampled_from(BOOK_CALLS), keys, any_slots, many_keys), max_size=40))
    @settings(max_examples=200, deadline=None)
    def test_c_and_python_agree(
        self, calls: list[tuple[str, list[OffloadKey], list[int], list[OffloadKey]]]
    ) -> None:
        (one, arrays), (other, others) = book(_slots.SlotBook), book(PythonBook)
        empty: list[int] = []
        for number, (call, named, places, asked) in enumerate(calls):
            arguments = self.arguments(other, call, number, named, places, empty)
            assert plain(getattr(one, call)(*arguments)) == plain(getattr(other, call)(*arguments))
            assert [plain(array) for array in arrays] == [plain(array) for array in others]
            self.compare(one, other, asked, places)
            held = other.find(UNIVERSE).tolist()
            empty = [s for s in range(CAPACITY) if s not in held and s not in other.free_slots().tolist()]

    def arguments(
        self, book: Any, call: str, number: int, named: list[OffloadKey], places: list[int], empty: list[int]
    ) -> tuple[Any, ...]:
        """Return what a call may be given: `free` only slots that are empty, `reserve` only keys that are
        new.
        """
        match call:
            case "reserve":
                return number, book.missing(named)[: book.num_free()]
            case "complete":
                return (named,)
            case "free":
                return (array(empty),)
            case "pin" | "unpin":
                return (book.find(named) if number % 2 else array(places),)
            case _:
                return (array(places),)

    def compare(self, one: Any, other: Any, asked: list[OffloadKey], places: list[int]) -> None:
        assert len(one) == len(other)
        assert one.num_free() == other.num_free()
        assert plain(one.free_slots()) == plain(other.free_slots())
        for method in ("find", "leading", "held", "missing"):
            assert plain(getattr(one, method)(asked)) == plain(getattr(other, method)(asked)), method
        assert one.keys(array(places)) == other.keys(array(places))
        assert [one.get(key) for key in UNIVERSE] == [other.get(key) for key in UNIVERSE]

    @pytest.mark.parametrize("kind", [_slots.SlotBook, PythonBook])
    def test_the_life_of_a_slot(self, kind: Any) -> None:
        book_, (readers, evictable, stored_by) = book(kind, 3)
        assert book_.reserve(7, UNIVERSE[:2]).tolist() == [0, 1]
        assert (readers.tolist(), evictable.any(), stored_by.tolist()) == (
            [WRITING, WRITING, 0],
            False,
            [7, 7, 0],
        )
        assert book_.complete([UNIVERSE[1], UNIVERSE[5], UNIVERSE[1]]) == [UNIVERSE[1]]
        assert book_.leading(UNIVERSE[1:3]) == 1
        assert book_.leading(UNIVERSE) == 0, "the first is still being written"
        assert [book_.pin(array(s)) for s in ([1, 0], [1, ABSENT], [1, 1])] == [1, 1, 2]
        assert readers.tolist() == [WRITING, 2, 0], "only the last could be pinned as a whole"
        assert book_.release(array([1])) is None
        assert [book_.unpin(array(s)) for s in ([1, 1, 1], [0], [1, 1])] == [2, 0, 2]
        assert evictable.tolist() == [False, True, False]
        assert [book_.release(array(s)) for s in ([1, 1], [1, 3], [-1], [0, 1])] == [None] * 4
        assert evictable.tolist() == [False, True, False]
        assert book_.release(array([1])) == [UNIVERSE[1]]
        assert book_.free_slots().tolist() == [2, 1]

    def test_keys_that_differ_in_one_byte_only_are_told_apart(self) -> None:
        """Guards the hash: keys that count up in any byte once fell into one place and took a millisecond
        each.
        """
        for size in (8, 36, 40):
            for place in range(size):
                batch = [
                    OffloadKey(bytes(place) + bytes([n]) + bytes(size - place - 1)) for n in range(1, 256)
                ]
                book_, _ = book(_slots.SlotBook, 255)
                book_.reserve(0, batch)
                assert book_.find(batch).tolist() == list(range(255))

    def test_a_key_is_kept_alive_exactly_while_it_is_held(self) -> None:
        key = OffloadKey(bytes(range(64)))
        before = sys.getrefcount(key)
        book_, arrays = book(_slots.SlotBook, 2)
        book_.reserve(0, [key])
        assert sys.getrefcount(key) == before + 1
        book_.remove(array([0]))
        assert sys.getrefcount(key) == before
        book_.reserve(0, [key])
        borrowed = [sys.getrefcount(array) for array in arrays]
        del book_
        assert sys.getrefcount(key) == before
        assert [sys.getrefcount(array) for array in arrays] == [count - 1 for count in borrowed]

    @pytest.mark.parametrize("kind", [_slots.SlotBook, PythonBook])
    def test_a_key_has_one_slot_and_a_slot_one_key(self, kind: Any) -> None:
        book_, _ = book(kind, 4)
        book_.reserve(0, [b"a"])
        for wrong in ([b"a"], [b"b", b"b"], [b"b", b"c", b"a"]):
            with pytest.raises(ValueError, match="without a slot"):
                book_.reserve(0, wrong)
            assert (len(book_), book_.missing([b"b"]), book_.free_slots().tolist()) == (1, [b"b"], [3, 2, 1])
        with pytest.raises(ValueError, match="one for each free slot"):
            book_.reserve(0, UNIVERSE[:5])

    @pytest.mark.parametrize("kind", [_slots.SlotBook, PythonBook])
    def test_a_slot_is_freed_once(self, kind: Any) -> None:
        """Guards two keys in one slot, and so wrong bytes: whoever frees a slot twice is told."""
        book_, _ = book(kind, 4)
        book_.reserve(0, [b"a", b"b"])
        book_.remove(array([0, 1]))
        for wrong in ([2], [0, 0], [0, 3], [1, 0, 1]):
            with pytest.raises(ValueError, match="empty slots that are not free, each once"):
                book_.free(array(wrong))
        book_.free(array([1, 0]))
        assert book_.free_slots().tolist() == [3, 2, 1, 0]

    @pytest.mark.parametrize("kind", [_slots.SlotBook, PythonBook])
    def test_a_flag_that_is_wrong_releases_nothing(self, kind: Any) -> None:
        """Guards an exception that was swallowed: the flags are an array that others may write too."""
        book_, (_, evictable, _) = book(kind, 2)
        evictable[:] = True
        assert book_.release(array([0])) is None
        book_.reserve(0, [b"a"])
        assert book_.release(array([0, 1])) is None
        assert (evictable.all(), book_.free_slots().tolist(), book_.get(b"a")) == (True, [1], 0)
        assert book_.release(array([0])) == [b"a"]

    @pytest.mark.parametrize("call", ["release", "remove"])
    def test_without_memory_nothing_is_released(self, call: str) -> None:
        """Guards keys that left the book and were never told: each allocation fails once."""
        testcapi = pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
        held, places = UNIVERSE[:20], array([*range(20)])
        failures = 0
        for failing in range(12):
            book_, arrays = book(_slots.SlotBook, 20)
            book_.reserve(0, held)
            book_.complete(held)
            method = getattr(book_, call)
            testcapi.set_nomemory(failing, failing + 1)
            try:
                answer = method(places)
            except MemoryError:
                answer = None
            finally:
                testcapi.remove_mem_hooks()
            if answer is None:
                failures += 1
                assert (book_.find(held).tolist(), book_.num_free()) == (places.tolist(), 0)
                assert arrays[1].all()
            else:
                assert (answer, len(book_)) == (held, 0)
        assert 0 < failures < 12

    def test_nonsense_is_refused(self) -> None:
        book_, arrays = book(_slots.SlotBook, 4)
        for slot in (-2, 4):
            for call in (book_.keys, book_.remove, book_.free, book_.pin, book_.unpin):
                with pytest.raises(IndexError, match=r"slots from -?[01] to 3"):
                    call(array([slot]))
        for bad in ("a", 1, None):
            for call in (book_.find, book_.held, book_.leading, book_.missing, book_.complete):
                with pytest.raises(TypeError):
                    call([bad])
                with pytest.raises(TypeError, match="list of keys"):
                    call(bad)
            with pytest.raises(TypeError):
                book_.reserve(0, [bad])
        for arguments in ((), (1,), ("a", [b"a"]), (1, (b"a",))):
            with pytest.raises(TypeError):
                book_.reserve(*arguments)
        with pytest.raises(ValueError, match="one dimension"):
            book_.keys(np.empty(4, dtype=np.int32))
        with pytest.raises(ValueError, match="empty slots"):
            book_.free(array([0]))
        with pytest.raises(ValueError, match="one length"):
            _slots.SlotBook(*arrays[:2], np.zeros(3, np.int64))
        assert len(book_) == 0
        assert book_.num_free() == 4


class TestRecency:
    names = st.sampled_from(("use", "use", "renew", "drop", "take", "coldest"))

    @given(st.lists(st.tuples(names, slots, masks), max_size=40))
    @settings(deadline=None)
    def test_c_and_python_agree(self, calls: list[tuple[str, list[int], list[bool]]]) -> None:
        one, other = _slots.RecencyList(CAPACITY), PythonRecency(CAPACITY)
        for call, places, allowed in calls:
            counted = call in ("take", "coldest")
            arguments = (len(places) // 2, np.array(allowed)) if counted else (array(places),)
            assert plain(getattr(one, call)(*arguments)) == plain(getattr(other, call)(*arguments))
            assert plain(one.slots()) == plain(other.slots())
            assert len(one) == len(other) == len(one.slots())

    @pytest.mark.parametrize("kind", [_slots.RecencyList, PythonRecency])
    def test_renewing_adds_nobody(self, kind: Any) -> None:
        recency = kind(8)
        recency.use(array([1, 2, 3]))
        assert recency.renew(array([7, 2, 5, 3])).tolist() == [7, 5]
        assert recency.slots().tolist() == [1, 3, 2]
        assert recency.take(-1, np.ones(8, dtype=bool)).tolist() == []

    def test_arrays_may_be_views(self) -> None:
        recency = _slots.RecencyList(8)
        recency.use(np.arange(8)[::-2])
        assert recency.slots().tolist() == [1, 3, 5, 7]

    def test_nonsense_is_refused(self) -> None:
        recency = _slots.RecencyList(4)
        recency.use(array([0, 1, 2, 3]))
        with pytest.raises(IndexError, match="slots from 0 to 3"):
            recency.use(array([0, 4]))
        with pytest.raises(ValueError, match="every slot"):
            recency.take(1, np.ones(3, dtype=bool))
        for arguments in ((), (1,), (None, np.ones(4, dtype=bool))):
            with pytest.raises(TypeError):
                recency.take(*arguments)
        with pytest.raises(ValueError, match="capacity"):
            _slots.RecencyList(-1)
        assert len(recency) == 4


class TestGhosts:
    @given(st.integers(0, 4), st.lists(st.tuples(st.sampled_from((0, 1, 2, 3)), keys), max_size=40))
    @settings(deadline=None)
    def test_c_and_python_agree(self, capacity: int, calls: list[tuple[int, list[OffloadKey]]]) -> None:
        one, other = _slots.GhostLists(capacity, 2), PythonGhosts(capacity, 2)
        for which, batch in calls:
            if which < 2:
                assert plain(one.remember(which, batch)) == plain(other.remember(which, batch))
            elif which == 2:
                assert plain(one.find(batch)) == plain(other.find(batch))
            else:
                assert plain(one.recall(batch)) == plain(other.recall(batch))
            assert one.sizes() == other.sizes()
            assert max(one.sizes()) <= capacity

    @pytest.mark.parametrize("ghosts", [_slots.GhostLists(2, 2), PythonGhosts(2, 2)])
    def test_the_oldest_is_forgotten_and_a_key_comes_back_once(self, ghosts: Any) -> None:
        ghosts.remember(0, [b"a", b"b", b"c"])
        ghosts.remember(1, [b"d"])
        assert ghosts.sizes() == (2, 1)
        assert ghosts.find([b"a", b"b", b"d", b"b"]).tolist() == [ABSENT, 1, 2, 1]
        assert ghosts.recall([b"a", b"b", b"d", b"b"]).tolist() == [ABSENT, 1, 2, ABSENT]
        assert ghosts.recall([b"a", b"b", b"d"]) is None
        assert ghosts.sizes() == (1, 0)

    def test_nonsense_is_refused(self) -> None:
        ghosts = _slots.GhostLists(4, 2)
        ghosts.remember(0, [b"a"])
        with pytest.raises(ValueError, match="one of 2 lists"):
            ghosts.remember(2, [b"b"])
        with pytest.raises(ValueError, match="1 or 2 lists"):
            _slots.GhostLists(4, 3)
        for bad in (None, [b"a", None]):
            with pytest.raises(TypeError):
                ghosts.recall(bad)
            with pytest.raises(TypeError):
                ghosts.remember(0, bad)


class Reuse:
    """The lists of one form, with the arrays that they share with their maker."""

    def __init__(self, kind: Any, capacity: int, num_gone: int, num_endings: int, every: int) -> None:
        self.ages = np.array([0.0, 0.5, 1.0, 4.0, 9.0])
        self.chunks, self.gone = np.zeros(capacity, CHUNK), np.zeros(num_gone, CHUNK)
        cells = 3 * num_endings * len(self.ages)
        self.used, self.given_up, self.indices = np.zeros(cells), np.zeros(cells), np.zeros(cells)
        self.arrays = self.chunks, self.gone, self.used, self.given_up, self.indices
        self.lean = np.array([2.0, 1.5, 1.0, 1.0, 0.5])
        self.lists = kind(*self.arrays, self.ages, self.lean, num_endings, every)

    def derive(self, now: float) -> None:
        idle = np.zeros(len(self.used))
        for start, stop in ((0, 3), (3, 9), (9, 99)):
            self.lists.count_idle(start, stop, now, idle)
        self.lists.derive(idle, np.array([0.1, 0.2, 0.1, 0.3, 0.02]), 2.0)


class TestReuseLists:
    @given(st.randoms(use_true_random=False), st.integers(0, 12), st.integers(0, 30), st.integers(1, 3))
    @settings(deadline=None)
    def test_c_and_python_agree(self, rng: Any, capacity: int, num_gone: int, every: int) -> None:
        num_endings, now = rng.randint(1, 4), 0.0
        one, other = (
            Reuse(kind, capacity, num_gone, num_endings, every)
            for kind in (_slots.ReuseLists, PythonReuseLists)
        )
        held: dict[int, OffloadKey] = {}

        def both(call: str, *arguments: Any) -> Any:
            first, second = (getattr(each.lists, call)(*arguments) for each in (one, other))
            assert plain(first) == plain(second), call
            return first

        for _ in range(25):
            now += rng.choice((0.0, 0.5, 3.0))
            free = [slot for slot in range(capacity) if slot not in held]
            absent = [key for key in UNIVERSE if key not in held.values()]
            some = rng.sample(sorted(held), rng.randint(0, len(held)))
            match rng.randrange(7):
                case 0 | 1:
                    new = rng.sample(free, rng.randint(0, len(free)))
                    names = rng.sample(absent, len(new))
                    both("insert", array(new), names, now)
                    held.update(zip(new, names, strict=True))
                case 2 | 3:
                    reused = np.array([rng.random() < 0.7 for _ in some], dtype=np.bool_)
                    both("use", array(some), reused, now, rng.randrange(num_endings))
                case 4:
                    if rng.random() < 0.5:
                        both("remove", array(some), now)
                    else:
                        both("leave", array(some), now)
                    for slot in some:
                        del held[slot]
                case 5:
                    both("refuse", rng.sample(absent, rng.randint(0, 9)), now)
                case _:
                    one.derive(now)
                    other.derive(now)
                    assert np.allclose(one.indices, other.indices, rtol=1e-9)
                    one.indices[:] = other.indices[:] = np.round(other.indices, 2)  # ties, too
            assert all(map(np.array_equal, one.arrays[:4], other.arrays[:4]))
            allowed = np.array([rng.random() < 0.8 for _ in range(capacity)], dtype=np.bool_)
            victims = both("order", rng.randint(-1, capacity + 1), allowed, now)
            both("offered", rng.sample(UNIVERSE, rng.randint(0, 9)))
            if rng.random() < 0.5 and len(absent := [key for key in UNIVERSE if key not in held.values()]):
                newcomers = rng.sample(absent, rng.randint(1, len(absent)))
                count = min(len(victims), rng.randint(0, len(newcomers)))
                stored_by = array([rng.choice((1, 1, 1, 1, 2)) for _ in range(capacity)])
                worth = now, rng.choice((0.0, 0.5, 0.9, 2.0)), stored_by, 2
                taken = both("take_for", newcomers, count, allowed, *worth).tolist()
                assert taken == victims[: len(taken)].tolist()
                assert 2 not in stored_by[taken]
                for slot in taken:
                    del held[slot]
            assert len(one.lists) == len(other.lists) == len(held)

    @pytest.mark.parametrize("kind", [_slots.ReuseLists, PythonReuseLists])
    def test_lists_of_different_sizes_are_refused(self, kind: Any) -> None:
        lists = Reuse(kind, 4, 2, 1, 1).lists
        lists.insert(array([0, 1]), UNIVERSE[:2], 0.0)
        with pytest.raises(ValueError, match="a key for each slot"):
            lists.insert(array([2]), UNIVERSE[:2], 0.0)
        with pytest.raises(ValueError, match="a flag for each slot"):
            lists.use(array([0, 1]), np.ones(1, dtype=np.bool_), 0.0, 0)
        for newcomers, stored_by in ((UNIVERSE[:1], np.zeros(4)), (UNIVERSE[:2], np.zeros(3))):
            with pytest.raises(ValueError, match="a user for each slot, and a key for each victim"):
                lists.take_for(newcomers, 2, np.ones(4, np.bool_), 0.0, 0.8, stored_by.astype(np.int64), 1)
        with pytest.raises(ValueError, match="each class and bin"):
            lists.count_idle(0, 9, 0.0, np.zeros(3))
        with pytest.raises(ValueError, match="each class and bin"):
            lists.derive(np.zeros(3), np.zeros(5), 1.0)
        assert len(lists) == 2

    def test_nonsense_is_refused(self) -> None:
        reuse = Reuse(_slots.ReuseLists, 4, 2, 2, 1)
        lists, flags = reuse.lists, np.ones(4, dtype=np.bool_)
        for call, arguments in (
            ("insert", (array([4]), UNIVERSE[:1], 0.0)),
            ("use", (array([-1]), flags[:1], 0.0, 0)),
            ("leave", (array([4]), 0.0)),
            ("remove", (array([4]), 0.0)),
        ):
            with pytest.raises(IndexError, match="slots from 0 to 3"):
                getattr(lists, call)(*arguments)
        with pytest.raises(ValueError, match="one of 2 endings"):
            lists.use(array([0]), flags[:1], 0.0, 2)
        with pytest.raises(ValueError, match="a flag for each slot"):
            lists.order(1, flags[:3], 0.0)
        for call in (
            "insert",
            "use",
            "order",
            "offered",
            "take_for",
            "leave",
            "refuse",
            "remove",
            "count_idle",
            "derive",
        ):
            with pytest.raises(TypeError):
                getattr(lists, call)("one")
        with pytest.raises(TypeError):
            lists.refuse([None], 0.0)
        with pytest.raises(TypeError):
            lists.insert(array([0]), [None], 0.0)
        ages, lean, good = reuse.ages, reuse.lean, reuse.arrays
        for wrong in (
            (*good, np.zeros(0), lean, 2, 1),
            (*good, np.zeros(65), lean, 2, 1),
            (*good, ages, lean, 0, 1),
            (*good, ages, lean[1:], 2, 1),
            (*good, ages, lean, 4, 1),
            (*good, ages, lean, 2, 0),
            (*good[:2], np.zeros(5), *good[3:], ages, lean, 2, 1),
            (np.zeros(4), *good[1:], ages, lean, 2, 1),
        ):
            with pytest.raises(ValueError, match="expected"):
                _slots.ReuseLists(*wrong)
        assert len(lists) == 0


@pytest.mark.parametrize("book", [PythonBook, _slots.SlotBook])
def test_a_book_may_begin_with_empty_slots(book: type[PythonBook]) -> None:
    arrays = np.zeros(5, np.int64), np.zeros(5, np.bool_), np.zeros(5, np.int64)
    made = book(*arrays, np.array([3, 0]))
    assert (made.num_free(), made.free_slots().tolist()) == (3, [4, 2, 1])
    assert made.reserve(0, [b"a", b"b", b"c"]).tolist() == [1, 2, 4]
    made.free(np.array([3]))
    assert made.reserve(0, [b"d"]).tolist() == [3]
    for bad in (-1, 5):
        with pytest.raises(ValueError, match="slots of this book"):
            book(*arrays, np.array([bad]))


WITHOUT_C = """
    import sys
    sys.modules["kvtier.native._slots"] = None
    from kvtier.policies.slots import SLOTS_BY
    assert SLOTS_BY == "python"
    import pytest
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_everything_works_without_a_compiler() -> None:
    """The contract suites and what the managers' own tests ask, over the Python forms."""
    suites = [
        f"tests/{name}.py"
        for name in ("contract/test_managers", "contract/test_policies", "unit/test_manager")
    ]
    suites += [f"tests/unit/test_{name}.py" for name in ("lru", "arc", "small_offers")]
    command = [sys.executable, "-c", textwrap.dedent(WITHOUT_C), *suites]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
