"""Blocks that cannot be named yet wait here instead of being lost.

A block's key depends on its tokens and its parent's key, so a block has no key while its parent is unknown,
or if its event had no tokens. `Orphans` keeps the data of such a block, and the areas in which the worker
holds it, until the parent or the block itself has a name. Waiting blocks take bytes of an allowance that
workers share: when it is spent, this worker's block that has waited longest is dropped and counted.

Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from kvtier.errors import IntegrityError
from kvtier.index.forms import Allowance

T = TypeVar("T")


class _Orphan(NamedTuple, Generic[T]):
    """A waiting block: its parent if known, its data, its size, and the number of copies per area."""

    parent: int | None
    item: T
    size: int
    copies: dict[int, int]


class Orphans(Generic[T]):
    """One worker's blocks without a name, by the engine's hash, in order of arrival."""

    def __init__(self, allowance: Allowance, counts: bool = False) -> None:
        """Keep as much as the allowance permits. `counts`: an area may hold several copies of a block."""
        self.dropped = 0  # blocks dropped since the last clear
        self._allowance, self._counts = allowance, counts
        self._blocks: dict[int, _Orphan[T]] = {}
        self._children: dict[int, dict[int, None]] = {}  # by parent

    def __len__(self) -> int:
        return len(self._blocks)

    def park(self, block: int, parent: int | None, item: T, size: int, copies: Mapping[int, int]) -> None:
        """Keep `item`, which takes `size` bytes, for a block that is now held in these areas too.

        An item without a `parent` has no description of the block, so it does not replace an earlier item.
        """
        before = self._blocks.get(block)
        if before is None or (before.parent is None and parent is not None):
            held = {} if before is None else self._take(block).copies
            if not self._make_room(size):
                self.dropped += 1
                return
            before = self._blocks[block] = _Orphan(parent, item, size, held)
            if parent is not None:
                self._children.setdefault(parent, {})[block] = None
        for area, count in copies.items():
            before.copies[area] = before.copies.get(area, 0) + count if self._counts else 1

    def _make_room(self, size: int) -> bool:
        while not self._allowance.take(size):
            if not self._blocks:
                return False
            self._take(next(iter(self._blocks)))
            self.dropped += 1
        return True

    def release(self, block: int) -> list[tuple[T, Mapping[int, int]]]:
        """Take out a block, which has a name now, and its children, oldest first: items and copies."""
        ready = [block] if block in self._blocks else []
        ready += self._children.get(block, ())
        return [(orphan.item, orphan.copies) for orphan in map(self._take, ready)]

    def discard(self, block: int, area: int) -> bool:
        """Drop a copy of a block in an area; return whether there was one."""
        orphan = self._blocks.get(block)
        if orphan is None or area not in orphan.copies:
            return False
        orphan.copies[area] -= 1
        if not orphan.copies[area]:
            del orphan.copies[area]
            if not orphan.copies:
                self._take(block)
        return True

    def clear(self) -> None:
        """Drop all blocks, and reset the count of dropped ones."""
        self._allowance.give(self.bytes())
        self._blocks.clear()
        self._children.clear()
        self.dropped = 0

    def bytes(self) -> int:
        """Return the bytes taken from the allowance."""
        return sum(orphan.size for orphan in self._blocks.values())

    def _take(self, block: int) -> _Orphan[T]:
        orphan = self._blocks.pop(block)
        if orphan.parent is not None:
            siblings = self._children[orphan.parent]
            del siblings[block]
            if not siblings:
                del self._children[orphan.parent]
        self._allowance.give(orphan.size)
        return orphan

    def check(self) -> None:
        """Raise `IntegrityError` unless blocks are found by their parents, and are held somewhere."""
        by_parent = [(block, parent) for parent, blocks in self._children.items() for block in blocks]
        expected = {
            block: orphan.parent for block, orphan in self._blocks.items() if orphan.parent is not None
        }
        if dict(by_parent) != expected or len(by_parent) != len(expected):
            raise IntegrityError(f"orphans: {len(expected)} have a parent, {len(by_parent)} are found by it")
        for block, orphan in self._blocks.items():
            if not orphan.copies or min(orphan.copies.values()) < 1:
                raise IntegrityError(f"orphans: block {block} waits, but is held nowhere")
