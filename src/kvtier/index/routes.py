"""The indexer's HTTP interface, in the formats that routers already use.

A request with `model_name` gets an answer like that of Dynamo's standalone indexer, one with `model` or
`modelname` an answer like that of Mooncake's conductor (RFC 1403). Counts are tokens. Both answers carry
further fields: whether each worker's replica is `exact`, `repairing` or `degraded` (under `states`, or in
each instance's `state`), and why it is not exact (under `reasons`, or in `reason`). Clients that do not
know these fields ignore them.

    POST /register /unregister /query /query_by_hash
    GET /workers /models /prefixes /dump /health /metrics, and a page at /

With XXH3 keys, `block_hashes` are hashes of single blocks, as Dynamo's clients send them, and `seq_hashes`
are chained ones, as Mooncake's do; with the engine's keys both are the engine's hashes. Long answers
(workers, prefixes, a dump, metrics) are made and sent in slices, and other requests are answered between
them. Metrics have names that begin with `kvtier_index_`: each model has the size, budget and refusals of its
index; each worker its blocks on each tier; each publisher its state, its lag, and the counters of its
stream; each path its requests and a histogram of their times. This belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from kvtier.errors import InputError, OutsideError
from kvtier.events.updates import Counters, State
from kvtier.events.wire import U64
from kvtier.index import page
from kvtier.index.base import Hashes, Match, StorageTier
from kvtier.index.http import Access, HttpError, HttpRequest, Response
from kvtier.index.sample import SharedPrefix, longest, shared_prefix
from kvtier.index.service import (
    Confidence,
    Conflict,
    Group,
    GroupKey,
    NotFound,
    Registration,
    Service,
    Subscription,
    Worker,
    worst,
)
from kvtier.index.xxh3 import chain_keys
from kvtier.metrics import Histogram, Metric, MetricKind, Registry, Sample

T = TypeVar("T")
_TIER_NAMES = {StorageTier.GPU: "device", StorageTier.CPU: "host_pinned", StorageTier.STORAGE: "disk"}
_CHANGES = frozenset(("/register", "/unregister"))
_DUMPS = 4
"""The most dumps at once: each keeps a list of all held blocks."""
_SEARCHES = 4
"""The most searches for shared prefixes at once."""
_PREFIXES = 20
_SLICE = 16
"""Instances that are described at once."""
_SLICE_INTERVAL = 0.002
"""Seconds between two slices of a long answer, so that other requests are answered in between."""
_REASON_LENGTH = 1000

Samples = Mapping[str, list[Sample]]

_REQUEST_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE
_INDEX = (
    Metric("blocks", _GAUGE, "Blocks that some worker holds."),
    Metric("workers", _GAUGE, "Workers that were heard of."),
    Metric("bytes", _GAUGE, "Bytes that the table takes."),
    Metric("budget", _GAUGE, "Bytes that the table may take."),
    Metric("dropped", _COUNTER, "Blocks refused because the budget was spent."),
    Metric("unknown", _COUNTER, "Removals of blocks that were not held."),
    Metric("ignored", _COUNTER, "Blocks of groups that no prefix match can be made of."),
    Metric(
        "refused", _COUNTER, "Blocks of another size, with wrong tokens, or in an area beyond the limit."
    ),
    Metric("orphans_dropped", _COUNTER, "Blocks that found no room to wait for their parents."),
    Metric("compiled", _GAUGE, "Whether compiled loops answer, or plain Python."),
    Metric("worker_blocks", _GAUGE, "Blocks that a worker holds on a tier."),
)
_STREAM = {
    counter.name: Metric(
        f"source_{counter.name}",
        _COUNTER,
        f"Of a publisher's stream: {counter.name.replace('_', ' ')}.",
    )
    for counter in fields(Counters)
}
_SOURCES = (
    Metric("source_state", _GAUGE, "1 for the state that answers about a publisher have."),
    Metric("source_ignored_batches", _COUNTER, "Batches that could not be applied."),
    Metric("source_lag_seconds", _GAUGE, "Age of a newest batch when it was applied."),
    Metric("source_connected", _GAUGE, "Whether a publisher is connected."),
    *_STREAM.values(),
)
_TRAFFIC = (
    Metric("requests", _COUNTER, "HTTP requests answered."),
    Metric("request_seconds", MetricKind.HISTOGRAM, "Times of HTTP requests.", _REQUEST_SECONDS),
    Metric("ignored_batches", _COUNTER, "Batches that could not be applied."),
)

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
        """The group in the request. Mooncake's dialect names it by a tenant, which Dynamo's ignores."""
        return self.routing_group or (self.tenant_id if self.is_mooncake else None)

    @property
    def group(self) -> GroupKey:
        return GroupKey(self.name, self.group_name or "default")


class _Register(_Named, kw_only=True):
    instance_id: InstanceId
    endpoint: Text
    block_size: Size | None = None
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
    """Answers requests from a service."""

    def __init__(self, service: Service, access: Access | None = None) -> None:
        self.service, self.access = service, access or Access()
        self._dumps = self._searches = 0
        self._traffic = Traffic()
        self._registry = make_registry(service, self._traffic)
        self._routes: dict[str, tuple[str, Callable[[HttpRequest], Any]]] = {
            "/register": ("POST", self._register),
            "/unregister": ("POST", self._unregister),
            "/query": ("POST", self._query),
            "/query_by_hash": ("POST", self._query_by_hash),
            "/workers": ("GET", self._workers),
            "/models": ("GET", self._models),
            "/prefixes": ("GET", self._prefixes),
            "/dump": ("GET", self._dump),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }
        self._routes |= {path: ("GET", partial(_file, path)) for path in page.FILES}

    async def __call__(self, request: HttpRequest) -> Response:
        """Answer a request."""
        start = time.perf_counter()
        path = request.path if request.path in self._routes else "other"
        response = HttpError(500, "the server failed on this request; its log says why").response()
        try:
            response = await self._answer(request)
        except HttpError as error:
            response = error.response()
        finally:
            self._traffic.record(path, response.status, time.perf_counter() - start)
        return response

    async def _answer(self, request: HttpRequest) -> Response:
        self.access.expect_caller(request.headers)
        if request.path not in self._routes:
            raise HttpError(404, f"expected one of {' '.join(self._routes)}")
        method, answer = self._routes[request.path]
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            raise HttpError(405, f"expected {method} {request.path}", {"Allow": method})
        if request.path in _CHANGES:
            self.access.expect_change(request.headers)
        try:
            result = answer(request)
        except NotFound as error:
            raise HttpError(404, str(error)) from None
        except Conflict as error:
            raise HttpError(409, str(error)) from None
        except InputError as error:
            raise HttpError(400, str(error)) from None
        except OutsideError as error:
            raise HttpError(503, str(error), {"Retry-After": "1"}) from None
        return result if isinstance(result, Response) else Response.json(result)

    # -- registrations -----------------------------------------------------------------------------

    def _register(self, request: HttpRequest) -> Response:
        wanted = _read(request, _Register)
        for endpoint in (wanted.endpoint, wanted.replay_endpoint or ""):
            if endpoint.startswith("ipc://") and not self.access.ipc:
                raise HttpError(403, "endpoint: expected tcp://, since the server runs without --allow-ipc")
        new = Registration(
            group=wanted.group,
            instance_id=wanted.instance_id,
            rank=wanted.dp_rank,
            endpoint=wanted.endpoint,
            replay_endpoint=wanted.replay_endpoint,
            topic=wanted.topic,
            block_size=wanted.block_size,
        )
        self.service.register(new)
        if wanted.is_mooncake:
            return Response.json({"status": "registered successfully", "instance_id": wanted.instance_id})
        return Response.json({"status": "ok"}, 201)

    def _unregister(self, request: HttpRequest) -> Any:
        wanted = _read(request, _Unregister)
        group = wanted.group_name or ("default" if wanted.is_mooncake else None)
        gone = self.service.unregister(str(wanted.instance_id), wanted.name, group, wanted.dp_rank)
        if not wanted.is_mooncake:
            return {"status": "ok"}
        removed = [f"{old.instance_id}|{old.group.routing_group}|{old.rank or 0}" for old in gone]
        return {"status": "unregistered successfully", "removed_instances": removed}

    # -- questions ---------------------------------------------------------------------------------

    def _query(self, request: HttpRequest) -> Any:
        wanted = _read(request, _Query)
        group = self._group(wanted)
        tokens = np.array(wanted.token_ids, np.uint32)
        keys = group.index.hash_tokens(tokens, lora=wanted.lora_name or None, salt=wanted.cache_salt or None)
        return self._scores(wanted, group, keys)

    def _query_by_hash(self, request: HttpRequest) -> Any:
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
        size = group.index.block_size
        if size is not None and wanted.block_size not in (None, size):
            raise HttpError(400, f"block_size: expected {size} for this model, got {wanted.block_size}")
        return group

    def _scores(self, wanted: _Question, group: Group, keys: Hashes) -> Any:
        match, confidences = self.service.answer(wanted.group, keys)
        tokens = _Tokens.of(match, group.index.block_size or 0)
        if wanted.is_mooncake:
            return {wanted.group.routing_group: _mooncake(tokens, confidences, wanted.instance_id)}
        return _dynamo(tokens, confidences)

    # -- views -------------------------------------------------------------------------------------

    def _workers(self, request: HttpRequest) -> Response:
        """List instances, each with its publishers by rank."""
        model, routing_group = request.query.get("model_name"), request.query.get("routing_group")
        listed: dict[tuple[GroupKey, str], list[tuple[Subscription, Confidence]]] = defaultdict(list)
        for subscription, confidences in self.service.subscriptions():
            key, instance = subscription.registration.group, str(subscription.registration.instance_id)
            if model in (None, key.model) and routing_group in (None, key.routing_group):
                listed[key, instance].append((subscription, worst(confidences)))
        return _json_list(_sliced(self._instance(key, found) for (key, _), found in listed.items()))

    def _instance(
        self, key: GroupKey, found: list[tuple[Subscription, Confidence]]
    ) -> dict[str, Any] | None:
        """Describe an instance; `None` if its model has been unregistered since."""
        try:
            group = self.service.group(key)
        except NotFound:
            return None
        listeners = {
            str(subscription.registration.rank or 0): self._listener(group, subscription, confidence)
            for subscription, confidence in found
        }
        return {
            "instance_id": found[0][0].registration.instance_id,
            "source": "zmq",
            "status": max(listener["status"] for listener in listeners.values()),
            "model_name": key.model,
            "routing_group": key.routing_group,
            "block_size": group.index.block_size,
            "endpoints": {rank: listener["endpoint"] for rank, listener in listeners.items()},
            "listeners": listeners,
        }

    def _listener(self, group: Group, subscription: Subscription, confidence: Confidence) -> dict[str, Any]:
        status = self.service.status(subscription)
        held = group.index.held_by(worker.name for worker in subscription.workers)
        listener: dict[str, Any] = {
            "endpoint": subscription.registration.endpoint,
            "status": "active" if status is not None and status.connected else "pending",
            "state": confidence.state,
            "ranks": [worker.rank for worker in subscription.workers],
            "ignored_batches": subscription.ignored,
            "tiers": {tier.name.lower(): count for tier, count in held.items()},
        }
        if confidence.reason:
            name = "last_error" if confidence.state is State.DEGRADED else "reason"
            listener[name] = confidence.reason[:_REASON_LENGTH]
        if status is not None:
            listener |= {"seq": status.seq, "lag": status.lag, "blocks": status.blocks, "kind": status.kind}
            listener["counters"] = status.counters.as_dict()
        return listener

    def _models(self, request: HttpRequest) -> Any:
        """List models, each with the size of its index."""
        return [
            {"model_name": key.model, "routing_group": key.routing_group}
            | {"block_size": group.index.block_size, "keys": group.index.keys}
            | group.index.stats()._asdict()
            for key, group in self.service.groups().items()
        ]

    def _prefixes(self, request: HttpRequest) -> Response:
        """List for each model the longest prefixes of sampled prompts that several workers hold."""
        if self._searches >= _SEARCHES:
            busy = f"{_SEARCHES} searches for prefixes are under way: try again later"
            raise HttpError(503, busy, {"Retry-After": "1"})
        return _json_list(self._search())

    async def _search(self) -> AsyncGenerator[list[Any], None]:
        self._searches += 1
        try:
            for key, group in self.service.groups().items():
                found: list[SharedPrefix] = []
                chains = self.service.sampled_prompts(group)
                for keys in chains:
                    if (prefix := shared_prefix(keys, group.index.match(keys))) is not None:
                        found.append(prefix)
                    await asyncio.sleep(_SLICE_INTERVAL)
                size = group.index.block_size or 0
                prefixes = [_describe_prefix(prefix, size) for prefix in longest(found, _PREFIXES)]
                model = {"model_name": key.model, "routing_group": key.routing_group, "sampled": len(chains)}
                yield [model | {"prefixes": prefixes}]
        finally:
            self._searches -= 1

    def _dump(self, request: HttpRequest) -> Response:
        """Return all held blocks, as stores. Parents and tokens are not kept, so they are null."""
        if self._dumps >= _DUMPS:
            raise HttpError(503, f"{_DUMPS} dumps are under way: try again later", {"Retry-After": "1"})
        return Response(200, self._dump_pieces())

    async def _dump_pieces(self) -> AsyncGenerator[bytes, None]:
        self._dumps += 1
        try:
            opening = b"{"
            for key, group in self.service.groups().items():
                name, size = msgspec.json.encode(":".join(key)), msgspec.json.encode(group.index.block_size)
                yield b'%b%b:{"block_size":%b,"events":[' % (opening, name, size)
                first, number = b"", 0
                slices, ids = group.index.dump(), self.service.instance_ids(key)
                # the first step may scan the whole index, the others are short
                part = await asyncio.to_thread(next, slices, None)
                while part is not None:
                    if events := list(_stores(part, number, ids)):
                        yield first + b",".join(map(msgspec.json.encode, events))
                        first, number = b",", number + len(events)
                    await asyncio.sleep(_SLICE_INTERVAL)
                    part = next(slices, None)
                yield b"]}"
                opening = b","
            yield b"}" if opening == b"," else b"{}"
        finally:
            self._dumps -= 1

    def _health(self, request: HttpRequest) -> Response:
        if self.service.failure is not None:
            raise HttpError(503, f"the index follows nobody any more: {self.service.failure}")
        return Response()

    def _metrics(self, request: HttpRequest) -> Response:
        return Response(200, self._metrics_pieces(), "text/plain; version=0.0.4")

    async def _metrics_pieces(self) -> AsyncGenerator[bytes, None]:
        for text in self._registry.texts():
            yield text.encode()
            await asyncio.sleep(_SLICE_INTERVAL)


def _file(path: str, request: HttpRequest) -> Response:
    """Return a file of the page."""
    content, kind = page.FILES[path]
    return Response(200, content, kind, page.HEADERS)


def _json_list(parts: AsyncGenerator[list[Any], None]) -> Response:
    """Answer with a JSON list that is made part by part."""
    return Response(200, _list_pieces(parts))


async def _list_pieces(parts: AsyncGenerator[list[Any], None]) -> AsyncGenerator[bytes, None]:
    before = b"["
    async with contextlib.aclosing(parts):
        async for part in parts:
            if part:
                yield before + b",".join(map(msgspec.json.encode, part))
                before = b","
    yield b"[]" if before == b"[" else b"]"


async def _sliced(values: Iterator[T | None]) -> AsyncGenerator[list[T], None]:
    """Yield values, without `None`, in slices; other requests are answered between two of them."""
    while part := list(islice(values, _SLICE)):
        yield [value for value in part if value is not None]
        await asyncio.sleep(_SLICE_INTERVAL)


def _describe_prefix(prefix: SharedPrefix, block_size: int) -> dict[str, Any]:
    steps = [
        {"tokens": step.blocks * block_size, "workers": step.workers}
        | {tier.name.lower(): count for tier, count in zip(StorageTier, step.on_tier, strict=True)}
        for step in prefix.steps
    ]
    return {"last_block": f"{prefix.last_key:016x}", "steps": steps}


def _read(request: HttpRequest, shape: type[T]) -> T:
    """Read a request's body."""
    try:
        return msgspec.json.decode(request.body, type=shape)
    except msgspec.ValidationError as error:
        raise HttpError(422, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"expected a JSON object: {error}") from None


