"""How fast the CUDA handlers move pages, compared with the bus and with the two usual ways, in the same run.

    python benchmarks/gpu_transfer.py [--mib 64 256] [--json FILE] [--plot FILE.svg]

    limit     one large pinned copy of the same bytes
    batched   one DMA for each page, all in one `cuMemcpyBatchAsync`
    kernel    a copy kernel on 12 SMs that reads and writes pinned memory itself
    ours      the handlers; blocks are scattered, slots side by side (as a fresh pool hands them out) or
              scattered too
    packed    the same with packing, in bytes of the engine's cache

Each is timed twice: from the call until the caller knows that it is over (for ours this includes planning
and the result), and on the device's clock, from the start of a job's first work to the end of its last.
They take turns. GB/s are 10^9 bytes per second.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from _gpu import WAYS, BareCopies, Rig, Timing, medians

from kvtier.report.plots import Linear, Log, Plot
from kvtier.transfer.base import CPULoadStoreSpec, GPULoadStoreSpec

PAGES = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20]
LAYERS = 64  # K and V of 32 layers


def refs_of(page: int) -> int:
    """Return the number of pages of a block: that of an 8B model, up to 16 MiB."""
    return min(LAYERS, (16 << 20) // page)


def bench_pages(page: int, size: int, repetitions: int) -> list[dict[str, Any]]:
    """Measure one page size both ways."""
    rig = Rig(page, refs_of(page), size)
    packing = Rig(page, refs_of(page), size, packs=True)
    packing.fill()
    bare = BareCopies(rig, rig.blocks)
    rows = []
    for way in WAYS:
        runs: dict[str, Callable[[], Timing]] = {
            "limit": partial(bare.run, partial(bare.large, way)),
            "batched": partial(bare.run, partial(bare.batched, way)),
            "kernel": partial(bare.run, bare.kernel(way)),
            "ours": partial(rig.run_new, way, rig.blocks, scattered=False),
            "scattered": partial(rig.run_new, way, rig.blocks, scattered=True),
            "packed": partial(packing.run_new, way, rig.blocks, scattered=False),
            "packed_scattered": partial(packing.run_new, way, rig.blocks, scattered=True),
        }
        timings = medians(runs, repetitions)
        speeds = {name: rig.job_bytes / timing.wall / 1e9 for name, timing in timings.items()}
        device = {f"{name}_device": rig.job_bytes / timing.device / 1e9 for name, timing in timings.items()}
        rows.append(
            {"page": page, "way": way, "row": rig.block_bytes, "bytes": rig.job_bytes} | speeds | device
        )
    for some in (rig, packing):
        some.close()
    return rows


def run_both_ways(rig: Rig) -> Timing:
    """Run a store and a load at once."""
    gpu, cpu = rig.ends(2 * rig.blocks, scattered=False)
    places = cpu.block_ids.reshape(2, -1)
    halves = [(GPULoadStoreSpec(gpu.block_ids[half::2]), CPULoadStoreSpec(places[half])) for half in (0, 1)]
    start = time.perf_counter()
    jobs = [rig.start(way, *ends) for way, ends in zip(WAYS, halves, strict=True)]
    for way, job in zip(WAYS, jobs, strict=True):
        rig.finish(way, job)
    return Timing(time.perf_counter() - start, 0)


def bench_both_ways(page: int, size: int, repetitions: int) -> dict[str, Any]:
    """Measure a store and a load at once, beside two large copies at once."""
    rig, packing = (Rig(page, refs_of(page), size, pool_jobs=2, packs=packs) for packs in (False, True))
    packing.fill()
    there, back = (BareCopies(rig, rig.blocks) for _ in range(2))

    def limit() -> Timing:
        start = time.perf_counter()
        there.large("store")
        back.large("load")
        for copies in (there, back):
            copies.stream.synchronize()
        return Timing(time.perf_counter() - start, 0)

    runs: dict[str, Callable[[], Timing]] = {
        "limit": limit,
        "ours": partial(run_both_ways, rig),
        "packed": partial(run_both_ways, packing),
    }
    timings = medians(runs, repetitions)
    speeds = {name: 2 * rig.job_bytes / timing.wall / 1e9 for name, timing in timings.items()}
    for some in (rig, packing):
        some.close()
    return {"page": page} | speeds


def bench_small(page: int, repetitions: int) -> list[dict[str, Any]]:
    """Measure jobs of 1 to 16 chunks, and one bare copy of the same bytes.

    The time beyond bytes / limit is overhead.
    """
    rig, packing = (Rig(page, LAYERS, 16 * page * LAYERS, packs=packs) for packs in (False, True))
    packing.fill()
    copies = {chunks: BareCopies(rig, chunks) for chunks in (1, 2, 4, 8, 16)}
    whole, rows = copies[rig.blocks], []
    for way in WAYS:
        for chunks in (1, 2, 4, 8, 16):
            runs: dict[str, Callable[[], Timing]] = {
                "limit": partial(whole.run, partial(whole.large, way)),
                "bare": partial(copies[chunks].run, partial(copies[chunks].large, way)),
                "ours": partial(rig.run_new, way, chunks, scattered=False),
                "packed": partial(packing.run_new, way, chunks, scattered=False),
            }
            limit, bare, ours, packed = medians(runs, repetitions).values()
            least = limit.device * chunks / rig.blocks
            over = {
                "device_us": ours.device,
                "wall_us": ours.wall,
                "bare_device_us": bare.device,
                "bare_us": bare.wall,
                "packed_device_us": packed.device,
                "packed_us": packed.wall,
            }
            over = {name: 1e6 * (seconds - least) for name, seconds in over.items()}
            rows.append({"page": page, "way": way, "chunks": chunks, "least_us": 1e6 * least} | over)
    for some in (rig, packing):
        some.close()
    return rows


def bench_growth(page: int, repetitions: int) -> list[dict[str, Any]]:
    """Measure jobs from one chunk to 1 GiB."""
    rig = Rig(page, LAYERS, 1 << 30)
    rows = []
    blocks = 1
    while blocks <= rig.blocks:
        bare = BareCopies(rig, blocks)
        for way in WAYS:
            runs: dict[str, Callable[[], Timing]] = {
                "limit": partial(bare.run, partial(bare.large, way)),
                "batched": partial(bare.run, partial(bare.batched, way)),
                "ours": partial(rig.run_new, way, blocks, scattered=False),
            }
            moved = blocks * rig.block_bytes
            speeds = {name: moved / timing.wall / 1e9 for name, timing in medians(runs, repetitions).items()}
            rows.append({"page": page, "way": way, "bytes": moved} | speeds)
        blocks *= 4
    rig.close()
    return rows


STYLE = """<style>
.line { fill: none; stroke-width: 2.4 } .load { stroke-dasharray: 5 4 }
.grid { stroke: #dfe4ea } .axis { stroke: #5b6876 }
.line.limit { stroke: #8a94a0 } .line.batched { stroke: #e59a3c } .line.ours { stroke: #1c6dd0 }
text { font: 12px sans-serif; fill: #5b6876; stroke: none; text-anchor: middle }
text.end { text-anchor: end } text.start { text-anchor: start }
</style>"""


def plot_growth(rows: list[dict[str, Any]]) -> str:
    """Draw speed over job size: ours, the limit and batched DMA, stores solid and loads dashed."""
    x, y = Log.around(row["bytes"] / 2**20 for row in rows), Linear(0, 60)
    plot = Plot("speed by size of the job", x, y, x_label="job, MiB (loads dashed)", y_label="GB/s")
    plot.x_axis((value, f"{value:g}") for value in x.ticks())
    plot.y_axis((value, f"{value:g}") for value in y.ticks())
    places = {
        "limit": ("store", -6, -6, "end"),
        "batched": ("store", 0, -8, ""),
        "ours": ("load", 10, 16, "start"),
    }
    for name, (labelled, right, down, anchor) in places.items():
        for way in WAYS:
            points = [(row["bytes"] / 2**20, row[name]) for row in rows if row["way"] == way]
            plot.line(points, f"{name} {way}")
            if way == labelled:
                plot.text(plot.x(points[1][0]) + right, plot.y(points[1][1]) + down, name, anchor)
    opening, rest = plot.svg().split("\n", 1)
    return opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + f"\n{STYLE}\n{rest}\n"


def show(results: dict[str, Any]) -> None:
    """Print all tables."""
    print("GB/s for the caller, and as parts of the limit: on the device's clock and (for the caller)")
    print(
        "job MiB page KiB way     limit batched kernel | slots side by side      | slots scattered    "
        "     | packed, side by side    | packed, scattered       row KiB"
    )
    for row in results["pages"]:
        cells = [f"{row['bytes'] >> 20:7d} {row['page'] >> 10:8d} {row['way']:5}"]
        cells.append(f"{row['limit']:7.1f} {row['batched']:7.1f} {row['kernel']:6.1f}")
        for name in ("ours", "scattered", "packed", "packed_scattered"):
            device, wall = row[f"{name}_device"] / row["limit_device"], row[name] / row["limit"]
            cells.append(f"| {row[name]:5.1f} {device:6.3f} ({wall:5.3f})   ")
        print(*cells, f"{row['row'] >> 10:6d}")
    for row in results["both_ways"]:
        of, packed = row["ours"] / row["limit"], row["packed"] / row["limit"]
        print(
            f"both ways, {row['page'] >> 10} KiB pages: {row['ours']:.1f} of {row['limit']:.1f} GB/s, "
            f"{of:.3f}; packed {packed:.3f}"
        )
    for row in results["small"]:
        print(
            f"{row['chunks']:2d} chunks, {row['page'] >> 10} KiB pages, {row['way']:5}: "
            f"{row['least_us']:6.1f} us at the limit,"
            f" + {row['device_us']:.1f} us on the device (one copy {row['bare_device_us']:.1f}),"
            f" + {row['wall_us']:.1f} us for the caller (one copy {row['bare_us']:.1f});"
            f" packed {row['packed_device_us']:+.1f} and {row['packed_us']:+.1f} us"
        )
    for row in results["growth"]:
        speeds = "  ".join(f"{name} {row[name]:5.1f}" for name in ("limit", "batched", "ours"))
        print(f"{row['bytes'] >> 20:5d} MiB {row['way']:5}  {speeds} GB/s")


def main() -> None:
    """Measure, print, and write the requested files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256], help="sizes of the jobs, in MiB")
    parser.add_argument("--pages", type=int, nargs="+", default=PAGES, help="sizes of the pages, in bytes")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    times = options.repetitions
    results = {
        "pages": [
            row
            for mib in options.mib
            for page in options.pages
            for row in bench_pages(page, mib << 20, times)
        ],
        "both_ways": [bench_both_ways(page, 512 << 20, 5) for page in (4 << 10, 32 << 10, 256 << 10)],
        "small": [row for page in (4 << 10, 32 << 10) for row in bench_small(page, 4 * times)],
        "growth": bench_growth(16 << 10, 5),
    }
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    if options.plot:
        options.plot.write_text(plot_growth(results["growth"]))


if __name__ == "__main__":
    main()
