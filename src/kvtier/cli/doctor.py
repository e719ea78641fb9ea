"""`kvtier doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from kvtier import __version__
from kvtier.cli.checks import Check, Status, examine
from kvtier.cli.disk_checks import examine_disk, read_folder
from kvtier.config import DiskConfig, KVTierConfig

__all__ = ["doctor_command"]

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.MISSING: "cyan", Status.FAIL: "bold red"}


_Config = Annotated[
    Path | None,
    Option(metavar="FILE", help="Settings, as `kvtier config check` takes them, whose disk is looked at."),
]
_Disk = Annotated[
    Path | None,
    Option(metavar="FOLDER", help="The folder of a disk tier to look at.", parser=read_folder),
]


def doctor_command(
    config: _Config = None,
    disk: _Disk = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine has and what is missing.

    Exits with 1 if kvtier, or the disk asked about, cannot be used.
    """
    of_disk = _examine_config(config) if config is not None else []
    of_disk += examine_disk(disk) if disk is not None else []
    of_machine = examine()
    runs, disk_works = _is_usable(of_machine), _is_usable(of_disk)
    if as_json:
        typer.echo(json.dumps(_to_dict([*of_machine, *of_disk], runs and disk_works), indent=2))
    else:
        _print([*of_machine, *of_disk], _verdict(runs, disk_works))
    raise typer.Exit(0 if runs and disk_works else 1)


def _examine_config(file: Path) -> list[Check]:
    """Look at the disk tier of a file of settings, if it has one."""
    disks = [tier for tier in KVTierConfig.from_file(file).tiers if isinstance(tier, DiskConfig)]
    if not disks:
        return [Check("disk", Status.MISSING, f"{file} has no disk tier", "see docs/tiers.md")]
    return [check for disk in disks for check in examine_disk(Path(disk.path), disk.capacity)]


def _is_usable(checks: list[Check]) -> bool:
    return not any(check.status is Status.FAIL for check in checks)


def _verdict(runs: bool, disk_works: bool) -> str:
    if not runs:
        return "kvtier cannot run here."
    return "kvtier can run here." if disk_works else "kvtier can run here, but not with this disk."


def _to_dict(checks: list[Check], usable: bool) -> dict[str, Any]:
    plain = [asdict(check) | {"status": check.status.value} for check in checks]
    return {"usable": usable, "kvtier_version": __version__, "checks": plain}


def _print(checks: list[Check], verdict: str) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in checks:
        text = Text(check.detail)
        if check.hint:
            text.append(f"\n→ {check.hint}", style="dim")
        table.add_row(Text(check.status.value, style=_STYLES[check.status]), check.name, text)
    console = Console(highlight=False)
    console.print(table)
    console.print(verdict, style="bold")
