"""The engine as its user sees it.

The toy model answers wrongly if a single element of a single block is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.engine.drive import (
    ALL_KINDS,
    ONE_GROUP,
    STATES,
    TWO_GROUPS,
    expect,
    expect_idle,
    run,
    tokens,
    toy_engine,
)
from tests.engine.fake_connector import FakeConnector
from tests.engine.harness import tiny
from tests.engine.test_cache import replay

from kvtier.engine import Engine, EngineConfig, SamplingParams, save_model
from kvtier.engine.cache import KVCache, group_layers
from kvtier.engine.config import STATE, LayerKind, ModelConfig
from kvtier.engine.weights import random_weights
from kvtier.errors import ConfigError, InputError, IntegrityError, ModelError
from kvtier.events.types import AllBlocksCleared
from kvtier.testing.toy_model import ToyModel

LAYERS = [ONE_GROUP, TWO_GROUPS, (8,), (None, 7, 20), STATES, ALL_KINDS, (STATE,)]


# -- the same tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("kv_layout", ["blocks_first", "kv_first"])
def test_chunks_of_any_size_give_the_same_tokens(layers: tuple[LayerKind, ...], kv_layout: str) -> None:
    prompts, params = [tokens(37), tokens(21, seed=1)], SamplingParams(max_tokens=9)
    for budget in (1, 5, 16, 200):
        engine = toy_engine(layers, max_num_batched_tokens=budget, num_blocks=200, kv_layout=kv_layout)
        answers = [output.token_ids for output in engine.generate(prompts, params)]
        assert answers == [expect(engine, prompt, params) for prompt in prompts]
        expect_idle(engine)


def test_a_preempted_request_gives_the_same_tokens() -> None:
    engine = toy_engine(num_blocks=14)
    params = SamplingParams(max_tokens=24)
    prompts = [tokens(14, seed=seed) for seed in range(4)]
    names = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = run(engine)
    assert sum(output.preemptions for output in outputs.values()) >= 2
    assert [outputs[name].token_ids for name in names] == [
        expect(engine, prompt, params) for prompt in prompts
    ]
    expect_idle(engine)


def test_sampled_tokens_do_not_depend_on_preemption_or_neighbours() -> None:
    params = [SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=seed) for seed in range(4)]
    prompts = [tokens(14, seed=seed) for seed in range(4)]
    small = toy_engine(num_blocks=14)
    together = small.generate(prompts, params)
    assert sum(output.preemptions for output in together) >= 1
    for prompt, param, output in zip(prompts, params, together, strict=True):
        (alone,) = toy_engine().generate([prompt], param)
        assert alone.token_ids == output.token_ids == expect(small, prompt, param)


def test_without_a_seed_of_its_own_a_request_is_seeded_by_the_engine_and_its_arrival() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0)
    first, second = (toy_engine(seed=3).generate([tokens(9)] * 2, params) for _ in range(2))
    assert [output.token_ids for output in first] == [output.token_ids for output in second]
    assert first[0].token_ids != first[1].token_ids
    assert toy_engine(seed=4).generate([tokens(9)], params)[0].token_ids != first[0].token_ids


def test_the_toy_model_sees_one_wrong_element() -> None:
    """The negative control of all tests that use it."""
    params = SamplingParams(max_tokens=8)
    for layer in range(2):
        engine = toy_engine()
        engine.add_request(tokens(10), params)
        engine.step()
        page = engine.kv_caches[f"layers.{layer}"][engine._scheduler.running[0].table.rows[0][1]]
        page[1, 2, 0, 1] += 1  # V of the seventh token
        assert next(iter(run(engine).values())).token_ids != expect(engine, tokens(10), params)


@pytest.mark.parametrize("element", range(4))
def test_the_toy_model_sees_one_wrong_element_of_a_state(element: int) -> None:
    params = SamplingParams(max_tokens=8)
    for group in range(1, 3):
        engine = toy_engine(STATES)
        engine.add_request(tokens(10), params)
        engine.step()
        state = engine.kv_caches[f"layers.{group}"][engine._scheduler.running[0].table.rows[group][2]]
        state.view(-1)[element] += 1
        assert next(iter(run(engine).values())).token_ids != expect(engine, tokens(10), params)


class Workload:
    """Random requests with shared prefixes, aborts and resets, over a cache that is too small for them."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.layers = random.choice(LAYERS)
        self.settings: dict[str, Any] = {
            "block_size": random.choice([2, 4, 8]),
            "max_num_seqs": random.randint(2, 8),
            "max_num_batched_tokens": random.choice([3, 16, 64]),
            "kv_layout": random.choice(["blocks_first", "kv_first"]),
            "enable_prefix_caching": random.random() < 0.9,
        }
        interval = random.choice([None, 0, 2 * self.settings["block_size"]])
        self.settings["state_interval"] = interval
        bases = [tokens(40, seed=100 * seed + index) for index in range(3)]
        self.prompts = [
            random.choice(bases)[: random.randint(0, 32)] + tokens(random.randint(1, 8), seed=index)
            for index in range(random.randint(4, 12))
        ]
        groups = group_layers(ToyModel(self.layers).config.layer_names, self.layers)
        cache = KVCache(
            groups, 3, self.settings["block_size"], max_slice=self.settings["max_num_batched_tokens"]
        )
        longest = cache.most_blocks(0, max(map(len, self.prompts)) + 42)
        self.settings["num_blocks"] = longest + 3 + random.randint(0, 4)

    def params(self) -> SamplingParams:
        sampled = (
            {"temperature": 0.8, "seed": self.random.randint(0, 99)} if self.random.random() < 0.3 else {}
        )
        return SamplingParams(max_tokens=self.random.randint(1, 40), **sampled)  # type: ignore[arg-type]


