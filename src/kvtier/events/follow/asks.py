"""What a follower asks of a publisher, and what it may conclude from the answer. Values; any thread may use them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtier.events.frames import SNAPSHOT, STATUS, replay_request

__all__ = ["Ask", "What"]


class What(StrEnum):
    """What is asked of a publisher."""

    STATUS = "status"  # who are you, and how far
    SNAPSHOT = "snapshot"  # all you hold
    REPLAY = "replay"  # batches from a number on, to close a hole
    HISTORY = "history"  # batches from 0 on, to build the picture anew


@dataclass(slots=True, eq=False)
class Ask:
    """A request under way. `proof` is the hash of the batch `start`, where the answer must begin with that very batch."""

    what: What
    request: bytes
    start: int = 0
    proof: int | None = None
    replies: int = 0
    checks: int = 0  # how many marks had been compared when it was asked
    ahead: int = -1  # the newest batch that was known to exist then

    @classmethod
    def status(cls) -> Ask:
        """Ask who publishes, and how far it is. A stock publisher answers with nothing."""
        return cls(What.STATUS, STATUS)

    @classmethod
    def snapshot(cls) -> Ask:
        """Ask for all that is held."""
        return cls(What.SNAPSHOT, SNAPSHOT)

    @classmethod
    def history(cls) -> Ask:
        """Ask for all that was ever published."""
        return cls(What.HISTORY, replay_request(0))

    @classmethod
    def replay(cls, after: int, proof: int | None) -> Ask:
        """Ask for what follows a batch; with its hash as a `proof`, for that batch too."""
        start = after + (proof is None)
        return cls(What.REPLAY, replay_request(start), start, proof)
