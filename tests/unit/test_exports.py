"""`__all__` is the public surface: present, sorted, true, and with every name that the contracts promise."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

PROMISED = {
    "kvtier.config": {
        "CPUConfig",
        "GroupConfig",
        "KVTierConfig",
        "OffloadingConfig",
        "parse_duration",
        "parse_size",
    },
    "kvtier.connector": {
        "ConnectorRole",
        "KVConnectorOutput",
        "OffloadingConnector",
        "OffloadingConnectorMetadata",
        "OffloadingConnectorScheduler",
        "OffloadingConnectorWorker",
        "ReqId",
        "TransferSpec",
        "yield_req_data",
    },
    "kvtier.engine": {"Engine", "EngineConfig", "SamplingParams"},
    "kvtier.errors": {"ConfigError", "InputError", "IntegrityError", "KVTierError", "OutsideError"},
    "kvtier.events": {
        "AllBlocksCleared",
        "BlockRemoved",
        "BlockStored",
        "EventBatch",
        "KVCacheEvent",
        "KVConnectorKVEvents",
        "KVEventAggregator",
        "KVEventBatch",
        "OffloadingEventsTracker",
        "decode_batch",
    },
    "kvtier.keys": {"BlockHash", "OffloadKey", "fingerprint", "hash_blocks", "make_offload_key"},
    "kvtier.offload": {
        "BlockIDsLoadStoreSpec",
        "CPULoadStoreSpec",
        "CPUOffloadingSpec",
        "CanonicalKVCacheRef",
        "CanonicalKVCacheTensor",
        "CanonicalKVCaches",
        "GPULoadStoreSpec",
        "LoadStoreSpec",
        "OffloadKey",
        "OffloadingEvent",
        "OffloadingHandler",
        "OffloadingManager",
        "OffloadingSpec",
        "OffloadingSpecFactory",
        "PrepareStoreOutput",
        "ReqContext",
        "TransferResult",
        "TransferSpec",
        "TransferType",
        "get_offload_block_hash",
        "get_offload_group_idx",
        "make_offload_key",
    },
    "kvtier.policies": {"ARCPolicy", "CachePolicy", "LRUPolicy", "register_policy"},
    "kvtier.transfer": {"NULL_BLOCK", "OffloadingHandler", "TransferResult", "TransferSpec", "TransferType"},
}

CONTRACTS = {
    "kvtier.connector": ["kvtier.connector.metadata"],
    "kvtier.events": ["kvtier.events.types", "kvtier.events.wire"],
    "kvtier.offload": ["kvtier.offload.base"],
    "kvtier.policies": ["kvtier.policies.base"],
    "kvtier.transfer": ["kvtier.transfer.base"],
}
"""Modules whose every public name belongs to the package's surface too."""


def sort_key(name: str) -> tuple[int, list[object]]:
    """Order as ruff's RUF022 does: CONSTANTS, then Classes, then the rest; digits by value."""
    rank = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return rank, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def names_bound_in(file: Path, module: str) -> set[str]:
    """Return the public names that a module defines or takes from its own submodules."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{module}."):
            found |= {alias.asname or alias.name for alias in node.names}
    return {name for name in found if not name.startswith("_")}


@pytest.fixture(params=sorted(PROMISED))
def module(request: pytest.FixtureRequest) -> str:
    if request.param == "kvtier.engine":
        pytest.importorskip("torch", reason="kvtier.engine needs torch")
    return request.param


def test_all_is_sorted_and_has_no_duplicates(module: str) -> None:
    names = importlib.import_module(module).__all__
    assert names == sorted(set(names), key=sort_key)


def test_every_name_is_there(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


def test_what_is_promised_is_exported(module: str) -> None:
    assert PROMISED[module] - set(importlib.import_module(module).__all__) == set()


def test_nothing_public_is_left_out(module: str) -> None:
    loaded = importlib.import_module(module)
    assert loaded.__file__ is not None
    assert names_bound_in(Path(loaded.__file__), module) - set(loaded.__all__) == set()


@pytest.mark.parametrize("module", sorted(CONTRACTS))
def test_contracts_are_exported_whole(module: str) -> None:
    exported = set(importlib.import_module(module).__all__)
    for contract in CONTRACTS[module]:
        assert set(importlib.import_module(contract).__all__) - exported == set(), contract


def test_every_module_says_what_is_public() -> None:
    """A module without `__all__` leaks its imports to whoever writes `import *`."""
    package = Path(importlib.import_module("kvtier").__file__ or "").parent
    silent = [
        str(file.relative_to(package))
        for file in sorted(package.rglob("*.py"))
        if file.name != "__main__.py" and "__all__ = [" not in file.read_text()
    ]
    assert silent == []
