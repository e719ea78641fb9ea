"""Combinations of parameters: all pairs are covered, with few of them, and always the same."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from kvtier.testing.caches import LAYOUTS
from kvtier.testing.kit import cover_pairs, pairs_of

PARAMETERS: list[tuple[list[Any], ...]] = [
    ([1, 2], [1, 2]),
    ([None, "a"], [0], [True, False]),
    (list(LAYOUTS), [32, 4096], [1, 2, 5], [1, 2]),
    ([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]),
]


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_all_pairs_are_covered(parameters: tuple[list[Any], ...]) -> None:
    chosen = cover_pairs(*parameters)
    covered = {pair for combination in chosen for pair in pairs_of(combination)}
    assert covered == {pair for combination in product(*parameters) for pair in pairs_of(combination)}


@pytest.mark.parametrize(("parameters", "most"), list(zip(PARAMETERS, [4, 4, 24, 9], strict=True)))
def test_few_combinations_suffice(parameters: tuple[list[Any], ...], most: int) -> None:
    chosen = cover_pairs(*parameters)
    assert len(chosen) == len(set(chosen)) <= most
    assert chosen == cover_pairs(*parameters)
