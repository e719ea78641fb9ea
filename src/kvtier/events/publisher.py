"""Publishers of KV events: the contract, the one that does nothing, the one over ZeroMQ, and the factory.

`ZmqEventPublisher` guarantees: batches leave in the order of `publish()`, numbered without reuse, several
under one number only where more than 64 wait; whatever a subscriber missed it gets by replay, batch by batch
while the buffer has them and as state after that. `publish()` never waits: when the thread is far behind,
batches overflow: their effect is in the state and their numbers are left out, a gap that everybody sees.
`shutdown()` returns within `SHUTDOWN_TIMEOUT`. Any thread may call the methods; one thread owns the sockets
and the states. A forked child has a closed publisher. One that is forgotten is shut down when it is
collected, or at exit.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from kvtier.errors import InputError
from kvtier.events.config import VLLM_FIELDS, KVEventsConfig
from kvtier.events.publish.endpoints import client_endpoint, offset_endpoint
from kvtier.events.publish.loop import PublisherLoop
from kvtier.events.publish.replay import END_SEQ
from kvtier.events.types import EventBatch

__all__ = [
    "EventPublisher",
    "EventPublisherFactory",
    "NullEventPublisher",
    "PublisherStats",
    "ZmqEventPublisher",
]


class EventPublisher(ABC):
    """Publishes batches of events for one data-parallel rank; every rank has its own."""

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Send a batch, in order, at least once. The batch belongs to the publisher from now on."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what waits, and end."""

    def get_publisher_config(self) -> KVEventsConfig | None:
        """Return what the publisher runs with, addresses resolved; `None` if it has no such thing."""
        return None


class NullEventPublisher(EventPublisher):
    """Publishes nothing."""

    def publish(self, events: EventBatch) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class PublisherStats:
    """What a publisher has done and holds: counts since its start, and sizes now."""

    next_seq: int
    epoch: int
    blocks: int
    digest: int
    queued: int
    buffered: int
    buffered_bytes: int
    ghosts: int
    sessions: int
    sent: int
    joined: int
    events: int
    filtered: int
    unencodable: int
    left_out: int
    heartbeats: int
    overflowed: int
    snapshots: int
    errors: int
    requests: int = 0
    malformed: int = 0
    refused: int = 0
    replayed: int = 0
    stalled: int = 0
    gone: int = 0
    denied: int = 0


class ZmqEventPublisher(EventPublisher):
    """Publishes over a PUB socket and answers replay requests on a ROUTER, from a thread of its own."""

    SHUTDOWN_TIMEOUT: ClassVar[float] = 1.0
    END_SEQ: ClassVar[bytes] = END_SEQ

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str | None = None,
        replay_endpoint: str | None = None,
        buffer_steps: int | None = None,
        hwm: int | None = None,
        max_queue_size: int | None = None,
        topic: str | None = None,
        config: KVEventsConfig | None = None,
    ) -> None:
        """Open the sockets and start.

        `config` says all that is not said here, `KVEventsConfig` what the names mean.
        """
        super().__init__(data_parallel_rank)
        said: dict[str, Any] = {
            "endpoint": endpoint,
            "replay_endpoint": replay_endpoint,
            "buffer_steps": buffer_steps,
            "hwm": hwm,
            "max_queue_size": max_queue_size,
            "topic": topic,
        }
        given = {name: value for name, value in said.items() if value is not None}
        config = replace(config or KVEventsConfig(), enable_kv_cache_events=True, publisher="zmq", **given)
        self._loop = loop = PublisherLoop(config, data_parallel_rank)
        self._config = replace(config, endpoint=loop.endpoint, replay_endpoint=loop.replay_endpoint)
        self.endpoint = client_endpoint(loop.endpoint)
        self.replay_endpoint = (
            None if loop.replay_endpoint is None else client_endpoint(loop.replay_endpoint)
        )
        self._outbox = loop.outbox
        self._end = weakref.finalize(self, loop.stop, self.SHUTDOWN_TIMEOUT)
        loop.start()

    def publish(self, events: EventBatch) -> None:
        """Hand a batch over; never waits. Raises `RuntimeError` after `shutdown()`.

        A batch that names no rank is of the publisher's own, which the thread writes into it.
        """
        outbox = self._outbox  # one call less than to ask it: it is cold when an engine comes to it
        queue = outbox.queue
        if len(queue) < outbox.room:
            queue.append(events)
        else:
            outbox.put_aside(events)
        if outbox.is_asleep:
            outbox.wake()

    def shutdown(self) -> None:
        """Send what waits as far as `SHUTDOWN_TIMEOUT` goes, and close everything.

        A second call does nothing.
        """
        self._end()

    def get_publisher_config(self) -> KVEventsConfig:
        """Return what the publisher runs with.

        Addresses are this rank's, and have the port that the system gave them.
        """
        return self._config

    def stats(self) -> PublisherStats:
        """Return what the publisher has done and holds; numbers of one moment each, not all of the same."""
        loop = self._loop
        sender, replay = loop.sender, loop.replay
        return PublisherStats(
            next_seq=sender.next_seq,
            epoch=sender.epoch,
            blocks=sender.blocks,
            digest=sender.digest,
            queued=len(loop.outbox),
            buffered=len(sender.ring),
            buffered_bytes=sender.ring.bytes,
            ghosts=sender.ghosts,
            overflowed=loop.outbox.overflowed,
            errors=loop.errors,
            sessions=0 if replay is None else len(replay),
            denied=0 if loop.gate is None else loop.gate.denied,
            **sender.counters,
            **({} if replay is None else replay.counters),
        )

    def flush(self) -> None:
        """Wait until all that was published so far is sent; `TimeoutError` after a minute."""
        self._loop.run(_nothing)

    def check(self) -> None:
        """Raise `IntegrityError` where anything inside is broken; waits for the thread."""
        self._loop.check()

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """Return the address that a data-parallel rank has."""
        return offset_endpoint(endpoint, data_parallel_rank)


def _nothing() -> None:
    pass


_OURS = {field.name for field in fields(KVEventsConfig)} - {
    "enable_kv_cache_events",
    "publisher",
    *VLLM_FIELDS,
}


class EventPublisherFactory:
    """Makes publishers by name."""

    _registry: ClassVar[dict[str, Callable[..., EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": ZmqEventPublisher,
    }

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Add a kind of publisher. A name that exists raises `KeyError`."""
        if name in cls._registry:
            raise KeyError(f"publisher {name!r} is already registered")
        cls._registry[name] = ctor

    @classmethod
    def create(cls, config: Any | None, data_parallel_rank: int = 0) -> EventPublisher:
        """Make the publisher that a config asks for; ours or an engine's own with the same fields.

        The constructor is given the rank and the fields that vLLM's config has; and as `config` all of it,
        if a field that is only ours is not at its default: it need not know those.
        """
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            return NullEventPublisher()
        ctor = cls._registry.get(config.publisher)
        if ctor is None:
            raise InputError(
                f"unknown event publisher {config.publisher!r}: expected one of {', '.join(cls._registry)}"
            )
        given = {name: getattr(config, name) for name in VLLM_FIELDS}
        defaults = KVEventsConfig()
        if isinstance(config, KVEventsConfig) and any(
            getattr(config, n) != getattr(defaults, n) for n in _OURS
        ):
            given["config"] = config
        return ctor(data_parallel_rank=data_parallel_rank, **given)
