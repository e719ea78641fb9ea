"""`kvtier simulate`: what so much memory and so much disk would save, with which policy.

The table goes to stdout, the progress bar to stderr. All options are checked before the first cell runs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer import Argument, Context, Option

from kvtier.cli.demo import expect_writable, find_policies_here, write_whole
from kvtier.cli.model_shape import read_config, read_shape
from kvtier.cli.size import positive_size
from kvtier.cli.streams import interruptible
from kvtier.config import DEFAULT_POLICY, parse_size
from kvtier.errors import ConfigError, InputError, ModelError

if TYPE_CHECKING:
    from kvtier.simulate import Capacity, CellResult, Sweep, Trace

_Trace = Annotated[
    Path,
    Argument(metavar="TRACE", help="Mooncake's JSONL, a recording of events, or CSV or JSONL of requests."),
]
_Sizes = Annotated[
    list[str],
    Option(metavar="SIZE,...", help="Sizes of the pool, as bytes or as a share of the trace's chunks (1%)."),
]
_Disks = Annotated[list[str], Option(metavar="SIZE,...", help="Sizes of the disk; 0 is none.")]
_Policies = Annotated[list[str], Option(metavar="NAME,...", help="Policies of pool and disk.")]
_Chunks = Annotated[
    list[str] | None, Option(metavar="TOKENS,...", help="Sizes of chunks; by default the trace's blocks.")
]
_Model = Annotated[
    Path | None, Option(help="A folder with a model's config.json: gives the bytes of a token.")
]
_TokenBytes = Annotated[
    str | None, Option(metavar="SIZE", help="The bytes of a token's KV, over all ranks.")
]
_Prefill = Annotated[float, Option(min=1.0, max=1e12, help="Tokens a second that the engine computes.")]
_Bus = Annotated[str, Option(metavar="SIZE", help="Bytes a second between the pool and the GPUs.")]
_DiskBandwidth = Annotated[str, Option(metavar="SIZE", help="Bytes a second that the disk reads.")]
_Write = Annotated[str, Option(help="When rows are written to the disk: through or evict.")]
_WriteLimit = Annotated[
    str | None,
    Option(metavar="SIZE", help="Bytes to write in 24 h; by default 4 capacities, 0 for no limit."),
]
_MemoryPrice = Annotated[
    float | None, Option(min=0.0, max=1e12, help="Price of a GiB of memory for a month.")
]
_DiskPrice = Annotated[float | None, Option(min=0.0, max=1e12, help="Price of a GiB of disk for a month.")]
_FlashWrites = Annotated[float, Option(min=1.0, max=1e12, help="How often the disk can be written over.")]
_BlockTokens = Annotated[
    int, Option(min=1, max=1 << 20, help="Tokens of a block in CSV and JSONL of requests.")
]
_StepTokens = Annotated[int, Option(min=1, help="Prompt tokens that the engine computes in a step.")]
_Here = Annotated[str | None, Option(metavar="SIZE", help="The memory (or disk) you have, to be marked.")]
_Jobs = Annotated[int | None, Option(min=1, help="Combinations at once; by default one for each core.")]
_Json = Annotated[Path | None, Option("--json", metavar="FILE", help="Also write the results as JSON.")]
_Html = Annotated[Path | None, Option("--html", metavar="FILE", help="Also write a page with curves.")]


def simulate_command(
    context: Context,
    trace: _Trace,
    memory: _Sizes,
    disk: _Disks = ["0"],  # noqa: B006  typer copies it
    policy: _Policies = [DEFAULT_POLICY],  # noqa: B006
    chunk_tokens: _Chunks = None,
    model: _Model = None,
    bytes_per_token: _TokenBytes = None,
    prefill: _Prefill = 10_000.0,
    bus: _Bus = "55GB",
    disk_bandwidth: _DiskBandwidth = "3GB",
    write: _Write = "through",
    write_limit: _WriteLimit = None,
    memory_price: _MemoryPrice = None,
    disk_price: _DiskPrice = None,
    flash_writes: _FlashWrites = 1825.0,
    block_tokens: _BlockTokens = 16,
    step_tokens: _StepTokens = 8192,
    here: _Here = None,
    jobs: _Jobs = None,
    json_file: _Json = None,
    html_file: _Html = None,
) -> None:
    """Replay a trace through kvtier in simulated time, and print what memory and disk would save."""
    from kvtier.policies import make_policy
    from kvtier.simulate import Speeds, Sweep, read_trace, run_sweep
    from kvtier.simulate.page import render_page

    expect_writable("--json", json_file)
    expect_writable("--html", html_file)
    if write not in ("through", "evict"):
        raise InputError(f"--write: expected through or evict, got {write!r}")
    policies = tuple(_split("--policy", policy))
    find_policies_here(policies)
    for name in policies:
        try:
            make_policy(name, 1)
        except ConfigError as error:
            raise InputError("--policy" + str(error).removeprefix(error.path)) from None
    mark = None if here is None else positive_size("--here", here)
    token_bytes = _token_bytes(model, bytes_per_token)
    speeds = Speeds(
        prefill, positive_size("--bus", bus), positive_size("--disk-bandwidth", disk_bandwidth), step_tokens
    )
    memories, disks = _capacities("--memory", memory), _capacities("--disk", disk)
    chunks = (
        None if chunk_tokens is None else [_count(text) for text in _split("--chunk-tokens", chunk_tokens)]
    )
    limit = None if write_limit is None else parse_size(write_limit, "--write-limit")
    requests = read_trace(trace, block_tokens)
    sweep = Sweep(
        memory=memories,
        disk=disks,
        policies=policies,
        chunk_tokens=tuple(chunks or [requests.block_tokens]),
        bytes_per_token=token_bytes,
        speeds=speeds,
        write=write,
        write_limit=limit,
        memory_price=memory_price,
        disk_price=disk_price,
        flash_writes=flash_writes,
    )
    console = Console(stderr=True)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with interruptible(), progress:
        task = progress.add_task("", total=None)
        results = run_sweep(
            requests,
            sweep,
            jobs or os.cpu_count() or 1,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    if json_file is not None:
        write_whole(json_file, json.dumps(_to_json(requests, sweep, results), indent=2) + "\n")
    if html_file is not None:
        command = ["kvtier", *map(str, context.find_root().obj or [])]
        write_whole(html_file, render_page(requests, results, mark, command))
    _print(requests, results)


# -- reading options -------------------------------------------------------------------------------


def _split(option: str, texts: Sequence[str]) -> list[str]:
    """Return the values of an option that takes lists and may be repeated, each once."""
    values = list(dict.fromkeys(part.strip() for text in texts for part in text.split(",")))
    if not all(values):
        raise InputError(f"{option}: expected values separated by commas, got {','.join(texts)!r}")
    return values


def _capacities(option: str, texts: Sequence[str]) -> tuple[Capacity, ...]:
    from kvtier.simulate import Capacity

    found = []
    for text in _split(option, texts):
        if not text.endswith("%"):
            found.append(Capacity(text, parse_size(text, option)))
        elif re.fullmatch(r"\d+(\.\d+)?%", text) and 0 < float(text[:-1]) <= 100:
            found.append(Capacity(text, share=float(text[:-1]) / 100))
        else:
            raise InputError(f"{option}: expected a size, or a share such as 1% up to 100%, got {text!r}")
    return tuple(found)


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1 << 20:
        raise InputError(f"--chunk-tokens: expected whole numbers of tokens, got {text!r}")
    return int(text)


def _token_bytes(model: Path | None, given: str | None) -> int:
    if (model is None) == (given is None):
        raise InputError("expected --model FOLDER or --bytes-per-token SIZE: one of them")
    if model is None:
        return positive_size("--bytes-per-token", given or "")
    try:
        return read_shape(read_config(model)).bytes_per_token
    except ModelError as error:
        prefix = "" if str(error).startswith(str(model)) else f"{model}: "
        raise InputError(f"{prefix}{error}; or give --bytes-per-token") from None


# -- showing ---------------------------------------------------------------------------------------


def _to_json(trace: Trace, sweep: Sweep, results: Sequence[CellResult]) -> dict[str, Any]:
    return {
        "trace": {
            "name": trace.name,
            "kind": trace.kind,
            "block_tokens": trace.block_tokens,
            "requests": len(trace.requests),
            "seconds": trace.seconds,
            "prompt_tokens": trace.prompt_tokens,
            "notes": list(trace.notes),
        },
        "settings": asdict(sweep),
        "cells": [
            asdict(result.cell)
            | {"memory_bytes": result.cell.memory_bytes, "disk_bytes": result.cell.disk_bytes}
            | {name: value for name, value in asdict(result).items() if name != "cell"}
            for result in results
        ],
    }


def _print(trace: Trace, results: Sequence[CellResult]) -> None:
    from kvtier.simulate.page import describe_trace, remarks_on, table_of

    console = Console(highlight=False)
    head, rows = table_of(results)
    console.print(Text(describe_trace(trace)), soft_wrap=True)
    unbounded = console.options.update(max_width=1000)
    for table in (_table(head, rows, padding=1), _table(head, rows, padding=0)):
        if console.measure(table, options=unbounded).minimum <= console.width:
            console.print(table)
            break
    else:
        for row in rows:
            words = ", ".join(
                f"{name.strip()} {value}" for name, value in zip(head, row, strict=True) if value
            )
            console.print(Text(words), soft_wrap=not console.is_terminal)
    rates = {result.cell.chunk_tokens: result.hit_rate_infinite for result in results}
    infinite = ", ".join(f"{rate:.2%} (chunks of {chunk})" for chunk, rate in rates.items())
    for note in (f"A cache without a limit would save {infinite}.", *trace.notes, *remarks_on(results)):
        console.print(Text(note), soft_wrap=not console.is_terminal)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], padding: int) -> Table:
    """Return the table; where it is narrow, the words of its head stand below each other."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, padding), pad_edge=False)
    for number, column in enumerate(head):
        words = [*column.split(), *(row[number] for row in rows)]
        table.add_column(column, justify="right", vertical="bottom", min_width=max(map(len, words)))
    for row in rows:
        table.add_row(*map(Text, row))
    return table
