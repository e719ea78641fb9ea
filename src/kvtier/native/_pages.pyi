from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

def store(pool: Any, engine: Any, slots: Ints, indices: Ints, blocks: Ints) -> None: ...
def load(pool: Any, engine: Any, slots: Ints, indices: Ints, blocks: Ints) -> None: ...
