"""A row as one value of a server: a header of 64 bytes in front of its payload.

     0  8   `kvtrow1` and a newline
     8  8   bytes of the payload, little-endian
    16  8   number of the row's scope
    24  1   bytes of the seal; 7 bytes of zeros
    32  32  seal, then zeros

The header says what the value is, so a reader detects a value that is cut short, too long, or of a later
format before it looks at the bytes. The seal decides about the bytes. Any thread may call these functions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from kvtier.errors import InputError
from kvtier.tiers.base import BackendRow

__all__ = ["HEADER_BYTES", "copy_into", "pack_header", "seal_in"]

_HEADER = struct.Struct("<8sQQB7x32s")
_MAGIC = b"kvtrow1\n"
_MOST_SEAL = 32
HEADER_BYTES = _HEADER.size


def pack_header(row: BackendRow) -> bytes:
    """Return the header of a row's value."""
    if len(row.seal) > _MOST_SEAL:
        raise InputError(f"seal: expected at most {_MOST_SEAL} bytes, got {len(row.seal)}")
    return _HEADER.pack(_MAGIC, row.nbytes, row.scope, len(row.seal), row.seal)


def seal_in(header: bytes | bytearray | memoryview, row: BackendRow) -> bytes:
    """Return the seal in a header; an empty one, which no row has, if the header is not this row's."""
    magic, nbytes, scope, length, seal = _HEADER.unpack(header)
    if (magic, nbytes, scope) != (_MAGIC, row.nbytes, row.scope) or length > _MOST_SEAL:
        return b""
    return bytes(seal[:length])


def copy_into(pieces: Sequence[memoryview], payload: memoryview) -> None:
    """Copy a payload with the GIL released; an assignment to a memoryview would hold it."""
    source, at = np.frombuffer(payload, np.uint8), 0
    for piece in pieces:
        np.copyto(np.frombuffer(piece, np.uint8), source[at : at + piece.nbytes])
        at += piece.nbytes
