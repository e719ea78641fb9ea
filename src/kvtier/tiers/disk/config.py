"""`DiskConfig`: what a user may set of a disk tier. Immutable; any thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Self

from kvtier.config import parse_size
from kvtier.errors import ConfigError, show_value
from kvtier.policies import make_policy

__all__ = ["DiskConfig"]

_WRITES_A_DAY = 4
"""Times the capacity: what a data-centre disk is commonly made for, or a little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """A disk tier: a folder, and how many bytes it may take there, all files and all ranks of an engine together.

    `write`: a row is written when it becomes ready in the pool (`through`), or before it leaves (`evict`). Beyond
    `write_limit` bytes in 24 hours (by default four times the capacity; 0: no limit) only what is offered a second
    time is written. `durability`: `periodic` syncs every few seconds, for machines that lose power; right bytes need
    neither. `required`: an engine does not start without it.
    """

    path: str
    capacity: int
    policy: str = "lru"
    write: str = "through"
    write_limit: int | None = None
    durability: str = "none"
    required: bool = False
    where: str = "disk"
    """How errors call it."""

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path) or "\0" in os.fspath(self.path):
            raise ConfigError(f"{self.where}.path", f"expected a folder, got {show_value(self.path)}")
        put("path", os.path.abspath(os.path.expanduser(os.fspath(self.path))))
        put("capacity", parse_size(self.capacity, f"{self.where}.capacity"))
        limit = self.capacity * _WRITES_A_DAY if self.write_limit is None else self.write_limit
        put("write_limit", parse_size(limit, f"{self.where}.write_limit"))
        self._expect_one_of("write", ("through", "evict"))
        self._expect_one_of("durability", ("none", "periodic"))
        if not isinstance(self.required, bool):
            raise ConfigError(f"{self.where}.required", f"expected true or false, got {show_value(self.required)}")
        if not isinstance(self.policy, str):
            raise ConfigError(f"{self.where}.policy", f"expected a name, got {show_value(self.policy)}")
        try:
            make_policy(self.policy, 1)
        except ConfigError as error:
            raise ConfigError(f"{self.where}.policy", str(error).removeprefix(f"{error.path}: ")) from None

    def _expect_one_of(self, name: str, values: tuple[str, ...]) -> None:
        if (value := getattr(self, name)) not in values:
            expected = " or ".join(map(repr, values))
            raise ConfigError(f"{self.where}.{name}", f"expected {expected}, got {show_value(value)}")

    @classmethod
    def from_dict(cls, values: object, where: str = "disk") -> Self:
        """Read what stands in a config under `disk`; `where` is its path there, such as `tiers[0].disk`."""
        if not isinstance(values, Mapping):
            raise ConfigError(where, f"expected a table of settings, got {show_value(values)}")
        known = [setting.name for setting in fields(cls) if setting.name != "where"]
        for name in values:
            if name not in known:
                close = get_close_matches(str(name), known, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
                raise ConfigError(f"{where}.{show_value(name).strip(chr(39))}", f"no such setting; {hint}")
        for name in ("path", "capacity"):
            if name not in values:
                raise ConfigError(f"{where}.{name}", "expected a value, got none; this setting is required")
        return cls(**values, where=where)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which `from_dict` makes an equal config."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.name != "where"}
