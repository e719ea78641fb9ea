"""Rows in a Mooncake store: memory of many processes, found through one master.

    {prefix}/{scope, 16 hex digits}/{key, hex}        a header (`value_header`) and the row

`lend` registers the pool once; rows in it travel without a copy, other rows by way of a registered buffer of
the calling thread. The store writes an object once: one that is there stays as it is, so a bad one has to be
deleted. Any thread may call, several at once; calls block without the GIL.

The client has no deadline: with a dead master a call blocks for four seconds and more, so memory stays in
use until it returns, and the tier above suspends. Worse, joining and leaving hold the GIL and so stop the
whole process: joining for a tenth of a second as a rule, but for a minute and a half if a server hangs, so
it is tried only after master and metadata server have both answered as such; leaving for a second or two,
because the client waits for a thread of its own that sleeps. So nobody leaves while the process lives: a
backend that is closed leaves its client, with no memory of ours, to the next one with equal settings.
`health_check` says yes to a dead master: `probe` moves bytes instead.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import http.client
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import SplitResult, urlsplit

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError, InputError
from kvtier.tier_config import MooncakeConfig
from kvtier.tiers.base import Backend, BackendRow, Piece
from kvtier.tiers.value_header import HEADER_BYTES, copy_into, pack_header, seal_in

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

__all__ = ["MooncakeBackend"]

_CALL_ROWS = 64
_RPC_MAGIC = 21
_RPC_QUESTION = struct.pack("<4B4I", _RPC_MAGIC, 0, 0, 0, 0, 0, 0, 0)
"""A call of no function, in the protocol of the master (coro_rpc): it says that there is none."""
_PORTS = {"http": 80, "https": 443, "etcd": 2379, "redis": 6379}

# What the store's calls return.
_NO_SPACE = -200
_INVALID = -600
_NOT_READY = -703
_ABSENT = -704
_EXISTS = -705
_TRANSFER_FAILED = -800
_NO_MASTER = -900

_ERRORS = {
    _NO_SPACE: (errno.ENOSPC, "there is no space left, or no process gives memory to the store"),
    _TRANSFER_FAILED: (errno.EIO, "the bytes could not be moved; a process that held them may have ended"),
    _NO_MASTER: (errno.ECONNREFUSED, "the master does not answer"),
}


class _Joining(NamedTuple):
    """What a client joins a store with, as `setup` takes it."""

    host: str
    metadata: str
    segment: int
    buffer: int
    protocol: str
    device: str
    master: str


_unused: dict[_Joining, list[MooncakeDistributedStore]] = {}
"""Clients that have joined and that no backend has now."""
_lock = threading.Lock()


def _take_unused(joining: _Joining) -> MooncakeDistributedStore | None:
    with _lock:
        clients = _unused.get(joining)
        return clients.pop() if clients else None


@atexit.register
def _leave() -> None:
    """Leave when the process ends. The package would, too, but then it cannot reach the metadata server."""
    for client in [client for clients in _unused.values() for client in clients]:
        client.close()
    _unused.clear()


class _Scratch:
    """Registered memory of one thread: the headers of a call's rows, and one row."""

    def __init__(self, row_bytes: int) -> None:
        self.memory = np.zeros(_CALL_ROWS * HEADER_BYTES + row_bytes, np.uint8)
        self.headers = self.memory[: _CALL_ROWS * HEADER_BYTES].reshape(_CALL_ROWS, HEADER_BYTES)
        self.row = self.memory[self.headers.nbytes :]
        self.address = _address_of(self.memory.data)

    def address_of_header(self, at: int) -> int:
        return self.address + at * HEADER_BYTES


