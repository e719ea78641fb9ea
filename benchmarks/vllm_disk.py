"""Claim: in vLLM a prompt's first token comes from disk as soon as the disk allows.

And the cost rule knows when computing is faster.

    python benchmarks/vllm_disk.py [--seconds 120] [--folder FOLDER] [--json FILE]

One engine of vLLM 0.32 with an 8B-shaped Llama (random weights, bf16, CUDA graphs) and kvtier over a disk
tier in a folder. For each length a prompt is computed and written, and then its first token is timed, in
turns: computed; from disk, when GPU and pool have evicted it, with the cost rule off; from the pool. In the
same turns the bare disk is measured: the same bytes read with direct I/O, by one thread and by as many
threads as the tier has. At the end the benchmark prints what the rule would have chosen, from what it has
learnt.

Results are printed and written as they come. `--seconds` bounds the whole run: lengths that would not fit
are left out, and reported. Needs vLLM 0.32 for this machine and kvtier; `--tiny` tries the program on the
CPU build.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from _vllm_arm import Arm, ArmPlan
from vllm_gpu import CPU, GPU, Sizes

THREADS = 8
"""The number of threads of a disk tier."""
PIECE = 16 << 20
"""Bytes of one direct read."""
RESERVE = 3.0
"""Seconds that are reserved for the end."""


class DiskSizes(NamedTuple):
    """An engine, the prompts, and the memory and disk for them: a promotion may take half of the pool."""

    engine: Sizes
    lengths: tuple[int, ...]
    pool: int
    disk: int


ONE_GRAPH = dict(GPU.options["compilation_config"]) | {"cudagraph_capture_sizes": [1]}
"""One size, because there is one request at a time."""
ON_GPU = DiskSizes(
    GPU._replace(options=dict(GPU.options) | {"max_num_seqs": 1, "compilation_config": ONE_GRAPH}),
    lengths=(4096, 16384, 32768),
    pool=9 << 30,
    disk=7 << 30,
)
TINY = DiskSizes(CPU, lengths=(128, 512), pool=64 << 20, disk=64 << 20)

Result = dict[str, Any]


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self._begin, self._seconds = time.perf_counter(), seconds

    @property
    def passed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._begin

    @property
    def left(self) -> float:
        """Seconds until the end, less the reserve; never 0, so that a wait may begin."""
        return max(0.1, self._seconds - RESERVE - self.passed)

    def say(self, text: str) -> None:
        """Print a line at once."""
        print(f"[{self.passed:6.1f} s] {text}", flush=True)


def read_bare(file: Path, start: int, size: int, threads: int) -> float:
    """Return the seconds of direct reads of a range, in pieces, by threads with a part each."""
    descriptor = open_direct(file)
    try:
        parts = [(start + size * at // threads, start + size * (at + 1) // threads) for at in range(threads)]
        parts = [(first // mmap.PAGESIZE * mmap.PAGESIZE, last) for first, last in parts]
        with ThreadPoolExecutor(threads) as pool:
            buffers = [mmap.mmap(-1, PIECE) for _ in parts]
            for buffer in buffers:
                buffer.write(bytes(PIECE))  # so that no page is allocated during the measurement
            begin = time.perf_counter()
            list(pool.map(lambda part, buffer: read_part(descriptor, part, buffer), parts, buffers))
            return time.perf_counter() - begin
    finally:
        os.close(descriptor)


def read_part(descriptor: int, part: tuple[int, int], buffer: mmap.mmap) -> None:
    """Read a range piece by piece."""
    (first, last), view = part, memoryview(buffer)
    while first < last:
        got = os.preadv(
            descriptor, [view[: min(PIECE, -(-(last - first) // mmap.PAGESIZE) * mmap.PAGESIZE)]], first
        )
        if got <= 0:
            raise OSError(f"expected {last - first} more bytes at {first}, found the end of the file")
        first += got


def open_direct(file: Path) -> int:
    """Open a file for direct reads; without direct I/O, drop the page cache's copy of it."""
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return descriptor


def plan_arm(sizes: DiskSizes, model: Path, folder: Path) -> ArmPlan:
    """Return the plan of an engine with kvtier over a disk in a folder, with long deadlines."""
    settings: Mapping[str, Any] = {
        "cpu": {"capacity": sizes.pool},
        "tiers": [{"disk": {"path": str(folder), "capacity": sizes.disk}}],
        "load_if_faster": False,
        "load_deadline": "60s",
    }
    transfer = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.integrations.vllm",
        "kv_connector_extra_config": settings,
    }
    return ArmPlan("kvtier", model, transfer, sizes.engine.options, {})


