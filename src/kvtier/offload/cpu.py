"""`CPUOffloadingSpec`: chunks in a pool of host memory.

The scheduler gets a manager that knows the slots, each worker gets the handlers that fill and read them.
Only workers are parties to the pool: this spec's scheduler touches no bytes, and a single process with
nobody to share with needs no shared memory. A spec whose scheduler moves rows too (tiers below the pool)
overrides `parties` and `party`, and calls `open_pool` on both sides. With a capacity of 0 there is no pool:
the manager takes nothing and workers get no handlers, since none is ever needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvtier.memory import expect_total_memory
from kvtier.offload.base import OffloadingSpec
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.pool import Pool
from kvtier.transfer.base import (
    CanonicalKVCaches,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
)

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig

__all__ = ["CPUOffloadingSpec"]

logger = logging.getLogger(__name__)


class CPUOffloadingSpec(OffloadingSpec):
    """Offloads to host memory. `clock` times the deadlines of transfers."""

    def __init__(self, config: OffloadingConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config)
        self._clock = clock
        self._manager: CPUOffloadingManager | None = None
        self._pool: Pool | None = None

    @property
    def parties(self) -> int:
        """How many times the pool is opened in all processes of the engine."""
        return self.config.world_size

    @property
    def party(self) -> int:
        """This process's number among the parties. Ranks come first."""
        return self.config.rank

    def get_manager(self) -> CPUOffloadingManager:
        """Return the manager, the same every time."""
        if self._manager is None:
            settings = self.config.settings
            if self.config.num_slots == 0:
                logger.info("cpu.capacity is 0: nothing is stored and nothing is loaded")
            # Before books are made for it. Workers may have taken it by now, so what is free says nothing.
            expect_total_memory(self.config.num_slots * self.config.row_bytes)
            self._manager = CPUOffloadingManager(
                self.config.num_slots, settings.cpu.policy, store_threshold=settings.store_threshold
            )
        return self._manager

    def open_pool(self) -> Pool:
        """Return this process's mapping of the pool, opening it the first time."""
        if self._pool is None:
            config = self.config
            self._pool = Pool.open(
                config.engine_id,
                config.num_slots,
                config.row_bytes,
                self.parties,
                party=self.party,
                launch_id=config.launch_id,
            )
        return self._pool

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield the handler of stores and the handler of loads, for the device that the caches are on."""
        if self.config.num_slots == 0:
            return
        settings = self.config.settings
        store, load = self._make_handlers(kv_caches)
        yield GPULoadStoreSpec, CPULoadStoreSpec, store(settings.store_deadline, clock=self._clock)
        yield CPULoadStoreSpec, GPULoadStoreSpec, load(settings.load_deadline, clock=self._clock)

    def _make_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> tuple[Callable[..., OffloadingHandler], Callable[..., OffloadingHandler]]:
        """Return what makes the two handlers, over one view of the memories."""
        pool = self.open_pool()
        if kv_caches.tensors[0].tensor.is_cuda and find_spec("triton") is not None:
            from kvtier.transfer.cuda import CudaLoadHandler, CudaMemory, CudaStoreHandler

            memory = CudaMemory(kv_caches, pool, self.config)
            return partial(CudaStoreHandler, memory), partial(CudaLoadHandler, memory)
        from kvtier.transfer.host import HostLoadHandler, HostStoreHandler
        from kvtier.transfer.spans import Spans

        spans = Spans(kv_caches, pool, self.config)
        return partial(HostStoreHandler, spans), partial(HostLoadHandler, spans)

    def shutdown(self) -> None:
        """Give up the mapping of the pool. Idempotent."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
