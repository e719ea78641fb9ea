"""How much a GPU's own work slows down beside continuous transfers: ours, large copies, and a copy kernel.

    python benchmarks/gpu_interference.py [--layout blocks] [--json FILE]

The work is a prefill with eight layers of an 8B-shaped Llama (bf16, 4,096 tokens), decode steps of as many
layers (32 sequences of 2,048 tokens, as a CUDA graph), loops of bf16 matrix products that take about 1.4 and
0.18 ms each, and a loop of copies within HBM, which leaves no bandwidth for anything else. *packed* are our
transfers of blocks that are kept packed, in GB/s of the engine's cache.

A GPU at its power limit drifts by more than the measured difference, and runs faster for a while after it
was idle. So the work never stops: transfers start and end beside it, in turns, and after each change
nothing counts for `SETTLE` seconds. Each turn is compared with the work alone before and after it. Two
figures: the part of its speed that the work keeps, and the part at the same clock, counted in cycles. The
first includes the device's power that transfers use, as any copy does; the second shows how much transfers
hold up the work itself. Large copies alone are the least that transfers can cost.

Engines also copy a few bytes at each step: the benchmark times such copies beside transfers, to the host
and to the device.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from _gpu import DEVICE, WAYS, BareCopies, Rig, is_over, new_stream, new_timer
from _shapes import LLAMA_8B
from triton.language.extra.cuda import globaltimer, smid

from kvtier.engine import Decoder, ModelConfig
from kvtier.engine.config import weight_shapes
from kvtier.engine.model import ForwardBatch, SequenceSlice

JOB = 256 << 20
LAYOUTS = {"layers": (32 << 10, 64), "blocks": (2 << 20, 1)}
"""Bytes and number of a block's pages: separate by layer and by K and V, or all in one run of memory.
"""
SETTLE, WINDOW, COPY_WINDOW = 0.1, 0.2, 0.5
PATIENCE = 1.0
AHEAD = 3
"""Units of work that are enqueued at a time, so that the device always has work."""


def matrix_products(size: int, count: int) -> Callable[[], None]:
    """Return a loop of matrix products."""
    a, b, out = (torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))

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


def make_model(shape: Mapping[str, Any]) -> Decoder:
    """Make a model with random weights."""
    config = ModelConfig.from_dict(shape)
    weights = {
        name: torch.randn(size, dtype=torch.bfloat16, device=DEVICE).mul_(
            size[-1] ** -0.5 if len(size) > 1 else 1
        )
        for name, size in weight_shapes(config).items()
    }
    return Decoder(config, weights, device=DEVICE, dtype=torch.bfloat16)


def prefill(num_tokens: int, num_layers: int, block_size: int = 16) -> Callable[[], None]:
    """Return the forward pass of one prompt through some layers of the model."""
    model = make_model(LLAMA_8B | {"num_hidden_layers": num_layers})
    num_blocks = num_tokens // block_size
    shape = (num_blocks, 2, block_size, model.config.num_kv_heads, model.config.head_dim)
    caches = {
        name: torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for name in model.config.layer_names
    }
    token = torch.arange(num_tokens, device=DEVICE)
    sequence = SequenceSlice(0, num_tokens, num_tokens, (torch.arange(num_blocks, device=DEVICE),))
    batch = ForwardBatch(token, token, [sequence], (token,))

    def work() -> None:
        model.hidden(batch, caches, [0] * num_layers, block_size)

    return work


def decode(num_layers: int, num_sequences: int = 32, context: int = 2048) -> Callable[[], None]:
    """Return a step in which each of some sequences gets a token: a graph of the kernels that read weights
    and KV, which take nearly all of its time.
    """
    shape = ModelConfig.from_dict(LLAMA_8B)
    heads, kv_heads, dim, hidden = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden_size

    def new(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=DEVICE).mul_(size[-1] ** -0.5)

    qkv_size, inner = (heads + 2 * kv_heads) * dim, shape.intermediate_size
    sizes = [(hidden, qkv_size), (heads * dim, hidden), (hidden, 2 * inner), (inner, hidden)]
    layers = [[new(*size) for size in sizes] for _ in range(num_layers)]
    caches = [new(2, num_sequences, kv_heads, context, dim) for _ in range(num_layers)]
    tokens = new(num_sequences, hidden)

    def step() -> None:
        x = tokens
        for (qkv, out, up, down), (keys, values) in zip(layers, caches, strict=True):
            q = (x @ qkv)[:, : heads * dim].view(num_sequences, heads, 1, dim)
            read = torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            x = x + read.reshape(num_sequences, heads * dim) @ out
            gate, value = (x @ up).chunk(2, dim=1)
            x = x + (torch.nn.functional.silu(gate) * value) @ down

    with torch.cuda.stream(new_stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Transfers:
    """Keeps a job running in each given direction, and one queued behind it."""

    def __init__(self, rig: Rig, ways: tuple[str, ...]) -> None:
        self._rig = rig
        self._jobs: dict[str, set[int]] = {way: set() for way in ways}
        self._side = new_stream()  # else each job would run after the work instead of beside it
        self.bytes = 0

    def step(self) -> None:
        """Start the next jobs of each direction."""
        for way, jobs in self._jobs.items():
            results = self._rig.handlers[way].get_finished()
            self.bytes += len(results) * self._rig.job_bytes
            jobs.difference_update(result.job_id for result in results)
            with torch.cuda.stream(self._side):
                while len(jobs) < 2:
                    jobs.add(self._rig.start(way, *self._rig.ends(self._rig.blocks, scattered=False)))

    def stop(self) -> None:
        """Wait for the running jobs."""
        for way, jobs in self._jobs.items():
            self._rig.handlers[way].wait(jobs)
            self._rig.handlers[way].get_finished()
            jobs.clear()


class Bare:
    """Keeps bare copies enqueued, in each given direction: large ones, or kernels over pinned memory."""

    def __init__(self, rig: Rig, ways: tuple[str, ...], kind: str) -> None:
        self._bare = [BareCopies(rig, rig.blocks) for _ in ways]
        pairs = list(zip(self._bare, ways, strict=True))
        self._enqueue = [
            bare.kernel(way) if kind == "kernel" else partial(bare.large, way) for bare, way in pairs
        ]
        self._events: list[deque[torch.cuda.Event]] = [deque() for _ in ways]
        self._size = rig.job_bytes
        self.bytes = 0

    def step(self) -> None:
        """Keep two copies enqueued on each stream."""
        for bare, enqueue, events in zip(self._bare, self._enqueue, self._events, strict=True):
            while events and is_over(events[0]):
                events.popleft()
                self.bytes += self._size
            while len(events) < 2:
                enqueue()
                events.append(bare.stream.record_event())

    def stop(self) -> None:
        """Wait for the enqueued copies."""
        for bare, events in zip(self._bare, self._events, strict=True):
            bare.stream.synchronize()
            events.clear()


class Running:
    """Transfers that run in their own thread until `leave`."""

    def __init__(self, transfers: Transfers | Bare) -> None:
        self._transfers = transfers
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._leave.wait(0.0001):
            self._transfers.step()
        self._transfers.stop()

    def leave(self) -> bool:
        """Start no more transfers, without waiting; return whether the running ones are over."""
        self._leave.set()
        return not self._thread.is_alive()

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave.set()
        self._thread.join()


@triton.jit
def _read_clock(out):  # type: ignore[no-untyped-def]
    """Record the cycles and nanoseconds of the multiprocessor that runs this."""
    place = out + 2 * smid()
    cycles = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(place, cycles)
    tl.store(place + 1, globaltimer())


class Clock:
    """Measures the multiprocessors' frequency between two looks, each enqueued after the work so far."""

    def __init__(self) -> None:
        self._count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        self._side = new_stream()

    def look(self) -> torch.Tensor:
        """Return a tensor that will hold cycles and nanoseconds of each multiprocessor."""
        seen = torch.zeros((2 * self._count, 2), dtype=torch.int64, device=DEVICE)
        _read_clock[(2 * self._count,)](seen, num_warps=1)
        return seen

    def hertz(self, before: torch.Tensor, after: torch.Tensor) -> float:
        """Return the frequency between two looks that are over; later enqueued work may still run."""
        with torch.cuda.stream(self._side):
            first, last = before.cpu(), after.cpu()
        both = (first[:, 1] > 0) & (last[:, 1] > 0)
        cycles, nanoseconds = (last - first)[both].double().sum(0).tolist()
        return 1e9 * float(cycles / nanoseconds)


