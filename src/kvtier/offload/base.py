"""The contracts of offloading: a manager that knows what is stored where, and a spec that makes managers and
handlers.

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
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.keys import OffloadKey
from kvtier.transfer.base import CanonicalKVCaches, LoadStoreSpec, OffloadingHandler

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig

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
    """What a manager may know of the request on whose behalf it is called.

    One object for the life of a request.
    """

    kv_transfer_params: dict[str, Any] | None = None
    req_id: str = ""
    stays_in_pool: bool = False
    """Its chunks must not leave the process: their keys do not say all that their bytes depend on."""


NO_REQUEST = ReqContext()
"""For calls that no request stands behind."""


@dataclass(slots=True)
class PrepareStoreOutput:
    """What `prepare_store` took: the keys to store, in the order offered, where to, and who had to leave for
    them.
    """

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey] = field(default_factory=list)


@dataclass(slots=True)
class OffloadingEvent:
    """Chunks that became loadable in a tier, or (`removed`) ceased to be."""

    keys: list[OffloadKey]
    medium: str
    removed: bool
    descriptions: tuple[bytes, ...] | None = None
    """What a tier has kept of each chunk for the event stream, if nobody else knows: after a restart."""


class MissReason(Enum):
    """Why a chunk cannot be loaded."""

    NEVER_STORED = "never stored"
    EVICTED = "evicted"
    REFUSED = "refused"
    WRITING = "still being written"
    FAILED = "failed its check"
    CLEARED = "cleared by a reset"
    NOT_WORTH_LOADING = "not worth loading"
    IO_FAILED = "could not be read or written"
    TOO_SLOW = "too slow"
    SUSPENDED = "suspended"
    NOT_OPEN = "not open yet"
    NAMESPACE_UNKNOWN = "namespace not known yet"
    LOST = "lost with its files"
    NO_ROOM = "no room in the pool to promote it"
    LIMITED = "beyond what the request may load"


class ChunkLookup(Protocol):
    """Answers whether chunks can be had, be it from one place or from several. Changes nothing."""

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Say of each key whether it can be had; `None`: not known yet."""
        ...

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, wait: bool = True
    ) -> int | None:
        """Count the leading keys that can be had, as `OffloadingManager.lookup_prefix` does."""
        ...


class OffloadingManager(ABC):
    """Knows which chunks a tier holds. All methods are called on the scheduler thread and none blocks."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Say whether a chunk is ready to be read; `None`: not known yet, ask again later.

        Changes nothing.
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

        Absent keys are ignored.

        Recency is applied so that the tail of a prefix leaves before its head.
        """
        return

    def complete_load(self, keys: Iterable[OffloadKey], spec: LoadStoreSpec | None = None) -> None:
        """Unpin chunks pinned by `prepare_load`.

        `spec` is what `prepare_load` returned for these keys. It tells uses of one key apart: a chunk that
        was made absent while a job read it may have been stored elsewhere since. Without it the oldest use
        of a key is meant.
        """
        return

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Take what can be stored of an offer, evicting if need be.

        Keys that are present (ready or writing) are left out; duplicates count once. What does not fit is
        left out from the end, so a partial fit stores the leading part. No key of the offer is evicted for
        it. `None`: there was something to store and no place for any of it. The chunks taken are writing
        until `complete_store`.
        """

    def complete_store(
        self, keys: Iterable[OffloadKey], success: bool = True, spec: LoadStoreSpec | None = None
    ) -> None:
        """End the writing of chunks: they become ready, or on failure absent with their place freed.

        Keys that are not being written are left alone. `spec` says where `prepare_store` put these keys, as
        for `complete_load`. A chunk that was made absent meanwhile stays absent, and its place is freed.
        """
        return

    def discard(self, keys: Iterable[OffloadKey], reason: MissReason = MissReason.FAILED) -> None:
        """Make chunks absent from now on, e.g. because their bytes are wrong.

        They may be stored again at once.

        A place that a job still uses is freed when that job completes.
        """
        return

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what is kept for a request. Completions of its jobs may still follow."""
        return

    def explain(self, key: OffloadKey) -> MissReason | None:
        """Say why a chunk cannot be read, as far as is remembered; `None`: it can."""
        return MissReason.NEVER_STORED

    def explain_tiers(self, key: OffloadKey, req_context: ReqContext) -> dict[str, MissReason]:
        """Say for each tier that cannot give a chunk why, as far as is remembered, for one request."""
        reason = self.explain(key)
        return {} if reason is None else {"cpu": reason}

    def reset_cache(self) -> None:
        """Make everything absent and announce it.

        Places in use by running jobs are freed when those complete.
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
        """Release what the manager holds. Idempotent."""
        return


class OffloadingSpec(ABC):
    """Makes the two halves of offloading from one config: a manager for the scheduler, handlers for each
    worker.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the manager. Called in the scheduler's process; the same object every time."""

    @abstractmethod
    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield `(src_type, dst_type, handler)` for each direction. Called once in each worker's process."""

    def shutdown(self) -> None:
        """Release what the spec itself holds, e.g. its mapping of the pool. Idempotent."""
        return
