"""The settings of a vLLM engine that its KV may depend on, as a JSON value that is equal in every start.

Every field of every config below `VllmConfig` counts, and every `VLLM_*` variable that is set, except for
those that are listed here with a reason. So a field that a new vLLM adds keeps engines apart that differ in
it, until someone has found it harmless. A wrong entry mixes the KV of different engines; a missing one only
means that KV is computed although it is already stored.

The class of the model counts too, because a plug-in may give an architecture one of its own; then the
plug-in's sources count.

A value that has no name beyond this process, or that names a file whose content decides, makes a namespace
that is like no other. Nothing here keeps state: any thread may call it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import transformers
import vllm
from transformers import PretrainedConfig
from vllm import envs
from vllm.config import ModelConfig

from kvtier.errors import OutsideError, show_value

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _by_name(names_by_reason: dict[str, str]) -> dict[str, str]:
    """Return the reason of each name."""
    return {name: reason for reason, names in names_by_reason.items() for name in names.split()}


HARMLESS = _by_name(
    {
        "the content of the weights' files counts instead": """
            LoadConfig.download_dir ModelConfig.model ModelConfig.model_weights ModelConfig.revision
            SpeculativeConfig.model SpeculativeConfig.revision""",
        "how files are read, not what": """
            LoadConfig.safetensors_prefetch_block_size LoadConfig.safetensors_prefetch_num_threads
            LoadConfig.use_tqdm_on_load ParallelConfig.max_parallel_loading_workers""",
        "text to tokens, which keys are made of; with images or other media it counts": """
            ModelConfig.skip_tokenizer_init ModelConfig.tokenizer ModelConfig.tokenizer_revision""",
        "after the KV: logits, sampling and text": """
            ModelConfig.generation_config ModelConfig.logits_processors ModelConfig.logprobs_mode
            ModelConfig.max_logprobs ModelConfig.override_generation_config ModelConfig.return_sampling_mask
            ModelConfig.use_fp64_gumbel ParallelConfig.enable_batch_sharded_sampling
            VllmConfig.reasoning_config VllmConfig.structured_outputs_config
            VllmConfig.watermark_config""",
        "the seed of sampling; that of random weights is part of the weights": "ModelConfig.seed",
        "the server's interface": """
            ModelConfig.allowed_local_media_path ModelConfig.allowed_media_domains ModelConfig.hf_token
            ModelConfig.renderer_num_workers ModelConfig.served_model_name ParallelConfig._api_process_count
            ParallelConfig._api_process_rank SchedulerConfig.stream_interval VllmConfig.shutdown_timeout""",
        "logs, metrics and profiles": """
            CompilationConfig.debug_dump_path VllmConfig.kv_events_config VllmConfig.logging_config
            VllmConfig.observability_config VllmConfig.profiler_config VllmConfig.watchdog_config""",
        "the name of one start": """
            ECTransferConfig.engine_id KVTransferConfig.engine_id VllmConfig.instance_id""",
        "addresses, ports and places": """
            ECTransferConfig.ec_ip ECTransferConfig.ec_port KVTransferConfig.kv_ip KVTransferConfig.kv_port
            ParallelConfig._coord_store_port ParallelConfig._data_parallel_master_port_list
            ParallelConfig.assigned_physical_gpu_ids ParallelConfig.data_parallel_master_ip
            ParallelConfig.data_parallel_master_port ParallelConfig.data_parallel_rpc_port
            ParallelConfig.master_addr ParallelConfig.master_port ParallelConfig.nnodes
            ParallelConfig.node_rank ParallelConfig.numa_bind ParallelConfig.numa_bind_cpus
            ParallelConfig.numa_bind_nodes ParallelConfig.placement_group""",
        "device_type is the kind of device, and this is which one": "DeviceConfig.device",
        "a rank of data parallelism computes whole requests": """
            ParallelConfig.data_parallel_backend ParallelConfig.data_parallel_external_lb
            ParallelConfig.data_parallel_hybrid_lb ParallelConfig.data_parallel_index
            ParallelConfig.data_parallel_rank ParallelConfig.data_parallel_rank_local
            ParallelConfig.data_parallel_size ParallelConfig.data_parallel_size_local
            ParallelConfig.dp_sync_interval ParallelConfig.elastic_ep_max_dp_size""",
        "how ranks of data parallelism agree on a step; by default it follows from async_scheduling": """
            ParallelConfig.disable_nccl_for_dp_synchronization""",
        "all ranks of an engine share a namespace": "ParallelConfig.rank",
        "how workers are started and watched; worker_cls is what they run": """
            ParallelConfig.cpu_distributed_timeout_seconds ParallelConfig.distributed_executor_backend
            ParallelConfig.distributed_timeout_seconds ParallelConfig.enable_fault_tolerance
            ParallelConfig.fault_tolerance_config ParallelConfig.ray_workers_use_nsight""",
        "how much memory, in bytes or blocks": """
            CacheConfig.gpu_memory_utilization CacheConfig.kv_cache_max_concurrency
            CacheConfig.kv_cache_memory_bytes CacheConfig.kv_cache_size_tokens CacheConfig.kv_offloading_size
            CacheConfig.num_cpu_blocks CacheConfig.num_gpu_blocks CacheConfig.num_gpu_blocks_override
            CacheConfig.simple_cpu_offload_num_blocks ECTransferConfig.ec_buffer_size
            MultiModalConfig.mm_ipc_gpu_memory_gb MultiModalConfig.mm_processor_cache_gb
            MultiModalConfig.mm_shm_cache_max_object_size_mb MultiModalConfig.skip_mm_profiling
            SchedulerConfig.encoder_cache_size""",
        "where processed images wait, not what they are": """
            ECTransferConfig.ec_buffer_device MultiModalConfig.mm_processor_cache_type
            MultiModalConfig.mm_tensor_ipc""",
        "which blocks vLLM keeps for itself": """
            CacheConfig.enable_prefix_caching CacheConfig.kv_offloading_backend
            CacheConfig.prefix_cache_retention_interval""",
        "block_size is the size, and this is who has chosen it": """
            CacheConfig._block_size_resolved CacheConfig.user_specified_block_size""",
        "filled in only where scheduler and worker share a config; the namespace has the first": """
            CacheConfig.hash_block_size CacheConfig.cache_hit_alignment_tokens""",
        "which requests run together, and in which pieces": """
            SchedulerConfig.async_scheduling SchedulerConfig.enable_chunked_prefill
            SchedulerConfig.long_prefill_token_threshold
            SchedulerConfig.long_prefill_token_threshold_adaptive SchedulerConfig.max_num_active_seqs
            SchedulerConfig.max_num_batched_tokens SchedulerConfig.max_num_encoder_input_tokens
            SchedulerConfig.max_num_queued_reqs SchedulerConfig.max_num_queued_tokens
            SchedulerConfig.max_num_scheduled_tokens SchedulerConfig.max_num_seqs SchedulerConfig.policy
            SchedulerConfig.prefill_schedule_interval SchedulerConfig.scheduler_reserve_full_isl
            SchedulerConfig.watermark""",
        "the batch sizes that graphs are made for, which follow from the largest batch": """
            CompilationConfig.compile_ranges_endpoints CompilationConfig.compile_sizes
            CompilationConfig.cudagraph_capture_sizes CompilationConfig.cudagraph_num_of_warmups
            CompilationConfig.decoder_replay_cudagraph_capture_sizes
            CompilationConfig.encoder_cudagraph_max_frames_per_batch
            CompilationConfig.encoder_cudagraph_max_vision_items_per_batch
            CompilationConfig.encoder_cudagraph_token_budgets
            CompilationConfig.max_cudagraph_capture_size""",
        "where compiled code is kept": """
            CompilationConfig.cache_dir CompilationConfig.compile_cache_save_format
            CompilationConfig.local_cache_dir""",
        "what vLLM notes while it builds and compiles the model": """
            CompilationConfig.compilation_time CompilationConfig.disabled_custom_ops
            CompilationConfig.enabled_custom_ops CompilationConfig.encoder_compilation_time
            CompilationConfig.static_all_moe_layers CompilationConfig.static_forward_context
            CompilationConfig.traced_files""",
        "what is tried out before the first request": """
            KernelConfig.enable_cutedsl_warmup KernelConfig.enable_jit_warmup""",
        "made of the model's config and of files beside the weights, which count": "VllmConfig.quant_config",
        "the engine's own configs once more": """
            SpeculativeConfig.target_model_config SpeculativeConfig.target_parallel_config""",
        "connectors move KV, and do not compute any": """
            KVTransferConfig.kv_buffer_device KVTransferConfig.kv_connector
            KVTransferConfig.kv_connector_extra_config KVTransferConfig.kv_connector_module_path
            KVTransferConfig.kv_buffer_size KVTransferConfig.kv_load_failure_policy
            KVTransferConfig.kv_parallel_size KVTransferConfig.kv_rank KVTransferConfig.kv_role""",
        "the KV of adapters never leaves the pool": """
            LoRAConfig.default_mm_loras LoRAConfig.max_cpu_loras LoRAConfig.max_lora_rank
            LoRAConfig.max_loras""",
        "what becomes of memory while the engine sleeps": """
            ModelConfig.enable_cumem_allocator ModelConfig.enable_nccl_comm_suspend
            ModelConfig.enable_sleep_mode ModelConfig.sleep_mode_backend
            ModelConfig.sleep_mode_offload_cudagraph ModelConfig.sleep_preserve_parameter_names""",
    }
)
"""Fields, as `Class.field`, that KV does not depend on, with the reason. Not every version has them all."""

HARMLESS_VARIABLES = _by_name(
    {
        "addresses and ports, also those that Kubernetes sets for every service": """
            *_HOST *_HOST_IP *_LOOPBACK_IP *_MASTER_IP *_PORT *_PORT_*_TCP* *_PORT_*_UDP* *_SERVICE_PORT_*
            VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_RPC_BASE_PATH""",
        "the name or the rank of one process": """
            VLLM_DIST_IDENT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE""",
        "how processes and threads are started": """
            VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_ENABLE_V1_MULTIPROCESSING
            VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS VLLM_RAY_* VLLM_WORKER_MULTIPROC_METHOD
            VLLM_USE_RAY_*""",
        "how much memory": "VLLM_CPU_KVCACHE_SPACE VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
        "how long to wait, and how often to try": "*_TIMEOUT *_TIMEOUT_S *_TIMEOUT_SECONDS *_MAX_RETRIES",
        "logs, statistics and profiles": """
            VLLM_CONFIGURE_LOGGING VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_DUMP_PATH
            VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG
            VLLM_LOGGING_* VLLM_LOG_* VLLM_NO_USAGE_STATS VLLM_NVTX_SCOPES_FOR_PROFILING
            VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_TRACE_FUNCTION VLLM_USAGE_*""",
        "the server's interface": """
            VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_API_KEY VLLM_HTTP_TIMEOUT_KEEP_ALIVE
            VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_LORA_RESOLVER_* VLLM_SERVER_DEV_MODE
            VLLM_SKIP_MODEL_NAME_VALIDATION""",
        "how and when an image of the server was built": "VLLM_BUILD_* VLLM_IMAGE_TAG",
        "where files are kept that can be made again": """
            VLLM_ASSETS_CACHE* VLLM_CACHE_ROOT VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_CONFIG_ROOT
            VLLM_DISABLE_COMPILE_CACHE VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_MEDIA_CACHE*
            VLLM_XLA_CACHE_PATH""",
        "the form of block hashes in events": "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
    }
)
"""Patterns of `VLLM_*` variables that KV does not depend on, with the reason."""

_NAMES_A_FILE = {"MultiModalConfig.mm_encoder_fp8_scale_path"}
"""Fields that name a file of which only vLLM knows the content that it has read."""

_LIBRARIES = (
    *("triton", "flash-attn", "flashinfer-python"),
    *("compressed-tensors", "bitsandbytes", "torchao"),
    *("Pillow", "torchvision", "numpy", "opencv-python", "opencv-python-headless", "av"),
)
"""Libraries that vLLM computes, reads weights or prepares media with, where they are installed."""

_PLACE = ("_name_or_path", "_commit_hash")
"""Where a model's config was found."""


