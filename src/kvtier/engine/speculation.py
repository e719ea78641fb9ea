"""Speculation: a request computes the tokens behind its load while the load is still on its way.

An engine that has nothing else to do begins the forward pass of the one request that it waits for. Each
layer waits for its own KV only (`await_layer`), on a GPU on the device, so that when the last layer has
arrived there is little left to compute. What comes of it is kept aside, and the next step uses it if that
step computes the same tokens in the same blocks. If a load fails it is forgotten, and then nothing was lost
but time that nobody wanted. Requests that load together are not computed ahead: one pass for all of them is
worth more.

    step n      load layers  0 ... 8 ... 16 ... 24 ... 31         no other request can run
                compute           0-7 | 8-15 | 16-23 | 24-31
    step n+1    the load is over: its tokens are scheduled, and their logits are there

Until then the pass may have written the KV of the request's own next tokens, in blocks that nothing else
reads. One thread.
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
        """How often something was computed ahead to its end."""
        self.used = 0
        """How often it served a step."""
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

        Forgets the one before.
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
        """Say whether it has the logits of a step that computes these slices."""
        there = self._logits is not None and slices == [self._slice]
        return there and slices[0].request.table.rows == self._blocks

    def take(self, slices: list[RequestSlice]) -> Tensor | None:
        """Return the logits of a step, `None` if it must be computed.

        Whatever was computed ahead is forgotten.
        """
        logits = self._logits if self.has(slices) else None
        self.used += logits is not None
        self.forget()
        return logits

    def forget(self) -> None:
        """Forget what was computed ahead: the load has failed, and may have spoilt what was written."""
        self._slice, self._blocks, self._logits = None, (), None


def written_blocks(request_slice: RequestSlice, block_size: int) -> set[int]:
    """Return the blocks into which a slice's own KV goes."""
    first, last = request_slice.start // block_size, (request_slice.end - 1) // block_size
    return {block for row in request_slice.request.table.rows for block in row[first : last + 1]}
