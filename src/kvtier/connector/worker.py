"""The worker's side: gives transfers to handlers and reports their results.

It decides nothing. Each step it first ends the jobs that read blocks which this step overwrites, then starts the step's loads,
and after the forward pass the step's stores, which read what the pass has written. Every job that the scheduler's side planned
is reported exactly once, also one that no handler would take. Called by the worker's thread only; nothing waits except
`handle_preemptions`, which is bounded, and `wait_for_transfers`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvtier.connector.metadata import OffloadingConnectorMetadata, ReqId, TransferReport
from kvtier.errors import InputError, KVTierError
from kvtier.offload.base import OffloadingSpec
from kvtier.transfer.base import GPULoadStoreSpec, OffloadingHandler, TransferResult, TransferSpec, TransferType

if TYPE_CHECKING:
    import torch

__all__ = ["OffloadingConnectorWorker"]

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = (
    0.1  # a store that has not read its blocks by then is given up: it costs a later miss, not a stalled step
)


class _Running(NamedTuple):
    req_id: ReqId
    spec: TransferSpec
    handler: OffloadingHandler


class OffloadingConnectorWorker:
    """Moves the bytes of one rank."""

    def __init__(self, spec: OffloadingSpec) -> None:
        self.spec = spec
        self._handlers: dict[TransferType, OffloadingHandler] = {}
        self._loads: dict[int, _Running] = {}
        self._stores: dict[int, _Running] = {}
        self._refused: list[TransferResult] = []
        self._held: set[ReqId] = set()
        self._reports: list[TransferReport] = []
        self._invalid_block_ids: set[int] = set()
        self._failed_loads: set[ReqId] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Learn where the engine keeps its KV, by layer name, and make the handlers."""
        from kvtier.transfer.layout import canonicalize

        canonical = canonicalize(kv_caches, self.spec.config.groups)
        for src, dst, handler in self.spec.get_handlers(canonical):
            self._handlers[src.medium(), dst.medium()] = handler

    def handle_preemptions(self, metadata: OffloadingConnectorMetadata) -> None:
        """Make sure that no running store reads a block which this step hands to someone else."""
        if not metadata.jobs_to_flush:
            return
        for handler in set(self._handlers.values()):
            jobs = {
                job for job in metadata.jobs_to_flush if job in self._stores and self._stores[job].handler is handler
            }
            if jobs and not handler.wait(jobs, _FLUSH_SECONDS):
                handler.cancel(jobs)

    def start_load_kv(self, metadata: OffloadingConnectorMetadata, *, by_layer: bool = False) -> None:
        """Start this step's loads, `by_layer` if somebody will `await_layer`."""
        for req_id, spec in metadata.reqs_to_load.items():
            self._start(self._loads, metadata.load_jobs[req_id], req_id, spec, by_layer=by_layer)

    def await_layer(self, req_id: ReqId, layer: str, timeout: float) -> bool:
        """Let what the caller does next find a layer of a request's load in place; say whether that could be done.

        It is good for what is used only if the load succeeds. On a device the caller's stream waits, not the caller.
        """
        for job_id, load in self._loads.items():
            if load.req_id == req_id:
                return load.handler.await_layer(job_id, layer, timeout)
        return False

    def is_storing(self, block_ids: set[int]) -> bool:
        """Say whether a running store reads one of these blocks."""
        return any(not block_ids.isdisjoint(_gpu_end(store.spec).block_ids.tolist()) for store in self._stores.values())

    def start_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """Start this step's stores. The forward pass has been given to the device by now."""
        for req_id, spec in metadata.reqs_to_store.items():
            self._start(self._stores, metadata.store_jobs[req_id], req_id, spec)
        self._held |= metadata.reqs_to_hold

    def get_finished(self, finished_req_ids: set[ReqId]) -> tuple[set[ReqId], set[ReqId]]:
        """Return requests whose stores are over after they finished, and requests whose load is over.

        Which finished requests hold their blocks is told by the metadata, so `finished_req_ids` adds nothing here.
        """
        recving = set()
        for result in self._take_results():
            self._reports.append(TransferReport(self.spec.config.rank, result))
            load = self._loads.pop(result.job_id, None)
            self._stores.pop(result.job_id, None)
            if load is not None:
                recving.add(load.req_id)
                self._note_missing_blocks(load, result)
        busy = {store.req_id for store in self._stores.values()}
        sending = self._held - busy
        self._held &= busy
        return sending, recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Take the blocks whose bytes did not arrive. Their requests are named by `get_finished` just before."""
        taken, self._invalid_block_ids = self._invalid_block_ids, set()
        return taken

    def take_failed_loads(self) -> set[ReqId]:
        """Take the requests whose load failed, for engines that cannot make use of block ids."""
        taken, self._failed_loads = self._failed_loads, set()
        return taken

    def take_reports(self) -> list[TransferReport]:
        """Take the results for the scheduler's side."""
        taken, self._reports = self._reports, []
        return taken

    def wait_for_transfers(self, timeout: float) -> None:
        """Block until the oldest load, or with none the oldest store, is over, or `timeout` seconds have passed."""
        jobs = self._loads or self._stores
        if jobs and not self._refused:
            oldest = min(jobs)
            jobs[oldest].handler.wait({oldest}, timeout)

    def shutdown(self) -> None:
        """End all transfers and release the pool. Idempotent."""
        for handler in set(self._handlers.values()):
            handler.shutdown()
        self._handlers.clear()
        self.spec.shutdown()

    def _start(
        self, jobs: dict[int, _Running], job_id: int, req_id: ReqId, spec: TransferSpec, *, by_layer: bool = False
    ) -> None:
        handler = self._handlers.get((spec[0].medium(), spec[1].medium()))
        if handler is None:
            raise InputError(
                f"no handler moves {spec[0].medium()} to {spec[1].medium()}: call register_kv_caches before the first step"
            )
        jobs[job_id] = _Running(req_id, spec, handler)
        try:
            taken = (handler.transfer_by_layer if by_layer else handler.transfer_async)(job_id, spec)
        except KVTierError as error:
            logger.error("job %d of request %s could not be started: %s", job_id, req_id, error)
            taken = False
        if not taken:
            self._refused.append(TransferResult(job_id, success=False))

    def _take_results(self) -> list[TransferResult]:
        if not self._loads and not self._stores:
            return []  # as in most steps: every job is noted here until its result is taken
        results, self._refused = self._refused, []
        for handler in set(self._handlers.values()):
            results += handler.get_finished()
        return results

    def _note_missing_blocks(self, load: _Running, result: TransferResult) -> None:
        if result.success:
            return
        self._failed_loads.add(load.req_id)
        ids = _gpu_end(load.spec).block_ids.tolist()
        missing = ids if result.failed_blocks is None else [ids[position] for position in result.failed_blocks]
        self._invalid_block_ids.update(missing)


def _gpu_end(spec: TransferSpec) -> GPULoadStoreSpec:
    (end,) = (end for end in spec if isinstance(end, GPULoadStoreSpec))
    return end
