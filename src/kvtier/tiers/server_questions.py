"""`Questions` and `KnownRows`: the open questions of a shared tier to its server, and the last answers.

At most one question at a time asks about a chunk. At its deadline a question is late: it no longer covers
its chunks, and it blocks new questions until its call has returned. Answers are remembered for a while, a
yes for longer than a no; when a row turns out to be lost, every earlier yes is in doubt. Scheduler thread
only, except for the fields that an I/O thread writes into a question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.residency import BoundedKeyMap

__all__ = ["KnownRows", "Question", "Questions"]

_YES_SECONDS = 30.0
"""A stored row usually stays this long: servers evict rows that were not used for minutes."""
_NO_SECONDS = 1.0
"""Enough that a burst of equal prompts asks once; another engine's row is found a second later."""
_FRESH_NO = 5.0
"""If the server said no within these seconds, it is not asked again before a row is sent: an engine that
computes a prompt has just asked about it, and if another engine has sent the row since, it is the same row.
"""


@dataclass(slots=True, eq=False)
class Question:
    """Chunks of a prefix that a thread asks about now or soon."""

    keys: list[OffloadKey]
    scope: int
    deadline: float
    is_late: bool = False
    began: float | None = None
    """When a thread began the call; written by that thread."""
    seconds: float = 0.0
    """How long the call took, once it is over; written by that thread."""


class Questions:
    """The questions whose calls have not returned."""

    def __init__(self) -> None:
        self._open: set[Question] = set()
        self._asked: dict[OffloadKey, Question] = {}
        self.num_late = 0
        """The number of late questions that block new ones."""

    def __len__(self) -> int:
        return len(self._open)

    def get(self, key: OffloadKey) -> Question | None:
        """Return the question that covers a chunk."""
        return self._asked.get(key)

    def add(self, keys: list[OffloadKey], scope: int, deadline: float) -> Question:
        """Add a question about chunks that no open question covers."""
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
        """Return the late questions whose calls have not returned."""
        return [question for question in self._open if question.is_late] if self.num_late else []

    def forget(self, question: Question) -> None:
        """Remove a question that is over, or no longer blocks others."""
        self._take_off(question)
        if question in self._open:
            self._open.remove(question)
            self.num_late -= question.is_late

    def forget_chunks(self) -> None:
        """Uncover all chunks. Questions whose calls are open stay open."""
        self._asked.clear()

    def _take_off(self, question: Question) -> list[OffloadKey]:
        """Uncover the chunks of a question, and return them."""
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
    """Whether a row was stored, and when the answer came."""

    is_there: bool
    at: float


class KnownRows:
    """The last answers about rows, for about the newest `limit` rows."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: BoundedKeyMap[_LastHeard] = BoundedKeyMap(limit)
        self._trusted_since = float("-inf")

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._heard)

    def note(self, keys: list[OffloadKey], *, is_there: bool) -> None:
        """Note the newest answer about rows."""
        self._heard.record(keys, _LastHeard(is_there, self._clock()))

    def doubt(self) -> None:
        """Stop trusting every earlier yes: the server may have lost all rows."""
        self._trusted_since = self._clock()

    def clear(self) -> None:
        """Forget everything."""
        self._heard.clear()

    def last(self, key: OffloadKey) -> bool | None:
        """Return the last answer, however old; `None`: there is none."""
        heard = self._heard.get(key)
        return None if heard is None else heard.is_there

    def look_up(self, key: OffloadKey, now: float) -> bool | None:
        """Say whether a row is stored; `None`: there is no answer, or it is too old."""
        heard = self._heard.get(key)
        if heard is None or not self._is_trusted(heard):
            return None
        return heard.is_there if now < heard.at + (_YES_SECONDS if heard.is_there else _NO_SECONDS) else None

    def was_there(self, key: OffloadKey) -> bool:
        """Say whether the last answer about a row was a yes that is still trusted, however old."""
        heard = self._heard.get(key)
        return heard is not None and heard.is_there and self._is_trusted(heard)

    def was_just_absent(self, key: OffloadKey, now: float) -> bool:
        """Say whether the server has said within seconds that it does not have a row."""
        heard = self._heard.get(key)
        return heard is not None and not heard.is_there and now - heard.at < _FRESH_NO

    def _is_trusted(self, heard: _LastHeard) -> bool:
        return not heard.is_there or heard.at >= self._trusted_since
