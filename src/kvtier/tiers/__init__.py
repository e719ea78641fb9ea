"""Tiers below the pool: the contracts `Tier` and `Backend`, the threads between them, and the disk.

Another tier is another `Backend`: on a server, beside `valkey`, `object` and `mooncake`, made in `factory`;
of slots of its own, under `slot_tier`, as `disk` is. Its settings are in `kvtier.tier_config`. Needs neither
torch nor an engine. `kvtier.testing` has the suites that every tier and backend passes.
"""

from __future__ import annotations

from kvtier.tiers.base import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    Backend,
    BackendRow,
    LentRow,
    LentRows,
    Outcome,
    Tier,
    TierChange,
    TierJob,
    TierMiss,
    TierResult,
    TierStats,
)

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_STORAGE",
    "Backend",
    "BackendRow",
    "LentRow",
    "LentRows",
    "Outcome",
    "Tier",
    "TierChange",
    "TierJob",
    "TierMiss",
    "TierResult",
    "TierStats",
]
