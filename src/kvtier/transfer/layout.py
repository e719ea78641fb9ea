"""Engine tensors -> `CanonicalKVCaches`: every layer's KV cache seen as pages of int8, without copying a
byte.

Strided tensors of shape `(num_blocks, ...)` and `(2, num_blocks, ...)` are understood. The latter hold K and
V apart and become two refs. The dimensions after the block dimension are one page; its bytes must be dense,
in any order of dimensions. Between pages there may be padding, or the pages of other layers. Layers that
view the same memory share one canonical tensor, and count once within a group: a cross-layer tensor may be
given under one name or under each layer's name.

`num_blocks` tells which dimension counts blocks. Without it, the number of blocks is the size that all
layers have in common, and a leading 2 means K and V wherever that fits. `(2, 2, ...)` fits both ways, and
nothing is guessed: name the `KVLayout`.

Anything else is a `LayoutError` that names the layer. These are pure functions: any thread may call them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

import torch

from kvtier.config import GroupConfig
from kvtier.errors import LayoutError
from kvtier.transfer.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

_Address = tuple[int, int, int]


class KVLayout(Enum):
    """The dimension in which a layer's tensor counts its blocks."""

    BLOCKS_FIRST = 0
    KV_FIRST = 1

    def num_blocks(self, tensor: torch.Tensor) -> int | None:
        """Return the number of blocks of a tensor in this layout; `None` if it cannot have this layout."""
        if tensor.dim() <= self.value or (self is KVLayout.KV_FIRST and tensor.shape[0] != 2):
            return None
        return tensor.shape[self.value]


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages at equal distances in one allocation. Offsets and sizes in bytes."""

    storage: torch.UntypedStorage
    device: torch.device
    offset: int
    stride: int
    page: int
    token_values: int

    @property
    def address(self) -> _Address:
        """The identity of the memory, equal for layers that view the same memory."""
        return self.storage.data_ptr(), self.offset, self.stride


def canonicalize(
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[GroupConfig],
    *,
    num_blocks: int | None = None,
    layout: KVLayout | None = None,
) -> CanonicalKVCaches:
    """Describe the engine's caches, given by layer name, as pages.

    The tensors' memory is shared, never copied.
    """
    _check_names(kv_caches, groups)
    for name, tensor in kv_caches.items():
        _check_kind(name, tensor)
    devices = sorted({str(tensor.device) for tensor in kv_caches.values()})
    if len(devices) > 1:
        raise LayoutError(f"expected all layers on one device, got {_few(devices)}")
    if num_blocks is None:
        num_blocks = _infer_num_blocks(kv_caches, [layout] if layout else list(KVLayout))
    layers = {name: _pages(name, tensor, num_blocks, layout) for name, tensor in kv_caches.items()}
    by_group = [_pages_of_group(i, group, layers) for i, group in enumerate(groups)]
    unique = _widest(pages for group in by_group for pages in group)
    index = {pages.address: i for i, pages in enumerate(unique)}
    refs = [
        [CanonicalKVCacheRef(index[pages.address], pages.page, pages.token_values) for pages in group]
        for group in by_group
    ]
    return CanonicalKVCaches([_tensor(pages, unique, num_blocks) for pages in unique], refs)


def _check_names(kv_caches: Mapping[str, torch.Tensor], groups: Sequence[GroupConfig]) -> None:
    expected = {name for group in groups for name in group.layer_names}
    if not expected:
        raise LayoutError("expected at least one layer, got none")
    if missing := sorted(expected - kv_caches.keys()):
        raise LayoutError(f"expected a tensor for every layer of the groups, got none for {_few(missing)}")
    if unknown := sorted(kv_caches.keys() - expected):
        raise LayoutError(f"expected only layers of the groups, got tensors for {_few(unknown)}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
        expected = "expected a strided tensor of real numbers in memory"
        raise LayoutError(f"{_describe(name, tensor)}: {expected}, got {tensor.layout} on {tensor.device}")


def _describe(name: str, tensor: torch.Tensor) -> str:
    strides = f" stride {tuple(tensor.stride())}" if tensor.layout is torch.strided else ""
    return f"layer {name} (shape {tuple(tensor.shape)}{strides} {tensor.dtype})"


def _infer_num_blocks(kv_caches: Mapping[str, torch.Tensor], layouts: Sequence[KVLayout]) -> int:
    """Return the number of blocks that every layer can have in one of these layouts."""
    readings = [{layout.num_blocks(tensor) for layout in layouts} - {None} for tensor in kv_caches.values()]
    common = [count for count in set.intersection(*readings) if count is not None]
    if not common:
        shapes = sorted({str(tuple(tensor.shape)) for tensor in kv_caches.values()})
        reading = f" as {layouts[0].name}" if len(layouts) == 1 else ""
        raise LayoutError(f"expected one number of blocks in all layers{reading}, got shapes {_few(shapes)}")
    return max(common, key=lambda count: (count != 2, count))


def _pages(name: str, tensor: torch.Tensor, num_blocks: int, layout: KVLayout | None) -> list[_Pages]:
    """Find the pages of a layer: one set, or one for K and one for V."""
    readings = [r for r in KVLayout if r.num_blocks(tensor) == num_blocks and layout in (None, r)]
    if num_blocks < 1 or not readings:
        expected = f"expected ({num_blocks}, ...) or (2, {num_blocks}, ...)" + (
            f" as {layout.name}" if layout else ""
        )
        raise LayoutError(f"{_describe(name, tensor)}: {expected} with at least one block")
    if len(readings) > 1:
        raise LayoutError(f"{_describe(name, tensor)}: 2 blocks, or K and V? Give `layout` to say which")
    halves = [tensor] if readings[0] is KVLayout.BLOCKS_FIRST else [tensor[0], tensor[1]]
    return [_dense_pages(name, tensor, half) for half in halves]


def _dense_pages(name: str, tensor: torch.Tensor, blocks: torch.Tensor) -> _Pages:
    size = blocks.element_size()
    page = prod(blocks.shape[1:]) * size
    stride = blocks.stride(0) * size if len(blocks) > 1 else max(blocks.stride(0) * size, page)
    if page == 0 or not _is_dense(blocks) or stride < page:
        problem = f"expected the {page} bytes of a block to be contiguous and apart from other blocks"
        raise LayoutError(
            f"{_describe(name, tensor)}: {problem}; make the block dimension the outermost in memory"
        )
    offset = int(blocks.storage_offset()) * size
    return _Pages(blocks.untyped_storage(), blocks.device, offset, stride, page, _token_values(blocks))


def _token_values(blocks: torch.Tensor) -> int:
    """Return the number of values from one token to the next; 0 if the shape does not tell.

    A page ends with its tokens, heads and channels (attention), or tokens and channels (latents).
    """
    dimensions = blocks.dim() - 1
    return int(blocks.stride(-min(dimensions, 3))) if dimensions > 1 else 0


def _is_dense(blocks: torch.Tensor) -> bool:
    """Return whether a block's elements fill one run of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(blocks.stride()[1:], blocks.shape[1:], strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _pages_of_group(index: int, group: GroupConfig, layers: Mapping[str, list[_Pages]]) -> list[_Pages]:
    """Return the distinct pages that make up a block of a group, in layer order."""
    distinct = _widest(pages for name in group.layer_names for pages in layers[name])
    total = sum(pages.page for pages in distinct)
    if total != group.bytes_per_block:
        got = f"layers {_few(list(group.layer_names))} have {total}"
        raise LayoutError(f"groups[{index}]: expected {group.bytes_per_block} bytes per block, but {got}")
    return distinct


def _widest(pages: Iterable[_Pages]) -> list[_Pages]:
    """Return the largest pages at every address, in the order in which addresses first appear."""
    kept: dict[_Address, _Pages] = {}
    for candidate in pages:
        if candidate.address not in kept or candidate.page > kept[candidate.address].page:
            kept[candidate.address] = candidate
    return list(kept.values())


def _tensor(pages: _Pages, everyone: list[_Pages], num_blocks: int) -> CanonicalKVCacheTensor:
    """View pages as int8, with the padding between a page and the next page of any layer."""
    starts = [other.offset for other in everyone if other.storage.data_ptr() == pages.storage.data_ptr()]
    to_next = min((start - pages.offset) % pages.stride or pages.stride for start in starts)
    to_end = pages.storage.nbytes() - pages.offset - (num_blocks - 1) * pages.stride
    width = max(pages.page, min(to_next, to_end))
    view = torch.empty(0, dtype=torch.int8, device=pages.device)
    view.set_(pages.storage, pages.offset, (num_blocks, width), (pages.stride, 1))
    return CanonicalKVCacheTensor(view, width)
