"""What `ZmqEventPublisher` is made of. Nothing here is for use from outside; read `loop` first, then `sender` and `state`."""

from __future__ import annotations

__all__: list[str] = []
