"""Takes what was asked for, a snapshot or a replay, into the picture, and says what became of it.

A snapshot counts only if it ends with a mark that it adds up to. A replay must begin where it was asked to: for a
publisher that sends no marks, with the very batch that was applied last. Half a state never counts: `facts.growing` is set from
the first batch of an answer to its end.

What follows from an outcome (another request, a pause, a new start) is for `kvtier.events.follow.follower` to decide.
Not for several threads at once.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from kvtier.events.follow.asks import Ask, What
from kvtier.events.follow.facts import FAR, Verdict, payload_hash
from kvtier.events.follow.picture import Picture
from kvtier.events.updates import Kind
from kvtier.events.wire import Batch

__all__ = ["Broken", "Failed", "Outcome", "Repair", "Restarted"]

B = TypeVar("B", bound=Batch)


class Failed(NamedTuple):
    """The answer is of no use."""

    why: str


class Restarted(NamedTuple):
    """Another incarnation answers."""

    why: str


class Broken(NamedTuple):
    """A part of the answer is missing, and may not be when it is asked for again."""


Outcome = Failed | Restarted | Broken | Verdict
"""What became of an answer, if that is more than a batch; a verdict is that of a mark in it."""


class Repair(Generic[B]):
    """Brings a picture up to date with the batches of answers."""

    def __init__(self, picture: Picture[B]) -> None:
        self._picture = picture
        self._facts = picture.facts
        self._hole: int | None = None  # behind which batch the last replay left something out

    def forget_hole(self) -> None:
        """Forget where replays leave something out: another publisher answers."""
        self._hole = None

    def take(self, ask: Ask, seq: int, payload: bytes, now: float) -> Outcome | None:
        """Take one batch of an answer."""
        if ask.what is What.SNAPSHOT:
            return self._take_snapshot(ask, seq, payload, now)
        return self._take_replay(ask, seq, payload, now)

    def end(self, ask: Ask, live: int) -> Outcome | None:
        """Take the end of an answer; `live` is the newest batch of the live stream, -1 for none."""
        return self._end_snapshot(ask, live) if ask.what is What.SNAPSHOT else self._end_replay(ask)

    # -- snapshots -------------------------------------------------------------------------------------------------------

    def _take_snapshot(self, ask: Ask, seq: int, payload: bytes, now: float) -> Outcome | None:
        """Apply a part of a snapshot; `seq` is the batch that follows it."""
        batch = self._picture.read(payload)
        if batch is None:
            return Failed(self._picture.why)
        if ask.replies == 1:
            self._picture.begin_anew(silent=batch.change().cleared)
        self._facts.growing = True
        return self._picture.deliver(seq - 1, batch, payload, now)

    def _end_snapshot(self, ask: Ask, live: int) -> Outcome | None:
        """Take the snapshot for true if it ended with a mark that it adds up to.

        It may be a little older than the request, so what was received live before may have to be replayed.
        """
        facts = self._facts
        facts.growing = False
        facts.complete = facts.complete and self._picture.counters.digest_checks > ask.checks
        if not facts.complete:
            return Failed("the snapshot does not add up" if ask.replies else "no snapshot came")
        facts.ahead = live if self._seq < live <= self._seq + FAR else self._seq
        return None

    # -- replays ---------------------------------------------------------------------------------------------------------

    def _take_replay(self, ask: Ask, seq: int, payload: bytes, now: float) -> Outcome | None:
        outcome = self._begin_replay(ask, seq, payload) if ask.replies == 1 else None
        if outcome is None and seq > self._seq + 1:
            outcome = self._skip_hole(seq)
        if outcome is not None or seq <= self._seq:
            return outcome
        self._facts.growing = True
        batch = self._picture.read(payload)
        if batch is None:
            self._picture.lose(seq + 1)
            return None
        verdict = self._picture.deliver(seq, batch, payload, now)
        self._picture.remember(seq, payload)
        return verdict

    def _begin_replay(self, ask: Ask, seq: int, payload: bytes) -> Outcome | None:
        """Judge the first batch of a replay: can the rest be used?"""
        facts, counters = self._facts, self._picture.counters
        if ask.what is What.HISTORY:
            self._build_from(seq)
        elif ask.proof is not None and seq == ask.start:
            if payload_hash(payload) != ask.proof:
                return Restarted(f"batch {seq} is not what it was")
            facts.doubt = False
        elif seq > ask.start and facts.kind is Kind.STOCK:
            counters.lost_batches += seq - ask.start - (ask.proof is not None)
            self._build_from(seq)
        elif seq != ask.start:
            counters.truncated_replays += 1
            facts.complete = False
            return Failed(f"asked for batch {ask.start}, got {seq}")
        return None

    def _build_from(self, seq: int) -> None:
        """Begin a new picture with the first batch that the publisher still has."""
        self._picture.begin_anew()
        self._facts.begin_at(seq)
        if seq:
            self._picture.counters.truncated_replays += 1
            self._picture.why = f"the publisher's buffer begins at batch {seq}"
            self._facts.hopeless = self._facts.kind is Kind.STOCK

    def _skip_hole(self, seq: int) -> Outcome | None:
        """Deal with a hole inside a replay, and go on behind it if there is nothing better.

        A stock publisher drops replies to a slow reader, so it is asked again; a hole that comes back at the same place
        is a batch it never had.
        """
        picture, before = self._picture, self._seq
        picture.why = f"the replay leaves out batches {before + 1} to {seq - 1}"
        if self._facts.is_ours:
            return Failed(picture.why)
        if self._hole != before:
            self._hole = before
            self._facts.ahead = max(self._facts.ahead, seq)
            return Broken()
        picture.lose(seq)
        return None

    def _end_replay(self, ask: Ask) -> Outcome | None:
        facts = self._facts
        grew, facts.growing = facts.growing, False
        facts.kind = facts.kind or Kind.STOCK
        if not ask.replies and ask.what is What.HISTORY:
            self._build_from(0)
        elif not ask.replies and ask.proof is not None:
            return Restarted(f"the publisher no longer has batch {ask.start}")
        if facts.is_ours:
            is_unmarked = grew and self._picture.counters.digest_checks == ask.checks
            facts.doubt = facts.doubt or is_unmarked  # a status will tell who it was that answered
        else:
            facts.doubt = False
            facts.hopeless = not facts.complete if ask.what is What.HISTORY else facts.hopeless
        if not grew and self._seq < facts.ahead:
            facts.complete = facts.complete and not facts.is_ours  # a snapshot will do
            return Failed(f"the replay ended at batch {self._seq}, before {facts.ahead}")
        return None

    @property
    def _seq(self) -> int:
        return -1 if self._facts.seq is None else self._facts.seq
