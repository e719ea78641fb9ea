"""The functions to ask an engine that all runs share, also the runs in processes that are killed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

from kvtier.demo.result import RequestResult
from kvtier.demo.workload import Turn

if TYPE_CHECKING:
    from kvtier.engine import Engine, RequestOutput

__all__ = ["play", "request_result", "warm_up"]

_WARM_UP_TOKENS = 64


def play(
    engine: Engine, prompts: Mapping[Turn, Sequence[int]], *, answer: int, concurrency: int
) -> Iterator[RequestResult]:
    """Ask prompts in their order, `concurrency` at a time, and yield the result of each."""
    from kvtier.engine import SamplingParams

    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    waiting, asking = deque(prompts), dict[str, Turn]()
    while waiting or asking:
        while waiting and len(asking) < concurrency:
            turn = waiting.popleft()
            asking[engine.add_request(prompts[turn], params)] = turn
        for output in engine.step():
            if output.finished:
                turn = asking.pop(output.request_id)
                yield request_result(turn, len(prompts[turn]), output)


def request_result(turn: Turn, prompt_tokens: int, output: RequestOutput) -> RequestResult:
    """Return the measurements of a finished request."""
    source, ttft = output.source, output.ttft
    assert source is not None
    assert ttft is not None
    return RequestResult(
        conversation=turn.conversation,
        turn=turn.turn,
        prompt_tokens=prompt_tokens,
        token_ids=tuple(output.token_ids),
        from_gpu=source.gpu,
        from_tiers=dict(source.tiers),
        recomputed=source.recomputed,
        first_miss=None if source.first_miss is None else source.first_miss.value,
        ttft=ttft,
        preemptions=output.preemptions,
    )


def warm_up(engine: Engine, seed: int) -> None:
    """Run a request that shares nothing with the workload: the first pass of a process pays for set-up."""
    from kvtier.engine import SamplingParams

    prompt = _random_prompt(engine, f"{seed}/warm-up", _WARM_UP_TOKENS)
    engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.drain()


def _random_prompt(engine: Engine, seed: str, length: int) -> list[int]:
    """Return `length` tokens that no conversation has; fewer if the engine has no room for so many."""
    random, vocabulary = Random(seed), engine.model.config.vocab_size
    return [random.randrange(vocabulary) for _ in range(min(length, engine.max_model_len - 2))]
