"""Pieces of msgpack, read from an array of bytes: heads, texts, integers.

Each function takes a position in the array and returns the position after the piece, or -1 if there is no
such piece. None ever reads past the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.index.compiled.jit import jit

# Unsigned integers of at most 32 bits, by their first byte: their length (0: not such an integer), and
# the position of their bits in the five bytes from the first on.
_U32_LENGTH = np.array([1] * 0x80 + [0] * 0x4C + [2, 3, 5] + [0] * 0x31)
_U32_SHIFT = np.where(_U32_LENGTH > 0, 40 - 8 * _U32_LENGTH, 0).astype(np.uint64)
_U32_MASK = np.where(_U32_LENGTH == 1, 0x7F, (1 << 8 * np.maximum(_U32_LENGTH - 1, 0)) - 1).astype(np.uint64)


@jit
def head(data: Any, at: Any, small: Any, limit: Any, word: Any) -> Any:
    """Read the head of an array, a map or a text; return its length (or -1) and the position after it.

    `small` is the first byte of the short form, which has up to `limit` elements; `word` is that of the
    16-bit form.
    """
    if at >= data.size:
        return np.int64(-1), at
    byte = np.int64(data[at])
    if small <= byte < small + limit:
        return byte - small, at + 1
    if byte == word and at + 3 <= data.size:
        return (np.int64(data[at + 1]) << 8) | np.int64(data[at + 2]), at + 3
    if byte == word + 1 and at + 5 <= data.size:
        size = np.int64(0)
        for i in range(1, 5):
            size = (size << 8) | np.int64(data[at + i])
        return size, at + 5
    return np.int64(-1), at


@jit
def text(data: Any, at: Any) -> Any:
    """Read a text's head; return the text's start and end, -1 if there is none."""
    if at + 1 < data.size and data[at] == 0xD9:
        size, start = np.int64(data[at + 1]), at + 2
    else:
        size, start = head(data, at, 0xA0, 32, 0xDA)
    if size < 0 or start + size > data.size:
        return np.int64(-1), np.int64(-1)
    return start, start + size


@jit
def word_in(data: Any, start: Any, stop: Any, words: Any, ends: Any) -> Any:
    """Return the number of the dictionary word that a text equals, -1 for none."""
    for word in range(ends.size - 1):
        first = ends[word]
        if ends[word + 1] - first != stop - start:
            continue
        same = True
        for i in range(stop - start):
            if data[start + i] != words[first + i]:
                same = False
                break
        if same:
            return word
    return -1


@jit
def integer(data: Any, at: Any) -> Any:
    """Read an integer; return its low 64 bits and the position after it, -1 if there is none."""
    if at >= data.size:
        return np.uint64(0), np.int64(-1)
    byte = np.int64(data[at])
    if byte < 0x80:
        return np.uint64(byte), at + 1
    if byte >= 0xE0:
        return np.uint64(byte - 256), at + 1
    if byte == 0xCF and at + 9 <= data.size:  # nearly all hashes: one load, because the width is known
        value = (
            np.uint64(data[at + 1]) << np.uint64(56)
            | np.uint64(data[at + 2]) << np.uint64(48)
            | np.uint64(data[at + 3]) << np.uint64(40)
            | np.uint64(data[at + 4]) << np.uint64(32)
            | np.uint64(data[at + 5]) << np.uint64(24)
            | np.uint64(data[at + 6]) << np.uint64(16)
            | np.uint64(data[at + 7]) << np.uint64(8)
            | np.uint64(data[at + 8])
        )
        return value, at + 9
    if not 0xCC <= byte <= 0xD3:
        return np.uint64(0), np.int64(-1)
    width = 1 << ((byte - 0xCC) & 3)
    if at + 1 + width > data.size:
        return np.uint64(0), np.int64(-1)
    value = np.uint64(0)
    for i in range(1, width + 1):
        value = (value << np.uint64(8)) | np.uint64(data[at + i])
    if byte >= 0xD0 and width < 8 and data[at + 1] >= 0x80:
        value |= ~np.uint64(0) << np.uint64(8 * width)
    return value, at + 1 + width


@jit
def _length(byte: Any) -> Any:
    """Return the length of the integer that begins with a byte, 0 if none does."""
    if 0xCC <= byte <= 0xD3:
        return 1 + (1 << (byte & 3))
    return 1 if byte < 0x80 or byte >= 0xE0 else 0


@jit
def skip_integers(data: Any, at: Any, count: Any) -> Any:
    """Return the position after `count` integers, -1 if something else is among them.

    The start of an integer is known only after the ones before it, so a core mostly waits. Long lists are
    therefore walked from two positions at once; the second one is a guess:

        at ---- taken ----> goal ---- taken ----> ahead

    If the first walk arrives at the start of the second, both together are one walk; else the second was
    useless.
    """
    size = data.size
    while count >= 64 and at + count <= size:
        goal = at + count - 8
        while goal < at + count and data[goal] & 0xFC != 0xCC:  # tokens of several bytes begin like this
            goal += 1
        ahead, taken = goal, np.int64(0)  # at most `count` integers, as each has at least a byte
        while at < goal:
            length = _length(np.int64(data[at]))
            if length == 0:
                return np.int64(-1)
            at += length
            taken += 1
            if ahead >= 0:
                length = _length(np.int64(data[ahead])) if ahead < size else 0
                ahead = ahead + length if length else np.int64(-1)
        count -= taken
        if at == goal and 0 <= ahead <= size and taken <= count:
            at, count = ahead, count - taken
    for _ in range(count):
        length = _length(np.int64(data[at])) if at < size else 0
        if length == 0:
            return np.int64(-1)
        at += length
    return at if at <= size else np.int64(-1)


@jit
def read_u32(data: Any, at: Any, count: Any, out: Any, start: Any) -> Any:
    """Read `count` integers of at most 32 bits into `out[start:]`.

    Return the position after them, -1 if something else is there. The lengths of tokens are unpredictable,
    so they come from a table and not from branches.
    """
    sure = data.size - 5  # up to here, all five bytes lie in the array
    for i in range(start, start + count):
        if at <= sure and _U32_LENGTH[data[at]]:
            head = data[at]
            word = (
                np.uint64(head) << np.uint64(32)
                | np.uint64(data[at + 1]) << np.uint64(24)
                | np.uint64(data[at + 2]) << np.uint64(16)
                | np.uint64(data[at + 3]) << np.uint64(8)
                | np.uint64(data[at + 4])
            )
            out[i] = np.uint32((word >> _U32_SHIFT[head]) & _U32_MASK[head])
            at += _U32_LENGTH[head]
        else:
            value, at = integer(data, at)
            if at < 0 or value > np.uint64(0xFFFFFFFF):
                return np.int64(-1)
            out[i] = np.uint32(value)
    return at
