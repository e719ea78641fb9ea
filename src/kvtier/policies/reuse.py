"""What is learnt about reuse: for each class of chunks, how likely a chunk comes back at which age.

A chunk is *idle* from the end of a request that used it until the next use. `ReuseModel` counts idle times
by class and by age: how many ended in a use, and how many were still idle when they were last seen. From
these it derives, for each class and age, the best rate of hits that a slot can get by waiting for the chunk
(a Gittins index, in hits a second): the highest value, over all times to give up, of the probability of a
use until then, divided by the expected time that the slot is taken until then.

Ages are counted in bins, two for each doubling of the age, from a quarter of a second to six days. Classes
with few counts lean on the counts of all classes. Counts are halved from time to time, so that old habits
are forgotten and the model stays bounded. The model survives a restart as 18 kB (`to_bytes`). Scheduler
thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.policies.base import ENDINGS, Ending, Slots
from kvtier.policies.slots import Numbers

USES = (1, 2, 4, 8)
"""The upper bounds of the classes by number of uses; the last class has no bound."""
ANSWERS = (64, 256)
"""The upper bounds, in tokens, of the classes by the length of the last answer. An unknown length counts as
one in the middle.
"""
NUM_ENDINGS = (len(ANSWERS) + 1) * len(ENDINGS) + 1
"""The classes of chunks with equally many uses. The last one is for requests whose end is not known yet."""
NUM_CLASSES = (len(USES) + 1) * NUM_ENDINGS
NO_ENDING = slice(NUM_ENDINGS - 1, None, NUM_ENDINGS)
"""The classes of chunks whose last request has not ended. They stand for all endings."""
NUM_BINS = 44

_FIRST_AGE = 0.25
_SHRINKAGE = 300.0
"""How many idle times a class must have seen to weigh as much as all classes together."""
_GUESS = 0.02
"""The probability of a use within a bin, before anything is learnt."""
_MOST_LIKELY = 0.95
_ENOUGH = 20
_MOST_COUNTS = 200_000.0
_MAGIC = b"kvtier reuse 1\n\0"

AGES: Numbers = np.concatenate(([0.0], _FIRST_AGE * np.sqrt(2.0) ** np.arange(NUM_BINS - 1)))
"""The youngest age of each bin, in seconds."""
_WIDTHS: Numbers = np.append(AGES[1:], AGES[-1] * np.sqrt(2.0)) - AGES


_CLASS_OF_USES = np.searchsorted(USES, np.arange(256), side="left") * NUM_ENDINGS


def _ending_number(ending: Ending | None) -> int:
    """Return the number of an ending among the classes of chunks with equally many uses."""
    if ending is None:
        return NUM_ENDINGS - 1
    length = 1 if ending.num_tokens is None else sum(ending.num_tokens >= bound for bound in ANSWERS)
    return length * len(ENDINGS) + (ENDINGS.index(ending.how) if ending.how in ENDINGS else 0)


def classes_of(uses: npt.NDArray[np.uint8], ending: Ending | None = None) -> Slots:
    """Return the class of chunks that were used so many times, the last time by a request with this end.

    `None` stands for a request that has not ended.
    """
    classes: Slots = _CLASS_OF_USES[uses] + _ending_number(ending)
    return classes


def bins_of(ages: Numbers) -> Slots:
    """Return the bin of each age."""
    doublings = np.log2(np.maximum(ages, _FIRST_AGE / 2.0) / _FIRST_AGE)
    return np.clip(np.floor(2.0 * doublings).astype(np.int64) + 1, 0, NUM_BINS - 1)


class ReuseModel:
    """The counts of idle times by class and age, and the indices derived from them."""

    def __init__(self) -> None:
        shape = NUM_CLASSES, NUM_BINS
        self._used, self._given_up = np.zeros(shape), np.zeros(shape)
        self.indices: Numbers = np.zeros(shape)
        """The index of each class at each age; a chunk with a low index is worth little."""
        self.derive(np.zeros(shape))

    def count_uses(self, classes: npt.NDArray[np.integer], ages: Numbers) -> None:
        """Count idle times that ended in a use."""
        np.add.at(self._used, (classes, bins_of(ages)), 1.0)

    def count_given_up(self, classes: npt.NDArray[np.integer], ages: Numbers) -> None:
        """Count idle times of which nothing more will be known."""
        np.add.at(self._given_up, (classes, bins_of(ages)), 1.0)

    def derive(self, idle: Numbers) -> None:
        """Derive the indices anew. `idle` counts the chunks that are idle now, by class and bin."""
        used = _pool_last(self._used)
        reached = _reached(_pool_last(self._used + self._given_up + idle))
        chances = _chances(used, reached)
        seen = reached[:, 0] > 0
        indices = np.empty((NUM_CLASSES, NUM_BINS))
        indices[seen] = _indices(chances[seen])
        indices[~seen] = _indices(chances[~seen][:1])  # nothing tells these classes apart
        # A head of a prefix has at least the uses of its tail, so it must not be worth less.
        by_uses = np.maximum.accumulate(indices.reshape(-1, NUM_ENDINGS, NUM_BINS), axis=0)
        self.indices = by_uses.reshape(NUM_CLASSES, NUM_BINS)
        if self._used.sum() + self._given_up.sum() > _MOST_COUNTS:
            self._used *= 0.5
            self._given_up *= 0.5

    # -- reports and restarts ----------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return what was learnt."""
        return _MAGIC + np.stack((self._used, self._given_up)).astype("<f4").tobytes()

    def take_bytes(self, data: bytes) -> bool:
        """Begin with what another model had learnt; return whether the bytes were those of one."""
        shape = 2, NUM_CLASSES, NUM_BINS
        if len(data) != len(_MAGIC) + 4 * int(np.prod(shape)) or not data.startswith(_MAGIC):
            return False
        counts = np.frombuffer(data, "<f4", offset=len(_MAGIC)).astype(np.float64).reshape(shape)
        if not (np.isfinite(counts).all() and counts.min() >= 0 and counts.sum() <= 4 * _MOST_COUNTS):
            return False
        self._used, self._given_up = counts[0].copy(), counts[1].copy()
        self.derive(np.zeros((NUM_CLASSES, NUM_BINS)))
        return True

    def habits(self) -> Iterator[Habit]:
        """Yield what is known of each class that was seen."""
        names = _class_names()
        for number, (used, given_up) in enumerate(zip(self._used, self._given_up, strict=True)):
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


