"""`CPUOffloadingSpec`, the factory, and what `kvtier.offload` offers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from tests.unit.tier_kit import HandTier

import kvtier.offload
from kvtier.config import DiskConfig, MooncakeConfig, OffloadingConfig
from kvtier.errors import ConfigError, LayoutError, OutsideError, PoolError
from kvtier.keys import make_offload_key
from kvtier.machine import MemoryBound
from kvtier.offload import (
    CPULoadStoreSpec,
    CPUOffloadingManager,
    CPUOffloadingSpec,
    GPULoadStoreSpec,
    MissReason,
    OffloadingSpec,
    OffloadingSpecFactory,
    ReqContext,
)
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.rendezvous import default_directory, path_of
from kvtier.testing.caches import make_caches, make_config
from kvtier.testing.kit import ManualClock
from kvtier.transfer.host import HostHandler
from kvtier.transfer.layout import canonicalize

PATIENCE = 30.0


def test_a_round_trip_through_the_spec() -> None:
    caches = make_caches("kv_first")
    spec = CPUOffloadingSpec(make_config(caches))
    handlers = list(spec.get_handlers(canonicalize(caches.layers, caches.groups)))
    assert [(source, destination) for source, destination, _ in handlers] == [
        (GPULoadStoreSpec, CPULoadStoreSpec),
        (CPULoadStoreSpec, GPULoadStoreSpec),
    ]
    (_, _, store), (_, _, load) = handlers
    assert store.transfer_async(0, (GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([5, 6])))
    assert store.wait({0}, PATIENCE)
    assert load.transfer_async(0, (CPULoadStoreSpec([5, 6]), GPULoadStoreSpec([11, 12])))
    assert load.wait({0}, PATIENCE)
    for layer in caches.layers.values():
        assert (layer[:, 1:3] == layer[:, 11:13]).all()
    for _, _, handler in handlers:
        handler.shutdown()
    spec.shutdown()
    spec.shutdown()


def test_the_manager_has_the_pool_s_slots_and_is_one() -> None:
    config = make_config(make_caches("kv_first"), num_slots=5)
    spec = CPUOffloadingSpec(config)
    manager = spec.get_manager()
    assert isinstance(manager, CPUOffloadingManager)
    assert manager is spec.get_manager()
    assert manager.num_slots == config.num_slots == spec.open_pool().num_slots == 5
    assert spec.open_pool() is spec.open_pool()
    spec.shutdown()


def test_with_a_capacity_of_zero_there_is_no_pool(caplog: pytest.LogCaptureFixture) -> None:
    caches = make_caches("kv_first")
    config = make_config(caches, num_slots=0, world_size=2, engine_id=uuid4().hex)
    spec = CPUOffloadingSpec(config)
    with caplog.at_level("INFO", logger="kvtier"):
        manager = spec.get_manager()
    assert spec.get_manager() is manager
    assert [record.message for record in caplog.records] == [
        "cpu.capacity is 0: nothing is stored and nothing is loaded"
    ]
    assert list(spec.get_handlers(canonicalize(caches.layers, caches.groups))) == []
    assert not named_file(config).exists()
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(3)]
    assert manager.prepare_store(keys, ReqContext()) is None
    assert manager.lookup_prefix(keys, ReqContext()) == 0
    assert manager.explain(keys[0]) is MissReason.REFUSED
    manager.touch(keys, ReqContext())
    manager.reset_cache()
    manager.check()
    spec.shutdown()


@pytest.mark.parametrize(("is_cuda", "has_triton"), [(True, True), (True, False), (False, True)])
def test_the_device_of_the_caches_chooses_the_handlers(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool, has_triton: bool
) -> None:
    """What the GPU's handlers do is tested on a GPU; that they are chosen is tested here, with others in
    their place.
    """
    caches = make_caches("kv_first")
    canonical = canonicalize(caches.layers, caches.groups)
    standing_in = {
        name: partial(_StandIn, name) for name in ("CudaMemory", "CudaStoreHandler", "CudaLoadHandler")
    }
    monkeypatch.setitem(sys.modules, "kvtier.transfer.cuda", SimpleNamespace(**standing_in))
    monkeypatch.setattr("kvtier.offload.cpu.find_spec", lambda name: object() if has_triton else None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda)
    spec = CPUOffloadingSpec(make_config(caches, deadline=3.0))
    store, load = (handler for _, _, handler in spec.get_handlers(canonical))
    if is_cuda and has_triton:
        assert isinstance(store, _StandIn)
        assert isinstance(load, _StandIn)
        assert (store.name, load.name) == ("CudaStoreHandler", "CudaLoadHandler")
        memory, deadline = load.arguments
        assert memory is store.arguments[0], "one view of the memories serves both directions"
        assert memory.arguments == (canonical, spec.open_pool(), spec.config)
        assert deadline == 3.0
    else:
        assert isinstance(store, HostHandler)
        assert isinstance(load, HostHandler)
        store.shutdown()
        load.shutdown()
    spec.shutdown()


class _StandIn:
    """Remembers what it was made of."""

    def __init__(self, name: str, *arguments: Any, clock: Any = None) -> None:
        self.name, self.arguments = name, arguments


def test_deadlines_are_those_of_the_settings() -> None:
    caches, clock = make_caches("kv_first"), ManualClock()
    spec = CPUOffloadingSpec(make_config(caches, deadline=3.0), clock=clock)
    (_, _, store), _ = spec.get_handlers(canonicalize(caches.layers, caches.groups))
    assert isinstance(store, HostHandler)
    store.probe = lambda job: job.over.wait(PATIENCE) and None
    assert store.transfer_async(0, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))
    clock.now = 2.9
    assert store.get_finished() == []
    clock.now = 3.1
    assert [result.success for result in store.get_finished()] == [False]
    store.shutdown()
    spec.shutdown()


def named_file(config: OffloadingConfig) -> Path:
    """Return where the processes of an engine meet. The name is no other run's, if its engine_id is not."""
    return path_of(config.engine_id, default_directory())


