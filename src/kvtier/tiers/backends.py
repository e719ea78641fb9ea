"""Makes the backend of a shared tier from its settings. It asks the server something, and so blocks: I/O
threads.

What a kind of tier needs beyond kvtier itself is an extra of the package (`pip install
'.[object]'`), and is imported here, when it is asked for.
"""

from __future__ import annotations

from importlib.util import find_spec

from kvtier.errors import ConfigError
from kvtier.keys import OffloadKey
from kvtier.tier_config import ObjectConfig, SharedTierConfig, ValkeyConfig
from kvtier.tiers.base import Backend, BackendRow

__all__ = ["expect_package", "open_backend"]

_PACKAGES = {"object": "obstore", "mooncake": "mooncake"}
_NO_ROW = BackendRow(OffloadKey(b"kvtier asks whether you are there" + bytes(4)), ())


def expect_package(kind: str, path: str) -> None:
    """Raise `ConfigError` if a kind of tier needs a package that is not there.

    Any thread; imports nothing.
    """
    package = _PACKAGES.get(kind)
    if package is not None and find_spec(package) is None:
        raise ConfigError(
            path,
            f"expected the package {package}, which is not there: in a checkout, pip install '.[{kind}]'",
        )


def open_backend(config: SharedTierConfig, row_bytes: int, timeout: float) -> Backend:
    """Return a backend whose server has answered.

    Where it can, it ends each call within `timeout` seconds.
    """
    backend = _make(config, row_bytes, timeout)
    try:
        backend.contains([_NO_ROW])
    except BaseException:
        backend.close()
        raise
    return backend


def _make(config: SharedTierConfig, row_bytes: int, timeout: float) -> Backend:
    if isinstance(config, ValkeyConfig):
        from kvtier.tiers.valkey import ValkeyBackend

        return ValkeyBackend(config, row_bytes, timeout=timeout)
    if isinstance(config, ObjectConfig):
        from kvtier.tiers.object import ObjectBackend

        return ObjectBackend(config, row_bytes, timeout=timeout)
    from kvtier.tiers.mooncake import MooncakeBackend

    return MooncakeBackend(config, row_bytes, timeout=timeout)
