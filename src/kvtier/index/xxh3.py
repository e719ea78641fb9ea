"""Keys that depend on tokens alone, so that engines which hash blocks differently can share one index.

The scheme is that of Dynamo and of Mooncake's RFC: a block's local hash is XXH3-64 over its token ids (u32,
little-endian) with a seed; its key chains the local hashes, and the first block's key is its local hash:

    seed  = 1337 + xxh3(lora, 0) + xxh3(salt, 1)         what is absent or empty adds nothing; modulo 2^64
    local = xxh3(tokens [. hashes of extra keys], seed)
    key   = xxh3(parent's key . local, 1337)             both as 8 bytes, little-endian

An image, sound or video whose identifier is 64 hex digits counts by its first 64 bits, as with Dynamo; any
other extra key (an identifier of the user's, the digest of embeddings) counts by the hash of its msgpack
bytes. Several extra keys are sorted in ascending order. An adapter that has a number but no name is called
`lora_id=<number>`.

Everything here is pure; any thread may call it. The compiled table has faster forms of the same functions.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import InputError
from kvtier.events.wire import U64
from kvtier.index.base import Hashes

SEED = 1337
_IDENTIFIER = re.compile(r"[0-9a-fA-F]{64}")
_SALT_PREFIX = "dynamo-cache-salt:"
_pair = struct.Struct("<QQ").pack


def seed_of(lora: str | None = None, salt: str | None = None) -> int:
    """Return the seed of the local hashes under an adapter and a salt."""
    seed = SEED
    if lora:
        seed += xxhash.xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        seed += xxhash.xxh3_64_intdigest(salt.encode(), 1)
    return seed & U64


def token_array(tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint32]:
    """Return token ids as u32. `InputError` if one does not fit."""
    try:
        wide = np.asarray(tokens, dtype=np.int64) if len(tokens) else np.empty(0, np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f"tokens: expected ids from 0 to 2**32 - 1, got something else ({error})") from None
    if wide.ndim != 1 or (len(wide) and (wide.min() < 0 or wide.max() >= 1 << 32)):
        raise InputError("tokens: expected a flat list of ids from 0 to 2**32 - 1")
    return wide.astype(np.uint32)


def local_hashes(
    tokens: npt.NDArray[np.uint32] | bytes,
    block_size: int,
    seed: int = SEED,
    extra: Sequence[Sequence[int]] = (),
) -> Hashes:
    """Return the local hash of each full block; `extra[i]` are the hashes of block `i`'s extra keys.

    Tokens are an array, or its bytes in little-endian order.
    """
    data = tokens if isinstance(tokens, bytes) else tokens.astype("<u4", copy=False).tobytes()
    digest, width = xxhash.xxh3_64_intdigest, block_size * 4
    found = []
    for i in range(len(data) // width):
        block = data[i * width : (i + 1) * width]
        if i < len(extra) and extra[i]:
            block += b"".join(number.to_bytes(8, "little") for number in sorted(extra[i]))
        found.append(digest(block, seed))
    return np.array(found, np.uint64)


def chain_keys(local: Hashes, parent: int | None = None) -> Hashes:
    """Return the keys of consecutive blocks from their local hashes and the first one's parent key."""
    digest, keys = xxhash.xxh3_64_intdigest, []
    for number in local.tolist():
        parent = number if parent is None else digest(_pair(parent, number), SEED)
        keys.append(parent)
    return np.array(keys, np.uint64)


def lora_of(name: str | None, number: int | None) -> str | None:
    """Return an adapter's name, else its number as a name; engines give 0 or less if there is none."""
    return name or (f"lora_id={number}" if number is not None and number > 0 else None)


def salt_of(extra_keys: Sequence[Sequence[Any] | None] | None, lora: str | None) -> str | None:
    """Return the salt among the first block's extra keys: the text that is neither adapter nor image."""
    texts = [key for key in ((extra_keys[0] or ()) if extra_keys else ()) if isinstance(key, str)]
    if lora in texts:
        texts.remove(lora)
    salts = [text for text in texts if text and not _IDENTIFIER.fullmatch(text)]
    return salts[0].removeprefix(_SALT_PREFIX) if salts else None


def extra_hashes(keys: Sequence[Any] | None, lora: str | None, salt: str | None = None) -> list[int]:
    """Return the hashes of a block's extra keys, without adapter and salt, which are in the seed.

    `TypeError`, `ValueError` or `OverflowError` if msgpack cannot encode a key.
    """
    left = list(keys or ())
    for names in ((lora,), (salt, f"{_SALT_PREFIX}{salt}")):
        seeded = next((key for key in left if isinstance(key, str) and key in names), None)
        if names[0] and seeded is not None:
            left.remove(seeded)
    return [_extra_hash(key) for key in left]


def _extra_hash(key: Any) -> int:
    """Return the hash of an extra key: text, bytes, or an identifier and its position in the block."""
    name = key[0] if isinstance(key, (list, tuple)) and len(key) == 2 else key
    if isinstance(name, str) and _IDENTIFIER.fullmatch(name):
        return int(name[:16], 16)
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(key))
