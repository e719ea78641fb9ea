"""Transfers: bytes on their way between an engine's cache and the pool.

`base` has the contracts and `plan` the pairing of the two ends; both need no torch and are exported here.
`jobs` keeps the records of a handler's jobs. `layout` turns engine tensors into canonical form, and `host`
and `cuda` move their pages. These need torch: import them by their own names.
"""

from __future__ import annotations

from kvtier.transfer.base import (
    NULL_BLOCK,
    AuditLoadStoreSpec,
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
from kvtier.transfer.plan import JobBounds, Plan, pair_blocks

__all__ = [
    "NULL_BLOCK",
    "AuditLoadStoreSpec",
    "BlockIDsLoadStoreSpec",
    "CPULoadStoreSpec",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "JobBounds",
    "LoadStoreSpec",
    "OffloadingHandler",
    "Plan",
    "TransferResult",
    "TransferSpec",
    "TransferType",
    "pair_blocks",
]
