"""Tiny models made on the fly: random weights in float32, so that a wrong byte of KV shows in the tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


def save_hybrid(folder: Path, pairs: int = 2, window: int = WINDOW) -> Path:
    """Save a Llama whose layers attend in turn to everything and to a window: two KV cache groups."""
    kinds = ["full_attention", "sliding_attention"] * pairs
    return _save(folder, num_hidden_layers=2 * pairs, layer_types=kinds, sliding_window=window)


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


def save_granite(folder: Path) -> Path:
    """Save a Granite 4 of three Mamba 2 layers and one of attention: four KV cache groups."""
    import torch
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    shape = _SHAPE | {"shared_intermediate_size": 256, "num_hidden_layers": 4}
    config = GraniteMoeHybridConfig(
        **shape,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_chunk_size=64,
    )
    torch.manual_seed(0)
    model = GraniteMoeHybridForCausalLM(config).to(torch.float32)
    _remember_long(model)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def save_qwen3_next(folder: Path, repeats: int = 1) -> Path:
    """Save a Qwen3-Next of three gated delta nets and one layer of attention, in bfloat16.

    With `repeats` each of its four groups has more layers. The heads of its linear layers have the least
    size that vLLM's CPU kernels take.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **(_SHAPE | {"head_dim": 64, "num_hidden_layers": 4 * repeats, "max_position_embeddings": 8192}),
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * repeats,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(config).to(torch.bfloat16)
    _remember_long(model)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def save_family(folder: Path, kind: str, dtype: str = "float32", **config: Any) -> Path:
    """Save a small model of the family that transformers calls `kind`. A setting that is `None` is left to
    transformers.

    Its attention, states and windows all matter: embeddings are small, or they would decide alone, and so is
    what other parts of a layer add.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # Else some lie beyond the vocabulary.
    tokens = {f"{name}_token_id": None for name in ("pad", "bos", "eos")}
    shape = {name: value for name, value in (_SHAPE | config).items() if value is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **tokens))
    model = model.to(getattr(torch, dtype))
    _remember_long(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed" in name:
                weight *= 0.03
            elif name.endswith("down_proj.weight"):
                weight *= 0.1
    model.save_pretrained(folder)
    return folder


def _remember_long(model: Any) -> None:
    """Have states keep tokens for about a thousand others: by chance they forget most within ten."""
    import math

    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(math.log(0.001))


def save_llama4(folder: Path, attention_chunk: int = 128) -> Path:
    """Save the text part of a Llama 4 without experts: three layers of chunked-local attention, and one of
    full attention.
    """
    import torch
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **(_SHAPE | {"num_hidden_layers": 4, "intermediate_size_mlp": 256}),
        attention_chunk_size=attention_chunk,
        moe_layers=[],
        interleave_moe_layer_step=0,
        num_local_experts=1,
        attn_temperature_tuning=False,
    )
    torch.manual_seed(0)
    model = Llama4ForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def save_mla_config(folder: Path) -> Path:
    """Save the config, and no weights, of a small DeepSeek with MLA."""
    _mla_config().save_pretrained(folder)
    return folder


def save_mla(folder: Path) -> Path:
    """Save a small DeepSeek with MLA and without experts."""
    import torch
    from transformers import DeepseekV2ForCausalLM

    torch.manual_seed(0)
    DeepseekV2ForCausalLM(_mla_config()).to(torch.float32).save_pretrained(folder)
    return folder


def _mla_config() -> Any:
    from transformers import DeepseekV2Config

    shape = {"num_hidden_layers": 3, "num_key_value_heads": 4, "first_k_dense_replace": 3}
    heads = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    mla = shape | heads | {"v_head_dim": 128, "architectures": ["DeepseekV2ForCausalLM"]}
    return DeepseekV2Config(**(_SHAPE | mla))


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


def save_blip2(folder: Path) -> Path:
    """Save a BLIP-2: a Llama that sees images of 28 by 28 pixels as 32 tokens before the prompt.

    (The LLaVAs of vLLM need torchvision.)
    """
    import torch
    from transformers import Blip2Config, Blip2ForConditionalGeneration, LlamaConfig

    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    std = {"initializer_range": 0.3}
    config = Blip2Config(
        vision_config=tower | std | {"image_size": 28, "patch_size": 14},
        qformer_config=tower | std | {"encoder_hidden_size": 64, "vocab_size": 8},
        text_config=LlamaConfig(**_SHAPE, num_hidden_layers=3).to_dict(),
        num_query_tokens=32,
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config)
    torch.nn.init.normal_(model.query_tokens)
    model.to(torch.float32).save_pretrained(folder)
    _save_tokenizer(folder, last="<image>")
    images = {
        "image_processor_type": "BlipImageProcessor",
        "size": {"height": 28, "width": 28},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": 32}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def save_trained(folder: Path, model: Path) -> Path:
    """Save a model with one value of a hundred changed, as a step of training changes it."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in weights.values():
        tensor += (torch.rand(tensor.shape, generator=generator) < 0.01) * 0.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


