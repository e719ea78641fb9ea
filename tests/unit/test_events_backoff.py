"""Backoff between requests: pauses grow, have a bound, and end."""

from __future__ import annotations

import pytest
from kvtier.events.follow.requests import Backoff

from kvtier.events import Limits

LIMITS = Limits(backoff=1.0, backoff_max=5.0, tries=3)


@pytest.fixture
def backoff() -> Backoff:
    return Backoff(LIMITS, now=100.0)


def test_pauses_grow_with_every_failure_up_to_a_bound(backoff: Backoff) -> None:
    assert not backoff.is_waiting
    told = [(backoff.after_failure(100.0), backoff.until, backoff.other_way) for _ in range(5)]
    assert told == [
        (False, 101.0, True),
        (False, 102.0, False),
        (True, 104.0, True),
        (True, 105.0, False),
        (True, 105.0, True),
    ]
    backoff.tick(104.9)
    assert backoff.is_waiting
    backoff.tick(105.0)
    assert not backoff.is_waiting
    assert backoff.after_failure(105.0), "time alone forgets no failure"
    backoff.end()
    assert not backoff.is_waiting
    assert not backoff.after_failure(106.0)
    assert backoff.until == 107.0


def test_a_replica_disproved_once_is_replaced_at_once(backoff: Backoff) -> None:
    assert [backoff.after_mismatch(100.0) for _ in range(2)] == [False, False]
    assert not backoff.is_waiting
    assert backoff.after_mismatch(100.0)
    assert backoff.until == 104.0
    backoff.end()
    backoff.forget_mismatches()
    assert not backoff.after_mismatch(110.0)
    assert not backoff.is_waiting


def test_only_one_reset_after_another_has_to_wait(backoff: Backoff) -> None:
    backoff.after_reset(100.0)
    assert not backoff.is_waiting
    backoff.after_reset(100.5)
    assert backoff.until == 101.5
    backoff.after_reset(103.0)
    assert not backoff.is_waiting
