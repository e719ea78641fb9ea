"""A fleet: engines as processes over one Valkey server. One computes, the others load; processes and
servers die.

Where the server answers or is dead, engines have all the time of a busy machine, and what they load is
certain. Where it goes silent they have little: there a load may be late, and the tier suspended, for no
fault of the server.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from tests.engine.drive import ONE_GROUP, tokens
from tests.engine.fleet_engine import LOAD_DEADLINE, serve
from tests.tiers.servers import ValkeyServer

from kvtier.engine import SamplingParams
from kvtier.testing.toy_model import ToyModel

PATIENCE = 60.0


_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.engine.fleet_engine"])  # one import for all


class FleetEngine:
    """An engine in a process of its own."""

    def __init__(
        self,
        tier: dict[str, Any],
        environment: dict[str, str] | None = None,
        load_deadline: float = LOAD_DEADLINE,
    ) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        what = tier, environment or {}, load_deadline, theirs
        self.process = _PROCESSES.Process(target=serve, args=what, daemon=True)
        self.process.start()
        theirs.close()
        self.number = 0

    def order(self, **order: Any) -> None:
        """Tell it to do something."""
        self._pipe.send(order)

    def answer(self) -> dict[str, Any]:
        """Wait for what has come of it; empty if it has died."""
        try:
            answer: dict[str, Any] = self._pipe.recv()
        except EOFError:
            return {}
        return answer

    def do(self, **order: Any) -> dict[str, Any]:
        self.order(**order)
        return self.answer()

    def begin(self, seed: int) -> None:
        """Begin a request with the prompt of a seed."""
        self.number += 1
        self.order(ask=tokens(33, seed=seed), name=f"request {self.number}")

    def end(self, seed: int) -> dict[str, Any]:
        """Wait for its end, and expect the tokens of the model."""
        answer = self.answer()
        expected = ToyModel(ONE_GROUP).expect(tokens(33, seed=seed), SamplingParams(max_tokens=4))
        assert answer["tokens"] == expected
        return answer

    def ask(self, seed: int) -> dict[str, Any]:
        """Run a request whole."""
        self.begin(seed)
        return self.end(seed)

    def wait_for(self, state: str) -> None:
        """Let it look after its tier until that is in this state."""
        until = time.monotonic() + PATIENCE
        while (found := self.do(look=True)["state"]) != state:
            assert time.monotonic() < until, f"expected {state}, found {found}"
            time.sleep(0.05)

    def close(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)
        self.process.close()
        self._pipe.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


def run_fleet(server: ValkeyServer, engines: int, load_deadline: float) -> Iterator[list[FleetEngine]]:
    fleet = [
        FleetEngine({"valkey": {"url": server.url}}, load_deadline=load_deadline) for _ in range(engines)
    ]
    try:
        for engine in fleet:
            engine.answer()
            engine.wait_for("open")
        yield fleet
    finally:
        for engine in fleet:
            engine.close()


@pytest.fixture(scope="module")
def patient(server: ValkeyServer) -> Iterator[list[FleetEngine]]:
    """Three engines whose loads are never late; the last is there to die."""
    yield from run_fleet(server, 3, PATIENCE)


@pytest.fixture(scope="module")
def fleet(server: ValkeyServer) -> Iterator[list[FleetEngine]]:
    """Two engines that do not wait for long."""
    yield from run_fleet(server, 2, LOAD_DEADLINE)


@pytest.fixture(scope="module")
def seeds() -> Iterator[int]:
    """Of prompts that nobody has seen."""
    return count(100)


def expect_loads(reader: FleetEngine, writer: FleetEngine, seeds: Iterator[int]) -> None:
    """Expect that one loads what the other computes: not each time on a busy machine, but by and by."""
    until = time.monotonic() + PATIENCE
    while True:
        seed = next(seeds)  # what the reader has missed it has written itself
        writer.wait_for("open")
        writer.ask(seed)
        reader.wait_for("open")
        found = reader.ask(seed)["tiers"]
        if found == {"valkey": 32}:
            return
        assert time.monotonic() < until, f"expected that a prompt is loaded, found {found}"


def test_one_computes_and_another_loads(patient: list[FleetEngine]) -> None:
    first = patient[0].ask(1)
    assert (first["tiers"], first["recomputed"]) == ({}, 33)
    second = patient[1].ask(1)
    assert (second["tiers"], second["recomputed"]) == ({"valkey": 32}, 1)
    assert second["demoted"] <= 1, "what is there is not written again"


def test_both_write_the_same_rows(patient: list[FleetEngine]) -> None:
    for engine in patient[:2]:
        engine.begin(2)
    for engine in patient[:2]:
        engine.end(2)
    for engine in patient[:2]:
        engine.do(forget=True)
        assert engine.ask(2)["tiers"] == {"valkey": 32}


def test_one_dies_in_the_middle_of_a_write(patient: list[FleetEngine]) -> None:
    *others, victim = patient
    victim.do(die_writing=True)
    victim.begin(3)
    assert victim.answer() == {}
    victim.process.join(PATIENCE)
    assert victim.process.exitcode == -signal.SIGKILL
    for engine in others:
        engine.ask(3)
        engine.do(forget=True)
        again = engine.ask(3)
        assert (again["tiers"], again["recomputed"]) == ({"valkey": 32}, 1), (
            "what was missing was written anew"
        )


def test_a_server_that_dies_and_comes_back_empty(patient: list[FleetEngine], server: ValkeyServer) -> None:
    one, other, _ = patient
    one.ask(4)
    server.kill()
    for seed in (5, 6, 7, 8):
        assert one.ask(seed)["tiers"] == {}
    one.wait_for("suspended")
    server.start()
    one.wait_for("open")
    one.do(forget=True)
    again = one.ask(4)
    assert (again["tiers"], again["recomputed"]) == ({}, 33), "it is empty"
    other.wait_for("open")
    until = time.monotonic() + PATIENCE
    while True:  # a row that is still being read when it is offered is not taken: it is offered again
        one.do(forget=True)
        one.ask(4)
        other.do(forget=True)
        if other.ask(4)["tiers"] == {"valkey": 32}:
            break
        assert time.monotonic() < until, "expected that it is filled again"
        time.sleep(0.2)


def test_a_server_that_does_not_answer_and_then_does(
    fleet: list[FleetEngine], server: ValkeyServer, seeds: Iterator[int]
) -> None:
    one, other = fleet
    one.ask(9)
    server.suspend()
    try:
        for seed in (9, 10, 11, 12):  # `other` has none of them
            assert other.ask(seed)["tiers"] == {}
        other.wait_for("suspended")
    finally:
        server.resume()
    other.wait_for("open")
    expect_loads(other, one, seeds)


def test_rows_computed_during_an_outage_are_written_after_it(
    patient: list[FleetEngine], server: ValkeyServer
) -> None:
    """Nobody computes it again: it waits in the pool of who did."""
    one, other, _ = patient
    server.kill()
    for seed in (13, 14, 15, 16):
        one.ask(seed)
    one.wait_for("suspended")
    one.ask(17)
    server.start()
    until = time.monotonic() + PATIENCE
    while (told := one.do(look=True))["unwritten"] or told["state"] != "open":
        assert time.monotonic() < until, "expected that they are written"
        time.sleep(0.05)
    assert other.ask(17)["tiers"] == {"valkey": 32}
