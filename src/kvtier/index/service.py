"""The indexer without HTTP: the followed publishers of each model, and one index per model.

One thread follows all publishers and applies their updates. Registrations and questions come from other
threads. A lock guards both, so an answer and its state belong together; each index has a lock of its own.

A publisher belongs to a *group*: a model, and within it a routing group. Groups are independent. A *worker*
is an instance and a data-parallel rank, and exactly one registration represents it. A registration with a
rank represents that rank, whatever its batches say; a registration without one represents the ranks that
its batches name.

Anything refused between the stream and an answer makes the worker's state `degraded`, with a reason, is
logged once, and is counted.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any, NamedTuple

from kvtier.errors import InputError, KVTierError, LogLimit
from kvtier.events.curve import CurveClient
from kvtier.events.follow.link import Source
from kvtier.events.subscriber import Subscriber
from kvtier.events.updates import Limits, Received, Reset, SourceStatus, State, StateChanged, Update
from kvtier.index.base import Hashes, Keys, Match
from kvtier.index.prefix import Counting, PrefixIndex
from kvtier.index.sample import Pace, PromptSample

logger = logging.getLogger(__name__)

_SCHEMES = ("tcp://", "ipc://")
_AT_ONCE = 64
"""How many batches are applied before questions get a turn."""
_BEST_FIRST = (State.EXACT, State.REPAIRING, State.DEGRADED)


class GroupKey(NamedTuple):
    """The key of a group: the publishers of one index."""

    model: str
    routing_group: str = "default"


class Worker(NamedTuple):
    """A holder of blocks: an instance, named as by routers, and one of its ranks."""

    instance: str
    rank: int

    @property
    def name(self) -> str:
        """The worker's name in the index."""
        return f"{self.rank}:{self.instance}"

    @classmethod
    def of(cls, name: str) -> Worker:
        """Return the worker of that name."""
        rank, _, instance = name.partition(":")
        return cls(instance, int(rank))


class Confidence(NamedTuple):
    """How far the data about a worker can be trusted, and why not."""

    state: State
    reason: str = ""


_NOT_HEARD = Confidence(State.REPAIRING, "not heard of yet")


def worst(confidences: list[Confidence]) -> Confidence:
    """Return the first of the worst."""
    return max(confidences, key=lambda confidence: _BEST_FIRST.index(confidence.state))


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of every index of a service, and their defaults, as of `PrefixIndex`.

    `budget` is per group.
    """

    keys: Keys = "xxh3"
    seed: str = ""
    budget: int = 1 << 30
    form: str | None = None
    counting: Counting = "count"
    max_groups: int = 64
    max_sources: int = 4096
    max_ranks: int = 64
    """The most ranks that one publisher may represent."""
    curve: CurveClient | None = None
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class Registration:
    """A publisher to follow. Its batches name a missing `rank`, the first store a missing `block_size`."""

    group: GroupKey
    instance_id: int | str
    rank: int | None
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    block_size: int | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The unique key of a registration in its group."""
        return str(self.instance_id), self.rank or 0

    def is_of(self, instance: str, model: str, routing_group: str | None) -> bool:
        """Return whether this is a registration of an instance for a model, in a group or in any."""
        in_group = routing_group in (None, self.group.routing_group)
        return in_group and (str(self.instance_id), self.group.model) == (instance, model)

    def worker(self, rank: int) -> Worker:
        """Return one of the instance's workers."""
        return Worker(str(self.instance_id), rank)


