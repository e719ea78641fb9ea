"""Where the tests' engines run: on a CUDA device where there is one, else on the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

__all__ = ["engine_options", "lora_options", "on_gpu", "skip_without_devices"]


@cache
def on_gpu() -> bool:
    """Return whether engines run on a CUDA device. Imports torch, which reads the environment then."""
    import torch

    return torch.cuda.is_available()


def engine_options() -> dict[str, Any]:
    """Return vLLM's options that depend on the device: attention that takes float32, and as on the CPU one
    step at a time.

    Steps that are scheduled ahead are the subject of `test_cuda`; the other tests look at an engine between
    two steps.
    """
    if not on_gpu():
        return {}
    return {"attention_backend": "TRITON_ATTN", "async_scheduling": False, "gpu_memory_utilization": 0.1}


def lora_options() -> dict[str, Any]:
    """Return vLLM's options for LoRA that depend on the device: its kernels for GPUs do not take float32."""
    return {"dtype": "bfloat16"} if on_gpu() else {}


def skip_without_devices(ranks: int) -> None:
    """Skip where ranks need a GPU each and there are too few. On a CPU they share it."""
    import torch

    if on_gpu() and torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} ranks need as many CUDA devices")
