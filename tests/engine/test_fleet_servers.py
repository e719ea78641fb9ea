"""Engines as processes over each kind of server: one computes, another loads; servers die, or go silent.

A request that waits for nobody takes a few steps, however fast the machine is; one that waits for a server
steps until its deadline.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from tests.engine.fleet_engine import LOAD_DEADLINE
from tests.engine.test_fleet import FleetEngine
from tests.tiers.mooncake_server import MooncakeServer, need_mooncake
from tests.tiers.object_server import BUCKET, REGION, S3Server, need_object_store
from tests.tiers.servers import ValkeyServer

UNDELAYED = 40
"""Steps of a request of 33 tokens that waits for nobody, at most."""


@dataclass
class ServerKind:
    """A server, the settings of a tier on it, and what befalls servers."""

    tier: dict[str, Any]
    start: Callable[[], None]
    kill: Callable[[], None]
    send_signal: Callable[[int], None]
    """SIGSTOP: it accepts and never answers."""
    environment: dict[str, str] = field(default_factory=dict)


def serve_valkey(_log: Path, stack: ExitStack) -> ServerKind:
    server = stack.enter_context(ValkeyServer())
    signals = {signal.SIGSTOP: server.suspend, signal.SIGCONT: server.resume}
    tier = {"valkey": {"url": server.url}}
    return ServerKind(tier, server.start, server.kill, lambda number: signals[signal.Signals(number)]())


def serve_objects(_log: Path, stack: ExitStack) -> ServerKind:
    need_object_store()
    server = S3Server()
    stack.callback(server.stop)
    url = f"s3://{BUCKET}/fleet"
    return ServerKind(
        {"object": {"url": url, "endpoint": server.endpoint, "region": REGION, "allow_http": True}},
        server.start,
        server.stop,
        lambda number: server.process.send_signal(number),
        {"AWS_ACCESS_KEY_ID": "test-id", "AWS_SECRET_ACCESS_KEY": "test-secret"},
    )


def serve_mooncake(log: Path, stack: ExitStack) -> ServerKind:
    need_mooncake()
    server = MooncakeServer(log, client_ttl=2)
    stack.callback(server.stop)
    return ServerKind(
        {"mooncake": {"master": server.address, "metadata": server.metadata}},
        server.start_master,
        server.stop_master,
        lambda number: server.master.send_signal(number),
    )


@dataclass
class Fleet:
    """A server and two engines."""

    name: str
    server: ServerKind
    engines: list[FleetEngine]
    seeds: Iterator[int] = field(default_factory=lambda: count(100))
    """Of prompts that nobody has seen."""


@pytest.fixture(scope="module", params=[serve_valkey, serve_objects, serve_mooncake])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        server: ServerKind = request.param(tmp_path_factory.mktemp("server") / "log", stack)
        engines = []
        for _ in range(2):
            engines.append(FleetEngine(server.tier, server.environment))
            stack.callback(engines[-1].close)
        for engine in engines:
            engine.answer()
            engine.wait_for("open")
        (name,) = server.tier
        yield Fleet(name, server, engines)


def test_one_computes_and_another_loads(fleet: Fleet) -> None:
    first, second = (engine.ask(1) for engine in fleet.engines)
    assert (first["tiers"], first["recomputed"]) == ({}, 33)
    assert (second["tiers"], second["recomputed"]) == ({fleet.name: 32}, 1)


def expect_one_delay(fleet: Fleet, engine: FleetEngine) -> None:
    """Expect that a server which is of no use delays one request by a deadline, and then nobody."""
    answers, suspended = [], []
    while len(suspended) < 3:
        answer = engine.ask(next(fleet.seeds))
        is_suspended = answer["misses"][fleet.name] == "SUSPENDED"
        assert is_suspended or not suspended
        (suspended if is_suspended else answers).append(answer)
    assert max(answer["steps"] for answer in suspended) < UNDELAYED
    undelayed = max(answer["seconds"] for answer in suspended)
    delays = [answer for answer in answers if answer["seconds"] >= LOAD_DEADLINE + undelayed]
    assert len(delays) <= 1


def expect_taken_back(fleet: Fleet) -> None:
    """Expect that what one engine computes comes to the other again.

    One that has not noticed that the server was away has connections that lead nowhere: it may miss once.
    """
    one, other = fleet.engines
    for engine in fleet.engines:
        engine.wait_for("open")
    found = []
    for seed in islice(fleet.seeds, 5):
        one.ask(seed)
        found.append(other.ask(seed)["tiers"])
        if found[-1] == {fleet.name: 32}:
            return
        for engine in fleet.engines:
            engine.wait_for("open")
    raise AssertionError(f"expected that a prompt is loaded, found {found}")


def test_a_dead_server_delays_one_request_once(fleet: Fleet) -> None:
    fleet.server.kill()
    expect_one_delay(fleet, fleet.engines[0])
    fleet.server.start()
    expect_taken_back(fleet)


def test_a_silent_server_delays_one_request_once(fleet: Fleet) -> None:
    fleet.server.send_signal(signal.SIGSTOP)
    try:
        expect_one_delay(fleet, fleet.engines[1])
    finally:
        fleet.server.send_signal(signal.SIGCONT)
    expect_taken_back(fleet)
