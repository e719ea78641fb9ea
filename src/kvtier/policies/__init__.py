"""Eviction policies by name.

`lru`, `arc` and `gittins` are ours. Any other `CachePolicy` is named by its import path,
`"package.module:Class"`, or by a name that its package gave to `register_policy`. If such a policy fails,
the `SlotTable` that uses it goes on with LRU. `kvtier.testing.PolicySuite` tests whether a policy keeps the
contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module

from kvtier.errors import ConfigError, InputError, KVTierError, show_value
from kvtier.policies.base import UNKNOWN_ENDING, CachePolicy, Ending, KeysOf, Slots
from kvtier.policies.gittins import GittinsPolicy
from kvtier.policies.recency import ARCPolicy, LRUPolicy

__all__ = [
    "UNKNOWN_ENDING",
    "ARCPolicy",
    "CachePolicy",
    "Ending",
    "GittinsPolicy",
    "KeysOf",
    "LRUPolicy",
    "Slots",
    "make_policy",
    "policy_names",
    "register_policy",
]

_FIELD = "cpu.policy"
_policies: dict[str, type[CachePolicy] | str] = {
    "lru": LRUPolicy,
    "arc": ARCPolicy,
    "gittins": GittinsPolicy,
}


def register_policy(name: str, policy: type[CachePolicy] | str) -> None:
    """Give a name to a policy class, or to its import path. A path is imported when the policy is made."""
    if ":" in name:
        raise InputError(f"policy name: expected no colon, which stands in import paths, got {name!r}")
    if _policies.setdefault(name, policy) != policy:
        raise InputError(
            f"policy {name!r} is already registered as {_policies[name]!r}; choose another name"
        )


def policy_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_policies)


def make_policy(name: str, capacity: int) -> CachePolicy:
    """Make the policy of this name or import path for a tier of `capacity` slots."""
    policy = name if ":" in name else _policies.get(name)
    if policy is None:
        raise ConfigError(_FIELD, _unknown(name))
    if isinstance(policy, str):
        policy = _import(policy)
    path = f"{policy.__module__}:{policy.__qualname__}"
    with _blamed(f"expected a policy that can be made for {capacity} slots, got {path!r}"):
        return policy(capacity)


def _unknown(name: str) -> str:
    close = get_close_matches(name, policy_names(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"expected one of {', '.join(policy_names())} or 'package.module:Class', got {name!r}{hint}"


def _import(path: str) -> type[CachePolicy]:
    module, _, name = path.partition(":")
    with _blamed(f"expected an importable 'package.module:Class', got {path!r}"):
        policy = getattr(import_module(module), name)
    if not (isinstance(policy, type) and issubclass(policy, CachePolicy)):
        found = show_value(policy)
        raise ConfigError(
            _FIELD, f"expected a subclass of kvtier.policies.CachePolicy at {path!r}, found {found}"
        )
    return policy


@contextmanager
def _blamed(expected: str) -> Iterator[None]:
    """Turn any exception of foreign code, even `SystemExit`, into a `ConfigError`."""
    try:
        yield
    except (KVTierError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(_FIELD, f"{expected} ({reason})") from error