class Drafting(NamedTuple):
    """A model, and how vLLM is told to draft for it."""

    target: Path
    config: dict[str, Any]


def save_eagle(folder: Path, *, windowed: bool = False) -> Drafting:
    """Save a Llama of one layer that counts, and an EAGLE head for it whose drafts are mostly right.

    The head has the weights of that layer and is blind to hidden states, so that it computes what the model
    will with its next token, but for the first token, which it does not get to see. Embeddings have unit
    length, because a head does without the norm before its layer. With `windowed` two layers follow that
    attend to a window and change little.
    """
    import torch

    kinds = ["full_attention", *["sliding_attention"] * 2] if windowed else ["full_attention"]
    more = {"layer_types": kinds, "sliding_window": WINDOW} if windowed else {}
    model = _random_llama(num_hidden_layers=len(kinds), **more)
    _let_first_layer_count(model)
    head = {f"layers.0.{name}": value for name, value in model.model.layers[0].state_dict().items()}
    del head["layers.0.input_layernorm.weight"]
    size = _SHAPE["hidden_size"]
    return _save_with_head(folder, model, "eagle", head | {"fc.weight": torch.eye(size, 2 * size)})


def save_eagle3(folder: Path) -> Drafting:
    """Save a Llama of one layer that counts and two that change little, and an EAGLE 3 head for it.

    The head sees little of the hidden states of all three layers: their norm makes them small. It does not
    add the token to what its layer gives, so the embeddings of the model are small too, which are normed
    before its first layer.
    """
    import torch

    model = _random_llama(num_hidden_layers=3)
    _let_first_layer_count(model, embedding_length=_LITTLE)
    head = {f"midlayer.{name}": value for name, value in model.model.layers[0].state_dict().items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = head[f"midlayer.self_attn.{name}.weight"]
        head[f"midlayer.self_attn.{name}.weight"] = torch.cat([weight, weight.flip(1)], 1)
    size = _SHAPE["hidden_size"]
    head["midlayer.hidden_norm.weight"] = torch.full((size,), _LITTLE)
    head["norm.weight"] = torch.ones(size)
    head["fc.weight"] = torch.eye(size).repeat(1, 3)
    return _save_with_head(folder, model, "eagle3", head, norm_before_residual=True)


def save_mtp(folder: Path) -> Drafting:
    """Save a MiMo of one layer, which is a Qwen 2 with an MTP module that vLLM runs without experts.

    The module is the layer once more, and sees little of hidden states.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**_SHAPE, num_hidden_layers=1)).to(torch.float32)
    _let_first_layer_count(model)
    weights, module, size = model.state_dict(), "model.mtp_layers.0", _SHAPE["hidden_size"]
    weights |= {f"{module}.{name}": value for name, value in model.model.layers[0].state_dict().items()}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    weights |= {f"{module}.{norm}.weight": torch.ones(size) for norm in norms}
    weights[f"{module}.input_proj.weight"] = torch.cat([_LITTLE * torch.eye(size), torch.eye(size)], 1)
    save_file({name: value.clone() for name, value in weights.items()}, folder / "model.safetensors")
    model.config.architectures, model.config.num_nextn_predict_layers = ["MiMoForCausalLM"], 1
    model.config.save_pretrained(folder)
    _save_tokenizer(folder)
    return Drafting(folder, {"method": "mtp"})


_LITTLE = 0.01


def save_qwen3_next_mtp(folder: Path) -> Drafting:
    """Save a Qwen3-Next whose last layer, the one of attention, counts most, and an MTP module for it.

    The module is that layer once more and sees little of hidden states. Four of ten drafts are right, and a
    lost state changes a fifth of all tokens (computed with transformers in float32).
    """
    import torch
    from safetensors.torch import load_file, save_file

    file = save_qwen3_next(folder) / "model.safetensors"
    weights, size, last = load_file(file), _SHAPE["hidden_size"], "model.layers.3."
    embeddings = weights["model.embed_tokens.weight"].float()
    embeddings /= embeddings.square().mean(-1, keepdim=True).sqrt()
    weights["model.embed_tokens.weight"] = embeddings.bfloat16()
    for name, weight in weights.items():
        if name.startswith("model.layers.") and not name.startswith(last):
            weight *= 0.006 if "out_proj" in name else 0.0005 if "down_proj" in name else 1
    weights |= {
        name.replace(last, "mtp.layers.0."): weight.clone()
        for name, weight in weights.items()
        if name.startswith(last)
    }
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{norm}.weight"] = torch.zeros(size, dtype=torch.bfloat16)  # they add one to it
    fc = torch.cat([torch.eye(size), _LITTLE * torch.eye(size)], 1)
    weights["mtp.fc.weight"] = fc.bfloat16()
    save_file(weights, file, {"format": "pt"})
    return Drafting(folder, {"method": "mtp"})


def save_kimi_linear_config(folder: Path) -> Path:
    """Save the config, and no weights, of a Kimi Linear without experts: three layers of delta attention
    (KDA), one of MLA.
    """
    linear = {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "head_dim": 128, "num_heads": 2}
    config = _MLA | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "mla_use_nope": True,
        "linear_attn_config": linear | {"short_conv_kernel_size": 4},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_deepseek_v32_config(folder: Path) -> Path:
    """Save the config, and no weights, of a DeepSeek V3.2 without experts: MLA that attends to 512 tokens,
    which an indexer chooses.
    """
    config = _MLA | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "q_lora_rank": 128,
        "index_topk": 512,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_MLA: dict[str, Any] = {name: value for name, value in _SHAPE.items() if name != "head_dim"} | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def _let_first_layer_count(model: Any, embedding_length: float = 1.0) -> None:
    """Have all layers but the first change little, and give embeddings a length."""
    import torch

    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings *= embedding_length / embeddings.square().mean(-1, keepdim=True).sqrt()
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight *= _LITTLE
            layer.mlp.down_proj.weight *= _LITTLE


def _save_with_head(folder: Path, model: Any, method: str, head: dict[str, Any], **config: Any) -> Drafting:
    """Save a model and a head of one layer, each in a folder of its own."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    model.save_pretrained(folder / "target")
    _save_tokenizer(folder / "target")
    (folder / "head").mkdir()
    save_file(head, folder / "head" / "model.safetensors")
    shape = LlamaConfig(**_SHAPE, num_hidden_layers=1, architectures=["LlamaForCausalLM"], **config)
    shape.save_pretrained(folder / "head")
    return Drafting(folder / "target", {"method": method, "model": str(folder / "head")})


def _save(folder: Path, **config: Any) -> Path:
    _random_llama(**config).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _random_llama(**config: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SHAPE, **config)).to(torch.float32)


def _save_tokenizer(folder: Path, last: str = str(VOCAB - 3)) -> None:
    """Save a tokenizer whose words are numbers, but perhaps for the last: all that the tests write."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", *map(str, range(VOCAB - 3)), last]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(
        folder
    )
