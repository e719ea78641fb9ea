"""Both sides of a connector in one object, for tests of the engine's side: a dict of blocks, and transfers
that take steps.

A store reads its blocks and a load writes them only when it is due, some steps later. So an engine that
frees or reuses a block too early stores or computes wrong bytes, and the toy model's tokens show it. Loads
fail on demand, leaving garbage behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvtier.connector import BlockIds, KVConnectorOutput, StepView
from kvtier.connector.metadata import BoundaryState
from kvtier.engine import Engine
from kvtier.engine.request import Request
from kvtier.keys import BlockHash

GARBAGE = 4321.0
Key = tuple[BlockHash, int]


@dataclass
class Transfer:
    req_id: str
    due: int
    moves: list[tuple[Key, int, int]]
    """Key, block id and position."""
    is_load: bool


@dataclass
class FakeConnector:
    """Takes the place of an engine's connector when made."""

    engine: Engine
    load_steps: int = 1
    store_steps: int = 1
    fail: Callable[[int], bool] = lambda position: False
    """Whether a load fails at a position of the sequence."""
    deferrals: dict[str, int] = field(default_factory=dict)
    """How many times a request is told to ask again."""
    rows: dict[Key, list[Tensor]] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)
    connector_scheduler: None = None

    def __post_init__(self) -> None:
        self.now = 0
        self.loads_failed = 0
        self._transfers: list[Transfer] = []
        self._planned: list[Transfer] = []
        self._requests: dict[str, Request] = {}
        self._tables: dict[str, BlockIds] = {}
        self._stored: dict[str, int] = {}
        self._never: set[str] = set()
        self._held: set[str] = set()
        self._invalid: set[int] = set()
        self._allocated: set[int] = set()
        self.engine.connector = self.engine.worker = self.engine._scheduler._connector = self

    # -- the scheduler's side --

    def on_new_request(self, request: Request) -> None:
        return

    def get_num_new_matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        self._requests[request.request_id] = request
        self.log.append(("ask", request.request_id))
        if self.deferrals.get(request.request_id, 0) > 0:
            self.deferrals[request.request_id] -= 1
            return None, False
        size, hashes = self.engine.config.block_size, request.block_hashes
        if request.request_id in self._never:
            return 0, False
        # A state contains all tokens up to its boundary, and the last token must be computed.
        has_states = any(group.is_state for group in self.engine.groups)
        last = (request.num_tokens - 1) // size if has_states else len(hashes)
        for end in range(last, local // size, -1):
            if all(
                (hashes[i], g) in self.rows
                for g in self._groups()
                for i in range(self._first(g, local, end), end)
            ):
                return end * size - local, True
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: BlockIds, num_external: int) -> None:
        self.log.append(("alloc", request.request_id))
        self._tables[request.request_id] = blocks
        size, local = self.engine.config.block_size, request.num_computed_tokens
        self._stored[request.request_id] = (local + num_external) // size
        self._allocated |= {block for row in blocks for block in row[local // size :]}
        if num_external:
            end = (local + num_external) // size
            moves = [
                ((request.block_hashes[i], g), blocks[g][i], i)
                for g in self._groups()
                for i in range(self._first(g, local, end), end)
                if blocks[g][i] != 0
            ]
            self._planned.append(
                Transfer(request.request_id, self.now + self.load_steps, moves, is_load=True)
            )

    def build_connector_meta(self, view: StepView) -> None:
        self.now += 1
        for req_id in view.preempted_req_ids:
            self._end(lambda transfer, gone=req_id: transfer.req_id == gone)  # type: ignore[misc]
            self._tables.pop(req_id, None)
        for new in view.new:
            self._allocated |= {
                b for row in new.block_ids for b in row[new.num_computed_tokens // self._size :]
            }
            self._tables[new.req_id] = new.block_ids
        for cached in view.cached:
            ids = cached.new_block_ids or tuple([] for _ in self._groups())
            start = cached.num_computed_tokens // self._size if cached.resumed else 0
            self._allocated |= {b for row in ids for b in row[start:]}
            old = self._tables[cached.req_id]
            joined = ids if cached.resumed else tuple(a + b for a, b in zip(old, ids, strict=True))
            self._tables[cached.req_id] = joined
        computed = {r.req_id: r.num_computed_tokens for r in (*view.new, *view.cached)}
        for req_id, scheduled in view.num_scheduled_tokens.items():
            stop = (computed[req_id] + scheduled) // self._size
            self._plan_store(req_id, stop, view.boundary_states.get(req_id, []))

    def _plan_store(self, req_id: str, stop: int, states: list[BoundaryState]) -> None:
        start, request = self._stored[req_id], self._requests[req_id]
        blocks = [(g, i, self._tables[req_id][g][i]) for g in self._positional() for i in range(start, stop)]
        blocks += [(state.group, state.boundary // self._size - 1, state.block_id) for state in states]
        moves = [
            ((request.block_hashes[i], g), block, i)
            for g, i, block in blocks
            if block != 0 and (request.block_hashes[i], g) not in self.rows
        ]
        self._stored[req_id] = max(start, stop)
        if moves:
            self._planned.append(Transfer(req_id, self.now + self.store_steps, moves, is_load=False))

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.log += [("recved", req_id) for req_id in sorted(output.finished_recving)]
        self.log += [("sent", req_id) for req_id in sorted(output.finished_sending)]

    def request_finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, None]:
        self.log.append(("finished", request.request_id))
        mine = [transfer for transfer in self._transfers if transfer.req_id == request.request_id]
        if any(not transfer.is_load for transfer in mine):
            self._held.add(request.request_id)
        return bool(mine), None

    def has_pending_push_work(self) -> bool:
        return bool(self._transfers)

    def wait_for_tiers(self, timeout: float) -> bool:
        return False

    def explain(self, request_id: str) -> None:
        return None

    def take_events(self) -> list[Any]:
        return []

    def reset_cache(self) -> None:
        self.rows.clear()

    # -- the worker's side --

    def bind_connector_metadata(self, metadata: None) -> None:
        self.log.append(("bind", ""))

    def handle_preemptions(self, metadata: None) -> None:
        """End stores that read a block which somebody got in this step. The null block is nobody's."""
        reused = self._allocated - {0}
        self._end(
            lambda transfer: not transfer.is_load and any(block in reused for _, block, _ in transfer.moves)
        )
        self._allocated = set()

    def start_load_kv(self) -> None:
        self._transfers += [transfer for transfer in self._planned if transfer.is_load]

    def wait_for_save(self) -> None:
        self._transfers += [transfer for transfer in self._planned if not transfer.is_load]
        self._planned = []

    def wait_for_transfers(self, timeout: float) -> None:
        self.log.append(("wait", ""))

    def take_output(self) -> KVConnectorOutput:
        recving = self._end(lambda transfer: transfer.due <= self.now)
        busy = {transfer.req_id for transfer in self._transfers}
        sending, self._held = self._held - busy, self._held & busy
        invalid, self._invalid = self._invalid, set()
        return KVConnectorOutput(sending, recving, invalid)

    def clear_connector_metadata(self) -> None:
        self.log.append(("clear", ""))

    def shutdown(self) -> None:
        self._transfers.clear()

    # -- bytes --

    @property
    def _size(self) -> int:
        return self.engine.config.block_size

    def _groups(self) -> range:
        return range(len(self.engine.groups))

    def _positional(self) -> list[int]:
        """Return the groups whose blocks are stored from the table."""
        return [index for index, group in enumerate(self.engine.groups) if not group.is_state]

    def _first(self, group: int, local: int, end: int) -> int:
        span = self.engine.groups[group].span
        return local // self._size if span is None else max(local, end * self._size - span) // self._size

    def _pages(self, group: int, block_id: int) -> list[Tensor]:
        caches = [self.engine.kv_caches[name] for name in self.engine.groups[group].layer_names]
        is_kv_first = self.engine.config.kv_layout == "kv_first" and not self.engine.groups[group].is_state
        return [cache.select(int(is_kv_first), block_id) for cache in caches]

    def _end(self, which: Callable[[Transfer], bool]) -> set[str]:
        """Carry out transfers; return the requests whose load is over."""
        ended = [transfer for transfer in self._transfers if which(transfer)]
        self._transfers = [transfer for transfer in self._transfers if transfer not in ended]
        for transfer in ended:
            for key, block_id, position in transfer.moves:
                if transfer.is_load:
                    self._load(transfer.req_id, key, block_id, position)
                else:
                    self.rows[key] = [page.clone() for page in self._pages(key[1], block_id)]
        return {transfer.req_id for transfer in ended if transfer.is_load}

    def _load(self, req_id: str, key: Key, block_id: int, position: int) -> None:
        failed = key not in self.rows or self.fail(position)  # a reset may have come between
        for page, row in zip(
            self._pages(key[1], block_id), self.rows.get(key, self._pages(key[1], 0)), strict=True
        ):
            page.copy_(row)
            if failed:
                page.fill_(GARBAGE)
        if failed:
            self._invalid.add(block_id)
            self._never.add(req_id)
            self.loads_failed += 1
