"""kvtier inside vLLM: `KVTierConnector`, found by vLLM through one flag (docs/vllm.md).

    --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.integrations.vllm",
                           "kv_role": "kv_both", "kv_connector_extra_config": {"cpu": {"capacity": "8GiB"}}}'

vLLM makes one of these beside its scheduler and one in each worker, as a rule in separate processes. Each holds the matching
half of `OffloadingConnector` and translates: vLLM's requests, steps and results into ours and back. Where the two differ:

- vLLM frees a finished request's blocks at once. They need not be held: whoever gets one of them, the step first ends the
  stores that read it (`handle_preemptions`, which vLLM calls before anything of a step is written).
- Workers' reports travel as worker metadata, which vLLM gathers over all ranks.
- A failed load is named by its blocks where a model has one KV cache group, and by its request where it has several: vLLM
  cannot tell blocks of different groups apart. Either way vLLM recomputes, which this connector asks it to.

Called by the thread that runs vLLM's scheduler or worker. This is the only module that imports vLLM.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm

from kvtier.config import GroupConfig, KVTierConfig, OffloadingConfig, Recompute, format_size
from kvtier.connector import (
    CachedRequest,
    ConnectorRole,
    ConnectorStats,
    KVConnectorOutput,
    NewRequest,
    OffloadingConnector,
    OffloadingConnectorMetadata,
    StepView,
    TransferReport,
)
from kvtier.errors import ConfigError, InputError
from kvtier.events import AllBlocksCleared, BlockRemoved, BlockStored, Description
from kvtier.integrations import expect_version
from kvtier.integrations.savings import Savings
from kvtier.keys import fingerprint, weights_manifest
from kvtier.offload import OffloadingSpec, OffloadingSpecFactory

expect_version("vllm", vllm.__version__, at_least="0.32", below="0.33")

# Only now: in another version these may be missing or, worse, mean something else.
from vllm.distributed import kv_events  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # noqa: E402
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.logger import init_logger  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
    resolve_none_hash_seed,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    group_kernel_blocks,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402
from vllm.v1.metrics.utils import create_metric_per_engine  # noqa: E402

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput as VllmConnectorOutput
    from vllm.v1.request import Request

__all__ = [
    "KVTierConnector",
    "KVTierMetadata",
    "KVTierMetrics",
    "KVTierStats",
    "KVTierWorkerMetadata",
    "describe_engine",
]

logger = init_logger("vllm.kvtier")  # under vLLM's own logger: it gives others no handler

_IDLE_SECONDS = 0.005  # how long a step without tokens may wait for a transfer
_SUPPORTED_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
_INSTEAD = "vLLM's own OffloadingConnector may serve it"
_UNSUPPORTED = {
    "pipeline_parallel_size": "kvtier does not follow KV over pipeline stages; use tensor_parallel_size",
    "decode_context_parallel_size": "kvtier does not follow KV that is spread over ranks by token",
    "prefill_context_parallel_size": "kvtier does not follow KV that is spread over ranks by token",
}
"""Ways to divide a model that are refused when greater than 1, and why."""
_COUNTERS = {
    "loads": "Loads from the pool that are over.",
    "loads_failed": "Loads that did not deliver everything, so that vLLM recomputed it.",
    "load_bytes": "Bytes loaded, over all ranks.",
    "stores": "Stores to the pool that are over.",
    "stores_failed": "Stores that did not deliver everything.",
    "store_bytes": "Bytes stored, over all ranks.",
    "waits": "Times that a request was asked to wait for a chunk on its way.",
    "not_worth": "Times that computing was expected to be faster than a load.",
    "flushes": "Stores that had to end before a step overwrote what they read.",
    "asked_tokens": "Prompt tokens that vLLM's own cache did not have.",
    "loaded_tokens": "Prompt tokens of them that were loaded instead of computed.",
}
"""What vLLM's /metrics shows of kvtier, as `vllm:kvtier_<name>_total`."""
_get_totals: Callable[[ConnectorStats], tuple[int, ...]] = attrgetter(*_COUNTERS)


