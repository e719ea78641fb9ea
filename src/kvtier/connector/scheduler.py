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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvtier.config import Recompute
from kvtier.connector.audit import AuditJob, Audits
from kvtier.connector.cost import CostModel, PrefillQueue, StepTimer, prefill_tokens
from kvtier.connector.explain import Explainer, Explanation
from kvtier.connector.jobs import (
    LoadFailures,
    LoadJob,
    RunningJobs,
    StoreJob,
    chunks_to_store,
    expect_loadable,
    plan_load,
    plan_store,
    reordered,
)
from kvtier.connector.load_decision import LoadDecision, PromotionDecision
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
)
from kvtier.connector.metrics import ConnectorStats, TransferTimes, describe_tiers, make_registry
from kvtier.connector.state import (
    ChunkGeometry,
    EngineBlocks,
    GroupState,
    RequestState,
    read_params,
    read_token_limit,
)
from kvtier.errors import InputError, LogLimit
from kvtier.events.tracker import Describe, OffloadingEventsTracker
from kvtier.events.types import KVCacheEvent
from kvtier.hints import read_hints, tenant_of
from kvtier.keys import OffloadKey
from kvtier.offload.base import OffloadingSpec, ReadLease, ReqContext, WriteLease
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.policies import UNKNOWN_ENDING, Ending
from kvtier.residency import MissReason
from kvtier.transfer.base import TransferResult

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
        self.cost = CostModel()
        self._settings = spec.config.settings
        self._geometry = ChunkGeometry(spec.config)
        self._blocks = EngineBlocks(self._geometry)
        self._clock = clock
        self._bad_params = LogLimit(clock=clock)
        self._requests: dict[ReqId, RequestState] = {}
        self._jobs = RunningJobs()
        self._prefill = PrefillQueue()
        self._promotion: PromotionDecision | None = None
        if isinstance(self.manager, TieredOffloadingManager):
            self._promotion = PromotionDecision(
                self._settings, self._geometry, self.cost, self._prefill, self.manager
            )
        self._load_decision = LoadDecision(
            self._settings,
            self._geometry,
            self.cost,
            self._jobs,
            self._prefill,
            self.manager,
            self._promotion,
            clock,
        )
        self._load_failures = LoadFailures()
        self._has_warned_of_unpacked = False
        self._audits = Audits(spec.config, self._geometry, self.manager)
        self._explainer = Explainer(self.manager, self._geometry)
        self.metrics = make_registry(
            self.stats,
            self.times,
            self._explainer,
            self.manager,
            self._audits,
            spec.config,
            self._blocks.stale,
        )
        self._timer = StepTimer()
        self._orders = OffloadingConnectorMetadata()  # the part of the next step's that is known
        self._ended = KVConnectorOutput()  # the requests whose transfers ended since the last output
        described = spec.config.enable_kv_cache_events and self._settings.self_describing_kv_events
        self._tracker = OffloadingEventsTracker(describe if described else None)
        self._events_to_take: list[KVCacheEvent] = []
        self._completed: list[OffloadKey] = []  # chunks of the stores that this step's output completed
        self._describe = describe
        if self._promotion is not None:
            self._describe_to_tiers(self._promotion.manager)
        self._recompute = Recompute.ALL if self._geometry.sparse else spec.config.recompute

    def _describe_to_tiers(self, manager: TieredOffloadingManager) -> None:
        if self._tracker.enabled:
            manager.describe_with(self._tracker.describe_chunks)
        if self._describe is None:
            logger.warning(
                "tiers: nothing is written or read: without `describe` no chunk is known to be of no adapter"
            )

    # -- asking ------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """Forget the explanation of an earlier request with the id of one that was queued."""
        self._explainer.forget(request.request_id)

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the computed ones can be loaded; if any, `True` (asynchronously).

        `(None, False)` means that the engine should ask again later. The call pins nothing and may be
        repeated. `max_num_new_tokens` is for an engine that could not use more.
        """
        req_id = request.request_id
        if self._promotion is not None and self._promotion.must_wait(req_id, self._requests.get(req_id)):
            self.stats.waits += 1
            return None, False
        state = self._track(request)
        state.extend_keys()
        if state.load_job is not None:
            return None, False
        state.start_over(num_computed_tokens, self._blocks.epoch)
        if not state.may_load or not self._geometry.may_load_after(num_computed_tokens):
            return 0, False
        limit = longest = self._geometry.longest_load(request.num_tokens)
        for most in (max_num_new_tokens, state.load_limit):
            if most is not None:
                limit = min(limit, num_computed_tokens + most)
        end, match = self._load_decision.decide(state, limit)
        if end is None:
            self.stats.waits += 1
            return None, False
        self.stats.not_worth += end < match.end
        if end > state.local:
            end = self._audits.choose_end(state, end)
            if state.audit and self._promotion is not None:
                state.audit_sources = self._promotion.manager.waits.sources(state.context)
        limited = limit < longest and self._geometry.next_chunk_end(match.reach) <= longest
        self._explainer.explain_match(state, match, end, limited=limited)
        # The last token is always computed.
        self._prefill.put(req_id, max(1, request.num_tokens - end))
        return end - state.local, end > state.local

    # -- loading -----------------------------------------------------------------------------------

    def update_state_after_alloc(
        self, request: RequestView, blocks: BlockIds, num_external_tokens: int
    ) -> None:
        """Record a request's blocks; with external tokens, pin their chunks and plan one load."""
        state = self._track(request)
        state.has_run = True
        if self._blocks.allocate(state, blocks):
            self._explainer.explain_stale_prefix(state)
        if state.audit:  # its rows should still be there when it has computed them
            self.manager.touch(state.all_keys(), state.context)
        if num_external_tokens:
            self._plan_load(state, state.local + num_external_tokens)

    def _plan_load(self, state: RequestState, end: int) -> None:
        self.manager.touch(state.all_keys(), state.context)  # its stores must not evict what it loads
        job = plan_load(self.spec.config, state, end, self._load_decision.wait_budget(state, end))
        if self._promotion is not None:
            job.promoted_tokens = self._promotion.tokens_by_tier(state, end)
        try:
            expect_loadable(state, end)
            job.lease = ReadLease(self.manager, job.keys, self.manager.prepare_load(job.keys, state.context))
        except InputError as error:  # a reset has come since the ask, or the length differs
            logger.warning("request %s: its load has failed before it began: %s", job.req_id, error)
            job.keys, job.void = [], True
        self._start(job)
        job.add_to(self._orders)
        for group in state.groups:
            group.next_store = max(group.next_store, end // group.geometry.chunk_size)

    def _start(self, job: LoadJob | StoreJob) -> None:
        job.epoch = self._blocks.epoch
        self._jobs.start(job, self._clock())

    # -- one step ----------------------------------------------------------------------------------

    def build_connector_meta(self, step: StepView) -> OffloadingConnectorMetadata:
        """Return this step's loads and stores for the workers, and the jobs that must end before it runs."""
        now = self._clock()
        self._prefill.take_step(step.num_scheduled_tokens)
        for req_id in step.preempted_req_ids:
            if (state := self._requests.get(req_id)) is not None:
                self._on_preempted(state)
        self._blocks.begin_step(step, self._requests)
        meta, self._orders = self._orders, OffloadingConnectorMetadata()
        meta.jobs_to_flush = self._jobs.stores_reading(self._blocks.handed_out)
        meta.handed_out = self._blocks.handed_out if meta.jobs_to_flush else set()
        meta.jobs_to_end = self._jobs.end_orders(now)
        self.stats.flushes += len(meta.jobs_to_flush)
        if self._promotion is not None:
            self._promotion.manager.begin_step()
        for job in self._plan_stores(step):
            job.add_to(meta)
        self._blocks.end_step()
        self._audits.earn(sum(step.num_scheduled_tokens.values()))
        self._timer.begin(self._clock(), prefill_tokens(step.num_scheduled_tokens))
        return meta

    def _on_preempted(self, state: RequestState) -> None:
        """Forget the blocks of a request: from now on fences protect those that stores still read."""
        self._jobs.release_blocks(state)
        state.next_offer = 0
        if self._promotion is not None:
            self._promotion.manager.waits.forget(state.context)  # it may be looked up and promoted again
        state.audit, state.audit_tokens = range(0), 0
        state.may_load = True  # the request has run since its load failed, so this cannot repeat for ever
        for group in state.groups:
            group.take_all()

    # -- storing -----------------------------------------------------------------------------------

    def _plan_stores(self, step: StepView) -> Iterator[StoreJob]:
        """Start a store for each request whose chunks this step completes, and audits of computed chunks.

        Most requests of most steps complete none.
        """
        blocks, states = self._blocks, step.boundary_states
        ended = [
            request
            for request in step.ended
            if (state := self._requests.get(request.req_id)) is not None and blocks.still_has_all(state)
        ]
        requests: list[NewRequest | CachedRequest] = [*step.new, *step.cached, *ended]
        if states:  # a request need not run in the step in which its states are offered
            known = {request.req_id for request in [*requests, *step.ended]}
            requests += [
                CachedRequest(req_id, None, max(offer.boundary for offer in offers))
                for req_id, offers in states.items()
                if offers and req_id not in known
            ]
        for request in requests:
            state, offers = self._requests.get(request.req_id), states.get(request.req_id, ())
            available = request.num_computed_tokens + step.num_scheduled_tokens.get(request.req_id, 0)
            if state is None:
                continue
            if not offers and (available < state.next_offer or blocks.step < state.retry_store_at):
                continue
            state.extend_keys()
            self.stats.count_tokens(self._explainer.explain_run(state), self.cost)
            if state.epoch != blocks.epoch:
                continue  # its blocks, or the KV they were computed from, are older than the last reset
            available = min(available, state.view.num_tokens)
            if self._geometry.states:
                state.take_boundary_states(offers, self._store_limit(state, available))
            available = self._geometry.num_final(available)
            state.next_offer = self._geometry.next_chunk_end(available)
            if state.audit:
                audit = self._audits.plan(state, available, blocks.handed_out_at)
                if audit is not None:
                    self._start(audit)
                    yield audit
            limit = self._store_limit(state, available)
            wanted = chunks_to_store(self._geometry, state, limit, blocks.handed_out_at)
            if any(wanted) and (store := self._start_store(state, wanted)) is not None:
                yield store

    def _store_limit(self, state: RequestState, available: int) -> int:
        """Return how many of the `available` leading tokens of a request may be stored."""
        prompt = state.view.num_prompt_tokens if self._settings.prompt_only else None
        return min(limit for limit in (available, prompt, state.store_limit) if limit is not None)

    def _start_store(self, state: RequestState, wanted: list[dict[OffloadKey, int]]) -> StoreJob | None:
        output = self.manager.prepare_store(state.head_to_tail(wanted), state.context)
        if output is None:
            state.retry_store_at, state.next_offer = self._blocks.step + _STORE_RETRY_STEPS, 0
            return None
        for group, chunks in zip(state.groups, wanted, strict=True):
            if chunks:
                group.next_store = max(chunks.values()) + 1
        if not output.keys_to_store:
            return None
        taken = [{key: chunks[key] for key in output.keys_to_store if key in chunks} for chunks in wanted]
        keys = [key for chunks in taken for key in chunks]
        lease = WriteLease(self.manager, keys, reordered(output.store_spec, output.keys_to_store, keys))
        job = plan_store(self.spec.config, state, taken, lease, StoreJob)
        self._start(job)  # first, because only a started job gives its slots back
        self._describe_chunks(state, taken)
        return job

    def _describe_chunks(self, state: RequestState, chunks: list[dict[OffloadKey, int]]) -> None:
        """Record the chunks of a store for the event stream, while the request still exists."""
        if self._tracker.enabled:
            for group, positions in zip(state.groups, chunks, strict=True):
                self._tracker.record_stores(state.view, group.geometry, positions)

    # -- completing --------------------------------------------------------------------------------

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in the workers' reports; complete jobs that every rank has reported, and give up late jobs.

        Call it once for every step, in the order of the steps. The next step may have been scheduled by
        then. The requests and blocks in the output are replaced by those of the jobs: a worker's output may
        be late, repeated or lost, but the output after this call is right.
        """
        now = self._clock()
        if (timed := self._timer.end(now)) is not None:
            self.cost.learn_step(*timed)
        for report in connector_output.reports:
            self._take_report(report)
        for job in self._jobs.expire(now):
            self._give_up(job)
        if self._promotion is not None:
            self._promotion.manager.end_step()
            self._promotion.learn()
        if self._completed:
            self._translate_events()
            # A chunk not announced by now has failed or was removed; another store may already store it.
            self._tracker.drop(set(self._completed) - self._jobs.storing())
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
            if not job.expired:
                self._complete(job)
            else:
                job.settle()

    def _learn(self, job: LoadJob, result: TransferResult) -> None:
        """Learn the cost of a load or, if it failed, a lower bound of it."""
        seconds, world_size = result.transfer_time, self.spec.config.world_size
        if result.success:
            if result.transfer_size and seconds:
                self.cost.loads.learn(result.transfer_size * world_size, seconds)
            return
        waited = self._clock() - job.started
        if seconds is None and waited >= min(job.wait_budget, job.deadline):
            seconds = waited
        self.cost.loads.learn_lost(job.num_bytes, seconds or 0.0)

    def _complete(self, job: LoadJob | StoreJob) -> None:
        if isinstance(job, LoadJob):
            if job.void:
                job.fail()
            job.settle()
            self._end_load(job)
            return
        job.settle()
        if isinstance(job, AuditJob):
            self._end_store(job)
            self._judge(job)
            return
        if self._tracker.enabled and job.epoch == self._blocks.epoch:
            self._completed += job.keys
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
            self.cost.loads.learn_lost(job.num_bytes, self._clock() - job.started)
            self._end_load(job)
            return
        # Another running store already stores the other chunks again.
        storing = self._jobs.storing()
        own = [key for key in job.keys if key not in storing]
        if job.epoch == self._blocks.epoch:
            self.manager.discard(own, MissReason.IO_FAILED)
            self._tracker.drop(own)
        self._end_store(job)

    def _end_load(self, job: LoadJob) -> None:
        """Record the end of a load, and let its request go on."""
        self.stats.count_load(job)
        now = self._clock()
        self.times.add(job)
        self._ended.finished_recving.add(job.req_id)
        if invalid := job.invalid_block_ids():
            self._ended.failed_recving.add(job.req_id)
            self._ended.invalid_block_ids |= invalid
        was_ended = job.void or (
            not job.expired and job.started + job.wait_budget < min(now, job.started + job.deadline)
        )
        state = job.request
        self._jobs.end(job)
        if not was_ended:  # a load that was ended early is no fault of its chunks
            corrupt, failing = self._load_failures.blame(job)
            if corrupt:
                self.manager.discard(corrupt, MissReason.FAILED)
            if failing:
                self.manager.discard(failing, MissReason.IO_FAILED)
        if state.finished:
            return
        explanation = self._explainer.explain_load(state, job, self._recompute, now - job.started)
        self.stats.count_tokens(explanation, self.cost)
        if job.failed:
            state.may_load, state.next_offer = False, 0
            for group in state.groups:
                group.next_store = min(group.next_store, job.local // group.geometry.chunk_size)

    def _judge(self, audit: AuditJob) -> None:
        """Take in what an audit found, unless it could not copy its chunks or a reset came meanwhile."""
        num_wrong = len(audit.wrong())
        if (audit.failed and not num_wrong) or audit.epoch != self._blocks.epoch:
            return
        self.stats.count_audit(audit, num_wrong)
        if self._audits.judge(audit):
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
            self.times.add(job)
            if job.unpacked:
                self._warn_of_unpacked()
        state = job.request
        had_blocks = self._jobs.end(job)
        if had_blocks and state.finished and not state.store_jobs and not self._is_used_again(job.req_id):
            self._ended.finished_sending.add(job.req_id)

    def _warn_of_unpacked(self) -> None:
        """Log once if more than one chunk in a thousand does not pack."""
        unpacked = self.stats.unpacked_chunks
        offered = unpacked + self.stats.stored_chunks
        if not self._has_warned_of_unpacked and 1000 <= offered < 1000 * unpacked:
            self._has_warned_of_unpacked = True
            logger.warning(
                "packing: %d of %d chunks have values that do not pack, and were not kept;"
                ' with "packing": "off" they would be',
                unpacked, offered,
            )  # fmt: skip

    def _is_used_again(self, req_id: ReqId) -> bool:
        """Return whether another request uses the id of a finished request."""
        return req_id in self._requests or any(load.req_id == req_id for load in self._jobs.loads())

    # -- ending ------------------------------------------------------------------------------------

    def request_finished(
        self, request: RequestView, block_ids: BlockIds | None = None, how: str = UNKNOWN_ENDING.how
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request, in whatever state it is. `how` is one of `kvtier.policies.base.ENDINGS`.

        A hint of the client that says how the request ends comes before `how`.

        `True` means that its blocks must stay until an output names it: in `finished_recving` if a load
        runs, else in `finished_sending`.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, None
        state.finished = True
        self._prefill.discard(request.request_id)
        if state.has_run:  # else it has used nothing; thousands that wait may be cancelled in one step
            state.extend_keys()
            how = state.context.hints.ending or how
            state.context.ending = Ending(request.num_tokens - request.num_prompt_tokens, how)
            self.manager.touch(state.all_keys(), state.context)
        self.manager.on_request_finished(state.context)
        if state.load_job is None and state.store_jobs:
            self._orders.reqs_to_hold.add(request.request_id)
        return state.load_job is not None or bool(state.store_jobs), None

    def reset_cache(self, kept_blocks: Iterable[int] | None = None) -> bool:
        """Empty every tier and announce it in the event stream.

        Running jobs end by themselves and leave nothing behind.

        Weights may have been swapped: requests that hold blocks now store nothing more, and running loads
        count as failed. `kept_blocks` are the blocks from which the engine, all the same, may go on in other
        requests: nothing that is computed from them is stored until they are handed out anew. `None` adds
        none to those it kept before.
        """
        if self._tracker.enabled:
            self._translate_events()  # a store that is not announced yet must not look like a later one
        self._blocks.reset(kept_blocks)
        for job in self._jobs.stores():
            self._tracker.drop(job.keys)
        self._jobs.void_loads()
        self.manager.reset_cache()
        self._tracker.clear()
        self._load_failures.clear()
        self._audits.forget_mismatches()
        return True

    def forget_stale_blocks(self) -> None:
        """Record that the engine goes on from no KV of before the last reset any more."""
        self._blocks.stale.clear()

    # -- reporting -----------------------------------------------------------------------------------

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Take the changes of the tiers since the last call."""
        self._translate_events()
        events, self._events_to_take = self._events_to_take, []
        return events

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
        """Return where a request's prompt came from; `None` if it has not run or that was forgotten."""
        return self._explainer.get(req_id)

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping although it has no requests."""
        return bool(self._jobs or self._orders.reqs_to_hold) or self.manager.has_pending_work()

    def is_idle(self) -> bool:
        """Return whether there are no requests and no work that continues without them."""
        return not self._requests and not self.has_pending_push_work()

    def describe_tiers(self) -> list[str]:
        """Describe in one line for each tier below the pool what it holds and has done since the start."""
        return describe_tiers(self._promotion.manager) if self._promotion is not None else []

    def check(self) -> None:
        """Raise `IntegrityError` if jobs and requests disagree, or the manager is broken."""
        self.manager.check()
        self._tracker.check()
        self._jobs.check(self._requests.values())
        self._prefill.check()

    def wait_for_tiers(self, timeout: float) -> bool:
        """Block until a promotion may have come, for an engine with nothing else to do.

        Returns `False` if no promotion is on its way.
        """
        return self._promotion is not None and self._promotion.manager.wait_any(timeout)

    def shutdown(self) -> None:
        """Release the manager and the pool. Idempotent."""
        self.manager.shutdown()
        self.spec.shutdown()

    def _track(self, request: RequestView) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            stays = self._promotion is not None and not self._is_keyed_by_content(request)
            params = read_params(request.kv_transfer_params)
            context = ReqContext(params, request.request_id, stays)
            context.hints = read_hints(params, self._settings.longest_keep, self._bad_params)
            context.tenant = tenant_of(getattr(request, "cache_salt", None))
            groups = tuple(GroupState(geometry) for geometry in self._geometry.groups)
            state = self._requests[request.request_id] = RequestState(
                request, context, groups, self._blocks.epoch
            )
            config, log_limit = self.spec.config, self._bad_params
            state.store_limit = (
                read_token_limit(params, "max_offload_tokens", log_limit) if config.may_store else 0
            )
            state.load_limit = (
                read_token_limit(params, "max_load_tokens", log_limit) if config.may_load else 0
            )
        return state

    def _is_keyed_by_content(self, request: RequestView) -> bool:
        """Return whether a request's keys name all that its KV depends on by content, in any process.

        They hold only the name of an adapter, and may hold only the name of an image.
        """
        if self._describe is None:
            return False
        description = self._describe(request, 0, 0, self._geometry.groups[0].block_size)
        return description.keyed_by_content and description.lora_name is None and description.lora_id is None
