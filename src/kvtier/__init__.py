"""kvtier keeps the KV cache that a GPU forgets: in host memory and below, and loads it on a prefix hit.

Importing this package needs neither torch nor an engine. Start reading at `kvtier.connector` (the interface
to the engine) and `kvtier.config` (the settings of a user).
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.2.0"
