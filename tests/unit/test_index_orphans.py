"""Blocks without a name wait for it, within bounds, and come out in order."""

from __future__ import annotations

import pytest

from kvtier.errors import IntegrityError
from kvtier.index.base import MemoryBudget
from kvtier.index.translate import Orphans

GPU, CPU = 0, 1


def orphans_in(limit: int = 1 << 30, counts: bool = False) -> Orphans[str]:
    return Orphans(MemoryBudget(limit), counts)


def park(
    orphans: Orphans[str], block: int, parent: int | None, item: str, area: int = GPU, size: int = 10
) -> None:
    orphans.park(block, parent, item, size, {area: 1})
    orphans.check()


def test_blocks_come_out_with_their_parent_oldest_first() -> None:
    orphans = orphans_in()
    park(orphans, 11, 1, "first")
    park(orphans, 21, 2, "other")
    park(orphans, 12, 1, "second")
    assert orphans.release(1) == [("first", {GPU: 1}), ("second", {GPU: 1})]
    assert orphans.release(1) == []
    assert len(orphans) == 1
    orphans.check()


def test_a_block_comes_out_with_its_own_name_too() -> None:
    orphans = orphans_in()
    park(orphans, 1, None, "without tokens")
    park(orphans, 2, 1, "child")
    assert [item for item, _ in orphans.release(1)] == ["without tokens", "child"]
    park(orphans, 2, 1, "child")
    assert [item for item, _ in orphans.release(2)] == ["child"]
    orphans.check()


@pytest.mark.parametrize("counts", [False, True])
def test_a_waiting_block_keeps_its_description_and_all_its_areas(counts: bool) -> None:
    orphans = orphans_in(counts=counts)
    park(orphans, 5, None, "without tokens", CPU)
    park(orphans, 5, 1, "with tokens")
    park(orphans, 5, None, "without tokens")
    assert len(orphans) == 1
    assert orphans.discard(5, GPU)
    assert orphans.discard(5, GPU) is counts
    assert orphans.release(1) == [("with tokens", {CPU: 1})]
    assert not orphans.discard(5, CPU)
    orphans.check()


def test_a_copy_can_be_taken_back() -> None:
    orphans = orphans_in(counts=True)
    park(orphans, 7, 1, "first")
    park(orphans, 7, 1, "again")
    assert orphans.discard(7, GPU)
    assert not orphans.discard(7, CPU)
    assert not orphans.discard(8, GPU)
    assert orphans.release(1) == [("first", {GPU: 1})]
    orphans.check()


def test_the_one_that_waited_longest_makes_room() -> None:
    orphans = orphans_in(limit=30)
    for i in range(10):
        park(orphans, 100 + i, i % 2, str(i))
    assert orphans.dropped == 7
    assert [item for item, _ in orphans.release(0) + orphans.release(1)] == ["8", "7", "9"]


def test_check_finds_contradictions() -> None:
    orphans = orphans_in()
    park(orphans, 5, 1, "a")
    orphans._children.clear()
    with pytest.raises(IntegrityError, match="found by it"):
        orphans.check()


def test_bytes_are_bounded_and_given_back() -> None:
    """Two workers share a budget; who finds no room drops its own, never another's."""
    budget = MemoryBudget(100)
    first, second = (Orphans[str](budget) for _ in range(2))
    for i in range(3):
        park(first, 10 + i, 0, str(i), size=30)
    park(second, 1, 0, "x", size=30)
    assert (len(first), len(second), second.dropped) == (3, 0, 1)
    park(first, 13, 0, "3", size=60)
    assert ([item for item, _ in first.release(0)], first.dropped, budget.used) == (["2", "3"], 2, 0)
    park(second, 1, 0, "x", size=30)
    park(second, 2, 0, "y", size=200)
    assert (len(second), second.dropped) == (0, 3)
    park(second, 3, None, "without tokens", size=90)
    park(second, 3, 0, "with tokens, for which there is no room", size=110)
    assert (len(second), second.dropped, budget.used) == (0, 4, 0)
    second.clear()
    assert (second.dropped, budget.used) == (0, 0)


def test_many_that_wait_for_one_parent_are_taken_back_one_by_one() -> None:
    orphans = orphans_in(counts=True)
    for i in range(50_000):
        orphans.park(i % 25_000, 1 << 40, str(i), 1, {GPU: 1})
    for i in range(25_000):
        assert orphans.discard(i, GPU)
    orphans.check()
    assert [item for item, _ in orphans.release(1 << 40)] == [str(i) for i in range(25_000)]
