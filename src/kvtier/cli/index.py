"""`kvtier index`: which worker holds which prefix, as a service for routers.

SIGINT and SIGTERM end it with exit code 0. Belongs to the main thread.
"""

from __future__ import annotations

import re
from enum import StrEnum
from threading import Timer
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from kvtier.cli.events import Key, ServerKey, curve_client, expect_address
from kvtier.cli.streams import remark
from kvtier.config import format_size, parse_size
from kvtier.errors import InputError

if TYPE_CHECKING:
    from kvtier.index.service import Registration


_SLOW_START = 3.0
"""Seconds after which a start that takes so long is explained; most take less than one."""
_LEAST_BUDGET = 4 << 20
"""With less, an index has room for hardly any block, or cannot be compiled."""

index_app = typer.Typer(help="Who holds which prefix, for routers to ask.")


class BlockKeys(StrEnum):
    """The hash that identifies blocks."""

    XXH3 = "xxh3"
    ENGINE = "engine"


class Counting(StrEnum):
    """How many removals end a block that was stored twice: as many as stores, or one."""

    COUNT = "count"
    SET = "set"


_Host = Annotated[str, Option(help="Listen on this address.")]
_Port = Annotated[int, Option(min=0, max=65535, help="Listen on this port; 0 takes a free one.")]
_Keys = Annotated[BlockKeys, Option(help="Know blocks by Dynamo's hash of tokens, or by the engine's.")]
_Budget = Annotated[str, Option(metavar="SIZE", help="Memory for the blocks of one model.")]
_Counting = Annotated[Counting, Option(help="Whether a block stored twice must be removed twice.")]
_Follow = Annotated[
    list[str] | None,
    Option(metavar="ID[:RANK]=ENDPOINT[,REPLAY]", help="Follow this publisher from the start; repeatable."),
]
_Model = Annotated[str, Option(help="The model of those publishers.")]
_Block = Annotated[
    int | None,
    Option(metavar="TOKENS", min=1, max=1 << 20, help="Their block size; the stream says it too."),
]
_AllowHost = Annotated[
    list[str] | None,
    Option(metavar="NAME", help="Clients may call the server by this name ('*': any); repeatable."),
]
_AllowIpc = Annotated[bool, Option("--allow-ipc", help="Clients may register ipc:// endpoints.")]
_TokenFile = Annotated[
    str | None, Option(metavar="FILE", help="Changes must carry the bearer token that is in this file.")
]


@index_app.command("serve")
def serve_command(
    host: _Host = "127.0.0.1",
    port: _Port = 8090,
    keys: _Keys = BlockKeys.XXH3,
    budget: _Budget = "1GiB",
    counting: _Counting = Counting.COUNT,
    follow: _Follow = None,
    model_name: _Model = "default",
    block_size: _Block = None,
    allow_host: _AllowHost = None,
    allow_ipc: _AllowIpc = False,
    token_file: _TokenFile = None,
    curve_key: Key = None,
    curve_server: ServerKey = None,
) -> None:
    """Follow publishers and answer over HTTP which of them hold a prompt.

    It serves /register, /unregister, /query, /query_by_hash, /workers, /models, /prefixes, /dump, /health
    and /metrics, and a page with the fleet at /.
    """
    import logging

    from kvtier.index.http import Access, read_token
    from kvtier.index.server import serve
    from kvtier.index.service import Settings

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings(
        keys=keys.value,
        budget=_budget(budget),
        counting=counting.value,
        curve=curve_client(curve_key, curve_server),
    )
    access = Access(
        hosts=tuple(allow_host or ()),
        token=None if token_file is None else read_token(token_file),
        ipc=allow_ipc,
    )
    slow = Timer(_SLOW_START, lambda: remark("not ready yet: a first start on a machine compiles the index"))
    slow.daemon = True
    slow.start()

    def on_ready(url: str) -> None:
        slow.cancel()
        slow.join()  # it may be printing
        remark(f"serving on {url}")

    try:
        serve(
            host,
            port,
            settings=settings,
            access=access,
            follow=[_registration(text, model_name, block_size) for text in follow or ()],
            on_ready=on_ready,
        )
    finally:
        slow.cancel()


def _budget(text: str) -> int:
    budget = parse_size(text, "--budget")
    if budget < _LEAST_BUDGET:
        raise InputError(f"--budget: expected at least {format_size(_LEAST_BUDGET)}, got {text!r}")
    return budget


def _registration(text: str, model: str, block_size: int | None) -> Registration:
    """Read one `--follow`."""
    from kvtier.index.service import GroupKey, Registration

    match = re.fullmatch(r"([^=:]+)(?::(\d{1,9}))?=([^,]+)(?:,([^,]+))?", text)
    if match is None:
        raise InputError(f"--follow: expected ID[:RANK]=ENDPOINT[,REPLAY], got {text!r}")
    name, rank, endpoint, replay = match.groups()
    for address in filter(None, (endpoint, replay)):
        expect_address("--follow", address)
    number = None if rank is None else int(rank)
    return Registration(GroupKey(model), name, number, endpoint, replay, block_size=block_size)
