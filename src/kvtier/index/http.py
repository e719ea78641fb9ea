"""A small HTTP/1.1 server: enough for a JSON API, and safe against anything that a stranger sends.

Heads, bodies, connections and waiting times are bounded; so is the total of unfinished bodies over all
connections. An invalid request gets an answer that says what was expected, and its connection is closed.
Connections are kept alive. Handlers are coroutines and see only complete requests; a long answer may be a
generator of pieces, which is read as fast as the client takes them. All of this belongs to one event loop.
`docs/decisions/0020-the-index-keeps-its-http-server.md` says why no other server is used.

`Access` has the rules for clients. A web page in a browser must not reach a server on the user's machine or
network. So a request must name the server by an address, by a loopback name, or by an allowed name: a page
whose own name was pointed at the server (DNS rebinding) sends its own name. A request that says it comes
from another page is refused too. Changes must be JSON, which other pages cannot send without a preflight,
and carry the token if there is one. The values are immutable; any thread may use them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import os
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from kvtier.errors import InputError, LogLimit

logger = logging.getLogger(__name__)

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_ONCE = frozenset(("authorization", "content-length", "content-type", "host", "origin", "transfer-encoding"))
"""Fields that decide where a request ends or who may send it: a second one could be read in two ways."""
_READ_SIZE = 64 << 10
ANY_HOST = "*"
_SHORTEST_TOKEN = 16
_LONGEST_TOKEN = 4096


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits for clients. Times are seconds."""

    connections: int = 512
    head: int = 16 << 10
    body: int = 8 << 20
    """Enough for a million token ids as JSON."""
    small_body: int = 64 << 10
    """Bodies up to this size are always accepted; the number of connections bounds them."""
    unfinished_bodies: int = 64 << 20
    """The most bytes of larger, unfinished bodies that are kept, over all connections."""
    receive_timeout: float = 15.0
    """How long a head may take from its first byte on, then its body; also the wait for a first request."""
    idle_timeout: float = 75.0
    """How long a connection may wait between two requests."""
    send_timeout: float = 30.0
    """How long a client may take to read an answer, or one piece of a long one."""
    stream_timeout: float = 300.0
    """How long a client may take for all pieces of a long answer."""
    grace: float = 3.0
    """How long running requests may take when the server closes."""
    linger: float = 1.0
    """How long a refused client may go on sending: it then sees the answer and not a reset."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A complete request. Names of header fields are lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. A body in pieces is sent piece by piece; a failure in the middle cuts the connection."""

    status: int = 200
    body: bytes | AsyncGenerator[bytes, None] = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: object, status: int = 200) -> Response:
        """Return a value as JSON."""
        return cls(status, msgspec.json.encode(value))


class HttpError(Exception):
    """A request that cannot be served: the status, and what was expected."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}

    def response(self) -> Response:
        """Return the answer to the request."""
        return Response(self.status, msgspec.json.encode({"error": str(self)}), headers=self.headers)


Handler = Callable[[HttpRequest], Awaitable[Response]]


class _Client(NamedTuple):
    """A connection, and the task that serves it."""

    task: asyncio.Task[None]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _Head(NamedTuple):
    """A request's head."""

    method: str
    target: str
    version: str
    headers: dict[str, str]

    @property
    def is_kept(self) -> bool:
        """Return whether the connection stays open after the answer."""
        connection = self.headers.get("connection", "").lower()
        return connection != "close" if self.version == "HTTP/1.1" else connection == "keep-alive"


