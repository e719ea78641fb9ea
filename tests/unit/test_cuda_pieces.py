"""Pieces of a job, and the ranges that they copy: all bytes once, none across a seam, neighbours
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.testing.caches import LAYOUTS, make_caches, make_config
from kvtier.transfer.base import CPULoadStoreSpec, GPULoadStoreSpec
from kvtier.transfer.cuda.pieces import (
    MOST_BLOCKS,
    Pages,
    Part,
    Piece,
    PoolMap,
    cut_load,
    cut_store,
    find_pages,
    split_pages,
)
from kvtier.transfer.layout import canonicalize
from kvtier.transfer.plan import JobBounds, Plan, pair_blocks

Cut = Callable[[Plan, Sequence[Sequence[Part]], int], Iterator[Piece]]


def pages_of(sizes: list[int], stride: int = 1 << 24) -> Pages:
    size = np.array(sizes, np.int64)
    return Pages(np.arange(len(sizes)) << 32, np.full(len(sizes), stride), size, np.cumsum(size) - size)


def plan_of(blocks: list[int], slots: list[int], per_chunk: int = 1) -> Plan:
    return pair_blocks(
        GPULoadStoreSpec(blocks), CPULoadStoreSpec(slots), JobBounds(1, 10_000, 10_000, per_chunk)
    )


def map_of(row_bytes: int, seam: int, per_chunk: int = 1, num_slots: int = 64) -> PoolMap:
    caches = make_caches("cross_layer", page=row_bytes // 3 // per_chunk // 2 * 2)
    config = make_config(caches, num_slots=num_slots, blocks_per_chunk=per_chunk)
    return PoolMap(1 << 40, row_bytes, seam, config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_where_the_layers_are(layout: str) -> None:
    caches = make_caches(layout, page=256)
    pages = find_pages(canonicalize(caches.layers, caches.groups, num_blocks=caches.num_blocks), 0)
    image = [(at, at + size) for at, size in zip(pages.offset.tolist(), pages.size.tolist(), strict=True)]
    assert image[0][0] == 0
    assert image[-1][1] == caches.groups[0].bytes_per_block
    assert all(end == start for (_, end), (start, _) in pairwise(image))
    starts = {page.data_ptr() for page in caches.pages(0, 5)}
    assert {int(base + 5 * stride) for base, stride in zip(pages.base, pages.stride, strict=True)} <= starts


def test_pages_that_are_neighbours_in_every_block_are_one() -> None:
    caches = make_caches("interleaved", page=256)
    pages = find_pages(canonicalize(caches.layers, caches.groups, num_blocks=caches.num_blocks), 0)
    assert pages.size.tolist() == [caches.groups[0].bytes_per_block]


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=20),
    st.integers(1, 120),
    st.integers(0, 300),
)
def test_parts_are_all_pages_in_order(sizes: list[int], direct_bytes: int, more: int) -> None:
    part_bytes = direct_bytes + more
    parts = split_pages(pages_of(sizes), part_bytes, direct_bytes)
    assert [size for part in parts for size in part.pages.size.tolist()] == sizes
    assert [part.offset for part in parts] == np.cumsum([0, *(part.bytes for part in parts)])[:-1].tolist()
    for part in parts:
        assert part.bytes == part.pages.size.sum()
        assert set((part.pages.size >= direct_bytes).tolist()) == {part.direct}
        assert part.direct or part.bytes <= part_bytes


@given(st.sampled_from([cut_store, cut_load]), st.integers(1, 200), st.integers(1, 64), st.integers(1, 3))
def test_pieces_are_all_blocks_in_order(cut: Cut, blocks: int, limit: int, pages: int) -> None:
    parts = [split_pages(pages_of([8] * pages), 16, 16)]
    pieces = list(cut([blocks], parts, limit))
    for part in parts[0]:
        mine = [(piece.first, piece.last) for piece in pieces if piece.part is part]
        assert mine[0][0] == 0
        assert mine[-1][1] == blocks
        assert all(last == first for (_, last), (first, _) in pairwise(mine))
    assert sum(piece.completes for piece in pieces) == blocks
    assert all(piece.bytes <= max(limit, piece.part.bytes) for piece in pieces)
    assert all(piece.last - piece.first <= MOST_BLOCKS for piece in pieces)


def test_a_store_is_cut_small_at_its_beginning_a_load_at_its_end_and_a_small_job_not_at_all() -> None:
    parts = [split_pages(pages_of([1 << 20]), 32 << 20, 32 << 20)]

    def sizes(blocks: int) -> tuple[list[int], list[int]]:
        store, load = (
            [piece.bytes >> 20 for piece in cut([blocks], parts, 32 << 20)] for cut in (cut_store, cut_load)
        )
        return store, load

    assert sizes(1) == ([1], [1])
    assert sizes(2) == ([2], [2])
    assert sizes(4) == ([4], [3, 1])
    assert sizes(5) == ([4, 1], [4, 1])
    assert sizes(64) == ([4, 12, 32, 16], [23, 32, 8, 1])
    assert sizes(256) == ([4, 12, *[32] * 7, 16], [23, *[32] * 7, 8, 1])


def test_groups_are_cut_apart() -> None:
    parts = [split_pages(pages_of([1 << 20]), 32 << 20, 32 << 20) for _ in range(2)]
    for cut, spans in ((cut_store, [(0, 4), (4, 5), (5, 12)]), (cut_load, [(0, 5), (5, 11), (11, 12)])):
        pieces = list(cut([5, 7], parts, 32 << 20))
        assert [(piece.first, piece.last) for piece in pieces] == spans
        assert all(piece.part is parts[piece.first >= 5][0] for piece in pieces)


def test_a_job_of_tiny_blocks_is_cut_by_their_number() -> None:
    parts = [split_pages(pages_of([8]), 1 << 20, 1 << 20)]
    pieces = cut_store([9000], parts, 32 << 20)
    assert [piece.last - piece.first for piece in pieces] == [4096, 4096, 808]


@pytest.mark.parametrize(("page", "expected"), [(6, 2), (8, 8), (40, 8), (4096, 16)])
def test_places_are_multiples_of_their_alignment(page: int, expected: int) -> None:
    """Kernels move as many bytes at a time: what is not aligned so would fail on the device."""
    caches = make_caches("kv_first", page=page)
    config = make_config(caches, world_size=3, rank=1, blocks_per_chunk=2)
    pool = PoolMap(1 << 40, config.row_bytes, 1 << 30, config)
    pages = find_pages(canonicalize(caches.layers, caches.groups, num_blocks=caches.num_blocks), 0)
    plan = pair_blocks(
        GPULoadStoreSpec([1, 2, 3, 4]), CPULoadStoreSpec([5, 2]), JobBounds(1, 24, config.num_slots, 2)
    )
    for part in split_pages(pages, 2 * page, 1 << 30):
        align = pool.alignment(part, 0)
        assert not ((pool.rows(plan).addresses(0, len(plan)) + part.offset) % align).any()
        assert align >= expected


def test_the_image_of_a_rank_begins_behind_the_places_of_those_before_it() -> None:
    """Places are as long as the longest image, also where this rank's is shorter."""
    caches = make_caches("cross_layer", page=40)
    alike = make_config(caches, world_size=3, rank=2)
    own = alike.groups[0].bytes_per_block
    longest = own + 4096
    stages = replace(alike, bytes_by_rank=((own,), (longest,), (own,)))
    firsts = [PoolMap(1 << 40, config.row_bytes, 1 << 30, config).first for config in (alike, stages)]
    assert firsts == [(1 << 40) + 2 * own, (1 << 40) + 2 * longest]


