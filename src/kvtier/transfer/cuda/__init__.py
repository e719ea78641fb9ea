"""Transfers of an engine on a CUDA device: staged through device memory, whole rows over the bus.

This needs torch and Triton.

`handlers` keeps the contract of `OffloadingHandler` and says in which order memory is touched. `memory` has
the engine's pages and the pinned pool, between which bytes move. `lanes` has the streams and buffers of one
direction. `commands` are the calls to streams, `kernels` the gather and the scatter, `pieces` the
arithmetic, and `driver` the calls to CUDA. All of it imports without a device, and all but `kernels` without
Triton.
"""

from __future__ import annotations

from kvtier.transfer.cuda.handlers import CudaHandler, CudaLoadHandler, CudaStoreHandler
from kvtier.transfer.cuda.memory import CudaMemory

__all__ = ["CudaHandler", "CudaLoadHandler", "CudaMemory", "CudaStoreHandler"]
