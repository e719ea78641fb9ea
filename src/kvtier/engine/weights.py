"""Weights by the names of a Hugging Face checkpoint: from a local folder, or random from a seed.

A model folder holds `config.json` and `*.safetensors`, with `model.safetensors.index.json` if there are
several. All tensors are checked against the config before they are used; an error is one `ModelError` line
that opens with the file. Nothing is ever downloaded. There is no state; any thread may call this.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvtier.engine.config import ModelConfig, parse_token_ids, weight_shapes
from kvtier.errors import ModelError, show_value

T = TypeVar("T")

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")


def load_config(folder: str | Path) -> ModelConfig:
    """Read and check `config.json`, and the end-of-sequence tokens that `generation_config.json` may add."""
    config = _parse(Path(folder) / _CONFIG, ModelConfig.from_dict)
    generation = Path(folder) / "generation_config.json"
    if not generation.is_file():
        return config
    more = _parse(generation, lambda fields: parse_token_ids(fields.get("eos_token_id")))
    return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))


def load_weights(folder: str | Path, config: ModelConfig) -> dict[str, Tensor]:
    """Load every tensor that the config calls for, on the CPU, in the dtype of the file.

    Other tensors are ignored.
    """
    missing = weight_shapes(config)
    weights: dict[str, Tensor] = {}
    files = _files(Path(folder))
    for path in files:
        weights |= _load_file(path, missing)
    if missing:
        name, shape = next(iter(missing.items()))
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise ModelError(f"{files[-1]}: expected tensor {name} of shape {shape}, it{more} missing")
    return weights


def random_weights(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Make weights from a seed, the same on every platform, whose outputs depend on all of the context.

    Uniform numbers come bit for bit from the generator's integers; normal ones would depend on a platform's
    logarithm. Queries, keys and the vocabulary are scaled up: otherwise attention would be a plain average
    that one token hardly changes, and the logits would be nearly flat.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.rand(shape, generator=generator) * 2 - 1
        gain = 2.0 if any(part in name for part in ("q_", "k_", "embed", "head")) else 1.0
        if len(shape) > 1:
            weights[name] = (noise * (gain * math.sqrt(3 / shape[-1]))).to(dtype)
        else:
            weights[name] = (noise * 0.1 + gain * name.endswith("norm.weight")).to(dtype)
    return weights


def save_model(folder: str | Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write a model folder: `config` as `config.json`, the weights as one safetensors file."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / _CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")
    save_file(dict(weights), Path(folder) / "model.safetensors", metadata={"format": "pt"})


def _parse(path: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    fields = _read_json(path)
    try:
        return parse(fields)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    _expect_folder(path.parent)
    if not path.is_file():
        raise ModelError(f"{path}: expected a JSON file, there is none; {_how_to_get_one('model')}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: expected a file that can be read ({error})") from None
    except (ValueError, RecursionError) as error:  # also for long numbers and deep nesting
        raise ModelError(f"{path}: expected JSON, got something else ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got a {type(value).__name__}")
    return value


def _expect_folder(folder: Path) -> None:
    if not folder.is_dir():
        found = "got a file" if folder.exists() else "there is none"
        raise ModelError(f"{folder}: expected a model folder, {found}; {_how_to_get_one(str(folder))}")


def _how_to_get_one(folder: str) -> str:
    """Describe a model folder, with a command that makes one."""
    download = f"hf download Qwen/Qwen3-0.6B --local-dir {shlex.quote(folder)}"
    return (
        "a model folder has config.json and *.safetensors; "
        f"for one: pip install huggingface_hub && {download}"
    )


def _files(folder: Path) -> list[Path]:
    """Return the files that hold the weights; raise `ModelError` if one does not exist."""
    _expect_folder(folder)
    index = folder / _INDEX
    if index.is_file():
        names = _read_json(index).get("weight_map")
        if (
            not isinstance(names, dict)
            or not names
            or not all(isinstance(name, str) for name in names.values())
        ):
            raise ModelError(
                f"{index}: expected weight_map to name the file of each tensor, got {show_value(names)}"
            )
        files = [folder / name for name in sorted(set(names.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder}: expected *.safetensors files, there are none; {_how_to_get_one('model')}"
        )
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path}: expected a file, {_INDEX} names it and there is none")
    return files


def _load_file(path: Path, missing: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Load the missing tensors that one file has, and remove them from `missing`."""
    weights: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(missing.keys() & set(file.keys())):
                part = file.get_slice(name)
                _check_tensor(path, name, tuple(part.get_shape()), part.get_dtype(), missing.pop(name))
                weights[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: expected a safetensors file, got one that cannot be read ({error})"
        ) from None
    return weights


def _check_tensor(
    path: Path, name: str, shape: tuple[int, ...], dtype: str, expected: tuple[int, ...]
) -> None:
    if shape != expected:
        raise ModelError(
            f"{path}: {name}: expected shape {expected}, got {shape}; does config.json belong to it?"
        )
    if dtype not in _DTYPES:
        raise ModelError(
            f"{path}: {name}: expected one of {', '.join(_DTYPES)}, got {dtype}; is it quantised?"
        )
