"""`run_demo`: measures the workload on an engine without kvtier and on one with it; then the run over a
disk.

Both engines get the same prompts in the same order, and both are warm when the clock starts. Answers are
greedy. By default activations are float64, so that rounding does not depend on which requests share a batch,
and the runs can be compared token by token. The engines are closed in every case. One thread uses this.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtier.config import format_size
from kvtier.demo.play import request_result, warm_up
from kvtier.demo.restart import run_restart
from kvtier.demo.result import DemoResult, PoolUse, RequestResult, RunResult
from kvtier.demo.setup import DemoSettings, describe, open_engines, token_bytes
from kvtier.demo.watcher import Watcher
from kvtier.demo.workload import Turn
from kvtier.errors import OutsideError

if TYPE_CHECKING:
    from kvtier.engine import Engine, RequestOutput

__all__ = ["run_demo"]


def run_demo(settings: DemoSettings, watcher: Watcher) -> DemoResult:
    """Run the workload without and with kvtier, kill and restart an engine, and return the measurements."""
    result = _compare(settings, watcher)
    if settings.disk_folder is None:
        return result
    try:
        return replace(result, restart=run_restart(settings, result, watcher))
    except OutsideError as error:
        watcher.note(f"no run over a disk: {error}")
        return replace(result, restart_skipped=str(error))


def _compare(settings: DemoSettings, watcher: Watcher) -> DemoResult:
    with ExitStack() as stack:
        on, off = open_engines(settings, stack)
        _note_capacity(settings, on, watcher)
        runs = [_run(name, engine, settings, watcher) for name, engine in (("off", off), ("on", on))]
        return DemoResult(runs[0], runs[1], describe(settings, on))


def _run(name: str, engine: Engine, settings: DemoSettings, watcher: Watcher) -> RunResult:
    """Play the whole workload on one engine."""
    warm_up(engine, settings.workload.seed)
    engine.reset_prefix_cache(reset_connector=True)
    watcher.begin(name, settings.workload.requests)
    people = _Users(engine, settings)
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


class _Users:
    """The users of an engine: `concurrency` of them ask at a time, in a fixed order. Each prompt holds the
    whole conversation so far.
    """

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
        """Send the next prompts, while fewer than `concurrency` users wait for an answer.

        A user asks only after the last answer has come.
        """
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
        self._answered[turn] = request_result(turn, len(said), output)
        said += output.token_ids
        return self._answered[turn]

    def results(self) -> tuple[RequestResult, ...]:
        """Return all requests in the order of asking."""
        return tuple(self._answered[turn] for turn in self._workload.rounds())


def _note_capacity(settings: DemoSettings, engine: Engine, watcher: Watcher) -> None:
    """Tell the watcher if the pool cannot hold all conversations, so that evictions are expected."""
    needed, capacity = settings.workload.total() * token_bytes(engine), settings.kvtier.cpu.capacity
    if needed > capacity:
        watcher.note(
            f"all conversations need about {format_size(needed)} of KV, "
            f"the pool has {format_size(capacity)}: "
            "expect evictions"
        )


def _pool_use(engine: Engine) -> PoolUse | None:
    """Return the use of the pool; `None` without kvtier."""
    from kvtier.offload import CPUOffloadingManager

    scheduler = None if engine.connector is None else engine.connector.connector_scheduler
    if scheduler is None or not isinstance(scheduler.manager, CPUOffloadingManager):
        return None
    stats = scheduler.manager.stats()
    return PoolUse(stats.slots - stats.free, stats.slots, scheduler.spec.config.row_bytes, stats.evicted)
