"""`run_demo`: plays the runs of the table `RUNS`, on engines of this process and of two that are killed.

    off, on          this process: the workload without kvtier, and with it
    computed, pool   a process over a disk: some prompts of the last turn, computed and then from the pool;
                     SIGKILL ends the process in the middle of its next answer
    disk             a second process over the same folder: the same prompts, from the rows on disk

All engines have the same model and settings, and are warm when the clock starts. Answers are greedy. By
default activations are float64, so that rounding does not depend on which requests share a batch, and the
runs can be compared token by token. Over a disk, the rule that prefers computing to a slower load is off, so
that the disk is used even if it is slow. Engines, processes and the temporary folder are removed in every
case. One thread uses this.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

from kvtier.config import DiskConfig, KVTierConfig, format_size
from kvtier.demo.result import RUNS, DemoResult, PoolUse, Process, RequestResult, RestartResult, RunResult
from kvtier.demo.setup import DemoSettings, Turn, describe, make_engine, open_engines, token_bytes
from kvtier.errors import IntegrityError, KVTierError, OutsideError
from kvtier.machine import find_mount
from kvtier.tiers.base import TierStats

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvtier.engine import Engine, RequestOutput
    from kvtier.offload.tiered import TieredOffloadingManager

_WARM_UP_TOKENS = 64
_MOST_PROMPTS = 5
"""The most prompts over a disk: computing more would take too long for a demo."""
_POOL_SHARE = 0.8
"""The share of the pool that these prompts may fill: all of them have to fit into it."""
_ROW_OVERHEAD = 1024
"""A bound on the bytes of a row's record and description."""
_SILENCE_SECONDS = 120.0
"""A process that says nothing for this long, or three times as long as the first run took, has failed."""
_STILL_SECONDS = 10.0
"""Rows that are not written for this long are given up."""
_LOAD_DEADLINE = 10.0
"""The least deadline of a load, in seconds, so that a busy machine uses the disk too."""

Prompts = Callable[[Turn, Mapping[Turn, Sequence[int]]], list[int]]
"""Returns the prompt of a turn, given the answers so far."""


class Watcher(Protocol):
    """An observer of a demo's progress. The thread that runs the demo calls it."""

    def note(self, text: str) -> None:
        """Take a remark for the user."""
        ...

    def begin(self, run: str, requests: int) -> None:
        """Begin a run, named as in `RUNS`."""
        ...

    def hear(self, run: str, turn: Turn, tokens: Sequence[int]) -> None:
        """Take an answer as far as it has come; it is empty when its question has just been asked."""
        ...

    def advance(self, run: str, request: RequestResult) -> None:
        """Count a finished request of a run."""
        ...

    def end(self, run: str, result: RunResult) -> None:
        """End a run."""
        ...


def run_demo(settings: DemoSettings, watcher: Watcher) -> DemoResult:
    """Play all runs and return their measurements."""
    result = _compare(settings, watcher)
    if settings.disk_folder is None:
        return result
    try:
        return replace(result, restart=_restart(settings, result, watcher))
    except OutsideError as error:
        watcher.note(f"no run over a disk: {error}")
        return replace(result, restart_skipped=str(error))


# -- one run ---------------------------------------------------------------------------------------


def _measure(
    name: str,
    engine: Engine,
    settings: DemoSettings,
    turns: Sequence[Turn],
    prompt_of: Prompts,
    watcher: Watcher,
) -> RunResult:
    """Play one run on an engine that is warm."""
    watcher.begin(name, len(turns))
    users = _Users(name, engine, settings, turns, prompt_of, watcher)
    start, start_cpu = time.perf_counter(), time.process_time()
    while users.are_talking():
        users.ask()
        for output in engine.step():
            users.take_output(output)
    wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    engine.drain()
    engine.check()
    result = RunResult(users.results(), wall, cpu, _pool_use(engine))
    watcher.end(name, result)
    return result


