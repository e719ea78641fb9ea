"""The shapes of the models that benchmarks on a GPU run with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.config import ROW_ALIGNMENT
from kvtier.packing import block_format

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}

HYBRID_8B: dict[str, Any] = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    # vLLM's class wants a layer with experts: the last, whose shared expert is as wide as the other MLPs.
    "mlp_only_layers": list(range(31)),
    "decoder_sparse_step": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 12288,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
}
"""24 gated delta nets and 8 layers of attention, like Qwen3-Next and Qwen3.5, almost without experts."""


def packed_row_bytes(size: int) -> int:
    """Return the bytes of a row whose KV of 16 tokens has `size` bytes as it is."""
    form = block_format(size, 16)
    assert form is not None
    return -(-form.bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


def attention_layers(shape: Mapping[str, Any]) -> int:
    """Return how many layers have KV of every token."""
    kinds = shape.get("layer_types", ["full_attention"] * shape["num_hidden_layers"])
    return sum(kind == "full_attention" for kind in kinds)


def cached_bytes(shape: Mapping[str, Any], tokens: int) -> int:
    """Return the bytes of a prefix: the KV of its tokens, and the states after the last of them."""
    width = 2 if shape["torch_dtype"] == "bfloat16" else 4
    attention = attention_layers(shape)
    kv_values = 2 * shape["num_key_value_heads"] * shape["head_dim"] * tokens * attention
    return int(width * (kv_values + (shape["num_hidden_layers"] - attention) * _state_values(shape)))


def _state_values(shape: Mapping[str, Any]) -> int:
    """Return the values of a gated delta net's two states, that of its heads and that of its convolution."""
    if "linear_num_value_heads" not in shape:
        return 0
    keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
    values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
    convolution = (2 * keys + values) * (shape["linear_conv_kernel_dim"] - 1)
    return int(values * shape["linear_key_head_dim"] + convolution)
