"""A model that is a hash of its KV cache: a fast detector of a wrong block, a stale byte or a lost page.

It implements the engine's `Model` and runs like a decoder: each layer writes a K and a V for every token,
reads back through the block table everything in its window, and passes the result to the next layer.
A state layer keeps a state instead, which every token multiplies and adds to. Numbers are small integers
that float32 holds exactly, every element of a page or a state counts, and a V depends on the whole prefix.
So one wrong element changes all later tokens, while chunking, batching and preemption change none. `expect`
computes the same tokens without a cache.

On the CPU and in float32 only. Any thread, one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.engine.config import STATE, LayerKind, ModelConfig, RopeConfig
from kvtier.engine.model import ForwardBatch, SequenceSlice, split_kv, state_shape
from kvtier.engine.sampling import SamplingParams, sample

Ints = npt.NDArray[np.int64]

_PRIME = 1_048_573


class ToyModel:
    """One layer for each of `layer_kinds`."""

    def __init__(
        self,
        layer_kinds: Sequence[LayerKind] = (None, None),
        *,
        vocab_size: int = 64,
        num_kv_heads: int = 1,
        head_dim: int = 2,
        max_position_embeddings: int = 4096,
        eos_token_ids: tuple[int, ...] = (),
        weights: int = 0,
    ) -> None:
        """Make a model.

        `weights` may change at any time, as in training: earlier KV and tokens are then wrong.
        """
        self.config = ModelConfig(
            family="llama",
            vocab_size=vocab_size,
            hidden_size=num_kv_heads * head_dim,
            intermediate_size=1,
            num_layers=len(layer_kinds),
            num_heads=num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=1e-6,
            rope=RopeConfig(),
            layer_kinds=tuple(layer_kinds),
            max_position_embeddings=max_position_embeddings,
            eos_token_ids=eos_token_ids,
        )
        self.weights = weights
        numbers = np.random.default_rng(0)
        self._spread: Ints = np.arange(num_kv_heads * head_dim, dtype=np.int64)
        self._weights = numbers.integers(1, _PRIME, size=(2, len(self._spread)))
        size = math.prod(state_shape(self.config))
        self._state_spread: Ints = np.arange(size, dtype=np.int64)
        self._state_weights = numbers.integers(1, _PRIME, size=(2, size))
        self._head = numbers.integers(1, _PRIME, size=(2, vocab_size))

    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: Mapping[str, Tensor],
        group_of_layer: Sequence[int],
        block_size: int,
    ) -> Tensor:
        """Write the batch's KV and states; return the logits after each sequence's last row."""
        tokens, positions = batch.tokens.numpy(), batch.positions.numpy()
        hidden = np.zeros_like(tokens)
        for layer, name in enumerate(self.config.layer_names):
            group, kind = group_of_layer[layer], self.config.layer_kinds[layer]
            values = self._values(tokens, positions, hidden, layer)
            if kind == STATE:
                states = kv_caches[name].numpy()
                parts = [self._recur(states, values, part, group, block_size) for part in batch.sequences]
            else:
                k, v = (pages.numpy() for pages in split_kv(kv_caches[name]))
                blocks, offsets = np.divmod(batch.slots[group].numpy(), block_size)
                k[blocks, offsets] = self._page(positions, k.shape[2:])
                v[blocks, offsets] = self._page(values, v.shape[2:])
                parts = [self._read(k, v, part, group, kind, block_size) for part in batch.sequences]
            hidden = np.concatenate(parts)
        return self._logits(hidden[[part.end - 1 for part in batch.sequences]])

    def expect(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """Return the tokens that a request must generate, computed without a cache.

        Stops as the engine does.
        """
        tokens = list(prompt)
        stops = params.stop_token_ids + (() if params.ignore_eos else self.config.eos_token_ids)
        for count in range(params.max_tokens):
            tokens += sample(self._logits(self._dense(tokens)[-1:]), [params], [count])
            if tokens[-1] in stops:
                break
        return tokens[len(prompt) :]

    def _dense(self, tokens: Sequence[int]) -> Ints:
        ids, positions = np.array(tokens, dtype=np.int64), np.arange(len(tokens), dtype=np.int64)
        hidden = np.zeros_like(ids)
        for layer, kind in enumerate(self.config.layer_kinds):
            k, v = positions, self._values(ids, positions, hidden, layer)
            if kind == STATE:
                hidden = self._hash_states(self._states_after(np.zeros_like(self._state_spread), v))
            else:
                hidden = self._attend(
                    k[:, None] + self._spread, v[:, None] + self._spread, positions, 0, kind
                )
        return hidden

    def _values(self, tokens: Ints, positions: Ints, hidden: Ints, layer: int) -> Ints:
        mixed = tokens * 7919 + positions * 104_729 + hidden * 31 + layer + 1 + self.weights * 524_287
        return np.asarray(mixed % _PRIME, dtype=np.int64)

    def _page(self, values: Ints, shape: tuple[int, ...]) -> Ints:
        return (values[:, None] + self._spread).reshape(-1, *shape)

    def _read(
        self,
        k: npt.NDArray[np.float32],
        v: npt.NDArray[np.float32],
        part: SequenceSlice,
        group: int,
        window: int | None,
        size: int,
    ) -> Ints:
        first = part.first_key(window)
        seen = np.arange(first, part.context_len)
        blocks, offsets = part.block_tables[group].numpy()[seen // size], seen % size
        keys, values = (pages[blocks, offsets].reshape(len(seen), -1).astype(np.int64) for pages in (k, v))
        rows = np.arange(part.context_len - (part.end - part.start), part.context_len)
        return self._attend(keys, values, rows, first, window)

    def _attend(self, keys: Ints, values: Ints, rows: Ints, first: int, window: int | None) -> Ints:
        """Hash for each row the K and V of the positions it may see; they begin at position `first`."""
        terms = (keys @ self._weights[0] % _PRIME) * (values @ self._weights[1] % _PRIME) % _PRIME
        sums = np.concatenate([[0], terms.cumsum()])
        begin = np.zeros_like(rows) if window is None else np.maximum(0, rows - window + 1)
        return np.asarray((sums[rows + 1 - first] - sums[begin - first]) % _PRIME, dtype=np.int64)

    def _recur(
        self, states: npt.NDArray[np.float64], values: Ints, part: SequenceSlice, group: int, size: int
    ) -> Ints:
        """Go on from the state before a sequence's rows, and write the states at the ends of blocks."""
        block = part.state_block(group, size)
        state = np.zeros_like(self._state_spread) if block is None else states[block].reshape(-1)
        after = self._states_after(state.astype(np.int64), values[part.start : part.end])
        blocks, rows = part.state_writes(group, size)
        states[blocks.numpy()] = after[rows].reshape(-1, *states.shape[1:])
        return self._hash_states(after)

    def _states_after(self, state: Ints, values: Ints) -> Ints:
        """Return the state after each of the values."""
        after = np.empty((len(values), len(state)), dtype=np.int64)
        for row, value in enumerate(values):
            state = after[row] = (state * self._state_weights[0] + value + self._state_spread) % _PRIME
        return after

    def _hash_states(self, states: Ints) -> Ints:
        return np.asarray(states @ self._state_weights[1] % _PRIME, dtype=np.int64)

    def _logits(self, hidden: Ints) -> Tensor:
        factor, offset = self._head
        return torch.from_numpy((hidden[:, None] * factor + offset) % _PRIME / _PRIME * 8)
