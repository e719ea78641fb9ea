"""Pipeline stages of a vLLM engine: the data about each other's layers that ranks and scheduler need.

vLLM gives a worker the KV cache config of its own stage, and the scheduler that of the first. But the
lengths of the other ranks' images decide how long a row is and where a rank's image lies in it. So the
workers exchange them when their connectors are made, and rank 0 sends them to the scheduler's side by
vLLM's handshake, which comes before the first step. A worker's thread calls this while the engine starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.parallel_state import get_pp_group

from kvtier.config import GroupConfig
from kvtier.errors import InputError, KVTierError

__all__ = ["BytesByRank", "KVTierHandshake", "gather_bytes_by_rank"]

BytesByRank = tuple[tuple[int, ...], ...]
"""The bytes of one block, for each rank and of each KV cache group."""


@dataclass(frozen=True, slots=True)
class KVTierHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The data that rank 0 sends to the scheduler's side."""

    bytes_by_rank: BytesByRank


def gather_bytes_by_rank(
    describe_groups: Callable[[], tuple[GroupConfig, ...]], ranks_per_stage: int
) -> BytesByRank:
    """Exchange the block sizes of all stages, and return them for all ranks.

    Blocks until every stage has called it. If one stage cannot be served all of them raise, so that no
    stage waits for one that has given up.
    """
    own: tuple[int, ...] | str
    try:
        own = tuple(group.bytes_per_block for group in describe_groups())
    except KVTierError as error:
        own = str(error)
    pipeline = get_pp_group()
    stages: list[tuple[int, ...] | str] = [()] * pipeline.world_size
    torch.distributed.all_gather_object(stages, own, group=pipeline.cpu_group)
    ranks: list[tuple[int, ...]] = []
    for stage, told in enumerate(stages):
        if isinstance(told, str):
            raise InputError(f"pipeline stage {stage}: {told}")
        ranks += [told] * ranks_per_stage
    return tuple(ranks)
