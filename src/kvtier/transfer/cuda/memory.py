"""The two memories between which handlers move bytes: the engine's pages on a device, and the pool, pinned.

A `CudaMemory` is immutable once made, and the handlers of both directions share it. Any thread may read it.
"""

from __future__ import annotations

import torch

from kvtier.config import OffloadingConfig
from kvtier.errors import LayoutError
from kvtier.pool import Pool
from kvtier.transfer.base import CanonicalKVCaches
from kvtier.transfer.cuda.pieces import Part, PoolMap, find_pages, find_stages, split_pages
from kvtier.transfer.cuda.pinning import Pinning
from kvtier.transfer.plan import JobBounds

__all__ = ["BUFFERS", "DIRECT_BYTES", "STAGE_BYTES", "CudaMemory"]

# docs/cuda-constants.md has the measurements for these.
BUFFERS = 4
"""The staging buffers of each direction. They hold pieces while kernels wait for the engine's kernels."""
DIRECT_BYTES = 2 << 20
"""From this page size on, pages are copied without a kernel: that is as fast."""
STAGE_BYTES = 256 << 10
"""The least bytes of a block in the first stage for loads to come layer by layer: every stage adds a range
to each row.
"""
_ALIGNMENT = 16  # of buffers, so that kernels can move 16 bytes at a time
_PAGEABLE_BYTES = 1 << 20  # a copy of pageable memory blocks with a lock held, so pieces must be short


class CudaMemory:
    """The memory that both handlers of a device share: addresses of pages and rows, and the pinned pool."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        pool: Pool,
        config: OffloadingConfig,
        *,
        staging_bytes: int | None = None,
        direct_bytes: int = DIRECT_BYTES,
        stage_bytes: int = STAGE_BYTES,
        pinning: Pinning | None = None,
    ) -> None:
        """Pin the pool and find the pages. `staging_bytes` defaults to the settings."""
        groups = range(len(config.groups))
        expected = [group.bytes_per_block for group in config.groups]
        found = [kv_caches.block_bytes(group) for group in range(len(kv_caches.group_data_refs))]
        if found != expected:
            raise LayoutError(f"expected groups with blocks of {expected} bytes, got {found}")
        first = kv_caches.tensors[0].tensor
        self.kv_caches = kv_caches  # kept, because the addresses in `parts` are valid only while these live
        self.device = first.device
        self.pool = pool
        self.pinning = pinning or Pinning(pool, lambda: torch.cuda.set_device(self.device))
        self.staging_bytes = config.settings.staging if staging_bytes is None else staging_bytes
        self.piece_bytes = max(_ALIGNMENT, self.staging_bytes // 2 // BUFFERS // _ALIGNMENT * _ALIGNMENT)
        if not self.pinning.pinned:
            self.piece_bytes = min(self.piece_bytes, _PAGEABLE_BYTES)
        direct_bytes = min(direct_bytes, self.piece_bytes)
        self.parts = [
            split_pages(find_pages(kv_caches, group), self.piece_bytes, direct_bytes) for group in groups
        ]
        self.stages, self.stage_of = self._find_stages(direct_bytes, stage_bytes)
        self.bounds = JobBounds(len(groups), len(first), pool.num_slots, config.settings.blocks_per_chunk)
        self.pool_map = PoolMap(self.pinning.address, pool.slot_bytes, self.pinning.seam, config)

    def _find_stages(
        self, direct_bytes: int, stage_bytes: int
    ) -> tuple[list[list[tuple[Part, ...]]], dict[str, int]]:
        """Return the parts of each stage by group, and the stage of each layer; both empty if of no use."""
        if not self.kv_caches.layer_ends or not self.pinning.pinned:
            return [], {}
        found = [find_stages(self.kv_caches, group) for group in range(len(self.parts))]
        if any(
            pages is not None and pages.size.sum() < stage_bytes
            for stages, _ in found
            for pages in stages[:1]
        ):
            return [], {}
        stages = [
            [() if pages is None else split_pages(pages, self.piece_bytes, direct_bytes) for pages in stage]
            for stage in zip(*(stages for stages, _ in found), strict=True)
        ]
        return stages, {name: stage for _, stage_of in found for name, stage in stage_of.items()}
