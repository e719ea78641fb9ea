"""Tokens -> chained block hashes -> `OffloadKey`; and the fingerprint of everything that bytes depend on.

The hash of a block is BLAKE2b-256 over its parent's hash and its token ids (u32, little-endian). Chaining
makes it name the whole prefix up to the block's end, so equal hashes mean equal prefixes. An *extra key* is
anything else that the KV of a block depends on (a LoRA, a cache salt, an image). It is encoded with a tag of
its source and its length, and hashed under another personalisation than plain blocks, so that no two
different inputs ever feed the hash the same bytes:

    root  = H("kvtier root",   seed)
    plain = H("kvtier block",  parent . tokens)
    extra = H("kvtier block+", parent . number of tokens . tokens . (tag . length . payload)*)

A small C module chains plain blocks where it was compiled, otherwise Python does, with the same hashes (see
`HASHED_BY`). Everything here is pure and may be called from any thread. A change in the input of a hash
orphans every stored row: bump `FORMAT_VERSION`.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError
from kvtier.native import form_of, uses_c

FORMAT_VERSION = 1
"""The version of everything that two engines must agree on to share bytes.

It is part of every fingerprint.
"""

BlockHash = NewType("BlockHash", bytes)
OffloadKey = NewType("OffloadKey", bytes)
"""`block_hash . group_idx` (4 bytes, big-endian). Flat bytes cost the garbage collector nothing."""

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]

_HASH_BYTES = 32
_GROUP_BYTES = 4
_TOKEN_BYTES = 4
_PLAIN = blake2b(digest_size=_HASH_BYTES, person=b"kvtier block")
_EXTRA = blake2b(digest_size=_HASH_BYTES, person=b"kvtier block+")


class ExtraKey(NamedTuple):
    """Something besides tokens that a block's KV depends on.

    The tag names its source, one of the functions below; the payload identifies it within its source.
    """

    tag: int
    payload: bytes


def lora_key(name: str) -> ExtraKey:
    """Name the adapter that a request runs with. It marks the first block; chaining carries it on."""
    return ExtraKey(1, name.encode())


def salt_key(salt: str) -> ExtraKey:
    """Name a tenant's salt: requests share blocks only if their salts are equal.

    It marks the first block, as a LoRA does.
    """
    return ExtraKey(2, salt.encode())


def media_key(item: str, offset: int) -> ExtraKey:
    """Name an image, sound or video behind a block's placeholder tokens.

    `item` identifies its content; `offset` is the position of its first token relative to the block's first.
    """
    return ExtraKey(3, offset.to_bytes(8, "little", signed=True) + item.encode())


def embeds_key(digest: bytes) -> ExtraKey:
    """Name embeddings given instead of tokens, by the digest of the part in this block."""
    return ExtraKey(4, digest)


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """A multimodal item of a request: the identifier of its content, and its tokens
    `[start, start + length)`.
    """

    item: str
    start: int
    length: int


def extra_keys_of(
    num_blocks: int,
    block_size: int,
    *,
    first_block: int = 0,
    lora: str | None = None,
    salt: str | None = None,
    items: Iterable[MultiModalItem] = (),
) -> dict[int, list[ExtraKey]]:
    """Lay a request's extra keys over `num_blocks` blocks from `first_block` on, as `hash_blocks` takes
    them.

    Keys of the result count from `first_block`. LoRA and salt mark block 0 of the request only.
    """
    marks: dict[int, list[ExtraKey]] = {}
    if first_block == 0 and num_blocks > 0:
        if lora is not None:
            marks.setdefault(0, []).append(lora_key(lora))
        if salt is not None:
            marks.setdefault(0, []).append(salt_key(salt))
    for item in items:
        # blocks [first, last) of the request overlap tokens [start, start + length)
        first = max(item.start // block_size, first_block)
        last = min(-(-(item.start + item.length) // block_size), first_block + num_blocks)
        for block in range(first, last):
            marks.setdefault(block - first_block, []).append(
                media_key(item.item, item.start - block * block_size)
            )
    return marks


@lru_cache(maxsize=64)
def root_hash(seed: str = "") -> BlockHash:
    """Return the parent of every first block. Engines that must not share hashes use different seeds."""
    return BlockHash(blake2b(seed.encode(), digest_size=_HASH_BYTES, person=b"kvtier root").digest())


def hash_blocks(
    tokens: Tokens,
    block_size: int,
    *,
    parent: BlockHash | None = None,
    extra_keys: Mapping[int, Iterable[ExtraKey]] | None = None,
    seed: str = "",
) -> list[BlockHash]:
    """Return the chained hashes of the full blocks in `tokens`; a rest shorter than a block is left out.

    With `parent`, `tokens` continue after the block of that hash, so a request is extended by hashing only
    its new tokens. `extra_keys` maps a position in the result to that block's extra keys; their order does
    not matter.
    """
    if block_size < 1:
        raise InputError(f"block_size: expected at least 1 token, got {block_size}")
    if parent is not None and len(parent) != _HASH_BYTES:
        raise InputError(f"parent: expected a block hash of {_HASH_BYTES} bytes, got {len(parent)} bytes")
    marks = {position: _encode_extras(extras) for position, extras in (extra_keys or {}).items()}
    if any(position < 0 for position in marks):
        raise InputError(f"extra_keys: expected positions from 0, got {min(marks)}")
    ids = (
        tokens
        if isinstance(tokens, list)
        else tokens.tolist()
        if isinstance(tokens, np.ndarray)
        else list(tokens)
    )
    digest = root_hash(seed) if parent is None else parent
    try:
        return _hash_runs(ids, block_size, digest, marks) if marks else _chain(ids, block_size, digest)
    except (OverflowError, TypeError) as error:
        raise InputError(f"tokens: expected ids from 0 to 2**32 - 1, got something else ({error})") from None


def _hash_runs(
    ids: list[int], block_size: int, digest: BlockHash, marks: Mapping[int, bytes]
) -> list[BlockHash]:
    """Hash runs of plain blocks and, between them, the blocks with extra keys."""
    hashes = [digest]
    num_blocks = len(ids) // block_size
    for position in sorted(position for position, mark in marks.items() if mark and position < num_blocks):
        # hashes[0] is the parent, so blocks [len(hashes) - 1, position) come next
        hashes += _chain(ids[(len(hashes) - 1) * block_size : position * block_size], block_size, hashes[-1])
        block = _encode_tokens(ids[position * block_size : (position + 1) * block_size])
        state = _EXTRA.copy()
        state.update(hashes[-1] + block_size.to_bytes(4, "little") + block + marks[position])
        hashes.append(BlockHash(state.digest()))
    hashes += _chain(ids[(len(hashes) - 1) * block_size :], block_size, hashes[-1])
    return hashes[1:]


def _encode_extras(extras: Iterable[ExtraKey]) -> bytes:
    """Encode a set of extra keys as `(tag . length . payload)*`, sorted; empty for none."""
    return b"".join(
        bytes([tag]) + len(payload).to_bytes(4, "little") + payload for tag, payload in sorted(set(extras))
    )


def _encode_tokens(ids: list[int]) -> bytes:
    """Return token ids as u32, little-endian. `array` reads a list three times as fast as numpy."""
    words = array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _chain_python(tokens: list[int], block_size: int, parent: BlockHash) -> list[BlockHash]:
    """Hash plain blocks one after the other.

    Copying a prepared state is cheaper than making one for each block.
    """
    data, width = _encode_tokens(tokens), block_size * _TOKEN_BYTES
    fresh, digest = _PLAIN.copy, bytes(parent)
    hashes: list[Any] = []  # not BlockHash, which would be one more call for each block
    for start in range(0, len(data) - width + 1, width):
        state = fresh()
        state.update(digest + data[start : start + width])
        digest = state.digest()
        hashes.append(digest)
    return hashes


if uses_c("chain"):
    from kvtier.native._chain import chain as _chain
else:
    _chain = _chain_python

HASHED_BY = form_of("chain")
"""Whether C or Python chains plain blocks here. Both give the same hashes; C takes half the time."""


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Name a chunk by the hash of its last block and its group.

    Raise `OverflowError` if the group index needs more than 4 bytes.
    """
    return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_BYTES, "big"))