def _hashes(values: list[int]) -> Hashes:
    """Return hashes in the form of the index; a negative hash is the same 64 bits as a signed number."""
    if any(not -(1 << 63) <= value < 1 << 64 for value in values):
        raise HttpError(422, "expected hashes of 64 bits")
    return np.array([value & U64 for value in values], np.uint64)


class _Tokens(NamedTuple):
    """The leading tokens a worker holds: in total; on each tier with those above; on each tier alone."""

    longest: int = 0
    reach: tuple[int, ...] = (0, 0, 0)
    alone: tuple[int, ...] = (0, 0, 0)

    @classmethod
    def of(cls, match: Match, block_size: int) -> dict[str, _Tokens]:
        """Return the token counts of each worker."""
        columns = [
            (column * block_size).tolist()
            for column in (match.on_any_tier, match.down_to_tier, match.on_tier)
        ]
        return {
            name: cls(longest, tuple(reach), tuple(alone))
            for name, longest, reach, alone in zip(match.workers, *columns, strict=True)
            if name is not None
        }


def _dynamo(found: dict[str, _Tokens], confidences: dict[Worker, Confidence]) -> dict[str, Any]:
    """Format a match like Dynamo: workers that hold something, tiers cumulative from the GPU down."""
    scores: defaultdict[str, dict[str, int]] = defaultdict(dict)
    instances: dict[str, dict[str, Any]] = {}
    for name, tokens in found.items():
        if not any(tokens.reach):
            continue
        worker = Worker.of(name)
        gpu, cpu, disk = tokens.reach
        if gpu:
            scores[worker.instance][str(worker.rank)] = gpu
        nothing = {"longest_matched": 0, "gpu": 0, "dp": {}, "cpu": 0, "disk": 0}
        entry = instances.setdefault(worker.instance, nothing)
        entry["dp"][str(worker.rank)] = gpu
        for tier, count in (("gpu", gpu), ("cpu", cpu), ("disk", disk), ("longest_matched", disk)):
            entry[tier] = max(entry[tier], count)
    states: defaultdict[str, dict[str, State]] = defaultdict(dict)
    reasons: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for worker, confidence in confidences.items():
        states[worker.instance][str(worker.rank)] = confidence.state
        if confidence.state is not State.EXACT:
            reasons[worker.instance][str(worker.rank)] = confidence.reason[:_REASON_LENGTH]
    answer = {"scores": scores, "frequencies": [], "instances": instances, "states": states}
    return answer | ({"reasons": reasons} if reasons else {})


