"""Decides which tokens are computed in a step: continuous batching with chunked prefill, oldest request
first.

    waiting --admit--> running --finish--> gone
       |  ^--preempt----'   ^        '---> held --> gone
       '--admit--> loading -'

Every queue is ordered by arrival. A held request is finished, but a transfer still uses its blocks.

The scheduler never deadlocks. A request is admitted only if there are blocks for all of its tokens beside
the blocks that earlier requests still need. When blocks run out anyway, the youngest running request gives
its blocks back and is computed again later; if that is the request which asks, it waits. So the oldest
running request lacks blocks only while transfers hold them, and transfers have deadlines. A request that
even an empty cache could not hold is refused before it comes here.

This is also the scheduler's half of a connector's host: `_ask`, `_open`, `take_transfers` and `finish` make
all calls of the connector except those around a step, which the engine makes. One thread uses this.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from kvtier.connector.metadata import BlockIds, CachedRequest, KVConnectorOutput, NewRequest, StepView
from kvtier.engine.cache import BlockTable, KVCache
from kvtier.engine.config import EngineConfig
from kvtier.engine.request import FinishReason, Request, RequestStatus
from kvtier.errors import IntegrityError

if TYPE_CHECKING:
    from kvtier.connector import OffloadingConnector

_by_arrival = attrgetter("arrival")


class RequestSlice(NamedTuple):
    """The tokens `[start, end)` of a request, to be computed in one step."""

    request: Request
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the slice ends with the request's last token, so that the next token can be sampled."""
        return self.end == self.request.num_tokens


@dataclass(slots=True)
class Step:
    """The slices that one step computes, and the step as a connector sees it."""

    budget: int
    slices: list[RequestSlice] = field(default_factory=list)
    view: StepView = field(default_factory=StepView)

    def add(self, request: Request, end: int, new_blocks: BlockIds) -> None:
        """Add a request's next tokens, up to `end`.

        The connector gets all blocks of a request that is new or resumed, else only its new blocks.
        """
        req_id, start = request.request_id, request.num_computed_tokens
        self.slices.append(RequestSlice(request, start, end))
        self.budget -= end - start
        self.view.num_scheduled_tokens[req_id] = end - start
        if not request.has_run:
            self.view.new.append(NewRequest(req_id, request.table.block_ids(), start))
        elif request.is_resumed:
            self.view.cached.append(CachedRequest(req_id, request.table.block_ids(), start, resumed=True))
        else:
            self.view.cached.append(CachedRequest(req_id, new_blocks if any(new_blocks) else None, start))
        request.has_run, request.is_resumed = True, False


