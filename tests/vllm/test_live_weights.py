"""Weights that change in memory: whoever changes them and however, no KV of the old ones comes back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.conftest import tokens_of
from tests.vllm.disks import disk_tier
from tests.vllm.engines import Engine, make_prompt, vllm_engine
from tests.vllm.models import save_trained
from tests.vllm.test_async_scheduling import async_scheduling
from tests.vllm.test_tiers import wait_open, wait_written

from kvtier.testing.kit import ManualClock

__all__ = ["async_scheduling"]  # a fixture
PROMPTS = [make_prompt(seed, 60 + 30 * seed) for seed in range(3)]


def _noisy(model: Any) -> list[tuple[str, Any]]:
    """Return all parameters of the norms with noise added: other parameters may be kept in another form."""
    import torch

    generator = torch.Generator().manual_seed(1)
    norms = [(name, weights) for name, weights in sorted(model.named_parameters()) if "norm" in name]
    return [(name, w.data + torch.randn(w.shape, generator=generator).to(w)) for name, w in norms]


def _write_in_place(model: Any) -> None:
    import torch

    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weights in _noisy(model):
            parameters[name].copy_(weights)


def _write_data(model: Any) -> None:
    """As vLLM's own loaders write: torch counts no new version of the parameter."""
    parameters = dict(model.named_parameters())
    for name, weights in _noisy(model):
        parameters[name].data.copy_(weights)


def _replace(model: Any) -> None:
    import torch

    for name, weights in _noisy(model):
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, torch.nn.Parameter(weights, requires_grad=False))


def _replace_modules(model: Any) -> None:
    from copy import deepcopy

    fresh = deepcopy({name.rpartition(".")[0]: weights for name, weights in _noisy(model)})
    for name, weights in fresh.items():
        module = deepcopy(model.get_submodule(name))
        module.weight.data.copy_(weights)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, module)


def _load(model: Any) -> None:
    model.load_weights(iter(_noisy(model)))


def _apply(change: Callable[[Any], None], engine: Engine, checkpoint: Path) -> None:
    engine.llm.apply_model(change)


def _reload(engine: Engine, checkpoint: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})


def _reload_from_memory(engine: Engine, checkpoint: Path) -> None:
    from safetensors.torch import load_file

    weights = list(load_file(checkpoint / "model.safetensors").items())
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


def _update(engine: Engine, checkpoint: Path) -> None:
    """Update as a trainer does, in two parts, with an idle step between them."""
    from safetensors.torch import load_file

    weights = sorted(load_file(checkpoint / "model.safetensors").items())
    engine.llm.init_weight_transfer_engine({"init_info": {}})
    engine.llm.start_weight_update()
    for part in (weights[::2], weights[1::2]):
        engine.llm.update_weights({"update_info": {"weights": part}})
        engine.step()
    engine.llm.finish_weight_update()


@pytest.fixture(scope="module")
def trainer() -> dict[str, Any]:
    """Options of an engine that a trainer in the same process may update."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    class SameProcessEngine(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls = update_info_cls = dict

        def init_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(update_info)

        def receive_weights(self, update_info: dict[str, Any]) -> None:
            self.model.load_weights(iter(update_info["weights"]))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None: ...

    WeightTransferEngineFactory.register_engine("same process", SameProcessEngine)
    return {"weight_transfer_config": WeightTransferConfig(backend="same process")}


WAYS = {
    "in place": partial(_apply, _write_in_place),
    "data": partial(_apply, _write_data),
    "replaced": partial(_apply, _replace),
    "modules replaced": partial(_apply, _replace_modules),
    "load_weights": partial(_apply, _load),
    "reload_weights": _reload,
    "reload_weights from memory": _reload_from_memory,
    "update_weights": _update,
}


@pytest.fixture(scope="module")
def checkpoint(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(tmp_path_factory.mktemp("checkpoint"), llama)


@pytest.mark.parametrize("way", list(WAYS))
def test_weights_that_change_without_a_word_are_noticed(
    llama: Path, checkpoint: Path, trainer: dict[str, Any], way: str
) -> None:
    change = WAYS[way]
    with vllm_engine(llama, num_blocks=256, **trainer) as plain:
        before, expected = tokens_of(plain.generate(PROMPTS)), tokens_after(change, plain, checkpoint)
    assert all(old != new for old, new in zip(before, expected, strict=True)), "else nothing is tested"
    with vllm_engine(llama, {}, **trainer) as engine:
        assert tokens_of(engine.generate(PROMPTS)) == before
        engine.forget()
        assert tokens_of(engine.generate(PROMPTS)) == before
        assert (engine.stats.loads, engine.stats.weight_changes) == (3, 0)
        rounds = [tokens_after(change, engine, checkpoint)]
        for _ in range(2):
            engine.forget()
            rounds.append(tokens_of(engine.generate(PROMPTS)))
        assert engine.stats.weight_changes > 0
        assert engine.stats.loads - engine.stats.loads_failed > 3, "new KV is kept and loaded"
    assert rounds == [expected] * 3


def tokens_after(
    change: Callable[[Engine, Path], None], engine: Engine, checkpoint: Path
) -> list[list[int]]:
    """Change the weights and clear vLLM's own cache, as users do; return the tokens that follow."""
    change(engine, checkpoint)
    engine.wait_look()
    engine.forget()
    return tokens_of(engine.generate(PROMPTS))


