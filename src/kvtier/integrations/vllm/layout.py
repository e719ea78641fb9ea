"""The cache layout that kvtier asks vLLM for: blocks outermost, so that a block is one run of memory.

In vLLM's default layout a block is one page for each layer, which a kernel gathers and scatters beside the
engine's own kernels. With blocks outermost the copy engine moves a block as it is: on an H200 an engine
with nothing to reuse kept 0.999 of its speed instead of 0.984 (docs/vllm.md). vLLM ignores the wish with a
warning if a backend cannot do it.

kvtier does not ask for it if it was not measured to be faster, or could keep an engine from starting: vLLM
cannot cut blocks that are not dense by layer into the smaller ones of some kernels, and children of a
`MultiConnector` must all want the same. `VLLM_KV_CACHE_LAYOUT` overrides any wish. Pure; any thread.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["BLOCKS_OUTERMOST", "wanted_layout"]

BLOCKS_OUTERMOST = "BLNHC"
_BACKENDS = (None, AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN)  # None: vLLM chooses
_BLOCK_SIZES = (16, 32, 64)  # sizes that the kernels of all backends take unchanged
_AMPERE, _HOPPER = 8, 9  # devices for which vLLM chooses FlashAttention itself


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """Return the layout to ask for; `None`: leave the choice to vLLM."""
    if not current_platform.is_cuda() or vllm_config.model_config.use_mla or _is_in_company():
        return None
    capability = current_platform.get_device_capability()
    fits = (
        capability is not None
        and capability.major in (_AMPERE, _HOPPER)
        and vllm_config.attention_config.backend in _BACKENDS
        and vllm_config.cache_config.block_size in _BLOCK_SIZES
    )
    return BLOCKS_OUTERMOST if fits else None


def _is_in_company() -> bool:
    """Say whether a `MultiConnector` asks. The configs of its children have no reference to it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        asker = frame.f_locals.get("cls")
        if isinstance(asker, type) and issubclass(asker, MultiConnector):
            return True
    return False
