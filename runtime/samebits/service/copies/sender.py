"""Send a rank's newest hashed slot to its buddy, one point at a time.

No process waits for copies. A point that cannot be sent now is skipped in favor of the next one, and the reason is
reported once. A buddy that does not answer is tried again later, because it may have been busy and the next point may
be an hour away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from samebits.errors import StoreError
from samebits.net.copies import (
    PIECE_BYTES,
    WINDOW_BYTES,
    BuddyAddress,
    BytesReceived,
    Declined,
    PointOffer,
    SenderSocket,
    StreamChunk,
    Whole,
)
from samebits.net.curve import KeyPair
from samebits.store.checkpoint import Location
from samebits.store.checkpoint.copied_buffer import OutgoingCopy, outgoing_copy
from samebits.store.checkpoint.memory_room import NAMES

SILENT_S = 10.0
"""Seconds that a keeper may leave a piece unanswered."""
AGAIN_S = 0.5
LATER_S = 30.0
"""Seconds before a silent keeper is retried."""

CopyOutcome = Callable[[int, str], object]
"""Called with a point's sequence number and the reason why it was not copied; "" if it was."""


class CopySender:
    """Sends the points of one rank.

    Args:
        context: the process's ZeroMQ context.
        room: the folder of the rank's slots.
        room_descriptor: that folder, open.
        root: the job's checkpoint folder, which also receives each point.
        report: called with the result for each point.
    """

    def __init__(
        self, context: zmq.Context[Any], room: Path, room_descriptor: int, root: Location, report: CopyOutcome
    ) -> None:
        self._context = context
        self._root = root
        self._room, self._room_descriptor = room, room_descriptor
        self._report = report
        self._keeper: BuddyAddress | None = None
        self._who = ""
        self._keys: KeyPair | None = None
        self._socket: SenderSocket | None = None
        self._newest: tuple[int, str] | None = None  # sequence, slot
        self._settled = 0  # points up to this sequence number are done
        self._outgoing: OutgoingCopy | None = None
        self._transfer = 0
        self._sent_bytes = self._answered_bytes = 0
        self._give_up_at: float | None = None
        self._again_at: float | None = None

    @property
    def socket(self) -> zmq.Socket[Any] | None:
        """Return the socket to poll, which may change with every call of a method."""
        return None if self._socket is None else self._socket.socket

    @property
    def wake_at(self) -> float | None:
        """Return when :meth:`look` must be called next at the latest, or None."""
        deadlines = [at for at in (self._give_up_at, self._again_at) if at is not None]
        return min(deadlines, default=None)

    def go_to(self, keeper: BuddyAddress | None, who: str, keys: KeyPair | None, now: float) -> None:
        """Send to this buddy, which has no copies yet, from now on; None for no buddy."""
        if keeper == self._keeper:
            return
        self._drop()
        self._hang_up()
        self._keeper, self._who, self._keys, self._settled = keeper, who, keys, 0
        if self._newest is None:
            self._newest = self._newest_there_is()
        self._begin(now)

    def _newest_there_is(self) -> tuple[int, str] | None:
        """Return the newest point left by an earlier process of this slot, or None."""
        found = []
        for name in NAMES:
            with contextlib.suppress(StoreError):  # the search for points reports the reason
                outgoing = outgoing_copy(self._room_descriptor, self._room / name)
                if outgoing is not None:
                    found.append((outgoing.sequence, name))
                    outgoing.close()
        return max(found, default=None)

    def hashed(self, name: str, sequence: int, now: float) -> None:
        """Record this slot as the newest, and offer it unless a copy is being sent."""
        self._newest = (sequence, name)
        if self._outgoing is None:
            self._begin(now)

    def look(self, now: float) -> None:
        """Read answers, and act on missing ones."""
        if self._socket is not None:
            for message in list(self._socket.drain()):  # handling a message may close the socket
                if message.transfer == self._transfer and self._outgoing is not None:
                    self._take(message, now)
        if self._give_up_at is not None and self._give_up_at <= now:
            self._leave_alone(now)
        if self._again_at is not None and self._again_at <= now:
            self._again_at = None
            self._begin(now)

    def _take(self, message: BytesReceived | Whole | Declined, now: float) -> None:
        match message:
            case BytesReceived(_, received_bytes):
                self._answered_bytes = max(self._answered_bytes, min(received_bytes, self._sent_bytes))
                self._give_up_at = now + SILENT_S
                self._send_on(now)
            case Whole():
                self._settle("", now)
            case Declined(_, text, again):
                if again:
                    self._drop()
                    self._again_at = now + AGAIN_S
                else:
                    self._settle(f"{self._who}: {text}", now)

    def _begin(self, now: float) -> None:
        """Offer the newest point unless the buddy already has it."""
        if self._keeper is None or self._newest is None or self._newest[0] <= self._settled:
            return
        sequence, name = self._newest
        try:
            outgoing = outgoing_copy(self._room_descriptor, self._room / name, self._root)
        except StoreError as error:
            self._settled = sequence
            self._report(sequence, str(error))
            return
        if outgoing is None or outgoing.sequence != sequence:  # being overwritten by a newer point
            if outgoing is not None:
                outgoing.close()
            return
        if self._socket is None:
            self._socket = SenderSocket(self._context, self._keeper.endpoint, self._keys)
        self._outgoing, self._again_at = outgoing, None
        self._transfer += 1
        self._sent_bytes = self._answered_bytes = 0
        self._give_up_at = now + SILENT_S
        what = outgoing.offer
        self._socket.send(
            PointOffer(
                self._keeper.ticket,
                self._transfer,
                what.job,
                what.slot,
                what.point,
                what.digest,
                what.manifest_bytes,
                what.data_bytes,
            )
        )

    def _send_on(self, now: float) -> None:
        assert self._outgoing is not None and self._socket is not None
        while self._sent_bytes - self._answered_bytes < WINDOW_BYTES:
            size_bytes = min(PIECE_BYTES, self._outgoing.offer.stream_bytes - self._sent_bytes)
            if size_bytes <= 0:
                return
            piece = self._outgoing.piece(self._sent_bytes, size_bytes)
            if piece is None:
                self._settle(
                    "it was removed from the disk before it was copied: points are saved faster than they can be "
                    "copied",
                    now,
                )
                return
            if not self._socket.send_piece(StreamChunk(self._transfer, self._sent_bytes), piece):
                self._settle(f"the connection to {self._who} takes nothing more", now, hangs_up=True)
                return
            self._sent_bytes += len(piece)

    def _settle(self, problem: str, now: float, *, hangs_up: bool = False) -> None:
        """Report the result for this point, and continue with the newest one."""
        assert self._outgoing is not None
        sequence = self._outgoing.sequence
        self._drop()
        if hangs_up:
            self._hang_up()
        self._settled = sequence
        self._report(sequence, problem)
        self._begin(now)

    def _leave_alone(self, now: float) -> None:
        """Stop trying a buddy that does not answer, and offer it the newest point later."""
        assert self._outgoing is not None
        self._report(self._outgoing.sequence, f"{self._who} has not answered for {SILENT_S:g} s")
        self._drop()
        self._hang_up()
        self._again_at = now + LATER_S

    def _drop(self) -> None:
        if self._outgoing is not None:
            self._outgoing.close()
        self._outgoing = self._give_up_at = self._again_at = None

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Discard unsent points."""
        self._drop()
        self._hang_up()
