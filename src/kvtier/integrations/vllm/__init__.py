"""kvtier inside vLLM: `KVTierConnector`, found by vLLM through one flag (docs/vllm.md).

    --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "kvtier.integrations.vllm",
                           "kv_connector_extra_config": {"cpu": {"capacity": "8GiB"}}}'

vLLM makes one of these beside its scheduler and one in each worker, as a rule in separate processes. Each
holds the matching half of `OffloadingConnector` and translates: vLLM's requests, steps and results into ours
and back. Where the two differ:

- vLLM frees a finished request's blocks at once. They need not be held: whoever gets one of them, the step
  first ends the stores that read it (`handle_preemptions`, which vLLM calls before anything of a step is
  written).
- Workers' reports travel as worker metadata, which vLLM gathers over all ranks.
- A failed load is named by its blocks where a model has one KV cache group, and by its request where it has
  several: vLLM cannot tell blocks of different groups apart. Either way vLLM recomputes, which this
  connector asks it to.

Called by the thread that runs vLLM's scheduler or worker. This package alone imports vLLM, and only the
version it was made for: in another, what it imports may be missing or, worse, mean something else.
"""

from __future__ import annotations

import vllm

from kvtier.integrations import expect_version

expect_version("vllm", vllm.__version__, at_least="0.32", below="0.33")

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
