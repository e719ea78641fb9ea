"""`CPUOffloadingSpec`: chunks in a pool of host memory, and in the tiers below it.

The scheduler gets a manager that knows the slots; each worker gets the handlers that fill and read them. The
parties to the pool are processes: those of the workers and, with tiers, the scheduler's process, which then
moves rows too. If scheduler and worker share a process, they share its one mapping, even if each has its own
spec. A single process needs no shared memory. With a capacity of 0 there is no pool: the manager takes
nothing, and workers get no handlers. An engine calls this only while it starts and ends.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from kvtier.config import KVTierConfig
from kvtier.machine import expect_total_memory
from kvtier.offload.base import OffloadingSpec
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.offload.tiered import ConfiguredTier, TieredOffloadingManager
from kvtier.pool import Pool
from kvtier.tier_config import TierConfig
from kvtier.tiers.base import Tier
from kvtier.tiers.factory import make_tier
from kvtier.tiers.io_tier import IOTier
from kvtier.tiers.shared_tier import SharedTier
from kvtier.transfer.base import (
    CanonicalKVCaches,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
)
from kvtier.transfer.compare import RowComparer

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig

logger = logging.getLogger(__name__)

_REQUIRED_SECONDS = 30.0
"""Seconds that a start waits for a required tier."""
_OPEN_SECONDS = 2.0
"""Seconds that a start waits for a server, so that the first request can use it."""


class _OpenPool(NamedTuple):
    """A mapping of the pool in this process, and the sides of the engine that use it."""

    pool: Pool
    sides: set[str]


_PoolKey = tuple[int, str, str, int, KVTierConfig]
"""Process, engine, launch, party and settings."""

_open_pools: dict[_PoolKey, list[_OpenPool]] = {}
"""The open pools, in the order in which they were opened.

Several connectors of one engine (vLLM's `MultiConnector`) differ in their settings only. If these are equal
too, their sides meet in the order in which they open pools, which is that of the connectors on both sides.
"""
_lock = Lock()

MakeTier = Callable[[TierConfig, "OffloadingConfig"], Tier]


class CPUOffloadingSpec(OffloadingSpec):
    """The spec of offloading to host memory and the tiers below it.

    `clock` times the deadlines of transfers; `make_tier` makes tiers.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        make_tier: MakeTier = make_tier,
    ) -> None:
        super().__init__(config)
        self._clock, self._make_tier = clock, make_tier
        self._manager: CPUOffloadingManager | TieredOffloadingManager | None = None
        self._pool: Pool | None = None
        self._kv_caches: CanonicalKVCaches | None = None
        self._pool_key: _PoolKey = 0, "", "", 0, config.settings

    @property
    def parties(self) -> int:
        """The number of processes that map the pool: first all ranks, then a scheduler of its own."""
        return self.config.world_size + bool(self.config.settings.tiers and self.config.scheduler_apart)

    def get_manager(self) -> CPUOffloadingManager | TieredOffloadingManager:
        """Return the manager, the same object every time."""
        if self._manager is None:
            pool = self._make_pool_manager()
            self._manager = self._make_tiered_manager(pool) if self.config.settings.tiers else pool
        return self._manager

    def _make_pool_manager(self) -> CPUOffloadingManager:
        settings = self.config.settings
        if self.config.num_slots == 0:
            logger.info("cpu.capacity is 0: nothing is stored and nothing is loaded")
        # Workers may have taken the memory by now, so the total is checked; and before the manager is made.
        expect_total_memory(self.config.num_slots * self.config.slot_bytes)
        return CPUOffloadingManager(
            self.config.num_slots,
            settings.cpu.policy,
            store_threshold=settings.store_threshold,
            share=settings.tenant_share,
        )

    def _make_tiered_manager(self, pool: CPUOffloadingManager) -> TieredOffloadingManager:
        settings = self.config.settings
        rows = self.open_pool("scheduler").rows
        tiers = [ConfiguredTier(self._make_tier(tier, self.config), tier.write) for tier in settings.tiers]
        manager = TieredOffloadingManager(
            pool,
            rows,
            tiers,
            row_bytes=self.config.row_bytes,
            store_deadline=settings.store_deadline,
            is_namespace_known=lambda: self.config.tier_namespace_nowait() is not None,
            clock=self._clock,
        )
        try:
            for tier in manager.tiers:
                if isinstance(tier, IOTier) and tier.required:
                    tier.wait_open(_REQUIRED_SECONDS)
                elif isinstance(tier, SharedTier):
                    tier.wait_open(_OPEN_SECONDS)
        except BaseException:
            manager.shutdown()
            raise
        return manager

    def open_pool(self, side: str = "worker") -> Pool:
        """Return this process's mapping of the pool; open it the first time. `side` is the caller's."""
        if self._pool is None:
            config = self.config
            is_apart = side == "scheduler" and config.scheduler_apart
            party = self.parties - 1 if is_apart else config.rank
            key = os.getpid(), config.engine_id, config.launch_id, party, config.settings
            with _lock:
                pools = _open_pools.setdefault(key, [])
                shared = next((shared for shared in pools if side not in shared.sides), None)
                if shared is not None:
                    shared.sides.add(side)
                    self._pool = shared.pool.share()
                else:
                    self._pool = self._open(party)
                    pools.append(_OpenPool(self._pool, {side}))
            self._pool_key = key
        return self._pool

    def _open(self, party: int) -> Pool:
        config = self.config
        return Pool.open(
            config.engine_id,
            config.num_slots,
            config.slot_bytes,
            self.parties,
            party=party,
            launch_id=config.launch_id,
        )

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield the handler of stores and the handler of loads, for the device that the caches are on."""
        if self.config.num_slots == 0:
            return
        settings, self._kv_caches = self.config.settings, kv_caches
        store, load = self._make_handlers(kv_caches)
        yield GPULoadStoreSpec, CPULoadStoreSpec, store(settings.store_deadline, clock=self._clock)
        yield CPULoadStoreSpec, GPULoadStoreSpec, load(settings.load_deadline, clock=self._clock)

    def _make_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> tuple[Callable[..., OffloadingHandler], Callable[..., OffloadingHandler]]:
        """Return the makers of the store and the load handler, which share one view of the memory."""
        pool, geometry = self.open_pool(), self.config.by_image()
        if kv_caches.tensors[0].tensor.is_cuda and find_spec("triton") is not None:
            from kvtier.transfer.cuda import CudaLoadHandler, CudaMemory, CudaStoreHandler

            memory = CudaMemory(kv_caches, pool, geometry)
            return partial(CudaStoreHandler, memory), partial(CudaLoadHandler, memory)
        from kvtier.transfer.host import HostLoadHandler, HostStoreHandler, Spans

        spans = Spans(kv_caches, pool, geometry)
        return partial(HostStoreHandler, spans), partial(HostLoadHandler, spans)

    def get_comparer(self) -> RowComparer | None:
        """Return the comparer of this rank's images. It comes after the handlers."""
        if self.config.num_slots == 0 or not self.config.audits:
            return None
        return RowComparer(self.open_pool(), self.config.by_image(), self._kv_caches)

    def shutdown(self) -> None:
        """Give up the mapping of the pool. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            with _lock:  # a later `open_pool` is another start of the engine
                pools = _open_pools.get(self._pool_key, [])
                pools[:] = [shared for shared in pools if shared.pool is not pool]
                if not pools:
                    _open_pools.pop(self._pool_key, None)
            pool.close()
