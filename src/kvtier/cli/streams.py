"""Lines that flow until somebody has had enough: printed at once, ended quietly. For the thread of the command alone."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["ending_quietly", "expect_reader", "remark", "say"]


def say(lines: Iterable[str]) -> None:
    """Print lines to stdout, at once."""
    for line in lines:
        print(line)
    sys.stdout.flush()


def remark(text: str) -> None:
    """Print a line for people, which is no output."""
    print(text, file=sys.stderr, flush=True)


def expect_reader() -> None:
    """Raise `BrokenPipeError` if nobody reads our output any more; writing would tell that only with the next line."""
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
        yield
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
