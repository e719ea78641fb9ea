"""XXH3-64 over tokens, compiled: the functions of `kvtier.index.xxh3` without an object per block.

Token ids are read as little-endian u32 on every machine, so a block of `n` tokens is an input of `4 n`
bytes. The module covers all input lengths that are multiples of 4. Pure functions; any thread may call
them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.index.compiled import fold_product, jit, swap_bytes
from kvtier.index.xxh3 import SEED

_SECRET_BYTES = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SECRET = np.array([int.from_bytes(_SECRET_BYTES[i : i + 8], "little") for i in range(185)], np.uint64)
"""The 8 bytes of the secret at every offset."""

_P32_1, _P32_2, _P32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_P64_1, _P64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_P64_3, _P64_4, _P64_5 = (
    np.uint64(0x165667B19E3779F9),
    np.uint64(0x85EBCA77C2B2AE63),
    np.uint64(0x27D4EB2F165667C5),
)
_MX1, _MX2 = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
_START = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1], np.uint64)
_SEED = np.uint64(SEED)
_LOW, _S32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@jit
def _read(tokens: Any, at: Any) -> Any:
    """Return the 8 bytes from token `at` on."""
    return np.uint64(tokens[at]) | (np.uint64(tokens[at + 1]) << _S32)


@jit
def _avalanche(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(37))) * _MX1
    return value ^ (value >> _S32)


@jit
def _mix16(tokens: Any, at: Any, secret: Any, seed: Any) -> Any:
    return fold_product(
        _read(tokens, at) ^ (_SECRET[secret] + seed), _read(tokens, at + 2) ^ (_SECRET[secret + 8] - seed)
    )


@jit
def _hash_pair(first: Any, second: Any, size: Any, seed: Any) -> Any:
    """Hash 9 to 16 bytes, given as their first 8 and their last 8."""
    low = first ^ ((_SECRET[24] ^ _SECRET[32]) + seed)
    high = second ^ ((_SECRET[40] ^ _SECRET[48]) - seed)
    return _avalanche(np.uint64(size) + swap_bytes(low) + high + fold_product(low, high))


@jit
def _hash_small(tokens: Any, start: Any, count: Any, seed: Any) -> Any:
    """Hash 4 or 8 bytes."""
    seed ^= swap_bytes(seed & _LOW) & ~_LOW
    value = (np.uint64(tokens[start]) << _S32) + np.uint64(tokens[start + count - 1])
    value ^= (_SECRET[8] ^ _SECRET[16]) - seed
    value ^= ((value << np.uint64(49)) | (value >> np.uint64(15))) ^ (
        (value << np.uint64(24)) | (value >> np.uint64(40))
    )
    value *= _MX2
    value ^= (value >> np.uint64(35)) + np.uint64(4 * count)
    value *= _MX2
    return value ^ (value >> np.uint64(28))


@jit
def _hash_middle(tokens: Any, start: Any, count: Any, seed: Any) -> Any:
    """Hash 17 to 128 bytes, from both ends towards the middle."""
    total = np.uint64(4 * count) * _P64_1
    for pair in range((count - 1) // 8, -1, -1):
        total += _mix16(tokens, start + 4 * pair, 32 * pair, seed)
        total += _mix16(tokens, start + count - 4 * (pair + 1), 32 * pair + 16, seed)
    return _avalanche(total)


@jit
def _hash_large(tokens: Any, start: Any, count: Any, seed: Any) -> Any:
    """Hash 129 to 240 bytes."""
    total = np.uint64(4 * count) * _P64_1
    for part in range(8):
        total += _mix16(tokens, start + 4 * part, 16 * part, seed)
    total = _avalanche(total)
    for part in range(8, count // 4):
        total += _mix16(tokens, start + 4 * part, 16 * (part - 8) + 3, seed)
    return _avalanche(total + _mix16(tokens, start + count - 4, 119, seed))


@jit
def _accumulate(state: Any, tokens: Any, at: Any, secret: Any, seed: Any) -> None:
    """Add 64 bytes to the state."""
    for word in range(8):
        data = _read(tokens, at + 2 * word)
        key = data ^ _seeded(secret + 8 * word, seed)
        state[word ^ 1] += data
        state[word] += (key & _LOW) * (key >> _S32)


@jit
def _seeded(at: Any, seed: Any) -> Any:
    """Return 8 bytes of the seeded secret: the seed is added to and subtracted from its words in turn."""
    first = at & ~7
    word = _SECRET[first] - seed if first & 8 else _SECRET[first] + seed
    if first == at:
        return word
    following = _SECRET[first + 8] + seed if first & 8 else _SECRET[first + 8] - seed
    shift = np.uint64(8 * (at - first))
    return (word >> shift) | (following << (np.uint64(64) - shift))


@jit
def _hash_long(tokens: Any, start: Any, count: Any, seed: Any) -> Any:
    """Hash more than 240 bytes, 64 at a time."""
    state = _START.copy()
    stripes = (4 * count - 1) // 64
    for stripe in range(stripes):
        _accumulate(state, tokens, start + 16 * stripe, 8 * (stripe % 16), seed)
        if stripe % 16 == 15:
            for word in range(8):
                value = state[word]
                state[word] = (value ^ (value >> np.uint64(47)) ^ _seeded(128 + 8 * word, seed)) * _P32_1
    _accumulate(state, tokens, start + count - 16, 121, seed)
    total = np.uint64(4 * count) * _P64_1
    for pair in range(4):
        left, right = _seeded(11 + 16 * pair, seed), _seeded(19 + 16 * pair, seed)
        total += fold_product(state[2 * pair] ^ left, state[2 * pair + 1] ^ right)
    return _avalanche(total)


@jit
def hash_block(tokens: Any, start: Any, count: Any, seed: Any) -> Any:
    """Return the local hash of `tokens[start:start + count]`."""
    if count <= 2:
        return _hash_small(tokens, start, count, seed)
    if count <= 4:
        return _hash_pair(_read(tokens, start), _read(tokens, start + count - 2), 4 * count, seed)
    if count <= 32:
        return _hash_middle(tokens, start, count, seed)
    if count <= 60:
        return _hash_large(tokens, start, count, seed)
    return _hash_long(tokens, start, count, seed)


@jit
def chain_one(parent: Any, local: Any) -> Any:
    """Return the key of a block that follows `parent`."""
    return _hash_pair(parent, local, 16, _SEED)


@jit
def hash_blocks(tokens: Any, block_size: Any, seed: Any) -> Any:
    """Return the local hash of each full block."""
    found = np.empty(tokens.size // block_size, np.uint64)
    for block in range(found.size):
        found[block] = hash_block(tokens, block * block_size, block_size, seed)
    return found


@jit
def chain(local: Any, parent: Any, has_parent: Any) -> Any:
    """Return the keys of consecutive blocks."""
    keys = np.empty_like(local)
    for block in range(local.size):
        parent = chain_one(parent, local[block]) if has_parent or block else local[block]
        keys[block] = parent
    return keys
