"""Rows on a real Valkey server, and what a server, a network or a stranger can do to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.tiers.servers import ValkeyServer

from kvtier.testing.backend_suite import ROW_BYTES, BackendSuite
from kvtier.tier_config import ValkeyConfig
from kvtier.tiers.base import Backend
from kvtier.tiers.valkey import ValkeyBackend

PATIENCE = 30.0
"""A time-out that no test waits for."""


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


class TestValkey(BackendSuite):
    @pytest.fixture(autouse=True)
    def on_server(self, server: ValkeyServer) -> None:
        server.say("FLUSHALL")
        self.url = server.url

    def make(self) -> Backend:
        return ValkeyBackend(ValkeyConfig(url=self.url), ROW_BYTES, timeout=PATIENCE)

    def reopen(self, backend: Backend) -> Backend:
        backend.close()
        return self.make()
