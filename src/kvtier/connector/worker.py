"""The worker's side: gives transfers to handlers and reports their results.

It decides nothing. In each step it first ends the jobs that read blocks which this step overwrites, then the
jobs that are no longer wanted. It then starts the step's loads, and after the forward pass the step's
stores, which read the blocks that the pass has written. Every job that the scheduler's side planned is
reported once, even if no handler took it or its step was never finished. A job is reported again only if the
scheduler's side asks for it. Of ranks that hold the same bytes, one stores; the others start no store and
report none. Only the worker's thread calls this. Only `handle_preemptions`, which is bounded, and
`wait_for_transfers` wait.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvtier.connector.metadata import (
    EndOrder,
    KVConnectorOutput,
    OffloadingConnectorMetadata,
    ReqId,
    TransferReport,
)
from kvtier.errors import InputError, KVTierError
from kvtier.offload.base import OffloadingSpec
from kvtier.transfer.base import (
    AuditLoadStoreSpec,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
    TransferType,
)
from kvtier.transfer.compare import AuditingHandler

if TYPE_CHECKING:
    import torch

__all__ = ["OffloadingConnectorWorker"]

logger = logging.getLogger(__name__)

_MAX_NAMED = 4096  # more loads than any engine has under way
_FLUSH_SECONDS = 0.1  # a store that has not read its blocks by then is given up: better a miss than a stall


class _Running(NamedTuple):
    req_id: ReqId
    spec: TransferSpec
    handler: OffloadingHandler


class OffloadingConnectorWorker:
    """The worker's half of the connector. It moves the bytes of one rank."""

    def __init__(self, spec: OffloadingSpec) -> None:
        self.spec = spec
        self._may_store = spec.config.rank in spec.config.storing_ranks
        self._handlers: dict[TransferType, OffloadingHandler] = {}
        self._loads: dict[int, _Running] = {}
        self._stores: dict[int, _Running] = {}
        self._refused: list[TransferResult] = []
        self._started: set[int] = set()
        """The jobs of the bound step that were given to a handler, or refused."""
        self._cancelled: set[int] = set()
        """Jobs that were ordered to end and have no result yet."""
        self._void: set[int] = set()
        """Jobs whose bytes may not be used, whatever their handler reports."""
        self._named: dict[int, None] = {}
        """The newest loads whose request `get_finished` has named.

        Each is named once, because engines count.
        """
        self._pending: set[ReqId] = set()
        """Finished requests that keep their blocks until their stores are over."""
        self._output = KVConnectorOutput()
        """The part of the next output that is known before results are taken."""

    def register_kv_caches(
        self, kv_caches: Mapping[str, torch.Tensor], *, blocks_first: bool = False
    ) -> None:
        """Take the engine's KV tensors, by layer name, and make the handlers.

        `blocks_first`: all tensors count blocks in their first dimension, also where its size is two.
        """
        from kvtier.transfer.layout import KVLayout, canonicalize

        layout = KVLayout.BLOCKS_FIRST if blocks_first else None
        canonical = canonicalize(kv_caches, self.spec.config.groups, layout=layout)
        for src, dst, handler in self.spec.get_handlers(canonical):
            self._handlers[src.medium(), dst.medium()] = handler
        if (comparer := self.spec.get_comparer()) is not None:
            stores = GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium()
            auditing = AuditingHandler(self._handlers[stores], comparer, self.spec.config)
            self._handlers[stores] = auditing
            self._handlers[GPULoadStoreSpec.medium(), AuditLoadStoreSpec.medium()] = auditing

    def handle_preemptions(self, metadata: OffloadingConnectorMetadata) -> None:
        """Make sure that no running store reads a block that this step gives to another request."""
        if not metadata.jobs_to_flush:
            return
        for handler in set(self._handlers.values()):
            jobs = {
                job
                for job in metadata.jobs_to_flush
                if job in self._stores and self._stores[job].handler is handler
            }
            if jobs and not handler.wait(jobs, _FLUSH_SECONDS):
                handler.cancel(jobs)

    def start_load_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """End the jobs that are to end, and start this step's loads."""
        self._started.clear()
        self._end_jobs(metadata)
        for req_id, spec in metadata.reqs_to_load.items():
            self._start(self._loads, metadata.load_jobs[req_id], req_id, spec)

    def _end_jobs(self, metadata: OffloadingConnectorMetadata) -> None:
        """Obey the end orders for this rank."""
        orders = {
            i: order for i, order in metadata.jobs_to_end.items() if self.spec.config.rank in order.ranks
        }
        for job_id, order in orders.items():
            running = self._loads.get(job_id) or self._stores.get(job_id)
            if running is None and job_id not in metadata.load_jobs.values():
                self._report_unknown(job_id, order)
                continue
            if order.void:
                self._void.add(job_id)
            if running is not None:
                self._end(job_id, running.handler)

    def _end(self, job_id: int, handler: OffloadingHandler) -> None:
        """End a job.

        If its handler was told to end it before and no longer has it, its result was lost: report a failure.
        """
        if job_id in self._cancelled and handler.wait({job_id}, 0.0):
            self._refused.append(TransferResult(job_id, success=False))
        self._cancelled.add(job_id)
        handler.cancel({job_id})

    def _report_unknown(self, job_id: int, order: EndOrder) -> None:
        """Report a job as failed that does not run here: its report was lost, or it never came here.

        The request of a load that never came here is named too.
        """
        self._output.reports.append(
            TransferReport(self.spec.config.rank, TransferResult(job_id, success=False))
        )
        if order.block_ids and job_id not in self._named:
            self._note_named(job_id)
            _name_load(self._output, order.req_id, order.block_ids)

    def _note_named(self, job_id: int) -> None:
        self._named[job_id] = None
        if len(self._named) > _MAX_NAMED:
            del self._named[next(iter(self._named))]

    def refuse_unstarted(self, metadata: OffloadingConnectorMetadata) -> None:
        """Report as failed the unstarted jobs of a step that was never finished."""
        for req_id, job_id in metadata.load_jobs.items():
            if job_id not in self._started and job_id not in self._loads:
                self._refuse(self._loads, job_id, req_id, metadata.reqs_to_load[req_id])
        for req_id, job_id in metadata.store_jobs.items():
            if self._may_store and job_id not in self._started and job_id not in self._stores:
                self._refuse(self._stores, job_id, req_id, metadata.reqs_to_store[req_id])
        for job_id, (req_id, spec) in metadata.audits.items():
            if self._may_store and job_id not in self._started and job_id not in self._stores:
                self._refuse(self._stores, job_id, req_id, spec)
        self._pending |= metadata.reqs_to_hold

    def void_loads(self) -> None:
        """Count the loads that run now as failed, whatever they bring."""
        self._void |= self._loads.keys()

    def start_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """Start this step's stores, after the forward pass was given to the device."""
        if self._may_store:
            for req_id, spec in metadata.reqs_to_store.items():
                self._start(self._stores, metadata.store_jobs[req_id], req_id, spec)
            for job_id, (req_id, spec) in metadata.audits.items():
                self._start(self._stores, job_id, req_id, spec)
        self._pending |= metadata.reqs_to_hold

    def take_output(self) -> KVConnectorOutput:
        """Take everything that this rank tells after a step: results, and the requests that they concern."""
        output, self._output = self._output, KVConnectorOutput()
        for result in self._take_results():
            output.reports.append(TransferReport(self.spec.config.rank, result))
            self._stores.pop(result.job_id, None)
            if (load := self._loads.pop(result.job_id, None)) is not None:
                self._note_named(result.job_id)
                _name_load(output, load.req_id, _missing_blocks(load, result))
        busy = {store.req_id for store in self._stores.values()}
        output.finished_sending |= self._pending - busy
        self._pending &= busy
        return output

    def get_finished(self, finished_req_ids: set[ReqId]) -> tuple[set[ReqId], set[ReqId]]:
        """Return the finished requests whose stores are over, and the requests whose load is over.

        The rest of the output waits for `take_output`. `finished_req_ids` is not used: the metadata tells
        which finished requests hold their blocks.
        """
        self._output = output = self.take_output()
        sending, output.finished_sending = output.finished_sending, set()
        recving, output.finished_recving = output.finished_recving, set()
        return sending, recving

    def wait_for_transfers(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the end of the oldest load, or else of the oldest store.

        `False`: there is neither.
        """
        jobs = self._loads or self._stores
        if jobs and not self._refused:
            oldest = min(jobs)
            jobs[oldest].handler.wait({oldest}, timeout)
        return bool(jobs)

    def shutdown(self) -> None:
        """End all transfers and release the pool. Idempotent."""
        for handler in set(self._handlers.values()):
            handler.shutdown()
        self._handlers.clear()
        self.spec.shutdown()

    def _start(self, jobs: dict[int, _Running], job_id: int, req_id: ReqId, spec: TransferSpec) -> None:
        self._started.add(job_id)
        if job_id in jobs:
            return  # the step runs again, and the job of its first run is still under way
        handler = self._handler_of(spec)
        if job_id not in self._void and self._is_taken(handler, job_id, spec):
            jobs[job_id] = _Running(req_id, spec, handler)
        else:
            self._refuse(jobs, job_id, req_id, spec)

    def _is_taken(self, handler: OffloadingHandler, job_id: int, spec: TransferSpec) -> bool:
        """Give a job to a handler, and say whether the handler took it."""
        try:
            return handler.transfer_async(job_id, spec)
        except Exception as error:  # a handler may be foreign code, and a transfer must not end a step
            is_known = isinstance(error, KVTierError)
            logger.error(
                "job %d could not be started: %s", job_id, error, exc_info=None if is_known else error
            )
            handler.cancel({job_id})  # the handler may have begun the job
        return False

    def _refuse(self, jobs: dict[int, _Running], job_id: int, req_id: ReqId, spec: TransferSpec) -> None:
        """Note a failed result for a job that no handler works on."""
        jobs[job_id] = _Running(req_id, spec, self._handler_of(spec))
        self._refused.append(TransferResult(job_id, success=False))

    def _handler_of(self, spec: TransferSpec) -> OffloadingHandler:
        source, target = (end.medium() for end in spec)
        if (source, target) not in self._handlers:
            raise InputError(
                f"no handler moves {source} to {target}: call register_kv_caches before the first step"
            )
        return self._handlers[source, target]

    def _take_results(self) -> Iterator[TransferResult]:
        """Take one result for each job that is over.

        A job that was refused here, even if its handler has begun it, gives only this one result.
        """
        if not self._loads and not self._stores:
            return  # most steps: a job stays in one of these until its result is taken
        results, self._refused = self._refused, []
        for handler in set(self._handlers.values()):
            try:
                results += filter(_is_result, handler.get_finished())
            except Exception:  # as above; the lost results are asked for again (`jobs_to_end`)
                logger.exception("a handler could not say which jobs are over")
        for result in results:
            self._cancelled.discard(result.job_id)
            if result.job_id in self._void:
                self._void.remove(result.job_id)
                yield result._replace(success=False, failed_blocks=None)
            elif (running := self._loads.get(result.job_id) or self._stores.get(result.job_id)) is not None:
                yield _checked(result, len(_gpu_end(running.spec).block_ids))


def _name_load(output: KVConnectorOutput, req_id: ReqId, missing: Sequence[int]) -> None:
    """Tell that a request's load is over, and which of its blocks did not arrive."""
    output.finished_recving.add(req_id)
    if missing:
        output.failed_recving.add(req_id)
        output.invalid_block_ids.update(missing)


def _missing_blocks(load: _Running, result: TransferResult) -> list[int]:
    """Return the blocks of a load that did not arrive."""
    if result.success:
        return []
    ids: list[int] = _gpu_end(load.spec).block_ids.tolist()
    return ids if result.failed_blocks is None else [ids[position] for position in result.failed_blocks]


def _is_result(result: object) -> bool:
    """Say whether a handler's result names a job. One that does not is lost."""
    is_result = isinstance(result, TransferResult) and isinstance(result.job_id, int)
    if not is_result:
        logger.error("a handler's result: expected a TransferResult with the id of its job, got %r", result)
    return is_result


def _checked(result: TransferResult, num_blocks: int) -> TransferResult:
    """Return a result, as a failure of all blocks if it contradicts itself or names blocks that it lacks."""
    blocks = result.failed_blocks
    if blocks is None:
        return result
    is_right = isinstance(blocks, tuple) and bool(blocks) is not bool(result.success)
    if is_right and all(isinstance(at, int) and 0 <= at < num_blocks for at in blocks):
        return result
    return result._replace(success=False, failed_blocks=None)


def _gpu_end(spec: TransferSpec) -> GPULoadStoreSpec:
    (end,) = (end for end in spec if isinstance(end, GPULoadStoreSpec))
    return end
