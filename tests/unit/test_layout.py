"""Engine tensors in canonical form: the right bytes, no copies, and one clear line for what cannot be
described.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtier.config import GroupConfig
from kvtier.errors import LayoutError
from kvtier.testing.caches import LAYOUTS, make_caches
from kvtier.transfer.base import CanonicalKVCaches
from kvtier.transfer.layout import KVLayout, canonicalize

Caches = dict[str, torch.Tensor]


def group(caches: Caches, bytes_per_block: int, names: tuple[str, ...] | None = None) -> GroupConfig:
    return GroupConfig(block_size=16, bytes_per_block=bytes_per_block, layer_names=names or tuple(caches))


def describe(caches: CanonicalKVCaches) -> tuple[list[tuple[int, ...]], list[list[tuple[int, int]]]]:
    """Return the shapes of the tensors, and the refs of every group."""
    refs = [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in caches.group_data_refs]
    return [tuple(tensor.tensor.shape) for tensor in caches.tensors], refs


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_refs_name_the_bytes_of_a_block(layout: str, num_groups: int) -> None:
    """Whatever the layout, writing through the refs of a block writes that block's pages and
    nothing else.
    """
    caches = make_caches(layout, num_groups=num_groups)
    canonical = canonicalize(caches.layers, caches.groups, num_blocks=caches.num_blocks)
    for index in range(num_groups):
        for allocation in caches.allocations:
            allocation.zero_()
        for ref in canonical.group_data_refs[index]:
            tensor = canonical.tensors[ref.tensor_idx]
            assert tensor.tensor.dtype == torch.int8
            assert tuple(tensor.tensor.shape) == (caches.num_blocks, tensor.page_size_bytes)
            tensor.tensor[5, : ref.page_size_bytes] = 1
        assert all(bool((page == 0x0101).all()) for page in caches.pages(index, 5))
        written = sum(int((allocation.view(torch.int8) == 1).sum()) for allocation in caches.allocations)
        assert written == canonical.block_bytes(index) == caches.groups[index].bytes_per_block


def test_blocks_first_is_one_page_a_layer() -> None:
    caches = {f"layer{i}": torch.zeros(10, 2, 16, 4, 8) for i in range(2)}
    page = 2 * 16 * 4 * 8 * 4
    assert describe(canonicalize(caches, [group(caches, 2 * page)])) == (
        [(10, page)] * 2,
        [[(0, page), (1, page)]],
    )


def test_kv_first_is_split_into_halves() -> None:
    caches = {"layer": torch.zeros(2, 10, 16, 4, 8, dtype=torch.bfloat16)}
    page = 16 * 4 * 8 * 2
    canonical = canonicalize(caches, [group(caches, 2 * page)])
    assert describe(canonical) == ([(10, page)] * 2, [[(0, page), (1, page)]])
    assert [tensor.tensor.data_ptr() for tensor in canonical.tensors] == [
        half.data_ptr() for half in caches["layer"]
    ]


def test_padding_counts_in_the_tensor_and_not_in_the_ref() -> None:
    caches = {"layer": torch.zeros(10, 100, dtype=torch.int8)[:, :64]}
    canonical = canonicalize(caches, [group(caches, 64)])
    assert describe(canonical) == ([(10, 100)], [[(0, 64)]])
    assert canonical.tensors[0].page_size_bytes == 100


def test_padding_that_the_last_page_lacks_is_not_reached_for() -> None:
    caches = {"layer": torch.zeros(1000, dtype=torch.int8).as_strided((10, 64), (100, 1), 36)}
    assert describe(canonicalize(caches, [group(caches, 64)])) == ([(10, 64)], [[(0, 64)]])


def test_pages_of_other_layers_are_no_padding() -> None:
    tensor = torch.zeros(10, 3, 64, dtype=torch.int8)
    caches = {f"layer{i}": tensor[:, i] for i in range(3)}
    canonical = canonicalize(caches, [group(caches, 3 * 64)])
    assert describe(canonical) == ([(10, 64)] * 3, [[(0, 64), (1, 64), (2, 64)]])
    assert [tensor.tensor.stride(0) for tensor in canonical.tensors] == [192] * 3


def test_groups_over_the_same_memory_share_a_tensor() -> None:
    full = torch.zeros(10, 96, dtype=torch.int8)
    caches = {"full": full, "window": full[:, :64]}
    groups = [group(caches, 96, ("full",)), group(caches, 64, ("window",))]
    assert describe(canonicalize(caches, groups)) == ([(10, 96)], [[(0, 96)], [(0, 64)]])


@pytest.mark.parametrize("names", [("all",), ("layer0", "layer1", "layer2")])
def test_a_cross_layer_tensor_counts_once_under_any_names(names: tuple[str, ...]) -> None:
    tensor = torch.zeros(10, 3, 64, dtype=torch.int8)
    caches = dict.fromkeys(names, tensor)
    assert describe(canonicalize(caches, [group(caches, 192)])) == ([(10, 192)], [[(0, 192)]])


def test_layers_that_share_kv_keep_the_larger_page() -> None:
    tensor = torch.zeros(10, 96, dtype=torch.int8)
    for caches in ({"a": tensor, "b": tensor[:, :64]}, {"a": tensor[:, :64], "b": tensor}):
        assert describe(canonicalize(caches, [group(caches, 96)])) == ([(10, 96)], [[(0, 96)]])


def test_nothing_is_copied_even_with_gradients_or_offsets() -> None:
    storage = torch.zeros(1000, dtype=torch.float32, requires_grad=True)
    caches = {"layer": storage[40:840].reshape(10, 80)}
    (tensor,) = canonicalize(caches, [group(caches, 320)]).tensors
    assert tensor.tensor.data_ptr() == storage.data_ptr() + 160
    assert not tensor.tensor.requires_grad


def test_pages_may_be_dense_in_any_order() -> None:
    caches = {"layer": torch.zeros(10, 4, 16, 8).transpose(1, 2)}
    page = 4 * 16 * 8 * 4
    assert describe(canonicalize(caches, [group(caches, page)])) == ([(10, page)], [[(0, page)]])


@pytest.mark.parametrize(
    ("shape", "num_blocks", "layout", "tensors"),
    [
        ((2, 7, 8), None, None, 2),
        ((2, 7, 8), 7, None, 2),
        ((2, 7, 8), 2, None, 1),
        ((7, 2, 8), None, None, 1),
        ((2, 2, 8), None, KVLayout.BLOCKS_FIRST, 1),
        ((2, 2, 8), 2, KVLayout.KV_FIRST, 2),
        ((1, 8), None, None, 1),
        ((2, 1, 8), None, None, 2),
        ((2, 5, 8), None, KVLayout.BLOCKS_FIRST, 1),
        ((2, 5, 8), None, KVLayout.KV_FIRST, 2),
    ],
)
def test_which_dimension_counts_blocks(
    shape: tuple[int, ...], num_blocks: int | None, layout: KVLayout | None, tensors: int
) -> None:
    caches = {"layer": torch.zeros(shape, dtype=torch.int8)}
    count = shape[1] if tensors == 2 else shape[0]
    canonical = canonicalize(
        caches, [group(caches, caches["layer"].numel() // count)], num_blocks=num_blocks, layout=layout
    )
    assert [len(tensor.tensor) for tensor in canonical.tensors] == [count] * tensors


def test_other_layers_settle_what_a_leading_two_means() -> None:
    caches = {"a": torch.zeros(2, 7, 8, dtype=torch.int8), "b": torch.zeros(7, 4, dtype=torch.int8)}
    assert describe(canonicalize(caches, [group(caches, 20)]))[0] == [(7, 8), (7, 8), (7, 4)]


BAD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "a transposed block dimension": (lambda: torch.zeros(8, 10).T, r"stride \(1, 10\).*contiguous"),
    "pages with holes": (lambda: torch.zeros(10, 16)[:, ::2], r"stride \(16, 2\).*contiguous"),
    "pages on top of each other": (
        lambda: torch.zeros(100).as_strided((10, 8), (4, 1)),
        "apart from other blocks",
    ),
    "one page for all": (lambda: torch.zeros(1, 8).expand(10, 8), "apart from other blocks"),
    "complex numbers": (lambda: torch.zeros(10, 8, dtype=torch.complex64), "complex64.*real numbers"),
    "sparse": (lambda: torch.zeros(10, 8).to_sparse(), "strided tensor"),
    "meta": (lambda: torch.zeros(10, 8, device="meta"), "in memory, got .* on meta"),
    "no dimensions": (lambda: torch.zeros(()), "one number of blocks"),
    "no blocks": (lambda: torch.zeros(0, 8), "at least one block"),
    "empty pages": (lambda: torch.zeros(10, 0), "0 bytes of a block"),
    "two readings": (lambda: torch.zeros(2, 2, 8), "2 blocks, or K and V"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_layout_that_cannot_be_described_is_one_clear_line(what: str) -> None:
    make, message = BAD[what]
    with pytest.raises(LayoutError, match=message) as caught:
        canonicalize(
            {"layer": make()}, [GroupConfig(block_size=16, bytes_per_block=32, layer_names=("layer",))]
        )
    assert "\n" not in str(caught.value)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int8)


@pytest.mark.parametrize(
    ("caches", "options", "message"),
    [
        ({"a": zeros(10, 8)}, {}, "got none for b"),
        ({"a": zeros(10, 8), "b": zeros(10, 8), "c": zeros(10, 8)}, {}, "got tensors for c"),
        (
            {"a": zeros(10, 8), "b": zeros(11, 8)},
            {},
            r"one number of blocks in all layers, got shapes \(10, 8\), \(11, 8\)",
        ),
        (
            {"a": zeros(10, 8), "b": zeros(10, 8)},
            {"num_blocks": 9},
            r"layer a \(shape \(10, 8\).*expected \(9, ...\) or",
        ),
        ({"a": zeros(10, 8), "b": zeros(10, 8)}, {"layout": KVLayout.KV_FIRST}, "as KV_FIRST"),
        (
            {"a": zeros(10, 8), "b": zeros(10, 4)},
            {},
            r"groups\[0\]: expected 16 bytes per block, but layers a, b have 12",
        ),
        ({"a": zeros(10, 8), "b": zeros(10, 8).to("meta")}, {}, "layer b.*on meta"),
    ],
)
def test_layers_that_do_not_fit_together(caches: Caches, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        canonicalize(
            caches, [GroupConfig(block_size=16, bytes_per_block=16, layer_names=("a", "b"))], **options
        )


def test_no_layers_at_all() -> None:
    with pytest.raises(LayoutError, match="at least one layer"):
        canonicalize({}, [])
