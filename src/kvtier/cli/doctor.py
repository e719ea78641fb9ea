"""`kvtier doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier import __version__
from kvtier.cli.checks import Check, Status, examine

__all__ = ["doctor_command"]

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.MISSING: "cyan", Status.FAIL: "bold red"}


def doctor_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine has and what is missing. Exits with 1 if kvtier cannot run here."""
    checks = examine()
    usable = not any(check.status is Status.FAIL for check in checks)
    if as_json:
        typer.echo(json.dumps(_to_dict(checks, usable), indent=2))
    else:
        _print(checks, usable)
    raise typer.Exit(0 if usable else 1)


def _to_dict(checks: list[Check], usable: bool) -> dict[str, Any]:
    plain = [asdict(check) | {"status": check.status.value} for check in checks]
    return {"usable": usable, "kvtier_version": __version__, "checks": plain}


def _print(checks: list[Check], usable: bool) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in checks:
        text = Text(check.detail)
        if check.hint:
            text.append(f"\n→ {check.hint}", style="dim")
        table.add_row(Text(check.status.value, style=_STYLES[check.status]), check.name, text)
    console = Console(highlight=False)
    console.print(table)
    console.print("kvtier can run here." if usable else "kvtier cannot run here.", style="bold")
