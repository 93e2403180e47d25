"""Leases and cool-downs of nodes (docs/contributors/architecture.md).

One idea: a lease is renewed by every accepted message and ends by silence or by a closed connection; the cool-down runs
from the last accepted message or observed close, whether or not the lease has ended. Deadlines sit in a lazy heap: one
entry a seat, looked at again when it comes up, so that a heartbeat costs O(1) and a tick O(expired).
"""

from __future__ import annotations

import heapq

from samebits.core.hangs import Hang, fix_of, told_apart
from samebits.core.ledger import Ledger, Presence
from samebits.core.ready import Level
from samebits.core.records import SeatLeft, SeatLost, SeatResumed
from samebits.core.state import Seat


class Leases:
    """Renews, ends and measures leases; every change of who is alive goes through here."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._deadlines: list[tuple[float, str, int]] = []
        self._searched_until = 0.0  # workers may look for their scheduler elsewhere: this one stood still for long
        self._closing: set[str] = set()  # live nodes whose connection is closed and has not come back

    def begin(self, seat: Seat, *, heard: bool) -> None:
        """A lease starts: the seat was just granted, or read from the journal (then nothing was heard yet)."""
        ledger = self._ledger
        presence = Presence(ledger.now + self._lease_s(is_heard=heard), ledger.now if heard else None)
        ledger.presences[seat.node] = presence
        if seat.slot is not None:
            ledger.meet(seat.slot)
        heapq.heappush(self._deadlines, (presence.lease_until, seat.node, seat.incarnation))

    def renew(self, seat: Seat) -> bool:
        """An accepted message. True where the node comes back: first heard in this term, or after it was lost."""
        ledger, presence = self._ledger, self._ledger.presences[seat.node]
        came_back = presence.heard_at is None or seat.is_lost
        if came_back:
            was_lost = seat.is_lost
            ledger.write(SeatResumed(seat.node, seat.incarnation))
            if was_lost:
                self.begin(seat, heard=True)
                presence = ledger.presences[seat.node]
        presence.ended = None
        presence.hear(ledger.now, ledger.policy)
        if presence.closed_at is not None:
            presence.closed_at = presence.grace_until = None
            self._closing.discard(seat.node)
        return came_back

    def close(self, seat: Seat, *, gone: bool, witness: Seat | None = None) -> str | None:
        """The connection of the seat's session closed, or a ``witness`` beside it saw its process die before that.

        Returns the reason where that ends the lease at once.
        """
        ledger, presence = self._ledger, self._ledger.presences[seat.node]
        if seat.has_left:
            return None
        presence.is_gone = presence.is_gone or gone
        if seat.is_lost:
            if presence.heard_at is not None and presence.closed_at is None:  # a later start of the cool-down
                presence.closed_at = ledger.now
                if seat.quiet_since is not None and seat.quiet_since.at == ledger.now:
                    return None
                ledger.write(SeatLost(seat.node, seat.incarnation, ledger.now, seat.reason, seat.status))
            return None
        if presence.closed_at is None or presence.grace_until is None:
            presence.closed_at = ledger.now
            presence.grace_until = ledger.now + self._grace_s()
        if witness is not None:
            return f"its process ended (seen by worker {witness.node} on the same host)"
        if gone:
            was_heard = presence.heard_at is not None
            return "its connection closed and its process is gone" if was_heard else "its process was found dead"
        self._closing.add(seat.node)
        heapq.heappush(self._deadlines, (presence.grace_until, seat.node, seat.incarnation))
        return None

    def end(self, seat: Seat, reason: str, status: int = 0) -> None:
        """Write down that the node is lost; ``status`` is not 0 if its script ended itself, with that status."""
        ledger, presence = self._ledger, self._ledger.presences[seat.node]
        known = presence.last_words or (presence.ended.text if presence.ended is not None else "")
        ledger.write(SeatLost(seat.node, seat.incarnation, self._quiet_from(seat), known or reason, status))
        self._closing.discard(seat.node)
        if seat.slot is not None:
            ledger.miss(seat.slot)
        hang = told_apart(presence.sight_now(), ledger.policy.node_timeout_s)
        fix = fix_of(hang, seat.process.pid) if hang.value in reason else ""
        text = f"{seat.title} ({seat.process}) is lost: {seat.reason}"
        ledger.ready.say(f"{text}. Fix: {fix}" if fix else text, Level.WARNING)

    def closing(self) -> list[Seat]:
        """Live seats whose connection is closed and has not come back: lost at once, if a collective failed too."""
        if not self._closing:
            return []  # an emptied set is still walked at its greatest size, for every heartbeat in a round
        return [self._ledger.state.seats[node] for node in sorted(self._closing)]

    def leave(self, seat: Seat) -> None:
        """The node gave its seat up on purpose: no cool-down."""
        self._ledger.write(SeatLeft(seat.node, seat.incarnation))
        self._closing.discard(seat.node)
        if seat.slot is not None:
            self._ledger.miss(seat.slot, at_once=True)

    def expired(self) -> list[tuple[Seat, str]]:
        """Seats whose lease is over now, with the reason. Ask only after the socket is drained."""
        ledger, over = self._ledger, []
        again = set()
        while self._deadlines and self._deadlines[0][0] <= ledger.now:
            _, node, incarnation = heapq.heappop(self._deadlines)
            seat = ledger.state.seats.get(node)
            if seat is None or seat.incarnation != incarnation or not seat.is_held or seat.is_retired:
                continue
            presence = ledger.presences[node]
            due, reason = self._due(presence)
            if due <= ledger.now:
                over.append((seat, reason))
            else:
                again.add((due, node, incarnation))  # one entry again, however many came up
        for entry in sorted(again):
            heapq.heappush(self._deadlines, entry)
        return list({seat.node: (seat, reason) for seat, reason in over}.values())

    def silent(self) -> list[Seat]:
        """Whom ``expired`` will name for their silence; that stays to be asked."""
        ledger, due = self._ledger, []
        while self._deadlines and self._deadlines[0][0] <= ledger.now:
            due.append(heapq.heappop(self._deadlines))
        for entry in due:
            heapq.heappush(self._deadlines, entry)
        seats = [ledger.state.seats.get(node) for node in dict.fromkeys(node for _, node, _ in due)]
        return [
            seat
            for seat in seats
            if seat is not None
            and seat.is_held
            and not seat.is_retired
            and ledger.presences[seat.node].lease_until <= ledger.now
        ]

    def shift(self, gap_s: float) -> None:
        """The scheduler itself stood still for ``gap_s``: nobody may lose a lease by that.

        What was renewed since (the queue may have been drained before) gets no more than a fresh lease; a cool-down
        runs on, for it protects nobody from this scheduler.
        """
        now = self._ledger.now
        if gap_s >= self._ledger.policy.node_timeout_s / 2:
            self._searched_until = now + self._ledger.policy.node_timeout_s
        for presence in self._ledger.presences.values():
            lease_s = self._lease_s(is_heard=presence.heard_at is not None)
            presence.lease_until = min(presence.lease_until + gap_s, now + lease_s)
            if presence.grace_until is not None:
                grace_s = self._grace_s()
                longer_s = gap_s + grace_s - self._ledger.policy.reconnect_grace_s
                presence.grace_until = min(presence.grace_until + longer_s, now + grace_s)

    def next_deadline(self) -> float | None:
        """When ``expired`` is worth asking again."""
        return self._deadlines[0][0] if self._deadlines else None

    def lease_left_s(self, seat: Seat) -> float:
        """Seconds until the lease can end; 0 where it has."""
        if not seat.is_held:
            return 0.0
        return max(0.0, self._due(self._ledger.presences[seat.node])[0] - self._ledger.now)

    def cool_down_left_s(self, seat: Seat) -> float:
        """Seconds until another session of this node may be seated, whatever the lease says."""
        if seat.has_left:
            return 0.0
        return max(0.0, self._quiet_from(seat) + self._ledger.policy.cool_down_s - self._ledger.now)

    def _lease_s(self, *, is_heard: bool) -> float:
        """A node that was not heard in this term may still look for its scheduler at another address."""
        policy = self._ledger.policy
        return policy.node_timeout_s if is_heard else policy.node_timeout_s + policy.search_s

    def _grace_s(self) -> float:
        policy = self._ledger.policy
        is_searched = self._ledger.now < self._searched_until
        return policy.reconnect_grace_s + policy.search_s if is_searched else policy.reconnect_grace_s

    def _due(self, presence: Presence) -> tuple[float, str]:
        policy = self._ledger.policy
        silent_s = self._lease_s(is_heard=presence.heard_at is not None)
        longer = " and the time to look for the scheduler elsewhere" if silent_s > policy.node_timeout_s else ""
        silent = f"silent for {silent_s:g} s (NODE_TIMEOUT{longer})"
        if presence.grace_until is not None and presence.grace_until <= presence.lease_until:
            return presence.grace_until, f"its connection closed and stayed closed for {policy.reconnect_grace_s:g} s"
        hang = told_apart(presence.sight_now(), policy.node_timeout_s)
        return presence.lease_until, silent if hang is Hang.SILENT else f"{silent}: it {hang.value}"

    def _quiet_from(self, seat: Seat) -> float:
        """The last accepted message or observed close, or what the journal proves about it."""
        ledger, presence = self._ledger, self._ledger.presences.get(seat.node)
        if presence is not None and presence.heard_at is not None:
            return max(presence.heard_at, presence.closed_at or presence.heard_at)
        proven = seat.quiet_since
        if proven is not None and proven.boot_id == ledger.boot_id:
            return min(proven.at, ledger.now)
        return ledger.loaded_at
