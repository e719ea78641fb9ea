"""The versions of vLLM: what kvtier expects of every version, and what differs between them.

All other modules of this package are written for the newest version; what an older one lacks, this module
replaces. The inventory lists what kvtier overrides and calls in vLLM. `expect_hooks` compares it with the
installed vLLM before any other module imports a name that may be missing. A version that has all of it may
run, whatever its number: outside of the range that kvtier is tested with, `warn_of_version` logs that.
Nothing here keeps state: any thread may call it.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import vllm
from vllm.logger import init_logger

from kvtier.errors import InputError
from kvtier.integrations import VLLM_VERSIONS

logger = init_logger("vllm.kvtier")  # below vLLM's own logger: other loggers get no handler

Inventory = dict[str, tuple[str, ...] | None]
"""Names, as `module:Class.name`, and the parameters of each. `None` means that it is not called."""


def _read(names_by_owner: dict[str, str]) -> Inventory:
    """Read an inventory of lines such as `name(parameter, parameter)`, grouped by module or class."""
    found: Inventory = {}
    for owner, lines in names_by_owner.items():
        for line in lines.strip().splitlines():
            name, is_called, parameters = line.strip().rstrip(")").partition("(")
            hook = f"{owner}{'.' if ':' in owner else ':'}{name}"
            found[hook] = tuple(parameters.split(", ") if parameters else ()) if is_called else None
    return found


OVERRIDDEN = _read(
    {
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": """
            __init__(vllm_config, role, kv_cache_config)
            bind_connector_metadata(connector_metadata)
            build_connector_meta(scheduler_output)
            build_connector_worker_meta()
            build_kv_connector_stats(data)
            build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            clear_connector_metadata()
            get_block_ids_with_load_errors()
            get_finished(finished_req_ids)
            get_handshake_metadata()
            get_kv_connector_stats()
            get_num_new_matched_tokens(request, num_computed_tokens)
            get_required_kvcache_layout(vllm_config)
            get_transfer_results(finished_req_ids)
            handle_preemptions(kv_connector_metadata)
            has_pending_push_work()
            on_new_request(request)
            register_kv_caches(kv_caches)
            request_finished(request, block_ids)
            requires_kv_delivery
            reset_cache()
            restore_kv_caches()
            save_kv_layer(layer_name, kv_layer, attn_metadata, kwargs)
            set_xfer_handshake_metadata_pp_aware(metadata)
            shutdown()
            start_load_kv(forward_context, kwargs)
            supports_sleep_mode(kv_transfer_config)
            take_events()
            unregister_kv_caches()
            update_connector_output(connector_output)
            update_state_after_alloc(request, blocks, num_external_tokens)
            wait_for_layer_load(layer_name)
            wait_for_save()""",
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata": """
            aggregate(other)""",
        "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": """
            request_finished_all_groups(request, block_ids)""",
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics": """
            __init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            observe(transfer_stats_data, engine_idx)""",
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats": """
            aggregate(other)
            is_empty()
            reduce()
            reset()""",
    }
)
"""The hooks that vLLM calls and kvtier overrides. vLLM may pass all of their parameters."""

NEWER = {
    f"vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.{name}": since
    for name, since in {
        "restore_kv_caches": "0.33",
        "supports_sleep_mode": "0.33",
        "unregister_kv_caches": "0.33",
    }.items()
}
"""Hooks of `OVERRIDDEN` that may be missing, with the first version that has them and calls them."""

CALLED = _read(
    {
        "vllm.config": """
            ModelConfig
            VllmConfig.num_prefill_lookahead_tokens
            VllmConfig.use_v2_model_runner""",
        "vllm.config.speculative": "SpeculativeConfig.use_eagle_block_drop()",
        "vllm.distributed.kv_events": """
            AllBlocksCleared
            BlockRemoved
            BlockStored""",
        "vllm.distributed.kv_transfer.kv_connector.factory": """
            KVConnectorFactory._registry
            KVConnectorFactory.register_connector(name, module_path, class_name)""",
        "vllm.distributed.kv_transfer.kv_connector.v1.base": """
            KVConnectorBase_V1.bind_kv_cache_manager(kv_cache_manager)
            KVConnectorHandshakeMetadata
            KVConnectorMetadata
            KVConnectorRole
            KVConnectorTransferResults(finished_recving, failed_recving)""",
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector": "MultiConnector",
        "vllm.distributed.parallel_state": """
            get_pp_group()
            get_tp_group()
            in_the_same_node_as(pg)""",
        "vllm.platforms": "current_platform",
        "vllm.transformers_utils.repo_utils": "hf_api()",
        "vllm.utils.hashing": "get_hash_fn_by_name(hash_fn_name)",
        "vllm.v1.attention.backends.registry": "AttentionBackendEnum",
        "vllm.v1.core.block_pool": "BlockPool.get_num_free_blocks()",
        "vllm.v1.core.kv_cache_manager": """
            KVCacheBlocks.get_block_ids()
            KVCacheManager.get_block_ids(request_id)""",
        "vllm.v1.core.kv_cache_utils": """
            generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)
            maybe_convert_block_hash(hash_bytes)
            resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            resolve_none_hash_seed(hash_fn)
            to_event_extra_keys(extra_keys)""",
        "vllm.v1.kv_cache_interface": """
            ChunkedLocalAttentionSpec
            FullAttentionSpec
            KVCacheConfig.needs_kv_cache_zeroing
            KVCacheConfig.prefix_cacheable_group_ids
            MLAAttentionSpec
            MambaSpec.state_content_size_bytes
            SlidingWindowMLASpec
            SlidingWindowSpec
            UniformTypeKVCacheSpecs
            get_kv_cache_spec_kind(kv_cache_spec)
            group_kernel_blocks(cache, num_blocks)""",
        "vllm.v1.request": "RequestStatus",
    }
)
"""What kvtier imports and calls, with the arguments that it passes."""


def expect_hooks() -> None:
    """Raise `InputError`, in one line, if vLLM lacks a name of the inventory or has other parameters."""
    for inventory, fits in ((OVERRIDDEN, _has_parameters), (CALLED, _takes_arguments)):
        for hook, parameters in inventory.items():
            found = _find(hook)
            if found is None and hook not in NEWER:
                _refuse(hook, parameters, "no such name")
            if found is not None and parameters is not None and not fits(found, parameters):
                _refuse(hook, parameters, f"({', '.join(_parameters(found))})")


def _refuse(hook: str, parameters: tuple[str, ...] | None, found: str) -> None:
    name = hook.replace(":", ".")
    expected = name if parameters is None else f"{name}({', '.join(parameters)})"
    remedy = f"install vllm{VLLM_VERSIONS}, or a kvtier for this version"
    raise InputError(f"vllm {vllm.__version__}: expected {expected}, got {found}; {remedy}")


def _find(hook: str) -> Any:
    """Return what an entry of the inventory names; `None` if there is nothing of the name."""
    module, _, path = hook.partition(":")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or module):
            raise  # vLLM lacks a library of its own
        return None
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def _has_parameters(hook: Any, names: tuple[str, ...]) -> bool:
    return _parameters(hook) == names


def _takes_arguments(function: Any, names: tuple[str, ...]) -> bool:
    """Return whether a function has these parameters in this order, and needs no other."""
    parameters = inspect.signature(function).parameters.values()
    needed = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    known = tuple(parameter.name for parameter in parameters if parameter.name in names)
    return known == names and needed <= {*names, "self"}


def warn_of_version() -> None:
    """Log a warning if this kvtier is not tested with the installed version."""
    if vllm.__version__ not in VLLM_VERSIONS:
        logger.warning(
            "kvtier is tested with vllm%s, and this is vllm %s: all hooks are there, but they may mean"
            " something else; compare some answers with those of an engine without kvtier",
            VLLM_VERSIONS,
            vllm.__version__,
        )


# -- what differs -----------------------------------------------------------------------------------

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:  # 0.31 counts external hits without their source
    HOST_HITS: Any = None
else:
    HOST_HITS = CacheHitSource.HOST
"""The source of kvtier's hits in vLLM's metrics."""
