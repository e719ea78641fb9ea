"""What is known of a publisher, and what proves it: sums by rank, marks, losses, clears."""

from __future__ import annotations

import pytest
from kvtier.events.follow.replica import MAX_RANKS, MarkResult, RankSums, Replica
from tests.chaos.stream_kit import stored

from kvtier.errors import IntegrityError
from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    Change,
    EventEncoder,
    Kind,
    Mark,
    Place,
    Received,
    Reset,
    decode_batch,
    frame_batch,
    place_weight,
)

GPU: Place = ("GPU", 0, "", "")
ENCODER = EventEncoder()
CLEAR = Change(True, 0, 0)


def store(*hashes: int) -> Change:
    return Change(False, len(hashes), sum(hashes))


def remove(*hashes: int) -> Change:
    return Change(False, -len(hashes), -sum(hashes) % (1 << 64))


def mark_of(*hashes: int, epoch: int = 1) -> Mark:
    return Mark(epoch, len(hashes), sum(hashes) % (1 << 64))


# -- sums ------------------------------------------------------------------------------------------


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
    sums.note_loss()  # store(5) is lost
    sums.add(0, remove(5))
    sums.add(0, store(5))
    sums.note_loss()  # remove(5) is lost: the publisher holds nothing, the consumer holds 5
    assert (sums.blocks, sums.digest) == (0, 0)
    assert not sums.confirm(mark_of())
    sums.add(0, CLEAR)
    assert sums.confirm(mark_of())


def test_one_loss_may_move_a_block_from_one_rank_to_another_so_it_is_no_proof_either() -> None:
    sums = RankSums(is_open=False)
    sums.add(0, store(5))
    sums.add(1, CLEAR)
    sums.note_loss()  # rank 0 removes 5, rank 1 stores it: the mark is the same
    assert not sums.confirm(mark_of(5))


def test_a_clear_mends_its_own_rank() -> None:
    sums = RankSums(is_open=False)
    sums.add(0, store(5))
    sums.add(1, store(6))
    sums.note_loss()
    sums.add(0, CLEAR)
    assert (sums.blocks, sums.digest) == (1, 6)
    assert not sums.confirm(mark_of(6))
    sums.add(1, CLEAR)
    assert sums.confirm(mark_of())


def test_of_a_rank_that_was_never_heard_of_only_a_mark_can_tell() -> None:
    sums = RankSums(is_open=False)
    sums.add(0, store(5))
    sums.note_loss()  # rank 7 stores 9
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
    sums.add(None, store(5))
    assert not sums.are_whole(is_stock=True)
    sums.add(None, CLEAR)
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


def test_check_finds_sums_that_count_as_proven_and_are_not() -> None:
    sums = RankSums()
    sums.add(0, store(1))
    sums.is_open = False
    with pytest.raises(IntegrityError, match="count as proven"):
        sums.check()


# -- replicas --------------------------------------------------------------------------------------


def batch(*hashes: int, rank: int | None = 0, mark: Mark | None = None, is_cleared: bool = False) -> bytes:
    events = [ENCODER.event(AllBlocksCleared())] if is_cleared else []
    events += [ENCODER.event(stored([block_hash])) for block_hash in hashes]
    return frame_batch(0.0, [*events, ENCODER.mark(mark)] if mark is not None else events, rank)


def weighed(*hashes: int, epoch: int = 1) -> Mark:
    return Mark(epoch, len(hashes), sum(hashes) * place_weight(GPU) % (1 << 64))


def apply(replica: Replica[object], seq: int, payload: bytes, **options: bool) -> MarkResult | None:
    decoded = replica.read(payload)
    assert decoded is not None
    return replica.apply(seq, decoded, payload, 1.0, **options)


@pytest.fixture
def replica() -> Replica[object]:
    """Return the replica of a publisher that marked its third batch."""
    made: Replica[object] = Replica("p", decode_batch)  # type: ignore[arg-type]
    made.begin_at(0)
    for seq in range(2):
        assert apply(made, seq, batch(seq)) is None
    assert apply(made, 2, batch(2, mark=weighed(0, 1, 2))) is MarkResult.CONFIRMED
    return made


def test_a_confirmed_replica_is_exact_until_it_is_behind_or_doubted(replica: Replica[object]) -> None:
    assert (replica.kind, replica.epoch, replica.seq, replica.blocks) == (Kind.KVTIER, 1, 2, 3)
    assert replica.is_exact
    replica.expect(3)
    assert not replica.is_exact
    replica.expect_only(2)
    replica.doubt()
    assert not replica.is_exact
    assert replica.judge(weighed(0, 1, 2)) is MarkResult.CONFIRMED
    assert replica.is_exact


