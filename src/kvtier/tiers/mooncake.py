"""Rows in a Mooncake store: the memory of many processes, which one master finds.

    {prefix}/2/{scope, 16 hex digits}/{key, hex}        the row and a header (`seal`) behind it

The store transfers each run of memory separately, so a row and its header are one run: the pool's slots
have room behind their rows, where `write` puts headers and `read` finds them. A job that owns a slot owns
that room, too. `lend` registers the pool once; rows in it travel without a copy. Rows elsewhere, or in
slots without room, go one at a time through a registered buffer of the calling thread. The store writes an
object once: an existing object stays as it is, so a bad one has to be deleted. Any thread may call, several
at once; calls block without the GIL.

The client has no deadline: with a dead master a call blocks for four seconds and more. The memory stays in
use until the call returns, and the tier above suspends. Worse, joining and leaving the store hold the GIL
and so stop the whole process. Joining usually takes a tenth of a second, but a minute and a half if a
server hangs; so it is tried only after master and metadata server have both answered as such. Leaving takes
a second or two, because the client waits for a thread of its own that sleeps. So no client leaves while the
process lives: a closed backend leaves its client, without our memory, to the next backend with equal
settings. `health_check` says yes for a dead master, so `probe` moves bytes instead.
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
from contextlib import closing, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

import numpy as np

from kvtier.errors import ConfigError, InputError
from kvtier.tier_config import MooncakeConfig
from kvtier.tiers.base import Backend, BackendRow
from kvtier.tiers.seal import HEADER_BYTES, copy_into, pack_header, seal_in

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

_VERSION = 2
"""The version of values; it is part of their names. In version 1 the header was in front of the row."""
_NO_HEADER = bytes(HEADER_BYTES)

_RPC_MAGIC = 21
_RPC_QUESTION = struct.pack("<4B4I", _RPC_MAGIC, 0, 0, 0, 0, 0, 0, 0)
"""A call of no function in the master's protocol (coro_rpc); the answer says that there is none."""
_PORTS = {"http": 80, "https": 443, "etcd": 2379, "redis": 6379}
_PROXY_VARIABLES = ("http_proxy", "all_proxy", "ALL_PROXY")  # libcurl ignores HTTP_PROXY
_DIRECT_VARIABLES = ("no_proxy", "NO_PROXY")
_PROXY_PORT = 1080
"""libcurl's port of a proxy that is named without one."""

# Return codes of the store's calls.
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
    """The settings with which a client joins a store, in the order of `setup`."""

    host: str
    metadata: str
    segment: int
    buffer: int
    protocol: str
    device: str
    master: str


_unused: dict[_Joining, list[MooncakeDistributedStore]] = {}
"""Clients that have joined and that no backend uses now."""
_lock = threading.Lock()


def _take_unused(joining: _Joining) -> MooncakeDistributedStore | None:
    with _lock:
        clients = _unused.get(joining)
        return clients.pop() if clients else None


@atexit.register
def _leave() -> None:
    """Leave when the process ends.

    The package does so too late: it cannot reach the metadata server then.
    """
    for client in [client for clients in _unused.values() for client in clients]:
        client.close()
    _unused.clear()


class _Scratch:
    """Registered memory of one thread: room for a row and its header."""

    def __init__(self, row_bytes: int) -> None:
        self.memory = memoryview(bytearray(row_bytes + HEADER_BYTES))
        self.address = _address_of(self.memory)


@dataclass(slots=True)
class _MooncakeCall:
    """Some rows of a batch, as the client's calls want them: each is one run of memory, its header last."""

    rows: list[BackendRow] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    headers: list[memoryview] = field(default_factory=list)
    bounce: memoryview | None = None
    """The payload of the only row while it travels, if that is not in the row's own memory."""

    def add(self, name: str, row: BackendRow, address: int, header: memoryview) -> None:
        self.rows.append(row)
        self.names.append(name)
        self.addresses.append(address)
        self.sizes.append(row.nbytes + HEADER_BYTES)
        self.headers.append(header)


