"""The audit's comparison: how far apart two rows are, and how far apart rows of the same KV may be.

KV of one prompt that is computed twice is seldom equal bit by bit: the batch, the cut of the prompt into
steps and the kernel change the order of sums. But it is close, and KV of another prompt, position, image or
weight is not. The distance of two layers' pages is the mean, over segments of `_SEGMENT` values, of the
Euclidean distance of two segments divided by the larger of their norms. Short segments keep the large keys
of a page from hiding its small values. The *distance* of two images is that of the layer that differs most:
weights of one of the last layers change the pages of few layers. `tolerance` derives the largest distance
that rounding explains.

An `AuditingHandler` adds audits to a handler of stores. An audit is a store into scratch slots, followed by
a comparison of these slots with the slots of the kept rows, on a thread of its own. Only the worker's thread
calls it. The module needs neither torch nor an engine.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from math import gcd, sqrt
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.config import OffloadingConfig
from kvtier.errors import InputError
from kvtier.packing import BlockFormat, PackedPages, PageShape
from kvtier.pool import Pool
from kvtier.transfer.base import (
    AuditLoadStoreSpec,
    CanonicalKVCaches,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
)

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_SEGMENT = 64
"""Values in a segment: the smallest head of today's models."""
_MAX_AUDITS = 64  # audits under way; one more is refused
_JOIN_SECONDS = 5.0

_ROUNDING = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""The largest relative error of rounding to each number format that can be compared."""
_LEAST_TOLERANCE = 0.02
_MOST_TOLERANCE = 0.3
"""Another matrix in one layer of a real model is at 0.36 or more, another text, position or image at 0.8."""
_MARGIN = 25.0


def tolerance(stored: str, computed: str, num_layers: int, *, is_quantized: bool = False) -> float | None:
    """Return the largest distance of rows that rounding explains; `None` if a format cannot be compared.

    Errors of rounding in `computed`, the format of activations, add up over layers like a random walk. Its
    step was 0.8 of the rounding error in a real model, and up to 24 in random weights that are made to
    amplify errors (docs/cuda-constants.md); the tolerance allows `_MARGIN`, but never more than
    `_MOST_TOLERANCE`. Rounding to a coarser format, of the cache or of quantized activations, moves a value
    by one unit of that format (twice its rounding error) as often as the difference before is a share of the
    unit: hence the root of their product.
    """
    if stored not in _ROUNDING or computed not in _ROUNDING:
        return None
    bound = max(_LEAST_TOLERANCE, _MARGIN * _ROUNDING[computed] * sqrt(num_layers))
    if is_quantized:
        bound = max(bound, sqrt(2 * _ROUNDING["float8_e4m3fn"] * bound))
    bound = max(bound, sqrt(2 * _ROUNDING[stored] * bound))
    return min(bound, _MOST_TOLERANCE)


def distance(one: Bytes, other: Bytes, number_format: str, num_layers: int = 1) -> float:
    """Return the distance of two images of equal length in bytes: 0 if equal, about 1 if unrelated.

    An image is made of blocks, and each block of `num_layers` equal parts. The bytes may have one or two
    dimensions: all blocks, or `(blocks, bytes)`.
    """
    blocks = one.reshape(-1, one.shape[-1]), other.reshape(-1, one.shape[-1])
    length = one.shape[-1] // num_layers
    apart = []
    for layer in range(num_layers):
        part = slice(layer * length, (layer + 1) * length)
        ratios = [_ratios(a[part], b[part], number_format) for a, b in zip(*blocks, strict=True)]
        apart.append(float(np.mean(ratios)))
    return max(apart)


def _ratios(one: Bytes, other: Bytes, number_format: str) -> npt.NDArray[np.float64]:
    """Return the relative distance of each segment of two short runs of bytes."""
    a, b = _decode(one, number_format), _decode(other, number_format)
    length = gcd(len(a), _SEGMENT)
    a, b = a.reshape(-1, length), b.reshape(-1, length)
    with np.errstate(all="ignore"):  # what is not finite is handled below
        apart = np.square(a - b, dtype=np.float64).sum(axis=1)
        norm = np.maximum(
            np.square(a, dtype=np.float64).sum(axis=1), np.square(b, dtype=np.float64).sum(axis=1)
        )
        ratios: npt.NDArray[np.float64] = np.sqrt(apart / norm)
    ratios[norm == 0] = 0.0
    if len(odd := np.flatnonzero(~np.isfinite(ratios))):  # NaN and infinity are equal if their bits are
        rows, other_rows = one.reshape(len(a), -1)[odd], other.reshape(len(a), -1)[odd]
        ratios[odd] = (rows != other_rows).any(axis=1)
    return ratios


def _decode(image: Bytes, number_format: str) -> Floats:
    if number_format == "bfloat16":
        return (image.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if number_format == "float8_e5m2":
        return (image.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if number_format == "float8_e4m3fn":
        return _E4M3[image]
    return image.view(number_format).astype(np.float32)


def _e4m3_values() -> Floats:
    """Return the value of each byte: a sign, 4 bits of exponent, 3 of mantissa; all ones are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    scaled = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values = np.where(code & 127 == 127, np.nan, np.where(code & 128, -scaled, scaled))
    return values.astype(np.float32)


_E4M3 = _e4m3_values()


