"""Access rules: which clients may ask an index server, and which may change what it follows.

A web page in a browser must not reach a server on the user's machine or network. So a request must name the
server by an address, by a loopback name, or by an allowed name: a page whose own name was pointed at the
server (DNS rebinding) sends its own name. A request that says it comes from another page is refused too.
Changes must be JSON, which other pages cannot send without a preflight, and carry the token if there is
one. The values here are immutable; any thread may use them.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvtier.errors import InputError
from kvtier.index.http import HttpError

ANY_HOST = "*"
_SHORTEST_TOKEN = 16
_LONGEST_TOKEN = 4096


@dataclass(frozen=True, slots=True)
class Access:
    """The rights of clients.

    `hosts` are names by which clients may call the server, besides `localhost` and addresses (`*`: any).
    `token` is required for changes (`None`: no token). `ipc` lets clients register sockets of this machine.
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
        """Say whether a request with this `Host` was meant for us.

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
