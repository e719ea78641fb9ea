"""Steps that are scheduled ahead (asynchronous scheduling): same tokens, and a last block is kept.

vLLM turns it off on a CPU, where it wins nothing; its scheduler and runner do it there all the same.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.engines import BLOCK, make_prompt, vllm_engine
from tests.vllm.test_same_tokens import STRESS


@pytest.fixture
def async_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn it on."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_turn_on(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(platform, "check_and_update_config", staticmethod(check_and_turn_on))


@pytest.mark.usefixtures("async_scheduling")
def test_the_last_block_is_kept_and_tokens_are_the_same(model: Path, reference: Reference) -> None:
    """The key of a generated block is known a step late, and a request that has ended had none left."""
    prompt = make_prompt(0, 20)
    expected = reference(model, STRESS, 48)
    num_blocks = 20 if "llama" in model.name else 28  # the least for one prompt and the steps ahead
    with vllm_engine(model, {}, num_blocks=num_blocks, async_scheduling=True) as engine:
        assert engine.core.batch_queue is not None, "two steps at a time"
        first = engine.generate([prompt], 2 * BLOCK + 1 - len(prompt))[0].tokens  # the last token has no KV
        engine.forget()
        (again,) = engine.generate([[*prompt, *first, 7]])
        rounds = [tokens_of(engine.generate(STRESS, 48)) for _ in range(2)]
        engine.settle()
        assert engine.count_preemptions() > 0
        assert engine.stats.loads > 24
    assert again.cached == 2 * BLOCK
    assert rounds == [expected, expected]


@pytest.mark.usefixtures("async_scheduling")
def test_a_session_with_the_id_of_a_request_that_has_just_ended(
    llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not asked about, and its blocks were stored as the last block of the other."""
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    prompt = make_prompt(0, 20)
    num_tokens = 2 * BLOCK + 1 - len(prompt)
    (first,) = reference(llama, [prompt], num_tokens)
    again = [*prompt, *first, 7]
    expected = reference(llama, [again])
    with vllm_engine(llama, {}, async_scheduling=True) as engine:
        engine.add("x", prompt, num_tokens)
        assert engine.run() == {"x": first}
        engine.add("x", make_prompt(1, 100))
        session = engine.core.scheduler.requests["x"]
        session.resumable, session.streaming_queue = True, deque()
        for _ in range(4):
            engine.step()
        engine.llm.llm_engine.abort_request(["x"])
        engine.forget()
        assert tokens_of(engine.generate([again])) == expected
