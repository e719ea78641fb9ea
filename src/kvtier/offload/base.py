"""The contracts of offloading: a manager that knows which chunk is stored where, and a spec that makes
managers and handlers.

`OffloadingManager` runs on the scheduler thread and moves no bytes: it decides, and the worker's handlers
(see `kvtier.transfer`) obey. Nothing here blocks. The state of a chunk in a tier:

    absent -> writing -> ready <-> reading(n) -> absent

Only ready chunks without a reader may be evicted. A removal is announced before the store that reuses its
place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.keys import OffloadKey
from kvtier.residency import MissReason, OffloadingEvent
from kvtier.transfer.base import CanonicalKVCaches, LoadStoreSpec, OffloadingHandler

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig
    from kvtier.transfer.compare import RowComparer

__all__ = [
    "ChunkLookup",
    "MissReason",
    "OffloadingEvent",
    "OffloadingManager",
    "OffloadingSpec",
    "PrepareStoreOutput",
    "ReqContext",
]


@dataclass(slots=True)
class ReqContext:
    """The data of a request that a manager may use. One object serves for the life of the request."""

    kv_transfer_params: dict[str, Any] | None = None
    req_id: str = ""
    stays_in_pool: bool = False
    """The request's chunks must not leave the process: their bytes depend on more than their keys say."""


NO_REQUEST = ReqContext()
"""The context of calls that belong to no request."""


@dataclass(slots=True)
class PrepareStoreOutput:
    """The result of `prepare_store`: the keys to store, in the order offered; their places; evicted keys."""

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey] = field(default_factory=list)


class ChunkLookup(Protocol):
    """A lookup of chunks in one place or in several. It changes nothing."""

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Say for each key whether it can be had; `None`: not known yet."""
        ...

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, wait: bool = True
    ) -> int | None:
        """Count the leading keys that can be had, as `OffloadingManager.lookup_prefix` does."""
        ...


class OffloadingManager(ABC):
    """The record of the chunks that a tier holds. Scheduler thread only; no method blocks."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Say whether a chunk is ready to be read; `None`: not known yet, ask again later.

        This changes nothing.
        """

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Answer `lookup` for each key."""
        return [self.lookup(key, req_context) for key in keys]

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, wait: bool = True
    ) -> int | None:
        """Count the leading keys that are ready.

        `None`: the run ends at a chunk that is not known yet, so a later answer may be longer. With
        `wait=False` such a chunk counts as a miss and the answer is never `None`.
        """
        for hits, key in enumerate(keys):
            found = self.lookup(key, req_context)
            if not found:
                return None if found is None and wait else hits
        return len(keys)

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin ready chunks until `complete_load` and say where they are, in the order of `keys`.

        A key that is not ready is misuse: `InputError`, and nothing is pinned. A key given twice is pinned
        twice.
        """

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Note that a request used these chunks, ordered from the head of its prefix.

        Absent keys are ignored. The tail of a prefix counts as used less recently, so that it leaves before
        its head.
        """
        return

    def complete_load(self, keys: Iterable[OffloadKey], spec: LoadStoreSpec | None = None) -> None:
        """Unpin chunks pinned by `prepare_load`.

        `spec` is the result of `prepare_load` for these keys. It tells uses of one key apart: a chunk that
        was made absent while a job read it may have been stored elsewhere since. Without a spec the oldest
        use of a key ends.
        """
        return

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Take the chunks of an offer that can be stored, evicting others if need be.

        Keys that are present (ready or writing) are left out; duplicates count once. If not all keys fit,
        the last ones are left out, so that the leading part is stored. No key of the offer is evicted for
        it. `None`: there were keys to store and no place for any of them. The chunks taken are writing until
        `complete_store`.
        """

    def reserve(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Take places as `prepare_store` does, however rarely the chunks were offered.

        This is for audits, whose chunks never become ready (`complete_store` with `success=False` gives
        their places back), and for promotions. `None`: there is no place.
        """
        return None

    def complete_store(
        self, keys: Iterable[OffloadKey], success: bool = True, spec: LoadStoreSpec | None = None
    ) -> None:
        """End the writing of chunks: they become ready, or on failure absent with their place freed.

        Keys that are not being written are left alone. `spec` gives the places that `prepare_store` chose,
        as for `complete_load`. A chunk that was made absent meanwhile stays absent, and its place is freed.
        """
        return

    def discard(self, keys: Iterable[OffloadKey], reason: MissReason = MissReason.FAILED) -> None:
        """Make chunks absent from now on: their bytes are wrong (`FAILED`), or their transfers fail.

        They may be stored again at once. A place that a job still uses is freed when that job completes.
        """
        return

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the data kept for a request. Completions of its jobs may still follow."""
        return

    def explain(self, key: OffloadKey) -> MissReason | None:
        """Say why a chunk cannot be read, as far as is remembered; `None`: it can be read."""
        return MissReason.NEVER_STORED

    def explain_tiers(self, key: OffloadKey, req_context: ReqContext) -> dict[str, MissReason]:
        """Say for each tier why it cannot give a chunk to a request, as far as is remembered."""
        reason = self.explain(key)
        return {} if reason is None else {"cpu": reason}

    def reset_cache(self) -> None:
        """Make all chunks absent. It is announced in this and the next calls of `take_events`.

        Places that running jobs use are freed when those jobs complete.
        """
        return

    def has_pending_work(self) -> bool:
        """Say whether the engine must keep stepping for this manager although it has no requests."""
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Drain the changes since the last call, in order."""
        return ()

    def check(self) -> None:
        """Raise `IntegrityError` if an invariant is broken."""
        return

    def shutdown(self) -> None:
        """Release the manager's resources. Idempotent."""
        return


class OffloadingSpec(ABC):
    """A maker of the two halves of offloading from one config: a manager for the scheduler, handlers for
    each worker.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the manager, the same object every time. Only the scheduler's process calls this."""

    @abstractmethod
    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield `(src_type, dst_type, handler)` for each direction.

        Each worker's process calls this once.
        """

    def get_comparer(self) -> RowComparer | None:
        """Return the comparer of rows for a worker's audits; `None`: rows are not audited."""
        return None

    def shutdown(self) -> None:
        """Release the spec's own resources, e.g. its mapping of the pool. Idempotent."""
        return
