"""`kvtier config check`: a file of settings as kvtier understands it, or one line about what is wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from kvtier.config import CPUConfig, DiskConfig, KVTierConfig, format_size
from kvtier.errors import ConfigError
from kvtier.policies import make_policy

__all__ = ["check_command", "config_app"]

config_app = typer.Typer(help="Look at a file of settings.")

_File = Annotated[
    Path,
    Argument(
        metavar="FILE",
        help="JSON or TOML (*.toml): settings, or all of what vLLM's --kv-transfer-config takes.",
    ),
]
_SIZES = ("capacity", "staging")


class _Line(NamedTuple):
    """One setting for display. `default` is `None` if the setting is required."""

    path: str
    value: object
    default: object


@config_app.command("check")
def check_command(
    file: _File,
    as_json: Annotated[bool, Option("--json", help="Print what was understood as JSON.")] = False,
) -> None:
    """Read a file of settings and print all that kvtier makes of it. Exits with 2 if something is wrong."""
    config = KVTierConfig.from_file(file)
    _expect_policy(file, "cpu.policy", config.cpu.policy)
    for at, tier in enumerate(config.tiers):
        if isinstance(tier, DiskConfig):
            _expect_policy(file, f"tiers[{at}].disk.policy", tier.policy)
    if as_json:
        typer.echo(json.dumps(config.to_dict(), indent=2))
    else:
        _print(config)


def _expect_policy(file: Path, path: str, name: str) -> None:
    if ":" in name:
        sys.path.insert(0, os.getcwd())  # so that a policy in this folder can be named
    try:
        make_policy(name, capacity=1)
    except ConfigError as error:
        problem = str(error).removeprefix(f"{error.path}: ")
        located = ConfigError(path, problem)
        located.args = (f"{file}: {located}",)
        raise located from None


def _print(config: KVTierConfig) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for line in _lines(config):
        text = Text(_write(line.path, line.value), style="dim" if line.value == line.default else "")
        table.add_row(line.path, text.append(" (default)" if line.value == line.default else ""))
    Console(highlight=False).print(table)


def _lines(config: KVTierConfig) -> Iterator[_Line]:
    """Yield every setting that is set, in the order of the documentation."""
    parts: tuple[tuple[str, CPUConfig | KVTierConfig], ...] = (("cpu.", config.cpu), ("", config))
    for prefix, part in parts:
        for setting in fields(part):
            value = getattr(part, setting.name)
            if setting.name != "cpu" and value not in (None, ()):
                default = None if setting.default is MISSING else setting.default
                yield _Line(prefix + setting.name, value, default)


def _write(path: str, value: object) -> str:
    """Write a value exactly, and readable for people."""
    name = path.rpartition(".")[2]
    if isinstance(value, bool):
        return "true" if value else "false"
    if name in _SIZES and isinstance(value, int):
        return f"{format_size(value)}, {value:,} bytes" if value else "0: nothing is kept"
    return (
        f"{value:g} s"
        if name.endswith("_deadline")
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
