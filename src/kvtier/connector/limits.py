"""Limits that a request sets for itself, named as vLLM's own connector names them. Pure; any thread."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

__all__ = ["read_token_limit"]

logger = logging.getLogger(__name__)


def read_token_limit(params: Mapping[str, Any] | None, name: str) -> int | None:
    """Return a number of tokens that a request names; `None` without one, or if it is no such number."""
    limit = None if params is None else params.get(name)
    if limit is None or (type(limit) is int and limit >= 0):
        return limit
    logger.warning(
        "kv_transfer_params.%s: expected a number of tokens, got %r; the request has no such limit", name, limit
    )
    return None