@dataclass(slots=True)
class KVTierMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders to every worker. `idle`: the step computes nothing."""

    orders: OffloadingConnectorMetadata
    idle: bool


@dataclass(slots=True)
class KVTierWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The reports of one rank or, aggregated, of all."""

    reports: list[TransferReport] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVTierWorkerMetadata:
        """Return the reports of both."""
        return KVTierWorkerMetadata(self.reports + other.reports)


class KVTierStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted since the last step; aggregated, since the last line in the log."""

    def aggregate(self, other: KVConnectorStats) -> KVTierStats:
        """Return the sum of both."""
        return KVTierStats(dict(Counter(self.data) + Counter(other.data)))

    def reset(self) -> None:
        """Count from zero again."""
        self.data: dict[str, int] = {}

    def reduce(self) -> dict[str, Any]:
        """Return what vLLM writes to its log, which is to be read by people."""
        return {
            f"kvtier {name}": format_size(count) if name.endswith("_bytes") else count
            for name, count in self.data.items()
        }

    def is_empty(self) -> bool:
        """Say whether nothing was counted."""
        return not self.data


class KVTierMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters for vLLM's /metrics."""

    def __init__(
        self, vllm_config: VllmConfig, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:kvtier_{name}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One half of kvtier's connector in vLLM's clothes."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        ours = ConnectorRole.SCHEDULER if role is KVConnectorRole.SCHEDULER else ConnectorRole.WORKER
        config = describe_engine(vllm_config, kv_cache_config, ours)
        self._groups = config.groups
        self._kinds = [get_kv_cache_spec_kind(group.kv_cache_spec).value for group in kv_cache_config.kv_cache_groups]
        self._windowed = any(group.sliding_window is not None for group in config.groups)
        self._counted = _get_totals(ConnectorStats())
        self._savings = Savings()
        self._gpu_entries: Any = None
        self._updated = False  # whether this step's output was taken in
        self._holding: dict[str, Request] = {}  # from the start of a load until the request runs
        self._connector = OffloadingConnector(config, ours, self.make_spec(config), _describe_blocks)
        if ours is ConnectorRole.SCHEDULER:
            _ask_for_recompute(vllm_config)
            logger.info("%s", _summary(config))

    def make_spec(self, config: OffloadingConfig) -> OffloadingSpec:
        """Make what stores and loads. A subclass may use another one, e.g. with faults for a test."""
        return OffloadingSpecFactory.create_spec(config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Say no: a store that is lost is a later miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for nothing: in all of vLLM's layouts a layer's page of a block is dense."""
        return None

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many more tokens can be loaded, and that loads are asynchronous."""
        if _takes_tokens_back(request):
            return 0, False
        # With a whole prompt loaded vLLM computes its last token again, but has by then freed the block that this token
        # sees at the far end of its window.
        limit = request.num_tokens - 1 - num_computed_tokens if self._windowed else None
        tokens, is_async = self._connector.get_num_new_matched_tokens(request, num_computed_tokens, limit)
        return (None, False) if tokens is not None and self._must_wait(request, tokens) else (tokens, is_async)

    def _must_wait(self, request: Request, tokens: int) -> bool:
        """Say whether requests that hold blocks for a load, and do not run yet, must run before this one gets blocks.

        vLLM 0.32 can leave such requests waiting for each other for ever: it reserves too little for them where a window
        keeps blocks, and one whose load failed gives its blocks back but stays ahead of the others, which are not looked at
        while it does not fit. Nobody is asked to wait for ever here: the answer is no once the others run.
        """
        may_block = self._windowed if tokens else request.request_id in self._holding
        if not may_block:
            return False
        manager = self._kv_cache_manager
        held = {req_id: sum(map(len, manager.get_block_ids(req_id))) for req_id in self._holding}
        missing = sum(self._num_blocks(self._holding[req_id]) - count for req_id, count in held.items() if count)
        free = manager.block_pool.get_num_free_blocks()
        return any(held.values()) and bool(missing + self._num_blocks(request) > free)

    def _num_blocks(self, request: Request) -> int:
        return sum(request.num_tokens // group.block_size + 1 for group in self._groups)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Tell which blocks a request got; with external tokens, plan their load."""
        if num_external_tokens:
            self._holding[request.request_id] = request
        if not _takes_tokens_back(request):
            self._connector.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVTierMetadata:
        """Return this step's orders for the workers."""
        for req_id in self._holding.keys() & scheduler_output.num_scheduled_tokens.keys():
            del self._holding[req_id]
        orders = self._connector.build_connector_meta(_step_view(scheduler_output))
        return KVTierMetadata(orders, idle=not scheduler_output.num_scheduled_tokens)

    def update_connector_output(self, connector_output: VllmConnectorOutput) -> None:
        """Take in what all workers reported."""
        self._updated = True
        meta = connector_output.kv_connector_worker_meta
        reports = [] if meta is None else meta.reports
        self._connector.update_connector_output(KVConnectorOutput(reports=reports))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End a request of a model with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request. Its blocks may be freed: running stores that read them are fenced."""
        self._holding.pop(request.request_id, None)
        self._connector.request_finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Say whether the engine must keep stepping for transfers although it has no requests."""
        return self._connector.has_pending_push_work()

    def reset_cache(self) -> bool:
        """Empty every tier."""
        return self._connector.reset_cache()

    def take_events(self) -> Iterable[kv_events.KVCacheEvent]:
        """Take what changed in the tiers. After vLLM has cleared its own cache, take what they hold.

        vLLM then tells listeners that all blocks are cleared and cannot say of which medium: they forget the tiers too.
        """
        entries = self._kv_cache_manager.block_pool.cached_block_hash_to_block  # a new object after a clear
        cleared, self._gpu_entries = self._gpu_entries not in (None, entries), entries
        events = self._connector.retell_events() if cleared else self._connector.take_events()
        return [_translate_event(event, self._kinds) for event in events]

    def get_kv_connector_stats(self) -> KVTierStats | None:
        """Take what was counted since the last call. On the scheduler's side vLLM calls it at the end of every step."""
        if self._connector.connector_scheduler is None:
            return None
        if not self._updated:  # vLLM does not pass on that a step has ended with nothing to tell
            self._connector.update_connector_output(KVConnectorOutput())
        self._updated = False
        stats = self._connector.connector_scheduler.stats
        if (line := self._savings.line(stats)) is not None:
            logger.info("%s", line)
        if (totals := _get_totals(stats)) == self._counted:
            return None  # as in most steps
        changes = zip(_COUNTERS, self._counted, totals, strict=True)
        self._counted = totals
        return KVTierStats({name: now - then for name, then, now in changes if now > then})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        """Make stats of what they were sent as."""
        return KVTierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KVTierMetrics:
        """Make the counters of vLLM's /metrics."""
        return KVTierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Tell where vLLM keeps its KV. Layers that share another's cache belong to no group and are left out."""
        num_blocks = self._kv_cache_config.num_blocks
        names = {name for group in self._groups for name in group.layer_names}
        self._connector.register_kv_caches(
            {name: group_kernel_blocks(kv_caches[name], num_blocks) for name in kv_caches if name in names}
        )

    def handle_preemptions(self, kv_connector_metadata: KVTierMetadata) -> None:
        """End the stores that read what this step overwrites. vLLM calls it first in every step."""
        self._connector.handle_preemptions(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: KVTierMetadata) -> None:
        """Set the orders of the step that begins."""
        super().bind_connector_metadata(connector_metadata)
        self._connector.bind_connector_metadata(connector_metadata.orders)

    def clear_connector_metadata(self) -> None:
        """End the step."""
        super().clear_connector_metadata()
        self._connector.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads. vLLM has given the forward pass to the device by now: none of them is for it."""
        self._connector.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is not scheduled before its load is over."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: stores take whole chunks after the pass."""

    def wait_for_save(self) -> None:
        """Start this step's stores. Despite its name it does not wait."""
        self._connector.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose load is over, and of a model with several groups those whose load failed."""
        if self._connector_metadata is not None and self._connector_metadata.idle:
            self._connector.wait_for_transfers(_IDLE_SECONDS)
        _, recving = self._connector.get_finished(finished_req_ids)
        failed = self._connector.take_failed_loads()
        return KVConnectorTransferResults(
            finished_recving=recving, failed_recving=failed if len(self._groups) > 1 else set()
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return no requests that held their blocks, and those whose load is over."""
        return set(), self.get_transfer_results(finished_req_ids).finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Take the blocks whose load failed, of a model with one group."""
        failed = self._connector.get_block_ids_with_load_errors()
        return failed if len(self._groups) == 1 else set()

    def build_connector_worker_meta(self) -> KVTierWorkerMetadata | None:
        """Take the results of jobs for the scheduler's side."""
        reports = self._connector.take_reports() if self.role is KVConnectorRole.WORKER else []
        return KVTierWorkerMetadata(reports) if reports else None

    # Both sides.

    def shutdown(self) -> None:
        """Release everything. Idempotent."""
        scheduler = self._connector.connector_scheduler
        if scheduler is not None and (line := self._savings.last_line(scheduler.stats)) is not None:
            logger.info("%s", line)
        self._connector.shutdown()


def describe_engine(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: ConnectorRole = ConnectorRole.SCHEDULER
) -> OffloadingConfig:
    """Return a vLLM engine's geometry and its user's settings as kvtier wants them, or refuse what it cannot serve."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    for name, reason in _UNSUPPORTED.items():
        if (size := getattr(parallel, name)) > 1:
            raise ConfigError(name, f"expected 1, got {size}: {reason}; {_INSTEAD}")
    events = vllm_config.kv_events_config
    groups = tuple(_describe_group(index, kv_cache_config) for index in range(len(kv_cache_config.kv_cache_groups)))
    _, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return OffloadingConfig(
        settings=KVTierConfig.from_dict(transfer.kv_connector_extra_config),
        groups=groups,
        hash_block_size=hash_block_size,
        world_size=parallel.world_size,
        rank=parallel.rank if role is ConnectorRole.WORKER else 0,
        engine_id=transfer.engine_id,
        # Rows leave the process, if at all, from the scheduler's side: a worker need not read the weights again.
        namespace=_namespace(vllm_config, groups, hash_block_size) if role is ConnectorRole.SCHEDULER else "",
        enable_kv_cache_events=events is not None and events.enable_kv_cache_events,
        recompute=Recompute.REST if len(groups) == 1 else Recompute.ALL,
    )


def _describe_group(index: int, kv_cache_config: KVCacheConfig) -> GroupConfig:
    group: KVCacheGroupSpec = kv_cache_config.kv_cache_groups[index]
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if type(spec) not in _SUPPORTED_SPECS:
        known = ", ".join(kind.__name__ for kind in _SUPPORTED_SPECS)
        raise InputError(f"KV cache group {index}: expected one of {known}, got {type(spec).__name__}; {_INSTEAD}")
    # A layer's page is the shorter of the two strides, whichever of layers and blocks is the outer dimension.
    tensors = [tensor for tensor in kv_cache_config.kv_cache_tensors if set(tensor.layers) & set(group.layer_names)]
    pages = {min(tensor.layer_stride, tensor.block_stride) for tensor in tensors}
    if len(pages) > 1:
        raise InputError(f"KV cache group {index}: expected layers with pages of one size, got {sorted(pages)} bytes")
    return GroupConfig(
        block_size=spec.block_size,
        bytes_per_block=spec.unpadded_page_size_bytes * len(group.layer_names),
        layer_names=tuple(group.layer_names),
        sliding_window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
    )


def _namespace(vllm_config: VllmConfig, groups: tuple[GroupConfig, ...], hash_block_size: int) -> str:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    algorithm = cache.prefix_caching_hash_algo
    return fingerprint(
        weights=_weights(vllm_config),
        dtype=str(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype),
        kv_layout=[cache.kv_cache_layout, str(vllm_config.attention_config.backend), *_device()],
        groups=[asdict(group) for group in groups],
        parallelism=[parallel.tensor_parallel_size, parallel.world_size],
        lora=vllm_config.lora_config is not None,
        seed=f"{algorithm} {resolve_none_hash_seed(get_hash_fn_by_name(algorithm))}",
        model=model.compute_hash(),
        hash_block_size=hash_block_size,
        engine=f"vllm {vllm.__version__}",
    )


def _weights(vllm_config: VllmConfig) -> Any:
    """Return what identifies the weights: files where they are local, else the name and the revision."""
    model = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return {"random": model.seed, "model": model.model}
    if any(Path(model.model).glob("*.safetensors")):
        return weights_manifest(model.model)
    return [model.model, model.revision, getattr(model.hf_config, "_commit_hash", None)]


def _device() -> list[str]:
    """Return what a backend on this device may fit its blocks to."""
    if not current_platform.is_cpu():
        return [current_platform.device_type, str(current_platform.get_device_capability())]
    return ["cpu", platform.machine(), torch.backends.cpu.get_cpu_capability()]


def _ask_for_recompute(vllm_config: VllmConfig) -> None:
    """Have vLLM recompute what a load did not deliver. It reads the policy once the connector has been made."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        logger.info("kvtier: kv_load_failure_policy is now 'recompute': a failed load costs time, not the request")


def _summary(config: OffloadingConfig) -> str:
    settings = config.settings
    if config.num_slots == 0:
        return f"kvtier {version('kvtier')}: cpu.capacity is 0: nothing is stored and nothing is loaded"
    chunk = settings.blocks_per_chunk * min(group.block_size for group in config.groups)
    return (
        f"kvtier {version('kvtier')}: {format_size(settings.cpu.capacity)} of host memory keep {config.num_slots:,} chunks"
        f" of {chunk} tokens ({format_size(config.row_bytes)} each); policy {settings.cpu.policy},"
        f" {len(config.groups)} KV cache group(s), {config.world_size} worker(s), namespace {config.namespace[:12]}"
    )


def _takes_tokens_back(request: Request) -> bool:
    """Say whether a request may lose tokens that it had: a streaming session does. Its hashes would not stay true."""
    return bool(request.resumable)


def _step_view(output: SchedulerOutput) -> StepView:
    """Translate a step as scheduled."""
    cached = output.scheduled_cached_reqs
    return StepView(
        new=[NewRequest(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs],
        cached=[
            CachedRequest(req_id, block_ids, computed, req_id in cached.resumed_req_ids)
            for req_id, block_ids, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ],
        num_scheduled_tokens=output.num_scheduled_tokens,
        preempted_req_ids=output.preempted_req_ids or set(),
        finished_req_ids=output.finished_req_ids,
    )


def _describe_blocks(request: Request, start: int, stop: int, block_size: int) -> Description:
    """Tell what the blocks of a request's tokens `[start, stop)` hold, as vLLM tells of its own."""
    lora = request.lora_request
    extra, item = [], 0  # the multimodal item to go on with
    for block in range(start, stop, block_size):
        keys, item = generate_block_hash_extra_keys(request, block, block + block_size, item)
        extra.append(keys)
    return Description(
        token_ids=request.all_token_ids[start:stop],
        lora_id=None if lora is None else lora.adapter_id,
        lora_name=None if lora is None else lora.name,
        extra_keys=to_event_extra_keys(extra),
    )


def _translate_event(event: Any, kinds: list[str]) -> kv_events.KVCacheEvent:
    """Make vLLM's event of ours: the same fields, with hashes and the group's kind as vLLM publishes them."""
    theirs = {kind: getattr(kv_events, kind.__name__) for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
    values = {name: getattr(event, name) for name in event.__struct_fields__}
    if "block_hashes" in values:
        values["block_hashes"] = [maybe_convert_block_hash(block_hash) for block_hash in values["block_hashes"]]
    if values.get("parent_block_hash") is not None:
        values["parent_block_hash"] = maybe_convert_block_hash(values["parent_block_hash"])
    if values.get("kv_cache_spec_kind") is not None:
        values["kv_cache_spec_kind"] = kinds[values["group_idx"]]
    return theirs[type(event)](**values)
