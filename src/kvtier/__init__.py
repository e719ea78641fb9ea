"""kvtier keeps the KV cache that a GPU forgets: host memory and below, and back on a prefix hit.

Importing this package needs neither torch nor an engine. Start at `kvtier.connector` (what an engine calls)
and `kvtier.config` (what a user sets).
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
