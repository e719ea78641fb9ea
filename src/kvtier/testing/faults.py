"""Transfers that fail on purpose: `with_faults(spec, plan)` is `spec` with handlers that fail at a rate.

A transfer is refused, fails, hangs until its own deadline ends it, or arrives short: some leading blocks
are really copied and the rest are not. A slow transfer delays the rest and may still arrive. Blocks that a
failed job did not deliver are filled with `POISON`, so that any use of them is detected. The plan's seed
and the job's id alone decide which job fails and how.

`Fault.CORRUPT` and `corrupt_pool` are negative controls: wrong bytes without a report. A test that does not
notice them proves nothing.

One thread uses a faulty handler, like any other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from kvtier.config import OffloadingConfig
from kvtier.errors import InputError, TransferError
from kvtier.offload.base import OffloadingManager, OffloadingSpec
from kvtier.offload.cpu import CPUOffloadingSpec
from kvtier.pool import Pool
from kvtier.transfer.base import (
    NULL_BLOCK,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
    TransferType,
)
from kvtier.transfer.compare import RowComparer
from kvtier.transfer.jobs import Job, JobHandler
from kvtier.transfer.plan import Plan

POISON = 0x7F
"""Fills bytes that did not arrive.

It is a huge, finite number as float32 or bfloat16, and NaN as float16.
"""

SLOW_SECONDS = 0.03
"""How long a slow transfer waits before each block."""


class Fault(Enum):
    """The way in which a transfer goes wrong."""

    REFUSE = "is not accepted"
    FAIL = "fails before its first block"
    HANG = "stops after some blocks until its deadline"
    SHORT = "fails after some blocks"
    SLOW = "waits before each block after some"
    CORRUPT = "delivers wrong bytes and calls it success"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which transfers go wrong: `rate` of them, evenly over `kinds`. `injected` counts them."""

    seed: int
    rate: float
    kinds: tuple[Fault, ...] = (Fault.REFUSE, Fault.FAIL, Fault.HANG, Fault.SHORT)
    injected: Counter[Fault] = field(default_factory=Counter, compare=False)

    def choose(self, transfer_type: TransferType, job_id: int) -> tuple[Fault | None, float]:
        """Return the fault of a job, if any, and the fraction of its blocks that it completes."""
        rng = random.Random(f"{self.seed} {transfer_type} {job_id}")
        fault = rng.choice(self.kinds) if rng.random() < self.rate else None
        if fault is not None:
            self.injected[fault] += 1
        return fault, rng.random()


class _Fate(NamedTuple):
    spec: TransferSpec
    fault: Fault | None
    blocks: int


