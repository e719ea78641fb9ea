"""Readers of a caller's values for a request. They refuse values that a step could not run (`InputError`).

A step computes many requests together, so a value that fails inside a step would stop them all. The results
are plain: lists of ints, and text that can be encoded. The caller's objects are not changed, and any
exception of their classes becomes an `InputError`. Everything here is pure; any thread may call it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kvtier.engine.sampling import SamplingParams
from kvtier.errors import InputError, show_value

__all__ = [
    "count_items",
    "expect_type",
    "read_items",
    "read_path",
    "read_sampling",
    "read_sampling_of_each",
    "read_text",
    "read_tokens",
]

_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Types that have a length and can be iterated, but are no lists of tokens."""
_MOST_TEXT = 1 << 20  # bytes: a salt travels with the events of every first block


def count_items(where: str, values: Any, expected: str) -> int:
    """Return the length of a list, tuple, array or tensor; refuse other types."""
    with _refusing(where, expected, values):
        if isinstance(values, _NO_LISTS):
            raise TypeError("not a list")
        return len(values)


def read_items(where: str, values: Any, count: int) -> Iterator[Any]:
    """Yield the `count` items of a list, tuple, array or tensor; refuse one with another number of items."""
    with _refusing(where, f"{count} items", values):
        items = values.tolist() if isinstance(values, np.ndarray | Tensor) else values
        number = 0
        for number, item in enumerate(islice(items, count + 1), 1):
            if number <= count:
                yield item
        if number != count:
            raise ValueError("it has another length than it says")


def read_tokens(where: str, prompt: Any, count: int, vocabulary: int) -> list[int]:
    """Return the `count` tokens of a prompt, 1 or more.

    Objects with an `__index__`, such as numpy's ints, become ints.
    """
    values = list(read_items(where, prompt, count))
    tokens = values if set(map(type, values)) == {int} else [_read_token(where, value) for value in values]
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        bad = next(token for token in tokens if not 0 <= token < vocabulary)
        raise InputError(f"{where}: expected token ids from 0 to {vocabulary - 1}, got {show_value(bad)}")
    return tokens


def _read_token(where: str, value: Any) -> int:
    with _refusing(where, "token ids that are ints", value):
        if isinstance(value, bool):
            raise TypeError("not an int")
        return operator.index(value)


def read_text(where: str, value: Any) -> str:
    """Return text of at most 1 MiB that can be encoded: hashes and events are made of its bytes."""
    expected = f"text without lone surrogates, of at most {_MOST_TEXT} bytes"
    with _refusing(where, expected, value):
        encoded = str.encode(value)
        if len(encoded) > _MOST_TEXT:
            raise ValueError("too long")
        return encoded.decode()  # a plain str, without the hash and equality of a subclass


def read_path(where: str, value: Any) -> Path:
    """Return a value as a path, if it can be one."""
    with _refusing(where, "the path of a folder", value):
        path = Path(value)
        if "\0" in str(path):
            raise ValueError("no path has that character")
        return path


def expect_type(where: str, value: object, expected: type) -> None:
    """Refuse a value of another type."""
    if not isinstance(value, expected):
        raise InputError(f"{where}: expected {expected.__name__}, got {show_value(value)}")


def read_sampling(where: str, params: Any) -> SamplingParams:
    """Return the parameters of a request; the defaults for `None`."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InputError(f"{where}: expected SamplingParams or None, got {show_value(params)}")
    return params


def read_sampling_of_each(params: Any, number: int) -> list[SamplingParams]:
    """Return the parameters of each of `number` prompts; the caller may give one for all."""
    if params is None or isinstance(params, SamplingParams):
        return [read_sampling("params", params)] * number
    given = count_items("params", params, "SamplingParams, or a list of them")
    if given != number:
        raise InputError(f"params: expected one for each of {number} prompts, got {given}")
    listed = read_items("params", params, given)
    return [read_sampling(f"params[{index}]", param) for index, param in enumerate(listed)]


@contextmanager
def _refusing(where: str, expected: str, value: object) -> Iterator[None]:
    """Refuse a value if reading it raises anything: a caller's class may raise any exception."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{where}: expected {expected}, got {show_value(value)}") from error
