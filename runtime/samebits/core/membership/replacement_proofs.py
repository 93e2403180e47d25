"""Recognise replacements: nodes that the job's own launcher starts for dead ones (rule 1b).

This module checks the proof; ``admission`` assigns seats. A replacement is a new node, such as ``2.1`` for node ``2``,
so the old node's cool-down needs no exception. A replacement proves its origin with the launcher's token, which never
leaves the launcher's machine. Each number is accepted once and must be higher than all earlier numbers of the same
node, so an intercepted proof is useless.
"""

from __future__ import annotations

import enum
import hashlib
import hmac

import msgspec

from samebits.core.ledger import Ledger
from samebits.core.messages import PROOF_BYTES, Register
from samebits.core.replacement_names import number_of, root_of
from samebits.core.state import Seat

TOKEN_BYTES = 32
_PERSON = b"samebits rule 1b"


def proof_of(token: bytes, job: str, node: str, session: str) -> bytes:
    """Return the proof that the launcher started this session of this node: a keyed BLAKE2b (RFC 7693).

    Args:
        token: the token of the job's launcher, at most 64 bytes.
    """
    said = msgspec.msgpack.encode([job, node, session])
    return hashlib.blake2b(said, key=token, digest_size=PROOF_BYTES, person=_PERSON).digest()


class Claim(enum.Enum):
    """The possible results of checking whether a Register comes from a replacement."""

    NONE = "it does not claim to be one, or the claim cannot be checked"
    FORGED = "its proof was not made with this job's token"
    SPENT = "its line has used this number or a higher one"
    EARLY = "its predecessor still holds its seat"
    OF_A_LOST_ONE = "its predecessor is lost or has left, and a slot is vacant"
    OF_NOBODY = "its predecessor holds nothing: it is treated like its line's first node"


class ReplacementProofs:
    """Checks whether a node is a replacement, without changing anything."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def claim(self, message: Register) -> Claim:
        """Check the claim of a session that holds no seat."""
        number, newest = number_of(message.node), self.newest(message.node)
        if number == 0:
            return Claim.NONE
        is_spent = self.is_spent(message.node)
        if not self._says_so(message):  # the record of a replaced number is gone by now: the number stays spent
            return Claim.SPENT if is_spent else Claim.NONE
        if not self.is_proven(message):
            return Claim.FORGED
        if is_spent:
            return Claim.SPENT
        if newest is None:
            return Claim.OF_NOBODY
        if newest.is_held and not newest.is_retired:
            return Claim.EARLY
        has_waited = newest.is_spare and number_of(newest.node) > 0
        needs_one = len(self._ledger.vacated) > len(self._ledger.state.spares)  # another line may have its slot by now
        return Claim.OF_A_LOST_ONE if newest.slot is not None or has_waited or needs_one else Claim.OF_NOBODY

    def is_spent(self, node: str) -> bool:
        """Return whether this replacement's number was already used."""
        return 0 < number_of(node) <= self._ledger.state.replacements.get(root_of(node), 0)

    def returns(self, message: Register) -> bool:
        """Return whether the launcher has restarted a lost spare under its name, and no later replacement exists."""
        newest = self.newest(message.node)
        is_it = newest is not None and newest.node == message.node and newest.is_spare and not newest.is_held
        return is_it and number_of(message.node) > 0 and self.is_proven(message)

    def is_proven(self, message: Register) -> bool:
        """Return whether the session's process was started by the job's own launcher."""
        policy, job = self._ledger.policy, self._ledger.state.job
        if not self._says_so(message):
            return False
        return hmac.compare_digest(message.proof, proof_of(policy.token, job, message.node, message.session))

    def newest(self, node: str) -> Seat | None:
        """Return the seat of the newest admitted node among this node and its replacements, or None."""
        state, root = self._ledger.state, root_of(node)
        number = state.replacements.get(root, 0)
        return (state.seats.get(f"{root}.{number}") if number else None) or state.seats.get(root)

    def _says_so(self, message: Register) -> bool:
        return bool(message.proof and self._ledger.policy.token)
