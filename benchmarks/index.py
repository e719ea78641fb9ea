"""Claim: the index takes in at least twice Dynamo's blocks per second, at 40 bytes a block or fewer.

It also matches 1,000 blocks against 64 workers in less than 15 microseconds.

*From the wire*: the same pre-encoded batches (64 blocks of 16 tokens each) go by ZeroMQ to Dynamo's
standalone indexer and to `kvtier index serve`, one after the other. Each is a separate process, which is
asked over HTTP until it has everything. With `keys=xxh3` both do the same work: they hash every token. With
`keys=engine` the engine's hashes are the keys. *Match* and *growth* run in this process; the peer's match
is that of its Python binding.

Dynamo runs in the Python given by `--dynamo-python`, by default this one, and is left out if it is not
installed there.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq
from rich.console import Console
from rich.table import Table

from kvtier.events.types import BlockStored
from kvtier.events.wire import DecodedBatch, EventEncoder, frame_batch
from kvtier.index import PrefixIndex, StorageTier
from kvtier.index.base import Op
from kvtier.index.base import Table as IndexTable
from kvtier.index.plain import PlainTable
from kvtier.index.prefix import choose_form

BLOCK_SIZE, BATCH_BLOCKS, CHAIN_BATCHES = 16, 64, 8
FIRST_BLOCKS = 8 * BATCH_BLOCKS * CHAIN_BATCHES
PAGE = os.sysconf("SC_PAGE_SIZE")
TARGETS = {"blocks_per_second": 2.0, "bytes_per_block": 40.0, "match_us": 15.0}
SERVE = """
import sys
from kvtier.index.server import serve
from kvtier.index.service import Settings
keys, form, port = sys.argv[1:]
serve(port=int(port), settings=Settings(keys=keys, form=form))
"""
RADIX = """
import json, random, sys, time
from dynamo.llm import RadixTree
rng, tree = random.Random(1), RadixTree()
local, chained = ([rng.getrandbits(63) for _ in range(1000)] for _ in range(2))
blocks = [{"block_hash": c, "tokens_hash": l, "mm_extra_info": None} for c, l in zip(chained, local)]
for worker in range(64):
    event = {"event_id": 1, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
    tree.apply_event(worker, json.dumps(event).encode())
times = []
for _ in range(500):
    start = time.perf_counter()
    found = tree.find_matches(local)
    times.append(time.perf_counter() - start)
assert set(found.scores.values()) == {1000} and len(found.scores) == 64
print(sorted(times)[len(times) // 2] * 1e6)
"""


# -- from the wire ---------------------------------------------------------------------------------


Question = tuple[str, dict[str, Any]]


class Part(NamedTuple):
    """Encoded batches; the last one stores a single block, so that a query for the end is cheap."""

    payloads: list[bytes]
    blocks: int
    chains: list[Chain]


class Chain(NamedTuple):
    """Consecutive blocks: their tokens, and the engine's hashes."""

    tokens: list[int]
    names: list[int | bytes]

    def question(self, keys: str) -> Question:
        """Return the query for its holders."""
        if keys == "engine":
            return "/query_by_hash", {"block_hashes": self.names, "model_name": "m"}
        return "/query", {"token_ids": self.tokens, "model_name": "m"}


def make_part(blocks: int, seed: int) -> Part:
    """Make batches of 64 blocks, 8 batches to a chain, and one of a single block."""
    rng, names, encoder = np.random.default_rng(seed), random.Random(seed), EventEncoder()
    payloads: list[bytes] = []

    def add(chain: Chain, number: int) -> None:
        parent = chain.names[-1] if chain.names else None
        tokens = rng.integers(0, 128_000, number * BLOCK_SIZE).tolist()
        new: list[int | bytes] = [names.getrandbits(62) | 1 << 62 for _ in range(number)]
        event = BlockStored(new, parent, tokens, BLOCK_SIZE, None, "GPU", None)
        payloads.append(frame_batch(time.time(), [encoder.event(event)], 0))
        chain.tokens.extend(tokens)
        chain.names.extend(new)

    for _ in range(blocks // (CHAIN_BATCHES * BATCH_BLOCKS)):
        chain = Chain([], [])
        for _ in range(CHAIN_BATCHES):
            add(chain, BATCH_BLOCKS)
    last = Chain([], [])
    add(last, 1)
    return Part(payloads, (len(payloads) - 1) * BATCH_BLOCKS + 1, [last, chain])


class Indexer:
    """An indexer in its own process, and its cost."""

    def __init__(self, name: str, command: Sequence[str], port: int) -> None:
        self.keys = "engine" if name.endswith("engine") else "xxh3"
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start: {' '.join(command)[:200]}")
            time.sleep(0.05)

    def _is_up(self) -> bool:
        try:
            return self.ask("GET", "/health")[0] == 200
        except OSError:
            return False

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Send a request over the connection that is kept open."""
        data = None if body is None else json.dumps(body)
        try:
            self._connection.request(method, path, data, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise

    def matched(self, query: Question) -> int:
        """Return how many tokens of a prompt the indexer finds."""
        instances = json.loads(self.ask("POST", *query)[1]).get("instances", {})
        return int(instances.get("1", {}).get("longest_matched", 0))

    def cpu_seconds(self) -> float:
        # Linux's name for a process's own clock: in nanoseconds; /proc counts hundredths of a second
        return time.clock_gettime(~self._process.pid << 3 | 2)

    def resident(self) -> int:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE

    def counted_bytes(self) -> int | None:
        for line in self.ask("GET", "/metrics")[1].decode().splitlines():
            if line.startswith("kvtier_index_bytes{"):
                return int(line.rsplit(" ", 1)[1])
        return None

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.wait(20)


@contextmanager
def running(name: str, command: Sequence[str], port: int) -> Iterator[Indexer]:
    indexer = Indexer(name, command, port)
    try:
        yield indexer
    finally:
        indexer.close()


def take_in(indexer: Indexer, parts: Sequence[Part]) -> list[dict[str, float | None]]:
    """Send parts. The first, small one shows the memory cost of taking in anything at all, the second the
    cost of a block; both come slowly, so that no message waits in a buffer. The others come as fast as
    possible, and each shows the speed: from the first byte until its last chain is found.
    """
    context = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.sndhwm = 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    new = {
        "instance_id": 1,
        "endpoint": f"tcp://127.0.0.1:{port}",
        "model_name": "m",
        "block_size": BLOCK_SIZE,
    }
    indexer.ask("POST", "/register", new)
    publisher.recv()  # the subscription
    sequence = count()
    first, memory, *rest = parts
    resident = [indexer.resident()]
    for part in (first, memory):
        send(publisher, sequence, part.payloads, 2000)
        wait_for(indexer, part)
        resident.append(indexer.resident())
    counted = indexer.counted_bytes()
    costs = {
        "first_use_mb": (resident[1] - resident[0]) / 1e6,
        "rss_bytes_per_block": (resident[2] - resident[1]) / memory.blocks,
        "counted_bytes_per_block": None if counted is None else counted / (first.blocks + memory.blocks),
        "query_ms": median_us(lambda: indexer.matched(memory.chains[1].question(indexer.keys)), 50) / 1e3,
    }
    speeds = [costs | measure_speed(indexer, publisher, sequence, part) for part in rest]
    publisher.close(0)
    context.term()
    return speeds


def measure_speed(
    indexer: Indexer, publisher: zmq.Socket[bytes], sequence: Iterator[int], part: Part
) -> dict[str, float | None]:
    cpu, start = indexer.cpu_seconds(), time.perf_counter()
    send(publisher, sequence, part.payloads, None)
    wait_for(indexer, part)
    seconds = time.perf_counter() - start
    used = indexer.cpu_seconds() - cpu
    return {"blocks_per_second": part.blocks / seconds, "cpu_us_per_block": used / part.blocks * 1e6}


def send(
    publisher: zmq.Socket[bytes], sequence: Iterator[int], payloads: list[bytes], rate: int | None
) -> None:
    """Send batches, at most `rate` per second.

    Frame by frame: `send_multipart` takes twice the time, on cores that are shared.
    """
    start = time.perf_counter()
    for number, payload in enumerate(payloads):
        publisher.send(b"", zmq.SNDMORE)
        publisher.send(struct.pack(">Q", next(sequence)), zmq.SNDMORE)
        publisher.send(payload)
        if rate is not None and number % 20 == 0:
            time.sleep(max(0.0, start + number / rate - time.perf_counter()))


def wait_for(indexer: Indexer, part: Part) -> None:
    """Ask until everything is taken in."""
    for chain in part.chains:
        question = chain.question(indexer.keys)
        while indexer.matched(question) < len(chain.tokens):
            time.sleep(0.01)  # frequent questions would be most of the work


def has_dynamo(python: str) -> bool:
    code = (
        "import importlib.util as u, sys; "
        "sys.exit(u.find_spec('dynamo') is None or u.find_spec('dynamo.indexer') is None)"
    )
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def from_the_wire(arguments: argparse.Namespace, forms: list[str]) -> dict[str, dict[str, Any]]:
    """Measure every indexer repeatedly, in turns, as the machine's speed changes; the best counts."""
    sizes = (FIRST_BLOCKS, *[arguments.blocks] * 4)
    parts = [make_part(size, seed) for seed, size in enumerate(sizes)]
    port = str(arguments.port)
    commands: dict[str, list[str]] = {}
    if has_dynamo(arguments.dynamo_python):
        commands["dynamo"] = [arguments.dynamo_python, "-m", "dynamo.indexer", "--port", port]
    for form in forms:
        for keys in ("xxh3", "engine"):
            commands[f"kvtier {form}, {keys}"] = [sys.executable, "-c", SERVE, keys, form, port]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for _ in range(arguments.rounds):
        for name, command in commands.items():
            with running(name, command, arguments.port) as indexer:
                results[name] += take_in(indexer, parts)
    return {name: best_of(rounds) for name, rounds in results.items()}


def best_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the most blocks per second, and the least of everything else: other load only adds to it."""
    best = {
        key: min(times[key] for times in rounds) for key, value in rounds[0].items() if value is not None
    }
    return best | {"blocks_per_second": max(times["blocks_per_second"] for times in rounds)}


# -- in this process -------------------------------------------------------------------------------


def median_us(
    function: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None
) -> float:
    times = []
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure_match(form: str) -> dict[str, float]:
    """Time a match of 1,000 blocks that all 64 workers hold, and one where each holds another part."""
    index, rng = PrefixIndex(keys="engine", counting="set", form=form), np.random.default_rng(2)
    store(index, "w0", rng.integers(0, 1 << 63, 10**6 if form == "numba" else 10**5, dtype=np.uint64))
    shared, ragged = rng.integers(0, 1 << 63, (2, 1000), dtype=np.uint64)
    for worker in range(64):
        store(index, f"w{worker}", shared)
        store(index, f"w{worker}", ragged[: 5 + 15 * worker])
        store(index, f"w{worker}", ragged[: 8 + 15 * worker], "CPU")
    assert (index.match(shared).on_any_tier == 1000).all()
    junk = np.zeros(1 << 26, np.uint8)

    def evict() -> None:
        junk[::64] += 1

    rounds = 2000 if form == "numba" else 100
    return {
        "hot_us": median_us(lambda: index.match(shared), rounds),
        "hot_ragged_us": median_us(lambda: index.match(ragged), rounds),
        "cold_us": median_us(lambda: index.match(shared), 30, evict),
    }


def store(
    index: PrefixIndex, worker: str, hashes: np.ndarray[Any, np.dtype[np.uint64]], medium: str = "GPU"
) -> None:
    """Apply stores of 64 blocks each."""
    for start in range(0, len(hashes), BATCH_BLOCKS):
        part = hashes[start : start + BATCH_BLOCKS].tolist()
        index.apply(worker, DecodedBatch(0.0, [BlockStored(part, None, [], 0, None, medium, None)], 0))


def peer_match(python: str) -> float | None:
    done = subprocess.run([python, "-c", RADIX], capture_output=True, text=True, timeout=120)
    return float(done.stdout) if done.returncode == 0 else None


def measure_growth(form: str, sizes: list[int]) -> list[dict[str, float]]:
    """Fill tables of several sizes, 64 blocks at a time like scanned batches, spread over 64 workers."""
    rows = []
    for size in sizes:
        gc.collect()
        table = make_table(form)
        table.grow(64)
        edits = np.array([(Op.STORED, StorageTier.GPU, BATCH_BLOCKS)])
        hashes = np.random.default_rng(3).integers(0, 1 << 63, size, dtype=np.uint64)
        resident, worst, start = own_resident(), 0.0, time.perf_counter()
        for at in range(0, size - BATCH_BLOCKS + 1, BATCH_BLOCKS):
            before = time.perf_counter()
            table.apply((at // BATCH_BLOCKS) % 64, edits, hashes[at : at + BATCH_BLOCKS])
            worst = max(worst, time.perf_counter() - before)
        seconds, stats = time.perf_counter() - start, table.stats()
        before = time.perf_counter()
        table.clear(7)
        clear = (time.perf_counter() - before) * 1e6
        rows.append(
            {
                "blocks": stats.blocks,
                "ns_per_block": seconds / stats.blocks * 1e9,
                "worst_batch_us": worst * 1e6,
                "bytes_per_block": stats.bytes / stats.blocks,
                "rss_bytes_per_block": (own_resident() - resident) / stats.blocks,
                "clear_us": clear,
            }
        )
        del table
    return rows


def make_table(form: str) -> IndexTable:
    """Make an empty table with room for all sizes."""
    if form == "python":
        return PlainTable(4 << 30)
    from kvtier.index.compiled.table import CompiledTable

    return CompiledTable(4 << 30)


def own_resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


# -- output ----------------------------------------------------------------------------------------


def show(console: Console, title: str, rows: dict[str, dict[str, Any]], columns: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        cells = [row.get(key) for key in columns]
        table.add_row(
            name,
            *("-" if cell is None else f"{cell:,.2f}" if cell < 100 else f"{cell:,.0f}" for cell in cells),
        )
    console.print(table)


def add_ratios(wire: dict[str, dict[str, Any]]) -> None:
    peer = wire.get("dynamo")
    if peer is None:
        return
    for row in wire.values():
        row["times_dynamo"] = row["blocks_per_second"] / peer["blocks_per_second"]
        row["cpu_times_less"] = peer["cpu_us_per_block"] / row["cpu_us_per_block"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1 << 18, help="blocks sent over the wire at a time")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--largest", type=int, default=10**7, help="largest index of the growth measurement")
    parser.add_argument("--port", type=int, default=18099)
    parser.add_argument("--dynamo-python", default=sys.executable, metavar="FILE")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too, `-` for stdout")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json == "-", highlight=False, width=170)
    forms = ["numba", "python"] if choose_form(None) == "numba" else ["python"]

    wire = from_the_wire(arguments, forms)
    add_ratios(wire)
    if "dynamo" not in wire:
        console.print(f"ai-dynamo-runtime is not installed in {arguments.dynamo_python}: no comparison")
    headings = {
        "blocks_per_second": "blocks/s",
        "times_dynamo": "x Dynamo",
        "cpu_us_per_block": "CPU us/block",
    }
    headings |= {
        "cpu_times_less": "x less CPU",
        "first_use_mb": "first use MB",
        "rss_bytes_per_block": "RSS B/block",
        "counted_bytes_per_block": "counted B/block",
        "query_ms": "512-block query ms",
    }
    show(console, f"From the wire, {arguments.blocks:,} blocks", wire, headings)

    match: dict[str, dict[str, Any]] = {f"kvtier {form}": dict(measure_match(form)) for form in forms}
    if "dynamo" in wire and (peer := peer_match(arguments.dynamo_python)) is not None:
        match["dynamo RadixTree"] = {"hot_us": peer}
    show(
        console,
        "Match of 1,000 blocks, 64 workers",
        match,
        {"hot_us": "hot us", "hot_ragged_us": "hot, ragged us", "cold_us": "cold us"},
    )

    growth: dict[str, Any] = {}
    for form in forms:
        most = arguments.largest if form == "numba" else min(arguments.largest, 10**6)
        sizes = [10**power for power in range(4, 9) if 10**power <= most]
        growth[form] = measure_growth(form, sizes)
        rows = {f"{int(row['blocks']):,}": row for row in growth[form]}
        named = {
            "ns_per_block": "ns/block",
            "worst_batch_us": "slowest batch us",
            "bytes_per_block": "B/block",
        }
        show(
            console,
            f"Growth, {form}",
            rows,
            named | {"rss_bytes_per_block": "RSS B/block", "clear_us": "clear us"},
        )

    result = {
        "wire": wire,
        "match": match,
        "growth": growth,
        "targets": TARGETS,
        "cores": len(os.sched_getaffinity(0)),
    }
    text = json.dumps(result, indent=2) + "\n"
    if arguments.json == "-":
        sys.stdout.write(text)
    elif arguments.json:
        Path(arguments.json).write_text(text)
    return 0 if is_met(console, result, forms) else 1


def is_met(console: Console, result: dict[str, Any], forms: list[str]) -> bool:
    """Return whether the claim holds, as far as it was measured."""
    if "numba" not in forms:
        console.print("without numba nothing is claimed")
        return True
    sizes = [row["bytes_per_block"] for row in result["growth"]["numba"]]
    checks = [(size <= TARGETS["bytes_per_block"], f"{size:.1f} bytes a block") for size in sizes]
    hot = result["match"]["kvtier numba"]["hot_us"]
    checks.append((hot < TARGETS["match_us"], f"match {hot:.1f} us"))
    if "dynamo" in result["wire"]:
        ratio = result["wire"]["kvtier numba, engine"]["times_dynamo"]
        checks.append((ratio >= TARGETS["blocks_per_second"], f"{ratio:.2f}x Dynamo's blocks per second"))
    for good, text in checks:
        console.print(f"{'ok  ' if good else 'MISS'} {text}")
    return all(good for good, _ in checks)


if __name__ == "__main__":
    raise SystemExit(main())