@pytest.mark.parametrize("when", ["before the first request", "later"])
def test_kv_of_changed_weights_is_not_found_by_an_engine_with_the_others(
    llama: Path, checkpoint: Path, tmp_path: Path, when: str
) -> None:
    with vllm_engine(llama, disk_tier(tmp_path)) as engine:
        wait_open(engine)
        before = tokens_of(engine.generate(PROMPTS)) if when == "later" else None
        after = tokens_after(WAYS["data"], engine, checkpoint)
        engine.forget()
        assert tokens_of(engine.generate(PROMPTS)) == after
        wait_written(engine)
        assert engine.stats.weight_changes == 1
    with vllm_engine(llama, disk_tier(tmp_path)) as engine:
        wait_open(engine)
        again = engine.generate(PROMPTS)
    assert [output.cached for output in again] == [0, 0, 0]
    assert tokens_of(again) != after
    assert before is None or tokens_of(again) == before


def test_a_reset_that_leaves_nothing_makes_a_notice_needless(llama: Path, checkpoint: Path) -> None:
    """As trainers should do it: what is computed after the reset is stored at once."""
    with vllm_engine(llama, {}) as engine:
        engine.generate(PROMPTS)
        engine.settle()
        WAYS["data"](engine, checkpoint)
        engine.wait_look()
        engine.forget(tiers_too=True)
        after = engine.generate(PROMPTS)
        engine.forget()
        again = engine.generate(PROMPTS)
        assert (engine.stats.weight_changes, engine.stale_blocks) == (0, 0)
        assert [output.cached for output in after + again] == [0, 0, 0, 32, 64, 96]
        assert tokens_of(after) == tokens_of(again)


def test_weights_that_change_while_requests_run(llama: Path, checkpoint: Path) -> None:
    """vLLM goes on with what these have; nothing that is computed from it is kept."""
    with vllm_engine(llama, num_blocks=256) as plain:
        expected = tokens_after(WAYS["data"], plain, checkpoint)
    with vllm_engine(llama, {}) as engine:
        engine.generate(PROMPTS[:1])
        for index, prompt in enumerate(PROMPTS):
            engine.add(str(index), prompt, 40)
        for _ in range(6):
            engine.step()
        WAYS["data"](engine, checkpoint)
        engine.wait_look()
        engine.run()
        assert engine.stats.weight_changes == 1
        assert engine.stale_blocks > 0
        rounds = []
        for _ in range(3):
            engine.forget()
            rounds.append(tokens_of(engine.generate(PROMPTS)))
        assert engine.stale_blocks == 0
    assert rounds == [expected] * 3


@pytest.mark.usefixtures("async_scheduling")
def test_loads_of_steps_that_were_scheduled_ahead_of_the_notice_count_as_failed(
    llama: Path, checkpoint: Path
) -> None:
    """A worker notices new weights in a step, and the next step was scheduled before it could tell."""
    with vllm_engine(llama, num_blocks=256) as plain:
        WAYS["data"](plain, checkpoint)
        expected = [plain.generate([prompt])[0].tokens for prompt in PROMPTS]
    with vllm_engine(llama, {}, async_scheduling=True) as engine:
        engine.generate(PROMPTS)
        engine.settle()
        assert engine.llm.reset_prefix_cache()
        WAYS["data"](engine, checkpoint)
        engine.wait_look()
        done: dict[str, list[int]] = {}
        for index, prompt in enumerate(PROMPTS):
            engine.add(str(index), prompt)
            done |= engine.step()
        done |= engine.run()
        assert engine.stats.weight_changes == 1
        assert engine.stats.loads == engine.stats.loads_failed >= 2
    assert [done[str(index)] for index in range(len(PROMPTS))] == expected


@pytest.mark.gpu
def test_a_look_at_a_device_does_not_wait_for_it() -> None:
    import torch

    clock, model = ManualClock(), make_model((64 * 1024,) * 8).cuda()
    weights = watch(model, clock)
    model.w3.data += 1
    torch.cuda._sleep(2_000_000_000)
    clock.now += 1.0
    weights.look()
    assert weights.is_looking_at_all
    assert not weights.take_change()
    torch.cuda.synchronize()
    assert not weights.is_looking_at_all
    assert weights.take_change()


# Without an engine.


def make_model(sizes: tuple[int, ...] = (100, 7, 4096, 1)) -> Any:
    import torch

    model = torch.nn.Module()
    for index, size in enumerate(sizes):
        weights = torch.randn(size, generator=torch.Generator().manual_seed(index)).to(torch.bfloat16)
        model.register_parameter(f"w{index}", torch.nn.Parameter(weights, requires_grad=False))
    return model


