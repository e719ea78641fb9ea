"""Backends in memory, and whole tiers over them: for tests, and the plainest examples of a backend.

`MemoryBackend` keeps rows by scope and key in a dict; it passes `BackendSuite`. `make_memory_tier` is the
disk's tier without the disk: the same books, threads, seals and suspension. `MemoryServer` stands for a
server that engines share, and `make_shared_tier` is a tier over it. Threads are real; tests wait for
results with `wait_any`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from kvtier.errors import OutsideError
from kvtier.keys import OffloadKey
from kvtier.policies import make_policy
from kvtier.slot_table import SlotTable
from kvtier.tiers.base import Backend, BackendRow, RowBuffer
from kvtier.tiers.seal import SealScope, copy_into
from kvtier.tiers.shared_tier import SharedTier
from kvtier.tiers.slot_tier import SlotTier, WriteLimit


class LooseRows(RowBuffer):
    """Rows that have memories of their own, in any number of pieces. Slots count up as rows are added."""

    def __init__(self) -> None:
        self.memory = None
        self._rows: list[tuple[memoryview, ...]] = []

    def add(self, rows: Iterable[tuple[memoryview, ...]]) -> list[int]:
        """Add rows, given by their pieces, and return their slots."""
        first = len(self._rows)
        self._rows += rows
        return list(range(first, len(self._rows)))

    def __getitem__(self, slot: int) -> tuple[memoryview, ...]:
        return self._rows[slot]


class MemoryBackend(Backend):
    """Keeps rows in a dict: seal and bytes by name. Tests may read and spoil `rows`."""

    def __init__(self) -> None:
        self.rows: dict[bytes, tuple[bytes, bytearray]] = {}
        self._lock = threading.Lock()

    def name(self, row: BackendRow) -> bytes:
        """Return the name under which a row is kept."""
        return b"%016x:%b" % (row.scope, row.key)

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        for row in rows:
            payload = bytearray().join(row.pieces)
            with self._lock:
                self.rows[self.name(row)] = row.seal, payload
        return [None] * len(rows)

    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        return [self._read(row) for row in rows]

    def _read(self, row: BackendRow) -> bytes | None:
        found = self.rows.get(self.name(row))
        if found is None:
            return None
        seal, payload = found
        if len(payload) != row.nbytes:
            return b""
        copy_into(row.pieces, memoryview(payload))
        return seal

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        return [self.name(row) in self.rows for row in rows]

    def delete(self, rows: Sequence[BackendRow]) -> None:
        for row in rows:
            with self._lock:
                self.rows.pop(self.name(row), None)


class MemoryServer(MemoryBackend):
    """A server in memory. Tests may remove rows, as servers do, and see how often it was asked."""

    def __init__(self, contains_batch: int = 1024) -> None:
        super().__init__()
        self.contains_batch = contains_batch
        self.questions: list[int] = []
        """The number of rows of each call of `contains`."""
        self.num_written = 0

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        self.num_written += len(rows)
        return super().write(rows)

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        self.questions.append(len(rows))
        return super().contains(rows)

    def evict(self, *keys: OffloadKey) -> None:
        """Forget rows of these keys, or all."""
        for name in [name for name in list(self.rows) if not keys or name[17:] in keys]:
            self.rows.pop(name, None)


def make_shared_tier(
    row_bytes: int,
    *,
    backend: Backend | None = None,
    name: str = "valkey",
    namespace: str = "test",
    threads: int = 2,
    **options: Any,
) -> SharedTier:
    """Return an open tier over a server in memory, or over any other backend that goes by key.

    Further options are those of `SharedTier`.
    """
    server = backend or MemoryServer()
    tier = SharedTier(
        name, row_bytes, lambda: server, namespace=lambda: namespace, threads=threads, **options
    )
    if not tier.wait_open():
        raise OutsideError(tier.problem or "the tier did not open")
    return tier


def make_memory_tier(
    num_slots: int,
    row_bytes: int,
    *,
    backend: Backend | None = None,
    policy: str = "lru",
    name: str = "disk",
    namespace: str = "test",
    threads: int = 2,
    write_limit: int | None = None,
    **options: Any,
) -> SlotTier:
    """Return an open tier over memory, or over any other backend, e.g. a `FaultyBackend`.

    Further options are those of `SlotTier`.
    """
    tier = SlotTier(name, row_bytes, threads=threads, write_limit=WriteLimit(write_limit), **options)
    table = SlotTable(num_slots, make_policy(policy, num_slots))
    tier.open_table(table, backend or MemoryBackend(), SealScope(namespace))
    return tier
