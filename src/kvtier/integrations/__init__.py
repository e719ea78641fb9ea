"""kvtier inside other engines: one module or package per engine; only these import an engine.

An integration only translates; it decides nothing. Its engine imports it, kvtier never does. The versions
of the engines are named here, for code that must not import an engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["VLLM_VERSIONS", "VersionRange"]


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The versions from `at_least` on and below `below`."""

    at_least: str
    below: str

    def __contains__(self, version: str) -> bool:
        return _numbers(self.at_least) <= _numbers(version) < _numbers(self.below)

    def __str__(self) -> str:
        return f">={self.at_least},<{self.below}"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `0.32.1rc2+cpu` is `(0, 32, 1)`."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


VLLM_VERSIONS = VersionRange("0.31", "0.34")
"""The versions of vLLM that kvtier is developed and tested for."""
