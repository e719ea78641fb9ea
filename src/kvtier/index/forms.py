"""The two forms of an index, compiled and plain: which one is used, and how its budget is divided.

Any thread may call these functions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from kvtier.errors import InputError
from kvtier.index.base import MIN_COMPILED_BYTES, Table
from kvtier.index.names import Names, PlainNames
from kvtier.index.plain_table import PlainTable

FORMS = ("numba", "python")
AUTO = "auto"
Keys = Literal["engine", "xxh3"]


@dataclass(slots=True)
class Form:
    """The table and the names of an index. With the engine's own keys, `names` stays empty."""

    table: Table
    names: Names


class Allowance:
    """Bytes that several owners share: everything beside the table and the names."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` bytes in total."""
        self.limit, self.used = limit, 0

    def take(self, size: int) -> bool:
        """Take bytes; `False`, without taking any, if they are not available."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """Give bytes back."""
        self.used -= size


def choose_form(form: str | None) -> str:
    """Return the form: the parameter's, else that of `KVTIER_INDEX`; `auto` is the fastest installed one."""
    form = form or os.environ.get("KVTIER_INDEX") or AUTO
    if form not in (*FORMS, AUTO):
        raise InputError(f"index form: expected one of {', '.join((*FORMS, AUTO))}, got {form!r}")
    if form == "numba" and not find_spec("numba"):
        raise InputError("index form: numba is wanted but not installed: pip install numba")
    if form == AUTO:
        return "numba" if find_spec("numba") else "python"
    return form


def allowance_of(keys: Keys, budget: int) -> int:
    """Return how many bytes of a budget are for data beside the table and the names.

    Blocks that wait for their parent are large. An index with the engine's keys has only duplicates, which
    are few.
    """
    return budget // (8 if keys == "xxh3" else 64)


def make_form(form: str, keys: Keys, budget: int) -> Form:
    """Make a table, and names if its keys need them.

    A name takes one and a half times the bytes of a block.
    """
    left = budget - allowance_of(keys, budget)
    table_budget = left if keys == "engine" else left * 2 // 5
    if form == "python":
        plain = PlainTable(table_budget)
        return Form(plain, PlainNames(plain, left - table_budget))
    if table_budget < MIN_COMPILED_BYTES:
        least = MIN_COMPILED_BYTES * budget // table_budget + 1 if table_budget else MIN_COMPILED_BYTES * 3
        raise InputError(
            f"budget: expected at least {least} bytes for a compiled index with {keys} keys, got {budget}"
        )
    from kvtier.index.compiled.names import CompiledNames
    from kvtier.index.compiled.table import CompiledTable

    table = CompiledTable(table_budget)
    if keys == "engine":
        return Form(table, PlainNames(table, 0))
    return Form(table, CompiledNames(table, left - table_budget))
