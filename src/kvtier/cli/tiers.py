"""`kvtier tiers check`: opens every configured tier as an engine would, and moves a few test rows.

A disk is measured in a temporary folder beside the tier's places, which stay as they are; if the tier's
folder does not exist, in the nearest parent that does. For the tier's own folder the check reports whether
there is room, and whether an engine owns it. Rows on servers use a namespace that no engine has. `kvtier
doctor` runs the same check.
"""

from __future__ import annotations

import errno
import json
import logging
import os
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
from kvtier.errors import ConfigError, InputError, KVTierError, OutsideError
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.machine import Mount, find_mount
from kvtier.tiers.base import Direction, RowBuffer, RowJob
from kvtier.tiers.disk.folder import find_places
from kvtier.tiers.io_tier import IOTier
from kvtier.tiers.shared_tier import SharedTier

tiers_app = typer.Typer(help="Look after the tiers of a config.")

_PAGE = 4096
_MOST_BYTES = 128 << 20
_ROWS_OF_A_CALL = 16
"""Rows per call of `discard`, so that a call ends in time: an object store often takes 50 ms per row."""
_SECONDS = 30.0
"""The longest time for any step before it counts as failed."""
_REMOTE = {"9p", "afs", "ceph", "cifs", "fuse", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs"}
_SLOW = 200e6
"""Bytes per second: slower than any serving GPU computes KV."""


class TierCheck(NamedTuple):
    """The result of one tier.

    `problem` says why an engine could not use it, and is `None` if it works. `warning` says what makes it
    work badly, if anything does.
    """

    tier: str
    problem: str | None
    open_seconds: float | None = None
    lookup_seconds: float | None = None
    put_bytes_per_second: float | None = None
    get_bytes_per_second: float | None = None
    warning: str | None = None

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
        return text + "".join(f"; but {what}" for what in (self.problem, self.warning) if what)


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
    checks = check_tiers(config, rows, size)
    if as_json:
        typer.echo(json.dumps([check._asdict() for check in checks], indent=2))
    for check in () if as_json else checks:
        typer.echo(check.sentence())
    raise typer.Exit(1 if any(check.problem for check in checks) else 0)


def check_tiers(config: KVTierConfig, num_rows: int = 16, row_bytes: int = 1 << 20) -> list[TierCheck]:
    """Open every tier of a config, move rows through it, and remove them."""
    with _silent("kvtier.tiers"):  # the check reports what an engine would log
        return [_check(index, tier, config, num_rows, row_bytes) for index, tier in enumerate(config.tiers)]


def _check(index: int, tier: TierConfig, config: KVTierConfig, num_rows: int, row_bytes: int) -> TierCheck:
    try:
        with _scratch(tier, num_rows, row_bytes) as (scratch, problem, warning):
            check = _measure(scratch, config, num_rows, row_bytes)
            if warning is None and isinstance(tier, DiskConfig):
                warning = _warn_of_speed(check)
            return check._replace(problem=check.problem or problem, warning=warning)
    except ConfigError as error:  # the config in its path has this tier alone
        return TierCheck(tier.kind, str(error).replace("tiers[0]", f"tiers[{index}]", 1))
    except (KVTierError, OSError) as error:
        return TierCheck(tier.kind, _one_line(tier.kind, str(error)))


class _Scratch(NamedTuple):
    """Settings for the measurement, and what is wrong or bad about the tier's own folder."""

    tier: TierConfig
    problem: str | None = None
    warning: str | None = None


@contextmanager
def _scratch(tier: TierConfig, num_rows: int, row_bytes: int) -> Iterator[_Scratch]:
    """Make a temporary folder to measure a disk in, on the file system of the tier's folder."""
    if not isinstance(tier, DiskConfig):
        yield _Scratch(replace(tier, required=False))
        return
    path, place = Path(tier.path), _nearest(Path(tier.path))
    if not place.is_dir():
        raise OutsideError(f"{place} is no folder; choose another disk.path")
    try:
        folder = tempfile.mkdtemp(prefix=".kvtier-check-", dir=place)
    except OSError as error:
        raise OutsideError(f"{place} cannot be written to: {error.strerror}") from None
    try:
        capacity = (num_rows + 8) * (row_bytes + _PAGE) + (1 << 20)
        # A limit of bytes a day is no reason to refuse a measurement.
        scratch = replace(tier, path=folder, capacity=capacity, write_limit=0, required=False)
        mount = find_mount(place)
        yield _Scratch(
            scratch, _find_problem(path, place, tier.capacity, mount), _find_warning(folder, mount)
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _nearest(path: Path) -> Path:
    """Return a path, or its deepest parent that exists."""
    return next((found for found in (path, *path.parents) if os.path.lexists(found)), path)


def _find_problem(path: Path, place: Path, capacity: int, mount: Mount | None) -> str | None:
    """Return why an engine could not use the folder `path` of a tier, on the file system of `place`."""
    if mount is not None and mount.is_memory:
        return f"{path} is on {mount.kind}: its files are memory and end with the machine"
    found = list(find_places(path)) if path.exists() else []
    needed = capacity - sum(place.taken for place in found)
    free = shutil.disk_usage(place).free
    if needed > free:
        return f"{path}: expected room for {format_size(needed)} more, found {format_size(free)}"
    if any(place.owned for place in found):
        return f"{path}: a process owns it; another engine would run without this tier"
    return None


def _find_warning(folder: str, mount: Mount | None) -> str | None:
    """Return what makes a file system a bad one for a disk tier, if anything does."""
    if mount is not None and mount.kind == "overlay":
        return "its file system is overlay, a container's layer, which ends with it; mount a volume"
    if mount is not None and mount.kind.partition(".")[0] in _REMOTE:
        remedy = "use a local disk: it belongs to one engine, and locks over a network may not hold"
        return f"its file system is {mount.kind}, which is not a local disk; {remedy}"
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
        os.close(os.open(os.path.join(folder, "direct"), flags, 0o600))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "its file system has no direct I/O, so that rows take memory and CPU twice"
    return None


def _warn_of_speed(check: TierCheck) -> str | None:
    rate = check.get_bytes_per_second
    if rate is None or rate >= _SLOW:
        return None
    return "most GPUs compute KV faster than it is read; kvtier then computes, and the disk is of little use"


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
