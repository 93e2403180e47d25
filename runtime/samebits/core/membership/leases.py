"""Leases and cool-downs of nodes (docs/contributors/architecture.md).

Each accepted message renews a lease; silence or a closed connection ends it. The cool-down starts at the last accepted
message or observed close, whether or not the lease has ended. Deadlines are in a heap with one entry per seat, which is
updated only when it reaches the top. A heartbeat therefore costs O(1) and a tick O(expired).
"""

from __future__ import annotations

import heapq

from samebits.core.hangs import OF_CLOSED, OF_SILENCE, Hang, classify_hang, fix_of
from samebits.core.ledger import Ledger, Liveness
from samebits.core.messages import Activity, Heartbeat
from samebits.core.ready import Severity
from samebits.core.records import SeatLeft, SeatLost, SeatResumed
from samebits.core.state import Seat

MOST_SESSIONS_A_SEAT = 2


class Leases:
    """Renews and ends leases. Every change of a node's liveness is made here."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._deadlines: list[tuple[float, str, int]] = []
        self._searched_until = 0.0  # workers may try other addresses until then, as this scheduler was paused
        self._closing: set[str] = set()  # live nodes whose connection is closed

    def begin(self, seat: Seat, *, heard: bool) -> None:
        """Begin the lease of a seat just granted (``heard``) or read from the journal."""
        ledger = self._ledger
        presence = Liveness(ledger.now + self._lease_s(is_heard=heard), ledger.now if heard else None)
        ledger.presences[seat.node] = presence
        if seat.slot is not None:
            ledger.meet(seat.slot)
        heapq.heappush(self._deadlines, (presence.lease_until, seat.node, seat.incarnation))

    def renew(self, seat: Seat) -> bool:
        """Renew the lease. Return True for the first message of this term or after a loss."""
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
        """Record a closed connection, or a death that a ``witness`` on the same host has reported first.

        Returns:
            The reason if the lease ends at once, else None.
        """
        ledger, presence = self._ledger, self._ledger.presences[seat.node]
        if seat.has_left:
            return None
        presence.is_gone = presence.is_gone or gone
        if seat.is_lost:
            if presence.heard_at is not None and presence.closed_at is None:  # restarts the cool-down
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
            return f"{OF_CLOSED} and its process is gone" if was_heard else "its process was found dead"
        self._closing.add(seat.node)
        heapq.heappush(self._deadlines, (presence.grace_until, seat.node, seat.incarnation))
        return None

    def end(self, seat: Seat, reason: str, status: int = 0) -> None:
        """Record that the node is lost. ``status`` is not 0 if its script exited with that status."""
        ledger, presence = self._ledger, self._ledger.presences[seat.node]
        known = presence.last_words or (presence.ended.text if presence.ended is not None else "")
        ledger.write(SeatLost(seat.node, seat.incarnation, self._quiet_from(seat), known or reason, status))
        self._closing.discard(seat.node)
        if seat.slot is not None:
            ledger.miss(seat.slot)
        hang = classify_hang(presence.current_process_state(), ledger.policy.node_timeout_s)
        fix = fix_of(hang, seat.process.pid) if hang.value in reason else ""
        text = f"{seat.title} ({seat.process}) is lost: {seat.reason}"
        ledger.ready.say(f"{text}. Fix: {fix}" if fix else text, Severity.WARNING)

    def closing(self) -> list[Seat]:
        """Return live seats with a closed connection, which count as lost at once if a collective fails.

        After a long pause of this scheduler the list is empty, because workers close connections to look for another
        one.
        """
        if not self._closing or self._ledger.now < self._searched_until:
            return []  # a cleared set keeps its size, and every heartbeat in a round would walk it
        return [self._ledger.state.seats[node] for node in sorted(self._closing)]

    def leave(self, seat: Seat) -> None:
        """Record a voluntary departure, which has no cool-down."""
        self._ledger.write(SeatLeft(seat.node, seat.incarnation))
        self._closing.discard(seat.node)
        if seat.slot is not None:
            self._ledger.miss(seat.slot, at_once=True)

    def expired(self) -> list[tuple[Seat, str]]:
        """Return the seats whose lease is over, with the reason. Call this only after the socket is drained."""
        return [(seat, reason) for _, seat, reason in self._take_over()]

    def silent(self) -> list[Seat]:
        """Return the seats that ``expired`` would return now because they are silent, without changing them."""
        over = self._take_over()
        for due, seat, _ in over:
            heapq.heappush(self._deadlines, (due, seat.node, seat.incarnation))
        now, presences = self._ledger.now, self._ledger.presences
        return [seat for _, seat, _ in over if presences[seat.node].lease_until <= now]

    def _take_over(self) -> list[tuple[float, Seat, str]]:
        """Remove and return the leases that are over; those that were renewed get their present deadline."""
        ledger, over, again = self._ledger, {}, set()
        while self._deadlines and self._deadlines[0][0] <= ledger.now:
            _, node, incarnation = heapq.heappop(self._deadlines)
            seat = ledger.state.seats.get(node)
            if seat is None or seat.incarnation != incarnation or not seat.is_held or seat.is_retired:
                continue
            presence = ledger.presences[node]
            if presence.lease_until > ledger.now and presence.grace_until is None:
                again.add((presence.lease_until, node, incarnation))
                continue
            due, reason = self._due(presence)
            if due <= ledger.now:
                over[node] = due, seat, reason
            else:
                again.add((due, node, incarnation))  # one entry, however many came up
        for entry in sorted(again):
            heapq.heappush(self._deadlines, entry)
        return list(over.values())

    def shift(self, gap_s: float) -> None:
        """Extend leases by the length of a pause of the scheduler, so that no node loses its lease because of it.

        A lease that was renewed after the pause (the queue may be drained first) gets at most its full length.
        Cool-downs are not extended, because they do not protect against pauses of this scheduler.
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
        """Return when the next lease may expire, or None."""
        return self._deadlines[0][0] if self._deadlines else None

    def lease_left_s(self, seat: Seat) -> float:
        """Return the number of seconds until the lease can end, or 0 if it has ended."""
        if not seat.is_held:
            return 0.0
        return max(0.0, self._due(self._ledger.presences[seat.node])[0] - self._ledger.now)

    def cool_down_left_s(self, seat: Seat) -> float:
        """Return the number of seconds until another session of this node can get the seat."""
        if seat.has_left:
            return 0.0
        return max(0.0, self._quiet_from(seat) + self._ledger.policy.cool_down_s - self._ledger.now)

    def _lease_s(self, *, is_heard: bool) -> float:
        """Return the lease's length in seconds.

        It is longer for a node that has not sent a message in this term, because it may first try other addresses.
        """
        policy = self._ledger.policy
        return policy.node_timeout_s if is_heard else policy.node_timeout_s + policy.search_s

    def _grace_s(self) -> float:
        policy = self._ledger.policy
        is_searched = self._ledger.now < self._searched_until
        return policy.reconnect_grace_s + policy.search_s if is_searched else policy.reconnect_grace_s

    def _due(self, presence: Liveness) -> tuple[float, str]:
        policy = self._ledger.policy
        silent_s = self._lease_s(is_heard=presence.heard_at is not None)
        longer = " and the time to look for the scheduler elsewhere" if silent_s > policy.node_timeout_s else ""
        silent = f"{OF_SILENCE} {silent_s:g} s (NODE_TIMEOUT{longer})"
        if presence.grace_until is not None and presence.grace_until <= presence.lease_until:
            return presence.grace_until, f"{OF_CLOSED} and stayed closed for {policy.reconnect_grace_s:g} s"
        hang = classify_hang(presence.current_process_state(), policy.node_timeout_s)
        return presence.lease_until, silent if hang is Hang.SILENT else f"{silent}: it {hang.value}"

    def _quiet_from(self, seat: Seat) -> float:
        """Return the time of the last accepted message or observed close, if known."""
        ledger, presence = self._ledger, self._ledger.presences.get(seat.node)
        if presence is not None and presence.heard_at is not None:
            return max(presence.heard_at, presence.closed_at or presence.heard_at)
        proven = seat.quiet_since
        if proven is not None and proven.boot_id == ledger.boot_id:
            return min(proven.at, ledger.now)
        return ledger.loaded_at