def play(workload: Workload, engine: Engine) -> int:
    """Run a workload, checking everything on the way; return how often a request was preempted."""
    random, held, preemptions = workload.random, set[tuple[Any, int | None]](), 0
    waiting = [(f"r{index}", prompt, workload.params()) for index, prompt in enumerate(workload.prompts)]
    asked = {name: (prompt, params) for name, prompt, params in waiting}
    while waiting or engine.has_unfinished():
        if waiting and random.random() < 0.6:
            name, prompt, params = waiting.pop(0)
            engine.add_request(prompt, params, request_id=name)
        if random.random() < 0.02 and (victim := random.choice(list(engine._requests) or [None])):
            output = engine.abort(victim)
            assert output is not None
            prompt, params = asked[victim]
            assert output.token_ids == expect(engine, prompt, params)[: len(output.token_ids)]
        if random.random() < 0.02:
            engine.reset_prefix_cache(reset_connector=random.random() < 0.5)
        for output in engine.step():
            prompt, params = asked[output.request_id]
            if output.finished:
                assert output.token_ids == expect(engine, prompt, params)
                preemptions += output.preemptions
        engine.check()
        replay(engine.take_events(), held)
        assert held == set(engine._cache._found_by)
    expect_idle(engine)
    return preemptions


def test_random_workloads() -> None:
    preemptions = 0
    for seed in range(40):
        workload = Workload(seed)
        preemptions += play(workload, toy_engine(workload.layers, **workload.settings))
    assert preemptions > 20


def test_random_workloads_with_a_slow_connector() -> None:
    loads = preemptions = 0
    for seed in range(40):
        workload = Workload(1000 + seed)
        engine = toy_engine(workload.layers, **workload.settings)
        connector = FakeConnector(engine, load_steps=1 + seed % 4, store_steps=1 + seed % 5)
        preemptions += play(workload, engine)
        loads += sum(call == "recved" for call, _ in connector.log)
    assert loads > 25
    assert preemptions > 20


def fails_at_random(random: Random) -> Callable[[int], bool]:
    return lambda _: random.random() < 0.3


def test_random_workloads_with_failing_loads() -> None:
    failed = 0
    for seed in range(40):
        workload, random = Workload(2000 + seed), Random(seed)
        engine = toy_engine(workload.layers, **workload.settings)
        connector = FakeConnector(engine, load_steps=1 + seed % 3, fail=fails_at_random(random))
        connector.deferrals = {f"r{index}": random.randint(0, 2) for index in range(12)}
        play(workload, engine)
        failed += connector.loads_failed
    assert failed > 25


# -- requests --------------------------------------------------------------------------------------


def test_outputs_tell_sources_and_times() -> None:
    engine = toy_engine()
    first, second = (engine.generate([tokens(21)], SamplingParams(max_tokens=3))[0] for _ in range(2))
    assert first.source is not None
    assert second.source is not None
    assert (first.source.gpu, first.source.tiers, first.source.recomputed) == (0, {}, 21)
    assert (second.source.gpu, second.source.tiers, second.source.recomputed) == (20, {}, 1)
    assert (second.finished, second.finish_reason, len(second.token_ids)) == (True, "length", 3)
    assert second.ttft is not None
    assert second.ttft > 0
    assert engine.explain(second.request_id) is None


