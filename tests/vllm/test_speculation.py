"""Speculative decoding: drafts are accepted as often after a load as when all was computed, and tokens are
the same.

The KV of an EAGLE head depends on the token after its own, so two prompts that part at the end of a block
have different KV in a block of the same name. A wrong token cannot come of it, since the model verifies
drafts; fewer accepted drafts can.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.vllm.conftest import tokens_of
from tests.vllm.device import on_gpu
from tests.vllm.engines import BLOCK, Engine, Output, Prompt, make_prompt, vllm_engine
from tests.vllm.models import Drafting, save_eagle, save_eagle3, save_hybrid, save_mtp
from tests.vllm.test_async_scheduling import async_scheduling
from tests.vllm.test_contract import engine_config

from kvtier.offload import ReqContext

__all__ = ["async_scheduling"]  # a fixture

SHARED = [make_prompt(seed, 2 * BLOCK) for seed in range(12)]
FIRST, SECOND = (
    [shared + make_prompt(other + seed, 5) for seed, shared in enumerate(SHARED)] for other in (100, 200)
)
NEW_TOKENS = 24

pytestmark = pytest.mark.timeout(300)  # engines start slowly on a busy machine


MODELS = {
    "eagle": save_eagle,
    "eagle_windowed": partial(save_eagle, windowed=True),
    "eagle3": save_eagle3,
    "mtp": save_mtp,
}
FOLDER = "drafting"
"""Of models. vLLM takes a draft model for an EAGLE head if `eagle3` is in its path, as in `eagle31`."""


@pytest.fixture(scope="module", params=MODELS)
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    """A model with one group or two, and what drafts for it."""
    return MODELS[request.param](tmp_path_factory.mktemp(FOLDER))


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    """A model with one group, and a head for it."""
    return save_eagle(tmp_path_factory.mktemp(FOLDER))


@contextmanager
def drafting_engine(drafting: Drafting, *, drops_blocks: bool = True, **options: Any) -> Iterator[Engine]:
    """Run an engine with kvtier that drafts. A step takes all prompts whole.

    Where it ends within a prompt, vLLM 0.32 gives its head the last token of the prompt for the next.
    """
    drops = {"disable_eagle_block_drop": not drops_blocks}
    config = drafting.config | drops | {"num_speculative_tokens": 3}
    options |= {"num_blocks": 128, "max_num_batched_tokens": 1024, "max_num_seqs": 16}
    patient = {"load_deadline": "60s", "store_deadline": "60s"}  # nothing is given up on a busy machine
    with vllm_engine(drafting.target, patient, speculative_config=config, **options) as engine:
        yield engine


def run(engine: Engine, prompts: list[Prompt]) -> tuple[list[Output], int]:
    """Return what became of prompts, and how many drafts were accepted."""
    before = count_accepted(engine)
    outputs = engine.generate(prompts, NEW_TOKENS)
    return outputs, count_accepted(engine) - before


def count_accepted(engine: Engine) -> int:
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(metric.value for metric in engine.llm.get_metrics() if metric.name == name)


def test_drafts_are_accepted_as_often(drafting: Drafting) -> None:
    with drafting_engine(drafting) as engine:
        computed, expected = run(engine, SECOND)
        engine.forget(tiers_too=True)
        run(engine, FIRST)
        engine.forget()
        loaded, accepted = run(engine, SECOND)
        engine.settle()
        loads = engine.stats.loads
        cached, accepted_by_cache = run(engine, SECOND)
        engine.settle()
        assert engine.stats.loads == loads, "what vLLM drops of its own hit is not loaded"
    assert [output.cached for output in loaded + cached] == [BLOCK] * 24
    assert accepted == accepted_by_cache == expected
    assert expected > 150, "else the drafts are too bad to tell"
    assert tokens_of(computed) == tokens_of(loaded) == tokens_of(cached)


@pytest.mark.parametrize("drafting", ["eagle", "eagle3", "mtp"], indirect=True)
def test_less_often_if_the_lookahead_is_overlooked(drafting: Drafting) -> None:
    """The negative control, by a flag of vLLM's that has the last block not dropped."""
    with drafting_engine(drafting, drops_blocks=False) as engine:
        computed, expected = run(engine, SECOND)
        engine.forget(tiers_too=True)
        run(engine, FIRST)
        engine.forget()
        loaded, accepted = run(engine, SECOND)
    assert [output.cached for output in loaded] == [2 * BLOCK] * 12
    assert accepted < expected
    assert tokens_of(computed) == tokens_of(loaded)


