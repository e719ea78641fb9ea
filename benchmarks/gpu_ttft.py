"""Time to the first token on a GPU: from the pool, against computing it again, for an 8B-shaped Llama.

    python benchmarks/gpu_ttft.py [--json FILE]

32 layers, 8 KV heads of 128, bf16, random weights. For each length, in turns: a new prompt (recompute); the
same after the GPU has forgotten it (tier); and once more, now that the GPU has it (gpu). The bare bus would
take bytes / limit; the limit is one large pinned copy in the same run. The last token is always computed,
so a load takes at least the time of the bus plus `gpu`; the ratio to the bus alone is shown too. One
request at a time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _gpu import BareCopies, Rig, medians

from kvtier.config import KVTierConfig
from kvtier.engine import Decoder, Engine, EngineConfig, ModelConfig, RequestOutput, SamplingParams
from kvtier.engine.model_config import weight_shapes

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2


def make_model(shape: Mapping[str, Any]) -> Decoder:
    """Make a model with random weights."""
    config = ModelConfig.from_dict(shape)
    weights = {
        name: torch.randn(size, dtype=torch.bfloat16, device="cuda").mul_(
            size[-1] ** -0.5 if len(size) > 1 else 1
        )
        for name, size in weight_shapes(config).items()
    }
    return Decoder(config, weights, device="cuda", dtype=torch.bfloat16)


def make_engine(lengths: list[int]) -> Engine:
    """Make an engine with room for one prompt on the GPU and for all of them in the tier."""
    model = make_model(LLAMA_8B)
    engine_config = EngineConfig(
        num_blocks=max(lengths) // 16 + 64,
        max_num_batched_tokens=8192,
        dtype="bfloat16",
        device="cuda",
        kv_events=False,
    )
    capacity = 2 * max(lengths) * TOKEN_BYTES
    kvtier = KVTierConfig.from_dict(
        {"cpu": {"capacity": capacity}, "load_if_faster": False, "load_deadline": "60s", "prompt_only": True}
    )
    return Engine(model, engine_config, kvtier)


def first_token(engine: Engine, prompt: list[int]) -> RequestOutput:
    """Run a prompt to its first token, and all transfers to their end."""
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    engine.drain()
    torch.cuda.synchronize()
    return output


def bench_length(engine: Engine, length: int, repetitions: int, rng: random.Random) -> dict[str, Any]:
    """Measure one length."""
    times: dict[str, list[float]] = {"recompute": [], "tier": [], "gpu": []}
    for repetition in range(-2, repetitions):
        prompt = [rng.randrange(128000) for _ in range(length)]
        engine.reset_prefix_cache()
        outputs = {"recompute": first_token(engine, prompt)}
        engine.reset_prefix_cache()
        outputs["tier"] = first_token(engine, prompt)
        outputs["gpu"] = first_token(engine, prompt)
        source = outputs["tier"].source
        loaded = 0 if source is None else source.tiers.get("cpu", 0)
        if loaded < length - 32:
            raise RuntimeError(f"expected {length} tokens from the tier, got {source}")
        for name, output in outputs.items():
            if repetition >= 0 and output.ttft is not None:
                times[name].append(output.ttft)
    return {"tokens": length, "loaded": loaded} | {
        name: statistics.median(values) for name, values in times.items()
    }


def bus_limit() -> float:
    """Return the bytes per second of one large pinned copy to the GPU."""
    rig = Rig(1 << 20, 1, 1 << 30)
    bare = BareCopies(rig, rig.blocks)
    timing = medians({"large": partial(bare.run, partial(bare.large, "load"))}, 5)["large"]
    rig.close()
    return rig.job_bytes / timing.device


def main() -> None:
    """Measure, print, and write the requested files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    limit = bus_limit()
    engine = make_engine(options.tokens)
    rows = []
    print(f"the bus: {limit / 1e9:.1f} GB/s; milliseconds to the first token")
    print(
        "tokens  recompute     tier      gpu  bus alone   faster by  the bus allows  reached   of the bus "
        "with no last token"
    )
    for length in options.tokens:
        row = bench_length(engine, length, options.repetitions, random.Random(length))
        row["bus"] = row["loaded"] * TOKEN_BYTES / limit
        faster, allowed, bare = (
            row["recompute"] / t for t in (row["tier"], row["bus"] + row["gpu"], row["bus"])
        )
        rows.append(row | {"faster": faster, "allowed": allowed, "bare": bare, "limit": limit})
        ms = [1e3 * row[name] for name in ("recompute", "tier", "gpu", "bus")]
        print(
            f"{length:6d} {ms[0]:10.1f} {ms[1]:8.2f} {ms[2]:8.2f} {ms[3]:10.2f} {faster:10.1f}x "
            f"{allowed:14.1f}x {faster / allowed:8.2f}   {faster / bare:.2f} of {bare:.1f}x"
        )
    engine.close()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