class MooncakeBackend(Backend):
    """A client of one store. Give it the pool by `lend` first."""

    writes_once = True
    call_bytes = 8 << 20
    """A call asks the master twice, and keeps a core busy while it waits: few large calls are best."""

    def __init__(
        self, config: MooncakeConfig, row_bytes: int, *, timeout: float, slot_bytes: int = 1
    ) -> None:
        """Join the store. `OSError`: a server does not answer in time. `ConfigError`: no package.

        Rows in the lent memory are `slot_bytes` apart, and the space between them is ours.
        """
        store_class, replication_class = _import_mooncake()
        self._master, self._prefix = config.master, config.prefix
        self._row_bytes, self._slot_bytes = row_bytes, slot_bytes
        facing = must_answer(config, timeout)
        self._replication: ReplicateConfig = replication_class()
        self._replication.replica_num = config.replicas
        self._lent, self._lent_address = memoryview(b""), 0
        self._scratches = threading.local()
        self._registered: dict[int, memoryview] = {}  # memory registered with the client, by address
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

    def lend(self, memory: memoryview) -> None:
        if self._slot_bytes >= self._row_bytes + HEADER_BYTES:
            self._register(memory)
            self._lent, self._lent_address = memory.cast("B"), _address_of(memory)

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        answers: list[OSError | None] = []
        for call in self._calls(rows):
            for row, header in zip(call.rows, call.headers, strict=True):
                header[:] = pack_header(row)
            if call.bounce is not None:
                pieces = [np.frombuffer(piece, np.uint8) for piece in call.rows[0].pieces]
                np.concatenate(pieces, out=np.frombuffer(call.bounce, np.uint8))
            codes = self._store.batch_put_from(call.names, call.addresses, call.sizes, self._replication)
            answers += [None if code in (0, _EXISTS) else self._error(code) for code in codes]
            if _NO_MASTER in codes:
                break  # the next call would block for as long
        return answers + [self._error(_NO_MASTER)] * (len(rows) - len(answers))

    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        answers: list[bytes | OSError | None] = []
        for call in self._calls(rows):
            for header in call.headers:
                header[:] = _NO_HEADER  # an earlier row's header must not be taken for this one's
            codes = self._store.batch_get_into(call.names, call.addresses, call.sizes)
            for at, code in enumerate(codes):
                answers.append(self._arrived(call, at, code))
            if _NO_MASTER in codes:
                break
        return answers + [self._error(_NO_MASTER)] * (len(rows) - len(answers))

    def _arrived(self, call: _MooncakeCall, at: int, code: int) -> bytes | OSError | None:
        """Return the result of a get: the seal, an empty one if the object is not this row, or the error."""
        row, nbytes = call.rows[at], call.sizes[at]
        if code == nbytes:
            if call.bounce is not None:
                copy_into(row.pieces, call.bounce)
            return seal_in(call.headers[at], row)
        if code in (_ABSENT, _NOT_READY):
            return None
        if code >= 0 or code in (_INVALID, _TRANSFER_FAILED):
            # The store uses these codes both for an object of another length and for an object it cannot
            # fetch.
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
        for code in self._store.batch_remove([self._name(row) for row in rows], True):  # even if in use
            if code not in (0, _ABSENT):
                raise self._error(code)

    def probe(self) -> None:
        """Raise `OSError` if the store does not accept an object as large as a row, or loses it."""
        name, scratch = f"{self._prefix}/probe/{os.urandom(8).hex()}", self._scratch()
        address, size = [scratch.address], [scratch.memory.nbytes]
        (code,) = self._store.batch_is_exist([name])  # does not block if the master is gone
        if code < 0:
            raise self._error(code)
        (code,) = self._store.batch_put_from([name], address, size, self._replication)
        if code:
            raise self._error(code)
        (code,) = self._store.batch_get_into([name], address, size)
        self._store.batch_remove([name], True)
        if code != scratch.memory.nbytes:
            raise self._error(code)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for address in self._registered:
                self._store.unregister_buffer(address)
            self._registered.clear()
            self._lent = memoryview(b"")
            with _lock:
                _unused.setdefault(self._joining, []).append(self._store)

    # -- inside ------------------------------------------------------------------------------------

    def _calls(self, rows: Sequence[BackendRow]) -> Iterator[_MooncakeCall]:
        """Cut a batch: rows in slots of the lent memory go together, every other row goes alone."""
        together = _MooncakeCall()
        for row in rows:
            start = self._slot_of(row)
            if start is not None:
                end = start + self._row_bytes
                header = self._lent[end : end + HEADER_BYTES]
                together.add(self._name(row), row, self._lent_address + start, header)
                continue
            if together.rows:  # answers come in the order of the rows
                yield together
                together = _MooncakeCall()
            yield self._bounced(row)
        if together.rows:
            yield together

    def _slot_of(self, row: BackendRow) -> int | None:
        """Return the offset of a row's slot in the registered memory; `None` if it is in no slot."""
        if len(row.pieces) != 1 or row.pieces[0].nbytes != self._row_bytes:
            return None
        start = _address_of(row.pieces[0]) - self._lent_address
        is_lent = 0 <= start <= self._lent.nbytes - self._slot_bytes
        return start if is_lent and start % self._slot_bytes == 0 else None

    def _bounced(self, row: BackendRow) -> _MooncakeCall:
        """Send a row through the scratch buffer, because there is no room for a header behind it."""
        if row.nbytes > self._row_bytes:
            expected = f"at most {self._row_bytes} bytes outside of the memory that was lent"
            raise InputError(f"row: expected {expected}, got {row.nbytes}")
        scratch, end = self._scratch(), row.nbytes
        call = _MooncakeCall(bounce=scratch.memory[:end])
        call.add(self._name(row), row, scratch.address, scratch.memory[end : end + HEADER_BYTES])
        return call

    def _scratch(self) -> _Scratch:
        scratch: _Scratch | None = getattr(self._scratches, "own", None)
        if scratch is None:
            scratch = self._scratches.own = _Scratch(self._row_bytes)
            self._register(scratch.memory)
        return scratch

    def _register(self, memory: memoryview) -> None:
        address = _address_of(memory)
        code = self._store.register_buffer(address, memory.nbytes)
        if code:
            raise self._error(code, f"{memory.nbytes} bytes of memory could not be registered")
        self._registered[address] = memory

    def _name(self, row: BackendRow) -> str:
        return f"{self._prefix}/{_VERSION}/{row.scope:016x}/{row.key.hex()}"

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