def _mooncake(
    found: dict[str, _Tokens], confidences: dict[Worker, Confidence], instance: int | str | None
) -> dict[str, dict[str, Any]]:
    """Format a match like Mooncake: every instance, each medium separately."""
    instances: dict[str, dict[str, Any]] = {}
    confidences_of: defaultdict[str, list[Confidence]] = defaultdict(list)
    for worker, confidence in confidences.items():
        if instance is not None and str(instance) != worker.instance:
            continue
        tokens = found.get(worker.name, _Tokens())
        nothing = {"longest_matched": 0, "GPU": 0, "DP": {}, "CPU": 0, "DISK": 0}
        entry = instances.setdefault(worker.instance, nothing)
        entry["DP"][str(worker.rank)] = tokens.longest
        names = ("longest_matched", "GPU", "CPU", "DISK")
        for name, count in zip(names, (tokens.longest, *tokens.alone), strict=True):
            entry[name] = max(entry[name], count)
        confidences_of[worker.instance].append(confidence)
    for name, its_confidences in confidences_of.items():
        confidence = worst(its_confidences)
        instances[name]["state"] = confidence.state
        if confidence.state is not State.EXACT:
            instances[name]["reason"] = confidence.reason[:_REASON_LENGTH]
    return instances


def _stores(
    part: list[tuple[str, int, StorageTier]], number: int, ids: dict[str, int | str]
) -> Iterator[dict[str, Any]]:
    """Yield a store for each worker and tier in a slice, in Dynamo's format; with registered `ids`."""
    held: defaultdict[tuple[str, StorageTier], list[int]] = defaultdict(list)
    for name, block_hash, tier in part:
        held[name, tier].append(block_hash)
    for at, ((name, tier), hashes) in enumerate(sorted(held.items()), number):
        worker = Worker.of(name)
        blocks = [{"block_hash": value, "tokens_hash": None, "mm_extra_info": None} for value in hashes]
        stored = {"parent_hash": None, "start_position": None, "blocks": blocks}
        yield {
            "worker_id": ids.get(worker.instance, worker.instance),
            "storage_tier": _TIER_NAMES[tier],
            "residency_domain": "worker",
            "event": {"event_id": at, "data": {"stored": stored}, "dp_rank": worker.rank},
        }


