"""An engine over a disk, to be killed: `python -m tests.engine.killed_engine FOLDER MODEL` computes prompts
until it is.
"""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path

from tests.engine.drive import ONE_GROUP, STATES, tokens
from tests.engine.tier_kit import disk_engine, manager_of, settle

from kvtier.engine import SamplingParams

MODELS = {"attention": ONE_GROUP, "states": STATES}


def main() -> None:
    """Compute some prompts, say when their rows are on disk, and go on with others."""
    engine = disk_engine(Path(sys.argv[1]), MODELS[sys.argv[2]], state_interval=0)
    engine.generate([tokens(33, seed=seed) for seed in range(4)], SamplingParams(max_tokens=4))
    settle(engine)
    (stats,) = manager_of(engine).tier_stats()
    print(stats.demoted, flush=True)
    for seed in cycle(range(4, 54)):  # all fit on the disk, however late the end comes
        engine.generate([tokens(33, seed=seed)], SamplingParams(max_tokens=4))


if __name__ == "__main__":
    main()
