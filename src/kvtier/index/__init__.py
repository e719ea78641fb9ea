"""What a router needs: who holds which prefix of a prompt, on which tier, fed by the event stream.

`PrefixIndex` answers in-process; `kvtier.index.server.serve` offers it over HTTP in the shape that routers
already speak. Nothing here needs torch; numba makes it fast where it is installed.
"""

from kvtier.index.base import Match, StorageTier
from kvtier.index.prefix import IndexStats, PrefixIndex, WorkerStats

__all__ = ["IndexStats", "Match", "PrefixIndex", "StorageTier", "WorkerStats"]
