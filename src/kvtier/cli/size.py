"""`kvtier size`: what the KV of a model takes, how much of it fits where, and when a load pays.

The bytes are exact (`model_shape`). Times are estimates: bytes divided by a bandwidth, and a fixed time for
each load; computing is tokens divided by a speed that the user knows.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from kvtier.cli.model_shape import DTYPES, OPTIONS, ModelShape, read_config, read_shape
from kvtier.config import GroupConfig, KVTierConfig, OffloadingConfig, format_size, parse_size
from kvtier.errors import InputError, ModelError

_LOAD_SECONDS = 0.01
"""The time of a load beside its bytes: orders and reports travel with the engine's steps.

First tokens from the pool took 11 to 14 ms longer than their bytes in vLLM on an H200, up to 8,192 tokens.
"""
_LEAST_DISK_ROW = 256 << 10
_LONGEST_PROMPT = 1 << 30
_GIB = 1 << 30

_Model = Annotated[
    Path | None,
    Argument(
        metavar="[MODEL]", help="A folder with a model's config.json, or that file.", show_default=False
    ),
]
_Layers = Annotated[int | None, Option(min=1, help="Layers with attention, instead of the config's.")]
_KvHeads = Annotated[int | None, Option(min=1, help="KV heads of a layer, instead of the config's.")]
_HeadDim = Annotated[int | None, Option(min=1, help="Values of a head, instead of the config's.")]
_Dtype = Annotated[str | None, Option(help="The model's dtype, instead of the config's.")]
_CacheDtype = Annotated[str | None, Option(help="The cache's dtype (fp8), if it is not the model's.")]
_TensorParallel = Annotated[int, Option(min=1, max=1024, help="Ranks that divide each layer.")]
_BlockSize = Annotated[int, Option(min=1, max=1 << 20, help="Tokens of the engine's blocks.")]
_Memory = Annotated[str | None, Option(metavar="SIZE", help="Memory for the pool, over all ranks.")]
_Disk = Annotated[str | None, Option(metavar="SIZE", help="Room on a disk.")]
_Bus = Annotated[str, Option(metavar="SIZE", help="Bytes a second between the pool and each GPU.")]
_DiskBandwidth = Annotated[str, Option(metavar="SIZE", help="Bytes a second that the disk reads.")]
_Prefill = Annotated[float, Option(min=1.0, max=1e12, help="Tokens a second that the engine computes.")]


@dataclass(frozen=True, slots=True)
class LoadSource:
    """What one place allows: the pool or the disk."""

    name: str
    bandwidth: int
    tokens_per_second: float
    capacity: int | None
    tokens: int | None
    """The tokens for which the capacity has room."""
    pays_from: int | None
    """The shortest prompt that is loaded faster than it is computed; `None` if none is."""


@dataclass(frozen=True, slots=True)
class SizeReport:
    """All that the command finds."""

    shape: ModelShape
    row_bytes: int | None
    """The bytes of a row; `None` if they depend on how the engine puts layers into groups."""
    chunk_tokens: int
    sources: tuple[LoadSource, ...]
    settings: dict[str, Any] | None
    """Settings to paste; `None` if no memory was given."""


def size_command(
    model: _Model = None,
    layers: _Layers = None,
    kv_heads: _KvHeads = None,
    head_dim: _HeadDim = None,
    dtype: _Dtype = None,
    cache_dtype: _CacheDtype = None,
    tensor_parallel: _TensorParallel = 1,
    block_size: _BlockSize = 16,
    memory: _Memory = None,
    disk: _Disk = None,
    bus: _Bus = "55GB",
    disk_bandwidth: _DiskBandwidth = "3GB",
    prefill: _Prefill = 10_000.0,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a model's KV takes, how many tokens fit where, and which loads beat computing."""
    if cache_dtype is not None and cache_dtype not in DTYPES:
        raise InputError(f"--cache-dtype: expected one of {', '.join(DTYPES)}, got {cache_dtype!r}")
    fields = {} if model is None else read_config(model)
    given = dict(zip(OPTIONS, (layers, kv_heads, head_dim, dtype), strict=True))
    given = {name: value for name, value in given.items() if value is not None}
    if not fields and not given:
        raise InputError(f"expected MODEL, or {', '.join(OPTIONS.values())}")
    try:
        shape = read_shape(fields, given=given, cache_dtype=cache_dtype, tensor_parallel=tensor_parallel)
    except ModelError as error:
        raise ModelError(str(error) if model is None else f"{model}: {error}") from None
    report = make_report(
        shape,
        tensor_parallel=tensor_parallel,
        block_size=block_size,
        memory=None if memory is None else positive_size("--memory", memory),
        disk=None if disk is None else positive_size("--disk", disk),
        bus=positive_size("--bus", bus),
        disk_bandwidth=positive_size("--disk-bandwidth", disk_bandwidth),
        prefill=prefill,
    )
    if as_json:
        derived = {"bytes_per_token": shape.bytes_per_token, "bytes_per_rank": shape.bytes_per_rank}
        typer.echo(json.dumps({**derived, "tokens_per_gib": _GIB // shape.bytes_per_token} | asdict(report)))
    else:
        _print(report, tensor_parallel, prefill)


def positive_size(option: str, text: str) -> int:
    """Read a size of at least one byte, or bytes a second."""
    size = parse_size(text.removesuffix("/s"), option)
    if size < 1:
        raise InputError(f"{option}: expected more than 0, got {text!r}")
    return size


# -- the figures -----------------------------------------------------------------------------------


def make_report(
    shape: ModelShape,
    *,
    tensor_parallel: int,
    block_size: int,
    memory: int | None,
    disk: int | None,
    bus: int,
    disk_bandwidth: int,
    prefill: float,
) -> SizeReport:
    """Compute all figures. Rows follow from the same config that an engine would be given."""
    blocks = 1
    if disk is not None:
        blocks = max(1, math.ceil(_LEAST_DISK_ROW / (shape.bytes_per_token * block_size)))
    settings = None if memory is None else _settings(memory, disk, blocks)
    config = _offloading_config(shape, tensor_parallel, block_size, blocks)
    row = None if config is None else config.row_bytes
    chunk = block_size * blocks

    def fits(capacity: int | None) -> int | None:
        if capacity is None:
            return None
        return capacity // shape.bytes_per_token if row is None else capacity // row * chunk

    def pays_from(read_from_disk: bool) -> int | None:
        def gain(tokens: int) -> float:
            moved = shape.load_bytes(tokens, per_rank=True) / bus
            moved += shape.load_bytes(tokens, per_rank=False) / disk_bandwidth if read_from_disk else 0.0
            states = (shape.state_bytes or 0) * (1 / bus / tensor_parallel)
            states += (shape.state_bytes or 0) / disk_bandwidth if read_from_disk else 0.0
            return tokens / prefill - (_LOAD_SECONDS + moved + states)

        return _first_gain(gain, chunk)

    pool = LoadSource("pool", bus, bus / shape.bytes_per_rank, memory, fits(memory), pays_from(False))
    below = LoadSource(
        "disk", disk_bandwidth, disk_bandwidth / shape.bytes_per_token, disk, fits(disk), pays_from(True)
    )
    return SizeReport(shape, row, chunk, (pool, below), settings)


def _first_gain(gain: Callable[[int], float], chunk: int) -> int | None:
    """Return the shortest prompt with a gain, of a chunk and a token at least.

    The gain changes its sign once: computing costs the same for every token, and loads cost less for each
    token beyond a window.
    """
    low, high = chunk + 1, _LONGEST_PROMPT
    if gain(high) <= 0:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) > 0 else (middle + 1, high)
    return low


def _settings(memory: int, disk: int | None, blocks: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"cpu": {"capacity": _short(memory)}}
    if blocks > 1:
        settings["blocks_per_chunk"] = blocks
    if disk is not None:
        settings["tiers"] = [{"disk": {"path": "/mnt/nvme/kv", "capacity": _short(disk)}}]
    return settings


def _short(size: int) -> str | int:
    """Return a size as people write it, if that is exact."""
    return size if size % _GIB else f"{size // _GIB}GiB"


def _offloading_config(
    shape: ModelShape, tensor_parallel: int, block_size: int, blocks: int
) -> OffloadingConfig | None:
    """Return what an engine with one group would give to kvtier; `None` if it has several."""
    if len({layers.window for layers in shape.sets}) > 1 or shape.state_layers:
        return None
    group = GroupConfig(
        block_size=block_size,
        bytes_per_block=block_size * shape.bytes_per_rank,
        layer_names=tuple(f"layers.{at}" for at in range(sum(layers.layers for layers in shape.sets))),
    )
    return OffloadingConfig(
        settings=KVTierConfig.from_dict({"cpu": {"capacity": 0}, "blocks_per_chunk": blocks}),
        groups=(group,),
        hash_block_size=block_size,
        world_size=tensor_parallel,
        replicas=tensor_parallel if shape.is_replicated else 1,
        engine_id="size",
    )


# -- printing --------------------------------------------------------------------------------------


def _print(report: SizeReport, tensor_parallel: int, prefill: float) -> None:
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _rows(report, tensor_parallel):
        table.add_row(Text(label, style="bold"), Text(value))
    console.print(table)
    for line in _remarks(report, prefill):
        console.print(Text(line), soft_wrap="{" in line or not console.is_terminal)  # settings are pasted


def _rows(report: SizeReport, tensor_parallel: int) -> Iterator[tuple[str, str]]:
    shape = report.shape
    yield "a token", f"{shape.bytes_per_token:,} bytes ({format_size(shape.bytes_per_token)})"
    for layers in shape.sets:
        window = f" of {layers.window:,} tokens" if layers.window else ""
        yield f"  {layers.kind}{window}", f"{layers.layers} layers, {layers.bytes_per_token:,} bytes"
    if tensor_parallel > 1:
        kept = "the same on all, kept once" if shape.is_replicated else "other heads on each"
        yield f"  on each of {tensor_parallel} ranks", f"{shape.bytes_per_rank:,} bytes; {kept}"
    if shape.state_layers:
        known = f"{shape.state_bytes:,} bytes at each boundary" if shape.state_bytes else "size not known"
        yield "states, not by token", f"{shape.state_layers} recurrent layers, {known}"
    if report.row_bytes is not None:
        of = f"a chunk of {report.chunk_tokens} tokens"
        yield "a row", f"{report.row_bytes:,} bytes ({format_size(report.row_bytes)}): {of}"
    yield "a GiB", f"{_GIB // shape.bytes_per_token:,} tokens"
    for source in report.sources:
        if source.capacity is not None:
            yield f"{source.name} of {format_size(source.capacity)}", f"{source.tokens:,} tokens"
    for source in report.sources:
        each = " for each GPU" if source.name == "pool" and tensor_parallel > 1 else ""
        rate = f"{source.tokens_per_second:,.0f} tokens/s at {source.bandwidth / 1e9:g} GB/s{each}"
        pays = "never pays" if source.pays_from is None else f"pays from {source.pays_from:,} tokens on"
        yield f"load from {source.name}", f"{rate}; {pays}"


def _remarks(report: SizeReport, prefill: float) -> Iterator[str]:
    """Yield what the figures assume, and the settings to paste."""
    yield (
        f"Assumed, unless you gave them: an engine that computes {prefill:,.0f} tokens/s, and the speeds of"
        f" bus and disk. A load takes {_LOAD_SECONDS * 1e3:g} ms beside its bytes. `kvtier tiers check`"
        " measures a disk."
    )
    if report.shape.state_layers:
        yield "Tokens that fit are counted without states: the engine chooses how many boundaries are kept."
    if report.row_bytes is None:
        yield "Rows are not shown: their size depends on how the engine puts layers into groups."
    if report.settings is None:
        yield "Give --memory SIZE for settings to paste."
        return
    settings = json.dumps(report.settings)
    flag = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": report.settings,
    }
    yield ""
    yield f"settings:  {settings}"
    yield f"for vLLM:  --kv-transfer-config {shlex.quote(json.dumps(flag))}"
