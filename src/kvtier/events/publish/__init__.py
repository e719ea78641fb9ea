"""What `ZmqEventPublisher` is made of. Nothing here is for use from outside.

Read `loop` first, then `sender` and `state`.
"""

__all__ = []
