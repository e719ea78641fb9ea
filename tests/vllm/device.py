"""Where the tests' engines run: on a CUDA device where there is one, else on the CPU. Called after vLLM's environment is set."""

from __future__ import annotations

from functools import cache
from typing import Any

__all__ = ["engine_options", "on_gpu"]


@cache
def on_gpu() -> bool:
    """Say whether engines run on a CUDA device. torch reads the environment when it is imported, hence not before."""
    import torch

    return torch.cuda.is_available()


def engine_options() -> dict[str, Any]:
    """Return vLLM's options that depend on the device: attention that takes float32, and as on the CPU one step at a time.

    Steps that are scheduled ahead are the subject of `test_cuda`; the other tests look at an engine between two steps.
    """
    if not on_gpu():
        return {}
    return {"attention_backend": "TRITON_ATTN", "async_scheduling": False, "gpu_memory_utilization": 0.3}
