"""Engine caches in every layout that kvtier understands, and a naive model of transfers.

`ReferenceTransfer` does not use canonical tensors, spans or runs: it moves one block at a time between the
layers' own tensors and a dict of rows. `Caches` made from the same arguments hold the same bytes, so a test
gives one set to handlers and the other to the model, and then compares every byte of every allocation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.config import CPUConfig, GroupConfig, KVTierConfig, OffloadingConfig
from kvtier.packing import PackedPages, PageShape
from kvtier.transfer.base import NULL_BLOCK, CPULoadStoreSpec, GPULoadStoreSpec
from kvtier.transfer.layout import canonicalize

LAYOUTS = (
    "blocks_first",
    "kv_first",
    "padded",
    "interleaved",
    "stacked",
    "cross_layer",
    "permuted",
    "shared",
)
PADDING = 24  # elements
_ONE_BLOCK = (np.zeros(1, np.int64),) * 3


@dataclass(frozen=True)
class Caches:
    """An engine's KV cache: tensors by layer, their groups, and the allocations behind them."""

    layers: dict[str, torch.Tensor]
    groups: tuple[GroupConfig, ...]
    allocations: list[torch.Tensor]
    num_blocks: int

    def pages(self, group: int, block: int) -> Iterator[torch.Tensor]:
        """Yield the pages of a block in layer order, K before V if they are separate."""
        for name in self.groups[group].layer_names:
            layer = self.layers[name]
            yield from (
                [layer[block]] if len(layer) == self.num_blocks else [layer[0, block], layer[1, block]]
            )

    def page(self, layer: str, block: int) -> torch.Tensor:
        """Return a layer's part of a block."""
        tensor = self.layers[layer]
        return tensor[block] if len(tensor) == self.num_blocks else tensor[:, block]

    def contents(self) -> bytes:
        """Return every byte, padding included."""
        return b"".join(_to_bytes(allocation) for allocation in self.allocations)