class RowComparer:
    """Compares one rank's images in two slots of the pool.

    `kv_caches` tell how the pages of packed groups lie in their blocks.
    """

    def __init__(
        self, pool: Pool, config: OffloadingConfig, kv_caches: CanonicalKVCaches | None = None
    ) -> None:
        self._rows, self._kv_caches = pool.rows, kv_caches
        self._format, self._config = config.number_format, config
        self._first = config.rank * config.max_image_bytes

    def distance(self, group: int, slot: int, other_slot: int) -> float:
        """Return the distance of the images of a group's chunk in two slots."""
        num_layers = len(self._config.groups[group].layer_names)
        one, other = self._image(group, slot), self._image(group, other_slot)
        return distance(one, other, self._format, num_layers)

    def _image(self, group: int, slot: int) -> Bytes:
        blocks = self._config.settings.blocks_per_chunk
        form = self._config.packed_format(group)
        if form is not None:
            return self._unpack(group, slot, form, blocks)
        image = self._rows[slot, self._first : self._first + self._config.image_bytes(group)]
        return image.reshape(blocks, -1)

    def _unpack(self, group: int, slot: int, form: BlockFormat, blocks: int) -> Bytes:
        """Return an image unpacked; with blocks that do not unpack as NaN, which equal no others."""
        if self._kv_caches is None:
            raise InputError(f"group {group}: expected its pages, to unpack its blocks, got none")
        shapes = [
            PageShape(ref.page_size_bytes, ref.token_values)
            for ref in self._kv_caches.group_data_refs[group]
        ]
        pages = [np.empty((blocks, shape.bytes), np.int8) for shape in shapes]
        every = np.arange(blocks)
        packed = PackedPages(self._rows, self._first, form, pages, shapes)
        arrived = packed.load(np.full(blocks, slot), every, every)
        image = np.concatenate(pages, axis=1).view(np.uint8)
        image[~arrived] = 0xFF
        return image


class _Copied(NamedTuple):
    """An audit whose computed chunks are in their scratch slots."""

    result: TransferResult
    gpu: GPULoadStoreSpec
    slots: AuditLoadStoreSpec


class AuditingHandler(OffloadingHandler):
    """A handler of stores that takes audits too; see the module.

    The result of an audit is a success if every chunk is within the tolerance. Otherwise it is `corrupt` and
    names the blocks of the chunks that are not. `distance` is the largest. `wait` waits for the copies only:
    a comparison reads no block.
    """

    def __init__(self, stores: OffloadingHandler, comparer: RowComparer, config: OffloadingConfig) -> None:
        self.stores = stores
        """The handler that copies, for stores and for audits."""
        self._comparer = comparer
        self._tolerance, self._per_chunk = config.audit_tolerance, config.settings.blocks_per_chunk
        self._copying: dict[int, tuple[GPULoadStoreSpec, AuditLoadStoreSpec]] = {}
        self._num_comparing = 0
        self._queue: SimpleQueue[_Copied | None] = SimpleQueue()
        self._compared: deque[TransferResult] = deque()
        self._thread: threading.Thread | None = None

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, target = spec
        if not isinstance(target, AuditLoadStoreSpec) or not isinstance(source, GPULoadStoreSpec):
            return self.stores.transfer_async(job_id, spec)
        if len(self._copying) + self._num_comparing >= _MAX_AUDITS:
            return False
        is_taken = self.stores.transfer_async(job_id, (source, CPULoadStoreSpec(target.block_ids)))
        if is_taken:
            self._copying[job_id] = source, target
        return is_taken

    def get_finished(self) -> list[TransferResult]:
        results = self.stores.get_finished()
        if self._copying:
            results = [result for result in results if not self._begin_comparing(result)]
        while self._compared:
            results.append(self._compared.popleft())
            self._num_comparing -= 1
        return results

    def _begin_comparing(self, result: TransferResult) -> bool:
        """Hand an audit whose copies have arrived to the thread; return whether `result` was of one."""
        audit = self._copying.pop(result.job_id, None)
        if audit is None or not result.success:
            return False
        if self._thread is None or not self._thread.is_alive():  # a forked child has no thread
            self._thread = threading.Thread(target=self._compare_all, name="kvtier-audit", daemon=True)
            self._thread.start()
        self._num_comparing += 1
        self._queue.put(_Copied(result, *audit))
        return True

    def _compare_all(self) -> None:
        while (audit := self._queue.get()) is not None:
            try:
                result = self._compare(audit)
            except Exception:
                logger.exception("an audit could not compare its rows")
                result = audit.result._replace(success=False)
            self._compared.append(result)

    def _compare(self, audit: _Copied) -> TransferResult:
        """Compare the chunks of an audit. All of them are whole, so chunks and blocks follow each other."""
        pairs = zip(audit.slots.block_ids.tolist(), audit.slots.kept.tolist(), strict=True)
        groups = [
            group for group, size in enumerate(audit.gpu.group_sizes) for _ in range(size // self._per_chunk)
        ]
        apart = [
            self._comparer.distance(group, scratch, kept)
            for group, (scratch, kept) in zip(groups, pairs, strict=True)
        ]
        wrong = [chunk for chunk, far in enumerate(apart) if far > self._tolerance]
        blocks = [chunk * self._per_chunk + at for chunk in wrong for at in range(self._per_chunk)]
        return audit.result._replace(
            success=not wrong,
            failed_blocks=tuple(blocks) if wrong else None,
            corrupt=bool(wrong),
            distance=max(apart),
        )

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        return self.stores.wait(job_ids, timeout)

    def cancel(self, job_ids: set[int]) -> None:
        self.stores.cancel(job_ids)

    def shutdown(self) -> None:
        self.stores.shutdown()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_JOIN_SECONDS)
