"""Audits: a small share of hits is computed although it could be loaded, and compared with the kept rows.

A namespace cannot name everything that KV depends on: a kernel that was upgraded, a hash that collides, our
own bugs. Computing finds what no name can know. `Audits` chooses the hits. An audited request loads its hit
without its end; the engine computes the rest as it would after a miss, and the computed chunks are copied to
scratch slots, where each worker compares them with the kept rows (`transfer.compare`). A row that is too far
away is dropped in all tiers. After `_MOST_MISMATCHES` requests with such a row the process leaves its
namespace.

Audits cost computing, and have a budget: the share `audit` of the tokens that the engine has computed, and
an advance, since a new process trusts rows that it has not made. A hit is audited if at least `_LEAST_HITS`
hits have passed since the last audit and the budget allows it: half of the time the whole hit, which finds a
wrong image at its head too, else only its last chunk, which is cheap and finds wrong weights. Scheduler
thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from random import Random

from kvtier.config import OffloadingConfig
from kvtier.connector.jobs import StoreJob, plan_store
from kvtier.connector.load_decision import match_prefix
from kvtier.connector.metadata import OffloadingConnectorMetadata, ReqId, TransferReport
from kvtier.connector.state import ChunkGeometry, GroupState, RequestState
from kvtier.keys import OffloadKey
from kvtier.offload.base import NO_REQUEST, OffloadingManager, ReadLease, WriteLease
from kvtier.residency import MissReason
from kvtier.transfer.base import AuditLoadStoreSpec, BlockIDsLoadStoreSpec

logger = logging.getLogger(__name__)

_ADVANCE = 4096
"""Tokens that a process may spend on audits before it has computed any."""
_MOST_CREDIT = 16_384
_LONGEST = 4096
"""The most tokens that one audit computes: the last ones of a longer hit."""
_LEAST_HITS, _MOST_HITS = 32, 96
"""The hits between two audits are a random number in this range, so that clients cannot foresee them."""
_MOST_CHUNKS = 64
"""The most chunks of an audit that are compared in one step."""
_SCRATCH_SHARE = 16
"""One slot of the pool in this many may be scratch."""
_MOST_MISMATCHES = 3
_SCRATCH = b"audit"
"""Stands before the keys of scratch slots, so that nobody looks them up."""


@dataclass(slots=True, kw_only=True)
class AuditJob(StoreJob):
    """A store into scratch slots, under keys that nobody looks up, and a comparison with kept rows."""

    kept: ReadLease
    """The kept rows, in the order of `keys`."""
    sources: dict[OffloadKey, str] = field(default_factory=dict)
    """The tiers that rows were promoted from for the request."""
    distance: float = 0.0

    def add_to(self, meta: OffloadingConnectorMetadata) -> None:
        """Order this audit."""
        scratch, kept = self.lease.spec, self.kept.spec
        assert isinstance(scratch, BlockIDsLoadStoreSpec)
        assert isinstance(kept, BlockIDsLoadStoreSpec)
        meta.audits[self.job_id] = (
            self.req_id,
            (self.gpu_end, AuditLoadStoreSpec(scratch.block_ids, kept.block_ids)),
        )

    def settle(self) -> None:
        """Free the scratch slots, and unpin the kept rows."""
        self.lease.abandon()
        self.kept.release()

    def take_report(self, report: TransferReport) -> None:
        """Take in the report of one rank."""
        StoreJob.take_report(self, report)
        self.distance = max(self.distance, report.result.distance or 0.0)

    def wrong(self) -> list[OffloadKey]:
        """Return the keys of the kept rows that are not the KV that was computed."""
        return [self.kept.keys[index] for index in sorted(self.corrupt)]


class Audits:
    """Chooses the hits that are audited, and plans the jobs that audit them."""

    def __init__(
        self,
        config: OffloadingConfig,
        geometry: ChunkGeometry,
        manager: OffloadingManager,
        rng: Random | None = None,
    ) -> None:
        self._config, self._geometry, self._manager = config, geometry, manager
        self._share = config.settings.audit if config.audits else 0.0
        self._rng = rng or Random()
        self._credit = float(_ADVANCE)
        self._hits_to_pass = self._draw_hits()
        self._mismatched: set[ReqId] = set()
        self.largest_distance = 0.0
        """The largest distance that an audit has found."""

    def _draw_hits(self) -> int:
        return self._rng.randint(_LEAST_HITS, _MOST_HITS) if self._share < 1 else 0

    def earn(self, num_tokens: int) -> None:
        """Add a step's tokens to the budget."""
        if self._share:
            self._credit = min(_MOST_CREDIT, self._credit + self._share * num_tokens)

    def choose_end(self, state: RequestState, end: int) -> int:
        """Return where the load of a hit up to `end` ends, before it if the hit is audited.

        The choice is made once for a request, however often it asks. `state.audit` becomes the tokens to
        audit.
        """
        if state.audit_tokens is None:
            state.audit_tokens = self._choose_tokens(end - state.local)
        state.audit = range(0)
        if state.audit_tokens:
            least = max(state.local, end - state.audit_tokens)
            start = match_prefix(self._geometry, self._manager, state, least).end
            if end - start > state.audit_tokens:  # no window or no state is kept so close to the end
                if end - start > _LONGEST and self._share < 1:
                    self._credit += state.audit_tokens
                    state.audit_tokens = 0
                    return end
                self._credit -= end - start - state.audit_tokens
                state.audit_tokens = end - start
            state.audit = range(start, end)
        return state.audit.start if state.audit else end

    def _choose_tokens(self, num_tokens: int) -> int:
        """Return how many tokens at the end of a hit are audited; usually none."""
        if not self._share:
            return 0
        if self._hits_to_pass:
            self._hits_to_pass -= 1
            return 0
        whole, least = min(num_tokens, _LONGEST), min(num_tokens, self._geometry.alignment)
        tokens = whole if self._credit >= whole and self._rng.random() < 0.5 else least
        if self._share < 1:
            if self._credit < tokens:
                return 0
            self._credit -= tokens
        self._hits_to_pass = self._draw_hits()
        return tokens

    def plan(self, state: RequestState, available: int, allocated_at: Mapping[int, int]) -> AuditJob | None:
        """Plan the audit of the chunks to audit that a request has computed, up to token `available`.

        Rows are pinned and scratch slots are taken until the job is over. `None` means that no such chunk is
        kept, or that there is no slot. `allocated_at` tells which blocks of windowed groups the request has
        lost.
        """
        chunks = [self._take_computed(state, group, available, allocated_at) for group in state.groups]
        sizes = [group.chunk_size for group in self._geometry.groups if not group.is_state]
        first_left = min(available // size * size for size in sizes)
        state.audit = range(max(state.audit.start, first_left), state.audit.stop)
        keys = [key for group in chunks for key in group]
        most = min(_MOST_CHUNKS, max(1, self._config.num_slots // _SCRATCH_SHARE))
        if len(keys) > most:
            chosen = set(islice(keys, 0, None, -(-len(keys) // most)))
            chunks = [{key: at for key, at in group.items() if key in chosen} for group in chunks]
            keys = [key for group in chunks for key in group]
        if not keys:
            return None
        kept = ReadLease(self._manager, keys, self._manager.prepare_load(keys, NO_REQUEST))
        scratch_keys = [OffloadKey(_SCRATCH + key) for key in keys]
        taken = self._manager.reserve(scratch_keys, state.context)
        scratch = WriteLease(self._manager, taken.keys_to_store, taken.store_spec) if taken else None
        if scratch is None or scratch.keys != scratch_keys:
            if scratch is not None:  # another audit has some of these keys, or there is too little room
                scratch.abandon()
            kept.release()
            return None
        sources = {key: state.audit_sources.get(key, "cpu") for key in keys}
        return plan_store(
            self._config, state, chunks, scratch, partial(AuditJob, kept=kept, sources=sources)
        )

    def _take_computed(
        self, state: RequestState, group: GroupState, available: int, allocated_at: Mapping[int, int]
    ) -> dict[OffloadKey, int]:
        """Return the computed chunks of a group that are to be audited and whose rows are in the pool."""
        if group.geometry.is_state:  # in another number format; a wrong one shows in the layers above it
            return {}
        size = group.geometry.chunk_size
        first = -(-state.audit.start // size)
        stop = min(group.num_complete(available), state.audit.stop // size)
        chunks = {
            group.keys[at]: at
            for at in range(first, stop)
            if not group.geometry.is_windowed or group.still_has(at, allocated_at)
        }
        held = self._manager.lookup_many(list(chunks), state.context)
        return {key: at for (key, at), is_held in zip(chunks.items(), held, strict=True) if is_held}

    def judge(self, job: AuditJob) -> bool:
        """Drop the wrong rows of an audit in all tiers; return whether all rows must be distrusted now."""
        self.largest_distance = max(self.largest_distance, job.distance)
        if wrong := job.wrong():
            logger.error(
                "audit: request %s: %d of %d kept chunks are not the KV that was computed; the first is %s"
                " (tier %s); the largest distance is %.3g, at most %.3g is expected; they are dropped in all"
                " tiers",
                job.req_id, len(wrong), len(job.keys), wrong[0].hex(), job.sources[wrong[0]],
                job.distance, self._config.audit_tolerance,
            )  # fmt: skip
            self._manager.discard(wrong, MissReason.FAILED)
            self._mismatched.add(job.req_id)
        return len(self._mismatched) >= _MOST_MISMATCHES

    def forget_mismatches(self) -> None:
        """Count mismatches from zero again: the rows that they were found in are gone."""
        self._mismatched.clear()
