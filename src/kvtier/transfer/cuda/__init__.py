"""Transfers of an engine on a CUDA device: staged through device memory, whole rows over the bus.

Needs torch and Triton.

`handlers` keeps the contract of `OffloadingHandler` and says in which order memory is touched; `memory` is
what they move bytes between; `lanes` has the streams and buffers, of a `device`; `commands` is what streams
are told; `kernels` has the gather and the scatter; `pieces` the arithmetic; `pinning` the pool's memory;
`driver` the calls to CUDA. All of it imports without a device, and all but `kernels` without Triton.
"""

from __future__ import annotations

from kvtier.transfer.cuda.handlers import CudaHandler, CudaLoadHandler, CudaStoreHandler
from kvtier.transfer.cuda.memory import CudaMemory

__all__ = ["CudaHandler", "CudaLoadHandler", "CudaMemory", "CudaStoreHandler"]
