"""How fast the host handlers move pages, compared with one bare memcpy of the same bytes in the same run.

    python benchmarks/transfer_host.py [--mib 64] [--ways] [--json FILE]

Blocks and slots are scattered, the worst case. `stacked`: all layers in one allocation, as in
`kvtier.engine`; `separate`: an allocation for each layer and half. The time of a job is from
`transfer_async` until `wait` returns.

`--ways` compares ways to copy scattered pages without the handler, for stores into the pool: the reason for
the design of `kvtier.transfer.host`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections import deque
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.config import CPUConfig, GroupConfig, KVTierConfig, OffloadingConfig
from kvtier.offload import CPULoadStoreSpec, CPUOffloadingSpec, GPULoadStoreSpec
from kvtier.transfer.host import COPIED_BY, store_pages
from kvtier.transfer.layout import canonicalize

LAYERS = 8
PAGES = [4 << 10, 16 << 10, 64 << 10, 256 << 10]
ROUNDS = 15


def best(size: int, *actions: Callable[[], object]) -> list[float]:
    """Return the best GB/s of each action.

    They take turns, so that a busy machine disturbs all of them alike.
    """
    seconds: list[list[float]] = [[] for _ in actions]
    for _ in range(ROUNDS + 1):
        for taken, action in zip(seconds, actions, strict=True):
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
    return [size / min(taken[1:]) / 1e9 for taken in seconds]


def make_layers(layout: str, blocks: int, page: int) -> list[torch.Tensor]:
    """Return one `(2, num_blocks, page)` tensor for each layer."""
    if layout == "stacked":
        return list(torch.ones(LAYERS, 2, blocks, page, dtype=torch.int8).unbind(0))
    return [torch.ones(2, blocks, page, dtype=torch.int8) for _ in range(LAYERS)]


def bench_handlers(layout: str, page: int, size: int) -> dict[str, Any]:
    """Measure a store and a load of `size` bytes."""
    block = 2 * LAYERS * page
    count = size // block
    layers = {f"layer{i}": tensor for i, tensor in enumerate(make_layers(layout, 2 * count + 1, page))}
    group = GroupConfig(block_size=16, bytes_per_block=block, layer_names=tuple(layers))
    settings = KVTierConfig(cpu=CPUConfig(capacity=2 * size))
    config = OffloadingConfig(settings=settings, groups=(group,), hash_block_size=16, engine_id="bench")
    spec = CPUOffloadingSpec(config)
    (_, _, store), (_, _, load) = spec.get_handlers(canonicalize(layers, (group,)))
    rng = np.random.default_rng(0)
    gpu = GPULoadStoreSpec(1 + rng.permutation(2 * count)[:count])
    cpu = CPULoadStoreSpec(rng.permutation(config.num_slots)[:count])
    rows = spec.open_pool().rows
    rows[:] = 1
    source, target = np.ones(count * block, np.uint8), rows.reshape(-1)[: count * block]

    def run(handler: Any, job: Any) -> None:
        handler.transfer_async(0, job)
        handler.wait({0})
        assert handler.get_finished()[0].success

    memcpy_gbps, store_gbps, load_gbps = best(
        count * block,
        lambda: np.copyto(target, source),
        lambda: run(store, (gpu, cpu)),
        lambda: run(load, (cpu, gpu)),
    )
    for handler in (store, load):
        handler.shutdown()
    spec.shutdown()
    speeds = {"memcpy_gbps": memcpy_gbps, "store_gbps": store_gbps, "load_gbps": load_gbps}
    return {"layout": layout, "page": page} | speeds


def bench_ways(page: int, size: int) -> dict[str, Any]:
    """Measure ways to copy scattered pages of one allocation into scattered rows."""
    refs = 2 * LAYERS
    count = size // (refs * page)
    engine = torch.ones(refs, 2 * count, page, dtype=torch.int8)
    rows = np.ones((2 * count, refs, page), np.int8)
    rng = np.random.default_rng(0)
    blocks, slots = rng.permutation(2 * count)[:count], rng.permutation(2 * count)[:count]
    pairs = list(zip(slots.tolist(), blocks.tolist(), strict=True))
    by_ref, by_block = engine.numpy(), engine.numpy().transpose(1, 0, 2)
    wide_pages, wide_rows = engine.view(torch.complex128), torch.from_numpy(rows).view(torch.complex128)
    block_index, slot_index = torch.from_numpy(blocks), torch.from_numpy(slots)
    staging = np.empty((max(1, (1 << 20) // page), page), np.int8)

    flat = np.ones(rows.size // 2, np.int8)

    def memcpy() -> None:
        np.copyto(rows.reshape(-1)[: flat.size], flat)

    def numpy_fancy() -> None:
        for ref in range(refs):
            rows[slots, ref] = by_ref[ref][blocks]

    def numpy_staged() -> None:
        for ref in range(refs):
            for i in range(0, count, len(staging)):
                part = staging[: len(blocks[i : i + len(staging)])]
                np.take(by_ref[ref], blocks[i : i + len(staging)], axis=0, out=part, mode="clip")
                rows[slots[i : i + len(staging)], ref] = part

    def torch_index() -> None:
        for ref in range(refs):
            wide_rows[:, ref].index_copy_(0, slot_index, wide_pages[ref].index_select(0, block_index))

    def memmove_each() -> None:
        for ref in range(refs):
            to = rows.ctypes.data + slots * rows.strides[0] + ref * page
            source = by_ref[ref].ctypes.data + blocks * page
            deque(map(ctypes.memmove, to.tolist(), source.tolist(), repeat(page)), maxlen=0)

    def assign_page() -> None:
        for ref in range(refs):
            for slot, block in pairs:
                rows[slot, ref] = by_ref[ref, block]

    def assign_span() -> None:
        for slot, block in pairs:
            rows[slot] = by_block[block]

    def kvtier_pages() -> None:
        store_pages(rows[:, None], by_block, slots, np.zeros_like(slots), blocks)

    ways = (
        memcpy,
        numpy_fancy,
        numpy_staged,
        torch_index,
        memmove_each,
        assign_page,
        assign_span,
        kvtier_pages,
    )
    speeds = best(flat.size, *ways)
    return {"page": page} | {way.__name__: speed for way, speed in zip(ways, speeds, strict=True)}


def main() -> None:
    """Print a table, and write it if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=64, help="bytes per job, in MiB")
    parser.add_argument("--ways", action="store_true", help="compare ways to copy instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = options.mib << 20
    if options.ways:
        results = [bench_ways(page, size) for page in PAGES]
        for result in results:
            shown = "  ".join(f"{name} {value:5.1f}" for name, value in result.items() if name != "page")
            print(f"{result['page'] >> 10:4d} KiB pages, GB/s:  {shown}")
    else:
        results = [
            bench_handlers(layout, page, size) for layout in ("stacked", "separate") for page in PAGES
        ]
        print(f"copied by {COPIED_BY}")
        print("layout    page      memcpy     store  ratio      load  ratio     (GB/s)")
        for result in results:
            memcpy, store, load = (result[f"{name}_gbps"] for name in ("memcpy", "store", "load"))
            print(
                f"{result['layout']:9} {result['page'] >> 10:3d} KiB {memcpy:9.1f} "
                f"{store:9.1f} {store / memcpy:6.2f} {load:9.1f} {load / memcpy:6.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