def all_settings(vllm_config: VllmConfig) -> Callable[[], Any]:
    """Return a function that returns the settings that KV may depend on, as they are now.

    It raises `OutsideError` if one of them has no name beyond this process.
    """
    try:
        found = {
            "config": _encode(vllm_config, "VllmConfig"),
            "models": _classes_of_models(vllm_config),
            "variables": _variables(),
        }
    except OutsideError as error:
        return partial(_fail, error)
    return lambda: found


def _fail(error: OutsideError) -> None:
    raise error


def installed_libraries() -> dict[str, str]:
    """Return the versions of the libraries that compute KV, or prepare weights or media for it."""
    found = {module.__name__: module.__version__ for module in (vllm, torch, transformers)}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _classes_of_models(vllm_config: VllmConfig) -> list[Any]:
    """Return what tells the code of the model apart, and that of the draft model."""
    speculative = getattr(vllm_config, "speculative_config", None)
    models = [getattr(vllm_config, "model_config", None), getattr(speculative, "draft_model_config", None)]
    return [_class_of(model) for model in models if isinstance(model, ModelConfig)]


def _class_of(model: ModelConfig) -> list[Any]:
    """Return the name of the class that vLLM has for a model, and the code of a plug-in's class.

    A class that vLLM has not imported yet is not imported here either: that may take seconds.
    """
    entry: Any = model.registry.models.get(model.architecture)
    found = getattr(entry, "model_cls", None)
    module = found.__module__ if found else getattr(entry, "module_name", None)
    name = found.__qualname__ if found else getattr(entry, "class_name", None)
    if module is None or name is None:
        raise OutsideError(f"{model.architecture}: expected a class of vLLM's registry, got {entry!r}")
    package = module.partition(".")[0]
    return [module, name, None if package == "vllm" else _code_of(package)]


