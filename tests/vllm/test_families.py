"""Families of models: what was evicted and loaded back gives the tokens of vLLM alone, and no less is loaded
than vLLM finds in a cache of its own.

Other files try a family of each kind of cache in depth; here are those that share a kind with them. For each
group of the cache there is a negative control: with falsified rows of this group the answers differ.

Prompts run one at a time, and for recurrent models in steps of one block, because in bfloat16 rounding
depends on the shapes of steps. In vLLM's CPU build short convolutions do so in float32, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from tests.vllm.conftest import tokens_of
from tests.vllm.device import on_gpu
from tests.vllm.engines import BLOCK, Engine, Output, Prompt, make_prompt, vllm_engine
from tests.vllm.models import save_family
from tests.vllm.test_states import skip_without_convolution

from kvtier.config import GroupConfig

ANSWER = 10


class Family(NamedTuple):
    """What transformers calls it, its config as far as it differs from that of the other models here, the
    options of its engines, and the tokens from one end of a hit to the next.
    """

    kind: str
    config: dict[str, Any]
    options: dict[str, Any] = {}  # noqa: RUF012  (nobody changes it)
    block: int = BLOCK


def _in_steps(block: int, **options: Any) -> dict[str, Any]:
    """Return the options of engines with blocks of this size, and steps of one block.

    The scan of vLLM's CPU build keeps no state within a step.
    """
    return {"block_size": block, "max_num_batched_tokens": block} | options


def _mamba2(kind: str, **config: Any) -> Family:
    """Return a family with Mamba 2 layers."""
    return Family(kind, config, _in_steps(128), 128)


def _windows(kind: str, layers: int = 4, block: int = BLOCK, **config: Any) -> Family:
    """Return a family whose layers attend in turn to a window and to everything."""
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    shape = {"num_hidden_layers": layers, "layer_types": kinds, "sliding_window": 2 * BLOCK + 1}
    return Family(kind, shape | config, block=block)


_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_HEADS = {"n_groups": 1, "chunk_size": 64}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}
_NEMOTRON = _HEADS | {"ssm_state_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 32}
_SHARED = {"num_kv_shared_layers": 4, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32}
FAMILIES = {
    "qwen3_5": Family(
        "qwen3_5_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "head_dim": 64,
        }
        # The least that vLLM's CPU kernels take.
        | {"linear_num_key_heads": 1, "linear_key_head_dim": 128}
        | {"linear_num_value_heads": 1, "linear_value_head_dim": 128},
        _in_steps(160, dtype="bfloat16", mamba_ssm_cache_dtype="float32")
        | ({"additional_config": {"gdn_prefill_backend": "triton"}} if on_gpu() else {}),
        160,
    ),
    "nemotron_h": _mamba2("nemotron_h", hybrid_override_pattern="M-M*-", **_NEMOTRON),
    # States and windows, and no full attention.
    "nemotron_h_windows": _mamba2(
        "nemotron_h", hybrid_override_pattern="M*M-*", sliding_window=129, **_NEMOTRON
    ),
    "falcon_h1": _mamba2(
        "falcon_h1", num_hidden_layers=2, mamba_d_ssm=256, mamba_rms_norm=True, mamba_chunk_size=64, **_MAMBA
    ),
    "zamba2": _mamba2(
        "zamba2",
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        head_dim=None,
        num_key_value_heads=4,
        n_mamba_heads=8,
        mamba_d_state=32,
        chunk_size=64,
        tie_word_embeddings=True,
    ),
    # States and nothing else: vLLM has no prefix cache for it unless it is told to.
    "mamba2": Family(
        "mamba2",
        _HEADS
        | {"num_hidden_layers": 2, "num_heads": 8, "state_size": 32}
        | {"num_attention_heads": None, "num_key_value_heads": None},
        _in_steps(128, enable_prefix_caching=True),
        128,
    ),
    "lfm2": Family(
        "lfm2",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "tie_word_embeddings": True}
        | {"conv_dim": 128, "block_dim": 128, "block_auto_adjust_ff_dim": False},
        _in_steps(BLOCK),
    ),
    "gpt_oss": _windows("gpt_oss", **_EXPERTS),
    "ministral": _windows("ministral"),
    "gemma3": _windows("gemma3_text", query_pre_attn_scalar=32, tie_word_embeddings=True),
    # The last four layers have no KV of their own.
    "gemma3n": _windows("gemma3n_text", 8, laurel_rank=16, tie_word_embeddings=True, **_SHARED),
    # Nor have they here, and the two groups have blocks of different size.
    "gemma4": _windows("gemma4_text", 8, 2 * BLOCK, global_head_dim=64, tie_word_embeddings=True, **_SHARED),
    "phi3": Family("phi3", {"num_hidden_layers": 3, "original_max_position_embeddings": 2048}),
    # It scores experts by a sigmoid, for which vLLM's CPU build has no code.
    "minimax_m2": Family(
        "minimax_m2",
        {"num_hidden_layers": 3, "rotary_dim": 16, "scoring_func": "softmax", "use_routing_bias": True}
        | _EXPERTS,
    ),
    "glm4": Family("glm4", {"num_hidden_layers": 3}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_evicted_prompts_come_back(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    if "max_num_batched_tokens" in family.options and "dtype" not in family.options:  # recurrent, in float32
        skip_without_convolution()
    if name == "qwen3_5":
        _register_qwen3_5()
    save_family(tmp_path, family.kind, family.options.get("dtype", "float32"), **family.config)
    lengths = [family.block, 2 * family.block + 1, 7 * family.block // 2]
    prompts = [make_prompt(seed, length) for seed, length in enumerate(lengths)]
    try:
        with _engine(family, tmp_path) as plain:
            expected, own = _run(plain, prompts), _run(plain, prompts)
    except Exception as error:
        if on_gpu():
            pytest.skip(f"vLLM alone does not run {name} here: {error}")
        raise
    assert len({token for output in expected for token in output.tokens}) > 15, "else little would show"

    with _engine(family, tmp_path, {"audit": 0}) as engine:
        first = _run(engine, prompts)
        engine.forget()
        again = _run(engine, prompts)
        engine.settle()
        loads, failed = engine.stats.loads, engine.stats.loads_failed + engine.stats.stores_failed
        groups = engine.connector._groups
        wrong = [_run_falsified(engine, prompts[1], group) for group in range(len(groups))]
    assert tokens_of(first) == tokens_of(again) == tokens_of(expected)
    loadable = [_count_loadable(length, family.block, groups) for length in lengths]
    assert [output.cached for output in again] == loadable
    assert all(ours.cached >= theirs.cached for ours, theirs in zip(again, own, strict=True))
    assert (loads, failed) == (sum(count > 0 for count in loadable), 0)
    assert all(output.cached == again[1].cached for output in wrong)
    assert expected[1].tokens not in tokens_of(wrong), "the control"


@contextmanager
def _engine(family: Family, model: Path, kvtier: dict[str, Any] | None = None) -> Iterator[Engine]:
    settings = None if kvtier is None else {"cpu": {"capacity": "64MiB"}} | kvtier
    options = {"num_blocks": 96, "max_model_len": 2048} | family.options
    with vllm_engine(model, settings, **options) as engine:
        yield engine


def _run(engine: Engine, prompts: list[Prompt]) -> list[Output]:
    """Run prompts one after the other."""
    return [engine.generate([prompt], ANSWER)[0] for prompt in prompts]


def _run_falsified(engine: Engine, prompt: Prompt, group: int) -> Output:
    """Run a prompt that is loaded while the pool's rows of a group are false."""
    engine.forget()
    engine.falsify_pool(group)
    (output,) = _run(engine, [prompt])
    engine.forget()
    engine.falsify_pool(group)
    return output


def _count_loadable(length: int, block: int, groups: Sequence[GroupConfig]) -> int:
    """Return how many tokens of a prompt can be loaded. A state must not have seen its last token; with a
    window the last token is computed in any case.
    """
    if any(group.is_state for group in groups):
        return (length - 1) // block * block
    return min(length // block * block, length - (len(groups) > 1))


def _register_qwen3_5() -> None:
    """Give vLLM the class of Qwen 3.5's text model. Its module has a vision tower too, which needs
    torchvision; PyPI has no build of that for CPUs.
    """
    from transformers import image_utils, video_utils  # noqa: F401  (they have noticed that it is not there)
    from vllm import ModelRegistry

    with pytest.MonkeyPatch.context() as patch:
        if find_spec("torchvision") is None:
            for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
                patch.setitem(sys.modules, f"torchvision{name}", ModuleType(f"torchvision{name}"))
        from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
    ModelRegistry.register_model("Qwen3_5ForCausalLM", Qwen3_5ForCausalLM)
