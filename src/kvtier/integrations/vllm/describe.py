"""A vLLM engine in kvtier's terms: its geometry, its pipeline stages, its user's settings, the namespace of
its bytes, and the cache layout to ask it for.

This module refuses configurations that kvtier cannot serve, with the reason. Nothing here keeps state: any
thread may call it.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.parallel_state import get_pp_group, get_tp_group, in_the_same_node_as
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes, resolve_none_hash_seed
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

from kvtier import __version__
from kvtier.config import GroupConfig, KVTierConfig, OffloadingConfig, Recompute, format_size, groups_to_pack
from kvtier.connector import ConnectorRole
from kvtier.errors import ConfigError, InputError, KVTierError
from kvtier.integrations.vllm.engine_settings import all_settings, installed_libraries
from kvtier.integrations.vllm.weights import all_weights
from kvtier.keys import fingerprint
from kvtier.namespace import Namespace
from kvtier.transfer.compare import tolerance

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

logger = init_logger("vllm.kvtier")  # under vLLM's own logger: it gives others no handler

_SUPPORTED_SPECS = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
)
_LATENTS = (MLAAttentionSpec, SlidingWindowMLASpec)
"""Specs of layers that keep one vector of a token, or of several tokens, instead of K and V."""
_NUMBER_FORMATS = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""The format of the values in a cache, by vLLM's name of it. In others scales lie among the values, or their
format is a plug-in's.
"""
_INSTEAD = "vLLM's own OffloadingConnector may serve it"
_UNSUPPORTED = {
    "decode_context_parallel_size": "kvtier does not follow KV that is spread over ranks by token",
    "prefill_context_parallel_size": "kvtier does not follow KV that is spread over ranks by token",
}
"""Ways to divide a model that are refused when greater than 1, and why."""

_ONE_MACHINE = (
    "the ranks of an engine share one pool of host memory; keep tensor_parallel_size within a machine"
    f" and use data_parallel_size over machines; {_INSTEAD}"
)


BytesByRank = tuple[tuple[int, ...], ...]
"""The bytes of one block, for each rank and of each KV cache group."""
BLOCKS_OUTERMOST = "BLNHC"
_BACKENDS = (None, AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN)  # None: vLLM chooses
_BLOCK_SIZES = (16, 32, 64)  # sizes that the kernels of all backends take unchanged
_AMPERE, _HOPPER = 8, 9  # devices for which vLLM chooses FlashAttention itself


