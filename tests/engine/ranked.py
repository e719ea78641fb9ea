"""The engine with several ranks: each has a KV cache and a worker of its own, and every forward pass runs on
all of them.

Ranks hold the same KV, so wherever one of them has a wrong block its logits differ from the others'. What
the workers say is merged here, on a wire that loses and delays the outputs of single ranks.
One process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvtier.config import OffloadingConfig
from kvtier.connector import (
    BlockIds,
    ConnectorRole,
    KVConnectorOutput,
    OffloadingConnector,
    OffloadingConnectorMetadata,
    ReqId,
)
from kvtier.engine import Engine
from kvtier.engine.assembly import allocate_kv
from kvtier.engine.model import ForwardBatch
from kvtier.engine.request import Request, RequestStatus
from kvtier.offload import OffloadingSpec
from kvtier.testing.toy_model import ToyModel


class PassFailedError(Exception):
    """A forward pass that ended before its time."""


class RankedModel:
    """A model on several ranks.

    Its answers come from each rank in turn, so that a wrong block anywhere changes tokens.
    """

    def __init__(self, model: ToyModel) -> None:
        self.model, self.config = model, model.config
        self.caches: list[Mapping[str, Tensor]] = []
        self.passes = 0
        self.fails_next = False

    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: Mapping[str, Tensor],
        group_of_layer: Sequence[int],
        block_size: int,
    ) -> Tensor:
        if self.fails_next:
            self.fails_next = False
            raise PassFailedError
        self.passes += 1
        logits = [self.model.forward(batch, caches, group_of_layer, block_size) for caches in self.caches]
        assert all(torch.equal(other, logits[0]) for other in logits), (
            "ranks disagree: one of them has a wrong block"
        )
        return logits[self.passes % len(logits)]


@dataclass
class Wire:
    """What becomes of the outputs of single ranks on their way to the scheduler."""

    random: Random
    loss: float = 0.0
    delay: float = 0.0
    """How many of them are lost, and how many come some steps late."""
    stutter: float = 0.0
    """How often a rank says nothing in a step, and more in the next."""
    lag: int = 0
    """How many steps late all of them come, as in an engine that schedules ahead."""
    silent: set[int] = field(default_factory=set)
    """Ranks of which nothing comes."""
    pipeline: deque[list[KVConnectorOutput]] = field(default_factory=deque)
    lost: int = 0
    late: list[tuple[int, int, KVConnectorOutput]] = field(default_factory=list)
    """By the step they are due in, and rank."""
    now: int = 0

    def send(self, outputs: list[KVConnectorOutput]) -> list[list[KVConnectorOutput]]:
        """Return what arrives in this step: rounds of outputs, one of each rank."""
        self.now += 1
        self.pipeline.append(outputs)
        if len(self.pipeline) <= self.lag:
            return []
        outputs = self.pipeline.popleft()
        arriving = [[] for _ in outputs]
        for due, rank, output in self.late:
            if due <= self.now:
                arriving[rank].append(output)
        self.late = [item for item in self.late if item[0] > self.now]
        for rank, output in enumerate(outputs):
            fate = self.random.random()
            if rank in self.silent or fate < self.loss:
                self.lost += bool(output.reports)
            elif fate < self.loss + self.delay:
                self.late.append((self.now + self.random.randint(1, 12), rank, output))
            else:
                arriving[rank].append(output)
        rounds = max(1, *map(len, arriving))
        return [
            [mine[i] if i < len(mine) else KVConnectorOutput() for mine in arriving] for i in range(rounds)
        ]


class OutputAggregator:
    """Merges all ranks' outputs of a step for an engine that goes by them: a request is finished once every
    rank has named it.

    A block is invalid if any rank says so. Invalid blocks are passed on together with their request, even if
    that is many steps later, because an engine takes the other blocks of a named request as good."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._sending: dict[ReqId, set[int]] = {}
        self._recving: dict[ReqId, set[int]] = {}
        """The ranks that have named a request, the oldest request first."""
        self._invalid: dict[ReqId, set[int]] = {}
        """Blocks that did not arrive, by the requests of `_recving` that were named in the same output."""

    def aggregate(self, outputs: Iterable[KVConnectorOutput]) -> KVConnectorOutput:
        """Merge one step's outputs, one per rank and in the order of the ranks."""
        merged = KVConnectorOutput()
        for rank, output in enumerate(outputs):
            if output.invalid_block_ids:
                for req_id in output.finished_recving:
                    self._invalid.setdefault(req_id, set()).update(output.invalid_block_ids)
            merged.finished_sending |= self._add(self._sending, rank, output.finished_sending)
            merged.finished_recving |= self._add(self._recving, rank, output.finished_recving)
            merged.reports += output.reports
        merged.failed_recving = merged.finished_recving & self._invalid.keys()
        merged.invalid_block_ids = self._take_invalid(merged.failed_recving)
        return merged

    def _add(self, named: dict[ReqId, set[int]], rank: int, req_ids: set[ReqId]) -> set[ReqId]:
        """Record that a rank has named requests, and return the requests that all ranks have named now."""
        for req_id in req_ids:
            named.setdefault(req_id, set()).add(rank)
        complete = {req_id for req_id in req_ids if len(named[req_id]) == self._world_size}
        for req_id in complete:
            del named[req_id]
        return complete

    def _take_invalid(self, failed: set[ReqId]) -> set[int]:
        """Return the blocks that may belong to these requests."""
        return set().union(*(self._invalid.pop(req_id) for req_id in failed))


