"""A heartbeat that differs from the one before in its step alone is read as ``decode`` would read it, or not at all."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core import messages
from runtime.core.messages import PROTOCOL, Activity, Credential, Heartbeat, RoundId
from runtime.errors import ProtocolError
from runtime.net.codec import _REGISTER_TAG, OtherProtocolError, decode, decode_again, head_of

MOST = 1 << 20
BEFORE = Heartbeat(Credential("job", "3", "session", 2), 1, Activity.TRAINING, 4, RoundId(1, 2), 100)
PACKED = messages.SCHEMA.pack(BEFORE)
HEAD = head_of(PACKED, BEFORE)


def decoded(packed: bytes) -> object:
    try:
        return decode(packed, MOST)
    except ProtocolError:
        return None


@pytest.mark.parametrize(
    ("version", "is_one"),
    [(PROTOCOL + 1, True), (-7, True), (2**31 - 1, True), (2**31, False), (PROTOCOL, False)]
    + [(word, False) for word in ("2", b"2", None, True, 2.0, [2])],
)
def test_only_a_small_number_is_another_version(version: object, is_one: bool) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(msgpack.packb([_REGISTER_TAG, version]), MOST)
    assert isinstance(caught.value, OtherProtocolError) is is_one


@pytest.mark.parametrize("step", [0, 1, 127, 128, 70_000, 2**40, 2**63 - 1, -1, -(2**63)])
def test_another_step_is_read(step: int) -> None:
    packed = HEAD + msgpack.packb(step)
    again = decode_again(packed, HEAD, BEFORE)
    assert again is not None and again.step == step
    assert again == decode(packed, MOST)


@pytest.mark.parametrize(
    "end",
    [b"", b"\xc0", b"\xc3", b"\xcb" + bytes(8), b"\x01\x01", b"\xcd\x01", b"\xa11", b"\x90", b"\xcf" + b"\xff" * 8],
)
def test_what_is_no_step_is_left_to_be_refused(end: bytes) -> None:
    assert decode_again(HEAD + end, HEAD, BEFORE) is None
    assert decoded(HEAD + end) is None


@settings(deadline=None)
@given(cut=st.integers(0, len(PACKED)), end=st.binary(max_size=12))
def test_no_bytes_are_read_as_another_message_than_they_are(cut: int, end: bytes) -> None:
    packed = PACKED[:cut] + end
    again = decode_again(packed, HEAD, BEFORE)
    assert again is None or again == decoded(packed)


def test_a_heartbeat_that_is_written_otherwise_has_no_head() -> None:
    """Its step may take more bytes than ours: where it begins cannot be told from its end."""
    odd = PACKED[:-1] + b"\xd1" + (100).to_bytes(2, "big")
    assert decode(odd, MOST) == BEFORE
    assert head_of(odd, BEFORE) == b""