def describe_engine(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    role: ConnectorRole = ConnectorRole.SCHEDULER,
    bytes_by_rank: BytesByRank = (),
) -> OffloadingConfig:
    """Return a vLLM engine's geometry and settings in kvtier's form, or refuse what kvtier cannot serve.

    With pipeline stages, workers exchange the sizes of their blocks here and wait for each other; the
    scheduler's side gets them as `bytes_by_rank`.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    for name, reason in _UNSUPPORTED.items():
        if (size := getattr(parallel, name)) > 1:
            raise ConfigError(name, f"expected 1, got {size}: {reason}; {_INSTEAD}")
    if parallel.world_size > 1:
        _expect_one_machine(parallel, role)
    _expect_usable_loads(vllm_config)
    if role is ConnectorRole.WORKER and parallel.pipeline_parallel_size > 1:
        describe = partial(_describe_groups, kv_cache_config)
        bytes_by_rank = gather_bytes_by_rank(describe, parallel.tensor_parallel_size)
    events = vllm_config.kv_events_config
    groups = _describe_groups(kv_cache_config)
    if role is ConnectorRole.WORKER and not bytes_by_rank and awaits_sizes(vllm_config, kv_cache_config):
        bytes_by_rank = (tuple(group.bytes_per_block for group in groups),) * parallel.world_size
    if role is ConnectorRole.SCHEDULER and bytes_by_rank:
        groups = tuple(
            replace(group, bytes_per_block=size)
            for group, size in zip(groups, bytes_by_rank[0], strict=True)
        )
    _, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    settings = KVTierConfig.from_dict(transfer.kv_connector_extra_config)
    number_format = _number_format(vllm_config)
    # Only the scheduler's side sends rows out of the process: a worker need not read the weights again.
    keeps = role is ConnectorRole.SCHEDULER and settings.cpu.capacity > 0
    return OffloadingConfig(
        settings=settings,
        groups=groups,
        hash_block_size=hash_block_size,
        world_size=parallel.world_size,
        rank=parallel.rank if role is ConnectorRole.WORKER else 0,
        engine_id=transfer.engine_id,
        launch_id=vllm_config.instance_id,  # shared by data-parallel engines, unlike engine_id
        namespace=_namespace(vllm_config, groups, hash_block_size, bytes_by_rank) if keeps else "",
        enable_kv_cache_events=events is not None and events.enable_kv_cache_events,
        recompute=Recompute.REST if len(groups) == 1 else Recompute.ALL,
        lookahead=kv_lookahead(vllm_config),
        scheduler_apart=parallel.distributed_executor_backend != "uni",
        engine_index=parallel.data_parallel_index,
        num_engines=parallel.data_parallel_size,  # for dense models vLLM has set it to 1 by now
        bytes_by_rank=bytes_by_rank,
        replicas=_num_replicas(vllm_config, kv_cache_config),
        packed_groups=groups_to_pack(
            settings,
            groups,
            _page_bytes(kv_cache_config),
            number_format,
        ),
        number_format=number_format,
        audit_tolerance=_audit_tolerance(vllm_config, number_format),
        writes_before_fence=_writes_before_fence(vllm_config, kv_cache_config),
        may_load=transfer.is_kv_consumer,  # and so is `kv_both`
        may_store=transfer.is_kv_producer,
    )


def awaits_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Return whether the scheduler's side has to be told the sizes of blocks by the workers.

    It has the KV cache config of the first pipeline stage, and in it one spec for all layers of a group. So
    it cannot see that layers of latents have pages of different size.
    """
    groups = [kv_cache_config.kv_cache_groups[group_id] for group_id in kept_group_ids(kv_cache_config)]
    latents = [
        name for group in groups for name, spec in layer_specs(group).items() if isinstance(spec, _LATENTS)
    ]
    shapes = {
        (tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        if set(tensor.layers) & set(latents)
    }
    return bool(vllm_config.parallel_config.pipeline_parallel_size > 1 or len(shapes) > 1)


def _writes_before_fence(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Return whether vLLM may write to new blocks before it calls `handle_preemptions`.

    Its second model runner clears new blocks of models with recurrent layers, and copies states and blocks
    that are shared in part, before that call; its first runner makes the call first.
    """
    clears = kv_cache_config.needs_kv_cache_zeroing or vllm_config.cache_config.prefix_match_unit is not None
    return bool(clears and vllm_config.use_v2_model_runner)


def _number_format(vllm_config: VllmConfig) -> str:
    """Return the format of the values in all of vLLM's caches; empty if they have several, or scales."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    is_fp8_of_cuda = cache.cache_dtype != "fp8" or current_platform.is_cuda()
    if cache.kv_cache_dtype_skip_layers or not is_fp8_of_cuda:  # others have other formats of that name
        return ""
    if cache.cache_dtype == "auto":
        return str(model.dtype).removeprefix("torch.")
    return _NUMBER_FORMATS.get(cache.cache_dtype, "")


def _audit_tolerance(vllm_config: VllmConfig, number_format: str) -> float:
    model = vllm_config.model_config
    activations, is_quantized = str(model.dtype).removeprefix("torch."), model.quantization is not None
    layers = model.get_total_num_hidden_layers()
    return tolerance(number_format, activations, layers, is_quantized=is_quantized) or 0.0


def _expect_usable_loads(vllm_config: VllmConfig) -> None:
    """Refuse kernels that ignore KV before a prompt's first computed token."""
    goes_on = vllm_config.scheduler_config.enable_chunked_prefill
    if current_platform.is_cpu() and vllm_config.model_config.use_mla and not goes_on:
        raise InputError(
            "MLA on a CPU: expected kernels that can go on in a prompt, got CPU_MLA: vLLM turns prefix"
            " caching off for it, and what is loaded would give wrong tokens; use a GPU"
        )


def _num_replicas(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return how many consecutive ranks hold the same KV.

    With MLA all ranks of tensor parallelism do: each computes it from the same input. If vLLM does not
    confirm this for all layers, or ranks have different layers, or there is a draft model, each rank keeps
    its own.
    """
    parallel = vllm_config.parallel_config
    ranks: int = parallel.tensor_parallel_size
    groups = [kv_cache_config.kv_cache_groups[group_id] for group_id in kept_group_ids(kv_cache_config)]
    is_same = (
        kv_cache_config.kv_tp_replicas == ranks == parallel.world_size
        and all(type(spec) in _LATENTS for group in groups for spec in layer_specs(group).values())
        and vllm_config.speculative_config is None
    )
    return ranks if is_same else 1


def _expect_one_machine(parallel: ParallelConfig, role: ConnectorRole) -> None:
    """Refuse ranks that cannot share one pool of host memory under one scheduler."""
    backend = parallel.distributed_executor_backend
    if backend == "external_launcher":
        reason = "each rank would have a scheduler of its own, and they decide by their own clocks"
        problem = f"expected mp or ray, got {backend}: {reason}; {_INSTEAD}"
        raise ConfigError("distributed_executor_backend", problem)
    if parallel.pipeline_parallel_size > 1 and backend != "mp":
        problem = f"expected mp with pipeline stages, got {backend}: not tried with kvtier; {_INSTEAD}"
        raise ConfigError("distributed_executor_backend", problem)
    if (machines := parallel.nnodes_within_dp) > 1:
        raise ConfigError("nnodes", f"expected 1 for each engine, got {machines}: {_ONE_MACHINE}")
    # Only the ranks know where Ray has put them: they ask each other here, and all get the same answer.
    if role is ConnectorRole.WORKER and backend not in ("mp", "uni"):
        together = sum(in_the_same_node_as(get_tp_group().cpu_group))
        if together < parallel.world_size:
            problem = f"expected {parallel.world_size} ranks on one machine, got {together}"
            raise ConfigError("tensor_parallel_size", f"{problem}: {_ONE_MACHINE}")


def kept_group_ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Return the groups that kvtier keeps: those whose blocks vLLM itself finds again by their hashes.

    Others, such as ring buffers, belong to one request each, and vLLM rebuilds them.
    """
    groups = kv_cache_config.kv_cache_groups
    return tuple(
        group_id
        for group_id in kv_cache_config.prefix_cacheable_group_ids
        if not groups[group_id].host_resident
    )


def layer_specs(group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    """Return the spec of each layer of a group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def _describe_groups(kv_cache_config: KVCacheConfig) -> tuple[GroupConfig, ...]:
    kept = kept_group_ids(kv_cache_config)
    if not kept:
        raise InputError(f"KV cache groups: expected one that can be found again, got none; {_INSTEAD}")
    return tuple(_describe_group(index, kv_cache_config.kv_cache_groups[index]) for index in kept)


def _describe_group(index: int, group: KVCacheGroupSpec) -> GroupConfig:
    if not group.layer_names:
        problem = "expected a layer of every group on every pipeline stage, got none"
        remedy = "divide the layers otherwise (VLLM_PP_LAYER_PARTITION)"
        raise InputError(f"KV cache group {index}: {problem}; {remedy}; {_INSTEAD}")
    specs = layer_specs(group)
    for name, spec in specs.items():
        if type(spec) not in _SUPPORTED_SPECS:
            known = ", ".join(kind.__name__ for kind in _SUPPORTED_SPECS)
            got = f"{type(spec).__name__} of layer {name}"
            raise InputError(f"KV cache group {index}: expected one of {known}, got {got}; {_INSTEAD}")
        _expect_boundaries(name, spec)
    spec = next(iter(specs.values()))  # all are of one kind and one block size, as in vLLM's scheduler
    return GroupConfig(
        block_size=spec.block_size,
        bytes_per_block=sum(map(content_bytes, specs.values())),
        layer_names=tuple(group.layer_names),
        sliding_window=_tokens_kept(spec),
        attention_chunk_size=(
            spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None
        ),
        is_state=isinstance(spec, MambaSpec),
    )


def _expect_boundaries(name: str, spec: KVCacheSpec) -> None:
    """Refuse a recurrent layer whose states vLLM does not keep at the boundaries of blocks."""
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
        problem = f"expected 'align', got {spec.mamba_cache_mode!r} for layer {name}"
        remedy = "no state can be found again without it; turn prefix caching on (--enable-prefix-caching)"
        raise ConfigError("mamba_cache_mode", f"{problem}: {remedy}")


def _page_bytes(kv_cache_config: KVCacheConfig) -> list[list[int]]:
    """Return the bytes of each page of a block, by group. A page of attention has K and V, which may be
    pages of their own; latents are one.
    """
    pages = []
    for group_id in kept_group_ids(kv_cache_config):
        specs = layer_specs(kv_cache_config.kv_cache_groups[group_id]).values()
        parts = [1 if isinstance(spec, _LATENTS) else 2 for spec in specs]
        sizes = [content_bytes(spec) // part for spec, part in zip(specs, parts, strict=True)]
        pages.append([size for size, part in zip(sizes, parts, strict=True) for _ in range(part)])
    return pages


def content_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of a layer's page without padding."""
    return int(
        spec.state_content_size_bytes if isinstance(spec, MambaSpec) else spec.unpadded_page_size_bytes
    )


def find_pages(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig
) -> dict[str, torch.Tensor]:
    """Return the pages of every layer that is kept, as tensors that count vLLM's blocks first.

    A recurrent layer's tensor shows one of its states; its page holds all of them, at the same distances.
    """
    strides = {
        name: tensor.block_stride for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers
    }
    num_blocks, pages = kv_cache_config.num_blocks, {}
    for group_id in kept_group_ids(kv_cache_config):
        for name, spec in layer_specs(kv_cache_config.kv_cache_groups[group_id]).items():
            cache = kv_caches[name]
            if isinstance(spec, MambaSpec):
                first = cache.storage_offset() * cache.element_size()
                view = torch.empty(0, dtype=torch.int8, device=cache.device)
                cache = view.set_(
                    cache.untyped_storage(), first, (num_blocks, content_bytes(spec)), (strides[name], 1)
                )
            pages[name] = group_kernel_blocks(cache, num_blocks)
    return pages


def _tokens_kept(spec: KVCacheSpec) -> int | None:
    """Return how many tokens before the next one vLLM keeps in a windowed group, and expects to be loaded.

    A chain of draft heads makes them more than the window.
    """
    if not isinstance(spec, SlidingWindowSpec):
        return None
    return int(spec.sliding_window + spec.extra_retained_tokens)


def _namespace(
    vllm_config: VllmConfig,
    groups: tuple[GroupConfig, ...],
    hash_block_size: int,
    bytes_by_rank: BytesByRank,
) -> Namespace:
    """Begin to compute the namespace.

    The layers of later pipeline stages follow from the number of stages and from vLLM's settings. The files
    of the weights are located at once, because a hub's branch may move on, and the settings are read at
    once, because vLLM notes things in them.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    algorithm, weights = cache.prefix_caching_hash_algo, all_weights(vllm_config)
    settings = all_settings(vllm_config)
    name = partial(
        fingerprint,
        dtype=str(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype),
        kv_layout=_device(vllm_config),
        groups=[asdict(group) for group in groups],
        parallelism=[parallel.tensor_parallel_size, parallel.world_size, *bytes_by_rank],
        seed=f"{algorithm} {resolve_none_hash_seed(get_hash_fn_by_name(algorithm))}",
        hash_block_size=hash_block_size,
        engine=installed_libraries(),
    )
    return Namespace(
        lambda: name(weights=[digest() for digest in weights], settings=settings()), _log_namespace
    )


def _log_namespace(namespace: Namespace) -> None:
    if namespace.problem is None:
        logger.info("kvtier: the namespace is %s", str(namespace.get_nowait())[:12])
    else:
        logger.warning(
            "kvtier: no other engine can share this one's KV, nor its next start: %s", namespace.problem
        )


def _device(vllm_config: VllmConfig) -> list[str]:
    """Return the device properties that a backend may adapt its blocks to."""
    if not current_platform.is_cpu():
        return [current_platform.device_type, str(current_platform.get_device_capability())]
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    # The instructions of the attention kernels, which decide how a block's keys are ordered.
    isa = _get_attn_isa(vllm_config.model_config.dtype, vllm_config.cache_config.block_size)
    return ["cpu", platform.machine(), torch.backends.cpu.get_cpu_capability(), isa]


def kv_lookahead(vllm_config: VllmConfig) -> int:
    """Return how many later tokens the KV of a token depends on: a draft head (EAGLE, MTP) sees a token's
    hidden state and the next token.

    vLLM runs the head before a step's KV is stored. With `disable_eagle_block_drop` vLLM ignores the
    dependence in its own cache, so it is ignored here too.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle_block_drop():
        return 0
    return int(vllm_config.num_prefill_lookahead_tokens)


def _describe_audits(config: OffloadingConfig) -> str:
    if config.audits:
        return f"audits for at most {config.settings.audit:.2%} of the computed tokens"
    if not config.settings.audit:
        return "no audits"
    return "no audits with a draft head" if config.lookahead else "no audits in this format of the cache"


def _describe_row(config: OffloadingConfig) -> str:
    size = format_size(config.row_bytes)
    return f"{size} packed, {format_size(config.raw_row_bytes)} as they are," if config.packs else size


def summarize(config: OffloadingConfig) -> str:
    """Describe the configuration in one line."""
    settings = config.settings
    if config.num_slots == 0:
        return f"kvtier {__version__}: cpu.capacity is 0: nothing is stored and nothing is loaded"
    chunk = settings.blocks_per_chunk * min(group.block_size for group in config.groups)
    namespace = config.namespace_nowait()
    return (
        f"kvtier {__version__}: {format_size(settings.cpu.capacity)} of host memory keep "
        f"{config.num_slots:,} chunks"
        f" of {chunk} tokens ({_describe_row(config)} each); policy {settings.cpu.policy},"
        f" {len(config.groups)} KV cache group(s), {config.world_size} worker(s),"
        f" {_describe_audits(config)}, namespace {'being computed' if namespace is None else namespace[:12]}"
    )


# -- pipeline stages --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KVTierHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The data that rank 0 sends to the scheduler's side."""

    bytes_by_rank: BytesByRank


def gather_bytes_by_rank(
    describe_groups: Callable[[], tuple[GroupConfig, ...]], ranks_per_stage: int
) -> BytesByRank:
    """Exchange the block sizes of all stages, and return them for all ranks.

    vLLM gives a worker the KV cache config of its own stage, and the scheduler that of the first. But the
    lengths of the other ranks' images decide how long a row is and where a rank's image lies in it. So the
    workers exchange them when their connectors are made, and rank 0 sends them to the scheduler's side by
    vLLM's handshake, which comes before the first step.

    This blocks until every stage has called it. If one stage cannot be served all of them raise, so that no
    stage waits for one that has given up.
    """
    own: tuple[int, ...] | str
    try:
        own = tuple(group.bytes_per_block for group in describe_groups())
    except KVTierError as error:
        own = str(error)
    pipeline = get_pp_group()
    stages: list[tuple[int, ...] | str] = [()] * pipeline.world_size
    torch.distributed.all_gather_object(stages, own, group=pipeline.cpu_group)
    ranks: list[tuple[int, ...]] = []
    for stage, found in enumerate(stages):
        if isinstance(found, str):
            raise InputError(f"pipeline stage {stage}: {found}")
        ranks += [found] * ranks_per_stage
    return tuple(ranks)


# -- the layout of the cache ------------------------------------------------------------------------


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """Return the cache layout to ask vLLM for: blocks outermost, so that a block is one run of memory.

    In vLLM's default layout a block is one page for each layer, which a kernel gathers and scatters beside
    the engine's own kernels. With blocks outermost the copy engine moves a block as it is: on an H200 an
    engine with nothing to reuse kept 0.999 of its speed instead of 0.984 (docs/vllm.md). vLLM ignores the
    request with a warning if a backend cannot do it.

    `None` leaves the choice to vLLM, where another layout was not measured to be faster or could keep an
    engine from starting: vLLM cannot cut blocks that are not dense by layer into the smaller ones of some
    kernels, which it must with recurrent layers, and children of a `MultiConnector` must all want the same.
    `VLLM_KV_CACHE_LAYOUT` overrides any layout.
    """
    model = vllm_config.model_config
    if not current_platform.is_cuda() or model.use_mla or model.is_hybrid or _is_in_company():
        return None
    capability = current_platform.get_device_capability()
    fits = (
        capability is not None
        and capability.major in (_AMPERE, _HOPPER)
        and vllm_config.attention_config.backend in _BACKENDS
        and vllm_config.cache_config.block_size in _BLOCK_SIZES
    )
    return BLOCKS_OUTERMOST if fits else None


def _is_in_company() -> bool:
    """Return whether a `MultiConnector` asks. The configs of its children have no reference to it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        asker = frame.f_locals.get("cls")
        if isinstance(asker, type) and issubclass(asker, MultiConnector):
            return True
    return False
