"""`kvtier disk`: lists a disk tier's folder, checks whether its rows are whole, and removes old places."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer import Argument, Option

from kvtier.config import format_size, parse_duration
from kvtier.errors import InputError, OutsideError
from kvtier.packing import raw_row_bytes_of
from kvtier.tiers.disk.folder import DiskPlace, find_places, find_ranks, read_learnt
from kvtier.tiers.disk.format import VERSION, DiskHeader

disk_app = typer.Typer(help="Look after the folder of a disk tier.")


def read_folder(text: str) -> Path:
    """Return the folder that a command line names. An empty name does not mean the current folder."""
    if not text:
        raise InputError("expected the path of a folder, got ''; the current one is '.'")
    return Path(text)


_Folder = Annotated[
    Path,
    Argument(metavar="PATH", help="The folder that the tier's `path` names.", parser=read_folder),
]
_Json = Annotated[bool, Option("--json", help="Print JSON.")]
_Places = Annotated[
    list[str] | None, Argument(metavar="[PLACE]...", help="Names of places, as `ls` shows them.")
]
_Age = Annotated[
    str | None, Option(metavar="TIME", help="Places that were last used longer ago, such as 48h.")
]


@disk_app.command("ls")
def ls_command(path: _Folder, as_json: _Json = False) -> None:
    """List the places of a folder: one for each model, row size and version that has used it."""
    places = _find(path)
    if as_json:
        typer.echo(json.dumps([_to_dict(path, place) for place in places], indent=2))
        return
    rows = [("place", "namespace", "rows of", "slots", "on disk", "last used", "")]
    for place in places:
        header = place.header
        shape = ("", "", "")
        if header is not None:
            shape = header.namespace[:16], _row_size(header), f"{header.slots:,}"
        used_at = _date(place.used_at)
        rows.append((_name(path, place), *shape, format_size(place.taken), used_at, _remark(place)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if places else ():  # whole lines that may wrap, so that names can be copied
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if not places:
        typer.echo(f"{path}: no places")


@disk_app.command("habits")
def habits_command(path: _Folder, places: _Places = None, as_json: _Json = False) -> None:
    """Show what the policy `gittins` has learnt: how long it takes until chunks of a kind come back."""
    from kvtier.policies.reuse import ReuseModel

    found: dict[str, list[dict[str, Any]]] = {}
    for place in _choose(path, places):
        model = ReuseModel()
        if model.take_bytes(read_learnt(place.folder)):
            found[_name(path, place)] = [habit._asdict() for habit in model.habits()]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif not found:
        typer.echo(
            f"{path}: nothing was learnt here; the policy `gittins` learns, and saves it every minute"
        )
    for name, habits in () if as_json else found.items():
        table = Table(
            "uses", "tokens of last answer", "ended", "seen", "came back", "median time", title=name
        )
        for habit in sorted(habits, key=lambda habit: -habit["idle_times"]):
            median = habit["median_seconds"]
            table.add_row(
                habit["uses"], habit["answer_tokens"], habit["ending"], f"{habit['idle_times']:,.0f}",
                f"{habit['comes_back']:.0%}", "" if median is None else f"{median:,.1f} s",
            )  # fmt: skip
        Console(highlight=False).print(table)


@disk_app.command("check")
def check_command(
    path: _Folder,
    places: _Places = None,
    drop: Annotated[bool, Option("--drop", help="Drop rows and records that are bad.")] = False,
    as_json: _Json = False,
) -> None:
    """Read every row and check its seal.

    Exits with 1 if some rows or records are bad and were not dropped.
    """
    from kvtier.tiers.disk.inspect import check_place

    chosen = _choose(path, places)
    results: dict[str, dict[str, Any]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for place in chosen:
            name = _name(path, place)
            task = progress.add_task(name, total=None)
            try:
                check = check_place(place, drop=drop, advance=partial(_show, progress, task))
                results[name] = check._asdict()
            except OutsideError as error:
                results[name] = {"error": str(error)}
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    for name, result in () if as_json else results.items():
        typer.echo(f"{name}: {_sentence(result)}")
    raise typer.Exit(1 if any(map(_has_failed, results.values())) else 0)


@disk_app.command("gc")
def gc_command(
    path: _Folder,
    places: _Places = None,
    older_than: _Age = None,
    everything: Annotated[bool, Option("--all", help="All places that no process owns.")] = False,
    as_json: _Json = False,
) -> None:
    """Remove places with all their rows: those named, those not used for long, or all.

    Exits with 1 if some cannot be removed.
    """
    found = _find(path)
    if places:
        chosen = _choose(path, places)
    elif older_than is not None:
        before = time.time() - parse_duration(older_than, "--older-than")
        chosen = [place for place in found if place.used_at < before and not place.owned]
    elif everything:
        chosen = [place for place in found if not place.owned]
    else:
        names = ", ".join(_name(path, place) for place in found) or "none"
        raise InputError(f"expected places to remove, --older-than or --all; places here: {names}")
    results: list[dict[str, Any]] = []
    for place in chosen:
        result: dict[str, Any] = {"place": _name(path, place), "bytes": place.taken}
        try:
            place.remove()
            line = f"removed {_name(path, place)}, {format_size(place.taken)}"
        except OutsideError as error:  # the others can still be removed
            result["error"] = line = str(error)
        results.append(result)
        if not as_json:
            typer.echo(line, err="error" in result)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    elif not results:
        typer.echo("nothing to remove")
    raise typer.Exit(1 if any("error" in result for result in results) else 0)


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):  # a file may have any time
        return "unknown"


def _show(progress: Progress, task: TaskID, done: int, total: int) -> None:
    progress.update(task, completed=done, total=total)


def _find(path: Path) -> list[DiskPlace]:
    try:
        places = list(find_places(path))
        if not places and any(path.iterdir()) and not any(find_ranks(path)):
            raise InputError(
                f"{path}: expected the folder that a disk tier's `path` names, found no rank-N in it"
            )
    except OSError as error:
        raise InputError(f"{path}: expected the folder of a disk tier: {error.strerror}") from None
    return places


def _choose(path: Path, names: list[str] | None) -> list[DiskPlace]:
    """Return the places of these names; without names, all."""
    found = {_name(path, place): place for place in _find(path)}
    for name in names or ():
        if name not in found:
            raise InputError(f"{name}: expected one of {', '.join(found) or 'no places at all'}")
    return [found[name] for name in names or found if names or not found[name].is_removed]


def _row_size(header: DiskHeader) -> str:
    raw = raw_row_bytes_of(header.namespace)
    size = format_size(header.row_bytes)
    return size if raw is None else f"{size} (packed from {format_size(raw)})"


def _name(path: Path, place: DiskPlace) -> str:
    return str(place.folder.relative_to(path))


def _remark(place: DiskPlace) -> str:
    if place.is_removed:
        return "being removed, or left when that failed"
    if place.version != VERSION:
        return f"version {place.version}, not known here"
    if place.header is None:
        return "its header is damaged"
    return "in use" if place.owned else ""


def _sentence(result: dict[str, Any]) -> str:
    if "error" in result:
        return str(result["error"])
    text = f"{result['whole']:,} rows are whole, {result['bad']:,} are bad"
    text += f", {result['damaged_records']:,} damaged records" if result["damaged_records"] else ""
    return text + (f"; dropped {result['dropped']:,}" if result["dropped"] else "")


def _has_failed(result: dict[str, Any]) -> bool:
    return "error" in result or result["bad"] + result["damaged_records"] > result["dropped"]


def _to_dict(path: Path, place: DiskPlace) -> dict[str, Any]:
    header = place.header
    return {
        "place": _name(path, place),
        "rank": place.rank,
        "version": place.version,
        "namespace": header.namespace if header else None,
        "row_bytes": header.row_bytes if header else None,
        "raw_row_bytes": (raw_row_bytes_of(header.namespace) or header.row_bytes) if header else None,
        "slots": header.slots if header else None,
        "epoch": header.epoch if header else None,
        "bytes_on_disk": place.taken,
        "used_at": place.used_at,
        "in_use": place.owned,
        "removed": place.is_removed,
    }
