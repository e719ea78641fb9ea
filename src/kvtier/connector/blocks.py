"""`EngineBlocks`: the blocks that the engine hands out to requests, and which of them hold stale KV.

A block that a running store still reads must not be written by another request before the store is ended, so
the blocks handed out since the last step are kept until the step is built. A reset of the tiers makes all KV
stale that the engine still has: blocks of before the reset, and blocks that are computed from them. Nothing
stale is stored. Scheduler thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from kvtier.connector.metadata import BlockIds, ReqId, StepView, yield_req_data
from kvtier.connector.state import ChunkGeometry, RequestState
from kvtier.transfer.base import NULL_BLOCK

logger = logging.getLogger(__name__)


class EngineBlocks:
    """Owns which blocks requests hold, when blocks were handed out, and which blocks are stale."""

    def __init__(self, geometry: ChunkGeometry) -> None:
        self._geometry = geometry
        self.step = 0
        """The number of steps so far."""
        self.epoch = 0
        """The number of resets so far."""
        self.handed_out: set[int] = set()
        """The blocks handed out since the last step."""
        self.handed_out_at: dict[int, int] = {}
        """With windows: the step in which a block was last handed out."""
        self.stale: set[int] = set()
        """The blocks that hold KV of before the last reset, or KV that was computed from it."""

    def allocate(self, state: RequestState, blocks: BlockIds) -> bool:
        """Record all blocks that a request holds now, and return whether its prefix hit is stale.

        Its new blocks count as handed out at once: another connector may load into them before it runs.
        """
        for group in state.groups:
            group.take_all()
            group.give(blocks[group.geometry.index], self.step + 1)
        is_stale = bool(self.stale) and not self.stale.isdisjoint(state.hits())
        if is_stale:
            state.epoch = None
        for group in state.groups:
            self._hand_out(group.block_ids[state.local // group.geometry.block_size :], state)
        return is_stale

    def begin_step(self, step: StepView, requests: Mapping[ReqId, RequestState]) -> None:
        """Record the blocks that requests get in a step."""
        self.step += 1
        starting = {new.req_id: new.num_computed_tokens for new in step.new}
        starting |= {cached.req_id: cached.num_computed_tokens for cached in step.cached if cached.resumed}
        stale_copies = {copy for block, copy in step.copied_blocks if block in self.stale}
        for req_id, block_ids, _ in yield_req_data(step):
            if not block_ids:
                continue
            hit = starting.get(req_id, 0)
            state = requests.get(req_id)  # `None` if the engine never asked about it
            if state is not None and stale_copies and not stale_copies.isdisjoint(chain(*block_ids)):
                state.epoch = None
                self.stale |= stale_copies
            for geometry, ids in zip(self._geometry.groups, block_ids, strict=False):
                self._hand_out(ids[hit // geometry.block_size :], state)
            for group, ids in zip(state.groups if state else (), block_ids, strict=False):
                if req_id in starting:
                    group.take_all()
                group.give(ids, self.step)
        self._hand_out(step.speculative_blocks, None)
        self.handed_out.discard(NULL_BLOCK)
        if self._geometry.windowed:
            self.handed_out_at.update(dict.fromkeys(self.handed_out, self.step))

    def end_step(self) -> None:
        """Forget the blocks handed out for a step that is planned."""
        self.handed_out = set()

    def _hand_out(self, block_ids: Collection[int], state: RequestState | None) -> None:
        """Record that a request got blocks to fill.

        A request fills them with stale KV if its own is stale, or if it is not known.
        """
        self.handed_out.update(block_ids)
        if not self.stale:
            return
        if state is None or state.epoch != self.epoch:
            self.stale.update(block_ids)
            self.stale.discard(NULL_BLOCK)
            return
        self.stale.difference_update(block_ids)
        if not self.stale:
            logger.info("the engine has handed out anew all blocks with KV of before the last reset")

    def still_has_all(self, state: RequestState) -> bool:
        """Return whether no block of a request was handed out to another request since the last step."""
        return all(self.handed_out.isdisjoint(group.block_ids) for group in state.groups)

    def reset(self, kept: Iterable[int] | None) -> None:
        """Begin a new epoch, in which the `kept` blocks are stale; `None` means those that were before."""
        self.epoch += 1
        if kept is not None:
            self.stale.clear()
            self.stale.update(kept)
        if self.stale:
            logger.warning(
                "reset: the engine still has %s blocks with KV of before it; nothing that requests compute "
                "from these is stored until they are handed out anew",
                f"{len(self.stale):,}",
            )
