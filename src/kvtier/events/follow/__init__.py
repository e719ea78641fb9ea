"""The parts of `Subscriber`, private to it. Read `replica`, then `follower`, then `link`."""

__all__ = []
