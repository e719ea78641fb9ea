"""An engine of another version is refused in one line."""

from __future__ import annotations

import pytest

from kvtier.errors import InputError
from kvtier.integrations import expect_version


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.1+cpu", "0.32.0rc1", "0.32.9.post1"])
def test_versions_in_the_range_pass(version: str) -> None:
    expect_version("vllm", version, at_least="0.32", below="0.33")


@pytest.mark.parametrize("version", ["0.31.9", "0.33", "0.33.0.dev1", "0.4", "1.0", "dev", ""])
def test_others_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(InputError, match=rf"inside vllm >=0\.32,<0\.33, but vllm {version} is installed; install"):
        expect_version("vllm", version, at_least="0.32", below="0.33")
