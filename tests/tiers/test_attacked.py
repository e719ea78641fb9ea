"""What attackers have found: faults beside each other, at bad moments, and in numbers."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.test_disk import capacity, make_tier, opened, place_of
from tests.tiers.test_parts import Gate, lent

from kvtier.cli import main
from kvtier.errors import OutsideError
from kvtier.policies import LRUPolicy
from kvtier.testing.tier_suite import key, keys
from kvtier.tiers.base import Outcome
from kvtier.tiers.disk import files as files_module
from kvtier.tiers.disk.folder import FolderLock, taken_bytes
from kvtier.tiers.io import Direction, IOThreads
from kvtier.tiers.seal import SealScope
from kvtier.tiers.slot_table import SlotTable


@pytest.mark.parametrize("garbage", [b"\0", b"\xa5"])
def test_without_a_header_nothing_from_before_a_reset_is_back(tmp_path: Path, garbage: bytes) -> None:
    with opened(tmp_path) as driver:
        driver.store(1, 2)
    with opened(tmp_path) as driver:
        driver.tier.reset("weights were swapped")
    with (place_of(tmp_path) / "records").open("r+b") as records:
        records.write(garbage * 8192)
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used == 0
        driver.store(3)
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used == 1
