"""`Hints`: what a client says about the KV of a request; and the tenant that a request belongs to.

A client gives hints in `kv_transfer_params["kvtier"]`. They order which chunks leave a full tier; they never
pin a chunk. A client may send anything: a value that is not valid is ignored, and costs one line in the log
a minute at most. Everything here is pure, but for that line; any thread may call it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from kvtier.config_fields import Reader, one_of, parse_duration, read_flag
from kvtier.errors import InputError, LogLimit, show_value
from kvtier.policies.base import ENDINGS

logger = logging.getLogger(__name__)

_PATH = "kv_transfer_params.kvtier"
_PRIORITIES = ("low", "normal", "high")
_LONGEST_TEXT = 32
"""No valid value is longer, and a pattern takes long to refuse a long text."""
_VERY_LONG = 1e7
"""Seconds. A number that is larger means as long as may be, and need not be read exactly."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client says about a request. The default says nothing."""

    keep: float = 0.0
    """The seconds after the request's end for which its chunks leave after others."""
    drop: bool = False
    """Whether nobody comes back for what the request stored, so that it leaves before others."""
    priority: int = 0
    """-1 for chunks that leave before others, 1 for chunks that are kept for as long as may be."""
    ending: str | None = None
    """How the request ends, if the client knows it: `tool` or `turn`."""

    @property
    def orders(self) -> bool:
        """Whether these hints say when chunks should leave."""
        return self.drop or self.keep > 0 or self.priority < 0


NO_HINTS = Hints()


def read_hints(params: Mapping[str, Any] | None, longest_keep: float, log_limit: LogLimit) -> Hints:
    """Return the hints among a request's parameters; those that are absent or not valid say nothing.

    No time to keep is longer than `longest_keep`. `log_limit` bounds the lines about what is not valid.
    """
    given = None if params is None else params.get("kvtier")
    if not isinstance(given, dict):
        return NO_HINTS
    hints: dict[str, Any] = {}
    for name, read in _READERS.items():
        if (value := given.get(name)) is not None:
            try:
                hints[name] = read(f"{_PATH}.{name}", _expect_short(f"{_PATH}.{name}", value))
            except InputError as error:
                _log_ignored(log_limit, str(error))
    unknown = next((name for name in given if name != "explain" and name not in _READERS), None)
    if unknown is not None:
        expected = f"expected explain, {', '.join(_READERS)}"
        _log_ignored(log_limit, f"{_PATH}: {expected}, got {show_value(unknown)}")
    if not hints:
        return NO_HINTS
    if hints.get("priority") == 1:
        hints["keep"] = longest_keep
    hints["keep"] = 0.0 if hints.get("drop") else min(hints.get("keep", 0.0), longest_keep)
    return Hints(**hints)


def _log_ignored(log_limit: LogLimit, problem: str) -> None:
    if (more := log_limit.admit()) is not None:
        logger.warning("%s; it is ignored%s", problem, more)


def _expect_short(path: str, value: object) -> object:
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        raise InputError(f"{path}: expected a word or a time, got {show_value(value)}")
    return value


def _read_keep(path: str, value: object) -> float:
    if isinstance(value, int | float) and value > _VERY_LONG:
        return _VERY_LONG
    return parse_duration(value, path)


def _read_priority(path: str, value: object) -> int:
    if type(value) is int and -1 <= value <= 1:
        return value
    return _PRIORITIES.index(one_of(*_PRIORITIES)(path, value)) - 1


_READERS: dict[str, Reader] = {
    "keep": _read_keep,
    "drop": read_flag,
    "priority": _read_priority,
    "ending": one_of(*ENDINGS[1:]),
}


def tenant_of(cache_salt: object) -> str:
    """Return the name of the tenant that uses a cache salt: a digest, which logs and metrics may show.

    Requests without a salt are one tenant, which has an empty name.
    """
    if not isinstance(cache_salt, str) or not cache_salt:
        return ""
    return sha256(cache_salt.encode(errors="surrogatepass")).hexdigest()[:12]
