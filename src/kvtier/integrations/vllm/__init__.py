"""kvtier inside vLLM: `KVTierConnector`, found by vLLM through one flag (docs/vllm.md).

    --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "kvtier.integrations.vllm",
                           "kv_connector_extra_config": {"cpu": {"capacity": "8GiB"}}}'

vLLM makes one connector beside its scheduler and one in each worker, usually in separate processes. Each
holds the matching half of `OffloadingConnector` and translates vLLM's requests, steps and results into ours
and back. Differences between the two:

- vLLM frees a finished request's blocks at once. kvtier need not hold them: before a step writes to such a
  block, it ends the stores that read it (`handle_preemptions`, which vLLM calls before a step writes
  anything).
- Workers' reports travel as worker metadata, which vLLM gathers over all ranks.
- A failed load is reported by its blocks if a model has one KV cache group, and by its request if it has
  several: vLLM cannot distinguish blocks of different groups. In both cases vLLM recomputes, because this
  connector asks it to.

The thread that runs vLLM's scheduler or worker makes all calls. Only this package imports vLLM. It is
written for the newest supported version; `kvtier.integrations.vllm.compat` knows the others, and refuses a
vLLM that lacks a hook.
"""

from __future__ import annotations

from kvtier.integrations.vllm.compat import expect_hooks

expect_hooks()  # before the modules below import what it looks for

from kvtier.integrations.vllm.connector import (  # noqa: E402
    KVTierConnector,
    KVTierMetadata,
    KVTierWorkerMetadata,
)
from kvtier.integrations.vllm.describe import describe_engine  # noqa: E402
from kvtier.integrations.vllm.metrics import KVTierMetrics, KVTierStats  # noqa: E402

__all__ = [
    "KVTierConnector",
    "KVTierMetadata",
    "KVTierMetrics",
    "KVTierStats",
    "KVTierWorkerMetadata",
    "describe_engine",
]
