"""Offloading: the contracts, the manager of host memory, and the specs that tie managers to transfers.

Everything here imports without torch. The docstring of each name says what it promises.
"""

from __future__ import annotations

from kvtier.keys import OffloadKey, get_offload_block_hash, get_offload_group_idx, make_offload_key
from kvtier.offload.base import (
    ChunkLookup,
    OffloadingManager,
    OffloadingSpec,
    OffloadingSpecFactory,
    PrepareStoreOutput,
    ReadLease,
    ReqContext,
    SlotLease,
    WriteLease,
)
from kvtier.offload.cpu import CPUOffloadingSpec
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.residency import MissReason, OffloadingEvent
from kvtier.transfer.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
    TransferType,
)

__all__ = [
    "BlockIDsLoadStoreSpec",
    "CPULoadStoreSpec",
    "CPUOffloadingManager",
    "CPUOffloadingSpec",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "ChunkLookup",
    "GPULoadStoreSpec",
    "LoadStoreSpec",
    "MissReason",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingHandler",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingSpecFactory",
    "PrepareStoreOutput",
    "ReadLease",
    "ReqContext",
    "SlotLease",
    "TieredOffloadingManager",
    "TransferResult",
    "TransferSpec",
    "TransferType",
    "WriteLease",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
]
