"""The gather and the scatter, in Triton's interpreter: every byte of every layout, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("needs triton, whose interpreter runs kernels without a GPU", allow_module_level=True)

CHECK = """
import random, sys
import torch
from kvtier.testing.caches import make_caches, make_config, ReferenceTransfer
from kvtier.transfer.base import CPULoadStoreSpec, GPULoadStoreSpec
from kvtier.transfer.cuda.kernels import SHORT, STAGED, PageCopy
from kvtier.transfer.cuda.pieces import find_pages, split_pages
from kvtier.transfer.layout import canonicalize

layout = sys.argv[1]
for page, shape in ((16, SHORT), (32, STAGED), (4096, STAGED), (4096, SHORT), (20_000, STAGED)):
    caches, twin = (make_caches(layout, page=page, num_blocks=9) for _ in range(2))
    model = ReferenceTransfer(twin, make_config(twin, num_slots=9))
    pages = find_pages(canonicalize(caches.layers, caches.groups, num_blocks=9), 0)
    ids = random.Random(page).sample(range(1, 9), 5)
    elsewhere = random.Random(-page).sample(range(1, 9), 5)
    model.store(GPULoadStoreSpec(ids), CPULoadStoreSpec(range(5)))
    model.load(CPULoadStoreSpec(range(5)), GPULoadStoreSpec(elsewhere))
    for part in split_pages(pages, 2 * int(pages.size.max()), 1 << 30):
        staging = torch.full((5 * part.bytes + 64,), 77, dtype=torch.int8)
        rows = [staging.data_ptr() + index * part.bytes for index in range(5)]
        PageCopy(part, "cpu", shape, gather=True)(torch.tensor(ids + rows), 5, 0)
        expected = b"".join(bytes(row[part.offset : part.offset + part.bytes]) for row in model.rows[:5])
        assert staging.numpy().tobytes() == expected + bytes([77]) * 64, (layout, page, "gather")
        PageCopy(part, "cpu", shape, gather=False)(torch.tensor(elsewhere + rows), 5, 0)
    assert caches.contents() == twin.contents(), (layout, page, "scatter")
"""


@pytest.mark.parametrize(
    "layout", ["blocks_first", "kv_first", "padded", "interleaved", "stacked", "permuted"]
)
def test_pages_arrive_and_no_others_change(layout: str) -> None:
    """In a process of its own: Triton reads the variable when kernels are defined."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK, layout],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-2000:]
