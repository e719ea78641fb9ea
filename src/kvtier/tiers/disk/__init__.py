"""The disk tier: a bounded folder of slots that a restart finds as it was (docs/tiers.md)."""

from __future__ import annotations

from kvtier.config import DiskConfig
from kvtier.tiers.disk.files import DiskFiles
from kvtier.tiers.disk.folder import DiskPlace, find_places
from kvtier.tiers.disk.tier import DiskTier

__all__ = ["DiskConfig", "DiskFiles", "DiskPlace", "DiskTier", "find_places"]
