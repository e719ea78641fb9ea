"""`Questions` and `KnownRows`: what a shared tier has asked its server, and what it has heard of rows.

A chunk is asked about by one question at a time. At its deadline a question is late: its chunks are asked
about no more, and it holds others up until its call has returned. What was heard of a row is kept in mind
for a while, a yes for longer than a no; when a row turns out to be lost, every yes from before is in doubt.
Scheduler thread only, but for what an I/O thread writes into a question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.tiers.recent_keys import RecentKeys

__all__ = ["KnownRows", "Question", "Questions"]

_YES_SECONDS = 30.0
"""A row that was there is there for as long, as a rule: servers evict what was not used for minutes."""
_NO_SECONDS = 1.0
"""Enough that a burst of equal prompts asks once; another engine's row is found a second later."""
_FRESH_NO = 5.0
"""A server that said no so many seconds ago is not asked again before a row is sent: who computes a prompt
has asked about it just before, and a row that another engine has sent since is the same row.
"""


@dataclass(slots=True, eq=False)
class Question:
    """Chunks of a prefix that a thread asks about, or is about to."""

    keys: list[OffloadKey]
    scope: int
    deadline: float
    is_late: bool = False
    began: float | None = None
    """When a thread has begun it; written by that thread."""
    seconds: float = 0.0
    """How long it took, once it is over; written by that thread."""


class Questions:
    """The questions whose calls have not returned."""

    def __init__(self) -> None:
        self._open: set[Question] = set()
        self._asked: dict[OffloadKey, Question] = {}
        self.num_late = 0
        """How many hold others up."""

    def __len__(self) -> int:
        return len(self._open)

    def get(self, key: OffloadKey) -> Question | None:
        """Return the question that a chunk is asked about by."""
        return self._asked.get(key)

    def add(self, keys: list[OffloadKey], scope: int, deadline: float) -> Question:
        """Note a question about chunks that are not asked about yet."""
        question = Question(keys, scope, deadline)
        self._open.add(question)
        self._asked.update(dict.fromkeys(keys, question))
        return question

    def take_late(self, now: float) -> list[OffloadKey]:
        """Give up the questions whose deadline has passed, and return their chunks."""
        late = [question for question in self._open if not question.is_late and now >= question.deadline]
        for question in late:
            question.is_late = True
            self.num_late += 1
        return [key for question in late for key in self._take_off(question)]

    def late(self) -> list[Question]:
        """Return the questions that were given up, and whose calls have not returned."""
        return [question for question in self._open if question.is_late] if self.num_late else []

    def forget(self, question: Question) -> None:
        """Note that a question is over, or holds nobody up any more."""
        self._take_off(question)
        if question in self._open:
            self._open.remove(question)
            self.num_late -= question.is_late

    def forget_chunks(self) -> None:
        """Note that no chunk is asked about any more. Questions whose calls are open stay so."""
        self._asked.clear()

    def _take_off(self, question: Question) -> list[OffloadKey]:
        """Take the chunks of a question off those that are asked about, and return them."""
        keys = [key for key in question.keys if self._asked.get(key) is question]
        for key in keys:
            del self._asked[key]
        return keys

    def check(self) -> None:
        """Raise `IntegrityError` if the books do not agree."""
        for holds, what in (
            (self._open.issuperset(self._asked.values()), "what is asked has a question"),
            (self.num_late == sum(question.is_late for question in self._open), "late ones are counted"),
        ):
            if not holds:
                raise IntegrityError(f"questions: expected that {what}")


class _LastHeard(NamedTuple):
    """Whether a row was there, and when that was heard."""

    is_there: bool
    at: float


class KnownRows:
    """What was last heard of rows, of the newest `limit` of them or so."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: RecentKeys[_LastHeard] = RecentKeys(limit)
        self._trusted_since = float("-inf")

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._heard)

    def note(self, keys: list[OffloadKey], *, is_there: bool) -> None:
        """Note what was just heard of rows."""
        self._heard.note(keys, _LastHeard(is_there, self._clock()))

    def doubt(self) -> None:
        """Trust no yes from before: the server may have lost all."""
        self._trusted_since = self._clock()

    def clear(self) -> None:
        """Forget everything."""
        self._heard.clear()

    def last(self, key: OffloadKey) -> bool | None:
        """Return what was last heard, however long ago; `None`: nothing."""
        heard = self._heard.get(key)
        return None if heard is None else heard.is_there

    def look_up(self, key: OffloadKey, now: float) -> bool | None:
        """Say whether a row is there; `None`: it is not known, or no longer."""
        heard = self._heard.get(key)
        if heard is None or not self._is_trusted(heard):
            return None
        return heard.is_there if now < heard.at + (_YES_SECONDS if heard.is_there else _NO_SECONDS) else None

    def was_there(self, key: OffloadKey) -> bool:
        """Say whether a row was there when it was last heard of, however long ago."""
        heard = self._heard.get(key)
        return heard is not None and heard.is_there and self._is_trusted(heard)

    def was_just_absent(self, key: OffloadKey, now: float) -> bool:
        """Say whether the server has just said that it does not have a row."""
        heard = self._heard.get(key)
        return heard is not None and not heard.is_there and now - heard.at < _FRESH_NO

    def _is_trusted(self, heard: _LastHeard) -> bool:
        return not heard.is_there or heard.at >= self._trusted_since
