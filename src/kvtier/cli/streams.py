"""Output of commands: lines that are printed at once, and what becomes of them when nobody reads or nothing
can be written.

For the thread of the command alone.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper

from kvtier.cli.interrupts import interruptible

__all__ = [
    "discard_output",
    "ending_quietly",
    "expect_reader",
    "flush_output",
    "open_streams",
    "remark",
    "say",
]


def open_streams() -> None:
    """Give the process an output and an error stream that take every character, also where it was started
    without.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # It lives as long as the process.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(lines: Iterable[str]) -> None:
    """Print lines to stdout, at once."""
    for line in lines:
        print(line)
    sys.stdout.flush()


def remark(text: str) -> None:
    """Print a line for people, which is no output: where it cannot be written, it is left out."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _redirect(2)


def expect_reader() -> None:
    """Raise `BrokenPipeError` if nobody reads our output any more; writing would tell that only with the
    next line.
    """
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a real file, as in a test
        return
    poller = select.poll()
    poller.register(descriptor, 0)
    if any(events & select.POLLERR for _, events in poller.poll(0)):
        raise BrokenPipeError


@contextmanager
def ending_quietly() -> Iterator[None]:
    """Take Ctrl-C, or a reader that went away, for the end."""
    try:
        with interruptible():
            yield
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        discard_output()


def flush_output() -> None:
    """Write what has not been written, if that is possible."""
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()


def discard_output() -> None:
    """Give up what has not been written: Python tries once more when it ends, and would complain."""
    with suppress(OSError, ValueError):  # not a real file, as in a test
        _redirect(sys.stdout.fileno())


def _redirect(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
