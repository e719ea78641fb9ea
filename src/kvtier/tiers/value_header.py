"""A row as one value of a server: 32 bytes in front of its payload.

     0  8  `kvtier`, 0, format version 1
     8  8  bytes of the payload, little-endian
    16  16 the row's seal
    32  .  payload

The header says what the value is, so that a value cut short, grown or of a later format is known before its
bytes are looked at. The seal decides about the bytes. Any thread may call what is here.
"""

from __future__ import annotations

from kvtier.tiers.base import BackendRow, Piece
from kvtier.tiers.seal import SEAL_BYTES

__all__ = ["HEADER_BYTES", "header_of", "seal_in"]

HEADER_BYTES = 32
_MAGIC = b"kvtier\x00\x01"


def header_of(row: BackendRow) -> bytes:
    """Return what goes in front of a row's payload."""
    return _MAGIC + row.nbytes.to_bytes(8, "little") + row.seal


def seal_in(header: bytes | Piece, row: BackendRow) -> bytes:
    """Return the seal in a header; an empty one, which no row has, if the header is not one of such a row."""
    start, seal = bytes(header[:-SEAL_BYTES]), bytes(header[-SEAL_BYTES:])
    return seal if start == _MAGIC + row.nbytes.to_bytes(8, "little") and len(header) == HEADER_BYTES else b""