def make_offload_keys(block_hashes: Iterable[bytes], group_idx: int) -> list[OffloadKey]:
    """Make the keys of many chunks of one group."""
    suffix = group_idx.to_bytes(_GROUP_BYTES, "big")
    # Not OffloadKey, which would be one more call for each key.
    keys: list[Any] = [block_hash + suffix for block_hash in block_hashes]
    return keys


def get_offload_block_hash(key: OffloadKey) -> BlockHash:
    """Return the hash part of a key."""
    return BlockHash(key[:-_GROUP_BYTES])


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the group part of a key."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def hash_to_u64(block_hash: bytes) -> int:
    """Return the low 64 bits of a hash (its last 8 bytes, big-endian), which events carry."""
    return int.from_bytes(block_hash[-8:], "big")


def fingerprint(
    *,
    weights: Any,
    dtype: str,
    kv_layout: Any,
    groups: Any,
    parallelism: Any,
    lora: Any = None,
    seed: str = "",
    **more: Any,
) -> str:
    """Return the namespace: 64 hex digits that are equal only for engines that may share bytes.

    Arguments are JSON values; `weights` is the result of `WeightsFiles.manifest`. Anything else that shapes
    the bytes of a block, such as an attention backend with its own layout, goes into `more`.
    """
    fields = {
        "weights": weights,
        "dtype": dtype,
        "kv_layout": kv_layout,
        "groups": groups,
        "parallelism": parallelism,
    }
    fields |= {"lora": lora, "seed": seed, "format": FORMAT_VERSION, "more": more}
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"fingerprint: expected JSON values, got something else ({error})") from None
    return sha256(text.encode()).hexdigest()
