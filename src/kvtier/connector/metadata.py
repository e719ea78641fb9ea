"""The messages between an engine and the connector and between the connector's two sides, and small views of
requests and steps.

The connector never sees an engine's classes. In each step, an engine offers requests as objects that fit
`RequestView`, and fills one `StepView`. It carries `OffloadingConnectorMetadata` from the scheduler's side
to every worker, and one `KVConnectorOutput` back. Everything that crosses a process boundary is plain and
picklable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from kvtier.transfer.base import TransferResult, TransferSpec

ReqId = str
BlockIds = tuple[list[int], ...]
"""Block ids by group. `NULL_BLOCK` stands where a sliding window has left no block."""


class ConnectorRole(Enum):
    """The half of a connector that a process needs."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class RequestView(Protocol):
    """A request as the scheduler's side reads it.

    The scheduler's side keeps the object from the first call until `request_finished`. If the request has a
    `cache_salt`, that tells its tenant.
    """

    @property
    def request_id(self) -> ReqId: ...
    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens and generated tokens so far."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes, one for every full `hash_block_size` tokens of `num_tokens`. Append-only."""
        ...

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None: ...


class NewRequest(NamedTuple):
    """A request that runs for the first time in this step, with all blocks it holds."""

    req_id: ReqId
    block_ids: BlockIds
    num_computed_tokens: int
    """The number of tokens whose KV is in the blocks before this step: prefix hits and finished loads."""


class CachedRequest(NamedTuple):
    """A request that ran before.

    `resumed`: it was preempted, and `new_block_ids` are all blocks it holds now.
    """

    req_id: ReqId
    new_block_ids: BlockIds | None
    num_computed_tokens: int
    resumed: bool = False


class BoundaryState(NamedTuple):
    """A block of a state group that holds, after a step, the state after exactly `boundary` tokens."""

    group: int
    block_id: int
    boundary: int


@dataclass(slots=True)
class StepView:
    """One engine step, as scheduled. The connector does not change it."""

    new: list[NewRequest] = field(default_factory=list)
    cached: list[CachedRequest] = field(default_factory=list)
    num_scheduled_tokens: dict[ReqId, int] = field(default_factory=dict)
    preempted_req_ids: set[ReqId] = field(default_factory=set)
    finished_req_ids: set[ReqId] = field(default_factory=set)
    """Requests for which `request_finished` was called since the last step."""
    ended: list[CachedRequest] = field(default_factory=list)
    """Requests that have ended and have chunks left to store. They get no new blocks, and their blocks may
    be given to others.
    """
    speculative_blocks: set[int] = field(default_factory=set)
    """Blocks allocated since the last step for requests that may never run with them."""
    copied_blocks: Sequence[tuple[int, int]] = ()
    """Pairs of a block and the block that it is copied to before the step runs."""
    boundary_states: dict[ReqId, list[BoundaryState]] = field(default_factory=dict)
    """The states that requests reach in this step, or reached before it, and that are worth keeping. Only
    these are stored: a state group's table does not say which block holds which state. The blocks keep
    their content until the end of the step; later they may be given to others.
    """


def yield_req_data(step: StepView) -> Iterator[tuple[ReqId, BlockIds, bool]]:
    """Yield `(req_id, new_block_id_groups, preempted)` for each request of a step.

    A `preempted` request starts over.
    """
    for new in step.new:
        yield new.req_id, new.block_ids, False
    for cached in step.cached:
        yield cached.req_id, cached.new_block_ids or (), cached.resumed


class EndOrder(NamedTuple):
    """An order to end a job and to report it, for the ranks whose report has not come.

    A rank that does not know the job (any more) reports it as failed: either the job was never started
    there, or its report was lost. `block_ids` are the blocks that a load was to fill. Nothing of a `void`
    load may be used, even if it has arrived.
    """

    req_id: ReqId
    ranks: frozenset[int]
    block_ids: tuple[int, ...]
    void: bool


@dataclass(slots=True)
class OffloadingConnectorMetadata:
    """One step's orders to every worker.

    A request has at most one load and one store in a step; `load_jobs` and `store_jobs` give their job
    ids. Jobs of `jobs_to_flush` read blocks that another request writes in this step, some of `handed_out`:
    they must be over before the step runs. `audits` are stores into scratch slots, by job id. Jobs of
    `jobs_to_end` have taken too long or are no longer wanted; an order is repeated until it is obeyed.
    Requests of `reqs_to_hold` have finished and keep their blocks until `get_finished` names them.
    """

    reqs_to_load: dict[ReqId, TransferSpec] = field(default_factory=dict)
    reqs_to_store: dict[ReqId, TransferSpec] = field(default_factory=dict)
    load_jobs: dict[ReqId, int] = field(default_factory=dict)
    store_jobs: dict[ReqId, int] = field(default_factory=dict)
    audits: dict[int, tuple[ReqId, TransferSpec]] = field(default_factory=dict)
    jobs_to_flush: set[int] = field(default_factory=set)
    handed_out: set[int] = field(default_factory=set)
    jobs_to_end: dict[int, EndOrder] = field(default_factory=dict)
    reqs_to_hold: set[ReqId] = field(default_factory=set)


class TransferReport(NamedTuple):
    """A job's result on one rank."""

    rank: int
    result: TransferResult


@dataclass(slots=True)
class KVConnectorOutput:
    """The workers' message to the scheduler's side after a step.

    `finished_sending`: finished requests whose stores are over, so that their blocks may be freed.
    `finished_recving`: requests whose load is over, successful or not. `invalid_block_ids`: blocks of these
    requests whose bytes did not arrive. `failed_recving`: the requests that these blocks belong to.
    `distrusted`: audits have found several wrong rows, and the tiers were reset. The engine must forget the
    KV in its own cache too, since some of it was loaded.
    """

    finished_sending: set[ReqId] = field(default_factory=set)
    finished_recving: set[ReqId] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    reports: list[TransferReport] = field(default_factory=list)
    failed_recving: set[ReqId] = field(default_factory=set)
    distrusted: bool = False


def merge_outputs(outputs: Iterable[KVConnectorOutput]) -> KVConnectorOutput:
    """Merge the messages of all workers for `update_connector_output`, which goes by their reports alone."""
    return KVConnectorOutput(reports=[report for output in outputs for report in output.reports])
