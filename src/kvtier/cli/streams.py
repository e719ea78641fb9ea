"""Output of commands: lines that are printed at once, and the handling of closed or full outputs.

Only the command's thread uses it.
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
    """Make stdout and stderr accept every character, and create them if the process has none."""
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
    """Print a line for people, not output: if it cannot be written, it is dropped."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _redirect(2)


def expect_reader() -> None:
    """Raise `BrokenPipeError` if the reader of our output has gone; a write would tell only later."""
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
    """Treat Ctrl-C, or a reader that went away, as the end."""
    try:
        with interruptible():
            yield
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        discard_output()


def flush_output() -> None:
    """Write pending output, if possible."""
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()


def discard_output() -> None:
    """Drop pending output: else Python tries again at its end, and complains."""
    with suppress(OSError, ValueError):  # not a real file, as in a test
        _redirect(sys.stdout.fileno())


def _redirect(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
