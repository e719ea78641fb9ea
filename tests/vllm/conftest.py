"""What the tests inside vLLM share: its environment, the models, and one engine without kvtier to compare
with.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.vllm.device import on_gpu
from tests.vllm.engines import Engine, Output, Prompt, vllm_engine
from tests.vllm.models import save_hybrid, save_llama


def _has_vllm() -> bool:
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None  # without an origin it is the folder of these tests


if _has_vllm():
    # Read when vLLM is imported. One thread: two that spin on a busy machine take a hundred times as long.
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # else tf32, whose rounding chooses between tokens that are nearly as likely
        "TRITON_F32_DEFAULT": "ieee",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip without vLLM or a device that a test needs, and let vLLM warn: only our own warnings
    are errors.
    """
    skip = (
        None
        if _has_vllm()
        else pytest.mark.skip(reason="vLLM is not installed here; `make test-vllm` installs it")
    )
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if skip is not None:
                item.add_marker(skip)
            elif item.get_closest_marker("gpu") and not on_gpu():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one KV cache group."""
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two KV cache groups, one of them windowed."""
    return save_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(params=["llama", "hybrid"])
def model(request: pytest.FixtureRequest) -> Path:
    """Each of the models."""
    path = request.getfixturevalue(request.param)
    assert isinstance(path, Path)
    return path


Reference = Callable[..., list[list[int]]]


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Give the tokens of prompts as vLLM computes them without a connector, with room for all of them."""
    known: dict[tuple[Path, str], list[list[int]]] = {}

    def compute(model: Path, prompts: list[Prompt], max_tokens: int = 8) -> list[list[int]]:
        key = model, repr((prompts, max_tokens))
        if key not in known:
            with vllm_engine(model, num_blocks=256) as engine:
                known[key] = tokens_of(engine.generate(prompts, max_tokens))
        return known[key]

    return compute


def tokens_of(outputs: list[Output]) -> list[list[int]]:
    """Return the tokens of outputs."""
    return [output.tokens for output in outputs]


@pytest.fixture
def engine(llama: Path) -> Iterator[Engine]:
    """An engine with kvtier and a small cache."""
    with vllm_engine(llama, {}) as running:
        yield running
