"""Reads traces of requests. The format is known by the content of the file:

    Mooncake    JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id for
                each 512 tokens
    requests    JSON lines or CSV with a header: `time` (s), and the prompt as `blocks` (ids; in CSV,
                separated by spaces) or as `session`, `input_tokens` and `output_tokens`;
                `finish_reason` is optional
    recording   what `kvtier events record` has written

A prompt given by counts extends the session's previous prompt and answer; if it is shorter than these, the
session begins anew. `shared_prefix` is the number of leading tokens that it has in common with other
sessions: `1200` of the one prefix of the trace, `agent:1200` of the prefix named `agent`.

A recording has no requests, only blocks that became readable. Each store of blocks on the GPU stands for a
request: its prompt is the chain of blocks up to there. Stores that go on from the end of another within
`GAP` seconds belong to the same request, as the steps of one prompt do. A request that computes no new block
leaves no event, so its hits are missing, and answers count as prompts. The stores of several publishers
are those of one engine.

A wrong line is an `InputError` with file and line. Reading blocks; any thread may call it.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import InputError, show_value
from kvtier.events.recording import MAGIC, RecordingReader
from kvtier.events.types import MEDIUM_GPU, BlockStored
from kvtier.events.wire import decode_batch
from kvtier.simulate.trace import Ids, PrefixIds, Trace, TraceRequest

GAP = 2.0
"""Seconds. A step of an engine is far shorter, and few people or tools answer within this time."""
_MOONCAKE_TOKENS = 512
_MOST_TOKENS = 1 << 26
_LONGEST_FIELD = 16 << 20
_Line = tuple[str, Mapping[str, Any]]
"""Where a line is, for messages, and its fields."""


def read_trace(path: Path, block_tokens: int = 16) -> Trace:
    """Read a trace. `block_tokens` is the length of blocks in files that do not say it."""
    try:
        with path.open("rb") as file:
            is_recording = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if is_recording:
        return _read_recording(path)
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}: expected requests, got an empty file")
    lines = chain((first,), lines)
    fields = first[1]
    if "hash_ids" in fields:
        return _sorted(path, "Mooncake", _MOONCAKE_TOKENS, _read_mooncake(lines))
    if "blocks" in fields:
        return _sorted(path, "requests with block ids", block_tokens, _read_blocks(lines, block_tokens))
    if "input_tokens" in fields:
        return _sorted(path, "requests with token counts", block_tokens, _read_counts(lines, block_tokens))
    raise InputError(
        f"{first[0]}: expected hash_ids (Mooncake's traces), or blocks, or session and input_tokens;"
        f" got {show_value(list(fields))}"
    )


def _sorted(path: Path, kind: str, block_tokens: int, requests: Iterable[TraceRequest]) -> Trace:
    ordered = sorted(requests, key=lambda request: request.time)
    return Trace(path.name, kind, block_tokens, ordered)


# -- lines -----------------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[_Line]:
    """Yield the fields of each line of a file of JSON objects, or of CSV."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            start = next((line.strip() for line in file if line.strip()), "")
            file.seek(0)
            if start:
                yield from _json_lines(path, file) if start.startswith("{") else _csv_lines(path, file)
        except UnicodeDecodeError:
            raise InputError(f"{path}: expected JSON lines, CSV or a recording of events") from None


def _json_lines(path: Path, file: Iterable[str]) -> Iterator[_Line]:
    for number, line in enumerate(file, 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                fields = None
            if not isinstance(fields, dict):
                raise InputError(f"{where}: expected a JSON object, got {show_value(line.strip())}")
            yield where, fields


def _csv_lines(path: Path, file: Iterable[str]) -> Iterator[_Line]:
    csv.field_size_limit(_LONGEST_FIELD)  # of the process; Python's own default is 128 KiB
    reader = csv.DictReader(file, skipinitialspace=True)
    try:
        yield from _csv_rows(path, reader)
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num + 1}: expected a row of CSV: {error}") from None


