"""Readers of config fields: sizes and times as people write them, and errors that say which field is wrong.

A setting is a field of a frozen dataclass with a reader. The reader turns the user's value into the stored
value, or raises a `ConfigError` of one line with the path of the field. Everything here is pure; any thread
may call it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError, show_value

LARGEST = (1 << 63) - 1
"""The most bytes that a file or a memory can have."""
_MOST = (1 << 31) - 1
"""The highest count: compiled code keeps some counts in 32 bits."""
_LONGEST = 365 * 24 * 3600
"""The longest wait in seconds, a year: the system's clocks and polls have bounds of their own."""
_BINARY = {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTPE", start=1)}
_DECIMAL = {f"{prefix}B": 1000**power for power, prefix in enumerate("kMGTPE", start=1)}
_SIZES = {"": 1, "B": 1} | {
    unit[:end]: factor for end in (-1, None) for unit, factor in (_DECIMAL | _BINARY).items()
}
"""The units of sizes, as Kubernetes writes them: `8G` is `8GB`, 8 * 10**9, and `8Gi` is `8GiB`, 8 * 2**30.

Case does not matter.
"""
_TIMES = {
    "": Fraction(1),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_QUANTITY = re.compile(r"\s*([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})\s*([a-zA-Z]*)\s*")


def parse_size(value: object, path: str = "") -> int:
    """Return a number of bytes from `8589934592`, `"8GiB"`, `"8Gi"`, `"8G"` or `"1.5 TB"`.

    A number without a unit must be whole: `8.5` is an error, `8.0` is 8. With a unit, the result is rounded
    down to whole bytes.
    """
    number, factor = _quantity(value, path, _SIZES, "a size such as 8GiB, 500MB or a number of bytes")
    if factor == 1 and number.denominator != 1:
        expected = "expected a whole number of bytes, or a unit as in 8.5GiB"
        raise ConfigError(path, f"{expected}, got {show_value(value)}")
    if number * factor > LARGEST:
        raise ConfigError(path, f"expected a size below {format_size(LARGEST)}, got {show_value(value)}")
    return math.floor(number * factor)


def parse_duration(value: object, path: str = "") -> float:
    """Return seconds from `2`, `0.5`, `"500ms"`, `"2s"`, `"5m"`, `"1h"` or `"30d"`, a year at most."""
    number, factor = _quantity(value, path, _TIMES, "a time such as 500ms, 2s or a number of seconds")
    if number * factor > _LONGEST:
        raise ConfigError(path, f"expected a year (8760h) at most, got {show_value(value)}")
    return float(number * factor)


def format_size(size: int) -> str:
    """Return a size as people read it: `4.0 MiB`, `512 B`."""
    for unit, factor in reversed(_BINARY.items()):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _quantity(
    value: object, path: str, units: Mapping[str, int | Fraction], expected: str
) -> tuple[Fraction, int | Fraction]:
    """Return a number that is 0 or more, and the factor of its unit."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return Fraction(value), 1
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    factor = (
        {unit.lower(): factor for unit, factor in units.items()}.get(match[2].lower()) if match else None
    )
    if match is None or factor is None:
        raise ConfigError(path, f"expected {expected}, got {show_value(value)}")
    return Fraction(match[1]), factor


# A reader takes a field's path and the user's value; it returns the stored value, or raises with the path.
Reader = Callable[[str, Any], Any]


def read_size(path: str, value: object) -> int:
    return parse_size(value, path)


def read_duration(path: str, value: object) -> float:
    seconds = parse_duration(value, path)
    if seconds <= 0:
        raise ConfigError(path, f"expected a time greater than 0, got {show_value(value)}")
    return seconds


def read_flag(path: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(path, f"expected true or false, got {show_value(value)}")
    return value


def read_number(path: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(path, f"expected a number of at least 0, got {show_value(value)}")
    return float(value)


def read_share(path: str, value: object) -> float:
    share = read_number(path, value)
    if share > 1:
        raise ConfigError(path, f"expected a share from 0 to 1, got {show_value(value)}")
    return share


def read_name(path: str, value: object) -> str:
    if not is_text(value) or not value:
        raise ConfigError(path, f"expected a name, got {show_value(value)}")
    return str(value)


def read_text(path: str, value: object) -> str:
    if not is_text(value):
        raise ConfigError(path, f"expected a string, got {show_value(value)}")
    return str(value)


def is_text(value: object) -> bool:
    """Return whether a value is a string that can be encoded: JSON may bring half a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def one_of(*choices: str) -> Reader:
    def read(path: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:  # other types may compare as they like
            close = get_close_matches(value, choices, n=1) if isinstance(value, str) else []
            hint = f"; did you mean {close[0]!r}?" if close else ""
            expected = " or ".join(map(repr, choices))
            raise ConfigError(path, f"expected {expected}, got {show_value(value)}{hint}")
        return str(value)

    return read


def read_path(path: str, value: object) -> str:
    if not isinstance(value, (str, Path)) or not is_text(str(value)) or not str(value) or "\0" in str(value):
        raise ConfigError(path, f"expected a folder, got {show_value(value)}")
    return os.path.abspath(os.path.expanduser(value))


def at_least(minimum: int, maximum: int = _MOST) -> Reader:
    def read(path: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(
                path, f"expected a whole number of at least {minimum}, got {show_value(value)}"
            )
        if value > maximum:
            raise ConfigError(path, f"expected a whole number of at most {maximum}, got {show_value(value)}")
        return value

    return read


def optional(reader: Reader) -> Reader:
    return lambda path, value: None if value is None else reader(path, value)


def instance(cls: type) -> Reader:
    def read(path: str, value: object) -> object:
        if not isinstance(value, cls):
            raise ConfigError(path, f"expected a {cls.__name__}, got {show_value(value)}")
        return value

    return read


def setting(reader: Reader, default: Any = MISSING) -> Any:
    """Declare a dataclass field that `reader` reads."""
    return field(default=default, metadata={"reader": reader})


def read_fields(config: Any, prefix: str = "") -> None:
    """Pass every field of a frozen dataclass through its reader."""
    for setting in fields(config):
        value = setting.metadata["reader"](prefix + setting.name, getattr(config, setting.name))
        object.__setattr__(config, setting.name, value)


def expect_table(path: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(path, f"expected a table of settings, got {show_value(value)}")
    return dict(value)


Suggest = Callable[[type, str, str], str]
"""Takes a class of settings, an unknown name and the prefix of its path; returns a hint for the error."""


def check_names(cls: type, values: Mapping[str, Any], prefix: str, suggest: Suggest | None = None) -> None:
    """Refuse unknown fields, with a suggestion, and missing required fields."""
    known = {setting.name: setting for setting in fields(cls)}
    for name in values:
        if name not in known:
            text = shown(name)
            raise ConfigError(
                f"{prefix}{text}", f"no such setting{(suggest or _suggest)(cls, text, prefix)}"
            )
    for name, setting in known.items():
        if setting.default is MISSING and name not in values:
            raise ConfigError(f"{prefix}{name}", "expected a value, got none; this setting is required")


def _suggest(cls: type, name: str, prefix: str) -> str:
    names = sorted(setting.name for setting in fields(cls))
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; expected one of {', '.join(names)}"


def shown(name: object) -> str:
    """Return a name as the path of an error shows it."""
    return name if isinstance(name, str) and name.isprintable() and len(name) < 80 else show_value(name)
