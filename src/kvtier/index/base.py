"""The basic types of an index: tiers, areas, edits, matches, budgets, and the contracts of both forms.

A table maps a block's hash (64 bits) to its *holders*: which workers hold it in which area. An area is where
a worker can hold blocks: an event names a medium, and perhaps a group, an owner and a locality, and each
combination is an area of its own, so that a removal from one never removes a block from another. Every area
belongs to one of three tiers and to one KV cache group; unknown media count as storage. A worker holds a
block *on a tier* if each attention group that it needs holds the block there. Blocks with equal holders
share one *holder set*, so a block costs its hash and a number, and clearing a worker touches the sets, not
the blocks.

A worker with recurrent layers has *state groups* too. A block of such a group is the state after all tokens
up to the end of that block, and an engine can go on only where it has a state of every such group. So a
prefix of such a worker counts up to the last block whose states the worker holds; see `Match` for tiers.

If the keys are hashes of tokens, a book of *names* beside the table has the hashes by which each worker's
engine calls blocks, since removals and parents are given by those. A name is remembered as long as the
worker holds the block, and a little longer: names of removed blocks are swept when there are as many as
others. Both are bounded; what does not fit is refused.

One thread at a time uses a table and its names; `kvtier.index.prefix.PrefixIndex` ensures that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.events.types import MEDIUM_CPU, MEDIUM_GPU, MEDIUM_STORAGE
from kvtier.events.wire import Place

Hashes = npt.NDArray[np.uint64]
Edits = npt.NDArray[np.int64]
"""One row per event, `(op, area, number of hashes)` and perhaps more; all events' hashes are joined."""
Columns = npt.NDArray[np.int32]
"""The seven depths of `Match` per worker: held anywhere, on each tier alone, and the walk down the tiers."""

Keys = Literal["engine", "xxh3"]
"""What a block is known by: the engine's hash, or a hash of its tokens."""
TIERS = 3
AREAS = 3
"""Areas that every table has from the start: one for each tier, with the tier's number."""
MAX_AREAS = 16
"""The most areas of a table, and also the most groups."""
MAX_WORKERS = 4096
MIN_COMPILED_BYTES = 256 << 10
"""The smallest budget of a compiled table."""


SLACK = 4096
"""A number of stale names that never matters."""
_PART = 1024  # names per part


class StorageTier(IntEnum):
    """The tier from which a block can be loaded, the fastest first."""

    GPU = 0
    CPU = 1
    STORAGE = 2


PLACES: tuple[Place, ...] = tuple((medium, 0, "", "") for medium in (MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE))
"""The places that every index has from the start, in the order of their areas."""

FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")
STATE = "mamba"
"""The kind of every group of recurrent layers, whatever their architecture."""

_TIERS = {
    StorageTier.GPU: ("GPU", "DEVICE", "G1"),
    StorageTier.CPU: ("CPU", "CPU_PINNED", "CPU_TIER1", "HOST", "HOST_PINNED", "G2"),
}
_TIER_OF = {medium: tier for tier, media in _TIERS.items() for medium in media}


def tier_of(medium: str) -> StorageTier:
    """Return the tier of a medium, in upper or lower case."""
    return _TIER_OF.get(medium.upper(), StorageTier.STORAGE)


