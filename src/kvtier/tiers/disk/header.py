"""The header of a disk tier's files: two pages of 4,096 bytes in front of the records, written in turn.

    magic `kvtdisk1` | XXH3-64 of the rest, u64 | length u32 | JSON, `length` bytes

The whole page with the higher sequence counts, so an interrupted write loses only itself. A new epoch is
written to both pages, so that no older page brings an older epoch back. A page whose numbers cannot be those
of any place is not whole. Pure functions; any thread.
"""

from __future__ import annotations

import msgspec
import xxhash

from kvtier.config import ROW_ALIGNMENT
from kvtier.errors import OutsideError

__all__ = ["HEADER_BYTES", "PAGE_BYTES", "VERSION", "DiskHeader", "pack_header", "read_header"]

VERSION = 1
"""The version of header, records, descriptions and slots together. Another version has another folder."""
PAGE_BYTES = 4096
HEADER_BYTES = 2 * PAGE_BYTES

_MAGIC = b"kvtdisk1"
_BODY_AT = 20
_MOST_SLOTS = 1 << 32
"""A record has 32 bits for the number of its slot."""
_MOST_BYTES = 1 << 62


class DiskHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about all slots.

    `written`: the count of the write limit, an hour and the bytes of 24 hours.
    """

    namespace: str
    row_bytes: int
    stride: int
    slots: int
    description_bytes: int
    epoch: int = 0
    sequence: int = 0
    version: int = VERSION
    prices: dict[str, float] = {}
    written: list[int] = []


def pack_header(header: DiskHeader) -> bytes:
    """Return a page. `OutsideError` if the header is longer than a page."""
    body = msgspec.json.encode(header)
    if len(body) > PAGE_BYTES - _BODY_AT:
        raise OutsideError(
            f"disk tier: expected a header of one page, got {len(body)} bytes of prices and names"
        )
    rest = len(body).to_bytes(4, "little") + body.ljust(PAGE_BYTES - _BODY_AT, b"\0")
    return _MAGIC + xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


def read_header(pages: bytes) -> DiskHeader | None:
    """Return the newest header of two pages; `None` if neither is whole."""
    found = (_read_page(pages[at : at + PAGE_BYTES]) for at in (0, PAGE_BYTES))
    return max(
        (header for header in found if header is not None), key=lambda header: header.sequence, default=None
    )


def _read_page(page: bytes) -> DiskHeader | None:
    rest = page[16:]
    if (
        len(page) < PAGE_BYTES
        or page[:8] != _MAGIC
        or page[8:16] != xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little")
    ):
        return None
    try:
        header = msgspec.json.decode(rest[4 : 4 + int.from_bytes(rest[:4], "little")], type=DiskHeader)
    except (msgspec.DecodeError, RecursionError):
        return None
    return header if header.version != VERSION or _is_possible(header) else None


def _is_possible(header: DiskHeader) -> bool:
    """Say whether a place can have these numbers."""
    return (
        0 < header.row_bytes <= header.stride == -(-header.row_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        and 0 <= header.slots <= _MOST_SLOTS
        and header.slots * header.stride < _MOST_BYTES
        and header.stride < _MOST_BYTES
        and 0 <= header.description_bytes < _MOST_SLOTS
        and 0 <= header.epoch < _MOST_BYTES
        and 0 <= header.sequence < _MOST_BYTES
        and header.namespace.isprintable()
    )
