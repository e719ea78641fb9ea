"""Publishers of KV events: the contract, one that does nothing, one over ZeroMQ, and the factory.

`ZmqEventPublisher` guarantees: batches leave in the order of `publish()`, under numbers that are never
reused; several share a number only if more than 64 wait. A subscriber can replay everything it missed,
batch by batch while the buffer has the batches, and as state after that. `publish()` never waits: if the
thread is far behind, it does not send the batches that wait; the state has their effect and their numbers
are skipped, so every consumer sees a gap. If the queue is full, batches are lost, and consumers are told to
forget everything. `shutdown()` returns within `SHUTDOWN_TIMEOUT`. Any thread may call the methods; one
thread owns the sockets and the states. In a forked child the publisher is closed. A publisher that is not
shut down is closed when it is collected, or at exit.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from kvtier.errors import InputError
from kvtier.events.config import VLLM_FIELDS, KVEventsConfig, client_endpoint, offset_endpoint
from kvtier.events.publish.loop import PublisherLoop
from kvtier.events.publish.replay import END_SEQ
from kvtier.events.types import EventBatch


class EventPublisher(ABC):
    """Publishes batches of events for one data-parallel rank; every rank has its own."""

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Send a batch, in order, at least once. The batch belongs to the publisher from now on."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send the waiting batches, and end."""

    def get_publisher_config(self) -> KVEventsConfig | None:
        """Return the publisher's config, with resolved addresses; `None` if it has none."""
        return None


class NullEventPublisher(EventPublisher):
    """Publishes nothing."""

    def publish(self, events: EventBatch) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class PublisherStats:
    """The counts of a publisher since its start, and its sizes now."""

    next_seq: int
    epoch: int
    blocks: int
    digest: int
    queued: int
    buffered: int
    buffered_bytes: int
    ancestors: int
    sessions: int
    sent: int
    joined: int
    events: int
    filtered: int
    unencodable: int
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
    """Publishes over a PUB socket and answers replay requests on a ROUTER, on a thread of its own."""

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

        `config` gives all values that are not given here; `KVEventsConfig` explains the names.
        """
        super().__init__(data_parallel_rank)
        arguments: dict[str, Any] = {
            "endpoint": endpoint,
            "replay_endpoint": replay_endpoint,
            "buffer_steps": buffer_steps,
            "hwm": hwm,
            "max_queue_size": max_queue_size,
            "topic": topic,
        }
        given = {name: value for name, value in arguments.items() if value is not None}
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

        A batch without a rank gets the publisher's own rank; the thread writes it into the batch.
        """
        outbox = self._outbox  # one call less than a method of the outbox: the cache is cold here
        queue = outbox.queue
        if len(queue) < outbox.room:
            queue.append(events)
        else:
            outbox.queue_or_lose(events)
        if outbox.is_asleep:
            outbox.wake()

    def shutdown(self) -> None:
        """Send the waiting batches while `SHUTDOWN_TIMEOUT` lasts, and close everything.

        A second call does nothing.
        """
        self._end()

    def get_publisher_config(self) -> KVEventsConfig:
        """Return the publisher's config.

        Addresses are those of this rank, with the port that the system chose.
        """
        return self._config

    def stats(self) -> PublisherStats:
        """Return counts and sizes. The values may be from slightly different moments."""
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
            ancestors=sender.ancestors,
            errors=loop.errors,
            sessions=0 if replay is None else len(replay),
            denied=0 if loop.gate is None else loop.gate.denied,
            **sender.counters,
            **({} if replay is None else replay.counters),
        )

    def flush(self) -> None:
        """Wait until everything published so far is sent; `TimeoutError` after a minute."""
        self._loop.run(_nothing)

    def check(self) -> None:
        """Raise `IntegrityError` if an invariant is broken; waits for the thread."""
        self._loop.check()

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """Return the address of a data-parallel rank."""
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
        """Add a kind of publisher. `KeyError` if the name exists."""
        if name in cls._registry:
            raise KeyError(f"publisher {name!r} is already registered")
        cls._registry[name] = ctor

    @classmethod
    def create(cls, config: Any | None, data_parallel_rank: int = 0) -> EventPublisher:
        """Make the publisher that a config asks for: our config, or an engine's own with the same fields.

        The constructor gets the rank and the fields of vLLM's config. It also gets the whole config as
        `config`, but only if one of our own fields is not at its default; so a publisher need not know
        those.
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
