"""Answers taken into a picture, batch by batch: what they bring, and what they are good for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.chaos.stream_kit import stored

from kvtier.events import AllBlocksCleared, EventEncoder, Kind, Mark, Place, decode_batch, frame_batch, place_weight
from kvtier.events.follow.asks import Ask
from kvtier.events.follow.facts import Verdict
from kvtier.events.follow.picture import Picture
from kvtier.events.follow.repair import Broken, Failed, Outcome, Repair, Restarted

GPU: Place = ("GPU", 0, "", "")
ENCODER = EventEncoder()


def batch(*hashes: int, mark: Mark | None = None, cleared: bool = False) -> bytes:
    events = [ENCODER.event(AllBlocksCleared())] if cleared else []
    events += [ENCODER.event(stored([each])) for each in hashes]
    return frame_batch(0.0, [*events, ENCODER.mark(mark)] if mark is not None else events, 0)


def mark_of(*hashes: int) -> Mark:
    return Mark(1, len(hashes), sum(hashes) * place_weight(GPU) % (1 << 64))


class Bench:
    """A picture of three batches, and what answers do to it."""

    def __init__(self, kind: Kind) -> None:
        self.picture = Picture("p", decode_batch)
        self.facts = self.picture.facts
        self.facts.kind = kind
        self.facts.begin_at(0)
        for seq in range(3):
            self.picture.deliver(seq, decode_batch(batch(seq)), batch(seq), now=0.0)
        self.repair = Repair(self.picture)

    def answer(self, ask: Ask, replies: Sequence[tuple[int, bytes]], live: int = -1) -> Outcome | None:
        """Take an answer until something comes of it."""
        for seq, payload in replies:
            ask.replies += 1
            outcome = self.repair.take(ask, seq, payload, now=1.0)
            if outcome is not None and not isinstance(outcome, Verdict):
                return outcome
        return self.repair.end(ask, live)


@pytest.fixture
def ours() -> Bench:
    return Bench(Kind.KVTIER)


@pytest.fixture
def stock() -> Bench:
    return Bench(Kind.STOCK)


@pytest.mark.parametrize(("live", "ahead"), [(-1, 8), (12, 12), (30_000, 8)])
def test_a_snapshot_counts_when_its_mark_adds_up(ours: Bench, live: int, ahead: int) -> None:
    parts = [batch(4, cleared=True), batch(5, mark=mark_of(4, 5))]
    assert ours.answer(Ask.snapshot(), [(9, part) for part in parts], live) is None
    assert (ours.facts.seq, ours.facts.ahead, ours.facts.complete, ours.facts.growing) == (8, ahead, True, False)


@pytest.mark.parametrize("parts", [[], [batch(4, cleared=True)], [batch(4, cleared=True, mark=mark_of(5))], [b"?"]])
def test_any_other_snapshot_fails(ours: Bench, parts: list[bytes]) -> None:
    assert isinstance(ours.answer(Ask.snapshot(), [(9, part) for part in parts]), Failed)
    assert not ours.facts.complete or ours.facts.seq == 2, "what could not be read changed nothing"


def test_a_replay_goes_on_behind_the_batch_that_proves_it(stock: Bench) -> None:
    ask = stock.facts.catch_up()
    assert stock.answer(ask, [(seq, batch(seq)) for seq in (2, 3, 4)]) is None
    assert (stock.facts.seq, stock.facts.complete) == (4, True)
    assert stock.picture.recall(3) is not None, "it may come live too"
    assert stock.picture.recall(3) is None
    assert stock.picture.counters.batches == 5


@pytest.mark.parametrize("replies", [[(2, batch(7))], []])
def test_another_batch_or_none_is_another_publisher(stock: Bench, replies: list[tuple[int, bytes]]) -> None:
    assert isinstance(stock.answer(stock.facts.catch_up(), replies), Restarted)


def test_a_hole_is_asked_for_once_more_and_then_given_up(stock: Bench) -> None:
    replies = [(2, batch(2)), (4, batch(4))]
    assert stock.answer(stock.facts.catch_up(), replies) == Broken()
    assert stock.facts.seq == 2
    assert stock.answer(stock.facts.catch_up(), replies) is None
    assert (stock.facts.seq, stock.facts.complete, stock.picture.counters.lost_batches) == (4, False, 1)


def test_a_buffer_that_begins_later_gives_what_it_has(stock: Bench) -> None:
    assert stock.answer(stock.facts.catch_up(), [(7, batch(7)), (8, batch(8))]) is None
    assert (stock.facts.seq, stock.facts.complete, stock.facts.hopeless) == (8, False, True)
    assert "buffer begins at batch 7" in stock.picture.why


def test_of_ours_a_replay_that_begins_elsewhere_or_has_a_hole_fails(ours: Bench) -> None:
    assert isinstance(ours.answer(ours.facts.catch_up(), [(5, batch(5))]), Failed)
    assert isinstance(ours.answer(ours.facts.catch_up(), [(3, batch(3)), (5, batch(5))]), Failed)
