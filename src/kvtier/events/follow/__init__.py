"""What `Subscriber` is made of; nothing here is for use from outside. Read `follower`, then `picture`, `facts`, `repair`."""

__all__ = []
