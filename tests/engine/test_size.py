"""`kvtier size` says what the reference engine keeps."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.cli.model_shape import read_shape
from kvtier.config import KVTierConfig
from kvtier.engine.assembly import describe_cache
from kvtier.engine.cache import group_layers
from kvtier.engine.config import EngineConfig, ModelConfig

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 32},
    "ministral": {
        "model_type": "ministral",
        "sliding_window": 32,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
    },
    "gated_linear": {
        "model_type": "gated_linear",
        "layer_types": ["linear_attention", "full_attention"] * 3,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_as_the_engine_describes_its_cache(name: str) -> None:
    fields = SMALL | MODELS[name]
    model = ModelConfig.from_dict(fields)
    described = describe_cache(
        model,
        EngineConfig(num_blocks=8, block_size=16, dtype="bfloat16"),
        group_layers(model.layer_names, model.layer_kinds),
        KVTierConfig.from_dict({"cpu": {"capacity": "1MiB"}}),
        weights_id=None,
    )
    shape = read_shape(fields)
    tokens = sum(group.bytes_per_block for group in described.groups if not group.is_state)
    assert 16 * shape.bytes_per_token == tokens
    assert shape.state_bytes == sum(group.bytes_per_block for group in described.groups if group.is_state)
    assert {layers.window for layers in shape.sets} == {
        group.sliding_window for group in described.groups if not group.is_state
    }
