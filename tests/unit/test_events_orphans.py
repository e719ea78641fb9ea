"""Stores whose parent is unknown wait for it, within bounds, and come out in order."""

from __future__ import annotations

import random

import pytest
from tests.chaos.stream_kit import Picture, stored

from kvtier.errors import IntegrityError
from kvtier.events import AllBlocksCleared, BlockRemoved, BlockStored, OrphanFilter, Orphans


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


def test_a_store_waits_for_its_parent() -> None:
    orphans = OrphanFilter()
    assert orphans.admit([stored([2, 3], parent=1), stored([9], parent=8)]) == []
    assert orphans.admit([stored([1])]) == [stored([1]), stored([2], parent=1), stored([3], parent=2)]
    assert (orphans.parked, len(orphans.waiting)) == (3, 1)
    orphans.check()


def test_a_parent_in_another_place_or_form_counts() -> None:
    orphans = OrphanFilter()
    orphans.admit([stored([1 << 40], medium="GPU")])
    child = stored([2], parent=1 << 40, medium="CPU")
    as_bytes = BlockStored([3], b"\7" * 24 + (1 << 40).to_bytes(8, "big"), [], 0, None, "CPU", None)
    assert orphans.admit([child, as_bytes]) == [child, as_bytes]


def test_a_block_that_is_removed_while_it_waits_never_comes_out() -> None:
    orphans = OrphanFilter()
    orphans.admit([stored([2, 3, 4], parent=1), stored([3], parent=2, medium="CPU")])
    assert orphans.admit([BlockRemoved([3, 77], "GPU")]) == [BlockRemoved([77], "GPU")]
    assert orphans.admit([stored([1])]) == [stored([1]), stored([2], parent=1), stored([3], parent=2, medium="CPU")] + [
        stored([4], parent=3)
    ]
    assert len(orphans.waiting) == 0


def test_a_clear_drops_what_waits() -> None:
    orphans = OrphanFilter()
    orphans.admit([stored([1]), stored([3], parent=2)])
    assert orphans.admit([AllBlocksCleared()]) == [AllBlocksCleared()]
    assert orphans.admit([stored([2], parent=1)]) == []
    assert orphans.admit([stored([1])]) == [stored([1]), stored([2], parent=1)]


@pytest.mark.parametrize("seed", range(5))
def test_any_order_gives_the_same_picture_with_parents_first(seed: int) -> None:
    rng = random.Random(seed)
    chains = [[rng.getrandbits(62) for _ in range(rng.randint(1, 6))] for _ in range(20)]
    events = [stored([each], chain[i - 1] if i else None) for chain in chains for i, each in enumerate(chain)]
    truth = Picture()
    truth.fold(events)
    rng.shuffle(events)
    orphans, picture = OrphanFilter(), Picture()
    held: set[int] = set()
    for event in events:
        for admitted in orphans.admit([event]):
            assert isinstance(admitted, BlockStored)
            assert admitted.parent_block_hash is None or admitted.parent_block_hash in held
            held.update(each for each in admitted.block_hashes if isinstance(each, int))
            picture.fold([admitted])
        orphans.check()
    assert picture.blocks == truth.blocks
    assert len(orphans.waiting) == 0
