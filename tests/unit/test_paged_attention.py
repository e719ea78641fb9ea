"""Attention over pages, in Triton's interpreter: what torch's own sees, whatever lies beyond what may be
seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("needs triton, whose interpreter runs kernels without a GPU", allow_module_level=True)

CHECK = """
import sys
import torch
import torch.nn.functional as F
from kvtier.engine.model import LayerPages
from kvtier.engine.paged_attention import PagedAttention

window = int(sys.argv[1]) or None
torch.manual_seed(0)
heads, kv_heads, dim, block_size, num_blocks = 6, 2, 16, 4, 90
for sequences, rows, ends in ((1, 1, [1]), (1, 1, [171]), (1, 5, [67]), (3, 1, [9, 130, 64])):
    for layout in ("blocks_first", "kv_first"):
        lead = (num_blocks, 2) if layout == "blocks_first" else (2, num_blocks)
        cache = torch.full((*lead, block_size, kv_heads, dim), torch.nan)
        k, v = (LayerPages(pages) for pages in cache.unbind(1 if layout == "blocks_first" else 0))
        table = torch.zeros(sequences, 50, dtype=torch.int64)
        free = (1 + torch.randperm(num_blocks - 1)).tolist()
        q = torch.randn(sequences * rows, heads, dim)
        positions, expected = [], []
        for index, end in enumerate(ends):
            first = max(0, end - rows - (window or end) + 1)
            for position in range(first, end):
                if position == first or position % block_size == 0:
                    table[index, position // block_size] = free.pop()
                at = table[index, position // block_size] * k.stride + position % block_size
                k.rows[at], v.rows[at] = torch.randn(2, kv_heads, dim)
            positions += range(end - rows, end)
            keys, queries = torch.arange(first, end), torch.arange(end - rows, end)
            at = table[index][keys // block_size] * k.stride + keys % block_size
            mask = keys[None] <= queries[:, None]
            if window is not None:
                mask &= keys[None] > queries[:, None] - window
            asked = q[index * rows : (index + 1) * rows].transpose(0, 1)
            seen = F.scaled_dot_product_attention(
                asked,
                k.rows[at].transpose(0, 1),
                v.rows[at].transpose(0, 1),
                attn_mask=mask,
                enable_gqa=True,
            )
            expected.append(seen.transpose(0, 1))
        paged = PagedAttention(sequences, rows, heads, kv_heads, dim, torch.device("cpu"))
        got = paged(q, k.rows, v.rows, table, torch.tensor(positions), block_size, k.stride, window)
        torch.testing.assert_close(got, torch.cat(expected), rtol=1e-5, atol=1e-5)
"""


@pytest.mark.parametrize("window", [0, 3, 40])
def test_it_sees_what_a_mask_allows_and_reads_nothing_else(window: int) -> None:
    """In a process of its own: Triton reads the variable when kernels are defined."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(window)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-2000:]
