"""Claim: the disk tier, sealed, is as fast as the disk, and faster than vLLM's `fs` tier.

    python benchmarks/disk.py [--folder DIR] [--fio PROGRAM] [--mib 256] [--rounds 7] [--json FILE]

`rows` moves rows of 256 KiB, 1 MiB and 2 MiB through contenders in turns, in one run: fio (io_uring, 16 in
flight, direct), vLLM's own `fs` tier (16 jobs, and one job, which is one request; unchecked), ours (16 jobs,
and one), and ours with the same KV packed, whose speed is that of the KV: as many tokens in fewer bytes. All
of them bypass the page cache, so a store has reached the disk when it ends, except for the file system's own
notes: these are synced after every turn, outside of its time, so that no contender pays for another. Ours is
full, so every store evicts; `fs` never removes a file, so the benchmark removes the old ones between turns,
and `both full` counts that time. Ratios are of one round; their median counts. CPU seconds are those of the
process; the figure behind them is that of the whole machine with that sync, which is meaningful only on a
quiet machine. Beside the CPU of seals stands that of only reading the same memory. `open` opens files of
10^4 to 10^6 records as a restart does. `thread` times 20 µs of Python every millisecond, alone and beside
full I/O, as an engine's scheduler experiences it. `scheduler` is the cost of storing a chunk for the
scheduler's thread, without a tier below the pool and with one that moves no bytes. Needs an environment with
vLLM 0.32 and kvtier (`make bench` builds one), and fio for its part (Debian: `apt install fio`); contenders
that are missing are left out.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import xxhash
from _shapes import packed_row_bytes

from kvtier.keys import OffloadKey
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.offload.tiered import ConfiguredTier, TieredOffloadingManager
from kvtier.policies import make_policy
from kvtier.slot_table import SlotTable
from kvtier.tiers.base import Backend, BackendRow, Direction, RowBuffer, RowJob
from kvtier.tiers.disk import DiskConfig, DiskFiles, DiskTier
from kvtier.tiers.disk.folder import learnt_bytes
from kvtier.tiers.disk.format import HEADER_BYTES, RECORD_BYTES, description_stride, pack_record
from kvtier.tiers.seal import SealScope
from kvtier.tiers.slot_tier import SlotTier

SIZES = (256 << 10, 1 << 20, 2 << 20)
JOBS = 16
NAMESPACE = "bench"
BARS = {
    "store / fio": (0.9, 0.9, 0.9),
    "load / fio": (0.75, 0.9, 0.9),
    "store / fs": (2.0, 1.5, 1.5),
    "load / fs, one request": (2.0, 1.5, 1.2),
    "load / fs, many": (0.9, 0.9, 0.9),
    "CPU of stores / fs": (0.5, 0.5, 0.5),
    "packed store / fs": (1.15, 1.15, 1.15),
    "packed load / fs, one request": (1.25, 1.25, 1.25),
    "packed load / fs, many": (1.0, 1.0, 1.0),
}
"""By row size. CPU has an upper bound, the others have lower bounds."""


class Cell(NamedTuple):
    """One measurement: bytes per second, and CPU seconds per 10^9 bytes, of process and machine."""

    speed: float
    cpu: float
    machine: float = 0.0


def make_rows(count: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return page-aligned rows of random bytes in large pages, like the pool of one process."""
    region = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        region.madvise(mmap.MADV_HUGEPAGE)
    rows = np.frombuffer(region, dtype=np.uint8).reshape(count, size)
    rows[:] = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    rows[:, :8] = np.arange(count, dtype=np.uint64).view(np.uint8).reshape(count, 8)
    return rows


def timed(nbytes: int, action: Callable[[], object]) -> Cell:
    """Time an action; the machine's part counts until all of it is on the disk."""
    machine, cpu, start = machine_seconds(), time.process_time(), time.perf_counter()
    action()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    os.sync()
    return Cell(nbytes / seconds, cpu / nbytes * 1e9, (machine_seconds() - machine) / nbytes * 1e9)


