"""The engine: requests in, tokens out, and the calls of a connector in an engine.

A step schedules, computes and samples. The connector's calls are around the forward pass, in
`_begin_transfers` and `_end_transfers`; the scheduler makes the calls for single requests. S and W are the
connector's two sides. A step is:

    schedule    S.get_num_new_matched_tokens, S.update_state_after_alloc, for each request that comes in
    begin       S.build_connector_meta -> W.bind_connector_metadata, W.handle_preemptions, W.start_load_kv
    forward     or, with nothing to run, W.wait_for_transfers
    sample      W.wait_for_save comes first, so that stores run behind the forward pass
    end         W.take_output, W.clear_connector_metadata -> S.update_connector_output
    append      S.request_finished, for each request that ends

An engine of several processes carries the metadata to every worker and merges their outputs with
`merge_outputs`; here both sides live in one process. Without kvtier there is no connector, and nothing
else changes. One thread calls an engine.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from kvtier.config import KVTierConfig, OffloadingConfig
from kvtier.connector import ConnectorRole, Explanation, OffloadingConnector, read_params
from kvtier.engine.assembly import (
    allocate_kv,
    describe_cache,
    expect_room,
    find_max_model_len,
    make_batch,
    make_decoder,
)
from kvtier.engine.cache import KVCache, group_layers
from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.engine.event_buffer import EventBuffer, Publisher
from kvtier.engine.model import ForwardBatch
from kvtier.engine.request import (
    FinishReason,
    Request,
    RequestOutput,
    TokenSources,
    count_items,
    expect_type,
    read_items,
    read_path,
    read_sampling,
    read_sampling_of_each,
    read_text,
    read_tokens,
)
from kvtier.engine.sampling import SamplingParams, sample
from kvtier.engine.scheduler import RequestSlice, Scheduler, Step
from kvtier.engine.weights import load_config, load_weights, random_weights
from kvtier.errors import InputError, show_value
from kvtier.events.types import KVCacheEvent
from kvtier.namespace import WeightsFiles
from kvtier.offload import OffloadingSpecFactory
from kvtier.offload.base import OffloadingSpec

SpecFactory = Callable[[OffloadingConfig], OffloadingSpec]

_IDLE_SECONDS = 0.05  # a step without tokens waits this long for a transfer
_TIER_SECONDS = 0.005  # such a step waits this long for a tier, because a transfer may end meanwhile
_BACKOFF_SECONDS = 0.001  # such a step sleeps this long if no transfer runs but reports are missing


class Model(Protocol):
    """A model, as the engine needs it. `Decoder` is one."""

    @property
    def config(self) -> ModelConfig: ...
    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: Mapping[str, Tensor],
        group_of_layer: Sequence[int],
        block_size: int,
    ) -> Tensor: ...


class Engine:
    """Runs requests on one model, with optional tiers for the KV that does not fit."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        kvtier: KVTierConfig | None = None,
        *,
        weights_id: Any = None,
        spec_factory: SpecFactory = OffloadingSpecFactory.create_spec,
        publisher: Publisher | None = None,
    ) -> None:
        """Allocate the cache.

        `weights_id` is a JSON value that is equal only for equal weights; by default it is equal to no
        other. For weights in files it is `WeightsFiles`, made before they were loaded: a thread hashes their
        content. `publisher` gets each step's events, and `take_events` then returns none; its owner closes
        it.
        """
        expect_type("config", config, EngineConfig)
        if kvtier is not None:
            expect_type("kvtier", kvtier, KVTierConfig)
        if config.kv_events is None:
            config = replace(config, kv_events=publisher is not None)
        self.model, self.config = model, config
        self.groups = group_layers(model.config.layer_names, model.config.layer_kinds)
        expect_room(model.config, config, self.groups)
        self._cache = KVCache(
            self.groups,
            config.num_blocks,
            config.block_size,
            max_slice=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            state_interval=config.state_interval,
            events=bool(config.kv_events),
        )
        self.max_model_len = find_max_model_len(model.config, config, self._cache)
        group_of = {name: index for index, group in enumerate(self.groups) for name in group.layer_names}
        self._group_of_layer = [group_of[name] for name in model.config.layer_names]
        self.kv_caches = allocate_kv(model.config, config, self.groups)
        self.connector: OffloadingConnector | None = None
        self.worker: OffloadingConnector | None = None
        if kvtier is not None:
            self._connect(
                describe_cache(model.config, config, self.groups, kvtier, weights_id), spec_factory
            )
        self._scheduler = Scheduler(config, self._cache, self.connector)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._outputs: dict[int, RequestOutput] = {}
        """The newest output of each request that was not returned yet, by the request's arrival."""
        self._is_closed = False
        self._publisher = publisher
        self._events = EventBuffer()

    def _connect(self, config: OffloadingConfig, spec_factory: SpecFactory) -> None:
        """Make both sides of a connector over one spec; on failure, release everything."""
        with ExitStack() as undo:
            spec = spec_factory(config)
            undo.callback(spec.shutdown)
            undo.callback(self.close)
            self.connector = OffloadingConnector(config, ConnectorRole.SCHEDULER, spec, Request.describe)
            self.worker = OffloadingConnector(config, ConnectorRole.WORKER, spec)
            self.worker.register_kv_caches(self.kv_caches)
            undo.pop_all()

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        config: EngineConfig,
        kvtier: KVTierConfig | None = None,
        *,
        spec_factory: SpecFactory = OffloadingSpecFactory.create_spec,
        publisher: Publisher | None = None,
    ) -> Self:
        """Make an engine from a local Hugging Face folder."""
        expect_type("config", config, EngineConfig)
        folder = read_path("path", path)
        files = WeightsFiles(folder)
        model_config = load_config(folder)
        model = make_decoder(model_config, load_weights(folder, model_config), config)
        return cls(model, config, kvtier, weights_id=files, spec_factory=spec_factory, publisher=publisher)

    @classmethod
    def from_config(
        cls,
        model_config: Mapping[str, Any],
        config: EngineConfig,
        kvtier: KVTierConfig | None = None,
        *,
        seed: int = 0,
        spec_factory: SpecFactory = OffloadingSpecFactory.create_spec,
        publisher: Publisher | None = None,
    ) -> Self:
        """Make an engine from the contents of a `config.json` and random weights."""
        expect_type("config", config, EngineConfig)
        parsed = ModelConfig.from_dict(model_config)
        model = make_decoder(parsed, random_weights(parsed, seed), config)
        weights = {"random": seed, "config": asdict(parsed)}
        return cls(model, config, kvtier, weights_id=weights, spec_factory=spec_factory, publisher=publisher)

    # -- requests ----------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> str:
        """Queue a prompt and return the request's id.

        A request that could never run is refused with `InputError`, and nothing has changed. Tokens are ints
        or numpy's ints. `kv_transfer_params` are for the tiers, which ignore what is not valid in them.
        """
        return self._queue(
            self._read_prompt("prompt", prompt_token_ids),
            read_sampling("params", params),
            self._free_id() if request_id is None else self._read_id(request_id),
            cache_salt=None if cache_salt is None else read_text("cache_salt", cache_salt),
            lora_name=None if lora_name is None else read_text("lora_name", lora_name),
            kv_transfer_params=read_params(kv_transfer_params),
        )

    def _queue(
        self,
        tokens: list[int],
        params: SamplingParams,
        request_id: str,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> str:
        """Queue a request whose values have been checked."""
        self._refuse_closed()
        if params.seed is None:
            params = replace(params, seed=self.config.seed << 32 | self._arrivals)
        request = Request(
            request_id=request_id,
            tokens=tokens,
            params=params,
            arrival=self._arrivals,
            arrived_at=time.perf_counter(),
            block_size=self.config.block_size,
            cache_salt=cache_salt,
            lora_name=lora_name,
            kv_transfer_params=kv_transfer_params,
        )
        self._arrivals += 1
        if self.connector is not None:
            self.connector.on_new_request(request)
        self._requests[request_id] = request
        self._scheduler.waiting.append(request)
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, in any state, and return its output so far.

        Return `None` if there is no such request any more.
        """
        request = self._requests.get(read_text("request_id", request_id))
        if request is None:
            return None
        self._end(request, FinishReason.ABORT)
        self._outputs.pop(request.arrival, None)
        return self._output(request)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end and return their outputs in order.

        If one prompt or parameter is wrong, all are refused. Other requests run beside these, and their
        outputs wait for `step` or `drain`.
        """
        listed = read_items("prompts", prompts, count_items("prompts", prompts, "a list of prompts"))
        tokens = [self._read_prompt(f"prompts[{index}]", prompt) for index, prompt in enumerate(listed)]
        chosen = read_sampling_of_each(params, len(tokens))
        ids = [self._queue(ours, param, self._free_id()) for ours, param in zip(tokens, chosen, strict=True)]
        try:
            return self._run_to_end(ids)
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise

    def _run_to_end(self, ids: list[str]) -> list[RequestOutput]:
        """Step until these requests are over.

        A request that was aborted meanwhile is returned as it was last seen.
        """
        arrivals = {self._requests[request_id].arrival for request_id in ids}
        outputs = {request_id: RequestOutput(request_id, [], finished=True) for request_id in ids}
        while not self._requests.keys().isdisjoint(ids):
            self._advance()
            for arrival in arrivals & self._outputs.keys():
                output = self._outputs.pop(arrival)
                outputs[output.request_id] = output
        return [outputs[request_id] for request_id in ids]

    def has_unfinished(self) -> bool:
        """Return whether any request is not over, or has an output that was not returned."""
        return bool(self._requests or self._outputs)

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no request and no transfer holds."""
        return self._cache.num_free

    # -- one step ----------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one batch and return an output for each request that got a token.

        Without a batch, wait for transfers. If it raises, the requests that ran start over in the next step,
        and no token and no output is lost. A Ctrl-C takes effect after the step.
        """
        self._advance()
        return self._take_outputs()

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, {}
        return list(outputs.values())

    def _advance(self) -> None:
        """Take a step, and keep its outputs."""
        self._refuse_closed()
        with uninterrupted():
            try:
                self._step()
            except BaseException:
                self._scheduler.start_all_over()
                raise

    def _step(self) -> None:
        step = self._scheduler.schedule()
        self._begin_transfers(step)
        self._scheduler.confirm(step)
        tokens: list[int] = []
        if step.slices:
            logits = self._forward(step.slices)
            self._begin_stores()
            tokens = self._sample(step.slices, logits)
        else:
            self._begin_stores()
            self._idle()
        self._end_transfers()
        self._take_tokens(step.slices, tokens)
        self._publish()

    def _begin_transfers(self, step: Step) -> None:
        """Tell the connector the schedule, start loads, and end stores whose blocks will be overwritten."""
        if self.connector is None or self.worker is None:
            return
        metadata = self.connector.build_connector_meta(step.view)
        self.worker.bind_connector_metadata(metadata)
        self.worker.handle_preemptions(metadata)
        self.worker.start_load_kv()

    def _begin_stores(self) -> None:
        if self.worker is not None:
            self.worker.wait_for_save()

    def _idle(self) -> None:
        """Wait a short time for a transfer to end."""
        if self.worker is not None:
            until = time.monotonic() + _IDLE_SECONDS
            if self.connector is not None and self.connector.wait_for_tiers(_TIER_SECONDS):
                return
            if not self.worker.wait_for_transfers(max(0.0, until - time.monotonic())):
                time.sleep(_BACKOFF_SECONDS)

    def _end_transfers(self) -> None:
        """Take the workers' output and complete the transfers that are over."""
        if self.connector is None or self.worker is None:
            return
        output = self.worker.take_output()
        self.worker.clear_connector_metadata()
        self.connector.update_connector_output(output)
        if output.distrusted:
            self.reset_prefix_cache()
        self._scheduler.take_transfers(output)

    def _forward(self, slices: list[RequestSlice]) -> Tensor:
        batch = make_batch(slices, len(self.groups), self.config.block_size, self.config.device)
        return self.model.forward(batch, self.kv_caches, self._group_of_layer, self.config.block_size)

    def _sample(self, slices: list[RequestSlice], logits: Tensor) -> list[int]:
        """Return a token for each slice that ends with its request's last token.

        On a device, this waits for the end of the step.
        """
        rows = [row for row, request_slice in enumerate(slices) if request_slice.is_last]
        if not rows:
            return []
        requests = [slices[row].request for row in rows]
        generated = [request.num_tokens - request.num_prompt_tokens for request in requests]
        return sample(logits[rows], [request.params for request in requests], generated)

    def _take_tokens(self, slices: list[RequestSlice], tokens: list[int]) -> None:
        """Count the slices as computed, and give their requests the sampled tokens."""
        sampled, now = iter(tokens), time.perf_counter()
        for request_slice in slices:
            is_last = request_slice.is_last
            self._scheduler.finish_slice(request_slice)
            if is_last:
                self._append(request_slice.request, next(sampled), now)

    def _append(self, request: Request, token: int, now: float) -> None:
        request.append(token, now)
        reason = self._finish_reason(request)
        try:
            if reason is not None:
                self._end(request, reason)
        finally:
            self._outputs[request.arrival] = self._output(request)

    def _finish_reason(self, request: Request) -> FinishReason | None:
        params, token = request.params, request.tokens[-1]
        if token in params.stop_token_ids or (
            token in self.model.config.eos_token_ids and not params.ignore_eos
        ):
            return FinishReason.STOP
        full = request.num_tokens >= self.max_model_len
        return FinishReason.LENGTH if full or len(request.output_token_ids) >= params.max_tokens else None

    def _end(self, request: Request, reason: FinishReason) -> None:
        del self._requests[request.request_id]
        self._scheduler.finish(request, reason)

    # -- outputs and events ------------------------------------------------------------------------

    def _output(self, request: Request) -> RequestOutput:
        reason, first = request.finish_reason, request.first_token_at
        return RequestOutput(
            request.request_id,
            request.output_token_ids,
            finished=reason is not None,
            finish_reason=None if reason is None else reason.value,
            source=None if reason is None else self._sources(request),
            ttft=None if first is None else first - request.arrived_at,
            preemptions=request.preemptions,
        )

    def _sources(self, request: Request) -> TokenSources:
        explanation = self.explain(request.request_id)
        if explanation is None:
            return TokenSources(request.from_gpu, {}, request.num_prompt_tokens - request.from_gpu)
        return TokenSources(
            explanation.from_gpu,
            dict(explanation.from_tiers),
            explanation.recomputed,
            explanation.first_miss,
        )

    def explain(self, request_id: str) -> Explanation | None:
        """Return where a prompt came from, and why not all from a cache; `None` if that is not known."""
        name = read_text("request_id", request_id)
        return None if self.connector is None else self.connector.explain(name)

    def take_events(self) -> list[KVCacheEvent]:
        """Drain the KV events since the last call: of each step the engine's own, then the tiers'.

        There are events if `kv_events` is true and there is no publisher. Their number is bounded, see
        `event_buffer`.
        """
        self._keep_events()
        return self._events.take()

    def _keep_events(self) -> None:
        """Take the events of the cache and the tiers, so that they do not pile up there."""
        if self.config.kv_events:
            tiers = [] if self.connector is None else self.connector.take_events()
            self._events.add([*self._cache.take_events(), *tiers])

    def reset_prefix_cache(self, reset_connector: bool = False) -> None:
        """Forget all KV computed so far, in the engine's cache and, with `reset_connector`, in the tiers."""
        self._cache.reset(tiers_too=reset_connector or self.connector is None)
        if reset_connector and self.connector is not None:
            self.connector.reset_cache()
        self._publish()  # an idle engine takes no step that would publish

    def _publish(self) -> None:
        """Give the publisher the events since the last call; without one, keep them for `take_events`."""
        self._keep_events()
        if self._publisher is not None:
            self._events.publish_to(self._publisher)

    # -- ending ------------------------------------------------------------------------------------

    def drain(self) -> list[RequestOutput]:
        """Step until all requests and transfers are over; return the last output of each request that was
        not returned yet.
        """
        self._refuse_closed()
        while self._requests or self._scheduler.held or self._has_transfers():
            self._advance()
        return self._take_outputs()

    def _has_transfers(self) -> bool:
        return self.connector is not None and self.connector.has_pending_push_work()

    def check(self) -> None:
        """Raise `IntegrityError` if requests, blocks and transfers do not agree."""
        self._scheduler.check()
        if self.connector is not None and self.connector.connector_scheduler is not None:
            self.connector.connector_scheduler.check()

    def close(self) -> None:
        """End all transfers and release the connector's resources.

        Idempotent. Unfinished requests stay unfinished.
        """
        self._is_closed = True
        for side in (self.worker, self.connector):
            if side is not None:
                side.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- refusing ----------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise InputError("expected an open engine, got one that was closed; make another")

    def _read_prompt(self, where: str, prompt: Sequence[int]) -> list[int]:
        # The length is checked before reading, because a range can have any length.
        length = count_items(where, prompt, "a list of token ids")
        if not 0 < length < self.max_model_len:
            raise InputError(
                f"{where}: expected 1 to {self.max_model_len - 1}, what {self.config.num_blocks} blocks "
                f"and max_model_len leave room for, got {length} tokens"
            )
        return read_tokens(where, prompt, length, self.model.config.vocab_size)

    def _read_id(self, value: str) -> str:
        request_id = read_text("request_id", value)
        if not request_id or self._is_used(request_id):
            raise InputError(f"request_id: expected text that is not in use, got {show_value(value)}")
        return request_id

    def _free_id(self) -> str:
        """Return an unused id for a request without one; a caller may have chosen one like ours."""
        return next(name for n in count(self._arrivals) if not self._is_used(name := f"request-{n}"))

    def _is_used(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._scheduler.held


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the block has ended, and raise `KeyboardInterrupt` then.

    Inside a step it would leave the engine's state half written. A second Ctrl-C is not held back, because a
    step may hang. Only Python's own handler is replaced, and only on the main thread, where signals arrive;
    a program's own handler stays.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pending: list[int] = []

    def hold(number: int, frame: object) -> None:
        if pending:
            raise KeyboardInterrupt
        pending.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt
