"""A rank in a process of its own: the worker's side of a connector over a pipe.

Run by test_connector_worker.py.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch

from kvtier.config import OffloadingConfig
from kvtier.connector import (
    ConnectorRole,
    KVConnectorOutput,
    OffloadingConnector,
    OffloadingConnectorMetadata,
)
from kvtier.offload import OffloadingSpec


class Rank:
    """One rank's KV tensor, `(num_blocks, bytes_per_block)`, and its side of the connector."""

    def __init__(
        self, config: OffloadingConfig, num_blocks: int, spec: OffloadingSpec | None = None
    ) -> None:
        self.kv = torch.zeros(num_blocks, config.groups[0].bytes_per_block, dtype=torch.int8)
        self.worker = OffloadingConnector(config, ConnectorRole.WORKER, spec)
        self.worker.register_kv_caches({config.groups[0].layer_names[0]: self.kv})

    def fill(self, seed: int) -> None:
        """Put random bytes into every block."""
        self.kv.random_(-128, 128, generator=torch.Generator().manual_seed(seed))

    def blocks(self, ids: list[int]) -> torch.Tensor:
        """Return a copy of some blocks."""
        return self.kv[ids].clone()

    def step(self, metadata: OffloadingConnectorMetadata) -> KVConnectorOutput:
        """Run a step without a forward pass, and wait for its transfers."""
        worker = self.worker
        worker.bind_connector_metadata(metadata)
        worker.handle_preemptions(metadata)
        worker.start_load_kv()
        worker.wait_for_save()
        worker.wait_for_transfers(10.0)
        output = worker.take_output()
        worker.clear_connector_metadata()
        return output

    def close(self) -> None:
        self.worker.shutdown()


def serve(pipe: Connection, config: OffloadingConfig, num_blocks: int) -> None:
    """Answer calls until told to close."""
    torch.set_num_threads(1)
    rank = Rank(config, num_blocks)
    while True:
        name, args = pipe.recv()
        pipe.send(getattr(rank, name)(*args))
        if name == "close":
            return


class RemoteRank:
    """Calls a `Rank` in another process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._pipe.send((name, args))
            return self._pipe.recv()

        return call