def machine_seconds() -> float:
    """Return the CPU time of everything on this machine, the kernel's threads included, in 10 ms steps."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _waiting, hard, soft = map(int, words[1:8])
    return (user + nice + system + hard + soft) / os.sysconf("SC_CLK_TCK")


def room_for(count: int, size: int) -> int:
    """Return the capacity of a disk that holds just so many rows, with records and descriptions."""
    capacity = count * (size + RECORD_BYTES + description_stride(512)) + HEADER_BYTES + 3 * mmap.PAGESIZE
    return capacity + learnt_bytes(capacity)


class Ours:
    """The disk tier, as a manager drives it."""

    def __init__(self, folder: Path, rows: np.ndarray[Any, np.dtype[np.uint8]], threads: int = 8) -> None:
        count, size = rows.shape
        self.rows = rows
        config = DiskConfig(path=str(folder), capacity=room_for(count, size), write_limit=0)
        self.tier = DiskTier(
            config,
            row_bytes=size,
            namespace=lambda: NAMESPACE,
            max_queued=1 << 40,
            threads=threads,
            max_in_flight=threads * (2 << 20),
        )
        self.tier.set_buffer(RowBuffer(rows.reshape(-1).data, size))
        assert self.tier.wait_open(60), self.tier.problem
        self.keys: list[OffloadKey] = []
        self._number = self._job = 0

    def new_keys(self) -> float:
        """Give the rows new names, so that all of them are stored again and evict others.

        Return the seconds that making room took: zero, because a store does it.
        """
        self._number += 1
        self.keys = [
            OffloadKey(b"%020d%012d" % (self._number, row) + bytes(4)) for row in range(len(self.rows))
        ]
        return 0.0

    def store(self, jobs: int) -> None:
        self._run(Direction.DEMOTE, self.tier.demote, jobs)

    def load(self, jobs: int) -> None:
        self._run(Direction.PROMOTE, self.tier.promote, jobs)

    def _run(self, direction: Direction, submit: Callable[[RowJob], object], jobs: int) -> None:
        slots = np.arange(len(self.keys))
        size = -(-len(slots) // jobs)
        for at in range(0, len(slots), size):
            self._job += 1
            some = slice(at, at + size)
            submit(RowJob(self._job, direction, self.keys[some], slots[some], time.monotonic() + 600))
        left = len(slots)
        while left:
            time.sleep(0.001)  # like the steps of an engine, or more often
            for result in self.tier.poll():
                assert result.outcome is None, result
                left -= len(result.positions)
        self.tier.take_events()

    def close(self) -> None:
        self.tier.close(30)


class Theirs:
    """vLLM's `fs` tier, as its manager drives it."""

    def __init__(self, folder: Path, rows: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        group = SimpleNamespace(tokens_per_block=16, layer_names=["layer"])
        parallel = SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
        )
        config = SimpleNamespace(
            groups=[group],
            parallel=parallel,
            canonical_layout=False,
            kv_cache_layout=None,
            replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )
        spec: Any = SimpleNamespace(
            config=config, blocks_per_chunk=1, kv_events_config=SimpleNamespace(enable_kv_cache_events=False)
        )
        self.folder, self.rows = folder, rows
        self.tier = FileSystemTierManager(spec, rows.data, "fs", str(folder))
        assert self.tier._use_o_direct, "fs would go through the page cache: nothing could be compared"
        self.keys: list[bytes] = []
        self._number = self._job = 0

    def new_keys(self) -> float:
        """Give the rows new names, and remove the old files outside the timed part: this tier removes none.

        Return the seconds that the removal took.
        """
        start = time.perf_counter()
        for old in self.keys:
            with suppress(FileNotFoundError):
                os.unlink(self.tier.file_mapper.get_file_name(old))
        seconds = time.perf_counter() - start
        os.sync()
        self._number += 1
        self.keys = [
            xxhash.xxh3_128_digest(b"%d %d" % (self._number, row)) * 2 + bytes(4)
            for row in range(len(self.rows))
        ]
        return seconds

    def store(self, jobs: int) -> None:
        self._run(self.tier.submit_store, jobs, False)

    def load(self, jobs: int) -> None:
        self._run(self.tier.submit_load, jobs, True)

    def _run(self, submit: Callable[[Any], object], jobs: int, promotion: bool) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        size = -(-len(self.keys) // jobs)
        begun = 0
        for at in range(0, len(self.keys), size):
            self._job, begun = self._job + 1, begun + 1
            keys = self.keys[at : at + size]
            context = ReqContext(req_id=f"{self._job}")
            submit(TransferJob(self._job, keys, np.arange(at, at + len(keys)), promotion, context))
        self.tier.drain_jobs()
        while begun:
            for result in self.tier.get_finished_jobs():
                assert result.success
                begun -= 1

    def close(self) -> None:
        self.tier.shutdown()


class Fio:
    """The speed of the disk: fio on one file of the same size."""

    def __init__(self, program: str, folder: Path, nbytes: int, size: int) -> None:
        self._command = [
            program,
            "--name=bench",
            f"--filename={folder / 'fio'}",
            f"--size={nbytes}",
            f"--bs={size}",
            "--direct=1",
            "--ioengine=io_uring",
            "--iodepth=16",
            "--output-format=json",
            "--fallocate=native",
        ]

    def run(self, way: str) -> Cell:
        """Run `randwrite` or `randread`, every block once."""
        done = subprocess.run([*self._command, f"--rw={way}"], capture_output=True, text=True, check=True)
        report = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        part = report["write" if way == "randwrite" else "read"]
        seconds = part["runtime"] / 1e3
        cpu = (report["usr_cpu"] + report["sys_cpu"]) / 100 * report["job_runtime"] / 1e3
        return Cell(part["io_bytes"] / seconds, cpu / part["io_bytes"] * 1e9)


def bench_rows(
    folder: Path, size: int, nbytes: int, rounds: int, fio_program: str | None, threads: int
) -> dict[str, Any]:
    """Measure the contenders in turns."""
    rows = make_rows(nbytes // size, size)
    nbytes = rows.nbytes
    ours, fs, fio = Ours(folder / "ours", rows, threads), None, None
    packed = Ours(folder / "packed", make_rows(len(rows), packed_row_bytes(size)), threads)
    (folder / "fs").mkdir()
    with suppress(ImportError):
        fs = Theirs(folder / "fs", rows)
    if fio_program is not None:
        fio = Fio(fio_program, folder, nbytes, size)
        fio.run("randwrite")  # first writes into fresh extents are slower, for every contender
    cells: dict[str, list[Cell]] = {}

    def note(name: str, cell: Cell) -> None:
        cells.setdefault(name, []).append(cell)

    for turn in range(-1, rounds):  # one extra turn, not counted
        if turn == 0:
            cells.clear()
        for way in ("store", "load"):
            for jobs, many in ((JOBS, "many"), (1, "one")):
                if fio is not None and jobs == JOBS:
                    note(f"fio {way}", fio.run("randwrite" if way == "store" else "randread"))
                for name, contender in (("ours", ours), ("packed", packed), ("fs", fs)):
                    if contender is None:
                        continue
                    making_room = contender.new_keys() if way == "store" else 0.0
                    cell = timed(nbytes, partial(getattr(contender, way), jobs))
                    note(f"{name} {way} {many}", cell)
                    if way == "store" and jobs == JOBS:
                        note(f"{name} store full", Cell(1 / (1 / cell.speed + making_room / nbytes), 0.0))
                if fio is not None and jobs == JOBS:
                    note(f"fio {way} after", fio.run("randwrite" if way == "store" else "randread"))
    passes = range(max(3, rounds))
    sealing = [timed(nbytes, lambda: [xxhash.xxh3_128_digest(row.data, 1) for row in rows]) for _ in passes]
    reading = [timed(nbytes, lambda: [row.view(np.uint64).max() for row in rows]) for _ in passes]
    ours.close()
    packed.close()
    if fs is not None:
        fs.close()
    shutil.rmtree(folder / "ours")
    shutil.rmtree(folder / "packed")
    shutil.rmtree(folder / "fs")
    return summarize(size, cells) | {
        "seal_cpu_per_gb": median(cell.cpu for cell in sealing),
        "read_cpu_per_gb": median(cell.cpu for cell in reading),
    }


def summarize(size: int, cells: dict[str, list[Cell]]) -> dict[str, Any]:
    """Return medians, and medians of the ratios of each round."""
    result: dict[str, Any] = {
        "row_bytes": size,
        "gbps": {},
        "cpu_per_gb": {},
        "machine_cpu_per_gb": {},
        "ratios": {},
    }
    for name, all_cells in cells.items():
        result["gbps"][name] = median(cell.speed for cell in all_cells) / 1e9
        result["cpu_per_gb"][name] = median(cell.cpu for cell in all_cells)
        result["machine_cpu_per_gb"][name] = mean(cell.machine for cell in all_cells)  # of coarse steps

    def ratio(name: str, ours: str, *theirs: str, by: Callable[[Cell], float]) -> None:
        if all(peer in cells for peer in theirs):
            peers = [cells[peer] for peer in theirs]
            rounds = [
                by(mine) / (sum(by(peer[turn]) for peer in peers) / len(peers))
                for turn, mine in enumerate(cells[ours])
            ]
            result["ratios"][name] = {"median": median(rounds), "least": min(rounds), "most": max(rounds)}

    def speed(cell: Cell) -> float:
        return cell.speed

    def cpu(cell: Cell) -> float:
        return cell.cpu

    for way in ("store", "load"):
        ratio(f"{way} / fio", f"ours {way} many", f"fio {way}", f"fio {way} after", by=speed)
    ratio("store / fs", "ours store many", "fs store many", by=speed)
    ratio("store / fs, both full", "ours store full", "fs store full", by=speed)
    ratio("store / fs, one request", "ours store one", "fs store one", by=speed)
    ratio("load / fs, one request", "ours load one", "fs load one", by=speed)
    ratio("load / fs, many", "ours load many", "fs load many", by=speed)
    ratio("packed store / fs", "packed store many", "fs store many", by=speed)
    ratio("packed load / fs, one request", "packed load one", "fs load one", by=speed)
    ratio("packed load / fs, many", "packed load many", "fs load many", by=speed)
    ratio("CPU of stores / fs", "ours store many", "fs store many", by=cpu)
    return result


def bench_open(folder: Path, slots: int) -> dict[str, Any]:
    """Open a place whose records are all used, in its own process."""
    size = 4096
    path = folder / "open"
    capacity = room_for(slots, size)
    (path / "rank-0").mkdir(parents=True)
    files, _, scope = DiskFiles.open(path / "rank-0", NAMESPACE, size, capacity, 512)
    assert files.header.slots == slots
    with (files.folder / "records").open("r+b") as records:
        records.seek(HEADER_BYTES)
        for slot in range(slots):
            key = OffloadKey(xxhash.xxh3_128_digest(b"%d" % slot) * 2 + bytes(4))
            records.write(pack_record(slot, key, bytes(16), size, scope.number, slot + 1))
    files.close()
    done = subprocess.run(
        [sys.executable, __file__, "--opening", str(path), "--slots", str(slots)],
        capture_output=True,
        text=True,
        check=True,
    )
    shutil.rmtree(path)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def open_here(path: Path, slots: int) -> dict[str, Any]:
    """Time the opening of a tier and lookups in it, and measure its memory."""
    keys = [OffloadKey(xxhash.xxh3_128_digest(b"%d" % slot) * 2 + bytes(4)) for slot in range(0, slots, 100)]
    before = resident_bytes()
    config = DiskConfig(path=str(path), capacity=room_for(slots, 4096), write_limit=0)
    start, cpu = time.perf_counter(), time.process_time()
    tier = DiskTier(config, row_bytes=4096, namespace=lambda: NAMESPACE)
    assert tier.wait_open(60), tier.problem
    assert tier.lookup(keys[0]) is True
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    memory = resident_bytes() - before
    assert tier.stats().used == slots
    lookups = []
    for at in range(0, len(keys), 100):
        part = keys[at : at + 100]
        start = time.perf_counter()
        assert all(tier.lookup_many(part))
        lookups.append((time.perf_counter() - start) / len(part))
    tier.close(60)
    return {
        "slots": slots,
        "open_seconds": seconds,
        "open_cpu_seconds": cpu,
        "bytes_per_slot": memory / slots,
        "lookup_ns_per_key": median(lookups) * 1e9,
    }


def resident_bytes() -> int:
    """Return the memory that this process has now. (Its peak would include that of its parent.)"""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class NoBytes(Backend):
    """A backend that does nothing."""

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        return [None] * len(rows)

    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        return [None] * len(rows)

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        return [False] * len(rows)

    def delete(self, rows: Sequence[BackendRow]) -> None:
        return


def bench_scheduler(rounds: int, chunks: int = 20_000, a_step: int = 200) -> dict[str, Any]:
    """Time the scheduler's thread over stores of chunks, with and without a tier below, in turns."""
    alone, tiered = [], []
    for _ in range(rounds):
        alone.append(_seconds_a_chunk(None, chunks, a_step))
        tier = SlotTier("none", 4096, threads=2)
        tier.open_table(SlotTable(8192, make_policy("lru", 8192)), NoBytes(), SealScope(NAMESPACE))
        tiered.append(_seconds_a_chunk(tier, chunks, a_step))
        assert tier.stats().demoted == chunks
        tier.close(30)
    return {"step_chunks": a_step, "alone_us": median(alone) * 1e6, "tiered_us": median(tiered) * 1e6}


def _seconds_a_chunk(tier: SlotTier | None, chunks: int, a_step: int) -> float:
    rows, context, spent = np.zeros((4096, 4096), np.uint8), ReqContext(req_id="bench"), 0.0
    manager = TieredOffloadingManager(
        CPUOffloadingManager(4096), rows, [ConfiguredTier(tier)] if tier else []
    )
    for first in range(0, chunks, a_step):
        keys = [OffloadKey(b"%036d" % number) for number in range(first, first + a_step)]
        start = time.thread_time()
        output = manager.prepare_store(keys, context)
        assert output is not None
        manager.complete_store(output.keys_to_store, spec=output.store_spec)
        manager.end_step()
        manager.take_events()
        spent += time.thread_time() - start
        while tier is not None and tier.stats().demoted < first + a_step:
            tier.wait_any(1.0)
            start = time.thread_time()
            manager.end_step()
            manager.take_events()
            spent += time.thread_time() - start
    return spent / chunks


def bench_thread(folder: Path, size: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Time a thread that works 20 µs every millisecond, alone and beside loads and stores, in turns."""
    rows = make_rows((128 << 20) // size, size)
    ours = Ours(folder / "thread", rows)
    ours.new_keys()
    ours.store(1)
    alone, beside = [], []
    with ours_busy(ours) as (resume, pause):
        for _ in range(rounds):
            pause()
            alone.append(_step_times(seconds))
            resume()
            beside.append(_step_times(seconds))
        pause()
    ours.close()
    shutil.rmtree(folder / "thread")
    p99 = [median(quantiles(times, n=100)[98] for times in part) for part in (alone, beside)]
    p50 = [median(median(times) for times in part) for part in (alone, beside)]
    ratios = [quantiles(b, n=100)[98] / quantiles(a, n=100)[98] for a, b in zip(alone, beside, strict=True)]
    return {
        "row_bytes": size,
        "alone_p50_us": p50[0] * 1e6,
        "alone_p99_us": p99[0] * 1e6,
        "beside_p50_us": p50[1] * 1e6,
        "beside_p99_us": p99[1] * 1e6,
        "p99_ratio": median(ratios),
    }


@contextmanager
def ours_busy(ours: Ours) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Keep the tier's I/O threads busy while resumed, from a thread that itself hardly runs."""
    go, ended, idle = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        while not ended.is_set():
            idle.set()
            go.wait()
            idle.clear()
            if ended.is_set():
                return
            ours.load(1)
            ours.new_keys()
            ours.store(1)

    thread = threading.Thread(target=work)
    thread.start()

    def pause() -> None:
        go.clear()
        idle.wait()

    try:
        yield go.set, pause
    finally:
        ended.set()
        go.set()
        thread.join()


def _step_times(seconds: float) -> list[float]:
    times, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        total = 0
        for number in range(400):  # about 20 µs
            total += number
        times.append(time.perf_counter() - start)
        time.sleep(0.001)
    return times


def show(results: dict[str, Any]) -> None:
    """Print the measurements, and their targets."""
    for result in results.get("rows", ()):
        size = result["row_bytes"] >> 10
        print(f"\nrows of {size} KiB: GB/s [CPU seconds for 10^9 bytes; of the machine]")
        for name, speed in result["gbps"].items():
            cpu, machine = result["cpu_per_gb"][name], result["machine_cpu_per_gb"][name]
            print(f"  {name:22} {speed:6.2f} [{cpu:.3f}; {machine:.3f}]")
        print(f"  {'seals':22} {'':6} [{result['seal_cpu_per_gb']:.3f}] (at most 0.07)", end="")
        print(f"; reading that memory takes [{result['read_cpu_per_gb']:.3f}]")
        for name, ratio in result["ratios"].items():
            bar = BARS[name][SIZES.index(result["row_bytes"])] if name in BARS else None
            at = "at most" if name.startswith("CPU") else "at least"
            asked = f"({at} {bar})" if bar is not None else ""
            print(f"  {name:26} {ratio['median']:5.2f}  {ratio['least']:.2f}–{ratio['most']:.2f} {asked}")
    for result in results.get("open", ()):
        seconds, cpu = result["open_seconds"], result["open_cpu_seconds"]
        print(f"{result['slots']:>9,} slots: open in {seconds:.2f} s ({cpu:.2f} of CPU)", end="")
        print(
            f", {result['bytes_per_slot']:.0f} bytes a slot, "
            f"lookup {result['lookup_ns_per_key']:.0f} ns a key"
        )
    for result in results.get("thread", ()):
        alone, beside, ratio = result["alone_p99_us"], result["beside_p99_us"], result["p99_ratio"]
        print(
            f"a thread beside I/O of {result['row_bytes'] >> 10} KiB rows: "
            f"p99 {alone:.0f} -> {beside:.0f} µs,",
            end="",
        )
        print(f" {ratio:.1f} × (at most 3)")
    if "scheduler" in results:
        result = results["scheduler"]
        alone, tiered, chunks = result["alone_us"], result["tiered_us"], result["step_chunks"]
        print(f"a chunk stored, {chunks} a step: {alone:.2f} µs of the scheduler's thread", end="")
        print(f", {tiered:.2f} with a tier below")


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; by default the temporary folder"
    )
    parser.add_argument("--fio", default=shutil.which("fio"), help="the program")
    parser.add_argument("--mib", type=int, default=256, help="bytes of each turn, in MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=8, help="of our tier; 2 MiB in flight for each")
    parser.add_argument("--only", choices=("rows", "open", "thread", "scheduler"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--opening", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.opening:
        print(json.dumps(open_here(options.opening, options.slots)))
        return
    results: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "fio": options.fio}
    if options.fio is None:
        print("no fio here: what the disk gives is not measured")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Path(folder)
        if options.only in (None, "rows"):
            results["rows"] = [
                bench_rows(place, size, options.mib << 20, options.rounds, options.fio, options.threads)
                for size in SIZES
            ]
        if options.only in (None, "open"):
            results["open"] = [bench_open(place, slots) for slots in (10_000, 100_000, 1_000_000)]
        if options.only in (None, "thread"):
            results["thread"] = [bench_thread(place, size, 2.0, 3) for size in SIZES[:2]]
        if options.only in (None, "scheduler"):
            results["scheduler"] = bench_scheduler(options.rounds)
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
