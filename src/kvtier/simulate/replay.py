"""Replays a trace through the connector's scheduler side and the managers, in simulated time.

Everything that decides is the product's own code: `OffloadingConnectorScheduler` with its load and promotion
decisions and its cost model, the pool's manager, the tiered manager, the disk's books, policies and write
limit. Simulated are the engine around it, the copies, and the clock:

- a request is served alone, at its time in the trace, by an engine whose own cache is empty;
- computing takes tokens / `prefill`; a load takes bytes / `bus` and `LOAD_SECONDS`; a promotion takes
  bytes / `disk`; no request waits for another;
- a prompt is computed in steps of `step_tokens`; a store is over with its step, and the disk has written
  everything before the next step.

One thread uses a simulator. `Simulator` makes manager and clock; `serve` is the life of one request.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.config import DEFAULT_POLICY, DiskConfig, GroupConfig, KVTierConfig, OffloadingConfig
from kvtier.connector.explain import Explanation
from kvtier.connector.metadata import (
    CachedRequest,
    KVConnectorOutput,
    NewRequest,
    OffloadingConnectorMetadata,
    StepView,
    TransferReport,
)
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.errors import IntegrityError
from kvtier.events.tracker import Description
from kvtier.offload.base import OffloadingSpec
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.offload.tiered import ConfiguredTier, TieredOffloadingManager
from kvtier.simulate.tier import SimulatedClock, SimulatedDisk, make_timed_policy
from kvtier.simulate.trace import Ids, Trace, TraceRequest
from kvtier.transfer.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    TransferResult,
)

LOAD_SECONDS = 0.01
"""The time of a load beside its bytes, as in `kvtier size`."""
_AHEAD_POLLS = 8
"""With `write: evict`, rows are looked for once in so many polls. An engine polls more often than that."""
_MOST_ASKS = 10_000
_SPARE_SLOTS = 64
"""Free slots that a pool has at least if its trace cannot fill it, beside as many as there are chunks: rows
are written ahead of their eviction when few slots are free.
"""
_ENDINGS = dict.fromkeys(("tool", "tool_calls", "tool_use"), "tool") | dict.fromkeys(
    ("turn", "stop", "end_turn"), "turn"
)
"""What policies call the finish reasons of traces (`kvtier.policies.base.ENDINGS`)."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the simulated machine does in a second, and how the engine divides prompts into steps."""

    prefill: float
    """Tokens that the engine computes."""
    bus: float
    """Bytes between the pool and the GPUs."""
    disk: float
    """Bytes that the disk reads."""
    step_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request."""

    pool_tokens: int
    disk_tokens: int
    computed_tokens: int
    first_token: float
    """Seconds."""


def make_settings(
    memory: int, disk: int = 0, policy: str = DEFAULT_POLICY, write: str = "through",
    write_limit: int | None = None, *, load_if_faster: bool = True,
) -> KVTierConfig:  # fmt: skip
    """Return the settings of an engine with this memory and disk."""
    table: dict[str, Any] = {"cpu": {"capacity": memory, "policy": policy}, "load_if_faster": load_if_faster}
    if disk:
        limit = {} if write_limit is None else {"write_limit": write_limit}
        place = {"path": "simulated", "capacity": disk, "policy": policy, "write": write}
        table["tiers"] = [{"disk": place | limit}]
    return KVTierConfig.from_dict(table)


def make_config(settings: KVTierConfig, chunk_tokens: int, bytes_per_token: int) -> OffloadingConfig:
    """Return the config of an engine with one group, whose blocks are as long as chunks."""
    group = GroupConfig(
        block_size=chunk_tokens, bytes_per_block=chunk_tokens * bytes_per_token, layer_names=("kv",)
    )
    return OffloadingConfig(
        settings=settings, groups=(group,), hash_block_size=chunk_tokens, engine_id="simulated"
    )


@dataclass(slots=True)
class _Request:
    """A request as the connector sees it."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    block_hashes: list[bytes]
    kv_transfer_params: dict[str, Any] | None = None


class _Spec(OffloadingSpec):
    """A spec with a manager that was made before, and without handlers."""

    def __init__(self, config: OffloadingConfig, manager: CPUOffloadingManager | TieredOffloadingManager):
        super().__init__(config)
        self._manager = manager

    def get_manager(self) -> CPUOffloadingManager | TieredOffloadingManager:
        return self._manager

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        return iter(())


