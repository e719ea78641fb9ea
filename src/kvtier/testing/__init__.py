"""The test kit, for us and for others: contract suites, faults, caches of every layout, a toy model.

The suites are classes for pytest. Subclass one in your own tests, say how to make your policy, manager,
handlers, tier or backend, and every promise of the contract is tested:

    from kvtier.testing import PolicySuite

    class TestMine(PolicySuite):
        def make(self, capacity):
            return MyPolicy(capacity)

With `pytest.register_assert_rewrite("kvtier.testing")` in your `conftest.py`, failures show values.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.testing.backend_suite import BackendSuite
    from kvtier.testing.handler_suite import HandlerSuite
    from kvtier.testing.manager_suite import ManagerSuite
    from kvtier.testing.policy_suite import PolicySuite
    from kvtier.testing.shared_tier_suite import SharedTierSuite
    from kvtier.testing.tier_suite import TierSuite

__all__ = ["BackendSuite", "HandlerSuite", "ManagerSuite", "PolicySuite", "SharedTierSuite", "TierSuite"]

_HOMES = {
    "BackendSuite": "backend_suite",
    "HandlerSuite": "handler_suite",
    "ManagerSuite": "manager_suite",
    "PolicySuite": "policy_suite",
    "SharedTierSuite": "shared_tier_suite",
    "TierSuite": "tier_suite",
}


def __getattr__(name: str) -> Any:
    """Import a suite on demand: one needs pytest, another torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
