"""How much a GPU's own work slows down beside continuous transfers: ours, large copies alone, and a copy kernel.

    python benchmarks/gpu_interference.py [--json FILE]

The work is a loop of bf16 matrix products (8192 x 8192 x 8192), and a loop of copies within HBM, which has nothing to spare
for anybody. Both are timed by the device's clock, alone and beside transfers that are always under way, in turns: a GPU at
its power limit drifts by more than what is to be measured, so each turn is held against those before and after it. Between turns
it is idle for some milliseconds, while transfers end: what comes next, the work alone, is the faster for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _gpu import DEVICE, WAYS, BareCopies, Rig, is_over, new_stream, new_timer

PAGE, REFS, JOB = 32 << 10, 64, 256 << 20


def matrix_products(count: int) -> Callable[[], None]:
    """Return a loop of matrix products."""
    a, b, out = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))

    def work() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    return work


def hbm_copies(count: int) -> Callable[[], None]:
    """Return a loop of copies within HBM."""
    a, b = (torch.empty(1 << 30, dtype=torch.int8, device=DEVICE) for _ in range(2))

    def work() -> None:
        for _ in range(count):
            b.copy_(a)

    return work


class Transfers:
    """Keeps a job under way in each direction given, and one behind it."""

    def __init__(self, rig: Rig, ways: tuple[str, ...]) -> None:
        self._rig = rig
        self._jobs: dict[str, set[int]] = {way: set() for way in ways}
        self._side = new_stream()  # else each job would follow the work that it is to run beside
        self.bytes = 0

    def step(self) -> None:
        """Start the next jobs of each direction."""
        for way, jobs in self._jobs.items():
            results = self._rig.handlers[way].get_finished()
            self.bytes += sum(result.transfer_size or 0 for result in results)
            jobs.difference_update(result.job_id for result in results)
            with torch.cuda.stream(self._side):
                while len(jobs) < 2:
                    jobs.add(self._rig.start(way, *self._rig.ends(self._rig.blocks, scattered=False)))

    def stop(self) -> None:
        """Wait for what is under way."""
        for way, jobs in self._jobs.items():
            self._rig.handlers[way].wait(jobs)
            self._rig.handlers[way].get_finished()
            jobs.clear()


class Bare:
    """Keeps copies without a handler enqueued, in each direction given: large ones, or kernels that read pinned memory."""

    def __init__(self, rig: Rig, ways: tuple[str, ...], kind: str) -> None:
        self._bare = [BareCopies(rig, rig.blocks) for _ in ways]
        pairs = list(zip(self._bare, ways, strict=True))
        self._enqueue = [bare.kernel(way) if kind == "kernel" else partial(bare.large, way) for bare, way in pairs]
        self._events: list[list[torch.cuda.Event]] = [[] for _ in ways]
        self._size = rig.job_bytes
        self.bytes = 0

    def step(self) -> None:
        """Keep two copies enqueued on each stream."""
        for bare, enqueue, events in zip(self._bare, self._enqueue, self._events, strict=True):
            while events and is_over(events[0]):
                events.pop(0)
                self.bytes += self._size
            while len(events) < 2:
                enqueue()
                events.append(bare.stream.record_event())

    def stop(self) -> None:
        """Wait for what is enqueued."""
        torch.cuda.synchronize()


def seconds(work: Callable[[], None], beside: Transfers | Bare | None) -> tuple[float, float]:
    """Return how long the work takes on the device, and how fast the transfers beside it are, in GB/s."""
    torch.cuda.synchronize()
    if beside is not None:
        beside.step()
    start, end = new_timer(), new_timer()
    moved, begin = (beside.bytes if beside else 0), time.perf_counter()
    start.record()
    work()
    end.record()
    while not is_over(end):
        if beside is not None:
            beside.step()
        time.sleep(0.0001)
    elapsed = time.perf_counter() - begin
    speed = (beside.bytes - moved) / elapsed / 1e9 if beside else 0.0
    if beside is not None:
        beside.stop()
    return start.elapsed_time(end) / 1000, speed


def bench(
    name: str, work: Callable[[], None], ways: tuple[str, ...], kind: str, beside: Transfers | Bare, turns: int
) -> dict[str, Any]:
    """Measure one kind of work beside one kind of transfers."""
    seconds(work, None)
    alone, busy, speeds = [seconds(work, None)[0]], [], []
    for _ in range(turns):
        elapsed, speed = seconds(work, beside)
        busy.append(elapsed)
        speeds.append(speed)
        alone.append(seconds(work, None)[0])
    kept = statistics.median((a + b) / 2 / c for a, b, c in zip(alone, alone[1:], busy, strict=False))
    speed = statistics.median(speeds)
    print(f"{name:18} beside {kind:12} {' and '.join(ways):14}: keeps {kept:.3f} of its speed, {speed:5.1f} GB/s moved")
    return {"work": name, "beside": kind, "ways": list(ways), "kept": kept, "gbps": speed}


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rig = Rig(PAGE, REFS, JOB)
    rows: list[dict[str, Any]] = []
    for name, work in {"matrix products": matrix_products(80), "copies within HBM": hbm_copies(160)}.items():
        for ways in (("store",), ("load",), WAYS):
            rows += [
                bench(name, work, ways, "ours", Transfers(rig, ways), options.repetitions),
                bench(name, work, ways, "large copies", Bare(rig, ways, "large"), options.repetitions),
                bench(name, work, ways, "kernel", Bare(rig, ways, "kernel"), options.repetitions // 4),
            ]
    rig.close()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
