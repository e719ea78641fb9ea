"""A Mooncake store for tests: its master, and a process that gives memory."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.ports import free_ports
from tests.tiers.object_server import wait_for_port

from kvtier.tier_config import MooncakeConfig

_GIVE = """
import sys
from kvtier.tier_config import MooncakeConfig
from kvtier.tiers.mooncake import MooncakeBackend
config = MooncakeConfig(master=sys.argv[1], metadata=sys.argv[2], segment=sys.argv[3])
backend = MooncakeBackend(config, 4096, timeout=60.0)
print("joined", flush=True)
sys.stdin.read()
"""


def need_mooncake() -> None:
    """Skip where the store is not installed, and say so."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"needs a Mooncake store, pip install 'kvtier[mooncake]': {error}")
    if not _master_program().is_file():
        pytest.skip("needs mooncake_master, which this wheel of the store does not bring")


def _master_program() -> Path:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "mooncake_master"


class MooncakeServer:
    """A master on ports of its own, kept when it is started again, and one process with memory at a time.

    With `gives=False` there is no such process at first.
    """

    def __init__(
        self, log: Path, *, segment: str = "64MiB", client_ttl: int = 10, gives: bool = True
    ) -> None:
        self.log, self.segment, self.client_ttl = log, segment, client_ttl
        self.ports = free_ports(3)
        self.master: subprocess.Popen[bytes] | None = None
        self.giver: subprocess.Popen[bytes] | None = None
        self.start_master()
        if gives:
            self.start_giver()

    def config(self, prefix: str, segment: int = 0) -> MooncakeConfig:
        return MooncakeConfig(master=self.address, metadata=self.metadata, prefix=prefix, segment=segment)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def metadata(self) -> str:
        return f"http://127.0.0.1:{self.ports[1]}/metadata"

    def start_master(self) -> None:
        rpc, metadata, metrics = self.ports
        options = {
            "rpc_port": rpc,
            "rpc_address": "127.0.0.1",
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": "127.0.0.1",
            "http_metadata_server_port": metadata,
            "metrics_port": metrics,
            "client_ttl": self.client_ttl,
        }
        command = [str(_master_program()), *(f"--{name}={value}" for name, value in options.items())]
        with self.log.open("ab") as log:
            self.master = subprocess.Popen(command, stdout=log, stderr=log)
        for port in (rpc, metadata):
            wait_for_port(port, self.master)

    def start_giver(self) -> None:
        command = [sys.executable, "-c", _GIVE, self.address, self.metadata, self.segment]
        with self.log.open("ab") as log:
            self.giver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert self.giver.stdout is not None
        for line in self.giver.stdout:
            if line.strip() == b"joined":
                return
        raise AssertionError(f"the process with memory ended: {self.log.read_text()[-2000:]}")

    def list_names(self) -> list[str]:
        """Return the names of objects that are whole; the master knows those that are being written, too."""
        if not (names := self._query("get_all_keys").split()):
            return []
        answers = json.loads(self._query("batch_query_keys?keys=" + ",".join(names)))["data"]
        return [name for name, answer in answers.items() if answer["ok"]]

    def _query(self, what: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/{what}", timeout=60) as answer:
            return str(answer.read().decode())

    def stop_giver(self) -> None:
        self.giver = _kill(self.giver)

    def stop_master(self) -> None:
        self.master = _kill(self.master)

    def stop(self) -> None:
        self.stop_giver()
        self.stop_master()


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
