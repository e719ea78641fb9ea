"""vLLM's connector: vLLM makes one beside its scheduler and one in each worker.

Each holds the matching half of `OffloadingConnector` and passes vLLM's calls to it, translated. The thread
that runs vLLM's scheduler or worker makes all calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvtier.config import OffloadingConfig
from kvtier.connector import (
    ConnectorRole,
    KVConnectorOutput,
    OffloadingConnector,
    OffloadingConnectorMetadata,
    TransferReport,
)
from kvtier.errors import ConfigError
from kvtier.integrations.summary import Summary
from kvtier.integrations.vllm.compat import HOST_HITS, warn_of_version
from kvtier.integrations.vllm.describe import (
    KVTierHandshake,
    awaits_sizes,
    describe_engine,
    find_pages,
    kept_group_ids,
    summarize,
    wanted_layout,
)
from kvtier.integrations.vllm.endings import find_call_ends, how_ended
from kvtier.integrations.vllm.metrics import Counts, KVTierMetrics, KVTierStats, show_messages
from kvtier.integrations.vllm.requests import (
    AdmissionGate,
    EndedRequests,
    RequestLog,
    answer_params,
    asked_params,
)
from kvtier.integrations.vllm.translate import describer, step_view, translate_event
from kvtier.integrations.vllm.weights import LiveWeights, find_models, watchable
from kvtier.offload import OffloadingSpec, OffloadingSpecFactory

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput as VllmConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvtier")  # below vLLM's own logger: other loggers get no handler

_IDLE_SECONDS = 0.005  # how long a step without tokens may wait for a transfer
_TIER_SECONDS = 0.001  # how long a step may wait for rows of a tier, instead of asking again at once


@dataclass(slots=True)
class KVTierMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders to every worker. An `idle` step computes nothing."""

    orders: OffloadingConnectorMetadata
    idle: bool
    clears: int = 0
    """The number of resets so far after which no KV was left, neither in the tiers nor in vLLM."""
    changes: int = 0
    """The number of changes of the weights that the scheduler's side knows of."""


