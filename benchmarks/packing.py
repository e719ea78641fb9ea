"""Claim: KV in bfloat16 packs without loss into 0.77 of its bytes, and a real model's KV always packs.

    python benchmarks/packing.py [--tokens 4096] [--json FILE]

`model` reads texts with the demo's model (SmolLM2, installed by `make demo`) in bfloat16 and packs every
block of its KV, in blocks of 16 and of 64 tokens: exceptions for each 16,384 values, blocks that do not
pack, and the ratio that an ideal code for the exponents of a page would reach. All blocks are unpacked and
compared bit by bit. `chats` is the share of prompt tokens that a pool gives back, packed and raw beside each
other, to chats whose KV is 1.3 times the pool, in random order. `speed` packs and unpacks the blocks of an
8B shape on one core, in turns with a copy of the same bytes; the ratios are those of CPU time, so that other
work on the machine counts little.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _common import MODEL, make_model, make_parser, open_console, random_prompt, write_json
from rich.console import Console

from kvtier.packing import PACKED_BY, PackedPages, PageShape, block_format

ROOT = Path(__file__).parents[1]
TEXTS = {
    "prose": ("README.md", "docs/tiers.md", "docs/tuning.md", "docs/vllm.md"),
    "tables": ("docs/benchmarks.md", "docs/vllm-support.md"),
    "code": ("src/kvtier/slot_table.py", "src/kvtier/config.py", "src/kvtier/connector/scheduler.py"),
}
Bits = npt.NDArray[np.uint16]


def read_texts(num_tokens: int, block_size: int) -> Iterator[tuple[str, Bits]]:
    """Yield a real model's KV of each text, as `(blocks, layers and K or V, tokens, channels)`."""
    from tokenizers import Tokenizer

    from kvtier.config import CPUConfig, KVTierConfig
    from kvtier.demo.model import cached_model
    from kvtier.engine import Engine, EngineConfig, SamplingParams

    folder = cached_model(lambda line: print(line, file=sys.stderr))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, files in TEXTS.items():
        text = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        tokens = tokenizer.encode(text).ids[:num_tokens]
        blocks = len(tokens) // block_size
        config = EngineConfig(num_blocks=blocks + 4, block_size=block_size, dtype="bfloat16")
        kvtier = KVTierConfig(cpu=CPUConfig(capacity=1 << 30), packing="off")
        with Engine.from_folder(folder, config, kvtier) as engine:
            engine.add_request(tokens[: block_size * blocks], SamplingParams(max_tokens=1))
            while engine.has_unfinished():
                engine.step()
            engine.drain()
            assert engine.connector is not None
            scheduler = engine.connector.connector_scheduler
            assert scheduler is not None
            rows = scheduler.spec.open_pool().rows  # type: ignore[attr-defined]
            size = scheduler.spec.config.image_bytes(0)
            kept = rows[rows.any(axis=1), :size].copy().view(np.uint16)
            model = engine.model.config
        assert len(kept) == blocks
        width = model.num_kv_heads * model.head_dim
        yield name, kept.reshape(blocks, 2 * model.num_layers, block_size, width)


def bench_model(num_tokens: int, block_size: int) -> Iterator[dict[str, Any]]:
    """Pack and unpack all blocks of each text."""
    for name, kv in read_texts(num_tokens, block_size):
        blocks, num_pages, _, width = kv.shape
        pages = [kv[:, page].reshape(blocks, -1).view(np.int8).copy() for page in range(num_pages)]
        shapes = [PageShape(page.shape[1], width) for page in pages]
        form = block_format(sum(shape.bytes for shape in shapes), block_size)
        assert form is not None
        rows, every = np.zeros((blocks, form.bytes), np.uint8), np.arange(blocks)
        nothing = np.zeros(blocks, np.int64)
        packs = PackedPages(rows, 0, form, pages, shapes).store(every, nothing, every)
        back = [np.empty_like(page) for page in pages]
        unpacks = PackedPages(rows, 0, form, back, shapes).load(every, nothing, every)
        values = kv[0].size
        exceptions = rows[:, :4].copy().view(np.uint32)[packs, 0] * (16384 / values)
        yield {
            "text": name,
            "block_size": block_size,
            "blocks": blocks,
            "not_packed": int((~packs).sum()),
            "bit_exact": bool(packs.all()) and bool(unpacks.all()) and all(map(np.array_equal, back, pages)),
            "exceptions": {"mean": float(exceptions.mean()), "most": float(exceptions.max())},
            "room": form.max_exceptions * 16384 / values,
            "ratio": kv[0].nbytes / form.bytes,
            "ideal": 16 / (8 + entropy(kv)),
        }