def test_a_mark_that_does_not_agree_disproves_it_once(replica: Replica[object]) -> None:
    assert replica.judge(weighed(0, 1)) is MarkResult.DISPROVED
    assert replica.judge(weighed(0, 1, 2)) is MarkResult.OPEN, "it cannot be believed any more"
    assert replica.counters.digest_mismatches == 1
    assert apply(replica, 3, batch(8, is_cleared=True, mark=weighed(8))) is MarkResult.CONFIRMED


def test_what_was_lost_is_counted_and_costs_the_proof(replica: Replica[object]) -> None:
    replica.lose(5)
    assert (replica.seq, replica.newest, replica.counters.lost_batches) == (4, 4, 2)
    assert apply(replica, 5, batch(mark=weighed(0, 1, 2))) is MarkResult.OPEN
    assert not replica.is_exact


def test_events_that_cannot_be_read_cost_the_proof(replica: Replica[object]) -> None:
    payload = frame_batch(0.0, [b"\x92\xa7Unknown\x01", ENCODER.mark(weighed(0, 1, 2))], 0)
    assert apply(replica, 3, payload) is MarkResult.OPEN
    assert not replica.is_exact
    assert replica.counters.skipped_events == 1


def test_another_incarnation_is_believed_only_where_it_begins_with_a_clear_of_all(
    replica: Replica[object],
) -> None:
    assert apply(replica, 3, batch(is_cleared=True, mark=weighed(epoch=2))) is MarkResult.CONFIRMED
    apply(replica, 4, batch(7, rank=1))
    again = batch(is_cleared=True, rank=0, mark=weighed(7, epoch=3))
    assert apply(replica, 5, again) is MarkResult.REPLACED, "its 7 need not be rank 1's"


def test_a_snapshot_is_believed_whoever_made_it(replica: Replica[object]) -> None:
    replica.forget()
    apply(replica, 8, batch(4, is_cleared=True), is_snapshot=True)
    assert (
        apply(replica, 8, batch(5, rank=1, mark=weighed(4, 5, epoch=2)), is_snapshot=True)
        is MarkResult.CONFIRMED
    )
    assert (replica.is_exact, replica.epoch, replica.counters.restarts) == (True, 2, 1)


def test_a_new_beginning_is_told_once(replica: Replica[object]) -> None:
    replica.take_updates()
    replica.forget()
    replica.forget_publisher()
    assert replica.take_updates() == [Reset("p")]
    assert (replica.kind, replica.epoch, replica.seq, replica.newest) == (None, None, None, -1)
    replica.rebuild_from(4)
    apply(replica, 4, batch(1))
    assert [type(update) for update in replica.take_updates()] == [Received]
    assert not replica.is_whole
    assert "buffer begins at batch 4" in replica.problem


def test_without_marks_a_removal_and_a_store_need_a_clear_after_a_loss() -> None:
    replica: Replica[object] = Replica("p", decode_batch)  # type: ignore[arg-type]
    replica.identify(Kind.STOCK)
    replica.begin_at(0)
    apply(replica, 0, batch(1))
    proof = replica.proof
    assert proof is not None
    assert replica.recall(0) == proof
    replica.lose(2)
    payload = frame_batch(0.0, [ENCODER.event(BlockRemoved([1], "GPU"))], 0)
    apply(replica, 2, payload)
    assert not replica.is_whole
    apply(replica, 3, batch(is_cleared=True))
    assert replica.is_exact
    replica.check()


@pytest.mark.parametrize("ranks", [(None, 0), (0, None)])
def test_a_batch_without_a_rank_is_of_rank_0(ranks: tuple[int | None, int | None]) -> None:
    """They were two ranks here and one in an index: a clear of one emptied both there, and mended one."""
    replica: Replica[object] = Replica("p", decode_batch)  # type: ignore[arg-type]
    replica.identify(Kind.STOCK)
    replica.begin_at(0)
    for seq, rank in enumerate(ranks):
        apply(replica, seq, batch(seq, rank=rank))
    replica.lose(3)
    assert not replica.is_whole
    apply(replica, 3, batch(7, rank=ranks[1], is_cleared=True))
    assert (replica.is_exact, replica.sums.blocks) == (True, 1)
