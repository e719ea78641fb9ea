"""The scheduler's side: decides which chunks are loaded and stored, and keeps account of them.

It follows a chunk through its life (docs/architecture.md): look up, pin and plan a load, plan a store as
soon as a chunk's last token is computed, complete jobs when every rank has reported. It guarantees that

- asking (`get_num_new_matched_tokens`) pins nothing and may be repeated; it answers `None` for a bounded
  time only;
- a request whose load failed is not offered another load before it has run: the engine computes instead;
- a block that a running store still reads is fenced: before another request writes it, the store is ended
  (`jobs_to_flush`);
- nothing that was computed or stored before a reset is stored or loaded after it;
- the wait for a report is bounded. After it the job counts as failed, and its slots stay out of use until
  every rank has reported that it is done with them (`jobs_to_end`);
- every slot in the pool is free or ready once its job is over, whatever became of the request.

A job refers to its request, not to the request's id, which may belong to another request by the time the job
is over. Everything runs on the scheduler thread and there are no locks. Only `wait_for_tiers` waits; and,
for half a second at most, a reset or a row with wrong bytes, if a disk has to record it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any

from kvtier.config import Recompute
from kvtier.connector.audit import AuditJob, Audits
from kvtier.connector.cost import CostModel, PrefillQueue, StepTimer
from kvtier.connector.explain import Explainer, Explanation
from kvtier.connector.jobs import (
    LoadFailures,
    LoadJob,
    RunningJobs,
    StoreJob,
    expect_loadable,
    plan_load,
    plan_store,
    reordered,
)
from kvtier.connector.load_decision import LoadDecision, PromotionDecision
from kvtier.connector.lookup import match_prefix
from kvtier.connector.metadata import (
    BlockIds,
    CachedRequest,
    KVConnectorOutput,
    NewRequest,
    OffloadingConnectorMetadata,
    ReqId,
    RequestView,
    StepView,
    TransferReport,
    yield_req_data,
)
from kvtier.connector.metrics import ConnectorStats, TransferTimes, describe_tiers, make_registry
from kvtier.connector.state import ChunkGeometry, GroupState, RequestState, read_params, read_token_limit
from kvtier.errors import InputError, IntegrityError
from kvtier.events.tracker import Describe, OffloadingEventsTracker
from kvtier.events.types import KVCacheEvent
from kvtier.keys import OffloadKey
from kvtier.log_limit import LogLimit
from kvtier.offload.base import MissReason, OffloadingSpec, ReqContext
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.transfer.base import NULL_BLOCK, TransferResult, TransferSpec

__all__ = ["OffloadingConnectorScheduler"]

logger = logging.getLogger(__name__)

_STORE_RETRY_STEPS = 16


class OffloadingConnectorScheduler:
    """The scheduler's half of the connector. It knows which job moves which chunk for which request."""

    def __init__(
        self,
        spec: OffloadingSpec,
        clock: Callable[[], float] = time.monotonic,
        describe: Describe | None = None,
    ) -> None:
        """Plan for `spec`.

        `describe` reads requests for the event stream; without it events carry only hashes.
        """
        self.spec = spec
        self.manager = spec.get_manager()
        self.stats = ConnectorStats()
        self.times = TransferTimes()
        self._stale_blocks: set[int] = set()
        """The engine's blocks that hold KV of before the last reset, or KV that was computed from it."""
        self.cost = CostModel()
        self._settings = spec.config.settings
        self._geometry = ChunkGeometry(spec.config)
        self._clock = clock
        self._bad_params = LogLimit(clock=clock)
        self._requests: dict[ReqId, RequestState] = {}
        self._jobs = RunningJobs()
        self._prefill = PrefillQueue()
        self._load_decision = LoadDecision(
            self._settings, self._geometry, self.cost, self._jobs, self._prefill, clock
        )
        self._load_failures = LoadFailures()
        self._audits = Audits(spec.config, self._geometry, self.manager)
        self.metrics = make_registry(
            self.stats, self.times, self.manager, self._audits, spec.config.row_bytes, self._stale_blocks
        )
        self._promotion: PromotionDecision | None = None
        self._step = 0
        self._epoch = 0  # resets so far
        self._timer = StepTimer()
        self._planned = OffloadingConnectorMetadata()
        self._allocated: set[int] = set()
        self._allocated_at: dict[int, int] = {}  # with windows: the step in which a block was last allocated
        self._ended = KVConnectorOutput()  # the requests whose transfers ended since the last output
        self._explainer = Explainer(self.manager)
        described = spec.config.enable_kv_cache_events and self._settings.self_describing_kv_events
        self._tracker = OffloadingEventsTracker(describe if described else None)
        self._events_to_take: list[KVCacheEvent] = []
        self._completed: list[OffloadKey] = []  # chunks of the stores that this step's output completed
        self._describe = describe
        self._tiered = self.manager if isinstance(self.manager, TieredOffloadingManager) else None
        if self._tiered is not None:
            self._use_tiers(self._tiered)
        self._recompute = Recompute.ALL if self._geometry.windowed else spec.config.recompute

    def _use_tiers(self, manager: TieredOffloadingManager) -> None:
        self._promotion = PromotionDecision(
            self._settings, self._geometry, self.cost, self._prefill, manager, self._clock
        )
        if self._tracker.enabled:
            manager.describe_with(self._tracker.describe_chunks)
        if self._describe is None:
            logger.warning(
                "tiers: nothing is written or read: without `describe` no chunk is known to be of no adapter"
            )

    # -- asking ------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """Note that a request was queued, and forget the explanation of an earlier request of its id."""
        self._explainer.forget(request.request_id)

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the computed ones can be loaded; if any, `True` (asynchronously).

        `(None, False)`: ask again later. The call pins nothing and may be repeated. `max_num_new_tokens` is
        for an engine that could not use more.
        """
        if self._promotion is not None and self._promotion.must_wait(self._requests.get(request.request_id)):
            self.stats.waits += 1
            return None, False
        state = self._track(request)
        state.extend_keys()
        if state.load_job is not None:
            return None, False
        state.start_over(num_computed_tokens, self._epoch)
        if not state.may_load:
            return 0, False
        limit = request.num_tokens
        for most in (max_num_new_tokens, state.load_limit):
            if most is not None:
                limit = min(limit, num_computed_tokens + most)
        match = match_prefix(self._geometry, self.manager, state, limit)
        if self._promotion is not None:
            if self._promotion.start_waiting(state, match, limit):
                self.stats.waits += 1
                return None, False
            match = self._promotion.without_arrivals(match)
        if self._load_decision.should_wait(state, match):
            self.stats.waits += 1
            return None, False
        state.waiting_since = None
        is_worth = self._load_decision.is_worth_loading(state, match)
        self.stats.not_worth += not is_worth
        end = match.end if is_worth else state.local
        if end > state.local:
            end = self._audits.choose_end(state, end)
            if state.audit and self._promotion is not None:
                state.audit_sources = self._promotion.sources(state)
        limited = (
            limit < request.num_tokens and self._geometry.next_chunk_end(match.reach) <= request.num_tokens
        )
        self._explainer.note_match(state, match, end, limited=limited)
        # The last token is always computed.
        self._prefill.put(request.request_id, max(1, request.num_tokens - end))
        return end - state.local, end > state.local

    # -- loading -----------------------------------------------------------------------------------

    def update_state_after_alloc(
        self, request: RequestView, blocks: BlockIds, num_external_tokens: int
    ) -> None:
        """Note all blocks that the request holds; with external tokens, pin their chunks and plan one load.

        The request's new blocks are fenced at once: another connector may load into them before it runs.
        """
        state = self._track(request)
        state.has_run = True
        for group in state.groups:
            group.take_all()
            group.give(blocks[group.geometry.index], self._step + 1)
        if self._stale_blocks and not self._stale_blocks.isdisjoint(state.hits()):
            state.epoch = None
            self._explainer.note_stale_prefix(state)
        for group in state.groups:
            self._note_allocated(group.block_ids[state.local // group.geometry.block_size :], state)
        if state.audit:  # its rows should still be there when it has computed them
            self.manager.touch(state.all_keys(), state.context)
        if num_external_tokens:
            self._plan_load(state, state.local + num_external_tokens)

    def _note_allocated(self, block_ids: Collection[int], state: RequestState | None) -> None:
        """Note that a request got blocks to fill.

        A request fills them with stale KV if its own is stale, or if it is not known.
        """
        self._allocated.update(block_ids)
        if not self._stale_blocks:
            return
        if state is None or state.epoch != self._epoch:
            self._stale_blocks.update(block_ids)
            self._stale_blocks.discard(NULL_BLOCK)
            return
        self._stale_blocks.difference_update(block_ids)
        if not self._stale_blocks:
            logger.info("the engine has handed out anew all blocks with KV of before the last reset")

    def _plan_load(self, state: RequestState, end: int) -> None:
        job = plan_load(self.spec.config, state, end, self._load_decision.patience(state, end))
        if self._promotion is not None:
            job.promoted_tokens = self._promotion.tokens_by_tier(state, end)
        try:
            expect_loadable(state, end)
            job.pool_end = self.manager.prepare_load(job.keys, state.context)
        except InputError as error:  # a reset has come since the ask, or the length differs
            logger.warning("request %s: its load has failed before it began: %s", job.req_id, error)
            job.keys, job.void = [], True
        self._start(job)
        state.load_job = job.job_id
        for group in state.groups:
            group.next_store = max(group.next_store, end // group.geometry.chunk_size)
        if job.pool_end is not None:  # else an end order makes the workers report the unknown job as failed
            self._planned.reqs_to_load[job.req_id] = (job.pool_end, job.gpu_end)
            self._planned.load_jobs[job.req_id] = job.job_id

    def _start(self, job: LoadJob | StoreJob) -> None:
        job.epoch = self._epoch
        self._jobs.start(job, self._clock())

    # -- one step ----------------------------------------------------------------------------------

    def build_connector_meta(self, step: StepView) -> OffloadingConnectorMetadata:
        """Return this step's loads and stores for the workers, and the jobs that must end before it runs."""
        self._step += 1
        now = self._clock()
        self._prefill.take_step(step.num_scheduled_tokens)
        self._update_blocks(step)
        meta, self._planned = self._planned, OffloadingConnectorMetadata()
        meta.jobs_to_flush = self._jobs.stores_reading(self._allocated)
        meta.jobs_to_end = self._jobs.end_orders(now)
        self.stats.flushes += len(meta.jobs_to_flush)
        if self._tiered is not None:
            self._tiered.begin_step()
        for job, spec in self._get_reqs_to_store(step):
            if isinstance(job, AuditJob):
                meta.audits[job.job_id] = job.req_id, spec
            else:
                meta.reqs_to_store[job.req_id] = spec
                meta.store_jobs[job.req_id] = job.job_id
        self._allocated = set()
        num_tokens = sum(step.num_scheduled_tokens.values())
        self._audits.earn(num_tokens)
        self._timer.begin(self._clock(), num_tokens)
        return meta

    def _update_blocks(self, step: StepView) -> None:
        """Update the blocks that each request holds."""
        for req_id in step.preempted_req_ids:
            if (state := self._requests.get(req_id)) is not None:
                self._on_preempted(state)
        starting = {new.req_id: new.num_computed_tokens for new in step.new}
        starting |= {cached.req_id: cached.num_computed_tokens for cached in step.cached if cached.resumed}
        stale_copies = {copy for block, copy in step.copied_blocks if block in self._stale_blocks}
        for req_id, block_ids, _ in yield_req_data(step):
            if not block_ids:
                continue
            hit = starting.get(req_id, 0)
            state = self._requests.get(req_id)  # `None`: the engine never asked about it
            if state is not None and stale_copies and not stale_copies.isdisjoint(chain(*block_ids)):
                state.epoch = None
                self._stale_blocks |= stale_copies
            for geometry, ids in zip(self._geometry.groups, block_ids, strict=False):
                self._note_allocated(ids[hit // geometry.block_size :], state)
            for group, ids in zip(state.groups if state else (), block_ids, strict=False):
                if req_id in starting:
                    group.take_all()
                group.give(ids, self._step)
        self._note_allocated(step.speculative_blocks, None)
        self._allocated.discard(NULL_BLOCK)
        if self._geometry.windowed:
            self._allocated_at.update(dict.fromkeys(self._allocated, self._step))

    def _on_preempted(self, state: RequestState) -> None:
        """Forget the blocks of a request: from now on fences protect those that stores still read."""
        state.store_jobs.clear()
        state.next_offer = 0
        state.may_ask = state.may_promote = True
        state.turn_until = None
        state.audit, state.audit_tokens = range(0), 0
        state.may_load = True  # the request has run since its load failed, so this cannot repeat for ever
        for group in state.groups:
            group.take_all()

    # -- storing -----------------------------------------------------------------------------------

    def _get_reqs_to_store(self, step: StepView) -> Iterator[tuple[StoreJob, TransferSpec]]:
        """Plan a store for each request whose chunks this step completes.

        Most requests of most steps complete none.
        """
        ended = [request for request in step.ended if self._still_has_blocks(request.req_id)]
        requests: list[NewRequest | CachedRequest] = [*step.new, *step.cached, *ended]
        for request in requests:
            state = self._requests.get(request.req_id)
            available = request.num_computed_tokens + step.num_scheduled_tokens.get(request.req_id, 0)
            if state is None or available < state.next_offer or self._step < state.retry_store_at:
                continue
            state.extend_keys()
            self.stats.count_tokens(self._explainer.note_run(state))
            if state.epoch != self._epoch:
                continue  # its blocks, or the KV they were computed from, are older than the last reset
            available = self._geometry.num_final(min(available, state.view.num_tokens))
            state.next_offer = self._geometry.next_chunk_end(available)
            if (
                state.audit
                and (audit := self._audits.plan(state, available, self._allocated_at)) is not None
            ):
                self._start(audit)
                state.store_jobs.add(audit.job_id)
                yield audit, (audit.gpu_end, audit.orders)
            wanted = self._chunks_to_store(state, available)
            if any(wanted) and (planned := self._plan_store(state, wanted)) is not None:
                yield planned

    def _still_has_blocks(self, req_id: ReqId) -> bool:
        """Say whether no block of a request was given to another request in this step."""
        state = self._requests.get(req_id)
        return state is not None and all(
            self._allocated.isdisjoint(group.block_ids) for group in state.groups
        )

    def _chunks_to_store(self, state: RequestState, limit: int) -> list[dict[OffloadKey, int]]:
        """Return for each group the complete chunks that were not offered before: keys and positions."""
        if self._settings.prompt_only:
            limit = min(limit, state.view.num_prompt_tokens)
        if state.store_limit is not None:
            limit = min(limit, state.store_limit)
        wanted = []
        for group in state.groups:
            start, stop = group.next_store, group.num_complete(limit)
            chunks = dict(zip(group.keys[start:stop], range(start, stop), strict=True))
            if group.geometry.window is not None:
                chunks = {
                    key: at
                    for key, at in chunks.items()
                    if self._geometry.may_need(group.geometry, at)
                    and group.still_has(at, self._allocated_at)
                }
            wanted.append(chunks)
        return wanted

    def _plan_store(
        self, state: RequestState, wanted: list[dict[OffloadKey, int]]
    ) -> tuple[StoreJob, TransferSpec] | None:
        output = self.manager.prepare_store(state.head_to_tail(wanted), state.context)
        if output is None:
            state.retry_store_at, state.next_offer = self._step + _STORE_RETRY_STEPS, 0
            return None
        for group, chunks in zip(state.groups, wanted, strict=True):
            if chunks:
                group.next_store = max(chunks.values()) + 1
        if not output.keys_to_store:
            return None
        taken = [{key: chunks[key] for key in output.keys_to_store if key in chunks} for chunks in wanted]
        job = plan_store(self.spec.config, state, taken)
        target = job.pool_end = reordered(output.store_spec, output.keys_to_store, job.keys)
        self._start(job)
        state.store_jobs.add(job.job_id)
        self._describe_chunks(state, taken)
        return job, (job.gpu_end, target)

    def _describe_chunks(self, state: RequestState, chunks: list[dict[OffloadKey, int]]) -> None:
        """Record the chunks of a store for the event stream, while the request still exists."""
        if self._tracker.enabled:
            for group, places in zip(state.groups, chunks, strict=True):
                for key, position in places.items():
                    self._tracker.record_store(state.view, group.geometry, position, key)

    # -- completing --------------------------------------------------------------------------------

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in the workers' reports; complete jobs that every rank has reported, and give up late jobs.

        Call it once for every step, in the order of the steps. The next step may have been scheduled by
        then. The requests and blocks in the output are replaced by those of the jobs: a worker's output may
        be late, repeated or lost, but the output after this call is right.
        """
        now = self._clock()
        if (timed := self._timer.end(now)) is not None:
            self.cost.note_step(*timed)
        for report in connector_output.reports:
            self._take_report(report)
        for job in self._jobs.expire(now):
            self._give_up(job)
        if self._tiered is not None and self._promotion is not None:
            self._tiered.end_step()
            self._promotion.learn()
            self._promotion.admit_next()
        if self._completed:
            self._translate_events()
            # A chunk not announced by now has failed or was removed; another store may already store it.
            self._tracker.drop(key for key in self._completed if not self._jobs.is_storing(key))
            self._completed = []
        ended, self._ended = self._ended, KVConnectorOutput()
        connector_output.finished_recving = ended.finished_recving
        connector_output.finished_sending = ended.finished_sending
        connector_output.failed_recving = ended.failed_recving
        connector_output.invalid_block_ids = ended.invalid_block_ids
        connector_output.distrusted = ended.distrusted
        if not self.spec.config.enable_kv_cache_events:
            self.manager.take_events()  # nothing else takes them, and they must not pile up

    def _take_report(self, report: TransferReport) -> None:
        job = self._jobs.take_report(report)
        if job is None:
            return
        if isinstance(job, LoadJob):
            self._learn(job, report.result)
        if not job.missing_ranks:
            if job.expired:
                self._free_slots(job)
            else:
                self._complete(job)

    def _learn(self, job: LoadJob, result: TransferResult) -> None:
        """Learn the cost of a load or, if it failed, a lower bound of it."""
        seconds, world_size = result.transfer_time, self.spec.config.world_size
        if result.success:
            if result.transfer_size and seconds:
                self.cost.note_load(result.transfer_size * world_size, seconds)
            return
        waited = self._clock() - job.started
        if seconds is None and waited >= min(job.patience, job.deadline):
            seconds = waited
        self.cost.note_lost_load(job.num_bytes, seconds or 0.0)

    def _complete(self, job: LoadJob | StoreJob) -> None:
        if isinstance(job, LoadJob):
            if job.void:
                job.fail()
            self.manager.complete_load(job.keys, job.pool_end)
            self._end_load(job)
        elif isinstance(job, AuditJob):
            self._audits.release(job)
            self._end_store(job)
            self._judge(job)
        else:
            self._complete_store(job)
            self._end_store(job)

    def _give_up(self, job: LoadJob | StoreJob) -> None:
        """Count a job as failed whose reports do not come.

        Its slots stay as they are until every rank is done with them.
        """
        self.stats.expired += 1
        logger.warning(
            "job %d of request %s: no report from rank(s) %s after %.3g s; "
            "its %d slots are set aside until there is one",
            job.job_id, job.req_id, sorted(job.missing_ranks), self._clock() - job.started, len(job.keys),
        )  # fmt: skip
        if isinstance(job, LoadJob):
            self.cost.note_lost_load(job.num_bytes, self._clock() - job.started)
            self._end_load(job)
            return
        # Another running store already stores the other chunks again.
        own = [key for key in job.keys if not self._jobs.is_storing(key)]
        if job.epoch == self._epoch:
            self.manager.discard(own, MissReason.IO_FAILED)
            self._tracker.drop(own)
        self._end_store(job)

    def _free_slots(self, job: LoadJob | StoreJob) -> None:
        """Free the slots of a job that was given up, once every rank is done with them."""
        if isinstance(job, LoadJob):
            self.manager.complete_load(job.keys, job.pool_end)
        elif isinstance(job, AuditJob):
            self._audits.release(job)
        else:
            self.manager.complete_store(job.keys, success=False, spec=job.pool_end)

    def _end_load(self, job: LoadJob) -> None:
        """Record the end of a load, and let its request go on."""
        self.stats.count_load(job)
        now = self._clock()
        self.times.note(job)
        self._ended.finished_recving.add(job.req_id)
        if invalid := job.invalid_block_ids():
            self._ended.failed_recving.add(job.req_id)
            self._ended.invalid_block_ids |= invalid
        was_ended = job.void or (
            not job.expired and job.started + job.patience < min(now, job.started + job.deadline)
        )
        state = job.request
        state.load_job = None
        if not was_ended:  # a load that was ended early is no fault of its chunks
            corrupt, failing = self._load_failures.blame(job)
            if corrupt:
                self.manager.discard(corrupt, MissReason.FAILED)
            if failing:
                self.manager.discard(failing, MissReason.IO_FAILED)
        if state.finished:
            return
        self.stats.count_tokens(self._explainer.note_load(state, job, self._recompute, now - job.started))
        if job.failed:
            state.may_load, state.next_offer = False, 0
            for group in state.groups:
                group.next_store = min(group.next_store, job.local // group.geometry.chunk_size)

    def _complete_store(self, job: StoreJob) -> None:
        arrived, failed = job.arrived(), sorted(job.failed)
        if failed:
            keys = [job.keys[index] for index in failed]
            self.manager.complete_store(keys, success=False, spec=job.pool_part(failed))
        keys = [job.keys[index] for index in arrived] if failed else job.keys
        self.manager.complete_store(keys, spec=job.pool_part(arrived) if failed else job.pool_end)
        if self._tracker.enabled and job.epoch == self._epoch:
            self._completed += job.keys

    def _judge(self, audit: AuditJob) -> None:
        """Take in what an audit found, unless it could not copy its chunks or a reset came meanwhile."""
        wrong = audit.wrong()
        if (audit.failed and not wrong) or audit.epoch != self._epoch:
            return
        self.stats.count_audit(audit, len(wrong))
        if wrong:
            logger.error(
                "audit: request %s: %d of %d kept chunks are not the KV that was computed; the first is %s"
                " (tier %s); the largest distance is %.3g, at most %.3g is expected; they are dropped in all"
                " tiers",
                audit.req_id, len(wrong), len(audit.keys), wrong[0].hex(), audit.sources[wrong[0]],
                audit.distance, self.spec.config.audit_tolerance,
            )  # fmt: skip
        if self._audits.take_verdict(audit):
            logger.error(
                "audit: kept KV is not what this engine computes, again and again: all of it is dropped, and"
                " this process leaves its namespace, so that it shares nothing with others from now on"
            )
            self.stats.namespace_departures += 1
            self.reset_cache()
            self._ended.distrusted = True

    def _end_store(self, job: StoreJob) -> None:
        """Record the end of a store.

        A finished request needs its blocks only as long as one of its stores runs.
        """
        if not isinstance(job, AuditJob):
            self.stats.count_store(job)
            self.times.note(job)
        state = job.request
        if job.job_id in state.store_jobs:
            state.store_jobs.remove(job.job_id)
            if state.finished and not state.store_jobs and not self._is_used_again(job.req_id):
                self._ended.finished_sending.add(job.req_id)

    def _is_used_again(self, req_id: ReqId) -> bool:
        """Say whether another request uses the id of a finished request."""
        return req_id in self._requests or any(load.req_id == req_id for load in self._jobs.loads())

    # -- ending ------------------------------------------------------------------------------------

    def request_finished(
        self, request: RequestView, block_ids: BlockIds | None = None
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request, in whatever state it is.

        `True`: its blocks must stay until an output names it: in `finished_recving` if a load runs, else in
        `finished_sending`.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, None
        state.finished = True
        self._prefill.discard(request.request_id)
        if state.has_run:  # else it has used nothing; thousands that wait may be cancelled in one step
            state.extend_keys()
            self.manager.touch(state.all_keys(), state.context)
        self.manager.on_request_finished(state.context)
        if state.load_job is None and state.store_jobs:
            self._planned.reqs_to_hold.add(request.request_id)
        return state.load_job is not None or bool(state.store_jobs), None

    def reset_cache(self, kept_blocks: Iterable[int] | None = None) -> bool:
        """Empty every tier and tell the event stream.

        Running jobs end by themselves and leave nothing behind.

        Weights may have been swapped: requests that hold blocks now store nothing more, and running loads
        count as failed. `kept_blocks` are the blocks from which the engine, all the same, may go on in other
        requests: nothing that is computed from them is stored until they are handed out anew. `None`: no
        others than those it kept before.
        """
        if self._tracker.enabled:
            self._translate_events()  # a store that is not announced yet must not look like a later one
        self._epoch += 1
        if kept_blocks is not None:
            self._stale_blocks.clear()
            self._stale_blocks.update(kept_blocks)
        if self._stale_blocks:
            logger.warning(
                "reset: the engine still has %s blocks with KV of before it; nothing that requests compute "
                "from these is stored until they are handed out anew",
                f"{len(self._stale_blocks):,}",
            )
        for job in self._jobs.stores():
            self._tracker.drop(job.keys)
        self._jobs.void_loads()
        self.manager.reset_cache()
        self._tracker.clear()
        self._load_failures.clear()
        self._audits.forget_mismatches()
        return True

    def forget_stale_blocks(self) -> None:
        """Note that the engine goes on from no KV of before the last reset any more."""
        self._stale_blocks.clear()

    # -- telling -----------------------------------------------------------------------------------

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Take the changes of the tiers since the last call."""
        self._translate_events()
        told, self._events_to_take = self._events_to_take, []
        return told

    def retell_events(self) -> Iterable[KVCacheEvent]:
        """Take events that announce the whole content of the tiers again, instead of the changes.

        This is for an engine that announced a clear of everything which did not include the tiers. It needs
        `self_describing_kv_events`; without it, the changes are returned.
        """
        changes = self.take_events()
        return self._tracker.retell() if self._tracker.enabled else changes

    def _translate_events(self) -> None:
        self._events_to_take += self._tracker.take_events(self.manager.take_events())

    def explain(self, req_id: ReqId) -> Explanation | None:
        """Say where a request's prompt came from; `None` if it has not run or that was forgotten."""
        return self._explainer.get(req_id)

    def has_pending_push_work(self) -> bool:
        """Say whether the engine must keep stepping although it has no requests."""
        return bool(self._jobs or self._planned.reqs_to_hold) or self.manager.has_pending_work()

    def is_idle(self) -> bool:
        """Say whether there are no requests and no work that continues without them."""
        return not self._requests and not self.has_pending_push_work()

    def describe_tiers(self) -> list[str]:
        """Describe in one line for each tier below the pool what it holds and has done since the start."""
        return describe_tiers(self._tiered) if self._tiered is not None else []

    def check(self) -> None:
        """Raise `IntegrityError` if jobs and requests disagree, or the manager is broken."""
        self.manager.check()
        self._tracker.check()
        self._jobs.check()
        self._prefill.check()
        loads = {job.job_id for job in self._jobs.loads()}
        for state in self._requests.values():
            if state.load_job is not None and state.load_job not in loads:
                raise IntegrityError(
                    f"request {state.view.request_id} waits for load {state.load_job}, which does not exist"
                )
            if not all(job_id in self._jobs for job_id in state.store_jobs):
                raise IntegrityError(
                    f"request {state.view.request_id} holds blocks for stores that do not exist"
                )

    def wait_for_tiers(self, timeout: float) -> bool:
        """Block until a promotion may have come, for an engine with nothing else to do.

        `False`: no promotion is on its way.
        """
        return self._tiered is not None and self._tiered.wait_any(timeout)

    def shutdown(self) -> None:
        """Release the manager and the pool. Idempotent."""
        if self._promotion is not None:
            self._promotion.keep_prices()
        self.manager.shutdown()
        self.spec.shutdown()

    def _track(self, request: RequestView) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            stays = self._promotion is not None and not self._is_keyed_by_content(request)
            params = read_params(request.kv_transfer_params)
            context = ReqContext(params, request.request_id, stays)
            groups = tuple(GroupState(geometry) for geometry in self._geometry.groups)
            state = self._requests[request.request_id] = RequestState(request, context, groups, self._epoch)
            config, told = self.spec.config, self._bad_params
            state.store_limit = (
                read_token_limit(params, "max_offload_tokens", told) if config.may_store else 0
            )
            state.load_limit = read_token_limit(params, "max_load_tokens", told) if config.may_load else 0
        return state

    def _is_keyed_by_content(self, request: RequestView) -> bool:
        """Say whether a request's keys name all that its KV depends on by content, in any process.

        They hold only the name of an adapter, and may hold only the name of an image.
        """
        if self._describe is None:
            return False
        told = self._describe(request, 0, 0, self._geometry.groups[0].block_size)
        return told.keyed_by_content and told.lora_name is None and told.lora_id is None
