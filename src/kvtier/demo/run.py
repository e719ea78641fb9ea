"""Plays the workload on an engine without kvtier and on one with it, and measures.

Both get the same prompts in the same order, and both are warm when the clock starts. Answers are greedy. By default activations
are float64, so that rounding does not depend on who shares a batch and the two runs can be compared token by token. Whatever
happens, the engines are closed. One thread.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from random import Random
from typing import TYPE_CHECKING, Protocol

from kvtier.config import format_size
from kvtier.demo.result import DemoResult, PoolUse, RequestResult, RunResult
from kvtier.demo.setup import DemoSettings, describe, open_engines, token_bytes
from kvtier.demo.workload import Turn

if TYPE_CHECKING:
    from kvtier.engine import Engine, RequestOutput

__all__ = ["Watcher", "run_demo"]

_WARM_UP_TOKENS = 64


class Watcher(Protocol):
    """Who wants to see progress. Calls come on the thread that runs the demo."""

    def note(self, text: str) -> None:
        """Say something worth knowing."""
        ...

    def begin(self, run: str, requests: int) -> None:
        """Tell that a run, `off` or `on`, begins."""
        ...

    def advance(self, run: str, request: RequestResult) -> None:
        """Tell that a request of it has finished."""
        ...

    def end(self, run: str, result: RunResult) -> None:
        """Tell that it is over."""
        ...


def run_demo(settings: DemoSettings, watcher: Watcher) -> DemoResult:
    """Run the workload without and with kvtier and return what was measured."""
    with ExitStack() as stack:
        on, off = open_engines(settings, stack)
        _note_capacity(settings, on, watcher)
        runs = [_run(name, engine, settings, watcher) for name, engine in (("off", off), ("on", on))]
        return DemoResult(runs[0], runs[1], describe(settings, on))


def _run(name: str, engine: Engine, settings: DemoSettings, watcher: Watcher) -> RunResult:
    """Play the whole workload on one engine."""
    _warm_up(engine, settings.workload.seed)
    watcher.begin(name, settings.workload.requests)
    people = _People(engine, settings)
    start, start_cpu = time.perf_counter(), time.process_time()
    while people.are_talking():
        people.ask()
        for output in engine.step():
            if output.finished:
                watcher.advance(name, people.take_answer(output))
    wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    engine.drain()
    engine.check()
    result = RunResult(people.results(), wall, cpu, _pool_use(engine))
    watcher.end(name, result)
    return result


class _People:
    """Those who talk to an engine: `concurrency` at a time, in a fixed order, each with all that was said before."""

    def __init__(self, engine: Engine, settings: DemoSettings) -> None:
        from kvtier.engine import SamplingParams

        self._engine, self._workload, self._concurrency = engine, settings.workload, settings.concurrency
        self._vocabulary = engine.model.config.vocab_size
        self._params = SamplingParams(max_tokens=self._workload.answer, ignore_eos=True)
        system = self._workload.system_prompt(self._vocabulary)
        self._said = {turn.conversation: list(system) for turn in self._workload.rounds()}
        self._waiting = deque(self._workload.rounds())
        self._asking: dict[str, Turn] = {}
        self._answered: dict[Turn, RequestResult] = {}

    def are_talking(self) -> bool:
        """Say whether a turn has not been answered."""
        return bool(self._waiting or self._asking)

    def ask(self) -> None:
        """Send the next prompts, if fewer than `concurrency` wait for an answer. Nobody asks before their last answer."""
        busy = {turn.conversation for turn in self._asking.values()}
        while self._waiting and len(busy) < self._concurrency and self._waiting[0].conversation not in busy:
            turn = self._waiting.popleft()
            self._said[turn.conversation] += self._workload.message_of(turn, self._vocabulary)
            self._asking[self._engine.add_request(self._said[turn.conversation], self._params)] = turn
            busy.add(turn.conversation)

    def take_answer(self, output: RequestOutput) -> RequestResult:
        """Note an answer; the next prompt of its conversation contains it."""
        turn = self._asking.pop(output.request_id)
        said = self._said[turn.conversation]
        self._answered[turn] = _result(turn, len(said), output)
        said += output.token_ids
        return self._answered[turn]

    def results(self) -> tuple[RequestResult, ...]:
        """Return all requests in the order of asking."""
        return tuple(self._answered[turn] for turn in self._workload.rounds())


def _result(turn: Turn, prompt_tokens: int, output: RequestOutput) -> RequestResult:
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


def _warm_up(engine: Engine, seed: int) -> None:
    """Run a request that shares nothing with the workload, and forget it: the first pass of a process pays for its set-up."""
    from kvtier.engine import SamplingParams

    random, config = Random(f"{seed}/warm-up"), engine.model.config
    prompt = [random.randrange(config.vocab_size) for _ in range(min(_WARM_UP_TOKENS, engine.max_model_len - 2))]
    engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.drain()
    engine.reset_prefix_cache(reset_connector=True)


def _note_capacity(settings: DemoSettings, engine: Engine, watcher: Watcher) -> None:
    """Say so if the CPU tier cannot hold all conversations: evictions are then part of what is shown."""
    needed, capacity = settings.workload.total() * token_bytes(engine), settings.kvtier.cpu.capacity
    if needed > capacity:
        watcher.note(
            f"all conversations need about {format_size(needed)} of KV, the CPU tier has {format_size(capacity)}: "
            "expect evictions"
        )


def _pool_use(engine: Engine) -> PoolUse | None:
    """Return how full the CPU tier is; `None` without kvtier."""
    from kvtier.offload import CPUOffloadingManager

    scheduler = None if engine.connector is None else engine.connector.connector_scheduler
    if scheduler is None or not isinstance(scheduler.manager, CPUOffloadingManager):
        return None
    stats = scheduler.manager.stats()
    return PoolUse(stats.slots - stats.free, stats.slots, scheduler.spec.config.row_bytes, stats.evicted)
