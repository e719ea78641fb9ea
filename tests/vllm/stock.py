"""The publishers that engines come with, each loaded from the engine itself, and what follows them in the
tests.

vLLM is installed. SGLang lies beside it, one folder per version: 0.5.9 sends arrays and replies without a
topic (as all do up to 0.5.19 and 0.5.21), 0.5.23 sends maps and replies with one.
"""

from __future__ import annotations

import atexit
import importlib
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zmq
from tests.chaos.stream_kit import Event, LossyLink, ModelReplica, Workload, stored

from kvtier.events import (
    DecodedBatch,
    Limits,
    Source,
    SourceStatus,
    State,
    Subscriber,
    Update,
)

PATIENCE = 30.0
LIMITS = Limits(reply_timeout=2.0, probe_interval=0.3, backoff=0.05, backoff_max=0.5)
SGLANG = ("0.5.9", "0.5.23")
STOCK = ("vllm", *(f"sglang-{version}" for version in SGLANG))

_loaded: dict[str, ModuleType] = {}


def load(name: str) -> ModuleType:
    """Return the events module of one of `STOCK`; skip the test where it is not installed."""
    if name not in _loaded:
        engine, _, version = name.partition("-")
        _loaded[name] = (
            _load_sglang(version)
            if engine == "sglang"
            else importlib.import_module("vllm.distributed.kv_events")
        )
    return _loaded[name]


def _load_sglang(version: str) -> ModuleType:
    """Import SGLang's module in packages without their `__init__`, which would import all that serving
    needs.
    """
    folder = Path(sys.prefix, "sglang", version)
    if not folder.exists():
        pytest.skip(
            f"SGLang {version} is not in {Path(sys.prefix).name}/sglang; "
            "`make test-vllm` puts it there where it can"
        )
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.utils"):
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
    try:
        return importlib.import_module("sglang.srt.disaggregation.kv_events")
    finally:
        for name in [module for module in sys.modules if module.split(".")[0] == "sglang"]:
            del sys.modules[name]  # so that another version can be loaded too


def as_engine(module: ModuleType, event: Event, **besides: object) -> Any:
    """Return the event as the engine's own class, as far as that has its fields."""
    kind = getattr(module, type(event).__name__)
    return kind(**{name: getattr(event, name, None) for name in kind.__struct_fields__} | besides)


def free_addresses() -> tuple[str, str]:
    """Return two addresses of this machine that nobody listens at."""
    with ExitStack() as stack:
        socks = [stack.enter_context(closing(zmq.Context.instance().socket(zmq.PUB))) for _ in range(2)]
        first, second = (f"tcp://127.0.0.1:{sock.bind_to_random_port('tcp://127.0.0.1')}" for sock in socks)
        return first, second


class Engine:
    """An engine's publisher, what it has published, and a link to it that loses messages when told to."""

    def __init__(self, name: str, seed: int, buffer_steps: int = 10_000) -> None:
        self.module = load(name)
        self.rng = random.Random(seed)
        self.workload = Workload(self.rng)
        self.truth = ModelReplica()
        self.newest = -1
        self.endpoint, self.replay_endpoint = free_addresses()
        self._buffer_steps = buffer_steps
        self._publisher = self._start()
        self.link = LossyLink(self.rng, self.endpoint)
        self.link.loss = 0.0

    def step(self, batches: int = 1) -> None:
        """Publish batches of random events."""
        for _ in range(batches):
            self.publish(self.workload.batch())

    def store(self, batches: int) -> None:
        """Publish batches of one new block each; unlike random events, they never clear anything."""
        for _ in range(batches):
            self.publish([stored([self.rng.getrandbits(62)])])

    def publish(self, events: list[Event]) -> None:
        """Publish a batch."""
        self.truth.apply_events(events)
        self.publish_own([as_engine(self.module, event) for event in events])

    def publish_own(self, events: list[Any], rank: int | None = None) -> None:
        """Publish a batch of the engine's own events."""
        self.newest += 1
        self._publisher.publish(self.module.KVEventBatch(time.time(), events, rank))

    def restart(self) -> None:
        """Start the publisher anew at the same addresses."""
        self._stop()
        self.workload.restart()
        self.truth, self.newest = ModelReplica(), -1
        self._publisher = self._start()

    def _start(self) -> Any:
        """Start a publisher; an address that was just let go may need a moment."""
        wild = [address.replace("127.0.0.1", "*") for address in (self.endpoint, self.replay_endpoint)]
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return self.module.ZmqEventPublisher(0, *wild, self._buffer_steps, topic="kv-events")
            except zmq.ZMQError:
                assert time.monotonic() < until, "the address stays in use"

    def _stop(self) -> None:
        atexit.unregister(self._publisher.shutdown)  # a second one would wait a second for nobody
        self._publisher.shutdown()

    def close(self) -> None:
        self._stop()
        self.link.close()


class Consumer:
    """A subscriber, its updates, and the replica that they give."""

    def __init__(self, endpoint: str, replay_endpoint: str | None) -> None:
        source = Source("engine", endpoint, replay_endpoint, topic="kv")
        self.subscriber: Subscriber[DecodedBatch] = Subscriber([source], limits=LIMITS)
        self.updates: list[Update] = []
        self.replica = ModelReplica()

    @property
    def status(self) -> SourceStatus:
        return self.subscriber.status("engine")

    def serve(self) -> None:
        new = self.subscriber.poll(0.002)
        self.updates += new
        self.replica.apply(new)

    def is_degraded_at(self, seq: int) -> bool:
        return self.status.state is State.DEGRADED and self.status.seq == seq

    def says_exact_of(self, engine: Engine) -> bool:
        return self.status.state is State.EXACT and self.status.seq == engine.newest

    def close(self) -> None:
        self.subscriber.check()
        self.subscriber.close()


def serve_until(engine: Engine, consumers: list[Consumer], done: Callable[[], bool]) -> None:
    """Move what is under way until `done`."""
    deadline = time.monotonic() + PATIENCE
    while not done():
        engine.link.pump()
        for consumer in consumers:
            consumer.serve()
        assert time.monotonic() < deadline, [consumer.status for consumer in consumers]