def measure_length(
    arm: Arm, clock: Clock, folder: Path, length: int, start: int, repetitions: int
) -> Result:
    """Write a prompt, whose first row is at byte `start` of the slots, and time its first token."""
    filled = arm.ask("fill_disk", clock.left, length=length, seconds=clock.left - 1)
    clock.say(
        f"{length:,} tokens: {filled['written']} of {filled['rows']} rows written in "
        f"{filled['seconds']:.1f} s"
    )
    runs: list[Result] = []
    took = 0.0
    while len(runs) < repetitions and clock.left > 1.5 * took and filled["written"] >= filled["rows"]:
        begin = clock.passed
        run = arm.ask("disk_first_tokens", clock.left, length=length)
        (slots,) = folder.glob("*/*/slots")
        first = start if start + run["promoted_bytes"] <= slots.stat().st_size else 0
        run["bare"] = read_bare(slots, first, run["promoted_bytes"], 1)
        run["bare_threads"] = read_bare(slots, first, run["promoted_bytes"], THREADS)
        runs.append(run)
        took = clock.passed - begin
        clock.say(f"{length:,} tokens: {json.dumps(run)}")
    return {"tokens": length, "filled": filled, "runs": runs}


def summarize(row: Result) -> Result:
    """Return medians, in milliseconds, and the rule's expectation and choice."""
    runs, expected = row["runs"], row["runs"][-1]["expected"]
    names = ("computed", "disk", "pool", "bare", "bare_threads")
    medians = {name: 1e3 * statistics.median(run[name] for run in runs) for name in names}
    from_disk = (expected["promote"] or 0.0) + (expected["load"] or 0.0)
    return medians | {
        "tokens": row["tokens"],
        "bytes": runs[-1]["promoted_bytes"],
        "from_disk": min(run["promoted_tokens"] for run in runs),
        "of_bare": medians["disk"] / min(medians["bare"], medians["bare_threads"]),
        "expected_disk": 1e3 * from_disk,
        "expected_compute": 1e3 * (expected["compute"] or 0.0),
        "rule": "disk" if from_disk <= (expected["compute"] or 0.0) else "compute",
    }


def show(rows: list[Result]) -> None:
    """Print the table."""
    print("\nfirst token, ms (medians)")
    measured = "computed  from disk  from pool  bare disk  by threads  of it"
    print(f"  tokens     GiB  {measured}  rule: disk  compute  chooses")
    for row in rows:
        times = f"{row['computed']:9.1f} {row['disk']:10.1f} {row['pool']:10.1f} {row['bare']:10.1f}"
        rule = f"{row['expected_disk']:11.1f} {row['expected_compute']:8.1f}  {row['rule']}"
        size = f"{row['tokens']:8,} {row['bytes'] / 2**30:7.2f}"
        print(f"{size} {times} {row['bare_threads']:11.1f} {row['of_bare']:6.2f} {rule}", flush=True)


def main() -> None:
    """Measure as much as fits into the time; print and write results as they come."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="of the whole run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; made, and removed in the end")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes, clock = TINY if options.tiny else ON_GPU, Clock(options.seconds)
    results: Result = {"lengths": [], "medians": []}
    with ExitStack() as stack:
        model = Path(stack.enter_context(TemporaryDirectory()))
        folder = Path(stack.enter_context(TemporaryDirectory(dir=options.folder)))
        (model / "config.json").write_text(json.dumps(dict(sizes.engine.model)))
        arm = stack.enter_context(closing(Arm(plan_arm(sizes, model, folder))))
        start = 0
        try:
            results["engine"] = arm.wait_ready(clock.left)
            clock.say(f"engine: {results['engine']}")
            results["disk"] = arm.ask("open_disk", clock.left, seconds=clock.left - 1)
            clock.say(f"disk: {results['disk']}")
            for length in options.lengths or sizes.lengths:
                row = measure_length(arm, clock, folder, length, start, options.repetitions)
                results["lengths"].append(row)
                start += row["filled"]["rows"] * results["disk"]["row_bytes"]
                if row["runs"]:
                    results["medians"].append(summarize(row))
                    show(results["medians"][-1:])
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1))
        except (TimeoutError, RuntimeError) as error:
            clock.say(f"stopped: {error}")
            results["stopped"] = str(error)
    show(results["medians"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