def test_steps_stream_all_tokens_so_far() -> None:
    engine = toy_engine()
    engine.add_request(tokens(5), SamplingParams(max_tokens=3), request_id="r")
    seen = [engine.step() for _ in range(3)]
    assert [[len(output.token_ids) for output in outputs] for outputs in seen] == [[1], [2], [3]]
    assert [outputs[0].finished for outputs in seen] == [False, False, True]
    assert engine.step() == []


def test_stop_tokens_and_the_end_of_text_end_a_request() -> None:
    answer = expect(toy_engine(), tokens(9), SamplingParams(max_tokens=10))
    stop = answer[4]
    params = SamplingParams(max_tokens=10, stop_token_ids=(stop,))
    (output,) = toy_engine().generate([tokens(9)], params)
    assert (output.token_ids, output.finish_reason) == (answer[: answer.index(stop) + 1], "stop")
    config = EngineConfig(num_blocks=32, block_size=4)
    ending = Engine(ToyModel(eos_token_ids=(stop,)), config)
    assert ending.generate([tokens(9)], SamplingParams(max_tokens=10))[0].token_ids == output.token_ids
    endless = Engine(ToyModel(eos_token_ids=(stop,)), config)
    assert (
        endless.generate([tokens(9)], SamplingParams(max_tokens=10, ignore_eos=True))[0].token_ids == answer
    )


def test_a_request_ends_where_the_cache_or_the_model_ends() -> None:
    """Guards against a request that is alone, has all blocks and waits for one more for ever."""
    engine = toy_engine(num_blocks=6)
    (output,) = engine.generate([tokens(15)], SamplingParams(max_tokens=100))
    assert (len(output.token_ids), output.finish_reason) == (5, "length")
    limited = toy_engine(max_model_len=18)
    assert len(limited.generate([tokens(15)], SamplingParams(max_tokens=100))[0].token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], r": expected 1 to 19, .* got 0 tokens"),
        (tokens(20), r": expected 1 to 19, what 6 blocks and max_model_len leave room for, got 20 tokens"),
        ([1, 64], ": expected token ids from 0 to 63, got 64"),
        ([1, -1], ": expected token ids from 0 to 63, got -1"),
    ],
)
def test_impossible_prompts_are_refused(prompt: list[int], problem: str) -> None:
    engine = toy_engine(num_blocks=6)
    with pytest.raises(InputError, match=problem):
        engine.add_request(prompt)
    with pytest.raises(InputError, match=problem):
        engine.generate([[1, 2, 3], prompt])
    assert not engine.has_unfinished()


def test_an_id_in_use_is_refused() -> None:
    engine = toy_engine()
    engine.add_request(tokens(3), request_id="r")
    with pytest.raises(InputError, match="request_id: expected text that is not in use, got 'r'"):
        engine.add_request(tokens(3), request_id="r")


def test_abort_in_every_state() -> None:
    engine = toy_engine(num_blocks=14, max_num_seqs=2)
    params = SamplingParams(max_tokens=40)
    for index in range(3):
        engine.add_request(tokens(14, seed=index), params, request_id=f"r{index}")
    assert engine.abort("nobody") is None
    while not engine._scheduler.waiting or engine._scheduler.waiting[0].preemptions == 0:
        engine.step()
    preempted, running = engine._scheduler.waiting[0].request_id, engine._scheduler.running[0].request_id
    for name in (preempted, running, "r2"):
        output = engine.abort(name)
        assert output is not None
        assert (output.finished, output.finish_reason) == (True, "abort")
        engine.check()
    assert not engine.has_unfinished()
    assert engine.abort("r2") is None
    assert engine.step() == []
    expect_idle(engine)


def test_salts_and_adapters_do_not_share() -> None:
    engine = toy_engine()
    for kind in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_name": "a"}, {}):
        engine.add_request(tokens(20), SamplingParams(max_tokens=1), **kind)
        (output,) = run(engine).values()
        assert output.source is not None
        assert output.source.gpu == 0


# -- the cache as seen from outside ----------------------------------------------------------------


