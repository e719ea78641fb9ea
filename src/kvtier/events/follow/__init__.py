"""The parts of `Subscriber`, private to it. Read `follower`, then `state`, then `link`."""

__all__ = []
