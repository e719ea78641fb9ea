"""What an index knows of one worker beside what the table holds of it: its groups, its duplicates, its
names, its refusals.

A block that was refused, or dropped while it waited, is one that the index does not know of: `reason()` says
so until the worker is cleared. Not for several threads at once.
"""

from __future__ import annotations

from kvtier.index.base import MAX_AREAS
from kvtier.index.duplicates import DuplicateCounts
from kvtier.index.places import Groups
from kvtier.index.translate import Translator

__all__ = ["KnownWorker"]


class KnownWorker:
    """A worker of an index. `number` is the one that it has in the table."""

    def __init__(
        self, name: str, number: int, duplicates: DuplicateCounts | None, translator: Translator | None
    ) -> None:
        self.name, self.number = name, number
        self.duplicates, self.translator = duplicates, translator
        self.groups = Groups()
        # The newest block size that was refused, and how many blocks.
        self.other_size, self.of_other_size = 0, 0
        self.no_area = 0  # blocks refused since there can be no more areas
        self.is_told = False  # it was logged that something is amiss

    @property
    def refused(self) -> int:
        """How many blocks were refused since it was last cleared, those that the table refused
        not counted.
        """
        misfits = 0 if self.translator is None else self.translator.misfits
        return self.no_area + self.of_other_size + misfits

    @property
    def waiting(self) -> int:
        """How many blocks wait for their parent."""
        return 0 if self.translator is None else len(self.translator.waiting)

    @property
    def orphans_dropped(self) -> int:
        """How many blocks were dropped while they waited, since it was last cleared."""
        return 0 if self.translator is None else self.translator.waiting.dropped

    @property
    def is_marred(self) -> bool:
        """Whether anything is amiss, what the table dropped not counted."""
        if self.of_other_size or self.no_area or self.groups.unclear:
            return True
        if self.duplicates is not None and self.duplicates.dropped:
            return True
        return self.translator is not None and bool(
            self.translator.misfits or self.translator.waiting.dropped
        )

    def bytes(self) -> int:
        """Return what is taken of the allowance."""
        names = 0 if self.translator is None else self.translator.bytes()
        return names + (0 if self.duplicates is None else self.duplicates.bytes())

    def reason(self, dropped: int, block_size: int | None) -> str:
        """Say in a line why less is known than was told, empty where all is known; the table `dropped` so
        many blocks.
        """
        translator, reasons = self.translator, []
        if self.of_other_size:
            size = self.other_size
            reasons.append(
                f"events have blocks of {size} tokens, the index has {block_size}: "
                f"register with block_size {size}"
            )
        if translator is not None and translator.misfits:
            reasons.append(
                f"{translator.misfits} blocks came with tokens or extra keys that are not those of "
                "whole blocks, or not those that they had before"
            )
        if self.no_area:
            reasons.append(
                f"{self.no_area} blocks are in places beyond the {MAX_AREAS} that an index can tell apart"
            )
        if dropped:
            reasons.append(f"{dropped} blocks found no room: raise the index's budget")
        if self.orphans_dropped:
            reasons.append(
                f"{self.orphans_dropped} blocks whose parent is unknown found no room to wait for it"
            )
        if self.duplicates is not None and self.duplicates.dropped:
            reasons.append(
                f"{self.duplicates.dropped} second copies of blocks found no room: raise the index's budget"
            )
        for group, count in self.groups.unclear.items():
            reasons.append(
                f"{count} blocks of group {group} were left out: events do not say its kind of attention"
            )
        return "; ".join(reasons)

    def clear(self) -> None:
        """Forget what was held, and that anything was refused. Groups stay: it is the same engine."""
        self.other_size = self.of_other_size = self.no_area = 0
        self.groups.unclear.clear()
        self.is_told = False
        if self.duplicates is not None:
            self.duplicates.clear()
        if self.translator is not None:
            self.translator.clear()
