"""The kernels that pack and unpack, in Triton's interpreter: the bytes of `kvtier.packing`, no others."""

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
import numpy as np
import torch
from kvtier.packing import PackedPages, PageShape, block_format
from kvtier.transfer.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.transfer.cuda.packing import Pack, Unpack
from kvtier.transfer.cuda.pieces import find_units, scratch_bytes

NUM_BLOCKS, ODD = 5, (0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8000, 0x0080)
tokens, *widths = map(int, sys.argv[1:])
rng = np.random.default_rng(tokens)
sizes = [2 * tokens * width for width in widths]
form = block_format(sum(sizes), tokens)


def make_pages():
    # Blocks of normal values, with some odd ones; the last block has far too many of those.
    pages = []
    for size in sizes:
        values = rng.standard_normal((NUM_BLOCKS, size // 2)).astype(np.float32).view(np.uint32) >> 16
        for block, share in enumerate([0, 1 / 3000, 1 / 3000, 1 / 300, 1 / 3]):
            odd = rng.random(size // 2) < share
            values[block, odd] = rng.choice(np.array(ODD), odd.sum())
        page = np.zeros((NUM_BLOCKS, size + 24), np.int8)  # pages have padding
        page[:, :size] = values.astype(np.uint16).view(np.int8)
        pages.append(page)
    return pages


def canonical(pages):
    tensors = [CanonicalKVCacheTensor(torch.from_numpy(page), page.shape[1]) for page in pages]
    refs = [CanonicalKVCacheRef(i, size, width) for i, (size, width) in enumerate(zip(sizes, widths))]
    return CanonicalKVCaches(tensors, [refs])


pages, blocks = make_pages(), np.arange(NUM_BLOCKS)
expected = np.zeros((NUM_BLOCKS, form.bytes), np.uint8)
shapes = [PageShape(size, width) for size, width in zip(sizes, widths)]
views = [page[:, :size] for page, size in zip(pages, sizes)]
packed = PackedPages(expected, 0, form, views, shapes).store(blocks, 0 * blocks, blocks)
assert packed.tolist() == [True] * 4 + [False]

units = find_units(canonical(pages), 0, form)
scratch = torch.zeros(scratch_bytes(units, NUM_BLOCKS), dtype=torch.int8)
rows = torch.full((NUM_BLOCKS + 1, form.bytes), 77, dtype=torch.uint8)
args = torch.from_numpy(np.concatenate([blocks, rows.data_ptr() + blocks * form.bytes]))
pack = Pack(units, "cpu", scratch.data_ptr())
for _ in range(2):  # the second finds what the first has left in the scratch
    pack(args, NUM_BLOCKS)
    assert (rows[:4].numpy() == expected[:4]).all(), "other bytes than those of the host"
    assert rows[4].numpy()[:8].tobytes() == expected[4, :8].tobytes(), "the head of what does not pack"
    assert (rows[5] == 77).all(), "bytes behind the blocks"

others, four = [np.full_like(page, 5) for page in pages], blocks[:4]
args = torch.from_numpy(np.concatenate([four, rows.data_ptr() + four * form.bytes]))
Unpack(find_units(canonical(others), 0, form), "cpu")(args, 4)
for page, other, size in zip(pages, others, sizes):
    assert (other[:4, :size] == page[:4, :size]).all(), "other values than those that were packed"
    assert (other[:, size:] == 5).all() and (other[4] == 5).all(), "bytes of others"

# Damaged bytes unpack to something, and write to no other memory.
for damage in range(8):
    broken = rows.clone()
    if damage:
        at = torch.from_numpy(rng.integers(0, form.scales if damage < 6 else form.bytes, 200))
        broken[:4, at] = torch.from_numpy(rng.integers(0, 256, 200).astype(np.uint8))
    args = torch.from_numpy(np.concatenate([four, broken.data_ptr() + four * form.bytes]))
    Unpack(find_units(canonical(others), 0, form), "cpu")(args, 4)
    assert all((other[:, size:] == 5).all() and (other[4] == 5).all() for other, size in zip(others, sizes))
"""


@pytest.mark.parametrize(
    "shape",
    [(16, 256, 256), (16, 64, 64, 64), (8, 96, 96), (32, 128), (16, 576), (16, 576, 128)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_the_bytes_are_those_of_the_host(shape: tuple[int, ...]) -> None:
    """In a process of its own: Triton reads the variable when kernels are defined.

    A shape is the tokens of a block and the values of a token in each of its pages.
    """
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *map(str, shape)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