def test_reset_makes_everything_a_miss() -> None:
    engine = toy_engine()
    engine.generate([tokens(20)])
    engine.take_events()
    engine.reset_prefix_cache()
    assert engine.take_events() == [AllBlocksCleared()]
    (output,) = engine.generate([tokens(20)])
    assert output.source is not None
    assert output.source.gpu == 0


def test_check_finds_a_request_in_the_wrong_queue() -> None:
    engine = toy_engine()
    engine.add_request(tokens(5))
    engine.step()
    engine._scheduler.waiting.append(engine._scheduler.running[0])
    with pytest.raises(IntegrityError, match="not all waiting"):
        engine.check()


def test_layers_of_different_groups_share_tensors() -> None:
    engine = toy_engine(TWO_GROUPS)
    layers = engine.kv_caches
    assert layers["layers.0"] is layers["layers.1"]
    assert layers["layers.2"] is layers["layers.3"]
    assert layers["layers.0"] is not layers["layers.2"]
    assert layers["layers.0"].shape == (65, 2, 4, 1, 2)
    assert toy_engine(kv_layout="kv_first").kv_caches["layers.0"].shape == (2, 65, 4, 1, 2)


# -- configs and models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"num_blocks": 2},
            r"num_blocks: expected a whole number of at least 3 \(the null block and two to use\), got 2",
        ),
        ({"num_blocks": "9"}, "num_blocks: expected a whole number of at least 3 .*, got '9'"),
        ({"num_blocks": 10**400}, "num_blocks: expected a whole number of at most 2147483647, got 1000"),
        (
            {"max_model_len": -(10**5000)},
            "max_model_len: expected a whole number of at least 2 .*, got a value",
        ),
        ({"device": None}, "device: expected one of 'cpu', 'cuda', got None"),
        ({"block_size": 0}, "block_size: expected a whole number of at least 1, got 0"),
        ({"state_interval": -16}, "state_interval: expected a whole number of at least 0, got -16"),
        ({"state_interval": 8}, r"state_interval: expected None or a multiple of block_size \(16\), got 8"),
        ({"max_num_seqs": 0}, "max_num_seqs: expected a whole number of at least 1, got 0"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens: .*, got True"),
        ({"max_model_len": 1}, "max_model_len: expected a whole number of at least 2 .*, got 1"),
        ({"dtype": "int8"}, "dtype: expected one of 'float32', 'float16', 'bfloat16', got 'int8'"),
        ({"compute_dtype": "f64"}, "compute_dtype: expected one of .*, got 'f64'"),
        ({"kv_layout": "hnd"}, "kv_layout: expected one of 'blocks_first', 'kv_first', got 'hnd'"),
        ({"device": 1}, "device: expected one of 'cpu', 'cuda', got 1"),
        ({"seed": "a"}, "seed: expected an int of at most 64 bits, got 'a'"),
        ({"seed": 2**64}, "seed: .* got 18446744073709551616"),
        ({"num_blocks": -(10**5000)}, "num_blocks: .* got a value of type int that cannot be printed"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching: expected one of True, False, got 'no'"),
        ({"kv_events": 1}, "kv_events: expected one of None, True, False, got 1"),
        ({"device": "tpu"}, "device: expected one of 'cpu', 'cuda', got 'tpu'"),
        ({"device": "cpu:0"}, "device: expected one of 'cpu', 'cuda', got 'cpu:0'"),
        ({"device": "cuda:x"}, "device: expected one of 'cpu', 'cuda', got 'cuda:x'"),
    ],
)
def test_bad_settings_are_one_clear_line(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        EngineConfig(**{"num_blocks": 8} | settings)
    assert caught.value.path == next(iter(settings))


def test_settings_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="max_model_len: expected at most the model's 4096 positions, got 5000"
    ):
        toy_engine(max_model_len=5000)
    with pytest.raises(
        ConfigError, match=r"num_blocks: expected at least one block .* for each of 3 groups, got 3"
    ):
        toy_engine((None, 5, 9), num_blocks=3)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        ConfigError, match="device: expected a device that torch can use here, got 'cuda'; try 'cpu'"
    ):
        Engine.from_config(tiny(), EngineConfig(num_blocks=8, device="cuda"))


