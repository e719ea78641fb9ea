"""The innermost loop: copy scattered blocks between an engine and the pool.

`engine` is `(num_blocks, refs, page bytes)` and `pool` is `(slots, blocks of a slot, refs, page bytes)`;
both are strided in all but the last dimension. `slots`, `indices` and `blocks` are parallel arrays of int64.
`store` and `load` take numpy arrays. The compiled forms run without the GIL from the first byte to the last,
so they and other Python threads do not slow each other down. The Python forms also take torch tensors, on
any device.

Any thread may call these functions. They keep no state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.native import form_of, uses_c

__all__ = ["COPIED_BY", "load", "load_python", "store", "store_python"]

Ints = npt.NDArray[np.int64]


def store_python(pool: Any, engine: Any, slots: Ints, indices: Ints, blocks: Ints) -> None:
    """Copy blocks of the engine into the pool."""
    for slot, index, block in zip(slots.tolist(), indices.tolist(), blocks.tolist(), strict=True):
        pool[slot, index] = engine[block]


def load_python(pool: Any, engine: Any, slots: Ints, indices: Ints, blocks: Ints) -> None:
    """Copy blocks of the pool into the engine."""
    for slot, index, block in zip(slots.tolist(), indices.tolist(), blocks.tolist(), strict=True):
        engine[block] = pool[slot, index]


if uses_c("pages"):
    from kvtier.native._pages import load, store
else:
    load, store = load_python, store_python

COPIED_BY = form_of("pages")
"""Whether C or Python copies pages of an engine on the host. C is as fast as one large memcpy."""
