"""The parts of `ZmqEventPublisher`. Private to it.

Read `loop` first, then `sender` and `state`.
"""

__all__ = []
