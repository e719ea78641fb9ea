"""LoRA adapters: their KV differs for the same tokens, so nobody gets another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import tokens_of
from tests.vllm.device import lora_options
from tests.vllm.engines import make_prompt, vllm_engine
from tests.vllm.models import save_adapter

from kvtier.keys import OffloadKey

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
PROMPT = make_prompt(0, 100)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """No adapter, one, and another."""
    from vllm.lora.request import LoRARequest

    folders = [save_adapter(tmp_path_factory.mktemp(f"lora{seed}"), seed) for seed in (1, 2)]
    return [None, *(LoRARequest(f"lora{i}", i, str(folder)) for i, folder in enumerate(folders, start=1))]


def test_adapters_and_the_base_never_share_kv(llama: Path, adapters: list[Any]) -> None:
    options = LORA | lora_options()
    with vllm_engine(llama, num_blocks=64, **options) as plain:
        expected = [tokens_of(plain.generate([PROMPT], lora_request=adapter)) for adapter in adapters]
    assert len({str(tokens) for tokens in expected}) == 3, "the adapters make a difference"
    with vllm_engine(llama, {}, num_blocks=64, **options) as engine:
        offered = _watch_offers(engine.connector._connector.connector_scheduler.manager)
        for seen, adapter in enumerate(adapters):
            engine.forget()
            (first,) = engine.generate([PROMPT], lora_request=adapter)
            assert (first.cached, [first.tokens]) == (0, expected[seen])
        engine.settle()
        for adapter, tokens in zip(adapters, expected, strict=True):
            engine.forget()
            (again,) = engine.generate([PROMPT], lora_request=adapter)
            assert (again.cached, [again.tokens]) == (96, tokens)
        assert engine.stats.loads == 3
    assert len(offered) == 9, "three chunks under three names"


def _watch_offers(manager: Any) -> set[OffloadKey]:
    """Collect all keys that a manager is offered from now on."""
    offered: set[OffloadKey] = set()
    prepare_store = manager.prepare_store

    def note(keys: list[OffloadKey], context: Any) -> Any:
        offered.update(keys)
        return prepare_store(keys, context)

    manager.prepare_store = note
    return offered