def entropy(kv: Bits) -> float:
    """Return the bits that the exponents of a page have on average."""
    found = []
    for page in kv.reshape(-1, kv.shape[2] * kv.shape[3]):
        share = np.bincount(page >> 7 & 0xFF) / page.size
        found.append(float(-(share[share > 0] * np.log2(share[share > 0])).sum()))
    return sum(found) / len(found)


def bench_chats(num_chats: int = 26, length: int = 129, turns: int = 5) -> dict[str, float]:
    """Return the share of prompt tokens loaded from a pool that holds ten of thirteen chats as they are."""
    from kvtier.config import CPUConfig, KVTierConfig
    from kvtier.engine import Engine, EngineConfig, SamplingParams

    prompts = [random_prompt(random.Random(chat), length) for chat in range(num_chats)]
    config = EngineConfig(num_blocks=40, dtype="bfloat16", max_num_batched_tokens=1024)
    blocks = length // config.block_size
    raw_row = MODEL["num_hidden_layers"] * 2 * config.block_size * MODEL["hidden_size"] // 2 * 2
    capacity = num_chats * blocks * raw_row * 10 // 13
    loaded: dict[str, float] = {}
    for packing in ("off", "on"):
        kvtier = KVTierConfig(
            cpu=CPUConfig(capacity=capacity), packing=packing, load_if_faster=False, audit=0
        )
        asked = source = 0
        with Engine(make_model(config), config, kvtier) as engine:
            rng = random.Random(0)
            for turn in range(turns):
                for chat in rng.sample(range(num_chats), num_chats):
                    engine.add_request(prompts[chat], SamplingParams(max_tokens=1))
                    (output,) = (done for done in steps(engine) if done.finished)
                    engine.reset_prefix_cache()
                    if turn:
                        asked += length
                        source += sum(output.source.tiers.values()) if output.source else 0
        loaded[packing] = source / asked
    return loaded


def steps(engine: Any) -> Iterator[Any]:
    """Run an engine until it is idle, and yield its outputs."""
    while engine.has_unfinished():
        yield from engine.step()
    engine.drain()


def bench_speed(rounds: int = 15) -> dict[str, float]:
    """Return raw bytes over CPU seconds: medians over rounds in which the three take turns."""
    tokens, width, num_pages, blocks = 16, 1024, 64, 32
    rng = np.random.default_rng(0)
    values = rng.standard_normal((num_pages, blocks, tokens * width), np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    pages, back = [page.view(np.int8) for page in bits], [page.view(np.int8).copy() for page in bits]
    shapes = [PageShape(2 * tokens * width, width)] * num_pages
    form = block_format(2 * tokens * width * num_pages, tokens)
    assert form is not None
    rows, every = np.zeros((blocks, form.bytes), np.uint8), rng.permutation(blocks)
    nothing = np.zeros(blocks, np.int64)
    packing = PackedPages(rows, 0, form, pages, shapes)
    unpacking = PackedPages(rows, 0, form, back, shapes)

    def copy() -> None:
        for target, source in zip(back, pages, strict=True):
            target[every] = source

    actions: dict[str, Callable[[], object]] = {
        "pack": lambda: packing.store(every, nothing, every),
        "unpack": lambda: unpacking.load(every, nothing, every),
        "copy": copy,
    }
    speeds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(-1, rounds):
        for name, action in actions.items():
            start = time.process_time()
            action()
            if turn >= 0:
                speeds[name].append(bits.nbytes / (time.process_time() - start) / 1e9)
    return {name: median(part) for name, part in speeds.items()}


def show(console: Console, results: dict[str, Any]) -> None:
    for cell in results["model"]:
        exceptions = cell["exceptions"]
        console.print(
            f"{cell['text']:7} {cell['blocks']:4} blocks of {cell['block_size']:3} tokens:"
            f" {cell['not_packed']} not packed, bit-exact: {cell['bit_exact']};"
            f" exceptions of 16,384 values: {exceptions['mean']:.1f} on average, {exceptions['most']:.1f}"
            f" at most, room for {cell['room']:.0f}; ratio {cell['ratio']:.3f} (ideal {cell['ideal']:.2f})"
        )
    chats = results["chats"]
    console.print(f"chats of 1.3 times the pool: {chats['on']:.1%} loaded packed, {chats['off']:.1%} raw")
    speed = results["speed"]
    console.print(
        f"one core, {PACKED_BY}: pack {speed['pack']:.2f}, unpack {speed['unpack']:.2f}, copy"
        f" {speed['copy']:.2f} GB/s of CPU time; of the copy's speed {speed['pack'] / speed['copy']:.2f} and"
        f" {speed['unpack'] / speed['copy']:.2f}"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of each text, at most")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = (16, 64)
    results = {
        "model": [cell for size in sizes for cell in bench_model(arguments.tokens, size)],
        "chats": bench_chats(),
        "speed": bench_speed(),
    }
    show(open_console(arguments), results)
    write_json(arguments, results)


if __name__ == "__main__":
    main()
