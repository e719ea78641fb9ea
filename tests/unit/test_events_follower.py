"""Every way in which a stream can go wrong, one at a time: what a follower then requests and delivers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.chaos.stream_kit import Message, ModelPublisher, ModelReplica, stored

from kvtier.errors import IntegrityError
from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventEncoder,
    Follower,
    Kind,
    Limits,
    Mark,
    Received,
    RequestKind,
    Reset,
    State,
    StateChanged,
    change_of,
    decode_batch,
    frame_batch,
)
from kvtier.events.wire import END_SEQ

LIMITS = Limits(
    reply_timeout=2.0, probe_interval=5.0, catch_up_delay=0.25, tries=3, backoff=0.25, backoff_max=4.0
)
ENCODER = EventEncoder()


class Bench:
    """A follower, a publisher to request, and the replica that a consumer has."""

    def __init__(
        self, *, is_stock: bool = False, can_ask: bool = True, ring: int = 100, limits: Limits = LIMITS
    ) -> None:
        self.now = 50.0
        self.publisher = ModelPublisher(random.Random(1), ring=ring, is_stock=is_stock)
        self.publisher.rng.random = lambda: 0.5  # no marks but where a test wants them
        self.follower = Follower("p", decode_batch, can_ask=can_ask, limits=limits, now=self.now)
        self.replica = ModelReplica()
        self.updates: list[object] = []
        self.hash = 1 << 62

    def publish(self, count: int = 1) -> Message:
        """Let the publisher store `count` new blocks in one batch; nothing arrives by itself."""
        message = self.publisher.publish([stored(list(range(self.hash, self.hash + count)))])
        self.hash += count
        assert message is not None
        return message

    def live(self, *messages: Message | None) -> None:
        """Let batches arrive.

        The first after a join is verified; most tests are not about that, so it is answered.
        """
        for message in messages:
            assert message is not None
            was_asking = self.follower.request is not None
            self.follower.live(*message, self.now)
            if not was_asking and self.follower.pending and self.follower.seq == message[0] - 1:
                self.answer_all()
        self.take()

    def take(self) -> None:
        updates = self.follower.take_updates()
        self.updates += updates
        self.replica.apply(updates)
        self.follower.check()

    def answer(self, *, upto: int | None = None) -> RequestKind:
        """Answer the request under way, whole or in part and without its end."""
        request = self.follower.request
        assert request is not None, (self.follower.state, self.follower.reason)
        for seq, payload in self.publisher.answer(request.data)[:upto]:
            self.follower.reply(request, seq, payload, self.now)
        if upto is None:
            self.follower.end(request, self.now)
        self.take()
        return request.kind

    def answer_all(self) -> list[RequestKind]:
        """Answer until nothing is asked any more; return what was."""
        asked = []
        while self.follower.request is not None:
            asked.append(self.answer())
            assert len(asked) < 10, asked
        return asked

    def join(self) -> list[RequestKind]:
        """Connect and answer; a publisher of ours also sends a heartbeat, which says who speaks."""
        self.follower.connected(self.now)
        asked = self.answer_all()
        if not self.publisher.is_stock:
            asked += self.beat()
        return asked

    def recover(self) -> list[RequestKind]:
        """Answer everything; where a publisher of ours has to say who speaks, its heartbeat does."""
        asked = self.answer_all()
        while not self.publisher.is_stock and self.state is not State.EXACT:
            asked += self.beat()
            self.wait(0.3)
            assert len(asked) < 20, asked
        return asked

    def beat(self) -> list[RequestKind]:
        """Let a heartbeat arrive, and answer what is asked then."""
        message = self.publisher.heartbeat()
        assert message is not None
        self.follower.live(*message, self.now)
        return self.answer_all()

    def wait(self, seconds: float) -> None:
        """Let time pass, ticking whenever the follower wants to be."""
        until = self.now + seconds
        while self.follower.deadline < until:
            self.now = max(self.now, self.follower.deadline)
            self.follower.tick(self.now)
        self.now = until
        self.follower.tick(self.now)
        self.take()

    @property
    def state(self) -> State:
        return self.follower.state

    def delivered(self) -> list[int]:
        return [update.seq for update in self.updates if isinstance(update, Received)]

    def states(self) -> list[State]:
        return [update.state for update in self.updates if isinstance(update, StateChanged)]

    def assert_exact(self) -> None:
        self.take()
        assert self.state is State.EXACT, self.follower.reason
        assert self.replica.state is State.EXACT
        assert self.replica.held == self.publisher.truth.held
        assert self.follower.reason == ""


def ours(**options: object) -> Bench:
    bench = Bench(**options)  # type: ignore[arg-type]
    bench.publisher.hello()
    return bench


def stock(**options: object) -> Bench:
    return Bench(is_stock=True, **options)  # type: ignore[arg-type]


def heartbeat(bench: Bench) -> Message:
    message = bench.publisher.heartbeat()
    assert message is not None
    return message


# -- joining ---------------------------------------------------------------------------------------


def test_nothing_is_asked_before_the_stream_is_connected() -> None:
    bench = ours()
    assert bench.follower.request is None
    assert (bench.state, bench.follower.reason) == (State.REPAIRING, "connecting")
    bench.wait(3)
    assert (bench.state, bench.follower.reason) == (State.DEGRADED, "no connection for 2 s")
    bench.join()
    bench.assert_exact()


def test_our_publisher_is_joined_by_snapshot() -> None:
    bench = ours()
    for _ in range(20):
        bench.publish(3)
    assert bench.join() == [RequestKind.STATUS, RequestKind.SNAPSHOT]
    bench.assert_exact()
    assert bench.follower.kind is Kind.KVTIER
    assert bench.follower.epoch == bench.publisher.epoch
    assert bench.follower.position == bench.publisher.newest
    assert not any(isinstance(update, Reset) for update in bench.updates)


def test_a_stock_publisher_is_joined_from_its_first_batch() -> None:
    bench = stock()
    for _ in range(20):
        bench.publish()
    assert bench.join() == [RequestKind.STATUS, RequestKind.HISTORY]
    bench.assert_exact()
    assert bench.follower.kind is Kind.STOCK
    assert bench.delivered() == list(range(20))


@pytest.mark.parametrize("make", [ours, stock])
def test_an_empty_publisher_is_joined(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.join()
    bench.assert_exact()
    bench.live(bench.publish(), bench.publish())
    bench.assert_exact()


@pytest.mark.parametrize("make", [ours, stock])
def test_live_batches_wait_for_the_replica_and_are_not_applied_twice(make: Callable[[], Bench]) -> None:
    bench = make()
    for _ in range(5):
        bench.publish()
    early = bench.publish()
    bench.follower.connected(bench.now)
    bench.live(early)
    assert bench.delivered() == []
    bench.answer()
    if not bench.publisher.is_stock:
        bench.live(bench.publisher.heartbeat())
    late = bench.publish()
    bench.answer(upto=2)
    bench.live(late)
    assert bench.state is State.REPAIRING
    request = bench.follower.request
    assert request is not None
    for reply in bench.publisher.answer(request.data)[2:]:
        bench.follower.reply(request, *reply, bench.now)
    bench.follower.end(request, bench.now)
    bench.assert_exact()
    assert max(bench.replica.blocks.values()) == 1
    bench.live(bench.publish())
    bench.assert_exact()


def test_a_stock_publisher_whose_buffer_lost_its_beginning_is_degraded_until_it_clears() -> None:
    bench = stock(ring=10)
    for _ in range(30):
        bench.publish()
    bench.join()
    assert (bench.state, bench.follower.reason) == (
        State.DEGRADED,
        "the publisher's buffer begins at batch 20",
    )
    assert bench.delivered() == list(range(20, 30))
    assert bench.follower.counters.truncated_replays == 1
    bench.live(bench.publish())
    assert bench.state is State.DEGRADED
    bench.live(bench.publisher.publish([AllBlocksCleared()]))
    bench.assert_exact()


def test_after_a_clear_a_stock_replica_can_be_rebuilt_again() -> None:
    bench = stock(ring=10)
    for _ in range(30):
        bench.publish()
    bench.join()
    bench.live(bench.publisher.publish([AllBlocksCleared()]), bench.publish())
    bench.publish()
    bench.live(bench.publish())
    bench.wait(20)  # nobody answers
    assert bench.state is State.DEGRADED
    asked = [*bench.answer_all(), bench.wait(4.1), *bench.answer_all()]
    assert RequestKind.HISTORY in asked
    bench.assert_exact()


def test_a_publisher_that_ignores_the_first_question_is_asked_another_way() -> None:
    bench = stock()
    bench.publish()
    bench.follower.connected(bench.now)
    assert bench.follower.request is not None
    assert bench.follower.request.kind is RequestKind.STATUS
    bench.wait(2.3)
    assert bench.answer() is RequestKind.HISTORY
    bench.assert_exact()


def test_too_much_live_traffic_while_joining_is_dropped_and_replayed() -> None:
    bench = ours(limits=Limits(pending_batches=3))
    bench.follower.connected(bench.now)
    bench.answer()
    bench.live(bench.publisher.heartbeat())
    parts = bench.publisher.answer(b"snapshot")
    bench.live(*(bench.publish() for _ in range(10)))
    assert bench.follower.pending <= 3
    assert bench.follower.counters.pending_overflows > 0
    request = bench.follower.request
    assert request is not None
    for reply in parts:
        bench.follower.reply(request, *reply, bench.now)
    bench.follower.end(request, bench.now)
    assert bench.answer_all() == [RequestKind.REPLAY, RequestKind.STATUS]
    bench.assert_exact()


def test_one_batch_larger_than_the_buffer_is_replayed() -> None:
    bench = stock(limits=Limits(pending_bytes=10))
    bench.follower.connected(bench.now)
    bench.live(bench.publish(50))
    assert bench.follower.pending == 0
    bench.answer_all()
    bench.assert_exact()


# -- gaps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "asked"),
    [(ours, [RequestKind.REPLAY, RequestKind.STATUS]), (stock, [RequestKind.REPLAY])],
)
def test_a_gap_is_replayed(make: Callable[[], Bench], asked: list[RequestKind]) -> None:
    bench = make()
    bench.live(bench.publish())
    bench.join()
    bench.updates.clear()
    first = bench.follower.position + 1
    for _ in range(3):
        bench.publish()
    bench.live(bench.publish())
    assert bench.state is State.REPAIRING
    assert "missing" in bench.follower.reason
    bench.live(bench.publish())
    assert bench.answer_all() == asked
    bench.assert_exact()
    assert bench.delivered() == list(range(first, first + 5))
    assert bench.states() == [State.REPAIRING, State.EXACT]
    assert bench.follower.counters.gaps == 1
    assert bench.follower.counters.lost_batches == 0


def test_a_gap_beyond_the_buffer_is_closed_by_a_snapshot() -> None:
    bench = ours(ring=5)
    bench.join()
    for _ in range(20):
        bench.publish(2)
    bench.live(bench.publish())
    bench.answer_all()
    assert bench.state is State.REPAIRING
    assert bench.beat() == [RequestKind.SNAPSHOT]
    bench.assert_exact()


def test_a_live_batch_cannot_slip_into_a_snapshot() -> None:
    """The number of a snapshot is that of a live batch still under way."""
    bench = ours()
    bench.publish(5)
    bench.follower.connected(bench.now)
    bench.answer()
    bench.live(heartbeat(bench))
    request = bench.follower.request
    assert request is not None
    assert request.kind is RequestKind.SNAPSHOT
    under_way = bench.publish(2)
    parts = bench.publisher.answer(request.data)
    bench.follower.reply(request, *parts[0], bench.now)
    bench.live(under_way)
    assert bench.delivered() == [under_way[0]]
    for reply in parts[1:]:
        bench.follower.reply(request, *reply, bench.now)
    bench.follower.end(request, bench.now)
    bench.assert_exact()
    bench.live(bench.publish())
    bench.assert_exact()
    assert max(bench.replica.blocks.values()) == 1


def test_a_wide_gap_is_closed_by_a_snapshot() -> None:
    bench = ours(ring=5)
    bench.join()
    bench.publisher.newest += 20_000
    bench.live(bench.publish())
    assert bench.answer_all() == []
    assert bench.beat() == [RequestKind.SNAPSHOT]
    bench.assert_exact()


def test_a_snapshot_older_than_the_live_stream_is_brought_up_to_date() -> None:
    """Publishers share snapshots between those who ask within a moment."""
    bench = ours()
    bench.join()
    bench.live(bench.publish())
    old = bench.publisher.answer(b"snapshot")
    bench.live(bench.publish(), bench.publish(), false_mark(bench))
    request = bench.follower.request
    assert request is not None
    assert request.kind is RequestKind.SNAPSHOT
    for reply in old:
        bench.follower.reply(request, *reply, bench.now)
    bench.follower.end(request, bench.now)
    bench.take()
    assert bench.state is State.REPAIRING
    bench.publisher._ring.pop()
    bench.publisher.newest -= 1
    bench.publisher.heartbeat()  # in place of the false mark
    assert bench.answer_all() == [RequestKind.REPLAY]
    bench.assert_exact()


@pytest.mark.parametrize(
    ("jump", "asked"),
    [(3, [RequestKind.REPLAY, RequestKind.STATUS]), (20_000, [RequestKind.SNAPSHOT])],
)
def test_a_live_number_that_the_publisher_never_used_is_ignored(jump: int, asked: list[RequestKind]) -> None:
    bench = ours()
    bench.join()
    bench.live(bench.publish())
    bench.live((bench.publisher.newest + jump, bench.publisher.answer(b"kvtier:status")[0][1]))
    assert bench.answer_all() == asked
    bench.assert_exact()
    bench.live(bench.publish(), bench.publisher.heartbeat())
    bench.assert_exact()
    assert bench.follower.counters.restarts == 0


@pytest.mark.parametrize("left_out", [0, 2])
def test_a_replay_of_ours_that_leaves_something_out_is_followed_by_a_snapshot(left_out: int) -> None:
    """As one does that jumps over a gap too long to be filled."""
    bench = ours()
    bench.join()
    for _ in range(6):
        bench.publish()
    bench.live(bench.publish())
    request = bench.follower.request
    assert request is not None
    replies = bench.publisher.answer(request.data)
    for reply in replies[:left_out] + replies[left_out + 1 :]:
        bench.follower.reply(request, *reply, bench.now)
    bench.take()
    assert bench.state is State.REPAIRING
    assert bench.follower.request is None
    bench.wait(0.3)
    assert bench.beat() == [RequestKind.SNAPSHOT]
    bench.assert_exact()


def test_a_state_of_more_ranks_than_numbers_is_followed_by_a_snapshot() -> None:
    """Such a replay has several batches under one number, and the replica would lack all but the first."""
    bench = ours()
    bench.join()
    bench.publish()
    bench.publish()
    bench.live(bench.publish())
    request, newest = bench.follower.request, bench.publisher.newest
    assert request is not None
    assert request.kind is RequestKind.REPLAY
    cleared = ENCODER.event(AllBlocksCleared())
    replies = [(newest - 2, 0), (newest - 1, 1), (newest - 1, 2)]
    for seq, rank in replies:
        bench.follower.reply(request, seq, frame_batch(1.0, [cleared], rank), bench.now)
    for reply in bench.publisher.answer(request.data)[-1:]:
        bench.follower.reply(request, *reply, bench.now)
    bench.follower.end(request, bench.now)
    bench.take()
    assert bench.follower.blocks is None  # so no status or live batch makes it exact
    assert RequestKind.SNAPSHOT in bench.recover()
    bench.assert_exact()


def test_a_burnt_number_is_repaired_from_the_state() -> None:
    bench = ours()
    bench.join()
    bench.live(bench.publish())
    bench.publisher.overflow([stored([5 << 40])])
    bench.live(bench.publish())
    bench.recover()
    bench.assert_exact()


def test_a_stock_gap_wider_than_the_buffer_leaves_what_the_buffer_has() -> None:
    bench = stock(ring=5)
    bench.join()
    bench.live(bench.publish())
    for _ in range(20):
        bench.publish()
    bench.live(bench.publish())
    bench.answer_all()
    assert bench.state is State.DEGRADED
    assert any(isinstance(update, Reset) for update in bench.updates)
    assert bench.follower.counters.truncated_replays == 1
    assert bench.follower.counters.lost_batches == 16
    assert bench.replica.held < bench.publisher.truth.held


def test_a_hole_in_a_stock_replay_is_asked_for_again() -> None:
    """vLLM drops replies to a slow reader, the end marker among them."""
    bench = stock()
    for _ in range(10):
        bench.publish()
    bench.follower.connected(bench.now)
    bench.answer()
    request = bench.follower.request
    assert request is not None
    for reply in [answer for answer in bench.publisher.answer(request.data) if answer[0] not in (4, 5)]:
        bench.follower.reply(request, *reply, bench.now)
    bench.answer_all()
    bench.assert_exact()
    assert bench.delivered() == list(range(10))


def test_a_batch_that_a_stock_publisher_never_had_is_given_up() -> None:
    bench = stock()
    bench.join()
    bench.live(bench.publish())
    bench.publisher.burn()
    bench.live(bench.publish())
    bench.answer_all()
    assert bench.state is State.DEGRADED
    assert "leaves out batches 1 to 1" in bench.follower.reason
    bench.live(bench.publish(), bench.publisher.publish([AllBlocksCleared()]))
    bench.assert_exact()


def test_a_replay_that_ends_too_early_is_tried_again_and_then_given_up() -> None:
    bench = stock()
    bench.join()
    bench.live(bench.publish())
    bench.live((7, bench.publish()[1]))  # a number that the publisher never used
    bench.answer()
    for _ in range(3):
        bench.answer()
        assert bench.follower.request is None
        bench.wait(1.5)
    assert bench.follower.counters.lost_batches == 5
    bench.answer_all()
    bench.live(bench.publish())  # below it: the stream went back
    bench.answer_all()
    bench.assert_exact()


# -- restarts --------------------------------------------------------------------------------------


def assert_forgotten(updates: list[object]) -> None:
    """Who applies updates in order holds nothing and calls it exact at no moment."""
    changed, reset = updates[-2:]
    assert isinstance(reset, Reset)
    assert isinstance(changed, StateChanged)
    assert changed.state is State.REPAIRING


@pytest.mark.parametrize("make", [ours, stock])
def test_a_sequence_that_goes_back_is_a_restart(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.join()
    bench.live(bench.publish(), bench.publish())
    bench.publisher.begin()
    bench.publisher.hello()
    bench.live(bench.publish())
    assert_forgotten(bench.updates)
    bench.recover()
    bench.assert_exact()
    assert bench.follower.counters.restarts == 1
    assert bench.follower.counters.resets == 1


@pytest.mark.parametrize("make", [ours, stock])
def test_a_restart_at_the_same_number_is_seen(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.join()
    last = bench.publish()
    bench.live(last)
    bench.live(last)
    bench.assert_exact()
    bench.publisher.begin()
    bench.publisher.newest = last[0] - 1
    bench.live(bench.publish(2))
    bench.answer_all()
    assert bench.follower.counters.restarts == 1


@pytest.mark.parametrize("make", [ours, stock])
def test_a_restart_that_passed_the_old_number_is_seen(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.join()
    bench.live(bench.publish(), bench.publish())
    bench.publisher.begin()
    bench.publisher.hello()
    for _ in range(10):
        bench.publish()
    bench.live(bench.publish())
    bench.recover()
    bench.assert_exact()
    assert bench.follower.counters.restarts == 1


@pytest.mark.parametrize("fewer", [True, False])
@pytest.mark.parametrize("make", [ours, stock])
def test_a_restart_that_an_answer_shows_is_counted_once(make: Callable[[], Bench], fewer: bool) -> None:
    """The live stream shows it too, later: its numbers go back from those of the publisher before."""
    bench = make()
    bench.join()
    bench.live(*(bench.publish() for _ in range(5)))
    bench.assert_exact()
    bench.follower.disconnected(bench.now)
    bench.publisher.begin()
    bench.publisher.hello()
    first = [bench.publish() for _ in range(2 if fewer else 20)]
    bench.follower.connected(bench.now)
    bench.answer_all()
    bench.live(*first, bench.publish())
    bench.recover()
    bench.assert_exact()
    assert (bench.follower.counters.restarts, bench.follower.counters.resets) == (1, 1)


def test_a_restart_below_the_snapshot_is_seen_by_its_mark() -> None:
    bench = ours()
    for _ in range(10):
        bench.publish()
    bench.join()
    bench.publisher.begin()
    bench.publisher.hello()
    bench.publish()
    bench.live(bench.publisher.heartbeat())
    assert_forgotten(bench.updates)
    bench.answer_all()
    bench.assert_exact()


def test_a_restart_below_what_was_replayed_is_seen() -> None:
    """The live stream never showed a number this high, the replay did: only the bytes tell that it is
    another batch.
    """
    bench = stock()
    for _ in range(10):
        bench.publish()
    bench.join()
    bench.publisher.begin()
    for _ in range(7):
        bench.publish()
    bench.live(bench.publish())
    assert bench.state is State.REPAIRING
    bench.answer_all()
    assert bench.follower.counters.restarts == 1
    bench.assert_exact()


def test_a_replayed_batch_that_is_no_longer_remembered_makes_it_ask() -> None:
    bench = stock(ring=5000)
    early = bench.publish()
    for _ in range(2000):
        bench.publish()
    bench.join()
    bench.live(early)
    assert bench.answer_all() == [RequestKind.REPLAY]
    bench.assert_exact()
    assert bench.follower.counters.restarts == 0


def test_the_first_live_batch_of_a_stock_publisher_is_verified() -> None:
    bench = stock()
    bench.join()
    bench.follower.live(*bench.publish(), bench.now)
    bench.take()
    assert (bench.state, bench.follower.pending) == (State.REPAIRING, 1)
    assert bench.answer_all() == [RequestKind.REPLAY]
    bench.assert_exact()
    bench.follower.live(*bench.publish(), bench.now)
    assert bench.follower.request is None
    bench.assert_exact()
    assert bench.follower.counters.gaps == 0


def test_a_publisher_of_ours_without_heartbeats_is_joined_and_its_live_batches_are_verified() -> None:
    """No live mark says who speaks: a status request names the process, a replay has the same bytes."""
    bench = ours()
    bench.publish(3)
    bench.follower.connected(bench.now)
    assert bench.answer_all() == [RequestKind.STATUS]
    bench.wait(LIMITS.reply_timeout - 0.1)
    bench.live(bench.publish())
    assert bench.follower.request is None
    bench.wait(0.2)
    assert bench.answer_all() == [RequestKind.STATUS, RequestKind.SNAPSHOT]
    bench.assert_exact()
    bench.follower.live(*bench.publish(), bench.now)
    bench.take()
    assert bench.state is State.REPAIRING
    assert bench.answer_all() == [RequestKind.REPLAY, RequestKind.STATUS]
    bench.assert_exact()
    bench.follower.live(*bench.publish(), bench.now)
    assert bench.follower.request is None
    bench.assert_exact()


def test_batches_that_came_before_the_first_mark_are_not_applied() -> None:
    """They may be of an earlier process, though they go on where the snapshot of the later one ends."""
    bench = ours()
    bench.follower.connected(bench.now)
    bench.answer_all()
    bench.wait(LIMITS.reply_timeout + 0.1)
    bench.answer_all()
    foreign = frame_batch(0.0, [ENCODER.event(stored([77]))], 0)
    bench.follower.live(bench.publisher.newest + 1, foreign, bench.now)
    assert bench.follower.pending == 1
    bench.publish()
    bench.follower.live(*heartbeat(bench), bench.now)
    bench.answer_all()
    bench.assert_exact()
    assert 77 not in {block for _, block in bench.replica.held}


def test_a_live_number_of_the_process_before_does_not_keep_the_replica_behind() -> None:
    """It came late, and the process that answers is silent and has not used that number yet."""
    bench = ours()
    bench.follower.connected(bench.now)
    bench.answer_all()
    bench.wait(LIMITS.reply_timeout + 0.1)
    bench.answer_all()
    bench.assert_exact()
    foreign = frame_batch(0.0, [ENCODER.event(stored([77]))], 0)
    bench.follower.live(bench.publisher.newest + 3, foreign, bench.now)
    for _ in range(10):
        bench.answer_all()
        bench.wait(0.5)
    bench.assert_exact()
    assert bench.follower.counters.bad_frames == 1


@pytest.mark.parametrize("make", [ours, stock])
def test_a_batch_that_comes_during_a_probe_is_no_failure_of_the_probe(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.join()
    bench.live(bench.publish())
    bench.wait(5.1)
    request = bench.follower.request
    assert request is not None
    replies = bench.publisher.answer(request.data)
    bench.follower.live(*bench.publish(), bench.now)
    for reply in replies:
        bench.follower.reply(request, *reply, bench.now)
    bench.follower.end(request, bench.now)
    bench.assert_exact()
    assert (bench.follower.request, bench.follower.counters.bad_frames) == (None, 0)


@pytest.mark.parametrize("make", [ours, stock])
def test_a_live_batch_that_a_replay_has_with_other_bytes_is_of_another_process(
    make: Callable[[], Bench],
) -> None:
    bench = make()
    bench.join()
    bench.live(bench.publish())
    bench.follower.disconnected(bench.now)
    bench.follower.connected(bench.now)
    bench.answer_all()
    seq, _ = bench.publish()
    bench.follower.live(seq, frame_batch(0.0, [ENCODER.event(stored([77]))], 0), bench.now)
    bench.recover()
    bench.assert_exact()
    assert 77 not in {block for _, block in bench.replica.held}


def test_a_snapshot_of_another_process_than_the_one_that_speaks_is_refused() -> None:
    bench = ours()
    bench.follower.connected(bench.now)
    bench.answer()
    bench.follower.live(*heartbeat(bench), bench.now)
    bench.publisher.begin(keeps_sequence=True)
    hello = bench.publisher.hello()
    assert bench.answer() is RequestKind.SNAPSHOT
    assert (bench.state, bench.follower.reason) == (State.REPAIRING, "another process has answered")
    bench.wait(1.0)
    assert bench.follower.request is None, "the next live mark shows which is the later one"
    bench.live(hello)
    bench.answer_all()
    bench.assert_exact()
    assert bench.follower.epoch == bench.publisher.epoch


def test_a_first_live_batch_with_a_mark_needs_no_verifying() -> None:
    bench = ours()
    bench.join()
    bench.follower.live(*heartbeat(bench), bench.now)
    assert bench.follower.request is None
    bench.follower.live(*bench.publish(), bench.now)
    assert bench.follower.request is None
    bench.assert_exact()


@pytest.mark.parametrize("make", [ours, stock])
@pytest.mark.parametrize("is_cut", [False, True])
def test_batches_of_a_publisher_that_was_replaced_while_it_was_joined_are_not_taken_for_the_new_ones(
    make: Callable[[], Bench], is_cut: bool
) -> None:
    """By chance the old one's batches that wait go on where the new one's snapshot ends."""
    bench = make()
    bench.follower.connected(bench.now)
    old = [bench.publish() for _ in range(10)]
    bench.live(*old[4:8])
    if is_cut:
        bench.follower.disconnected(bench.now)
        bench.follower.connected(bench.now)
    bench.publisher.begin()
    bench.publisher.hello()
    while bench.publisher.newest < old[3][0]:
        bench.publish()
    bench.answer_all()
    bench.live(*old[8:])  # these were on their way for longer
    for _ in range(20):
        bench.wait(0.5)
        bench.answer_all()
        assert bench.state is not State.EXACT or bench.replica.held == bench.publisher.truth.held
    while bench.publisher.newest < old[9][0] + 5:
        bench.live(bench.publish())
        bench.answer_all()
        assert bench.state is not State.EXACT or bench.replica.held == bench.publisher.truth.held
    bench.wait(0.5)
    bench.answer_all()
    bench.assert_exact()
    assert bench.follower.counters.digest_mismatches == 0


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_snapshot_by_a_publisher_that_took_over_unties_the_live_stream(is_cut: bool) -> None:
    """The live stream was shown to be the old one's; the replica is the new one's now."""
    bench = ours()
    bench.join()
    bench.live(heartbeat(bench))
    bench.follower.live(*false_mark(bench), bench.now)
    assert bench.follower.request is not None
    assert bench.follower.request.kind is RequestKind.SNAPSHOT
    newest = bench.publisher.newest
    old = [bench.publish() for _ in range(6)]
    bench.live(*old[:4])
    if is_cut:
        bench.follower.disconnected(bench.now)
        bench.follower.connected(bench.now)
    bench.publisher.begin()
    bench.publisher.hello()
    while bench.publisher.newest < newest:
        bench.publish()
    bench.answer_all()
    bench.live(*old[4:])
    for _ in range(20):
        bench.wait(0.5)
        bench.answer_all()
        assert bench.state is not State.EXACT or bench.replica.held == bench.publisher.truth.held
    bench.assert_exact()
    assert bench.follower.epoch == bench.publisher.epoch
    assert bench.follower.counters.digest_mismatches == 1  # the false mark


def test_a_replay_by_a_publisher_that_took_over_is_not_taken_for_the_old_one_s() -> None:
    """It has all the numbers that were asked for, and sends no mark meanwhile: the next status tells."""
    bench = ours()
    bench.join()
    bench.live(heartbeat(bench))
    bench.publish()
    bench.live(bench.publish())
    newest = bench.publisher.newest
    bench.publisher.begin()
    bench.publisher.hello()
    while bench.publisher.newest <= newest:
        bench.publish()
    assert bench.answer() is RequestKind.REPLAY
    assert bench.state is State.REPAIRING
    bench.recover()
    bench.assert_exact()
    assert (bench.follower.counters.restarts, bench.follower.counters.digest_mismatches) == (1, 0)


def test_a_restart_that_continues_the_numbers_is_followed() -> None:
    bench = ours()
    bench.join()
    bench.live(bench.publish())
    bench.publisher.begin(keeps_sequence=True)
    bench.live(bench.publisher.hello())
    bench.answer_all()
    bench.assert_exact()
    assert bench.follower.epoch == bench.publisher.epoch


def test_a_first_batch_that_follows_on_begins_a_new_replica() -> None:
    """Its mark names another process, so nothing of the replica is kept."""
    bench = ours()
    bench.join()
    bench.live(bench.publish())
    newest = bench.publisher.newest
    bench.publisher.begin()
    bench.publisher.newest = newest
    bench.live(bench.publisher.hello())
    assert bench.answer_all() == [RequestKind.SNAPSHOT]
    bench.assert_exact()
    assert bench.follower.counters.restarts == 1


def test_a_mark_of_another_epoch_that_does_not_add_up_is_a_restart() -> None:
    bench = ours()
    bench.join()
    bench.live(bench.publish())
    newest = bench.publisher.newest
    bench.publisher.begin()
    bench.publisher.newest = newest
    bench.publish()
    bench.publisher.newest = newest
    bench.live(bench.publisher.heartbeat())
    assert any(isinstance(update, Reset) for update in bench.updates)
    bench.answer_all()
    bench.assert_exact()


@pytest.mark.parametrize("make", [ours, stock])
def test_a_cut_connection_is_checked_when_it_is_back(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.join()
    bench.live(bench.publish())
    bench.follower.disconnected(bench.now)
    assert (bench.state, bench.follower.reason) == (State.REPAIRING, "connection lost")
    assert bench.follower.request is None
    bench.publish()  # lost
    bench.wait(1.0)
    bench.follower.connected(bench.now)
    assert bench.state is State.REPAIRING
    bench.answer_all()
    bench.wait(0.5)
    bench.answer_all()
    bench.assert_exact()
    assert bench.follower.counters.reconnects == 1


@pytest.mark.parametrize("make", [ours, stock])
def test_a_restart_behind_a_cut_connection_is_seen(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.join()
    bench.live(bench.publish(), bench.publish())
    bench.follower.disconnected(bench.now)
    bench.publisher.begin()
    bench.publisher.hello()
    for _ in range(6):
        bench.publish()
    bench.follower.connected(bench.now)
    bench.recover()
    bench.assert_exact()
    assert bench.follower.counters.restarts == 1


def test_a_stock_publisher_that_restarted_empty_is_seen() -> None:
    bench = stock()
    bench.join()
    bench.live(bench.publish())
    bench.follower.disconnected(bench.now)
    bench.publisher.begin()
    bench.follower.connected(bench.now)
    bench.answer_all()
    bench.assert_exact()
    assert bench.replica.held == set()


def test_a_publisher_that_is_gone_is_degraded_and_says_so() -> None:
    bench = ours()
    bench.join()
    bench.follower.disconnected(bench.now)
    bench.wait(3)
    assert (bench.state, bench.follower.reason) == (State.DEGRADED, "connection lost for 2 s")
    bench.join()
    bench.assert_exact()


def test_another_kind_of_publisher_at_the_same_address_is_joined_anew() -> None:
    bench = ours()
    bench.join()
    bench.live(bench.publish())
    other = stock()
    other.publish()
    bench.follower.disconnected(bench.now)
    bench.publisher = other.publisher
    bench.follower.connected(bench.now)
    assert bench.answer_all() == [RequestKind.STATUS, RequestKind.HISTORY]
    bench.assert_exact()


def test_a_live_minus_one_announces_a_restart() -> None:
    bench = stock()
    bench.join()
    bench.live(bench.publish())
    bench.publisher.begin()
    bench.live((END_SEQ, b""))
    bench.answer_all()
    bench.assert_exact()


def test_two_publishers_on_one_stream_do_not_make_it_spin() -> None:
    bench = stock()
    bench.join()
    asked = 0
    for i in range(200):
        before = bench.follower.request
        bench.live((i % 2 * 7, bench.publish()[1]))
        asked += bench.follower.request is not before
    assert asked <= 4


# -- silence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ours, stock])
def test_a_lost_tail_is_found_by_asking(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.join()
    bench.live(bench.publish())
    bench.publish(3)  # lost, and nothing follows
    assert bench.state is State.EXACT
    bench.wait(5.1)
    bench.answer_all()
    bench.wait(0.3)
    bench.answer_all()
    bench.assert_exact()
    assert bench.states()[-2:] == [State.REPAIRING, State.EXACT]


@pytest.mark.parametrize("make", [ours, stock])
def test_a_silent_publisher_that_lost_nothing_stays_exact(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.join()
    bench.live(bench.publish())
    for _ in range(3):
        bench.wait(5.1)
        bench.answer_all()
    bench.assert_exact()
    # It joined; the first live batch of a stock publisher was compared with a replay.
    assert bench.states() == [State.REPAIRING, State.EXACT] * (2 if bench.publisher.is_stock else 1)


def test_a_heartbeat_shows_a_lost_tail() -> None:
    bench = ours()
    bench.join()
    bench.publish()
    bench.live(bench.publisher.heartbeat())
    bench.answer_all()
    bench.assert_exact()


def test_batches_under_way_are_awaited_before_they_are_asked_for() -> None:
    bench = ours()
    bench.join()
    bench.live(bench.publisher.heartbeat())
    bench.follower.disconnected(bench.now)
    bench.follower.connected(bench.now)
    under_way = bench.publish()
    assert bench.answer() is RequestKind.STATUS
    assert bench.follower.request is None
    bench.live(under_way)
    bench.assert_exact()
    assert bench.follower.counters.replays == 1  # the check of the first batch of a new connection


def test_a_live_stream_is_followed_while_the_publisher_is_asked_who_it_is() -> None:
    bench = ours()
    bench.join()
    bench.live(bench.publisher.heartbeat())
    bench.wait(5.1)
    assert bench.follower.request is not None
    bench.live(bench.publish())
    bench.assert_exact()
    bench.answer()
    bench.assert_exact()


# -- digests ---------------------------------------------------------------------------------------


def false_mark(bench: Bench) -> Message:
    """Return a batch whose mark is not what the stream adds up to."""
    bench.publisher.newest += 1
    mark = Mark(bench.publisher.epoch, 3, 4)
    message = bench.publisher.newest, frame_batch(0.0, [ENCODER.mark(mark)], 0)
    bench.publisher._ring.append(message)
    return message


def test_a_replica_that_is_disproved_is_replaced() -> None:
    bench = ours()
    bench.join()
    bench.live(bench.publish())
    bench.live(false_mark(bench))
    assert bench.state is State.REPAIRING
    assert "digest of batch" in bench.follower.reason
    assert bench.answer_all() == [RequestKind.SNAPSHOT]
    bench.assert_exact()
    assert bench.follower.counters.digest_mismatches == 1
    bench.live(bench.publisher.heartbeat())
    bench.assert_exact()


def test_a_replica_that_is_disproved_again_and_again_is_degraded_with_growing_backoff() -> None:
    bench = ours()
    bench.join()
    snapshots = 0
    for _ in range(100):
        bench.live(false_mark(bench))
        snapshots += bench.answer_all().count(RequestKind.SNAPSHOT)
        bench.wait(0.1)
    assert snapshots <= 9
    assert State.DEGRADED in bench.states()
    for _ in range(3):
        bench.live(bench.publisher.heartbeat())
        bench.wait(5)
        bench.answer_all()
    bench.assert_exact()


def test_a_snapshot_that_does_not_add_up_is_not_taken_for_true() -> None:
    bench = ours()
    for _ in range(5):
        bench.publish(4)
    bench.follower.connected(bench.now)
    bench.answer()
    bench.live(bench.publisher.heartbeat())
    request = bench.follower.request
    assert request is not None
    parts = bench.publisher.answer(request.data)
    for reply in [parts[0], *parts[2:]]:
        bench.follower.reply(request, *reply, bench.now)
    bench.follower.end(request, bench.now)
    bench.take()
    assert bench.state is State.REPAIRING
    assert bench.follower.reason == "the snapshot does not add up"
    bench.wait(0.3)
    bench.recover()
    bench.assert_exact()


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_snapshot_that_breaks_off_is_not_taken_for_true(kept: int) -> None:
    bench = ours()
    for _ in range(5):
        bench.publish(4)
    bench.follower.connected(bench.now)
    bench.answer()
    bench.live(bench.publisher.heartbeat())
    bench.answer(upto=kept)
    bench.live(bench.publish())
    bench.wait(2.1)
    assert bench.state is State.REPAIRING
    assert "no answer to snapshot" in bench.follower.reason
    bench.wait(0.3)
    bench.recover()
    bench.assert_exact()


def test_a_replayed_state_that_breaks_off_is_not_taken_for_true() -> None:
    bench = ours(ring=3)
    bench.join()
    for _ in range(20):
        bench.publish(4)
    bench.live(bench.publish())
    bench.answer(upto=4)
    bench.follower.disconnected(bench.now)
    bench.follower.connected(bench.now)
    assert bench.state is State.REPAIRING
    bench.recover()
    bench.assert_exact()


# -- trouble with answers --------------------------------------------------------------------------


def test_answers_that_never_come_degrade_the_replica_and_live_batches_go_on() -> None:
    bench = ours()
    bench.join()
    bench.live(bench.publish())
    bench.publish()
    bench.live(bench.publish())
    bench.wait(20)
    assert bench.state is State.DEGRADED
    assert "no answer to" in bench.follower.reason
    before = len(bench.delivered())
    bench.live(bench.publish())
    bench.wait(2.1)
    assert len(bench.delivered()) > before
    bench.publish()
    bench.wait(10)
    while bench.state is not State.EXACT:
        bench.wait(0.5)
        bench.answer_all()
    bench.assert_exact()


def test_the_backoff_between_requests_grows_up_to_its_bound() -> None:
    bench = ours()
    bench.follower.connected(bench.now)
    bench.wait(120)
    assert bench.state is State.DEGRADED
    assert 120 / (2 + 4) <= bench.follower.counters.timeouts <= 120 / (2 + 4) + 6


def test_an_error_is_reported_and_tried_again() -> None:
    bench = ours()
    bench.follower.connected(bench.now)
    request = bench.follower.request
    assert request is not None
    bench.follower.end(request, bench.now, "the publisher answered: error: busy")
    bench.take()
    assert bench.follower.reason == "the publisher answered: error: busy"
    bench.wait(0.3)
    bench.recover()
    bench.assert_exact()


def test_answers_to_an_earlier_request_are_ignored() -> None:
    bench = stock()
    bench.publish()
    bench.follower.connected(bench.now)
    old = bench.follower.request
    assert old is not None
    bench.wait(2.3)
    assert bench.follower.request is not old
    bench.follower.reply(old, 0, b"", bench.now)
    bench.follower.end(old, bench.now)
    bench.answer_all()
    bench.assert_exact()


# -- batches that cannot be read -------------------------------------------------------------------


@pytest.mark.parametrize("make", [ours, stock])
def test_a_live_batch_that_cannot_be_read_is_replayed(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.join()
    bench.live(bench.publish())
    seq, _ = bench.publish()
    bench.live((seq, b"\xc1 garbage"))
    assert bench.state is State.REPAIRING
    bench.answer_all()
    bench.assert_exact()
    assert bench.follower.counters.bad_frames == 1


def test_a_batch_that_nobody_can_read_costs_a_stock_replica() -> None:
    bench = stock()
    bench.join()
    bench.live(bench.publish())
    bench.publisher.newest += 1
    bench.publisher._ring.append((bench.publisher.newest, b"garbage"))
    bench.live((bench.publisher.newest, b"garbage"))
    bench.answer_all()
    assert bench.state is State.DEGRADED
    assert bench.follower.counters.lost_batches == 2  # in the replay, and again in the one from the start
    bench.live(bench.publisher.publish([AllBlocksCleared()]))
    bench.assert_exact()


def test_events_that_cannot_be_read_cost_a_stock_replica_and_make_ours_ask() -> None:
    unknown = b"\x92\xa7Unknown\x01"
    bench = stock()
    bench.join()
    bench.live(bench.publish())
    bench.live((1, frame_batch(0.0, [unknown], 0)))
    assert bench.state is not State.EXACT
    assert bench.follower.counters.skipped_events == 1
    bench = ours()
    bench.join()
    bench.live(bench.publisher.heartbeat())
    bench.publisher.newest += 1
    bench.live((bench.publisher.newest, frame_batch(0.0, [unknown], 0)))
    assert bench.answer() is RequestKind.SNAPSHOT, (
        "a mark could not tell: what is unread may cancel with what is read"
    )
    bench.assert_exact()


# -- losses that cancel ----------------------------------------------------------------------------


def lose_so_that_it_cancels(bench: Bench) -> Message:
    """Lose store(A), deliver remove(A) and store(A), lose remove(A); return the mark that comes then."""
    block = 1 << 50
    bench.publisher.publish([stored([block])])
    bench.live(bench.publisher.publish([BlockRemoved([block], "GPU")]))
    bench.live(bench.publisher.publish([stored([block])]))
    bench.publisher.publish([BlockRemoved([block], "GPU")])
    return heartbeat(bench)


def test_without_replay_losses_that_cancel_are_not_called_exact() -> None:
    bench = ours(can_ask=False)
    bench.live(bench.publish(), heartbeat(bench))
    bench.assert_exact()
    bench.live(lose_so_that_it_cancels(bench), heartbeat(bench))
    assert bench.replica.held != bench.publisher.truth.held
    assert bench.state is State.DEGRADED
    bench.live(bench.publisher.publish([AllBlocksCleared()]), heartbeat(bench))
    bench.assert_exact()


def test_nothing_is_delivered_as_exact_behind_a_loss() -> None:
    """The batch behind the hole came first, and then the word that the replica is not exact."""
    bench = ours(can_ask=False)
    bench.live(bench.publish(), heartbeat(bench))
    bench.assert_exact()
    bench.updates.clear()
    bench.publish()
    bench.live(bench.publish())
    first, *rest = bench.updates
    assert isinstance(first, StateChanged)
    assert first.state is not State.EXACT
    assert any(isinstance(update, Received) for update in rest)


def test_with_replays_that_fail_losses_that_cancel_are_not_called_exact() -> None:
    bench = ours()
    bench.join()
    bench.live(bench.publish(), heartbeat(bench))
    bench.publish()
    bench.live(heartbeat(bench))
    bench.wait(20)  # nobody answers, so it goes on over what is missing
    assert bench.state is State.DEGRADED
    bench.live(bench.publisher.publish([AllBlocksCleared()]), heartbeat(bench))
    while bench.follower.request is not None:
        bench.wait(0.5)
    bench.live(lose_so_that_it_cancels(bench))
    assert bench.replica.held == bench.publisher.truth.held or bench.state is not State.EXACT
    for _ in range(8):
        bench.wait(2)
        bench.live(heartbeat(bench))
        assert bench.replica.held == bench.publisher.truth.held or bench.state is not State.EXACT
    while bench.state is not State.EXACT:
        bench.wait(0.5)
        bench.answer_all()
    bench.assert_exact()


def ranked(
    rank: int, *events: BlockStored | BlockRemoved | AllBlocksCleared, mark: Mark | None = None
) -> bytes:
    parts = [ENCODER.event(event) for event in events]
    return frame_batch(0.0, parts if mark is None else [*parts, ENCODER.mark(mark)], rank)


def test_a_clear_speaks_of_its_own_rank() -> None:
    """Rank 1 keeps what it holds, and the next mark counts it."""
    digest = change_of([stored([5])]).digest
    bench = ours(can_ask=False)
    bench.live((0, ranked(0, AllBlocksCleared(), mark=Mark(9, 0, 0))))
    bench.live((1, ranked(0, stored([6]))), (2, ranked(1, stored([5]))), (3, ranked(0, AllBlocksCleared())))
    bench.live((4, ranked(0, mark=Mark(9, 1, digest))))
    assert bench.state is State.EXACT
    assert bench.follower.blocks == 1
    assert bench.follower.counters.digest_mismatches == 0


def test_after_a_loss_a_clear_of_one_rank_does_not_make_the_others_exact() -> None:
    bench = ours(can_ask=False)
    bench.live((0, ranked(0, AllBlocksCleared(), mark=Mark(9, 0, 0))), (1, ranked(1, stored([5]))))
    bench.live((3, ranked(0, AllBlocksCleared())))  # batch 2 is lost
    bench.live((4, ranked(0, mark=Mark(9, 1, change_of([stored([5])]).digest))))
    assert bench.state is State.DEGRADED, "batch 2 may have moved 5 to another rank"
    bench.live((5, ranked(1, AllBlocksCleared())), (6, ranked(0, mark=Mark(9, 0, 0))))
    assert bench.state is State.EXACT


# -- no replay endpoint ----------------------------------------------------------------------------


def test_without_replay_a_stream_seen_from_its_first_batch_is_exact() -> None:
    bench = stock(can_ask=False)
    bench.follower.connected(bench.now)
    assert bench.state is State.REPAIRING
    bench.live(bench.publish(), bench.publish())
    bench.assert_exact()


def test_without_replay_a_clear_before_any_mark_is_no_proof() -> None:
    """A publisher of several ranks may speak, and the others may hold blocks."""
    bench = stock(can_ask=False)
    bench.publish()
    bench.live(bench.publish())
    assert (bench.state, bench.follower.reason) == (State.DEGRADED, "joined at batch 1")
    bench.live(bench.publisher.publish([AllBlocksCleared()]))
    assert bench.state is State.DEGRADED
    bench.publisher.begin()
    bench.live(bench.publish())
    bench.assert_exact()


def test_without_replay_a_clear_is_a_proof_for_a_stock_stream_seen_from_its_first_batch() -> None:
    """The first batch of each of our processes has a mark, so number 0 without one is a stock publisher."""
    bench = stock(can_ask=False)
    bench.live(bench.publish())
    assert bench.follower.kind is Kind.STOCK
    bench.publish()
    bench.live(bench.publish())
    assert bench.state is State.DEGRADED
    bench.live(bench.publisher.publish([AllBlocksCleared()]))
    bench.assert_exact()


def test_without_replay_the_epoch_of_a_restart_is_not_forgotten() -> None:
    """A second restart, hidden by its numbers, shows at its first mark."""
    bench = ours(can_ask=False)
    bench.live((5, ranked(0, AllBlocksCleared(), mark=Mark(1, 0, 0))), (6, ranked(0, stored([7]))))
    bench.live((7, ranked(0, mark=Mark(2, 1, 9))))  # another process, which holds another block
    assert (bench.follower.kind, bench.follower.epoch) == (Kind.KVTIER, 2)
    bench.live((8, ranked(0, BlockRemoved([9], "GPU"), stored([9]))), (9, ranked(0, mark=Mark(3, 1, 7))))
    assert (bench.follower.epoch, bench.state) == (3, State.DEGRADED)
    assert bench.replica.held == set()


def test_an_answer_of_a_process_before_the_one_that_speaks_is_ignored() -> None:
    """A live mark names a process that is later still, so its answer no longer counts."""
    bench = ours()
    bench.join()
    bench.live(bench.publish())
    bench.publisher.overflow([stored([1])])
    bench.live(bench.publish())
    bench.publisher.begin(keeps_sequence=True)
    bench.publisher.hello()
    request = bench.follower.request
    while request is None or request.kind is not RequestKind.SNAPSHOT:
        if request is None:
            bench.follower.live(*heartbeat(bench), bench.now)
        else:
            bench.answer()
        request = bench.follower.request
    snapshot = bench.publisher.answer(request.data)
    bench.publisher.begin(keeps_sequence=True)
    bench.live(bench.publisher.hello())
    for seq, payload in snapshot:
        bench.follower.reply(request, seq, payload, bench.now)
    bench.follower.end(request, bench.now)
    bench.take()
    assert bench.state is not State.EXACT
    bench.recover()
    bench.assert_exact()
    assert bench.follower.epoch == bench.publisher.epoch


def test_without_replay_a_mark_that_adds_up_proves_the_replica() -> None:
    bench = ours(can_ask=False)
    bench.live(bench.publish())
    assert bench.state is State.DEGRADED
    bench.live(bench.publisher.heartbeat())
    bench.assert_exact()
    bench.wait(6)
    assert (bench.state, bench.follower.reason) == (State.DEGRADED, "silent for 5 s")
    bench.live(bench.publisher.heartbeat())
    bench.assert_exact()


def test_without_replay_a_gap_is_a_loss() -> None:
    bench = ours(can_ask=False)
    bench.live(bench.publish(), bench.publisher.heartbeat())
    bench.publish()
    bench.live(bench.publish())
    assert (bench.state, bench.follower.reason) == (State.DEGRADED, "batches 3 to 3 are missing")
    assert bench.follower.counters.lost_batches == 1
    bench.live(bench.publisher.heartbeat())
    assert bench.state is State.DEGRADED
    bench.live(bench.publisher.publish([AllBlocksCleared()]), bench.publish(), bench.publisher.heartbeat())
    bench.assert_exact()


def test_without_replay_a_reconnected_stock_stream_is_not_trusted() -> None:
    bench = stock(can_ask=False)
    bench.live(bench.publish())
    bench.follower.disconnected(bench.now)
    bench.follower.connected(bench.now)
    bench.live(bench.publish())
    assert bench.state is State.DEGRADED
    bench.live(bench.publisher.publish([AllBlocksCleared()]))
    assert bench.state is State.DEGRADED  # it may be a publisher of several ranks by now


def test_without_replay_nothing_of_the_process_before_is_kept() -> None:
    """The new process clears rank 0, and holds a block that rank 1 of the old one held too."""
    digest = change_of([stored([7])]).digest
    bench = ours(can_ask=False)
    bench.live((5, ranked(0, AllBlocksCleared(), mark=Mark(1, 0, 0))), (6, ranked(1, stored([7]))))
    assert bench.state is State.EXACT
    bench.live((7, ranked(0, AllBlocksCleared(), mark=Mark(2, 1, digest))))
    assert bench.state is State.DEGRADED, "its 7 need not be rank 1's"
    assert bench.replica.held == set()


def test_a_reset_without_updates_before_it_is_not_repeated() -> None:
    bench = stock(can_ask=False)
    bench.live(bench.publish())
    for _ in range(3):
        bench.live((END_SEQ, b""))
    assert sum(isinstance(update, Reset) for update in bench.updates) == 1
    assert (bench.follower.counters.resets, bench.follower.counters.restarts) == (1, 3)
    assert (bench.follower.kind, bench.follower.epoch, bench.follower.seq) == (None, None, None)


@pytest.mark.parametrize("ranks", [(None, 0), (0, None)])
def test_a_batch_without_a_rank_is_of_rank_0(ranks: tuple[int | None, int | None]) -> None:
    """They were two ranks here and one in an index: a clear of one emptied both there, and mended one."""
    bench = stock(can_ask=False)
    for seq, rank in enumerate(ranks):
        bench.live((seq, frame_batch(0.0, [ENCODER.event(stored([seq]))], rank)))
    clear = [ENCODER.event(AllBlocksCleared()), ENCODER.event(stored([7]))]
    bench.live((3, frame_batch(0.0, clear, ranks[1])))
    assert bench.state is State.EXACT
    assert bench.follower.sums.blocks == 1


# -- the object itself -----------------------------------------------------------------------------


def test_check_finds_a_false_claim() -> None:
    bench = ours()
    bench.follower.state = State.EXACT
    with pytest.raises(IntegrityError, match="says exact"):
        bench.follower.check()


def test_no_bytes_raise() -> None:
    rng = random.Random(5)
    bench = ours()
    bench.follower.connected(bench.now)
    for _ in range(3000):
        payload = bytearray(bench.publisher.answer(b"kvtier:status")[0][1])
        for _ in range(rng.randint(0, 3)):
            payload[rng.randrange(len(payload))] = rng.getrandbits(8)
        seq = rng.choice((rng.getrandbits(64), rng.randrange(10), bench.follower.position + 1))
        if rng.random() < 0.5:
            bench.live((max(seq, 0), bytes(payload)))
        elif bench.follower.request is not None:
            bench.follower.reply(bench.follower.request, max(seq, 0), bytes(payload), bench.now)
        if rng.random() < 0.1 and bench.follower.request is not None:
            bench.follower.end(bench.follower.request, bench.now)
        bench.wait(0.05)
    for _ in range(40):
        bench.live(bench.publisher.heartbeat())
        bench.answer_all()
        bench.wait(1.0)
    bench.assert_exact()


def test_the_digest_of_a_stored_block_is_that_of_the_wire() -> None:
    event = BlockStored([1 << 62], None, [1, 2], 2, None, "GPU", None)
    assert decode_batch(frame_batch(0.0, [ENCODER.event(event)], 0)).change() == change_of([event])