class HttpServer:
    """Serves a handler on one address."""

    def __init__(self, handler: Handler, limits: HttpLimits | None = None) -> None:
        self._handler = handler
        self._limits = limits or HttpLimits()
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], bool] = {}  # connection -> whether a request is running
        self._unfinished = 0  # bytes of large, unfinished bodies
        self._failures = LogLimit()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and return the address that clients connect to."""
        self._server = await asyncio.start_server(self._connected, host, port, limit=self._limits.head)
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    async def close(self) -> None:
        """Take no more connections, let running requests finish, and close."""
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
        client = _Client(task, reader, writer)
        try:
            if len(self._tasks) > self._limits.connections:
                await self._send(client, _error(503, "too many connections: try again later"))
            else:
                await self._serve(client)
        except (OSError, TimeoutError, EOFError):
            pass  # the client is gone, or too slow
        except asyncio.CancelledError:
            pass  # the server closes
        finally:
            del self._tasks[task]
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _serve(self, client: _Client) -> None:
        """Answer one request after the other."""
        wait = self._limits.receive_timeout
        while self._server is not None and self._server.is_serving():
            async with asyncio.timeout(wait):
                first = await client.reader.read(1)
            if not first:
                return
            if not await self._exchange(client, first):
                return
            self._tasks[client.task] = False
            wait = self._limits.idle_timeout
            await asyncio.sleep(0)  # pipelined requests never wait, so give other connections a turn

    async def _exchange(self, client: _Client, first: bytes) -> bool:
        """Answer one request, whose first byte is given; return whether more may follow.

        Nothing of the request outlives this call: an idle connection keeps no body.
        """
        try:
            data = await self._read_head(first, client.reader)
            self._tasks[client.task] = True
            head = _parse_head(data)
            body = await self._read_body(head, client)
            response = await self._handle(_request_of(head, body))
        except HttpError as error:
            await self._send(client, error.response())
            await self._drop_rest(client.reader)
            return False
        return await self._send(client, response, head)

    async def _read_head(self, first: bytes, reader: asyncio.StreamReader) -> bytes:
        """Return a request's head with the empty line that ends it."""
        try:
            async with asyncio.timeout(self._limits.receive_timeout):
                return first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise HttpError(431, f"expected a head of at most {self._limits.head} bytes") from None
        except asyncio.IncompleteReadError as error:
            if not (first + error.partial).strip():
                raise EOFError from None
            raise HttpError(400, "expected an HTTP/1.1 request that ends in an empty line") from None

    async def _read_body(self, head: _Head, client: _Client) -> bytes:
        size = self._body_size(head.headers)
        if not size:
            return b""
        if head.headers.get("expect", "").lower() == "100-continue":
            client.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts, missing, counted = [], size, 0
        try:
            async with asyncio.timeout(self._limits.receive_timeout):
                while missing:
                    part = await client.reader.read(min(missing, _READ_SIZE))
                    if not part:
                        raise EOFError
                    parts.append(part)
                    missing -= len(part)
                    if size > self._limits.small_body:
                        counted += len(part)
                        self._unfinished += len(part)
                        self._expect_room()
        finally:
            self._unfinished -= counted
        return b"".join(parts)

    def _expect_room(self) -> None:
        if self._unfinished > self._limits.unfinished_bodies:
            most = self._limits.unfinished_bodies
            busy = f"more than {most} bytes of unfinished requests: try again later"
            raise HttpError(503, busy, {"Retry-After": "1"})

    def _body_size(self, headers: Mapping[str, str]) -> int:
        if "transfer-encoding" in headers:
            raise HttpError(411, "expected a Content-Length: bodies in chunks are not read")
        size = headers.get("content-length", "0")
        if not (size.isascii() and size.isdigit()):
            raise HttpError(400, f"Content-Length: expected a number, got {size[:40]!r}")
        if len(size) > 18 or int(size) > self._limits.body:
            raise HttpError(413, f"expected a body of at most {self._limits.body} bytes")
        return int(size)

    async def _handle(self, request: HttpRequest) -> Response:
        try:
            return await self._handler(request)
        except HttpError as error:
            return error.response()
        except Exception:  # the top of a request: its failure must not stop the server
            if (more := self._failures.admit()) is not None:
                logger.exception("%s %s failed%s", request.method, request.path, more)
            return _error(500, "the server failed on this request; its log says why")

    async def _send(self, client: _Client, response: Response, head: _Head | None = None) -> bool:
        """Send an answer, and return whether the connection stays open. Without a head it is closed."""
        writer, body = client.writer, response.body
        in_chunks = head is not None and head.version == "HTTP/1.1" and not isinstance(body, bytes)
        # pieces without chunks: the answer ends when the connection ends
        is_kept = head is not None and head.is_kept and (in_chunks or isinstance(body, bytes))
        writer.write(_head_of(response, is_kept, in_chunks))
        if head is not None and head.method == "HEAD":
            pass
        elif isinstance(body, bytes):
            writer.write(body)
        else:
            await self._send_pieces(writer, body, in_chunks)
        async with asyncio.timeout(self._limits.send_timeout):
            await writer.drain()
            if not is_kept:
                with contextlib.suppress(OSError):
                    writer.write_eof()
        return is_kept

    async def _send_pieces(
        self, writer: asyncio.StreamWriter, body: AsyncGenerator[bytes, None], in_chunks: bool
    ) -> None:
        try:
            async with asyncio.timeout(self._limits.stream_timeout), contextlib.aclosing(body):
                async for piece in body:
                    if not piece:
                        continue  # an empty chunk would end the answer
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if in_chunks else piece)
                    async with asyncio.timeout(self._limits.send_timeout):
                        await writer.drain()
        except BaseException as error:
            writer.transport.abort()  # the client must not take a part for the whole
            if isinstance(error, Exception) and not isinstance(error, (OSError, TimeoutError)):
                if (more := self._failures.admit()) is not None:
                    logger.exception("an answer broke off%s", more)
                raise ConnectionAbortedError from None
            raise
        if in_chunks:
            writer.write(b"0\r\n\r\n")

    async def _drop_rest(self, reader: asyncio.StreamReader) -> None:
        """Read the rest of a refused request: closing with unread bytes would discard the answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger):
                while await reader.read(_READ_SIZE):
                    pass


def _error(status: int, message: str) -> Response:
    return HttpError(status, message).response()


def _parse_head(data: bytes) -> _Head:
    """Read a head."""
    line, *fields = data.decode("latin-1").strip("\r\n").split("\r\n")
    method, _, rest = line.partition(" ")
    target, _, version = rest.partition(" ")
    if method not in _METHODS or version not in ("HTTP/1.1", "HTTP/1.0") or not target.startswith("/"):
        raise HttpError(400, "expected a request line like: POST /query HTTP/1.1")
    return _Head(method, target, version, _headers(fields))


def _headers(lines: list[str]) -> dict[str, str]:
    """Return the fields of a head."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip():
            raise HttpError(400, "expected header lines like: Content-Length: 2")
        if name in headers and name in _ONCE:
            raise HttpError(400, f"expected {name} at most once")
        headers[name] = value.strip()
    return headers


