"""Models whose KV cache groups have blocks of unequal sizes: the same tokens, and no less loaded than by
vLLM's own connector.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.connector_kit import Request, make_host
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.device import on_gpu
from tests.vllm.engines import BLOCK, Engine, Output, Prompt, make_prompt, vllm_engine
from tests.vllm.models import save_unequal
from tests.vllm.test_multi import BENCHMARKS, own_connector

STORED = [make_prompt(seed, length) for seed, length in enumerate((130, 160, 192, 300))]
ASKED = [
    *STORED,
    *(STORED[-1][:shared] + make_prompt(shared, 40) for shared in (95, 100, 140, 192, 230, 270)),
]
PATIENT = {"load_deadline": "60s", "store_deadline": "60s"}
"""However slow the machine is, nothing is given up."""

Groups = list[tuple[int, int | None]]
"""For each group the tokens of a block, and its window."""

CHATS = [make_prompt(seed % 4, 200) + make_prompt(100 + seed, 7 * seed) for seed in range(12)]
WINDOWS = {(32, 64, 96): (None, 65, 40), (64, 32): (None, 33), (32, 64): (None, 1)}
"""By the tokens of a block in each group: the windows."""


@pytest.fixture(autouse=True)
def layers_outermost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM keep blocks unequal on a GPU too: with blocks outermost, as kvtier asks for, it makes them
    equal. The layout is that of vLLM's own connector.
    """
    if on_gpu():
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")


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
        ((32, 64), [128, 128, 191, 256, 64, 64, 128, 192, 192, 256]),
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
    with vllm_engine(models[sizes], PATIENT, num_blocks=40) as engine:
        assert tuple(group.block_size for group in engine.connector._groups) == sizes
        ours = _ask_again(engine)
    with vllm_engine(
        models[sizes], num_blocks=40, kv_transfer_config=KVTransferConfig(**own_connector())
    ) as engine:
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


# -- the schedulers' sides alone, with blocks that no model here gets ---------------------------------


class Stock:
    """The scheduler's side of vLLM's own connector, without an engine."""

    def __init__(self, model: Path, groups: Groups, blocks_per_chunk: int) -> None:
        import torch
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            SlidingWindowSpec,
        )

        shape = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
        specs = [
            FullAttentionSpec(block_size=size, **shape)
            if window is None
            else SlidingWindowSpec(block_size=size, sliding_window=window, **shape)
            for size, window in groups
        ]
        names = [KVCacheGroupSpec([f"layers.{index}"], spec) for index, spec in enumerate(specs)]
        own = own_connector()
        own["kv_connector_extra_config"] |= {"blocks_per_chunk": blocks_per_chunk}
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            block_size=BLOCK,
            skip_tokenizer_init=True,
            kv_transfer_config=KVTransferConfig(**own),
        ).create_engine_config()
        connector = OffloadingConnector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(100, [], names))
        self._scheduler = connector.connector_scheduler

    def store(self, name: str, prompt: Prompt) -> None:
        """Have all complete chunks of a prompt in the pool."""
        state = self._begin(name, prompt)
        keys = [key for group in state.group_states for key in group.offload_keys]
        if keys:
            assert self._scheduler.manager.prepare_store(keys, state.req_context) is not None
            self._scheduler.manager.complete_store(keys, state.req_context)

    def ask(self, name: str, prompt: Prompt) -> int:
        """Return how many tokens of a prompt it would load."""
        tokens, _ = self._scheduler.get_num_new_matched_tokens(self._begin(name, prompt).req, 0)
        assert isinstance(tokens, int)
        return tokens

    def _begin(self, name: str, prompt: Prompt) -> Any:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request as VllmRequest

        init_none_hash(sha256)
        hasher = get_request_block_hasher(self._scheduler.config.tokens_per_hash, sha256)
        request = VllmRequest(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        self._scheduler.on_new_request(request)
        state = self._scheduler._req_status[name]
        state.update_offload_keys()
        return state


@pytest.mark.parametrize(
    "groups",
    [
        [(16, None), (12, 8)],
        [(16, None), (12, 13)],
        [(12, None), (16, 30)],
        [(16, None), (24, 9)],
        [(24, None), (16, 40)],
        [(16, None), (32, 17)],
        [(32, None), (16, 16)],
        [(12, None), (16, None)],
        [(16, None), (32, 33), (48, 70)],
    ],
    ids=str,
)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_never_less_is_loaded_than_vllms_own_scheduler_would(
    llama: Path, monkeypatch: pytest.MonkeyPatch, groups: Groups, blocks_per_chunk: int
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    theirs = Stock(llama, groups, blocks_per_chunk)
    sizes, windows = zip(*groups, strict=True)
    host = make_host(10_000, windows, block_sizes=sizes, blocks_per_chunk=blocks_per_chunk)
    found: list[tuple[int, int]] = []
    for shared in range(1, 200, 3):
        prompt = make_prompt(shared, shared + 45)
        theirs.store(f"stored {shared}", prompt[:shared])
        stored, asked = Request(f"stored {shared}", prompt[:shared]), Request(f"asked {shared}", prompt)
        assert host.scheduler.get_num_new_matched_tokens(stored, 0) == (0, False)
        blocks = tuple(list(range(1, 2 + shared // size)) for size in sizes)
        for job in host.run_new(stored, blocks).store_jobs.values():
            host.report(job)
        tokens, _ = host.scheduler.get_num_new_matched_tokens(asked, 0)
        found.append((tokens or 0, theirs.ask(f"asked {shared}", prompt)))
    assert all(our >= their for our, their in found), found
    assert any(their for _, their in found)
    if groups == [(16, None), (12, 8)] and blocks_per_chunk == 1:
        assert found[13] == (32, 32), "85 tokens, of which 40 are shared"


def test_chunks_of_two_blocks_in_a_small_cache_and_a_small_pool(
    models: dict[tuple[int, ...], Path], reference: Reference
) -> None:
    """Chunks of 64, 128 and 192 tokens; prompts share a GPU's 20 blocks, and the pool evicts."""
    model = models[32, 64, 96]
    settings = PATIENT | {"blocks_per_chunk": 2, "cpu": {"capacity": "6MiB"}}
    with vllm_engine(model, settings, num_blocks=20) as engine:
        rounds = [tokens_of(engine.generate(CHATS, 24)) for _ in range(2)]
        engine.settle()
        assert engine.stats.loads > 0
    assert rounds == [reference(model, CHATS, 24)] * 2


def test_wrong_bytes_would_be_noticed(models: dict[tuple[int, ...], Path], reference: Reference) -> None:
    """The negative control."""
    model, prompt = models[32, 64, 96], STORED[-1]
    with vllm_engine(model, PATIENT) as engine:
        engine.generate([prompt])
        engine.forget()
        engine.falsify_pool()
        (output,) = engine.generate([prompt])
    assert output.cached == 256
    assert output.tokens != reference(model, ASKED)[ASKED.index(prompt)]