class Scheduler:
    """Owns every request that is not over."""

    def __init__(
        self, config: EngineConfig, cache: KVCache, connector: OffloadingConnector | None = None
    ) -> None:
        self._config = config
        self._cache = cache
        self._connector = connector
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.held: dict[str, Request] = {}
        self._held_for_loads: set[str] = set()
        # The changes that the connector does not know yet.
        self._finished: set[str] = set()
        self._preempted: set[str] = set()

    # -- one step ----------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Fill a step: running requests go on; if none lacked blocks, waiting requests come in."""
        step = Step(self._config.max_num_batched_tokens)
        if self._continue_running(step):
            self._admit_waiting(step)
        step.view.finished_req_ids = set(self._finished)
        step.view.preempted_req_ids = set(self._preempted)
        for request, start, end in step.slices:
            if states := self._cache.boundary_states(request, start, end):
                step.view.boundary_states[request.request_id] = states
        return step

    def confirm(self, step: Step) -> None:
        """Count the changes of a step as known to the connector, if any.

        Until then the next step reports them again.
        """
        self._finished -= step.view.finished_req_ids
        self._preempted -= step.view.preempted_req_ids

    def start_all_over(self) -> None:
        """Send back all running requests, because a step was cut off at an unknown point.

        Tokens stay. KV that was counted as computed can be found again, and the rest is computed again.
        """
        while self.running:
            request = self.running.pop()
            self._preempted.add(request.request_id)
            self._send_back(request)

    def _continue_running(self, step: Step) -> bool:
        preempted = len(self._preempted)
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:
                break  # this request and all that follow were preempted for an older one
            end = min(request.compute_end, request.num_computed_tokens + step.budget)
            if end > request.num_computed_tokens and not self._continue(step, request, end):
                return False
        return len(self._preempted) == preempted

    def _continue(self, step: Step, request: Request, end: int) -> bool:
        """Compute a request up to `end`, preempting younger requests for blocks.

        Return `False` if there is no younger request, so that it waits.
        """
        while (new_blocks := self._cache.extend(request.table, request.num_computed_tokens, end)) is None:
            if self._release_held():
                continue
            youngest = self.running[-1]
            if youngest is request:
                return False
            self.running.pop()
            self._send_back(youngest)
            youngest.preemptions += 1
            self._preempted.add(youngest.request_id)
        step.add(request, end, new_blocks)
        return True

    def _send_back(self, request: Request) -> None:
        """Take a request's blocks and let it wait, in the order of arrival."""
        self._cache.release(request.table)
        request.start_over()
        insort(self.waiting, request, key=_by_arrival)

    def _admit_waiting(self, step: Step) -> None:
        """Admit requests, oldest first, up to the first without room; skip those that must ask again."""
        for request in list(self.waiting):
            if len(self.running) + len(self.loading) == self._config.max_num_seqs:
                break
            if request.request_id in self.held:
                continue  # an abandoned load of this request still fills blocks
            local = self._cache.find_prefix(request)
            external = self._ask(request, local)
            if external is None:
                continue
            if not (external or step.budget) or not self._make_room(request, local, local + external):
                break
            self._open(request, local, external)
            self.waiting.remove(request)
            if not external:
                self._set_running(request)
                self._continue(step, request, min(request.num_tokens, local + step.budget))

    def _make_room(self, request: Request, local: int, end: int) -> bool:
        """Return whether there is room for a request; if need be, free blocks that only stores of finished
        requests read.
        """
        return self._has_room(request, local, end) or (
            self._release_held() and self._has_room(request, local, end)
        )

    def _release_held(self) -> bool:
        """Free the blocks that finished requests keep for their stores; return whether there were any.

        A store that still reads such a block is ended before the step in which another request gets it.
        """
        stored = self.held.keys() - self._held_for_loads
        for req_id in stored:
            self._cache.release(self.held.pop(req_id).table)
        return bool(stored)

    def _has_room(self, request: Request, local: int, end: int) -> bool:
        """Return whether a request can compute all its tokens and one more, beside the admitted requests."""
        promised = sum(
            max(
                0,
                self._cache.most_blocks(other.num_computed_tokens, other.num_tokens + 1)
                - other.table.num_held,
            )
            for other in (*self.running, *self.loading)
        )
        return promised + self._cache.blocks_to_take(request, local, end) <= self._cache.num_free

    def _set_running(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_by_arrival)

    def finish_slice(self, request_slice: RequestSlice) -> None:
        """Count a slice as computed; its full blocks can serve other requests from now on."""
        request_slice.request.advance(request_slice.end - request_slice.start)
        self._cache.enter(request_slice.request)

    # -- with a connector --------------------------------------------------------------------------

    def _ask(self, request: Request, local: int) -> int | None:
        """Ask how many tokens beyond the local ones can be loaded; `None` means to ask again in a step."""
        if self._connector is None:
            return 0
        external, _ = self._connector.get_num_new_matched_tokens(request, local)
        return external

    def _open(self, request: Request, local: int, external: int) -> None:
        """Give a request its blocks. Its external tokens are loaded while other requests run."""
        request.table = self._cache.open(request, local, local + external)
        request.num_computed_tokens = local
        if request.first_token_at is None:
            request.from_gpu = local
        if self._connector is not None:
            try:
                self._connector.update_state_after_alloc(request, request.table.block_ids(), external)
            except BaseException:
                self._take_back(request, self._connector)
                raise
        if external:
            request.load_end = local + external
            request.status = RequestStatus.LOADING
            insort(self.loading, request, key=_by_arrival)

    def _take_back(self, request: Request, connector: OffloadingConnector) -> None:
        """Take back a request's blocks, which the connector may know of.

        If the connector has planned a load anyway, the load keeps the blocks.
        """
        former = copy(request)
        request.table = BlockTable()
        request.start_over()
        hold = True
        try:
            hold, _ = connector.request_finished(former, former.table.block_ids())
        finally:
            self._hold_or_release(former, hold, is_loading=hold)

    def take_transfers(self, output: KVConnectorOutput) -> None:
        """Take in the ended transfers: let loaded requests run, and free blocks held for transfers."""
        for request in [
            request for request in self.loading if request.request_id in output.finished_recving
        ]:
            self.loading.remove(request)
            self._end_load(request, output.invalid_block_ids)
        for req_id in (output.finished_sending | output.finished_recving) & self.held.keys():
            self._held_for_loads.discard(req_id)
            self._cache.release(self.held.pop(req_id).table)

    def _end_load(self, request: Request, invalid: set[int]) -> None:
        """Let a loaded request run. It computes only the blocks that did not arrive.

        With a sliding window or a state, computing even one missing block needs all blocks before it, and
        those were not loaded: the request starts over. So does a request whose load failed because of a
        reset: its KV on the GPU is as old as the load. The connector will not offer it a load again.
        """
        size, rows = self._cache.block_size, request.table.rows
        start, stop = request.num_computed_tokens // size, request.load_end // size
        arrived = [True] * (stop - start)
        if invalid:
            arrived = [all(row[position] not in invalid for row in rows) for position in range(start, stop)]
        has_all = all(group.span is None for group in self._cache.groups)
        if not all(arrived) and (not has_all or request.table.epoch != self._cache.epoch):
            self._send_back(request)
            return
        request.islands = [(first * size, last * size) for first, last in _runs(arrived, start)]
        request.advance(0)
        self._cache.enter(request)
        self._set_running(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state. Blocks that a transfer uses are kept until the transfer is over."""
        is_loading = request in self.loading
        for queue in (self.waiting, self.loading, self.running):
            if request in queue:
                queue.remove(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        self._preempted.discard(request.request_id)  # its id may be used again before the next step
        hold = is_loading
        try:
            if self._connector is not None:
                self._finished.add(request.request_id)
                hold, _ = self._connector.request_finished(request, request.table.block_ids())
        finally:
            self._hold_or_release(request, hold, is_loading)

    def _hold_or_release(self, request: Request, hold: bool, is_loading: bool) -> None:
        if not hold:
            self._cache.release(request.table)
            return
        self.held[request.request_id] = request
        if is_loading:
            self._held_for_loads.add(request.request_id)

    # -- integrity ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `IntegrityError` if requests and blocks do not agree."""
        for status, queue in zip(RequestStatus, (self.waiting, self.loading, self.running), strict=False):
            if queue != sorted(queue, key=_by_arrival) or any(
                request.status is not status for request in queue
            ):
                raise IntegrityError(
                    f"the {status.value} requests are not in order of arrival, or not all {status.value}"
                )
        for request in self.waiting:
            if request.table.rows:
                raise IntegrityError(f"request {request.request_id} waits and has blocks")
        for request in self.running:
            if request.num_computed_tokens >= request.num_tokens:
                raise IntegrityError(
                    f"request {request.request_id} has computed tokens that it does not have yet"
                )
        self._cache.check(request.table for request in (*self.loading, *self.running, *self.held.values()))


def _runs(flags: list[bool], start: int) -> Iterator[tuple[int, int]]:
    """Yield the runs `[first, last)` of set flags; the first flag is at position `start`."""
    first = start
    for position, flag in enumerate([*flags, False], start):
        if not flag:
            if first < position:
                yield first, position
            first = position + 1
