"""The engine on a CUDA device: the tier gives the same tokens, by CUDA transfers, and a fused kernel sees
what a mask allows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kvtier.config import KVTierConfig
from kvtier.demo.setup import QUICK_MODEL
from kvtier.engine import Decoder, Engine, EngineConfig, ModelConfig, SamplingParams, model, random_weights
from kvtier.engine.model import ForwardBatch, SequenceSlice
from kvtier.transfer.cuda import CudaHandler


def make_engine(kvtier: KVTierConfig | None, **settings: Any) -> Engine:
    config = EngineConfig(
        num_blocks=80, max_num_batched_tokens=64, device="cuda", compute_dtype="float64", **settings
    )
    return Engine.from_config(QUICK_MODEL, config, kvtier)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(512, (200,), generator=generator).tolist()
    return [shared + torch.randint(512, (100,), generator=generator).tolist() for _ in range(count)]


@pytest.mark.parametrize("kv_layout", ["blocks_first", "kv_first"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_the_tier_gives_the_same_tokens(kv_layout: str, blocks_per_chunk: int) -> None:
    """More prompts than the cache has room for, twice: the second time most of them come from the tier."""
    kvtier = KVTierConfig.from_dict(
        {
            "cpu": {"capacity": "64MiB"},
            "blocks_per_chunk": blocks_per_chunk,
            "load_if_faster": False,
            "audit": 0,
        }
    )
    params = SamplingParams(max_tokens=8)
    plain, tiered = make_engine(None, kv_layout=kv_layout), make_engine(kvtier, kv_layout=kv_layout)
    assert tiered.worker is not None
    assert tiered.worker.connector_worker is not None
    handlers = tiered.worker.connector_worker._handlers
    assert len(handlers) == 2
    assert all(isinstance(handler, CudaHandler) for handler in handlers.values())
    expected = [output.token_ids for output in plain.generate(prompts(12), params)]
    loaded = 0
    for _ in range(2):
        outputs = [tiered.generate([prompt], params)[0] for prompt in prompts(12)]
        assert [output.token_ids for output in outputs] == expected
        loaded += sum(output.source.tiers.get("cpu", 0) for output in outputs if output.source is not None)
        tiered.drain()
        tiered.check()
    assert loaded > 1000
    tiered.close()
    plain.close()


@pytest.mark.parametrize(("start", "end"), [(0, 100), (37, 100), (99, 100)])
def test_a_fused_kernel_sees_what_the_mask_allows(
    monkeypatch: pytest.MonkeyPatch, start: int, end: int
) -> None:
    torch.manual_seed(start)
    config = ModelConfig.from_dict(QUICK_MODEL | {"head_dim": 64})
    decoder = Decoder(config, random_weights(config), device="cuda", dtype=torch.bfloat16)
    page = (8, 2, 16, config.num_kv_heads, config.head_dim)
    caches = {name: torch.randn(page, dtype=torch.bfloat16, device="cuda") for name in config.layer_names}
    positions = torch.arange(start, end, device="cuda")
    table = torch.arange(1, 8, device="cuda")
    batch = ForwardBatch(
        positions % 500, positions, [SequenceSlice(0, end - start, end, (table,))], (positions + 16,)
    )
    groups = [0] * config.num_layers
    fused = decoder.forward(batch, caches, groups, 16)

    def mask(rows: int, keys: int) -> torch.Tensor:
        return torch.ones(1, 1, rows, keys, dtype=torch.bool, device="cuda").tril(keys - rows)

    monkeypatch.setattr(model, "causal_lower_right", mask)
    masked = decoder.forward(batch, caches, groups, 16)
    # Measured over 90 caches: at most 0.027 from rounding in bfloat16, at least 0.16 from a mask that is off
    # by one.
    assert (fused - masked).norm() < 0.06 * masked.norm()
