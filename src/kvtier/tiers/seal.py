"""Seals: the checksum of a row, bound to its owner, put on and checked in one place above all backends.

    seed = XXH3-64(scope . key . length of the row, u64)
    seal = XXH3-128(payload, seed)

The scope is the namespace with the epoch and the suffix of the last reset. So a row fails its check if it
was damaged, cut short, swapped with another, written before a reset, or made by another model. The seed
costs nothing; the payload is hashed at memory speed with the GIL released. Any thread may call these
functions.

Anyone can make such a seal. With a secret key, only an owner of the key can:

    seal = BLAKE3-keyed(scope . length of the key, u32 . key . length of the row, u64 . payload), 16 bytes

So a row in a place where others may write passes its check only if an engine with the same key made it. The
number of a scope, which is part of a row's name on servers, then comes from the key, too: fleets with
different keys never see each other's rows. The secret appears in no text, error or log.

On servers a row is one value, with its seal in a header of 64 bytes:

     0  8   `kvtrow1` and a newline
     8  8   bytes of the payload, little-endian
    16  8   number of the row's scope
    24  1   bytes of the seal; 7 bytes of zeros
    32  32  seal, then zeros

The header says what the value is, so a reader detects a value that is cut short, too long, or of a later
format before it looks at the bytes. The seal decides about the bytes.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import ConfigError, InputError
from kvtier.keys import OffloadKey

if TYPE_CHECKING:
    from kvtier.tiers.base import BackendRow

logger = logging.getLogger(__name__)

SEAL_BYTES = 16
_KEY_BYTES = 32
_HEADER = struct.Struct("<8sQQB7x32s")
_MAGIC = b"kvtrow1\n"
_MOST_SEAL = 32
HEADER_BYTES = _HEADER.size


class SealScope:
    """The owner of a row's bytes: namespace, epoch, and the suffix of this process's last reset.

    Immutable. `number` represents the scope in records and names: 64 bits, never 0. With a `seal_key` only
    owners of the key can compute the number.
    """

    __slots__ = ("epoch", "namespace", "number", "suffix", "text")

    def __init__(
        self,
        namespace: str,
        epoch: int = 0,
        suffix: str = "",
        seal_key: SealKey | None = None,
    ) -> None:
        self.namespace, self.epoch, self.suffix = namespace, epoch, suffix
        parts = [namespace.encode(), b"%d" % epoch, suffix.encode()]
        self.text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        number = xxhash.xxh3_64_intdigest(self.text) if seal_key is None else seal_key.number_of(self.text)
        self.number = number or 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SealScope) and (self.text, self.number) == (other.text, other.number)

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"SealScope({self.namespace!r}, {self.epoch}, {self.suffix!r})"


class SealKey:
    """The secret of a fleet. Its repr hides it, and it cannot be pickled."""

    __slots__ = ("_blake3", "_secret")

    def __init__(self, secret: bytes) -> None:
        """Take 32 bytes. `ConfigError` without the package `blake3`."""
        try:
            from blake3 import blake3
        except ImportError:
            raise ConfigError("seal_key_file", "needs the package blake3: pip install blake3") from None
        if len(secret) != _KEY_BYTES:
            raise ConfigError("seal_key_file", f"expected a key of {_KEY_BYTES} bytes, got {len(secret)}")
        self._blake3: Any = blake3
        self._secret = secret

    def __repr__(self) -> str:
        return "SealKey(...)"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a seal key is not pickled; read it from its file where it is needed")

    def number_of(self, text: bytes) -> int:
        """Return a 64-bit number for a text; it differs from key to key."""
        return int.from_bytes(self._blake3(text, key=self._secret).digest(length=8), "little")

    def seal(self, scope: SealScope, key: OffloadKey, length: int, pieces: Sequence[memoryview]) -> bytes:
        """Return the keyed seal of a row."""
        whose = scope.text + len(key).to_bytes(4, "little") + key + length.to_bytes(8, "little")
        state = self._blake3(whose, key=self._secret)
        for piece in pieces:
            state.update(piece)
        seal: bytes = state.digest(length=SEAL_BYTES)
        return seal


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting: a pipe that has no writer is then read as empty."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_seal_key(path: str) -> SealKey:
    """Read the key of a fleet from its file: 32 bytes, or 64 hex digits. `ConfigError` if it has neither."""
    expected = f"expected {_KEY_BYTES} bytes or {2 * _KEY_BYTES} hex digits in {path}"
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(4096) or b""
    except OSError as error:
        raise ConfigError("seal_key_file", f"{expected}: {error.strerror}") from None
    if len(secret) != _KEY_BYTES:
        try:
            secret = bytes.fromhex(secret.decode("ascii"))
        except ValueError:
            problem = f"{expected}, got {len(secret)} bytes that are not hex digits"
            raise ConfigError("seal_key_file", problem) from None
        if len(secret) != _KEY_BYTES:
            raise ConfigError("seal_key_file", f"{expected}, got {2 * len(secret)} hex digits")
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        logger.warning("seal_key_file: every user of this machine may read or write %s; chmod 600 it", path)
    return SealKey(secret)


def seal_of(
    scope: SealScope,
    key: OffloadKey,
    pieces: Sequence[memoryview],
    seal_key: SealKey | None = None,
) -> bytes:
    """Return the seal of a row, 16 bytes. The division into pieces does not matter."""
    if seal_key is not None:
        return seal_key.seal(scope, key, sum(piece.nbytes for piece in pieces), pieces)
    if len(pieces) == 1:
        (piece,) = pieces
        return xxhash.xxh3_128_digest(piece, _seed(scope, key, piece.nbytes))
    state = xxhash.xxh3_128(seed=_seed(scope, key, sum(piece.nbytes for piece in pieces)))
    for piece in pieces:
        state.update(piece)
    return state.digest()


def _seed(scope: SealScope, key: OffloadKey, length: int) -> int:
    return xxhash.xxh3_64_intdigest(scope.text + key + length.to_bytes(8, "little"))


def pack_header(row: BackendRow) -> bytes:
    """Return the header of a row's value."""
    if len(row.seal) > _MOST_SEAL:
        raise InputError(f"seal: expected at most {_MOST_SEAL} bytes, got {len(row.seal)}")
    return _HEADER.pack(_MAGIC, row.nbytes, row.scope, len(row.seal), row.seal)


def seal_in(header: bytes | bytearray | memoryview, row: BackendRow) -> bytes:
    """Return the seal in a header; an empty one, which no row has, if the header is not this row's."""
    magic, nbytes, scope, length, seal = _HEADER.unpack(header)
    if (magic, nbytes, scope) != (_MAGIC, row.nbytes, row.scope) or length > _MOST_SEAL:
        return b""
    return bytes(seal[:length])


def copy_into(pieces: Sequence[memoryview], payload: memoryview) -> None:
    """Copy a payload with the GIL released; an assignment to a memoryview would hold it."""
    source, at = np.frombuffer(payload, np.uint8), 0
    for piece in pieces:
        np.copyto(np.frombuffer(piece, np.uint8), source[at : at + piece.nbytes])
        at += piece.nbytes


def copy_out(pieces: Sequence[memoryview], buffer: npt.NDArray[np.uint8]) -> None:
    """Copy the pieces of a row to the start of a buffer, with the GIL released."""
    at = 0
    for piece in pieces:
        np.copyto(buffer[at : at + piece.nbytes], np.frombuffer(piece, np.uint8))
        at += piece.nbytes
