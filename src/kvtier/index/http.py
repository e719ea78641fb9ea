"""A small HTTP/1.1 server: enough for an API of JSON, and nothing a stranger sends can hurt it.

Heads, bodies, connections and waiting times are bounded. A request that is none gets an answer that says what was expected,
and its connection is closed. Connections are kept alive. Handlers are coroutines and see only complete requests.
Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote

import msgspec

__all__ = ["Handler", "HttpError", "HttpLimits", "HttpServer", "Request", "Response"]

logger = logging.getLogger(__name__)

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client may ask for. Times are seconds."""

    connections: int = 512
    head: int = 16 << 10
    body: int = 8 << 20
    """A million token ids as JSON."""
    receive_timeout: float = 15.0
    idle_timeout: float = 75.0
    send_timeout: float = 30.0
    grace: float = 3.0
    """How long requests under way may take when the server closes."""


@dataclass(frozen=True, slots=True)
class Request:
    """A complete request."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Response:
    """What goes back."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    allow: str = ""

    @classmethod
    def json(cls, value: object, status: int = 200) -> Response:
        """Return a value as JSON."""
        return cls(status, msgspec.json.encode(value))


class HttpError(Exception):
    """A request that cannot be served: the status, and what was expected."""

    def __init__(self, status: int, message: str, allow: str = "") -> None:
        super().__init__(message)
        self.status, self.allow = status, allow

    def response(self) -> Response:
        """Return the answer to it."""
        return Response(self.status, msgspec.json.encode({"error": str(self)}), allow=self.allow)


Handler = Callable[[Request], Awaitable[Response]]


class HttpServer:
    """Serves a handler on one address."""

    def __init__(self, handler: Handler, limits: HttpLimits | None = None) -> None:
        self._handler = handler
        self._limits = limits or HttpLimits()
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], bool] = {}  # connection -> whether a request is under way
        self.refused = 0

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and return the address that clients connect to."""
        self._server = await asyncio.start_server(self._connected, host, port, limit=self._limits.head)
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    async def close(self) -> None:
        """Take no more connections, let requests under way finish, and close."""
        if self._server is None:
            return
        self._server.close()
        for task, is_busy in list(self._tasks.items()):
            if not is_busy:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._limits.grace)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = False
        try:
            if len(self._tasks) > self._limits.connections:
                self.refused += 1
                await self._send(writer, HttpError(503, "too many connections: try again later").response(), False)
            else:
                await self._serve(task, reader, writer)
        except (OSError, TimeoutError, EOFError):
            pass  # the client is gone, or too slow
        except asyncio.CancelledError:
            pass  # the server closes
        finally:
            del self._tasks[task]
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer a connection's requests until one of the two ends it."""
        keep = True
        while keep and self._server is not None and self._server.is_serving():
            try:
                head = await self._head(reader)
                if head is None:
                    return
                self._tasks[task] = True
                request, keep = await self._request(head, reader, writer)
                response = await self._handle(request)
            except HttpError as error:
                response, keep = error.response(), False
            head_only = keep and request.method == "HEAD"
            await self._send(writer, response, keep, head_only)
            self._tasks[task] = False

    async def _head(self, reader: asyncio.StreamReader) -> list[str] | None:
        """Return a request's head as lines, `None` when there comes no more."""
        try:
            async with asyncio.timeout(self._limits.idle_timeout):
                data = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise HttpError(431, f"expected a head of at most {self._limits.head} bytes") from None
        except asyncio.IncompleteReadError as error:
            if not error.partial.strip():
                return None
            raise HttpError(400, "expected an HTTP/1.1 request that ends in an empty line") from None
        return data.decode("latin-1").strip("\r\n").split("\r\n")

    async def _request(
        self, head: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Request, bool]:
        """Read the rest of a request; tell whether the connection stays open behind it."""
        method, _, rest = head[0].partition(" ")
        target, _, version = rest.partition(" ")
        if method not in _METHODS or version not in ("HTTP/1.1", "HTTP/1.0") or not target.startswith("/"):
            raise HttpError(400, "expected a request line like: POST /query HTTP/1.1")
        headers = _headers(head[1:])
        size = self._body_size(headers)
        if size and headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        async with asyncio.timeout(self._limits.receive_timeout):
            body = await reader.readexactly(size)
        path, _, query = target.partition("?")
        connection = headers.get("connection", "").lower()
        keep = connection != "close" if version == "HTTP/1.1" else connection == "keep-alive"
        try:
            parameters = dict(parse_qsl(query, max_num_fields=64))
        except ValueError:
            raise HttpError(400, "expected at most 64 query parameters") from None
        return Request(method, unquote(path), parameters, body), keep

    def _body_size(self, headers: Mapping[str, str]) -> int:
        if "transfer-encoding" in headers:
            raise HttpError(411, "expected a Content-Length: bodies in chunks are not read")
        size = headers.get("content-length", "0")
        if not (size.isascii() and size.isdigit()):
            raise HttpError(400, f"Content-Length: expected a number, got {size[:40]!r}")
        if len(size) > 18 or int(size) > self._limits.body:
            raise HttpError(413, f"expected a body of at most {self._limits.body} bytes")
        return int(size)

    async def _handle(self, request: Request) -> Response:
        try:
            return await self._handler(request)
        except HttpError as error:
            return error.response()
        except Exception:  # the top of a request: one that fails must not take the server along
            logger.exception("%s %s failed", request.method, request.path)
            return HttpError(500, "the server failed on this request; its log says why").response()

    async def _send(
        self, writer: asyncio.StreamWriter, response: Response, keep: bool, head_only: bool = False
    ) -> None:
        try:
            phrase = HTTPStatus(response.status).phrase
        except ValueError:
            phrase = "Unknown"
        lines = [f"HTTP/1.1 {response.status} {phrase}", f"Content-Length: {len(response.body)}"]
        lines += [f"Content-Type: {response.content_type}"] if response.body else []
        lines += [f"Allow: {response.allow}"] if response.allow else []
        lines += [f"Connection: {'keep-alive' if keep else 'close'}", "", ""]
        writer.write("\r\n".join(lines).encode("latin-1"))
        if not head_only:
            writer.write(response.body)
        async with asyncio.timeout(self._limits.send_timeout):
            await writer.drain()
            if not keep:
                with contextlib.suppress(OSError):
                    writer.write_eof()


def _headers(lines: list[str]) -> dict[str, str]:
    """Return the fields of a head. Doubled ones that decide where a request ends are an error."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip():
            raise HttpError(400, "expected header lines like: Content-Length: 2")
        if name in headers and name in ("content-length", "transfer-encoding"):
            raise HttpError(400, f"expected {name} at most once")
        headers[name] = value.strip()
    return headers
