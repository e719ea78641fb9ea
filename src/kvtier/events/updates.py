"""The updates that a follower of the stream gives its consumer, and the follower's status.

A consumer applies updates in order. `StateChanged` is in line with the data: a consumer that sees
`State.EXACT` and has applied all updates before it holds what the publisher held at that point. All of
these are values; any thread may use them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from kvtier.events.wire import Batch

B = TypeVar("B", bound=Batch)


class State(StrEnum):
    """How good the replica of a publisher is."""

    EXACT = "exact"  # the replica is what the publisher held at `seq`
    REPAIRING = "repairing"  # something is missing or in doubt, and is being fetched
    DEGRADED = "degraded"  # something is missing and cannot be had; live batches are applied as they come


class Kind(StrEnum):
    """The kind of publisher: one of ours (it marks its batches), or one with numbers and replay only."""

    KVTIER = "kvtier"
    STOCK = "stock"


class Reset(NamedTuple):
    """Forget everything that this source held."""

    source: str


class Received(NamedTuple, Generic[B]):
    """Apply this batch. In a snapshot, `seq` is the number whose state the snapshot describes."""

    source: str
    seq: int
    batch: B


class StateChanged(NamedTuple):
    """From here on the replica is in `state`; `reason` says why it is not exact."""

    source: str
    state: State
    reason: str = ""


Update = Reset | Received[Any] | StateChanged


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a follower waits, and how much it holds. Times are seconds."""

    reply_timeout: float = 2.0
    """How long an answer may be silent, and how long a live mark is awaited before a status request."""
    probe_interval: float = 5.0
    """How long the live stream may be silent before the publisher is asked for its status."""
    catch_up_delay: float = 0.25
    """How long announced batches may take to arrive before they are requested."""
    tries: int = 3
    """How many repairs may fail before the replica counts as degraded."""
    backoff: float = 0.25
    backoff_max: float = 30.0
    pending_batches: int = 100_000
    pending_bytes: int = 64 << 20
    """How much of the live stream waits during a replay.

    Beyond it all waiting batches are dropped and replayed.
    """


@dataclass(slots=True)
class Counters:
    """Counts of events in the life of one source. They only grow."""

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    lost_batches: int = 0
    replays: int = 0
    truncated_replays: int = 0
    snapshots: int = 0
    probes: int = 0
    timeouts: int = 0
    resets: int = 0
    restarts: int = 0
    reconnects: int = 0
    digest_checks: int = 0
    digest_mismatches: int = 0
    skipped_events: int = 0
    bad_frames: int = 0
    pending_overflows: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {counter.name: getattr(self, counter.name) for counter in fields(self)}


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The status of one source.

    `lag` is the age of the newest batch when applied; `seq` is -1 before any.
    """

    name: str
    state: State
    reason: str
    kind: Kind | None
    connected: bool
    epoch: int | None
    seq: int
    blocks: int | None
    lag: float | None
    pending: int
    counters: Counters = field(default_factory=Counters)
