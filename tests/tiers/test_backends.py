"""Every backend in the tree runs the suite, and the suite fails for backends that break the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvtier.testing.backend_suite import NUM_PLACES, ROW_BYTES, BackendSuite
from kvtier.testing.memory_tier import MemoryBackend
from kvtier.tiers.base import Backend, BackendRow
from kvtier.tiers.disk import DiskFiles


class TestMemory(BackendSuite):
    def make(self) -> Backend:
        return MemoryBackend()


class TestDiskFiles(BackendSuite):
    namespace = "suite"

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make(self) -> Backend:
        capacity = (NUM_PLACES + 1) * (ROW_BYTES + 2048)
        return DiskFiles.open(self.path, self.namespace, ROW_BYTES, capacity, 512).files

    def reopen(self, backend: Backend) -> Backend:
        backend.close()
        return self.make()


class TestDiskFilesWithoutDirectIO(TestDiskFiles):
    @pytest.fixture(autouse=True)
    def no_direct_io(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtier.tiers.disk.files.os.O_DIRECT", 0)


# Broken backends


class KeepsLentMemory(MemoryBackend):
    """Stores the memory of a row instead of a copy."""

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        for row in rows:
            kept = row.pieces[0] if len(row.pieces) == 1 else bytearray().join(row.pieces)
            self.rows[self.name(row)] = row.seal, kept  # type: ignore[assignment]
        return [None] * len(rows)


class IgnoresScope(MemoryBackend):
    def name(self, row: BackendRow) -> bytes:
        return row.key


class IgnoresGroup(MemoryBackend):
    def name(self, row: BackendRow) -> bytes:
        return super().name(row._replace(key=row.key[:-4]))  # type: ignore[arg-type]


class HasOneLength(MemoryBackend):
    """Fills shorter rows up, and returns as much as was asked for."""

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        super().write(rows)
        for row in rows:
            seal, payload = self.rows[self.name(row)]
            self.rows[self.name(row)] = seal, payload.ljust(ROW_BYTES, b"\0")
        return [None] * len(rows)

    def _read(self, row: BackendRow) -> bytes | None:
        found = self.rows.get(self.name(row))
        if found is None:
            return None
        at = 0
        for piece in row.pieces:
            piece[:] = found[1][at : at + piece.nbytes]
            at += piece.nbytes
        return found[0]


class RefusesOtherLengths(MemoryBackend):
    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        return super().write([row for row in rows if row.nbytes == ROW_BYTES]) and [None] * len(rows)


class DropsRowsOfLongCalls(MemoryBackend):
    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        super().write(rows[:70])
        return [None] * len(rows)


class HoldsFewRows(MemoryBackend):
    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        super().write(rows)
        for name in list(self.rows)[:-70]:
            del self.rows[name]
        return [None] * len(rows)


_SUITE = BackendSuite()


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (KeepsLentMemory, _SUITE.test_a_row_that_was_written_is_a_copy),
        (IgnoresScope, _SUITE.test_scopes_have_rows_of_their_own),
        (IgnoresGroup, _SUITE.test_groups_have_rows_of_their_own),
        (HasOneLength, lambda backend: _SUITE.test_rows_of_other_lengths(backend, 5000)),
        (RefusesOtherLengths, lambda backend: _SUITE.test_rows_of_other_lengths(backend, 5000)),
        (DropsRowsOfLongCalls, _SUITE.test_many_rows_in_one_call),
        (HoldsFewRows, _SUITE.test_many_rows_in_one_call),
    ],
)
def test_the_suite_fails_for_a_broken_backend(
    broken: type[Backend], test: Callable[[Backend], None]
) -> None:
    """Guards backends of others: all of these had passed the suite."""
    with pytest.raises(AssertionError):
        test(broken())
