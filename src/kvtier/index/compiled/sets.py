"""The compiled table's holder sets: a block's holders, as a row of bits that many blocks share.

A row has a word per area for 64 workers. Sets are interned: equal rows have equal numbers; set 0 is empty.
Clearing a worker removes its bits from every row and interns all rows again; `alias` then maps a set to its
equal, or to 0 if it became empty. `refs` counts the cells with each number; an unused number may be given
to another set.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.index.compiled.cells import DEAD, FREE, mix
from kvtier.index.compiled.jit import jit

_ONE, _ZERO = np.uint64(1), np.uint64(0)
_NO_SET = np.int64(-1)


@jit
def _seat(rows: Any, intern: Any, row: Any) -> Any:
    """Return the position in `intern` of a row's number, or where it belongs."""
    mixed = _ZERO
    for word in range(rows.shape[1]):
        mixed = mix(mixed ^ rows[row, word], word)
    mask = np.uint64(intern.size - 1)
    at = mixed & mask
    while intern[at] != 0:
        number, equal = intern[at], True
        for word in range(rows.shape[1]):
            if rows[number, word] != rows[row, word]:
                equal = False
                break
        if equal:
            break
        at = (at + _ONE) & mask
    return at


@jit
def toggled(
    meta: Any, rows: Any, alias: Any, intern: Any, free: Any, holders: Any, word: Any, bit: Any
) -> Any:
    """Return the set that differs from `holders` in one bit; -1 if no number is free for it."""
    scratch, empty = rows.shape[0] - 1, True
    for at in range(rows.shape[1]):
        rows[scratch, at] = rows[holders, at] ^ bit if at == word else rows[holders, at]
        empty = empty and rows[scratch, at] == 0
    if empty:
        return np.int64(0)
    seat = _seat(rows, intern, scratch)
    if intern[seat] != 0:
        return np.int64(intern[seat])
    if meta[FREE] == 0:
        return _NO_SET
    meta[FREE] -= 1
    number = free[meta[FREE]]
    rows[number] = rows[scratch]
    intern[seat] = alias[number] = number
    return np.int64(number)


@jit
def intern_all(meta: Any, rows: Any, refs: Any, alias: Any, intern: Any, free: Any) -> None:
    """Intern all sets again after rows changed: equal sets get an alias, unused numbers become free."""
    intern[:] = 0
    meta[FREE] = meta[DEAD] = 0
    for number in range(refs.size - 1, 0, -1):
        alias[number] = 0
        if refs[number] == 0:
            free[meta[FREE]] = number
            meta[FREE] += 1
            continue
        if not rows[number].any():
            meta[DEAD] += refs[number]
            continue
        seat = _seat(rows, intern, number)
        if intern[seat] == 0:
            intern[seat] = number
        alias[number] = intern[seat]
