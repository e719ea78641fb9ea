"""What a follower of the stream tells its consumer, and how it fares.

A consumer applies updates in the order in which they come. `StateChanged` is in line with the data: who sees
`State.EXACT` and has applied all before it holds what the publisher held at that point. All of these are values; any
thread may use them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from kvtier.events.wire import Batch

__all__ = ["Counters", "Kind", "Limits", "Received", "Reset", "SourceStatus", "State", "StateChanged", "Update"]

B = TypeVar("B", bound=Batch)


class State(StrEnum):
    """How far a picture of a publisher can be trusted."""

    EXACT = "exact"  # it is what the publisher held at `seq`
    REPAIRING = "repairing"  # something is missing or in doubt, and is being fetched
    DEGRADED = "degraded"  # something is missing and could not be had; live batches are applied as they come


class Kind(StrEnum):
    """Who publishes: one of ours (it marks its batches), or one that knows sequence numbers and replay only."""

    KVTIER = "kvtier"
    STOCK = "stock"


class Reset(NamedTuple):
    """Forget all that this source held."""

    source: str


class Received(NamedTuple, Generic[B]):
    """Apply this batch. In a snapshot, `seq` is the number whose state the snapshot describes."""

    source: str
    seq: int
    batch: B


class StateChanged(NamedTuple):
    """From here on the picture is as good as `state` says; `reason` tells why it is not exact."""

    source: str
    state: State
    reason: str = ""


Update = Reset | Received[Any] | StateChanged


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient a follower is, and how much it holds. Times are seconds."""

    reply_timeout: float = 2.0
    """How long a replay may be silent."""
    probe_interval: float = 5.0
    """How long the live stream may be silent before the publisher is asked what it has."""
    catch_up_delay: float = 0.25
    """How long batches that the publisher says it sent may be under way."""
    tries: int = 3
    """How many repairs may fail before the picture counts as degraded."""
    backoff: float = 0.25
    backoff_max: float = 30.0
    held_batches: int = 100_000
    held_bytes: int = 64 << 20
    """How much of the live stream is held while a replay runs. Beyond it the oldest go, and are replayed."""


@dataclass(slots=True)
class Counters:
    """What happened to one source so far. They only grow."""

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
    held_overflows: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How one source fares. `lag` is the age of the newest batch when it was applied; `seq` is -1 before the first."""

    name: str
    state: State
    reason: str
    kind: Kind | None
    connected: bool
    epoch: int | None
    seq: int
    blocks: int | None
    lag: float | None
    held: int
    counters: Counters = field(default_factory=Counters)
