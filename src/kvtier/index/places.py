"""Where a worker can hold blocks, and which tier that is.

An event names a medium, and perhaps a group, an owner and a locality. Each combination is a lane of its own, so that a
removal from one never takes a block from another. Only groups of full attention count: of a group with a sliding window a
prefix match says nothing. Media that nobody has heard of count as storage.
"""

from __future__ import annotations

from kvtier.events.types import MEDIUM_CPU, MEDIUM_GPU, MEDIUM_STORAGE, BlockStored
from kvtier.events.wire import Place
from kvtier.index.base import Tier

__all__ = ["FULL_ATTENTION", "PLACES", "counts", "tier_of"]

PLACES: tuple[Place, ...] = tuple((medium, 0, "", "") for medium in (MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE))
"""The places that every index knows from the start, in the order of their lanes."""

FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")

_TIERS = {
    Tier.GPU: ("GPU", "DEVICE", "G1"),
    Tier.CPU: ("CPU", "CPU_PINNED", "CPU_TIER1", "HOST", "HOST_PINNED", "G2"),
}
_TIER_OF = {medium: tier for tier, media in _TIERS.items() for medium in media}


def tier_of(medium: str) -> Tier:
    """Return the tier that a medium belongs to, however it is spelt."""
    return _TIER_OF.get(medium.upper(), Tier.STORAGE)


def counts(event: BlockStored) -> bool:
    """Tell whether a prefix match over the event's group means that the prefix can be used."""
    kind = event.kv_cache_spec_kind
    return kind in FULL_ATTENTION if kind is not None else not event.group_idx
