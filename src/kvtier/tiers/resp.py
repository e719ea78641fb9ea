"""One connection to a Valkey or Redis server that sends from and receives into memory that is lent to it.

The packaged clients (valkey-py, redis-py, glide) return values as new `bytes`, one copy more than needed,
and lend their sockets under private names only; so RESP is spoken here, over sockets and TLS of the standard
library. A connection is used by one thread at a time. All that is done on it has to be over at its
`deadline` (of `time.monotonic`). Whatever is raised leaves answers on their way that nobody must take for
the next ones: whoever sees an exception closes the connection. An error that the server answers is a value.

Secrets are sent and kept nowhere: errors name files and hosts, and what a server says to `AUTH` is cut to
its first word, because servers repeat the arguments of commands that they do not know.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import ssl
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote

from kvtier.errors import ConfigError, show_value
from kvtier.tier_config import ValkeyConfig
from kvtier.tiers.base import Piece

__all__ = ["Endpoint", "RespConnection", "bulk", "command"]

logger = logging.getLogger(__name__)

_PORT = 6379
_BUFFER_BYTES = 4096
"""Holds the heads of replies. What it catches of a row is copied out of it, so it is small."""
_MOST_BUFFERS = 512
"""Of one `sendmsg`; Linux takes 1,024."""

_CODES = {
    "OOM": errno.ENOSPC,
    "READONLY": errno.EROFS,
    "NOREPLICAS": errno.EROFS,
    "MISCONF": errno.EROFS,
    "NOAUTH": errno.EACCES,
    "WRONGPASS": errno.EACCES,
    "NOPERM": errno.EACCES,
    "LOADING": errno.EBUSY,
    "BUSY": errno.EBUSY,
    "MASTERDOWN": errno.EBUSY,
    "WRONGTYPE": errno.EINVAL,
    "MOVED": errno.ENOTSUP,
    "ASK": errno.ENOTSUP,
    "CLUSTERDOWN": errno.ENOTSUP,
}
_CLUSTER = "the server is a node of a cluster, which is not supported: expected a single server or a proxy"
_SHOWN = 120


def bulk(*words: bytes) -> bytes:
    """Return words of a command as they travel."""
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def command(*words: bytes) -> bytes:
    """Return a whole command as it travels."""
    return b"*%d\r\n" % len(words) + bulk(*words)


def _refusal(line: bytes, *, secret: bool = False) -> OSError:
    """Return what a server's error means here."""
    text = line.decode("utf-8", "replace")
    word = text.partition(" ")[0]
    code = _CODES.get(word, errno.EIO)
    if code == errno.ENOTSUP:
        return OSError(code, f"{_CLUSTER} ({word})")
    shown = word if secret else text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return OSError(code, f"the server answered {shown}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is and how to be let in. Files are read at each connect, so that they can be replaced."""

    host: str
    port: int
    path: str | None
    """Of a Unix socket; `None`: host and port count."""
    database: int
    user: str | None
    tls: bool
    config: ValkeyConfig

    @classmethod
    def from_config(cls, config: ValkeyConfig) -> Endpoint:
        """Read the address of a config."""
        parts = config.address
        unix = parts.scheme == "unix"
        text = parts.path.strip("/")
        if unix:
            query = parse_qs(parts.query, keep_blank_values=True)
            text = query.pop("db", ["0"])[-1]
        elif query := parse_qs(parts.query, keep_blank_values=True):
            raise ConfigError("valkey.url", f"expected nothing behind a ?, got {show_value(next(iter(query)))}")
        if text and not text.isdecimal():
            raise ConfigError("valkey.url", f"expected the number of a database, got {show_value(text)}")
        return cls(
            host=parts.hostname or "",
            port=parts.port or _PORT,
            path=unquote(parts.path) if unix else None,
            database=int(text or 0),
            user=unquote(parts.username) if parts.username else None,
            tls=config.tls or parts.scheme in ("valkeys", "rediss"),
            config=config,
        )

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    def connect(self, deadline: float) -> RespConnection:
        """Open a connection and be let in. `OSError` says what is in the way."""
        password = self._read_password()
        raw = self._open(_left(deadline))
        try:
            if self.tls:
                raw.settimeout(_left(deadline))
                raw = self._wrap(raw)
            connection = RespConnection(raw, deadline)
            self._greet(connection, password)
        except BaseException:
            raw.close()
            raise
        return connection

    def _open(self, timeout: float) -> socket.socket:
        try:
            if self.path is not None:
                raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    raw.settimeout(timeout)
                    raw.connect(self.path)
                except BaseException:
                    raw.close()
                    raise
                return raw
            raw = socket.create_connection((self.host, self.port), timeout)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"no connection to {self} in {timeout:.3g} s") from None
        except OSError as error:
            raise OSError(error.errno or errno.EIO, f"no connection to {self}: {error.strerror or error}") from None
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return raw

    def _wrap(self, raw: socket.socket) -> ssl.SSLSocket:
        try:
            return self._context().wrap_socket(raw, server_hostname=self.host)
        except ssl.SSLCertVerificationError as error:
            raise OSError(errno.EPROTO, f"no TLS with {self}: {error.verify_message}; see valkey.tls_ca_file") from None
        except TimeoutError:
            raise _late() from None
        except ssl.SSLError as error:
            raise OSError(errno.EPROTO, f"no TLS with {self}: {error.reason or error}") from None

    def _context(self) -> ssl.SSLContext:
        config = self.config
        try:
            context = ssl.create_default_context(cafile=config.tls_ca_file)
            if config.tls_cert_file is not None:
                context.load_cert_chain(config.tls_cert_file, config.tls_key_file)
        except OSError as error:  # which names no file, and SSLError is one
            files = [config.tls_ca_file, config.tls_cert_file, config.tls_key_file]
            names = ", ".join(name for name in files if name)
            raise OSError(error.errno or errno.EINVAL, f"expected certificates in {names}: {error.strerror}") from None
        return context

    def _greet(self, connection: RespConnection, password: bytes | None) -> None:
        """Be let in, choose the database, and see that the server listens: one round trip."""
        commands = []
        if password is not None:
            user = [] if self.user is None else [self.user.encode()]
            commands.append(command(b"AUTH", *user, password))
        if self.database:
            commands.append(command(b"SELECT", b"%d" % self.database))
        commands.append(command(b"PING"))
        connection.send(commands)
        refusals = [connection.read_status(secret=number == 0) for number in range(len(commands))]
        refusal = next((refusal for refusal in refusals if refusal is not None), None)
        if refusal is None:
            return
        hint = ""
        if refusal.errno == errno.EACCES:
            hint = "; set valkey.password_file" if password is None else "; see valkey.password_file and the user"
        elif password is not None and refusals[0] is None and self.database and refusals[1] is not None:
            hint = "; see the database in valkey.url"
        raise OSError(refusal.errno, f"{self}: {refusal.strerror}{hint}")

    def _read_password(self) -> bytes | None:
        name = self.config.password_file
        if name is None:
            return None
        try:
            with open(name, "rb") as file:
                if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                    _warn_once(name)
                password = file.read().rstrip(b"\r\n")
        except OSError as error:
            raise OSError(error.errno, f"valkey.password_file: cannot read {name}: {error.strerror}") from None
        if not password:
            raise OSError(errno.EINVAL, f"valkey.password_file: expected a password in {name}, found nothing")
        return password


