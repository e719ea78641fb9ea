"""What `Subscriber` is made of, for no use from outside. Read `replica`, then `follower`, then `link`."""

__all__ = []
