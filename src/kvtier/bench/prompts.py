"""The prompts of `kvtier bench`: those of a file, or documents that are made up, the same in every run.

Everything here is pure but `read_prompts`, which reads a file. Any thread may call it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from kvtier.errors import InputError, show_value

Prompt = str | list[Any]
"""A text, or the messages of a chat."""

_MOST_BYTES = 256 << 20
_SUBJECTS = (
    "the harbour|a courier|our committee|the northern archive|every witness|the second engine|a visitor"
)
_VERBS = "recorded|repaired|counted|postponed|described|measured|returned|questioned"
_OBJECTS = (
    "the old bridge|three letters|a map of the valley|the winter ledger|its own report|the copper wire"
)
_ENDS = "before noon|without delay|for the ministry|after the storm|in plain words|at the far gate|by hand"
_PARTS = [part.split("|") for part in (_SUBJECTS, _VERBS, _OBJECTS, _ENDS)]


def make_document(number: int, words: int) -> str:
    """Return a text of so many words. Texts of different numbers differ from the second word on."""
    chance = random.Random(number)
    written = ["Record", f"{number}."]
    while len(written) < words:
        sentence = f"{' '.join(map(chance.choice, _PARTS))} on day {chance.randrange(1000)}."
        written += (sentence[0].upper() + sentence[1:]).split()
    return " ".join(written[:words])


def read_prompts(path: Path) -> list[Prompt]:
    """Read a file of prompts: a text is one; each line of a `.jsonl` is one.

    A line is a string, or an object with a `prompt` or with `messages`.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path}: expected at most {_MOST_BYTES >> 20} MiB of prompts")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read the prompts: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected text in UTF-8") from None
    if path.suffix != ".jsonl":
        prompts: list[Prompt] = [text] if text.strip() else []
    else:
        lines = enumerate(text.splitlines(), 1)
        prompts = [_read_line(f"{path}, line {number}", line) for number, line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{path}: expected a prompt, got an empty file")
    return prompts


def _read_line(place: str, line: str) -> Prompt:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place}: expected JSON: {error}") from None
    if isinstance(found, dict):
        found = found.get("prompt") or found.get("messages")
    if found and isinstance(found, str | list):
        return found
    shown = show_value(line)
    raise InputError(f'{place}: expected a string, {{"prompt": "…"}} or {{"messages": […]}}, got {shown}')