def test_workers_of_one_engine_meet_in_one_pool() -> None:
    """Each rank stores its own image; the row holds them side by side."""
    caches = [make_caches("blocks_first", seed=rank) for rank in range(2)]
    config = make_config(caches[0], world_size=2, engine_id=uuid4().hex)
    specs = [CPUOffloadingSpec(replace(config, rank=rank)) for rank in range(2)]
    handlers = [
        list(spec.get_handlers(canonicalize(cache.layers, cache.groups)))
        for spec, cache in zip(specs, caches, strict=True)
    ]
    assert not named_file(config).exists()
    for (_, _, store), _ in handlers:
        assert store.transfer_async(0, (GPULoadStoreSpec([7]), CPULoadStoreSpec([2])))
        assert store.wait({0}, PATIENCE)
        store.shutdown()
    expected = b"".join(page.numpy().tobytes() for cache in caches for page in cache.pages(0, 7))
    for spec in specs:
        assert spec.open_pool().rows[2, : len(expected)].tobytes() == expected
        spec.shutdown()


def test_a_rank_of_another_launch_is_refused() -> None:
    """Two engines with one engine_id paired up rank by rank, and both wrote into one region."""
    config = make_config(make_caches("kv_first"), world_size=2, engine_id=uuid4().hex)
    ours = CPUOffloadingSpec(replace(config, launch_id="1"))
    theirs = CPUOffloadingSpec(replace(config, launch_id="2", rank=1))
    ours.open_pool()
    with pytest.raises(
        PoolError, match=f"two engines have the engine_id '{config.engine_id}'; give each its own"
    ):
        theirs.open_pool()
    second = CPUOffloadingSpec(replace(config, launch_id="1", rank=1))
    assert second.open_pool().complete
    for spec in (ours, second):
        spec.shutdown()


