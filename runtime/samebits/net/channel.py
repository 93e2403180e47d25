"""Authenticate messages between a rank and the scheduler end to end, through a relay.

The rank sends a hello with a nonce, and the scheduler answers with a welcome and another nonce. From the session key
and both nonces, each end derives the key of this attachment. Every later message carries a counter, which must
increase, and a keyed BLAKE2b hash (RFC 7693) of the counter and the message. A relay knows no key, so it can delay or
drop messages, but neither forge nor repeat them, and a recorded attachment is worthless after a restart of either end.
A message to many ranks is hashed once, and each rank gets a stamp of that hash.

A relay behind an inner relay attaches in the same way, with a key of the relays.

Without a secret, the session key is empty, so a relay could forge messages, like any process that can connect to the
scheduler.
"""

from __future__ import annotations

import hashlib
import os
import struct
from hmac import compare_digest

NONCE_BYTES = 16
MAC_BYTES = 16
HELLO, WELCOME, DATA = b"H", b"W", b"M"
MAY_WAIT = b"B"
"""Instead of DATA, for messages such as repeated heartbeats, which a relay may hold back for a moment.

It is not authenticated, because a relay can delay any message anyway.
"""
UNREACHABLE, ATTACH_AGAIN = b"D", b"U"
"""Messages of the relay itself: the scheduler is unreachable, or is reachable and expects a hello."""
ABOUT, MOVE = b"A", b"V"
"""Messages between a relay and the scheduler: a note (``net.relay_tree``), and the address of another relay."""
_COUNTER = struct.Struct(">Q")
_COUNTER_BYTES = _COUNTER.size
_HEAD_BYTES = 1 + _COUNTER_BYTES + MAC_BYTES
_STAMP_BYTES = _COUNTER_BYTES + MAC_BYTES


class ForgedError(Exception):
    """A message was forged, changed, repeated, or belongs to another attachment."""


def digest_of(body: bytes) -> bytes:
    """Return the hash of a message that :meth:`SchedulerEnd.stamp` authenticates for each receiver."""
    return hashlib.blake2b(body, digest_size=32).digest()


def relays_key(session_key: bytes) -> bytes:
    """Return the key with which relays attach to an inner relay, derived from the session key; empty without one.

    A relay cannot derive the session key from it.
    """
    return hashlib.blake2b(key=session_key, person=b"relays", digest_size=32).digest() if session_key else b""


def _mac(key: bytes, person: bytes, *parts: bytes) -> bytes:
    state = hashlib.blake2b(key=key, person=person, digest_size=MAC_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()


class _Keyed:
    """One direction of an attachment: its key, and the last counter."""

    __slots__ = ("_counter", "_last", "_state")

    def __init__(self, key: bytes, person: bytes) -> None:
        self._state = hashlib.blake2b(key=key, person=person, digest_size=MAC_BYTES)
        self._counter = 0  # of the last stamp
        self._last = bytes(_COUNTER_BYTES)  # the last accepted counter; big-endian numbers compare like their bytes

    def stamp(self, body: bytes) -> bytes:
        """Return the next counter, and the hash of the counter and ``body``."""
        self._counter += 1
        counter = _COUNTER.pack(self._counter)
        state = self._state.copy()
        state.update(counter + body)
        return counter + state.digest()

    def check(self, stamp: bytes, body: bytes) -> None:
        """Accept an authentic message once; raise :class:`ForgedError` otherwise."""
        counter = stamp[:_COUNTER_BYTES]
        state = self._state.copy()
        state.update(counter + body)
        if len(stamp) != _STAMP_BYTES or not compare_digest(state.digest(), stamp[_COUNTER_BYTES:]):
            raise ForgedError("forged, or of another attachment")
        if counter <= self._last:
            raise ForgedError("repeated")
        self._last = counter


def _attachment_key(session_key: bytes, session: str, nonces: bytes) -> bytes:
    return hashlib.blake2b(session.encode() + nonces, key=session_key, person=b"attachment", digest_size=32).digest()


class RankEnd:
    """The rank's end of one attachment.

    Args:
        session_key: the session key of the cluster's keys; empty without a secret.
        session: the rank's session.

    Attributes:
        hello: the first message to send.
        is_open: whether the scheduler's welcome has arrived.
    """

    def __init__(self, session_key: bytes, session: str) -> None:
        self._key, self._session = session_key, session
        self._nonce = os.urandom(NONCE_BYTES)
        self.hello = HELLO + self._nonce + _mac(session_key, b"hello", session.encode(), self._nonce)
        self.is_open = False

    def welcome(self, packed: bytes) -> bool:
        """Process a welcome, and return whether it opened this attachment.

        Only the first valid welcome opens it.
        """
        nonces = self._nonce + packed[1 : 1 + NONCE_BYTES]
        proof = _mac(self._key, b"welcome", self._session.encode(), nonces)
        if self.is_open or not compare_digest(proof, packed[1 + NONCE_BYTES :]):
            return False
        key = _attachment_key(self._key, self._session, nonces)
        self._up, self._down = _Keyed(key, b"up"), _Keyed(key, b"down")
        self.is_open = True
        return True

    def seal(self, body: bytes, *, may_wait: bool = False) -> bytes:
        """Return the message as it is sent to the relay, with counter and hash."""
        return (MAY_WAIT if may_wait else DATA) + self._up.stamp(body) + body

    def check(self, stamp: bytes, body: bytes) -> None:
        """Check a message from the scheduler.

        Raises:
            ForgedError: the scheduler did not send the message in this attachment, or not to this rank.
        """
        if not self.is_open:
            raise ForgedError("before the welcome")
        self._down.check(stamp, digest_of(body))


class SchedulerEnd:
    """The scheduler's end of one attachment.

    Args:
        session_key: the session key of the cluster's keys; empty without a secret.
        session: the rank's session.
        hello: the rank's first message.

    Attributes:
        hello: the rank's first message.
        welcome: the answer to the hello.

    Raises:
        ForgedError: the sender of ``hello`` does not know the session key.
    """

    __slots__ = ("_down", "_up", "hello", "welcome")

    def __init__(self, session_key: bytes, session: str, hello: bytes) -> None:
        nonce, proof = hello[1 : 1 + NONCE_BYTES], hello[1 + NONCE_BYTES :]
        if not compare_digest(_mac(session_key, b"hello", session.encode(), nonce), proof):
            raise ForgedError("forged: its sender does not know the cluster's secret")
        self.hello = hello
        nonces = nonce + os.urandom(NONCE_BYTES)
        proof = _mac(session_key, b"welcome", session.encode(), nonces)
        self.welcome = WELCOME + nonces[NONCE_BYTES:] + proof
        key = _attachment_key(session_key, session, nonces)
        self._up, self._down = _Keyed(key, b"up"), _Keyed(key, b"down")

    def unseal(self, sealed: bytes) -> bytes:
        """Return the message from the result of :meth:`RankEnd.seal`, after checking it.

        Raises:
            ForgedError: the rank did not send the message in this attachment, or it was received before.
        """
        body = sealed[_HEAD_BYTES:]
        self._up.check(sealed[1:_HEAD_BYTES], body)
        return body

    def stamp(self, digest: bytes) -> bytes:
        """Return the stamp for a message to this rank, given the message's :func:`digest_of`."""
        return self._down.stamp(digest)
