"""Rows on a Valkey or Redis server: `ValkeyBackend(config, row_bytes, timeout=...)`.

    name    {prefix}:{scope, 16 hex digits}:{bytes of a row, hex}:{key, hex}
    value   header of 64 bytes . row

A batch is one exchange: all commands are sent, then all answers are read. Rows go directly from and into
the lent memory. An exchange that fails in the middle returns the answers received so far and a failure for
each other row, and its connection is closed: bytes still on their way are never taken for another answer.
An exchange has `timeout` seconds, including the wait for a connection and connecting (but not the
resolution of a host's name, which nothing bounds). Any thread may call; at most `config.connections`
exchanges run at once.

`write` replaces (`SET`), as the contract says. `NX` would save nothing: the row has already travelled when
the server looks, and a damaged row would stay for ever; a caller that wants to write once asks `contains`
first. A value that is not one of our rows, by length or by header, is read as a row with an empty seal: it
fails its check, and can be deleted or replaced.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from kvtier.errors import IntegrityError
from kvtier.tier_config import ValkeyConfig
from kvtier.tiers.base import Backend, BackendRow
from kvtier.tiers.seal import HEADER_BYTES, pack_header, seal_in
from kvtier.tiers.valkey.endpoint import Endpoint
from kvtier.tiers.valkey.resp import RespConnection, bulk, command

_Answer = TypeVar("_Answer")

_EXCHANGE_BYTES = 16 << 20
"""The most bytes of one exchange, beyond the first row: a server keeps the answers to all rows in memory."""
_EXCHANGE_ROWS = 1024


class ValkeyBackend(Backend):
    """Rows on a server, by key."""

    contains_batch = _EXCHANGE_ROWS

    def __init__(self, config: ValkeyConfig, row_bytes: int, *, timeout: float) -> None:
        """Prepare the backend; the first call connects.

        `row_bytes` separates engines with other chunk sizes.
        """
        self._endpoint = Endpoint.from_config(config)
        self._endpoint.warn_of_open_files()
        self._timeout = timeout
        self._prefix, self._row_bytes = config.prefix.encode(), row_bytes
        self._expiry = b"" if config.ttl is None else bulk(b"PX", b"%d" % max(1, round(config.ttl * 1000)))
        self._connections = config.connections
        self._room = threading.Semaphore(config.connections)
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []
        self._closed = False

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        return self._exchange(_parts(rows), self._set, _read_status)

    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        return self._exchange(_parts(rows), partial(self._ask, b"GET"), _read_row)

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        return [number > 0 for number in self._count(b"EXISTS", rows)]

    def delete(self, rows: Sequence[BackendRow]) -> None:
        self._count(b"UNLINK", rows)

    def probe(self) -> None:
        """Raise `OSError` if the server does not accept a row, or does not return it.

        The probe is as large as a row, because a small value might pass where no row does. The answer may
        be another engine's probe, or nothing.
        """
        name = self._prefix + b":probe"
        store = command(b"SET", name, bytes(self._row_bytes), b"PX", b"1000")
        with self._connection() as connection:
            connection.send([store, command(b"GET", name), command(b"UNLINK", name)])
            refusal, length = connection.read_status(), connection.read_length()
            if isinstance(length, int):
                connection.end_value(unread=length)
            connection.read_number()
        for answer in (refusal, length):
            if isinstance(answer, OSError):
                raise answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._close_idle()

    def check(self) -> None:
        """Raise `IntegrityError` if too many connections are kept, or a bad one."""
        with self._lock:
            kept, most = len(self._idle), self._connections
            if kept > most or any(connection.refused for connection in self._idle):
                raise IntegrityError(f"valkey: expected at most {most} good connections, kept {kept} or bad")

    # -- exchanges ---------------------------------------------------------------------------------

    def _name(self, row: BackendRow) -> bytes:
        return b"%b:%016x:%x:%b" % (self._prefix, row.scope, self._row_bytes, row.key.hex().encode())

    def _ask(self, verb: bytes, row: BackendRow) -> list[bytes | memoryview]:
        return [command(verb, self._name(row))]

    def _set(self, row: BackendRow) -> list[bytes | memoryview]:
        """Return `SET name header.row`; the row is sent from its own memory."""
        head = b"*%d\r\n" % (5 if self._expiry else 3) + bulk(b"SET", self._name(row))
        size = b"$%d\r\n" % (HEADER_BYTES + row.nbytes)
        return [head + size + pack_header(row), *row.pieces, b"\r\n" + self._expiry]

    def _count(self, verb: bytes, rows: Sequence[BackendRow]) -> list[int]:
        """Return the server's number for each row; `OSError` if one is missing."""
        counts: list[int] = []
        parts = [rows[at : at + _EXCHANGE_ROWS] for at in range(0, len(rows), _EXCHANGE_ROWS)]
        for count in self._exchange(parts, partial(self._ask, verb), _read_number):
            if isinstance(count, OSError):
                raise count
            counts.append(count)
        return counts

    def _exchange(
        self,
        parts: Sequence[Sequence[BackendRow]],
        ask: Callable[[BackendRow], list[bytes | memoryview]],
        receive: Callable[[RespConnection, BackendRow], _Answer],
    ) -> list[_Answer | OSError]:
        """Send the commands of a part, made by `ask`, then receive all answers; part by part.

        After an error, all unanswered rows have failed, and no further part is tried.
        """
        answers: list[_Answer | OSError] = []
        try:
            for part in parts:
                with self._connection() as connection:
                    connection.send([buffer for row in part for buffer in ask(row)])
                    for row in part:
                        answers.append(receive(connection, row))
        except OSError as error:
            answers += [error] * (sum(len(part) for part in parts) - len(answers))
        return answers

    # -- connections -------------------------------------------------------------------------------

    @contextmanager
    def _connection(self) -> Iterator[RespConnection]:
        """Lend a connection for one exchange. It is kept after a success; a failure closes all idle ones."""
        deadline = time.monotonic() + self._timeout
        if not self._room.acquire(timeout=self._timeout):
            raise TimeoutError(errno.ETIMEDOUT, "all connections were busy")
        try:
            connection = self._take_idle() or self._endpoint.connect(deadline)
            try:
                connection.begin(deadline)
                yield connection
            except BaseException:
                connection.refused = True
                raise
            finally:
                self._give_back(connection)
        finally:
            self._room.release()

    def _take_idle(self) -> RespConnection | None:
        """Return a kept connection that the server has not closed since."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None or connection.is_quiet():
                return connection
            connection.close()

    def _give_back(self, connection: RespConnection) -> None:
        with self._lock:
            keep = not (connection.refused or self._closed)
            if keep:
                self._idle.append(connection)
        if not keep:  # other connections may lead to the same dead or demoted server
            connection.close()
            self._close_idle()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _read_status(connection: RespConnection, _row: BackendRow) -> OSError | None:
    return connection.read_status()


def _read_number(connection: RespConnection, _row: BackendRow) -> int | OSError:
    return connection.read_number()


def _read_row(connection: RespConnection, row: BackendRow) -> bytes | OSError | None:
    """Receive a row into its memory; skip a value that cannot be the row."""
    length = connection.read_length()
    if isinstance(length, OSError) and length.errno == errno.EINVAL:
        return b""  # a list, a set, ...
    if length is None or isinstance(length, OSError):
        return length
    if length != HEADER_BYTES + row.nbytes:
        connection.end_value(unread=length)
        return b""
    header = bytearray(HEADER_BYTES)
    connection.read_value([memoryview(header), *row.pieces])
    connection.end_value()
    return seal_in(header, row)


def _parts(rows: Sequence[BackendRow]) -> list[Sequence[BackendRow]]:
    """Cut a batch into parts, one for each exchange."""
    parts, start, nbytes = [], 0, 0
    for at, row in enumerate(rows):
        size = row.nbytes
        if at > start and (nbytes + size > _EXCHANGE_BYTES or at - start == _EXCHANGE_ROWS):
            parts.append(rows[start:at])
            start, nbytes = at, 0
        nbytes += size
    return [*parts, rows[start:]] if rows else []
