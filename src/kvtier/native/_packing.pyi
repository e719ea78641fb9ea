from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

def pack(
    rows: npt.NDArray[np.uint8],
    pages: tuple[Any, ...],
    channels: Ints,
    geometry: Ints,
    slots: Ints,
    indices: Ints,
    blocks: Ints,
    counts: Ints,
    /,
) -> None: ...
def unpack(
    rows: npt.NDArray[np.uint8],
    pages: tuple[Any, ...],
    channels: Ints,
    geometry: Ints,
    slots: Ints,
    indices: Ints,
    blocks: Ints,
    counts: Ints,
    /,
) -> None: ...
