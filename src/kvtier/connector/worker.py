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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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

logger = logging.getLogger(__name__)

_MAX_REPORTED = 16_384  # more jobs than any engine has under way
_FLUSH_SECONDS = 0.1  # a store that has not read its blocks by then is given up: better a miss than a stall


@dataclass(slots=True, eq=False)
class _WorkerJob:
    """A transfer that this rank has not reported yet.

    It is recorded before its handler gets it: whatever happens in between, its result is waited for.
    """

    job_id: int
    req_id: ReqId
    spec: TransferSpec
    handler: OffloadingHandler
    is_refused: bool = False
    """No handler works on the job: it is reported as failed."""
    is_cancelled: bool = False
    """The job was ordered to end."""
    is_void: bool = False
    """The job's bytes may not be used, whatever its handler reports."""
    lost: set[int] = field(default_factory=set)
    """The positions of blocks that the engine may have written while the job was reading them."""

    @property
    def is_load(self) -> bool:
        return isinstance(self.spec[1], GPULoadStoreSpec)

    @property
    def gpu_end(self) -> GPULoadStoreSpec:
        (end,) = (end for end in self.spec if isinstance(end, GPULoadStoreSpec))
        return end


class _NoHandler(OffloadingHandler):
    """Takes no job: the engine has unmapped its KV tensors."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        return False

    def get_finished(self) -> list[TransferResult]:
        return []

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        return True

    def cancel(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        return


class OffloadingConnectorWorker:
    """The worker's half of the connector. It moves the bytes of one rank."""

    def __init__(self, spec: OffloadingSpec) -> None:
        self.spec = spec
        self._may_store = spec.config.rank in spec.config.storing_ranks
        self._handlers: dict[TransferType, OffloadingHandler] = {}
        self._jobs: dict[int, _WorkerJob] = {}
        """The jobs that are not reported yet, by id; the oldest first."""
        self._reported: dict[int, None] = {}
        """The newest jobs that were reported.

        `get_finished` names the request of a load once, because engines count.
        """
        self._held: set[ReqId] = set()
        """Finished requests that keep their blocks until their stores are over."""
        self._output = KVConnectorOutput()
        """The part of the next output that is known before results are taken."""

    def register_kv_caches(
        self, kv_caches: Mapping[str, torch.Tensor], *, blocks_first: bool = False
    ) -> None:
        """Take the engine's KV tensors, by layer name, and make the handlers.

        With `blocks_first`, all tensors count blocks in their first dimension, also where its size is two.
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

    def unregister_kv_caches(self) -> None:
        """End all transfers and give up the handlers, before the engine unmaps its KV tensors. Idempotent.

        The results are part of the next output; a job without a result has failed, and so has one that is
        ordered before `register_kv_caches` makes new handlers. The pool keeps its rows.
        """
        for handler in set(self._handlers.values()):
            handler.shutdown()
        self._output = self.take_output()
        for job in self._jobs.values():
            job.is_refused = True
        self._output = self.take_output()
        self._handlers = dict.fromkeys(self._handlers, _NoHandler())

    def handle_preemptions(self, metadata: OffloadingConnectorMetadata) -> None:
        """Make sure that no running store reads a block that this step gives to another request.

        If the engine may have written such a block by now (`writes_before_fence`), a store that was not
        reported before has lost these blocks and keeps the others, and an audit counts as failed.
        """
        if not metadata.jobs_to_flush:
            return
        if self.spec.config.writes_before_fence:
            self._lose_blocks(metadata)
            return
        for handler in set(self._handlers.values()):
            jobs = {
                job_id: job
                for job_id in metadata.jobs_to_flush
                if (job := self._jobs.get(job_id)) is not None and job.handler is handler
            }
            if jobs and not handler.wait(set(jobs), _FLUSH_SECONDS):
                handler.cancel(set(jobs))

    def _lose_blocks(self, metadata: OffloadingConnectorMetadata) -> None:
        """Record the blocks that stores have lost, and end those that have none left."""
        for job_id in metadata.jobs_to_flush & self._jobs.keys():
            job = self._jobs[job_id]
            blocks = job.gpu_end.block_ids.tolist()
            job.lost.update(at for at, block_id in enumerate(blocks) if block_id in metadata.handed_out)
            if len(job.lost) == len(blocks) or isinstance(job.spec[1], AuditLoadStoreSpec):
                job.is_void = True
                job.handler.cancel({job_id})

    def start_load_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """End the jobs that are to end, and start this step's loads."""
        void = self._end_jobs(metadata)
        for job_id, req_id, spec in _loads_of(metadata):
            self._start(job_id, req_id, spec, refuse=job_id in void)

    def _end_jobs(self, metadata: OffloadingConnectorMetadata) -> set[int]:
        """Obey the end orders for this rank, and return the loads of this step that must not start."""
        rank, starting = self.spec.config.rank, set(metadata.load_jobs.values())
        void: set[int] = set()
        for job_id, order in metadata.jobs_to_end.items():
            if rank not in order.ranks:
                continue
            if (job := self._jobs.get(job_id)) is not None:
                job.is_void |= order.void
                self._end(job)
            elif job_id not in starting:
                self._report_unknown(job_id, order)
            elif order.void:
                void.add(job_id)
        return void

    def _end(self, job: _WorkerJob) -> None:
        """End a job.

        If it was ended before and its handler no longer has it, its result was lost: report a failure.
        """
        if job.is_cancelled and job.handler.wait({job.job_id}, 0.0):
            job.is_refused = True
        job.is_cancelled = True
        job.handler.cancel({job.job_id})

    def _report_unknown(self, job_id: int, order: EndOrder) -> None:
        """Report a job as failed that does not run here: its report was lost, or it never came here.

        The request of a load that never came here is named too.
        """
        if order.block_ids and job_id not in self._reported:
            _name_load(self._output, order.req_id, order.block_ids)
        self._report(self._output, TransferResult(job_id, success=False))

    def _report(self, output: KVConnectorOutput, result: TransferResult) -> None:
        output.reports.append(TransferReport(self.spec.config.rank, result))
        self._reported[result.job_id] = None
        if len(self._reported) > _MAX_REPORTED:
            del self._reported[next(iter(self._reported))]

    def refuse_unstarted(self, metadata: OffloadingConnectorMetadata) -> None:
        """Report as failed the unstarted jobs of a step that was never finished."""
        for job_id, req_id, spec in (*_loads_of(metadata), *self._stores_of(metadata)):
            if job_id not in self._jobs and job_id not in self._reported:
                self._start(job_id, req_id, spec, refuse=True)
        self._held |= metadata.reqs_to_hold

    def _stores_of(self, metadata: OffloadingConnectorMetadata) -> Iterator[tuple[int, ReqId, TransferSpec]]:
        """Yield the stores and audits that a step orders from this rank."""
        if self._may_store:
            for req_id, spec in metadata.reqs_to_store.items():
                yield metadata.store_jobs[req_id], req_id, spec
            for job_id, (req_id, spec) in metadata.audits.items():
                yield job_id, req_id, spec

    def void_loads(self) -> None:
        """Count the loads that run now as failed, whatever they bring."""
        for job in self._jobs.values():
            job.is_void |= job.is_load

    def start_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """Start this step's stores, after the forward pass was given to the device."""
        for job_id, req_id, spec in self._stores_of(metadata):
            self._start(job_id, req_id, spec)
        self._held |= metadata.reqs_to_hold

    def take_output(self) -> KVConnectorOutput:
        """Take this rank's results after a step, and the requests that they concern."""
        output, self._output = self._output, KVConnectorOutput()
        for result in self._take_results():
            if (job := self._jobs.pop(result.job_id, None)) is None:
                continue  # a job that was refused here gives only that one result
            result = _checked(job, result)
            self._report(output, result)
            if job.is_load:
                _name_load(output, job.req_id, _missing_blocks(job, result))
        if self._held:
            busy = {job.req_id for job in self._jobs.values() if not job.is_load}
            output.finished_sending |= self._held - busy
            self._held &= busy
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

        Returns `False` if there is neither.
        """
        jobs = self._jobs.values()
        oldest = next((job for job in jobs if job.is_load), None) or next(iter(jobs), None)
        if oldest is not None and not any(job.is_refused for job in jobs):
            oldest.handler.wait({oldest.job_id}, timeout)
        return oldest is not None

    def shutdown(self) -> None:
        """End all transfers and release the pool. Idempotent."""
        for handler in set(self._handlers.values()):
            handler.shutdown()
        self._handlers.clear()
        self.spec.shutdown()

    def _start(self, job_id: int, req_id: ReqId, spec: TransferSpec, *, refuse: bool = False) -> None:
        """Give a job to its handler; if no handler takes it, its failure is the next output's."""
        if job_id in self._jobs:
            return  # the step runs again, and the job of its first run is still under way
        job = self._jobs[job_id] = _WorkerJob(job_id, req_id, spec, self._handler_of(spec))
        job.is_refused = refuse or not self._is_taken(job)

    def _is_taken(self, job: _WorkerJob) -> bool:
        """Give a job to its handler, and return whether the handler took it."""
        try:
            return job.handler.transfer_async(job.job_id, job.spec)
        except Exception as error:  # a handler may be foreign code, and a transfer must not end a step
            is_known = isinstance(error, KVTierError)
            logger.error(
                "job %d could not be started: %s", job.job_id, error, exc_info=None if is_known else error
            )
            job.handler.cancel({job.job_id})  # the handler may have begun the job
        return False

    def _handler_of(self, spec: TransferSpec) -> OffloadingHandler:
        source, target = (end.medium() for end in spec)
        if (source, target) not in self._handlers:
            raise InputError(
                f"no handler moves {source} to {target}: call register_kv_caches before the first step"
            )
        return self._handlers[source, target]

    def _take_results(self) -> list[TransferResult]:
        """Take the results of jobs that are over; those of jobs refused here come first."""
        if not self._jobs:
            return []  # most steps
        refused = [job_id for job_id, job in self._jobs.items() if job.is_refused]
        results = [TransferResult(job_id, success=False) for job_id in refused]
        for handler in set(self._handlers.values()):
            try:
                results += filter(_is_result, handler.get_finished())
            except Exception:  # as above; the lost results are asked for again (`jobs_to_end`)
                logger.exception("a handler could not say which jobs are over")
        return results


