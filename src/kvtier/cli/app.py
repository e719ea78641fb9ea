"""Builds the tree of `kvtier` commands, runs a command line, and explains a wrong one."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from kvtier import __version__
from kvtier.cli.bench import bench_command
from kvtier.cli.config import config_app
from kvtier.cli.demo import demo_command
from kvtier.cli.disk import disk_app
from kvtier.cli.doctor import doctor_command
from kvtier.cli.events import events_app
from kvtier.cli.index import index_app
from kvtier.cli.simulate import simulate_command
from kvtier.cli.size import size_command
from kvtier.cli.streams import INTERRUPTED, remark
from kvtier.cli.tiers import tiers_app
from kvtier.cli.top import top_command

app = typer.Typer(name="kvtier", add_completion=False, help="Keeps the KV cache that a GPU forgets.")
app.command("bench")(bench_command)
app.command("demo")(demo_command)
app.command("doctor")(doctor_command)
app.command("simulate")(simulate_command)
app.command("size")(size_command)
app.command("top")(top_command)
app.add_typer(config_app, name="config")
app.add_typer(disk_app, name="disk")
app.add_typer(events_app, name="events")
app.add_typer(index_app, name="index")
app.add_typer(tiers_app, name="tiers")

# typer's exception for a wrong command line is public only as the base of a subclass.
_UsageError: Any = typer.BadParameter.__mro__[1]


def run(arguments: list[str]) -> int:
    """Run a command line up to its last byte of output, and return the exit code."""
    try:
        code = typer.main.get_command(app)(
            args=arguments, prog_name="kvtier", standalone_mode=False, obj=arguments
        )
        sys.stdout.flush()
    except _UsageError as error:
        words, command = _find_command(arguments)
        remark(
            " ".join(
                f"{words}: {error.format_message()}{_explain(error, command)} (see {words} --help)".split()
            )
        )
        return 2
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == INTERRUPTED:  # some versions of typer return it, others raise
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _find_command(arguments: list[str]) -> tuple[str, Any]:
    """Return the words that name a command, and the command; not every typer error knows them."""
    words, command = ["kvtier"], typer.main.get_command(app)
    for word in arguments:
        commands = getattr(command, "commands", {})
        if word in commands:
            command = commands[word]
            words.append(word)
    return " ".join(words), command


def _explain(error: Any, command: Any) -> str:
    """Describe the value of an option that came without one."""
    name = getattr(error, "option_name", None)
    takes = [option.help for option in command.params if name in option.opts and option.help]
    return f" It takes: {takes[0]}" if takes else ""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


def _show_help(context: typer.Context) -> None:
    """Show the help if no command was named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _group in (config_app, disk_app, events_app, index_app, tiers_app):
    _group.callback(invoke_without_command=True)(_show_help)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    _show_help(context)
