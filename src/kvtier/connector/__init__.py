"""The connector: how an engine stores and loads KV through kvtier.

It needs no engine, and no torch until KV caches are registered.
"""

from kvtier.connector.connector import OffloadingConnector
from kvtier.connector.explain import Explanation
from kvtier.connector.metadata import (
    BlockIds,
    BoundaryState,
    CachedRequest,
    ConnectorRole,
    EndOrder,
    KVConnectorOutput,
    NewRequest,
    OffloadingConnectorMetadata,
    ReqId,
    RequestView,
    StepView,
    TransferReport,
    merge_outputs,
    yield_req_data,
)
from kvtier.connector.metrics import ConnectorStats
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.state import read_params
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.transfer.base import TransferSpec

__all__ = [
    "BlockIds",
    "BoundaryState",
    "CachedRequest",
    "ConnectorRole",
    "ConnectorStats",
    "EndOrder",
    "Explanation",
    "KVConnectorOutput",
    "NewRequest",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "ReqId",
    "RequestView",
    "StepView",
    "TransferReport",
    "TransferSpec",
    "merge_outputs",
    "read_params",
    "yield_req_data",
]