class Op(IntEnum):
    """The kind of an event's change."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


class IndexArea(NamedTuple):
    """The tier of an area, and the number of its group (the first has 0)."""

    tier: StorageTier
    group: int


class Match(NamedTuple):
    """The number of leading blocks of a prefix that each worker holds.

    Row `i` of every array is about `workers[i]`. If that is `None`, the worker was removed and the row is
    zeros. Counts are blocks, not tokens.

    Every count of a worker with state groups ends at a block whose states the worker holds as well. A prefix
    on one tier needs the states on that tier. An engine continues a prefix on its GPU, which ends at states
    on the GPU, by blocks from the tiers below it and by states from any of these.
    """

    workers: tuple[str | None, ...]
    on_any_tier: npt.NDArray[np.int32]
    """`[worker]`: leading blocks that are each on at least one tier."""
    on_tier: npt.NDArray[np.int32]
    """`[worker, tier]`: leading blocks that are all on that tier, whatever the other tiers hold."""
    down_to_tier: npt.NDArray[np.int32]
    """`[worker, tier]`: a walk down the tiers: it takes leading blocks from the GPU, then the following ones
    from the CPU, then those from storage. So `down_to_tier[:, 2]` is the whole walk.
    """


class TableStats(NamedTuple):
    """A table's size: held blocks, holder sets, bytes now and at most, blocks refused for lack of room,
    removals of blocks that were not held.
    """

    blocks: int
    sets: int
    bytes: int
    budget: int
    dropped: int
    unknown: int


class Table(Protocol):
    """Maps each block to its holders.

    Workers and areas are small numbers; a worker's number may be reused once it is cleared.
    """

    form: str
    areas: list[IndexArea]

    def grow(self, workers: int) -> bool:
        """Make room for `workers` workers; `False` if the budget does not allow it."""

    def add_area(self, area: IndexArea) -> int | None:
        """Add an area and return its number; `None` if no more are possible."""

    def require(self, worker: int, groups: int, states: int = 0) -> None:
        """Set a worker's groups (one bit each): those in which it must hold a block, so that it counts as
        held, and those in which it must hold the last block of a prefix, so that the prefix counts.
        """

    def apply(
        self, worker: int, edits: Edits, hashes: Hashes, unique: bool = False
    ) -> tuple[int, int] | None:
        """Apply events in order. Blocks that find no room are dropped and counted.

        If `unique`, stop at a store of a block that the worker holds in that area already, and return the
        edit and how many of its hashes are done; otherwise such a store does nothing.
        """

    def store(self, worker: int, area: int, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Add the worker to the blocks' holders; return which of them it did not hold there before."""

    def refuse(self, worker: int, count: int) -> None:
        """Count blocks that the caller had to refuse itself."""

    def clear(self, worker: int) -> None:
        """Forget everything that the worker holds, in time that grows with holder sets, not with blocks."""

    def match(self, hashes: Hashes) -> Columns:
        """Return `[worker, column]`: how far along these blocks each worker comes; see `Columns`."""

    def holds(self, worker: int, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Return for each block whether the worker holds it in any area."""

    def holdings(self) -> int:
        """Return how many blocks all workers hold, each counted once per worker and area."""

    def held(self, worker: int) -> list[int]:
        """Return how many blocks the worker holds in each area."""

    def dropped(self, worker: int) -> int:
        """Return how many of a worker's blocks were refused since it was last cleared."""

    def hashes(self) -> Iterator[Hashes]:
        """Yield the blocks' hashes in parts.

        The table may change meanwhile: a block that stays comes once.
        """

    def usable(self, hashes: Hashes) -> list[Mapping[int, int]]:
        """Return for each block its workers, and the tiers on which each holds it (one bit each)."""

    def stats(self) -> TableStats: ...

    def check(self) -> None:
        """Raise `IntegrityError` if the table contradicts itself."""


class NamePart(NamedTuple):
    """Some names: their workers, the engine's hashes of the blocks, and the keys."""

    workers: npt.NDArray[np.uint32]
    hashes: Hashes
    keys: Hashes


class Names(Protocol):
    """Maps the hashes of each worker's engine to keys."""

    def get(self, worker: int, engine_hash: int) -> int | None:
        """Return the key that a worker's engine names by this hash."""

    def put(self, worker: int, hashes: Sequence[int], keys: Hashes) -> bool:
        """Store names; `False` if there is no room for all, until a `sweep` makes room."""

    def clear(self, worker: int) -> None:
        """Forget a worker's names."""

    def tidy(self) -> None:
        """Forget names of removed blocks, if there are many. Call it only between batches."""

    def sweep(self) -> None:
        """Forget all names of removed blocks. The table must already hold every block named before."""

    def parts(self) -> Iterator[NamePart]:
        """Yield all names in parts. The book may change meanwhile: a name that stays comes once."""

    def bytes(self) -> int:
        """Return how many bytes the names take."""

    def check(self) -> None:
        """Raise `IntegrityError` if the book contradicts itself."""


class IndexBackend(NamedTuple):
    """The table and the names of an index. With the engine's own keys, `names` stays empty."""

    table: Table
    names: Names


class MemoryBudget:
    """Counts bytes that several owners share: those of all data beside the table and the names."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` bytes in total."""
        self.limit, self.used = limit, 0

    def take(self, size: int) -> bool:
        """Take bytes; `False`, without taking any, if they are not available."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """Give bytes back."""
        self.used -= size


def tiers_of(
    holders: Iterable[tuple[int, int]], needs: Callable[[int], int], areas: Sequence[IndexArea]
) -> dict[int, int]:
    """Return the workers that hold a block on any tier, and those tiers (one bit each).

    `holders` are workers and areas; `needs` gives the groups in which a worker must hold a block.
    """
    held: dict[int, int] = {}
    for worker, area in holders:
        held[worker] = held.get(worker, 0) | 1 << area
    on = {worker: _usable_tiers(bits, needs(worker), areas) for worker, bits in held.items()}
    return {worker: tiers for worker, tiers in on.items() if tiers}


def _usable_tiers(held: int, needed: int, areas: Sequence[IndexArea]) -> int:
    """Return the tiers (one bit each) on which a block in the areas `held` has all groups `needed`."""
    groups = [0] * TIERS
    for number, (tier, group) in enumerate(areas):
        groups[tier] |= (held >> number & 1) << group
    return sum(1 << tier for tier in range(TIERS) if needed and groups[tier] & needed == needed)


def parts_of(worker: int, hashes: Sequence[int], key_of: Callable[[int], int | None]) -> Iterator[NamePart]:
    """Yield a worker's names in parts; `key_of` gives the key at that time, and `None` leaves a name out."""
    for start in range(0, len(hashes), _PART):
        keys = [(name, key_of(name)) for name in hashes[start : start + _PART]]
        found = np.array([(name, key) for name, key in keys if key is not None], np.uint64).reshape(-1, 2)
        yield NamePart(np.full(len(found), worker, np.uint32), found[:, 0].copy(), found[:, 1].copy())