class Simulator:
    """An engine's connector over a pool and perhaps a disk, without the engine and without bytes.

    Of slots that a trace with so many different chunks can never fill, few are made: the others would cost
    memory and change nothing.
    """

    def __init__(self, config: OffloadingConfig, speeds: Speeds, num_chunks: int | None = None) -> None:
        settings = config.settings
        most_slots = sys.maxsize if num_chunks is None else 2 * num_chunks + _SPARE_SLOTS
        num_slots = min(config.num_slots, most_slots)
        self.config, self.speeds, self.clock = config, speeds, SimulatedClock()
        self.chunk_tokens = config.groups[0].block_size
        policy = make_timed_policy(settings.cpu.policy, num_slots, self.clock)
        pool = CPUOffloadingManager(num_slots, policy, store_threshold=settings.store_threshold)
        self.manager: CPUOffloadingManager | TieredOffloadingManager = pool
        self.disk: SimulatedDisk | None = None
        self._polls = 0
        for tier in settings.tiers:
            assert isinstance(tier, DiskConfig), "make_settings gives no other"
            self.disk = SimulatedDisk(tier, config.row_bytes, self.clock, speeds.disk, most_slots)
            self.manager = TieredOffloadingManager(
                pool,
                np.zeros((num_slots, 0), dtype=np.uint8),
                [ConfiguredTier(self.disk, tier.write)],
                row_bytes=config.row_bytes,
                store_deadline=settings.store_deadline,
                clock=self.clock.now,
            )
            self._polls = _AHEAD_POLLS if tier.write == "evict" else 0
        spec = _Spec(config, self.manager)
        self.scheduler = OffloadingConnectorScheduler(spec, self.clock.now, lambda *_: Description(()))
        self._served = 0

    # -- one request -------------------------------------------------------------------------------

    def serve(self, traced: TraceRequest, chunks: Ids) -> Served:
        """Serve a request of the trace, whose complete chunks have these numbers."""
        self.clock.arrival = traced.time
        scheduler, prompt, began = self.scheduler, traced.prompt_tokens, self.clock.service
        hashes = _hashes(chunks)
        known = prompt // self.chunk_tokens
        request = _Request(str(self._served), prompt, prompt, hashes[:known])
        self._served += 1
        loaded = self._ask(request)
        blocks = (list(range(1, -(-traced.keyed_tokens // self.chunk_tokens) + 1)),)
        scheduler.update_state_after_alloc(request, blocks, loaded)
        if loaded:
            self._step(StepView())
        computed = min(loaded, prompt - 1)
        step = StepView(new=[NewRequest(request.request_id, blocks, computed)])
        while computed < prompt:
            count = min(self.speeds.step_tokens, prompt - computed)
            step.num_scheduled_tokens = {request.request_id: count}
            self._step(step)
            computed += count
            step = StepView(cached=[CachedRequest(request.request_id, None, computed)])
        first_token = self.clock.service - began
        self._decode(request, traced, hashes)
        explanation = scheduler.explain(request.request_id)
        scheduler.request_finished(request, how=_ENDINGS.get(traced.finish_reason or "", "unknown"))
        self._settle()
        return _served(explanation, first_token)

    def _decode(self, request: _Request, traced: TraceRequest, hashes: list[bytes]) -> None:
        """Take the steps of an answer that complete a chunk. Its last token is never computed."""
        size, known, done = self.chunk_tokens, len(request.block_hashes), traced.prompt_tokens
        computed = done + max(0, traced.output_tokens - 1)
        keyed = min(traced.keyed_tokens, computed)
        request.block_hashes += hashes[known : keyed // size]
        for end in range((known + 1) * size, keyed + 1, size):
            request.num_tokens = done = end
            step = StepView(cached=[CachedRequest(request.request_id, None, end - 1)])
            step.num_scheduled_tokens = {request.request_id: 1}
            self._step(step)
        if computed > done:
            self._settle()
        request.num_tokens = traced.prompt_tokens + traced.output_tokens
        request.block_hashes = hashes

    def _ask(self, request: _Request) -> int:
        """Ask about a request until there is an answer, and return how many tokens are loaded."""
        for _ in range(_MOST_ASKS):
            tokens, _is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
            if tokens is not None:
                return tokens
            meta = self.scheduler.build_connector_meta(StepView())
            self.clock.service = self._next_event(request)
            self._end_step(meta)
            self._settle()
        raise IntegrityError(f"request {request.request_id} waits for ever")

    def _next_event(self, request: _Request) -> float:
        """Return when rows have come, or the request has waited as long as computing would take."""
        end = None if self.disk is None else self.disk.io.next_end
        budget = (
            self.scheduler.cost.compute_seconds(request.num_tokens) or self.config.settings.load_deadline
        )
        latest = self.clock.service + budget
        return latest if end is None else min(end, latest)

    def _step(self, step: StepView) -> None:
        """Take a step: its loads, its tokens, then its stores."""
        self._settle()
        meta = self.scheduler.build_connector_meta(step)
        self.clock.service += sum(step.num_scheduled_tokens.values()) / self.speeds.prefill
        self._end_step(meta)

    def _end_step(self, meta: OffloadingConnectorMetadata) -> None:
        output = KVConnectorOutput()
        for req_id, job_id in meta.load_jobs.items():
            blocks = meta.reqs_to_load[req_id][1]
            assert isinstance(blocks, GPULoadStoreSpec), "a load ends on the GPU"
            size = len(blocks.block_ids) * self.config.groups[0].bytes_per_block
            seconds = size / self.speeds.bus
            self.clock.service += seconds + LOAD_SECONDS
            output.reports.append(TransferReport(0, TransferResult(job_id, True, size, seconds)))
        for job_id in meta.store_jobs.values():
            output.reports.append(TransferReport(0, TransferResult(job_id, True)))
        self.scheduler.update_connector_output(output)

    def _settle(self) -> None:
        """Have the disk write what it was offered: an engine does so between its steps."""
        if isinstance(self.manager, TieredOffloadingManager):
            for _ in range(self._polls):
                self.manager.end_step()
            while self.manager.has_pending_work():
                self.manager.end_step()


def _hashes(chunks: Ids) -> list[bytes]:
    data = chunks.tobytes()
    return [data[at : at + 8] for at in range(0, len(data), 8)]


def _served(explanation: Explanation | None, first_token: float) -> Served:
    assert explanation is not None, "a request that has run is explained"
    tiers = explanation.from_tiers
    return Served(tiers.get("cpu", 0), tiers.get("disk", 0), explanation.recomputed, first_token)


def replay(trace: Trace, simulator: Simulator) -> Iterator[Served]:
    """Serve all requests of a trace, one after the other."""
    for request in trace.requests:
        yield simulator.serve(request, trace.chunks(request, simulator.chunk_tokens))
