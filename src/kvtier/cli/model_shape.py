"""The bytes of KV that a model keeps, from the `config.json` of Hugging Face.

A layer keeps keys and values of every token, or with MLA one compressed vector. A recurrent layer keeps one
state that stands for all tokens up to a boundary, so its bytes do not grow with the tokens and are counted
apart. Tensor parallelism divides the KV heads among the ranks; a rank keeps at least one head, and with MLA
every rank keeps everything.

A config that does not say what is needed is an error, which names the field and the option to give instead.
There is no state; any thread may call this.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ModelError, show_value

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""The bytes of a value, by the names that engines have for the dtypes of caches."""

OPTIONS = {
    "num_hidden_layers": "--layers",
    "num_key_value_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "dtype": "--dtype",
}
"""The options that stand for fields of a config."""

_LONGEST_FILE = 1 << 22
_MOST = 1 << 24
_MOST_LAYERS = 1 << 14
_FULL = {"full_attention", "attention"}
_STATES = {"linear_attention", "mamba", "recurrent", "conv"}
_WITHOUT_KV = {"mlp", "moe"}
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_RECURRENT_GEMMA = {"recurrent": "recurrent", "attention": "sliding_attention"}
_MULTI_HEAD = {"", "baichuan", "codegen", "gpt_neox", "gptj", "internlm", "llama", "opt", "phi", "qwen"}
"""Families in which all heads keep KV if the config has no number of KV heads. Others have a default."""
_OWN_HEAD_DIM = (
    "afmoe|axk|beam|cohere2_moe|cwm|ernie4_5|flint|gemma|glm|gpt_oss|helium|hrm_text|hy_v|internlm3|jetmoe|kimi|"
    "kolibri|laguna|lfm3|llama4|mellum|mimo_v2|minicpm3|minimax_m|ministral3|mistral4|mistral_large4|molmo2|"
    "muse|neomme|paddleocr|qwen2_5_omni_talker|qwen3|qwen4|seed_oss|solar_open|step3|t5_gemma|t5gemma|vaultgemma|"
    "youtu|zamba|zaya"
)
"""Families, by how their names begin, in which an absent `head_dim` does not follow from other fields."""
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_groups")
_HEAD_DIM = ("head_dim", "kv_channels", "hidden_size_per_head")
"""The names that families have for the same thing."""
_NOT_KNOWN = (
    "attention_layers",
    "attention_other_setting",
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "cross_attn_all_layers",
    "cross_layer_interval",
    "indexer_head_dim",
    "is_encoder_decoder",
    "kv_source_layers",
    "layer_group_size",
    "linear_attn_config",
    "mamba_step",
    "multi_query",
    "num_key_value_attention_heads",
    "per_layer_config",
    "swa_head_dim",
    "swa_num_key_value_heads",
    "use_cla",
)
"""Fields that make the layers' KV other than this module computes it."""


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Layers of one kind. The bytes are those of one token in all these layers."""

    kind: str
    layers: int
    bytes_per_rank: int
    bytes_per_token: int
    """What all ranks keep together; the same bytes on several ranks (MLA) count once."""
    window: int | None = None
    """A load brings no more than so many tokens of these layers."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The KV of a model."""

    sets: tuple[LayerSet, ...]
    is_replicated: bool
    """Whether all ranks keep the same bytes."""
    state_layers: int = 0
    state_bytes: int | None = None
    """The bytes of all recurrent layers' states at one boundary; `None` if the config does not say them."""

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token over all ranks."""
        return sum(layers.bytes_per_token for layers in self.sets)

    @property
    def bytes_per_rank(self) -> int:
        """The bytes of one token on one rank."""
        return sum(layers.bytes_per_rank for layers in self.sets)

    def load_bytes(self, tokens: int, *, per_rank: bool) -> int:
        """Return what a load of a prompt brings: all its tokens, or those in a layer's window."""
        total = 0
        for layers in self.sets:
            size = layers.bytes_per_rank if per_rank else layers.bytes_per_token
            total += size * min(tokens, layers.window or tokens)
        return total


