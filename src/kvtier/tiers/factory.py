"""Makes tiers from their settings: the tier and, for a shared tier, the backend that its threads open.

A kind of tier may need a package beyond kvtier itself. That package is an extra (`pip install '.[object]'`)
and is imported here, on demand. `make_tier` runs while an engine starts; it does not wait for the tier.
`open_backend` sends a question to the server, so it blocks: I/O threads only.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, assert_never

from kvtier.errors import ConfigError
from kvtier.keys import OffloadKey
from kvtier.policies import make_policy
from kvtier.tier_config import (
    DiskConfig,
    MooncakeConfig,
    ObjectConfig,
    SharedTierConfig,
    TierConfig,
    ValkeyConfig,
)
from kvtier.tiers.base import Backend, BackendRow, Tier
from kvtier.tiers.io_tier import IOTier
from kvtier.tiers.seal import SealKey, read_seal_key
from kvtier.tiers.shared_tier import SharedTier

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig

logger = logging.getLogger(__name__)

_MOONCAKE_CALLS = 3
"""Calls at the same time: one moves a batch over as many connections as the store likes, one seals the next
batch, and one is kept free of writes.
"""
_HOW_MANY_ENGINES = (
    "%s: this is data-parallel engine %d, of how many is not known: the first to start takes all of the"
    " capacity; set %s.engines to their number"
)
_PACKAGES = {"object": "obstore", "mooncake": "mooncake"}
_NO_ROW = BackendRow(OffloadKey(b"kvtier asks whether you are there" + bytes(4)), ())


def make_tier(tier: TierConfig, config: OffloadingConfig) -> Tier:
    """Make a tier from its settings."""
    path = f"tiers[{config.settings.tiers.index(tier)}].{tier.kind}"
    if isinstance(tier, DiskConfig):
        return _make_disk(tier, config, path)
    return _make_shared(tier, config, path)


def _make_disk(tier: DiskConfig, config: OffloadingConfig, path: str) -> IOTier:
    from kvtier.tiers.disk import DiskTier

    _expect_policy(tier, f"{path}.policy")
    engines = tier.engines or config.num_engines
    if config.engine_index >= engines:
        logger.warning(_HOW_MANY_ENGINES, path, config.engine_index, path)
    return DiskTier(
        tier,
        row_bytes=config.row_bytes,
        namespace=config.tier_namespace_nowait,
        rank=config.engine_index,
        ranks=engines,
        description_bytes=config.description_bytes,
        share=config.settings.tenant_share,
    )


def _make_shared(tier: SharedTierConfig, config: OffloadingConfig, path: str) -> IOTier:
    expect_package(tier.kind, path)
    made = SharedTier(
        tier.kind,
        config.row_bytes,
        partial(open_backend, tier, config.row_bytes, config.settings.load_deadline, config.slot_bytes),
        namespace=config.tier_namespace_nowait,
        threads=_MOONCAKE_CALLS if isinstance(tier, MooncakeConfig) else tier.connections,
        seal_key=_read_seal_key(tier, path),
        place=tier.place,
        sparse_groups=frozenset(index for index, group in enumerate(config.groups) if group.is_state),
    )
    made.required = tier.required
    return made


def _read_seal_key(tier: SharedTierConfig, path: str) -> SealKey | None:
    try:
        return None if tier.seal_key_file is None else read_seal_key(tier.seal_key_file)
    except ConfigError as error:
        raise ConfigError(f"{path}.{error.path}", str(error).removeprefix(f"{error.path}: ")) from None


def _expect_policy(tier: DiskConfig, path: str) -> None:
    """Refuse a policy that cannot be made, before one of the tier's threads fails on it."""
    try:
        make_policy(tier.policy, 1)
    except ConfigError as error:
        raise ConfigError(path, str(error).removeprefix(f"{error.path}: ")) from None


def expect_package(kind: str, path: str) -> None:
    """Raise `ConfigError` if a kind of tier needs a package that is not installed.

    Any thread; imports nothing.
    """
    package = _PACKAGES.get(kind)
    if package is not None and find_spec(package) is None:
        raise ConfigError(
            path,
            f"expected the package {package}, which is not there: in a checkout, pip install '.[{kind}]'",
        )


def open_backend(
    config: SharedTierConfig, row_bytes: int, timeout: float, slot_bytes: int | None = None
) -> Backend:
    """Return a backend whose server has answered.

    The backend ends each call within `timeout` seconds if it can. `slot_bytes` is the distance between rows
    in the lent memory; by default rows follow each other without gaps.
    """
    backend = _make(config, row_bytes, timeout, row_bytes if slot_bytes is None else slot_bytes)
    try:
        backend.contains([_NO_ROW])
    except BaseException:
        backend.close()
        raise
    return backend


def _make(config: SharedTierConfig, row_bytes: int, timeout: float, slot_bytes: int) -> Backend:
    if isinstance(config, ValkeyConfig):
        from kvtier.tiers.valkey import ValkeyBackend

        return ValkeyBackend(config, row_bytes, timeout=timeout)
    if isinstance(config, ObjectConfig):
        from kvtier.tiers.object import ObjectBackend

        return ObjectBackend(config, row_bytes, timeout=timeout)
    if isinstance(config, MooncakeConfig):
        from kvtier.tiers.mooncake import MooncakeBackend

        return MooncakeBackend(config, row_bytes, timeout=timeout, slot_bytes=slot_bytes)
    assert_never(config)