@dataclass(slots=True, eq=False)
class Subscription:
    """A registration and its current status. Guarded by the service's lock."""

    registration: Registration
    source: str
    """Its name in the subscriber. Names are never reused, so no late update of another source is applied."""
    confidence: Confidence = _NOT_HEARD
    ranks: set[int] = field(default_factory=set)
    """The ranks it represents. Without a rank: those that its batches named, and 0 before any did."""
    batch_rank: int | None = None
    """The rank in the batches of a registration that has a rank."""
    refusal: str = ""
    """Why batches were not applied, since the replica last began again."""
    ignored: int = 0
    """The number of batches that were not applied."""
    log_limit: LogLimit = field(default_factory=LogLimit)

    @property
    def workers(self) -> list[Worker]:
        """Return the workers it represents."""
        return [self.registration.worker(rank) for rank in sorted(self.ranks or {0})]

    def represents_only(self, rank: int) -> bool:
        """Return whether this registration has no rank and represents this one.

        `Conflict` if it represents others too.
        """
        ranks = self.ranks or {0}
        if self.registration.rank is not None or rank not in ranks:
            return False
        if len(ranks) > 1:
            of, all_ranks = self.registration.instance_id, ", ".join(map(str, sorted(ranks)))
            raise Conflict(
                f"instance {of} is registered without dp_rank, "
                f"and its one stream speaks for ranks {all_ranks}: "
                f"unregister it without dp_rank, or register each rank's endpoint with one"
            )
        return True


@dataclass(slots=True)
class Group:
    """An index, the publishers that feed it, and some prompts for finding shared prefixes."""

    index: PrefixIndex
    sample: PromptSample
    members: dict[str, Subscription] = field(default_factory=dict)
    """By the name of their source."""

    def representative(self, worker: Worker) -> Subscription | None:
        """Return the subscription that represents a worker: exactly one does, or none."""
        for member in self.members.values():
            if worker.rank in member.ranks and str(member.registration.instance_id) == worker.instance:
                return member
        return None


class NotFound(InputError):
    """The named thing does not exist."""


class Conflict(InputError):
    """The request contradicts the existing registrations."""