def _code_of(package: str) -> list[Any]:
    """Return the versions of an installed package, and a digest of each of its sources."""
    try:
        spec = None if package in ("__main__", "__mp_main__") else find_spec(package)
    except ValueError:  # of a module that was made by hand
        spec = None
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    files = {
        file.relative_to(folder).as_posix(): file for folder in folders for file in folder.rglob("*.py")
    }
    if not folders and spec and spec.has_location:
        files = {package: Path(str(spec.origin))}
    if not files:
        raise OutsideError(f"{package}: expected a model's class in a package or a module with a source")
    names = metadata.packages_distributions().get(package, [])
    return [sorted((name, metadata.version(name)) for name in set(names)), _digests(files)]


def _digests(files: dict[str, Path]) -> dict[str, str]:
    try:
        return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    except OSError as error:
        raise OutsideError(
            f"{error.filename}: expected a file that can be read: {error.strerror}"
        ) from error


def _tokenizer(model: Any) -> list[Any]:
    """Return which tokenizer a model has: transformers takes settings of processors of media from it.

    The model's own counts with the files of the model.
    """
    name, revision = model.tokenizer, model.tokenizer_revision
    folder = Path(str(name))
    if folder.is_dir():
        is_own = folder.resolve() == Path(str(model.model)).resolve()
        files = {file.name: file for file in folder.iterdir() if file.suffix in (".json", ".py")}
        which: Any = "of the model" if is_own else _digests(files)
    elif (name, revision) == (model.model, model.revision):
        which = "of the model"
    else:
        commit = getattr(revision, "resolved", None) or revision
        if not re.fullmatch("[0-9a-f]{40}", str(commit)):
            expected = "expected the model's own, a folder or a commit of the hub for a model with media"
            raise OutsideError(f"ModelConfig.tokenizer: {expected}, got {name} in revision {revision}")
        which = [name, str(commit)]
    return [which, model.skip_tokenizer_init]


