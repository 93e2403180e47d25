"""The keeping half of buddy copies: what other ranks send is put into memory slots of this host, compared, and kept.

Here lives whose copies this process takes, and what it answers; the slots are ``store``'s, the words ``net.copies``'.
The one idea: a copy is good only when every chunk of it has been compared where it lies; until then the one before it
stays, and a refusal is a sentence to its sender, who alone has to act on it.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from samebits.errors import CheckpointError, LockedError, StoreError
from samebits.net.copies import MAX_TEXT_BYTES, Declined, FromKeeper, KeeperSocket, Offer, Piece, Said, Taken, Whole
from samebits.net.curve import KeyPair
from samebits.store.checkpoint import MemoryRoom
from samebits.store.checkpoint.copied_buffer import CopyOffer, IncomingCopy, has_copy


@dataclass(slots=True)
class _Incoming:
    """What one sender is sending."""

    sender: bytes
    transfer: int
    copy: IncomingCopy


class CopyKeeper:
    """Takes in the copies of some slots.

    Args:
        context: of the process.
        descriptor: of a TCP socket that listens.
        keys: both ends' where there is a secret.
        base: the folder in memory.
        job: whose.
        ticket: what an offer must carry.
    """

    def __init__(
        self, context: zmq.Context[Any], descriptor: int, keys: KeyPair | None, base: Path, job: str, ticket: bytes
    ) -> None:
        self._socket = KeeperSocket(context, descriptor, keys)
        self._base, self._job, self._ticket = base, job, ticket
        self._slots: frozenset[int] = frozenset()
        self._rooms: dict[int, MemoryRoom] = {}
        self._incoming: dict[int, _Incoming] = {}  # by slot

    @property
    def sources(self) -> list[zmq.Socket[Any]]:
        """The sockets to watch."""
        return self._socket.sources

    @property
    def look_within_s(self) -> float | None:
        """Seconds after which ``look`` is due although nothing is readable; None: any number."""
        return self._socket.look_within_s

    def keep(self, slots: frozenset[int]) -> None:
        """From now on take copies of these slots; what is here of others stays, and is nobody's."""
        self._slots = slots
        for slot in self._rooms.keys() - slots:
            self._incoming.pop(slot, None)
            self._rooms.pop(slot).close()

    def look(self) -> None:
        """Read what has come, and answer."""
        for said in self._socket.drain():
            answer = self._offered(said, said.message) if isinstance(said.message, Offer) else self._brought(said)
            if answer is not None:
                self._socket.send(said.sender, answer)

    def _offered(self, said: Said, offer: Offer) -> FromKeeper:
        number = offer.transfer
        if not hmac.compare_digest(offer.ticket, self._ticket):
            return Declined(number, "the offer does not carry the ticket of this keeper", again=False)
        self._socket.settle(said)
        if offer.job != self._job:
            return Declined(number, f"it keeps copies of job {self._job}, not of job {offer.job}", again=False)
        if offer.slot not in self._slots:  # or not yet: not every member hears of a generation at once
            return Declined(number, f"it does not keep copies of slot {offer.slot}", again=True)
        copied = CopyOffer(offer.job, offer.slot, offer.point, offer.digest, offer.manifest_bytes, offer.data_bytes)
        try:
            room = self._rooms.get(offer.slot)
            if room is None:
                room = self._rooms[offer.slot] = MemoryRoom(self._base, self._job, offer.slot, is_copy=True)
            if has_copy(room, copied):
                return Whole(number)
            self._incoming[offer.slot] = _Incoming(said.sender, number, IncomingCopy(room, copied))
        except CheckpointError as error:  # what is offered cannot be: nothing of what is here is touched
            return Declined(number, _short(error), again=False)
        except LockedError:  # whoever kept it before has not heard yet that it does not any more
            return Declined(number, "another process of its host still has the copies", again=True)
        except StoreError as error:
            self._give_up(offer.slot)
            return Declined(number, _short(error), again=False)
        return Taken(number, 0)

    def _brought(self, said: Said) -> FromKeeper | None:
        assert isinstance(said.message, Piece)
        number, offset = said.message.transfer, said.message.offset
        found = next(
            (
                (slot, one)
                for slot, one in self._incoming.items()
                if (one.sender, one.transfer, one.copy.received_bytes) == (said.sender, number, offset)
            ),
            None,
        )
        if found is None:
            return None  # of a transfer that is over
        slot, incoming = found
        try:
            is_whole = incoming.copy.take(said.data)
        except StoreError as error:
            self._give_up(slot)
            return Declined(number, _short(error), again=False)
        if not is_whole:
            return Taken(number, incoming.copy.received_bytes)
        del self._incoming[slot]
        return Whole(number)

    def _give_up(self, slot: int) -> None:
        """What was coming in is none; the room is opened anew for what comes next, for it may be gone itself."""
        self._incoming.pop(slot, None)
        if (room := self._rooms.pop(slot, None)) is not None:
            room.close()

    def close(self) -> None:
        """Let go of everything; the copies stay."""
        self.keep(frozenset())
        self._socket.close()


def _short(error: StoreError) -> str:
    return str(error).encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