@dataclass(slots=True)
class _Call:
    """Some rows of a batch as the client's calls want them. Each begins with its header in `scratch`."""

    scratch: _Scratch
    rows: list[BackendRow] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    addresses: list[list[int]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    bounced: bool = False
    """The payload of the only row is in the scratch, too."""

    def add(self, name: str, row: BackendRow, addresses: list[int], sizes: list[int]) -> None:
        self.addresses.append([self.scratch.address_of_header(len(self.rows)), *addresses])
        self.sizes.append([HEADER_BYTES, *sizes])
        self.names.append(name)
        self.rows.append(row)

    @property
    def bounce(self) -> NDArray[np.uint8]:
        return self.scratch.row[: self.sizes[0][1]]


class MooncakeBackend(Backend):
    """A client of one store. Give it the pool by `lend` first."""

    writes_once = True
    call_bytes = 8 << 20
    """A call has the master asked before and after, and burns a core while it waits: few large ones are
    best.
    """

    def __init__(self, config: MooncakeConfig, row_bytes: int, *, timeout: float) -> None:
        """Join the store. `OSError`: a server does not answer in time. `ConfigError`: no package."""
        store_class, replication_class = _import_mooncake()
        self._master, self._prefix, self._row_bytes = config.master, config.prefix, row_bytes
        facing = _must_answer(config, timeout)
        self._replication: ReplicateConfig = replication_class()
        self._replication.replica_num = config.replicas
        self._lent = range(0)
        self._scratches = threading.local()
        self._registered: dict[int, Piece] = {}  # memory that the client knows, by address
        self._closed = False
        self._joining = _Joining(
            config.host or facing,
            config.metadata,
            config.segment,
            0,
            config.protocol,
            config.device,
            config.master,
        )
        self._store: MooncakeDistributedStore = _take_unused(self._joining) or self._join(store_class())

    def _join(self, store: MooncakeDistributedStore) -> MooncakeDistributedStore:
        if code := store.setup(*self._joining):
            raise self._error(code, "the store could not be joined")
        return store

    def __repr__(self) -> str:
        return f"MooncakeBackend({self._master})"

    def lend(self, memory: Piece) -> None:
        self._register(memory)
        self._lent = range(_address_of(memory), _address_of(memory) + memory.nbytes)

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        answers: list[OSError | None] = []
        for call in self._calls(rows):
            headers = b"".join([pack_header(row) for row in call.rows])
            call.scratch.memory[: len(headers)] = np.frombuffer(headers, np.uint8)
            if call.bounced:
                pieces = [np.frombuffer(piece, np.uint8) for piece in call.rows[0].pieces]
                np.concatenate(pieces, out=call.bounce)
            put = self._store.batch_put_from_multi_buffers
            codes = put(call.names, call.addresses, call.sizes, self._replication)
            answers += [None if code in (0, _EXISTS) else self._error(code) for code in codes]
            if _NO_MASTER in codes:
                break  # the next call would block as long
        return answers + [self._error(_NO_MASTER)] * (len(rows) - len(answers))

    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        answers: list[bytes | OSError | None] = []
        for call in self._calls(rows):
            call.scratch.headers[:] = 0
            codes = self._store.batch_get_into_multi_buffers(call.names, call.addresses, call.sizes)
            for at, code in enumerate(codes):
                answers.append(self._arrived(call, at, code))
            if _NO_MASTER in codes:
                break
        return answers + [self._error(_NO_MASTER)] * (len(rows) - len(answers))

    def _arrived(self, call: _Call, at: int, code: int) -> bytes | OSError | None:
        """Say what a get came to: the seal, an empty one if the object is no such row, or why it failed."""
        row, nbytes = call.rows[at], sum(call.sizes[at])
        if code == nbytes:
            if call.bounced:
                copy_into(row.pieces, call.bounce.data)
            return seal_in(call.scratch.headers[at].data, row)
        if code in (_ABSENT, _NOT_READY):
            return None
        if code >= 0 or code in (_INVALID, _TRANSFER_FAILED):
            # The same codes for an object of another length and for one that cannot be had.
            size = self._store.get_size(call.names[at])
            if size >= 0 and size != nbytes:
                return b""
        return self._error(code)

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        if not rows:
            return []
        codes = self._store.batch_is_exist([self._name(row) for row in rows])
        for code in codes:
            if code < 0:
                raise self._error(code)
        return [code == 1 for code in codes]

    def delete(self, rows: Sequence[BackendRow]) -> None:
        if not rows:
            return
        for code in self._store.batch_remove([self._name(row) for row in rows], True):  # readers or not
            if code not in (0, _ABSENT):
                raise self._error(code)

    def probe(self) -> None:
        """Raise `OSError` if the store does not take as many bytes as a row has, or does not
        give them back.
        """
        name, row = f"{self._prefix}/probe/{os.urandom(8).hex()}", self._scratch().row
        address, size = [_address_of(row.data)], [row.nbytes]
        (code,) = self._store.batch_is_exist([name])  # does not block if the master is gone
        if code < 0:
            raise self._error(code)
        (code,) = self._store.batch_put_from([name], address, size, self._replication)
        if code:
            raise self._error(code)
        (code,) = self._store.batch_get_into([name], address, size)
        self._store.batch_remove([name], True)
        if code != row.nbytes:
            raise self._error(code)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for address in self._registered:
                self._store.unregister_buffer(address)
            self._registered.clear()
            with _lock:
                _unused.setdefault(self._joining, []).append(self._store)

    # -- inside ------------------------------------------------------------------------------------

    def _calls(self, rows: Sequence[BackendRow]) -> Iterator[_Call]:
        """Cut a batch: rows in the lent memory together, up to a limit; any other by itself."""
        scratch = self._scratch()
        together = _Call(scratch)
        for row in rows:
            addresses = [_address_of(piece) for piece in row.pieces]
            sizes = [piece.nbytes for piece in row.pieces]
            if self._is_lent(addresses, sizes):
                together.add(self._name(row), row, addresses, sizes)
            else:
                if together.rows:  # its headers are in the scratch, which the next call uses
                    yield together
                    together = _Call(scratch)
                yield self._bounced(scratch, row)
            if len(together.rows) == _CALL_ROWS:
                yield together
                together = _Call(scratch)
        if together.rows:
            yield together

    def _bounced(self, scratch: _Scratch, row: BackendRow) -> _Call:
        """Have a row travel by way of the scratch, because the client does not know its memory."""
        if row.nbytes > self._row_bytes:
            expected = f"at most {self._row_bytes} bytes outside of the memory that was lent"
            raise InputError(f"row: expected {expected}, got {row.nbytes}")
        call = _Call(scratch, bounced=True)
        call.add(self._name(row), row, [_address_of(scratch.row.data)], [row.nbytes])
        return call

    def _is_lent(self, addresses: list[int], sizes: list[int]) -> bool:
        start, stop = self._lent.start, self._lent.stop
        return all(start <= at and at + size <= stop for at, size in zip(addresses, sizes, strict=True))

    def _scratch(self) -> _Scratch:
        scratch: _Scratch | None = getattr(self._scratches, "own", None)
        if scratch is None:
            scratch = self._scratches.own = _Scratch(self._row_bytes)
            self._register(scratch.memory.data)
        return scratch

    def _register(self, memory: Piece) -> None:
        address = _address_of(memory)
        code = self._store.register_buffer(address, memory.nbytes)
        if code:
            raise self._error(code, f"{memory.nbytes} bytes of memory could not be registered")
        self._registered[address] = memory

    def _name(self, row: BackendRow) -> str:
        return f"{self._prefix}/{row.scope:016x}/{row.key.hex()}"

    def _error(self, code: int, what: str = "") -> OSError:
        number, problem = _ERRORS.get(code, (errno.EIO, "a call failed"))
        return OSError(number, f"mooncake store at {self._master}: {what or problem} (code {code})")


def _import_mooncake() -> tuple[type[MooncakeDistributedStore], type[ReplicateConfig]]:
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    except ModuleNotFoundError:
        raise ConfigError(
            "mooncake", "needs the store's package: in a checkout, pip install '.[mooncake]'"
        ) from None
    except ImportError as error:  # a wheel for CUDA on a machine without
        problem = f"the package cannot be loaded: {error}; of its wheels exactly one may be installed"
        hint = "in a checkout, pip install '.[mooncake]' for one without CUDA"
        raise ConfigError("mooncake", f"{problem}: {hint}") from None
    return MooncakeDistributedStore, ReplicateConfig


def _must_answer(config: MooncakeConfig, timeout: float) -> str:
    """Raise `OSError` unless master and metadata server answer. Return our address that faces the master.

    Silence, a connection that is closed, and a server of another kind must not be met: joining tries each of
    its steps twenty times, and its owner tries to join for as long as it lives.
    """
    facing = _ask_master(config.master, timeout)
    _ask_metadata(urlsplit(config.metadata), timeout)
    return facing


def _ask_master(master: str, timeout: float) -> str:
    """Have the master say anything in its protocol. Return our address that faces it."""
    host, _, port = master.rpartition(":")
    problem = f"mooncake store: its master at {master} cannot be reached"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as sock:
            problem = f"mooncake store: its master at {master} accepts and does not answer"
            facing: str = sock.getsockname()[0]
            sock.sendall(_RPC_QUESTION)
            answer = sock.recv(1)
    except OSError as error:
        raise OSError(error.errno or errno.ETIMEDOUT, problem) from None
    if not answer:  # a stopped process accepts, and a proxy of a dead one closes
        raise OSError(errno.ECONNRESET, problem)
    if answer[0] != _RPC_MAGIC:
        problem = f"mooncake store: what answers at {master} is no master; is the port right?"
        raise OSError(errno.EPROTO, problem)
    return facing


def _ask_metadata(url: SplitResult, timeout: float) -> None:
    """Have the metadata server take an entry and remove it, as joining and leaving do."""
    where = url.hostname or "", url.port or _PORTS[url.scheme]
    name = f"{url.path}?key=kvtier/question/{os.urandom(8).hex()}"
    statuses: list[int] = []
    try:
        if url.scheme != "http":
            socket.create_connection(where, timeout).close()
            return
        for method, body in (("PUT", b"{}"), ("DELETE", None)):
            with closing(http.client.HTTPConnection(*where, timeout=timeout)) as connection:
                connection.request(method, name, body)
                statuses.append(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        problem = f"mooncake store: its metadata server at {url.hostname} does not answer"
        raise OSError(getattr(error, "errno", None) or errno.ETIMEDOUT, problem) from None
    if statuses != [http.client.OK, http.client.OK]:
        problem = f"what answers at {url.hostname} is no metadata server (HTTP {statuses[0]})"
        raise OSError(errno.EPROTO, f"mooncake store: {problem}; are port and path right?")


def _address_of(memory: Piece) -> int:
    """Return where memory begins. Whoever uses the number keeps the memory."""
    if memory.readonly or not memory.nbytes:
        address: int = np.frombuffer(memory, np.uint8).ctypes.data
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # a tenth of the time
