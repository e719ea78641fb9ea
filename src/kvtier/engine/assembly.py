"""The parts of an engine: a decoder, KV tensors, their description for kvtier, limits, batches.

These are functions of configs, without state. Any thread may call them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from kvtier.config import GroupConfig, KVTierConfig, OffloadingConfig, format_size, groups_to_pack
from kvtier.engine.cache import CacheGroup, KVCache
from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.engine.model import STATE_DTYPE, Decoder, ForwardBatch, SequenceSlice, state_shape
from kvtier.engine.scheduler import RequestSlice
from kvtier.errors import ConfigError
from kvtier.keys import fingerprint
from kvtier.machine import free_memory
from kvtier.namespace import Namespace, WeightsFiles
from kvtier.transfer.compare import tolerance

_BLOCK_BYTES = 256
"""The approximate bytes of the cache's records for a block."""

_HARMLESS = {
    "device": "its kind is covered, and its number only says which one",
    "enable_prefix_caching": "which blocks the engine keeps for itself",
    "kv_events": "what is published about blocks",
    "max_model_len": "how long requests may be; the model's own config decides on positions",
    "max_num_batched_tokens": "in which pieces prompts are computed",
    "max_num_seqs": "which requests run together",
    "num_blocks": "how much memory",
    "seed": "the seed of sampling",
    "state_interval": "which states are kept",
}
"""Fields of `EngineConfig` that KV does not depend on, with the reason. All others make the namespace."""