class Service:
    """Follows publishers and answers questions about them. `close()` ends it."""

    def __init__(self, settings: Settings | None = None) -> None:
        """Compile the index's loops, which takes some ten seconds once on a machine, and start to follow."""
        self.settings = settings or Settings()
        self.failure: str | None = None
        self.ignored = 0  # batches that could not be applied, over all registrations so far
        self._lock = threading.Lock()
        self._groups: dict[GroupKey, Group] = {}
        self._sources: dict[str, Subscription] = {}  # the members of all groups
        self._numbers = count()
        self._pace = Pace()
        sample = self._new_index(1, budget=1 << 20)
        if sample.form == "numba":
            sample.warm_up()  # before any publisher is followed: no batch waits for the compiler
        self._subscriber: Subscriber[Any] = Subscriber(decode=sample.decoder(), limits=self.settings.limits)
        self._thread = threading.Thread(target=self._follow, name="kvtier-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following. Waits for the thread."""
        self._subscriber.close()
        self._thread.join()

    # -- registrations -----------------------------------------------------------------------------

    def register(self, new: Registration) -> None:
        """Follow a publisher. `Conflict` if it is registered already, or its block size differs."""
        for endpoint in (new.endpoint, new.replay_endpoint):
            if endpoint is not None and (not endpoint.startswith(_SCHEMES) or "*" in endpoint):
                expected = "expected an address like tcp://host:5557"
                raise InputError(f"endpoint: {expected}, got {endpoint[:200]!r}")
        with self._lock:
            group = self._group_for(new)
            subscription = Subscription(new, f"{new.instance_id}#{next(self._numbers)}")
            address = new.endpoint, new.replay_endpoint, new.topic, self.settings.curve
            self._subscriber.add(Source(subscription.source, *address))
            self._sources[subscription.source] = subscription
            self._groups[new.group] = group
            group.members[subscription.source] = subscription
            if new.rank is not None:
                subscription.ranks.add(new.rank)

    def _group_for(self, new: Registration) -> Group:
        """Return the group of a publisher, or a new one."""
        group = self._groups.get(new.group)
        if group is not None:
            is_taken = new.rank is not None and group.representative(new.worker(new.rank)) is not None
            if is_taken or any(member.registration.key == new.key for member in group.members.values()):
                raise Conflict(f"instance {new.instance_id} dp_rank {new.rank or 0} already registered")
        if len(self._sources) >= self.settings.max_sources:
            most = self.settings.max_sources
            raise Conflict(f"expected at most {most} registrations: unregister some first")
        if group is None:
            if len(self._groups) >= self.settings.max_groups:
                raise Conflict(f"expected at most {self.settings.max_groups} models and routing groups")
            index = self._new_index(new.block_size)
            return Group(index, PromptSample(index, self._pace))
        if group.index.block_size is None and new.block_size is not None:
            group.index.expect_block_size(new.block_size)
        elif new.block_size not in (None, group.index.block_size):
            where = f"model={new.group.model} routing_group={new.group.routing_group}"
            sizes = f"existing={group.index.block_size}, requested={new.block_size}"
            raise Conflict(f"block_size mismatch for {where}: {sizes}")
        return group

    def _new_index(self, block_size: int | None, budget: int | None = None) -> PrefixIndex:
        wanted = self.settings
        return PrefixIndex(
            keys=wanted.keys,
            block_size=block_size,
            budget=wanted.budget if budget is None else budget,
            form=wanted.form,
            seed=wanted.seed,
            counting=wanted.counting,
        )

    def unregister(
        self, instance: str, model: str, routing_group: str | None = None, rank: int | None = None
    ) -> list[Registration]:
        """Stop following an instance, or a rank of it, and forget its blocks; return the old registrations.

        A registration without a rank can be removed by the only rank it represents. `Conflict` if it
        represents more: its stream is followed as a whole or not at all.
        """
        with self._lock:
            gone = [
                subscription
                for subscription in self._sources.values()
                if subscription.registration.is_of(instance, model, routing_group)
                and (
                    rank in (None, subscription.registration.rank or 0) or subscription.represents_only(rank)
                )
            ]
            if not gone:
                which = f" with dp_rank {rank}" if rank is not None else ""
                raise NotFound(f"instance {instance} not found{which}")
            for subscription in gone:
                self._forget(subscription)
            return [subscription.registration for subscription in gone]

    def _forget(self, gone: Subscription) -> None:
        self._subscriber.remove(gone.source)
        del self._sources[gone.source]
        group = self._groups[gone.registration.group]
        del group.members[gone.source]
        if not group.members:
            del self._groups[gone.registration.group]
            return
        for rank in gone.ranks:
            group.index.remove_worker(gone.registration.worker(rank).name)

    # -- the following thread ----------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while updates := self._subscriber.poll():
                for _, run in groupby(updates, _run_of):
                    together = list(run)
                    for start in range(0, len(together), _AT_ONCE):
                        self._apply(together[start : start + _AT_ONCE])
        except Exception as error:  # the top of the thread: answers must say that they are no longer true
            logger.exception("the index follows nobody any more")
            self.failure = f"{type(error).__name__}: {error}"

    def _apply(self, run: list[Any]) -> None:
        """Apply consecutive updates of one kind and source; batches also of one rank."""
        update: Update = run[-1]
        with self._lock:
            subscription = self._sources.get(update.source)
            if subscription is None:
                return  # unregistered meanwhile
            group = self._groups[subscription.registration.group]
            if isinstance(update, Received):
                self._receive(subscription, group, [received.batch for received in run])
            elif isinstance(update, Reset):
                subscription.refusal, subscription.batch_rank = "", None
                for rank in subscription.ranks:
                    group.index.clear(subscription.registration.worker(rank).name)
            elif isinstance(update, StateChanged):
                subscription.confidence = Confidence(update.state, update.reason)

    def _receive(self, subscription: Subscription, group: Group, batches: list[Any]) -> None:
        spoken = batches[0].data_parallel_rank
        rank = subscription.registration.rank
        if rank is None:
            rank = spoken or 0
            refusal = self._take_rank(subscription, group, rank)
        else:
            subscription.batch_rank = spoken if subscription.batch_rank is None else subscription.batch_rank
            refusal = ""
            if spoken not in (None, subscription.batch_rank):
                both = f"its batches speak for rank {spoken} besides {subscription.batch_rank}"
                refusal = f"{both}: register it without dp_rank"
        if not refusal:
            try:
                worker = subscription.registration.worker(rank).name
                group.index.apply_all(worker, batches)
                group.sample.offer_batch(worker, batches[-1])
                return
            except KVTierError as error:
                refusal = str(error)
        self.ignored += len(batches)
        subscription.ignored += len(batches)
        if subscription.refusal != refusal:
            subscription.refusal = refusal
            name, group_key = subscription.registration.instance_id, subscription.registration.group
            if (more := subscription.log_limit.admit()) is not None:
                line = "batches of instance %r of %s are not applied: %s%s"
                logger.warning(line, name, group_key, refusal, more)

    def _take_rank(self, subscription: Subscription, group: Group, rank: int) -> str:
        """Let a registration without a rank represent one; return why it may not."""
        if rank in subscription.ranks:
            return ""
        if rank < 0:
            return f"rank {rank}: expected at least 0"
        if len(subscription.ranks) >= self.settings.max_ranks:
            return f"rank {rank}: expected at most {self.settings.max_ranks} ranks of one publisher"
        if (other := group.representative(subscription.registration.worker(rank))) is not None:
            return f"rank {rank}: {other.registration.endpoint} speaks for this rank of the instance already"
        subscription.ranks.add(rank)
        return ""

    # -- questions ---------------------------------------------------------------------------------

    def group(self, key: GroupKey) -> Group:
        """Return a group. `NotFound` if it has no registration."""
        with self._lock:
            return self._group(key)

    def _group(self, key: GroupKey) -> Group:
        try:
            return self._groups[key]
        except KeyError:
            where = f"model={key.model} routing_group={key.routing_group}"
            raise NotFound(f"no indexer for {where}") from None

    def groups(self) -> dict[GroupKey, Group]:
        """Return all groups."""
        with self._lock:
            return dict(self._groups)

    def instance_ids(self, key: GroupKey) -> dict[str, int | str]:
        """Return the registered ids of a group's instances, by the instance name of its workers."""
        with self._lock:
            members = self._groups[key].members.values() if key in self._groups else ()
            ids = [subscription.registration.instance_id for subscription in members]
        return {str(instance_id): instance_id for instance_id in ids}

    def answer(self, key: GroupKey, hashes: Hashes) -> tuple[Match, dict[Worker, Confidence]]:
        """Return how much of a prefix each worker holds, and how far that can be trusted at that moment."""
        with self._lock:
            group = self._group(key)
            match = group.index.match(hashes)
            group.sample.offer_query(hashes, match)
            return match, self._confidences(group)

    def sampled_prompts(self, group: Group) -> list[Hashes]:
        """Return the keys of some prompts' leading blocks, in which shared prefixes can be found."""
        with self._lock:
            return group.sample.chains()

    def subscriptions(self) -> list[tuple[Subscription, list[Confidence]]]:
        """Return the followed publishers, and how far the data about their workers can be trusted."""
        with self._lock:
            return [
                (subscription, [confidences[worker] for worker in subscription.workers])
                for group in self._groups.values()
                for confidences in [self._confidences(group)]
                for subscription in group.members.values()
            ]

    def _confidences(self, group: Group) -> dict[Worker, Confidence]:
        """Return each worker's confidence: that of its stream, or degraded if anything was refused."""
        incomplete = group.index.incomplete()
        dead = f"the index follows nobody any more: {self.failure}" if self.failure is not None else ""
        confidences: dict[Worker, Confidence] = {}
        for subscription in group.members.values():
            for worker in subscription.workers:
                reasons = [dead, subscription.refusal, incomplete.get(worker.name, "")]
                reason = "; ".join(filter(None, reasons))
                confidences[worker] = (
                    Confidence(State.DEGRADED, reason) if reason else subscription.confidence
                )
        return confidences

    def status(self, subscription: Subscription) -> SourceStatus | None:
        """Return the status of a publisher's stream; `None` if it is no longer followed."""
        try:
            return self._subscriber.status(subscription.source)
        except InputError:
            return None

    def check(self) -> None:
        """Raise `IntegrityError` if an index contradicts itself."""
        for group in self.groups().values():
            group.index.check()


def _run_of(update: Update) -> tuple[Any, ...]:
    """Return a key that is equal for updates that can be applied together."""
    rank = update.batch.data_parallel_rank if isinstance(update, Received) else None
    return type(update), update.source, rank
