"""What is learnt about reuse: for each class of chunks, how likely a chunk comes back at which age.

A chunk is *idle* from the end of a request that used it until the next use. `ReuseModel` counts idle times
by class and by age: how many ended in a use, and how many were still idle when they were last seen. From
these it derives, for each class and age, the best rate of hits that a slot can get by waiting for the chunk
(a Gittins index, in hits a second): the highest value, over all times to give up, of the probability of a
use until then, divided by the expected time that the slot is taken until then.

Ages are counted in bins, two for each doubling of the age, from four milliseconds to six days. Classes with
few counts lean on those of as many uses, and these on all classes. Counts are halved from time to time, so
that old habits are forgotten and the model stays bounded. The model survives a restart as 22 kB
(`to_bytes`). Scheduler thread only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvtier.policies.base import ENDINGS, Ending
from kvtier.policies.slots import CHUNK, Chunks, Numbers, ReuseLists

_USES = ("1", "2", "3-4", "5-8", "9 or more")
"""The classes by number of uses."""
ANSWERS = (64, 256)
"""The upper bounds, in tokens, of the classes by the length of the last answer. An unknown length counts as
one in the middle.
"""
NUM_ENDINGS = (len(ANSWERS) + 1) * len(ENDINGS) + 1
"""The classes of chunks with equally many uses. The last one is for requests whose end is not known yet."""
NUM_CLASSES = len(_USES) * NUM_ENDINGS
NUM_BINS = 56

_FIRST_AGE = 2.0**-8
_SHRINKAGE = 10.0
"""How many requests a class must have seen to weigh as much as what it leans on. Chunks of one request come
back together, so it is requests that tell, not chunks.
"""
_LEAN = 0.1
"""The power of the age by which the index is divided to rank chunks: of chunks that are worth nearly the
same, the one that was used last stays. Estimates are noisy, and LRU is what is right without any.
"""
_MOST_COUNTS = 200_000.0
_MAGIC = b"kvtier reuse 2\n\0"

AGES: Numbers = np.concatenate(([0.0], _FIRST_AGE * np.exp2(np.arange(NUM_BINS - 1) / 2.0)))
"""The youngest age of each bin, in seconds."""
_WIDTHS: Numbers = np.append(AGES[1:], AGES[-1] * np.sqrt(2.0)) - AGES
_GUESS: Numbers = 0.02 * np.minimum(1.0, _WIDTHS / _FIRST_AGE)
"""The chance of a use in each bin, before anything is learnt: as with LRU, an older chunk is worth less."""
_LEANING: Numbers = np.append(_FIRST_AGE / np.sqrt(2.0), AGES[1:]) ** -_LEAN


def ending_number(ending: Ending | None) -> int:
    """Return the number of an ending among the classes of chunks with equally many uses.

    `None` stands for a request that has not ended.
    """
    if ending is None:
        return NUM_ENDINGS - 1
    length = 1 if ending.num_tokens is None else bisect_right(ANSWERS, ending.num_tokens)
    return length * len(ENDINGS) + (ENDINGS.index(ending.how) if ending.how in ENDINGS else 0)


class ReuseModel:
    """The counts of idle times by class and age, and the indices derived from them."""

    def __init__(self) -> None:
        self._used, self._given_up, flat = self.new_counts(), self.new_counts(), self.new_counts()
        self.indices: Numbers = flat.reshape(NUM_CLASSES, NUM_BINS)
        """The index of each class at each age; a chunk with a low index is worth little."""
        none = np.zeros(0, dtype=CHUNK)
        self._tables = self.make_lists(none, none, 1)
        self._chunks, self._squares = 1.0, 1.0  # sums over requests, of chunks and of their squares
        self.derive(self.new_counts())

    @staticmethod
    def new_counts() -> Numbers:
        """Return a table by class and bin, of zeros."""
        return np.zeros(NUM_CLASSES * NUM_BINS)

    def make_lists(self, chunks: Chunks, gone: Chunks, every: int) -> ReuseLists:
        """Return lists that rank by these indices, and count here."""
        indices = self.indices.reshape(-1)
        return ReuseLists(
            chunks, gone, self._used, self._given_up, indices, AGES, _LEANING, NUM_ENDINGS, every
        )

    def count_request(self, num_chunks: float) -> None:
        """Count a request, of whose chunks so many were counted."""
        self._chunks += num_chunks
        self._squares += num_chunks * max(1.0, num_chunks)

    def derive(self, idle: Numbers) -> None:
        """Derive the indices anew. `idle` counts the chunks that are idle now, by class and bin."""
        self._tables.derive(idle, _GUESS, _SHRINKAGE * self._squares / self._chunks)
        if self._used.sum() + self._given_up.sum() > _MOST_COUNTS:
            self._used *= 0.5
            self._given_up *= 0.5
            self._chunks, self._squares = self._chunks / 2.0, self._squares / 2.0

    def has_learnt(self) -> bool:
        """Return whether any idle time was seen."""
        return bool(self._used.any() or self._given_up.any())

    def newest_index(self) -> float:
        """Return the index of a chunk that was never seen before."""
        return float(self.indices[NUM_ENDINGS - 1, 0])

    # -- reports and restarts ----------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return what was learnt."""
        return _MAGIC + np.stack((self._used, self._given_up)).astype("<f4").tobytes()

    def take_bytes(self, data: bytes) -> bool:
        """Begin with what another model had learnt, if anything; return whether it was one's bytes."""
        if len(data) != len(_MAGIC) + 8 * NUM_CLASSES * NUM_BINS or not data.startswith(_MAGIC):
            return False
        found = np.frombuffer(data, "<f4", offset=len(_MAGIC))
        if not np.isfinite(found).all():  # before the cast, which warns of some that are no numbers
            return False
        counts = found.astype(np.float64)
        if counts.min() < 0 or counts.sum() > 4 * _MOST_COUNTS:
            return False
        if counts.any():  # else what was learnt here since the start is more
            self._used[:], self._given_up[:] = counts.reshape(2, -1)
            self.derive(self.new_counts())
        return True

    def habits(self) -> Iterator[Habit]:
        """Yield what is known of each class that was seen."""
        names = _class_names()
        shape = NUM_CLASSES, NUM_BINS
        counts = zip(self._used.reshape(shape), self._given_up.reshape(shape), strict=True)
        for number, (used, given_up) in enumerate(counts):
            if used.sum() + given_up.sum() > 0:
                yield Habit(*names[number], *_summary(used, given_up))


class Habit(NamedTuple):
    """When chunks of a class come back, as far as is known."""

    uses: str
    answer_tokens: str
    ending: str
    idle_times: float
    """How many idle times were seen."""
    comes_back: float
    """The share that came back before it was forgotten."""
    median_seconds: float | None
    """The median of the times until they came back."""


def _summary(used: Numbers, given_up: Numbers) -> tuple[float, float, float | None]:
    total, back = float(used.sum() + given_up.sum()), float(used.sum())
    half = int(np.searchsorted(np.cumsum(used), back / 2.0))
    return total, back / total, float(AGES[half] + _WIDTHS[half] / 2.0) if back else None


def _class_names() -> list[tuple[str, str, str]]:
    """Return the names of each class's uses, answer and ending."""
    answers = [f"under {ANSWERS[0]}", f"{ANSWERS[0]}-{ANSWERS[1] - 1}", f"{ANSWERS[1]} or more"]
    endings = [(answer, how) for answer in answers for how in ENDINGS]
    return [(use, *ending) for use in _USES for ending in [*endings, ("unknown", "refused")]]