def _csv_rows(path: Path, reader: csv.DictReader[str]) -> Iterator[_Line]:
    if "time" not in (reader.fieldnames or ()):
        got = show_value(reader.fieldnames)
        raise InputError(f"{path}:1: expected JSON lines, or CSV with a header that has time; got {got}")
    for row in reader:
        where = f"{path}:{reader.line_num}"
        if None in row or None in row.values():
            raise InputError(f"{where}: expected {len(reader.fieldnames or ())} columns, as the header has")
        yield where, {name: value for name, value in row.items() if value != ""}


def _number(line: _Line, name: str, least: float = 0.0) -> float:
    where, fields = line
    value = fields.get(name)
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not least <= number < math.inf:
        got = "nothing" if value is None else show_value(value)
        raise InputError(f"{where}: {name}: expected a number of at least {least:g}, got {got}")
    return number


def _count(line: _Line, name: str, least: int, default: int | None = None) -> int:
    if default is not None and line[1].get(name) is None:
        return default
    number = _number(line, name, least)
    if number != int(number) or number > _MOST_TOKENS:
        got = show_value(line[1][name])
        raise InputError(f"{line[0]}: {name}: expected a whole number up to {_MOST_TOKENS:,}, got {got}")
    return int(number)


def _reason(line: _Line) -> str | None:
    reason = line[1].get("finish_reason")
    if reason is not None and not isinstance(reason, str):
        raise InputError(f"{line[0]}: finish_reason: expected a word, got {show_value(reason)}")
    return reason


# -- requests --------------------------------------------------------------------------------------


