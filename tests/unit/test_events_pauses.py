"""Pauses between requests: they grow, have a bound, and end."""

from __future__ import annotations

import pytest

from kvtier.events import Limits
from kvtier.events.follow.pauses import Pauses

LIMITS = Limits(backoff=1.0, backoff_max=5.0, tries=3)


@pytest.fixture
def pauses() -> Pauses:
    return Pauses(LIMITS, now=100.0)


def test_they_grow_with_every_failure_up_to_a_bound(pauses: Pauses) -> None:
    assert not pauses
    told = [(pauses.after_failure(100.0), pauses.until, pauses.other_way) for _ in range(5)]
    assert told == [
        (False, 101.0, True),
        (False, 102.0, False),
        (True, 104.0, True),
        (True, 105.0, False),
        (True, 105.0, True),
    ]
    pauses.tick(104.9)
    assert pauses
    pauses.tick(105.0)
    assert not pauses
    assert pauses.after_failure(105.0), "time alone forgets no failure"
    pauses.end()
    assert not pauses
    assert not pauses.after_failure(106.0)
    assert pauses.until == 107.0


def test_a_picture_disproved_once_is_replaced_at_once(pauses: Pauses) -> None:
    assert [pauses.after_mismatch(100.0) for _ in range(2)] == [False, False]
    assert not pauses
    assert pauses.after_mismatch(100.0)
    assert pauses.until == 104.0
    pauses.end()
    pauses.forget_mismatches()
    assert not pauses.after_mismatch(110.0)
    assert not pauses


def test_only_one_reset_after_another_has_to_wait(pauses: Pauses) -> None:
    pauses.after_reset(100.0)
    assert not pauses
    pauses.after_reset(100.5)
    assert pauses.until == 101.5
    pauses.after_reset(103.0)
    assert not pauses
