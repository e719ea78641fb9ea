"""Model folders: what is right loads, what is wrong is one line that names the file."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.engine.harness import Paged, prompt, tiny
from torch import Tensor

from kvtier.engine.config import STATE, ModelConfig, weight_shapes
from kvtier.engine.weights import load_config, load_weights, random_weights, save_model
from kvtier.errors import ModelError

INDEX = "model.safetensors.index.json"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    save_model(path, tiny(), random_weights(ModelConfig.from_dict(tiny()), seed=1))
    return path


def load(folder: Path) -> dict[str, Tensor]:
    return load_weights(folder, load_config(folder))


def shard(folder: Path) -> None:
    """Rewrite a folder as two files and an index."""
    weights = load(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def replace(folder: Path, name: str, tensor: Tensor | None) -> None:
    weights = load(folder)
    del weights[name]
    save_model(folder, tiny(), weights if tensor is None else weights | {name: tensor})


def test_a_saved_model_loads_bit_for_bit(folder: Path) -> None:
    expected = random_weights(ModelConfig.from_dict(tiny()), seed=1)
    loaded = load(folder)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())


def test_shards_load_like_one_file_and_stray_tensors_and_files_are_left_alone(folder: Path) -> None:
    whole = load(folder)
    shard(folder)
    save_file({"stray": torch.zeros(1)}, folder / "consolidated.safetensors")
    loaded = load(folder)
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in whole.items())


def test_eos_of_the_generation_config_joins_that_of_the_model(folder: Path) -> None:
    assert load_config(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_config(folder).eos_token_ids == (2, 7)


def _break_config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def _break_index(text: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        shard(folder)
        (folder / INDEX).write_text(text)

    return damage


def _lose_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        "config.json",
        "expected a JSON file, there is none",
    ),
    "config is not JSON": (_break_config("{'a': 1}"), "config.json", "expected JSON, got something else"),
    "config is no object": (_break_config("[]"), "config.json", "expected a JSON object, got a list"),
    "config field": (
        _break_config(json.dumps(tiny(vocab_size=0))),
        "config.json",
        "vocab_size: expected a positive",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "",
        r"expected \*\.safetensors files, there are none; .* hf download ",
    ),
    "no shard": (
        _lose_shard,
        "model-00002-of-00002.safetensors",
        "names it and there is none",
    ),
    "index is not JSON": (_break_index("no"), INDEX, "expected JSON"),
    "index names nothing": (_break_index("{}"), INDEX, "expected weight_map"),
    "index names no file": (
        _break_index('{"weight_map": {"a": [1], "b": 2}}'),
        INDEX,
        "expected weight_map",
    ),
    "a number of 5,000 digits": (_break_config('{"a": %s}' % ("9" * 5000)), "config.json", "expected JSON"),
    "deep nesting": (_break_config("[" * 200_000), "config.json", "expected JSON"),
    "file cut short": (_truncate, "model.safetensors", "cannot be read"),
    "no tensor": (
        lambda f: replace(f, DOWN, None),
        "model.safetensors",
        rf"expected tensor {DOWN} .* is missing",
    ),
    "wrong shape": (
        lambda f: replace(f, DOWN, torch.zeros(64, 95)),
        "model.safetensors",
        rf"{DOWN}: expected shape \(64, 96\), got \(64, 95\)",
    ),
    "quantised": (
        lambda f: replace(f, DOWN, torch.zeros(64, 96, dtype=torch.int8)),
        "model.safetensors",
        f"{DOWN}: expected one of F64, F32, F16, BF16, got I8",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_one_line_that_names_the_file(case: str, folder: Path) -> None:
    damage, file, message = BROKEN[case]
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert str(caught.value).startswith(str(folder / file))
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    for read in (load_config, lambda path: load_weights(path, ModelConfig.from_dict(tiny()))):
        with pytest.raises(ModelError, match=r"nowhere: expected a model folder, there is none"):
            read(tmp_path / "nowhere")


@pytest.mark.parametrize(("path", "found"), [("path/to/model", "there is none"), ("my model", "got a file")])
def test_an_error_about_the_folder_names_the_command_that_downloads_one(
    path: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my model").touch()
    with pytest.raises(ModelError) as caught:
        load_config(path)
    assert str(caught.value).startswith(
        f"{path}: expected a model folder, {found}; a model folder has config.json and *.safetensors"
    )
    assert f"hf download Qwen/Qwen3-0.6B --local-dir {shlex.quote(path)}" in str(caught.value)


ROPE3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mixtral"}, "model_type: expected one of gated_linear, llama, .*, got 'mixtral'"),
    ({"model_type": None}, "model_type: .* got None"),
    ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config: expected none"),
    ({"hidden_size": None}, "hidden_size: expected a positive int, got nothing"),
    ({"hidden_size": "64"}, "hidden_size: expected a positive int, got '64'"),
    ({"num_hidden_layers": True}, "num_hidden_layers: expected a positive int, got True"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps: expected a positive float, got -1.0"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps: expected at most 9007199254740992, got 1000"),
    ({"rope_theta": math.inf}, "rope_theta: expected at most 9007199254740992, got inf"),
    ({"rope_theta": math.nan}, "rope_theta: expected a positive float, got nan"),
    (
        {"hidden_size": -(10**5000)},
        "hidden_size: expected a positive int, got a value of type int that cannot be printed",
    ),
    (
        {"model_type": "qwen2", "max_window_layers": None},
        "max_window_layers: expected a whole number, got None",
    ),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false, got 'yes'"),
    (
        {"num_key_value_heads": 3},
        r"num_key_value_heads: expected a divisor of num_attention_heads \(4\), got 3",
    ),
    ({"head_dim": 15}, "head_dim: expected an even number, got 15"),
    ({"eos_token_id": "</s>"}, "eos_token_id: expected a token id or a list of them, got '</s>'"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        "rope_type: expected default, linear or llama3, got 'yarn'",
    ),
    ({"rope_scaling": ROPE3}, "factor: expected a positive float, got nothing"),
    ({"rope_scaling": "linear"}, "rope_scaling: expected one object for all layers, got 'linear'"),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters: expected one object for all layers"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window: expected a positive int, got 0"),
    ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "layer_types: .* use ministral"),
    (
        {"model_type": "ministral", "layer_types": ["full_attention"]},
        "layer_types: expected a list of one per",
    ),
    (
        {"model_type": "ministral", "layer_types": ["linear_attention"] * 3},
        "layer_types: .* got 'linear_attention'",
    ),
    ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3}, "sliding_window: .* got nothing"),
    ({"model_type": "gated_linear"}, r"layer_types: expected a list of one per layer \(3\), got None"),
    (
        {"model_type": "gated_linear", "layer_types": ["mamba"] * 3},
        "layer_types: expected full_attention or sliding_attention or linear_attention, got 'mamba'",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda fields: next(iter(fields)))
def test_a_config_that_cannot_be_honoured_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"^{message}"):
        ModelConfig.from_dict(tiny(**fields))


def test_config_defaults_are_those_of_the_families() -> None:
    llama = ModelConfig.from_dict(tiny(num_key_value_heads=None, sliding_window=8))
    assert (llama.num_kv_heads, llama.head_dim, llama.layer_kinds) == (4, 16, (None, None, None))
    assert ModelConfig.from_dict(tiny(model_type="mistral")).layer_kinds == (4096,) * 3
    assert ModelConfig.from_dict(tiny(model_type="qwen2", sliding_window=8)).layer_kinds == (None,) * 3
    assert llama.layer_names == ("layers.0", "layers.1", "layers.2")
    types = ["linear_attention", "sliding_attention", "full_attention"]
    hybrid = ModelConfig.from_dict(tiny(model_type="gated_linear", layer_types=types, sliding_window=8))
    assert hybrid.layer_kinds == (STATE, 8, None)


def test_random_weights_are_pinned_to_the_seed() -> None:
    """Guards reproducibility across machines and releases: these numbers may not move."""
    config = ModelConfig.from_dict(tiny())
    weights = random_weights(config, seed=0)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == weight_shapes(config)
    first, last = weights["model.embed_tokens.weight"].flatten()[0], weights["lm_head.weight"].flatten()[-1]
    assert (float(first), float(last)) == (-0.0032418882474303246, 0.32676270604133606)
    assert not torch.equal(random_weights(config, seed=1)["lm_head.weight"], weights["lm_head.weight"])


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gated_linear"])
def test_random_weights_spread_the_logits_and_listen_to_the_whole_context(model_type: str) -> None:
    types = {"layer_types": ["linear_attention"] * 3} if model_type == "gated_linear" else {}
    config = ModelConfig.from_dict(tiny(model_type=model_type, head_dim=16, **types))
    tokens = prompt(48)

    def logits(tokens: list[int]) -> Tensor:
        paged = Paged(config)
        return paged.forward((paged.add(tokens), len(tokens)))[0]

    base = logits(tokens)
    assert 1 < base.std() < 4
    for position in (0, 20, 47):
        changed = [*tokens]
        changed[position] = (changed[position] + 1) % 128
        assert (logits(changed) - base).abs().max() > 0.1
