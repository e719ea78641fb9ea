"""A Llama-family decoder over a paged KV cache: embed, attend, multiply, score.

One forward pass takes any mix of prefill chunks and decode steps (`ForwardBatch`), flattened to rows that go
through the linear layers together. A layer first writes the K and V of its rows into the cache, and then
attends over the cache: KV computed in this step and KV loaded from a tier are read the same way.

A state layer is gated linear attention. Each of its KV heads has a matrix, which decays by a gate and gains
`k^T v` with every token, and which queries multiply. A block of its cache holds the matrices after the last
computed token of the block: a sequence goes on from the block of its last computed token, and writes a state
into each block that it enters. A state is never written again once its block is full.

Guarantees: a sequence reads only its own tokens, and only those that one of its rows may see. The null
block, the unwritten end of a last block and other sequences' pages are never read, so garbage there, NaN
included, reaches no result. All arithmetic is in `compute_dtype`, except that of states, which is in float64
and never rounded; values are rounded to the cache's dtype only where K and V are stored. With float32 caches
and float64 arithmetic the tokens do not depend on how sequences were chunked or batched.

One thread at a time may use a decoder; the weights are never written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kvtier.engine.config import STATE, ModelConfig, weight_shapes
from kvtier.errors import InputError, ModelError

STATE_DTYPE = torch.float64
_GATE_ROOT = 16  # a gate is this root of a sigmoid: a state remembers some twenty tokens, not two


def state_shape(config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of one state of one layer."""
    return config.num_kv_heads, config.head_dim, config.head_dim


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's part of a batch: rows `[start, end)`. The last row is its token `context_len - 1`.

    `block_tables[g]` are its block ids in group g, with the null block where the group's window has passed.
    """

    start: int
    end: int
    context_len: int
    block_tables: tuple[Tensor, ...]

    @property
    def first(self) -> int:
        """The position of the first row."""
        return self.context_len - (self.end - self.start)

    def first_key(self, window: int | None) -> int:
        """Return the first position that the first row may see."""
        return 0 if window is None else max(0, self.first - window + 1)

    def state_block(self, group: int, block_size: int) -> int | None:
        """Return the block with the state before the first row; `None` at the head of a sequence."""
        return int(self.block_tables[group][(self.first - 1) // block_size]) if self.first else None

    def state_writes(self, group: int, block_size: int) -> tuple[Tensor, list[int]]:
        """Return the blocks that the rows enter, and the last row in each, counted from the first row."""
        positions = range(self.first // block_size, (self.context_len - 1) // block_size + 1)
        rows = [min((i + 1) * block_size, self.context_len) - 1 - self.first for i in positions]
        return self.block_tables[group][positions.start : positions.stop], rows


@dataclass(slots=True)
class ForwardBatch:
    """One forward pass over several sequences, flattened to T rows: `tokens` [T] at `positions` [T].

    `slots[g]` [T] are the positions of each row's K and V in the caches of group g:
    `block_id * block_size + offset`.
    """

    tokens: Tensor
    positions: Tensor
    sequences: list[SequenceSlice]
    slots: tuple[Tensor, ...]


def split_kv(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of a layer as `(num_blocks, block_size, heads, dim)` views of its cache.

    The cache is `(num_blocks, 2, …)` or `(2, num_blocks, …)`. A cache of two blocks would fit both and is
    refused.
    """
    if cache.ndim != 5 or list(cache.shape[:2]).count(2) != 1:
        raise InputError(
            "kv cache: expected (num_blocks, 2, block_size, heads, dim) or (2, num_blocks, block_size, "
            f"heads, dim) with more than two blocks, got {tuple(cache.shape)}"
        )
    k, v = cache.unbind(1 if cache.shape[1] == 2 else 0)
    return k, v


class _Span(NamedTuple):
    """Sequences that attend in one call: N of them with R rows each, over L keys, padded to the longest.

    `rows` [N, R] are rows of the batch, `keys` [N * L] are rows of `LayerPages`. `mask` [N, 1, R, L] holds
    the keys that each row may see. For one sequence without a window, on a GPU in half precision, the mask
    is only a description, so that a fused kernel can be used.
    """

    rows: Tensor
    keys: Tensor
    mask: Tensor


def _plan(
    batch: ForwardBatch, group: int, window: int | None, block_size: int, stride: int, dtype: torch.dtype
) -> list[_Span]:
    """Gather sequences into spans of equally many rows, with key counts within a factor of two, to bound
    padding.
    """

    def shape(sequence: SequenceSlice) -> tuple[int, int]:
        length = sequence.context_len - sequence.first_key(window)
        return sequence.end - sequence.start, length.bit_length()

    alike = groupby(sorted(batch.sequences, key=shape), key=shape)
    return [_span(list(some), group, window, block_size, stride, dtype) for _, some in alike]


