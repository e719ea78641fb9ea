"""The basic types of an index: tiers, edits, matches, and the contract that both table forms fulfil.

A table maps a block's hash (64 bits) to its *holders*: which workers hold it in which area. An area is a
place in which a worker can hold blocks (GPU, CPU, STORAGE, and rarer ones made on demand); every area
belongs to one of three tiers and to one KV cache group. A worker holds a block *on a tier* if each group
that it needs holds the block there. Blocks with equal holders share one *holder set*, so a block costs its
hash and a number, and clearing a worker touches the sets, not the blocks.

One thread at a time uses a table; `kvtier.index.prefix.PrefixIndex` ensures that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Edits = npt.NDArray[np.int64]
"""One row per event, `(op, area, number of hashes)` and perhaps more; all events' hashes are joined."""
Columns = npt.NDArray[np.int32]
"""The seven depths of `Match` per worker: held anywhere, on each tier alone, and the walk down the tiers."""

TIERS = 3
AREAS = 3
"""Areas that every table has from the start: one for each tier, with the tier's number."""
MAX_AREAS = 16
"""The most areas of a table, and also the most groups."""
MAX_WORKERS = 4096
MIN_COMPILED_BYTES = 256 << 10
"""The smallest budget of a compiled table."""


class StorageTier(IntEnum):
    """The tier from which a block can be loaded, the fastest first."""

    GPU = 0
    CPU = 1
    STORAGE = 2


class Op(IntEnum):
    """The kind of an event's change."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


class IndexArea(NamedTuple):
    """A place in which workers hold blocks: its tier, and its group's number (the first has 0)."""

    tier: StorageTier
    group: int


class Match(NamedTuple):
    """How many leading blocks of a prefix each worker holds. Row `i` of every array is about `workers[i]`.

    `any` counts leading blocks held on any tier. `alone[:, tier]` counts those held on that tier. `reach[:,
    tier]` is the walk down the tiers: leading blocks on the GPU, then the following ones on the CPU, then
    those in storage; so `reach[:, 2]` is the longest walk.
    """

    workers: tuple[str | None, ...]
    any: npt.NDArray[np.int32]
    alone: npt.NDArray[np.int32]
    reach: npt.NDArray[np.int32]


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
    """The holders of each block.

    Workers and areas are small numbers; a worker's number may be reused once it is cleared.
    """

    form: str
    areas: list[IndexArea]

    def grow(self, workers: int) -> bool:
        """Make room for `workers` workers; `False` if the budget does not allow it."""

    def add_area(self, area: IndexArea) -> int | None:
        """Add an area and return its number; `None` if no more are possible."""

    def require(self, worker: int, groups: int) -> None:
        """Set the groups (one bit each) in which a worker must hold a block, so that it counts as held."""

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
        """Say for each block whether the worker holds it in any area."""

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
