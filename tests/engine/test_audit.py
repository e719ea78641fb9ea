"""Audits in a real engine: rows of the same KV pass, and rows of other KV are found."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.engine.harness import tiny

from kvtier.config import KVTierConfig
from kvtier.connector import OffloadingConnectorScheduler
from kvtier.engine import Engine, EngineConfig, SamplingParams
from kvtier.engine.config import ModelConfig
from kvtier.engine.model import Decoder
from kvtier.engine.weights import random_weights

BLOCK = 8
STATES = {
    "model_type": "gated_linear",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def make_engine(
    settings: dict[str, Any], *, seed: int = 0, model: dict[str, Any] | None = None, **fields: Any
) -> Engine:
    """Return an engine with too small a cache for its prompts; all have one id of their weights."""
    config = ModelConfig.from_dict(tiny(max_position_embeddings=1024, **(model or {})))
    engine = EngineConfig(**({"num_blocks": 40, "block_size": BLOCK, "max_num_batched_tokens": 64} | fields))
    compute = None if engine.compute_dtype is None else getattr(torch, engine.compute_dtype)
    decoder = Decoder(
        config, random_weights(config, seed=seed), dtype=getattr(torch, engine.dtype), compute_dtype=compute
    )
    kvtier = KVTierConfig.from_dict({"cpu": {"capacity": "8MiB"}, "load_if_faster": False} | settings)
    return Engine(decoder, engine, kvtier, weights_id="equal for all")


def scheduler_of(engine: Engine) -> OffloadingConnectorScheduler:
    assert engine.connector is not None
    assert engine.connector.connector_scheduler is not None
    return engine.connector.connector_scheduler


def documents(count: int = 6, tokens: int = 120) -> list[list[int]]:
    rng = Random(7)
    return [[rng.randrange(3, 128) for _ in range(tokens)] for _ in range(count)]


def ask(engine: Engine, rng: Random, texts: list[list[int]]) -> None:
    """Ask some questions at once, each about a part of a document."""
    prompts = [
        text[: rng.randrange(len(text) // 2, len(text))] + [rng.randrange(3, 128) for _ in range(3)]
        for text in rng.choices(texts, k=rng.randrange(1, 4))
    ]
    engine.generate(prompts, SamplingParams(max_tokens=rng.randrange(1, 12)))


@pytest.mark.parametrize(
    ("fields", "settings", "model"),
    [
        ({}, {}, {}),
        ({"dtype": "bfloat16"}, {}, {}),
        ({"dtype": "float16"}, {"blocks_per_chunk": 2}, {}),
        ({"dtype": "bfloat16", "kv_layout": "kv_first"}, {}, {}),
        ({"dtype": "bfloat16"}, {}, {"num_hidden_layers": 16}),
        ({"dtype": "bfloat16"}, {}, {"model_type": "mistral", "sliding_window": 24}),
        ({"dtype": "bfloat16", "compute_dtype": "float32"}, {"cpu": {"capacity": "192KiB"}}, {}),
        ({}, {}, STATES),
        ({"dtype": "bfloat16", "state_interval": 4 * BLOCK}, {"blocks_per_chunk": 2}, STATES),
    ],
    ids=[
        "float32",
        "bfloat16",
        "chunks of two",
        "kv first",
        "16 layers",
        "windows",
        "small pool",
        "states",
        "states, few",
    ],
)
def test_rows_of_the_same_kv_pass(
    fields: dict[str, Any], settings: dict[str, Any], model: dict[str, Any]
) -> None:
    rng, texts = Random(1), documents()
    with make_engine(settings | {"audit": 1}, model=model, **fields) as engine:
        for _ in range(25):
            ask(engine, rng, texts)
        engine.drain()
        stats = scheduler_of(engine).stats
        assert stats.audited_chunks > 10
        assert stats.audit_mismatches == 0, scheduler_of(engine)._audits.largest_distance
        scheduler_of(engine).check()


def change_weights(engine: Engine, seed: int = 5) -> None:
    """Give the model other weights, in place, and have the engine forget the KV in its own cache alone."""
    model = engine.model
    assert isinstance(model, Decoder)
    others = Decoder(model.config, random_weights(model.config, seed=seed))
    model.__dict__.update(others.__dict__)
    engine.reset_prefix_cache()


def test_weights_that_change_in_memory_are_found_and_everything_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng, texts = Random(1), documents()
    with make_engine({}) as engine:
        for text in texts:
            engine.generate([text], SamplingParams(max_tokens=1))
        change_weights(engine)
        for _ in range(300):
            engine.reset_prefix_cache()
            ask(engine, rng, texts)
            if scheduler_of(engine).stats.namespace_departures:
                break
        stats = scheduler_of(engine).stats
        assert stats.audit_mismatches >= 3
        assert stats.namespace_departures == 1
        assert "leaves its namespace" in caplog.text
        prompt = texts[0]
        engine.reset_prefix_cache()
        answer = engine.generate([prompt], SamplingParams(max_tokens=12))[0].token_ids
    with make_engine({"audit": 0}, seed=5) as fresh:
        assert fresh.generate([prompt], SamplingParams(max_tokens=12))[0].token_ids == answer


def test_rows_of_other_weights_on_a_disk_are_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two models with one name share a disk, as they would after a bug in the namespace."""
    disk = {"tiers": [{"disk": {"path": str(tmp_path), "capacity": "8MiB"}}], "load_deadline": "30s"}
    small = {"cpu": {"capacity": "192KiB"}}
    rng, texts = Random(1), documents()
    with make_engine(disk) as first:
        for text in texts:
            first.generate([text], SamplingParams(max_tokens=1))
        first.drain()
    with make_engine(disk | small, seed=5) as second:
        for _ in range(300):
            second.reset_prefix_cache()
            ask(second, rng, texts)
            if scheduler_of(second).stats.namespace_departures:
                break
        assert scheduler_of(second).stats.namespace_departures == 1
        assert "tier disk" in caplog.text
    with make_engine(disk | {"audit": 0}) as third:  # nothing of the first is left to find
        third.generate([texts[0]], SamplingParams(max_tokens=1))
        assert scheduler_of(third).stats.loads == 0


def test_one_row_of_another_prompt_is_dropped_and_the_rest_stays() -> None:
    texts = documents(3)
    with make_engine({"audit": 1, "cpu": {"capacity": "1MiB"}}) as engine:
        for text in texts:
            engine.generate([text], SamplingParams(max_tokens=1))
        engine.drain()
        manager: Any = scheduler_of(engine).manager
        pool = scheduler_of(engine).spec.open_pool()  # type: ignore[attr-defined]
        held = [slot for slot in range(manager.num_slots) if manager._table.evictable[slot]]
        pool.rows[held[0]] = pool.rows[held[5]]  # as after a bug in the records of slots
        engine.reset_prefix_cache()
        for text in texts:
            engine.generate([text], SamplingParams(max_tokens=1))
        engine.drain()
        stats = scheduler_of(engine).stats
        assert stats.audit_mismatches == 1
        assert stats.namespace_departures == 0
