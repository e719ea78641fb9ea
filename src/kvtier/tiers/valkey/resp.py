"""One connection that speaks RESP, and sends from and receives into lent memory.

The packaged clients (valkey-py, redis-py, glide) return values as new `bytes`, one copy more than needed,
and keep their sockets under private names; so this module speaks RESP itself. One thread at a time uses a
connection.

All calls after a `begin` must end by its deadline (of `time.monotonic`). The kernel does the waiting, so
that a row is one call without the GIL; a server that stops in the middle of a row is noticed after twice
the time at most. An error that the server answers is a returned value, in our words. After an exception,
unread answers may still arrive, and must not be taken for later ones: the caller closes the connection.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence

_BUFFER_BYTES = 4096
"""Holds the heads of replies. Bytes of a row that land in it must be copied, so it is small."""
_MOST_BUFFERS = 512
"""Buffers of one `sendmsg`; Linux takes 1,024."""

_CLUSTER = "it is a node of a cluster, which is not supported: expected a single server or a proxy"
_REFUSALS = {
    "OOM": (errno.ENOSPC, "it is full and evicts nothing"),
    "READONLY": (errno.EROFS, "it is a replica, or became one"),
    "NOREPLICAS": (errno.EROFS, "it has too few replicas to take anything"),
    "MISCONF": (errno.EROFS, "it cannot save to its disk, and takes nothing"),
    "NOAUTH": (errno.EACCES, "it expects a password"),
    "WRONGPASS": (errno.EACCES, "the user or the password is wrong"),
    "NOPERM": (errno.EACCES, "the user may not do that, or not with names that begin so"),
    "LOADING": (errno.EBUSY, "it is loading its data"),
    "BUSY": (errno.EBUSY, "a script keeps it busy"),
    "MASTERDOWN": (errno.EBUSY, "it is a replica whose primary is gone"),
    "WRONGTYPE": (errno.EINVAL, "the value is no string"),
    "MOVED": (errno.ENOTSUP, _CLUSTER),
    "ASK": (errno.ENOTSUP, _CLUSTER),
    "CLUSTERDOWN": (errno.ENOTSUP, _CLUSTER),
}
"""The meanings of server errors, by their first word."""
_PHRASES = {
    "max number of clients": "it has as many clients as it may have",
    "unknown command": "it does not know a command that is needed",
    "maximum allowed size": "it takes no value of this size",
    "DB index": "it has no such database",
}
"""The meanings of errors that begin with ERR, by a phrase in them."""


def bulk(*words: bytes) -> bytes:
    """Return words of a command in wire format."""
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def command(*words: bytes) -> bytes:
    """Return a whole command in wire format."""
    return b"*%d\r\n" % len(words) + bulk(*words)


def _refusal(line: bytes) -> OSError:
    """Translate a server's error into our words: its own text may repeat arguments, and so secrets."""
    text = line.decode("utf-8", "replace")
    word = text.partition(" ")[0]
    if word in _REFUSALS:
        code, meaning = _REFUSALS[word]
        return OSError(code, f"the server answered {word}: {meaning}")
    if word != "ERR":
        return OSError(errno.EIO, "the server answered an error that is not known here")
    meanings = [meaning for phrase, meaning in _PHRASES.items() if phrase in text]
    return OSError(errno.EIO, ": ".join(["the server answered ERR", *meanings[:1]]))


class RespConnection:
    """An open connection. After an exception only `close` may be called."""

    __slots__ = ("_buffer", "_deadline", "_end", "_socket", "_start", "_view", "_whole", "refused")

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._deadline = 0.0
        self._whole = 0 if isinstance(connected, ssl.SSLSocket) else socket.MSG_WAITALL
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # bytes received and not read yet
        self.refused = False
        """The server has answered an error, so it may no longer be the right server."""

    def close(self) -> None:
        """Close the connection. Bytes on their way are lost."""
        self._socket.close()

    def is_quiet(self) -> bool:
        """Return whether it is open and the server has sent nothing unexpected."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return self._start == self._end and not poller.poll(0)

    def begin(self, deadline: float) -> None:
        """Set the deadline of the following calls."""
        self._deadline = deadline
        left = seconds_left(deadline)
        if isinstance(self._socket, ssl.SSLSocket):  # OpenSSL waits by itself
            self._socket.settimeout(left)
            return
        self._socket.settimeout(None)
        wait = struct.pack("@ll", int(left), max(1, int(left % 1 * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)

    # -- sending -----------------------------------------------------------------------------------

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send buffers one after the other, without a copy."""
        try:
            if isinstance(self._socket, ssl.SSLSocket):  # has no `sendmsg`
                for buffer in buffers:
                    seconds_left(self._deadline)
                    self._socket.sendall(buffer)
                return
            left, at = [memoryview(buffer) for buffer in buffers], 0
            while at < len(left):
                seconds_left(self._deadline)
                sent = self._socket.sendmsg(left[at : at + _MOST_BUFFERS])
                while at < len(left) and sent >= left[at].nbytes:
                    sent -= left[at].nbytes
                    at += 1
                if sent:
                    left[at] = left[at][sent:]
        except (TimeoutError, BlockingIOError):
            raise late() from None

    # -- receiving ---------------------------------------------------------------------------------

    def read_status(self) -> OSError | None:
        """Read `+OK` or the like, or the server's error."""
        head = self._read_head(b"+")
        return head if isinstance(head, OSError) else None

    def read_number(self) -> int | OSError:
        """Read `:n`, or the server's error."""
        head = self._read_head(b":")
        return head if isinstance(head, OSError) else _number(head)

    def read_length(self) -> int | OSError | None:
        """Read the head of a value: the bytes that follow, `None` if there is no value, or the error."""
        head = self._read_head(b"$")
        if isinstance(head, OSError):
            return head
        return None if head == b"-1" else _number(head)

    def read_value(self, pieces: Sequence[memoryview]) -> None:
        """Fill pieces with the next bytes of a value."""
        for piece in pieces:
            filled = min(self._end - self._start, piece.nbytes)
            piece[:filled] = self._view[self._start : self._start + filled]
            self._start += filled
            while filled < piece.nbytes:
                filled += self._receive(piece[filled:], self._whole)

    def end_value(self, unread: int = 0) -> None:
        """Skip the unread rest of a value, and check that it ends there."""
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

    def _read_head(self, kind: bytes) -> bytes | OSError:
        """Read a line of this kind without its first byte, or the server's error."""
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._fill()
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        if line[:1] == b"-":
            self.refused = True
            return _refusal(line[1:])
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

    def _receive(self, view: memoryview, flags: int = 0) -> int:
        seconds_left(self._deadline)
        try:
            received = self._socket.recv_into(view, 0, flags)
        except (TimeoutError, BlockingIOError):
            raise late() from None
        if not received:
            raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
        return received


def _number(head: bytes) -> int:
    if not head.isdigit():
        raise _garbled()
    return int(head)


def _garbled() -> OSError:
    return OSError(errno.EPROTO, "expected an answer of a Valkey or Redis server, got something else")


def late() -> OSError:
    """Return the error that a deadline raises."""
    return TimeoutError(errno.ETIMEDOUT, "the server did not answer in time")


def seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline; raise the socket's time-out error if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise late()
    return left
