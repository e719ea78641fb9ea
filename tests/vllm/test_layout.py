"""The layout that kvtier asks for: where it wins, and never where an engine might not start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import as_connector, make_prompt, vllm_engine
from tests.vllm.test_contract import engine_config


@pytest.fixture
def config(llama: Path) -> Any:
    """vLLM's config of an engine with kvtier, as it is on a GPU."""
    config = engine_config(llama)
    config.attention_config.backend = None
    config.cache_config.block_size = 16
    return config


class Device:
    """A platform, as far as a layout depends on it."""

    def __init__(self, cuda: bool = True, major: int = 9) -> None:
        self._cuda, self.major = cuda, major

    def is_cuda(self) -> bool:
        return self._cuda

    def get_device_capability(self) -> Device:
        return self


@pytest.fixture
def use_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to run elsewhere."""
    return lambda *where: monkeypatch.setattr(
        "kvtier.integrations.vllm.describe.current_platform", Device(*where)
    )


@pytest.mark.parametrize(
    ("where", "changes", "expected"),
    [
        ((True, 9), {}, "BLNHC"),
        ((True, 8), {"backend": "TRITON_ATTN"}, "BLNHC"),
        ((True, 10), {}, None),
        ((False, 9), {}, None),
        ((True, 9), {"backend": "FLASHINFER"}, None),
        ((True, 9), {"block_size": 528}, None),
    ],
    ids=["hopper", "ampere", "blackwell", "not_cuda", "other_backend", "blocks_to_be_cut"],
)
def test_asked_for_where_it_wins(
    config: Any, use_device: Any, where: tuple[bool, int], changes: dict[str, Any], expected: str | None
) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvtier.integrations.vllm import KVTierConnector

    use_device(*where)
    if "backend" in changes:
        config.attention_config.backend = AttentionBackendEnum[changes["backend"]]
    config.cache_config.block_size = changes.get("block_size", 16)
    assert KVTierConnector.get_required_kvcache_layout(config) == expected


def test_in_company_nothing_is_asked_for(config: Any, use_device: Any) -> None:
    """vLLM does not start with children that want different layouts, and its own connector wants one."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    use_device()
    own = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    config.kv_transfer_config.kv_connector = "MultiConnector"
    config.kv_transfer_config.kv_connector_extra_config = {"connectors": [as_connector({}), own]}
    assert MultiConnector.get_required_kvcache_layout(config) == "LBHNC"


def test_the_cpu_build_starts_without_a_warning(llama: Path) -> None:
    with vllm_engine(llama, {}) as engine:
        engine.generate([make_prompt(0, 40)])
        config = engine.llm.llm_engine.vllm_config
        from kvtier.integrations.vllm import KVTierConnector

        asked = KVTierConnector.get_required_kvcache_layout(config)
        assert asked in (None, config.cache_config.kv_cache_layout)
