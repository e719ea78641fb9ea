"""Every kind of server that a tier can be on, with what befalls servers: one interface for tests of all."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tiers.mooncake_server import MooncakeServer, need_mooncake
from tests.tiers.object_server import BUCKET, REGION, S3Server, need_object_store
from tests.tiers.servers import ValkeyServer, send_signal

__all__ = ["ServerKind", "serve_mooncake", "serve_mooncake_memory", "serve_objects", "serve_valkey"]


@dataclass
class ServerKind:
    """A server, the settings of a tier on it, and what befalls servers."""

    tier: dict[str, Any]
    start: Callable[[], None]
    kill: Callable[[], None]
    send_signal: Callable[[int], None]
    """SIGSTOP: it accepts and never answers."""
    num_rows: Callable[[], int]
    """Counts the rows that are there, and whole."""
    environment: dict[str, str] = field(default_factory=dict)
    empty: Callable[[], None] | None = None
    """Has it forget all rows, if there is a quicker way than a kill and a start."""


def _num_rows(names: list[str]) -> int:
    return sum("/probe" not in name for name in names)


def serve_valkey(_log: Path, stack: ExitStack) -> ServerKind:
    server = stack.enter_context(ValkeyServer())
    signals = {signal.SIGSTOP: server.suspend, signal.SIGCONT: server.resume}
    tier = {"valkey": {"url": server.url}}
    return ServerKind(
        tier,
        server.start,
        server.kill,
        lambda number: signals[signal.Signals(number)](),
        lambda: int(server.say("DBSIZE")[1:]),
    )


def serve_objects(_log: Path, stack: ExitStack) -> ServerKind:
    need_object_store()
    server = S3Server()
    stack.callback(server.stop)
    url = f"s3://{BUCKET}/fleet"
    return ServerKind(
        {"object": {"url": url, "endpoint": server.endpoint, "region": REGION, "allow_http": True}},
        server.start,
        server.stop,
        lambda number: send_signal(server.process, number),
        lambda: _num_rows(server.list_names("fleet")),
        {"AWS_ACCESS_KEY_ID": "test-id", "AWS_SECRET_ACCESS_KEY": "test-secret"},
        server.forget,
    )


def serve_mooncake(log: Path, stack: ExitStack) -> ServerKind:
    """A store whose memory lives: it is given up by nobody, however late a busy machine lets it say so."""
    need_mooncake()
    server = MooncakeServer(log, client_ttl=60)
    stack.callback(server.stop)
    return ServerKind(
        {"mooncake": {"master": server.address, "metadata": server.metadata}},
        server.start_master,
        server.stop_master,
        lambda number: send_signal(server.master, number),
        lambda: _num_rows(server.list_names()),
    )


def serve_mooncake_memory(log: Path, stack: ExitStack) -> ServerKind:
    """A store whose master lives: what befalls servers befalls the process with memory."""
    need_mooncake()
    server = MooncakeServer(log, client_ttl=2)
    stack.callback(server.stop)
    return ServerKind(
        {"mooncake": {"master": server.address, "metadata": server.metadata}},
        server.start_giver,
        server.stop_giver,
        lambda number: send_signal(server.giver, number),
        lambda: _num_rows(server.list_names()),
    )
