"""Ctrl-C takes effect between two steps of an engine, not inside a step, which would leave its state half
written.

A second Ctrl-C is not held back, because a step may hang. Only Python's own handler is replaced, and only on
the main thread, where signals arrive; a program's own handler stays.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the block has ended, and raise `KeyboardInterrupt` then."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pending: list[int] = []

    def hold(number: int, frame: object) -> None:
        if pending:
            raise KeyboardInterrupt
        pending.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt
