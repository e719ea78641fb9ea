"""The distance of rows, the tolerance, and the handler that copies and compares."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtier.config import CPUConfig, GroupConfig, KVTierConfig, OffloadingConfig
from kvtier.pool import Pool
from kvtier.transfer.base import (
    AuditLoadStoreSpec,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
)
from kvtier.transfer.compare import AuditingHandler, RowComparer, distance, tolerance

FORMATS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def encode(values: torch.Tensor, number_format: str) -> np.ndarray:
    stored = values.to(getattr(torch, number_format))
    return stored.view(torch.uint8).reshape(-1).numpy().copy()


def values(seed: int = 0, count: int = 4096) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("number_format", FORMATS)
def test_equal_rows_have_no_distance_and_unrelated_rows_a_large_one(number_format: str) -> None:
    row = encode(values(), number_format)
    assert distance(row, row.copy(), number_format) == 0
    assert distance(row, encode(values(1), number_format), number_format) > 0.9


@pytest.mark.parametrize("number_format", FORMATS)
def test_distance_is_that_of_the_values(number_format: str) -> None:
    one, other = encode(values(), number_format), encode(values() * 1.25, number_format)
    a = torch.from_numpy(one).view(getattr(torch, number_format)).double().reshape(-1, 64)
    b = torch.from_numpy(other).view(getattr(torch, number_format)).double().reshape(-1, 64)
    norms = torch.maximum(a.norm(dim=1), b.norm(dim=1))
    assert distance(one, other, number_format) == pytest.approx(
        float(((a - b).norm(dim=1) / norms).mean()), rel=1e-5
    )


def test_every_code_of_fp8_is_decoded() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for number_format in ("float8_e4m3fn", "float8_e5m2"):
        numbers = torch.from_numpy(codes.copy()).view(getattr(torch, number_format)).float()
        for code in codes[~torch.isfinite(numbers).numpy()]:
            pair = np.full(64, code, np.uint8)
            assert distance(pair, pair, number_format) == 0
        for code in codes[torch.isfinite(numbers).numpy()]:
            one, expected = np.full(64, code, np.uint8), encode(numbers[int(code)].repeat(64), "float32")
            assert distance(encode(numbers[int(code)].repeat(64), "float32"), expected, "float32") == 0
            zero = np.zeros(64, np.uint8)
            assert distance(one, zero, number_format) == (numbers[int(code)] != 0)


def test_values_that_are_no_numbers_are_equal_only_if_their_bits_are() -> None:
    nan, infinity = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))
    row = np.frombuffer(nan * 64 + infinity * 64, np.uint8).copy()
    assert distance(row, row.copy(), "float32") == 0
    other = row.copy()
    other[0] ^= 1
    assert distance(row, other, "float32") == 0.5


def test_one_large_value_does_not_hide_the_others() -> None:
    ours, theirs = values(), values(1)
    ours[0] = theirs[0] = 1e6
    assert distance(encode(ours, "float32"), encode(theirs, "float32"), "float32") > 0.9


def test_one_layer_of_many_counts() -> None:
    ours = values().reshape(2, 32, 64)  # two blocks of 32 layers
    theirs = ours.clone()
    theirs[:, 31] = values(1).reshape(2, 32, 64)[:, 0]
    one, other = (encode(each, "bfloat16").reshape(2, -1) for each in (ours, theirs))
    assert distance(one, other, "bfloat16") < 0.1
    assert distance(one, other, "bfloat16", 32) > 0.9


def test_images_of_any_length_can_be_compared() -> None:
    for count in (1, 3, 65, 100_003):
        row = encode(values(count=count), "bfloat16")
        assert distance(row, row.copy(), "bfloat16") == 0
        assert distance(row, encode(values(1, count), "bfloat16"), "bfloat16") > 0.3


def test_tolerance_grows_with_layers_and_coarser_formats() -> None:
    def bound(stored: str, layers: int = 32, computed: str = "float16", *, quantized: bool = False) -> float:
        allowed = tolerance(stored, computed, layers, is_quantized=quantized)
        assert allowed is not None
        return allowed

    assert bound("float16", 2) < bound("float16", 32) < bound("float16", 126)
    assert bound("float16") < bound("bfloat16", computed="bfloat16")
    assert bound("float16", 2) < bound("float8_e4m3fn", 2) < bound("float8_e5m2", 2)
    assert bound("float16", 2) < bound("float16", 2, quantized=True)
    assert bound("float8_e5m2", 126, "bfloat16", quantized=True) < 0.35, (
        "another matrix in a layer is farther"
    )
    assert tolerance("nvfp4", "bfloat16", 32) is None


class Copies(OffloadingHandler):
    """A handler whose copies fill a slot with the number of the block; it fails for block 13."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._results: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        gpu, cpu = spec
        assert isinstance(gpu, GPULoadStoreSpec)
        assert type(cpu) is CPULoadStoreSpec
        for block, slot in zip(gpu.block_ids.tolist(), cpu.block_ids.tolist(), strict=True):
            self._pool.rows[slot] = block
        self._results.append(TransferResult(job_id, success=13 not in gpu.block_ids.tolist()))
        return True

    def get_finished(self) -> list[TransferResult]:
        taken, self._results = self._results, []
        return taken

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        return True

    def cancel(self, job_ids: set[int]) -> None: ...
    def shutdown(self) -> None: ...


