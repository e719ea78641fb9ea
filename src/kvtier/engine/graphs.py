"""Small steps of a decoder as CUDA graphs: captured when they are first needed, replayed from then on.

A step of a few rows is a thousand small kernels, and launching them one by one takes several times as long
as running them. A graph launches them all at once. It holds addresses, not values: tokens, positions, places
and block tables are copied into its own buffers before each replay. Two kinds of steps have graphs, in half
precision, where a fused kernel is used anyway:

    up to 16 sequences of one row      decoding; padded to the next power of two
    one sequence of up to 16 rows      the end of a prompt whose beginning came from a cache; padded to 16

A step is a few graphs, one after the other, each of some layers, so that it can begin before the KV of the
last layers has arrived. Padding rows write to the null block, which is never read. Logits are valid until
the next replay. One thread uses this; other threads may use the device meanwhile, even while a graph is
captured.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor

from kvtier.engine.model import Attention, Decoder, ForwardBatch, LayerPages, run_to_end
from kvtier.transfer.plan import stage_bounds

__all__ = ["MOST_ROWS", "StepGraph", "StepGraphs"]

MOST_ROWS = 16
_HEAD_DIMS = (16, 32, 64, 128, 256)


class StepGraphs:
    """The graphs of one decoder over one set of caches."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._caches: Mapping[str, Tensor] | None = None
        self._graphs: dict[tuple[int, int], StepGraph] = {}

    @staticmethod
    def can_capture(decoder: Decoder) -> bool:
        """Say whether a decoder's steps can be captured."""
        half = decoder.dtype == decoder.compute_dtype and decoder.dtype.itemsize == 2
        fits = decoder.config.head_dim in _HEAD_DIMS
        return decoder.device.type == "cuda" and half and fits and find_spec("triton") is not None

    def find(
        self,
        batch: ForwardBatch,
        kv_caches: Mapping[str, Tensor],
        group_of_layer: Sequence[int],
        block_size: int,
    ) -> StepGraph | None:
        """Return the graph that computes a batch, or `None` for a step that has no graph."""
        shape = _find_shape(batch)
        if shape is None:
            return None
        if self._caches is not kv_caches:
            self._caches, self._graphs = kv_caches, {}
        if shape not in self._graphs:
            self._graphs[shape] = StepGraph(self._decoder, *shape, kv_caches, group_of_layer, block_size)
        return self._graphs[shape]


def _find_shape(batch: ForwardBatch) -> tuple[int, int] | None:
    """Return the padded number of sequences and of rows of each; `None` if there is no graph for them."""
    count, rows = len(batch.sequences), len(batch.tokens)
    if rows > MOST_ROWS:
        return None
    if rows == count:
        return 1 << (count - 1).bit_length(), 1
    return (1, MOST_ROWS) if count == 1 else None


class StepGraph:
    """The graphs of one shape of step.

    The inputs are `[sequences * rows]`, the block tables of each group `[sequences, blocks]`.
    """

    def __init__(
        self,
        decoder: Decoder,
        sequences: int,
        rows: int,
        kv_caches: Mapping[str, Tensor],
        group_of_layer: Sequence[int],
        block_size: int,
    ) -> None:
        from kvtier.engine.paged_attention import PagedAttention

        config, device = decoder.config, decoder.device
        groups, num_blocks = max(group_of_layer) + 1, max(next(iter(kv_caches.values())).shape[:2])
        self._inputs = torch.zeros(2 + groups, sequences * rows, dtype=torch.int64, device=device)
        self._last = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._tables = torch.zeros(groups, sequences, num_blocks, dtype=torch.int64, device=device)
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        paged = PagedAttention(sequences, rows, *self._heads, device)

        def attention(group: int, window: int | None, stride: int) -> Attention:
            def attend(q: Tensor, k: LayerPages, v: LayerPages) -> Tensor:
                table, positions = self._tables[group], self._inputs[1]
                return paged(q, k.rows, v.rows, table, positions, block_size, stride, window)

            return attend

        def run() -> Generator[str, None, Tensor]:
            tokens, positions, *places = self._inputs
            layers = decoder.run_layers(
                tokens, positions, places, kv_caches, group_of_layer, block_size, attention
            )
            hidden = yield from layers
            return decoder.logits(hidden[self._last])

        self._layers = [config.layer_names[first:last] for first, last in _stages(config.num_layers)]
        warm_up, layers = run(), run()
        self._graphs, self._logits = _capture(
            warm_up, layers, [len(names) for names in self._layers], device
        )

    def replay(self, batch: ForwardBatch) -> Generator[str, None, Tensor]:
        """Compute a batch of at most this shape.

        Yield the names of the layers that come next, and return the logits.
        """
        count = len(batch.tokens)
        self._inputs.zero_()
        torch.stack((batch.tokens, batch.positions, *batch.places), out=self._inputs[:, :count])
        for index, sequence in enumerate(batch.sequences):
            for table, blocks in zip(self._tables, sequence.block_tables, strict=True):
                table[index, : len(blocks)] = blocks
        ends = [sequence.end - 1 for sequence in batch.sequences]
        self._last[: len(ends)] = torch.tensor(ends, device=self._last.device)
        for names, graph in zip(self._layers, self._graphs, strict=True):
            yield from names
            graph.replay()
        return self._logits[: len(ends)]


def _stages(num_layers: int) -> list[tuple[int, int]]:
    """Return the layers `[first, last)` of each graph, the same that a load brings in one stage."""
    return [(first, last) for first, last in pairwise([0, *stage_bounds(num_layers)]) if first < last]


def _capture(
    warm_up: Generator[str, None, Tensor],
    layers: Generator[str, None, Tensor],
    sizes: list[int],
    device: torch.device,
) -> tuple[list[torch.cuda.CUDAGraph], Tensor]:
    """Capture a forward pass in graphs of some layers each; return the graphs and their result tensor."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    graphs: list[torch.cuda.CUDAGraph] = []
    with torch.inference_mode():
        with torch.cuda.stream(stream):
            run_to_end(warm_up)  # compiles kernels and sets up libraries, which cannot be captured
        stream.synchronize()
        pool = torch.cuda.graph_pool_handle()
        for size in sizes[:-1]:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=pool, stream=stream, capture_error_mode="thread_local"):
                for _ in range(size + (len(graphs) == 1)):  # the first graph also runs up to the first layer
                    next(layers)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool, stream=stream, capture_error_mode="thread_local"):
            out = run_to_end(layers)
    return graphs, out