def read_config(path: Path) -> dict[str, Any]:
    """Read the config of a model: a folder with `config.json`, or the file itself."""
    file = path / "config.json" if path.is_dir() else path
    if file.exists() and not file.is_file():
        raise ModelError(f"{file}: expected a file, got a folder, a pipe or a device")
    try:
        with open(file, "rb") as stream:
            text = stream.read(_LONGEST_FILE + 1)
        if len(text) > _LONGEST_FILE:
            raise ModelError(f"{file}: expected a config of at most {_LONGEST_FILE >> 20} MiB, got more")
        fields = json.loads(text)
    except OSError as error:
        fetch = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and isinstance(error, FileNotFoundError):
            fetch = f"; to fetch one: hf download {path} config.json --local-dir FOLDER"
        raise ModelError(
            f"{file}: expected a folder with a model's config.json, or that file: {error.strerror}{fetch}"
        ) from None
    except (ValueError, RecursionError):
        raise ModelError(f"{file}: expected JSON, got something else") from None
    if not isinstance(fields, dict):
        raise ModelError(f"{file}: expected a JSON object, got {show_value(fields)}")
    return fields


def read_shape(
    config: Mapping[str, Any],
    *,
    given: Mapping[str, Any] | None = None,
    cache_dtype: str | None = None,
    tensor_parallel: int = 1,
) -> ModelShape:
    """Return the KV of a model.

    `given` has fields that replace the config's, under the names in `OPTIONS`.
    `cache_dtype` is the dtype of the cache, if it is not the model's. Raises `ModelError` with the field
    that is missing or not understood.
    """
    fields = dict(config)
    if isinstance(text := config.get("text_config"), Mapping):  # a model of text and images
        fields = {**config, **text}
        if "dtype" not in text and "torch_dtype" in text:
            fields["dtype"] = text["torch_dtype"]
    fields |= given or {}
    for name in _NOT_KNOWN:
        if fields.get(name):
            raise ModelError(
                f"{name}: the layers of such a model keep KV of sizes that this command does not know;"
                f" leave out MODEL and give {', '.join(OPTIONS.values())}"
            )
    _check_heads_of_layers(fields)
    dtype = _dtype_of(fields)
    kinds = _layer_kinds(fields)
    states = sum(kind in _STATES for kind in kinds)
    kinds = kinds[: len(kinds) - _count(fields, "num_kv_shared_layers", 0)]
    counts = Counter(kind for kind in kinds if kind not in _STATES | _WITHOUT_KV)
    if not counts:
        raise ModelError("layer_types: expected at least one layer with attention, got none")
    itemsize = DTYPES[dtype if cache_dtype is None else cache_dtype]
    if _count(fields, "kv_lora_rank", 0):
        sets = _mla_sets(fields, counts, itemsize)
        return ModelShape(sets, tensor_parallel > 1, states, _state_bytes(fields, kinds, dtype))
    sets = tuple(
        _attention_set(fields, kind, layers, itemsize, tensor_parallel) for kind, layers in counts.items()
    )
    if _family(fields) == "falcon_h1":  # each layer has attention and a state
        kinds, states = ["mamba"] * len(kinds), len(kinds)
    return ModelShape(sets, False, states, _state_bytes(fields, kinds, dtype))


# -- attention -------------------------------------------------------------------------------------


