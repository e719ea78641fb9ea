"""`EngineConfig`: the settings of the engine, validated once, with the name of the bad field in the error.

Sizes are counts of blocks and tokens. `KVTierConfig` sets where KV goes beyond them. An `EngineConfig` is
immutable; any thread may use it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvtier.errors import ConfigError, show_value

__all__ = ["EngineConfig"]

_DTYPES = ("float32", "float16", "bfloat16")
_COMPUTE_DTYPES = (*_DTYPES, "float64")
_KV_LAYOUTS = ("blocks_first", "kv_first")
_DEVICES = ("cpu", "cuda")
_NUMBER = re.compile("(?<=^cuda):[0-9]{1,3}$")
_MOST = (1 << 31) - 1
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
    """The most tokens of a request, prompt and output. `None`: as many as the model and the cache allow."""
    dtype: str = "float32"
    """The dtype of the weights and of the KV cache."""
    compute_dtype: str | None = None
    """The dtype of activations; `None`: `dtype`."""
    device: str = "cpu"
    kv_layout: str = "blocks_first"
    """`blocks_first`: `(num_blocks, 2, …)`; `kv_first`: `(2, num_blocks, …)`."""
    enable_prefix_caching: bool = True
    seed: int = 0
    """The seed of sampling, for requests without one."""
    kv_events: bool | None = None
    """Whether to make KV events.

    `None`: only if the engine has a publisher. `True` without a publisher: `take_events` returns them.
    """

    def __post_init__(self) -> None:
        self._at_least("num_blocks", 3, "the null block and two to use")
        for field in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            self._at_least(field, 1)
        if self.max_model_len is not None:
            self._at_least("max_model_len", 2, "one token of prompt and one of output")
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
        if value > _MOST:
            raise ConfigError(field, f"expected a whole number of at most {_MOST}, got {show_value(value)}")

    @staticmethod
    def _one_of(field: str, value: object, choices: tuple[object, ...]) -> None:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ConfigError(
                field, f"expected one of {', '.join(map(repr, choices))}, got {show_value(value)}"
            )
