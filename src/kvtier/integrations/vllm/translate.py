"""vLLM's steps and requests in kvtier's terms, and kvtier's events in vLLM's. Nothing here keeps state."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvtier.connector import BlockIds, BoundaryState, CachedRequest, NewRequest, StepView
from kvtier.events import AllBlocksCleared, BlockRemoved, BlockStored, Describe, Description

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_HEX_DIGITS = {"blake3": 64, "sha256": 64, "sha512": 128}
"""The length of a digest by each of vLLM's algorithms for media."""


def step_view(output: SchedulerOutput, group_ids: Sequence[int]) -> StepView:
    """Translate a scheduled step, as far as it concerns the groups that are kept."""
    cached, block_state = output.scheduled_cached_reqs, output.kv_connector_block_state
    states = {} if block_state is None else block_state.boundary_state_offloads
    index_of = {group_id: index for index, group_id in enumerate(group_ids)}

    def select(block_ids: BlockIds) -> BlockIds:
        return tuple(block_ids[group_id] for group_id in group_ids)

    return StepView(
        new=[
            NewRequest(new.req_id, select(new.block_ids), new.num_computed_tokens)
            for new in output.scheduled_new_reqs
        ],
        cached=[
            CachedRequest(
                req_id, block_ids and select(block_ids), computed, req_id in cached.resumed_req_ids
            )
            for req_id, block_ids, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ],
        num_scheduled_tokens=output.num_scheduled_tokens,
        preempted_req_ids=output.preempted_req_ids or set(),
        finished_req_ids=output.finished_req_ids,
        copied_blocks=output.kv_cache_block_copies or (),
        boundary_states={
            req_id: [
                BoundaryState(index_of[group_id], block_id, boundary)
                for group_id, block_id, boundary in offers
                if group_id in index_of
            ]
            for req_id, offers in states.items()
        },
    )


def describer(vllm_config: VllmConfig) -> Describe:
    """Return `describe_blocks` for an engine."""
    return partial(describe_blocks, media_digest=_media_digest(vllm_config))


def _media_digest(vllm_config: VllmConfig) -> re.Pattern[str] | None:
    """Return the form of the digests by which an engine names images and other media, if it has any.

    With both its processor cache and its prefix cache turned off, vLLM counts media and hashes none.
    """
    media = vllm_config.model_config.multimodal_config
    if media is None:
        return None
    hashes = media.mm_processor_cache_gb > 0 or vllm_config.cache_config.enable_prefix_caching
    digits = _HEX_DIGITS.get(media.mm_hasher_algorithm) if hashes else None
    return None if digits is None else re.compile(f"[0-9a-f]{{{digits}}}")


def describe_blocks(
    request: Request, start: int, stop: int, block_size: int, media_digest: re.Pattern[str] | None = None
) -> Description:
    """Describe the blocks of a request's tokens `[start, stop)`, as vLLM describes its own.

    `media_digest` is the form of a medium's name that vLLM has computed from its content; another name comes
    from a client or a counter. The other extra keys of vLLM's hashes are content: the salt, and digests of
    embeddings.
    """
    lora = request.lora_request
    extra, item = [], 0  # the multimodal item to continue with
    for block in range(start, stop, block_size):
        keys, item = generate_block_hash_extra_keys(request, block, block + block_size, item)
        extra.append(keys)
    return Description(
        token_ids=request.all_token_ids[start:stop],
        lora_id=None if lora is None else lora.adapter_id,
        lora_name=None if lora is None else lora.name,
        extra_keys=to_event_extra_keys(extra),
        keyed_by_content=all(
            media_digest is not None and media_digest.fullmatch(media.identifier)
            for media in request.mm_features
        ),
    )


def translate_event(
    event: Any, group_ids: Sequence[int], kinds: Mapping[int, str]
) -> kv_events.KVCacheEvent:
    """Convert our event to vLLM's: the same fields, with hashes, group and its kind in vLLM's form."""
    theirs = {
        kind: getattr(kv_events, kind.__name__) for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
    }
    values = {name: getattr(event, name) for name in event.__struct_fields__}
    if "block_hashes" in values:
        values["block_hashes"] = [
            maybe_convert_block_hash(block_hash) for block_hash in values["block_hashes"]
        ]
    if values.get("parent_block_hash") is not None:
        values["parent_block_hash"] = maybe_convert_block_hash(values["parent_block_hash"])
    if values.get("group_idx") is not None:
        values["group_idx"] = group_ids[values["group_idx"]]
    if values.get("kv_cache_spec_kind") is not None:
        values["kv_cache_spec_kind"] = kinds[values["group_idx"]]
    return theirs[type(event)](**values)
