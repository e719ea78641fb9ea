"""`kvtier bench`: a running server measured with pairs of requests, with and without loading.

`client` speaks HTTP, `prompts` has what is sent, `run` sends the pairs, `result` has what was measured.
"""

from __future__ import annotations

from kvtier.bench.client import Server, StreamedAnswer
from kvtier.bench.result import BenchResult, Side
from kvtier.bench.run import Bench, BenchSettings

__all__ = ["Bench", "BenchResult", "BenchSettings", "Server", "Side", "StreamedAnswer"]
