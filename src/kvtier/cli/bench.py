"""`kvtier bench`: a user's own server, measured with and without loading.

It asks before it sends load, and prints what was measured so far if it is interrupted. Belongs to the main
thread.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Context, Option

from kvtier.bench.client import Server
from kvtier.bench.prompts import read_prompts
from kvtier.bench.result import BenchResult
from kvtier.bench.run import Bench, BenchSettings
from kvtier.cli.demo import expect_writable, write_whole
from kvtier.cli.display import print_rows
from kvtier.cli.scrape import read_url
from kvtier.cli.streams import INTERRUPTED, interruptible, remark
from kvtier.errors import InputError
from kvtier.report.bench import SIDES, render_bench

_MOST_PROMPTS = 1000

_Url = Annotated[str, Argument(metavar="URL", help="HOST:PORT, or the address of /v1, of a vLLM server.")]
_Model = Annotated[str | None, Option(help="The model; by default the first that the server lists.")]
_Prompts = Annotated[
    Path | None, Option(metavar="FILE", help="A text that is one prompt, or a .jsonl with one on each line.")
]
_Pairs = Annotated[int, Option(min=1, max=_MOST_PROMPTS, help="Pairs of requests.")]
_Tokens = Annotated[int, Option(min=32, max=1 << 20, help="Tokens of the documents it brings itself.")]
_Answer = Annotated[int, Option(min=1, max=4096, help="Tokens of each answer.")]
_Concurrency = Annotated[int, Option(min=1, max=64, help="Requests at a time.")]
_Seconds = Annotated[float, Option(min=1, max=86_400, help="End after so many seconds.")]
_Filler = Annotated[
    int | None,
    Option(min=0, help="Tokens that push prompts out of the server's own cache; default: its size."),
]
_Chat = Annotated[bool, Option("--chat", help="Send /v1/chat/completions instead of /v1/completions.")]
_Token = Annotated[
    Path | None, Option(metavar="FILE", help="The bearer token that the server expects is in this file.")
]
_Html = Annotated[Path | None, Option(metavar="FILE", help="Write a page to send on.")]


def bench_command(
    context: Context,
    url: _Url,
    model: _Model = None,
    prompts: _Prompts = None,
    pairs: _Pairs = 8,
    tokens: _Tokens = 1024,
    answer_tokens: _Answer = 32,
    concurrency: _Concurrency = 1,
    max_seconds: _Seconds = 600.0,
    filler_tokens: _Filler = None,
    chat: _Chat = False,
    token_file: _Token = None,
    html: _Html = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of the table.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Send load without asking.")] = False,
) -> None:
    """Measure a running server: pairs of requests with and without loading KV from kvtier.

    It sends load, says how much, and asks before it does.
    """
    from kvtier.index.http import read_token

    expect_writable("--html", html)
    settings = BenchSettings(
        model=model,
        prompts=() if prompts is None else tuple(read_prompts(prompts)),
        pairs=pairs,
        tokens=tokens,
        answer_tokens=answer_tokens,
        concurrency=min(concurrency, pairs),
        max_seconds=max_seconds,
        filler_tokens=filler_tokens,
        chat=chat,
    )
    base = read_url(url).removesuffix("/metrics").rstrip("/").removesuffix("/v1")
    bench = Bench(Server(base, None if token_file is None else read_token(token_file)), settings, remark)
    remark(bench.inspect())
    if not yes:
        _confirm()
    try:
        with interruptible():
            bench.run()
    except KeyboardInterrupt:
        bench.result.ended_early = "Interrupted"
    finally:
        if bench.result.pairs:
            _show(bench.result, as_json, html, ["kvtier", *(context.obj or ())])
    if bench.result.ended_early == "Interrupted":
        raise typer.Exit(INTERRUPTED)


def _confirm() -> None:
    """Return if the user agrees to the load."""
    if not sys.stdin.isatty():
        raise InputError("expected --yes, because there is no terminal on which to ask")
    typer.confirm("Send it?", err=True, abort=True)


def _show(result: BenchResult, as_json: bool, html: Path | None, command: list[str]) -> None:
    """Print the table or the JSON, and write the page."""
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        console = Console(highlight=False)
        print_rows(console, [words for _, words in SIDES], list(result.rows()))
        for sentence in result.remarks():
            console.print(Text(sentence))
    if html is not None:
        write_whole(html, render_bench(result, command=command))
        remark(f"page: {html}")
