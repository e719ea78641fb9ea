"""A fleet: engines as processes over one Valkey server. One computes, the others load; processes and
servers die."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.engine.drive import ONE_GROUP, tokens
from tests.engine.fleet_engine import serve
from tests.tiers.servers import ValkeyServer

from kvtier.engine import SamplingParams
from kvtier.testing.toy_model import ToyModel

PATIENCE = 60.0


_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.engine.fleet_engine"])  # one import for all


class FleetEngine:
    """An engine in a process of its own."""

    def __init__(self, tier: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=serve, args=(tier, environment or {}, theirs), daemon=True)
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


@pytest.fixture(scope="module")
def fleet(server: ValkeyServer) -> Iterator[list[FleetEngine]]:
    """Three engines; the last is there to die."""
    engines = [FleetEngine({"valkey": {"url": server.url}}) for _ in range(3)]
    try:
        assert [engine.answer()["state"] for engine in engines] == ["open"] * 3
        yield engines
    finally:
        for engine in engines:
            engine.close()


def test_one_computes_and_another_loads(fleet: list[FleetEngine]) -> None:
    first = fleet[0].ask(1)
    assert (first["tiers"], first["recomputed"]) == ({}, 33)
    second = fleet[1].ask(1)
    assert (second["tiers"], second["recomputed"]) == ({"valkey": 32}, 1)
    assert second["demoted"] <= 1, "what is there is not written again"


def test_both_write_the_same_rows(fleet: list[FleetEngine]) -> None:
    for engine in fleet[:2]:
        engine.begin(2)
    for engine in fleet[:2]:
        engine.end(2)
    for engine in fleet[:2]:
        engine.do(forget=True)
        assert engine.ask(2)["tiers"] == {"valkey": 32}


def test_one_dies_in_the_middle_of_a_write(fleet: list[FleetEngine]) -> None:
    *others, victim = fleet
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


def test_a_server_that_dies_and_comes_back_empty(fleet: list[FleetEngine], server: ValkeyServer) -> None:
    one, other, _ = fleet
    one.ask(4)
    server.kill()
    for seed in (5, 6, 7, 8):
        assert one.ask(seed)["tiers"] == {}
    assert one.do(look=True)["state"] == "suspended"
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


def test_a_server_that_does_not_answer_and_then_does(fleet: list[FleetEngine], server: ValkeyServer) -> None:
    one, other, _ = fleet
    one.ask(9)
    server.suspend()
    try:
        for seed in (9, 10, 11, 12):  # `other` has none of them
            assert other.ask(seed)["tiers"] == {}
        assert other.do(look=True)["state"] == "suspended"
    finally:
        server.resume()
    other.wait_for("open")
    other.do(forget=True)
    assert other.ask(9)["tiers"] == {"valkey": 32}


def test_what_was_computed_while_a_server_was_away_is_written_when_it_is_back(
    fleet: list[FleetEngine], server: ValkeyServer
) -> None:
    """Nobody computes it again: it waits in the pool of who did."""
    one, other, _ = fleet
    server.kill()
    for seed in (13, 14, 15, 16):
        one.ask(seed)
    assert one.do(look=True)["state"] == "suspended"
    one.ask(17)
    before = one.do(look=True)["demoted"]
    server.start()
    one.wait_for("open")
    counts = [before]
    until = time.monotonic() + PATIENCE
    while counts[-1] == before or len(set(counts[-8:])) > 1:  # until no more of them come
        assert time.monotonic() < until, "expected that they are written"
        time.sleep(0.2)
        counts.append(one.do(look=True)["demoted"])
    other.wait_for("open")
    assert other.ask(17)["tiers"] == {"valkey": 32}
