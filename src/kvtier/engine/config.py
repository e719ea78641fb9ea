"""The settings of the engine, and the shape of a model. Both are checked once, when they are read.

`EngineConfig` sets the engine's memory and batch, in blocks and tokens; `KVTierConfig` sets where KV goes
beyond them. An error names the bad field.

`ModelConfig.from_dict` reads a Hugging Face `config.json` of Llama, Qwen2, Qwen3, Mistral or Ministral, in
the spelling of transformers 5 (`rope_parameters`) and of older releases (`rope_theta`, `rope_scaling`). It
refuses a setting that it cannot honour, with one line that opens with the name of the field: a model that
loads computes what `transformers` computes. `gated_linear` is a family of our own, which `transformers` does
not have: a Llama whose `linear_attention` layers are recurrent, to run state groups.

Nothing here needs torch; values are frozen, and any thread may read them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar

from kvtier.errors import ConfigError, ModelError, show_value

_DTYPES = ("float32", "float16", "bfloat16")
_COMPUTE_DTYPES = (*_DTYPES, "float64")
_KV_LAYOUTS = ("blocks_first", "kv_first")
_DEVICES = ("cpu", "cuda")
_NUMBER = re.compile("(?<=^cuda):[0-9]{1,3}$")
_MOST_COUNT = (1 << 31) - 1
"""The highest count: block ids and tokens are 32-bit numbers on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's memory, its batch, and how it computes."""

    num_blocks: int
    """The number of blocks in the paged cache. Block 0 is the null block and holds nothing."""
    block_size: int = 16
    """The number of tokens in a block."""
    max_num_seqs: int = 16
    """The most requests that run or load at once."""
    max_num_batched_tokens: int = 512
    """The most tokens in one step. Longer prompts are computed in chunks."""
    max_model_len: int | None = None
    """The most tokens of a request, prompt and output; by default as many as model and cache allow."""
    dtype: str = "float32"
    """The dtype of the weights and of the KV cache."""
    compute_dtype: str | None = None
    """The dtype of activations. With `None` it is `dtype`."""
    device: str = "cpu"
    kv_layout: str = "blocks_first"
    """`blocks_first`: `(num_blocks, 2, …)`; `kv_first`: `(2, num_blocks, …)`."""
    enable_prefix_caching: bool = True
    state_interval: int | None = None
    """Which states of recurrent layers are kept when their request has passed them.

    `None`: the state at the end of every block. A number: the states after every multiple of so many tokens,
    a multiple of `block_size` (0: none), and the last one within the prompt, where the same prompt would
    begin to compute.
    """
    seed: int = 0
    """The seed of sampling, for requests without one."""
    kv_events: bool | None = None
    """Whether to make KV events.

    With `None`, only if the engine has a publisher. With `True` and no publisher, `take_events` returns
    them.
    """

    def __post_init__(self) -> None:
        self._at_least("num_blocks", 3, "the null block and two to use")
        for field in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            self._at_least(field, 1)
        if self.max_model_len is not None:
            self._at_least("max_model_len", 2, "one token of prompt and one of output")
        if self.state_interval is not None:
            self._at_least("state_interval", 0)
            if self.state_interval % self.block_size:
                expected = f"expected None or a multiple of block_size ({self.block_size})"
                raise ConfigError("state_interval", f"{expected}, got {self.state_interval}")
        self._one_of("dtype", self.dtype, _DTYPES)
        self._one_of("compute_dtype", self.compute_dtype, (None, *_COMPUTE_DTYPES))
        self._one_of("kv_layout", self.kv_layout, _KV_LAYOUTS)
        device = _NUMBER.sub("", self.device) if isinstance(self.device, str) else self.device
        self._one_of("device", device, _DEVICES)
        self._one_of("enable_prefix_caching", self.enable_prefix_caching, (True, False))
        self._one_of("kv_events", self.kv_events, (None, True, False))
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**64:
            raise ConfigError("seed", f"expected an int of at most 64 bits, got {show_value(self.seed)}")

    def _at_least(self, field: str, least: int, why: str = "") -> None:
        value = getattr(self, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            reason = f" ({why})" if why else ""
            raise ConfigError(
                field, f"expected a whole number of at least {least}{reason}, got {show_value(value)}"
            )
        if value > _MOST_COUNT:
            raise ConfigError(
                field, f"expected a whole number of at most {_MOST_COUNT}, got {show_value(value)}"
            )

    @staticmethod
    def _one_of(field: str, value: object, choices: tuple[object, ...]) -> None:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ConfigError(
                field, f"expected one of {', '.join(map(repr, choices))}, got {show_value(value)}"
            )


# -- models --------------------------------------------------------------------------------------

FAMILIES = ("gated_linear", "llama", "ministral", "mistral", "qwen2", "qwen3")
"""The values of `model_type` that the engine runs."""

STATE: Final = "state"
LayerKind: TypeAlias = int | Literal["state"] | None
"""What a layer reads of the tokens before: with `None` the KV of all, with a number the KV of those in a
sliding window of so many tokens, with `STATE` one state that stands for all.
"""

T = TypeVar("T", int, float, bool)

_MOST_NUMBER = 1 << 53
"""The highest number in a config: up to it, floats are exact ints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rotary position embedding. `kind` is `default`, `linear` or `llama3`, and decides which of the
    other fields count.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read the rope of a `config.json`, in any of its three spellings."""
        name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        scaling = config.get(name) or {}
        if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
            raise ModelError(f"{name}: expected one object for all layers, got {show_value(scaling)}")
        rope = {**config, **scaling}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ("default", "linear", "llama3"):
            raise ModelError(f"rope_type: expected default, linear or llama3, got {show_value(kind)}")
        if (part := _read(rope, "partial_rotary_factor", float, 1.0)) != 1.0:
            raise ModelError(f"partial_rotary_factor: expected 1.0, got {part}")
        context = _read(config, "max_position_embeddings", int, 2048)
        return cls(
            theta=_read(rope, "rope_theta", float, 10_000.0),
            kind=kind,
            factor=_read(rope, "factor", float, 1.0 if kind == "default" else None),
            low_freq_factor=_read(rope, "low_freq_factor", float, None if kind == "llama3" else 1.0),
            high_freq_factor=_read(rope, "high_freq_factor", float, None if kind == "llama3" else 4.0),
            original_max_position_embeddings=_read(rope, "original_max_position_embeddings", int, context),
        )

    def frequencies(self, head_dim: int) -> list[float]:
        """Return the angle by which each pair of a head's elements rotates from one position to the next."""
        base = [self.theta ** (-i / head_dim) for i in range(0, head_dim, 2)]
        if self.kind == "llama3":
            return [self._stretch(frequency) for frequency in base]
        return [frequency / self.factor for frequency in base] if self.kind == "linear" else base

    def _stretch(self, frequency: float) -> float:
        """Divide a low frequency by `factor`: less than `low_freq_factor` turns in the original context.

        Up to `high_freq_factor` turns the division fades out.
        """
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = min(max(keep, 0.0), 1.0)
        return frequency * (keep + (1 - keep) / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and settings of a decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_kinds: tuple[LayerKind, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`; raise `ModelError` with the field that the engine cannot
        honour.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ModelError(f"model_type: expected one of {', '.join(FAMILIES)}, got {show_value(family)}")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise ModelError(f"hidden_act: expected 'silu', got {show_value(act)}")
        if config.get("quantization_config") is not None:
            raise ModelError("quantization_config: expected none, quantised checkpoints cannot be run")
        num_layers = _read(config, "num_hidden_layers", int)
        bias = family in ("llama", "qwen3") and _read(config, "attention_bias", bool, False)
        return cls(
            family=family,
            vocab_size=_read(config, "vocab_size", int),
            num_layers=num_layers,
            intermediate_size=_read(config, "intermediate_size", int),
            rms_norm_eps=_read(config, "rms_norm_eps", float, 1e-6),
            rope=RopeConfig.from_dict(config),
            layer_kinds=_layer_kinds(config, family, num_layers),
            max_position_embeddings=_read(config, "max_position_embeddings", int, 2048),
            eos_token_ids=parse_token_ids(config.get("eos_token_id")),
            tie_word_embeddings=_read(config, "tie_word_embeddings", bool, False),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=family == "llama" and _read(config, "mlp_bias", bool, False),
            qk_norm=family == "qwen3",
            **_heads(config),
        )

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The names of the layers, which key the KV caches: `layers.0`, `layers.1`, …"""
        return tuple(f"layers.{i}" for i in range(self.num_layers))


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model in order, by its name in a Hugging Face checkpoint."""
    hidden, mlp, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    linears = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (mlp, hidden, config.mlp_bias),
        "mlp.up_proj": (mlp, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, mlp, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer, kind in zip(config.layer_names, config.layer_kinds, strict=True):
        shapes |= {f"model.{layer}.{name}.weight": (out, into) for name, (out, into, _) in linears.items()}
        if kind == STATE:
            shapes[f"model.{layer}.self_attn.g_proj.weight"] = (kv, hidden)
        shapes |= {f"model.{layer}.{name}.bias": (out,) for name, (out, _, bias) in linears.items() if bias}
        shapes |= {f"model.{layer}.{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (hidden,)
    return shapes if config.tie_word_embeddings else shapes | {"lm_head.weight": (config.vocab_size, hidden)}


def parse_token_ids(value: object) -> tuple[int, ...]:
    """Read an `eos_token_id`, which may be absent, one id or a list."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in ids):
        raise ModelError(f"eos_token_id: expected a token id or a list of them, got {show_value(value)}")
    return tuple(ids)


def _read(config: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Return a field that must be a bool or a positive number.

    If it is null or absent, return `default`; without a default, raise `ModelError`.
    """
    value = config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, (int, float)) and value > _MOST_NUMBER:
        raise ModelError(f"{name}: expected at most {_MOST_NUMBER}, got {show_value(value)}")
    if kind is float and type(value) is int and value > 0:
        value = float(value)
    if type(value) is not kind or (kind is not bool and not value > 0):
        expected = "true or false" if kind is bool else f"a positive {kind.__name__}"
        raise ModelError(
            f"{name}: expected {expected}, got {'nothing' if value is None else show_value(value)}"
        )
    return value


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    hidden = _read(config, "hidden_size", int)
    heads = _read(config, "num_attention_heads", int)
    kv_heads = _read(config, "num_key_value_heads", int, heads)
    head_dim = _read(config, "head_dim", int, max(1, hidden // heads))
    if heads % kv_heads:
        raise ModelError(
            f"num_key_value_heads: expected a divisor of num_attention_heads ({heads}), got {kv_heads}"
        )
    if head_dim % 2:
        raise ModelError(f"head_dim: expected an even number, got {head_dim}")
    return {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _layer_kinds(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[LayerKind, ...]:
    """Return the kind of each layer.

    An absent `sliding_window` means 4096 in these families; null means no window.
    """
    if family == "llama":
        return (None,) * num_layers
    qwen = family in ("qwen2", "qwen3")
    off = qwen and not _read(config, "use_sliding_window", bool, False)
    off = off or config.get("sliding_window", 4096) is None
    window = None if off else _read(config, "sliding_window", int, 4096)
    types = config.get("layer_types")
    if types is None and family != "gated_linear":
        first = config.get("max_window_layers", 28) if qwen else 0
        if type(first) is not int:
            raise ModelError(f"max_window_layers: expected a whole number, got {show_value(first)}")
        return tuple(window if i >= first else None for i in range(num_layers))
    if family == "mistral":
        raise ModelError(
            "layer_types: expected none for model_type mistral, use ministral for layers that differ"
        )
    return _typed_kinds(types, window, num_layers, has_states=family == "gated_linear")


def _typed_kinds(
    types: object, window: int | None, num_layers: int, has_states: bool
) -> tuple[LayerKind, ...]:
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(
            f"layer_types: expected a list of one per layer ({num_layers}), got {show_value(types)}"
        )
    kinds: dict[str, LayerKind] = {"full_attention": None, "sliding_attention": window}
    if has_states:
        kinds["linear_attention"] = STATE
    for layer_type in types:
        if layer_type not in kinds:
            raise ModelError(f"layer_types: expected {' or '.join(kinds)}, got {show_value(layer_type)}")
    if window is None and "sliding_attention" in types:
        raise ModelError(
            "sliding_window: expected a positive int for the sliding_attention layers, got nothing"
        )
    return tuple(kinds[layer_type] for layer_type in types)
