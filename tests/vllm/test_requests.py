"""What one request may ask for, in the words of vLLM and its own connector; and the least cache there is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.engines import BLOCK, Engine, Output, make_prompt, vllm_engine

PROMPT = make_prompt(0, 200)


def run(engine: Engine, transfer: Any = None, **options: Any) -> Output:
    """Run the prompt with parameters of its own."""
    more = options if transfer is None else options | {"extra_args": {"kv_transfer_params": transfer}}
    (done,) = engine.llm.generate([{"prompt_token_ids": PROMPT}], engine.params(8, **more), use_tqdm=False)
    engine.settle()
    return Output(list(done.outputs[0].token_ids), done.num_cached_tokens)


@pytest.mark.parametrize(
    ("limit", "kept"), [(0, 0), (31, 0), (100, 96), (1000, 192), ("all", 192), (-1, 192)]
)
def test_only_so_many_tokens_are_stored(llama: Path, limit: Any, kept: int) -> None:
    with vllm_engine(llama, {}) as engine:
        run(engine, {"max_offload_tokens": limit})
        engine.forget()
        assert run(engine).cached == kept


@pytest.mark.parametrize(("limit", "loaded"), [(0, 0), (31, 0), (100, 96), (1000, 192), (True, 192)])
def test_only_so_many_tokens_are_loaded(model: Path, reference: Reference, limit: Any, loaded: int) -> None:
    with vllm_engine(model, {}) as engine:
        run(engine)
        engine.forget()
        again = run(engine, {"max_load_tokens": limit})
    assert (again.cached, [again.tokens]) == (loaded, reference(model, [PROMPT]))


def test_a_request_that_skips_the_cache_loads_nothing_and_is_stored(llama: Path) -> None:
    with vllm_engine(llama, {}) as engine:
        first = run(engine, skip_reading_prefix_cache=True)
        engine.forget()
        again = run(engine, {"kvtier": {"explain": True}}, skip_reading_prefix_cache=True)
        assert engine.stats.loads == engine.stats.waits == 0
        assert run(engine).cached == 192
    assert (first.cached, again.cached) == (0, 0)
    assert first.tokens == again.tokens


def test_a_cache_of_two_blocks(llama: Path, reference: Reference) -> None:
    """Its two blocks were taken for K and V, and the engine did not start."""
    prompt = make_prompt(3, BLOCK - 12)
    expected = reference(llama, [prompt], 8)
    with vllm_engine(llama, {}, num_blocks=2, max_model_len=BLOCK, max_num_batched_tokens=BLOCK) as engine:
        assert tokens_of(engine.generate([prompt], 8)) == expected
        worker = engine.worker._connector.connector_worker
        assert worker._handlers.keys() >= {("GPU", "CPU"), ("CPU", "GPU")}


JUNK: list[Any] = [
    "",
    0,
    [],
    False,
    {"kvtier": "x"},
    {"kvtier": {"explain": "yes"}},
    {"max_load_tokens": [1]},
]


def test_parameters_of_any_type_leave_the_engine_alive(llama: Path, reference: Reference) -> None:
    """One HTTP request with `{"vllm_xargs": {"kv_transfer_params": ""}}` ended the server."""
    with vllm_engine(llama, {}) as engine:
        run(engine)
        engine.forget()
        outputs = [run(engine, junk).tokens for junk in JUNK]
        for junk in ("x", 3, ["a"]):  # vLLM's front end refuses these; its scheduler would not
            request = SimpleNamespace(request_id="r", kv_transfer_params=junk)
            engine.connector.on_new_request(request)
            assert request.kv_transfer_params is None
    assert outputs == reference(llama, [PROMPT]) * len(JUNK)
