"""The records of the paged KV cache: which request holds which block, which blocks can serve a prefix again,
and which block is reused first.

Block ids come from one range and name a page in every tensor, so a block belongs to one group at a time.
Block 0 is the null block: it stands where a sliding window has left no block, and is never allocated or
written. A block of a state group holds the state after its last computed token, so that such a group needs
only the block of the last token before. Guarantees:

- a block is free, or held by the requests whose tables name it (`ref_count`), never both;
- free blocks with content can be found until they are allocated again, least recently freed first. The tail
  of a freed sequence is allocated before its head, so that the rest is still a prefix;
- events, replayed, give exactly the blocks that can be found; without windows a parent is announced before
  its children.

Positions count blocks from the head of a sequence. There are no tensors here. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from kvtier.connector.metadata import BlockIds, BoundaryState
from kvtier.engine.config import STATE, LayerKind
from kvtier.errors import IntegrityError
from kvtier.events.types import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvtier.keys import BlockHash
from kvtier.transfer.base import NULL_BLOCK

if TYPE_CHECKING:
    from kvtier.engine.request import Request

CacheKey = tuple[BlockHash, int]
"""A block's content: the hash of the prefix that it ends, and its group."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one row of block ids."""

    layer_names: tuple[str, ...]
    kind: LayerKind = None

    @property
    def is_state(self) -> bool:
        """Whether a block holds a state instead of its tokens' KV."""
        return self.kind == STATE

    @property
    def sliding_window(self) -> int | None:
        """The number of tokens that a token attends to, itself included; `None` if there is no window."""
        return self.kind if isinstance(self.kind, int) else None

    @property
    def span(self) -> int | None:
        """The number of last tokens, the current one included, whose blocks are needed; `None` means all.

        A state is in the block of the token before.
        """
        return 2 if self.is_state else self.sliding_window

    def first_needed(self, num_computed: int) -> int:
        """Return the first token whose block the token at `num_computed` needs."""
        return 0 if self.span is None else max(0, num_computed - self.span + 1)


def group_layers(layer_names: Sequence[str], kinds: Sequence[LayerKind]) -> tuple[CacheGroup, ...]:
    """Put layers of the same kind into one group, in order of first appearance.

    State layers are spread over groups no larger than the smallest other group, as engines do that give all
    groups blocks of one size.
    """
    names: dict[LayerKind, list[str]] = {}
    for name, kind in zip(layer_names, kinds, strict=True):
        names.setdefault(kind, []).append(name)
    fewest = min((len(layers) for kind, layers in names.items() if kind != STATE), default=len(kinds))
    sizes = {kind: fewest if kind == STATE else len(layers) for kind, layers in names.items()}
    return tuple(
        CacheGroup(tuple(layers[first : first + sizes[kind]]), kind)
        for kind, layers in names.items()
        for first in range(0, len(layers), sizes[kind])
    )


