"""The demo: multi-turn conversations over a GPU cache too small for them, without kvtier and then with it;
then an engine over a disk that is killed and started again.

`model` has a model that talks, and `talk` what it is asked. `setup` has random models and workloads, and the
engines. `runs` plays the runs of the table `result.RUNS`. `result` holds the measurements and `summary` puts
them into rows. Only running the demo needs torch.
"""

from __future__ import annotations

from kvtier.demo.result import DemoResult, Difference, RequestResult, RestartResult, RunResult
from kvtier.demo.runs import Watcher, run_demo
from kvtier.demo.setup import DemoSettings, Workload

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
