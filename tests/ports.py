"""Ports for servers that tests start: no other process is given them before the server listens.

They are below the ports that the kernel gives to clients and to whoever asks for any port. Two runs of tests
at once have no port in common. Not for several threads at once.
"""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

__all__ = ["free_port", "free_ports"]

_FIRST, _COUNT, _RANGES = 20_000, 400, 30
_claims: list[socket.socket] = []


def free_port() -> int:
    """Return a port of this process's range that nobody listens on, and that was not given for longest."""
    while True:
        port = next(_cycle())
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def free_ports(count: int) -> list[int]:
    """Return so many of them, none twice."""
    return [free_port() for _ in range(count)]


@cache
def _cycle() -> Iterator[int]:
    """Claim a range of ports until this process ends, and give them in turns."""
    starts = [_FIRST + number * _COUNT for number in range(_RANGES)]
    random.SystemRandom().shuffle(starts)  # vLLM seeds the other
    for start in starts:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0kvtier-tests-ports-{start}")  # a name without a file, gone with the process
        except OSError:
            claim.close()
        else:
            _claims.append(claim)
            return itertools.cycle(range(start, start + _COUNT))
    raise AssertionError(f"expected at most {_RANGES} runs of tests at once on this machine")