def _variables() -> dict[str, Any]:
    """Return vLLM's variables that are set; of those that vLLM reads, what it makes of them."""
    found = {}
    for name, text in sorted(os.environ.items()):
        is_harmless = any(fnmatchcase(name, pattern) for pattern in HARMLESS_VARIABLES)
        if name.startswith("VLLM_") and not is_harmless:
            value: Any = text
            with suppress(AttributeError, OSError, ValueError):  # a variable that vLLM does not read
                value = getattr(envs, name)
            found[name] = _encode(value, name)
    return found


def _encode(value: Any, where: str) -> Any:
    """Return a JSON value that is the same in every process, and another one for another value."""
    match value:
        case PretrainedConfig():  # before dataclasses, which it is one of
            return {_qualified(type(value)): _encode(_content(value, where), where)}
        case Enum():  # before numbers and strings, which some are
            return {_qualified(type(value)): value.name}
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case type():
            return {"type": _qualified(value)}
        case torch.dtype() | torch.device() | Path():
            return {type(value).__name__: str(value)}
        case bytes():
            return {"bytes": value.hex()}
        case partial():
            return {"partial": _encode([value.func, value.args, value.keywords], where)}
        case Mapping():
            pairs = [
                [_encode(key, where), _encode(item, f"{where}[{key!r}]")] for key, item in value.items()
            ]
            return {"mapping": sorted(pairs, key=_order)}
        case Set():
            return {"set": sorted((_encode(item, where) for item in value), key=_order)}
        case list() | tuple():
            return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
        case FunctionType() | BuiltinFunctionType() if "<" not in value.__qualname__:
            return {"function": _qualified(value)}
    if is_dataclass(value):
        return {_qualified(type(value)): _encode_fields(value)}
    raise OutsideError(
        f"{where}: expected a value that has the same name in every process, got {show_value(value)}"
    )