def watch(model: Any, clock: ManualClock, **more: Any) -> Any:
    from kvtier.integrations.vllm.weights import LiveWeights

    return LiveWeights([model], clock=clock, **more)


def changed_after(weights: Any, clock: ManualClock, pause: float) -> bool:
    """Return whether the step that follows a pause finds new weights."""
    clock.now += pause
    weights.look()
    found = weights.take_change()
    weights.end_step()
    assert not weights.is_looking_at_all
    return bool(found)


def test_a_step_after_a_pause_looks_at_all_weights() -> None:
    clock, model = ManualClock(), make_model()
    weights = watch(model, clock)
    assert not changed_after(weights, clock, pause=1.0)
    for name in ("w0", "w1", "w2"):
        getattr(model, name).data += 1
        assert changed_after(weights, clock, pause=1.0)
        assert not changed_after(weights, clock, pause=1.0)


def test_steps_without_a_pause_look_at_all_weights_in_turn() -> None:
    clock, model = ManualClock(), make_model((64,) * 9)
    weights = watch(model, clock)
    weights._seconds = 1.0
    for index in range(9):
        getattr(model, f"w{index}").data += 1
        found = [changed_after(weights, clock, pause=0.0) for _ in range(5)]
        assert sum(found) == 1
        weights._seconds = 1.0


@pytest.mark.parametrize("pause", [1.0, 0.0])
def test_a_replaced_module_is_found(pause: float) -> None:
    """Its parameters are in another dict than those of the module that was there."""
    import torch

    clock, model = ManualClock(), torch.nn.Module()
    model.layers = torch.nn.ModuleList([make_model(), make_model()])
    weights = watch(model, clock)
    for replaced in (False, True, False):
        weights._seconds = 0.5
        if replaced:
            model.layers[0] = make_model()
        found = [changed_after(weights, clock, pause) for _ in range(4)]
        assert sum(found) == replaced


def test_one_changed_value_of_a_hundred_is_found() -> None:
    import torch

    clock, model = ManualClock(), make_model((64 * 1024,) * 20)
    weights = watch(model, clock)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += (torch.rand(parameter.shape, generator=generator) < 0.01) * 1
    assert changed_after(weights, clock, pause=1.0)


@pytest.mark.parametrize("shape", [(64, 64), (63, 65), (1, 4096), (4096, 1)])
def test_views_are_looked_at_within_their_bounds(shape: tuple[int, int]) -> None:
    """A parameter may be a part of a larger memory, transposed, or both."""
    import torch

    clock, memory = ManualClock(), torch.zeros(shape[0] + 2, shape[1], dtype=torch.bfloat16)
    for view in (memory[1:-1], memory[1:-1].t()):
        model = torch.nn.Module()
        model.register_parameter("w", torch.nn.Parameter(view, requires_grad=False))
        weights = watch(model, clock)
        memory[1:-1] += 1
        assert changed_after(weights, clock, pause=1.0)


def test_weights_that_are_away_or_in_another_form_have_changed() -> None:
    import torch

    clock, model = ManualClock(), make_model()
    weights = watch(model, clock)
    kept = model.w2
    model.w2 = torch.nn.Parameter(torch.empty(4096, device="meta"), requires_grad=False)
    assert changed_after(weights, clock, pause=1.0)
    assert not changed_after(weights, clock, pause=1.0)
    model.w2 = kept
    assert changed_after(weights, clock, pause=1.0)
    del model.w0
    assert changed_after(weights, clock, pause=1.0)


def test_a_worker_without_a_runner_warns_once_that_changes_go_unnoticed(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives a connector no reference to its model, so the runner is looked for among the callers."""
    from kvtier.integrations.vllm.connector import logger

    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda message, *_: warnings.append(message))
    with vllm_engine(llama, {}) as engine:
        assert engine.worker._live_weights is not None
        assert warnings == []
    monkeypatch.setattr("kvtier.integrations.vllm.connector.find_models", list)
    with vllm_engine(llama, {}) as engine:
        assert engine.worker._live_weights is None
        engine.generate(PROMPTS)
    (warning,) = warnings
    assert "model runner was not found" in warning


def test_experts_that_vllm_moves_are_not_watched() -> None:
    from kvtier.integrations.vllm.weights import watchable

    def config(eplb: bool, group: int) -> Any:
        prefetch = SimpleNamespace(offload_group_size=group)
        parallel = SimpleNamespace(enable_eplb=eplb)
        return SimpleNamespace(offload_config=SimpleNamespace(prefetch=prefetch), parallel_config=parallel)

    assert watchable(config(False, 8)) is None
    for eplb in (True, False):
        is_watched = watchable(config(eplb, 0))
        assert is_watched is not None
        assert is_watched("model.layers.0.mlp.experts.w2_weight") is not eplb
        assert is_watched("model.layers.0.self_attn.qkv_proj.weight")
