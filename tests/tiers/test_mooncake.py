"""The backend over a Mooncake store: a real master, memory in another process, bytes over TCP."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tiers.mooncake_server import MooncakeServer, need_mooncake
from tests.tiers.object_server import ToldServer, http_answer
from tests.tiers.servers import RealServerSuite, send_signal

from kvtier.errors import ConfigError, InputError
from kvtier.testing.backend_suite import (
    NUM_PLACES,
    ROW_BYTES,
    BackendSuite,
    content,
    empty,
    payload_of,
    sealed,
)
from kvtier.tier_config import MooncakeConfig
from kvtier.tiers import factory, mooncake
from kvtier.tiers.base import Backend, BackendRow
from kvtier.tiers.mooncake import MooncakeBackend, must_answer
from kvtier.tiers.seal import HEADER_BYTES, pack_header

PATIENCE = 60.0
SLOT_BYTES = ROW_BYTES + 4096
_prefixes = count()


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    need_mooncake()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, needed: None) -> Iterator[MooncakeServer]:
    server = MooncakeServer(tmp_path_factory.mktemp("mooncake") / "log")
    yield server
    server.stop()


def open_backend(server: MooncakeServer) -> MooncakeBackend:
    return MooncakeBackend(server.config(f"run-{next(_prefixes)}"), ROW_BYTES, timeout=PATIENCE)


class OpenBackend(MooncakeBackend):
    """One for all tests of the suite: joining and leaving takes longer than most of them."""

    def close(self) -> None:
        return


@pytest.fixture(scope="module")
def joined(server: MooncakeServer) -> Iterator[OpenBackend]:
    backend = OpenBackend(server.config("suite"), ROW_BYTES, timeout=PATIENCE, slot_bytes=SLOT_BYTES)
    yield backend
    MooncakeBackend.close(backend)


class TestMooncake(BackendSuite):
    @pytest.fixture(autouse=True)
    def at(self, server: MooncakeServer, joined: OpenBackend) -> None:
        self.server, self.joined = server, joined

    def make(self) -> Backend:
        self.joined.delete([empty(number) for number in range(NUM_PLACES)])
        return self.joined

    def reopen(self, backend: Backend) -> Backend:
        """What another process finds, or this one that has left and joined again."""
        return MooncakeBackend(self.server.config("suite"), ROW_BYTES, timeout=PATIENCE)

    @pytest.mark.parametrize("seed", [0])
    @pytest.mark.parametrize("rate", [0.01, 0.3])
    def test_never_wrong(self, backend: Backend, seed: int, rate: float) -> None:
        super().test_never_wrong(backend, seed, rate)


class TestShared(RealServerSuite):
    """Tiers of several engines over one store, by way of one client: joining takes longer than
    most tests.
    """

    @pytest.fixture(autouse=True)
    def at(self, joined: OpenBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(joined, "_prefix", f"run-{next(_prefixes)}")
        self.joined = joined

    def make_backend(self) -> Backend:
        return self.joined


class TestRows:
    @pytest.fixture
    def backend(self, joined: OpenBackend, monkeypatch: pytest.MonkeyPatch) -> MooncakeBackend:
        monkeypatch.setattr(joined, "_prefix", f"run-{next(_prefixes)}")
        return joined

    @pytest.fixture
    def pool(self, backend: MooncakeBackend) -> NDArray[np.uint8]:
        """Memory that was lent, of twice 70 slots."""
        pool = np.full((2 * 70, SLOT_BYTES), 0xEE, np.uint8)
        backend.lend(pool.reshape(-1).data)
        return pool

    def in_pool(self, pool: NDArray[np.uint8], number: int, row: BackendRow) -> BackendRow:
        memory = pool[number, :ROW_BYTES]
        memory[:] = np.frombuffer(payload_of(row), np.uint8)
        return row._replace(pieces=(memory.data,))

    def test_rows_of_the_lent_pool(self, backend: MooncakeBackend, pool: NDArray[np.uint8]) -> None:
        """With one between them that lies elsewhere, and one in pieces. No byte beside them changes."""
        rows = [self.in_pool(pool, number, sealed(number)) for number in range(70)]
        rows[40] = sealed(40)
        whole = np.frombuffer(rows[50].pieces[0], np.uint8)
        rows[50] = rows[50]._replace(pieces=(whole[:100].data, whole[100:].data))
        assert backend.write(rows) == [None] * 70
        found = [self.in_pool(pool, 70 + number, empty(number)) for number in range(70)]
        found[30] = empty(30)
        assert backend.read(found) == [row.seal for row in rows]
        assert [payload_of(row) for row in found] == [content(number) for number in range(70)]
        assert (pool[:, ROW_BYTES + HEADER_BYTES :] == 0xEE).all()

    def test_rows_of_the_lent_pool_are_not_copied(
        self, backend: MooncakeBackend, pool: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backend, "_bounced", pytest.fail)
        assert backend.write([self.in_pool(pool, number, sealed(number)) for number in range(70)])
        assert backend.read([self.in_pool(pool, 70, empty(69))]) == [sealed(69).seal]
        assert pool[70, :ROW_BYTES].tobytes() == content(69)

    def test_a_value_is_the_row_and_then_its_header(
        self, backend: MooncakeBackend, pool: NDArray[np.uint8]
    ) -> None:
        """As docs/formats.md has it, wherever the row lies."""
        for row in (self.in_pool(pool, 0, sealed(1)), sealed(2)):
            assert backend.write([row]) == [None]
            name = f"{backend._prefix}/2/{row.scope:016x}/{row.key.hex()}"
            (length,) = backend._store.batch_get_into([name], [pool[1].ctypes.data], [SLOT_BYTES])
            assert pool[1, :length].tobytes() == payload_of(row) + pack_header(row)

    def test_a_header_left_from_another_row_is_not_taken(
        self, backend: MooncakeBackend, pool: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A store that says the bytes have come, and has brought none."""

        class Idle:
            def batch_get_into(self, names: list[str], places: list[int], sizes: list[int]) -> list[int]:
                return sizes

        row = self.in_pool(pool, 0, sealed(1))
        assert backend.write([row, sealed(2)]) == [None, None], "their headers are in slot and scratch"
        monkeypatch.setattr(backend, "_store", Idle())
        assert backend.read([row._replace(seal=b"")]) == [b""]
        assert backend.read([empty(2)]) == [b""]

    @pytest.mark.parametrize("start", [1, SLOT_BYTES // 2, 2 * SLOT_BYTES - ROW_BYTES, 2 * SLOT_BYTES])
    def test_a_row_beside_the_slots_has_no_room(self, backend: MooncakeBackend, start: int) -> None:
        """Not at the start of a slot, or beyond the end of what was lent."""
        memory = np.full(4 * SLOT_BYTES, 0xEE, np.uint8)
        backend.lend(memory[: 2 * SLOT_BYTES].data)
        row, place = sealed(1), memory[start : start + ROW_BYTES]
        place[:] = np.frombuffer(payload_of(row), np.uint8)
        assert backend.write([row._replace(pieces=(place.data,))]) == [None]
        assert backend.read([empty(1)]) == [row.seal]
        assert (memory[:start] == 0xEE).all()
        assert (memory[start + ROW_BYTES :] == 0xEE).all(), "what is behind it is not ours"

    def test_a_pool_without_room_is_not_written_beside_its_rows(self, server: MooncakeServer) -> None:
        memory = np.zeros(2 * ROW_BYTES, np.uint8)
        backend = open_backend(server)
        backend.lend(memory.data)
        row = sealed(1)
        memory[:ROW_BYTES] = np.frombuffer(payload_of(row), np.uint8)
        assert backend.write([row._replace(pieces=(memory[:ROW_BYTES].data,))]) == [None]
        assert not memory[ROW_BYTES:].any()
        assert backend.read([empty(1)]) == [row.seal]
        backend.close()

    def test_a_row_too_long_for_the_way_round_is_refused(self, backend: MooncakeBackend) -> None:
        row = empty(1)._replace(pieces=(memoryview(bytearray(ROW_BYTES + 1)),))
        with pytest.raises(InputError, match=f"at most {ROW_BYTES} bytes outside"):
            backend.write([row])

    @pytest.mark.parametrize("length", [1, 64, ROW_BYTES - 1])
    def test_a_value_of_another_length_fails_its_check(
        self, backend: MooncakeBackend, pool: NDArray[np.uint8], length: int
    ) -> None:
        short = sealed(1)
        short = short._replace(pieces=(short.pieces[0][:length],))
        assert backend.write([short]) == [None]
        found = empty(1)
        assert backend.read([found, self.in_pool(pool, 0, found)]) == [b"", b""], "too short"
        backend.delete([found])
        assert backend.write([sealed(1)]) == [None]
        found = empty(1)._replace(pieces=(memoryview(bytearray(length)),))
        assert backend.read([found]) == [b""], "too long"

    def test_a_value_too_long_for_its_slot_is_not_read_into_it(
        self, backend: MooncakeBackend, pool: NDArray[np.uint8]
    ) -> None:
        row = self.in_pool(pool, 0, empty(1))
        place = [pool[1].ctypes.data], [SLOT_BYTES]
        assert backend._store.batch_put_from([backend._name(row)], *place, backend._replication) == [0]
        assert backend.read([row]) == [b""]
        assert (pool[0, ROW_BYTES + HEADER_BYTES :] == 0xEE).all()

    def test_a_swapped_value_has_the_other_seal(self, backend: MooncakeBackend) -> None:
        row = sealed(2)
        backend.write([row._replace(key=sealed(1).key)])
        assert backend.read([empty(1)]) == [row.seal]

    def test_a_row_that_was_just_read_can_be_deleted(self, backend: MooncakeBackend) -> None:
        """A read gives the row a lease of seconds; a bad row must go at once, since no write replaces it."""
        backend.write([sealed(1)])
        backend.read([empty(1)])
        backend.delete([empty(1)])
        assert backend.contains([empty(1)]) == [False]
        assert backend.write([sealed(1, version=1)]) == [None]
        assert backend.read([empty(1)]) == [sealed(1, version=1).seal]


class TestLeaving:
    """Leaving holds the GIL for a second, and joining for a tenth: engines do not stop each other so."""

    def test_the_next_backend_has_the_client_of_one_that_was_closed(self, server: MooncakeServer) -> None:
        first, second = (open_backend(server) for _ in range(2))
        clients = [first._store, second._store]
        assert clients[0] is not clients[1]
        pool = np.zeros(4 * ROW_BYTES, np.uint8)
        first.lend(pool.data)
        first.write([sealed(1)])
        first.close()
        first.close()
        third = open_backend(server)
        assert third._store is clients[0]
        assert open_backend(server)._store not in clients, "it has one user at a time"
        third.lend(pool.data)
        assert third.write([sealed(2)]) == [None], "nothing is registered twice"
        assert third.read([empty(1), empty(2)]) == [None, sealed(2).seal], "with a prefix of its own"
        for backend in (second, third):
            backend.close()

    def test_a_client_that_failed_right_after_joining_is_used_again(
        self, server: MooncakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else an engine would join and leave, and so stop, at each of its tries."""
        config, clients = server.config(f"run-{next(_prefixes)}"), []

        def fail(self: MooncakeBackend, rows: Sequence[BackendRow]) -> list[bool]:
            clients.append(self._store)
            raise OSError(errno.ECONNREFUSED, "the master does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(MooncakeBackend, "contains", fail)
            for _ in range(3):
                with pytest.raises(OSError, match="the master does not answer"):
                    factory.open_backend(config, ROW_BYTES, PATIENCE)
        assert clients[0] is clients[1] is clients[2]
        backend = factory.open_backend(config, ROW_BYTES, PATIENCE)
        assert backend.write([sealed(1)]) == [None]
        backend.close()

    def test_a_process_that_ends_takes_its_memory_out_of_the_store(self, tmp_path: Path) -> None:
        """Else others would be sent to it, and fail, until the master misses it."""
        script = (
            "import sys\n"
            "from kvtier.tier_config import MooncakeConfig\n"
            "from kvtier.tiers.mooncake import MooncakeBackend\n"
            "from kvtier.testing.backend_suite import sealed\n"
            "config = MooncakeConfig(master=sys.argv[1], metadata=sys.argv[2], segment='64MiB')\n"
            "backend = MooncakeBackend(config, 8192, timeout=60.0)\n"
            "assert backend.write([sealed(1)]) == [None]\n"
            "backend.close()\n"
        )
        own = MooncakeServer(tmp_path / "log", client_ttl=600, gives=False)
        try:
            command = [sys.executable, "-c", script, own.address, own.metadata]
            subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
            backend = MooncakeBackend(own.config("kvtier"), ROW_BYTES, timeout=PATIENCE)
            assert backend.contains([empty(1)]) == [False]
            backend.close()
        finally:
            own.stop()


class TestServers:
    @pytest.fixture
    def own(self, tmp_path: Path) -> Iterator[MooncakeServer]:
        server = MooncakeServer(tmp_path / "log")
        yield server
        server.stop()

    def test_the_memory_goes_and_comes_back(self, own: MooncakeServer) -> None:
        backend = open_backend(own)
        assert backend.write([sealed(1)]) == [None]
        own.stop_giver()
        (found,) = backend.read([empty(1)])
        assert found is None or isinstance(found, OSError)
        (failed,) = backend.write([sealed(2)])
        assert isinstance(failed, OSError)
        with pytest.raises(OSError, match="mooncake store at"):
            backend.probe()
        own.start_giver()
        wait_for_probe(backend)
        until = time.monotonic() + PATIENCE
        written: list[OSError | None] = [OSError()]
        while written != [None] and time.monotonic() < until:  # the master may still offer what is gone
            backend.delete([empty(1)])
            written = backend.write([sealed(1)])
        assert written == [None]
        assert backend.read([empty(1)]) == [sealed(1).seal]
        backend.close()

    def test_the_master_goes_and_comes_back(self, own: MooncakeServer) -> None:
        backend = open_backend(own)
        assert backend.write([sealed(1)]) == [None]
        own.stop_master()
        start = time.monotonic()
        answers = backend.read([empty(number) for number in range(20)])
        once = time.monotonic() - start
        assert {answer.errno for answer in answers if isinstance(answer, OSError)} == {errno.ECONNREFUSED}
        assert len(answers) == 20
        assert once < PATIENCE, "one call has blocked, not twenty"
        with pytest.raises(OSError, match="the master does not answer"):
            backend.contains([empty(1)])
        with pytest.raises(OSError, match="the master does not answer"):
            backend.probe()
        own.start_master()
        wait_for_probe(backend)
        assert backend.write([sealed(2)]) == [None]
        assert backend.read([empty(2)]) == [sealed(2).seal]
        backend.close()

    @pytest.mark.parametrize(
        ("master", "metadata", "problem"),
        [
            ("gone", "answers", "its master at .* cannot be reached"),
            ("silent", "answers", "its master at .* does not answer"),
            ("answers", "gone", "its metadata server at .* does not answer"),
            ("answers", "silent", "its metadata server at .* does not answer"),
        ],
    )
    def test_nobody_joins_what_does_not_answer(
        self,
        server: MooncakeServer,
        monkeypatch: pytest.MonkeyPatch,
        master: str,
        metadata: str,
        problem: str,
    ) -> None:
        """Joining would hold the GIL for a minute and a half, and stop the engine: it is not begun.

        A master that answers may take its time.
        """
        ask_master = mooncake._ask_master

        def ask(address: str, timeout: float) -> str:
            return ask_master(address, PATIENCE if address == server.address else timeout)

        monkeypatch.setattr(mooncake, "_ask_master", ask)
        silent = ToldServer(None)
        with socket.socket() as gone:
            gone.bind(("127.0.0.1", 0))
            others = {"gone": f"127.0.0.1:{gone.getsockname()[1]}"}
            others["silent"] = silent.endpoint.removeprefix("http://")
            address = others.get(master, server.address)
            url = f"http://{others[metadata]}/metadata" if metadata in others else server.metadata
            with pytest.raises(OSError, match=problem):
                MooncakeBackend(MooncakeConfig(master=address, metadata=url), ROW_BYTES, timeout=0.5)
        silent.close()

    def test_the_master_hangs_and_its_metadata_server_does_not(self, server: MooncakeServer) -> None:
        told = ToldServer(http_answer("404 Not Found"))
        config = MooncakeConfig(master=server.address, metadata=f"{told.endpoint}/metadata")
        assert server.master is not None
        send_signal(server.master, signal.SIGSTOP)
        try:
            with pytest.raises(OSError, match=r"its master at .* does not answer"):
                MooncakeBackend(config, ROW_BYTES, timeout=0.5)
            assert told.requests == [], "it was not even asked: nothing was begun"
        finally:
            server.master.send_signal(signal.SIGCONT)
            told.close()

    @pytest.mark.parametrize("path", ["/meta", "/"])
    def test_nobody_joins_by_way_of_another_web_server(
        self, server: MooncakeServer, monkeypatch: pytest.MonkeyPatch, path: str
    ) -> None:
        """Joining would stop the process for two seconds, in vain, again and again."""
        monkeypatch.setattr("kvtier.tiers.mooncake._import_mooncake", lambda: (pytest.fail, pytest.fail))
        config = MooncakeConfig(master=server.address, metadata=server.metadata.replace("/metadata", path))
        problem = r"is no metadata server \(HTTP 404\); are port, path and no_proxy right\?"
        with pytest.raises(OSError, match=problem):
            MooncakeBackend(config, ROW_BYTES, timeout=PATIENCE)

    def test_a_process_ends_whatever_the_store_does(self, own: MooncakeServer) -> None:
        """With a call that blocks because the master is gone."""
        script = (
            "import sys, threading\n"
            "from kvtier.tier_config import MooncakeConfig\n"
            "from kvtier.tiers.mooncake import MooncakeBackend\n"
            "from kvtier.testing.backend_suite import empty\n"
            "config = MooncakeConfig(master=sys.argv[1], metadata=sys.argv[2])\n"
            "backend = MooncakeBackend(config, 8192, timeout=60.0)\n"
            "print('joined', flush=True)\n"
            "sys.stdin.readline()\n"
            "begun = threading.Event()\n"
            "def work():\n"
            "    while True:\n"
            "        begun.set()\n"
            "        backend.read([empty(1)])\n"
            "threading.Thread(target=work, daemon=True).start()\n"
            "begun.wait()\n"
        )
        command = [sys.executable, "-c", script, own.address, own.metadata]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
            assert process.stdout.readline() == b"joined\n"
            own.stop_master()
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.wait(PATIENCE)


def wait_for_probe(backend: MooncakeBackend) -> None:
    """Probe until it succeeds, as a suspended tier does."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            backend.probe()
            return
        except OSError:
            assert time.monotonic() < until
            threading.Event().wait(0.2)


@pytest.mark.parametrize("closes", [False, True])
def test_no_client_is_set_up_for_a_master_that_accepts_and_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    """A process that was stopped.

    Setting up a client would hold the GIL for ten minutes: it is not begun.
    """

    def hang_up() -> None:
        master.accept()[0].close()

    monkeypatch.setattr("kvtier.tiers.mooncake._import_mooncake", lambda: (pytest.fail, pytest.fail))
    told = ToldServer(http_answer("404 Not Found"))
    with socket.create_server(("127.0.0.1", 0)) as master:
        thread = threading.Thread(target=hang_up, daemon=True)
        if closes:
            thread.start()
        address = f"127.0.0.1:{master.getsockname()[1]}"
        config = MooncakeConfig(master=address, metadata=f"{told.endpoint}/metadata")
        with pytest.raises(OSError, match=r"its master at .* accepts and does not answer"):
            MooncakeBackend(config, ROW_BYTES, timeout=PATIENCE if closes else 0.5)
        if closes:
            thread.join()
    told.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldServer]:
    """A proxy in the environment that accepts and does not answer, unless it is told to."""
    silent = ToldServer(None)
    for name in ("http_proxy", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", silent.endpoint)
    yield silent
    silent.close()


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy", "ALL_PROXY"])
def test_no_client_is_set_up_by_way_of_a_proxy_that_does_not_answer(
    server: MooncakeServer, proxy: ToldServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The client would go that way, and wait for minutes with the GIL in its hands."""
    monkeypatch.setattr("kvtier.tiers.mooncake._import_mooncake", lambda: (pytest.fail, pytest.fail))
    monkeypatch.delenv("http_proxy")
    monkeypatch.setenv(name, proxy.endpoint.replace("http://", "http://user:secret@"))
    proxy.close()
    with pytest.raises(OSError, match=r"proxy .* add 127\.0\.0\.1 to no_proxy") as raised:
        MooncakeBackend(server.config("proxy"), ROW_BYTES, timeout=PATIENCE)
    assert "secret" not in str(raised.value)


def test_a_proxy_that_answers_will_do(server: MooncakeServer, proxy: ToldServer) -> None:
    proxy.answer = http_answer("200 OK")
    assert must_answer(server.config("proxy"), PATIENCE) == "127.0.0.1"
    put, delete = proxy.requests
    assert put.startswith(f"PUT {server.metadata}?key=kvtier/question/".encode())
    assert delete.split()[:2] == [b"DELETE", put.split()[1]]


@pytest.mark.parametrize("names", ["127.0.0.1", "*", "other.host, 127.0.0.1", "10.0.0.0/8,127.0.0.0/8"])
def test_a_proxy_is_not_asked_about_hosts_in_no_proxy(
    server: MooncakeServer, proxy: ToldServer, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    monkeypatch.setenv("no_proxy", names)
    assert must_answer(server.config("proxy"), PATIENCE) == "127.0.0.1"
    assert proxy.requests == []


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR unknown command\r\n"])
def test_no_client_is_set_up_for_another_server_at_the_master_s_port(
    monkeypatch: pytest.MonkeyPatch, greeting: bytes
) -> None:
    """A port that was mistaken for the master's, as that of a web server or of Redis.

    Setting up a client would hold the GIL for ten minutes.
    """

    def answer() -> None:
        with master.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(greeting)

    monkeypatch.setattr("kvtier.tiers.mooncake._import_mooncake", lambda: (pytest.fail, pytest.fail))
    told = ToldServer(http_answer("404 Not Found"))
    with socket.create_server(("127.0.0.1", 0)) as master:
        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{master.getsockname()[1]}"
        config = MooncakeConfig(master=address, metadata=f"{told.endpoint}/metadata")
        with pytest.raises(OSError, match=r"what answers at .* is no master; is the port right\?"):
            MooncakeBackend(config, ROW_BYTES, timeout=PATIENCE)
        thread.join()
    told.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    config = MooncakeConfig(master="127.0.0.1:1", metadata="http://127.0.0.1:1/metadata")
    with pytest.raises(ConfigError, match=r"pip install '\.\[mooncake\]'"):
        MooncakeBackend(config, ROW_BYTES, timeout=1.0)