def test_a_chain_of_heads_looks_back_further(
    eagle: Drafting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For heads that each look one token further ahead (MTP with several modules) vLLM keeps more than a
    window, and takes all of it for loaded: a block that was not gave wrong tokens to the next request.

    The chain is vLLM's word alone: its CPU build runs the first head for all of them.
    """
    if on_gpu():
        pytest.skip("vLLM's runner for GPUs would run heads that this model does not have")
    from vllm.config import SpeculativeConfig

    monkeypatch.setattr(SpeculativeConfig, "use_multi_module_mtp", lambda config: True)
    target = save_hybrid(tmp_path, window=2 * BLOCK)
    prompt = make_prompt(0, 6 * BLOCK)
    other = prompt[: 5 * BLOCK] + make_prompt(1, 3)
    with drafting_engine(Drafting(target, eagle.config)) as engine:
        expected = engine.logprobs(other)
        engine.forget(tiers_too=True)
        engine.generate([prompt])
        engine.forget()
        (loaded,) = engine.generate([prompt])
        assert loaded.cached == 5 * BLOCK
        assert engine.logprobs(other) == pytest.approx(expected, abs=1e-3)
        assert engine.stats.loads == 1, "else vLLM did not take what it has kept"


@contextmanager
def noted_keys(engine: Engine) -> Iterator[list[Any]]:
    """Note the keys of chunks that are offered to the pool."""
    manager = engine.connector._connector.connector_scheduler.manager
    keys, prepare_store = [], manager.prepare_store

    def note(offered: Any, context: Any) -> Any:
        keys.extend(offered)
        return prepare_store(offered, context)

    manager.prepare_store = note
    yield keys
    manager.prepare_store = prepare_store


def stored_rows(engine: Engine, prompt: Prompt, max_tokens: int) -> tuple[list[int], dict[Any, Any]]:
    """Compute a prompt, and return its tokens and what was stored of it, by key. Then forget all."""
    with noted_keys(engine) as keys:
        (output,) = engine.generate([prompt], max_tokens)
        engine.settle()
    manager = engine.connector._connector.connector_scheduler.manager
    rows = engine.worker._connector.connector_worker.spec.open_pool().rows
    slots = manager.prepare_load(keys, ReqContext()).block_ids
    manager.complete_load(keys)
    found = {key: rows[slot].view("float32").copy() for key, slot in zip(keys, slots, strict=True)}
    engine.forget(tiers_too=True)
    return output.tokens, found


def is_close(rows: dict[Any, Any], others: dict[Any, Any]) -> bool:
    return all(np.allclose(rows[key], others[key], atol=1e-3) for key in rows.keys() & others.keys())


def check_rows(engine: Engine) -> None:
    """Expect what was stored while drafting to be the KV of a prompt with the same tokens."""
    prompt = make_prompt(0, 20)
    tokens, drafted = stored_rows(engine, prompt, 4 * BLOCK)
    assert 0 < count_accepted(engine) < len(tokens), "some drafts are accepted and some are not"
    _, computed = stored_rows(engine, prompt + tokens, 1)
    assert len(drafted.keys() & computed.keys()) == 4
    assert is_close(drafted, computed)
    # The control: another token after a block changes what the head has of its last token.
    _, other = stored_rows(engine, (prompt + tokens)[: 2 * BLOCK] + [7, 7], 1)
    assert len(other.keys() & computed.keys()) == 2
    assert not is_close(other, computed)


def test_chunks_stored_while_drafting_are_final(eagle: Drafting) -> None:
    with drafting_engine(eagle) as engine:
        check_rows(engine)


@pytest.mark.usefixtures("async_scheduling")
def test_and_with_steps_that_are_scheduled_ahead(eagle: Drafting) -> None:
    with drafting_engine(eagle, async_scheduling=True) as engine:
        assert engine.core.batch_queue is not None, "two steps at a time"
        check_rows(engine)


@pytest.mark.parametrize(
    ("speculative", "expected"),
    [
        ({"method": "eagle"}, 1),
        ({"method": "eagle", "disable_eagle_block_drop": True}, 0),
        ({"method": "draft_model"}, 0),
        ({"method": "ngram", "prompt_lookup_max": 3}, 0),
    ],
)
def test_how_far_heads_look_ahead(
    eagle: Drafting,
    monkeypatch: pytest.MonkeyPatch,
    speculative: dict[str, Any],
    expected: int,
) -> None:
    from vllm.config import SpeculativeConfig

    from kvtier.integrations.vllm.describe import kv_lookahead

    head = {} if speculative["method"] == "ngram" else {"model": eagle.config["model"]}
    speculative = speculative | head | {"num_speculative_tokens": 3}
    config = engine_config(eagle.target, speculative_config=speculative)
    assert kv_lookahead(config) == expected
    # Of a chain of heads (MTP) each looks one token further ahead than the one before it.
    monkeypatch.setattr(SpeculativeConfig, "use_multi_module_mtp", lambda config: True)
    assert kv_lookahead(config) == 3 * expected
