"""An engine over a disk in a process of its own, which ends only when it is killed.

    messages:     Ready -> Answered ... -> PassOver -> (the next pass) -> TierStats -> goes on answering
    on failure:   Failure, at any point

Each pass asks the same prompts after the engine's own cache was emptied. Nothing is cleaned up at the end,
just as when the kernel or a person kills an engine. If the parent process is gone, this process ends too.
This runs on the only thread of its process.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.config import KVTierConfig
from kvtier.demo.play import play, warm_up
from kvtier.demo.result import RequestResult
from kvtier.demo.setup import DemoSettings, make_engine
from kvtier.demo.workload import Turn
from kvtier.errors import KVTierError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvtier.engine import Engine
    from kvtier.offload.tiered import TieredOffloadingManager

__all__ = ["Answered", "Failure", "Orders", "PassOver", "Ready", "serve_until_killed"]

_STILL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders to the process: `kvtier` has the disk tier, `passes` are the names of the passes."""

    settings: DemoSettings
    kvtier: KVTierConfig
    prompts: dict[Turn, list[int]]
    passes: tuple[str, ...]


class Ready(NamedTuple):
    """A message: the model is loaded, and the process is warm."""


class Answered(NamedTuple):
    """A message: a request of a pass has finished."""

    name: str
    request: RequestResult


class PassOver(NamedTuple):
    """A message: all requests of a pass have finished."""

    wall_seconds: float
    cpu_seconds: float


class Failure(NamedTuple):
    """A message: the process cannot go on."""

    why: str


def serve_until_killed(connection: Connection[Any, Any], orders: Orders) -> None:
    """Run the passes and report them. This is the main function of the process."""
    logging.getLogger("kvtier").addHandler(logging.NullHandler())  # only the parent process prints
    try:
        with make_engine(orders.settings, orders.kvtier) as engine:
            _serve(engine, connection, orders)
    except (KVTierError, MemoryError, OSError, RuntimeError) as error:  # torch out of memory: RuntimeError
        with suppress(OSError):
            connection.send(Failure(str(error) or type(error).__name__))


def _serve(engine: Engine, connection: Connection[Any, Any], orders: Orders) -> None:
    manager = _manager_of(engine)
    warm_up(engine, orders.settings.workload.seed)
    connection.send(Ready())
    settings = orders.settings
    for name in orders.passes:
        engine.reset_prefix_cache()
        start, start_cpu = time.perf_counter(), time.process_time()
        answer, concurrency = settings.workload.answer, settings.concurrency
        for request in play(engine, orders.prompts, answer=answer, concurrency=concurrency):
            connection.send(Answered(name, request))
        connection.send(PassOver(time.perf_counter() - start, time.process_time() - start_cpu))
        engine.drain()
        engine.check()
    _await_written(engine, manager)
    connection.send(manager.tier_stats()[0])
    _go_on(engine, connection, next(iter(orders.prompts.values())))


def _go_on(engine: Engine, connection: Connection[Any, Any], prompt: list[int]) -> None:
    """Answer a long request, so that the kill comes in the middle of it."""
    from kvtier.engine import SamplingParams

    engine.add_request(prompt, SamplingParams(max_tokens=engine.max_model_len, ignore_eos=True))
    while engine.has_unfinished() and not connection.poll():
        engine.step()
    connection.poll(None)


def _manager_of(engine: Engine) -> TieredOffloadingManager:
    from kvtier.offload.tiered import TieredOffloadingManager

    assert engine.connector is not None
    assert engine.connector.connector_scheduler is not None
    manager = engine.connector.connector_scheduler.manager
    assert isinstance(manager, TieredOffloadingManager)
    return manager


def _await_written(engine: Engine, manager: TieredOffloadingManager) -> None:
    """Step until all rows of the pool are on disk, or none has been written for a while."""
    written, until = -1, 0.0
    while ((tier := manager.tier_stats()[0]).used or 0) < manager.stats().ready:
        now = time.monotonic()
        if tier.demoted > written:
            written, until = tier.demoted, now + _STILL_SECONDS
        elif now > until:
            return
        engine.step()
