"""Engines as processes over each kind of server: one computes, another loads; servers die, or go silent.

A request that waits for nobody takes a few steps, however fast the machine is; one that waits for a server
steps until its deadline.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

import pytest
from tests.engine.fleet_engine import LOAD_DEADLINE
from tests.engine.test_fleet import PATIENCE, FleetEngine
from tests.tiers.server_kinds import ServerKind, serve_mooncake, serve_objects, serve_valkey

UNDELAYED = 40
"""Steps of a request of 33 tokens that waits for nobody, at most."""
WAITING = 20
"""Steps of one that waits for a deadline, at least: it looks every few milliseconds."""


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
    first = fleet.engines[0].ask(1)
    assert (first["tiers"], first["recomputed"]) == ({}, 33)
    expect_shared(fleet)


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
    waited = [answer for answer in answers if answer["steps"] >= WAITING]  # others were just held up
    delays = [answer for answer in waited if answer["seconds"] >= LOAD_DEADLINE + undelayed]
    assert len(delays) <= 1


def expect_shared(fleet: Fleet) -> None:
    """Expect that what one engine computes comes to the other.

    One that has not noticed that the server was away has connections that lead nowhere: it may miss once. On
    a busy machine a load may be late, and the tier suspended for a while.
    """
    one, other = fleet.engines
    until = time.monotonic() + PATIENCE
    while True:
        for engine in fleet.engines:
            engine.wait_for("open")
        seed = next(fleet.seeds)
        one.ask(seed)
        found = other.ask(seed)
        if found["tiers"] == {fleet.name: 32}:
            assert found["recomputed"] == 1
            return
        assert time.monotonic() < until, f"expected that a prompt is loaded, found {found}"


def test_a_dead_server_delays_one_request_once(fleet: Fleet) -> None:
    fleet.server.kill()
    expect_one_delay(fleet, fleet.engines[0])
    fleet.server.start()
    expect_shared(fleet)


def test_a_silent_server_delays_one_request_once(fleet: Fleet) -> None:
    fleet.server.send_signal(signal.SIGSTOP)
    try:
        expect_one_delay(fleet, fleet.engines[1])
    finally:
        fleet.server.send_signal(signal.SIGCONT)
    expect_shared(fleet)