class Turn(NamedTuple):
    """Seconds and cycles of a unit of work on the device, and GB/s moved beside it."""

    seconds: float
    cycles: float
    gbps: float


class _Mark(NamedTuple):
    """The end of a unit of work."""

    timer: torch.cuda.Event
    seen: torch.Tensor


class Work:
    """Work that never stops: `for_seconds` returns while the last units still run."""

    def __init__(self, unit: Callable[[], None]) -> None:
        self._unit, self._clock = unit, Clock()
        self._marks: deque[_Mark] = deque()

    def for_seconds(self, seconds: float) -> tuple[_Mark, _Mark, int]:
        """Continue for `seconds`; return two marks that are over, and the number of units between them."""
        until = time.perf_counter() + seconds
        over: list[_Mark] = []
        while time.perf_counter() < until or len(over) < 2:
            self._unit()
            self._marks.append(_Mark(new_timer(), self._clock.look()))
            self._marks[-1].timer.record()
            if len(self._marks) > AHEAD:
                over.append(self._marks.popleft())
                over[-1].timer.synchronize()
        return over[0], over[-1], len(over) - 1

    def turn(self, transfers: Transfers | Bare | None) -> Turn:
        """Continue for a turn, alone or beside transfers."""
        if transfers is None:
            self.for_seconds(SETTLE)
            return self._read(*self.for_seconds(WINDOW), 0.0)
        with Running(transfers) as running:
            self.for_seconds(SETTLE)
            moved, begin = transfers.bytes, time.perf_counter()
            found = self.for_seconds(WINDOW)
            gbps = (transfers.bytes - moved) / (time.perf_counter() - begin) / 1e9
            while not running.leave():
                self.for_seconds(0.0)
        return self._read(*found, gbps)

    def _read(self, first: _Mark, last: _Mark, units: int, gbps: float) -> Turn:
        seconds = float(first.timer.elapsed_time(last.timer)) / 1000 / units
        return Turn(seconds, seconds * self._clock.hertz(first.seen, last.seen), gbps)


