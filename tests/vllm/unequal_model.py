"""A Llama whose layers differ in KV heads and windows, so that vLLM gives its groups blocks of other sizes.

vLLM wants pages of one size: a layer with a half or a third of the KV heads gets blocks of twice or three
times as many tokens. Importing this module imports vLLM.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

__all__ = ["register"]


class UnequalLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """A layer with KV heads and a window of its own."""

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        whole = vllm_config.model_config.hf_config
        config, layer = copy(whole), extract_layer_index(prefix)
        config.num_key_value_heads = whole.kv_heads_by_layer[layer]
        config.sliding_window = whole.windows_by_layer[layer]
        super().__init__(vllm_config, prefix, config)


class UnequalLlama(LlamaForCausalLM):  # type: ignore[misc]
    """The model, as vLLM makes it."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=UnequalLayer)


def register() -> None:
    """Tell vLLM of the model."""
    ModelRegistry.register_model("UnequalLlama", UnequalLlama)
