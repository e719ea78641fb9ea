from collections.abc import Callable
from typing import NoReturn

from kvtier.transfer.cuda.commands import KernelArgs, Script, SimpleBounds
from kvtier.transfer.cuda.driver import Launch
from kvtier.transfer.cuda.pieces import Ints, Pages, Rows

class Submitter:
    """See `kvtier.transfer.cuda.commands.Submitter`."""

    def __new__(
        cls, functions: bytes, fail: Callable[[int, str], NoReturn], to_pool: int, address: int, seam: int,
        small_range: int, first_ranges: int, batch_ranges: int, /,
    ) -> Submitter: ...  # fmt: skip
    def is_simple(self, bounds: SimpleBounds, blocks: Ints, slots: Ints, engine: int, /) -> bool: ...
    def play(
        self,
        script: Script,
        blocks: Ints,
        first: int,
        last: int,
        count: int,
        rows: Rows,
        start: int,
        wait: int,
        /,
    ) -> None: ...
    def write_args(
        self, args: KernelArgs, blocks: Ints, first: int, last: int, rows: Rows, offset: int, /
    ) -> None: ...
    def launch(
        self,
        kernel: Launch,
        args: KernelArgs,
        num_blocks: int,
        stream: int,
        start: int,
        wait: int,
        done: int,
        /,
    ) -> None: ...
    def copy(
        self, pages: Pages, blocks: Ints | None, first: int, last: int, rows: Rows,
        stream: int, side: int, side_done: int, after: int, start: int, wait: int, done: int, /,
    ) -> None: ...  # fmt: skip
    def is_over(self, event: int, /) -> bool: ...
    def is_idle(self, stream: int, /) -> bool: ...
    def wait_over(self, event: int, /) -> None: ...
    def seconds_between(self, start: int, end: int, /) -> float: ...
