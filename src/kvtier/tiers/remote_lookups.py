"""`InFlightLookups` and `PresenceCache`: a shared tier's running lookups on its server, and recent answers.

At most one lookup at a time covers a chunk. A lookup has the deadline of its call, as a job of rows has; the
requests that wait for it have their own (`offload.waits`). At its deadline a lookup is late: it no longer
covers its chunks, and it blocks new lookups until its call has returned. Answers are remembered for a while,
a yes for longer than a no; when a row turns out to be lost, every earlier yes is in doubt. Scheduler thread
only, except for the fields that an I/O thread writes into a lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.residency import BoundedKeyMap

_YES_SECONDS = 30.0
"""A stored row usually stays this long: servers evict rows that were not used for minutes."""
_NO_SECONDS = 1.0
"""Enough that a burst of equal prompts asks once; another engine's row is found a second later."""
_FRESH_NO = 5.0
"""If the server said no within these seconds, it is not asked again before a row is sent: an engine that
computes a prompt has just looked it up, and if another engine has sent the row since, it is the same row.
"""


@dataclass(slots=True, eq=False)
class InFlightLookup:
    """Chunks of a prefix that a thread looks up on the server now or soon."""

    keys: list[OffloadKey]
    scope: int
    deadline: float
    is_late: bool = False
    began: float | None = None
    """When a thread began the call; written by that thread."""
    seconds: float = 0.0
    """How long the call took, once it is over; written by that thread."""


class InFlightLookups:
    """Keeps the lookups whose calls have not returned."""

    get: Callable[[OffloadKey], InFlightLookup | None]
    """Return the lookup that covers a chunk. This is the dict's own."""

    def __init__(self) -> None:
        self._open: set[InFlightLookup] = set()
        self._covered: dict[OffloadKey, InFlightLookup] = {}
        self.get = self._covered.get

    def __len__(self) -> int:
        return len(self._open)

    def add(self, keys: list[OffloadKey], scope: int, deadline: float) -> InFlightLookup:
        """Add a lookup of chunks that no other lookup covers."""
        lookup = InFlightLookup(keys, scope, deadline)
        self._open.add(lookup)
        self._covered.update(dict.fromkeys(keys, lookup))
        return lookup

    def take_late(self, now: float) -> list[OffloadKey]:
        """Give up the lookups whose deadline has passed, and return their chunks."""
        late = [lookup for lookup in self._open if not lookup.is_late and now >= lookup.deadline]
        for lookup in late:
            lookup.is_late = True
        return [key for lookup in late for key in self._take_off(lookup)]

    def late(self) -> list[InFlightLookup]:
        """Return the late lookups whose calls have not returned. They block new ones."""
        return [lookup for lookup in self._open if lookup.is_late]

    def forget(self, lookup: InFlightLookup) -> None:
        """Remove a lookup that is over, or no longer blocks others."""
        self._take_off(lookup)
        self._open.discard(lookup)

    def forget_chunks(self) -> None:
        """Uncover all chunks. Lookups whose calls are open stay open."""
        self._covered.clear()

    def _take_off(self, lookup: InFlightLookup) -> list[OffloadKey]:
        """Uncover the chunks of a lookup, and return them."""
        keys = [key for key in lookup.keys if self._covered.get(key) is lookup]
        for key in keys:
            del self._covered[key]
        return keys

    def check(self) -> None:
        """Raise `IntegrityError` if the records do not agree."""
        if not self._open.issuperset(self._covered.values()):
            raise IntegrityError("lookups in flight: expected that every covered chunk has a lookup")


class _Answer(NamedTuple):
    """Whether a row was stored, and when the answer came."""

    is_there: bool
    at: float


class PresenceCache:
    """Remembers the last answers about rows, for about the newest `limit` rows."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: BoundedKeyMap[_Answer] = BoundedKeyMap(limit)
        self._trusted_since = float("-inf")

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._answers)

    def record(self, keys: list[OffloadKey], *, is_there: bool) -> None:
        """Record the newest answer about rows."""
        self._answers.record(keys, _Answer(is_there, self._clock()))

    def doubt(self) -> None:
        """Stop trusting every earlier yes: the server may have lost all rows."""
        self._trusted_since = self._clock()

    def clear(self) -> None:
        """Forget everything."""
        self._answers.clear()

    def last(self, key: OffloadKey) -> bool | None:
        """Return the last answer, however old, or `None` if there is none."""
        answer = self._answers.get(key)
        return None if answer is None else answer.is_there

    def look_up(self, keys: Iterable[OffloadKey], now: float) -> list[bool | None]:
        """Return for each row whether it is stored; `None` if there is no answer or it is too old."""
        found: list[bool | None] = []
        for answer in map(self._answers.get, keys):
            if answer is None:
                found.append(None)
            elif answer.is_there:
                is_new = now < answer.at + _YES_SECONDS and answer.at >= self._trusted_since
                found.append(True if is_new else None)
            else:
                found.append(False if now < answer.at + _NO_SECONDS else None)
        return found

    def were_there(self, keys: list[OffloadKey]) -> set[OffloadKey]:
        """Return the rows of which the last answer was a yes that is still trusted, however old."""
        since = self._trusted_since
        answers = zip(keys, map(self._answers.get, keys), strict=True)
        return {key for key, answer in answers if answer and answer.is_there and answer.at >= since}

    def were_just_absent(self, keys: list[OffloadKey], now: float) -> set[OffloadKey]:
        """Return the rows that the server did not have when it answered, within the last seconds."""
        since = now - _FRESH_NO
        answers = zip(keys, map(self._answers.get, keys), strict=True)
        return {key for key, answer in answers if answer and not answer.is_there and answer.at > since}
