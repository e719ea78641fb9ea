"""`kvtier tiers check`: opens every configured tier as an engine would, and moves a few test rows.

A disk is measured in a separate folder beside the tier's places, which stay as they are; for the tier's own
folder the check says whether there is room, and whether an engine owns it. Rows on servers use a namespace
that no engine has.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from typer import Argument, Option

from kvtier.config import (
    CPUConfig,
    DiskConfig,
    GroupConfig,
    KVTierConfig,
    OffloadingConfig,
    TierConfig,
    format_size,
    parse_size,
)
from kvtier.errors import ConfigError, InputError, KVTierError
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.tiers.base import Direction, RowBuffer, RowJob
from kvtier.tiers.disk.folder import find_places
from kvtier.tiers.io_tier import IOTier
from kvtier.tiers.shared_tier import SharedTier

__all__ = ["check_command", "tiers_app"]

tiers_app = typer.Typer(help="Look after the tiers of a config.")

_PAGE = 4096
_MOST_BYTES = 128 << 20
_ROWS_OF_A_CALL = 16
"""Rows per call of `discard`, so that a call ends in time: an object store often takes 50 ms per row."""
_SECONDS = 30.0
"""The longest time for any step before it counts as failed."""


class TierCheck(NamedTuple):
    """The result of one tier. `problem` says what is wrong; `None`: it works."""

    tier: str
    problem: str | None
    open_seconds: float | None = None
    lookup_seconds: float | None = None
    put_bytes_per_second: float | None = None
    get_bytes_per_second: float | None = None

    def sentence(self) -> str:
        """Return the result as one line."""
        if (
            self.open_seconds is None
            or self.put_bytes_per_second is None
            or self.get_bytes_per_second is None
        ):
            return f"{self.tier}: {self.problem}"
        text = f"{self.tier}: opens in {self.open_seconds * 1e3:.1f} ms, "
        text += f"puts {format_size(int(self.put_bytes_per_second))}/s, "
        text += f"gets {format_size(int(self.get_bytes_per_second))}/s"
        text += f", looks up in {(self.lookup_seconds or 0.0) * 1e3:.2f} ms"
        return text + (f"; but {self.problem}" if self.problem else "")


@tiers_app.command("check")
def check_command(
    file: Annotated[
        Path, Argument(metavar="FILE", help="JSON or TOML (*.toml), as `kvtier config check` takes.")
    ],
    rows: Annotated[int, Option(min=1, max=1024, help="Rows to put and get.")] = 16,
    row_size: Annotated[str, Option(metavar="SIZE", help="Bytes of a row.")] = "1MiB",
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Open every configured tier, put, look up, get and remove a few rows.

    Exits with 1 if a tier does not work.
    """
    config = KVTierConfig.from_file(file)
    wanted = parse_size(row_size, "--row-size")
    if wanted < 1:
        raise InputError(f"--row-size: expected at least one byte, got {row_size!r}")
    size = -(-wanted // _PAGE) * _PAGE
    if not config.tiers:
        raise InputError(f"{file}: expected tiers, got none")
    if rows * size > _MOST_BYTES:
        raise InputError(
            f"--rows, --row-size: expected {format_size(_MOST_BYTES)} in all, got {format_size(rows * size)}"
        )
    with _silent("kvtier.tiers"):  # the check reports what an engine would log
        checks = [_check(index, tier, config, rows, size) for index, tier in enumerate(config.tiers)]
    if as_json:
        typer.echo(json.dumps([check._asdict() for check in checks], indent=2))
    for check in () if as_json else checks:
        typer.echo(check.sentence())
    raise typer.Exit(1 if any(check.problem for check in checks) else 0)


def _check(index: int, tier: TierConfig, config: KVTierConfig, num_rows: int, row_bytes: int) -> TierCheck:
    try:
        with _scratch(tier, num_rows, row_bytes) as (scratch, problem):
            check = _measure(scratch, config, num_rows, row_bytes)
            return check._replace(problem=check.problem or problem)
    except ConfigError as error:  # the config in its path has this tier alone
        return TierCheck(tier.kind, str(error).replace("tiers[0]", f"tiers[{index}]", 1))
    except (KVTierError, OSError) as error:
        return TierCheck(tier.kind, _one_line(tier.kind, str(error)))


@contextmanager
def _scratch(tier: TierConfig, num_rows: int, row_bytes: int) -> Iterator[tuple[TierConfig, str | None]]:
    """Yield settings for the measurement, and the problem of the tier's own place, if any."""
    if not isinstance(tier, DiskConfig):
        yield replace(tier, required=False), None
        return
    path = Path(tier.path)
    path.mkdir(parents=True, exist_ok=True)
    places = list(find_places(path))
    needed = tier.capacity - sum(place.taken for place in places)
    free = shutil.disk_usage(path).free
    problem = None
    if needed > free:
        problem = f"{path}: expected room for {format_size(needed)} more, found {format_size(free)}"
    elif any(place.owned for place in places):
        problem = f"{path}: a process owns it; another engine would run without this tier"
    with tempfile.TemporaryDirectory(prefix=".kvtier-check-", dir=path) as folder:
        yield (
            replace(
                tier, path=folder, capacity=(num_rows + 8) * (row_bytes + _PAGE) + (1 << 20), required=False
            ),
            problem,
        )


def _measure(tier: TierConfig, config: KVTierConfig, num_rows: int, row_bytes: int) -> TierCheck:
    """Open a tier as an engine does, and move rows."""
    from kvtier.tiers.factory import make_tier

    group = GroupConfig(block_size=16, bytes_per_block=row_bytes, layer_names=("check",))
    room = CPUConfig(capacity=row_bytes + _PAGE)  # for one slot; no pool is opened
    settings = replace(config, cpu=room, blocks_per_chunk=1, tiers=(tier,))
    engine = OffloadingConfig(
        settings=settings,
        groups=(group,),
        hash_block_size=16,
        engine_id="kvtier-tiers-check",
        namespace=f"kvtier tiers check {secrets.token_hex(8)}",
    )
    seconds: dict[str, float] = {}
    names = [make_offload_key(secrets.token_bytes(32), 0) for _ in range(num_rows)]
    memory = bytearray(secrets.token_bytes(num_rows * row_bytes))
    with _timed(seconds, "open"):
        made = make_tier(tier, engine)
        assert isinstance(made, IOTier)
        made.set_buffer(RowBuffer(memoryview(memory), row_bytes))
        made.wait_open(_SECONDS)
    try:
        try:
            problem = _move(made, names, memory, seconds)
        finally:
            left = _remove(made, names)
        problem = problem or left
    finally:
        made.close()
    total = num_rows * row_bytes
    return TierCheck(
        tier.kind,
        None if problem is None else _one_line(tier.kind, problem),
        seconds["open"],
        seconds.get("lookup"),
        total / seconds["put"] if "put" in seconds else None,
        total / seconds["get"] if "get" in seconds else None,
    )


def _move(tier: IOTier, names: list[OffloadKey], memory: bytearray, seconds: dict[str, float]) -> str | None:
    """Put, look up and get the rows in a memory; return the problem, if any."""
    if not tier.is_open():
        return tier.problem or f"{tier.where}: it does not open"
    payload = bytes(memory)
    with _timed(seconds, "put"):
        taken = tier.demote(job := _job(1, Direction.DEMOTE, names))
        outcome = _wait(tier, job, len(taken))
    if len(taken) < len(names) or outcome is not None:
        return f"{tier.where}: a row could not be put: {outcome or 'it was refused'}"
    unheard = [make_offload_key(secrets.token_bytes(32), 0) for _ in names]
    with _timed(seconds, "lookup"):
        tier.ask(unheard, time.monotonic() + _SECONDS)
        while None in tier.lookup_many(unheard) and tier.stats().suspended is None:
            tier.wait_any(0.01)
            tier.poll()
    memory[:] = bytes(len(memory))
    with _timed(seconds, "get"):
        tier.promote(job := _job(2, Direction.PROMOTE, names))
        outcome = _wait(tier, job, len(names))
    if outcome is not None:
        return f"{tier.where}: a row that was put could not be got: {outcome}"
    return None if memory == payload else f"{tier.where}: a row came back with other bytes"


def _job(number: int, direction: Direction, names: list[OffloadKey]) -> RowJob:
    return RowJob(number, direction, names, np.arange(len(names)), time.monotonic() + _SECONDS)


def _wait(tier: IOTier, job: RowJob, num_rows: int) -> str | None:
    """Wait for the results of rows; return the problem of the first that failed."""
    problem: str | None = None
    while num_rows > 0:
        tier.wait_any(0.1)
        for result in tier.poll():
            if result.job is job and not result.returned:
                num_rows -= len(result.positions)
                if result.outcome is not None:
                    problem = problem or result.why or result.outcome.value
    return problem


def _remove(tier: IOTier, names: list[OffloadKey]) -> str | None:
    """Remove rows, a few per call; return why some remain, if any do."""
    if not tier.is_open():
        return None
    for at in range(0, len(names), _ROWS_OF_A_CALL):
        tier.discard(names[at : at + _ROWS_OF_A_CALL])
    until = time.monotonic() + _SECONDS
    while (tier.has_open_calls() or tier.stats().stuck) and time.monotonic() < until:
        tier.wait_any(0.1)
        tier.poll()
    if not isinstance(tier, SharedTier):
        return None
    why = tier.undeleted or (f"it took more than {_SECONDS:g} s" if tier.has_open_calls() else None)
    return (
        why and f"{tier.where}: rows that were put could not be removed, and some may be there still: {why}"
    )


def _one_line(kind: str, problem: str) -> str:
    return " ".join(problem.split()).removeprefix(f"{kind} tier: ")


@contextmanager
def _silent(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - start
