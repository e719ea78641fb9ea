"""Messages of the stream, frame by frame: received by a SUB, and received or sent by a DEALER.

A live message is `[topic, seq, payload]`; some publishers leave the topic out. A reply to a request is
`["", topic, seq, payload]`, or the same without the topic (vLLM up to 0.25, SGLang up to 0.5.21); the last
has sequence number -1, and a text if the request failed. Any other message is `None` here, never an
exception. Any thread may call these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "END_SEQ",
    "SNAPSHOT",
    "STATUS",
    "NumberedPayload",
    "read_live",
    "read_reply",
    "replay_request",
    "reply_topic",
]

END_SEQ = (1 << 64) - 1
"""-1 as an unsigned number: ends a replay; sent live, it announces a restart."""
SNAPSHOT = b"snapshot"
STATUS = b"kvtier:status"


class NumberedPayload(NamedTuple):
    """A batch's number and bytes; in an end marker, `payload` is empty or the text of an error."""

    seq: int
    payload: bytes


def read_live(frames: Sequence[bytes]) -> NumberedPayload | None:
    """Return the batch in a live message."""
    if len(frames) not in (2, 3) or len(frames[-2]) != 8:
        return None
    return NumberedPayload(int.from_bytes(frames[-2], "big"), frames[-1])


def read_reply(frames: Sequence[bytes]) -> NumberedPayload | None:
    """Return the batch, or the end marker, in a reply to a request."""
    if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != 8:
        return None
    seq = int.from_bytes(frames[-2], "big")
    if seq == END_SEQ and len(frames) == 4 and not frames[-1]:
        return NumberedPayload(seq, frames[1] if frames[1].startswith(b"error") else b"")
    return NumberedPayload(seq, frames[-1])


def reply_topic(frames: Sequence[bytes], absent: bytes = b"") -> bytes:
    """Return the topic of a reply; `absent` if the publisher sends none."""
    return frames[1] if len(frames) == 4 else absent


def replay_request(start: int) -> bytes:
    """Return the request for all batches from `start` on."""
    return start.to_bytes(8, "big")
