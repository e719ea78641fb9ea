"""The contracts of offloading: a manager that knows which chunk is stored where, and a spec that makes
managers and handlers and is found by name.

`OffloadingManager` runs on the scheduler thread and moves no bytes: it decides, and the worker's handlers
(see `kvtier.transfer`) obey. Nothing here blocks. The state of a chunk in a tier:

    absent -> writing -> ready <-> reading(n) -> absent

Only ready chunks without a reader may be evicted. A removal is announced before the store that reuses its
slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvtier.errors import ConfigError, InputError
from kvtier.hints import NO_HINTS, Hints
from kvtier.keys import OffloadKey
from kvtier.policies import Ending
from kvtier.residency import MissReason, OffloadingEvent
from kvtier.transfer.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    LoadStoreSpec,
    OffloadingHandler,
)

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig
    from kvtier.transfer.compare import RowComparer


@dataclass(slots=True)
class ReqContext:
    """The data of a request that a manager may use. One object serves for the life of the request."""

    kv_transfer_params: dict[str, Any] | None = None
    req_id: str = ""
    stays_in_pool: bool = False
    """The request's chunks must not leave the process: their bytes depend on more than their keys say."""
    ending: Ending | None = None
    """How the request ended, once it has."""
    is_cut: bool = False
    """A chunk of the request was not worth its slot. Those behind it could not be loaded without it."""
    hints: Hints = NO_HINTS
    """What the client says about the request's chunks. It counts when the request ends."""
    tenant: str = ""
    """Whose chunks they are, as `kvtier.hints.tenant_of` names a tenant."""


NO_REQUEST = ReqContext()
"""The context of calls that belong to no request."""


@dataclass(slots=True)
class PrepareStoreOutput:
    """The result of `prepare_store`: the keys to store, in the order offered; their slots; evicted keys."""

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey] = field(default_factory=list)


