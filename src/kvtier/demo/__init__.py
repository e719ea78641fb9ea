"""The demonstration: multi-turn conversations over a GPU cache too small for them, without kvtier and then
with it; then an engine over a disk that is killed and started again.

`workload` says who asks what and when, `models` has the built-in model, `setup` makes the engines, `run`
plays the workload on them, `restart` kills a process (`killed`) and starts it again, `result` holds what
was measured and `summary` puts it into rows. Only running it needs torch.
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
