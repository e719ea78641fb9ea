"""Speculation: a request computes the tokens behind its load while the load is still on its way.

An engine that has nothing else to do begins the forward pass of the one request that it waits for. Each
layer waits only for its own KV (`await_layer`; on a GPU, the device waits), so that little is left to
compute when the last layer has arrived. The resulting logits are kept, and the next step uses them if it
computes the same tokens in the same blocks. If a load fails, the logits are dropped, and only idle time was
lost. Requests that load together are not computed ahead: one pass for all of them is worth more.

    step n      load layers  0 ... 8 ... 16 ... 24 ... 31         no other request can run
                compute           0-7 | 8-15 | 16-23 | 24-31
    step n+1    the load is over: its tokens are scheduled, and their logits are already computed

Until then the pass may have written the KV of the request's own next tokens, in blocks that nothing else
reads. One thread uses this.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from torch import Tensor

from kvtier.connector.metadata import BlockIds
from kvtier.engine.scheduler import RequestSlice

__all__ = ["Speculation", "written_blocks"]


class Speculation:
    """The logits of one slice that was computed ahead, if any."""

    def __init__(self) -> None:
        self.runs = 0
        """The number of slices that were computed ahead completely."""
        self.used = 0
        """The number of steps that used such a slice."""
        self._slice: RequestSlice | None = None
        self._blocks: BlockIds = ()
        self._logits: Tensor | None = None

    def run(
        self,
        request_slice: RequestSlice,
        layers: Generator[str, None, Tensor],
        arrives: Callable[[str], bool],
    ) -> None:
        """Compute a slice as far as its layers arrive, and keep its logits if all do.

        The slice before is forgotten.
        """
        self._slice, self._blocks, self._logits = (
            request_slice,
            request_slice.request.table.block_ids(),
            None,
        )
        try:
            while arrives(next(layers)):
                pass
            layers.close()
        except StopIteration as end:
            self._logits = end.value
            self.runs += 1

    def has(self, slices: list[RequestSlice]) -> bool:
        """Say whether the logits of a step that computes these slices are known."""
        there = self._logits is not None and slices == [self._slice]
        return there and slices[0].request.table.rows == self._blocks

    def take(self, slices: list[RequestSlice]) -> Tensor | None:
        """Return the logits of a step, or `None` if it must be computed; forget the slice computed ahead."""
        logits = self._logits if self.has(slices) else None
        self.used += logits is not None
        self.forget()
        return logits

    def forget(self) -> None:
        """Forget the slice computed ahead: its load has failed, and its KV may be wrong."""
        self._slice, self._blocks, self._logits = None, (), None


def written_blocks(request_slice: RequestSlice, block_size: int) -> set[int]:
    """Return the blocks into which a slice writes its KV."""
    first, last = request_slice.start // block_size, (request_slice.end - 1) // block_size
    return {block for row in request_slice.request.table.rows for block in row[first : last + 1]}