_warned: set[str] = set()


def _warn_once(name: str) -> None:
    if name not in _warned:
        _warned.add(name)
        logger.warning("valkey.password_file: everybody can read %s; chmod 600 it", name)


class RespConnection:
    """An open connection. After an exception nothing may be done with it but `close`."""

    __slots__ = ("_end", "_socket", "_start", "_view", "deadline", "refused")

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # what was received and not read
        self.deadline = deadline
        self.refused = False
        """The server has answered an error, so it may not be the right one any more."""

    def close(self) -> None:
        """End it. Whatever was on its way is lost."""
        self._socket.close()

    def is_quiet(self) -> bool:
        """Say whether it is open and the server has sent nothing that nobody has asked for."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return self._start == self._end and not poller.poll(0)

    # -- sending -----------------------------------------------------------------------------------

    def send(self, buffers: Sequence[bytes | Piece]) -> None:
        """Send buffers one after the other, from where they lie."""
        try:
            if isinstance(self._socket, ssl.SSLSocket):  # has no `sendmsg`
                for buffer in buffers:
                    self._socket.settimeout(_left(self.deadline))
                    self._socket.sendall(buffer)
                return
            left, at = [memoryview(buffer) for buffer in buffers], 0
            while at < len(left):
                self._socket.settimeout(_left(self.deadline))
                sent = self._socket.sendmsg(left[at : at + _MOST_BUFFERS])
                while at < len(left) and sent >= left[at].nbytes:
                    sent -= left[at].nbytes
                    at += 1
                if sent:
                    left[at] = left[at][sent:]
        except TimeoutError:
            raise _late() from None

    # -- receiving ---------------------------------------------------------------------------------

    def read_status(self, *, secret: bool = False) -> OSError | None:
        """Read `+OK` or the like, or the server's error, of which nothing is told that may be secret."""
        head = self._read_head(b"+", secret=secret)
        return head if isinstance(head, OSError) else None

    def read_number(self) -> int | OSError:
        """Read `:n`, or the server's error."""
        head = self._read_head(b":")
        return head if isinstance(head, OSError) else _number(head)

    def read_length(self) -> int | OSError | None:
        """Read the head of a value: how many bytes follow, `None` if there is none, or the server's error."""
        head = self._read_head(b"$")
        if isinstance(head, OSError):
            return head
        return None if head == b"-1" else _number(head)

    def read_value(self, pieces: Sequence[Piece]) -> None:
        """Fill pieces with the next bytes of a value."""
        for piece in pieces:
            filled = min(self._end - self._start, piece.nbytes)
            piece[:filled] = self._view[self._start : self._start + filled]
            self._start += filled
            while filled < piece.nbytes:
                filled += self._receive(piece[filled:])

    def end_value(self, unread: int = 0) -> None:
        """Pass over the rest of a value, and see that it ends there."""
        while unread:
            passed = min(unread, self._end - self._start)
            self._start += passed
            unread -= passed
            if unread:
                self._fill()
        end = bytearray(2)
        self.read_value([memoryview(end)])
        if end != b"\r\n":
            raise _garbled()

    def _read_head(self, kind: bytes, *, secret: bool = False) -> bytes | OSError:
        """Read a line of this kind without its first byte, or the server's error."""
        while (length := bytes(self._view[self._start : self._end]).find(b"\r\n")) < 0:
            self._fill()
        line = bytes(self._view[self._start : self._start + length])
        self._start += length + 2
        if line[:1] == b"-":
            self.refused = True
            return _refusal(line[1:], secret=secret)
        if line[:1] != kind:
            raise _garbled()
        return line[1:]

    def _fill(self) -> None:
        """Receive more into the buffer."""
        held = self._end - self._start
        if held == _BUFFER_BYTES:
            raise _garbled()
        self._view[:held] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, held
        self._end += self._receive(self._view[held:])

    def _receive(self, view: Piece) -> int:
        self._socket.settimeout(_left(self.deadline))
        try:
            received = self._socket.recv_into(view)
        except TimeoutError:
            raise _late() from None
        if not received:
            raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
        return received


def _number(head: bytes) -> int:
    if not head.isdigit():
        raise _garbled()
    return int(head)


def _garbled() -> OSError:
    return OSError(errno.EPROTO, "expected an answer in RESP, got something else; is this a Valkey or Redis server?")


def _late() -> OSError:
    return TimeoutError(errno.ETIMEDOUT, "the server did not answer in time")


def _left(deadline: float) -> float:
    """Return the seconds until then, or raise what a socket raises that waits no longer."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise _late()
    return left
