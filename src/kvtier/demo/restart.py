"""The run over a disk: an engine's process is killed with SIGKILL and started again over the same folder.

The first process answers some prompts of the demo's last turn twice: it computes them, and then loads them
from the pool. It is killed in the middle of its next answer. The second process answers the same prompts
from the rows on disk. All tokens must equal the computed ones. The rule that prefers computing to a slower
load is off in both processes, so that the disk is used even if it is slow. The folder is temporary; it and
the processes are removed in every case. One thread uses this.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from kvtier.config import DiskConfig
from kvtier.demo.killed import Answered, Failure, Orders, PassOver, Ready, serve_until_killed
from kvtier.demo.result import DemoResult, RestartResult, RunResult
from kvtier.demo.setup import DemoSettings
from kvtier.demo.watcher import Watcher
from kvtier.demo.workload import Turn
from kvtier.errors import IntegrityError, OutsideError
from kvtier.machine import find_mount
from kvtier.tiers.base import TierStats

__all__ = ["run_restart"]

_MOST_PROMPTS = 5
"""The most prompts: computing more would take too long for a demo."""
_POOL_SHARE = 0.8
"""The share of the pool that the prompts may fill: all of them have to fit into it."""
_ROW_OVERHEAD = 1024
"""A bound on the bytes of a row's record and description."""
_PATIENCE = 120.0
_LOAD_DEADLINE = 10.0
"""The least deadline of a load, in seconds, so that a busy machine uses the disk too."""

_T = TypeVar("_T")


def run_restart(settings: DemoSettings, result: DemoResult, watcher: Watcher) -> RestartResult:
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
            return _run(_order(settings, result, prompts, rows, folder), result, watcher)
    except OSError as error:
        raise OutsideError(f"{parent}: {error.strerror or error}") from error


def _run(orders: Orders, result: DemoResult, watcher: Watcher) -> RestartResult:
    patience = max(_PATIENCE, 3 * result.off.wall_seconds)
    with _EngineProcess(replace(orders, passes=("computed", "pool")), patience) as first:
        first.expect(Ready)
        computed, pool = (first.watch(name, len(orders.prompts), watcher) for name in ("computed", "pool"))
        before = first.expect(TierStats)
        exit_code = first.kill()
    began = time.perf_counter()
    with _EngineProcess(replace(orders, passes=("disk",)), patience) as second:
        second.expect(Ready)
        seconds = time.perf_counter() - began
        disk = second.watch("disk", len(orders.prompts), watcher)
        after = second.expect(TierStats)
    return RestartResult(
        computed,
        pool,
        disk,
        exit_code=exit_code,
        restart_seconds=seconds,
        rows_found=(after.used or 0) - after.demoted,
        tiers=(before, after),
    )


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


def _order(
    settings: DemoSettings, result: DemoResult, prompts: dict[Turn, list[int]], rows: int, folder: str
) -> Orders:
    """Make the orders. The disk has room for the prompts, and for the answer that the kill interrupts."""
    assert result.on.pool is not None
    longest = _rows_of(settings, settings.num_blocks * settings.block_size)
    capacity = (2 * rows + longest + 64) * (result.on.pool.row_bytes + _ROW_OVERHEAD)
    disk = DiskConfig(path=folder, capacity=capacity, required=True)
    deadline = max(settings.kvtier.load_deadline, _LOAD_DEADLINE)
    kvtier = replace(settings.kvtier, load_if_faster=False, load_deadline=deadline, tiers=(disk,))
    return Orders(settings, kvtier, prompts, ())


class _EngineProcess:
    """A child process that runs an engine. It is killed when the context ends, at the latest."""

    def __init__(self, orders: Orders, patience: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._patience = patience
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

    def watch(self, name: str, requests: int, watcher: Watcher) -> RunResult:
        """Wait until a pass is over, and report its requests to the watcher."""
        watcher.begin(name, requests)
        answered = []
        for _ in range(requests):
            request = self.expect(Answered).request
            watcher.advance(name, request)
            answered.append(request)
        over = self.expect(PassOver)
        result = RunResult(tuple(answered), over.wall_seconds, over.cpu_seconds)
        watcher.end(name, result)
        return result

    def expect(self, kind: type[_T]) -> _T:
        """Wait for the next message.

        Raise `OutsideError` if the process fails, ends or is silent for long.
        """
        if not self._connection.poll(self._patience):
            raise OutsideError(f"the engine's process said nothing for {self._patience:.0f} s")
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            raise OutsideError(f"the engine's process ended by itself, with code {self.kill()}") from None
        if isinstance(message, Failure):
            raise OutsideError(message.why)
        if not isinstance(message, kind):
            raise IntegrityError(f"demo: expected {kind.__name__} from a process, got {message!r}")
        return message
