"""The form in which block hashes are published; consumers differ in what they take. Any thread may use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvtier.events.types import ExternalBlockHash
from kvtier.events.wire import U64, to_u64

__all__ = ["HashFormat"]

_BIT_62, _BIT_63 = 1 << 62, 1 << 63


def _to_u63(block: ExternalBlockHash) -> int:
    """Return the low 63 bits, moved out of the range below 2^32 that some decoders refuse; never 0."""
    low = to_u64(block) & (_BIT_63 - 1)
    return low if low >= 1 << 32 else low | _BIT_62


def _to_i64(block: ExternalBlockHash) -> int:
    low = to_u64(block)
    return low - (1 << 64) if low & _BIT_63 else low


_CONVERTERS: dict[str, Callable[[ExternalBlockHash], int]] = {"u64": to_u64, "u63": _to_u63, "i64": _to_i64}


def _are_u64(hashes: list[Any]) -> bool:
    """Return whether all are unsigned 64-bit ints, as an engine's mostly are."""
    return not hashes or (set(map(type, hashes)) == {int} and min(hashes) >= 0 and max(hashes) <= U64)


class HashFormat:
    """Converts hashes to one format; `as_is` leaves everything alone."""

    def __init__(self, name: str = "as_is") -> None:
        self._convert = _CONVERTERS.get(name)

    def block(self, block: ExternalBlockHash) -> ExternalBlockHash:
        """Return a hash in the format."""
        return block if self._convert is None else self._convert(block)

    def event(self, event: Any) -> Any:
        """Return a `BlockStored` or `BlockRemoved` with its hashes, the parent's included, in the format."""
        convert = self._convert
        if convert is None:
            return event
        hashes, parent = event.block_hashes, getattr(event, "parent_block_hash", None)
        if convert is to_u64 and _are_u64([*hashes] if parent is None else [*hashes, parent]):
            return event
        hashes = [convert(block) for block in hashes]
        if parent is None:
            return msgspec.structs.replace(event, block_hashes=hashes)
        return msgspec.structs.replace(event, block_hashes=hashes, parent_block_hash=convert(parent))