# -- metrics ---------------------------------------------------------------------------------------


class Traffic:
    """Counts the HTTP requests that were answered, by path and status, and their times by path."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(_REQUEST_SECONDS))

    def record(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self.requests[path, status] += 1
        self.seconds[path].observe(seconds)


def make_registry(service: Service, traffic: Traffic) -> Registry:
    """Return the metrics of a service and of its HTTP traffic."""
    registry = Registry("kvtier_index_")
    registry.add(_INDEX, lambda: _read_indexes(service))
    registry.add(_SOURCES, lambda: _read_sources(service))
    registry.add(_TRAFFIC, lambda: _read_traffic(service, traffic))
    return registry


def _read_indexes(service: Service) -> Samples:
    samples: dict[str, list[Sample]] = {metric.name: [] for metric in _INDEX}
    for key, group in service.groups().items():
        labels = {"model": key.model, "routing_group": key.routing_group}
        stats = group.index.stats()._asdict()
        stats["compiled"] = stats["form"] == "numba"
        for name in samples.keys() & stats.keys():
            samples[name].append((labels, float(stats[name])))
        for name in group.index.workers:
            worker = Worker.of(name)
            who = labels | {"instance": worker.instance, "rank": str(worker.rank)}
            for tier, count in group.index.worker_stats(name).blocks.items():
                samples["worker_blocks"].append((who | {"tier": tier.name.lower()}, float(count)))
    return samples


def _read_sources(service: Service) -> Samples:
    samples: dict[str, list[Sample]] = {metric.name: [] for metric in _SOURCES}
    for subscription, confidences in service.subscriptions():
        labels, state, status = _labels(subscription), worst(confidences).state, service.status(subscription)
        samples["source_state"] += [(labels | {"state": name}, float(state is name)) for name in State]
        samples["source_ignored_batches"].append((labels, float(subscription.ignored)))
        if status is None:
            continue
        samples["source_connected"].append((labels, float(status.connected)))
        if status.lag is not None:
            samples["source_lag_seconds"].append((labels, status.lag))
        for name, value in status.counters.as_dict().items():
            samples[_STREAM[name].name].append((labels, float(value)))
    return samples


def _read_traffic(service: Service, traffic: Traffic) -> Samples:
    return {
        "requests": [
            ({"path": path, "status": str(status)}, float(count))
            for (path, status), count in traffic.requests.items()
        ],
        "request_seconds": [({"path": path}, seconds) for path, seconds in traffic.seconds.items()],
        "ignored_batches": [({}, float(service.ignored))],
    }


def _labels(subscription: Subscription) -> dict[str, str]:
    source = subscription.registration
    labels = {"model": source.group.model, "routing_group": source.group.routing_group}
    return labels | {"instance": str(source.instance_id), "rank": str(source.rank or 0)}
