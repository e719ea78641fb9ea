"""The two forms of an index, compiled and plain, and which one is used."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal

from kvtier.errors import InputError
from kvtier.index.base import Table
from kvtier.index.names import Names, PlainNames
from kvtier.index.plain import PlainTable

__all__ = ["FORMS", "Keys", "choose_form", "make_form"]

FORMS = ("numba", "python")
Keys = Literal["engine", "xxh3"]
_MIN_TABLE = 256 << 10  # bytes that a compiled table cannot do without


def choose_form(form: str | None) -> str:
    """Return the form that is wanted: the parameter's, else that of `KVTIER_INDEX`, else the fastest there is."""
    form = form or os.environ.get("KVTIER_INDEX") or ("numba" if find_spec("numba") else "python")
    if form not in FORMS:
        raise InputError(f"index form: expected one of {', '.join(FORMS)}, got {form!r}")
    if form == "numba" and not find_spec("numba"):
        raise InputError("index form: numba is wanted but not installed: pip install numba")
    return form


def make_form(form: str, keys: Keys, budget: int) -> tuple[Table, Names | None]:
    """Make a table, and names if its keys need them. A name takes half as much again as a block."""
    table_budget = budget if keys == "engine" else budget * 2 // 5
    if form == "numba" and table_budget < _MIN_TABLE:
        least = _MIN_TABLE if keys == "engine" else _MIN_TABLE * 5 // 2
        raise InputError(f"budget: expected at least {least} bytes for a compiled index with {keys} keys, got {budget}")
    if form == "python":
        plain = PlainTable(table_budget)
        return plain, PlainNames(plain, budget - table_budget) if keys == "xxh3" else None
    from kvtier.index.compiled.names import CompiledNames
    from kvtier.index.compiled.table import CompiledTable

    table = CompiledTable(table_budget)
    return table, CompiledNames(table, budget - table_budget) if keys == "xxh3" else None