class RankedWorkers:
    """All ranks' workers behind the face of one."""

    def __init__(self, workers: list[OffloadingConnector], wire: Wire) -> None:
        self.workers, self.wire = workers, wire
        self._aggregator = OutputAggregator(len(workers))

    def bind_connector_metadata(self, metadata: OffloadingConnectorMetadata) -> None:
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)

    def handle_preemptions(self, metadata: OffloadingConnectorMetadata) -> None:
        for worker in self.workers:
            worker.handle_preemptions(metadata)

    def start_load_kv(self, **kwargs: Any) -> None:
        for worker in self.workers:
            worker.start_load_kv(**kwargs)

    def wait_for_save(self) -> None:
        for worker in self.workers:
            worker.wait_for_save()

    def wait_for_transfers(self, timeout: float) -> bool:
        """Wait for a moment only: ranks are to be done in different steps."""
        busy = [worker.wait_for_transfers(min(timeout, 0.002)) for worker in self.workers]
        return any(busy)

    def take_output(self) -> KVConnectorOutput:
        outputs = []
        for worker in self.workers:
            if self.wire.random.random() < self.wire.stutter:
                outputs.append(KVConnectorOutput())
                continue
            outputs.append(worker.take_output())
        together = KVConnectorOutput()
        for arrived in self.wire.send(outputs):
            merged = self._aggregator.aggregate(arrived)
            together.finished_sending |= merged.finished_sending
            together.finished_recving |= merged.finished_recving
            together.invalid_block_ids |= merged.invalid_block_ids
            together.reports += merged.reports
        return together

    def clear_connector_metadata(self) -> None:
        for worker in self.workers:
            worker.clear_connector_metadata()

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()


class VLLMLike:
    """A scheduler's side as vLLM uses it.

    With `frees_at_once` a request's blocks and its id are free as soon as it has finished, unless it is
    being loaded. With `by_workers` the engine goes by what the workers say, not by what the scheduler's side
    makes of it.
    """

    def __init__(
        self, engine: Engine, connector: OffloadingConnector, frees_at_once: bool, by_workers: bool
    ) -> None:
        self._engine, self._connector = engine, connector
        self._frees_at_once, self._by_workers = frees_at_once, by_workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def request_finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, None]:
        state = self._connector.connector_scheduler._requests.get(request.request_id)
        is_loading = state is not None and state.load_job is not None
        hold, _ = self._connector.request_finished(request, block_ids)
        return hold and (is_loading or not self._frees_at_once), None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        told = replace(output)
        self._connector.update_connector_output(told)
        if self._by_workers:
            loading = {request.request_id for request in self._engine._scheduler.loading}
            wrong = output.finished_recving - loading - self._engine._scheduler.held.keys()
            assert not wrong, f"vLLM would have died: {wrong} were named and do not load"
        else:
            output.finished_sending, output.finished_recving = told.finished_sending, told.finished_recving
            output.invalid_block_ids = told.invalid_block_ids


class RankedEngine(Engine):
    """An engine over `RankedModel`. `make_spec(config)` makes the spec of one rank."""

    def __init__(
        self,
        model: ToyModel,
        *args: Any,
        num_ranks: int,
        wire: Wire,
        make_spec: Callable[[OffloadingConfig], OffloadingSpec],
        by_workers: bool = False,
        frees_at_once: bool = False,
        weights_id: Any = None,
    ) -> None:
        self._num_ranks, self._wire, self._make_spec = num_ranks, wire, make_spec
        self._by_workers, self._frees_at_once = by_workers, frees_at_once
        super().__init__(RankedModel(model), *args, weights_id=weights_id)

    def _connect(self, config: OffloadingConfig, spec_factory: Any) -> None:
        assert isinstance(self.model, RankedModel)
        configs = [replace(config, world_size=self._num_ranks, rank=rank) for rank in range(self._num_ranks)]
        self.specs = [self._make_spec(config) for config in configs]
        scheduler = OffloadingConnector(configs[0], ConnectorRole.SCHEDULER, self.specs[0], Request.describe)
        self.connector = scheduler
        if self._frees_at_once or self._by_workers:
            self.connector = VLLMLike(self, scheduler, self._frees_at_once, self._by_workers)
        workers = []
        for config, spec in zip(configs, self.specs, strict=True):
            caches = allocate_kv(self.model.config, self.config, self.groups)
            self.model.caches.append(caches)
            worker = OffloadingConnector(config, ConnectorRole.WORKER, spec)
            worker.register_kv_caches(caches)
            workers.append(worker)
        self.worker = RankedWorkers(workers, self._wire)  # type: ignore[assignment]

    def swap_weights(self) -> set[str]:
        """Change the weights and reset every cache, as training does; return the requests that have KV or
        tokens of before.

        With an engine that schedules ahead and goes by the workers' word, also those whose load may have
        ended already. vLLM says of such a reset that it did not succeed.
        """
        assert isinstance(self.model, RankedModel)
        has_kv = {RequestStatus.RUNNING}
        if self._by_workers and self._wire.lag:
            has_kv.add(RequestStatus.LOADING)
        tainted = {r.request_id for r in self._requests.values() if r.status in has_kv or r.output_token_ids}
        self.model.model.weights += 1
        self.reset_prefix_cache(reset_connector=True)
        return tainted
