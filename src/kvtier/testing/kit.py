"""The small parts that several suites share: keys, contents, a clock, and combinations of parameters.

Everything here needs neither torch nor pytest, and belongs to the thread of its test.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

from kvtier.keys import OffloadKey, make_offload_key
from kvtier.residency import OffloadingEvent

PATIENCE = 30.0
"""Seconds after which a wait that should have ended fails its test."""

Combination = tuple[Any, ...]


def key(number: int, group: int = 0) -> OffloadKey:
    """Return the key of a chunk."""
    return make_offload_key(b"%032d" % number, group)


def keys(*numbers: int) -> list[OffloadKey]:
    """Return the keys of chunks."""
    return [key(number) for number in numbers]


def content_of(number: int, version: int, nbytes: int) -> bytes:
    """Return the bytes of a chunk, computed with the weights of this version."""
    return random.Random(f"{number} {version}").randbytes(nbytes)


def believed_held(events: Iterable[OffloadingEvent]) -> set[OffloadKey]:
    """Return the chunks that a listener believes to be held after these events."""
    held: set[OffloadKey] = set()
    for event in events:
        if event.removed:
            assert held >= set(event.keys), "a chunk was removed that was never stored"
            held -= set(event.keys)
        else:
            assert held.isdisjoint(event.keys), "a chunk was stored twice"
            held |= set(event.keys)
    return held


class ManualClock:
    """A clock that the test moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def cover_pairs(*parameters: Sequence[Any]) -> list[Combination]:
    """Return combinations of one value for each of two or more parameters, which cover all pairs.

    Most faults need one value, or two together. So these find what the full product finds, with a fraction
    of the combinations. The choice is greedy and deterministic.
    """
    remaining = list(product(*(range(len(values)) for values in parameters)))
    uncovered = {pair for combination in remaining for pair in pairs_of(combination)}
    chosen = []
    while uncovered:
        best = max(remaining, key=lambda combination: len(uncovered.intersection(pairs_of(combination))))
        uncovered.difference_update(pairs_of(best))
        chosen.append(tuple(values[index] for values, index in zip(parameters, best, strict=True)))
    return chosen


def pairs_of(combination: Combination) -> Iterator[tuple[tuple[int, Any], ...]]:
    """Return all pairs of a combination's values, each value with the number of its parameter."""
    return combinations(enumerate(combination), 2)
