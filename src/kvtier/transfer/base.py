"""The contract of a transfer: the two ends of a job, the engine's caches in canonical form, and the handler
that moves bytes.

What an offloading contract needs besides a manager. A *spec* says where bytes are at one end; a job is a
pair `(src, dst)` of specs with an id and one `TransferResult`. No class here imports torch: tensors only
pass through.

Threads: a handler's methods are called by one thread, the worker's. What a handler does in the background is
its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError

if TYPE_CHECKING:
    import torch

__all__ = [
    "NULL_BLOCK",
    "BlockIDsLoadStoreSpec",
    "CPULoadStoreSpec",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "LoadStoreSpec",
    "OffloadingHandler",
    "TransferResult",
    "TransferSpec",
    "TransferType",
]

NULL_BLOCK = 0
"""The block id that means *no block here* (a block that a sliding window has left behind).

Engines never hand it out.
"""


class LoadStoreSpec(ABC):
    """Where the bytes of one end of a transfer are."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Name the kind of memory, e.g. `GPU` or `CPU`. Handlers are chosen by it."""


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    """Bytes found by number: block ids in an engine's cache, or slot ids in a pool."""

    def __init__(self, block_ids: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self.block_ids: npt.NDArray[np.int64] = np.asarray(block_ids, dtype=np.int64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the engine's paged cache, on whatever device the engine runs.

    `block_ids` are ordered by group. `group_sizes[g]` of them belong to group g (`None`: one group). Within
    a group they are consecutive blocks of one request, the first being its `block_indices[g]`-th block: with
    chunks of several blocks, `block_indices[g] % blocks_per_chunk` leading blocks of the first chunk are
    skipped.
    """

    def __init__(
        self,
        block_ids: Sequence[int] | npt.NDArray[np.int64],
        group_sizes: Sequence[int] | None = None,
        block_indices: Sequence[int] | None = None,
    ) -> None:
        super().__init__(block_ids)
        self.group_sizes: tuple[int, ...] = (
            (len(self.block_ids),) if group_sizes is None else tuple(group_sizes)
        )
        self.block_indices: tuple[int, ...] | None = None if block_indices is None else tuple(block_indices)
        if sum(self.group_sizes) != len(self.block_ids):
            raise InputError(
                f"group_sizes: expected to sum to the number of block ids ({len(self.block_ids)}), "
                f"got {self.group_sizes}"
            )
        if self.block_indices is not None and len(self.block_indices) != len(self.group_sizes):
            raise InputError(
                f"block_indices: expected one per group ({len(self.group_sizes)}), "
                f"got {len(self.block_indices)}"
            )

    @staticmethod
    def medium() -> str:
        return "GPU"


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the pool, one per chunk, in the order of the chunks on the other end."""

    @staticmethod
    def medium() -> str:
        return "CPU"


TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
TransferType = tuple[str, str]


class TransferResult(NamedTuple):
    """The one result of a job on one rank.

    `failed_blocks` are positions into the GPU end's `block_ids` whose bytes did not arrive; `None` on a
    failed job means all of them. `corrupt` says that the bytes themselves are at fault, so that the chunk
    must not be offered again.
    """

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
    transfer_type: TransferType | None = None
    failed_blocks: tuple[int, ...] | None = None
    corrupt: bool = False


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """An engine tensor seen as `(num_blocks, page_size_bytes)` int8. `page_size_bytes` includes padding."""

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """One layer's pages: which canonical tensor, and how many leading bytes of each page are real."""

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """The engine's caches as unique tensors, and for each group the refs that make up one block, in layer
    order.

    The bytes of one block of group g are the concatenation of `page_size_bytes` bytes of each of
    `group_data_refs[g]`.
    """

    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]
    layer_ends: list[dict[str, int]] = field(default_factory=list)
    """For each group, if known, how many leading refs hold a layer and all layers before it."""

    def block_bytes(self, group: int) -> int:
        """Return the bytes of one block of a group, without padding."""
        return sum(ref.page_size_bytes for ref in self.group_data_refs[group])


class OffloadingHandler(ABC):
    """Moves bytes in one direction, asynchronously.

    Every job accepted by `transfer_async` yields exactly one result from `get_finished`. Once a result has
    been yielded the handler never again reads or writes either end of that job: blocks and slots may be
    handed to someone else.
    """

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a job and return at once. `False`: the job was refused, there will be no result."""

    def transfer_by_layer(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a load of which the first layers should arrive first, for who begins with them.

        May be in any order.
        """
        return self.transfer_async(job_id, spec)

    def await_layer(self, job_id: int, layer: str, timeout: float) -> bool:
        """Let what the caller does next find a layer of a load in place.

        On a device the caller's stream waits, not the caller.

        May block for `timeout` seconds. `False`: it cannot be promised, and the result is to be waited for.
        Whatever is made of the layer is good only if the job succeeds.
        """
        return False

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Take the results that are in, without waiting.

        Jobs past their deadline are ended here and reported failed.
        """

    @abstractmethod
    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        """Block until these jobs are over or `timeout` seconds have passed; say whether they are.

        Unknown ids are over.

        Results stay in place for `get_finished`.
        """

    @abstractmethod
    def cancel(self, job_ids: set[int]) -> None:
        """End these jobs now; those not yet complete are reported as failed.

        Afterwards they touch no memory.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End everything. Idempotent. Nothing is touched afterwards."""
