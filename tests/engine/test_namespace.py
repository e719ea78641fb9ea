"""The namespace of the engine's bytes: the content of its weights, read while the engine runs."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch
from tests.engine.harness import tiny

from kvtier.config import KVTierConfig
from kvtier.engine import Engine, EngineConfig, SamplingParams, save_model
from kvtier.engine.model_config import ModelConfig
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
