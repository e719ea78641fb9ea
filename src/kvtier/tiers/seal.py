"""Seals: the checksum of a row, bound to whose it is, put on and checked in one place above all backends.

    seed = XXH3-64(scope . key . length of the row, u64)
    seal = XXH3-128(payload, seed)

The scope is the namespace with the epoch and the suffix of the last reset. So a row that was damaged, cut
short, swapped with another, left from before a reset, or made by another model fails its check. The seed
costs nothing; the payload is hashed at memory speed with the GIL released. Any thread may call what is
here.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvtier.keys import OffloadKey
from kvtier.tiers.base import Piece

__all__ = ["SEAL_BYTES", "SealScope", "seal_of"]

SEAL_BYTES = 16


class SealScope:
    """Whose bytes a row is: namespace, epoch, and the suffix of this process's last reset.

    Immutable. `number` stands for it in records: 64 bits, 0 never.
    """

    __slots__ = ("epoch", "namespace", "number", "suffix", "text")

    def __init__(self, namespace: str, epoch: int = 0, suffix: str = "") -> None:
        self.namespace, self.epoch, self.suffix = namespace, epoch, suffix
        parts = [namespace.encode(), b"%d" % epoch, suffix.encode()]
        self.text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        self.number = xxhash.xxh3_64_intdigest(self.text) or 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SealScope) and self.text == other.text

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"SealScope({self.namespace!r}, {self.epoch}, {self.suffix!r})"


def seal_of(scope: SealScope, key: OffloadKey, pieces: Sequence[Piece]) -> bytes:
    """Return the seal of a row, 16 bytes. How it is cut into pieces does not matter."""
    if len(pieces) == 1:
        (piece,) = pieces
        return xxhash.xxh3_128_digest(piece, _seed(scope, key, piece.nbytes))
    state = xxhash.xxh3_128(seed=_seed(scope, key, sum(piece.nbytes for piece in pieces)))
    for piece in pieces:
        state.update(piece)
    return state.digest()


def _seed(scope: SealScope, key: OffloadKey, length: int) -> int:
    return xxhash.xxh3_64_intdigest(scope.text + key + length.to_bytes(8, "little"))