def _address_of(memory: memoryview) -> int:
    """Return the address of memory. The caller must keep the memory alive."""
    if memory.readonly or not memory.nbytes:
        address: int = np.frombuffer(memory, np.uint8).ctypes.data
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # a tenth of the time


def must_answer(config: MooncakeConfig, timeout: float) -> str:
    """Raise `OSError` unless master and metadata server answer as such.

    Joining a store holds the GIL, and tries each of its steps twenty times: if a server hangs, or is of
    another kind, it stops the process for minutes. So both servers are asked first, in the same way as the
    store's client asks them: the metadata server through a proxy, if the environment names one. It blocks
    for a few timeouts at most. Return our address towards the master.
    """
    facing = _ask_master(config.master, timeout)
    _ask_metadata(config.metadata, timeout)
    return facing


def _ask_master(master: str, timeout: float) -> str:
    """Make the master answer anything in its protocol. Return our address towards it."""
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
    if not answer:  # a stopped process accepts, and a proxy of a dead process closes
        raise OSError(errno.ECONNRESET, problem)
    if answer[0] != _RPC_MAGIC:
        problem = f"mooncake store: what answers at {master} is no master; is the port right?"
        raise OSError(errno.EPROTO, problem)
    return facing


def _ask_metadata(address: str, timeout: float) -> None:
    """Have the metadata server store an entry and remove it, as joining and leaving do."""
    url = urlsplit(address)
    where = url.hostname or "", url.port or _PORTS[url.scheme]
    name = f"{url.path}?key=kvtier/question/{os.urandom(8).hex()}"
    problem = f"mooncake store: its metadata server at {url.hostname} does not answer"
    if url.scheme == "http" and (proxy := _find_proxy(where[0])) is not None:
        hint = f"add {where[0]} to no_proxy"
        problem += f" by way of the proxy that the environment names (http_proxy, all_proxy): {hint}"
        where, name = proxy, f"http://{url.netloc}{name}"
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
        raise OSError(getattr(error, "errno", None) or errno.ETIMEDOUT, problem) from None
    if statuses != [http.client.OK, http.client.OK]:
        problem = f"what answers at {url.hostname} is no metadata server (HTTP {statuses[0]})"
        raise OSError(errno.EPROTO, f"mooncake store: {problem}; are port, path and no_proxy right?")


def _find_proxy(host: str) -> tuple[str, int] | None:
    """Return the HTTP proxy that libcurl, in the store's client, uses for a host, if any."""
    proxy, direct = (
        next((os.environ[name] for name in names if os.environ.get(name)), "")
        for names in (_PROXY_VARIABLES, _DIRECT_VARIABLES)
    )
    if not proxy or proxy_bypass(host, {"no": direct}):
        return None
    for name in direct.split(","):
        with suppress(ValueError):  # not a network, or the host is not an address
            if ip_address(host) in ip_network(name.strip(), strict=False):
                return None
    url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return (url.hostname or "", url.port or _PROXY_PORT) if url.scheme == "http" else None
