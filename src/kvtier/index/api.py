"""The indexer's HTTP interface, in the shapes that routers already speak.

Requests that say `model_name` are answered as Dynamo's standalone indexer answers them, those that say `model` or `modelname` as
Mooncake's conductor does (RFC 1403). Counts are tokens. Both answers carry more than those: whether each worker's picture is
`exact`, `repairing` or `degraded`, under `states` or in each instance's `state`; who does not know the field does not see it.

    POST /register /unregister /query /query_by_hash         GET /workers /dump /health /metrics

With keys by XXH3, `block_hashes` are hashes of single blocks, as Dynamo's clients send, and `seq_hashes` are chained ones, as
Mooncake's do; with the engine's keys both are the engine's hashes. Functions here belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from kvtier.errors import InputError
from kvtier.events.updates import State
from kvtier.index.base import Hashes, Match, Tier
from kvtier.index.http import HttpError, Request, Response
from kvtier.index.metrics import metrics_of
from kvtier.index.service import Conflict, Group, GroupKey, NotFound, Registration, Service, Worker
from kvtier.index.xxh3 import chain_keys

__all__ = ["Api"]

T = TypeVar("T")
_WORST = (State.DEGRADED, State.REPAIRING, State.EXACT)
_TIER_NAMES = {Tier.GPU: "device", Tier.CPU: "host_pinned", Tier.STORAGE: "disk"}

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
BlockHash = int
InstanceId = Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class _Named(msgspec.Struct, kw_only=True):
    """A request about a model, in either dialect."""

    model_name: Text | None = None
    model: Text | None = None
    modelname: Text | None = None
    routing_group: Text | None = None
    tenant_id: Text | None = None

    @property
    def is_mooncake(self) -> bool:
        return self.model_name is None

    @property
    def name(self) -> str:
        name = self.model_name or self.model or self.modelname
        if not name:
            raise HttpError(422, "expected the field `model_name`")
        return name

    @property
    def group_name(self) -> str | None:
        """What the request says of the group. A tenant is one in Mooncake's dialect; Dynamo ignores it."""
        return self.routing_group or (self.tenant_id if self.is_mooncake else None)

    @property
    def group(self) -> GroupKey:
        return GroupKey(self.name, self.group_name or "default")


class _Register(_Named, kw_only=True):
    instance_id: InstanceId
    endpoint: Text
    block_size: Size
    dp_rank: Rank | None = None
    replay_endpoint: Text | None = None
    topic: Text = ""


class _Unregister(_Named, kw_only=True):
    instance_id: InstanceId
    dp_rank: Rank | None = None


class _Question(_Named, kw_only=True):
    instance_id: InstanceId | None = None
    block_size: Size | None = None
    lora_name: Text | None = None
    cache_salt: Text | None = None


class _Query(_Question, kw_only=True):
    token_ids: list[Token]


class _QueryByHash(_Question, kw_only=True):
    block_hashes: list[BlockHash] | None = None
    seq_hashes: list[BlockHash] | None = None
    block_hash: list[BlockHash] | None = None


