"""The indexer's inside: which publishers are followed for which model, and one index per model.

One thread follows all publishers and applies what they say. `register` and `unregister` come from other threads, and so do
questions. A lock guards the list of registrations; each index has its own.

A publisher belongs to a *group*: a model, and within it a routing group. Groups know nothing of each other. A *worker* is
an instance and a data-parallel rank: a batch's own rank counts, else that of the registration.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

from kvtier.errors import InputError, KVTierError
from kvtier.events.curve import CurveClient
from kvtier.events.follow.link import Source
from kvtier.events.subscriber import Limits, Subscriber
from kvtier.events.updates import Received, Reset, SourceStatus, State, StateChanged, Update
from kvtier.index.prefix import PrefixIndex

__all__ = ["Conflict", "Group", "GroupKey", "NotFound", "Registration", "Service", "Settings", "Worker"]

logger = logging.getLogger(__name__)

_SCHEMES = ("tcp://", "ipc://")
_AT_ONCE = 64
"""How many batches are applied before questions get a turn."""


class GroupKey(NamedTuple):
    """The publishers that one index follows."""

    model: str
    routing_group: str = "default"


class Worker(NamedTuple):
    """Who holds blocks: an instance as routers call it, and one of its ranks."""

    instance: str
    rank: int

    @property
    def name(self) -> str:
        """What the index calls it."""
        return f"{self.rank}:{self.instance}"

    @classmethod
    def of(cls, name: str) -> Worker:
        """Return the worker of that name."""
        rank, _, instance = name.partition(":")
        return cls(instance, int(rank))


@dataclass(frozen=True, slots=True)
class Settings:
    """What every index of a service is like. `budget` is per group."""

    keys: Literal["engine", "xxh3"] = "xxh3"
    seed: str = ""
    budget: int = 1 << 30
    form: str | None = None
    counting: Literal["set", "count"] = "count"
    max_groups: int = 64
    max_sources: int = 4096
    max_ranks: int = 64
    """How many ranks one publisher may speak for."""
    curve: CurveClient | None = None
    limits: Limits | None = None


@dataclass(slots=True)
class Registration:
    """A publisher that is followed."""

    group: GroupKey
    instance_id: int | str
    rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    state: State = State.REPAIRING
    reason: str = "not heard of yet"
    ranks: set[int] = field(default_factory=set)

    @property
    def source(self) -> str:
        """What the subscriber calls it."""
        return "\0".join((*self.group, str(self.instance_id), str(self.rank)))

    def worker(self, rank: int | None = None) -> Worker:
        """Return the worker that a batch with this rank speaks of."""
        return Worker(str(self.instance_id), self.rank if rank is None else rank)


@dataclass(frozen=True, slots=True)
class Group:
    """An index, and the block size that all its publishers have."""

    index: PrefixIndex
    block_size: int


class NotFound(InputError):
    """There is nothing of that name."""


class Conflict(InputError):
    """It contradicts what is there already."""


class Service:
    """Follows publishers and answers questions about them. `close()` ends it."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.failure: str | None = None
        self.ignored = 0  # batches that could not be applied
        self._lock = threading.Lock()
        self._groups: dict[GroupKey, Group] = {}
        self._sources: dict[str, Registration] = {}
        probe = self._new_group(1, budget=1 << 20).index
        if self.settings.form is not None:  # without a wish, indexes answer at once and are compiled meanwhile
            probe.warm_up()
        self._subscriber: Subscriber[Any] = Subscriber(decode=probe.decoder(), limits=self.settings.limits)
        self._thread = threading.Thread(target=self._follow, name="kvtier-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Follow nobody any more. Waits for the thread."""
        self._subscriber.close()
        self._thread.join()

    # -- registrations -----------------------------------------------------------------------------------------------------

    def register(self, registration: Registration, block_size: int) -> None:
        """Follow a publisher. `Conflict` where it, or another block size, is there already."""
        for endpoint in (registration.endpoint, registration.replay_endpoint):
            if endpoint is not None and (not endpoint.startswith(_SCHEMES) or "*" in endpoint):
                raise InputError(f"endpoint: expected an address like tcp://host:5557, got {endpoint[:200]!r}")
        with self._lock:
            group = self._group_for(registration, block_size)
            self._subscriber.add(self._source_of(registration))
            self._sources[registration.source] = registration
            self._groups[registration.group] = group

    def _group_for(self, new: Registration, block_size: int) -> Group:
        """Return the group that a publisher belongs to, or would make."""
        if new.source in self._sources:
            raise Conflict(f"instance {new.instance_id} dp_rank {new.rank} already registered")
        if len(self._sources) >= self.settings.max_sources:
            raise Conflict(f"expected at most {self.settings.max_sources} registrations: unregister some first")
        group = self._groups.get(new.group)
        if group is not None and group.block_size != block_size:
            where = f"model={new.group.model} routing_group={new.group.routing_group}"
            raise Conflict(f"block_size mismatch for {where}: existing={group.block_size}, requested={block_size}")
        if group is None and len(self._groups) >= self.settings.max_groups:
            raise Conflict(f"expected at most {self.settings.max_groups} models and routing groups")
        return group or self._new_group(block_size)

    def _new_group(self, block_size: int, budget: int | None = None) -> Group:
        wanted = self.settings
        index = PrefixIndex(
            keys=wanted.keys,
            block_size=block_size,
            budget=wanted.budget if budget is None else budget,
            form=wanted.form or "auto",
            seed=wanted.seed,
            counting=wanted.counting,
        )
        return Group(index, block_size)

    def _source_of(self, new: Registration) -> Source:
        return Source(new.source, new.endpoint, new.replay_endpoint, new.topic, self.settings.curve)

    def unregister(
        self, instance: str, model: str, routing_group: str | None = None, rank: int | None = None
    ) -> list[Registration]:
        """Follow an instance no more, or one rank of it, and forget what it holds; return what was registered."""
        with self._lock:
            gone = [
                each
                for each in self._sources.values()
                if (str(each.instance_id), each.group.model) == (instance, model)
                and routing_group in (None, each.group.routing_group)
                and rank in (None, each.rank)
            ]
            if not gone:
                raise NotFound(f"instance {instance} not found" + (f" with dp_rank {rank}" if rank is not None else ""))
            for each in gone:
                self._forget(each)
            return gone

    def _forget(self, gone: Registration) -> None:
        self._subscriber.remove(gone.source)
        del self._sources[gone.source]
        if not any(each.group == gone.group for each in self._sources.values()):
            del self._groups[gone.group]
            return
        for rank in gone.ranks:
            self._groups[gone.group].index.remove_worker(gone.worker(rank).name)

    # -- the following thread ----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while updates := self._subscriber.poll():
                for _, run in groupby(updates, _run_of):
                    self._apply(list(run))
        except Exception as error:  # the top of the thread: the answers must say that they are no longer true
            logger.exception("the index follows nobody any more")
            self.failure = f"{type(error).__name__}: {error}"

    def _apply(self, run: list[Any]) -> None:
        """Apply consecutive updates of one kind and one source, batches of one rank."""
        update: Update = run[-1]
        with self._lock:
            source = self._sources.get(update.source)
            if source is None:
                return  # unregistered meanwhile
            index = self._groups[source.group].index
            if isinstance(update, Received):
                self._receive(source, index, [each.batch for each in run])
            elif isinstance(update, Reset):
                for rank in source.ranks:
                    index.clear(source.worker(rank).name)
            elif isinstance(update, StateChanged):
                source.state, source.reason = update.state, update.reason

    def _receive(self, source: Registration, index: PrefixIndex, batches: list[Any]) -> None:
        rank = source.rank if batches[0].data_parallel_rank is None else batches[0].data_parallel_rank
        if rank not in source.ranks:
            if rank < 0 or len(source.ranks) >= self.settings.max_ranks:
                self.ignored += len(batches)
                return
            source.ranks.add(rank)
        try:
            for start in range(0, len(batches), _AT_ONCE):
                index.apply_all(source.worker(rank).name, batches[start : start + _AT_ONCE])
        except KVTierError as error:
            self.ignored += len(batches)
            logger.warning("batches of %r were not applied: %s", source.source, error)

    # -- questions ---------------------------------------------------------------------------------------------------------

    def group(self, key: GroupKey) -> Group:
        """Return a group. `NotFound` where nobody is registered for it."""
        with self._lock:
            try:
                return self._groups[key]
            except KeyError:
                where = f"model={key.model} routing_group={key.routing_group}"
                raise NotFound(f"no indexer for {where}") from None

    def groups(self) -> dict[GroupKey, Group]:
        """Return all groups."""
        with self._lock:
            return dict(self._groups)

    def registrations(self, group: GroupKey | None = None) -> list[Registration]:
        """Return who is followed, in one group or in all."""
        with self._lock:
            return [each for each in self._sources.values() if group in (None, each.group)]

    def status(self, registration: Registration) -> SourceStatus | None:
        """Return how a publisher's stream fares, `None` where it is no longer followed."""
        try:
            return self._subscriber.status(registration.source)
        except InputError:
            return None

    def states(self, key: GroupKey) -> Iterator[tuple[Worker, State]]:
        """Yield each worker of a group, and how far its picture can be trusted.

        That is what its publisher's stream says, unless blocks of it found no room, or nobody follows any more.
        """
        incomplete = self.group(key).index.incomplete()
        for each in self.registrations(key):
            for worker in map(each.worker, sorted(each.ranks or {each.rank})):
                trusted = self.failure is None and (not incomplete or worker.name not in incomplete)
                yield worker, each.state if trusted else State.DEGRADED

    def check(self) -> None:
        """Raise `IntegrityError` where an index contradicts itself."""
        for group in self.groups().values():
            group.index.check()


def _run_of(update: Update) -> tuple[Any, ...]:
    """Return what updates that can be applied together have in common."""
    rank = update.batch.data_parallel_rank if isinstance(update, Received) else None
    return type(update), update.source, rank
