"""What a lane has of its device: streams, events, memory and kernels, most of them torch's, kept for as long
as it lives.

All are given out as handles and addresses, which is how `commands` and `driver` take them. Any thread may
ask for the current stream; the rest is for one thread at a time.
"""

from __future__ import annotations

import weakref

import torch

from kvtier.errors import TransferError
from kvtier.transfer.cuda import driver
from kvtier.transfer.cuda.pieces import Part

__all__ = ["PRIORITY", "Device"]

PRIORITY = 0
"""Of streams: the lowest that CUDA has. Higher ones moved no more bytes beside matrix products."""


class Device:
    """Makes what a lane needs."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index or 0
        self._kept: list[object] = []
        self._any_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """Make this the device of the calling thread, if it has none."""
        if not driver.has_context():
            torch.cuda.set_device(self._device)

    def current_stream(self) -> int:
        """Return the calling thread's current stream."""
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def stream(self) -> int:
        """Return a new stream."""
        with torch.cuda.device(self._device):
            stream = driver.new_stream(PRIORITY)
        weakref.finalize(self, driver.end_stream, stream)
        return stream

    def event(self, *, timing: bool = False, blocking: bool = False) -> int:
        """Return a new event. `blocking`: a thread that waits for it sleeps."""
        event = torch.cuda.Event(enable_timing=timing, blocking=blocking)  # type: ignore[no-untyped-call]
        event.record(self._any_stream)  # it has a handle from now on
        self._kept.append(event)
        return int(event.cuda_event)

    def rows(self, count: int, size: int) -> list[int]:
        """Return rows of the device's memory."""
        return self._keep_rows(torch.empty((count, size), dtype=torch.int8, device=self._device))

    def host_rows(self, count: int, size: int) -> list[int]:
        """Return rows of pinned memory."""
        return self._keep_rows(torch.empty((count, size), dtype=torch.int8, pin_memory=True))

    def _keep_rows(self, rows: torch.Tensor) -> list[int]:
        self._kept.append(rows)
        return [row.data_ptr() for row in rows]

    def kernels(self, part: Part, row_align: int, *, gather: bool) -> tuple[driver.Launch, driver.Launch]:
        """Return two kernels that copy pages of a part: one between them and a buffer, one between them and
        the pool.
        """
        # Needs Triton, as does only who has a device.
        from kvtier.transfer.cuda.kernels import (
            SHORT,
            STAGED,
            PageCopy,
        )

        with torch.cuda.device(self._device):
            staged = PageCopy(part, self._device, STAGED, gather=gather)
            short = PageCopy(part, self._device, SHORT, gather=gather, row_align=row_align)
            torch.cuda.synchronize()
        if staged.launch is None or short.launch is None:
            raise TransferError(
                "expected compiled kernels, got Triton's interpreter: unset TRITON_INTERPRET"
            )
        self._kept += [staged, short]
        return staged.launch, short.launch
