"""Models whose KV cache groups have blocks of unequal sizes: the same tokens, and no less loaded than by
vLLM's own connector.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.engines import Engine, Output, make_prompt, vllm_engine
from tests.vllm.models import save_unequal
from tests.vllm.test_multi import BENCHMARKS, OWN

STORED = [make_prompt(seed, length) for seed, length in enumerate((130, 160, 192, 300))]
ASKED = [
    *STORED,
    *(STORED[-1][:shared] + make_prompt(shared, 40) for shared in (95, 100, 140, 192, 230, 270)),
]
CHATS = [make_prompt(seed % 4, 200) + make_prompt(100 + seed, 7 * seed) for seed in range(12)]
WINDOWS = {(32, 64, 96): (None, 65, 40), (64, 32): (None, 33)}
"""By the tokens of a block in each group: the windows."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], Path]:
    """Models by the tokens of a block in each of their groups. Those with the most KV heads have 32."""
    from tests.vllm.unequal_model import register

    register()
    return {
        sizes: save_unequal(
            tmp_path_factory.mktemp("unequal"), [6 * 32 // size for size in sizes] * 2, windows * 2
        )
        for sizes, windows in WINDOWS.items()
    }


@pytest.mark.parametrize(
    ("sizes", "loaded"),
    [
        # All of 192 tokens but the last; the full-attention blocks end at 288, those of 64 at 256.
        ((32, 64, 96), [96, 96, 191, 256, 0, 64, 96, 192, 192, 192]),
        ((64, 32), [128, 128, 191, 256, 64, 64, 128, 192, 192, 256]),
    ],
)
def test_as_much_is_loaded_as_with_vllms_own_connector(
    models: dict[tuple[int, ...], Path],
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    loaded: list[int],
) -> None:
    from vllm.config import KVTransferConfig

    monkeypatch.syspath_prepend(BENCHMARKS)
    with vllm_engine(models[sizes], {}, num_blocks=40) as engine:
        assert tuple(group.block_size for group in engine.connector._groups) == sizes
        ours = _ask_again(engine)
    with vllm_engine(models[sizes], num_blocks=40, kv_transfer_config=KVTransferConfig(**OWN)) as engine:
        theirs = _ask_again(engine)
    assert [output.cached for output in ours] == loaded
    assert all(our.cached >= their.cached for our, their in zip(ours, theirs, strict=True))
    assert tokens_of(ours) == tokens_of(theirs) == reference(models[sizes], ASKED)


def _ask_again(engine: Engine) -> list[Output]:
    """Compute what is to be stored, and ask for each prompt when vLLM's own cache is empty."""
    engine.generate(STORED)
    outputs = []
    for prompt in ASKED:
        engine.forget()
        outputs += engine.generate([prompt])
    return outputs


def test_chunks_of_two_blocks_in_a_small_cache_and_a_small_pool(
    models: dict[tuple[int, ...], Path], reference: Reference
) -> None:
    """Chunks of 64, 128 and 192 tokens; prompts share a GPU's 20 blocks, and the pool evicts."""
    model = models[32, 64, 96]
    with vllm_engine(model, {"blocks_per_chunk": 2, "cpu": {"capacity": "6MiB"}}, num_blocks=20) as engine:
        rounds = [tokens_of(engine.generate(CHATS, 24)) for _ in range(2)]
        engine.settle()
        assert engine.stats.loads > 0
    assert rounds == [reference(model, CHATS, 24)] * 2


def test_wrong_bytes_would_be_noticed(models: dict[tuple[int, ...], Path], reference: Reference) -> None:
    """The negative control."""
    model, prompt = models[32, 64, 96], STORED[-1]
    with vllm_engine(model, {}) as engine:
        engine.generate([prompt])
        engine.forget()
        engine.falsify_pool()
        (output,) = engine.generate([prompt])
    assert output.cached == 256
    assert output.tokens != reference(model, ASKED)[ASKED.index(prompt)]
