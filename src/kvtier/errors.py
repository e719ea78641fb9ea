"""Every exception kvtier raises, how errors show values, and a limit for lines that others cause.

    KVTierError
    ├── InputError             misuse: something the caller gave us is wrong
    │   ├── ConfigError        a setting (carries the path of the bad field)
    │   ├── LayoutError        engine tensors that cannot be described as pages
    │   └── ModelError         a model folder that cannot be run
    ├── OutsideError           a broken outside world
    │   ├── PoolError          host memory that cannot be had
    │   └── TransferError      bytes that did not arrive
    └── IntegrityError         our bug: a `check()` found a broken invariant

A miss, a full tier and a pending chunk are return values, never exceptions. Any thread may raise these.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SHOWN = 80


class KVTierError(Exception):
    """The root of the tree."""


class InputError(KVTierError, ValueError):
    """Something the caller gave us is wrong. The message is one line that says what to do."""


class ConfigError(InputError):
    """A setting is wrong.

    `path` is the dotted path of the bad field, e.g. `tiers[1].capacity`, and opens the message.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path


class LayoutError(InputError):
    """Engine tensors do not have a shape, stride or dtype that kvtier can move."""


class ModelError(InputError):
    """A model folder is missing a file, or describes a model that the engine cannot run."""


class OutsideError(KVTierError, RuntimeError):
    """The world outside this process did not do what we need."""


class PoolError(OutsideError):
    """Host memory for the pool could not be had or attached."""


class TransferError(OutsideError):
    """A transfer did not deliver its bytes."""


class IntegrityError(KVTierError, AssertionError):
    """An invariant of kvtier itself is broken. Please report it."""


def show_value(value: object) -> str:
    """Return a value as messages show it: its `repr`, in one line, and cut short."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of 5,000 digits, deeply nested lists, any error of a caller's class
        text = f"a value of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def show_text(text: str) -> str:
    """Return a stranger's text in one line that a terminal shows and does not obey."""
    return "".join(
        char if char.isprintable() else " " if char.isspace() else char.encode("unicode_escape").decode()
        for char in text
    )


class LogLimit:
    """Keeps a line that a client or a peer can cause as often as it likes from flooding the log.

    One line of its kind is logged in a minute, and the next one says how many were withheld. Any thread may
    use it: `if (more := limit.admit()) is not None: logger.warning(...)`.
    """

    def __init__(self, interval: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval, self._clock = interval, clock
        self._lock = threading.Lock()
        self._quiet_until = float("-inf")
        self._withheld = 0

    def admit(self) -> str | None:
        """Return the end of a line that may be logged now, or `None` if the line must be withheld.

        A withheld line is counted. The end says how many lines were withheld, and is empty if none was.
        """
        with self._lock:
            if (now := self._clock()) < self._quiet_until:
                self._withheld += 1
                return None
            withheld, self._withheld = self._withheld, 0
            self._quiet_until = now + self._interval
        return f"; and {withheld:,} more since the last such line" if withheld else ""