def make_caches(
    layout: str,
    *,
    page: int = 64,
    num_blocks: int = 24,
    num_groups: int = 1,
    seed: int = 0,
    device: str = "cpu",
    bfloat16: bool = False,
) -> Caches:
    """Make a cache with random contents: any bytes, or values in `bfloat16` that pack.

    A layer has `page` bytes a block in the first group and half in the second.
    """
    generator = torch.Generator().manual_seed(seed)
    layers: dict[str, torch.Tensor] = {}
    groups: list[GroupConfig] = []
    allocations: list[torch.Tensor] = []
    for group in range(num_groups):
        views, bases = _allocate(layout, 3 - group, num_blocks, page // 2 >> group, device)
        if layout == "shared" and group:
            views, bases = [tensor[:, : page // 4] for tensor in layers.values()], []
        for base in bases:
            if bfloat16:
                values = torch.randn(base.shape, generator=generator).to(torch.bfloat16).view(torch.int16)
            else:
                values = torch.randint(-(2**15), 2**15, base.shape, dtype=torch.int16, generator=generator)
            base.copy_(values)
        names = {f"group{group}.layer{i}": view for i, view in enumerate(views)}
        bytes_per_block = sum(view.numel() * view.element_size() for view in views) // num_blocks
        layers |= names
        groups.append(GroupConfig(block_size=16, bytes_per_block=bytes_per_block, layer_names=tuple(names)))
        allocations += bases
    return Caches(layers, tuple(groups), allocations, num_blocks)


def _allocate(
    layout: str, count: int, blocks: int, elements: int, device: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors of `count` layers, and the allocations that they view."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int16, device=device)

    match layout:
        case "blocks_first":
            tensors = [new(blocks, 2, elements // 2) for _ in range(count)]
            return tensors, tensors
        case "kv_first":
            tensors = [new(2, blocks, elements // 2) for _ in range(count)]
            return tensors, tensors
        case "padded" | "shared":
            tensors = [new(blocks, elements + PADDING) for _ in range(count)]
            return [tensor[:, :elements] for tensor in tensors], tensors
        case "interleaved":
            tensor = new(blocks, count, elements)
            return list(tensor.unbind(1)), [tensor]
        case "stacked":
            tensor = new(count, 2, blocks, elements // 2)
            return list(tensor.unbind(0)), [tensor]
        case "cross_layer":
            tensor = new(blocks, count, elements)
            return [tensor], [tensor]
        case "permuted":  # K and V apart in shape but not in memory, and a page's own dimensions swapped
            tensors = [new(blocks, 2, 4, elements // 8) for _ in range(count)]
            return [tensor.permute(1, 0, 3, 2) for tensor in tensors], tensors
    raise ValueError(f"expected one of {LAYOUTS}, got {layout!r}")


def make_config(
    caches: Caches,
    *,
    blocks_per_chunk: int = 1,
    num_slots: int = 16,
    world_size: int = 1,
    rank: int = 0,
    deadline: float = 10.0,
    engine_id: str = "test",
    packs: bool = False,
) -> OffloadingConfig:
    """Make the config of an engine with these caches and a pool of `num_slots`."""

    def config(capacity: int) -> OffloadingConfig:
        settings = KVTierConfig(
            cpu=CPUConfig(capacity=capacity),
            blocks_per_chunk=blocks_per_chunk,
            load_deadline=deadline,
            store_deadline=deadline,
        )
        return OffloadingConfig(
            settings=settings,
            groups=caches.groups,
            hash_block_size=16,
            world_size=world_size,
            rank=rank,
            engine_id=engine_id,
            packed_groups=(True,) * len(caches.groups) if packs else (),
        )

    return config(config(1 << 40).row_bytes * num_slots)


class ReferenceTransfer:
    """Transfers in their simplest form, one block at a time: the reference for handlers."""

    def __init__(self, caches: Caches, config: OffloadingConfig) -> None:
        self.caches = caches
        self.rows = [bytearray(config.row_bytes) for _ in range(config.num_slots)]
        self._config = config
        refs = canonicalize(caches.layers, caches.groups, num_blocks=caches.num_blocks).group_data_refs
        self._shapes = [[PageShape(ref.page_size_bytes, ref.token_values) for ref in some] for some in refs]

    def store(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> None:
        """Do the work of a store."""
        for group, block, slot, index in self.pairs(gpu, cpu):
            at, data = self._place(group, index), self.image(self.caches, group, block)
            self.rows[slot][at : at + len(data)] = data

    def load(self, cpu: CPULoadStoreSpec, gpu: GPULoadStoreSpec) -> None:
        """Do the work of a load."""
        for group, block, slot, index in self.pairs(gpu, cpu):
            at = self._place(group, index)
            data = self._unpacked(group, self.rows[slot][at : at + self._config.kept_bytes(group)])
            first = 0
            for page in self.caches.pages(group, block):
                size = page.numel() * page.element_size()
                _set_bytes(page, data[first : first + size])
                first += size

    def image(self, caches: Caches, group: int, block: int) -> bytes:
        """Return a block as it is kept."""
        data = b"".join(_to_bytes(page) for page in caches.pages(group, block))
        if self._config.packed_format(group) is None:
            return data
        packed, pages, convert = self._packed_block(group, bytearray(self._config.kept_bytes(group)))
        first = 0
        for page in pages:
            page[:] = np.frombuffer(data, np.int8, page.size, first)
            first += page.size
        assert convert.store(*_ONE_BLOCK).all()
        return bytes(packed)

    def _unpacked(self, group: int, data: bytearray) -> bytearray:
        if self._config.packed_format(group) is None:
            return data
        _, pages, convert = self._packed_block(group, data)
        assert convert.load(*_ONE_BLOCK).all()
        return bytearray(b"".join(page.tobytes() for page in pages))

    def _packed_block(
        self, group: int, data: bytearray
    ) -> tuple[bytearray, list[npt.NDArray[np.int8]], PackedPages]:
        """Return the bytes of a packed block, pages of their own, and what converts one to the other."""
        form, shapes = self._config.packed_format(group), self._shapes[group]
        assert form is not None
        pages = [np.zeros((1, shape.bytes), np.int8) for shape in shapes]
        row = np.frombuffer(data, np.uint8).reshape(1, -1)
        return data, pages, PackedPages(row, 0, form, pages, shapes)

    def _place(self, group: int, index: int) -> int:
        image = self._config.rank * self._config.max_image_bytes
        return image + index * self._config.kept_bytes(group)

    def pairs(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> Iterator[tuple[int, int, int, int]]:
        """Yield `(group, block, slot, index of the block in the slot)` for every block that has bytes."""
        blocks, slots, slot = iter(gpu.block_ids.tolist()), iter(cpu.block_ids.tolist()), 0
        for group, size in enumerate(gpu.group_sizes):
            first = gpu.block_indices[group] if gpu.block_indices else 0
            for i in range(size):
                index = (first + i) % self._config.settings.blocks_per_chunk
                slot = next(slots) if i == 0 or index == 0 else slot
                block = next(blocks)
                if block != NULL_BLOCK:
                    yield group, block, slot, index


def _to_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in the order of memory, which differs from its shape if permuted."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous().cpu().numpy().tobytes()


def _set_bytes(tensor: torch.Tensor, data: bytearray) -> None:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    view = tensor.permute(order)
    view.copy_(torch.frombuffer(data, dtype=tensor.dtype).reshape(view.shape))
