"""HTTP requests to servers that may be faulty or hostile.

A `BoundedConnection` ends by its timeout, whatever the server sends or leaves out: connecting, the TLS
handshake, the head, and every piece of the body share one deadline. Only the look-up of a host's name takes
as long as the system's resolver lets it. It follows no redirects and uses no proxy.

One thread uses a connection; any thread may abort it.
"""

from __future__ import annotations

import io
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

Clock = Callable[[], float]


class BoundedConnection:
    """A connection to the server of `url`, for a single request. Close it.

    Everything but `abort` and `close` raises `TimeoutError` after so many seconds, and `OSError`,
    `HTTPException` or `UnicodeError` for what else goes wrong.
    """

    def __init__(self, url: str, timeout: float, clock: Clock = time.monotonic) -> None:
        parts = urlsplit(url)
        self._clock, self._deadline = clock, clock() + timeout
        host, is_secure = parts.hostname or "", parts.scheme == "https"
        self._http = (HTTPSConnection if is_secure else HTTPConnection)(host, parts.port)
        self._socket = self._connect(host, self._http.port)
        if is_secure:
            try:
                self._socket.settimeout(self._remaining())
                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=host)
            except BaseException:
                self._socket.close()
                raise
        self._http.sock = _BoundedSocket(self._socket, self._remaining)

    def request(
        self, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> HTTPResponse:
        """Send the request, and return the response once its head has come."""
        self._http.request(method, target, body, headers or {})
        return self._http.getresponse()

    def abort(self) -> None:
        """End a running request with an error in its own thread."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()
        self._socket.close()

    def _connect(self, host: str, port: int) -> socket.socket:
        """Try the addresses of a host. Each has its share of the time that is left."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        problem: OSError = OSError(f"{host} has no address")
        for number, (*_, address) in enumerate(found):
            try:
                share = self._remaining() / (len(found) - number)
                return socket.create_connection((str(address[0]), port), share)
            except OSError as error:
                problem = error
        raise problem

    def _remaining(self) -> float:
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            raise TimeoutError("timed out")
        return remaining


class _BoundedSocket:
    """What `HTTPConnection` needs of a socket. Closing it leaves the socket to its owner."""

    def __init__(self, sock: socket.socket, remaining: Callable[[], float]) -> None:
        self._socket, self._remaining = sock, remaining

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            self._socket.settimeout(self._remaining())
            left = left[self._socket.send(left) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._socket, self._remaining))

    def close(self) -> None:
        pass


class _Reader(io.RawIOBase):
    """The bytes that come before the deadline."""

    def __init__(self, sock: socket.socket, remaining: Callable[[], float]) -> None:
        self._socket, self._remaining = sock, remaining

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._socket.settimeout(self._remaining())
        return self._socket.recv_into(buffer)
