"""Names of policies: given once, found by name or import path, imported no earlier than needed."""

from __future__ import annotations

import pytest

from kvtier import policies
from kvtier.errors import ConfigError, InputError
from kvtier.policies import ARCPolicy, LRUPolicy, make_policy, policy_names, register_policy


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the names as they were."""
    monkeypatch.setattr(policies, "_policies", dict(policies._policies))


def test_ours_are_there() -> None:
    assert policy_names() == ["arc", "gittins", "lru"]
    assert type(make_policy("lru", 2)) is LRUPolicy
    assert type(make_policy("arc", 2)) is ARCPolicy
    assert make_policy("kvtier.policies:ARCPolicy", 7).capacity == 7


def test_a_path_may_be_registered_and_is_imported_when_used() -> None:
    register_policy("later", "not.there.yet:Policy")
    assert "later" in policy_names()
    with pytest.raises(ConfigError, match=r"^cpu\.policy: .*'not\.there\.yet:Policy'"):
        make_policy("later", 2)


def test_a_name_is_given_once() -> None:
    register_policy("mine", LRUPolicy)
    register_policy("mine", LRUPolicy)
    with pytest.raises(InputError, match="'mine' is already registered"):
        register_policy("mine", ARCPolicy)
    with pytest.raises(InputError, match="no colon"):
        register_policy("my:name", LRUPolicy)
