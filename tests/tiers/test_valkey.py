"""Rows on a real Valkey server, and what a server, a network or a stranger can do to them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.ports import free_port
from tests.tiers.servers import Certificates, RealServerSuite, Relay, ValkeyServer, find_valkey

from kvtier.errors import ConfigError
from kvtier.residency import MissReason
from kvtier.testing import shared_tier_suite, tier_suite
from kvtier.testing.backend_suite import (
    ROW_BYTES,
    BackendSuite,
    content,
    empty,
    key,
    payload_of,
    sealed,
    submit_rows,
)
from kvtier.testing.faulty_backend import FaultyBackend
from kvtier.testing.memory_tier import make_shared_tier
from kvtier.tier_config import ValkeyConfig
from kvtier.tiers.base import Backend, BackendRow, Direction, TierResult
from kvtier.tiers.io_threads import IOThreads
from kvtier.tiers.seal import SealScope
from kvtier.tiers.valkey import ValkeyBackend
from kvtier.tiers.valkey import backend as valkey_backend
from kvtier.tiers.valkey.resp import RespConnection

_Backend = TypeVar("_Backend", bound=ValkeyBackend)
PATIENCE = 60.0
"""A time-out that no test waits for."""
SOON = 0.3
"""A time-out that a test waits for."""
PASSWORD = "hunter2-sesame"


def make(url: str, row_bytes: int = ROW_BYTES, timeout: float = PATIENCE, **settings: Any) -> ValkeyBackend:
    return ValkeyBackend(ValkeyConfig(url=url, **settings), row_bytes, timeout=timeout)


@contextmanager
def closing(backend: _Backend) -> Iterator[_Backend]:
    try:
        yield backend
        backend.check()
    finally:
        backend.close()


def probe_error(url: str, **settings: Any) -> OSError:
    """Return what a probe raises."""
    with closing(make(url, **settings)) as backend:
        try:
            backend.probe()
        except OSError as error:
            return error
    raise AssertionError("expected a failure")


def name_of(number: int) -> bytes:
    """Return the name of a row of the suite, as docs/formats.md has it."""
    return b"kvtier:%016x:2000:%b" % (SealScope("suite").number, key(number).hex().encode())


def codes(answers: list[Any]) -> list[int | None]:
    return [answer.errno if isinstance(answer, OSError) else None for answer in answers]


def assert_right(backend: Backend, numbers: range = range(8)) -> None:
    rows = [empty(number) for number in numbers]
    assert backend.read(rows) == [sealed(number).seal for number in numbers]
    assert [payload_of(row) for row in rows] == [content(number) for number in numbers]


@pytest.fixture(scope="module")
def module_server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def server(module_server: ValkeyServer) -> ValkeyServer:
    """A server that holds nothing."""
    module_server.say("FLUSHALL")
    return module_server


@pytest.fixture
def backend(server: ValkeyServer) -> Iterator[ValkeyBackend]:
    with closing(make(server.url)) as backend:
        yield backend


@pytest.fixture(scope="module")
def guarded() -> Iterator[ValkeyServer]:
    """A server that wants a password."""
    with ValkeyServer(password=PASSWORD) as server:
        yield server


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


class TestSuite(BackendSuite):
    @pytest.fixture(autouse=True)
    def on_server(self, server: ValkeyServer) -> None:
        self.url = server.url

    def make(self) -> Backend:
        return make(self.url)

    def reopen(self, backend: Backend) -> Backend:
        backend.close()
        return self.make()


class TestShared(RealServerSuite):
    """Tiers of several engines over one server."""

    @pytest.fixture(autouse=True)
    def on_server(self, server: ValkeyServer) -> None:
        self.url = server.url

    def make_backend(self) -> Backend:
        return make(self.url, shared_tier_suite.ROW_BYTES)


class TestRows:
    def test_values_on_the_server(self, server: ValkeyServer, backend: ValkeyBackend) -> None:
        """Guards the format: another release, or another program, finds rows by it."""
        row = sealed(1)
        backend.write([row])
        value = server.say("GET", name_of(1)).partition(b"\r\n")[2][:-2]
        header = struct.pack("<8sQQB7x32s", b"kvtrow1\n", ROW_BYTES, row.scope, 16, row.seal)
        assert value == header + content(1)
        assert server.say("TTL", name_of(1)) == b":-1\r\n"

    def test_it_goes_after_its_time(self, server: ValkeyServer) -> None:
        with closing(make(server.url, ttl="1h")) as backend:
            assert backend.write([sealed(1), sealed(2, cuts=(7,))]) == [None, None]
            assert_right(backend, range(1, 3))
        assert 3500 < int(server.say("TTL", name_of(1))[1:]) <= 3600

    @pytest.mark.parametrize("rows", [1, 3])
    def test_exchanges(self, backend: ValkeyBackend, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        monkeypatch.setattr(valkey_backend, "_EXCHANGE_BYTES", rows * ROW_BYTES)
        assert backend.write([sealed(number) for number in range(8)]) == [None] * 8
        assert_right(backend)

    def test_lookups_of_many_rows(self, backend: ValkeyBackend) -> None:
        backend.write([sealed(number) for number in range(0, 60, 2)])
        rows = [empty(number)._replace(pieces=()) for number in range(3000)]
        found = [number for number, there in enumerate(backend.contains(rows)) if there]
        assert found == list(range(0, 60, 2))

    def test_a_lookup_is_one_round_trip(self, server: ValkeyServer) -> None:
        """However large the rows are that are asked for: they do not travel."""

        class Counting(ValkeyBackend):
            exchanges = 0

            def _take_idle(self) -> RespConnection | None:
                self.exchanges += 1
                return super()._take_idle()

        large = memoryview(bytearray(1 << 20))
        rows = [empty(number)._replace(pieces=(large,)) for number in range(1000)]
        with closing(Counting(ValkeyConfig(url=server.url), len(large), timeout=PATIENCE)) as backend:
            assert backend.contains(rows) == [False] * 1000
            assert backend.exchanges == 1

    def test_databases_and_prefixes_are_apart(self, server: ValkeyServer, backend: ValkeyBackend) -> None:
        backend.write([sealed(1)])
        for other in (make(server.url[:-1] + "1"), make(server.url, prefix="other"), make(server.url, 4096)):
            with closing(other):
                assert other.contains([empty(1)]) == [False]

    def test_a_unix_socket(self, tmp_path: Path) -> None:
        with (
            ValkeyServer("--unixsocket", str(tmp_path / "socket")),
            closing(make(f"unix://{tmp_path}/socket?db=2")) as backend,
        ):
            backend.write([sealed(number) for number in range(8)])
            assert_right(backend)

    def test_two_engines_with_many_threads(self, server: ValkeyServer) -> None:
        """Both write the same rows and read them: right or absent, over no more connections than allowed."""

        def work(backend: ValkeyBackend, thread: int) -> None:
            for turn in range(20):
                numbers = [(thread + turn + step) % 16 for step in range(4)]
                assert backend.write([sealed(number) for number in numbers]) == [None] * 4
                if turn % 5 == 4:
                    backend.delete([empty(numbers[0])])
                rows = [empty(number) for number in range(16)]
                for number, row, seal in zip(range(16), rows, backend.read(rows), strict=True):
                    if seal is not None:
                        assert (seal, payload_of(row)) == (sealed(number).seal, content(number))

        with Relay(server.port) as relay, ThreadPoolExecutor(16) as pool:
            url = f"valkey://127.0.0.1:{relay.port}"
            with closing(make(url, connections=2)) as one, closing(make(url, connections=3)) as two:
                for done in [pool.submit(work, (one, two)[thread % 2], thread) for thread in range(16)]:
                    done.result()
            assert relay.accepted <= 5


def read_checked(backend: Backend, rows: list[BackendRow]) -> list[TierResult]:
    """Read rows as a tier does, seals checked."""
    threads = IOThreads(backend, row_bytes=max(row.nbytes for row in rows), threads=1)
    try:
        submit_rows(threads, Direction.PROMOTE, 1, rows, SealScope("suite"))
        reports: list[TierResult] = []
        while sum(len(report.positions) for report in reports) < len(rows):
            assert threads.wait_any(PATIENCE)
            reports += threads.poll()
        return reports
    finally:
        assert threads.close(PATIENCE)


class TestStrangeValues:
    """What lies on a server may be anybody's."""

    def value(self, server: ValkeyServer, number: int) -> bytes:
        return server.say("GET", name_of(number)).partition(b"\r\n")[2][:-2]

    @pytest.mark.parametrize(
        "forge",
        [
            lambda value: value[:-1],
            lambda value: value + b"\0",
            lambda value: value * 300,
            lambda value: value[:40],
            lambda value: b"",
            lambda value: b"\r\n$5\r\n",
            lambda value: b"x" * len(value),
            lambda value: value[:-1] + bytes([value[-1] ^ 1]),
            lambda value: value[:40] + bytes([value[40] ^ 1]) + value[41:],
            lambda value: value[:32] + bytes(32) + value[64:],
            lambda value: value[:24] + b"\xff" + value[25:],
        ],
    )
    def test_a_forged_value_is_no_row(
        self, server: ValkeyServer, backend: ValkeyBackend, forge: Callable[[bytes], bytes]
    ) -> None:
        backend.write([sealed(number) for number in range(8)])
        server.say("SET", name_of(3), forge(self.value(server, 3)))
        outcomes = {
            at: report.outcome
            for report in read_checked(backend, [empty(number) for number in range(8)])
            for at in report.positions
        }
        assert outcomes.pop(3) is MissReason.FAILED
        assert set(outcomes.values()) == {None}, "its neighbours are read from the same connection"
        backend.delete([empty(3)])
        assert backend.read([empty(3)]) == [None]
        assert backend.write([sealed(3)]) == [None]
        assert_right(backend)

    @pytest.mark.parametrize("at", [0, 7, 8, 16, 24])
    def test_another_header(self, server: ValkeyServer, backend: ValkeyBackend, at: int) -> None:
        """A later version may lay rows out in another way: its seals are none of ours."""
        backend.write([sealed(1)])
        value = self.value(server, 1)
        server.say("SET", name_of(1), value[:at] + bytes([value[at] ^ 0x80]) + value[at + 1 :])
        assert backend.read([empty(1)]) == [b""]

    def test_swapped_values(self, server: ValkeyServer, backend: ValkeyBackend) -> None:
        backend.write([sealed(1), sealed(2)])
        one, two = self.value(server, 1), self.value(server, 2)
        server.say("SET", name_of(1), two)
        server.say("SET", name_of(2), one)
        (report,) = read_checked(backend, [empty(1), empty(2)])
        assert report.outcome is MissReason.FAILED

    def test_a_value_of_another_type(self, server: ValkeyServer, backend: ValkeyBackend) -> None:
        server.say("RPUSH", name_of(1), "x")
        backend.write([sealed(2)])
        found = [empty(1), empty(2)]
        assert backend.read(found) == [b"", sealed(2).seal]
        assert backend.write([sealed(1)]) == [None]
        assert_right(backend, range(1, 3))


