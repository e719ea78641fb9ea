"""Ctrl-C in the `kvtier` command: it ends the process at once, or raises while there is work to clean up.

A command mostly imports, for seconds, and has nothing to clean up. Ctrl-C then ends the process at once: an
exception inside an import may be swallowed, or come out as a traceback. Work that needs a cleanup runs
inside `interruptible`, where Ctrl-C raises `KeyboardInterrupt` as usual. For the main thread.
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
    """Make Ctrl-C end the process from here on.

    If it is ignored, as in the background of a script, it stays ignored.
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
    """Let Ctrl-C raise `KeyboardInterrupt` inside, because the work needs a cleanup."""
    if signal.getsignal(signal.SIGINT) is not _end:  # the process is not ours alone
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)
