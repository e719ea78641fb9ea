"""The KV event stream: tells other processes what is cached where. Needs no torch and no engine."""

from __future__ import annotations

from kvtier.events.aggregator import KVConnectorKVEvents, KVEventAggregator
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
    KVEventBatch,
    Mark,
    blocks_of,
)
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
    Encoding,
    EventEncoder,
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
