"""The decoder agrees with transformers on the same weights, whatever the chunks, the batch and the cache's
layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import Paged, prompt, tiny
from torch import Tensor

from kvtier.engine.config import ModelConfig
from kvtier.engine.model import Decoder, split_kv
from kvtier.engine.weights import load_weights, random_weights, save_model
from kvtier.errors import InputError, ModelError

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": tiny(rope_theta=10_000.0),
    "llama-biased": tiny(attention_bias=True, mlp_bias=True, head_dim=32),
    "llama3-old": tiny(rope_theta=500_000.0, rope_scaling=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama3-new": tiny(rope_parameters=LLAMA3_ROPE | {"rope_theta": 500_000.0}),
    "llama-linear": tiny(rope_scaling={"type": "linear", "factor": 4.0}),
    "qwen2": tiny(model_type="qwen2", tie_word_embeddings=True),
    "qwen2-upper": tiny(model_type="qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": tiny(model_type="qwen3", head_dim=32),
    "qwen3-alternating": tiny(
        model_type="qwen3",
        head_dim=16,
        num_hidden_layers=4,
        layer_types=ALTERNATING,
        use_sliding_window=True,
        sliding_window=8,
    ),
    "mistral": tiny(model_type="mistral", sliding_window=None),
    "mistral-window": tiny(model_type="mistral", sliding_window=8),
    "ministral": tiny(
        model_type="ministral", head_dim=16, num_hidden_layers=4, layer_types=ALTERNATING, sliding_window=8
    ),
}
WINDOWED = FAMILIES["qwen3-alternating"]
STATEFUL = tiny(
    model_type="gated_linear",
    num_hidden_layers=4,
    layer_types=["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
    sliding_window=8,
)
"""A family that transformers does not have."""


def reference_logits(folder: Path, tokens: list[int]) -> Tensor:
    transformers: Any = pytest.importorskip("transformers")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), (
        "a tensor that transformers lacks it makes up, and one too many it forgets"
    )
    with torch.inference_mode():
        return model.eval()(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_agree_with_transformers_at_every_position(name: str, tmp_path: Path) -> None:
    config = ModelConfig.from_dict(FAMILIES[name])
    save_model(tmp_path, FAMILIES[name], random_weights(config, seed=3))
    paged = Paged(config, load_weights(tmp_path, config))
    tokens = prompt(56)
    sequence = paged.add(tokens)
    chunks = [13, 7, 20] + [1] * 16
    logits = torch.cat([paged.rows((sequence, n))[0] for n in chunks])
    torch.testing.assert_close(logits, reference_logits(tmp_path, tokens), atol=1e-4, rtol=1e-4)


def test_logits_are_sensitive_to_what_families_differ_in() -> None:
    """Guards the suite above: a window, a rope or a norm that is ignored moves logits far more than its
    tolerance.
    """
    tokens = prompt(56)
    base = last_logits(ModelConfig.from_dict(WINDOWED), tokens, [56])
    for change in ({"sliding_window": 9}, {"rope_theta": 9_000.0}, {"rms_norm_eps": 1e-2}):
        assert (
            last_logits(ModelConfig.from_dict(WINDOWED | change), tokens, [56]) - base
        ).abs().max() > 1e-2


def last_logits(config: ModelConfig, tokens: list[int], chunks: list[int], **options: Any) -> Tensor:
    paged = Paged(config, **options)
    sequence = paged.add(tokens)
    return torch.stack([paged.forward((sequence, n))[0] for n in chunks])[-1]


@pytest.mark.parametrize("kv_first", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("model", [WINDOWED, STATEFUL], ids=["windows", "states"])
def test_result_does_not_depend_on_the_cache_geometry(
    kv_first: bool, block_size: int, model: dict[str, Any]
) -> None:
    config = ModelConfig.from_dict(model)
    ours = last_logits(config, prompt(50), [9, 30, 11], block_size=block_size, kv_first=kv_first)
    torch.testing.assert_close(ours, last_logits(config, prompt(50), [50]), atol=1e-5, rtol=1e-5)


DOUBLE: dict[str, Any] = {"dtype": torch.float32, "compute_dtype": torch.float64}


@pytest.mark.parametrize("name", ["llama3-new", "qwen2", "qwen3-alternating", "mistral-window", "states"])
def test_double_precision_does_not_depend_on_chunks_or_neighbours(name: str) -> None:
    config = ModelConfig.from_dict(STATEFUL if name == "states" else FAMILIES[name])
    tokens = prompt(53)
    whole = last_logits(config, tokens, [53], **DOUBLE)
    assert whole.dtype == torch.float64
    for chunks in ([1] * 53, [3, 17, 5, 27, 1], [52, 1]):
        assert_same(last_logits(config, tokens, chunks, **DOUBLE), whole)
    assert_same(logits_beside_others(config, tokens), whole)


def assert_same(ours: Tensor, whole: Tensor) -> None:
    assert ours.argmax() == whole.argmax()
    torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-9 * float(whole.abs().max()))


def logits_beside_others(config: ModelConfig, tokens: list[int]) -> Tensor:
    """Compute a prompt in passes that it shares with a shorter, a longer and an equal sequence at other
    stages.
    """
    paged = Paged(config, **DOUBLE)
    ours, short, long, twin = (paged.add(t) for t in (tokens, prompt(9, 1), prompt(80, 2), prompt(53, 3)))
    paged.forward((long, 60), (ours, 20))
    paged.forward((ours, 20), (short, 8), (long, 19))
    paged.forward((short, 1), (ours, 12), (twin, 12))
    return paged.forward((twin, 1), (ours, 1), (long, 1))[1]


def test_prefill_and_decode_in_one_batch_keep_their_rows_apart() -> None:
    config = ModelConfig.from_dict(WINDOWED)
    prompts = [prompt(n, seed=n) for n in (5, 21, 40, 22, 41)]
    paged = Paged(config)
    sequences = [paged.add(tokens) for tokens in prompts]
    for sequence in sequences:
        paged.forward((sequence, len(sequence.tokens) - 1))
    together = paged.forward(*((sequence, 1) for sequence in sequences))
    for tokens, logits in zip(prompts, together, strict=True):
        torch.testing.assert_close(logits, last_logits(config, tokens, [len(tokens)]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("position", "visible"), [(32, False), (33, True), (39, True)])
def test_a_token_reaches_the_result_only_from_inside_the_window(position: int, visible: bool) -> None:
    """Guards the harness too: it puts NaN wherever nobody may read, which proves something only if a read
    shows.
    """
    paged = Paged(ModelConfig.from_dict(FAMILIES["mistral-window"]))
    sequence = paged.add(prompt(42))
    paged.forward((sequence, 41))
    table = sequence.tables[0]
    for cache in paged.caches.values():
        cache[table[position // 4], :, position % 4] = torch.nan
    sequence.computed = 40
    assert bool(paged.forward((sequence, 1)).isnan().any()) is visible


def naive_states(model: Decoder, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the rows of one sequence see in a state layer, and the states, as sums over all tokens up
    to a row: the gain of a token times the gates after it.
    """
    config, weights = model.config, model._layers[layer]
    heads = config.num_kv_heads
    q, k, v = weights.qkv(x).split([config.num_heads * 16, heads * 16, heads * 16], dim=1)
    decay = torch.sigmoid(weights.gate(x)).view(-1, heads, 16).log().cumsum(0) / 16  # type: ignore
    rows, states = [], []
    for i in range(len(x)):
        kept = (decay[i] - decay[: i + 1]).exp() * k.view(-1, heads, 16)[: i + 1]
        states.append(torch.einsum("jhd,jhe->hde", kept, v.view(-1, heads, 16)[: i + 1]))
        seen = torch.einsum("hgd,hde->hge", q[i].view(heads, -1, 16), states[-1])
        rows.append((seen / (seen.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()).flatten())
    return torch.stack(rows), torch.stack(states)


def test_a_state_layer_agrees_with_a_sum_over_all_tokens() -> None:
    """Also the states that blocks hold: each after the last computed token of its block."""
    config = ModelConfig.from_dict(STATEFUL)
    paged = Paged(config, block_size=4, **DOUBLE)
    sequence = paged.add(prompt(19))
    for chunk in (3, 6, 9, 1):
        batch = paged.batch((sequence, chunk))
        layer, x = paged.decoder._layers[0], paged.decoder._embedding[torch.tensor(sequence.tokens[:19])]
        x = layer.attention_norm(x)
        begin, end = batch.sequences[0].first, batch.sequences[0].context_len
        seen = layer.recur(x[begin:end], paged.caches["layers.0"], batch, 0, 4)  # type: ignore[attr-defined]
        rows, states = naive_states(paged.decoder, 0, x)
        torch.testing.assert_close(seen, rows[begin:end], rtol=1e-9, atol=1e-9)
        for position, block in enumerate(sequence.tables[0]):
            if block != 0:
                held = paged.caches["layers.0"][block]
                after = states[min(4 * position + 4, end) - 1]
                torch.testing.assert_close(held, after, rtol=1e-9, atol=1e-9)
    assert [block == 0 for block in sequence.tables[0]] == [True] * 4 + [False], "16 to 18 are in the last"


@pytest.mark.parametrize("layer", [0, 2])
def test_a_state_of_another_boundary_changes_tokens(layer: int) -> None:
    """Guards all tests of states: a state of one token earlier, or none, moves logits and the next token."""
    config, changed = ModelConfig.from_dict(STATEFUL), 0
    for seed in range(8):
        right, tokens = last_logits(config, prompt(48, seed), [47, 1], **DOUBLE), prompt(48, seed)
        for wrong in ("one token earlier", "none"):
            paged = Paged(config, **DOUBLE)
            sequence = paged.add(tokens)
            paged.forward((sequence, 46))
            cache = paged.caches[f"layers.{layer}"]
            earlier = cache[sequence.tables[0][11]].clone()
            paged.forward((sequence, 1))
            cache[sequence.tables[0][11]] = earlier if wrong == "one token earlier" else 0.0
            logits = paged.forward((sequence, 1))[0]
            assert (logits - right).abs().max() > 1e-2
            changed += int(logits.argmax() != right.argmax())
    assert changed >= 4


def test_bfloat16_runs_and_stays_near_float32() -> None:
    config = ModelConfig.from_dict(WINDOWED)
    weights = random_weights(config, dtype=torch.bfloat16)
    exact = last_logits(config, prompt(40), [40], weights=weights, dtype=torch.float32)
    rough = last_logits(config, prompt(40), [40], weights=weights, dtype=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(rough, exact, dim=0) > 0.99


def test_split_kv_gives_views_of_both_layouts() -> None:
    for shape in ((5, 2, 4, 2, 8), (2, 5, 4, 2, 8)):
        cache = torch.zeros(shape)
        k, v = split_kv(cache)
        k.fill_(1)
        v.fill_(2)
        assert k.shape == v.shape == (5, 4, 2, 8)
        assert cache.sum() == 3 * k.numel()


@pytest.mark.parametrize("shape", [(5, 3, 4, 2, 8), (2, 2, 4, 2, 8), (5, 2, 4, 16)])
def test_split_kv_refuses_a_cache_that_it_cannot_tell_apart(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="kv cache: expected"):
        split_kv(torch.zeros(shape))


def test_decoder_names_a_missing_weight() -> None:
    config = ModelConfig.from_dict(tiny())
    weights = random_weights(config)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        Decoder(config, weights)
