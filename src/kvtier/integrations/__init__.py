"""kvtier inside other engines: one module or package per engine; only these import an engine.

An integration only translates; it decides nothing. Its engine imports it, kvtier never does.
"""

from __future__ import annotations

import re

from kvtier.errors import InputError

__all__ = ["expect_version"]


def expect_version(engine: str, installed: str, at_least: str, below: str) -> None:
    """Refuse a version of an engine that this kvtier was not made for, in one line."""
    if not _numbers(at_least) <= _numbers(installed) < _numbers(below):
        problem = (
            f"this kvtier runs inside {engine} >={at_least},<{below}, but {engine} {installed} is installed"
        )
        raise InputError(f"{problem}; install {engine}>={at_least},<{below} or another kvtier")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `0.32.1rc2+cpu` is `(0, 32, 1)`."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
