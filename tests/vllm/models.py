"""Tiny models made on the fly: random weights in float32, so that a wrong byte of KV shows in the tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


_NORMS = ("input", "post_attention")


def save_llama(folder: Path) -> Path:
    """Save a Llama of three layers with full attention: one KV cache group."""
    return _save(folder, num_hidden_layers=3)


def save_hybrid(folder: Path, pairs: int = 2) -> Path:
    """Save a Llama whose layers attend in turn to everything and to a window: two KV cache groups."""
    kinds = ["full_attention", "sliding_attention"] * pairs
    return _save(folder, num_hidden_layers=2 * pairs, layer_types=kinds, sliding_window=WINDOW)


def save_unequal(folder: Path, kv_heads: Sequence[int], windows: Sequence[int | None]) -> Path:
    """Save a Llama whose layers have these KV heads and windows. vLLM must have been told of it
    (`unequal_model`).
    """
    import torch
    from safetensors.torch import save_file

    shape = _SHAPE | {"hidden_size": 6 * 32, "num_attention_heads": 6, "num_key_value_heads": max(kv_heads)}
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    sizes = {"model.embed_tokens": (VOCAB, hidden), "lm_head": (VOCAB, hidden)}
    for layer, heads in enumerate(kv_heads):
        for name, rows, columns in [
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", heads * 32, hidden),
            ("self_attn.v_proj", heads * 32, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ]:
            sizes[f"model.layers.{layer}.{name}"] = rows, columns
    generator, std = torch.Generator().manual_seed(0), shape["initializer_range"]
    weights = {
        f"{name}.weight": std * torch.randn(size, generator=generator) for name, size in sizes.items()
    }
    norms = [f"model.layers.{layer}.{kind}_layernorm" for layer in range(len(kv_heads)) for kind in _NORMS]
    weights |= {f"{name}.weight": torch.ones(hidden) for name in [*norms, "model.norm"]}
    save_file(weights, folder / "model.safetensors")
    config = shape | {
        "architectures": ["UnequalLlama"],
        "model_type": "llama",
        "num_hidden_layers": len(kv_heads),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": next(window for window in windows if window),
        "kv_heads_by_layer": list(kv_heads),
        "windows_by_layer": list(windows),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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


def save_eagle(folder: Path, *, windowed: bool = False) -> tuple[Path, Path]:
    """Save a Llama of one layer that counts, and an EAGLE head for it whose drafts are mostly right.

    The head has the weights of that layer and is blind to hidden states, so that it computes what the model
    will with its next token, but for the first token, which it does not get to see. Embeddings have unit
    length, because a head does without the norm before its layer. With `windowed` two layers follow that
    attend to a window and change little.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    target, head = folder / "target", folder / "head"
    kinds = ["full_attention", *["sliding_attention"] * 2] if windowed else ["full_attention"]
    more = {"layer_types": kinds, "sliding_window": WINDOW} if windowed else {}
    model = _random_llama(num_hidden_layers=len(kinds), **more)
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings /= embeddings.square().mean(-1, keepdim=True).sqrt()
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight *= 0.01
            layer.mlp.down_proj.weight *= 0.01
    model.save_pretrained(target)
    _save_tokenizer(target)
    weights = {f"layers.0.{name}": value for name, value in model.model.layers[0].state_dict().items()}
    del weights["layers.0.input_layernorm.weight"]
    size = _SHAPE["hidden_size"]
    weights["fc.weight"] = torch.eye(size, 2 * size)
    head.mkdir()
    save_file(weights, head / "model.safetensors")
    config = LlamaConfig(**_SHAPE, num_hidden_layers=1, architectures=["LlamaForCausalLM"])
    config.save_pretrained(head)
    return target, head


def _save(folder: Path, **config: Any) -> Path:
    _random_llama(**config).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _random_llama(**config: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SHAPE, **config)).to(torch.float32)


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
