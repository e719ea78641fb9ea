"""`must_answer`: checks that the servers of a Mooncake store answer, and are the right kind of server.

Joining a store holds the GIL, and tries each of its steps twenty times: if a server hangs, or is of another
kind, it stops the process for minutes. So both servers are asked first, in the same way as the store's
client asks them: the metadata server through a proxy, if the environment names one. Any thread may call; it
blocks for a few timeouts at most.
"""

from __future__ import annotations

import errno
import http.client
import os
import socket
import struct
from contextlib import closing, suppress
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

from kvtier.tier_config import MooncakeConfig

__all__ = ["must_answer"]

_RPC_MAGIC = 21
_RPC_QUESTION = struct.pack("<4B4I", _RPC_MAGIC, 0, 0, 0, 0, 0, 0, 0)
"""A call of no function in the master's protocol (coro_rpc); the answer says that there is none."""
_PORTS = {"http": 80, "https": 443, "etcd": 2379, "redis": 6379}
_PROXY_VARIABLES = ("http_proxy", "all_proxy", "ALL_PROXY")  # libcurl ignores HTTP_PROXY
_DIRECT_VARIABLES = ("no_proxy", "NO_PROXY")
_PROXY_PORT = 1080
"""libcurl's port of a proxy that is named without one."""


def must_answer(config: MooncakeConfig, timeout: float) -> str:
    """Raise `OSError` unless master and metadata server answer as such.

    Return our address towards the master.
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
    """Return the HTTP proxy that libcurl, in the store's client, uses for a host; `None`: no proxy."""
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
