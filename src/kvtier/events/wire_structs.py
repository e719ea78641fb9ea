"""Structs that decode events before they become public ones: per encoding, with and without tokens.

The public events require all fields of the newest vLLM. Older versions and other engines send fewer, and
arrays besides maps; SGLang's arrays (up to 0.5.19) differ behind the medium. The structs here read all of
that and become public events. Nothing here keeps state: any thread may use it. `kvtier.events.wire` decodes
with this module.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, TypeVar, cast

import msgspec

from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, ExternalBlockHash

Event = BlockStored | BlockRemoved | AllBlocksCleared

_T = TypeVar("_T")
_MAP_HEADS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
# The values of fields that the sender lacks; other fields become None.
_LACKING = {
    "token_ids": [],
    "block_size": 0,
}
# The number of fields that all publishers of arrays agree on: those up to the medium.
_CORE_FIELDS = {
    BlockStored: 6,
    BlockRemoved: 2,
    AllBlocksCleared: 0,
}


class Encoding(StrEnum):
    """The wire form of an event."""

    MAP = "map"
    ARRAY = "array"


def encoding_of(raw: bytes) -> Encoding:
    """Return the wire form of an encoded event."""
    return Encoding.MAP if raw[0] in _MAP_HEADS else Encoding.ARRAY


class _Shape(msgspec.Struct, gc=False):
    """A public event's fields in order; only the hashes are required."""

    def public(self) -> Event:
        """Return the public event."""
        return self.kind(*msgspec.structs.astuple(self))  # type: ignore[attr-defined, no-any-return]


class _StoredShape(_Shape):
    """A stored event; its tokens, and the fields behind its medium, may be absent."""

    def public(self) -> Event:
        values: Any = msgspec.structs.astuple(self)
        hashes, parent, tokens, size, lora_id, medium, *others = values
        if type(tokens) is msgspec.Raw:
            tokens = []
        return BlockStored(hashes, parent, tokens, size, lora_id, medium, *(others or (None,)))


def _shape(kind: type[Event], form: Encoding, *, tokens: bool, is_core: bool = False) -> type[_Shape]:
    """Return the struct that decodes `kind`: with or without tokens, whole or up to its medium."""
    fields: list[Any] = [("block_hashes", list[ExternalBlockHash])] if kind is not AllBlocksCleared else []
    for field in msgspec.structs.fields(kind)[1:]:
        unread = field.name == "token_ids" and not tokens
        fields.append((field.name, msgspec.Raw if unread else field.type, _LACKING.get(field.name)))
    made = msgspec.defstruct(
        kind.__name__,
        fields[: _CORE_FIELDS[kind]] if is_core else fields,
        bases=(_StoredShape if kind is BlockStored else _Shape,),
        namespace={"kind": kind},
        tag=kind.__name__,
        array_like=form is Encoding.ARRAY,
        gc=False,
    )
    return cast(type[_Shape], made)


class Outer(msgspec.Struct, Generic[_T], array_like=True, gc=False):
    """A batch of anything; fields behind the rank are ignored."""

    ts: float
    events: list[_T]
    data_parallel_rank: int | None = None


class Reader:
    """Decodes events, or whole batches of them, with the given structs."""

    def __init__(
        self, stored: type[msgspec.Struct], removed: type[msgspec.Struct], cleared: type[msgspec.Struct]
    ) -> None:
        """Decode with these structs; public events need no conversion."""
        union: Any = stored | removed | cleared
        self._event = msgspec.msgpack.Decoder(union).decode
        self._batch = msgspec.msgpack.Decoder(Outer[union]).decode
        self._shapes = {shape for shape in (stored, removed, cleared) if issubclass(shape, _Shape)}

    def event(self, raw: bytes) -> Event:
        """Read one event."""
        event = self._event(raw)
        return event.public() if type(event) in self._shapes else event  # type: ignore[no-any-return]

    def batch(self, payload: bytes) -> Outer[Event]:
        """Read a batch with all its events."""
        batch = self._batch(payload)
        shapes = self._shapes
        if shapes:
            batch.events = [event.public() if type(event) in shapes else event for event in batch.events]
        return batch


def _readers(form: Encoding, *, is_core: bool = False) -> dict[bool, Reader]:
    """Return the readers of one encoding that require no field, with and without tokens."""
    kinds = (BlockStored, BlockRemoved, AllBlocksCleared)
    return {
        tokens: Reader(*(_shape(kind, form, tokens=tokens, is_core=is_core) for kind in kinds))
        for tokens in (True, False)
    }


_MAP, _ARRAY = _readers(Encoding.MAP), _readers(Encoding.ARRAY)
_CORE = _readers(Encoding.ARRAY, is_core=True)

OUTER = msgspec.msgpack.Decoder(Outer[msgspec.Raw])

WHOLE = {
    True: (Reader(BlockStored, BlockRemoved, AllBlocksCleared), _ARRAY[True], _MAP[True]),
    False: (
        Reader(_shape(BlockStored, Encoding.MAP, tokens=False), BlockRemoved, AllBlocksCleared),
        _ARRAY[False],
    ),
}
"""Readers of a whole batch, with or without tokens, to be tried in order."""

EACH = {
    (Encoding.MAP, True): (_MAP[True], _MAP[False]),
    (Encoding.MAP, False): (_MAP[False],),
    (Encoding.ARRAY, True): (_ARRAY[True], _CORE[True], _CORE[False]),
    (Encoding.ARRAY, False): (_ARRAY[False], _CORE[False]),
}
"""Readers of one event of an encoding, with or without tokens, to be tried in order.

Tokens that are not numbers are left out.
"""
