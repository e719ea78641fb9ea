"""The part of the index that numba compiles: its table, its names, its hashes, and its reader of batches.

Importing anything here needs numba (the extra `index`). A function marked with `jit` is compiled at its
first call and releases the GIL; none of them is for several threads at once. The result is kept on disk for
later processes until a module changes that is compiled or gives compiled code a constant. The intrinsics
below are machine instructions that Python does not offer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numba
import xxhash
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["COMPILED_IN", "fold_product", "jit", "lowest_bit", "prefetch", "stamp_of", "swap_bytes"]

COMPILED_IN = ("base", "xxh3")
"""Modules of the index, besides those of this folder, whose constants are in compiled code."""


def stamp_of(files: Iterable[Path]) -> int:
    """Return a number that changes with any of the files."""
    digest = xxhash.xxh3_64()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.intdigest()


_HERE = Path(__file__).parent
_STAMP = stamp_of([*_HERE.glob("*.py"), *(_HERE.parent / f"{name}.py" for name in COMPILED_IN)])


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function.

    numba compiles again when the function's own file changes. But called functions and constants are
    compiled in: after an upgrade, code with the old layout of an array would run beside code with the new
    one. So the cache also depends on `_STAMP`.
    """
    compiled = numba.njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")(function)
    kept = getattr(compiled._cache, "_cache_file", None)  # there is none if no folder is writable
    if kept is not None:
        kept._source_stamp = (_STAMP, kept._source_stamp)
    return compiled


def _lowest_bit(_context: Any, word: Any) -> Any:
    """Return the position of the lowest bit set in a word that is not 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


def _fold_product(_context: Any, left: Any, right: Any) -> Any:
    """Multiply two words to 128 bits and return the exclusive or of the halves."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), word)
        return builder.xor(builder.trunc(product, word), high)

    return types.uint64(types.uint64, types.uint64), generate


def _swap_bytes(_context: Any, word: Any) -> Any:
    """Reverse a word's bytes."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bswap(arguments[0])

    return types.uint64(types.uint64), generate


def _prefetch(_context: Any, array: Any, offset: Any) -> Any:
    """Begin to load an element of an array of one dimension; it will be wanted soon."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        data = context.make_array(array)(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        # To read, keep, data.
        builder.call(function, [address, *(ir.Constant(number, flag) for flag in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


lowest_bit: Any = intrinsic(_lowest_bit)
prefetch: Any = intrinsic(_prefetch)
fold_product: Any = intrinsic(_fold_product)
swap_bytes: Any = intrinsic(_swap_bytes)
