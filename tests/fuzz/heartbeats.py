"""Target: what follows a heartbeat on its connection, read the short way.

One input is the bytes of the next message. The short way reads it as the long way does, or leaves it to the long way.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.core.messages import SCHEMA, Activity, Heartbeat, RoundId
from runtime.errors import ProtocolError
from runtime.net.codec import decode, decode_again, head_of
from tests.fuzz import decoder

MAX_BYTES = 1 << 20
STEPS = (0, 127, 128, 2**16, 2**32, 2**63 - 1, -1)


def _heartbeat(step: int) -> Heartbeat:
    example = decoder._example(Heartbeat)
    return Heartbeat(example.sender, 3, Activity.TRAINING, 7, RoundId(3, 2), step)


BEFORE = [(message, head_of(SCHEMA.pack(message), message)) for message in map(_heartbeat, STEPS)]


def check(data: bytes) -> None:
    for before, head in BEFORE:
        again = decode_again(data, head, before)
        if again is not None:
            assert again == decode(data, MAX_BYTES), f"{again} the short way"
    try:
        message = decode(data, MAX_BYTES)
    except ProtocolError:
        return
    head = head_of(data, message) if isinstance(message, Heartbeat) else b""
    if head:
        assert decode_again(data, head, message) == message, "the same again is not read the short way"


def seeds() -> Iterator[bytes]:
    """Heartbeats of all lengths, and each a little more and a little less."""
    for step in STEPS:
        packed = SCHEMA.pack(_heartbeat(step))
        yield packed
        yield packed + b"\x00"
        yield packed[:-1]
