"""One engine of a fleet, as a process that does what it is told over a pipe.

`{"ask": [tokens], "name": "a"}` runs a request and answers its tokens, where its prompt came from, how many
steps and seconds it took, and why the tier did not give the rest; `{"forget": True}` empties engine and
pool; `{"die_writing": True}` has the process end, as SIGKILL does, in the middle of the next time that it
sends rows; any other order is for a step. Every answer has the state of the tier, and how many rows are yet
to be written.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from tests.engine.tier_kit import ROW, manager_of, num_unwritten, server_engine

from kvtier.engine import Engine, SamplingParams

LOAD_DEADLINE = 0.5


def serve(
    tier: dict[str, Any], environment: dict[str, str], load_deadline: float, pipe: Connection[Any, Any]
) -> None:
    """Obey until nobody gives orders any more."""
    os.environ |= environment
    with server_engine(tier, load_deadline=load_deadline) as engine, suppress(EOFError):
        pipe.send(_state(engine))
        while True:
            order = pipe.recv()
            pipe.send(_obey(engine, order, load_deadline) | _state(engine))


def _obey(engine: Engine, order: dict[str, Any], load_deadline: float) -> dict[str, Any]:
    if "die_writing" in order:
        _die_writing()
    if "forget" in order:
        engine.drain()
        engine.reset_prefix_cache()
        manager_of(engine).pool.reset_cache()
    if "ask" not in order:
        engine.step()  # looks after the tier
        return {}
    name = order["name"]
    engine.add_request(order["ask"], SamplingParams(max_tokens=4), request_id=name)
    steps, began = 0, time.monotonic()
    while engine.has_unfinished():
        outputs = engine.step()
        engine.check()
        steps += 1
    (output,) = outputs
    seconds = time.monotonic() - began
    explained = engine.explain(name)
    _settle(engine, load_deadline)
    assert output.source is not None
    assert explained is not None
    misses = {tier: miss.name for tier, miss in explained.misses.items()}
    source = {"tiers": output.source.tiers, "recomputed": output.source.recomputed}
    return {"tokens": output.token_ids, "steps": steps, "seconds": seconds, "misses": misses} | source


def _settle(engine: Engine, patience: float) -> None:
    """Step until what was offered is written, or is not going to be: nothing has moved for a second, and a
    tier that works was waited for for so long.
    """
    manager, until = manager_of(engine), time.monotonic() + patience
    engine.drain()
    while manager.has_pending_work() or (num_unwritten(engine) and manager.tiers[0].takes_rows()):
        if not manager.has_pending_work() and time.monotonic() > until:
            return
        engine.step()


def _state(engine: Engine) -> dict[str, Any]:
    (stats,) = manager_of(engine).tier_stats()
    told = {"state": stats.state, "suspended": stats.suspended, "demoted": stats.demoted}
    return told | {"unwritten": num_unwritten(engine)}


def _die_writing() -> None:
    """Have the next rows be sent by half, and nothing after that."""
    send = socket.socket.sendmsg

    def send_half(self: socket.socket, buffers: Sequence[Any], *more: Any) -> int:
        whole = b"".join(buffers)
        if len(whole) > ROW:
            send(self, [whole[: len(whole) // 2]])
            os.kill(os.getpid(), signal.SIGKILL)
        return send(self, buffers, *more)

    socket.socket.sendmsg = send_half  # type: ignore[assignment, method-assign]
