"""Simulates a trace with every combination of memory, disk, policy and chunk size: the cells of a sweep.

A cell's result has what the replay found, and beside it what the best possible policy would have found with
memory and disk as one tier. Cells run in processes of their own, several at once. One thread uses a sweep.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing import active_children, get_context, parent_process

import numpy as np

from kvtier.config import DiskConfig, format_size
from kvtier.errors import InputError, OutsideError
from kvtier.simulate.optimum import optimal_hits
from kvtier.simulate.replay import Simulator, Speeds, make_config, make_settings, replay
from kvtier.simulate.trace import Trace

_DAY = 86_400.0
_MONTH = 30 * _DAY
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Capacity:
    """A size in bytes, or as a share of the different chunks of the trace."""

    text: str
    size: int | None = None
    share: float = 0.0

    def rows(self, row_bytes: int, num_chunks: int) -> int:
        """Return how many rows fit."""
        return int(self.share * num_chunks + 1e-9) if self.size is None else self.size // row_bytes


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination, in rows of `row_bytes`."""

    memory: str
    disk: str
    policy: str
    chunk_tokens: int
    row_bytes: int
    memory_rows: int
    disk_rows: int

    @property
    def memory_bytes(self) -> int:
        """The bytes of the pool's rows."""
        return self.memory_rows * self.row_bytes

    @property
    def disk_bytes(self) -> int:
        """The bytes of the disk's rows."""
        return self.disk_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is simulated, and with which costs. Prices are for a GiB and a month."""

    memory: tuple[Capacity, ...]
    disk: tuple[Capacity, ...]
    policies: tuple[str, ...]
    chunk_tokens: tuple[int, ...]
    bytes_per_token: int
    speeds: Speeds
    write: str = "through"
    write_limit: int | None = None
    memory_price: float | None = None
    disk_price: float | None = None
    flash_writes: float = 1825.0
    """How often the disk can be written over before it is worn out: by default once a day for five years."""

    def cells(self, trace: Trace) -> list[Cell]:
        """Return all combinations."""
        cells = []
        for chunk in self.chunk_tokens:
            trace.expect_chunk(chunk)
            settings = make_settings(0)
            row, chunks = (
                make_config(settings, chunk, self.bytes_per_token).row_bytes,
                trace.num_chunks(chunk),
            )
            for memory, disk, policy in product(self.memory, self.disk, self.policies):
                rows = memory.rows(row, chunks), disk.rows(row, chunks)
                if not rows[0] or (not rows[1] and disk.size != 0):
                    option, text = ("--disk", disk.text) if rows[0] else ("--memory", memory.text)
                    least = f"expected at least one row of {chunk} tokens ({format_size(row)})"
                    raise InputError(f"{option}: {least}, got {text}")
                cells.append(Cell(memory.text, disk.text, policy, chunk, row, *rows))
        return cells


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a combination saves. Rates are shares of all prompt tokens; times are in seconds."""

    cell: Cell
    hit_rate: float
    hit_rate_memory: float
    hit_rate_disk: float
    hit_rate_optimum: float
    """Of the best possible policy, with memory and disk as one tier."""
    hit_rate_infinite: float
    tokens_saved: int
    tokens_computed: int
    first_token_p50: float
    first_token_p99: float
    compute_p50: float
    """The first token of the same prompts if all of them were computed."""
    compute_p99: float
    disk_written_per_day: float
    """Bytes."""
    write_limit_hours: float | None
    """How soon the disk's write limit would bind at this rate, if that is within a day."""
    flash_years: float | None
    """How long the disk lasts; `None` if nothing is written."""
    cost_per_million_tokens: float | None
    """Of tokens saved; `None` without prices, or if none is saved."""