class _Users:
    """The users of an engine: `concurrency` of them ask at a time, in a fixed order."""

    def __init__(
        self,
        run: str,
        engine: Engine,
        settings: DemoSettings,
        turns: Sequence[Turn],
        prompt_of: Prompts,
        watcher: Watcher,
    ) -> None:
        self._run, self._engine, self._turns, self._prompt_of = run, engine, turns, prompt_of
        self._watcher, self._concurrency = watcher, settings.concurrency
        self._params = settings.workload.sampling()
        self._waiting = deque(turns)
        self._asking: dict[str, tuple[Turn, int]] = {}
        """The turn and the length of the prompt of each request under way."""
        self._answers: dict[Turn, Sequence[int]] = {}
        self._results: dict[Turn, RequestResult] = {}

    def are_talking(self) -> bool:
        """Return whether a turn has not been answered."""
        return bool(self._waiting or self._asking)

    def ask(self) -> None:
        """Send the next prompts, while fewer than `concurrency` users wait for an answer.

        A user asks only after the last answer has come.
        """
        busy = {turn.conversation for turn, _ in self._asking.values()}
        while self._waiting and len(busy) < self._concurrency and self._waiting[0].conversation not in busy:
            turn = self._waiting.popleft()
            prompt = self._prompt_of(turn, self._answers)
            self._asking[self._engine.add_request(prompt, self._params)] = turn, len(prompt)
            busy.add(turn.conversation)
            self._watcher.hear(self._run, turn, ())

    def take_output(self, output: RequestOutput) -> None:
        """Pass an answer on, and keep it when it is whole: the next prompt of its conversation has it."""
        turn, prompt_tokens = self._asking[output.request_id]
        self._watcher.hear(self._run, turn, output.token_ids)
        if output.finished:
            del self._asking[output.request_id]
            self._answers[turn] = output.token_ids
            self._results[turn] = _request_result(turn, prompt_tokens, output)
            self._watcher.advance(self._run, self._results[turn])

    def results(self) -> tuple[RequestResult, ...]:
        """Return all requests in the order of asking."""
        return tuple(self._results[turn] for turn in self._turns)


def _request_result(turn: Turn, prompt_tokens: int, output: RequestOutput) -> RequestResult:
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
    """Run a request that shares nothing with the workload: the first pass of a process pays for set-up."""
    from kvtier.engine import SamplingParams

    random, vocabulary = Random(f"{seed}/warm-up"), engine.model.config.vocab_size
    length = min(_WARM_UP_TOKENS, engine.max_model_len - 2)
    prompt = [random.randrange(vocabulary) for _ in range(length)]
    engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.drain()


def _pool_use(engine: Engine) -> PoolUse | None:
    """Return the use of the pool; `None` without kvtier, and over a disk."""
    from kvtier.offload import CPUOffloadingManager

    scheduler = None if engine.connector is None else engine.connector.connector_scheduler
    if scheduler is None or not isinstance(scheduler.manager, CPUOffloadingManager):
        return None
    stats = scheduler.manager.stats()
    return PoolUse(stats.slots - stats.free, stats.slots, scheduler.spec.config.row_bytes, stats.evicted)


# -- the runs of this process ----------------------------------------------------------------------


def _compare(settings: DemoSettings, watcher: Watcher) -> DemoResult:
    workload = settings.workload
    with ExitStack() as stack:
        on, off = open_engines(settings, stack)
        _report_capacity(settings, on, watcher)
        vocabulary = on.model.config.vocab_size
        runs = {}
        for name, engine in (("off", off), ("on", on)):
            _warm_up(engine, workload.seed)
            engine.reset_prefix_cache(reset_connector=True)
            runs[name] = _measure(
                name,
                engine,
                settings,
                list(workload.rounds()),
                lambda turn, answers: workload.prompt_of(turn, answers, vocabulary),
                watcher,
            )
        texts = workload.texts(runs["on"].requests)
        return DemoResult(runs["off"], runs["on"], describe(settings, on), texts)


def _report_capacity(settings: DemoSettings, engine: Engine, watcher: Watcher) -> None:
    """Notify the watcher if the pool cannot hold all conversations, so that evictions are expected."""
    needed, capacity = settings.workload.total() * token_bytes(engine), settings.kvtier.cpu.capacity
    if needed > capacity:
        watcher.note(
            f"all conversations need about {format_size(needed)} of KV, "
            f"the pool has {format_size(capacity)}: "
            "expect evictions"
        )


# -- the runs over a disk --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders to a process: the settings of kvtier, with the disk tier, the prompts and the runs."""

    settings: DemoSettings
    kvtier: KVTierConfig
    prompts: dict[Turn, list[int]]
    runs: tuple[str, ...] = ()