def make_decoder(model: ModelConfig, weights: Mapping[str, Tensor], config: EngineConfig) -> Decoder:
    """Put a model's weights on the engine's device."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            "device", f"expected a device that torch can use here, got {config.device!r}; try 'cpu'"
        )
    compute = None if config.compute_dtype is None else getattr(torch, config.compute_dtype)
    return Decoder(
        model, weights, device=config.device, dtype=getattr(torch, config.dtype), compute_dtype=compute
    )


def expect_room(model: ModelConfig, config: EngineConfig, groups: Sequence[CacheGroup]) -> None:
    """Raise `ConfigError` if the blocks do not fit into host memory, before any of them is made."""
    bytes_per_block = _BLOCK_BYTES
    if config.device == "cpu":
        bytes_per_block += sum(
            _num_tensors(groups, is_state) * _page_bytes(model, config, is_state)
            for is_state in (False, True)
        )
    needed, free = config.num_blocks * bytes_per_block, free_memory()
    if free is not None and needed > free.size:
        but = f"but only {format_size(free.size)} {free.where}"
        problem = f"{config.num_blocks} blocks need {format_size(needed)}, {but}; lower num_blocks"
        raise ConfigError("num_blocks", f"{problem}{free.remedy}")


def find_max_model_len(model: ModelConfig, config: EngineConfig, cache: KVCache) -> int:
    """Return the most tokens of a request: the configured number, and no more than model and cache allow."""
    asked, positions = config.max_model_len, model.max_position_embeddings
    if asked is not None and asked > positions:
        raise ConfigError(
            "max_model_len", f"expected at most the model's {positions} positions, got {asked}"
        )
    longest = cache.longest_request(positions if asked is None else asked)
    if longest < 2:
        needed = f"expected at least one block of two tokens or more for each of {len(cache.groups)} groups"
        raise ConfigError("num_blocks", f"{needed}, got {config.num_blocks} with the null block")
    return longest


def _num_tensors(groups: Sequence[CacheGroup], is_state: bool) -> int:
    return max((len(group.layer_names) for group in groups if group.is_state == is_state), default=0)


def _page_bytes(model: ModelConfig, config: EngineConfig, is_state: bool) -> int:
    """Return the bytes of a block in one layer."""
    if is_state:
        return math.prod(state_shape(model)) * STATE_DTYPE.itemsize
    itemsize: int = getattr(torch, config.dtype).itemsize
    return 2 * config.block_size * model.num_kv_heads * model.head_dim * itemsize


def allocate_kv(model: ModelConfig, config: EngineConfig, groups: Sequence[CacheGroup]) -> dict[str, Tensor]:
    """Return each layer's cache.

    The j-th layers of all attention groups share a tensor, and so do those of all state groups: a block
    belongs to one group at a time.
    """
    page = (config.block_size, model.num_kv_heads, model.head_dim)
    lead = (config.num_blocks, 2) if config.kv_layout == "blocks_first" else (2, config.num_blocks)
    pages = [
        torch.zeros(*lead, *page, dtype=getattr(torch, config.dtype), device=config.device)
        for _ in range(_num_tensors(groups, is_state=False))
    ]
    states = [
        torch.zeros(config.num_blocks, *state_shape(model), dtype=STATE_DTYPE, device=config.device)
        for _ in range(_num_tensors(groups, is_state=True))
    ]
    return {
        name: tensor
        for group in groups
        for name, tensor in zip(group.layer_names, states if group.is_state else pages, strict=False)
    }


def describe_cache(
    model: ModelConfig,
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    settings: KVTierConfig,
    weights_id: Any,
) -> OffloadingConfig:
    """Describe the engine's cache to kvtier.

    Weights without an id count as equal to no others; files are hashed later.
    """
    described = tuple(
        GroupConfig(
            block_size=config.block_size,
            bytes_per_block=len(group.layer_names) * _page_bytes(model, config, group.is_state),
            layer_names=group.layer_names,
            sliding_window=group.sliding_window,
            is_state=group.is_state,
        )
        for group in groups
    )
    name = partial(
        fingerprint,
        dtype=config.dtype,
        kv_layout=config.kv_layout,
        groups=[asdict(group) for group in described],
        parallelism=1,
        model=asdict(model),
        engine={field: value for field, value in asdict(config).items() if field not in _HARMLESS},
        device=config.device.partition(":")[0],
    )
    # A page holds K and V, which are pages of their own where the layout keeps them apart.
    pages = [
        [_page_bytes(model, config, group.is_state) // 2] * 2 * len(group.layer_names) for group in groups
    ]
    return OffloadingConfig(
        settings=settings,
        groups=described,
        packed_groups=groups_to_pack(
            settings,
            described,
            pages,
            config.dtype,
        ),
        hash_block_size=config.block_size,
        engine_id=uuid4().hex,
        namespace=_namespace(name, weights_id),
        enable_kv_cache_events=bool(config.kv_events),
        number_format=config.dtype,
        audit_tolerance=tolerance(config.dtype, config.compute_dtype or config.dtype, model.num_layers) or 0,
    )


def _namespace(name: Callable[..., str], weights_id: Any) -> str | Namespace:
    if isinstance(weights_id, WeightsFiles):
        return Namespace(lambda: name(weights=weights_id.manifest()))
    return name(weights=uuid4().hex if weights_id is None else weights_id)


def make_batch(
    slices: Sequence[RequestSlice], num_groups: int, block_size: int, device: str
) -> ForwardBatch:
    """Flatten slices to rows, with the position in each group's cache that each row writes."""
    tokens = [token for request, start, end in slices for token in request.tokens[start:end]]
    positions = [position for _, start, end in slices for position in range(start, end)]
    slots = [
        [
            request.table.rows[group][position // block_size] * block_size + position % block_size
            for request, start, end in slices
            for position in range(start, end)
        ]
        for group in range(num_groups)
    ]
    tables = [row for request, _, _ in slices for row in request.table.rows]
    sent = iter(_send([tokens, positions, *slots, *tables], device))
    sent_tokens, sent_positions, *sent_slots = (next(sent) for _ in range(2 + num_groups))
    sequences, row = [], 0
    for _, start, end in slices:
        block_tables = tuple(next(sent) for _ in range(num_groups))
        sequences.append(SequenceSlice(row, row + end - start, end, block_tables))
        row += end - start
    return ForwardBatch(sent_tokens, sent_positions, sequences, tuple(sent_slots))


def _send(lists: list[list[int]], device: str) -> tuple[Tensor, ...]:
    """Copy lists to the device in one copy."""
    together = torch.tensor(list(chain.from_iterable(lists)), device=device)
    return torch.split_with_sizes(together, [len(values) for values in lists])
