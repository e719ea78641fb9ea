"""An index's data about one worker, beside the table: its groups, duplicates, names and refusals.

The index does not know a block that was refused, or dropped while it waited: `reason()` says so until the
worker is cleared. Not for several threads at once.
"""

from __future__ import annotations

from kvtier.index.base import MAX_AREAS
from kvtier.index.forms import Allowance, Form
from kvtier.index.places import Groups
from kvtier.index.translate import Translator
from kvtier.log_limit import LogLimit

_COUNT_BYTES = 256  # a pair of ints and its place in a dict that has just doubled


class DuplicateCounts:
    """How many copies of a block one worker holds beyond the first.

    vLLM sends a store and a removal for every physical copy of a block. Second copies are rare, so only
    they are counted. A copy that does not fit is counted as dropped, and its block is forgotten at its
    first removal: too early, never too late.
    """

    def __init__(self, allowance: Allowance) -> None:
        """Remember as much as the allowance permits."""
        self.dropped = 0  # since the last clear
        self._allowance = allowance
        self._more: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._more)

    def add(self, area: int, block_hash: int) -> None:
        """Count one more copy of a block that is held already."""
        more = self._more.get((area, block_hash), 0)
        if more or self._allowance.take(_COUNT_BYTES):
            self._more[area, block_hash] = more + 1
        else:
            self.dropped += 1

    def take(self, area: int, block_hash: int) -> bool:
        """Count one copy less; `False` if there is only one, which is not counted here."""
        more = self._more.get((area, block_hash), 0)
        if more > 1:
            self._more[area, block_hash] = more - 1
        elif more:
            del self._more[area, block_hash]
            self._allowance.give(_COUNT_BYTES)
        return more > 0

    def clear(self) -> None:
        """Forget all duplicates."""
        self._allowance.give(_COUNT_BYTES * len(self._more))
        self._more.clear()
        self.dropped = 0

    def bytes(self) -> int:
        """Return the bytes taken from the allowance."""
        return _COUNT_BYTES * len(self._more)


class KnownWorker:
    """A worker of an index.

    `number` is its number in the table; if it `counts`, it announces every copy of a block.
    """

    def __init__(self, name: str, number: int, form: Form, allowance: Allowance, counts: bool) -> None:
        self.name, self.number, self.counts = name, number, counts
        self.groups = Groups()
        self.duplicates = DuplicateCounts(allowance)  # used if it counts
        self.translator = Translator(number, form, allowance, counts)  # used if keys are hashes of tokens
        # The newest block size that was refused, and the number of such blocks.
        self.other_size, self.of_other_size = 0, 0
        self.no_area = 0  # blocks refused because no more areas are possible
        self.problem_logged = False  # since the last clear
        self.log_limit = LogLimit()

    @property
    def refused(self) -> int:
        """How many blocks were refused since the last clear, without those that found no room."""
        return self.no_area + self.of_other_size + self.translator.misfits

    @property
    def has_losses(self) -> bool:
        """Whether blocks are missing, apart from those that the table dropped."""
        lost = self.refused or self.translator.waiting.dropped or self.duplicates.dropped
        return bool(lost or self.groups.unclear)

    def bytes(self) -> int:
        """Return the bytes taken from the allowance."""
        return self.translator.bytes() + self.duplicates.bytes()

    def reason(self, dropped: int, block_size: int | None) -> str:
        """Say in a line why blocks are missing; `dropped` is the table's count."""
        size, groups = self.other_size, self.groups.unclear.items()
        losses = [
            (
                self.of_other_size,
                f"events have blocks of {size} tokens, the index has {block_size}: "
                f"register with block_size {size}",
            ),
            (
                self.translator.misfits,
                "{} blocks came with tokens or extra keys that are not those of whole blocks, or not those "
                "that they had before",
            ),
            (self.no_area, f"{{}} blocks are in places beyond the {MAX_AREAS} that an index can tell apart"),
            (dropped, "{} blocks found no room: raise the index's budget"),
            (
                self.translator.waiting.dropped,
                "{} blocks whose parent is unknown found no room to wait for it",
            ),
            (
                self.duplicates.dropped,
                "{} second copies of blocks found no room: raise the index's budget",
            ),
            *(
                (
                    count,
                    f"{{}} blocks of group {group} were left out: events do not say its kind of attention",
                )
                for group, count in groups
            ),
        ]
        return "; ".join(text.format(count) for count, text in losses if count)

    def clear(self) -> None:
        """Forget all blocks and refusals. Groups stay: it is the same engine."""
        self.other_size = self.of_other_size = self.no_area = 0
        self.problem_logged = False
        self.groups.unclear.clear()
        self.duplicates.clear()
        self.translator.clear()