def bench(
    name: str, work: Work, ways: tuple[str, ...], kinds: dict[str, Transfers | Bare], turns: int
) -> list[dict[str, Any]]:
    """Measure one kind of work beside each kind of transfers, in turns."""
    triples: dict[str, list[tuple[Turn, Turn, Turn]]] = {kind: [] for kind in kinds}
    before = work.turn(None)
    for _ in range(turns):
        for kind, transfers in kinds.items():
            busy, after = work.turn(transfers), work.turn(None)
            triples[kind].append((before, busy, after))
            before = after
    torch.cuda.synchronize()
    rows = []
    for kind, some in triples.items():
        kept = statistics.median((a.seconds + b.seconds) / 2 / busy.seconds for a, busy, b in some)
        cycles = statistics.median((a.cycles + b.cycles) / 2 / busy.cycles for a, busy, b in some)
        speed = statistics.median(busy.gbps for _, busy, _ in some)
        which = " and ".join(ways)
        print(
            f"{name:22} {which:14} {kind:12} keeps {kept:.3f}, at the same clock {cycles:.3f}; "
            f"{speed:5.1f} GB/s moved"
        )
        row = {
            "work": name,
            "beside": kind,
            "ways": list(ways),
            "kept": kept,
            "kept_cycles": cycles,
            "gbps": speed,
        }
        rows.append(row)
    return rows