def make_handler() -> tuple[AuditingHandler, Pool]:
    config = OffloadingConfig(
        settings=KVTierConfig(cpu=CPUConfig(capacity=1 << 20)),
        groups=(GroupConfig(block_size=4, bytes_per_block=256, layer_names=("0",)),),
        hash_block_size=4,
        engine_id="compare",
        number_format="float8_e4m3fn",
        audit_tolerance=0.1,
    )
    pool = Pool.open("compare", 16, 4096)
    return AuditingHandler(Copies(pool), RowComparer(pool, config), config), pool


def take_result(handler: AuditingHandler) -> TransferResult:
    while not (results := handler.get_finished()):
        pass
    (result,) = results
    return result


def test_audit_passes_rows_that_are_equal_and_names_those_that_are_not() -> None:
    handler, pool = make_handler()
    pool.rows[1], pool.rows[2], pool.rows[3] = 7, 99, 9
    spec = GPULoadStoreSpec([7, 8, 9], [3], [0]), AuditLoadStoreSpec([10, 11, 12], [1, 2, 3])
    assert handler.transfer_async(1, spec)
    result = take_result(handler)
    assert (result.success, result.corrupt, result.failed_blocks) == (False, True, (1,))
    assert result.distance is not None
    assert result.distance > 0.9
    pool.rows[2] = 8
    assert handler.transfer_async(2, spec)
    result = take_result(handler)
    assert (result.success, result.corrupt, result.failed_blocks, result.distance) == (True, False, None, 0)
    handler.shutdown()


def test_copy_that_fails_is_no_mismatch() -> None:
    handler, _pool = make_handler()
    spec = GPULoadStoreSpec([13], [1], [0]), AuditLoadStoreSpec([10], [1])
    assert handler.transfer_async(1, spec)
    result = take_result(handler)
    assert (result.success, result.corrupt) == (False, False)
    handler.shutdown()


def test_ordinary_stores_pass_unchanged() -> None:
    handler, _pool = make_handler()
    assert handler.transfer_async(1, (GPULoadStoreSpec([7], [1], [0]), CPULoadStoreSpec([10])))
    assert take_result(handler) == TransferResult(1, success=True)
    handler.shutdown()


def test_comparison_that_raises_is_a_failed_audit(caplog: pytest.LogCaptureFixture) -> None:
    handler, _pool = make_handler()
    assert handler.transfer_async(1, (GPULoadStoreSpec([7], [1], [0]), AuditLoadStoreSpec([10], [999])))
    result = take_result(handler)
    assert (result.success, result.corrupt) == (False, False)
    assert "could not compare" in caplog.text
    handler.shutdown()


def test_ranks_compare_their_own_images() -> None:
    config = OffloadingConfig(
        settings=KVTierConfig(cpu=CPUConfig(capacity=1 << 20)),
        groups=(GroupConfig(block_size=4, bytes_per_block=256, layer_names=("0",)),),
        hash_block_size=4,
        engine_id="compare",
        world_size=2,
        number_format="float8_e4m3fn",
        audit_tolerance=0.1,
    )
    pool = Pool.open("compare", 16, 4096)
    pool.rows[0], pool.rows[1] = 7, 7
    pool.rows[1, 256:512] = 99
    assert RowComparer(pool, config).distance(0, 0, 1) == 0
    assert RowComparer(pool, replace(config, rank=1)).distance(0, 0, 1) > 0.9
