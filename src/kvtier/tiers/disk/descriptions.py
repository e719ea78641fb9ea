"""Descriptions: the event data of each chunk (parent, hashes, tokens, extra keys), kept for a restart.

One entry per slot, all of one length: `XXH3-64 of the payload, seeded by the key, u64 | length u32 | 4 of
zero | payload`. The payload is opaque here: the caller that demotes a row defines it. A description that is
too long is not kept, and the chunk is announced without one; so is a chunk whose description belongs to
another key or was damaged. Pure functions; any thread.
"""

from __future__ import annotations

import xxhash

from kvtier.keys import OffloadKey

__all__ = ["description_stride", "pack_description", "read_description"]

_START = 16
_ALIGNMENT = 64


def description_stride(most_bytes: int) -> int:
    """Return the space that one description of up to `most_bytes` takes; 0 if none are kept."""
    return -(-(_START + most_bytes) // _ALIGNMENT) * _ALIGNMENT if most_bytes else 0


def pack_description(key: OffloadKey, description: bytes, stride: int) -> bytes:
    """Return the bytes to write for a slot; a description that does not fit is written as absent."""
    if not description or _START + len(description) > stride:
        return bytes(min(stride, _START))
    checksum = xxhash.xxh3_64_intdigest(description, _seed(key))
    return checksum.to_bytes(8, "little") + len(description).to_bytes(8, "little") + description


def read_description(key: OffloadKey, content: bytes) -> bytes:
    """Return the description that was kept for a key; empty if there is none."""
    length = int.from_bytes(content[8:12], "little")
    description = content[_START : _START + length]
    if not length or len(description) < length:
        return b""
    return (
        description
        if xxhash.xxh3_64_intdigest(description, _seed(key)).to_bytes(8, "little") == content[:8]
        else b""
    )


def _seed(key: OffloadKey) -> int:
    return xxhash.xxh3_64_intdigest(key)