_LATER = (np.arange(NUM_BINS)[:, None] <= np.arange(NUM_BINS)[None, :]).astype(np.float64)
"""Whether a bin, the second one, can be the end of waiting that begins in the first."""


def _pool_last(counts: Numbers) -> Numbers:
    """Return the counts with those of all endings in the class of unknown endings, by number of uses."""
    pooled = counts.copy()
    pooled[NO_ENDING] = counts.reshape(-1, NUM_ENDINGS, NUM_BINS).sum(axis=1)
    return pooled


def _chances(used: Numbers, reached: Numbers) -> Numbers:
    """Return the probability of a use in each bin, for a chunk that has reached it."""
    all_used, all_reached = used[NO_ENDING].sum(axis=0), reached[NO_ENDING].sum(axis=0)
    # Before anything is learnt, a chunk is worth less the older it is, as with LRU.
    pooled = _GUESS * np.minimum(1.0, _WIDTHS / _FIRST_AGE)
    known = all_reached >= _ENOUGH
    pooled[known] = all_used[known] / all_reached[known]
    if known.any():  # beyond the ages that were seen often, the last known chance holds
        last = int(known.nonzero()[0][-1])
        pooled[last + 1 :] = pooled[last]
    ratio = (used.sum(axis=1) + 1.0) / ((reached * pooled).sum(axis=1) + 1.0)
    expected = _SHRINKAGE * ratio[:, None] * pooled
    chances: Numbers = np.minimum(_MOST_LIKELY, (used + expected) / (reached + _SHRINKAGE))
    return chances


def _indices(chances: Numbers) -> Numbers:
    """Return the index of each class and bin: the highest ratio of hits and seconds, over all ends."""
    # The survival up to a bin cancels out of the ratio, so sums from the right are all that is needed.
    alive = np.cumprod(np.hstack((np.ones((len(chances), 1)), 1.0 - chances[:, :-1])), axis=1)
    hits, seconds = _sums(alive * chances), _sums(alive * (1.0 - chances / 2.0) * _WIDTHS)
    gained = hits[:, :-1, None] - hits[:, None, 1:]
    gained *= _LATER
    taken = seconds[:, :-1, None] - seconds[:, None, 1:]
    np.maximum(taken, np.finfo(np.float64).tiny, out=taken)
    rates: Numbers = (gained / taken).max(axis=2)
    return rates


def _reached(counts: Numbers) -> Numbers:
    """Return how many of the counted idle times have reached each bin."""
    reached: Numbers = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
    return reached


def _sums(values: Numbers) -> Numbers:
    """Return the sums of each row from each bin to the last, and a zero."""
    return np.hstack((_reached(values), np.zeros((len(values), 1))))


def _summary(used: Numbers, given_up: Numbers) -> tuple[float, float, float | None]:
    total, back = float(used.sum() + given_up.sum()), float(used.sum())
    half = int(np.searchsorted(np.cumsum(used), back / 2.0))
    return total, back / total, float(AGES[half] + _WIDTHS[half] / 2.0) if back else None


def _class_names() -> list[tuple[str, str, str]]:
    """Return the names of each class's uses, answer and ending."""
    uses = ["1", "2", "3-4", "5-8", "9 or more"]
    answers = [f"under {ANSWERS[0]}", f"{ANSWERS[0]}-{ANSWERS[1] - 1}", f"{ANSWERS[1]} or more"]
    endings = [(answer, how) for answer in answers for how in ENDINGS]
    return [(use, *ending) for use in uses for ending in [*endings, ("unknown", "refused")]]