def test_memory_that_the_workers_have_taken_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler comes last, when the pool is reserved or pinned: it may be more than what is left."""
    monkeypatch.setattr("kvtier.machine.free_memory", lambda root: MemoryBound(0, "of memory is available"))
    CPUOffloadingSpec(make_config(make_caches("kv_first"))).get_manager().check()


def test_caches_of_another_shape_are_refused_and_nothing_is_left() -> None:
    caches = make_caches("blocks_first")
    spec = CPUOffloadingSpec(make_config(make_caches("blocks_first", page=128)))
    with pytest.raises(LayoutError, match="expected groups with blocks of"):
        list(spec.get_handlers(canonicalize(caches.layers, caches.groups)))
    spec.shutdown()


class OutsideSpec(CPUOffloadingSpec):
    """A spec that this package has never heard of."""


not_a_spec = 7


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(OffloadingSpecFactory, "_paths", dict(OffloadingSpecFactory._paths))
    return


def test_specs_are_found_by_name() -> None:
    config = make_config(make_caches("kv_first"))
    assert type(OffloadingSpecFactory.create_spec(config)) is CPUOffloadingSpec
    spec = OffloadingSpecFactory.create_spec(config, "OutsideSpec", __name__)
    assert type(spec).__name__ == "OutsideSpec"
    assert isinstance(spec, OffloadingSpec)
    assert spec.config is config


@pytest.mark.usefixtures("registry")
def test_a_name_can_be_registered_once() -> None:
    OffloadingSpecFactory.register_spec("Mine", __name__, "OutsideSpec")
    assert OffloadingSpecFactory.get_spec_cls("Mine").__name__ == "OutsideSpec"
    with pytest.raises(ConfigError, match="expected a new name, got 'Mine'"):
        OffloadingSpecFactory.register_spec("Mine", "elsewhere", "Other")
    with pytest.raises(ValueError, match="CPUOffloadingSpec"):
        OffloadingSpecFactory.register_spec("CPUOffloadingSpec", "elsewhere", "Other")


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        (
            "Nothing",
            None,
            "spec_name: expected one of CPUOffloadingSpec, or spec_module_path to be given, got 'Nothing'",
        ),
        ("Nothing", "no.such.module", "cannot import Nothing from no.such.module"),
        ("Nothing", __name__, "cannot import Nothing from"),
        ("not_a_spec", __name__, "expected a subclass of OffloadingSpec, got 7"),
    ],
)
def test_a_spec_that_is_not_there_is_one_clear_line(name: str, module: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadingSpecFactory.get_spec_cls(name, module)


def test_the_package_offers_what_it_lists() -> None:
    assert kvtier.offload.__all__ == sorted(kvtier.offload.__all__)
    assert all(hasattr(kvtier.offload, name) for name in kvtier.offload.__all__)
    public = {
        name
        for name, value in vars(kvtier.offload).items()
        if name[0] != "_" and not isinstance(value, type(sys))
    }
    assert public - {"annotations"} == set(kvtier.offload.__all__)


def test_managing_needs_no_torch() -> None:
    script = (
        "import sys; import kvtier.offload, kvtier.transfer, kvtier.pool; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent)


def test_a_capacity_beyond_the_machine_is_refused_before_books_are_made_for_it() -> None:
    caches = make_caches("kv_first")
    config = make_config(caches)
    config = replace(
        config, settings=replace(config.settings, cpu=replace(config.settings.cpu, capacity=1 << 60))
    )
    with pytest.raises(
        PoolError, match=r"needs 1\.0 EiB, but only .* of memory is in this machine; lower cpu\.capacity"
    ):
        CPUOffloadingSpec(config).get_manager()


# Who maps the pool


def test_scheduler_and_worker_of_one_process_share_one_private_mapping(tmp_path: Path) -> None:
    """Each side of an engine may have a spec of its own.

    Another engine, by mistake of the same name, shares nothing.
    """
    config = tiered_config(tmp_path)
    scheduler, worker, stranger = (CPUOffloadingSpec(config, make_tier=make_hand_tier) for _ in range(3))
    manager = scheduler.get_manager()
    assert isinstance(manager, TieredOffloadingManager)
    assert scheduler.parties == 1
    pool, other = worker.open_pool(), stranger.open_pool()
    rows = np.frombuffer(manager._buffer.memory or b"", np.uint8).reshape(pool.rows.shape)
    assert np.shares_memory(pool.rows, rows)
    assert not np.shares_memory(pool.rows, other.rows)
    pool.rows[1] = 7
    worker.shutdown()
    assert (rows[1] == 7).all(), "the other side has not closed it"
    assert scheduler.open_pool().rows.shape == rows.shape
    manager.shutdown()
    scheduler.shutdown()
    stranger.shutdown()


def test_a_scheduler_in_a_process_of_its_own_is_a_party(tmp_path: Path) -> None:
    config = replace(tiered_config(tmp_path), world_size=2, scheduler_apart=True, engine_id=uuid4().hex)
    specs = [CPUOffloadingSpec(replace(config, rank=rank), make_tier=make_hand_tier) for rank in (0, 1)]
    scheduler = CPUOffloadingSpec(config, make_tier=make_hand_tier)
    assert scheduler.parties == 3
    pools = [spec.open_pool() for spec in specs]
    assert not pools[0].complete
    manager = scheduler.get_manager()
    assert isinstance(manager, TieredOffloadingManager)
    assert all(pool.complete for pool in pools)
    pools[1].rows[0] = 9
    assert set(manager._buffer[0][0]) == {9}
    manager.shutdown()
    for spec in (*specs, scheduler):
        spec.shutdown()


def test_rows_and_the_room_behind_them() -> None:
    """With a Mooncake store slots are longer than rows: handlers and tiers find rows at their beginning."""
    caches, tier = make_caches("kv_first"), HandTier()
    store_config = MooncakeConfig(master="host:1", metadata="http://host/metadata")
    config = make_config(caches, num_slots=64)
    config = replace(config, settings=replace(config.settings, tiers=(store_config,)), namespace="test")
    assert config.slot_bytes == config.row_bytes + 4096
    spec = CPUOffloadingSpec(config, make_tier=lambda *_: tier)
    manager = spec.get_manager()
    assert isinstance(manager, TieredOffloadingManager)
    assert tier.buffer is not None
    assert tier.buffer.memory is not None
    assert tier.buffer.memory.nbytes == config.num_slots * config.slot_bytes
    (_, _, store), (_, _, load) = spec.get_handlers(canonicalize(caches.layers, caches.groups))
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(2)]
    output = manager.prepare_store(keys, ReqContext())
    assert output is not None
    assert store.transfer_async(0, (GPULoadStoreSpec([1, 2]), output.store_spec))
    assert store.wait({0}, PATIENCE)
    manager.complete_store(keys, True, output.store_spec)
    manager.end_step()
    (job,) = tier.demotions.values()
    pool = spec.open_pool().rows
    for slot in job.slots.tolist():
        (piece,) = tier.buffer[slot]
        assert piece.nbytes == config.row_bytes
        assert np.frombuffer(piece, np.uint8).ctypes.data == pool[slot].ctypes.data
        assert not pool[slot, config.row_bytes :].any(), "nobody but the store's tier writes there"
        pool[slot, config.row_bytes :] = 7
    assert load.transfer_async(0, (output.store_spec, GPULoadStoreSpec([11, 12])))
    assert load.wait({0}, PATIENCE)
    for layer in caches.layers.values():
        assert (layer[:, 1:3] == layer[:, 11:13]).all()
    for handler in (store, load):
        handler.shutdown()
    manager.shutdown()
    spec.shutdown()


def test_without_tiers_the_scheduler_maps_nothing() -> None:
    config = replace(make_config(make_caches("kv_first")), scheduler_apart=True)
    spec = CPUOffloadingSpec(config)
    assert type(spec.get_manager()) is CPUOffloadingManager
    assert spec._pool is None
    assert spec.parties == config.world_size


def test_a_policy_that_is_none_is_refused_with_its_path(tmp_path: Path) -> None:
    spec = CPUOffloadingSpec(tiered_config(tmp_path, policy="lur"))
    with pytest.raises(ConfigError, match=r"tiers\[0\].disk.policy: expected one of .*did you mean 'lru'"):
        spec.get_manager()
    spec.shutdown()


def test_a_required_tier_that_cannot_be_had_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    spec = CPUOffloadingSpec(tiered_config(tmp_path / "file", required=True))
    with pytest.raises(OutsideError) as caught:
        spec.get_manager()
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "file") in str(caught.value)
    spec.shutdown()


def tiered_config(folder: Path, **disk: Any) -> Any:
    config = make_config(make_caches("kv_first"))
    tier = DiskConfig(path=str(folder), capacity=1 << 20, **disk)
    return replace(config, settings=replace(config.settings, tiers=(tier,)), namespace="test")


def make_hand_tier(tier: Any, config: Any) -> HandTier:
    return HandTier()
