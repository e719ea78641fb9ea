"""How the index's inner loops are compiled, and the machine instructions that Python has no name for.

Needs numba. A function marked with `jit` is compiled at its first call, kept on disk for the next process, and lets other
threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["fold_product", "jit", "lowest_bit", "swap_bytes"]


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function."""
    return numba.njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")(function)


def _lowest_bit(_context: Any, word: Any) -> Any:
    """Return the place of the lowest bit set in a word that is not 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


def _fold_product(_context: Any, left: Any, right: Any) -> Any:
    """Multiply two words to 128 bits and return the exclusive or of the halves."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(*(builder.zext(each, wide) for each in arguments))
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), word)
        return builder.xor(builder.trunc(product, word), high)

    return types.uint64(types.uint64, types.uint64), generate


def _swap_bytes(_context: Any, word: Any) -> Any:
    """Reverse a word's bytes."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bswap(arguments[0])

    return types.uint64(types.uint64), generate


lowest_bit: Any = intrinsic(_lowest_bit)
fold_product: Any = intrinsic(_fold_product)
swap_bytes: Any = intrinsic(_swap_bytes)
