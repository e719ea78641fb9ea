"""A backend in memory, and a whole tier over it: for tests, and the plainest example of a backend.

`MemoryBackend` keeps rows by key in a dict; it passes `BackendSuite`. `make_memory_tier` is the disk's
tier without the disk: the same books, threads, seals and suspension. Its threads are real; who wants a
result waits for it with `wait_any`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvtier.keys import OffloadKey
from kvtier.policies import make_policy
from kvtier.tiers.base import Backend, BackendRow
from kvtier.tiers.seal import SealScope
from kvtier.tiers.slot_table import SlotTable
from kvtier.tiers.slot_tier import SlotTier
from kvtier.tiers.write_limit import WriteLimit

__all__ = ["MemoryBackend", "make_memory_tier"]


class MemoryBackend(Backend):
    """Keeps rows in a dict: seal and bytes by key. `rows` is there to be looked at, and spoilt, by tests."""

    def __init__(self) -> None:
        self.rows: dict[OffloadKey, tuple[bytes, bytearray]] = {}
        self._lock = threading.Lock()

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        for row in rows:
            payload = bytearray().join(row.pieces)
            with self._lock:
                self.rows[row.key] = row.seal, payload
        return [None] * len(rows)

    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        return [self._read(row) for row in rows]

    def _read(self, row: BackendRow) -> bytes | None:
        found = self.rows.get(row.key)
        if found is None or len(found[1]) != row.nbytes:
            return None
        seal, payload = found
        at = 0
        for piece in row.pieces:
            piece[:] = payload[at : at + piece.nbytes]
            at += piece.nbytes
        return seal

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        return [row.key in self.rows for row in rows]

    def delete(self, rows: Sequence[BackendRow]) -> None:
        for row in rows:
            with self._lock:
                self.rows.pop(row.key, None)


def make_memory_tier(
    num_slots: int,
    row_bytes: int,
    *,
    backend: Backend | None = None,
    policy: str = "lru",
    name: str = "disk",
    namespace: str = "test",
    threads: int = 2,
    max_queued: int = 256 << 20,
    write_limit: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    check_seals: bool = True,
) -> SlotTier:
    """Return an open tier over memory, or over any other backend, e.g. a `FaultyBackend`."""
    tier = SlotTier(
        name,
        row_bytes,
        threads=threads,
        max_queued=max_queued,
        write_limit=WriteLimit(write_limit),
        clock=clock,
        check_seals=check_seals,
    )
    tier.open_table(
        SlotTable(num_slots, make_policy(policy, num_slots)), backend or MemoryBackend(), SealScope(namespace)
    )
    return tier
