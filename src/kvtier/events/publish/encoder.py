"""Events in their published form: checked, cut, joined, with hashes as consumers want them, and as bytes.

Every consumer can read an encoded event: an event with a field of a wrong type is left out. One thread owns
a `BatchEncoder`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from kvtier.events.config import KVEventsConfig
from kvtier.events.types import BlockRemoved, BlockStored, blocks_of
from kvtier.events.wire import U64, EventEncoder, to_u64
from kvtier.events.wire_structs import Encoding

UNENCODABLE = (AttributeError, OverflowError, RecursionError, TypeError, ValueError)
"""The exceptions of a batch that cannot be encoded."""

_MOST_BLOCKS, _MOST_TOKENS = 1024, 16_384
"""Bounds of one event. Encoding or decoding an event holds the interpreter, so larger ones are cut."""

EncodedEvent = tuple[str, Any, bytes]
"""An event to publish: the name of its kind, the event, its bytes."""


def _readable(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a struct with the fields of a public event, and the types that consumers can read.

    Single tokens are not checked: too many.
    """
    fields = [
        (one.name, Any if one.name == "token_ids" else one.type) for one in msgspec.structs.fields(kind)
    ]
    return msgspec.defstruct(kind.__name__, fields, gc=False)


_READABLE = {kind.__name__: _readable(kind) for kind in (BlockStored, BlockRemoved)}


class BatchEncoder:
    """Brings the events of a batch into their published form, as the config says."""

    def __init__(self, config: KVEventsConfig, encoder: EventEncoder) -> None:
        self._as_u64 = config.hash_format == "u64"
        self._not_as_text = None if self._as_u64 else (bytes,)  # else `msgspec` takes base64 text for bytes
        self._most_blocks = min(config.max_blocks_per_event or _MOST_BLOCKS, _MOST_BLOCKS)
        self._encoder = encoder
        self._is_map = encoder.encoding is Encoding.MAP
        self._encode = msgspec.msgpack.Encoder().encode if self._is_map else encoder.event

    def encode(self, events: Iterable[Any]) -> tuple[list[EncodedEvent], list[str]]:
        """Return a batch's events in published form, and the problems of events that are left out.

        Raises one of `UNENCODABLE` if the whole batch cannot be encoded.
        """
        events = (part for event in events for part in _cut_event(event, self._most_blocks))
        encoded: list[EncodedEvent] = []
        problems: list[str] = []
        for kind, event in _join_removals(events):
            if kind in _READABLE:
                event = self._in_form(kind, event)
            data = self._encode(event)
            problem = self._problem_of(kind, event) if kind in _READABLE else None
            if problem is None:
                encoded.append((kind, event, data))
            else:
                problems.append(problem)
        return encoded, problems

    def _in_form(self, kind: str, event: Any) -> Any:
        """Return an event with hashes in the wanted format, without place fields that cannot be encoded."""
        if self._as_u64 and not _has_u64(kind, event):
            event = _with_u64(kind, event)
        return event if self._is_map else self._encoder.reduced(event)

    def _problem_of(self, kind: str, event: Any) -> str | None:
        """Return the problem that keeps consumers from reading an event; `None` if there is none."""
        try:
            msgspec.convert(event, _READABLE[kind], from_attributes=True, builtin_types=self._not_as_text)
            _expect_list(event, "block_hashes")
            if kind == "BlockStored":
                _expect_list(event, "token_ids")
        except msgspec.ValidationError as error:
            return f"a {kind} with {_in_words(error)}"
        return None


def _expect_list(event: Any, name: str) -> None:
    """Raise if a field is not a list: `msgspec` takes sets for lists, and would copy all tokens."""
    found = type(getattr(event, name))
    if found is not list and found is not tuple:
        raise msgspec.ValidationError(f"Expected `array`, got `{found.__name__}` - at `$.{name}`")


def _in_words(error: msgspec.ValidationError) -> str:
    """Describe what is wrong with an event, the field first."""
    problem, _, path = str(error).partition(" - at `$.")
    return f"{path.rstrip('`') or 'fields'}: {problem[0].lower()}{problem[1:]}"


def _has_u64(kind: str, event: Any) -> bool:
    """Return whether all hashes, with the parent's, are unsigned 64-bit ints, as an engine's are."""
    try:
        array("Q", event.block_hashes)
    except (OverflowError, TypeError):
        return False
    parent = event.parent_block_hash if kind == "BlockStored" else None
    return parent is None or (type(parent) is int and 0 <= parent <= U64)


def _with_u64(kind: str, event: Any) -> Any:
    """Return an event with all hashes, also the parent's, as their low 64 bits."""
    changed: dict[str, Any] = {"block_hashes": [to_u64(block) for block in event.block_hashes]}
    if kind == "BlockStored" and event.parent_block_hash is not None:
        changed["parent_block_hash"] = to_u64(event.parent_block_hash)
    return replace(event, **changed)


def _join_removals(events: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the events with the names of their kinds; join runs of removals from one place.

    Engines send removals block by block. A joined removal is no larger than a cut one.
    """
    joined: list[tuple[str, Any]] = []
    last: BlockRemoved | None = None  # if the last event is a removal
    for event in events:
        kind = type(event).__name__  # not the class: an engine's own event classes are accepted, too
        if kind != "BlockRemoved" or type(event.block_hashes) is not list:
            last = None
        elif (
            last is not None
            and len(last.block_hashes) + len(event.block_hashes) <= _MOST_BLOCKS
            and event.medium is last.medium  # identity is fast, and a run cut in two does no harm
            and event.group_idx is last.group_idx
            and event.locality is last.locality
            and event.ownership is last.ownership
        ):
            last.block_hashes.extend(event.block_hashes)
            continue
        else:
            place = event.medium, event.group_idx, event.locality, event.ownership
            event = last = BlockRemoved(list(event.block_hashes), *place)
        joined.append((kind, event))
    return joined


def _cut_event(event: Any, most: int) -> Iterator[Any]:
    """Yield an event in parts of at most `most` blocks, and of a bounded number of tokens."""
    kind = type(event).__name__
    if kind == "BlockStored":
        if type(event.block_size) is int and event.block_size > 0:
            most = max(1, min(most, _MOST_TOKENS // event.block_size))
        cut: Callable[[Any, int, int], Any] = blocks_of
    elif kind == "BlockRemoved":
        most, cut = _MOST_BLOCKS, _removals_of
    if kind not in _READABLE or type(event.block_hashes) is not list or len(event.block_hashes) <= most:
        yield event
        return
    for start in range(0, len(event.block_hashes), most):
        yield cut(event, start, start + most)


def _removals_of(event: Any, start: int, stop: int) -> Any:
    return replace(event, block_hashes=event.block_hashes[start:stop])
