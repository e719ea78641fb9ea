"""Keys that depend on tokens alone, so that engines which hash blocks differently can share one index.

The scheme is that of Dynamo and of Mooncake's RFC: a block's local hash is XXH3-64 over its token ids (u32, little-endian)
with a seed; its key chains the local hashes, and the first block's key is its local hash:

    seed  = 1337 + xxh3(lora, 0) + xxh3(salt, 1)         what is absent or empty adds nothing; modulo 2^64
    local = xxh3(tokens [. hashes of images], seed)
    key   = xxh3(parent's key . local, 1337)             both as 8 bytes, little-endian

An image, sound or video counts by the first 64 bits of its identifier, of several in ascending order. Everything here is
pure and may be called from any thread. The compiled table brings faster forms of the same functions.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import InputError
from kvtier.index.base import Hashes

__all__ = ["SEED", "chain_keys", "image_hashes", "local_hashes", "salt_of", "seed_of", "token_array"]

SEED = 1337
_U64 = (1 << 64) - 1
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
    return seed & _U64


def token_array(tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint32]:
    """Return token ids as u32. What does not fit raises `InputError`."""
    try:
        wide = np.asarray(tokens, dtype=np.int64) if len(tokens) else np.empty(0, np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f"tokens: expected ids from 0 to 2**32 - 1, got something else ({error})") from None
    if wide.ndim != 1 or (len(wide) and (wide.min() < 0 or wide.max() >= 1 << 32)):
        raise InputError("tokens: expected a flat list of ids from 0 to 2**32 - 1")
    return wide.astype(np.uint32)


def local_hashes(
    tokens: npt.NDArray[np.uint32], block_size: int, seed: int = SEED, images: Sequence[Sequence[int]] = ()
) -> Hashes:
    """Return the local hash of each full block; `images[i]` are the hashes of what else block `i` contains."""
    data, width = tokens.astype("<u4", copy=False).tobytes(), block_size * 4
    digest = xxhash.xxh3_64_intdigest
    found = []
    for i in range(len(tokens) // block_size):
        block = data[i * width : (i + 1) * width]
        if i < len(images) and images[i]:
            block += b"".join(each.to_bytes(8, "little") for each in sorted(images[i]))
        found.append(digest(block, seed))
    return np.array(found, np.uint64)


def chain_keys(local: Hashes, parent: int | None = None) -> Hashes:
    """Return the keys of consecutive blocks from their local hashes, the first one's parent's key given."""
    digest, keys = xxhash.xxh3_64_intdigest, []
    for each in local.tolist():
        parent = each if parent is None else digest(_pair(parent, each), SEED)
        keys.append(parent)
    return np.array(keys, np.uint64)


def salt_of(extra_keys: Sequence[Sequence[Any] | None] | None, lora: str | None) -> str | None:
    """Return the cache salt among the first block's extra keys: the text that is neither the adapter nor an image."""
    texts = [key for key in ((extra_keys[0] or ()) if extra_keys else ()) if isinstance(key, str)]
    if lora in texts:
        texts.remove(lora)
    salts = [text for text in texts if text and not _IDENTIFIER.fullmatch(text)]
    return salts[0].removeprefix(_SALT_PREFIX) if salts else None


def image_hashes(extra_keys: Iterable[Sequence[Any] | None] | None) -> list[list[int]]:
    """Return per block the hashes of the images among its extra keys: texts of 64 hex digits, alone or with an offset."""
    return [
        [int(name[:16], 16) for name in map(_name_of, keys or ()) if _IDENTIFIER.fullmatch(name)]
        for keys in extra_keys or ()
    ]


def _name_of(key: Any) -> str:
    if isinstance(key, (list, tuple)) and len(key) == 2:
        key = key[0]
    return key if isinstance(key, str) else ""
