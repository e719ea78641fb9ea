"""Addresses of a publisher: the port of a data-parallel rank, binding or connecting, and clients' addresses.

Rank r moves its base address by r: the port of tcp, a suffix `_dp{r}` of ipc and inproc. Pure functions,
except `attach`, which binds or connects a socket; any thread may call them.
"""

from __future__ import annotations

import re
import socket
from typing import Any

import zmq

from kvtier.errors import InputError, OutsideError

__all__ = ["attach", "check_ports", "client_endpoint", "expect_port", "is_bound", "offset_endpoint"]

_TCP = re.compile(r"(tcp://.*):(\d+)")
_LAST_PORT = 65535


def offset_endpoint(endpoint: str | None, rank: int) -> str | None:
    """Return the address of a data-parallel rank; port 0 stays 0, because the system picks one."""
    if not endpoint:
        return endpoint
    if "tcp" in endpoint:
        base, port = _split_tcp(endpoint)
        if port == 0 or rank == 0:
            return endpoint
        if port + rank > _LAST_PORT:
            raise InputError(
                f"{endpoint}: rank {rank} would have port {port + rank}; expected at most {_LAST_PORT}"
            )
        return f"{base}:{port + rank}"
    if "inproc" in endpoint or "ipc" in endpoint:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    raise InputError(
        f"{endpoint!r} is no address of a publisher: expected one that begins with tcp://, "
        "ipc:// or inproc://"
    )


def expect_port(endpoint: str) -> None:
    """Refuse a port that libzmq would silently reduce modulo 65,536."""
    match = _TCP.fullmatch(endpoint)
    if match is not None and (len(match[2]) > 9 or int(match[2]) > _LAST_PORT):
        raise InputError(f"{endpoint!r}: expected a port from 0 to {_LAST_PORT}, got {match[2][:20]}")


def _split_tcp(endpoint: str) -> tuple[str, int]:
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise InputError(f"{endpoint!r} has no port: expected one at its end, like tcp://*:5557")
    expect_port(endpoint)
    return match[1], int(match[2])


def check_ports(endpoint: str, replay_endpoint: str | None, rank: int) -> None:
    """Raise if this rank's ports must collide with those of this rank or a lower one.

    Takes the base addresses.
    """
    if replay_endpoint is None:
        return
    if endpoint == replay_endpoint and not endpoint.endswith(":0"):
        raise InputError(f"endpoint and replay_endpoint are both {endpoint}: expected two addresses")
    if not (endpoint.startswith("tcp") and replay_endpoint.startswith("tcp")):
        return
    port, replay_port = _split_tcp(endpoint)[1], _split_tcp(replay_endpoint)[1]
    if port and replay_port and abs(replay_port - port) <= rank:
        raise InputError(
            f"ports {port} (endpoint) and {replay_port} (replay_endpoint) are {abs(replay_port - port)} "
            f"apart, so rank {rank} "
            f"meets a lower rank's: put them further apart than there are data-parallel ranks"
        )


def is_bound(endpoint: str) -> bool:
    """Return whether a PUB socket binds this address; it connects to other addresses."""
    return (
        "*" in endpoint
        or "::" in endpoint
        or endpoint.startswith(("ipc://", "inproc://"))
        or endpoint.endswith(":0")
    )


def attach(sock: zmq.Socket[bytes], endpoint: str, rank: int, *, bind: bool) -> str:
    """Bind or connect a socket, and return its address. `tcp://*:0` gets the port that the system chose."""
    try:
        if not bind:
            sock.connect(endpoint)
            return endpoint
        if "[" in endpoint or endpoint.startswith("tcp://::"):
            sock.setsockopt(zmq.IPV6, 1)
        sock.bind(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        raise OutsideError(
            f"data-parallel rank {rank} cannot {verb} {endpoint}: {error.strerror}"
        ) from error
    if not endpoint.endswith(":0"):
        return endpoint
    bound: Any = sock.getsockopt_string(zmq.LAST_ENDPOINT)
    return f"{endpoint.rpartition(':')[0]}:{bound.rpartition(':')[2]}"


def client_endpoint(endpoint: str) -> str:
    """Return the address with which clients reach a bound one; for a wildcard, this machine's own."""
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or host not in ("*", "0.0.0.0", "::", "[::]"):
        return endpoint
    return f"tcp://{_own_address()}{colon}{port}"


def _own_address() -> str:
    """Return the address that this machine uses towards others, or the loopback one. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Reserved for documentation: routed like any other address, but no machine has it.
            probe.connect(("192.0.2.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address