class Api:
    """Answers requests out of a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.requests: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._routes: dict[str, tuple[str, Callable[[Request], Any]]] = {
            "/register": ("POST", self._register),
            "/unregister": ("POST", self._unregister),
            "/query": ("POST", self._query),
            "/query_by_hash": ("POST", self._query_by_hash),
            "/workers": ("GET", self._workers),
            "/dump": ("GET", self._dump),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        start = time.perf_counter()
        path = request.path if request.path in self._routes else "other"
        response = HttpError(500, "the server failed on this request; its log says why").response()
        try:
            response = await self._answer(request)
        except HttpError as error:
            response = error.response()
        finally:
            self.requests[path, response.status] += 1
            self.seconds[path] += time.perf_counter() - start
        return response

    async def _answer(self, request: Request) -> Response:
        if request.path not in self._routes:
            raise HttpError(404, f"expected one of {' '.join(self._routes)}")
        method, answer = self._routes[request.path]
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            raise HttpError(405, f"expected {method} {request.path}", allow=method)
        try:
            # a dump may be long; it must not keep the questions waiting
            result = await asyncio.to_thread(answer, request) if request.path == "/dump" else answer(request)
        except NotFound as error:
            raise HttpError(404, str(error)) from None
        except Conflict as error:
            raise HttpError(409, str(error)) from None
        except InputError as error:
            raise HttpError(400, str(error)) from None
        return result if isinstance(result, Response) else Response.json(result)

    # -- registrations -----------------------------------------------------------------------------------------------------

    def _register(self, request: Request) -> Response:
        wanted = _read(request, _Register)
        new = Registration(
            wanted.group, wanted.instance_id, wanted.dp_rank or 0, wanted.endpoint, wanted.replay_endpoint, wanted.topic
        )
        self.service.register(new, wanted.block_size)
        if wanted.is_mooncake:
            return Response.json({"status": "registered successfully", "instance_id": wanted.instance_id})
        return Response.json({"status": "ok"}, 201)

    def _unregister(self, request: Request) -> Any:
        wanted = _read(request, _Unregister)
        group = wanted.group_name or ("default" if wanted.is_mooncake else None)
        gone = self.service.unregister(str(wanted.instance_id), wanted.name, group, wanted.dp_rank)
        if not wanted.is_mooncake:
            return {"status": "ok"}
        removed = [f"{each.instance_id}|{each.group.routing_group}|{each.rank}" for each in gone]
        return {"status": "unregistered successfully", "removed_instances": removed}

    # -- questions ---------------------------------------------------------------------------------------------------------

    def _query(self, request: Request) -> Any:
        wanted = _read(request, _Query)
        group = self._group(wanted)
        tokens = np.array(wanted.token_ids, np.uint32)
        keys = group.index.hash_tokens(tokens, lora=wanted.lora_name or None, salt=wanted.cache_salt or None)
        return self._scores(wanted, group, keys)

    def _query_by_hash(self, request: Request) -> Any:
        wanted = _read(request, _QueryByHash)
        group = self._group(wanted)
        if not wanted.is_mooncake and wanted.cache_salt is not None:
            raise HttpError(400, "cache_salt: expected none, since block_hashes must contain it already")
        chained = wanted.seq_hashes if wanted.seq_hashes is not None else wanted.block_hash
        if (chained is None) == (wanted.block_hashes is None):
            raise HttpError(422, "expected either `block_hashes` or `seq_hashes`")
        if chained is not None:
            return self._scores(wanted, group, _hashes(chained))
        local = _hashes(wanted.block_hashes or [])
        return self._scores(wanted, group, chain_keys(local) if group.index.keys == "xxh3" else local)

    def _group(self, wanted: _Question) -> Group:
        group = self.service.group(wanted.group)
        if wanted.block_size not in (None, group.block_size):
            raise HttpError(400, f"block_size: expected {group.block_size} for this model, got {wanted.block_size}")
        return group

    def _scores(self, wanted: _Question, group: Group, keys: Hashes) -> Any:
        match = group.index.match(keys)
        states = dict(self.service.states(wanted.group))
        if wanted.is_mooncake:
            return {wanted.group.routing_group: _mooncake(match, group.block_size, states, wanted.instance_id)}
        return _dynamo(match, group.block_size, states)

    # -- views -------------------------------------------------------------------------------------------------------------

    def _workers(self, request: Request) -> Any:
        """List instances, each with its ranks."""
        model, routing_group = request.query.get("model_name"), request.query.get("routing_group")
        listed: dict[tuple[GroupKey, str], dict[str, Any]] = {}
        groups = self.service.groups()
        for each in self.service.registrations():
            if each.group not in groups or model not in (None, each.group.model):
                continue
            if routing_group not in (None, each.group.routing_group):
                continue
            entry = listed.setdefault(
                (each.group, str(each.instance_id)),
                {
                    "instance_id": each.instance_id,
                    "source": "zmq",
                    "status": "active",
                    "model_name": each.group.model,
                    "routing_group": each.group.routing_group,
                    "block_size": groups[each.group].block_size,
                    "endpoints": {},
                    "listeners": {},
                },
            )
            listener = self._listener(each)
            entry["endpoints"][str(each.rank)] = each.endpoint
            entry["listeners"][str(each.rank)] = listener
            if listener["status"] != "active":
                entry["status"] = listener["status"]
        return list(listed.values())

    def _listener(self, registration: Registration) -> dict[str, Any]:
        status = self.service.status(registration)
        listener: dict[str, Any] = {"endpoint": registration.endpoint, "status": "pending", "state": registration.state}
        if registration.reason:
            listener["last_error" if registration.state is State.DEGRADED else "reason"] = registration.reason
        if status is not None:
            listener["status"] = "active" if status.connected else "pending"
            listener |= {"seq": status.seq, "lag": status.lag, "blocks": status.blocks, "kind": status.kind}
        return listener

    def _dump(self, request: Request) -> Response:
        """Return all that is held, as the stores that would make it so. Parents and tokens are not kept: they are null."""
        groups = self.service.groups()
        return Response.json(
            {":".join(key): {"block_size": each.block_size, "events": _dump_of(each)} for key, each in groups.items()}
        )

    def _health(self, request: Request) -> Response:
        if self.service.failure is not None:
            raise HttpError(503, f"the index follows nobody any more: {self.service.failure}")
        return Response()

    def _metrics(self, request: Request) -> Response:
        text = metrics_of(self.service, self.requests, self.seconds)
        return Response(200, text.encode(), "text/plain; version=0.0.4")


def _read(request: Request, shape: type[T]) -> T:
    """Read a request's body."""
    try:
        return msgspec.json.decode(request.body, type=shape)
    except msgspec.ValidationError as error:
        raise HttpError(422, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"expected a JSON object: {error}") from None


