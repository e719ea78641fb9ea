"""A scheduler's side without an engine: requests, steps and workers' reports made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.config import CPUConfig, GroupConfig, KVTierConfig, OffloadingConfig, Recompute
from kvtier.connector import (
    CachedRequest,
    KVConnectorOutput,
    NewRequest,
    OffloadingConnectorMetadata,
    OffloadingConnectorScheduler,
    StepView,
    TransferReport,
)
from kvtier.events.tracker import Description
from kvtier.keys import hash_blocks
from kvtier.offload import (
    CanonicalKVCaches,
    CPUOffloadingManager,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
    TransferResult,
)

BLOCK = 4


@dataclass(frozen=True)
class ChunkedLocal:
    """Chunked-local attention, in place of a window."""

    size: int


class State:
    """A recurrent state, in place of a window."""


STATE = State()
GroupKind = int | None | ChunkedLocal | State
"""The kind of a group: a window, `None` for full attention, or one of those above."""


@dataclass
class Request:
    """A request as an engine shows it."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int = 0
    kv_transfer_params: Any = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        return hash_blocks(self.tokens, BLOCK)

    def describe(self, start: int, stop: int, block_size: int) -> Description:
        return Description(self.tokens[start:stop])


class ManagerOnlySpec(OffloadingSpec):
    """A spec for tests that move no bytes."""

    def __init__(self, config: OffloadingConfig, manager: OffloadingManager) -> None:
        super().__init__(config)
        self._manager = manager

    def get_manager(self) -> OffloadingManager:
        return self._manager

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        raise AssertionError("this spec moves no bytes")


@dataclass
class Clock:
    """A clock that the test moves."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def make_config(
    windows: Sequence[GroupKind] = (None,),
    world_size: int = 1,
    capacity: int = 1 << 20,
    recompute: Recompute = Recompute.MISSING,
    block_sizes: Sequence[int] = (),
    lookahead: int = 0,
    may_load: bool = True,
    may_store: bool = True,
    **settings: Any,
) -> OffloadingConfig:
    """Return the config of an engine with blocks of 64 bytes and `BLOCK` tokens in each group, unless sizes
    are given.
    """
    sizes = block_sizes or [BLOCK] * len(windows)
    groups = tuple(
        GroupConfig(
            block_size=size,
            bytes_per_block=64,
            layer_names=(f"layers.{i}",),
            sliding_window=kind if isinstance(kind, int) else None,
            attention_chunk_size=kind.size if isinstance(kind, ChunkedLocal) else None,
            is_state=isinstance(kind, State),
        )
        for i, (size, kind) in enumerate(zip(sizes, windows, strict=True))
    )
    return OffloadingConfig(
        settings=KVTierConfig(cpu=CPUConfig(capacity=capacity), **settings),
        groups=groups,
        hash_block_size=BLOCK,
        world_size=world_size,
        engine_id="test",
        enable_kv_cache_events=True,
        recompute=recompute,
        lookahead=lookahead,
        may_load=may_load,
        may_store=may_store,
    )


@dataclass
class Host:
    """Plays the engine for one scheduler's side: computes, reports, and keeps the jobs that workers have not
    reported.
    """

    scheduler: OffloadingConnectorScheduler
    world_size: int = 1
    running: dict[str, OffloadingConnectorMetadata] = field(default_factory=dict)
    next_block: int = 1

    def blocks(self, count: int, groups: int = 1) -> tuple[list[int], ...]:
        """Hand out fresh blocks."""
        given = tuple(
            list(range(self.next_block + g * count, self.next_block + (g + 1) * count))
            for g in range(groups)
        )
        self.next_block += groups * count
        return given

    def run_new(
        self,
        request: Request,
        blocks: tuple[list[int], ...],
        computed: int = 0,
        scheduled: int | None = None,
        **step: Any,
    ) -> OffloadingConnectorMetadata:
        """Run a request's first step."""
        scheduled = request.num_tokens - computed if scheduled is None else scheduled
        return self.scheduler.build_connector_meta(
            StepView(
                new=[NewRequest(request.request_id, blocks, computed)],
                num_scheduled_tokens={request.request_id: scheduled},
                **step,
            )
        )

    def run_more(
        self,
        request: Request,
        computed: int,
        scheduled: int,
        blocks: tuple[list[int], ...] | None = None,
        resumed: bool = False,
        **step: Any,
    ) -> OffloadingConnectorMetadata:
        """Run a later step of a request."""
        return self.scheduler.build_connector_meta(
            StepView(
                cached=[CachedRequest(request.request_id, blocks, computed, resumed)],
                num_scheduled_tokens={request.request_id: scheduled},
                **step,
            )
        )

    def report(
        self,
        job_id: int,
        success: bool = True,
        failed_blocks: tuple[int, ...] | None = None,
        corrupt: bool = False,
        rank: int | None = None,
        seconds: float | None = 0.001,
    ) -> None:
        """Report a job, on every rank or on one."""
        ranks = range(self.world_size) if rank is None else (rank,)
        reports = [
            TransferReport(r, TransferResult(job_id, success, 64, seconds, None, failed_blocks, corrupt))
            for r in ranks
        ]
        self.scheduler.update_connector_output(KVConnectorOutput(reports=reports))
        self.scheduler.check()

    def refuse(self, job_id: int) -> None:
        """Report a job that no handler took."""
        reports = [
            TransferReport(rank, TransferResult(job_id, success=False)) for rank in range(self.world_size)
        ]
        self.scheduler.update_connector_output(KVConnectorOutput(reports=reports))
        self.scheduler.check()

    def cache(self, request: Request, groups: int = 1) -> tuple[list[int], ...]:
        """Compute a request whole, store it and finish it; return the blocks that it had."""
        ask = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert ask == (0, False), ask
        blocks = self.blocks(-(-request.num_tokens // BLOCK), groups)
        self.scheduler.update_state_after_alloc(request, blocks, 0)
        meta = self.run_new(request, blocks)
        for job_id in meta.store_jobs.values():
            self.report(job_id)
        assert self.scheduler.request_finished(request, blocks) == (False, None)
        return blocks

    def idle(self) -> OffloadingConnectorMetadata:
        """Run a step with nothing scheduled."""
        return self.scheduler.build_connector_meta(StepView())


def make_host(
    num_slots: int = 64,
    windows: Sequence[GroupKind] = (None,),
    world_size: int = 1,
    clock: Clock | None = None,
    manager: OffloadingManager | None = None,
    **settings: Any,
) -> Host:
    """Return a host with a fresh scheduler's side, over the pool alone unless a manager is given."""
    manager = manager or CPUOffloadingManager(num_slots)
    spec = ManagerOnlySpec(make_config(windows, world_size, **settings), manager)
    return Host(OffloadingConnectorScheduler(spec, clock or Clock(), Request.describe), world_size)
