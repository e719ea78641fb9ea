"""Tiny models made on the fly: random weights in float32, so that a wrong byte of KV shows in the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 512
WINDOW = 65
"""One more than two blocks: a token then needs a block that is out of sight for the next."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def save_llama(folder: Path) -> Path:
    """Save a Llama of three layers with full attention: one KV cache group."""
    return _save(folder, num_hidden_layers=3)


def save_hybrid(folder: Path, pairs: int = 2) -> Path:
    """Save a Llama whose layers attend in turn to everything and to a window: two KV cache groups."""
    kinds = ["full_attention", "sliding_attention"] * pairs
    return _save(folder, num_hidden_layers=2 * pairs, layer_types=kinds, sliding_window=WINDOW)


def save_mla_config(folder: Path) -> Path:
    """Save the config, and no weights, of a small DeepSeek with MLA."""
    from transformers import DeepseekV2Config

    shape = {"num_hidden_layers": 3, "num_key_value_heads": 4, "first_k_dense_replace": 3}
    heads = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    mla = shape | heads | {"v_head_dim": 128, "architectures": ["DeepseekV2ForCausalLM"]}
    DeepseekV2Config(**(_SHAPE | mla)).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, seed: int) -> Path:
    """Save a LoRA adapter for the keys and values of `save_llama`'s model."""
    import torch
    from safetensors.torch import save_file

    generator, rank, size = torch.Generator().manual_seed(seed), 4, _SHAPE["hidden_size"]
    weights = {}
    for layer in range(3):
        for module in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, size, generator=generator)
            weights[f"{name}.lora_B.weight"] = torch.randn(64, rank, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _save(folder: Path, **config: Any) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**_SHAPE, **config)).to(torch.float32).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose words are numbers: all that the tests write."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "</s>": 1} | {str(number): number + 2 for number in range(VOCAB - 2)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(
        folder
    )
