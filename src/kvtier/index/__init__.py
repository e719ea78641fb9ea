"""The index for routers: which worker holds which prefix of a prompt, on which tier, fed by events.

`PrefixIndex` answers in-process; `kvtier.index.server.serve` offers it over HTTP in the formats that
routers already use. Nothing here needs torch; numba, if installed, makes it fast.
"""

from kvtier.index.base import Match, StorageTier
from kvtier.index.prefix import IndexStats, PrefixIndex, WorkerStats

__all__ = ["IndexStats", "Match", "PrefixIndex", "StorageTier", "WorkerStats"]
