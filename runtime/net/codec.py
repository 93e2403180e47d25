"""Bytes to messages, with bounds: what a peer sent is parsed only as far as a message of ours can reach.

The bounds on bytes, list lengths and versions live here; what a message looks like is ``core.messages``' schema. The
one idea: a list's length is claimed before its items come, so it is bounded before anything is made of it: msgpack
would else reserve what five bytes claim, and again for each list in that list.
"""

from __future__ import annotations

from typing import Any

import msgpack

from runtime.core import messages
from runtime.core.messages import PROTOCOL, Activity, Heartbeat
from runtime.errors import ProtocolError

MAX_ITEMS = 4096
"""Longest list that a worker sends: the restore points that it holds, or its settings."""
_REGISTER_TAG = 1


class OtherProtocolError(ProtocolError):
    """A Register of another protocol version, whatever else is in it: its sender can be told."""


def decode(packed: bytes | memoryview, max_bytes: int, max_items: int = MAX_ITEMS) -> Any:
    """The message in these bytes.

    Raises:
        OtherProtocolError: it is a Register of another version.
        ProtocolError: it is no message; nothing was built.
    """
    if len(packed) > max_bytes:
        raise ProtocolError(f"{len(packed)} bytes, at most {max_bytes} are accepted")
    try:
        plain = msgpack.unpackb(
            packed, raw=False, strict_map_key=True, max_array_len=max_items, max_map_len=0, max_ext_len=0
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from None
    try:
        return messages.SCHEMA.from_plain(plain)
    except ProtocolError:
        speaks = _protocol_of(plain)
        if speaks in (None, PROTOCOL):
            raise
        raise OtherProtocolError(
            f"this scheduler speaks protocol {PROTOCOL}, the worker speaks {speaks}: "
            "install the same samebits on all hosts"
        ) from None


def _protocol_of(plain: Any) -> int | None:
    """The version in a Register, which is its first field in every version."""
    if isinstance(plain, list) and len(plain) > 1 and type(plain[0]) is int and plain[0] == _REGISTER_TAG:
        return plain[1] if type(plain[1]) is int and abs(plain[1]) < 2**31 else None
    return None


def head_of(packed: bytes, message: Heartbeat) -> bytes:
    """The bytes of a heartbeat before its step, its last field; none where the next one will differ in more than that.

    That is so before training begins, and to be expected where the bytes are not written as we write them.
    """
    if message.activity is not Activity.TRAINING or messages.SCHEMA.pack(message) != packed:
        return b""
    return packed[: -len(msgpack.packb(message.step))]


def decode_again(packed: bytes, head: bytes, before: Heartbeat) -> Heartbeat | None:
    """A heartbeat that differs from the one before in nothing but its step; None where these bytes must be decoded.

    Args:
        packed: as they came.
        head: ``head_of`` the one before; not empty. What is the same to the byte was found well-formed then, and a
            value of msgpack ends where it says: what is left has to be one integer.
        before: the one before.
    """
    if not packed.startswith(head):
        return None
    try:
        step = msgpack.unpackb(packed[len(head) :], max_array_len=0, max_map_len=0, max_str_len=0, max_bin_len=0)
    except (ValueError, msgpack.UnpackException):
        return None
    if type(step) is not int or not -(2**63) <= step < 2**63:
        return None
    return Heartbeat(before.sender, before.term, before.activity, before.generation, before.round, step)
