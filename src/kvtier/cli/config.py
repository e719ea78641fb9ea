"""`kvtier config check`: a file of settings as kvtier understands it, or one line about what is wrong."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from kvtier.cli.lmcache import Translation, translate_file
from kvtier.cli.streams import remark
from kvtier.config import CPUConfig, DiskConfig, KVTierConfig, SharesConfig, TierConfig, format_size
from kvtier.errors import ConfigError
from kvtier.policies import make_policy

config_app = typer.Typer(help="Look at a file of settings.")

_File = Annotated[
    Path,
    Argument(
        metavar="FILE",
        help="JSON or TOML (*.toml): settings, or all of what vLLM's --kv-transfer-config takes.",
    ),
]
_SIZES = {
    "capacity": "nothing is kept",
    "segment": "none of this process's memory is given",
    "staging": "none",
    "write_limit": "no limit",
}
"""The settings that are sizes, with the meaning of 0."""
_Part = KVTierConfig | CPUConfig | SharesConfig | TierConfig


class _Line(NamedTuple):
    """One setting for display."""

    path: str
    value: object
    is_default: bool


@config_app.command("check")
def check_command(
    file: _File,
    as_json: Annotated[bool, Option("--json", help="Print what was understood as JSON.")] = False,
) -> None:
    """Read a file of settings and print all that kvtier makes of it. Exits with 2 if something is wrong."""
    if (translation := _translate_lmcache(file)) is not None:
        remark(f"kvtier: {file}: these settings are LMCache's. kvtier has these instead:")
        for line in translation.remarks:
            remark(f"  {line}")
        typer.echo(json.dumps(translation.settings, indent=2))
        raise typer.Exit(2)
    config = KVTierConfig.from_file(file)
    _expect_policy(file, "cpu.policy", config.cpu.policy)
    for at, tier in enumerate(config.tiers):
        if isinstance(tier, DiskConfig):
            _expect_policy(file, f"tiers[{at}].disk.policy", tier.policy)
    if as_json:
        typer.echo(json.dumps(config.to_dict(), indent=2))
    else:
        _print(config)


def _translate_lmcache(file: Path) -> Translation | None:
    """Return settings of LMCache in our words. Errors name the file."""
    try:
        return translate_file(file)
    except ConfigError as error:
        error.args = (f"{file}: {error}",)
        raise


def _expect_policy(file: Path, path: str, name: str) -> None:
    """Make a policy as an engine would, and refuse one that cannot be made.

    A policy in the current folder is found, too; a remark says that an engine may not look there.
    """
    here, looks_here = os.getcwd(), {"", os.getcwd()} & {*sys.path}
    if ":" in name and not looks_here:
        sys.path.append(here)
    try:
        make_policy(name, capacity=1)
    except ConfigError as error:
        problem = str(error).removeprefix(f"{error.path}: ")
        located = ConfigError(path, problem)
        located.args = (f"{file}: {located}",)
        raise located from None
    module = sys.modules.get(name.partition(":")[0])
    if not looks_here and str(getattr(module, "__file__", None)).startswith(os.path.join(here, "")):
        remark(
            f"kvtier: {path}: {name} is in the current folder, where an engine such as `vllm serve` does"
            f" not look; start it with PYTHONPATH={shlex.quote(here)}"
        )


def _print(config: KVTierConfig) -> None:
    """Print a line for each setting, under the path that errors name. Nothing is wrapped or cut off."""
    parts: list[tuple[str, _Part]] = [("cpu.", config.cpu), ("", config)]
    parts += [("shares.", config.shares)] if config.shares is not None else []
    parts += [(f"tiers[{at}].{tier.kind}.", tier) for at, tier in enumerate(config.tiers)]
    lines = [line for prefix, part in parts for line in _lines(prefix, part)]
    width = max(len(line.path) for line in lines)
    console = Console(highlight=False)
    for line in lines:
        text = Text(f"{line.path:{width}}  ")
        text.append(
            _write(line.path, line.value) + (" (default)" if line.is_default else ""),
            style="dim" if line.is_default else "",
        )
        console.print(text, soft_wrap=True)


def _lines(prefix: str, part: _Part) -> Iterator[_Line]:
    """Yield every setting of a part that is set, in the order of the documentation."""
    required = {setting.name for setting in fields(part) if setting.default is MISSING}
    # Some defaults follow from required settings.
    plain = type(part)(**{name: getattr(part, name) for name in required})
    for setting in fields(part):
        value = getattr(part, setting.name)
        if setting.name not in ("cpu", "shares", "tiers") and value not in (None, ""):
            is_default = setting.name not in required and value == getattr(plain, setting.name)
            yield _Line(prefix + setting.name, value, is_default)


def _write(path: str, value: object) -> str:
    """Write a value exactly, and readable for people."""
    name = path.rpartition(".")[2]
    if isinstance(value, bool):
        return "true" if value else "false"
    if name in _SIZES and isinstance(value, int):
        return f"{format_size(value)}, {value:,} bytes" if value else f"0: {_SIZES[name]}"
    if name.endswith("_deadline") or name in ("ttl", "longest_keep"):
        return f"{value:g} s"
    return f"{value:,}" if isinstance(value, int) else str(value)
