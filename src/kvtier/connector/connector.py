"""`OffloadingConnector`: the object that an engine talks to. It is one of two halves, chosen by role.

An engine makes one with `ConnectorRole.SCHEDULER` beside its scheduler and one with `ConnectorRole.WORKER`
in every worker, from the same config. The halves share the pool; apart from it they exchange only the
messages that the engine carries between them. docs/architecture.md draws the order of calls in a step, and
`kvtier.engine` follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvtier.config import OffloadingConfig
from kvtier.connector.explain import Explanation
from kvtier.connector.metadata import (
    BlockIds,
    ConnectorRole,
    KVConnectorOutput,
    OffloadingConnectorMetadata,
    ReqId,
    RequestView,
    StepView,
)
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.errors import InputError
from kvtier.events.tracker import Describe
from kvtier.events.types import KVCacheEvent
from kvtier.offload.base import OffloadingSpec, OffloadingSpecFactory
from kvtier.policies import UNKNOWN_ENDING

if TYPE_CHECKING:
    import torch


class OffloadingConnector:
    """One half of the connector. Calling a method of the other half raises `InputError`."""

    def __init__(
        self,
        config: OffloadingConfig,
        role: ConnectorRole,
        spec: OffloadingSpec | None = None,
        describe: Describe | None = None,
    ) -> None:
        """Make one half.

        `describe` reads the engine's requests for the event stream (`kvtier.events.tracker`).
        """
        self.role = role
        self.connector_scheduler: OffloadingConnectorScheduler | None = None
        self.connector_worker: OffloadingConnectorWorker | None = None
        self._metadata: OffloadingConnectorMetadata | None = None
        spec = spec or OffloadingSpecFactory.create_spec(config)
        if role is ConnectorRole.SCHEDULER:
            self.connector_scheduler = OffloadingConnectorScheduler(spec, describe=describe)
        else:
            self.connector_worker = OffloadingConnectorWorker(spec)

    @property
    def _scheduler(self) -> OffloadingConnectorScheduler:
        if self.connector_scheduler is None:
            raise InputError(
                "this connector was made with ConnectorRole.WORKER; the call belongs to the scheduler's side"
            )
        return self.connector_scheduler

    @property
    def _worker(self) -> OffloadingConnectorWorker:
        if self.connector_worker is None:
            raise InputError(
                "this connector was made with ConnectorRole.SCHEDULER; the call belongs to the worker's side"
            )
        return self.connector_worker

    # The scheduler's side.

    def on_new_request(self, request: RequestView) -> None:
        """Record that a request was queued. An earlier request may have had the same id."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the computed ones can be loaded, and whether asynchronously."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)

    def update_state_after_alloc(
        self, request: RequestView, blocks: BlockIds, num_external_tokens: int
    ) -> None:
        """Record the blocks that a request got; with external tokens, plan their load."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: StepView) -> OffloadingConnectorMetadata:
        """Return this step's orders for the workers."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in the workers' reports after a step; write into the output whose transfers are over."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: RequestView, block_ids: BlockIds | None = None, how: str = UNKNOWN_ENDING.how
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request. `how` it ended is one of `kvtier.policies.base.ENDINGS`, if the engine knows.

        `True` means that its blocks must be kept, and its id not reused, until an output names it.
        """
        return self._scheduler.request_finished(request, block_ids, how)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Take the events of changes in the tiers since the last call."""
        return self._scheduler.take_events()

    def retell_events(self) -> Iterable[KVCacheEvent]:
        """Take events that announce the whole content of the tiers again, instead of the changes."""
        return self._scheduler.retell_events()

    def explain(self, req_id: ReqId) -> Explanation | None:
        """Return where a request's prompt came from."""
        return self._scheduler.explain(req_id)

    def reset_cache(self, kept_blocks: Iterable[int] | None = None) -> bool:
        """Empty every tier. Of blocks that the engine keeps, nothing computed from them is stored."""
        return self._scheduler.reset_cache(kept_blocks)

    def forget_stale_blocks(self) -> None:
        """Record that the engine has none of the blocks any more that it kept at the last reset."""
        self._scheduler.forget_stale_blocks()

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping although it has no requests."""
        return self._scheduler.has_pending_push_work()

    def wait_for_tiers(self, timeout: float) -> bool:
        """Block until chunks from a tier may have come, for an engine that has nothing else to do.

        Returns `False` if no chunk is on its way.
        """
        return self._scheduler.wait_for_tiers(timeout)

    # The worker's side.

    def register_kv_caches(
        self, kv_caches: Mapping[str, torch.Tensor], *, blocks_first: bool = False
    ) -> None:
        """Register the engine's KV tensors, by layer name, before the first step.

        With `blocks_first`, all tensors count blocks in their first dimension, also where its size is two.
        """
        self._worker.register_kv_caches(kv_caches, blocks_first=blocks_first)

    def unregister_kv_caches(self) -> None:
        """End all transfers and give up the KV tensors, before the engine unmaps their memory. Idempotent.

        `register_kv_caches` registers them again.
        """
        self._worker.unregister_kv_caches()

    def bind_connector_metadata(self, connector_metadata: OffloadingConnectorMetadata) -> None:
        """Set the orders of the step that begins.

        If the step before was never ended, its jobs that were not started are reported as failed.
        """
        if self._metadata is not None and self.connector_worker is not None:
            self.connector_worker.refuse_unstarted(self._metadata)
        self._metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """End the step."""
        self._metadata = None

    def handle_preemptions(self, metadata: OffloadingConnectorMetadata) -> None:
        """Make sure that no running store reads a block which this step overwrites.

        This is the first call of a step.
        """
        self._worker.handle_preemptions(metadata)

    def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
        """Start this step's loads."""
        self._worker.start_load_kv(self._bound())

    def void_loads(self) -> None:
        """Count the loads that run now as failed, whatever they bring."""
        self._worker.void_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is not scheduled before its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: stores take whole chunks after the pass."""

    def wait_for_save(self) -> None:
        """Start this step's stores, after the forward pass. Despite its name it does not wait."""
        self._worker.start_store_kv(self._bound())

    def take_output(self) -> KVConnectorOutput:
        """Take this worker's message after a step."""
        return self._worker.take_output()

    def get_finished(self, finished_req_ids: set[ReqId]) -> tuple[set[ReqId], set[ReqId]]:
        """Return the requests whose stores, and those whose load, are over.

        The rest of the output waits for `take_output`.
        """
        return self._worker.get_finished(finished_req_ids)

    def wait_for_transfers(self, timeout: float) -> bool:
        """Block until a transfer is over or `timeout` seconds have passed.

        This is for an engine with nothing else to do. Returns `False` if no transfer runs.
        """
        return self._worker.wait_for_transfers(timeout)

    # Both sides.

    def shutdown(self) -> None:
        """Release everything. Idempotent."""
        for side in (self.connector_worker, self.connector_scheduler):
            if side is not None:
                side.shutdown()

    def _bound(self) -> OffloadingConnectorMetadata:
        if self._metadata is None:
            raise InputError("no step is under way: call bind_connector_metadata first")
        return self._metadata
