"""Pairing the ends of a job: the same pairs as the naive model, in runs that are whole and no longer than
allowed.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.testing.caches import ReferenceTransfer, make_caches, make_config
from kvtier.transfer.base import NULL_BLOCK, CPULoadStoreSpec, GPULoadStoreSpec
from kvtier.transfer.plan import JobBounds, pair_blocks

Job = tuple[GPULoadStoreSpec, CPULoadStoreSpec, int]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw a job over up to three groups, with neighbours and null blocks often."""
    per_chunk = draw(st.integers(1, 4))
    blocks: list[int] = []
    sizes, indices, num_slots = [], [], 0
    for _ in range(draw(st.integers(1, 3))):
        size, first = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        start = draw(st.integers(1, 5))
        neighbours = [start + i if draw(st.booleans()) else draw(st.integers(0, 23)) for i in range(size)]
        blocks += neighbours
        sizes.append(size)
        indices.append(first)
        num_slots += -(-(size + first % per_chunk) // per_chunk) if size else 0
    first_slot = draw(st.integers(0, 3))
    slots = draw(st.sampled_from([list(range(first_slot, first_slot + num_slots)), [0] * num_slots]))
    gpu = GPULoadStoreSpec(blocks, sizes, indices if any(indices) or draw(st.booleans()) else None)
    return gpu, CPULoadStoreSpec(slots), per_chunk


@given(jobs(), st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_pieces_are_the_pairs_of_the_model(job: Job, longest: list[int]) -> None:
    gpu, cpu, per_chunk = job
    plan = pair_blocks(gpu, cpu, JobBounds(len(gpu.group_sizes), 24, 64, per_chunk))
    pieces = list(plan.pieces(longest))
    paired = [
        (group, *place)
        for group, piece in pieces
        for place in zip(piece.blocks.tolist(), piece.slots.tolist(), piece.indices.tolist(), strict=True)
    ]
    caches = make_caches("blocks_first", page=16)
    assert paired == list(
        ReferenceTransfer(caches, make_config(caches, blocks_per_chunk=per_chunk)).pairs(gpu, cpu)
    )
    assert plan.blocks.tolist() == gpu.block_ids[plan.positions].tolist()
    assert NULL_BLOCK not in plan.blocks
    for group, piece in pieces:
        assert 1 <= len(piece) <= longest[group]
        assert set(piece.groups.tolist()) == {group}
    whole = sum(-(-np.count_nonzero(plan.groups == group) // most) for group, most in enumerate(longest))
    assert len(pieces) == whole, "pieces are as long as they may be"