def simulate_cell(trace: Trace, sweep: Sweep, cell: Cell) -> CellResult:
    """Replay the trace with one combination."""
    settings = make_settings(cell.memory_bytes, cell.disk_bytes, cell.policy, sweep.write, sweep.write_limit)
    config = make_config(settings, cell.chunk_tokens, sweep.bytes_per_token)
    simulator = Simulator(config, sweep.speeds, trace.num_chunks(cell.chunk_tokens))
    served = list(replay(trace, simulator))
    simulator.manager.check()
    prompts = np.array([request.prompt_tokens for request in trace.requests])
    total = int(prompts.sum())
    pool, below = sum(one.pool_tokens for one in served), sum(one.disk_tokens for one in served)
    first, computing = [one.first_token for one in served], prompts / sweep.speeds.prefill
    seconds = max(trace.seconds, 1.0)
    written = 0 if simulator.disk is None else simulator.disk.stats().demoted_bytes
    daily = written * _DAY / seconds
    limit = next((tier.write_limit for tier in settings.tiers if isinstance(tier, DiskConfig)), None)
    simulator.manager.shutdown()
    rows = cell.memory_rows + cell.disk_rows
    return CellResult(
        cell=cell,
        hit_rate=(pool + below) / total,
        hit_rate_memory=pool / total,
        hit_rate_disk=below / total,
        hit_rate_optimum=sum(optimal_hits(trace, cell.chunk_tokens, rows)) / total,
        hit_rate_infinite=sum(optimal_hits(trace, cell.chunk_tokens, None)) / total,
        tokens_saved=pool + below,
        tokens_computed=sum(one.computed_tokens for one in served),
        first_token_p50=float(np.percentile(first, 50)),
        first_token_p99=float(np.percentile(first, 99)),
        compute_p50=float(np.percentile(computing, 50)),
        compute_p99=float(np.percentile(computing, 99)),
        disk_written_per_day=daily,
        write_limit_hours=24 * limit / daily if limit and daily > limit else None,
        flash_years=sweep.flash_writes * cell.disk_bytes / daily / 365 if daily else None,
        cost_per_million_tokens=_cost(sweep, cell, (pool + below) / seconds),
    )


def _cost(sweep: Sweep, cell: Cell, tokens_per_second: float) -> float | None:
    """Return the price of a million tokens that are not computed."""
    if (sweep.memory_price is None and sweep.disk_price is None) or not tokens_per_second:
        return None
    monthly = (sweep.memory_price or 0.0) * cell.memory_bytes / _GIB
    monthly += (sweep.disk_price or 0.0) * cell.disk_bytes / _GIB
    return monthly / (tokens_per_second * _MONTH) * 1e6


# -- several cells ---------------------------------------------------------------------------------

_trace: Trace | None = None
"""The trace of a worker process."""


def _begin_worker(trace: Trace) -> None:
    global _trace
    _trace = trace
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _simulate_here(sweep: Sweep, cell: Cell) -> CellResult:
    assert _trace is not None, "the initializer has set it"
    return simulate_cell(_trace, sweep, cell)


def run_sweep(
    trace: Trace, sweep: Sweep, jobs: int, on_progress: Callable[[int, int], None] = lambda _done, _all: None
) -> list[CellResult]:
    """Simulate all cells, up to `jobs` at once, and return their results in the order of the cells.

    `on_progress` is told how many of how many cells are done.
    """
    cells = sweep.cells(trace)
    on_progress(0, len(cells))
    results: dict[Cell, CellResult] = {}
    with closing(_run(trace, sweep, cells, min(jobs, len(cells)))) as running:
        for result in running:
            results[result.cell] = result
            on_progress(len(results), len(cells))
    return [results[cell] for cell in cells]


def _run(trace: Trace, sweep: Sweep, cells: list[Cell], jobs: int) -> Generator[CellResult, None, None]:
    if jobs <= 1:
        yield from (simulate_cell(trace, sweep, cell) for cell in cells)
        return
    others = set(active_children())
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin_worker, (trace,)) as pool:
        try:
            with _interrupts_blocked():
                futures = [pool.submit(_simulate_here, sweep, cell) for cell in cells]
            for future in as_completed(futures):
                yield future.result()
        except BaseException as error:
            for child in set(active_children()) - others:
                child.terminate()
            if isinstance(error, BrokenProcessPool):
                problem = "a process that simulates was killed; perhaps memory was short: give fewer --jobs"
                raise OutsideError(problem) from None
            raise


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C. Processes that start meanwhile never get it: their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
