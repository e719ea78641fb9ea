"""Tiers below the pool: the contracts `Tier` and `Backend`, the threads between them, and the disk.

To add a tier, add a `Backend`. A backend for a server stands beside `valkey`, `object` and `mooncake`, and
`factory` makes it. A backend with slots of its own goes under `slot_tier`, like `disk`. Settings of tiers
are in `kvtier.tier_config`. Needs neither torch nor an engine. `kvtier.testing` has the suites that every
tier and backend passes.
"""

from __future__ import annotations

from kvtier.residency import MEDIUM_CPU, MEDIUM_STORAGE
from kvtier.tiers.base import (
    Backend,
    BackendRow,
    Direction,
    RowBuffer,
    RowJob,
    Tier,
    TierResult,
    TierStats,
)

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_STORAGE",
    "Backend",
    "BackendRow",
    "Direction",
    "RowBuffer",
    "RowJob",
    "Tier",
    "TierResult",
    "TierStats",
]