class SmallCopies:
    """Copies of a few bytes on their own stream, one at a time."""

    def __init__(self) -> None:
        self._here = torch.zeros(8, dtype=torch.int8).pin_memory()
        self._there = self._here.to(DEVICE)
        self._stream = new_stream()

    def seconds(self, *, to_host: bool) -> list[float]:
        """Return the times of copies, sorted.

        A copy that takes longer than `PATIENCE` counts as that, and is the last.
        """
        found: list[float] = []
        rng = random.Random(0)
        dst, src = (self._here, self._there) if to_host else (self._there, self._here)
        until = time.perf_counter() + COPY_WINDOW
        while (begin := time.perf_counter()) < until:
            with torch.cuda.stream(self._stream):
                dst.copy_(src, non_blocking=True)
            event = self._stream.record_event()
            while not is_over(event):
                if time.perf_counter() - begin > PATIENCE:
                    return sorted([*found, PATIENCE])
            found.append(time.perf_counter() - begin)
            time.sleep(rng.uniform(0, 0.002))  # not always at the same point of the other work
        return sorted(found)


def bench_copies(rig: Rig, packing: Rig, ways: tuple[str, ...]) -> list[dict[str, Any]]:
    """Measure copies of a few bytes beside each kind of transfers."""
    kinds: dict[str, Transfers | Bare | None] = {
        "nothing": None,
        "ours": Transfers(rig, ways),
        "packed": Transfers(packing, ways),
        "large copies": Bare(rig, ways, "large"),
    }
    rows = []
    for kind, transfers in kinds.items():
        row: dict[str, Any] = {"work": "small copies", "beside": kind, "ways": list(ways)}
        for to_host in (True, False):
            small = SmallCopies()
            with Running(transfers) if transfers else nullcontext():
                time.sleep(SETTLE)
                moved, begin = transfers.bytes if transfers else 0, time.perf_counter()
                seconds = small.seconds(to_host=to_host)
                gbps = ((transfers.bytes if transfers else 0) - moved) / (time.perf_counter() - begin) / 1e9
            name = "to_host" if to_host else "to_device"
            p50, p95, worst = (seconds[int(part * (len(seconds) - 1))] for part in (0.5, 0.95, 1))
            row |= {f"{name}_p50": p50, f"{name}_p95": p95, f"{name}_worst": worst, f"{name}_gbps": gbps}
            print(
                f"{'8 bytes ' + name.replace('_', ' '):22} {' and '.join(ways):14} {kind:12}"
                f" {1000 * p50:.2f} ms, p95 {1000 * p95:.2f}, at worst {1000 * worst:.2f}; "
                f"{gbps:5.1f} GB/s moved"
            )
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print, and write the requested files."""
    works = {
        "prefill": partial(prefill, 4096, 8),
        "decode": partial(decode, 8),
        "matrix products, 8192": partial(matrix_products, 8192, 2),
        "matrix products, 4096": partial(matrix_products, 4096, 12),
        "copies within HBM": partial(hbm_copies, 4),
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument(
        "--layout", choices=list(LAYOUTS), default="layers", help="of the cache that is copied"
    )
    parser.add_argument("--work", nargs="+", choices=list(works), default=list(works))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rig, packing = (Rig(*LAYOUTS[options.layout], JOB, packs=packs) for packs in (False, True))
    packing.fill()
    rows: list[dict[str, Any]] = []
    for ways in (("store",), ("load",), WAYS):
        rows += bench_copies(rig, packing, ways)
    for name in options.work:
        work = Work(works[name]())
        for ways in (("store",), ("load",), WAYS):
            kinds: dict[str, Transfers | Bare] = {
                "ours": Transfers(rig, ways),
                "packed": Transfers(packing, ways),
                "large copies": Bare(rig, ways, "large"),
            }
            rows += bench(name, work, ways, kinds, options.turns)
            # Separate from the others: the work beside it is so slow that the device cools, and is fast
            # afterwards.
            rows += bench(
                name, work, ways, {"kernel": Bare(rig, ways, "kernel")}, max(1, options.turns // 4)
            )
    for some in (rig, packing):
        some.close()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