class Repeats:
    """The last heartbeat of each session whose heartbeat had no effect; a repetition only renews the lease.

    A repeated message causes no transition (invariant S17), so it need not be handled in full until something else
    happens. That matters with ten thousand heartbeats per second. Any other event, from any sender, clears the stored
    heartbeats, so they are never older than the last change.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._said: dict[str, tuple[Heartbeat, Liveness, int]] = {}
        self._era = 0  # entries of earlier eras are invalid

    def take(self, session: str, message: object) -> bool:
        """Renew the sender's lease if the message is a repetition. During training the step may differ."""
        known = self._said.get(session)
        if known is None or known[2] != self._era:
            return False
        before, presence, _ = known
        if message is not before:
            if not isinstance(message, Heartbeat) or not is_repeated(message, before):
                return False
            presence.step = message.step
        presence.hear(self._ledger.now, self._ledger.policy)
        return True

    def remember(self, session: str, message: Heartbeat, presence: Liveness) -> None:
        """Store an accepted heartbeat that had no effect."""
        self._said[session] = (message, presence, self._era)

    def forget(self) -> None:
        """Invalidate all entries. Removing ten thousand of them would delay the handling of a loss."""
        self._era += 1
        if len(self._said) > MOST_SESSIONS_A_SEAT * len(self._ledger.state.seats):
            self._said.clear()  # drop sessions that have ended


def is_repeated(message: Heartbeat, before: Heartbeat) -> bool:
    """Return whether a heartbeat only renews the lease after an earlier one. During training the step may differ."""
    return (
        message.activity is before.activity
        and (message.step == before.step or message.activity is Activity.TRAINING)
        and message.generation == before.generation
        and message.term == before.term
        and message.round == before.round
        and message.sender == before.sender
    )
