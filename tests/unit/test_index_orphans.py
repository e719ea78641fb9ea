"""Stores whose parent is unknown wait for it, within bounds, and come out in order."""

from __future__ import annotations

import pytest

from kvtier.errors import IntegrityError
from kvtier.index.duplicates import Allowance
from kvtier.index.orphans import Orphans


def test_items_come_out_with_their_parent_oldest_first() -> None:
    orphans: Orphans[str] = Orphans()
    orphans.park(1, "a", "first")
    orphans.park(2, "b", "other")
    orphans.park(1, "c", "second")
    orphans.check()
    assert orphans.release(1) == ["first", "second"]
    assert orphans.release(1) == []
    assert len(orphans) == 1
    orphans.check()


def test_an_item_can_be_taken_back() -> None:
    orphans: Orphans[str] = Orphans()
    orphans.park(1, "a", "first")
    orphans.park(1, "a", "again")
    assert orphans.discard("a")
    assert not orphans.discard("b")
    assert orphans.release(1) == ["again"]
    orphans.check()


def test_the_one_that_waited_longest_makes_room() -> None:
    orphans: Orphans[int] = Orphans(limit=3)
    for i in range(10):
        orphans.park(i % 2, i, i)
        orphans.check()
    assert orphans.dropped == 7
    assert orphans.release(0) + orphans.release(1) == [8, 7, 9]


def test_check_finds_what_is_broken() -> None:
    orphans: Orphans[int] = Orphans()
    orphans.park(1, "a", 1)
    orphans._by_parent.clear()
    with pytest.raises(IntegrityError, match="by parent"):
        orphans.check()


def test_bytes_are_bounded_too_and_given_back() -> None:
    """Two workers share an allowance; who finds no room drops its own, never another's."""
    allowance = Allowance(100)
    first, second = (Orphans[int](allowance=allowance) for _ in range(2))
    for i in range(3):
        first.park(0, i, i, 30)
    second.park(0, "x", 1, 30)
    assert (len(first), len(second), second.dropped) == (3, 0, 1)
    first.park(0, 3, 3, 60)
    assert (first.release(0), first.dropped, allowance.used) == ([2, 3], 2, 0)
    second.park(0, "x", 1, 30)
    second.park(0, "x", 2, 200)
    assert (len(second), second.dropped) == (0, 3)
    second.clear()
    assert (second.dropped, allowance.used) == (0, 0)


def test_many_that_wait_for_one_parent_are_taken_back_one_by_one() -> None:
    orphans: Orphans[int] = Orphans()
    for i in range(50_000):
        orphans.park(1, i % 25_000, i)
    for i in range(25_000):
        assert orphans.discard(i)
    orphans.check()
    assert orphans.release(1) == list(range(25_000, 50_000))
