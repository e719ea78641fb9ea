"""The public surface is `__all__` of the packages: sorted, true, documented, and with every name that the
contracts promise.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import kvtier

ROOT = Path(kvtier.__file__).parent
ELSEWHERE = "kvtier.integrations.vllm"
"""Needs vLLM; its exports are used by vLLM's own suite."""
PACKAGES = sorted(
    {".".join(("kvtier", *file.parent.relative_to(ROOT).parts)) for file in ROOT.rglob("__init__.py")}
    - {ELSEWHERE}
)

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
"""Modules whose every public class belongs to the package's surface too."""


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


def load(module: str) -> ModuleType:
    """Import a module; skip the test if this environment lacks what the module needs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "kvtier":
            raise
        pytest.skip(f"{module} needs {error.name}")


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param)


def test_all_is_sorted_and_has_no_duplicates(package: ModuleType) -> None:
    assert package.__all__ == sorted(set(package.__all__), key=sort_key)


def test_every_exported_name_exists(package: ModuleType) -> None:
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_every_exported_class_and_function_has_a_docstring(package: ModuleType) -> None:
    exported = {name: getattr(package, name) for name in package.__all__}
    documented = {
        name: item for name, item in exported.items() if inspect.isclass(item) or inspect.isfunction(item)
    }
    assert [name for name, item in documented.items() if not item.__doc__] == []
    assert package.__doc__


OPEN = {"fingerprint", "save_kv_layer", "start_load_kv"}
"""Functions that take any names: facts about an engine; whatever vLLM passes along."""


def test_no_exported_callable_hides_options(package: ModuleType) -> None:
    """An option behind `**more` is in no signature, no editor and no reference."""
    exported = [getattr(package, name) for name in package.__all__]
    functions = [item for item in exported if inspect.isfunction(item)]
    for item in filter(inspect.isclass, exported):
        own = inspect.getmembers(item, lambda member: inspect.isfunction(member) or inspect.ismethod(member))
        functions += [member for name, member in own if name == "__init__" or not name.startswith("_")]
    ours = [function for function in functions if function.__module__.startswith("kvtier.")]
    hiding = {
        function.__qualname__
        for function in ours
        if function.__name__ not in OPEN and inspect.getfullargspec(inspect.unwrap(function)).varkw
    }
    assert hiding == set()


def test_a_package_exports_everything_public_that_it_binds(package: ModuleType) -> None:
    if package.__name__ == "kvtier.cli":  # a program: it exports its entry point alone
        assert package.__all__ == ["main"]
        return
    assert package.__file__ is not None
    assert names_bound_in(Path(package.__file__), package.__name__) - set(package.__all__) == set()


@pytest.mark.parametrize("module", sorted(PROMISED))
def test_promised_names_are_there(module: str) -> None:
    loaded = load(module)
    names = loaded.__all__ if module in PACKAGES else vars(loaded)
    assert PROMISED[module] - set(names) == set()


@pytest.mark.parametrize("package", sorted(CONTRACTS))
def test_contracts_are_exported_whole(package: str) -> None:
    exported = set(load(package).__all__)
    for contract in CONTRACTS[package]:
        members = vars(load(contract)).items()
        classes = {name for name, item in members if inspect.isclass(item) and item.__module__ == contract}
        assert {name for name in classes if not name.startswith("_")} - exported == set(), contract
