"""`RequestState`: the keys, blocks and jobs of a request, as the scheduler's side keeps them; and
`EngineBlocks`: the blocks that the engine hands out to requests.

Chunk arithmetic lives here too. All ranges are half-open; for one group, in tokens:

    0 ............ local ............... end .......... num_tokens
      on the GPU         to be loaded         to be computed

A windowed group needs only `[max(local, end - window), end)` of the middle part. The token computed next
looks no further back; it is at `end`, or at `end - 1` if everything was loaded. A chunked-local group needs
the tokens since the last multiple of its chunk size. A state group needs one block, the one that ends at
`end`: it stands for all tokens before. Such an `end` is a multiple of the group's chunks, and never the
request's last token, which would enter the state a second time when it is computed.

Where groups have blocks of different sizes, an end may lie inside a chunk of some group. That whole chunk is
needed, and its tokens beyond the end are computed again in its place. Scheduler thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import gcd, lcm
from typing import Any

from kvtier.config import OffloadingConfig
from kvtier.connector.metadata import (
    BlockIds,
    BoundaryState,
    ReqId,
    RequestView,
    StepView,
    yield_req_data,
)
from kvtier.errors import LogLimit, show_value
from kvtier.keys import OffloadKey, make_offload_keys
from kvtier.offload.base import ReqContext
from kvtier.residency import MissReason
from kvtier.transfer.base import NULL_BLOCK

logger = logging.getLogger(__name__)

_FEW_WINDOW_CHUNKS = 6
"""Windows are stored for every end if they take at most so many times the chunks of full attention."""


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """The sizes by which the tokens of one group are divided into blocks and chunks."""

    index: int
    block_size: int
    blocks_per_chunk: int
    hashes_per_chunk: int
    window: int | None = None
    attention_chunk: int | None = None
    is_state: bool = False

    @property
    def chunk_size(self) -> int:
        """Tokens of one chunk."""
        return self.block_size * self.blocks_per_chunk

    @property
    def is_windowed(self) -> bool:
        """Whether a token sees only some of the tokens before it, so that requests drop blocks."""
        return self.window is not None or self.attention_chunk is not None

    def first_needed(self, local: int, end: int) -> int:
        """Return the first token that must be loaded so that computing can go on at `end` or `end - 1`."""
        if self.window is not None:
            return max(local, end - self.window)
        if self.attention_chunk is not None:
            return max(local, (end - 1) // self.attention_chunk * self.attention_chunk)
        return max(local, end - self.block_size) if self.is_state else local


class ChunkGeometry:
    """The chunk arithmetic of all groups of an engine."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.lookahead = config.lookahead
        per_chunk = config.settings.blocks_per_chunk
        self.groups = tuple(
            GroupGeometry(
                index,
                group.block_size,
                per_chunk,
                group.block_size * per_chunk // config.hash_block_size,
                group.sliding_window,
                group.attention_chunk_size,
                group.is_state,
            )
            for index, group in enumerate(config.groups)
        )
        self.windowed = tuple(group for group in self.groups if group.is_windowed)
        self.states = tuple(group for group in self.groups if group.is_state)
        self.sparse = self.windowed + self.states
        """The groups of which a load needs only the last part."""
        self.full = tuple(group for group in self.groups if group not in self.sparse)
        self.main_group = (self.full or self.sparse)[0].index
        """The group whose chunks decide how many tokens count for each tier."""
        attention = self._find_attention_alignment()
        self.alignment = lcm(attention, *(group.chunk_size for group in self.states))
        """Loads end at multiples of this many tokens. A state exists only at the end of its chunks."""
        covers = self.lookahead and self.states != self.groups
        self.reach_alignment = attention if covers else self.alignment
        """The chunks that are looked for end at multiples of this many tokens. With a lookahead, attention's
        chunks beyond the last state count too.
        """
        self.has_costly_windows = self._find_costly_windows()
        """Whether windows are stored only for some ends of a request (`RequestState.window_ends`)."""
        self._block_bytes = tuple(map(config.bytes_of_all_ranks, range(len(config.groups))))

    def _find_attention_alignment(self) -> int:
        """Return the number of tokens between two possible ends of a load, if there were no states.

        It divides the size of every full-attention chunk, since a prefix may end at any of those. A windowed
        chunk size that divides this number does not lower it, so that windowed chunks beyond the window of
        every end need not be stored. Any other windowed chunk is in the window of some end anyway.
        """
        windowed = [group.chunk_size for group in self.windowed]
        coarse = gcd(*(group.chunk_size for group in self.full)) or max(windowed, default=1)
        return gcd(coarse, *(size for size in windowed if coarse % size))

    def may_load_after(self, local: int) -> bool:
        """Return whether a load can begin at token `local`: not inside a block."""
        return all(local % group.block_size == 0 for group in self.groups)

    def longest_load(self, num_tokens: int) -> int:
        """Return how many leading tokens of a request may be loaded.

        The last token is computed in any case. A state that has seen it already would see it twice.
        """
        return num_tokens - bool(self.states)

    def next_chunk_end(self, num_tokens: int) -> int:
        """Return the smallest number above `num_tokens` that completes a chunk of some group."""
        return min((num_tokens // group.chunk_size + 1) * group.chunk_size for group in self.groups)

    def num_final(self, num_tokens: int) -> int:
        """Return the number of tokens whose KV is final after a step that has computed `num_tokens`.

        The first token of the lookahead is known when the step is over. A longer lookahead delays the rest.
        """
        return max(0, num_tokens - max(0, self.lookahead - 1))

    def may_need(self, group: GroupGeometry, chunk: int, ends: Iterable[int] | None = None) -> bool:
        """Return whether a load may ever need a chunk of a windowed group.

        It does only if the chunk is in the window of the first end beyond its start, or of one of `ends`.
        """
        start, stop = chunk * group.chunk_size, (chunk + 1) * group.chunk_size
        if ends is None:
            ends = ((start // self.reach_alignment + 1) * self.reach_alignment,)
        return any(start < end and group.first_needed(0, end) < stop for end in ends)

    def _find_costly_windows(self) -> bool:
        """Return whether the windows of all ends take many times the chunks of full attention."""
        span = lcm(self.reach_alignment, *(group.chunk_size for group in self.groups))
        windows = sum(
            self.may_need(group, chunk)
            for group in self.windowed
            for chunk in range(span // group.chunk_size)
        )
        full = sum(span // group.chunk_size for group in self.full)
        return 0 < _FEW_WINDOW_CHUNKS * full < windows

    def load_bytes(self, local: int, end: int) -> int:
        """Estimate the bytes of all ranks that a load of `[local, end)` moves."""
        return sum(
            -(-(end - group.first_needed(local, end)) // group.block_size) * self._block_bytes[group.index]
            for group in self.groups
        )


@dataclass(slots=True)
class GroupState:
    """One request's chunks in one group."""

    geometry: GroupGeometry
    keys: list[OffloadKey] = field(default_factory=list)
    """The keys of all complete chunks whose tokens are known; the list only grows."""
    block_ids: list[int] = field(default_factory=list)
    """The blocks that the request was given, by position; `NULL_BLOCK` where there is none."""
    boundary_blocks: dict[int, int] = field(default_factory=dict)
    """Of a state group, the blocks that hold states in this step, by chunk.

    The block table of such a group says only where a load goes: the engine moves states within it.
    """
    given_at: list[int] = field(default_factory=list)
    """Of a windowed group, the step in which each block was given.

    A block that the window has passed may belong to another request since.
    """
    next_store: int = 0
    """The first chunk that has not been offered for storing."""

    def extend_keys(self, hashes: Sequence[bytes]) -> None:
        """Add the keys of newly complete chunks: a chunk is named by the hash of its last block."""
        step = self.geometry.hashes_per_chunk
        last = (len(self.keys) + 1) * step - 1
        if last < len(hashes):
            self.keys += make_offload_keys(hashes[last::step], self.geometry.index)

    @property
    def num_keyed(self) -> int:
        """The number of tokens in chunks that have a key."""
        return len(self.keys) * self.geometry.chunk_size

    def give(self, block_ids: list[int], step: int) -> None:
        """Add blocks that the request got in a step."""
        self.block_ids += block_ids
        if self.geometry.is_windowed:
            self.given_at += [step] * len(block_ids)

    def take_all(self) -> None:
        """Take all blocks from the request."""
        self.block_ids, self.given_at = [], []

    def num_complete(self, num_tokens: int) -> int:
        """Count the leading chunks within the first `num_tokens` tokens that have a key and blocks."""
        blocks = len(self.block_ids) // self.geometry.blocks_per_chunk
        return min(num_tokens // self.geometry.chunk_size, len(self.keys), blocks)

    def blocks_of(self, chunks: list[int]) -> list[int]:
        """Return the block ids of chunks, one after the other. A state is the last block of its chunk."""
        per_chunk = self.geometry.blocks_per_chunk
        if self.geometry.is_state:
            nothing = [NULL_BLOCK] * (per_chunk - 1)
            return [block_id for chunk in chunks for block_id in (*nothing, self.boundary_blocks[chunk])]
        if per_chunk == 1:
            return [self.block_ids[chunk] for chunk in chunks]
        starts = [chunk * per_chunk for chunk in chunks]
        return [block_id for start in starts for block_id in self.block_ids[start : start + per_chunk]]

    def still_has(self, chunk: int, allocated_at: Mapping[int, int]) -> bool:
        """Return whether the request still has all blocks of a windowed group's chunk.

        It has lost a block that is null, or that was allocated again after the request got it.
        """
        start = chunk * self.geometry.blocks_per_chunk
        stop = start + self.geometry.blocks_per_chunk
        blocks = zip(self.block_ids[start:stop], self.given_at[start:stop], strict=True)
        return all(block != NULL_BLOCK and allocated_at.get(block, 0) <= given for block, given in blocks)


@dataclass(slots=True)
class RequestState:
    """Everything the scheduler's side knows of one request."""

    view: RequestView
    context: ReqContext
    groups: tuple[GroupState, ...]
    epoch: int | None = 0
    """The number of resets of the tiers before the engine last asked. The request's blocks were computed
    after the last of these; `None` means from KV of before it, which the engine still had.
    """
    local: int = 0
    """The number of tokens on the GPU when the engine last asked."""
    full_reach: int = 0
    """How far full attention could be loaded when the engine last asked, whatever windows there were."""
    load_job: int | None = None
    store_jobs: set[int] = field(default_factory=set)
    """Running stores that read blocks which the request holds."""
    may_load: bool = True
    """False once a load has failed, until the request is preempted: it computes instead."""
    waiting_since: float | None = None
    """When the request began to wait for chunks that are on their way into the pool for another request."""
    next_offer: int = 0
    """The number of computed tokens from which a next chunk is complete and can be offered for storing."""
    retry_store_at: int = 0
    store_limit: int | None = None
    """The number of leading tokens that may be stored, if the request or the engine sets a limit."""
    load_limit: int | None = None
    """The number of tokens that a load may bring, if the request or the engine sets a limit."""
    audit_tokens: int | None = None
    """The number of tokens at the end of its hit that are audited; `None` until that is chosen."""
    audit: range = range(0)
    """The tokens that could be loaded and are computed for an audit."""
    audit_sources: Mapping[OffloadKey, str] = field(default_factory=dict)
    """The tiers from which rows of the hit were promoted for the request."""
    has_run: bool = False
    """Whether the request has ever had blocks."""
    finished: bool = False
    explained: bool = False
    miss: tuple[dict[str, MissReason], int | None] = field(default_factory=lambda: ({}, None))
    """The reasons, by tier, why the first chunk that is not loaded is missing; and its first token."""

    def start_over(self, local: int, epoch: int) -> None:
        """Begin with `local` tokens on the GPU: the engine asks about a request that holds no blocks."""
        self.local = local
        if epoch != self.epoch:
            self.epoch, self.next_offer = epoch, 0
            for group in self.groups:
                group.next_store = 0

    def window_ends(self, alignment: int) -> tuple[int, int]:
        """Return the ends whose windows are worth storing where those of all ends would be too many.

        They are the end of the prompt, where a next turn goes on, and the end of what the prompt shares with
        earlier ones: they have stored full attention up to there, but no windows.
        """
        return self.view.num_prompt_tokens // alignment * alignment, self.full_reach

    def hits(self) -> Iterator[int]:
        """Return the blocks that held tokens of the request when the engine last asked."""
        for group in self.groups:
            yield from group.block_ids[: -(-self.local // group.geometry.block_size)]

    def take_boundary_states(self, offers: Iterable[BoundaryState], limit: int) -> None:
        """Take in the states that the request reaches in this step, up to token `limit`.

        A state at another boundary than the end of a chunk cannot be found, and is left out.
        """
        for group in self.groups:
            group.boundary_blocks = {}
        for index, block_id, boundary in offers:
            group = self.groups[index]
            chunk, rest = divmod(boundary, group.geometry.chunk_size)
            if rest == 0 and block_id != NULL_BLOCK and 0 < boundary <= limit:
                group.boundary_blocks[chunk - 1] = block_id

    def extend_keys(self) -> None:
        """Add the keys of chunks that the request's new hashes complete."""
        hashes = self.view.block_hashes
        for group in self.groups:
            group.extend_keys(hashes)

    @property
    def num_chunks(self) -> int:
        """The number of chunks of all groups that have a key."""
        return sum(len(group.keys) for group in self.groups)

    def all_keys(self) -> list[OffloadKey]:
        """Return the keys of all groups from the head of the prefix to its tail."""
        if len(self.groups) == 1:
            return self.groups[0].keys
        return self.head_to_tail(
            [dict(zip(group.keys, range(len(group.keys)), strict=True)) for group in self.groups]
        )

    def head_to_tail(self, chunks: list[dict[OffloadKey, int]]) -> list[OffloadKey]:
        """Return the keys of `chunks` from the head of the prefix to its tail.

        `chunks` gives for each group the position of each key.
        """
        if len(chunks) == 1:
            return list(chunks[0])
        placed = [
            ((position + 1) * group.geometry.chunk_size, group.geometry.index, key)
            for group, positions in zip(self.groups, chunks, strict=True)
            for key, position in positions.items()
        ]
        return [key for _, _, key in sorted(placed)]


class EngineBlocks:
    """Owns which blocks requests hold, when blocks were handed out, and which blocks hold stale KV.

    A block that a running store still reads must not be written by another request before the store is
    ended, so the blocks handed out since the last step are kept until the next step is planned. A reset of
    the tiers makes all KV stale that the engine still has: blocks of before the reset, and blocks that are
    computed from them. Nothing stale is stored.
    """

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
        self.handed_out.update(copy for _, copy in step.copied_blocks)
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
                if req_id in starting or not group.geometry.is_state:
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
        """Return whether no block of a request was handed out to another request since the last step.

        States do not count: they are stored in the step that reaches them.
        """
        groups = (group for group in state.groups if not group.geometry.is_state)
        return all(self.handed_out.isdisjoint(group.block_ids) for group in groups)

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


def read_params(params: object) -> dict[str, Any] | None:
    """Return the parameters of a request; `None` if they are not a dict.

    They come from a client and may be of any type.
    """
    return params if isinstance(params, dict) else None


def read_token_limit(params: Mapping[str, Any] | None, name: str, log_limit: LogLimit) -> int | None:
    """Return a number of tokens from a request's parameters; `None` if it is absent or not valid.

    `log_limit` bounds the lines about numbers that are not valid.
    """
    limit = None if params is None else params.get(name)
    if limit is None or (type(limit) is int and limit >= 0):
        return limit
    if (more := log_limit.admit()) is not None:
        logger.warning(
            "kv_transfer_params.%s: expected a number of tokens, got %s; the request has no such limit%s",
            name,
            show_value(limit),
            more,
        )
    return None
