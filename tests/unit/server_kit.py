"""An index server in a thread, its client and its publishers, for the tests of the server."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

from kvtier.errors import InputError, OutsideError
from kvtier.events.config import KVEventsConfig
from kvtier.events.publisher import ZmqEventPublisher
from kvtier.events.types import BlockStored, KVEventBatch
from kvtier.index.http import Access, HttpLimits
from kvtier.index.server import make_service, run
from kvtier.index.service import Registration, Service, Settings

T = list(range(200, 260))
PATIENCE = 60.0
SMALL = Settings(budget=4 << 20, form="python")


class IndexServer:
    """A server in its own thread. As a context manager it listens when entered and has stopped when left."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        settings: Settings | None = None,
        limits: HttpLimits | None = None,
        access: Access | None = None,
        follow: Iterable[Registration] = (),
    ) -> None:
        """Take the arguments of `serve`."""
        self.url = ""
        self._host, self._port, self._settings = host, port, settings
        self._arguments = limits, access, follow
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-index-http", daemon=True)

    def _run(self) -> None:
        try:
            asyncio.run(self._main(make_service(self._host, self._settings)))
        except (InputError, OutsideError) as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _main(self, service: Service) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await run(self._host, self._port, service, *self._arguments, self._on_ready, self._stop)

    def _on_ready(self, url: str) -> None:
        self.url = url
        self._ready.set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *exc: object) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


class Client:
    """Speaks JSON to a server."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        status, headers, data = self.raw(method, path, None if body is None else json.dumps(body).encode())
        return status, json.loads(data) if headers.get("content-type", "").startswith(
            "application/json"
        ) else data.decode()

    def raw(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            return (
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()

    def bytes(self, data: bytes, half_close: bool = True) -> bytes:
        """Send bytes as they are, and return all that comes back."""
        host, _, port = self._address.partition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as sock:
            try:
                sock.sendall(data)
                if half_close:
                    sock.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: sock.recv(65536), b""))
            except (ConnectionResetError, BrokenPipeError):
                return b""

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """Give a connection, and break it off in the end."""
        host, _, port = self._address.partition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as sock:
            yield sock

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics; labels are part of the name."""
        lines = self("GET", "/metrics")[1].splitlines()
        return {
            name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")
        }

    def listener(self, rank: int = 0) -> dict[str, Any]:
        """Return what /workers says of the one instance there is."""
        return self("GET", "/workers")[1][0]["listeners"][str(rank)]

    def query_status(self) -> int:
        return self.raw("POST", "/query", b'{"token_ids":[1],"model_name":"none"}')[0]

    def query(self, tokens: list[int], **more: Any) -> Any:
        status, answer = self("POST", "/query", {"token_ids": tokens, "model_name": "m"} | more)
        assert status == 200, answer
        return answer


def until(condition: Callable[[], bool]) -> None:
    """Ask until the answer is yes; the asking takes long enough by itself."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"


@contextmanager
def publishing(rank: int = 0, **options: Any) -> Iterator[ZmqEventPublisher]:
    publisher = ZmqEventPublisher(
        rank, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=KVEventsConfig(**options)
    )
    try:
        yield publisher
    finally:
        publisher.shutdown()


def stored(hashes: list[int], parent: int | None, tokens: list[int], medium: str = "GPU") -> BlockStored:
    return BlockStored(hashes, parent, tokens, 4, None, medium, None)


def publish(publisher: ZmqEventPublisher, *events: Any) -> None:
    publisher.publish(KVEventBatch(time.time(), list(events)))


def registered(publisher: ZmqEventPublisher, instance: int | str = 1, **more: Any) -> dict[str, Any]:
    endpoints = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    return {"instance_id": instance, "model_name": "m", "block_size": 4} | endpoints | more