_order = partial(json.dumps, sort_keys=True)


def _encode_fields(config: Any) -> dict[str, Any]:
    classes = [base.__name__ for base in type(config).__mro__]
    found = {}
    for field in fields(config):
        names = {f"{name}.{field.name}" for name in classes}
        if names & HARMLESS.keys():
            continue
        value, where = getattr(config, field.name, None), f"{classes[0]}.{field.name}"
        if value is not None and names & _NAMES_A_FILE:
            raise OutsideError(f"{where}: expected no file beside the weights, got {show_value(value)}")
        found[field.name] = _encode(value, where)
    if getattr(config, "multimodal_config", None) is not None:
        found["tokenizer"] = _tokenizer(config)
    # With -1 vLLM fits the length to the free memory of each start, after the model was built for all
    # positions of its config. The length counts because some models choose their positions by it.
    if getattr(config, "original_max_model_len", None) == -1:
        found["max_model_len"] = -1
    return found


def _qualified(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _content(config: PretrainedConfig, where: str) -> Any:
    """Return the content of a model's config without the places that it and its parts come from."""
    try:
        return _without_place(config.to_dict())
    except Exception as error:  # of the model's own code, which may raise anything
        raise OutsideError(f"{where}: expected a config that to_dict() can list: {error}") from error


def _without_place(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_place(item) for key, item in value.items() if key not in _PLACE}
    return value