class TestServersThatRefuse:
    def test_a_full_server(self) -> None:
        size = 256 << 10
        with (
            ValkeyServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server,
            closing(make(server.url, size)) as backend,
        ):
            rows = [BackendRow(key(n), (memoryview(bytes([n]) * size),), n, 1, b"seal") for n in range(64)]
            answers = backend.write(rows)
            assert set(codes(answers)) == {None, errno.ENOSPC}
            with pytest.raises(OSError, match="OOM"):
                backend.probe()
            found = [row._replace(pieces=(memoryview(bytearray(size)),)) for row in rows]
            for row, there, written, seal in zip(rows, found, answers, backend.read(found), strict=True):
                assert seal == (b"seal" if written is None else None)
                assert seal is None or payload_of(there) == payload_of(row)
            backend.delete(rows)
            backend.probe()
            assert backend.write(rows[:2]) == [None, None]

    def test_a_server_that_evicts(self) -> None:
        size = 256 << 10
        with (
            ValkeyServer("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as server,
            closing(make(server.url, size)) as backend,
        ):
            rows = [BackendRow(key(n), (memoryview(bytes([n]) * size),), n, 1, b"seal") for n in range(64)]
            assert backend.write(rows) == [None] * 64
            there = backend.contains(rows)
            found = [row._replace(pieces=(memoryview(bytearray(size)),)) for row in rows]
            seals = backend.read(found)
            assert 0 < sum(there) < 64
            for row, other, was_there, seal in zip(rows, found, there, seals, strict=True):
                assert seal in ((b"seal", None) if was_there else (None,)), "answers may evict, too"
                assert seal is None or payload_of(other) == payload_of(row)

    def test_a_server_that_became_a_replica(self, server: ValkeyServer) -> None:
        """After a failover the old address may lead to a replica: connections to it are not kept."""
        with Relay(server.port) as relay, closing(make(f"valkey://127.0.0.1:{relay.port}")) as backend:
            assert backend.write([sealed(1)]) == [None]
            server.say("REPLICAOF", "127.0.0.1", str(free_port()))
            try:
                assert codes(backend.write([sealed(1), sealed(2)])) == [errno.EROFS] * 2
                with pytest.raises(OSError, match="READONLY"):
                    backend.probe()
                assert_right(backend, range(1, 2))
            finally:
                server.say("REPLICAOF", "NO", "ONE")
            assert backend.write([sealed(2)]) == [None]
            assert relay.accepted > 2

    def test_a_node_of_a_cluster(self, tmp_path: Path) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes"))
        with ValkeyServer(*options) as server, closing(make(server.url)) as backend:
            (answer,) = backend.read([empty(1)])
            assert isinstance(answer, OSError)
            assert "cluster, which is not supported" in str(answer)

    @pytest.mark.parametrize(
        ("said", "code", "told"),
        [
            (b"-MOVED 3999 10.0.0.1:6381\r\n", errno.ENOTSUP, "cluster, which is not supported"),
            (b"-ASK 3999 10.0.0.1:6381\r\n", errno.ENOTSUP, "cluster, which is not supported"),
            (b"-LOADING Valkey is loading the dataset in memory\r\n", errno.EBUSY, "LOADING"),
            (b"-ERR max number of clients reached\r\n", errno.EIO, "ERR: it has as many clients as it may"),
            (b"-OOM hunter2\x1b[2J\xff" + 3000 * b"x" + b"\r\n", errno.ENOSPC, "answered OOM: it is full"),
            (b"-ERR no hunter2\r\n", errno.EIO, "the server answered ERR; set valkey.password_file"),
            (b"-HUNTER2 hunter2\r\n", errno.EIO, "answered an error that is not known here"),
            (b"-hunter2\x00\x07\r\n", errno.EIO, "answered an error that is not known here"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", errno.EPROTO, "expected an answer of a Valkey"),
            (b"x" * 10_000, errno.EPROTO, "expected an answer of a Valkey"),
            (b"$7\r\n", errno.EPROTO, "expected an answer of a Valkey"),
        ],
    )
    def test_server_errors_are_translated(self, said: bytes, code: int, told: str) -> None:
        with scripted(lambda connection: connection.sendall(said)) as port:
            with closing(make(f"valkey://127.0.0.1:{port}")) as backend:
                (answer,) = backend.read([empty(1)])
            assert codes([answer]) == [code]
            assert told in str(answer)
            assert "hunter2" not in str(answer).lower()
            assert str(answer).isprintable()
            assert len(str(answer)) < 200

    def test_names_of_rows_are_not_repeated(self) -> None:
        """Servers repeat arguments of commands that they do not know. Names come from the seal key, too."""
        with ValkeyServer("--rename-command", "SET", "") as server, closing(make(server.url)) as backend:
            assert name_of(1) in server.say("SET", name_of(1), "x")
            (answer,) = backend.write([sealed(1)])
        assert "does not know a command that is needed" in str(answer)
        assert name_of(1).decode()[:16] not in str(answer)


@contextmanager
def scripted(behave: Callable[[socket.socket], object]) -> Iterator[int]:
    """Run a server that does this with each connection, after it has sent something; for faults only."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(1 << 16)
                    behave(connection)
                    connection.recv(1 << 16)
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(PATIENCE)


class TestLateAndLost:
    def test_a_server_that_accepts_and_never_answers(self, server: ValkeyServer) -> None:
        with closing(make(server.url)) as backend:
            backend.write([sealed(number) for number in range(8)])
        fresh, used = make(server.url, timeout=SOON), make(server.url)
        with closing(fresh), closing(used):
            assert used.contains([empty(1)]) == [True]
            used._timeout = SOON
            server.suspend()
            try:
                for backend in (fresh, used):
                    assert codes(backend.read([empty(1), empty(2)])) == [errno.ETIMEDOUT] * 2
                    assert codes(backend.write([sealed(1)])) == [errno.ETIMEDOUT]
                    for call in (backend.contains, backend.delete):
                        with pytest.raises(TimeoutError, match="did not answer in time"):
                            call([empty(9)])
                    with pytest.raises(TimeoutError):
                        backend.probe()
            finally:
                server.resume()
        with closing(make(server.url)) as backend:
            backend.probe()
            assert_right(backend)

    def test_a_server_that_takes_rows_and_gives_none_fails_its_probe(self) -> None:
        """Else it is taken back again and again, and each time a request waits for one deadline in vain."""

        def take(connection: socket.socket) -> None:
            connection.sendall(b"+PONG\r\n")
            arrived = b""
            while b"UNLINK" not in arrived:
                arrived = arrived[-64:] + connection.recv(1 << 16)
            connection.sendall(b"+OK\r\n" if b"GET" in arrived else b"+OK\r\n:1\r\n")

        with scripted(take) as port:
            backend = make(f"valkey://127.0.0.1:{port}", timeout=SOON)
            with closing(backend), pytest.raises(TimeoutError):
                backend.probe()

    def test_the_probe_of_another_engine_does_not_disturb(self, server: ValkeyServer) -> None:
        with (
            closing(make(server.url)) as small,
            closing(make(server.url, row_bytes=1 << 20)) as large,
            ThreadPoolExecutor(2) as threads,
        ):
            for done in [threads.submit(backend.probe) for _ in range(20) for backend in (small, large)]:
                done.result(PATIENCE)
        assert server.say("EXISTS", "kvtier:probe") == b":0\r\n"

    def test_late_answers_are_nobody_elses(self, server: ValkeyServer) -> None:
        """An answer that arrives after its deadline must not be read as the next one."""
        with Relay(server.port) as relay, closing(make(f"valkey://127.0.0.1:{relay.port}")) as backend:
            backend.write([sealed(number) for number in range(8)])
            for number in range(2):
                relay.hold()
                backend._timeout = SOON
                assert codes(backend.read([empty(number)])) == [errno.ETIMEDOUT]
                assert codes(backend.write([sealed(number)])) == [errno.ETIMEDOUT]
                relay.release()
                backend._timeout = PATIENCE
                rows = [empty(number + 1), empty(number + 2)]
                assert backend.read(rows) == [sealed(number + 1).seal, sealed(number + 2).seal]
                assert [payload_of(row) for row in rows] == [content(number + 1), content(number + 2)]
                assert backend.contains([empty(50)]) == [False]

    @pytest.mark.parametrize("head", [b"$%d\r\n" % (64 + ROW_BYTES), b"$"])
    def test_a_drip_does_not_hold_a_call(self, head: bytes) -> None:
        """The time-out is that of the exchange, not of a byte."""
        over = threading.Event()

        def drip(connection: socket.socket) -> None:
            connection.sendall(b"+PONG\r\n")
            connection.recv(1 << 16)
            connection.sendall(head)
            while not over.wait(SOON / 20):
                connection.sendall(b"x")

        with scripted(drip) as port, closing(make(f"valkey://127.0.0.1:{port}", timeout=SOON)) as backend:
            assert codes(backend.read([empty(1)])) == [errno.ETIMEDOUT]
            over.set()

    def test_a_value_without_end_takes_no_memory(self) -> None:
        """It is skipped through one small buffer, until the time is over."""

        def lie(connection: socket.socket) -> None:
            connection.sendall(b"+PONG\r\n")
            connection.recv(1 << 16)
            connection.sendall(b"$%d\r\n" % (1 << 50))
            while True:
                connection.sendall(zeros)

        zeros = bytes(1 << 16)
        with scripted(lie) as port, closing(make(f"valkey://127.0.0.1:{port}", timeout=SOON)) as backend:
            row = empty(1)
            tracemalloc.start()
            try:
                assert codes(backend.read([row])) == [errno.ETIMEDOUT]
                assert tracemalloc.get_traced_memory()[1] < 1 << 20
            finally:
                tracemalloc.stop()

    def test_a_connection_lost_in_the_middle(self) -> None:
        """What was answered counts; the others failed."""
        row = sealed(1)
        header = struct.pack("<8sQQB7x32s", b"kvtrow1\n", ROW_BYTES, row.scope, 16, row.seal)
        whole = b"$%d\r\n%b\r\n" % (64 + ROW_BYTES, header + content(1))

        def behave(connection: socket.socket) -> None:
            connection.sendall(b"+PONG\r\n")
            connection.recv(1 << 16)
            connection.sendall(whole + whole[:5000])
            connection.shutdown(socket.SHUT_WR)

        with scripted(behave) as port, closing(make(f"valkey://127.0.0.1:{port}")) as backend:
            rows = [empty(1), empty(1), empty(1)]
            answers = backend.read(rows)
            assert answers[0] == row.seal
            assert payload_of(rows[0]) == content(1)
            assert codes(answers[1:]) == [errno.ECONNRESET] * 2

    def test_connections_that_the_server_closed_meanwhile(self, server: ValkeyServer) -> None:
        """Servers close idle connections, and a restart closes all: that is no failure."""
        with Relay(server.port) as relay, closing(make(f"valkey://127.0.0.1:{relay.port}")) as backend:
            backend.write([sealed(number) for number in range(8)])
            for _ in range(3):
                relay.cut()
                assert_right(backend)

    def test_a_failure_makes_all_connections_anew(self, server: ValkeyServer) -> None:
        """After a failover all of them lead to a server that is gone; each would cost a time-out."""
        with (
            Relay(server.port) as relay,
            closing(make(f"valkey://127.0.0.1:{relay.port}")) as backend,
            ThreadPoolExecutor(2) as pool,
        ):
            relay.hold()
            waiting = [pool.submit(backend.contains, [empty(number)]) for number in range(2)]
            while relay.accepted < 2:
                assert relay.holding.wait(PATIENCE)
            relay.release()
            assert [answer.result() for answer in waiting] == [[False], [False]]
            relay.hold()
            backend._timeout = SOON
            assert codes(backend.read([empty(1)])) == [errno.ETIMEDOUT]
            relay.release()
            backend._timeout = PATIENCE
            assert backend.read([empty(1)]) == [None]
            assert relay.accepted == 3

    def test_a_dead_server_and_a_new_one(self) -> None:
        with ValkeyServer() as server, closing(make(server.url)) as backend:
            backend.write([sealed(1)])
            server.kill()
            assert codes(backend.read([empty(1), empty(2)])) == [errno.ECONNREFUSED] * 2
            assert codes(backend.write([sealed(1)])) == [errno.ECONNREFUSED]
            with pytest.raises(OSError, match=r"no connection to 127\.0\.0\.1"):
                backend.probe()
            server.start()
            backend.probe()
            assert backend.read([empty(1)]) == [None], "it came back empty"
            assert backend.write([sealed(number) for number in range(8)]) == [None] * 8
            assert_right(backend)

    def test_kills_beside_busy_threads(self) -> None:
        """Every answer is right, absent or a failure, whenever the server dies."""
        kills, stop = 4, threading.Event()
        moved = threading.Semaphore(0)

        def work(backend: ValkeyBackend, thread: int) -> None:
            numbers = range(thread * 8, thread * 8 + 8)
            while not stop.is_set():
                written = backend.write([sealed(number) for number in numbers])
                rows = [empty(number) for number in numbers]
                for number, row, seal in zip(numbers, rows, backend.read(rows), strict=True):
                    if isinstance(seal, bytes):
                        assert seal == sealed(number).seal
                        assert payload_of(row) == content(number)
                        moved.release()
                assert all(error is None or isinstance(error, OSError) for error in written)

        with (
            ValkeyServer() as server,
            closing(make(server.url)) as one,
            closing(make(server.url)) as two,
            ThreadPoolExecutor(4) as pool,
        ):
            works = [pool.submit(work, (one, two)[thread % 2], thread) for thread in range(4)]
            try:
                for _ in range(kills):
                    for _ in range(40):  # so that every kill is in the middle of work that works
                        assert moved.acquire(timeout=PATIENCE)
                    server.kill()
                    server.start()
                    while moved.acquire(blocking=False):
                        pass
                assert moved.acquire(timeout=PATIENCE)
            finally:
                stop.set()
            for done in works:
                done.result()

    def test_a_resolver_that_hangs_costs_a_thread_and_one_deadline(
        self, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing bounds a resolver: its calls are given up like those of a server that does not answer."""
        resolve, hangs, go_on = socket.getaddrinfo, threading.Semaphore(0), threading.Event()

        def hang(*arguments: Any, **more: Any) -> Any:
            hangs.release()
            assert go_on.wait(PATIENCE)
            return resolve(*arguments, **more)

        clock = tier_suite.ManualClock(1000.0)
        backend = make(f"valkey://localhost:{server.port}", tier_suite.ROW_BYTES)
        tier = make_shared_tier(tier_suite.ROW_BYTES, backend=backend, threads=4, clock=clock)
        driver = tier_suite.TierDriver(tier, FaultyBackend(backend), clock)
        driver.store(1)
        backend._close_idle()
        monkeypatch.setattr(socket, "getaddrinfo", hang)
        tier.ask(tier_suite.keys(5), clock.now + 2)
        assert hangs.acquire(timeout=PATIENCE)
        clock.now += 2
        driver.poll()
        assert tier.lookup_many(tier_suite.keys(5, 6)) == [False, False], "who asked has waited"
        assert tier.stats().suspended is not None
        for _ in range(50):
            clock.now += 10
            driver.poll()
            assert tier.lookup_many(tier_suite.keys(7)) == [False], "and others wait for nothing"
        assert hangs.acquire(timeout=PATIENCE), "a probe"
        assert not hangs.acquire(blocking=False), "no more than one, so that two threads are free"
        go_on.set()

        def resumes() -> bool:
            clock.now += 1
            return tier.stats().suspended is None

        driver.wait(resumes)
        assert driver.fetch(1) == {1: tier_suite.content(1)}
        assert tier.close(PATIENCE)

    def test_a_host_that_does_not_exist(self) -> None:
        with closing(make("valkey://kvtier.invalid")) as backend:
            (answer,) = backend.read([empty(1)])
            assert "no connection to kvtier.invalid:6379" in str(answer)


class TestBeingLetIn:
    def test_with_the_password(self, guarded: ValkeyServer, password_file: Path) -> None:
        with closing(make(guarded.url, password_file=str(password_file))) as backend:
            assert backend.write([sealed(number) for number in range(8)]) == [None] * 8
            assert_right(backend)

    def test_as_a_user(self, guarded: ValkeyServer, password_file: Path) -> None:
        """These commands are all that a user needs."""
        rights = ("~kvtier:*", "+set", "+get", "+exists", "+unlink", "+ping", "+select")
        password_file.write_text("another")
        assert guarded.say("ACL", "SETUSER", "kv+tier", "reset", "on", ">another", *rights) == b"+OK\r\n"
        url = guarded.url.replace("//", "//kv%2Btier@").replace("/0", "/1")
        with closing(make(url, password_file=str(password_file))) as backend:
            backend.probe()
            assert backend.write([sealed(number) for number in range(8)]) == [None] * 8
            assert_right(backend)
            backend.delete([empty(1)])
            assert backend.contains([empty(1), empty(2)]) == [False, True]
        with closing(make(url, password_file=str(password_file), prefix="other")) as backend:
            assert codes(backend.write([sealed(1)])) == [errno.EACCES]

    def test_as_a_user_without_a_password(self) -> None:
        """Not as the server's default user, who may do everything."""
        with ValkeyServer() as server:
            rights = ("~kvtier:*", "+set", "+get", "+exists", "+unlink", "+ping")
            assert server.say("ACL", "SETUSER", "kv", "reset", "on", "nopass", *rights) == b"+OK\r\n"
            with closing(make(server.url.replace("//", "//kv@"))) as backend:
                assert backend.write([sealed(1)]) == [None]
                assert b"user=kv" in server.say("CLIENT", "LIST")
            error = probe_error(server.url.replace("//", "//nobody@"))
            assert error.errno == errno.EACCES
            assert "the user in valkey.url" in str(error)

    def test_a_pipe_that_nobody_writes_is_not_waited_for(
        self, guarded: ValkeyServer, tmp_path: Path
    ) -> None:
        os.mkfifo(tmp_path / "pipe")
        backend = make(guarded.url, password_file=str(tmp_path / "pipe"))
        with closing(backend), pytest.raises(OSError, match=r"expected a password in .*pipe, got none"):
            backend.probe()

    @pytest.mark.parametrize("host", [".host", "h" * 64])
    def test_impossible_hosts_are_refused(self, host: str) -> None:
        with (
            closing(make(f"valkey://{host}")) as backend,
            pytest.raises(OSError, match="expected the name of a host"),
        ):
            backend.probe()

    def test_a_password_that_changes(self, password_file: Path) -> None:
        with (
            ValkeyServer(password=PASSWORD) as server,
            closing(make(server.url, password_file=str(password_file))) as backend,
        ):
            assert backend.write([sealed(1)]) == [None]
            server.say("CONFIG", "SET", "requirepass", "tomorrow")
            server.password = "tomorrow"
            server.say("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert codes(backend.write([sealed(1)])) == [errno.EACCES]
            password_file.write_text("tomorrow\n")
            assert backend.write([sealed(1)]) == [None]

    @pytest.mark.parametrize(
        ("content_of_file", "url", "told"),
        [
            ("wrong-secret\n", "{}", "see valkey.password_file"),
            (PASSWORD, "{user}", "see valkey.password_file and the user"),
            ("\n", "{}", "expected a password in"),
            (None, "{}", "cannot read"),
            (PASSWORD, "{database}", "see the database in valkey.url"),
        ],
    )
    def test_a_wrong_one_is_told_without_it(
        self,
        guarded: ValkeyServer,
        password_file: Path,
        caplog: pytest.LogCaptureFixture,
        content_of_file: str | None,
        url: str,
        told: str,
    ) -> None:
        caplog.set_level(logging.DEBUG)
        if content_of_file is None:
            password_file.unlink()
        else:
            password_file.write_text(content_of_file)
        user, database = guarded.url.replace("//", "//nobody@"), guarded.url.replace("/0", "/9999")
        address = {"{}": guarded.url, "{user}": user, "{database}": database}[url]
        error = probe_error(address, password_file=str(password_file))
        assert told in str(error)
        shown = f"{error!r} {caplog.text}"
        assert PASSWORD not in shown
        assert "wrong-secret" not in shown

    def test_none_where_one_is_needed(self, guarded: ValkeyServer) -> None:
        error = probe_error(guarded.url)
        assert error.errno == errno.EACCES
        assert "set valkey.password_file" in str(error)

    def test_a_server_that_repeats_what_it_does_not_know(self, password_file: Path) -> None:
        """Servers repeat the arguments of unknown commands in their errors."""
        with ValkeyServer("--rename-command", "AUTH", "") as server:
            assert PASSWORD.encode() in server.say("AUTH", PASSWORD)
            error = probe_error(server.url, password_file=str(password_file))
        assert "the server answered ERR: it does not know a command that is needed" in str(error)
        assert PASSWORD not in repr(error)

    @pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o640, 0), (0o644, 1)])
    def test_a_password_that_everybody_can_read(
        self,
        guarded: ValkeyServer,
        password_file: Path,
        caplog: pytest.LogCaptureFixture,
        mode: int,
        warnings: int,
    ) -> None:
        password_file.chmod(mode)
        with closing(make(guarded.url, password_file=str(password_file))) as backend:
            backend.probe()
            backend.probe()
        assert caplog.text.count("everybody can read the secret in") == warnings
        assert PASSWORD not in caplog.text

    @pytest.mark.parametrize(
        ("url", "settings", "told"),
        [
            ("valkey://host/zero", {}, "valkey.url: expected the number of a database"),
            ("valkey://host?ssl=1", {}, "valkey.url: expected nothing behind a ?"),
            ("unix:///socket?base=1", {}, "valkey.url: expected nothing behind a ?"),
            ("unix:///socket?db=one", {}, "valkey.url: expected the number of a database"),
            ("unix:///socket", {"tls": True}, "valkey.tls: expected none on a Unix socket"),
        ],
    )
    def test_settings_that_cannot_be(self, url: str, settings: dict[str, Any], told: str) -> None:
        with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
            make(url, **settings)


