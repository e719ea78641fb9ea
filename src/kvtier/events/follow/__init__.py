"""What `Subscriber` is made of. Nothing here is for use from outside; read `follower` first, then `facts`."""

__all__ = []
