"""The disk of the simulator: `SlotTier` itself, over I/O that takes simulated time and moves no bytes.

Slots, eviction, the write limit, refusals and counts are those of the product's disk. Only the threads are
replaced: a read is over when the clock has reached its time, a write at once. One thread uses all of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.policies import CachePolicy, make_policy
from kvtier.slot_table import SlotTable
from kvtier.tier_config import DiskConfig
from kvtier.tiers.base import Backend, Direction, RowBatch, RowJob, TierResult
from kvtier.tiers.io_threads import IOThreads
from kvtier.tiers.seal import SealScope
from kvtier.tiers.slot_tier import SlotTier, WriteLimit


@dataclass(slots=True)
class SimulatedClock:
    """Two times. `arrival` is the trace's: policies and the write limit see it. `service` runs on while
    requests are served: costs, deadlines and I/O see it. They differ because no request waits for another.
    """

    arrival: float = 0.0
    service: float = 0.0

    def now(self) -> float:
        """Return the time of service."""
        return self.service

    def trace_time(self) -> float:
        """Return the time of the trace."""
        return self.arrival


def make_timed_policy(name: str, capacity: int, clock: SimulatedClock) -> CachePolicy:
    """Make a policy that sees the time of the trace."""
    policy = make_policy(name, capacity)
    policy.clock = clock.trace_time
    return policy


class SimulatedIO(IOThreads):
    """The queue of a tier, without threads."""

    def __init__(self, row_bytes: int, clock: SimulatedClock, bandwidth: float) -> None:
        super().__init__(row_bytes=row_bytes, threads=0, clock=clock.now)
        self._num_threads = 1  # none is ever busy
        self._bandwidth = bandwidth
        self._reads: list[tuple[float, RowBatch]] = []

    def submit(self, job: RowJob, positions: Iterable[int]) -> None:
        super().submit(job, positions)
        self._queues[job.direction].clear()
        batch = RowBatch(job, self._take_out(job))
        batch.seconds = self._nbytes(batch) / self._bandwidth
        job.running.add(batch)
        if job.direction is Direction.DEMOTE:
            self._ended.append(batch)
        else:
            self._reads.append((self._clock() + batch.seconds, batch))

    def poll(self) -> list[TierResult]:
        if self._reads:
            now = self._clock()
            self._ended.extend(batch for end, batch in self._reads if end <= now)
            self._reads = [read for read in self._reads if read[0] > now]
        return super().poll()

    @property
    def next_end(self) -> float | None:
        """When the first running read is over; `None` if none runs."""
        return min((end for end, _ in self._reads), default=None)


class _NoBackend(Backend):
    """Stands for an open disk. No row reaches it."""

    def write(self, rows: object) -> list[OSError | None]:
        raise NotImplementedError

    def read(self, rows: object) -> list[bytes | OSError | None]:
        raise NotImplementedError

    def contains(self, rows: object) -> list[bool]:
        raise NotImplementedError

    def delete(self, rows: object) -> None:
        raise NotImplementedError


class SimulatedDisk(SlotTier):
    """A disk with the slots, the policy and the write limit of its config. It is open from the start.

    It has `most_slots` slots at most.
    """

    def __init__(
        self, config: DiskConfig, row_bytes: int, clock: SimulatedClock, bandwidth: float, most_slots: int
    ) -> None:
        limit = WriteLimit(config.write_limit or None, clock.trace_time)
        super().__init__("disk", row_bytes, threads=0, write_limit=limit, clock=clock.now)
        self.io = self._io = SimulatedIO(row_bytes, clock, bandwidth)
        slots = min(config.capacity // row_bytes, most_slots)
        policy = make_timed_policy(config.policy, slots, clock)
        self.open_table(SlotTable(slots, policy), _NoBackend(), SealScope(""))
