"""Every backend in the tree runs the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.testing.backend_suite import NUM_PLACES, ROW_BYTES, BackendSuite
from kvtier.testing.memory_tier import MemoryBackend
from kvtier.tiers.base import Backend
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
