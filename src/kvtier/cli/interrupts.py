"""Ctrl-C in the `kvtier` command: it ends the process at once, or raises where work is to be put in order.

A command mostly imports, for seconds, and has nothing to put in order. Ctrl-C then ends the process at once:
an exception that falls into an import may be swallowed, or come out as a traceback. What must be put in
order runs inside `interruptible`, where Ctrl-C raises `KeyboardInterrupt` as usual. For the main thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["INTERRUPTED", "end_at_once", "interruptible"]

INTERRUPTED = 130
"""The exit code that shells give to SIGINT."""


def end_at_once() -> None:
    """From here on Ctrl-C ends the process.

    Where it is ignored, as in the background of a script, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: object) -> None:
    try:
        os.write(2, b"kvtier: interrupted\n")
    finally:
        os._exit(INTERRUPTED)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` inside: there is something to put in order first."""
    if signal.getsignal(signal.SIGINT) is not _end:  # of a process that is not ours alone
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)
