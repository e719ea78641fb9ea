"""`Endpoint`: the address of a server, and the opening of connections: sockets, TLS, password, database.

Secrets are not kept in memory: files are read at each connect, so that they can be replaced, and errors
name files and hosts only. Any thread may call these functions.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from kvtier.tier_config import ValkeyConfig
from kvtier.tiers.valkey.resp import RespConnection, command, late, seconds_left

logger = logging.getLogger(__name__)

_PORT = 6379
_MOST_PASSWORD = 64 << 10


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address and login of a server. Files are read at each connect, so that they can be replaced.

    The number of a database follows the host of an address; for a Unix socket it is `?db=number`.
    """

    host: str
    port: int
    path: str | None
    """The path of a Unix socket; `None` if host and port are used."""
    database: int
    user: str | None
    tls: bool
    config: ValkeyConfig

    @classmethod
    def from_config(cls, config: ValkeyConfig) -> Endpoint:
        """Read the address of a config."""
        parts = config.address
        unix = parts.scheme == "unix"
        tls = config.tls or parts.scheme in ("valkeys", "rediss")
        return cls(
            host=parts.hostname or "",
            port=parts.port or _PORT,
            path=unquote(parts.path) if unix else None,
            database=int(config.database or 0),
            user=unquote(parts.username) if parts.username else None,
            tls=tls,
            config=config,
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"

    def connect(self, deadline: float) -> RespConnection:
        """Open a connection and log in. `OSError` says what failed."""
        password = self._read_password()
        raw = self._open(seconds_left(deadline))
        try:
            if self.tls:
                raw.settimeout(seconds_left(deadline))
                raw = self._wrap(raw)
            connection = RespConnection(raw)
            connection.begin(deadline)
            self._greet(connection, password)
        except BaseException:
            raw.close()
            raise
        return connection

    def warn_of_open_files(self) -> None:
        """Log the secret files that every user of this machine can read."""
        for name in (self.config.password_file, self.config.tls_key_file):
            with suppress(OSError):  # `connect` reports it
                if name is not None and Path(name).stat().st_mode & stat.S_IROTH:
                    logger.warning("valkey: everybody can read the secret in %s; chmod 600 it", name)

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
            problem = f"no connection to {self}: {error.strerror or error}"
            raise OSError(error.errno or errno.EIO, problem) from None
        except ValueError:  # from the codec of host names
            raise OSError(errno.EINVAL, f"no connection to {self}: expected the name of a host") from None
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return raw

    def _wrap(self, raw: socket.socket) -> ssl.SSLSocket:
        try:
            return self._context().wrap_socket(raw, server_hostname=self.host)
        except ssl.SSLCertVerificationError as error:
            hint = "the host in valkey.url" if "mismatch" in error.verify_message else "valkey.tls_ca_file"
            problem = f"no TLS with {self}: {error.verify_message.rstrip('.')}; see {hint}"
            raise OSError(errno.EPROTO, problem) from None
        except TimeoutError:
            raise late() from None
        except ssl.SSLError as error:
            raise OSError(errno.EPROTO, f"no TLS with {self}: {error.reason or error}") from None

    def _context(self) -> ssl.SSLContext:
        config = self.config
        try:
            context = ssl.create_default_context(cafile=config.tls_ca_file)
            if config.tls_cert_file is not None:
                context.load_cert_chain(config.tls_cert_file, config.tls_key_file)
        except OSError as error:  # it names no file; SSLError is an OSError
            files = [config.tls_ca_file, config.tls_cert_file, config.tls_key_file]
            names = ", ".join(name for name in files if name)
            problem = f"expected certificates in {names}: {error.strerror}"
            raise OSError(error.errno or errno.EINVAL, problem) from None
        return context

    def _greet(self, connection: RespConnection, password: bytes | None) -> None:
        """Log in, choose the database, and check that the server answers: one round trip."""
        commands: list[tuple[bytes, str]] = []
        if password is not None or self.user is not None:  # some users need no password, only a name
            user = [] if self.user is None else [self.user.encode()]
            hint = "see valkey.password_file and the user in valkey.url"
            commands.append((command(b"AUTH", *user, password or b""), hint))
        if self.database:
            commands.append((command(b"SELECT", b"%d" % self.database), "see the database in valkey.url"))
        commands.append(
            (command(b"PING"), "set valkey.password_file" if password is None else "see its log")
        )
        connection.send([words for words, _ in commands])
        for _, hint in commands:
            refusal = connection.read_status()
            if refusal is not None:
                told = refusal.errno in (errno.EACCES, errno.EIO)
                raise OSError(refusal.errno, f"{self}: {refusal.strerror}" + (f"; {hint}" if told else ""))

    def _read_password(self) -> bytes | None:
        name = self.config.password_file
        if name is None:
            return None
        try:
            # A pipe without a writer is read as empty, without waiting; it could not be read at each
            # connect.
            with open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                password = (file.read(_MOST_PASSWORD) or b"").rstrip(b"\r\n")
        except OSError as error:
            problem = f"valkey.password_file: cannot read {name}: {error.strerror}"
            raise OSError(error.errno, problem) from None
        if not password:
            raise OSError(errno.EINVAL, f"valkey.password_file: expected a password in {name}, got none")
        return password
