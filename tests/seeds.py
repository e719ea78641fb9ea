"""Seeds of random tests: `make test` takes the first few, `make test-all` takes all of them."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int, few: int) -> list[Any]:
    """Return the seeds below `count`; those from `few` on are left to `make test-all`."""
    more = [pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(few, count)]
    return [*range(few), *more]
