"""`kvtier size` says what vLLM's own specs say."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvtier.cli.model_shape import read_shape

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "dtype": "bfloat16",
}
DEEPSEEK = LLAMA | {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_llama(ranks: int) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8 // ranks, head_size=128, dtype=torch.bfloat16)
    assert 16 * read_shape(LLAMA, tensor_parallel=ranks).bytes_per_rank == 32 * spec.page_size_bytes


def test_mla() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert 16 * read_shape(DEEPSEEK).bytes_per_rank == 61 * spec.page_size_bytes
