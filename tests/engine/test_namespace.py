"""The namespace of the engine's bytes: the content of its weights, read while the engine runs."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import tiny

from kvtier.config import KVTierConfig
from kvtier.engine import Engine, EngineConfig, SamplingParams, save_model
from kvtier.engine.assembly import describe_cache
from kvtier.engine.cache import CacheGroup
from kvtier.engine.config import ModelConfig
from kvtier.engine.weights import random_weights
from kvtier.namespace import Namespace, WeightsFiles

SETTINGS = KVTierConfig.from_dict({"cpu": {"capacity": "1MiB"}})
CONFIG = EngineConfig(num_blocks=32)


def save(folder: Path, *, scale_of_one_matrix: float = 1.0) -> Path:
    weights = random_weights(ModelConfig.from_dict(tiny()), 0)
    name = next(name for name in weights if "v_proj" in name)
    weights[name] = weights[name] * scale_of_one_matrix
    save_model(folder, tiny(), weights)
    return folder


def namespace(engine: Engine) -> Namespace:
    assert engine.connector is not None
    assert engine.connector.connector_scheduler is not None
    found = engine.connector.connector_scheduler.spec.config.namespace
    assert isinstance(found, Namespace)
    return found


def name_of(folder: Path) -> str | None:
    with Engine.from_folder(folder, CONFIG, SETTINGS) as engine:
        found = namespace(engine)
        value = found.wait(60)
        assert found.problem is None
    return value


def test_one_matrix_makes_another_namespace(tmp_path: Path) -> None:
    base, tuned = save(tmp_path / "base"), save(tmp_path / "tuned", scale_of_one_matrix=1.01)
    copy = shutil.copytree(base, tmp_path / "copy")
    assert name_of(base) == name_of(copy) != name_of(tuned)


@pytest.mark.parametrize("place", ["../else", "checkpoint-500", "original", ".hidden"])
def test_weights_that_the_index_names_elsewhere_count(tmp_path: Path, place: str) -> None:
    """The engine loads them from there."""
    names = []
    for scale in (1.0, 1.01):
        folder = save(tmp_path / str(scale) / "model", scale_of_one_matrix=scale)
        file = folder / place / "model.safetensors"
        file.parent.mkdir(exist_ok=True)
        (folder / "model.safetensors").rename(file)
        save(folder)  # weights that are not loaded
        weights = random_weights(ModelConfig.from_dict(tiny()), 0)
        index = {"weight_map": dict.fromkeys(weights, f"{place}/model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        names.append(name_of(folder))
    assert names[0] != names[1]


HARMLESS = {
    "enable_prefix_caching": False,
    "kv_events": True,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 3,
    "num_blocks": 48,
    "seed": 7,
    "state_interval": 32,
}
COUNTS = {"block_size": 8, "dtype": "bfloat16", "compute_dtype": "float64", "kv_layout": "kv_first"}


def test_every_setting_counts_but_harmless_ones() -> None:
    assert {field.name for field in fields(EngineConfig)} == {"device"} | HARMLESS.keys() | COUNTS.keys()
    before = name_with()
    assert all(name_with(**{name: value}) == before for name, value in HARMLESS.items())
    assert len({before} | {name_with(**{name: value}) for name, value in COUNTS.items()}) == 1 + len(COUNTS)


def name_with(**options: Any) -> str:
    config = replace(CONFIG, **options)
    with Engine.from_config(tiny(), config, SETTINGS) as engine:
        assert engine.connector is not None
        assert engine.connector.connector_scheduler is not None
        found = engine.connector.connector_scheduler.spec.config.namespace
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize(("device", "is_other"), [("cpu", False), ("cuda", True), ("cuda:3", True)])
def test_the_kind_of_device_counts(device: str, is_other: bool) -> None:
    model = ModelConfig.from_dict(tiny())
    names = []
    for chosen in ("cpu", device, "cuda:0"):
        config = replace(CONFIG, device=chosen)
        groups = [CacheGroup(("layer",), None)]
        names.append(str(describe_cache(model, config, groups, SETTINGS, "weights").namespace))
    assert (names[0] != names[1]) == (names[1] == names[2]) == is_other


def test_the_model_counts_beside_the_id_of_its_weights() -> None:
    """The caller of `Engine` names the weights, and may name those of two models alike."""
    names = set()
    for theta in (10_000.0, 20_000.0):
        model = ModelConfig.from_dict(tiny() | {"rope_theta": theta})
        described = describe_cache(model, CONFIG, [CacheGroup(("layer",), None)], SETTINGS, "weights")
        names.add(described.namespace)
    assert len(names) == 2


def test_the_engine_runs_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), WeightsFiles.manifest

    def manifest(files: WeightsFiles) -> list[list[str | int]]:
        assert gate.wait(60)
        return real(files)

    monkeypatch.setattr(WeightsFiles, "manifest", manifest)
    with Engine.from_folder(save(tmp_path), CONFIG, SETTINGS) as engine:
        assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert namespace(engine).get_nowait() is None
        gate.set()
        assert namespace(engine).wait(60)


def test_weights_that_change_before_they_are_read_are_like_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may have loaded either."""
    from kvtier.engine import engine as module

    real = module.load_weights

    def load_weights(path: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
        weights = real(path, config)
        save(tmp_path, scale_of_one_matrix=1.01)
        return weights

    monkeypatch.setattr(module, "load_weights", load_weights)
    with Engine.from_folder(save(tmp_path), CONFIG, SETTINGS) as engine:
        assert namespace(engine).wait(60)
        assert "expected the files of when the engine was made" in str(namespace(engine).problem)
