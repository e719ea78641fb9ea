"""Publishers in command lines: addresses and keys.

Pure functions; a wrong value is an `InputError` of one line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from typer import Option

from kvtier.errors import InputError

if TYPE_CHECKING:
    from kvtier.events.curve import CurveClient

__all__ = ["Key", "ServerKey", "curve_client", "expect_address"]

Key = Annotated[str | None, Option("--curve-key", metavar="FILE", help="Our secret key (NAME.key_secret).")]
ServerKey = Annotated[
    str | None, Option("--curve-server", metavar="FILE|KEY", help="The publisher's public key.")
]

_ADDRESS = re.compile(r"tcp://(?:[^:/\s]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})|ipc://.+")


def expect_address(option: str, text: str) -> None:
    """Refuse a text that is not the address of a publisher."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[1] or 1) < 1 << 16:
        raise InputError(
            f"{option}: expected an address such as tcp://127.0.0.1:5557 or ipc://PATH, got {text!r}"
        )


def curve_client(key: str | None, server: str | None) -> CurveClient | None:
    """Return the keys of a subscriber, `None` if it uses none."""
    from kvtier.events.curve import CurveClient

    if (key is None) != (server is None):
        raise InputError("--curve-key and --curve-server: expected both or none")
    return CurveClient(key, server) if key is not None and server is not None else None