class ChunkLookup(Protocol):
    """A lookup of chunks in one place or in several. It changes nothing."""

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return for each key whether it can be had; `None` means that it is not known yet."""
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
        """Return whether a chunk is ready to be read; `None` means that it is not known yet.

        The caller should then ask again later. This changes nothing.
        """

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Answer `lookup` for each key."""
        return [self.lookup(key, req_context) for key in keys]

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, wait: bool = True
    ) -> int | None:
        """Count the leading keys that are ready.

        `None` means that the run ends at a chunk that is not known yet, so that a later answer may be
        longer. With `wait=False` such a chunk counts as a miss and the answer is never `None`.
        """
        for hits, key in enumerate(keys):
            found = self.lookup(key, req_context)
            if not found:
                return None if found is None and wait else hits
        return len(keys)

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin ready chunks until `complete_load` and return where they are, in the order of `keys`.

        A key that is not ready is misuse: `InputError`, and nothing is pinned. A key given twice is pinned
        twice.
        """

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Record that a request used these chunks, ordered from the head of its prefix.

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
        the last ones are left out, so that the leading part is stored, and so are the last ones if they are
        worth less than the chunks that would have to leave. No key of the offer is evicted for it. `None`
        means that there were keys to store and no slot for any of them. The chunks taken are writing until
        `complete_store`.
        """

    def reserve(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Take slots as `prepare_store` does, however rarely the chunks were offered.

        This is for audits, whose chunks never become ready (`complete_store` with `success=False` gives
        their slots back), and for promotions. `None` means that there is no slot.
        """
        return None

    def complete_store(
        self, keys: Iterable[OffloadKey], success: bool = True, spec: LoadStoreSpec | None = None
    ) -> None:
        """End the writing of chunks: they become ready, or on failure absent with their slot freed.

        Keys that are not being written are left alone. `spec` gives the slots that `prepare_store` chose,
        as for `complete_load`. A chunk that was made absent meanwhile stays absent, and its slot is freed.
        """
        return

    def discard(self, keys: Iterable[OffloadKey], reason: MissReason = MissReason.FAILED) -> None:
        """Make chunks absent from now on: their bytes are wrong (`FAILED`), or their transfers fail.

        They may be stored again at once. A slot that a job still uses is freed when that job completes.
        """
        return

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the data kept for a request. Completions of its jobs may still follow."""
        return

    def explain(self, key: OffloadKey) -> MissReason | None:
        """Return why a chunk cannot be read, as far as is remembered; `None` if it can be read."""
        return MissReason.NEVER_STORED

    def explain_tiers(self, key: OffloadKey, req_context: ReqContext) -> dict[str, MissReason]:
        """Return for each tier why it cannot give a chunk to a request, as far as is remembered."""
        reason = self.explain(key)
        return {} if reason is None else {"cpu": reason}

    def reset_cache(self) -> None:
        """Make all chunks absent. It is announced in this and the next calls of `take_events`.

        Slots that running jobs use are freed when those jobs complete.
        """
        return

    def has_pending_work(self) -> bool:
        """Return whether the engine must keep stepping for this manager although it has no requests."""
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


class SlotLease:
    """Slots that a job uses, with the keys of their chunks. Each is given back once.

    `positions` in the methods below are indices into `keys`; without them, all slots that are left are
    meant. Giving a slot back twice is an `InputError`.
    """

    def __init__(self, manager: OffloadingManager, keys: list[OffloadKey], spec: LoadStoreSpec) -> None:
        """Take over what `prepare_load` or `prepare_store` gave: `spec` has the slots, in key order."""
        self._manager = manager
        self.keys, self.spec = keys, spec
        self._left: set[int] | None = None

    @property
    def left(self) -> set[int]:
        """The positions that were not given back yet, always the same set."""
        if self._left is None:
            self._left = set(range(len(self.keys)))
        return self._left

    def _take(self, positions: Iterable[int] | None) -> tuple[list[OffloadKey], LoadStoreSpec | None]:
        """Take positions out of the lease, and return their keys and slots."""
        if self._left is None and positions is None:
            self._left = set()
            return self.keys, self.spec
        left, spec = self.left if self._left is None else self._left, self.spec
        taken = sorted(left if positions is None else positions)
        if not left.issuperset(taken):
            raise InputError(f"lease: expected positions that are left ({len(left)}), got {taken}")
        left.difference_update(taken)
        if len(taken) == len(self.keys):
            return self.keys, spec
        part = type(spec)(spec.block_ids[taken]) if isinstance(spec, BlockIDsLoadStoreSpec) else None
        return [self.keys[position] for position in taken], part


class ReadLease(SlotLease):
    """Ready chunks that are pinned for a job."""

    def release(self, positions: Iterable[int] | None = None) -> None:
        """Unpin chunks."""
        keys, spec = self._take(positions)
        if keys:
            self._manager.complete_load(keys, spec)


class WriteLease(SlotLease):
    """Slots that a job writes."""

    def commit(self, positions: Iterable[int] | None = None) -> None:
        """Make chunks ready."""
        self._complete(positions, success=True)

    def abandon(self, positions: Iterable[int] | None = None) -> None:
        """Free slots without making their chunks ready."""
        self._complete(positions, success=False)

    def _complete(self, positions: Iterable[int] | None, *, success: bool) -> None:
        keys, spec = self._take(positions)
        if keys:
            self._manager.complete_store(keys, success, spec)


class OffloadingSpec(ABC):
    """Makes the two halves of offloading from one config: a manager for the scheduler, handlers for each
    worker.
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
        """Return the comparer of rows for a worker's audits; `None` if rows are not audited."""
        return None

    def shutdown(self) -> None:
        """Release the spec's own resources, e.g. its mapping of the pool. Idempotent."""
        return


class OffloadingSpecFactory:
    """Finds specs by name. A spec outside this package is registered once, or named with its module.

    A module is imported when its spec is asked for, not before. One thread calls this while an engine
    starts.
    """

    _paths: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None:
        """Give a name to a class of a module. A name can be given once."""
        if name in cls._paths:
            taken = ":".join(cls._paths[name])
            raise ConfigError("spec_name", f"expected a new name, got {name!r}, which stands for {taken}")
        cls._paths[name] = (module_path, class_name)

    @classmethod
    def get_spec_cls(cls, name: str, module_path: str | None = None) -> type[OffloadingSpec]:
        """Import the class of a registered name, or the class of that name from `module_path`."""
        if name not in cls._paths and module_path is None:
            known = ", ".join(sorted(cls._paths))
            raise ConfigError(
                "spec_name", f"expected one of {known}, or spec_module_path to be given, got {name!r}"
            )
        module, class_name = cls._paths.get(name) or (str(module_path), name)
        try:
            found = getattr(import_module(module), class_name)
        except (ImportError, AttributeError) as error:
            raise ConfigError("spec_name", f"cannot import {class_name} from {module}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, OffloadingSpec)):
            raise ConfigError("spec_name", f"expected a subclass of OffloadingSpec, got {found!r}")
        return found

    @classmethod
    def create_spec(
        cls, config: OffloadingConfig, name: str = "CPUOffloadingSpec", module_path: str | None = None
    ) -> OffloadingSpec:
        """Make a spec."""
        return cls.get_spec_cls(name, module_path)(config)


OffloadingSpecFactory.register_spec("CPUOffloadingSpec", "kvtier.offload.cpu", "CPUOffloadingSpec")
