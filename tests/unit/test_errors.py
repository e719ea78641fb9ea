"""Lines that clients cause: one of a kind in a minute, and none is forgotten."""

from __future__ import annotations

from tests.unit.connector_kit import Clock

from kvtier.errors import LogLimit


def test_one_line_passes_in_an_interval_and_the_next_counts_the_others() -> None:
    clock = Clock()
    limit = LogLimit(60.0, clock)
    assert [limit.admit() for _ in range(4)] == ["", None, None, None]
    clock.now = 59.9
    assert limit.admit() is None
    clock.now = 60.0
    assert limit.admit() == "; and 4 more since the last such line"
    clock.now = 120.0
    assert limit.admit() == "", "none was withheld"
