"""What `ZmqEventPublisher` is made of. Nothing here is for use from outside; read `loop` first, then `sender` and `state`."""

__all__ = []