def test_rows_side_by_side_are_one_range_up_to_a_seam() -> None:
    pool, buffer = (
        map_of(12288, seam=4 * 12288),
        Pages(*(np.array([value]) for value in (4096, 12288, 12288, 0))),
    )
    plan = plan_of([9, 4, 7, 1, 2, 3], [2, 3, 4, 5, 9, 10])
    device, host, size = pool.ranges(buffer, np.arange(6), pool.rows(plan).addresses(0, 6))
    assert ((host - (1 << 40)) // 12288).tolist() == [2, 4, 9]
    assert (size // 12288).tolist() == [2, 2, 2]
    assert ((device - 4096) // 12288).tolist() == [0, 2, 4]


@given(st.lists(st.integers(0, 63), min_size=1, max_size=12), st.sampled_from([1, 4]), st.booleans())
def test_ranges_are_the_pages_of_the_blocks(slots: list[int], per_chunk: int, direct: bool) -> None:
    """Copy by ranges and block by block, between numbers that stand for bytes."""
    block_bytes = 3072
    pool = map_of(per_chunk * block_bytes, seam=8 * per_chunk * block_bytes, per_chunk=per_chunk)
    plan = plan_of(list(range(1, len(slots) * per_chunk + 1)), slots, per_chunk)
    pages, blocks = pages_of([1024, 2048], stride=2048), plan.blocks
    if not direct:
        pages, blocks = pages_of([block_bytes], stride=block_bytes), np.arange(len(plan))
    ranges = pool.ranges(pages, blocks, pool.rows(plan).addresses(0, len(plan)))
    copied = [
        (device + byte, host + byte)
        for device, host, size in zip(*(column.tolist() for column in ranges), strict=True)
        for byte in range(0, size, 1024)
    ]
    expected = []
    for index, (block, slot, inner) in enumerate(zip(plan.blocks, plan.slots, plan.indices, strict=True)):
        row = (1 << 40) + (slot * per_chunk + inner) * block_bytes
        sources = [block * 2048, (1 << 32) + block * 2048, (1 << 32) + block * 2048 + 1024]
        staged = [index * block_bytes + at for at in (0, 1024, 2048)]
        expected += list(zip(sources if direct else staged, [row, row + 1024, row + 2048], strict=True))
    assert copied == expected
