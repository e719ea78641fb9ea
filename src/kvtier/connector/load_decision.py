"""Load, wait or compute: what is best for a request that could be loaded.

A request waits only for what is on its way, and for no longer than computing it would take. Scheduler thread
only.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.config import KVTierConfig
from kvtier.connector.cost import CostModel, PrefillQueue
from kvtier.connector.jobs import LoadJob
from kvtier.connector.lookup import PrefixMatch
from kvtier.connector.running_jobs import RunningJobs
from kvtier.connector.state import ChunkGeometry, RequestState

__all__ = ["LoadDecision"]

_UNKNOWN_PATIENCE = 0.05  # how long to wait for a chunk while the price of computing it is not known
_LEAST_PATIENCE = 0.05
_STEPS = 3  # a load begins after the step that runs and that of its order, and is seen after a third
_PATIENCE = 4  # times what computing takes: a load that was expected to be faster and is not, has gone wrong


class LoadDecision:
    """Decides by what loads and steps have cost so far, and by what is under way."""

    def __init__(
        self,
        settings: KVTierConfig,
        geometry: ChunkGeometry,
        cost: CostModel,
        running: RunningJobs,
        prefill: PrefillQueue,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._geometry = settings, geometry
        self._cost, self._running, self._prefill, self._clock = cost, running, prefill, clock

    def should_wait(self, state: RequestState, match: PrefixMatch) -> bool:
        """Say whether the request should be asked about later: a chunk is on its way and worth the wait."""
        tokens, known_to_take = 0, 0.0
        if match.pending:
            tokens = state.view.num_tokens - match.end
        elif (job := self._shared_load(state, match.end)) is not None:
            tokens = match.end - state.local
            known_to_take = self._seconds_left(job)
        if tokens == 0:
            return False
        now = self._clock()
        if state.waiting_since is None:
            state.waiting_since = now
        compute = self._cost.compute_seconds(tokens)
        patience = min(self._settings.load_deadline, _UNKNOWN_PATIENCE if compute is None else compute)
        return known_to_take <= patience and now - state.waiting_since < patience

    def _shared_load(self, state: RequestState, end: int) -> LoadJob | None:
        """Return the running load of another request that brings the first chunk which this one needs."""
        if end <= state.local:
            return None
        for group in state.groups:
            first = group.geometry.first_needed(state.local, end) // group.geometry.chunk_size
            if (job := self._running.load_of(group.keys[first])) is not None:
                return job
        return None

    def _seconds_left(self, job: LoadJob) -> float:
        expected = self._cost.load_seconds(job.num_bytes)
        return 0.0 if expected is None else max(0.0, expected - (self._clock() - job.started))

    def patience(self, state: RequestState, end: int) -> float:
        """Say how long a load of tokens up to `end` may take before computing them is the better choice."""
        deadline, compute = self._settings.load_deadline, self._cost.compute_seconds(end - state.local)
        if compute is None or not self._settings.load_if_faster:
            return deadline
        waits = self._bus_wait() + _STEPS * self._cost.slowest_step
        return min(deadline, max(_LEAST_PATIENCE, waits + _PATIENCE * compute))

    def is_worth_loading(self, state: RequestState, match: PrefixMatch) -> bool:
        """Say whether a load behind those that run should beat computing behind the prompts ahead."""
        if not self._settings.load_if_faster or match.end == state.local:
            return True
        num_bytes = self._geometry.load_bytes(state.local, match.end)
        tokens = self._prefill.ahead_of(state.view.request_id) + match.end - state.local
        return self._cost.worth_loading(num_bytes, tokens, self._bus_wait())

    def _bus_wait(self) -> float:
        """Estimate how long loads keep the bus busy.

        One that should be in by now is only not reported yet.
        """
        free_at = 0.0
        for job in self._running.loads():
            free_at = max(free_at, job.started) + (self._cost.load_seconds(job.num_bytes) or 0.0)
        return max(0.0, free_at - self._clock())
