"""CURVE: encrypted, authenticated sockets, and the key files they need.

A publisher is a server: clients know its public key. With a folder of public client keys, only those
clients may connect; without a folder, any client that knows the server's key. Keys are ZeroMQ certificates:
`NAME.key` (public, to hand out) and `NAME.key_secret` (readable by its owner only). The dataclasses here
are immutable; a `Gate` belongs to the thread that serves it.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

from kvtier.errors import ConfigError, InputError, LogLimit, show_value

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"kvtier"
_SETTLED_NS = 1_000_000_000
_KEY_BYTES = 32
_LARGEST_FILE = 64 << 10

logger = logging.getLogger(__name__)


def make_keys(folder: str | Path, name: str) -> tuple[Path, Path]:
    """Make a key pair and return its files, public and secret.

    An existing pair is an error, not replaced.
    """
    if not name or Path(name).name != name:
        raise InputError(f"name: expected the name of a file, without a folder, got {show_value(name)}")
    folder = Path(folder)
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    for file in (public, secret):
        if file.exists():
            raise InputError(f"{file} exists: remove it first, or choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        zmq.auth.create_certificates(folder, name)
        secret.chmod(0o600)
    except OSError as error:
        raise InputError(f"{folder}: expected a folder that keys can be written to: {error}") from None
    return public, secret


def _load(path: str | Path, *, secret: bool) -> tuple[bytes, bytes | None]:
    """Return the public and the secret key of a file."""
    try:
        public, private = _load_certificate(Path(path))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read a CURVE key: {error}") from None
    if secret and private is None:
        raise InputError(f"{path}: expected a secret key file (NAME.key_secret), got a public one")
    return public, private


def _load_certificate(path: Path) -> tuple[bytes, bytes | None]:
    """Read a key. Anything but a small regular file is refused: a pipe would never end."""
    if path.exists() and not (path.is_file() and path.stat().st_size <= _LARGEST_FILE):
        raise ValueError(f"expected a regular file of at most {_LARGEST_FILE:,} bytes")
    public, private = zmq.auth.load_certificate(path)
    return public, private


def _need_curve() -> None:
    if not zmq.has("curve"):
        raise InputError("this libzmq has no CURVE: install a pyzmq wheel, or build libzmq with libsodium")


@dataclass(frozen=True)
class CurveServer:
    """The keys of a publisher: its own, and a folder of allowed clients' keys; `None` allows any client."""

    secret_key_file: str
    clients_dir: str | None = None

    def apply(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE server; call it before the socket is bound."""
        _need_curve()
        public, secret = _load(self.secret_key_file, secret=True)
        sock.curve_publickey, sock.curve_secretkey = public, secret
        sock.curve_server = True
        if self.clients_dir is not None:
            sock.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)


@dataclass(frozen=True)
class CurveClient:
    """The keys of a subscriber: its own, and the publisher's public key (40 characters, or its file)."""

    secret_key_file: str
    server_public_key: str

    def apply(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE client; call it before the socket is connected."""
        _need_curve()
        public, secret = _load(self.secret_key_file, secret=True)
        sock.curve_publickey, sock.curve_secretkey = public, secret
        sock.curve_serverkey = self._server_key()

    def _server_key(self) -> bytes:
        key = self.server_public_key
        return key.encode() if len(key) == 40 and not Path(key).exists() else _load(key, secret=False)[0]


class Gate:
    """Tells libzmq which clients may connect, for one context (ZeroMQ RFC 27).

    The folder is read again when it or any file in it changed, so that keys can be added, replaced or
    removed while the publisher runs. Connected clients stay connected. A file that cannot be read refuses
    its own client only.
    """

    def __init__(self, context: zmq.Context[Any], clients_dir: str) -> None:
        self._dir = Path(clients_dir)
        if not self._dir.is_dir():
            raise ConfigError("curve.clients_dir", f"expected a folder of public keys, got {clients_dir}")
        self._read: frozenset[tuple[str, int, int, int]] | None = None
        self._allowed: frozenset[bytes] = frozenset()
        self._unreadable: dict[str, str] = {}  # why files are skipped, by name
        self.denied = 0
        self._folder_lines = LogLimit()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP)

    def serve(self) -> None:
        """Answer all waiting requests of libzmq. Never blocks."""
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator,arg-type]
            frames = self.socket.recv_multipart()
            is_curve = len(frames) == 7 and frames[0] == b"1.0" and frames[5] == b"CURVE"
            good = is_curve and self._is_allowed(frames[6])
            self.denied += not good
            status = (b"200", b"OK", b"client") if good else (b"400", b"unknown key", b"")
            self.socket.send_multipart((b"1.0", frames[1] if len(frames) > 1 else b"", *status, b""))

    def close(self) -> None:
        """Stop answering; libzmq then refuses every client."""
        self.socket.close(linger=0)

    def _is_allowed(self, key: bytes) -> bool:
        try:
            found = self._look()
            if found != self._read:
                self._allowed = self._load_all(name for name, *_ in found if name.endswith(".key"))
                self._read = found if self._is_settled(found) else None
        except OSError as error:
            if (more := self._folder_lines.admit()) is not None:
                line = "cannot read the clients' keys in %s (%s): new clients are refused%s"
                logger.warning(line, self._dir, error, more)
            return False
        return zmq.utils.z85.encode(key) in self._allowed

    def _load_all(self, names: Iterable[str]) -> frozenset[bytes]:
        """Return the keys in files. A file that holds no key, or half of one, is skipped and logged once."""
        keys, unreadable = set(), {}
        for name in names:
            try:
                key, _ = _load_certificate(self._dir / name)
                if len(zmq.utils.z85.decode(key)) != _KEY_BYTES:
                    raise ValueError(f"expected a key of 40 characters, got {len(key)}")
                keys.add(key)
            except FileNotFoundError:
                continue  # removed since the folder was listed
            except (OSError, ValueError, KeyError, struct.error) as error:
                unreadable[name] = str(error)
        for name in unreadable.keys() - self._unreadable.keys():
            logger.warning(
                "%s: skipped, and its client refused, until it holds a whole public key: %s",
                self._dir / name,
                unreadable[name],
            )
        self._unreadable = unreadable
        return frozenset(keys)

    def _look(self) -> frozenset[tuple[str, int, int, int]]:
        """Return a fingerprint of the folder's content."""
        stats = []
        for file in self._dir.iterdir():
            with suppress(OSError):  # removed since the folder was listed, or a link that leads nowhere
                stats.append((file.name, file.stat()))
        return frozenset((name, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats)

    def _is_settled(self, found: frozenset[tuple[str, int, int, int]]) -> bool:
        """Return whether the next change will show: two changes at the same moment have the same time."""
        return all(time.time_ns() - changed > _SETTLED_NS for *_, changed in found)