def _request_of(head: _Head, body: bytes) -> HttpRequest:
    path, _, query = head.target.partition("?")
    try:
        parameters = dict(parse_qsl(query, max_num_fields=64))
    except ValueError:
        raise HttpError(400, "expected at most 64 query parameters") from None
    return HttpRequest(head.method, unquote(path), parameters, body, head.headers)


def _head_of(response: Response, is_kept: bool, in_chunks: bool) -> bytes:
    """Return an answer's head."""
    try:
        phrase = HTTPStatus(response.status).phrase
    except ValueError:
        phrase = "Unknown"
    lines = [f"HTTP/1.1 {response.status} {phrase}"]
    if isinstance(response.body, bytes):
        lines += [f"Content-Length: {len(response.body)}"]
    elif in_chunks:
        lines += ["Transfer-Encoding: chunked"]
    lines += [f"Content-Type: {response.content_type}"] if response.body else []
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    lines += [f"Connection: {'keep-alive' if is_kept else 'close'}", "", ""]
    return "\r\n".join(lines).encode("latin-1")


# -- access ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Access:
    """Decides what clients may do.

    `hosts` are names by which clients may call the server, besides `localhost` and addresses; `*` allows
    any. `token` is required for changes, unless it is `None`. `ipc` lets clients register sockets of this
    machine.
    """

    hosts: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    ipc: bool = False

    def expect_caller(self, headers: Mapping[str, str]) -> None:
        """Refuse a request that was meant for another server, or comes from another site's web page."""
        host = headers.get("host", "")
        if host and not self._knows(host):
            expected = "expected an address, localhost, or a name given with --allow-host"
            raise HttpError(403, f"Host: {expected}, got {host[:200]!r}")
        origin = headers.get("origin", "")
        if origin and _netloc_of(origin) != host.lower():
            raise HttpError(403, f"Origin: expected no request from another site, got {origin[:200]!r}")
        site = headers.get("sec-fetch-site", "none")  # browsers send it even without an Origin
        if site.lower() not in ("none", "same-origin"):
            raise HttpError(
                403, f"Sec-Fetch-Site: expected no request from another site, got {site[:200]!r}"
            )

    def expect_change(self, headers: Mapping[str, str]) -> None:
        """Refuse a change that is not allowed, or not JSON."""
        if self.token is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode("latin-1"), self.token.encode())
            if scheme.lower() != "bearer" or not is_right:
                expected = "Authorization: expected Bearer and the token that the server was given"
                raise HttpError(401, expected, {"WWW-Authenticate": "Bearer"})
        kind = headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise HttpError(415, f"Content-Type: expected application/json, got {kind[:200]!r}")

    def _knows(self, host: str) -> bool:
        """Return whether a request with this `Host` was meant for us.

        An attacker can point only names at us.
        """
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        allowed = (allowed.lower().rstrip(".") for allowed in self.hosts)
        return name == "localhost" or _is_address(name) or ANY_HOST in self.hosts or name in allowed


def _netloc_of(origin: str) -> str | None:
    """Return host and port of an origin, in the form of a `Host`; `None` if it has none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def read_token(path: str | Path) -> str:
    """Return the token in a file that only its owner can read."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_LONGEST_TOKEN + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot read the token: {error.strerror}") from None
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        found = f"mode {stat.S_IMODE(mode):04o}: chmod 600 {path}"
        raise InputError(f"{path}: expected a file that only its owner can read, got {found}")
    token = data.strip()
    is_text = token.isascii() and token.decode("latin-1").isprintable()
    if not (is_text and _SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN):
        expected = f"{_SHORTEST_TOKEN} to {_LONGEST_TOKEN} printable ASCII characters on one line"
        raise InputError(f"{path}: expected a token of {expected}")
    return token.decode()
