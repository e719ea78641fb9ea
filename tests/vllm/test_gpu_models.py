"""Models whose kernels run on GPUs only: Kimi Linear (KDA beside MLA), DeepSeek V3.2 (MLA beside an
indexer), and Qwen3-Next with an MTP module. What was evicted and loaded back gives the tokens of vLLM alone.

In bfloat16 rounding depends on the shapes of steps, so prompts run one at a time, and for recurrent models
in steps of one block. Kernels that add in any order may still give other tokens for the same bytes: vLLM
alone answers each prompt twice, and only prompts whose two answers agree are compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from tests.vllm.conftest import tokens_of
from tests.vllm.engines import Engine, Output, Prompt, make_prompt, vllm_engine
from tests.vllm.models import save_deepseek_v32_config, save_kimi_linear_config, save_qwen3_next_mtp
from tests.vllm.test_speculation import count_accepted

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400)]

ANSWER = 20


class Model(NamedTuple):
    """A saved model, the options of its engines, and its prompts."""

    path: Path
    options: dict[str, Any]
    lengths: tuple[float, ...]
    """Of prompts, in blocks."""


def _save_kimi(folder: Path) -> Model:
    options = {"attention_backend": "TRITON_MLA", "max_num_batched_tokens": 2048}
    return Model(save_kimi_linear_config(folder), _RANDOM | options, _STATES)


def _save_deepseek(folder: Path, cache_dtype: str) -> Model:
    options = {
        "attention_backend": "FLASHMLA_SPARSE",
        "attention_config": {"sparse_mla_force_mqa": True},
        "kv_cache_dtype": cache_dtype,
        "block_size": 64,
        "max_num_batched_tokens": 4096,
    }
    # Prompts of more tokens than an indexer chooses.
    return Model(save_deepseek_v32_config(folder), _RANDOM | options, (9.5, 12, 15.1, 20.7, 25, 31.9))


def _save_mtp(folder: Path) -> Model:
    drafting = save_qwen3_next_mtp(folder)
    options = {
        "speculative_config": drafting.config | {"num_speculative_tokens": 1},
        "additional_config": {"gdn_prefill_backend": "triton"},
        "max_num_batched_tokens": 2048,
        "prefix_cache_retention_interval": None,
    }
    # The last block of a hit is computed again, for the module looks a token ahead.
    return Model(drafting.target, options, tuple(1 + count for count in _STATES))


_RANDOM: dict[str, Any] = {"load_format": "dummy"}
_STATES = (1.3, 2, 2.6, 3.1, 3.5, 4.02)
MODELS: dict[str, Callable[[Path], Model]] = {
    "kimi_linear": _save_kimi,
    "deepseek_v32": partial(_save_deepseek, cache_dtype="auto"),
    "deepseek_v32_fp8": partial(_save_deepseek, cache_dtype="fp8_ds_mla"),
    "qwen3_next_mtp": _save_mtp,
}


@pytest.mark.parametrize("name", MODELS)
def test_evicted_prompts_come_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _load_random_weights(monkeypatch)
    _bring_what_the_indexer_lacks(monkeypatch)
    model = MODELS[name](tmp_path)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 4096, "block_size": 128} | model.options
    try:
        options |= _find_steps(model, options)
        block = options.pop("tokens_of_a_block")
        prompts = [make_prompt(seed, round(count * block)) for seed, count in enumerate(model.lengths)]
        with vllm_engine(model.path, num_blocks=256, **options) as plain:
            expected = [tokens_of(_run(plain, prompts)) for _ in range(2)]
            accepted = count_accepted(plain) // 2
    except (
        ImportError,
        AttributeError,
        AssertionError,
        NotImplementedError,
        RuntimeError,
        ValueError,
    ) as error:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        pytest.skip(f"vLLM alone does not run {name} here: {_first_cause(error)}")
    sure = [at for at in range(len(prompts)) if expected[0][at] == expected[1][at]]
    print(f"{name}: blocks of {block}, {len(sure)} of {len(prompts)} prompts give one answer in vLLM alone")
    assert len(sure) >= len(prompts) // 2
    assert len({token for tokens in expected[0] for token in tokens}) > 20, (
        "else a wrong state would not show"
    )

    settings = {"cpu": {"capacity": "512MiB"}, "audit": 0}
    with vllm_engine(model.path, settings, num_blocks=256, **options) as engine:
        first = _run(engine, prompts)
        before = count_accepted(engine)
        again = _run(engine, prompts)
        drafts = before, count_accepted(engine) - before
        engine.settle()
        loads, loaded = engine.stats.loads, engine.stats.load_bytes
        assert engine.stats.loads_failed + engine.stats.stores_failed == 0
        engine.falsify_pool()
        wrong = _run(engine, prompts)
    print(
        f"{name}: cached {[output.cached for output in again]}, {loads} loads of {loaded:,} bytes;"
        f" drafts accepted by vLLM alone, first, loaded: {accepted, *drafts}"
    )
    assert [output.cached for output in first] == [0] * len(prompts)
    assert all(output.cached > 0 for output in (*again, *wrong))
    assert loads >= len(prompts)
    for at in sure:
        assert first[at].tokens == again[at].tokens == expected[0][at]
        assert wrong[at].tokens != expected[0][at], "the control"
    if "speculative_config" in options:
        assert min(accepted, *drafts) > 0, "else no state of accepted drafts was tried"


def _run(engine: Engine, prompts: list[Prompt]) -> list[Output]:
    """Run prompts one after the other, in an engine that forgets them at the end."""
    outputs = [engine.generate([prompt], ANSWER)[0] for prompt in prompts]
    engine.forget()
    return outputs


def _find_steps(model: Model, options: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a block, which vLLM makes large enough for a state, and of a step: for recurrent
    models a block.
    """
    with vllm_engine(model.path, num_blocks=64, **options) as engine:
        block = engine.core.vllm_config.cache_config.block_size
        is_hybrid = engine.core.vllm_config.model_config.is_hybrid
    return {"tokens_of_a_block": block} | ({"max_num_batched_tokens": block} if is_hybrid else {})


