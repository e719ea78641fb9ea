"""Whatever a client sends to the index server, the others are served, and the server does not grow.

How many requests are sent: see `test_fuzz_events.py`.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections import Counter
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from tests.fuzz.mutate import mutate
from tests.fuzz.test_fuzz_events import FRAMES, MAY_GROW, SEED, resident_bytes
from tests.unit.server_kit import IndexServer

from kvtier.index.http import HttpLimits
from kvtier.index.service import Settings

PATHS = (
    "/register",
    "/unregister",
    "/query",
    "/query_by_hash",
    "/workers",
    "/dump",
    "/health",
    "/metrics",
    "/",
    "/%00?a=b",
)
NAMES = (
    "model_name",
    "model",
    "instance_id",
    "endpoint",
    "block_size",
    "dp_rank",
    "token_ids",
    "block_hashes",
    "tenant_id",
)
VALUES: tuple[object, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        4,
        2**31,
        2**63,
        2**64,
        10**400,
        1.5,
        "",
        "m",
        "\0",
        "é" * 3,
        "x" * 5000,
        {},
        [],
        [[]],
    ),
    *(
        [1, 2, 3, 4],
        list(range(300)),
        [-1],
        [2**64],
        ["a"],
        [None],
        {"a": {"b": []}},
        "tcp://127.0.0.1:1",
        "tcp://",
        "inproc://a",
    ),
)
BODIES = [
    json.dumps(body).encode()
    for body in (
        {
            "instance_id": 1,
            "model_name": "m",
            "endpoint": "tcp://127.0.0.1:1",
            "block_size": 4,
            "dp_rank": 0,
        },
        {"instance_id": "w", "model": "m", "endpoint": "tcp://127.0.0.1:2", "block_size": 4},
        {"model_name": "m", "token_ids": list(range(64))},
        {"model_name": "m", "block_hashes": [2**63, 1, 5]},
        {"instance_id": 1, "model_name": "m"},
    )
]


def body(rng: random.Random) -> bytes:
    """Return a body: a valid one, a broken one, one of odd values, or a tower."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(BODIES)
    if kind == 1:
        return mutate(rng, BODIES)
    if kind == 2:
        return rng.choice((b"[", b'{"model_name":')) * rng.choice((3, 100_000))
    return json.dumps(
        {name: rng.choice(VALUES) for name in rng.sample(NAMES, rng.randrange(len(NAMES)))}
    ).encode()


def request(rng: random.Random) -> bytes:
    """Return a request whose head is right, nearly right, or nothing of the kind."""
    content, method, path = (
        body(rng),
        rng.choice(("POST", "POST", "POST", "GET", "HEAD", "TRACE")),
        rng.choice(PATHS),
    )
    size = rng.choice((*[len(content)] * 12, 0, len(content) - 1, -1, 2**70, "1e3"))
    extra = rng.choice(
        (
            *[""] * 9,
            "Transfer-Encoding: chunked\r\n",
            "Content-Length: 3\r\n",
            "X: " + "y" * 20_000 + "\r\n",
            ":\r\n",
        )
    )
    who = (
        rng.choice((*["localhost"] * 12, "evil.example"))
        + "\r\n"
        + rng.choice((*[""] * 12, "Origin: null\r\n"))
    )
    kind = rng.choice((*["application/json"] * 12, "text/plain"))
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {who}Content-Type: {kind}\r\n"
        f"Content-Length: {size}\r\n{extra}\r\n"
    )
    whole = head.encode() + content
    return mutate(rng, [whole]) if rng.random() < 0.1 else whole


def exchange(address: tuple[str, int], data: bytes) -> list[int]:
    """Send bytes and no more; return the statuses of what comes back."""
    with socket.create_connection(address, timeout=60) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            parts = list(iter(lambda: connection.recv(1 << 16), b""))
        except TimeoutError:
            raise
        except OSError:
            return []  # refused before all of it was sent
    return [int(status) for status in re.findall(rb"^HTTP/1\.1 (\d{3}) ", b"".join(parts), re.MULTILINE)]


@pytest.mark.timeout(3600)
def test_the_index_server_takes_anything() -> None:
    """No request fails inside the server: each is served, or refused with a reason."""
    rng, statuses, before = random.Random(SEED), Counter[int](), 0
    # Plain, since numba would be loaded at some time meanwhile, and takes more memory than may be lost.
    settings = Settings(max_sources=8, max_groups=4, budget=1 << 20, form="python")
    with IndexServer(settings=settings, limits=HttpLimits(receive_timeout=1.0, idle_timeout=1.0)) as server:
        target = urlsplit(server.url)
        for at in range(count := FRAMES // 20):
            statuses.update(exchange((target.hostname or "", target.port or 0), request(rng)))
            before = resident_bytes() if at == count // 10 else before
        assert resident_bytes() - before < MAY_GROW
        with urlopen(f"{server.url}/health", timeout=60) as reply:
            assert reply.status == 200
    assert statuses[500] == 0
    assert {200, 400, 403, 404, 405, 413, 415, 422} <= statuses.keys()
    assert statuses.total() > count // 2
