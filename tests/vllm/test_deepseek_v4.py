"""DeepSeek V4: compressed latents, an indexer, sliding windows, and windows of what is not compressed yet,
in groups whose blocks have 4 to 256 tokens. The tokens are those of vLLM alone.

It runs in a process of its own (`deepseek_v4.py`), which has to change things before vLLM is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.device import on_gpu

PROGRAM = Path(__file__).with_name("deepseek_v4.py")

# The CPU's form of the model is new in it. The program takes two minutes, and longer on a busy machine.
pytestmark = [pytest.mark.newest_vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program says."""
    import torch

    if on_gpu() or not torch.cpu._is_avx512_bf16_supported() or find_spec("triton") is None:
        pytest.skip("needs vLLM's CPU build, AVX-512 with bfloat16, and Triton for its interpreter")
    root = str(PROGRAM.parents[2])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path_factory.mktemp("model"))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(lines[-40:])
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def tokens(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in outputs]


def test_groups_have_blocks_of_many_sizes(found: Any) -> None:
    assert sorted(map(tuple, found["groups"]), key=str) == sorted(
        [(64, 128)] * 3 + [(256, None), (4, 8), (8, 128)], key=str
    )


def test_prompts_come_back_up_to_the_last_end(found: Any) -> None:
    alone = tokens(found["alone"])
    assert tokens(found["computed"]) == alone[:3]
    assert tokens(found["loaded"]) == alone[:3]
    assert [output["cached"] for output in found["loaded"]] == [512, 511, 512]


def test_few_windows_are_stored(found: Any) -> None:
    """Each prompt has one chunk of full attention for 256 tokens, and the windows of one end."""
    assert found["chunks"] == 3 * (2 + 3 * 2 + 2 + 16)


def test_a_shared_beginning_is_found_by_the_third_that_has_it(found: Any) -> None:
    assert tokens(found["sharing"]) == tokens(found["alone"])[3:]
    assert [output["cached"] for output in found["sharing"]] == [0, 0, 512]


def test_every_group_counts(found: Any) -> None:
    """The control: with the rows of any group falsified, tokens are more or less likely."""
    loaded = [output["logprobs"] for output in found["loaded"][:2]]
    for group, outputs in enumerate(found["falsified"]):
        assert [output["cached"] for output in outputs] == [512, 511]
        assert [output["logprobs"] for output in outputs] != loaded, f"group {group}"
