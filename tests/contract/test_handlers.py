"""Our handlers keep the contract of handlers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvtier.config import OffloadingConfig
from kvtier.pool import Pool
from kvtier.testing.handler_suite import Handlers, HandlerSuite
from kvtier.transfer import host
from kvtier.transfer.base import CanonicalKVCaches, OffloadingHandler
from kvtier.transfer.host import HostHandler, HostJob, HostLoadHandler, HostStoreHandler, Spans


class TestHostHandlers(HandlerSuite):
    def make_handlers(
        self, config: OffloadingConfig, kv_caches: CanonicalKVCaches, clock: Callable[[], float]
    ) -> Handlers:
        pool = Pool.open(config.engine_id, config.num_slots, config.row_bytes)
        spans = Spans(kv_caches, pool, config)
        store = HostStoreHandler(spans, config.settings.store_deadline, clock=clock)
        load = HostLoadHandler(spans, config.settings.load_deadline, clock=clock)
        return Handlers(store, load, pool.rows)

    @contextmanager
    def hold(self, handler: OffloadingHandler) -> Iterator[None]:
        assert isinstance(handler, HostHandler)
        released = threading.Event()

        def wait_for_release(job: HostJob) -> None:
            while not released.is_set() and not job.over.wait(0.001):
                pass

        handler.probe = wait_for_release
        try:
            yield
        finally:
            released.set()
            handler.probe = None


class TestPackedHandlers(TestHostHandlers):
    """Blocks are kept packed."""

    packs = True


class TestHandlersWithoutCompiler(TestHostHandlers):
    """The same where nothing was compiled."""

    @pytest.fixture(autouse=True)
    def _copy_in_python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host, "store_pages", host.store_pages_python)
        monkeypatch.setattr(host, "load_pages", host.load_pages_python)
