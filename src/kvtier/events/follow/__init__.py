"""What `Subscriber` is made of; nothing here is for use from outside. Read `replica`, then `follower`, then `link`."""

__all__ = []