@dataclass(slots=True)
class KVTierWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The reports of one rank or, aggregated, of all."""

    reports: list[TransferReport] = field(default_factory=list)
    has_new_weights: bool = False
    """Whether a rank has found that its weights have changed since KV was stored or loaded."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVTierWorkerMetadata:
        """Return the reports of both."""
        return KVTierWorkerMetadata(
            self.reports + other.reports, self.has_new_weights or other.has_new_weights
        )


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One half of kvtier's connector, with vLLM's interface."""

    _cache_hit_source = HOST_HITS

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _register(cls)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        show_messages(vllm_config.logging_config)
        ours = ConnectorRole.SCHEDULER if role is KVConnectorRole.SCHEDULER else ConnectorRole.WORKER
        self._group_ids = kept_group_ids(kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._kinds = {
            group_id: get_kv_cache_spec_kind(groups[group_id].kv_cache_spec).value
            for group_id in self._group_ids
        }
        # vLLM cannot tell the blocks of several groups apart, nor a state's block from another's.
        self._fails_by_request = len(groups) > 1 or "mamba" in self._kinds.values()
        self._counts = Counts()
        self._summary: Summary | None = None
        self._gpu_entries: Any = None
        self._kept_entries: Any = None  # vLLM's own cache at the last reset; a new object after a clear
        self._clears = self._changes = 0  # as in `KVTierMetadata`; a worker's are those of its last step
        self._kv_caches: dict[str, torch.Tensor] = {}  # of this worker, to register them again after a sleep
        self._is_asleep = False  # whether vLLM may have unmapped this worker's memory
        self._live_weights: LiveWeights | None = None
        self._has_new_weights = False  # whether this worker has yet to report so
        self._changes_at_notice = -1  # loads of steps with no more changes may bring KV of old weights
        self._call_ends: frozenset[int] = frozenset()
        self._shown: set[str] = set()  # requests known to the core connector
        self._updated = False  # whether this step's output was processed
        self._output = KVConnectorOutput()  # of this worker's last step; vLLM takes it in three parts
        self._in_company = _schedulers_config(vllm_config) is not vllm_config.kv_transfer_config
        self._ended = EndedRequests(vllm_config.scheduler_config.async_scheduling)
        # Blocks of requests unknown to the core connector, since the last step.
        self._untracked_blocks: set[int] = set()
        if ours is ConnectorRole.SCHEDULER:
            warn_of_version()
            _ask_for_recompute(vllm_config)
        self._awaits_handshake = ours is ConnectorRole.SCHEDULER and awaits_sizes(
            vllm_config, kv_cache_config
        )
        if not self._awaits_handshake:
            self._make_half(describe_engine(vllm_config, kv_cache_config, ours), ours)

    def _make_half(self, config: OffloadingConfig, role: ConnectorRole) -> None:
        """Make everything that depends on the engine's geometry."""
        self._groups = config.groups
        self._windowed = any(
            group.sliding_window is not None or group.attention_chunk_size is not None
            for group in config.groups
        )
        self._admission_gate = AdmissionGate(config.groups)
        self._request_log = RequestLog(_log, config.settings.load_deadline)
        describe = describer(self._vllm_config)
        self._connector = OffloadingConnector(config, role, self.make_spec(config), describe)
        if self._connector.connector_scheduler is not None:
            self._call_ends = find_call_ends(self._vllm_config)
            _log(summarize(config))
            scheduler = self._connector.connector_scheduler
            self._summary = Summary(scheduler.stats, _log, describe_tiers=scheduler.describe_tiers)
            self._summary.start()

    def make_spec(self, config: OffloadingConfig) -> OffloadingSpec:
        """Make the spec that stores and loads.

        A subclass may make another one, e.g. with faults for a test.
        """
        return OffloadingSpecFactory.create_spec(config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a lost store is only a later miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for blocks that are one run of memory, if that is faster.

        A layer's page is dense in all of vLLM's layouts.
        """
        return wanted_layout(vllm_config)

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn the block sizes of the pipeline stages, and make this half, which waited for them.

        vLLM calls it once, before the first step.
        """
        if not self._awaits_handshake:
            return
        found = next((shape for shape in metadata.values() if isinstance(shape, KVTierHandshake)), None)
        if found is None:
            problem = "expected the first handshake of a MultiConnector to be kvtier's, got another"
            raise ConfigError("pipeline_parallel_size", f"{problem}; name kvtier first")
        role, sizes = ConnectorRole.SCHEDULER, found.bytes_by_rank
        self._make_half(describe_engine(self._vllm_config, self._kv_cache_config, role, sizes), role)
        self._awaits_handshake = False

    def on_new_request(self, request: Request) -> None:
        """Take in a request; a client wrote its parameters (`vllm_xargs` pass unchecked).

        A request that has just ended may have had the same id.
        """
        self._end(self._ended.take(request.request_id))
        request.kv_transfer_params = asked_params(request)
        self._connector.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many more tokens can be loaded, and that loads are asynchronous."""
        if _takes_tokens_back(request):
            return 0, False
        limit = self._most_to_load(request)
        self._shown.add(request.request_id)
        if self._kept_entries not in (None, self._kv_cache_manager.block_pool.cached_block_hash_to_block):
            self._kept_entries = None
            self._connector.forget_stale_blocks()
        tokens, _ = self._connector.get_num_new_matched_tokens(request, num_computed_tokens, limit)
        if tokens is not None and self._windowed:
            # If a whole prompt can be loaded, vLLM computes its last token again. vLLM must know that
            # before it allocates blocks: the window of this token begins one token earlier than that of the
            # next.
            tokens = min(tokens, request.num_tokens - 1 - num_computed_tokens)
        if tokens is not None and self._admission_gate.must_wait(request, tokens, self._kv_cache_manager):
            return None, False
        return tokens, bool(tokens)

    def _most_to_load(self, request: Request) -> int | None:
        """Return how many tokens may be offered to vLLM for a request. `None` means any number."""
        if request in self._admission_gate:
            # A load of this request failed, ours or a sibling connector's. vLLM may wait for ever to
            # begin another, since it reserves the blocks of this request against itself. A sibling that is
            # asked after us must not offer any tokens either.
            request.skip_reading_prefix_cache |= self._in_company
            return 0
        if request.skip_reading_prefix_cache:
            return 0  # e.g. prompt logprobs: vLLM computes the whole prompt, whatever is offered
        return None

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Record the blocks that a request got; with external tokens, plan their load."""
        self._admission_gate.add(request)
        block_ids = blocks.get_block_ids()
        if request.request_id in self._shown:
            kept = tuple(block_ids[group_id] for group_id in self._group_ids)
            self._connector.update_state_after_alloc(request, kept, num_external_tokens)
        else:  # another connector may load into these blocks
            self._untracked_blocks.update(*block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVTierMetadata:
        """Return this step's orders for the workers."""
        self._admission_gate.discard(scheduler_output.num_scheduled_tokens)
        step = step_view(scheduler_output, self._group_ids)
        step.ended = self._ended.entries()
        step.speculative_blocks, self._untracked_blocks = self._untracked_blocks, set()
        orders = self._connector.build_connector_meta(step)
        self._end(self._ended.take_all())
        idle = not scheduler_output.num_scheduled_tokens
        if idle:
            self._connector.wait_for_tiers(_TIER_SECONDS)
        return KVTierMetadata(orders, idle, self._clears, self._changes)

    def update_connector_output(self, connector_output: VllmConnectorOutput) -> None:
        """Process the reports of all workers."""
        self._updated = True
        meta = connector_output.kv_connector_worker_meta
        if meta is not None and meta.has_new_weights:
            self._on_new_weights()
        reports = [] if meta is None else meta.reports
        output = KVConnectorOutput(reports=reports)
        self._connector.update_connector_output(output)
        if output.distrusted:
            self.reset_cache()  # vLLM's own cache has loaded KV

    def _on_new_weights(self) -> None:
        """Forget everything: the weights have changed and nobody has said so."""
        self._changes += 1
        logger.warning("kvtier: the weights have changed in memory: everything kept so far is dropped")
        self.reset_cache()
        assert self._connector.connector_scheduler is not None
        self._connector.connector_scheduler.stats.weight_changes += 1

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End a request of a model with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request. Its blocks may be freed: running stores that read them are fenced."""
        self._admission_gate.discard([request.request_id])
        self._shown.discard(request.request_id)
        if not self._ended.add(request):
            self._end([request])
        explanation = self._connector.explain(request.request_id)
        self._request_log.record(request.request_id, explanation)
        answer = answer_params(request, explanation)
        if answer is not None:  # most of vLLM's streamed answers do not carry it
            logger.debug("kvtier: request %s: %s", request.request_id, json.dumps(answer["kvtier"]))
        return False, answer

    def _end(self, requests: list[Request]) -> None:
        """Make the core connector forget requests. Their blocks need not be held."""
        for request in requests:
            self._connector.request_finished(request, how=how_ended(request, self._call_ends))

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping for transfers although it has no requests."""
        return bool(self._ended) or self._connector.has_pending_push_work()

    def reset_cache(self) -> bool:
        """Empty every tier.

        vLLM has tried to clear its own cache before, but may have failed. A block that a running request has
        not filled yet becomes an entry of that cache later.
        """
        pool = self._kv_cache_manager.block_pool
        self._kept_entries = pool.cached_block_hash_to_block
        kept = [block for block in pool.blocks if block.ref_cnt or block.block_hash is not None]
        kept_ids = [block.block_id for block in kept if not block.is_null]
        self._clears += not kept_ids
        return self._connector.reset_cache(kept_ids)

    def take_events(self) -> Iterable[kv_events.KVCacheEvent]:
        """Take the tiers' changes.

        After vLLM has cleared its own cache, take everything that the tiers hold.

        vLLM then tells listeners that all blocks are cleared, without naming a medium, so listeners forget
        the tiers too.
        """
        entries = self._kv_cache_manager.block_pool.cached_block_hash_to_block  # a new object after a clear
        cleared, self._gpu_entries = self._gpu_entries not in (None, entries), entries
        events = self._connector.retell_events() if cleared else self._connector.take_events()
        return [translate_event(event, self._group_ids, self._kinds) for event in events]

    def get_kv_connector_stats(self) -> KVTierStats | None:
        """Take the counts since the last call.

        On the scheduler's side vLLM calls it at the end of every step.
        """
        if self._connector.connector_scheduler is None:
            return None
        if not self._updated:  # vLLM does not report a step that ended without output
            self._connector.update_connector_output(KVConnectorOutput())
        self._updated = False
        return self._counts.take_changes(self._connector.connector_scheduler)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        """Make stats from their transmitted form."""
        return KVTierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KVTierMetrics:
        """Make the metrics for vLLM's /metrics."""
        return KVTierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The worker's side.

    def get_handshake_metadata(self) -> KVTierHandshake | None:
        """Return the scheduler's data about pipeline stages; one rank sends it for all."""
        worker = self._connector.connector_worker
        config = None if worker is None else worker.spec.config
        if config is None or config.rank != 0 or not config.bytes_by_rank:
            return None
        return KVTierHandshake(config.bytes_by_rank)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pass on where vLLM keeps its KV.

        Layers that share another's cache belong to no group and are left out.
        """
        self._kv_caches = find_pages(kv_caches, self._kv_cache_config)
        self._connector.register_kv_caches(self._kv_caches, blocks_first=True)
        is_watched, models = watchable(self._vllm_config), find_models()
        if not models:
            logger.warning(
                "kvtier: vLLM's model runner was not found, so weights that change in memory go unnoticed:"
                " call reset_prefix_cache(reset_running_requests=True, reset_connector=True) after a change"
            )
        elif is_watched is not None:
            self._live_weights = LiveWeights(models, is_watched)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return True: no transfer touches memory that vLLM has unmapped. vLLM calls this from 0.33 on."""
        return True

    def unregister_kv_caches(self) -> None:
        """End all transfers before vLLM unmaps its memory to sleep. Idempotent.

        vLLM calls this from 0.33 on. It has reset the connector before, so nothing is lost that a reset does
        not drop anyway.
        """
        if not self._is_asleep:
            self._is_asleep = True
            self._connector.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """Use vLLM's memory again, which it has mapped to the same addresses. Idempotent."""
        if self._is_asleep:
            self._connector.register_kv_caches(self._kv_caches, blocks_first=True)
            self._is_asleep = False

    def handle_preemptions(self, kv_connector_metadata: KVTierMetadata) -> None:
        """End the stores that read blocks which this step overwrites. vLLM calls it first in every step."""
        if self._live_weights is not None and not self._is_asleep:  # else the weights may be unmapped too
            self._live_weights.look(after_clear=kv_connector_metadata.clears != self._clears)
            self._clears = kv_connector_metadata.clears
        self._connector.handle_preemptions(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: KVTierMetadata) -> None:
        """Set the orders of the step that begins."""
        super().bind_connector_metadata(connector_metadata)
        self._connector.bind_connector_metadata(connector_metadata.orders)

    def clear_connector_metadata(self) -> None:
        """End the step."""
        super().clear_connector_metadata()
        self._connector.clear_connector_metadata()
        if self._live_weights is not None:
            self._live_weights.end_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads. None is for the current forward pass, which vLLM has already launched."""
        self._connector.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is not scheduled before its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: stores take whole chunks after the pass."""

    def wait_for_save(self) -> None:
        """Start this step's stores. Despite its name it does not wait."""
        self._connector.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose load is over and, unless blocks are reported, those that failed."""
        if self._connector_metadata is not None and self._connector_metadata.idle:
            self._connector.wait_for_transfers(_IDLE_SECONDS)
        if not self._check_weights():
            return KVConnectorTransferResults(finished_recving=set(), failed_recving=set())
        left, self._output = self._output, self._connector.take_output()
        self._output.invalid_block_ids |= left.invalid_block_ids  # empty, if vLLM has taken them
        self._output.reports[:0] = left.reports
        return KVConnectorTransferResults(
            finished_recving=self._output.finished_recving,
            failed_recving=self._output.failed_recving if self._fails_by_request else set(),
        )

    def _check_weights(self) -> bool:
        """Return whether results of transfers may be reported.

        They may not while it is unknown whether the weights are new. Loads after a change, until the
        scheduler's side knows of it, count as failed.
        """
        meta = self._connector_metadata
        if self._live_weights is None or meta is None:
            return True
        if self._live_weights.take_change():
            self._has_new_weights, self._changes_at_notice = True, meta.changes
        if meta.changes <= self._changes_at_notice:
            self._connector.void_loads()
        return not self._live_weights.is_looking_at_all

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return an empty set (no request holds its blocks), and the requests whose load is over."""
        return set(), self.get_transfer_results(finished_req_ids).finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Take the blocks whose load failed, of a model with one group."""
        failed, self._output.invalid_block_ids = self._output.invalid_block_ids, set()
        return set() if self._fails_by_request else failed

    def build_connector_worker_meta(self) -> KVTierWorkerMetadata | None:
        """Take the results of jobs for the scheduler's side."""
        reports, self._output.reports = self._output.reports, []
        is_new, self._has_new_weights = self._has_new_weights, False
        return KVTierWorkerMetadata(reports, is_new) if reports or is_new else None

    # Both sides.

    def shutdown(self) -> None:
        """Release everything. Idempotent."""
        if self._summary is not None:
            self._summary.close()
        self._live_weights = None  # which holds on to the model
        if not self._awaits_handshake:
            self._connector.shutdown()


def _log(line: str) -> None:
    logger.info("%s", line)


def _register(cls: type[KVTierConnector]) -> None:
    """Register a class with vLLM: a `MultiConnector` reads its child's counts by the class name."""
    if cls.__name__ not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(cls.__name__, cls.__module__, cls.__name__)


_register(KVTierConnector)


def _ask_for_recompute(vllm_config: VllmConfig) -> None:
    """Have vLLM recompute blocks that a load did not deliver.

    vLLM reads the policy after the connector is made.
    """
    transfer = _schedulers_config(vllm_config)
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        _log("kvtier: kv_load_failure_policy is now 'recompute': a failed load costs time, not the request")


def _schedulers_config(vllm_config: VllmConfig) -> KVTransferConfig:
    """Return the transfer config that vLLM's scheduler will read.

    A `MultiConnector` makes its children from copies of the config without a reference to itself, so this
    function searches the calling frames for it.
    """
    transfer, frame = vllm_config.kv_transfer_config, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(maker := frame.f_locals.get("self"), MultiConnector):
            transfer = maker._kv_transfer_config
    return transfer


def _takes_tokens_back(request: Request) -> bool:
    """Return whether a request may lose tokens, as a streaming session does: its hashes would be wrong."""
    return bool(request.resumable)
