"""Cache layouts of models that need a GPU to run: vLLM's own code makes their specs, groups and tensors, and
kvtier describes, stores and loads them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.test_contract import engine_config

from kvtier.connector import ConnectorRole
from kvtier.errors import InputError
from kvtier.offload.cpu import CPUOffloadingSpec
from kvtier.transfer.base import CPULoadStoreSpec, GPULoadStoreSpec
from kvtier.transfer.layout import KVLayout, canonicalize

pytestmark = pytest.mark.newest_vllm  # it builds specs with vLLM's internals, which differ by version

LAYERS = 3
BLOCK = 64
INDEXER_BYTES = 128 + 4
"""The bytes of a token's key in DeepSeek's indexer: 8-bit numbers and a scale."""
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")


@pytest.fixture
def config(llama: Path) -> Any:
    """vLLM's config of an engine with kvtier and blocks as DeepSeek has them."""
    config = engine_config(llama, block_size=BLOCK, dtype="bfloat16", max_model_len=256)
    config.cache_config.num_gpu_blocks_override = 12
    return config


def mla_spec(config: Any, cache_dtype: str) -> Any:
    """Return what vLLM's MLA layer with DeepSeek's sizes answers."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    layer = SimpleNamespace(
        kv_cache_dtype=cache_dtype,
        head_size=512 + 64,
        sliding_window=None,
        indexer=object(),
        topk_buffer_width=2048,
        non_causal_multi_token_decode=False,
    )
    return MLAAttention.get_kv_cache_spec(layer, config)


def indexer_spec(config: Any, name: str, kpool: int = 1) -> Any:
    """Return what the cache of DeepSeek's indexer answers, changed as GLM's does if it pools tokens.

    (The module of GLM's needs torchvision.)
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    with set_current_vllm_config(config):
        cache = DeepseekV32IndexerCache(INDEXER_BYTES, torch.uint8, name, config.cache_config)
        return replace(cache.get_kv_cache_spec(config), tokens_per_state=kpool)


def ring_spec() -> Any:
    """Return the spec of a ring buffer that belongs to one request."""
    import torch
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    return CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)


def deepseek_specs(config: Any, cache_dtype: str, kpool: int = 1) -> dict[str, Any]:
    """Return the specs of all layers: of attention, and of its indexer."""
    specs = {}
    for layer in range(LAYERS):
        specs[f"model.layers.{layer}.self_attn.attn"] = mla_spec(config, cache_dtype)
        name = f"model.layers.{layer}.self_attn.indexer.k_cache"
        specs[name] = indexer_spec(config, name, kpool)
    return specs


def lay_out(config: Any, specs: dict[str, Any], layout: str) -> Any:
    """Return vLLM's cache config for these layers."""
    config.cache_config.kv_cache_layout = layout
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:  # before 0.33
        from vllm.v1.core import kv_cache_utils as planning

        groups = []
    else:
        groups = [planning.get_global_kv_cache_groups(config, [specs])]
    (cache_config,) = planning.get_kv_cache_configs(config, [specs], [1 << 30], *groups)
    return cache_config


