"""Models with recurrent layers (Mamba 2, gated delta nets) and with chunked-local attention: the tokens are
those of vLLM alone, and only exact states are kept and loaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.seeds import seeds
from tests.vllm.conftest import tokens_of
from tests.vllm.device import on_gpu
from tests.vllm.disks import disk_tier
from tests.vllm.engines import BLOCK, Engine, Prompt, make_prompt, vllm_engine
from tests.vllm.models import save_granite, save_llama4, save_qwen3_next
from tests.vllm.test_contract import is_at_least
from tests.vllm.test_faults import DEADLINES, FAULTY, KINDS, use
from tests.vllm.test_tiers import wait_open, wait_written

from kvtier.testing.faults import FaultPlan

POOL = {"cpu": {"capacity": "256MiB"}}


class Model(NamedTuple):
    """A saved model, the options of its engines, and the tokens between two states or local chunks."""

    path: Path
    options: dict[str, Any]
    block: int
    is_recurrent: bool = True

    def prompts(self, *lengths: float) -> list[Prompt]:
        """Return prompts of so many blocks."""
        return [make_prompt(seed, round(length * self.block)) for seed, length in enumerate(lengths)]

    def around_boundaries(self) -> list[Prompt]:
        """Return prompts that end at a boundary, a token before it, or a token behind it."""
        counts = [n * self.block + more for n in (1, 2, 3) for more in (-1, 0, 1)]
        return [make_prompt(seed, count) for seed, count in enumerate(counts)]

    def most_cached(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt can be loaded, if the state at its last boundary is kept.

        A state that has seen the last token would see it twice.
        """
        if self.is_recurrent:
            return (len(prompt) - 1) // self.block * self.block
        return min(len(prompt) // BLOCK * BLOCK, len(prompt) - 1)

    @contextmanager
    def engine(self, kvtier: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
        """Run an engine."""
        settings = None if kvtier is None else POOL | kvtier
        with vllm_engine(self.path, settings, **(self.options | options)) as engine:
            yield engine


# The scan of vLLM's CPU build keeps no state within a step, so its steps are a block long.
_GRANITE = {"max_model_len": 1024, "max_num_batched_tokens": 128, "block_size": 128, "num_blocks": 64}
_QWEN = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 1152,
    "num_blocks": 64,
    "dtype": "bfloat16",
    "block_size": 128,
    "additional_config": {"gdn_prefill_backend": "triton"} if on_gpu() else {},
}
_LLAMA4 = {"max_model_len": 1024, "max_num_batched_tokens": 256, "num_blocks": 128}


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Model:
    skip_without_convolution()
    return Model(save_granite(tmp_path_factory.mktemp("granite")), _GRANITE, 128)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    model = Model(save_qwen3_next(tmp_path_factory.mktemp("qwen")), _QWEN, 0)
    with model.engine() as engine:  # vLLM makes its blocks large enough for a state
        block = engine.core.vllm_config.cache_config.block_size
    # In bfloat16 tokens depend on the steps that a prompt is computed in, so all engines have the same.
    return model._replace(block=block, options=_QWEN | {"max_num_batched_tokens": block})


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(save_llama4(tmp_path_factory.mktemp("llama4")), _LLAMA4, 128, is_recurrent=False)


@pytest.fixture(params=["granite", "qwen", "llama4"])
def model(request: pytest.FixtureRequest) -> Model:
    """Each of the models."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Model)
    return found


@pytest.fixture(params=["granite", "qwen"])
def recurrent(request: pytest.FixtureRequest) -> Model:
    """Each of the models with states."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Model)
    return found


def skip_without_convolution() -> None:
    """Skip where vLLM has no kernels for a Mamba 2 layer in float32."""
    if not (is_at_least("0.32") or on_gpu()):
        pytest.skip("the CPU build of vLLM 0.31 has no convolution in float32")


Reference = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Give the tokens of prompts as vLLM computes them without a connector, with room for all of them."""
    known: dict[tuple[Path, str], list[list[int]]] = {}

    def compute(model: Model, prompts: list[Prompt], max_tokens: int = 16) -> list[list[int]]:
        key = model.path, repr((prompts, max_tokens))
        if key not in known:
            with model.engine(num_blocks=256) as engine:
                known[key] = one_by_one(engine, prompts, max_tokens)
            distinct = {token for tokens in known[key] for token in tokens}
            assert len(distinct) > len(prompts), "else a wrong state would not show"
        return known[key]

    return compute


def one_by_one(engine: Engine, prompts: list[Prompt], max_tokens: int = 16) -> list[list[int]]:
    """Run prompts one after the other: in bfloat16, rounding depends on what is computed together."""
    return [engine.generate([prompt], max_tokens)[0].tokens for prompt in prompts]


def scheduler_of(engine: Engine) -> Any:
    return engine.connector._connector.connector_scheduler


# -- same tokens ------------------------------------------------------------------------------------


def test_prompts_around_boundaries_come_back(model: Model, reference: Reference) -> None:
    prompts = model.around_boundaries()
    with model.engine({}) as engine:
        first = [engine.generate([prompt], 16)[0] for prompt in prompts]
        engine.forget()
        again = [engine.generate([prompt], 16)[0] for prompt in prompts]
    assert tokens_of(first) == tokens_of(again) == reference(model, prompts)
    assert [output.cached for output in first] == [0] * len(prompts)
    assert [output.cached for output in again] == list(map(model.most_cached, prompts))


@pytest.mark.parametrize("retention", [0, None, 256])
def test_retention_decides_which_states_are_kept(
    granite: Model, reference: Reference, retention: int | None
) -> None:
    (prompt,) = granite.prompts(5.5)
    shorter = prompt[: 3 * granite.block + 5]
    with granite.engine({}, prefix_cache_retention_interval=retention) as engine:
        engine.generate([prompt])
        engine.forget()
        short = engine.generate([shorter], 16)[0]
        engine.forget()
        again = engine.generate([prompt], 16)[0]
    assert [short.tokens, again.tokens] == reference(granite, [shorter, prompt])
    assert again.cached == 5 * granite.block
    expected = {0: 0, None: 3, 256: 2}[retention]  # the last boundary, every boundary, every second one
    assert short.cached == expected * granite.block


@pytest.mark.parametrize("blocks_per_chunk", [2, 3])
def test_chunks_of_several_blocks(model: Model, reference: Reference, blocks_per_chunk: int) -> None:
    prompts, options = model.prompts(1.5, 2, 3.5, 5.1), {}
    if model.is_recurrent:  # a state at every boundary
        options = {"prefix_cache_retention_interval": None, "max_num_batched_tokens": model.block}
    with model.engine({"blocks_per_chunk": blocks_per_chunk}, **options) as engine:
        first = one_by_one(engine, prompts)
        engine.forget()
        again = [engine.generate([prompt], 16)[0] for prompt in prompts]
    assert first == tokens_of(again) == reference(model, prompts)
    if model.is_recurrent:
        chunk = blocks_per_chunk * model.block
        assert [output.cached for output in again] == [(len(p) - 1) // chunk * chunk for p in prompts]


def test_prompts_that_share_a_prefix(model: Model, reference: Reference) -> None:
    shared = make_prompt(0, round(2.2 * model.block))
    prompts = [shared + make_prompt(seed, seed * model.block // 3) for seed in range(1, 7)]
    with model.engine({}) as engine:
        one_by_one(engine, prompts)
        engine.forget()
        again = [engine.generate([prompt], 16)[0] for prompt in prompts]
        engine.settle()
        assert engine.stats.loads > 0
    assert tokens_of(again) == reference(model, prompts)


def test_turns_of_a_chat(model: Model, reference: Reference) -> None:
    """Each turn goes on from the answer to the one before, in a cache that other prompts have emptied."""
    rng = random.Random(3)
    turns = [make_prompt(0, round(1.3 * model.block))]
    with model.engine({}) as engine:
        for turn in range(1, 4):
            answer = engine.generate([turns[-1]], 16)[0].tokens
            turns.append(turns[-1] + answer + make_prompt(rng.randrange(10**6), model.block * turn // 2))
            engine.forget()
        engine.settle()
        assert engine.stats.loads >= 2
        again = one_by_one(engine, turns)
    assert again == reference(model, turns)


def test_a_part_in_vllms_cache_and_the_rest_in_the_pool(model: Model, reference: Reference) -> None:
    (prompt,) = model.prompts(4.4)
    options = {"prefix_cache_retention_interval": None} if model.is_recurrent else {}
    with model.engine({}, **options) as engine:
        engine.generate([prompt])
        engine.forget()
        engine.generate([prompt[: 2 * model.block + 1]])
        loaded = engine.stats.load_bytes
        again = engine.generate([prompt], 16)[0]
        engine.settle()
        assert engine.stats.load_bytes > loaded
    assert again.tokens == reference(model, [prompt])[0]
    assert again.cached >= 4 * model.block


# -- eviction, preemption, faults -------------------------------------------------------------------


def _mixed(model: Model) -> list[Prompt]:
    """Return prompts that share prefixes, of up to three blocks."""
    block = model.block
    return [
        make_prompt(i % 6, block // 2 + i * block * 5 // 8 % (2 * block)) + make_prompt(100 + i, i * 13 % 60)
        for i in range(16)
    ]


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5])
def test_scarce_blocks_and_faults(granite: Model, reference: Reference, rate: float) -> None:
    """In float32, so that requests may run together, be preempted, and be loaded in any order."""
    prompts = _mixed(granite)
    expected = reference(granite, prompts, 40)
    plan = use(FaultPlan(1, rate, KINDS))
    with granite.engine(DEADLINES, connector=FAULTY, num_blocks=18) as engine:
        rounds = [tokens_of(engine.generate(prompts, 40)) for _ in range(3)]
        engine.settle()
        assert engine.stats.loads > engine.stats.loads_failed
    assert rounds == [expected] * 3
    assert bool(plan.injected) == (rate > 0)


def test_local_chunks_with_scarce_blocks_and_faults(llama4: Model, reference: Reference) -> None:
    prompts = _mixed(llama4)
    use(FaultPlan(7, 0.2, KINDS))
    with llama4.engine(DEADLINES, connector=FAULTY, num_blocks=72, max_model_len=448) as engine:
        rounds = [tokens_of(engine.generate(prompts, 40)) for _ in range(3)]
        engine.settle()
        assert engine.stats.loads > engine.stats.loads_failed > 0
    assert rounds == [reference(llama4, prompts, 40)] * 3


def test_a_preempted_request_leaves_no_wrong_state(granite: Model, reference: Reference) -> None:
    """Preempted between a boundary and its store's end, a request computes its prompt again."""
    prompts = granite.prompts(*[0.9] * 8)
    expected = reference(granite, prompts, 300)
    with granite.engine({}, num_blocks=24, max_model_len=640) as engine:
        first = tokens_of(engine.generate(prompts, 300))
        assert engine.count_preemptions() > 0
        engine.forget()
        again = tokens_of(engine.generate(prompts, 300))
    assert first == again == expected


class _RandomEngine:
    """An engine with random settings that runs random prompts, some of which are aborted."""

    def __init__(self, model: Model, seed: int) -> None:
        self.rng, self.model = random.Random(seed), model
        self.rate = self.rng.choice([0.0, 0.05, 0.2, 0.5])
        self.prompts = self._draw_prompts()

    def _draw_prompts(self) -> list[Prompt]:
        rng, block = self.rng, self.model.block
        stems = [make_prompt(rng.randrange(4), block * n + rng.choice([-1, 0, 1])) for n in (1, 2, 3)]
        return [
            rng.choice(stems) + make_prompt(rng.randrange(10**6), rng.choice([0, 1, 7, block - 1, block]))
            for _ in range(8)
        ]

    def run(self) -> dict[str, list[int]]:
        """Run each prompt several times, in an order and beside others that chance decides."""
        rng = self.rng
        use(FaultPlan(rng.randrange(10**6), self.rate, KINDS))
        settings = DEADLINES | {"blocks_per_chunk": rng.choice([1, 1, 2]), "prompt_only": rng.random() < 0.3}
        options = {
            "num_blocks": rng.choice([18, 24, 40]),
            "max_num_seqs": rng.choice([2, 4, 8]),
            "prefix_cache_retention_interval": rng.choice([0, 0, None, 256]),
        }
        answers: dict[str, list[int]] = {}
        with self.model.engine(settings, connector=FAULTY, **options) as engine:
            for turn in range(3):
                order = rng.sample(range(len(self.prompts)), len(self.prompts))
                for at in order:
                    engine.add(f"{turn}-{at}", self.prompts[at], 20)
                    for _ in range(rng.randrange(4)):
                        answers |= engine.step()
                    if rng.random() < 0.1:
                        engine.llm.llm_engine.abort_request([f"{turn}-{rng.choice(order)}"])
                answers |= engine.run()
                if rng.random() < 0.7:
                    engine.forget(tiers_too=rng.random() < 0.1)
            engine.settle()
        return answers


@pytest.mark.parametrize("seed", seeds(6, few=2))
def test_random_engines(granite: Model, reference: Reference, seed: int) -> None:
    engine = _RandomEngine(granite, seed)
    answers = engine.run()
    expected = reference(granite, engine.prompts, 20)
    wrong = {name for name, tokens in answers.items() if tokens != expected[int(name.split("-")[1])]}
    assert len(answers) >= 2 * len(engine.prompts)
    assert not wrong


# -- controls: what these tests would notice --------------------------------------------------------


def _for_controls(model: Model) -> list[Prompt]:
    return model.prompts(2.5, 3.3)


def _again(model: Model, spoil: Callable[[Engine], None]) -> tuple[list[list[int]], int]:
    """Return the tokens of prompts that come back from a pool that was spoilt, and how many came from it."""
    prompts = _for_controls(model)
    options = {"prefix_cache_retention_interval": None, "max_num_batched_tokens": model.block}
    with model.engine({"audit": 0}, **options) as engine:
        spoil(engine)
        one_by_one(engine, prompts)
        engine.forget()
        again = [engine.generate([prompt], 16)[0] for prompt in prompts]
    return tokens_of(again), sum(output.cached for output in again)


def _change_states(engine: Engine, change: Callable[[list[Any]], list[Any]]) -> None:
    """Change the states that each step offers, by group."""
    connector = scheduler_of(engine)
    build = connector.build_connector_meta

    def changed(step: Any) -> Any:
        step.boundary_states = {req_id: change(offers) for req_id, offers in step.boundary_states.items()}
        return build(step)

    engine.connector._connector.connector_scheduler.build_connector_meta = changed


def test_states_one_boundary_off_are_noticed(recurrent: Model, reference: Reference) -> None:
    def one_off(engine: Engine) -> None:
        _change_states(
            engine,
            lambda offers: [offer._replace(boundary=offer.boundary - recurrent.block) for offer in offers],
        )

    tokens, cached = _again(recurrent, one_off)
    assert cached > 0
    assert tokens != reference(recurrent, _for_controls(recurrent))


def test_a_state_that_one_group_lacks_is_no_hit(recurrent: Model, reference: Reference) -> None:
    def lose(engine: Engine) -> None:
        _change_states(engine, lambda offers: [offer for offer in offers if offer.group != 1])

    tokens, cached = _again(recurrent, lose)
    assert cached == 0
    assert tokens == reference(recurrent, _for_controls(recurrent))


def test_positional_stores_would_be_noticed(recurrent: Model, reference: Reference) -> None:
    """The block that the table has where the next state goes is not the block of this state."""

    def positional(engine: Engine) -> None:
        _change_states(
            engine,
            lambda offers: [offer._replace(block_id=max(1, offer.block_id - 1)) for offer in offers],
        )

    tokens, cached = _again(recurrent, positional)
    assert cached > 0
    assert tokens != reference(recurrent, _for_controls(recurrent))


def test_wrong_bytes_would_be_noticed(model: Model, reference: Reference) -> None:
    (prompt,) = model.prompts(3.5)
    with model.engine({"audit": 0}) as engine:
        engine.generate([prompt])
        engine.forget()
        engine.falsify_pool()
        output = engine.generate([prompt], 16)[0]
    assert output.cached >= 3 * model.block
    assert output.tokens != reference(model, [prompt])[0]


# -- tiers, events, explanations, refusals -----------------------------------------------------------


def test_states_come_back_from_disk_after_a_restart(
    model: Model, reference: Reference, tmp_path: Path
) -> None:
    prompts = model.prompts(1.5, 2.01, 3.4)
    settings = disk_tier(tmp_path)
    with model.engine(settings) as engine:
        first = one_by_one(engine, prompts)
        wait_open(engine)
        wait_written(engine)
    with model.engine(settings) as engine:
        again = [engine.generate([prompt], 16)[0] for prompt in prompts]
        engine.settle()
    assert first == tokens_of(again) == reference(model, prompts)
    assert [output.cached for output in again] == list(map(model.most_cached, prompts))


def test_an_explanation_names_the_missing_state(granite: Model) -> None:
    (prompt,) = granite.prompts(4.5)
    shorter = prompt[: 3 * granite.block + 5]
    with granite.engine({}) as engine:  # one state, at the last boundary of a prompt
        engine.generate([prompt])
        engine.forget()
        engine.generate([shorter])
        explanations = scheduler_of(engine)._explainer._explained
        explanation = list(explanations.values())[-1]
    assert explanation.first_miss is not None
    assert explanation.first_miss.value == "no state at this boundary"
    assert explanation.first_missing_token == 0


def test_events_name_the_kind_of_each_group(granite: Model) -> None:
    from vllm.config import KVEventsConfig

    (prompt,) = granite.prompts(2.5)
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with granite.engine({}, kv_events_config=events) as engine:
        seen: list[Any] = []
        take = engine.connector.take_events

        def watched() -> Any:
            taken = list(take())
            seen.extend(taken)
            return taken

        engine.connector.take_events = watched
        engine.generate([prompt])
        engine.settle()
        kinds = [group.is_state for group in engine.connector._groups]
    stored = {(event.group_idx, event.kv_cache_spec_kind) for event in seen if hasattr(event, "token_ids")}
    assert stored == {(at, "mamba" if is_state else "full_attention") for at, is_state in enumerate(kinds)}
    states = [event for event in seen if event.kv_cache_spec_kind == "mamba"]
    assert {len(event.token_ids) for event in states} == {granite.block}
    assert {tuple(event.token_ids) for event in states} == {tuple(prompt[granite.block : 2 * granite.block])}


def test_models_whose_states_are_not_kept_are_refused(granite: Model) -> None:
    remedy = "turn prefix caching on"
    message = f"mamba_cache_mode: expected 'align', got 'none'.*{remedy}"
    with pytest.raises(Exception, match=message), granite.engine({}, enable_prefix_caching=False):
        pass


def test_a_reset_forgets_states(granite: Model, reference: Reference) -> None:
    (prompt,) = granite.prompts(3.5)
    with granite.engine({}) as engine:
        engine.generate([prompt])
        engine.forget(tiers_too=True)
        again = engine.generate([prompt], 16)[0]
    assert again.cached == 0
    assert again.tokens == reference(granite, [prompt])[0]