def _restart(settings: DemoSettings, result: DemoResult, watcher: Watcher) -> RestartResult:
    """Kill and restart an engine over a folder. Raise `OutsideError` if the disk cannot be used."""
    parent = settings.disk_folder
    assert parent is not None
    mount = find_mount(parent)
    if mount is not None and mount.is_memory:
        raise OutsideError(f"{parent} is memory ({mount.kind}); name a folder on a disk with --disk-folder")
    prompts, rows = _choose_prompts(settings, result)
    try:
        with tempfile.TemporaryDirectory(
            prefix="kvtier-demo-", dir=parent, ignore_cleanup_errors=True
        ) as folder:
            kvtier = _over_disk(settings, result, rows, folder)
            silence = max(_SILENCE_SECONDS, 3 * result.off.wall_seconds)
            return _kill_and_restart(Orders(settings, kvtier, prompts), silence, watcher)
    except OSError as error:
        raise OutsideError(f"{parent}: {error.strerror or error}") from error


def _kill_and_restart(orders: Orders, silence: float, watcher: Watcher) -> RestartResult:
    with _EngineProcess(replace(orders, runs=_runs_in(Process.KILLED)), silence) as first:
        first.wait_ready()
        runs, before = first.follow(watcher)
        exit_code = first.kill()
    began = time.perf_counter()
    with _EngineProcess(replace(orders, runs=_runs_in(Process.RESTARTED)), silence) as second:
        second.wait_ready()
        seconds = time.perf_counter() - began
        more, after = second.follow(watcher)
    return RestartResult(
        **runs,
        **more,
        exit_code=exit_code,
        restart_seconds=seconds,
        rows_found=(after.used or 0) - after.demoted,
        tiers=(before, after),
    )


def _runs_in(process: Process) -> tuple[str, ...]:
    return tuple(name for name, run in RUNS.items() if run.process is process)


def _choose_prompts(settings: DemoSettings, result: DemoResult) -> tuple[dict[Turn, list[int]], int]:
    """Return the first prompts of the last turn that fit into the pool, and their number of rows."""
    workload = settings.workload
    asked = result.off.requests
    answers = {Turn(request.conversation, request.turn): request.token_ids for request in asked}
    slots = 0 if result.on.pool is None else int(result.on.pool.slots * _POOL_SHARE)
    prompts, rows = dict[Turn, list[int]](), 0
    for turn in workload.rounds():
        if turn.turn < workload.turns or len(prompts) == _MOST_PROMPTS:
            continue
        prompt = workload.prompt_of(turn, answers, result.config["model"]["vocab_size"])
        needed = _rows_of(settings, len(prompt) + workload.answer)
        if rows + needed <= slots:
            prompts[turn] = prompt
            rows += needed
    if not prompts:
        raise OutsideError("the pool has no room for one prompt of the last turn; raise --cpu-capacity")
    return prompts, rows


