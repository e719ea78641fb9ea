"""The `kvtier` command.

    0   done; commands that run until they are stopped end so with Ctrl-C, too
    1   the world or kvtier failed: tokens differ, memory could not be had, a check found our own bug
    2   what was asked for is wrong: one line on stderr says what, and nothing was started or is left behind
  130   interrupted

Errors are one line without a traceback; `--debug` shows it. Commands import what they need when they run, so that
`kvtier doctor` and `kvtier --version` work without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvtier import __version__
from kvtier.cli.demo import demo_command
from kvtier.cli.doctor import doctor_command
from kvtier.cli.events import events_app
from kvtier.cli.index import index_app
from kvtier.errors import InputError, IntegrityError, KVTierError

__all__ = ["app", "main"]

app = typer.Typer(name="kvtier", add_completion=False, help="Keeps the KV cache that a GPU forgets.")
app.command("demo")(demo_command)
app.command("doctor")(doctor_command)
app.add_typer(events_app, name="events")
app.add_typer(index_app, name="index")

# What typer raises for a wrong command line has no public name but that of a subclass.
_UsageError: Any = typer.BadParameter.__mro__[1]
_INTERRUPTED = 130


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process, and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = typer.main.get_command(app)(args=arguments, prog_name="kvtier", standalone_mode=False, obj=arguments)
        if code == _INTERRUPTED:  # some versions of typer return it, others raise
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except _UsageError as error:
        where = error.ctx.command_path if error.ctx else "kvtier"
        return _fail(f"{where}: {error.format_message()} (see {where} --help)", 2)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("kvtier: interrupted", _INTERRUPTED)
    except (KVTierError, MemoryError) as error:
        if "--debug" in arguments:
            raise
        return _fail(f"kvtier: {_explain(error)}", 2 if isinstance(error, InputError) else 1)


def _explain(error: KVTierError | MemoryError) -> str:
    if isinstance(error, IntegrityError):
        return f"a bug in kvtier, please report it: {error}"
    return f"not enough memory: {error}" if isinstance(error, MemoryError) else str(error)


def _fail(message: str, code: int) -> int:
    """Say what went wrong in one line."""
    print(" ".join(message.split()), file=sys.stderr)
    return code
