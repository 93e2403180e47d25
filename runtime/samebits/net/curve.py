"""Read the cluster's secret, and derive the key pairs for CURVE.

CURVE is ZeroMQ's authentication and encryption. Every process that knows the secret computes the same pairs: the
scheduler's, the workers' and the relays'. So no key is ever sent or stored, and a successful handshake proves that a
process knows the secret, or is a relay that was given the relays' pair. The session key is also derived from the
secret; ranks and the scheduler use it to authenticate the messages that pass through a relay (``net.relaying``), and a
relay discards it.

Derivation: ``master = scrypt(secret, salt="samebits curve keys v1", N=2^14, r=8, p=1)`` (RFC 7914, with its parameters
for interactive use: some 50 ms and 16 MiB per guess), then for each side 32 bytes of BLAKE2b, keyed with the master and
personalised with the side's name (RFC 7693). Any 32 bytes are a valid X25519 secret key (RFC 7748, section 5), which
CurveZMQ (RFC 26) uses. The salt is fixed because the two ends share nothing but the secret. An attacker who recorded
one handshake could therefore test guesses offline, so short secrets are refused.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from samebits.errors import SettingsError
from samebits.named_file import read_named_file
from samebits.net.channel import relays_key

LEAST_SECRET_BYTES = 16
MOST_SECRET_BYTES = 4096
MAKE_ONE = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
_SALT = b"samebits curve keys v1"
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**14, 8, 1
_SCRYPT_MEMORY_BYTES = 2 * 128 * _SCRYPT_N * _SCRYPT_R  # twice what scrypt needs (RFC 7914, section 2)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The key pair of one side in ZeroMQ's format: 32 bytes as Z85 text (RFC 32)."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """Both sides' keys.

    The public halves are secret too, because a handshake can be requested with one of them.

    Attributes:
        scheduler: the key pair of the listening side.
        worker: the key pair of the connecting side.
        relay: the key pair of relays, which may also connect to the listening side; None if relays may not connect.
        session_key: authenticates a rank's messages through a relay, end to end; in a relay, it is the key of the
            relays, which authenticates only frames.
    """

    scheduler: KeyPair = field(repr=False)
    worker: KeyPair = field(repr=False)
    relay: KeyPair | None = field(default=None, repr=False)
    session_key: bytes = field(default=b"", repr=False)

    def above_relay(self) -> ClusterKeys:
        """Return the keys with which a relay connects to the scheduler or to an inner relay."""
        assert self.relay is not None, "these keys are a relay's already"
        return ClusterKeys(
            scheduler=KeyPair(self.scheduler.public, b""),
            worker=self.relay,
            relay=KeyPair(self.relay.public, b""),
            session_key=relays_key(self.session_key),
        )

    def below_relay(self) -> ClusterKeys:
        """Return the keys that are used between a relay and its workers, or the relays below it."""
        assert self.relay is not None, "these keys are a relay's already"
        return ClusterKeys(scheduler=self.relay, worker=self.worker, relay=KeyPair(self.relay.public, b""))


def cluster_keys(secret: str | None, secret_file: Path | None) -> ClusterKeys | None:
    """Return the keys for the secret, given by value or by file; None if neither is given.

    Raises:
        SettingsError: the file contains no usable secret, or this ZeroMQ has no CURVE.
    """
    words = secret_words(secret, secret_file)
    return derive_keys(words) if words is not None else None


def secret_words(secret: str | None, secret_file: Path | None) -> bytes | None:
    """Return the secret's bytes, or None if no secret is given.

    The line end that an editor or ``echo`` adds is removed.

    Raises:
        SettingsError: the secret cannot be read or is unusable; its text appears in no message.
    """
    if secret is not None:
        return _checked(os.fsencode(secret), "CLUSTER_SECRET=(hidden)", "export CLUSTER_SECRET")
    if secret_file is None:
        return None
    try:
        found = read_named_file(secret_file, MOST_SECRET_BYTES + 2)  # room for a line end
    except OSError as error:
        raise SettingsError(
            [
                f"CLUSTER_SECRET_FILE={secret_file}: cannot be read ({error.strerror}); expected a file with the "
                "cluster's secret, the same on every host. Fix: export CLUSTER_SECRET_FILE=<a file this user may read>"
            ]
        ) from None
    return _checked(found, f"CLUSTER_SECRET_FILE={secret_file}", "write one into that file")


def _checked(words: bytes, shown: str, fix: str) -> bytes:
    words = words.rstrip(b"\r\n")
    if LEAST_SECRET_BYTES <= len(words) <= MOST_SECRET_BYTES:
        return words
    why = "too short to withstand guessing" if len(words) < LEAST_SECRET_BYTES else "too long"
    raise SettingsError(
        [
            f"{shown}: {why}; expected {LEAST_SECRET_BYTES} to {MOST_SECRET_BYTES} bytes. "
            f"Fix: make one with `{MAKE_ONE}` and {fix}, the same for every process"
        ]
    )


def derive_keys(words: bytes) -> ClusterKeys:
    """Derive both sides' key pairs from the secret. This deliberately takes about 50 ms.

    Raises:
        SettingsError: this ZeroMQ was built without CURVE.
    """
    if not zmq.has("curve"):
        raise SettingsError(
            [
                f"CLUSTER_SECRET: the ZeroMQ of this Python ({zmq.zmq_version()}) was built without CURVE. "
                "Fix: pip install --force-reinstall --only-binary pyzmq pyzmq"
            ]
        )
    master = hashlib.scrypt(
        words, salt=_SALT, n=_SCRYPT_N, r=_SCRYPT_R, p=_SCRYPT_P, maxmem=_SCRYPT_MEMORY_BYTES, dklen=32
    )
    return ClusterKeys(
        scheduler=_pair(master, b"scheduler"),
        worker=_pair(master, b"worker"),
        relay=_pair(master, b"relay"),
        session_key=hashlib.blake2b(key=master, person=b"session", digest_size=32).digest(),
    )


def _pair(master: bytes, side: bytes) -> KeyPair:
    secret = z85.encode(hashlib.blake2b(key=master, person=side, digest_size=32).digest())
    return KeyPair(zmq.curve_public(secret), secret)
