"""The demo: multi-turn conversations over a GPU cache too small for them, without kvtier and then with it;
then an engine over a disk that is killed and started again.

`workload` has the prompts and their order, `models` the built-in model. `setup` makes the engines, `run`
plays the workload on them, `restart` kills a process (`killed`) and starts it again. `result` holds the
measurements and `summary` puts them into rows. Only running the demo needs torch.
"""

from __future__ import annotations

from kvtier.demo.result import DemoResult, Difference, RequestResult, RestartResult, RunResult
from kvtier.demo.run import run_demo
from kvtier.demo.setup import DemoSettings
from kvtier.demo.watcher import Watcher
from kvtier.demo.workload import Workload

__all__ = [
    "DemoResult",
    "DemoSettings",
    "Difference",
    "RequestResult",
    "RestartResult",
    "RunResult",
    "Watcher",
    "Workload",
    "run_demo",
]
