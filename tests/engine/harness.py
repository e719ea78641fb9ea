"""A paged cache by hand for the decoder's tests: shuffled blocks, a table per group, NaN wherever nobody may
read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtier.engine.cache import CacheGroup
from kvtier.engine.config import ModelConfig
from kvtier.engine.model import STATE_DTYPE, Decoder, ForwardBatch, SequenceSlice, state_shape
from kvtier.engine.weights import random_weights

torch.set_num_threads(1)  # on a busy machine threads wait for each other far longer than these tensors take

NULL_BLOCK = 0

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(**fields: Any) -> dict[str, Any]:
    """Return a small `config.json` with some fields changed."""
    return TINY | fields


def prompt(length: int, seed: int = 0, vocab: int = 128) -> list[int]:
    """Return seeded random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()


class Sequence:
    """Tokens, how many are computed, and the blocks of each group."""

    def __init__(self, tokens: list[int], tables: list[list[int]]) -> None:
        self.tokens, self.tables, self.computed = tokens, tables, 0


class Paged:
    """A decoder and its caches.

    Layers of the same kind form a group; a block that a window has left is reused.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor] | None = None,
        *,
        block_size: int = 4,
        num_blocks: int = 192,
        kv_first: bool = False,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.decoder = Decoder(
            config,
            random_weights(config) if weights is None else weights,
            dtype=dtype,
            compute_dtype=compute_dtype,
        )
        self.config, self.block_size = config, block_size
        self.groups = [CacheGroup((), kind) for kind in dict.fromkeys(config.layer_kinds)]
        self.group_of_layer = [self.groups.index(CacheGroup((), kind)) for kind in config.layer_kinds]
        shape = (2, num_blocks) if kv_first else (num_blocks, 2)
        page = (block_size, config.num_kv_heads, config.head_dim)
        self.caches = {
            name: torch.full((num_blocks, *state_shape(config)), torch.nan, dtype=STATE_DTYPE)
            if self.groups[group].is_state
            else torch.full((*shape, *page), torch.nan, dtype=dtype)
            for name, group in zip(config.layer_names, self.group_of_layer, strict=True)
        }
        self.free = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1).tolist()

    def add(self, tokens: list[int]) -> Sequence:
        """Start a sequence that holds no blocks yet."""
        return Sequence(tokens, [[] for _ in self.groups])

    def rows(self, *steps: tuple[Sequence, int]) -> list[Tensor]:
        """Compute the next `n` tokens of each sequence in one pass and return the logits of all
        their rows.
        """
        batch = self.batch(*steps)
        hidden = self.decoder.hidden(batch, self.caches, self.group_of_layer, self.block_size)
        return [self.decoder.logits(hidden[s.start : s.end]) for s in batch.sequences]

    def forward(self, *steps: tuple[Sequence, int]) -> Tensor:
        """Compute the next `n` tokens of each sequence in one pass and return the logits after the last of
        each.
        """
        return self.decoder.forward(self.batch(*steps), self.caches, self.group_of_layer, self.block_size)

    def batch(self, *steps: tuple[Sequence, int]) -> ForwardBatch:
        """Allocate blocks for the steps and flatten them."""
        tokens: list[int] = []
        positions: list[int] = []
        places: list[list[int]] = [[] for _ in self.groups]
        slices = []
        for sequence, count in steps:
            new = range(sequence.computed, sequence.computed + count)
            tables = [self._grow(sequence, group, new) for group in range(len(self.groups))]
            start = len(tokens)
            tokens += [sequence.tokens[i] for i in new]
            positions += new
            for group, table in enumerate(tables):
                places[group] += [
                    int(table[i // self.block_size]) * self.block_size + i % self.block_size for i in new
                ]
            slices.append(SequenceSlice(start, len(tokens), new.stop, tuple(tables)))
            sequence.computed = new.stop
        return ForwardBatch(
            torch.tensor(tokens), torch.tensor(positions), slices, tuple(map(torch.tensor, places))
        )

    def _grow(self, sequence: Sequence, group: int, new: range) -> Tensor:
        """Give a table blocks up to its last new token and take those that no row can see any more."""
        table = sequence.tables[group]
        while len(table) * self.block_size < new.stop:
            table.append(self.free.pop())
        for i in range(self.groups[group].first_needed(new.start) // self.block_size):
            if table[i] != NULL_BLOCK:
                self._release(group, table[i])
                table[i] = NULL_BLOCK
        return torch.tensor(table)

    def _release(self, group: int, block: int) -> None:
        layers = zip(self.config.layer_names, self.group_of_layer, strict=True)
        for name in (name for name, layer_group in layers if layer_group == group):
            cache = self.caches[name]
            is_kv_first = cache.ndim == 5 and cache.shape[1] != 2
            (cache[:, block] if is_kv_first else cache[block]).fill_(torch.nan)
        self.free.insert(0, block)