def _span(
    sequences: list[SequenceSlice],
    group: int,
    window: int | None,
    block_size: int,
    stride: int,
    dtype: torch.dtype,
) -> _Span:
    #  0 ........ first .............. end - R ..... end
    #             keys in [first, first + L)   queries in [end - R, end)
    device = sequences[0].block_tables[group].device
    num_rows = sequences[0].end - sequences[0].start
    num_keys = max(s.context_len - s.first_key(window) for s in sequences)
    first, end, start = (
        torch.tensor(values, device=device)[:, None]
        for values in zip(*((s.first_key(window), s.context_len, s.start) for s in sequences), strict=True)
    )
    each_row = torch.arange(num_rows, device=device)
    keys = first + torch.arange(num_keys, device=device)
    queries = end - num_rows + each_row
    if len(sequences) == 1 and window is None and device.type == "cuda" and dtype.itemsize == 2:
        mask: Tensor = causal_lower_right(num_rows, num_keys)
    else:
        mask = (keys[:, None] <= queries[:, :, None])[:, None]
        if window is not None:
            mask &= (keys[:, None] > queries[:, :, None] - window)[:, None]
    # Padding repeats the sequence's own last token, which is masked, and as finite as its other tokens.
    keys = keys.minimum(end - 1)
    blocks = torch.stack(
        [s.block_tables[group][row] for s, row in zip(sequences, keys // block_size, strict=True)]
    )
    return _Span(start + each_row, (blocks * stride + keys % block_size).flatten(), mask)


class LayerPages:
    """One layer's K or V as rows of tokens, in either layout. Token `o` of block `b` is row `b * stride +
    o`.
    """

    def __init__(self, pages: Tensor) -> None:
        num_blocks, block_size, heads, dim = pages.shape
        self.stride = pages.stride(0) // pages.stride(1)
        self.rows = pages.as_strided(
            ((num_blocks - 1) * self.stride + block_size, heads, dim), pages.stride()[1:]
        )

    def write(self, rows: Tensor, values: Tensor) -> None:
        self.rows.index_copy_(0, rows, values.to(self.rows.dtype))

    def read(self, rows: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return `(count, heads, keys, dim)`.

        Selecting rows is several times as fast as indexing by block and offset.
        """
        tokens = self.rows.index_select(0, rows).to(dtype)
        return tokens.view(count, -1, *tokens.shape[1:]).transpose(1, 2)


class _Linear:
    """One matrix product of several of the checkpoint's matrices, side by side."""

    def __init__(self, weights: Mapping[str, Tensor], *names: str) -> None:
        self.weight = torch.cat([weights[f"{name}.weight"] for name in names])
        self.bias = (
            torch.cat([weights[f"{name}.bias"] for name in names]) if f"{names[0]}.bias" in weights else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, stream: Tensor, x: Tensor) -> Tensor:
        """Return the product of `x`, added to `stream`."""
        return torch.addmm(stream, x, self.weight.T) if x.is_cuda and self.bias is None else stream + self(x)


class _Norm:
    """A norm that scales rows to unit root mean square, then by a weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 1:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight


def _attend_spans(spans: list[_Span], q: Tensor, k: LayerPages, v: LayerPages) -> Tensor:
    out = torch.empty_like(q)
    for rows, keys, mask in spans:
        query = q[rows].transpose(1, 2)
        key, value = k.read(keys, len(rows), q.dtype), v.read(keys, len(rows), q.dtype)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        out[rows] = seen.transpose(1, 2)
    return out


class _LayerInputs(NamedTuple):
    """The inputs that all layers of one group and window share in a forward pass."""

    cos: Tensor
    sin: Tensor
    writes: Tensor
    spans: list[_Span]


class _Layer:
    """Attention and a gated MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.attention_norm = _Norm(weights["input_layernorm.weight"], config.rms_norm_eps)
        self.mlp_norm = _Norm(weights["post_attention_layernorm.weight"], config.rms_norm_eps)
        self.qkv = _Linear(weights, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.o = _Linear(weights, "self_attn.o_proj")
        self.gate_up = _Linear(weights, "mlp.gate_proj", "mlp.up_proj")
        self.down = _Linear(weights, "mlp.down_proj")
        self.qk_norm: _Norm | None = None
        if config.qk_norm:
            q, k = weights["self_attn.q_norm.weight"], weights["self_attn.k_norm.weight"]
            stacked = torch.cat([q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)])
            self.qk_norm = _Norm(stacked, config.rms_norm_eps)

    def __call__(self, x: Tensor, read_tokens: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the layer's output; `read_tokens` is `attend` or `recur` over the layer's cache."""
        x = self.o.add(x, read_tokens(self.attention_norm(x)))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return self.down.add(x, F.silu(gate) * up)

    def attend(self, x: Tensor, k: LayerPages, v: LayerPages, inputs: _LayerInputs) -> Tensor:
        """Write the rows' K and V, and return what the rows see in the cache."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = self.qkv(x).view(len(x), -1, self.config.head_dim)
        qk, new_v = qkv.tensor_split([heads + kv_heads], dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q, new_k = _rotate(qk, inputs.cos, inputs.sin).tensor_split([heads], dim=1)
        k.write(inputs.writes, new_k)
        v.write(inputs.writes, new_v)
        return _attend_spans(inputs.spans, q, k, v).flatten(1)


class _StateLayer(_Layer):
    """Gated linear attention and a gated MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        super().__init__(config, weights)
        self.gate = _Linear(weights, "self_attn.g_proj")

    def recur(self, x: Tensor, states: Tensor, batch: ForwardBatch, group: int, block_size: int) -> Tensor:
        """Go on from each sequence's state, write the states at the ends of blocks, and return what the rows
        see in the states after them.
        """
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = self.qkv(x).to(STATE_DTYPE).view(len(x), -1, dim)
        q, k, v = qkv.tensor_split([heads, heads + kv_heads], dim=1)
        gates = self.gate(x).to(STATE_DTYPE).view(len(x), kv_heads, dim, 1).sigmoid() ** (1 / _GATE_ROOT)
        gains = k[..., :, None] * v[..., None, :]
        after = torch.empty_like(gains)
        for sequence in batch.sequences:
            block = sequence.state_block(group, block_size)
            state = torch.zeros_like(states[0]) if block is None else states[block]
            for row in range(sequence.start, sequence.end):
                state = after[row] = torch.addcmul(gains[row], gates[row], state)
            blocks, last_rows = sequence.state_writes(group, block_size)
            states[blocks] = after[sequence.start : sequence.end][last_rows]
        seen = q.reshape(len(x), kv_heads, -1, dim) @ after
        return F.rms_norm(seen, seen.shape[-1:], eps=self.config.rms_norm_eps).flatten(1).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head as parts of complex numbers. `sin` is negative for the first half."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Decoder:
    """A model's weights on a device, ready to run.

    `dtype` is the dtype of the KV caches, `compute_dtype` that of everything else.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self.compute_dtype = dtype if compute_dtype is None else compute_dtype
        if missing := weight_shapes(config).keys() - weights.keys():
            raise ModelError(f"weights: expected every tensor of the model, {min(missing)} is missing")

        def take(prefix: str) -> dict[str, Tensor]:
            return {
                name.removeprefix(prefix): weight.to(self.device, self.compute_dtype)
                for name, weight in weights.items()
                if name.startswith(prefix)
            }

        self._embedding = take("model.embed_tokens.")["weight"]
        self._layers = [
            (_StateLayer if kind == STATE else _Layer)(config, take(f"model.{name}."))
            for name, kind in zip(config.layer_names, config.layer_kinds, strict=True)
        ]
        self._norm = _Norm(take("model.norm.")["weight"], config.rms_norm_eps)
        self._head = self._embedding if config.tie_word_embeddings else take("lm_head.")["weight"]
        # Always in float64: float32 angles are off by a hundredth at position 100,000.
        self._frequencies = torch.tensor(
            config.rope.frequencies(config.head_dim), dtype=torch.float64, device=device
        )

    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: Mapping[str, Tensor],
        group_of_layer: Sequence[int],
        block_size: int,
    ) -> Tensor:
        """Write the batch's KV and states; return the last rows' logits `[num_sequences, vocab]`.

        Logits are float32, or `compute_dtype` if that is wider. `kv_caches` are keyed by
        `config.layer_names`.
        """
        last = torch.tensor([sequence.end - 1 for sequence in batch.sequences], device=self.device)
        return self.logits(self.hidden(batch, kv_caches, group_of_layer, block_size)[last])

    @torch.inference_mode()
    def hidden(
        self,
        batch: ForwardBatch,
        kv_caches: Mapping[str, Tensor],
        group_of_layer: Sequence[int],
        block_size: int,
    ) -> Tensor:
        """Do the same as `forward` up to the last layer, and return the hidden state of every row."""
        angles = batch.positions.to(torch.float64)[:, None, None] * self._frequencies
        cos = torch.cat((angles, angles), dim=-1).cos().to(self.compute_dtype)
        sin = torch.cat((-angles, angles), dim=-1).sin().to(self.compute_dtype)
        inputs: dict[tuple[int, int | None, int], _LayerInputs] = {}
        x = self._embedding[batch.tokens]
        layers = zip(
            self._layers, self.config.layer_names, self.config.layer_kinds, group_of_layer, strict=True
        )
        for layer, name, kind, group in layers:
            if isinstance(layer, _StateLayer):
                states = kv_caches[name]
                x = layer(
                    x, partial(layer.recur, states=states, batch=batch, group=group, block_size=block_size)
                )
                continue
            window = kind if isinstance(kind, int) else None
            k, v = (LayerPages(pages) for pages in split_kv(kv_caches[name]))
            if (key := (group, window, k.stride)) not in inputs:
                slots = batch.slots[group]
                writes = slots // block_size * k.stride + slots % block_size
                spans = _plan(batch, group, window, block_size, k.stride, self.compute_dtype)
                inputs[key] = _LayerInputs(cos, sin, writes, spans)
            x = layer(x, partial(layer.attend, k=k, v=v, inputs=inputs[key]))
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the vocabulary for each row of `hidden`."""
        scores = F.linear(self._norm(hidden), self._head)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))