def _read_mooncake(lines: Iterable[_Line]) -> Iterator[TraceRequest]:
    numbers = PrefixIds()
    for line in lines:
        tokens = _count(line, "input_length", 1)
        ids, needed = line[1].get("hash_ids"), -(-tokens // _MOONCAKE_TOKENS)
        if not isinstance(ids, list) or len(ids) != needed or not all(type(name) is int for name in ids):
            raise InputError(
                f"{line[0]}: hash_ids: expected {needed} whole numbers, one for each {_MOONCAKE_TOKENS} of"
                f" {tokens} tokens, got {show_value(ids)}"
            )
        time, output = _number(line, "timestamp") / 1000, _count(line, "output_length", 0)
        yield TraceRequest(time, numbers.number(ids), tokens, output, tokens, _reason(line))


def _read_blocks(lines: Iterable[_Line], block_tokens: int) -> Iterator[TraceRequest]:
    numbers = PrefixIds()
    for line in lines:
        ids = line[1].get("blocks")
        ids = ids.split() if isinstance(ids, str) else ids
        if not isinstance(ids, list) or not ids or not all(type(name) in (int, str) for name in ids):
            got = "nothing" if ids is None else show_value(ids)
            raise InputError(f"{line[0]}: blocks: expected a list of block ids, got {got}")
        tokens = _count(line, "input_tokens", 1, len(ids) * block_tokens)
        if -(-tokens // block_tokens) != len(ids):
            raise InputError(
                f"{line[0]}: blocks: expected one id for each {block_tokens} of {tokens} tokens, got"
                f" {len(ids)}; --block-tokens sets the length of blocks"
            )
        output = _count(line, "output_tokens", 0, 1)
        yield TraceRequest(_number(line, "time"), numbers.number(ids), tokens, output, tokens, _reason(line))


def _read_counts(lines: Iterable[_Line], block_tokens: int) -> Iterator[TraceRequest]:
    rows: dict[tuple[str, ...], int] = {}
    """A number for each row of blocks: of a session, since it last began anew, or of a shared prefix."""
    sessions: dict[str, tuple[int, int, Ids]] = {}
    """Of each session, how often it began anew, the tokens so far, and the blocks of its shared prefix."""
    for line in sorted(lines, key=lambda line: _number(line, "time")):
        session = line[1].get("session")
        if not isinstance(session, str | int):
            raise InputError(f"{line[0]}: session: expected a name, got {show_value(session)}")
        name, prompt = str(session), _count(line, "input_tokens", 1)
        output = _count(line, "output_tokens", 0, 1)
        starts, length, prefix = sessions.get(name, (0, prompt + 1, _NO_IDS))
        if prompt < length:
            starts += 1
            shared, tokens = _shared_prefix(line)
            row = rows.setdefault(("shared", shared), len(rows))
            prefix = _row(row, 0, min(tokens, prompt) // block_tokens)
        sessions[name] = starts, prompt + output, prefix
        row = rows.setdefault(("session", name, str(starts)), len(rows))
        own = _row(row, len(prefix), -(-(prompt + output) // block_tokens))
        yield TraceRequest(
            _number(line, "time"),
            np.concatenate((prefix, own)),
            prompt,
            output,
            prompt + output,
            _reason(line),
        )


_NO_IDS: Ids = np.empty(0, dtype=np.int64)


def _row(row: int, start: int, stop: int) -> Ids:
    """Return the ids of blocks `[start, stop)` of a row."""
    return np.arange(start, stop, dtype=np.int64) + row * _MOST_TOKENS


def _shared_prefix(line: _Line) -> tuple[str, int]:
    """Return the name of the prefix that a session shares, and how many tokens of it."""
    value = line[1].get("shared_prefix")
    name, _, tokens = str(value or 0).rpartition(":")
    if isinstance(value, float | bool | list | dict) or not tokens.isdecimal() or len(tokens) > 8:
        expected = "expected a number of tokens, or name:tokens"
        raise InputError(f"{line[0]}: shared_prefix: {expected}, got {show_value(value)}")
    return name, int(tokens)


# -- recordings ------------------------------------------------------------------------------------


class _Chain:
    """A request that is derived from stores: its blocks so far, and when the first and last of them came."""

    def __init__(self, began: float) -> None:
        self.began = self.time = began
        self.names: list[object] = []


def _read_recording(path: Path) -> Trace:
    """Derive requests from the stores of a recording."""
    parents: dict[object, object] = {}
    tips: dict[object, _Chain] = {}
    requests: list[_Chain] = []
    sizes: set[int] = set()
    orphans = 0
    for time, event in _stores(path):
        sizes.add(event.block_size)
        names, parent = event.block_hashes, event.parent_block_hash
        request = tips.pop(parent, None)
        if request is None or time - request.time > GAP:
            request = _Chain(time)
            requests.append(request)
            orphans += parent is not None and parent not in parents
            request.names = _chain_to(path, parent, parents)
        request.time = time
        request.names += names
        for name in names:
            parents[name], parent = parent, name
        tips[parent] = request
    if not requests or len(sizes) != 1:
        expected = "expected stores of blocks of one size on the GPU, with their tokens"
        raise InputError(f"{path}: {expected}, got {len(requests)} of sizes {sorted(sizes)}")
    (size,) = sizes
    numbers, start = PrefixIds(), requests[0].began
    notes = ["Requests are derived from stores: those that computed no new block are missing."]
    if orphans:
        notes.append(f"Of {orphans:,} requests the first blocks were stored before the recording began.")
    derived = [
        TraceRequest(
            chained.began - start,
            numbers.number(chained.names),
            len(chained.names) * size,
            keyed_tokens=len(chained.names) * size,
        )
        for chained in requests
    ]
    return Trace(path.name, "recording of events", size, derived, tuple(notes))


def _stores(path: Path) -> Iterator[tuple[float, BlockStored]]:
    """Yield the stores on the GPU, with the time of their receipt; of several groups those of the first."""
    group: int | None = None
    with RecordingReader(path) as reader:
        for record in reader:
            try:
                events = decode_batch(record.payload, tokens=False).events if record.payload else []
            except ValueError as error:
                raise InputError(f"{path}: record {record.seq}: {error}") from None
            for event in events:
                if (
                    isinstance(event, BlockStored)
                    and event.medium in (None, MEDIUM_GPU)
                    and event.block_size
                ):
                    group = event.group_idx if group is None else group
                    if event.group_idx == group:
                        yield record.time, event


def _chain_to(path: Path, name: object, parents: Mapping[object, object]) -> list[object]:
    """Return the blocks from the head of a prefix to this one."""
    names: dict[object, None] = {}
    while name is not None:
        if name in names:
            got = f"{show_value(name)}, which follows itself"
            raise InputError(f"{path}: expected blocks that follow others, got {got}")
        names[name] = None
        name = parents.get(name)
    return list(names)[::-1]
