"""Ctrl-C and output of a command, whose streams can be closed or full.

A command mostly imports, for seconds, and has nothing to clean up. Ctrl-C then ends the process at once: an
exception inside an import may be swallowed, or come out as a traceback. Work that needs a cleanup runs
inside `interruptible`, where Ctrl-C raises `KeyboardInterrupt` as usual. Only the main thread uses this.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper

from kvtier.errors import show_text

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
    """Let Ctrl-C raise `KeyboardInterrupt` inside, and SIGTERM `SystemExit`: the work needs a cleanup."""
    if signal.getsignal(signal.SIGINT) is not _end:  # the process is not ours alone
        yield
        return
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_default:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)
        if is_default:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    raise SystemExit(128 + number)


# -- output ----------------------------------------------------------------------------------------


def open_streams() -> None:
    """Make stdout and stderr accept every character, and create them if the process has none."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # It lives as long as the process.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to stdout, at once."""
    for line in lines:
        print(line)
    sys.stdout.flush()


def remark(text: str) -> None:
    """Print a line for people to stderr; drop it if it cannot be written, because it is not output."""
    try:
        print(show_text(text), file=sys.stderr, flush=True)
    except OSError:
        _redirect(2)


def expect_reader() -> None:
    """Raise `BrokenPipeError` if the reader of our output has gone; a write would show that only later."""
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
    """Drop pending output. Otherwise Python tries to write it again when it ends, and complains."""
    with suppress(OSError, ValueError):  # not a real file, as in a test
        _redirect(sys.stdout.fileno())


def _redirect(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