def _first_cause(error: BaseException) -> str:
    """Return the first line of the error that led to this one."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _load_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM's loader of dummy weights draw them from a range in which tokens differ."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load(loader: Any, model: Any, model_config: Any) -> None:
        with torch.no_grad():
            for number, (name, weight) in enumerate(model.named_parameters()):
                generator = torch.Generator(weight.device).manual_seed(number)
                if not weight.is_floating_point() or "scale" in name:
                    continue
                if name.endswith("A_log"):
                    weight.fill_(math.log(0.001))  # states then keep tokens for about a thousand others
                elif weight.ndim > 1:
                    weight.normal_(std=3 / math.sqrt(weight.shape[-1]), generator=generator)
                else:
                    weight.fill_(1.0 if name.endswith("weight") else 0.0)

    monkeypatch.setattr(DummyModelLoader, "load_weights", load)


# -- what DeepSeek's indexer lacks without DeepGEMM and CuTe ------------------------------------------


def _bring_what_the_indexer_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute an indexer's scores with torch where DeepGEMM is missing, and have vLLM take its Triton kernel
    for queries where CuTe is. The caches and all other kernels are vLLM's.
    """
    from vllm.model_executor.layers import sparse_attn_indexer as indexer
    from vllm.utils.import_utils import has_deep_gemm

    if not has_deep_gemm():
        monkeypatch.setattr(indexer, "has_deep_gemm", lambda: True)
        monkeypatch.setattr(indexer, "fp8_fp4_mqa_logits", _prompt_scores)
        monkeypatch.setattr(indexer, "fp8_fp4_paged_mqa_logits", _paged_scores)
    try:
        import cutlass  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        name = "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl"
        without = ModuleType(name)
        without.fused_q_cutedsl = None  # type: ignore[attr-defined]
        without.is_fused_q_cutedsl_supported = lambda *_, **__: False  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, without)


def _score(q: Any, keys: Any, scales: Any, weights: Any) -> Any:
    """Return the scores of keys (n, d) for queries (m, h, d) with the weights (m, h) of their heads."""
    import torch

    scores = torch.einsum("mhd,nd->mhn", q.float(), keys.float()).relu()
    return torch.einsum("mhn,mh->mn", scores, weights.float()) * scales


def _prompt_scores(
    q: Any, kv: Any, weights: Any, starts: Any, ends: Any, max_keys: int, *_: Any, **__: Any
) -> Any:
    """Return each query's scores of the keys from its start to its end, in the first columns.

    Rows begin where vector loads can, as DeepGEMM's do.
    """
    import torch

    scores = _score(q[0], kv[0], kv[1].reshape(-1), weights)
    columns = starts[:, None].long() + torch.arange(-(-max_keys // 256) * 256, device=scores.device)
    chosen = scores.gather(1, columns.clamp(max=scores.shape[1] - 1))
    return chosen.masked_fill(columns >= ends[:, None], -math.inf)[:, :max_keys]


def _paged_scores(
    q: Any,
    kv_cache: Any,
    weights: Any,
    lengths: Any,
    block_tables: Any,
    schedule: Any,
    max_model_len: int,
    **_: Any,
) -> Any:
    """Return each query's scores of a request's keys, which lie in pages: first all keys, then their
    scales.
    """
    import torch

    (requests, queries, _, dim), page = q[0].shape, kv_cache.shape[1]
    scores = torch.full((requests * queries, max_model_len), -math.inf, device=q[0].device)
    limits = lengths.reshape(requests, -1).expand(requests, queries).tolist()
    for at in range(requests):
        count = max(limits[at])
        pages = kv_cache[block_tables[at, : -(-count // page)].long()].reshape(-1, page * (dim + 4))
        keys = pages[:, : page * dim].contiguous().view(torch.float8_e4m3fn).reshape(-1, dim)
        scales = pages[:, page * dim :].contiguous().view(torch.float32).reshape(-1)
        rows = slice(at * queries, (at + 1) * queries)
        found = _score(q[0][at], keys, scales, weights[rows])
        for row, limit in enumerate(limits[at]):
            scores[at * queries + row, :limit] = found[row, :limit]
    return scores