class _FaultyHandler(OffloadingHandler):
    """Hooks into the copy thread of a real handler, so that its own deadlines and reports are tested."""

    def __init__(
        self,
        handler: JobHandler[Any],
        kv_caches: CanonicalKVCaches,
        config: OffloadingConfig,
        plan: FaultPlan,
    ) -> None:
        self._handler = handler
        self._kv_caches, self._config = kv_caches, config
        self._plan = plan
        self._fates: dict[int, _Fate] = {}
        self._results: list[TransferResult] = []
        handler.piece_bytes = 1  # block by block, so that even a small job can arrive in part
        handler.probe = self._probe

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        fault, fraction = self._plan.choose(self._handler.transfer_type, job_id)
        if fault is Fault.REFUSE:
            return False
        gpu = next(end for end in spec if isinstance(end, GPULoadStoreSpec))
        blocks = 0 if fault is Fault.FAIL else int(fraction * np.count_nonzero(gpu.block_ids != NULL_BLOCK))
        self._fates[job_id] = _Fate(spec, fault, blocks)
        accepted = self._handler.transfer_async(job_id, spec)
        if not accepted:
            del self._fates[job_id]
        return accepted

    def get_finished(self) -> list[TransferResult]:
        self._collect()
        taken, self._results = self._results, []
        return taken

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        over = self._handler.wait(job_ids, timeout)
        self._collect()
        return over

    def cancel(self, job_ids: set[int]) -> None:
        self._handler.cancel(job_ids)
        self._collect()

    def shutdown(self) -> None:
        self._handler.shutdown()
        self._collect()

    def check(self) -> None:
        """Raise `IntegrityError` if the handler's books do not agree."""
        self._handler.check()

    def _probe(self, job: Job) -> None:
        """Inject the fault. Runs on the copy thread before each block."""
        fate = self._fates.get(job.job_id)  # none: the job has ended, and its result was taken
        if fate is None or job.blocks_begun < fate.blocks:
            return
        if fate.fault is Fault.HANG:
            self._handler.wait_ending(job)
        elif fate.fault is Fault.SLOW:
            self._handler.wait_ending(job, SLOW_SECONDS)
        elif fate.fault in (Fault.FAIL, Fault.SHORT):
            raise TransferError(f"injected: {fate.fault.value}")

    def _collect(self) -> None:
        """Take results from the real handler, and spoil missing blocks before anyone sees the result."""
        for result in self._handler.get_finished():
            fate = self._fates.pop(result.job_id)
            plan = self._handler.plan(fate.spec)
            if not result.success:
                missing = plan.positions if result.failed_blocks is None else result.failed_blocks
                self._spoil(plan.part(np.isin(plan.positions, missing)))
            elif fate.fault is Fault.CORRUPT:
                self._spoil(plan)
            self._results.append(result)

    def _spoil(self, blocks: Plan) -> None:
        to_engine = self._handler.transfer_type[1] == GPULoadStoreSpec.medium()
        for group, block in blocks.pieces([1] * len(self._config.groups)):
            if to_engine:
                for ref in self._kv_caches.group_data_refs[group]:
                    page = self._kv_caches.tensors[ref.tensor_idx].tensor[int(block.blocks[0])]
                    page[: ref.page_size_bytes] = POISON
            else:
                size = self._config.kept_bytes(group)
                start = self._config.rank * self._config.max_image_bytes + int(block.indices[0]) * size
                self._handler.pool.rows[int(block.slots[0]), start : start + size] = POISON


class FaultySpec(OffloadingSpec):
    """Another spec with faults in its transfers."""

    def __init__(self, spec: OffloadingSpec, plan: FaultPlan) -> None:
        super().__init__(spec.config)
        self.spec = spec
        self.plan = plan

    def get_manager(self) -> OffloadingManager:
        """Return the manager of the real spec."""
        return self.spec.get_manager()

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield the handlers of the real spec, made faulty."""
        for source, destination, handler in self.spec.get_handlers(kv_caches):
            if not isinstance(handler, JobHandler):
                raise InputError(
                    f"expected handlers with a probe (JobHandler), got {type(handler).__name__}"
                )
            yield source, destination, _FaultyHandler(handler, kv_caches, self.config.by_image(), self.plan)

    def get_comparer(self) -> RowComparer | None:
        """Return the comparer of the real spec."""
        return self.spec.get_comparer()

    def shutdown(self) -> None:
        """Release the real spec's resources."""
        self.spec.shutdown()


def with_faults(spec: OffloadingSpec, plan: FaultPlan) -> FaultySpec:
    """Return a spec whose transfers go wrong as planned."""
    return FaultySpec(spec, plan)


def corrupt_pool(where: OffloadingSpec | Pool, rng: np.random.Generator) -> None:
    """Change every byte of a pool that this process has open, without notifying any other object."""
    while isinstance(where, FaultySpec):
        where = where.spec
    pool = where.open_pool() if isinstance(where, CPUOffloadingSpec) else where
    if not isinstance(pool, Pool):
        raise InputError(f"expected a pool or a spec that has one, got {type(pool).__name__}")
    for row in pool.rows:
        row ^= rng.integers(1, 256, len(row), dtype=np.uint8)