def _loads_of(metadata: OffloadingConnectorMetadata) -> Iterator[tuple[int, ReqId, TransferSpec]]:
    """Yield the loads that a step orders."""
    for req_id, spec in metadata.reqs_to_load.items():
        yield metadata.load_jobs[req_id], req_id, spec


def _name_load(output: KVConnectorOutput, req_id: ReqId, missing: Sequence[int]) -> None:
    """Report that a request's load is over, and which of its blocks did not arrive."""
    output.finished_recving.add(req_id)
    if missing:
        output.failed_recving.add(req_id)
        output.invalid_block_ids.update(missing)


def _missing_blocks(load: _WorkerJob, result: TransferResult) -> list[int]:
    """Return the blocks of a load that did not arrive."""
    if result.success:
        return []
    ids: list[int] = load.gpu_end.block_ids.tolist()
    return ids if result.failed_blocks is None else [ids[position] for position in result.failed_blocks]


def _is_result(result: object) -> bool:
    """Return whether a handler's result names a job. One that does not is lost."""
    is_result = isinstance(result, TransferResult) and isinstance(result.job_id, int)
    if not is_result:
        logger.error("a handler's result: expected a TransferResult with the id of its job, got %r", result)
    return is_result


def _checked(job: _WorkerJob, result: TransferResult) -> TransferResult:
    """Return a result, as a failure of all blocks if it contradicts itself or the job is void."""
    blocks = result.failed_blocks
    if job.is_void:
        return result._replace(success=False, failed_blocks=None, corrupt=False)
    if blocks is not None:
        is_right = isinstance(blocks, tuple) and bool(blocks) is not bool(result.success)
        num_blocks = len(job.gpu_end.block_ids)
        if not (is_right and all(isinstance(at, int) and 0 <= at < num_blocks for at in blocks)):
            return result._replace(success=False, failed_blocks=None)
    if not job.lost or (blocks is None and not result.success):
        return result
    return result._replace(success=False, failed_blocks=tuple(sorted(job.lost.union(blocks or ()))))
