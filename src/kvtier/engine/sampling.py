"""Sampling: the choice of the next token from logits, greedily or at random.

A draw depends only on the logits, the parameters and `(seed, number of tokens generated so far)`. There is
no generator whose state another request, a preemption or a restart could change. Everything here is pure;
any thread may call it.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.errors import InputError, show_value


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 exclude no token. Without a `seed`, every draw uses
    the system's entropy.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(_is_int(self.max_tokens, 1), "max_tokens", "an int, 1 or more", self.max_tokens)
        _require(_is_number(self.temperature), "temperature", "a finite number, 0 or more", self.temperature)
        _require(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            "a number above 0, at most 1",
            self.top_p,
        )
        _require(_is_int(self.top_k, 0), "top_k", "an int, 0 or more", self.top_k)
        _require(
            self.seed is None or _is_seed(self.seed), "seed", "an int of at most 128 bits or None", self.seed
        )
        ids = self.stop_token_ids
        _require(
            type(ids) is tuple and all(map(_is_int, ids)), "stop_token_ids", "a tuple of token ids", ids
        )
        _require(type(self.ignore_eos) is bool, "ignore_eos", "True or False", self.ignore_eos)


def sample(logits: Tensor, params: Sequence[SamplingParams], num_generated: Sequence[int]) -> list[int]:
    """Choose one token for each row of `logits` `[N, vocab]`, after `num_generated[n]` generated tokens."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (param, count) in enumerate(zip(params, num_generated, strict=True)):
        if param.temperature > 0:
            tokens[row] = _draw(logits[row], param, _uniform(param.seed, count))
    return tokens


def _draw(logits: Tensor, param: SamplingParams, uniform: float) -> int:
    """Invert the cumulative distribution at `uniform`. The order of token ids makes near-ties harmless."""
    scaled = _scale(logits, float(param.temperature))
    if 0 < param.top_k < len(scaled):
        scaled[scaled < scaled.topk(param.top_k).values[-1]] = -torch.inf
    probabilities = scaled.softmax(dim=-1)
    if param.top_p < 1:
        ordered, ids = probabilities.sort(descending=True, stable=True)
        above = ordered.cumsum(dim=-1) - ordered
        probabilities[ids[above >= param.top_p]] = 0
    cumulative = probabilities.cumsum(dim=-1)
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))


def _scale(logits: Tensor, temperature: float) -> Tensor:
    """Return (logits - best logit) / temperature, where no value is above 0 or NaN at any temperature.

    The best tokens have 0, even if their logit is infinite. NaN counts as -inf, which is never drawn.
    """
    known = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = known.max()
    return torch.where(known == best, 0.0, (known - best) / temperature)


def _uniform(seed: int | None, count: int) -> float:
    """Return a number in [0, 1).

    It has 52 bits, one less than a float, so that its product with a sum stays below the sum.
    """
    if seed is None:
        return secrets.randbits(52) / 2**52
    digest = hashlib.blake2b(f"{seed}/{count}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 12) / 2**52


def _is_int(value: object, least: float = -math.inf) -> bool:
    return type(value) is int and value >= least


def _is_seed(value: object) -> bool:
    """Return whether a value is an int that Python can print: it refuses very long ones."""
    return type(value) is int and value.bit_length() <= 128


def _is_number(value: object) -> bool:
    """Return whether a value is a number of 0 or more that is finite as a float."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    )


def _require(holds: bool, field: str, expected: str, value: object) -> None:
    if not holds:
        raise InputError(f"{field}: expected {expected}, got {show_value(value)}")