class Block:
    """One block: its id, the number of requests that hold it, and its content's key if it can be found."""

    __slots__ = ("block_id", "key", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: CacheKey | None = None

    def __repr__(self) -> str:
        return f"block {self.block_id} (held {self.ref_count} times, {'full' if self.key else 'empty'})"


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request: for each group a row of ids, in which leading positions may be null.

    It is empty if the request has no blocks.
    """

    rows: BlockIds = ()
    num_null: list[int] = field(default_factory=list)
    num_entered: int = 0
    """The number of leading positions that are in the prefix cache or came from it."""
    epoch: int = 0
    """The number of resets of the cache before the table's content was computed."""

    def block_ids(self) -> BlockIds:
        """Return a copy of the rows."""
        return tuple(list(row) for row in self.rows)

    @property
    def num_held(self) -> int:
        """The number of blocks that the request holds, over all groups."""
        return sum(map(len, self.rows)) - sum(self.num_null)


class KVCache:
    """The blocks of the engine: it allocates them, takes them back, and finds prefixes in them."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        block_size: int,
        *,
        max_slice: int,
        enable_prefix_caching: bool = True,
        state_interval: int | None = None,
        events: bool = True,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self._max_slice = max_slice
        self._prefix_caching = enable_prefix_caching
        self._state_interval = state_interval
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = OrderedDict((block.block_id, block) for block in self._blocks[1:])
        self._found_by: dict[CacheKey, Block] = {}
        self.epoch = 0
        """The number of resets of the cache."""
        self._events: list[KVCacheEvent] | None = [] if events else None

    # -- room --------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """The number of blocks that no request holds."""
        return len(self._free)

    def most_blocks(self, num_computed: int, num_tokens: int) -> int:
        """Return the most blocks that a request holds while it computes `[num_computed, num_tokens)`."""
        total = 0
        for group in self.groups:
            blocks = self._blocks_of(num_tokens)
            # A window holds itself and the slice behind it, which may begin anywhere in a block.
            if group.span is not None:
                span = group.span - 1 + min(self._max_slice, num_tokens - num_computed)
                blocks = min(blocks, self._blocks_of(span - 1) + 1)
            total += blocks
        return total

    def longest_request(self, limit: int) -> int:
        """Return the number of tokens, up to `limit`, that a request can have if it is alone."""
        usable = len(self._blocks) - 1
        if self.most_blocks(0, limit) <= usable:
            return limit
        blocks = min(usable, limit // self.block_size)
        while self.most_blocks(0, blocks * self.block_size) > usable:
            blocks -= 1
        return blocks * self.block_size

    def blocks_to_take(self, request: Request, local: int, end: int) -> int:
        """Return the most free blocks that all tokens of a request and one more can take.

        The request is opened with `open(request, local, end)`.
        """
        shared = sum(block.ref_count > 0 for row in self._prefix_rows(request, local, end) for block in row)
        return self.most_blocks(min(end, request.num_tokens - 1), request.num_tokens + 1) - shared

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- finding -----------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> int:
        """Return the number of leading tokens in the cache: whole blocks, and never the last token."""
        if not self._prefix_caching:
            return 0
        hashes = request.block_hashes
        length, shorter = -1, (request.num_tokens - 1) // self.block_size
        while length != shorter:  # if one group shortens the prefix, the windows of the others move
            length = shorter
            for index in range(len(self.groups)):
                shorter = self._longest(index, hashes, shorter)
        return length * self.block_size

    def _longest(self, index: int, hashes: Sequence[BlockHash], limit: int) -> int:
        """Return the longest prefix, in blocks up to `limit`, for which a group has all needed blocks."""
        if self.groups[index].span is None:
            return next((i for i in range(limit) if (hashes[i], index) not in self._found_by), limit)
        end = limit  # positions [position, end) are in the cache
        for position in reversed(range(limit)):
            if (hashes[position], index) not in self._found_by:
                end = position
            if position <= self._first_position(index, end * self.block_size):
                break
        return end

    def _prefix_rows(self, request: Request, local: int, end: int) -> list[list[Block]]:
        """Return by group the cached blocks, in the first `local` tokens, that computing at `end` needs."""
        hashes, stop, computed = (
            request.block_hashes,
            local // self.block_size,
            min(end, request.num_tokens - 1),
        )
        return [
            [self._found_by[hashes[i], index] for i in range(self._first_position(index, computed), stop)]
            for index in range(len(self.groups))
        ]

    def _first_position(self, index: int, num_computed: int) -> int:
        return self.groups[index].first_needed(num_computed) // self.block_size

    # -- holding -----------------------------------------------------------------------------------

    def open(self, request: Request, local: int, end: int) -> BlockTable:
        """Give a request its cached prefix of `local` tokens, and new blocks to load tokens `[local, end)`.

        Positions that computing from `end` on does not need are null. The caller has made sure that there is
        room.
        """
        computed = min(end, request.num_tokens - 1)  # the last token is computed even if it was loaded
        prefix = self._prefix_rows(request, local, end)
        for block in (block for blocks in prefix for block in blocks):
            self._hold(block)  # hold all before taking any, because taking evicts
        num_null = [self._first_position(index, computed) for index in range(len(self.groups))]
        rows = tuple(
            [NULL_BLOCK] * null + [block.block_id for block in blocks]
            for null, blocks in zip(num_null, prefix, strict=True)
        )
        table = BlockTable(rows, num_null, local // self.block_size, self.epoch)
        self._fill(table, end)
        return table

    def extend(self, table: BlockTable, num_computed: int, num_tokens: int) -> BlockIds | None:
        """Make room for tokens `[num_computed, num_tokens)`; first drop blocks that windows have passed.

        Return the new block ids by group, or `None` if there are not enough free blocks; then none is taken.
        """
        self._drop_left_behind(table, num_computed)
        missing = sum(max(0, self._blocks_of(num_tokens) - len(row)) for row in table.rows)
        return self._fill(table, num_tokens) if missing <= self.num_free else None

    def release(self, table: BlockTable) -> None:
        """Take back all blocks of a request, the tail of its sequence first.

        The table is empty afterwards.
        """
        for block_ids in zip(*map(reversed, table.rows), strict=True):
            for block_id in block_ids:
                self._let_go(block_id)
        table.rows, table.num_null, table.num_entered = (), [], 0

    def _fill(self, table: BlockTable, num_tokens: int) -> BlockIds:
        new = tuple(
            [self._take() for _ in range(len(row), self._blocks_of(num_tokens))] for row in table.rows
        )
        for row, block_ids in zip(table.rows, new, strict=True):
            row.extend(block_ids)
        return new

    def _drop_left_behind(self, table: BlockTable, num_computed: int) -> None:
        for index, row in enumerate(table.rows):
            first = self._first_position(index, num_computed)
            for position in reversed(range(table.num_null[index], first)):
                self._let_go(row[position])
                row[position] = NULL_BLOCK
            table.num_null[index] = max(first, table.num_null[index])

    def _take(self) -> int:
        block_id, block = self._free.popitem(last=False)
        if block.key is not None:
            self._record(_removed(block.key))
            del self._found_by[block.key]
        block.key, block.ref_count = None, 1
        return block_id

    def _hold(self, block: Block) -> None:
        if block.ref_count == 0:
            del self._free[block.block_id]
        block.ref_count += 1

    def _let_go(self, block_id: int) -> None:
        if block_id == NULL_BLOCK:
            return
        block = self._blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free[block_id] = block
            if block.key is None:  # nothing is lost with it, so it is reused before blocks with content
                self._free.move_to_end(block_id, last=False)

    # -- content -----------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """Enter the request's full, computed blocks into the prefix cache, and announce them."""
        table, hashes = request.table, request.block_hashes
        if not self._prefix_caching or table.epoch != self.epoch:
            return
        stop = request.num_computed_tokens // self.block_size
        for index, row in enumerate(table.rows):
            positions = self._kept_positions(request, index, table.num_entered, stop)
            entered = [i for i in positions if self._enter_block(row[i], (hashes[i], index))]
            self._announce(request, index, entered)
        table.num_entered = max(table.num_entered, stop)

    def boundary_states(self, request: Request, start: int, end: int) -> list[BoundaryState]:
        """Return the blocks that hold a state to keep once tokens `[start, end)` are computed."""
        first, stop = start // self.block_size, end // self.block_size
        return [
            BoundaryState(index, request.table.rows[index][i], (i + 1) * self.block_size)
            for index, group in enumerate(self.groups)
            if group.is_state
            for i in self._kept_positions(request, index, first, stop)
        ]

    def _kept_positions(self, request: Request, index: int, start: int, stop: int) -> Sequence[int]:
        """Return the positions of `[start, stop)` whose content is kept: of a state group, not all."""
        interval, positions = self._state_interval, range(start, stop)
        if interval is None or not self.groups[index].is_state:
            return positions
        replay = (request.num_prompt_tokens - 1) // self.block_size
        spacing = interval // self.block_size
        return [i for i in positions if i + 1 == replay or (spacing and (i + 1) % spacing == 0)]

    def _enter_block(self, block_id: int, key: CacheKey) -> bool:
        if block_id == NULL_BLOCK or key in self._found_by:
            return False
        block = self._found_by[key] = self._blocks[block_id]
        block.key = key
        return True

    def reset(self, *, tiers_too: bool = True) -> None:
        """Forget the content of all blocks.

        Blocks in use stay in use, but KV that is computed after them is not entered any more.
        `AllBlocksCleared` names no medium, so it is announced only if the tiers are emptied too; else the
        removal of every block is announced.
        """
        for event in (AllBlocksCleared(),) if tiers_too else map(_removed, self._found_by):
            self._record(event)
        for block in self._found_by.values():
            block.key = None
        self._found_by.clear()
        self.epoch += 1

    # -- events ------------------------------------------------------------------------------------

    def take_events(self) -> list[KVCacheEvent]:
        """Drain the changes since the last call, in order."""
        taken = list(self._events or ())
        if self._events:
            self._events.clear()
        return taken

    def _record(self, event: KVCacheEvent) -> None:
        if self._events is not None:
            self._events.append(event)

    def _announce(self, request: Request, index: int, positions: Iterable[int]) -> None:
        """Announce each run of consecutive positions."""
        if self._events is not None:
            for _, run in groupby(enumerate(positions), key=lambda item: item[1] - item[0]):
                consecutive = [position for _, position in run]
                self._record(self._stored(request, index, consecutive[0], consecutive[-1] + 1))

    def _stored(self, request: Request, index: int, start: int, stop: int) -> BlockStored:
        group = self.groups[index]
        attention = "full_attention" if group.sliding_window is None else "sliding_window"
        described = request.describe(start * self.block_size, stop * self.block_size, self.block_size)
        return BlockStored(
            block_hashes=list(request.block_hashes[start:stop]),
            parent_block_hash=request.block_hashes[start - 1] if start else None,
            token_ids=list(described.token_ids),
            block_size=self.block_size,
            lora_id=None,
            medium=MEDIUM_GPU,
            lora_name=described.lora_name,
            extra_keys=None if described.extra_keys is None else list(described.extra_keys),
            group_idx=index,
            kv_cache_spec_kind="mamba" if group.is_state else attention,
            kv_cache_spec_sliding_window=group.sliding_window,
        )

    # -- integrity ---------------------------------------------------------------------------------

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise `IntegrityError` unless the records agree with all tables that have blocks."""
        refs = Counter(block_id for table in tables for row in table.rows for block_id in row)
        null, *blocks = self._blocks
        for block in blocks:
            if block.ref_count != refs[block.block_id]:
                raise IntegrityError(f"{block} is in {refs[block.block_id]} tables")
            if (block.ref_count == 0) != (block.block_id in self._free):
                raise IntegrityError(
                    f"{block} is {'' if block.block_id in self._free else 'not '}in the free queue"
                )
            if block.key is not None and self._found_by.get(block.key) is not block:
                raise IntegrityError(f"{block} has content that does not find it")
        if any(block.key != key for key, block in self._found_by.items()):
            raise IntegrityError("a key finds a block that does not have it")
        if null.ref_count or null.key or NULL_BLOCK in self._free:
            raise IntegrityError("the null block is in use")


def _removed(key: CacheKey) -> BlockRemoved:
    block_hash, index = key
    return BlockRemoved(block_hashes=[block_hash], medium=MEDIUM_GPU, group_idx=index)
