"""The copy in C does what the copy in Python does, for every shape, and touches nothing it was
not told to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.transfer import host
from kvtier.transfer.host import load_pages_python, store_pages_python

_pages = pytest.importorskip("kvtier.native._pages", reason="kvtier.native._pages was not compiled here")

PAIRS = [(_pages.store, store_pages_python), (_pages.load, load_pages_python)]


def bytes_at(
    rng: np.random.Generator, shape: tuple[int, ...], offset: int, gap: int
) -> np.ndarray[Any, Any]:
    """Return random bytes of a shape, misaligned by `offset` and with `gap` bytes after each page."""
    *outer, page = shape
    buffer = rng.integers(-128, 128, offset + int(np.prod(outer)) * (page + gap), dtype=np.int8)
    return buffer[offset:].reshape(*outer, page + gap)[..., :page]


@given(
    st.integers(0, 2**32),
    st.integers(0, 300),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 33),
    st.integers(0, 9),
)
def test_c_and_python_agree(seed: int, page: int, refs: int, per_slot: int, offset: int, gap: int) -> None:
    for c, python in PAIRS:
        copies = []
        for function in (c, python):
            rng = np.random.default_rng(seed)
            engine, pool = (
                bytes_at(rng, (7, refs, page), offset, gap),
                bytes_at(rng, (5, per_slot, refs, page), gap, offset),
            )
            count = int(rng.integers(0, 6))
            slots, indices, blocks = (
                rng.permutation(5)[:count],
                rng.integers(0, per_slot, 5)[:count],
                rng.permutation(7)[:count],
            )
            function(pool, engine, slots, indices, blocks)
            copies.append([array.base.tobytes() for array in (engine, pool)])
        assert copies[0] == copies[1]


@pytest.mark.parametrize("function", [_pages.store, _pages.load])
@pytest.mark.parametrize(
    "break_it",
    [
        lambda a: a | {"slots": a["slots"] + 5},
        lambda a: a | {"slots": a["slots"] - 1},
        lambda a: a | {"indices": a["indices"] + 2},
        lambda a: a | {"blocks": a["blocks"] + 7},
        lambda a: a | {"blocks": a["blocks"] - 1},
        lambda a: a | {"blocks": a["blocks"][:1]},
        lambda a: a | {"blocks": a["blocks"].astype(np.int32)},
        lambda a: a | {"pool": a["pool"][:, :, :1]},
        lambda a: a | {"pool": a["pool"][..., :-1]},
        lambda a: a | {"pool": a["pool"][..., ::-1]},
        lambda a: a | {"pool": a["pool"][0]},
        lambda a: a | {"engine": a["engine"][0]},
        lambda a: a | {"engine": a["engine"].astype(np.int16)},
        lambda a: a | {"engine": None},
        lambda a: a | {"blocks": [0, 1]},
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_a_byte_moves(
    function: Callable[..., None], break_it: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    rng = np.random.default_rng(0)
    good = {
        "pool": bytes_at(rng, (5, 2, 3, 8), 0, 0),
        "engine": bytes_at(rng, (7, 3, 8), 0, 0),
        "slots": np.array([0, 4]),
        "indices": np.array([1, 1]),
        "blocks": np.array([0, 6]),
    }
    before = good["pool"].tobytes(), good["engine"].tobytes()
    with pytest.raises((ValueError, TypeError)):
        function(*break_it(good).values())
    assert (good["pool"].tobytes(), good["engine"].tobytes()) == before
    function(*good.values())
    assert (good["pool"].tobytes(), good["engine"].tobytes()) != before


def test_a_destination_that_may_not_be_written_is_refused() -> None:
    engine, pool, at = np.zeros((1, 1, 8), np.int8), np.zeros((1, 1, 1, 8), np.int8), np.array([0])
    pool.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        _pages.store(pool, engine, at, at, at)
    _pages.load(pool, engine, at, at, at)


def test_the_compiled_version_is_the_one_in_use() -> None:
    assert (host.COPIED_BY, host.store_pages, host.load_pages) == ("c", _pages.store, _pages.load)