def _hashes(values: list[int]) -> Hashes:
    """Return hashes as they are in the index; negative ones are the same 64 bits seen as signed."""
    if any(not -(1 << 63) <= each < 1 << 64 for each in values):
        raise HttpError(422, "expected hashes of 64 bits")
    return np.array([each & ((1 << 64) - 1) for each in values], np.uint64)


def _dynamo(match: Match, block_size: int, states: dict[Worker, State]) -> dict[str, Any]:
    """Say a match as Dynamo does: whoever holds something, tiers cumulative from the GPU down."""
    scores: defaultdict[str, dict[str, int]] = defaultdict(dict)
    instances: dict[str, dict[str, Any]] = {}
    for name, reach in zip(match.workers, (match.reach * block_size).tolist(), strict=True):
        if name is None or not any(reach):
            continue
        worker = Worker.of(name)
        gpu, cpu, disk = reach
        if gpu:
            scores[worker.instance][str(worker.rank)] = gpu
        entry = instances.setdefault(worker.instance, {"longest_matched": 0, "gpu": 0, "dp": {}, "cpu": 0, "disk": 0})
        entry["dp"][str(worker.rank)] = gpu
        for tier, tokens in (("gpu", gpu), ("cpu", cpu), ("disk", disk), ("longest_matched", disk)):
            entry[tier] = max(entry[tier], tokens)
    said: defaultdict[str, dict[str, State]] = defaultdict(dict)
    for worker, state in states.items():
        said[worker.instance][str(worker.rank)] = state
    return {"scores": scores, "frequencies": [], "instances": instances, "states": said}


def _mooncake(
    match: Match, block_size: int, states: dict[Worker, State], instance: int | str | None
) -> dict[str, dict[str, Any]]:
    """Say a match as Mooncake does: every instance, each medium for itself."""
    found: dict[str, dict[str, Any]] = {}
    held = {
        name: ([longest * block_size] + [tokens * block_size for tokens in alone])
        for name, longest, alone in zip(match.workers, match.any.tolist(), match.alone.tolist(), strict=True)
    }
    for worker, state in states.items():
        if instance is not None and str(instance) != worker.instance:
            continue
        longest, *tiers = held.get(worker.name, [0, 0, 0, 0])
        entry = found.setdefault(
            worker.instance, {"longest_matched": 0, "GPU": 0, "DP": {}, "CPU": 0, "DISK": 0, "state": State.EXACT}
        )
        entry["DP"][str(worker.rank)] = longest
        for name, tokens in zip(("longest_matched", "GPU", "CPU", "DISK"), (longest, *tiers), strict=True):
            entry[name] = max(entry[name], tokens)
        entry["state"] = min(entry["state"], state, key=_WORST.index)
    return found


def _dump_of(group: Group) -> list[dict[str, Any]]:
    """Return one store for each worker and tier."""
    held: defaultdict[tuple[str, Tier], list[int]] = defaultdict(list)
    for name, key, tier in group.index.entries():
        held[name, tier].append(key)
    names = {name: group.index.engine_hashes(name) for name, _ in held}
    return [
        _stored(number, Worker.of(name), tier, [names[name].get(key, key) for key in keys])
        for number, ((name, tier), keys) in enumerate(sorted(held.items()))
    ]


def _stored(number: int, worker: Worker, tier: Tier, hashes: list[int]) -> dict[str, Any]:
    """Return a store as Dynamo writes it."""
    blocks = [{"block_hash": each, "tokens_hash": None, "mm_extra_info": None} for each in hashes]
    stored = {"parent_hash": None, "start_position": None, "blocks": blocks}
    return {
        "worker_id": int(worker.instance) if worker.instance.isdecimal() else worker.instance,
        "storage_tier": _TIER_NAMES[tier],
        "residency_domain": "worker",
        "event": {"event_id": number, "data": {"stored": stored}, "dp_rank": worker.rank},
    }
