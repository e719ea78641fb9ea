"""What memory and disk would save, and with which policy: a trace replayed through kvtier in simulated time.

`read_trace` reads a trace, `run_sweep` simulates it with every combination of a `Sweep`, `optimal_hits` is
the ceiling. `docs/simulate.md` says what is simulated and what is left out.
"""

from __future__ import annotations

from kvtier.simulate.optimum import optimal_hits
from kvtier.simulate.readers import read_trace
from kvtier.simulate.replay import Served, Simulator, Speeds, make_config, make_settings, replay
from kvtier.simulate.sweep import Capacity, Cell, CellResult, Sweep, run_sweep
from kvtier.simulate.trace import Trace, TraceRequest

__all__ = [
    "Capacity",
    "Cell",
    "CellResult",
    "Served",
    "Simulator",
    "Speeds",
    "Sweep",
    "Trace",
    "TraceRequest",
    "make_config",
    "make_settings",
    "optimal_hits",
    "read_trace",
    "replay",
    "run_sweep",
]
