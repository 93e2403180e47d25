"""Store buddy copies: receive points of other ranks into memory slots of this host.

A copy is valid only once all of its chunks have been verified in place; until then, the previous copy is kept. Refusals
are sent to the sender, because only the sender can act on them.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from samebits.errors import CheckpointError, LockedError, StoreError
from samebits.net.copies import (
    MAX_TEXT_BYTES,
    BytesReceived,
    CopyMessage,
    Declined,
    FromKeeper,
    KeeperSocket,
    PointOffer,
    StreamChunk,
    Whole,
)
from samebits.net.curve import KeyPair
from samebits.store.checkpoint import MemoryRoom
from samebits.store.checkpoint.copied_buffer import CopyOffer, IncomingCopy, has_copy
from samebits.store.checkpoint.memory_room import RoomKind


@dataclass(slots=True)
class _Incoming:
    """The transfer of one sender."""

    sender: bytes
    transfer: int
    copy: IncomingCopy


class CopyKeeper:
    """Receives and stores the copies of some slots.

    Args:
        context: the process's ZeroMQ context.
        descriptor: a listening TCP socket.
        keys: the keys of both ends, if there is a secret.
        base: the folder in memory.
        job: the job's id.
        ticket: proof that an offer must carry.
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
        """Return the sockets to poll."""
        return self._socket.sources

    @property
    def look_within_s(self) -> float | None:
        """Return after how many seconds ``look`` is due even without a readable socket, or None for never."""
        return self._socket.look_within_s

    def keep(self, slots: frozenset[int]) -> None:
        """Store copies of these slots from now on. Existing copies of other slots remain, unused."""
        self._slots = slots
        for slot in self._rooms.keys() - slots:
            self._incoming.pop(slot, None)
            self._rooms.pop(slot).close()

    def look(self) -> None:
        """Read and answer what has arrived."""
        for said in self._socket.drain():
            answer = self._offered(said, said.message) if isinstance(said.message, PointOffer) else self._brought(said)
            if answer is not None:
                self._socket.send(said.sender, answer)

    def _offered(self, said: CopyMessage, offer: PointOffer) -> FromKeeper:
        number = offer.transfer
        if not hmac.compare_digest(offer.ticket, self._ticket):
            return Declined(number, "the offer does not carry the ticket of this keeper", again=False)
        self._socket.settle(said)
        if offer.job != self._job:
            return Declined(number, f"it keeps copies of job {self._job}, not of job {offer.job}", again=False)
        if offer.slot not in self._slots:  # perhaps not yet: not all members learn of a generation at the same time
            return Declined(number, f"it does not keep copies of slot {offer.slot}", again=True)
        copied = CopyOffer(offer.job, offer.slot, offer.point, offer.digest, offer.manifest_bytes, offer.data_bytes)
        try:
            room = self._rooms.get(offer.slot)
            if room is None:
                room = self._rooms[offer.slot] = MemoryRoom(self._base, self._job, offer.slot, kind=RoomKind.COPIED)
            if has_copy(room, copied):
                return Whole(number)
            self._incoming[offer.slot] = _Incoming(said.sender, number, IncomingCopy(room, copied))
        except CheckpointError as error:  # the offer is invalid; existing copies are not touched
            return Declined(number, _short(error), again=False)
        except LockedError:  # the previous keeper has not released the room yet
            return Declined(number, "another process of its host still has the copies", again=True)
        except StoreError as error:
            self._give_up(offer.slot)
            return Declined(number, _short(error), again=False)
        return BytesReceived(number, 0)

    def _brought(self, said: CopyMessage) -> FromKeeper | None:
        assert isinstance(said.message, StreamChunk)
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
            return None  # a chunk of an earlier transfer
        slot, incoming = found
        try:
            is_whole = incoming.copy.take(said.data)
        except StoreError as error:
            self._give_up(slot)
            return Declined(number, _short(error), again=False)
        if not is_whole:
            return BytesReceived(number, incoming.copy.received_bytes)
        del self._incoming[slot]
        return Whole(number)

    def _give_up(self, slot: int) -> None:
        """Discard an incoming copy and close its room, which may be gone.

        The next copy opens a new room.
        """
        self._incoming.pop(slot, None)
        if (room := self._rooms.pop(slot, None)) is not None:
            room.close()

    def close(self) -> None:
        """Release all resources; the copies stay in memory."""
        self.keep(frozenset())
        self._socket.close()


def _short(error: StoreError) -> str:
    return str(error).encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
