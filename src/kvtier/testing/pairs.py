"""Few combinations of parameters that cover all pairs: for tests whose full product says little more.

Most faults need one value, or two together. A set in which every two values of different parameters occur
together finds those faults, with a fraction of the combinations. The choice is greedy and deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

Combination = tuple[Any, ...]


def cover_pairs(*parameters: Sequence[Any]) -> list[Combination]:
    """Return combinations of one value for each of two or more parameters, which cover all pairs."""
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