def test_a_real_model_from_a_config_and_from_a_folder(tmp_path: Path) -> None:
    """Small chunks, preemption and a second group change nothing where arithmetic is wider than
    the cache.
    """
    model = tiny(
        model_type="ministral",
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [tokens(30), tokens(9, seed=1), [*tokens(20), *tokens(5, seed=2)]]
    roomy = EngineConfig(num_blocks=200, compute_dtype="float64")
    wanted = [
        output.token_ids for output in Engine.from_config(model, roomy, seed=5).generate(prompts, params)
    ]
    save_model(tmp_path, model, random_weights(ModelConfig.from_dict(model), 5))
    tight = EngineConfig(num_blocks=26, block_size=4, max_num_batched_tokens=7, compute_dtype="float64")
    engine = Engine.from_folder(tmp_path, tight)
    outputs = engine.generate(prompts, params)
    assert [output.token_ids for output in outputs] == wanted
    assert sum(output.preemptions for output in outputs) >= 1
    expect_idle(engine)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: expected a JSON file, there is none"):
        Engine.from_folder(tmp_path, EngineConfig(num_blocks=8))


# -- whose outputs ---------------------------------------------------------------------------------


def test_outputs_of_other_requests_wait_for_who_takes_them() -> None:
    """`generate` and `drain` took what `step` should have returned, and threw it away."""
    engine, short, long = toy_engine(), SamplingParams(max_tokens=3), SamplingParams(max_tokens=10)
    name = engine.add_request(tokens(9), short)
    (own,) = engine.generate([tokens(7, seed=1)], long)
    assert own.token_ids == expect(engine, tokens(7, seed=1), long)
    assert engine.has_unfinished(), "an output is to be had"
    (other,) = engine.step()
    assert (other.request_id, other.finished) == (name, True)
    assert other.token_ids == expect(engine, tokens(9), short)
    assert not engine.has_unfinished()
    names = [engine.add_request(tokens(9, seed=seed), short) for seed in range(3)]
    drained = {output.request_id: output for output in engine.drain()}
    assert [drained[added].token_ids for added in names] == [
        expect(engine, tokens(9, seed=seed), short) for seed in range(3)
    ]
    assert engine.step() == engine.drain() == []


def test_an_aborted_request_is_told_by_abort_alone() -> None:
    engine = toy_engine()
    name = engine.add_request(tokens(9), SamplingParams(max_tokens=50))
    engine.generate([tokens(7, seed=1)], SamplingParams(max_tokens=5))
    aborted = engine.abort(name)
    assert aborted is not None
    assert aborted.token_ids
    assert engine.step() == []


def test_outputs_that_wait_are_told_apart_though_they_have_one_id() -> None:
    engine = toy_engine()
    for seed in range(2):
        engine.add_request(tokens(9, seed=seed), SamplingParams(max_tokens=2), request_id="a")
        engine.generate([tokens(7)], SamplingParams(max_tokens=8))
    params = SamplingParams(max_tokens=2)
    assert [output.token_ids for output in engine.step()] == [
        expect(engine, tokens(9, seed=seed), params) for seed in range(2)
    ]


# -- what cannot be --------------------------------------------------------------------------------


def test_blocks_that_no_memory_holds_are_refused_before_they_are_made() -> None:
    """It made Python objects for minutes, and then the machine had no memory left."""
    with pytest.raises(
        ConfigError, match=r"num_blocks: 2147483647 blocks need .* but only .* lower num_blocks"
    ):
        toy_engine(num_blocks=2**31 - 1)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Engine(ToyModel(), {}), "config: expected EngineConfig, got {}"),  # type: ignore[arg-type]
        (lambda: Engine(ToyModel(), None), "config: expected EngineConfig, got None"),  # type: ignore
        (lambda: Engine(ToyModel(), CONFIG, {"cpu": {}}), "kvtier: expected KVTierConfig"),  # type: ignore
        (lambda: Engine.from_folder(3, CONFIG), "path: expected the path of a folder"),  # type: ignore
        (lambda: Engine.from_folder("a\0b", CONFIG), "path: expected the path of a folder"),
        (lambda: Engine.from_folder("a", {}), "config: expected EngineConfig"),  # type: ignore[arg-type]
        (lambda: Engine.from_config({}, {}), "config: expected EngineConfig"),  # type: ignore[arg-type]
        (lambda: toy_engine().explain([]), "request_id: expected text"),  # type: ignore[arg-type]
    ],
)
def test_values_of_wrong_types_are_refused_in_one_line(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        make()


CONFIG = EngineConfig(num_blocks=8)
