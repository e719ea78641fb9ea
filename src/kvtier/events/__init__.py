"""The KV event stream: tells other processes what is cached where. Needs no torch and no engine.

Only the modules that a scheduler needs are imported with the package. All other names are imported when they
are first used, so that an engine that publishes nothing does not load ZeroMQ.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier.events.tracker import Describe, Description, OffloadingEventsTracker
from kvtier.events.types import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExternalBlockHash,
    KVCacheEvent,
    KVConnectorKVEvents,
    KVEventAggregator,
    KVEventBatch,
    Mark,
    blocks_of,
)

if TYPE_CHECKING:
    from kvtier.events.config import KVEventsConfig
    from kvtier.events.curve import CurveClient, CurveServer, make_keys
    from kvtier.events.follow.follower import Follower
    from kvtier.events.follow.link import SocketOptions, Source
    from kvtier.events.follow.state import RequestKind, StreamRequest
    from kvtier.events.publisher import (
        EventPublisher,
        EventPublisherFactory,
        NullEventPublisher,
        PublisherStats,
        ZmqEventPublisher,
    )
    from kvtier.events.subscriber import Subscriber
    from kvtier.events.updates import (
        Counters,
        Kind,
        Limits,
        Received,
        Reset,
        SourceStatus,
        State,
        StateChanged,
        Update,
    )
    from kvtier.events.wire import (
        Batch,
        Change,
        DecodedBatch,
        EventEncoder,
        NumberedPayload,
        Place,
        array_fields,
        change_of,
        decode_batch,
        frame_batch,
        hash_sum,
        place_of,
        place_weight,
        to_u64,
    )
    from kvtier.events.wire_structs import Encoding

_LATER = (
    "wire_structs",
    "wire",
    "updates",
    "follow.state",
    "follow.follower",
    "curve",
    "config",
    "follow.link",
    "subscriber",
    "publisher",
)
"""The modules of the other names. Those from `curve` on need ZeroMQ, so they come last."""

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "Batch",
    "BlockRemoved",
    "BlockStored",
    "Change",
    "Counters",
    "CurveClient",
    "CurveServer",
    "DecodedBatch",
    "Describe",
    "Description",
    "Encoding",
    "EventBatch",
    "EventEncoder",
    "EventPublisher",
    "EventPublisherFactory",
    "ExternalBlockHash",
    "Follower",
    "KVCacheEvent",
    "KVConnectorKVEvents",
    "KVEventAggregator",
    "KVEventBatch",
    "KVEventsConfig",
    "Kind",
    "Limits",
    "Mark",
    "NullEventPublisher",
    "NumberedPayload",
    "OffloadingEventsTracker",
    "Place",
    "PublisherStats",
    "Received",
    "RequestKind",
    "Reset",
    "SocketOptions",
    "Source",
    "SourceStatus",
    "State",
    "StateChanged",
    "StreamRequest",
    "Subscriber",
    "Update",
    "ZmqEventPublisher",
    "array_fields",
    "blocks_of",
    "change_of",
    "decode_batch",
    "frame_batch",
    "hash_sum",
    "make_keys",
    "place_of",
    "place_weight",
    "to_u64",
]


def __getattr__(name: str) -> Any:
    """Import modules until one has the public name."""
    if name in __all__:
        for module in _LATER:
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                globals()[name] = found  # so that the next access does not come here
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
