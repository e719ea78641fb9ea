"""The contract of a transfer: the two ends of a job, the engine's caches in canonical form, and the handler
that moves bytes.

A *spec* says where bytes are at one end; a job is a pair `(src, dst)` of specs with an id and one
`TransferResult`. No class here imports torch: tensors only pass through.

Only one thread, the worker's, calls the methods of a handler. A handler may run threads of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError

if TYPE_CHECKING:
    import torch

NULL_BLOCK = 0
"""The block id that means *no block here* (a block that a sliding window has left behind).

Engines never allocate it.
"""


class LoadStoreSpec(ABC):
    """Where the bytes are at one end of a transfer."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the kind of memory, e.g. `GPU` or `CPU`. Handlers are chosen by it."""


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    """Bytes found by number: block ids in an engine's cache, or slot ids in a pool."""

    def __init__(self, block_ids: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self.block_ids: npt.NDArray[np.int64] = np.asarray(block_ids, dtype=np.int64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the engine's paged cache, on any device.

    `block_ids` are ordered by group. `group_sizes[g]` of them belong to group g; without sizes there is one
    group. Within a group they are consecutive blocks of one request, the first being its
    `block_indices[g]`-th block: with chunks of several blocks, `block_indices[g] % blocks_per_chunk` leading
    blocks of the first chunk are skipped.
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


class AuditLoadStoreSpec(CPULoadStoreSpec):
    """Scratch slots of the pool for computed chunks, and the slots of the `kept` rows to compare with."""

    def __init__(
        self, block_ids: Sequence[int] | npt.NDArray[np.int64], kept: Sequence[int] | npt.NDArray[np.int64]
    ) -> None:
        super().__init__(block_ids)
        self.kept: npt.NDArray[np.int64] = np.asarray(kept, dtype=np.int64)

    @staticmethod
    def medium() -> str:
        return "AUDIT"


TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
TransferType = tuple[str, str]


class TransferResult(NamedTuple):
    """The one result of a job on one rank.

    `failed_blocks` are positions into the GPU end's `block_ids` whose bytes did not arrive; `None` on a
    failed job means all of them. `corrupt`: the bytes themselves are wrong, so the chunk must not be loaded
    again. `distance`: of an audit, how far the computed chunk that differs most is from its kept row.
    `unpacked`: of a store, how many of the failed blocks did not pack.
    """

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
    transfer_type: TransferType | None = None
    failed_blocks: tuple[int, ...] | None = None
    corrupt: bool = False
    distance: float | None = None
    unpacked: int = 0


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """An engine tensor seen as `(num_blocks, page_size_bytes)` int8. `page_size_bytes` includes padding."""

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """One layer's pages: the index of their canonical tensor, and the leading bytes of each page in use.

    `token_values` is the number of values from one token to the next in a page; 0 if that is not known.
    """

    tensor_idx: int
    page_size_bytes: int
    token_values: int = 0


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """The engine's caches as unique tensors, and for each group the refs that make up one block, in layer
    order.

    The bytes of one block of group g are the first `page_size_bytes` bytes of each ref in
    `group_data_refs[g]`, one after the other.
    """

    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]

    def block_bytes(self, group: int) -> int:
        """Return the bytes of one block of a group, without padding."""
        return sum(ref.page_size_bytes for ref in self.group_data_refs[group])


class OffloadingHandler(ABC):
    """Moves bytes in one direction, asynchronously.

    Every job that `transfer_async` accepts yields exactly one result from `get_finished`. After that the
    handler never again reads or writes either end of the job: its blocks and slots may be used for others.
    """

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a job and return at once. `False` means that the job was refused and gets no result."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Take the results so far, without waiting.

        Jobs past their deadline are ended here and reported as failed.
        """

    @abstractmethod
    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        """Block until these jobs are over or `timeout` seconds have passed; return whether they are over.

        Unknown ids count as over. `get_finished` still returns the results.
        """

    @abstractmethod
    def cancel(self, job_ids: set[int]) -> None:
        """End these jobs now; jobs that are not complete are reported as failed.

        Afterwards the jobs touch no memory.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End all jobs. Idempotent. No memory is touched afterwards."""
