"""vLLM's own offloading on vLLM's CPU build: its own connector and manager, a worker that copies at once.

vLLM refuses this platform because its worker needs a GPU's streams; nothing else needs them. This spec
measures the scheduler's side, which is entirely vLLM's. Copies run when they are submitted, so that they
never make a step wait for another; their time is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

__all__ = ["HostSpec"]


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPU offloading with another worker. One KV cache group and one block per chunk."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return _CopyWorker(kv_caches, self.num_chunks)


class _CopyWorker(OffloadingWorker):  # type: ignore[misc]
    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._blocks = [cache.tensor for cache in kv_caches.tensors]
        self._chunks = [
            torch.empty((num_chunks, *blocks.shape[1:]), dtype=blocks.dtype) for blocks in self._blocks
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        source, target = _indices(src_spec), _indices(dst_spec)
        for blocks, chunks in zip(self._blocks, self._chunks, strict=True):
            chunks[target] = blocks[source]
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        source, target = _indices(src_spec), _indices(dst_spec)
        for blocks, chunks in zip(self._blocks, self._chunks, strict=True):
            blocks[target] = chunks[source]
        return self._finish(job_id)

    def get_finished(self) -> list[TransferResult]:
        taken, self._finished = self._finished, []
        return taken

    def wait(self, job_ids: set[int]) -> None:
        return

    def _finish(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True


def _indices(spec: Any) -> torch.Tensor:
    return torch.from_numpy(spec.block_ids).long()
