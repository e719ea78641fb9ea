"""Rows that are kept packed, in handlers, audits, configs and metrics: the same blocks come back, what does
not pack is not kept, what is no packed block fails its load, and no other engine takes it for raw rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.cuda_kit import FakeDriver

from kvtier.config import (
    CPUConfig,
    GroupConfig,
    KVTierConfig,
    MooncakeConfig,
    OffloadingConfig,
    groups_to_pack,
)
from kvtier.connector.metrics import ConnectorStats
from kvtier.errors import ConfigError, TransferError
from kvtier.pool import Pool
from kvtier.testing.kit import ManualClock
from kvtier.transfer.base import NULL_BLOCK, CPULoadStoreSpec, GPULoadStoreSpec, TransferResult
from kvtier.transfer.compare import RowComparer
from kvtier.transfer.cuda import CudaHandler, CudaLoadHandler, CudaMemory, CudaStoreHandler
from kvtier.transfer.cuda.memory import Pinning
from kvtier.transfer.host import HostHandler, HostLoadHandler, HostStoreHandler, Spans
from kvtier.transfer.layout import canonicalize

NUM_BLOCKS, TOKENS, HEADS, DIM = 12, 16, 2, 64
BLOCK_BYTES = 3 * 2 * TOKENS * HEADS * DIM * 2
LAYOUTS = {
    "blocks_first": (NUM_BLOCKS, 2, TOKENS, HEADS, DIM),
    "kv_first": (2, NUM_BLOCKS, TOKENS, HEADS, DIM),
    "heads_first": (NUM_BLOCKS, HEADS, TOKENS, 2 * DIM),
}
PATIENCE = 30.0
Handler = HostHandler | CudaHandler


def make_config(
    groups: tuple[GroupConfig, ...], packed: tuple[bool, ...] = (True,), **options: Any
) -> OffloadingConfig:
    per_chunk, tiers = options.pop("blocks_per_chunk", 1), options.pop("tiers", ())
    settings = KVTierConfig(cpu=CPUConfig(capacity=1 << 22), blocks_per_chunk=per_chunk, tiers=tiers)
    return OffloadingConfig(
        settings=settings,
        groups=groups,
        hash_block_size=TOKENS,
        engine_id="packed",
        packed_groups=packed,
        number_format="bfloat16",
        **options,
    )


class Rig:
    """An engine's cache of normal values in bfloat16, a pool and handlers: those of a host, or those of a
    GPU over a driver that copies on the host.
    """

    def __init__(self, layout: str = "blocks_first", *, on_gpu: bool = False, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = LAYOUTS[layout]
        self.layers = {
            f"layer{i}": torch.randn(shape, generator=generator).to(torch.bfloat16) for i in range(3)
        }
        if layout == "heads_first":  # as vLLM shows it: tokens before heads, whatever the order in memory
            self.layers = {name: layer.transpose(1, 2) for name, layer in self.layers.items()}
        group = GroupConfig(block_size=TOKENS, bytes_per_block=BLOCK_BYTES, layer_names=tuple(self.layers))
        self.config = make_config((group,), **options)
        self.pool = Pool.open("packed", self.config.num_slots, self.config.slot_bytes)
        self.kv_caches = canonicalize(self.layers, self.config.groups, num_blocks=NUM_BLOCKS)
        self.clock = ManualClock()
        self.store: Handler
        self.load: Handler
        if on_gpu:
            pinning = Pinning(self.pool, lambda: None, pin=lambda *some: None, unpin=lambda *some: None)
            memory = CudaMemory(self.kv_caches, self.pool, self.config, pinning=pinning)
            self.store = CudaStoreHandler(memory, 10.0, clock=self.clock)
            self.load = CudaLoadHandler(memory, 10.0, clock=self.clock)
        else:
            spans = Spans(self.kv_caches, self.pool, self.config)
            self.store = HostStoreHandler(spans, 10.0, clock=self.clock)
            self.load = HostLoadHandler(spans, 10.0, clock=self.clock)
        self.axis = LAYOUTS[layout].index(NUM_BLOCKS)

    def block(self, number: int) -> list[bytes]:
        return [
            layer.select(self.axis, number).contiguous().view(torch.int16).numpy().tobytes()
            for layer in self.layers.values()
        ]

    def spoil(self, number: int) -> None:
        """Fill a block with values of which too many do not fit a code."""
        for layer in self.layers.values():
            page = layer.select(self.axis, number)
            page.copy_(torch.full_like(page, torch.inf))

    def run(self, handler: Handler, blocks: list[int], slots: list[int], first: int = 0) -> TransferResult:
        gpu, cpu = GPULoadStoreSpec(blocks, [len(blocks)], [first]), CPULoadStoreSpec(slots)
        assert handler.transfer_async(1, (gpu, cpu) if handler is self.store else (cpu, gpu))
        assert handler.wait({1}, PATIENCE)
        (result,) = handler.get_finished()
        return result


@pytest.fixture(params=[(layout, on_gpu) for layout in LAYOUTS for on_gpu in (False, True)], ids=str)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    layout, on_gpu = request.param
    if on_gpu:
        FakeDriver(copies=True).use(monkeypatch)
    rig = Rig(layout, on_gpu=on_gpu)
    yield rig
    for handler in (rig.store, rig.load):
        handler.check()
        handler.shutdown()


def test_blocks_come_back_from_fewer_bytes(rig: Rig) -> None:
    """And results count the bytes that the pool holds."""
    assert rig.config.kept_bytes(0) < 0.8 * BLOCK_BYTES
    before = [rig.block(number) for number in range(NUM_BLOCKS)]
    stored = rig.run(rig.store, [3, 5, 7], [2, 0, 1])
    assert (stored.success, stored.transfer_size) == (True, 3 * rig.config.kept_bytes(0))
    loaded = rig.run(rig.load, [8, 9, 10], [2, 0, 1])
    assert (loaded.success, loaded.transfer_size) == (True, 3 * rig.config.kept_bytes(0))
    after = [rig.block(number) for number in range(NUM_BLOCKS)]
    assert after[8:11] == [before[3], before[5], before[7]]
    assert after[:8] == before[:8]
    assert after[11:] == before[11:]


def test_units_follow_the_tokens_of_each_layout() -> None:
    """Scales are those of channels: of all heads of a token, or of one head where heads lie apart."""
    widths = {layout: Rig(layout).kv_caches.group_data_refs[0][0].token_values for layout in LAYOUTS}
    assert widths == {"blocks_first": HEADS * DIM, "kv_first": HEADS * DIM, "heads_first": 2 * DIM}


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_parts_of_a_chunk_come_back(first: int) -> None:
    """A chunk of four blocks, one of them without bytes, is loaded from any of its blocks on."""
    rig = Rig(blocks_per_chunk=4)
    assert rig.run(rig.store, [3, NULL_BLOCK, 4, 5], [1]).success
    expected = [rig.block(number) for number in (3, NULL_BLOCK, 4, 5)]
    targets = [8, NULL_BLOCK, 9, 10][first:]
    assert rig.run(rig.load, targets, [1], first).success
    for target, block in zip(targets, expected[first:], strict=True):
        assert target == NULL_BLOCK or rig.block(target) == block


def test_ranks_keep_their_own_images() -> None:
    rigs = [Rig(world_size=2, rank=rank) for rank in range(2)]
    for layer in rigs[1].layers.values():
        layer *= 3
    pool = rigs[0].pool
    for rig in rigs:
        rig.spans = Spans(rig.kv_caches, pool, rig.config)
        rig.store = HostStoreHandler(rig.spans, 10.0, clock=rig.clock)
        rig.load = HostLoadHandler(rig.spans, 10.0, clock=rig.clock)
        assert rig.run(rig.store, [3], [0]).success
    for rig in rigs:
        assert rig.run(rig.load, [8], [0]).success
        assert rig.block(8) == rig.block(3)
    assert rigs[0].block(8) != rigs[1].block(8)


# -- blocks that do not pack, and bytes that are no packed block -------------------------------------


def test_a_block_that_does_not_pack_is_reported_and_others_are_stored(rig: Rig) -> None:
    rig.spoil(4)
    result = rig.run(rig.store, [3, 4, 5], [0, 1, 2])
    assert (result.success, result.failed_blocks) == (False, (1,))
    assert (result.unpacked, result.corrupt) == (1, False)
    loaded = rig.run(rig.load, [8, 9, 10], [0, 1, 2])
    assert (loaded.success, loaded.failed_blocks, loaded.corrupt) == (False, (1,), True)
    assert (rig.block(8), rig.block(10)) == (rig.block(3), rig.block(5))


def test_a_damaged_block_fails_its_load_as_wrong_bytes(rig: Rig) -> None:
    assert rig.run(rig.store, [3, 5], [0, 1]).success
    rig.pool.rows[1, 4] ^= 1
    result = rig.run(rig.load, [8, 9], [0, 1])
    assert (result.success, result.failed_blocks, result.corrupt) == (False, (1,), True)
    assert result.unpacked == 0
    assert rig.block(8) == rig.block(3)


def test_a_load_that_ends_early_blames_no_chunk_that_had_no_time() -> None:
    """One block is damaged, and others did not arrive in time: nobody knows yet whose bytes are wrong."""
    rig = Rig()
    assert rig.run(rig.store, [3, 5, 6], [0, 1, 2]).success
    rig.pool.rows[0, 4] ^= 1
    rig.load.piece_bytes = 1

    def fail_later(job: Any) -> None:
        if job.blocks_begun == 2:
            raise TransferError("no more")

    rig.load.probe = fail_later
    result = rig.run(rig.load, [8, 9, 10], [0, 1, 2])
    assert (result.success, result.corrupt) == (False, False)
    assert result.failed_blocks is not None
    assert sorted(result.failed_blocks) == [0, 2]


# -- audits -------------------------------------------------------------------------------------------


def test_audits_compare_values_not_codes(rig: Rig) -> None:
    """A value that rounds otherwise may change the codes of its whole channel; its distance stays small."""
    comparer = RowComparer(rig.pool, rig.config, rig.kv_caches)
    close, far = rig.layers["layer1"].clone(), rig.layers["layer1"].clone()
    for slot, change in enumerate((None, close * 1.01, far.flip(-1))):
        original = rig.layers["layer1"].clone()
        if change is not None:
            rig.layers["layer1"].copy_(change)
        assert rig.run(rig.store, [3], [slot]).success
        rig.layers["layer1"].copy_(original)
    assert comparer.distance(0, 0, 0) == 0
    assert 0 < comparer.distance(0, 0, 1) < 0.02
    assert comparer.distance(0, 0, 2) > 0.9


def test_a_damaged_row_is_far_from_every_other(rig: Rig) -> None:
    comparer = RowComparer(rig.pool, rig.config, rig.kv_caches)
    assert rig.run(rig.store, [3, 3], [0, 1]).success
    rig.pool.rows[1, 0] ^= 0x80
    assert comparer.distance(0, 0, 1) > 0.9


def test_the_negative_control_one_flipped_code_is_seen(rig: Rig) -> None:
    """A code decides about one value alone, and nothing but a seal or a comparison can know it."""
    form = rig.config.packed_format(0)
    assert form is not None
    assert rig.run(rig.store, [3], [0]).success
    rig.pool.rows[0, form.codes] ^= 1
    assert rig.run(rig.load, [8], [0]).success
    assert rig.block(8) != rig.block(3)


# -- geometry -----------------------------------------------------------------------------------------

KV = GroupConfig(block_size=16, bytes_per_block=64 * 32768, layer_names=tuple(map(str, range(32))))
STATE = GroupConfig(block_size=16, bytes_per_block=100_000, layer_names=("state",), is_state=True)


def test_the_same_memory_keeps_more_rows() -> None:
    raw, packed = (
        replace(make_config((KV,), flags), settings=KVTierConfig(cpu=CPUConfig(capacity=8 << 30)))
        for flags in ((), (True,))
    )
    assert packed.num_slots / raw.num_slots > 1.30
    assert packed.packing_ratio == pytest.approx(packed.num_slots / raw.num_slots, rel=0.01)
    assert raw.packing_ratio == 1.0
    assert packed.bytes_of_all_ranks(0) == packed.kept_bytes(0) == 1_609_728


def test_groups_that_are_not_packed_keep_their_bytes() -> None:
    config = make_config((KV, STATE), (True, False), blocks_per_chunk=2)
    assert config.image_bytes(1) == 200_000
    assert config.max_image_bytes == config.image_bytes(0) == 2 * 1_609_728
    assert config.packed_format(1) is None


def test_ranks_with_other_layers_are_packed_by_their_own_sizes() -> None:
    config = make_config((KV,), world_size=2, bytes_by_rank=((64 * 32768,), (32 * 32768,)))
    short = replace(KV, bytes_per_block=32 * 32768)
    alone = make_config((short,))
    assert config.bytes_of_all_ranks(0) == 1_609_728 + alone.kept_bytes(0)


def test_packed_and_raw_rows_have_different_namespaces() -> None:
    """A disk of raw rows is found again when packing is off, and never by an engine that packs."""
    raw, packed = (make_config((KV,), flags, namespace="n") for flags in ((), (True,)))
    unaware = OffloadingConfig(
        settings=raw.settings, groups=(KV,), hash_block_size=16, engine_id="packed", namespace="n"
    )
    assert raw.tier_namespace_nowait() == unaware.tier_namespace_nowait() == "n 1x1x2097152"
    assert packed.tier_namespace_nowait() == "n 1x1x1609728xpacked1xpx2097152"


def test_a_slot_of_a_packed_row_has_room_for_a_header() -> None:
    tier = MooncakeConfig(master="127.0.0.1:1", metadata="http://127.0.0.1:1/metadata")
    config = make_config((KV,), tiers=(tier,))
    assert config.slot_bytes == config.row_bytes + 4096


@pytest.mark.parametrize(
    ("groups", "flags", "message"),
    [
        ((KV,), (True, False), "packed_groups: expected one for each of 1 groups, got 2"),
        ((STATE,), (True,), r"packed_groups\[0\]: expected blocks of KV that can be packed"),
        ((replace(KV, block_size=32, bytes_per_block=96),), (True,), r"packed_groups\[0\]"),
    ],
)
def test_groups_that_cannot_be_packed_are_refused(
    groups: tuple[GroupConfig, ...], flags: tuple[bool, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(groups, flags)


# -- the setting --------------------------------------------------------------------------------------


def choose(packing: str, number_format: str = "bfloat16", *, size: int = 32768) -> Any:
    settings = KVTierConfig(cpu=CPUConfig(capacity=1 << 22), packing=packing)
    return groups_to_pack(settings, (KV, STATE), [[size] * 64, [100_000]], number_format)


def test_attention_groups_are_packed_where_it_was_asked_for() -> None:
    assert choose("on") == (True, False)
    assert choose("off") == choose("auto") == choose("auto", "float32") == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"number_format": "float32"}, "packing: expected a cache of bfloat16, got float32; set it to auto"),
        ({"number_format": ""}, "packing: expected a cache of bfloat16, got other formats, or several"),
        ({"size": 1024}, "packing: expected blocks of at least 8 tokens with heads of 64 values or more"),
    ],
)
def test_packing_that_is_impossible_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose("on", **options)


def test_the_setting_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match="packing: expected"):
        KVTierConfig(cpu=CPUConfig(capacity=1), packing="yes")


# -- counting -----------------------------------------------------------------------------------------


def test_chunks_that_do_not_pack_are_counted_apart(rig: Rig) -> None:
    stats = ConnectorStats()
    job: Any = type("Job", (), {"unpacked": 2, "failed": {1}, "keys": [b"a", b"b"], "num_bytes": 10})()
    stats.count_store(job)
    assert (stats.stores, stats.stores_failed) == (1, 0)
    assert (stats.stored_chunks, stats.unpacked_chunks) == (1, 1)


def test_logging_is_quiet(caplog: pytest.LogCaptureFixture, rig: Rig) -> None:
    """A block that does not pack is no reason for a line each: the connector sums them up."""
    rig.spoil(4)
    with caplog.at_level(logging.WARNING):
        rig.run(rig.store, [4], [0])
    assert not caplog.records