def _rows_of(settings: DemoSettings, tokens: int) -> int:
    chunk = settings.kvtier.chunk_tokens or settings.kvtier.blocks_per_chunk * settings.block_size
    return -(-tokens // chunk)


def _over_disk(settings: DemoSettings, result: DemoResult, rows: int, folder: str) -> KVTierConfig:
    """Add a disk tier with room for the prompts, and for the answer that the kill interrupts."""
    assert result.on.pool is not None
    longest = _rows_of(settings, settings.num_blocks * settings.block_size)
    capacity = (2 * rows + longest + 64) * (result.on.pool.row_bytes + _ROW_OVERHEAD)
    disk = DiskConfig(path=folder, capacity=capacity, required=True)
    deadline = max(settings.kvtier.load_deadline, _LOAD_DEADLINE)
    return replace(settings.kvtier, load_if_faster=False, load_deadline=deadline, tiers=(disk,))


# -- messages from a process -----------------------------------------------------------------------
#
#    Ready -> Progress ... -> TierStats -> goes on answering until it is killed; or Failure at any point


class Ready(NamedTuple):
    """A message: the model is loaded, and the process is warm."""


class Progress(NamedTuple):
    """A message: a call of the process's watcher, for the watcher of the parent."""

    call: str
    values: tuple[Any, ...]


class Failure(NamedTuple):
    """A message: the process cannot go on."""

    why: str


class _EngineProcess:
    """A child process that runs an engine. It is killed when the context ends, at the latest."""

    def __init__(self, orders: Orders, silence: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._silence = silence
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve_until_killed, args=(theirs, orders), daemon=True)
        # A Ctrl-C is for this process, which kills the child. The child must not end with a traceback.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._connection.close()

    def kill(self) -> int:
        """End the process with SIGKILL, if it has not ended, and return its exit code: -9."""
        self._process.kill()
        self._process.join()
        return self._process.exitcode or 0

    def wait_ready(self) -> None:
        """Wait until the process can answer."""
        self._wait_message(Ready)

    def follow(self, watcher: Watcher) -> tuple[dict[str, RunResult], TierStats]:
        """Pass the progress of the process on to a watcher until its runs are over.

        Return the runs by name, and the statistics of the disk tier.
        """
        runs: dict[str, RunResult] = {}
        while isinstance(message := self._wait_message(Progress, TierStats), Progress):
            getattr(watcher, message.call)(*message.values)
            if message.call == "end":
                runs.update([message.values])
        return runs, message

    def _wait_message(self, *kinds: type) -> Any:
        """Wait for the next message.

        Raise `OutsideError` if the process fails, ends or is silent for long.
        """
        if not self._connection.poll(self._silence):
            raise OutsideError(f"the engine's process said nothing for {self._silence:.0f} s")
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            raise OutsideError(f"the engine's process ended by itself, with code {self.kill()}") from None
        if isinstance(message, Failure):
            raise OutsideError(message.why)
        if not isinstance(message, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise IntegrityError(f"demo: expected {expected} from a process, got {message!r}")
        return message


# -- in the process that is killed -----------------------------------------------------------------


class _SendingWatcher:
    """A watcher that sends every call to the parent process, which calls its own."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def __getattr__(self, call: str) -> Callable[..., None]:
        return lambda *values: self._connection.send(Progress(call, values))


def serve_until_killed(connection: Connection[Any, Any], orders: Orders) -> None:
    """Play the runs and report them. This is the main function of a process, on its only thread.

    Nothing is cleaned up at the end, just as when the kernel or a person kills an engine. If the parent
    process is gone, this process ends too.
    """
    logging.getLogger("kvtier").addHandler(logging.NullHandler())  # only the parent process prints
    try:
        with make_engine(orders.settings, orders.kvtier) as engine:
            _serve(engine, connection, orders)
    except (KVTierError, MemoryError, OSError, RuntimeError) as error:  # torch out of memory: RuntimeError
        with suppress(OSError):
            connection.send(Failure(str(error) or type(error).__name__))


def _serve(engine: Engine, connection: Connection[Any, Any], orders: Orders) -> None:
    manager, prompts = _manager_of(engine), orders.prompts
    watcher = cast(Watcher, _SendingWatcher(connection))
    _warm_up(engine, orders.settings.workload.seed)
    connection.send(Ready())
    for name in orders.runs:
        engine.reset_prefix_cache()
        _measure(name, engine, orders.settings, list(prompts), lambda turn, _: prompts[turn], watcher)
    _await_written(engine, manager)
    connection.send(manager.tier_stats()[0])
    _answer_on(engine, connection, next(iter(prompts.values())))


def _answer_on(engine: Engine, connection: Connection[Any, Any], prompt: list[int]) -> None:
    """Answer a long request, so that the kill comes in the middle of it."""
    from kvtier.engine import SamplingParams

    engine.add_request(prompt, SamplingParams(max_tokens=engine.max_model_len, ignore_eos=True))
    while engine.has_unfinished() and not connection.poll():
        engine.step()
    connection.poll(None)


def _manager_of(engine: Engine) -> TieredOffloadingManager:
    from kvtier.offload.tiered import TieredOffloadingManager

    assert engine.connector is not None
    assert engine.connector.connector_scheduler is not None
    manager = engine.connector.connector_scheduler.manager
    assert isinstance(manager, TieredOffloadingManager)
    return manager


def _await_written(engine: Engine, manager: TieredOffloadingManager) -> None:
    """Step until all rows of the pool are on disk, or none has been written for a while."""
    written, until = -1, 0.0
    while ((tier := manager.tier_stats()[0]).used or 0) < manager.stats().ready:
        now = time.monotonic()
        if tier.demoted > written:
            written, until = tier.demoted, now + _STILL_SECONDS
        elif now > until:
            return
        engine.step()