def allocate(cache_config: Any, layout: str) -> dict[str, Any]:
    """Return the tensors of all layers, allocated by vLLM and filled with random bytes."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    tensors: dict[str, Any] = allocate_kv_cache(cache_config, torch.device("cpu"), KVCacheLayout[layout])
    storage = next(iter(tensors.values())).untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    flat.random_(generator=torch.Generator().manual_seed(0))
    return tensors


def page(tensor: Any, block: int) -> bytes:
    """Return the bytes of a layer in a block."""
    import torch

    found = tensor[block].contiguous().view(torch.uint8).numpy().tobytes()
    assert isinstance(found, bytes)
    return found


def move_and_compare(config: Any, cache_config: Any, layout: str) -> None:
    """Store two blocks, load them into two others, and compare every page of every layer."""
    from kvtier.integrations.vllm.describe import describe_engine, find_pages

    described = describe_engine(config, cache_config, ConnectorRole.WORKER)
    tensors = allocate(cache_config, layout)
    names = [name for group in described.groups for name in group.layer_names]
    pages = find_pages(tensors, cache_config)
    assert sorted(pages) == sorted(names)
    caches = canonicalize(pages, described.groups, layout=KVLayout.BLOCKS_FIRST)
    for index, group in enumerate(described.groups):
        assert caches.block_bytes(index) == group.bytes_per_block
    spec = CPUOffloadingSpec(described)
    try:
        handlers = {source.medium(): handler for source, _, handler in spec.get_handlers(caches)}
        groups = len(described.groups)
        slots = CPULoadStoreSpec(range(2 * groups))
        for job, (medium, blocks) in enumerate([("GPU", [3, 5]), ("CPU", [7, 2])]):
            ours = GPULoadStoreSpec(blocks * groups, [2] * groups, [0] * groups)
            before = {name: [page(tensors[name], block) for block in (3, 5, 4)] for name in names}
            ends = (ours, slots) if medium == "GPU" else (slots, ours)
            assert handlers[medium].transfer_async(job, ends)
            assert handlers[medium].wait({job}, 10)
            assert all(result.success for result in handlers[medium].get_finished())
        for name in names:
            assert [page(tensors[name], block) for block in (3, 5, 4)] == before[name], "others are intact"
            assert [page(tensors[name], block) for block in (7, 2)] == before[name][:2]
    finally:
        spec.shutdown()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("cache_dtype", "token_bytes"), [("auto", 2 * 576), ("fp8_ds_mla", 656)])
def test_deepseek_with_an_indexer(config: Any, layout: str, cache_dtype: str, token_bytes: int) -> None:
    """One group of unequal pages."""
    from kvtier.integrations.vllm.describe import describe_engine

    cache_config = lay_out(config, deepseek_specs(config, cache_dtype), layout)
    (group,) = describe_engine(config, cache_config, ConnectorRole.WORKER).groups
    assert group.block_size == BLOCK
    assert group.bytes_per_block == LAYERS * BLOCK * (token_bytes + INDEXER_BYTES)
    assert len(group.layer_names) == 2 * LAYERS
    move_and_compare(config, cache_config, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_indexer_that_pools_tokens(config: Any, layout: str) -> None:
    """The page of GLM's indexer holds a key for every four tokens."""
    from kvtier.integrations.vllm.describe import describe_engine

    cache_config = lay_out(config, deepseek_specs(config, "auto", kpool=4), layout)
    (group,) = describe_engine(config, cache_config, ConnectorRole.WORKER).groups
    assert group.bytes_per_block == LAYERS * (BLOCK * 2 * 576 + BLOCK // 4 * INDEXER_BYTES)
    move_and_compare(config, cache_config, layout)


def test_rings_of_single_requests_are_left_out(config: Any) -> None:
    from kvtier.integrations.vllm.describe import describe_engine, kept_group_ids

    specs = deepseek_specs(config, "auto")
    rings = {f"model.layers.{layer}.self_attn.indexer.tail": ring_spec() for layer in range(LAYERS)}
    cache_config = lay_out(config, specs | rings, "BLNHC")
    assert len(cache_config.kv_cache_groups) > len(kept_group_ids(cache_config)) > 0
    groups = describe_engine(config, cache_config, ConnectorRole.WORKER).groups
    assert {name for group in groups for name in group.layer_names} == set(specs)
    assert sum(group.bytes_per_block for group in groups) == LAYERS * BLOCK * (2 * 576 + INDEXER_BYTES)
    move_and_compare(config, cache_config, "BLNHC")


def deepseek_v4_specs() -> dict[str, Any]:
    """Return the specs of DeepSeek V4's layers with its sizes: compressed latents, windows of latents, and
    windows of what is not compressed yet. Their pages are padded.
    """
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    latents = {"num_kv_heads": 1, "max_tp_shards": 1, "head_size": 512, "dtype": torch.uint8}
    latents |= {"cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 584, "alignment": 576}
    states = {"num_kv_heads": 1, "max_tp_shards": 1, "dtype": torch.float32, "alignment": 576}
    specs: dict[str, Any] = {}
    for layer, rate in enumerate((4, 128, 4)):
        name = f"model.layers.{layer}.attn"
        specs[name] = MLAAttentionSpec(
            block_size=256, tokens_per_state=rate, model_version="deepseek_v4", **latents
        )
        specs[f"{name}.swa"] = SlidingWindowMLASpec(
            block_size=64, sliding_window=128, model_version="deepseek_v4", **latents
        )
        size, window, width = (4, 8, 2048) if rate == 4 else (8, 128, 1024)
        specs[f"{name}.compressor"] = SlidingWindowMLASpec(
            block_size=size, sliding_window=window, head_size=width, **states
        )
    return specs


@pytest.mark.parametrize("layout", ["BLNHC", "BLHNC"])
def test_windows_of_latents(config: Any, layout: str) -> None:
    from kvtier.integrations.vllm.describe import describe_engine

    config.cache_config.num_gpu_blocks_override = 400  # one of 4 tokens takes as much as one of 256
    cache_config = lay_out(config, deepseek_v4_specs(), layout)
    groups = describe_engine(config, cache_config, ConnectorRole.WORKER).groups
    assert {group.sliding_window for group in groups} == {None, 8, 128}
    assert sum(group.bytes_per_block for group in groups) == (
        (2 * 64 + 2) * 584 + 3 * 64 * 584 + 2 * 4 * 2048 * 4 + 8 * 1024 * 4
    ), "without padding"
    move_and_compare(config, cache_config, layout)


def test_a_kind_that_is_refused_is_named_in_one_line(config: Any) -> None:
    import torch
    from vllm.v1.kv_cache_interface import SinkFullAttentionSpec

    from kvtier.integrations.vllm.describe import describe_engine

    spec = SinkFullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, sink_len=64
    )
    specs = {f"model.layers.{layer}.attn": spec for layer in range(LAYERS)}
    cache_config = lay_out(config, specs, "BLNHC")
    with pytest.raises(
        InputError, match=r"got SinkFullAttentionSpec of layer model\.layers\.0\.attn"
    ) as caught:
        describe_engine(config, cache_config)
    assert "\n" not in str(caught.value)