class TestTLS:
    @pytest.mark.parametrize(("scheme", "tls"), [("valkeys", False), ("rediss", False), ("valkey", True)])
    def test_rows_over_it(
        self, certificates: Certificates, guarded: ValkeyServer, password_file: Path, scheme: str, tls: bool
    ) -> None:
        with Relay(guarded.port, certificates.server_context()) as relay:
            files = {"tls_ca_file": str(certificates.authority), "password_file": str(password_file)}
            with closing(make(f"{scheme}://localhost:{relay.port}", tls=tls, **files)) as backend:
                cuts = ((), (1,), (5, 4096))
                assert backend.write([sealed(n, cuts=cuts[n % 3]) for n in range(8)]) == [None] * 8
                assert_right(backend)
                assert_right(backend)
                assert relay.accepted == 1
                relay.cut()
                assert_right(backend)
                backend.delete([empty(1)])
                assert backend.contains([empty(1), empty(2)]) == [False, True]

    def test_a_client_with_a_certificate(self, certificates: Certificates, server: ValkeyServer) -> None:
        with Relay(server.port, certificates.server_context(ask_client=True)) as relay:
            url, known = f"valkeys://127.0.0.1:{relay.port}", {"tls_ca_file": str(certificates.authority)}
            certificate, its_key = map(str, certificates.client)
            with closing(make(url, tls_cert_file=certificate, tls_key_file=its_key, **known)) as backend:
                backend.probe()
            assert isinstance(probe_error(url, **known), OSError)

    def test_a_server_nobody_vouches_for(self, certificates: Certificates, server: ValkeyServer) -> None:
        with Relay(server.port, certificates.server_context()) as relay:
            error = str(probe_error(f"valkeys://localhost:{relay.port}"))
            assert "no TLS with localhost" in error
            assert "see valkey.tls_ca_file" in error

    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
    def test_the_certificate_of_another_host(
        self, certificates: Certificates, server: ValkeyServer, host: str
    ) -> None:
        context = certificates.server_context()
        context.load_cert_chain(*map(str, certificates.issue("other", "subjectAltName=DNS:other.example")))
        with Relay(server.port, context) as relay:
            url = f"valkeys://{host}:{relay.port}"
            error = str(probe_error(url, tls_ca_file=str(certificates.authority)))
            assert f"certificate is not valid for '{host}'; see the host in valkey.url" in error

    def test_a_server_without_tls(self) -> None:
        with scripted(lambda connection: connection.sendall(b"-ERR\r\n")) as port:
            assert "no TLS with 127.0.0.1" in str(probe_error(f"valkeys://127.0.0.1:{port}"))

    def test_files_that_are_not_there(self, server: ValkeyServer, tmp_path: Path) -> None:
        url = server.url.replace("valkey:", "valkeys:")
        error = probe_error(url, tls_ca_file=str(tmp_path / "missing"))
        assert isinstance(error, FileNotFoundError)
        assert f"expected certificates in {tmp_path}/missing" in str(error)

    def test_a_server_that_speaks_it_itself(self, certificates: Certificates, tmp_path: Path) -> None:
        program = next(filter(None, map(shutil.which, ("valkey-server", "redis-server"))), None)
        if program is None:
            pytest.skip("no server with TLS of its own: install valkey-server or redis-server")
        port = free_port()
        certificate, its_key = map(str, certificates.server)
        options = [f"--tls-port {port}", f"--tls-cert-file {certificate}", f"--tls-key-file {its_key}"]
        options += [f"--tls-ca-cert-file {certificates.authority}", "--tls-auth-clients no"]
        words = [word for option in options for word in option.split()]
        with ValkeyServer(*words, program=program) as server:
            assert server.say("PING") == b"+PONG\r\n"
            settings = {"tls_ca_file": str(certificates.authority)}
            with closing(make(f"valkeys://localhost:{port}", **settings)) as backend:
                backend.write([sealed(number) for number in range(8)])
                assert_right(backend)
                backend.probe()


def test_a_server_was_found() -> None:
    """Says in a skip what all others of this file need."""
    assert find_valkey()
