"""`Device`: the streams, events, memory and kernels of a lane, most of them torch's. It keeps them as long
as it lives.

All are given out as handles and addresses, which `commands` and `driver` take. Any thread may ask for the
current stream; the rest is for one thread at a time.
"""

from __future__ import annotations

import weakref

import torch

from kvtier.errors import TransferError
from kvtier.transfer.cuda import driver
from kvtier.transfer.cuda.pieces import Part

PRIORITY = 0
"""The priority of streams, the lowest of CUDA.

A higher priority moved no more bytes beside matrix products.
"""


class Device:
    """The maker and keeper of a lane's streams, events, memory and kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index or 0
        self._kept: list[object] = []
        self._any_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread, if the thread has none."""
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
        """Return a new event. `blocking`: a waiting thread sleeps."""
        event = torch.cuda.Event(enable_timing=timing, blocking=blocking)  # type: ignore[no-untyped-call]
        event.record(self._any_stream)  # the event has a handle only after this
        self._kept.append(event)
        return int(event.cuda_event)

    def rows(self, count: int, size: int) -> list[int]:
        """Return the addresses of new rows in the device's memory."""
        return self._keep_rows(torch.empty((count, size), dtype=torch.int8, device=self._device))

    def host_rows(self, count: int, size: int) -> list[int]:
        """Return the addresses of new rows in pinned memory."""
        return self._keep_rows(torch.empty((count, size), dtype=torch.int8, pin_memory=True))

    def _keep_rows(self, rows: torch.Tensor) -> list[int]:
        self._kept.append(rows)
        return [row.data_ptr() for row in rows]

    def kernels(self, part: Part, row_align: int, *, gather: bool) -> tuple[driver.Launch, driver.Launch]:
        """Return two kernels that copy the pages of a part: one for a buffer, one for the pool."""
        # Imported here, because only a process with a device needs Triton.
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
