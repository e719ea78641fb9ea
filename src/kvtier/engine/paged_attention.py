"""Attention of few rows over many keys, read directly from the pages of a cache: two Triton kernels.

The keys of a sequence are cut into `splits` shares, so that one sequence alone keeps the whole device busy.
A program attends from all rows of a sequence, and all query heads of one KV head, over one share; a second
kernel joins the shares. The keys that a row may see follow from its position, which is read on the device:
shapes and addresses are the same in every step, so a step can be captured once and replayed.

A key that no row of its sequence may see is not read. This needs Triton, on a CUDA device or in its
interpreter. Any thread may call it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["PagedAttention"]

# The best number of keys per loop turn, and of stages, changes at this many queries (measured on an H200).
_FEW_QUERIES = 32


@triton.jit  # type: ignore[untyped-decorator]
def _attend_share(  # type: ignore[no-untyped-def]
    q, k, v, table, positions, out, maxima, sums, scale, block_tokens, token_stride, table_width,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend over one share of the keys; write the output, and the maximum and sum of its softmax."""
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, heads = tl.num_programs(0), tl.num_programs(1)
    query, dim = tl.arange(0, QUERIES), tl.arange(0, DIM)
    row, real = sequence * ROWS + query // GROUP, query < ROWS * GROUP
    position = tl.load(positions + row, mask=real, other=0)
    q_head = row * heads * GROUP + head * GROUP + query % GROUP
    asked = tl.load(q + q_head[:, None] * DIM + dim[None, :], mask=real[:, None], other=0.0)
    last = tl.max(position, 0) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, tl.min(tl.where(real, position, last), 0) - WINDOW + 1)
    share = tl.cdiv(tl.cdiv(last - first, splits), KEYS) * KEYS
    start = first + split * share
    end = tl.minimum(start + share, last)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    seen = tl.zeros([QUERIES, DIM], tl.float32)
    for turn in range(start, end, KEYS):
        key = turn + tl.arange(0, KEYS)
        there = key < end
        block = tl.load(table + sequence * table_width + key // BLOCK_SIZE, mask=there, other=0)
        at = (block * block_tokens + key % BLOCK_SIZE) * token_stride + head * DIM
        keys = tl.load(k + at[None, :] + dim[:, None], mask=there[None, :], other=0.0)
        score = tl.dot(asked, keys) * scale
        visible = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible &= key[None, :] > position[:, None] - WINDOW
        score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(top - base)
        values = tl.load(v + at[:, None] + dim[None, :], mask=there[:, None], other=0.0)
        seen = seen * shrink[:, None] + tl.dot(weight.to(values.dtype), values)
        total = total * shrink + tl.sum(weight, 1)
        top = higher
    place = ((sequence * heads + head) * QUERIES + query) * splits + split
    tl.store(out + place[:, None] * DIM + dim[None, :], seen)
    tl.store(maxima + place, top)
    tl.store(sums + place, total)


@triton.jit  # type: ignore[untyped-decorator]
def _join_shares(  # type: ignore[no-untyped-def]
    shares, maxima, sums, out,
    ROWS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the shares of one query of one KV head."""
    query, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    place = ((sequence * heads + head) * QUERIES + query) * SPLITS + split
    top = tl.load(maxima + place)
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(sums + place), 0)
    seen = tl.load(shares + place[:, None] * DIM + dim[None, :])
    result = tl.sum(seen * weight[:, None], 0) / total
    q_head = (sequence * ROWS + query // GROUP) * heads * GROUP + head * GROUP + query % GROUP
    tl.store(out + q_head * DIM + dim, result.to(out.dtype.element_ty))


class PagedAttention:
    """Attention for `sequences` of `rows` rows each, with the memory for the shares."""

    def __init__(
        self,
        sequences: int,
        rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        self._sequences, self._rows = sequences, rows
        self._group, self._kv_heads, self._dim = num_heads // num_kv_heads, num_kv_heads, head_dim
        self._queries = max(16, triton.next_power_of_2(rows * self._group))
        self._splits = max(4, 32 // triton.next_power_of_2(sequences))
        places = (sequences, num_kv_heads, self._queries, self._splits)
        self._shares = torch.empty(*places, head_dim, dtype=torch.float32, device=device)
        self._maxima = torch.empty(places, dtype=torch.float32, device=device)
        self._sums = torch.empty(places, dtype=torch.float32, device=device)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        positions: Tensor,
        block_size: int,
        block_tokens: int,
        window: int | None,
    ) -> Tensor:
        """Return the attention output for `q` `[sequences * rows, heads, dim]`, in the same shape.

        `k` and `v` `[tokens, kv heads, dim]` hold token o of block b at `b * block_tokens + o`; `table`
        `[sequences, blocks]` has each sequence's blocks. A row sees the keys up to its position, within
        `window`.
        """
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        between = (self._shares, self._maxima, self._sums)
        keys, stages = (128, 2) if self._queries <= _FEW_QUERIES else (64, 3)
        shape = {"ROWS": self._rows, "GROUP": self._group, "QUERIES": self._queries, "DIM": self._dim}
        _attend_share[self._splits, self._kv_heads, self._sequences](
            q.contiguous(), k, v, table, positions, *between,
            self._dim**-0.5, block_tokens, k.stride(0), table.stride(0),
            BLOCK_SIZE=block_size, WINDOW=window or 0, KEYS=keys, **shape, num_stages=stages,
        )  # fmt: skip
        queries = self._rows * self._group
        _join_shares[queries, self._kv_heads, self._sequences](*between, out, SPLITS=self._splits, **shape)
        return out
