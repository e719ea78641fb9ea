"""A program for `test_deepseek_v4`: a small DeepSeek V4 with random weights, in vLLM's CPU build.

`python deepseek_v4.py FOLDER` computes prompts with vLLM alone, and with kvtier; forgets them and loads them
back, whole, beside other ends, and with each group of the pool falsified. It says what came out as one line
of JSON.

vLLM runs this model on CPUs with AMX and with triton-cpu. Its attention kernels need neither, only bfloat16
in AVX-512; so vLLM is told that there is AMX when it chooses its settings, and Triton's interpreter runs the
kernels that prepare metadata.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(
    compiler=None, driver=SimpleNamespace(is_active=lambda: True)
)
torch.cpu._is_amx_tile_supported = lambda: sys._getframe(1).f_code.co_filename.endswith("platforms/cpu.py")

from tests.vllm.engines import Engine, Prompt, make_prompt, vllm_engine  # noqa: E402
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: E402
from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder  # noqa: E402

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "n_routed_experts": 256,  # the routing kernels know few numbers
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "num_hash_layers": 0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "expert_dtype": "bf16",
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "block_size": 256,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 4,
    "num_blocks": 1400,
}
LENGTHS = (700, 512, 513)


def draw_weights(_: Any, model: torch.nn.Module, __: Any) -> None:
    """Draw weights with which answers depend on all tokens."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.state_dict().items():
        if "norm" in name or ("hc_" in name and "scale" in name):
            weight.fill_(1.0)
        elif weight.is_floating_point():
            scale = (
                1.0 if weight.dim() < 2 or "embed" in name or "lm_head" in name else weight.shape[-1] ** -0.5
            )
            scale *= 3.0 if ".wo" in name else 1.0
            weight.copy_(scale * torch.randn(weight.shape, generator=generator))


def run(engine: Engine, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Run prompts one by one, as rounding depends on what else is in a step."""
    found = []
    for prompt in prompts:
        params = engine.params(6, logprobs=0)
        (done,) = engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        likely = [next(iter(token.values())).logprob for token in done.outputs[0].logprobs]
        tokens = list(done.outputs[0].token_ids)
        found.append({"tokens": tokens, "cached": done.num_cached_tokens, "logprobs": likely})
    return found


def main() -> None:
    (folder,) = map(Path, sys.argv[1:])
    (folder / "config.json").write_text(json.dumps(CONFIG))
    DummyModelLoader.load_weights = draw_weights
    # The CPU's plan lacks the kinds of layers of DeepSeek V4.1, which are looked up all the same.
    plan = DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler
    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, count: (
        {"c1a": None, "c2a": None} | plan(self, count)
    )

    prompts = [make_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    system = make_prompt(99, 530)
    sharing = [system + make_prompt(100 + seed, 300) for seed in range(3)]
    found: dict[str, Any] = {}
    with vllm_engine(folder, **OPTIONS) as engine:
        found["alone"] = run(engine, prompts + sharing)
    with vllm_engine(folder, {"cpu": {"capacity": "64MiB"}, "audit": 0}, **OPTIONS) as engine:
        config = engine.connector._connector.connector_scheduler.spec.config
        found["groups"] = [[group.block_size, group.sliding_window] for group in config.groups]
        found["computed"] = run(engine, prompts)
        engine.forget()
        found["chunks"] = engine.stats.stored_chunks
        found["loaded"] = run(engine, prompts)
        found["sharing"] = []
        for prompt in sharing:
            engine.forget()
            found["sharing"] += run(engine, [prompt])
        found["falsified"] = []
        for group in range(len(config.groups)):
            engine.forget()
            engine.falsify_pool(group)
            found["falsified"].append(run(engine, prompts[:2]))
            engine.forget()
            engine.falsify_pool(group)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
