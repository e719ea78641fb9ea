"""The parts of a follower's state: sums by rank, pending batches, back-off."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import IntegrityError
from kvtier.events import Change, Limits, Mark
from kvtier.events.follow.state import MAX_RANKS, Backoff, PendingBatches, RankSums

CLEAR = Change(True, 0, 0)


# -- sums ------------------------------------------------------------------------------------------


def store(*hashes: int) -> Change:
    return Change(False, len(hashes), sum(hashes))


def remove(*hashes: int) -> Change:
    return Change(False, -len(hashes), -sum(hashes) % (1 << 64))


def mark_of(*hashes: int, epoch: int = 1) -> Mark:
    return Mark(epoch, len(hashes), sum(hashes) % (1 << 64))


def test_blocks_may_be_counted_while_another_thread_adds_ranks() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    shown, is_over = RankSums(is_open=False), threading.Event()

    def count() -> None:
        while not is_over.is_set():
            assert shown.blocks >= 0

    try:
        with ThreadPoolExecutor(1) as pool:
            counting = pool.submit(count)
            until = time.monotonic() + 0.5
            while time.monotonic() < until and not counting.done():
                shown = RankSums(is_open=False)
                for rank in range(64):
                    shown.add(rank, store(rank))
            is_over.set()
            counting.result()
    finally:
        sys.setswitchinterval(interval)


def test_a_mark_confirms_what_was_seen_from_the_start() -> None:
    sums = RankSums(is_open=False)
    sums.add(0, store(5, 7))
    sums.add(1, store(5))
    sums.add(0, remove(7))
    assert sums.are_whole(is_stock=False)
    assert sums.confirm(mark_of(5, 5))
    assert not sums.confirm(mark_of(5, 7))


def test_a_mark_shows_that_nothing_was_held_before_the_first_batch_that_came() -> None:
    sums = RankSums()
    sums.add(0, store(5))
    assert not sums.are_whole(is_stock=False)
    assert not sums.confirm(mark_of(5, 6))
    assert sums.confirm(mark_of(5))
    assert sums.are_whole(is_stock=False)


def test_losses_that_cancel_are_no_proof() -> None:
    sums = RankSums(is_open=False)
    sums.add(0, CLEAR)
    sums.add_loss()  # store(5) is lost
    sums.add(0, remove(5))
    sums.add(0, store(5))
    sums.add_loss()  # remove(5) is lost: the publisher holds nothing, the consumer holds 5
    assert (sums.blocks, sums.digest) == (0, 0)
    assert not sums.confirm(mark_of())
    sums.add(0, CLEAR)
    assert sums.confirm(mark_of())


def test_one_loss_that_moves_a_block_to_another_rank_is_no_proof() -> None:
    sums = RankSums(is_open=False)
    sums.add(0, store(5))
    sums.add(1, CLEAR)
    sums.add_loss()  # rank 0 removes 5, rank 1 stores it: the mark is the same
    assert not sums.confirm(mark_of(5))


def test_a_clear_mends_its_own_rank() -> None:
    sums = RankSums(is_open=False)
    sums.add(0, store(5))
    sums.add(1, store(6))
    sums.add_loss()
    sums.add(0, CLEAR)
    assert (sums.blocks, sums.digest) == (1, 6)
    assert not sums.confirm(mark_of(6))
    sums.add(1, CLEAR)
    assert sums.confirm(mark_of())


def test_only_a_mark_covers_ranks_that_were_never_heard_of() -> None:
    sums = RankSums(is_open=False)
    sums.add(0, store(5))
    sums.add_loss()  # rank 7 stores 9
    sums.add(0, CLEAR)
    assert not sums.are_whole(is_stock=False)
    assert not sums.confirm(mark_of(9))
    sums.add(7, remove(9))
    assert sums.blocks == -1
    assert sums.confirm(mark_of()) is False
    sums.add(7, CLEAR)
    assert sums.confirm(mark_of())


def test_without_marks_a_clear_of_all_ranks_heard_of_is_enough() -> None:
    sums = RankSums()
    assert not sums.are_whole(is_stock=True)
    sums.add(0, store(5))
    assert not sums.are_whole(is_stock=True)
    sums.add(0, CLEAR)
    assert sums.are_whole(is_stock=True)
    assert not sums.are_whole(is_stock=False)
    sums.add(3, store(5))
    assert not sums.are_whole(is_stock=True), "another rank, of which nothing is known"


def test_ranks_are_bounded_and_beyond_the_bound_nothing_is_proven() -> None:
    sums = RankSums(is_open=False)
    for rank in range(MAX_RANKS + 10):
        sums.add(rank, store(rank))
    assert len(sums._ranks) == MAX_RANKS
    assert not sums.are_whole(is_stock=False)
    assert not sums.are_whole(is_stock=True)
    assert not sums.confirm(Mark(1, sums.blocks, sums.digest))
    sums.check()


def test_check_finds_sums_that_are_wrongly_proven() -> None:
    sums = RankSums()
    sums.add(0, store(1))
    sums.is_open = False
    with pytest.raises(IntegrityError, match="count as proven"):
        sums.check()


# -- pending batches -------------------------------------------------------------------------------


def test_pending_batches_are_consecutive() -> None:
    pending = PendingBatches(10, 100)
    for seq in (3, 4, 7, 8):
        pending.push(seq, b"x")
        pending.check()
    assert (len(pending), pending.first) == (2, (7, b"x"))
    pending.pop()
    assert pending.first == (8, b"x")
    assert pending.overflows == 0


@pytest.mark.parametrize("limits", [(3, 100), (100, 3)])
def test_full_pending_batches_are_dropped_but_for_the_new_one(limits: tuple[int, int]) -> None:
    pending = PendingBatches(*limits)
    for seq in range(4):
        pending.push(seq, b"x")
    assert (len(pending), pending.first, pending.overflows) == (1, (3, b"x"), 1)
    pending.check()


def test_a_batch_larger_than_the_bound_is_not_kept() -> None:
    pending = PendingBatches(10, 3)
    pending.push(0, b"x")
    pending.push(1, b"xxxx")
    assert (len(pending), pending.overflows) == (0, 1)
    pending.check()


def test_check_finds_pending_batches_that_are_counted_wrong() -> None:
    pending = PendingBatches(10, 100)
    pending.push(0, b"x")
    pending._bytes = 2
    with pytest.raises(IntegrityError, match="by the count"):
        pending.check()


# -- back-off --------------------------------------------------------------------------------------

LIMITS = Limits(backoff=1.0, backoff_max=5.0, tries=3)


@pytest.fixture
def backoff() -> Backoff:
    return Backoff(LIMITS, now=100.0)


def test_backoff_grows_with_every_failure_up_to_a_bound(backoff: Backoff) -> None:
    assert not backoff.is_waiting
    outcomes = [(backoff.after_failure(100.0), backoff.until, backoff.other_way) for _ in range(5)]
    assert outcomes == [
        (False, 101.0, True),
        (False, 102.0, False),
        (True, 104.0, True),
        (True, 105.0, False),
        (True, 105.0, True),
    ]
    backoff.tick(104.9)
    assert backoff.is_waiting
    backoff.tick(105.0)
    assert not backoff.is_waiting
    assert backoff.after_failure(105.0), "time alone forgets no failure"
    backoff.end()
    assert not backoff.is_waiting
    assert not backoff.after_failure(106.0)
    assert backoff.until == 107.0


def test_a_replica_disproved_once_is_replaced_at_once(backoff: Backoff) -> None:
    assert [backoff.after_mismatch(100.0) for _ in range(2)] == [False, False]
    assert not backoff.is_waiting
    assert backoff.after_mismatch(100.0)
    assert backoff.until == 104.0
    backoff.end()
    backoff.forget_mismatches()
    assert not backoff.after_mismatch(110.0)
    assert not backoff.is_waiting


def test_only_one_reset_after_another_has_to_wait(backoff: Backoff) -> None:
    backoff.after_reset(100.0)
    assert not backoff.is_waiting
    backoff.after_reset(100.5)
    assert backoff.until == 101.5
    backoff.after_reset(103.0)
    assert not backoff.is_waiting