def _attention_set(
    fields: Mapping[str, Any], kind: str, layers: int, itemsize: int, tensor_parallel: int
) -> LayerSet:
    heads, dim = _heads(fields)
    if kind in _FULL:  # Gemma 4 has other heads in these layers
        dim = _count(fields, "global_head_dim", dim)
        if fields.get("attention_k_eq_v"):
            heads = _count(fields, "num_global_key_value_heads", heads)
    if heads % tensor_parallel and tensor_parallel % heads:
        raise ModelError(
            f"--tensor-parallel: expected a divisor or a multiple of the {heads} KV heads,"
            f" got {tensor_parallel}"
        )
    per_rank = 2 * max(1, heads // tensor_parallel) * dim * itemsize * layers
    name = "full attention" if kind in _FULL else kind.replace("_", " ")
    window = None
    if kind in _WINDOWS:
        named = "attention_window_size" if "block_types" in fields else _WINDOWS[kind]
        window = _count(fields, named)
    return LayerSet(name, layers, per_rank, per_rank * tensor_parallel, window)


def _heads(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of KV heads and their size."""
    family, heads, dim = _family(fields), None, None
    kv_heads = next((name for name in _KV_HEADS if fields.get(name) is not None), "num_key_value_heads")
    head_dim = next((name for name in _HEAD_DIM if fields.get(name) is not None), "head_dim")
    if fields.get(kv_heads) is None and fields.get("multi_query_attention"):  # ChatGLM
        kv_heads = "multi_query_group_num"
    if "num_attention_heads" in fields:
        query_heads = _count(fields, "num_attention_heads")
        heads = query_heads if family in _MULTI_HEAD or "num_key_value_heads" in fields else None
        if fields.get("multi_query_attention") is False:
            heads = query_heads
        if "hidden_size" in fields and not family.startswith(tuple(_OWN_HEAD_DIM.split("|"))):
            dim, rest = divmod(_count(fields, "hidden_size"), query_heads)
            if rest and fields.get(head_dim) is None:
                raise ModelError(
                    f"hidden_size: expected a multiple of the {query_heads} heads, got"
                    f" {fields['hidden_size']}; give --head-dim"
                )
    return _count(fields, kv_heads, heads), _count(fields, head_dim, dim)


def _family(fields: Mapping[str, Any]) -> str:
    """Return the `model_type`."""
    family = fields.get("model_type")
    return family if isinstance(family, str) else ""


def _check_heads_of_layers(fields: dict[str, Any]) -> None:
    """Take a number of KV heads that is given for each layer, if it is the same for all."""
    heads = fields.get("num_key_value_heads_per_layer")
    if heads is None or fields.get("num_key_value_heads") is not None:
        return
    if not isinstance(heads, list) or not heads or any(one != heads[0] for one in heads):
        raise ModelError(
            "num_key_value_heads_per_layer: expected the same number for all layers, because engines differ"
            f" in what they keep otherwise, got {show_value(heads)}; give --kv-heads"
        )
    fields["num_key_value_heads"] = heads[0]


def _mla_sets(fields: Mapping[str, Any], counts: Counter[str], itemsize: int) -> tuple[LayerSet, ...]:
    layers = counts.total()
    size = (_count(fields, "kv_lora_rank") + _count(fields, "qk_rope_head_dim")) * itemsize
    sets = [LayerSet("MLA", layers, size * layers, size * layers)]
    if index_dim := _count(fields, "index_head_dim", 0):  # 8-bit values, and a scale for each 128
        size = index_dim + index_dim // 128 * 4
        sets.append(LayerSet("indexer of MLA", layers, size * layers, size * layers))
    return tuple(sets)


def _layer_kinds(fields: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, in the words of `layer_types`."""
    if isinstance(pattern := fields.get("hybrid_override_pattern"), str):
        kinds = [_PATTERN.get(letter, letter) for letter in pattern]
        return _known("hybrid_override_pattern", kinds, len(kinds))
    layers = _count(fields, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ModelError(f"num_hidden_layers: expected at most {_MOST_LAYERS:,}, got {layers:,}")
    for name in ("layer_types", "layers_block_type"):
        if fields.get(name) is not None:
            return _known(name, fields[name], layers)
    for name, other in (("attn_layer_indices", "mamba"), ("full_attn_idxs", "conv")):
        if (indices := fields.get(name)) is not None:
            if not isinstance(indices, list) or not all(
                type(at) is int and 0 <= at < layers for at in indices
            ):
                raise ModelError(
                    f"{name}: expected numbers of layers, below {layers}, got {show_value(indices)}"
                )
            chosen = set(indices)
            return ["attention" if at in chosen else other for at in range(layers)]
    if (types := fields.get("attn_type_list")) is not None:  # MiniMax
        if not isinstance(types, list) or not all(type(one) is int and one in (0, 1) for one in types):
            raise ModelError(f"attn_type_list: expected 0 or 1 for each layer, got {show_value(types)}")
        return _known("attn_type_list", [("linear_attention", "attention")[one] for one in types], layers)
    if (blocks := fields.get("block_types")) is not None:  # RecurrentGemma
        if (
            not isinstance(blocks, list)
            or not blocks
            or any(one not in [*_RECURRENT_GEMMA] for one in blocks)
        ):
            expected = ", ".join(_RECURRENT_GEMMA)
            raise ModelError(f"block_types: expected a list of {expected}, got {show_value(blocks)}")
        return [_RECURRENT_GEMMA[blocks[at % len(blocks)]] for at in range(layers)]
    if period := _count(fields, "attn_layer_period", 0):
        offset = _count(fields, "attn_layer_offset", 0)
        return ["attention" if at % period == offset else "mamba" for at in range(layers)]
    if interval := _count(fields, "full_attention_interval", 0):
        return [("linear_attention", "attention")[(at + 1) % interval == 0] for at in range(layers)]
    if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
        return ["attention"] * layers
    default = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6}.get(_family(fields), 0)
    if period := _count(fields, "sliding_window_pattern", default):
        return [("sliding_attention", "attention")[(at + 1) % period == 0] for at in range(layers)]
    first = _count(fields, "max_window_layers", 0) if fields.get("use_sliding_window") else 0
    return ["attention" if at < first else "sliding_attention" for at in range(layers)]


def _known(name: str, kinds: object, layers: int) -> list[str]:
    """Check the kinds that a config gives."""
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelError(f"{name}: expected a list of one per layer ({layers}), got {show_value(kinds)}")
    known = _FULL | _STATES | _WITHOUT_KV | {*_WINDOWS}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise ModelError(
                f"{name}: expected {', '.join(sorted(known))}, got {show_value(kind)};"
                f" leave out MODEL and give {', '.join(OPTIONS.values())} of the layers with attention"
            )
    return [*kinds]


# -- states ----------------------------------------------------------------------------------------


def _state_bytes(fields: Mapping[str, Any], kinds: list[str], dtype: str) -> int | None:
    """Return the bytes of the states at one boundary, over all ranks; `None` if they are not known."""
    ssm_dtype = fields.get("mamba_ssm_dtype")
    ssm_size = DTYPES[ssm_dtype if isinstance(ssm_dtype, str) and ssm_dtype in DTYPES else dtype]
    total = 0
    for kind, layers in Counter(kind for kind in kinds if kind in _STATES).items():
        size = _state_size(fields, kind, DTYPES[dtype], ssm_size)
        if size is None:
            return None
        total += layers * size
    return total


def _state_size(fields: Mapping[str, Any], kind: str, itemsize: int, ssm_size: int) -> int | None:
    """Return the bytes of one layer's state: the last inputs of its convolution, and what it remembers."""

    def first(*names: str) -> int:
        return next((_count(fields, name, 0) for name in names if fields.get(name)), 0)

    if _family(fields) == "gated_linear":  # of the reference engine, always float64
        heads, dim = _heads(fields)
        return heads * dim * dim * 8
    state, kernel = first("mamba_d_state", "ssm_state_size"), first("mamba_d_conv", "conv_kernel")
    if kind == "linear_attention":
        keys = first("linear_num_key_heads") * first("linear_key_head_dim")
        values = first("linear_num_value_heads") * first("linear_value_head_dim")
        kernel, remembers = first("linear_conv_kernel_dim"), values * first("linear_key_head_dim")
        inputs = 2 * keys + values if keys else 0
    elif kind == "mamba" and (heads := first("mamba_n_heads", "mamba_num_heads")):
        inner = heads * first("mamba_d_head", "mamba_head_dim")
        remembers, inputs = inner * state, inner + 2 * first("mamba_n_groups", "n_groups") * state
    elif kind == "mamba":
        inputs = first("mamba_expand") * first("hidden_size")
        remembers = inputs * state
    else:
        return None
    return (
        (kernel - 1) * inputs * itemsize + remembers * ssm_size if kernel and inputs and remembers else None
    )


# -- fields ----------------------------------------------------------------------------------------


def _count(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a field that is a positive whole number, or `default` if it is null or absent."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if type(value) is int and (0 < value <= _MOST or value == default):
        return value
    instead = f"; give {OPTIONS[name]}" if name in OPTIONS else ""
    got = "nothing" if value is None else show_value(value)
    raise ModelError(f"{name}: expected a positive whole number, got {got}{instead}")


def _dtype_of(fields: Mapping[str, Any]) -> str:
    value = fields.get("dtype") or fields.get("torch_dtype")
    if isinstance(value, str) and DTYPES.get(value, 0) > 1:
        return value
    expected = ", ".join(name for name, size in DTYPES.items() if size > 1)
    got = "nothing" if value is None else show_value(value)
    raise ModelError(f"dtype: expected {expected}, got {got}; give --dtype")
