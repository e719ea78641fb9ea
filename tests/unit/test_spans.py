"""Spans: refs that go together are copied together, in batches of bounded size, and every byte belongs to
one span.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.errors import LayoutError
from kvtier.pool import Pool
from kvtier.testing.caches import LAYOUTS, Caches, make_caches, make_config
from kvtier.transfer.host import BATCH_BYTES, Spans
from kvtier.transfer.layout import canonicalize


def make_spans(caches: Caches, blocks_per_chunk: int = 1, world_size: int = 1, rank: int = 0) -> Spans:
    config = make_config(
        caches, blocks_per_chunk=blocks_per_chunk, world_size=world_size, rank=rank, num_slots=4
    )
    pool = Pool.open(config.engine_id, config.num_slots, config.row_bytes)
    canonical = canonicalize(caches.layers, caches.groups, num_blocks=caches.num_blocks)
    return Spans(canonical, pool, config)


@pytest.mark.parametrize(
    ("layout", "refs"),
    [
        ("blocks_first", [1, 1, 1]),
        ("kv_first", [2, 2, 2]),
        ("permuted", [2, 2, 2]),
        ("stacked", [6]),
        ("interleaved", [3]),
        ("cross_layer", [1]),
    ],
)
def test_refs_at_equal_distances_are_one_span(layout: str, refs: list[int]) -> None:
    ((batch,),) = make_spans(make_caches(layout)).batches
    assert [span.engine.shape[1] for span in batch] == refs


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_spans_cover_every_byte_of_an_image_once(layout: str, blocks_per_chunk: int) -> None:
    spans = make_spans(make_caches(layout, num_groups=2), blocks_per_chunk, world_size=2, rank=1)
    for group, batches in enumerate(spans.batches):
        spans.pool.rows[:] = 0
        for span in (span for batch in batches for span in batch):
            span.pool[...] += 1
        image = blocks_per_chunk * spans.block_bytes[group]
        start = blocks_per_chunk * max(spans.block_bytes)
        assert (spans.pool.rows[:, start : start + image] == 1).all()
        assert spans.pool.rows.sum() == spans.pool.num_slots * image


@pytest.mark.parametrize(
    ("page", "sizes"), [(1 << 17, [3 << 17]), (1 << 19, [1 << 20, 1 << 19]), (1 << 22, [1 << 21] * 6)]
)
def test_a_batch_is_bounded_unless_it_is_one_page(page: int, sizes: list[int]) -> None:
    (batches,) = make_spans(make_caches("stacked", page=page, num_blocks=1)).batches
    assert [sum(span.engine[0].size for span in batch) for batch in batches] == sizes
    assert all(size <= max(BATCH_BYTES, page // 2) for size in sizes)


def test_views_are_of_the_memory_itself() -> None:
    caches = make_caches("stacked")
    spans = make_spans(caches)
    (span,) = spans.batches[0][0]
    assert span.engine.ctypes.data == caches.allocations[0].data_ptr()
    assert np.shares_memory(span.pool, spans.pool.rows)


def test_caches_and_config_must_agree() -> None:
    caches, other = make_caches("blocks_first"), make_caches("blocks_first", page=128)
    config = make_config(other)
    pool = Pool.open(config.engine_id, config.num_slots, config.row_bytes)
    with pytest.raises(LayoutError, match=r"expected groups with blocks of \[384\] bytes, got \[192\]"):
        Spans(canonicalize(caches.layers, caches.groups), pool, config)
