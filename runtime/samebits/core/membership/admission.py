"""Admission to seats: rules 1 to 8 and 1b of docs/contributors/architecture.md.

Every answer is a message to the session that asked. A refusal changes only the list of waiting sessions, so it cannot
extend a wait. An admission is written to the journal as a SeatGranted record before it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from samebits.core.ledger import NAMED, Ledger
from samebits.core.membership.leases import Leases
from samebits.core.membership.rebuild import highest_unheard_incarnation, is_placeholder
from samebits.core.membership.replacement_proofs import Claim, ReplacementProofs
from samebits.core.membership.world import World
from samebits.core.messages import (
    PROTOCOL,
    Admitted,
    Credential,
    Fenced,
    Pending,
    Refusal,
    Register,
    protocol_difference,
)
from samebits.core.ready import Severity
from samebits.core.records import ReplacementShown, SeatGranted, SeatRetired, SpareAdmitted
from samebits.core.replacement_names import root_of
from samebits.core.restore import differing
from samebits.core.state import Seat

MIN_RETRY_S = 0.05
EARLY_RETRY_S = 0.1  # the launcher saw a death that the scheduler will notice in a moment
MUST_LEAVE = ": this process must not touch the job again"
MAY_RETURN = ": it must leave its generation, and may come back as a spare"
MAX_REFUSED = 1000  # remembered beyond two per slot; further sessions are refused without notice of the job's end
MAX_DIGITS = 18  # of a number inside a name; a peer must not determine how long int() takes


@dataclass(slots=True)
class Waiting:
    """A process that has asked for a seat and has none yet."""

    register: Register
    until: float  # when it is forgotten unless it asks again
    for_s: float  # the length of that wait


class Admission:
    """Answers Register messages and tracks the sessions that wait for a seat.

    Args:
        give_slots: called for an admitted spare before it is answered, since it may get a lost slot at once.
    """

    def __init__(self, ledger: Ledger, leases: Leases, world: World, give_slots: Callable[[Seat], object]) -> None:
        self._ledger = ledger
        self._leases = leases
        self._world = world
        self._give_slots = give_slots
        self._replacements = ReplacementProofs(ledger)
        self.pending: dict[str, Waiting] = {}  # by session: waiting until all workers are registered
        self.refused: dict[str, Waiting] = {}  # by session: refused for now
        self._silent: dict[str, None] = {}  # sessions that have not asked again in time, and are still connected
        self._pending_session: dict[str, str] = {}  # node → its session in ``pending``
        self.check_at: float | None = None  # when an entry may expire

    def register(self, message: Register) -> Seat | None:
        """Answer one Register message, and return the seat if the session now holds one."""
        before = self.refused.pop(message.session, None)
        self._silent.pop(message.session, None)
        stranger = self._is_stranger(message)
        if stranger is not None:
            self._refuse(message, *stranger)
            return None
        seat = self._ledger.state.seats.get(message.node)
        if seat is not None and self._may_resume(message, seat):
            return self._welcome_back(seat)
        late = self._late_member(message)
        if late is not None:
            return late
        if self._is_late_spare(message, seat):
            return self._admit_spare(message, incarnation=message.incarnation)
        if message.incarnation > 0 or (seat is not None and seat.session == message.session):
            self._fence(message, seat)
            return None
        is_new = seat is None and self._ledger.policy.recovery
        claim = self._replacements.claim(message) if is_new else Claim.NONE
        if claim not in (Claim.NONE, Claim.OF_NOBODY):
            return self._admit_replacement(message, claim, before)
        if seat is None or seat.is_retired:
            return self._admit_unknown(message)
        return self._admit_known(message, seat)

    def forget(self, session: str) -> None:
        """Forget a session whose connection closed."""
        waiting = self.pending.pop(session, None)
        if waiting is not None:
            self._pending_session.pop(waiting.register.node, None)
        self.refused.pop(session, None)
        self._silent.pop(session, None)

    def sessions(self) -> list[str]:
        """Return the connected sessions without a seat, which must be notified of the job's end."""
        return [*self.pending, *self.refused, *self._silent]

    def forget_silent(self) -> None:
        """Stop waiting for sessions that have not asked again in time.

        A busy host may delay them, so as long as they are connected they are still notified of the job's end.
        """
        now = self._ledger.now
        if self.check_at is None or self.check_at > now:
            return
        for waiting in (self.pending, self.refused):
            for session in [session for session, entry in waiting.items() if entry.until <= now]:
                self.forget(session)
                if len(self._silent) < MAX_REFUSED:
                    self._silent[session] = None
        rest = [entry.until for entry in (*self.pending.values(), *self.refused.values())]
        self.check_at = min(rest, default=None)

    def longest_wait_s(self) -> float | None:
        """Return the longest time in seconds that a refused session must still wait, or None."""
        ledger = self._ledger
        free_at = max((entry.until - ledger.policy.node_timeout_s for entry in self.refused.values()), default=None)
        return None if free_at is None else max(0.0, free_at - ledger.now)

    def shift(self, gap_s: float) -> None:
        """Extend all waits by the length of a pause of the scheduler."""
        for waiting in (*self.pending.values(), *self.refused.values()):
            waiting.until = min(waiting.until + gap_s, self._ledger.now + waiting.for_s)

    # ---- rule 8

    def _is_stranger(self, message: Register) -> tuple[Refusal, str] | None:
        state = self._ledger.state
        if message.job and message.job != state.job and message.protocol == PROTOCOL:
            found = f"worker {message.node} belongs to job {message.job}, this scheduler runs job {state.job}"
            if message.incarnation == 0:
                return Refusal.OTHER_JOB, f"{found}. Fix: start each job with its own SCHED_PORT"
            return Refusal.OTHER_JOB, f"{found}: its recovery path is not the one the worker's job was started with"
        return self.difference(message)

    def difference(self, message: Register) -> tuple[Refusal, str] | None:
        """Return why the sender cannot belong to any job here, or None."""
        policy = self._ledger.policy
        if message.protocol != PROTOCOL:
            return Refusal.PROTOCOL, protocol_difference(f"worker {message.node}", message.protocol)
        if policy.job_name and message.job_name and message.job_name != policy.job_name:
            return Refusal.OTHER_JOB, (
                f"worker {message.node} was started for {message.job_name!r}, this scheduler runs {policy.job_name!r}: "
                "set SCHED_HOST and SCHED_PORT to its own scheduler, or the same JOB_NAME on both"
            )
        difference = differing(message.settings, policy.settings)
        if difference:
            return Refusal.OTHER_SETTINGS, (
                f"worker {message.node} ('here') was started with other settings than the scheduler ('there'): "
                f"{difference}. Start it with the job's values"
            )
        return None

    def _late_member(self, message: Register) -> Seat | None:
        """Return the sender's reserved seat if its report agrees with the rebuilt generation, otherwise None."""
        state, standing = self._ledger.state, message.standing
        committed = state.generation
        if committed is None or standing is None or not 0 <= standing.rank < len(committed.slots):
            return None
        kept, present = state.seat_of_slot(committed.slots[standing.rank]), state.seats.get(message.node)
        if (standing.generation, standing.round) != (committed.generation, committed.round):
            return None
        if kept is None or kept.slot is None or not is_placeholder(kept.session):
            return None
        if present is not None and present is not kept and (present.is_held and not present.is_retired):
            return None  # another process of this node has registered
        slot = kept.slot
        if kept.node != message.node:
            self._ledger.write(SeatRetired(kept.node, slot))
        return self._seat(message, slot, incarnation=message.incarnation)

    def _is_late_spare(self, message: Register, seat: Seat | None) -> bool:
        """Return whether the sender is a spare of the rebuilt job, which the members could not report."""
        is_spare = seat is None and message.incarnation > 0 and message.standing is None
        was_replaced = self._replacements.is_spent(message.node)  # its record was dropped, so it looks unknown
        return is_spare and not was_replaced and self._has_room_for_spare(message)

    # ---- rule 1b

    def _admit_replacement(self, message: Register, claim: Claim, before: Waiting | None) -> Seat | None:
        """Admit a new node that replaces a dead one.

        The node is a spare in addition to SPARE_NUM until it gets a slot. Once training is finished, no round assigns
        slots, so the node takes the lost node's slot and runs the rest of its script. If that slot went to another
        node, it takes any lost slot whose script is unfinished.
        """
        node, newest = message.node, self._replacements.newest(message.node)
        if claim is Claim.OF_A_LOST_ONE:
            if self._ledger.state.final is None or newest is None:
                return self._admit_spare(message)
            if newest.slot is not None:
                slot = newest.slot
                self._ledger.write(SeatRetired(newest.node, slot))
                return self._grant(message, slot)
            unfinished = [seat for seat in self._holders() if not (seat.is_held or seat.has_left)]
            return self._take_over(message, unfinished) if unfinished else self._admit_spare(message)
        if claim is Claim.EARLY and newest is not None:
            text = f"worker {node} replaces {newest.title}, which is still held by {newest.process}"
            self._refuse(message, Refusal.ALIVE, text, self._early_retry_s(before))
        elif claim is Claim.FORGED:
            text = (
                f"worker {node} claims that this job's launcher started it, but cannot prove it with the job's token. "
                "Fix: unset NODE_ID, which only a launcher sets to such a name"
            )
            self._refuse(message, Refusal.FULL, text)
        else:
            last = newest.title if newest is not None else "no node"
            text = f"worker {node} was replaced: {last} is the last of its line. Fix: unset NODE_ID"
            self._refuse(message, Refusal.FULL, text)
        return None

    def _early_retry_s(self, before: Waiting | None) -> float:
        """Return twice the session's last wait, because the process that it replaces may still be alive."""
        node_timeout_s = self._ledger.policy.node_timeout_s
        return EARLY_RETRY_S if before is None else min(2 * (before.for_s - node_timeout_s), node_timeout_s)

    # ---- rules 2 and 6

    def _may_resume(self, message: Register, seat: Seat) -> bool:
        gave_up = seat.has_left or self._ledger.presences[seat.node].is_gone
        is_holder = seat.session == message.session and message.incarnation in (0, seat.incarnation)
        return is_holder and not seat.is_retired and not gave_up

    def _welcome_back(self, seat: Seat) -> Seat:
        if self._leases.renew(seat):
            self._ledger.ready.say(f"{seat.title} is back ({seat.process}), same incarnation {seat.incarnation}")
        self.welcome(seat)
        return seat

    def _fence(self, message: Register, seat: Seat | None) -> None:
        fenced = self.fenced(message, seat)
        self._ledger.ready.send(message.session, fenced)
        self._ledger.ready.say(f"fenced {message.process}: {fenced.text}", Severity.WARNING)

    def fenced(self, sender: Register | Credential, seat: Seat | None) -> Fenced:
        """Return the message for a process that wrongly believes it holds this node's seat."""
        policy = self._ledger.policy
        is_own = seat is not None and seat.is_retired and seat.session == sender.session
        may_return = is_own and policy.recovery and (policy.spare_num > 0 or policy.is_elastic)
        text = fenced_text(sender.node, seat) + (MAY_RETURN if may_return else MUST_LEAVE)
        state = self._ledger.state
        return Fenced(state.job, sender.session, sender.incarnation, text, may_return, state.term)

    # ---- rules 3, 4, 5 and 7

    def _admit_known(self, message: Register, seat: Seat) -> Seat | None:
        policy = self._ledger.policy
        if not policy.recovery:
            self._refuse(
                message,
                Refusal.RECOVERY_OFF,
                f"worker {message.node} was in this job before, and no worker can return with ENABLE_RECOVERY=0: "
                "set ENABLE_RECOVERY=1 to let it return",
            )
            return None
        lease_left, cool_down_left = self._leases.lease_left_s(seat), self._leases.cool_down_left_s(seat)
        retry = max(lease_left, cool_down_left)
        if seat.is_held:
            text = (
                f"worker {seat.node} is held by {seat.process}, whose lease ends in {lease_left:.1f} s of silence; "
                f"its seat is free {policy.cool_down_s:g} s (REGISTER_COOLDOWN) after its last message"
            )
            self._refuse(message, Refusal.ALIVE, text, max(retry, MIN_RETRY_S))
            return None
        if cool_down_left > 0:
            self._refuse_cooling_down(message, seat, "its seat is free again", cool_down_left)
            return None
        if seat.slot is None:
            return self._admit_unknown(message)
        return self._grant(message, seat.slot)

    # ---- rule 1

    def _admit_unknown(self, message: Register) -> Seat | None:
        """Admit a node without a seat: into a free slot, a lost seat after its cool-down, or as a spare."""
        state = self._ledger.state
        first = root_of(message.node) if self._replacements.is_proven(message) else message.node
        wanted, known = _slot_named_by(first), state.seats.get(message.node)
        if known is not None and known.is_retired and known.is_lost:
            cool_down_left = self._leases.cool_down_left_s(known)
            if cool_down_left > 0:
                self._refuse_cooling_down(message, known, "its slot was given away; it may return", cool_down_left)
                return None
        if wanted is not None and wanted >= self._ledger.policy.max_world_size:
            if self._has_room_for_spare(message):
                return self._admit_spare(message)
            self._refuse_spare(message)
            return None
        holder = None if wanted is None else state.seat_of_slot(wanted)
        named = None if wanted is None or holder is not None else self._world.free_slot(wanted)
        if named is not None:
            return self._grant(message, named)
        if holder is not None and known is None and not self._ledger.policy.is_elastic:
            is_anothers = self._replacements.is_proven(message) and holder.is_held  # permanently
            return self._take_over(message, self._holders() if is_anothers else [holder])
        free = self._world.free_slot()
        if free is None:
            return self._take_over(message, self._holders())
        if known is not None or self._world.has_begun or free >= self._ledger.policy.world_size:
            return self._grant(message, free)
        return self._wait_for_full_house(message)

    def _holders(self) -> list[Seat]:
        """Return the holders of all slots, alive or not."""
        state = self._ledger.state
        return [state.seats[node] for node in state.by_slot.values()]

    def _take_over(self, message: Register, holders: list[Seat]) -> Seat | None:
        """Grant the first lost seat whose cool-down is over. Used if no slot is free."""
        is_trained = self._ledger.state.final is not None
        waits = [
            (max(self._leases.lease_left_s(seat), self._leases.cool_down_left_s(seat)), seat.slot or 0, seat)
            for seat in holders
            if not seat.is_held and not (is_trained and seat.has_left)  # a seat whose script is complete is kept
        ]
        wait_s, slot, lost = min(waits, key=lambda entry: entry[:2], default=(0.0, 0, None))
        if lost is not None and wait_s <= 0:
            self._ledger.write(SeatRetired(lost.node, slot))
            return self._grant(message, slot)
        if self._has_room_for_spare(message):
            return self._admit_spare(message)
        if lost is None:
            names = ", ".join(f"{seat.node} ({seat.process})" for seat in holders[:4])
            more = f" and {len(holders) - 4} more" if len(holders) > 4 else ""
            policy, limit = self._ledger.policy, ""
            if policy.is_elastic and not self._world.has_resets_left():
                limit = f"; training has restarted {policy.reset_limit} times (RESET_LIMIT) and admits no more workers"
            text = f"no seat for worker {message.node}: held by {names}{more}{limit}"
            self._refuse(message, Refusal.FULL, text, policy.node_timeout_s)
            return None
        text = f"slot {slot} of worker {lost.node}, lost ({lost.reason}), is free again in {wait_s:.1f} s"
        self._refuse(message, Refusal.COOLING_DOWN, text, max(wait_s, MIN_RETRY_S))
        return None

    def _wait_for_full_house(self, message: Register) -> Seat | None:
        """Make a node whose ID is no slot number wait until all nodes have registered.

        Nothing is written to the journal before.
        """
        ledger, world_size = self._ledger, self._ledger.policy.world_size
        is_new = message.session not in self.pending
        older = self._pending_session.get(message.node)
        if older is not None:
            self.pending.pop(older, None)
        self._pending_session[message.node] = message.session
        self._wait(self.pending, message, ledger.policy.node_timeout_s)
        registered = len(ledger.state.by_slot) + len(self.pending)
        if registered < world_size:
            ledger.ready.send(message.session, Pending(message.session, ledger.state.term, registered, world_size))
            if is_new:
                ledger.ready.say(f"{registered}/{world_size} registered")
            return None
        self.seat_pending()
        return ledger.state.seats[message.node]

    def seat_pending(self) -> None:
        """Assign slots to the waiting nodes, ordered by (host, node id)."""
        ledger = self._ledger
        waiting = sorted(
            (entry.register for entry in self.pending.values()),
            key=lambda register: (_natural(register.process.host), _natural(register.node)),
        )
        free = sorted(set(range(ledger.policy.world_size)) - ledger.state.by_slot.keys())
        self.forget_pending()
        for slot, register in zip(free, waiting, strict=False):  # a node named by a number may have taken one meanwhile
            self._seat(register, slot)

    def forget_pending(self) -> None:
        """Forget all nodes that wait for a slot. They will ask again."""
        self.pending.clear()
        self._pending_session.clear()

    # ---- answers

    def _grant(self, message: Register, slot: int) -> Seat:
        seat = self._seat(message, slot)
        if self.pending and len(self._ledger.state.by_slot) + len(self.pending) >= self._ledger.policy.world_size:
            self.seat_pending()
        return seat

    def _seat(self, message: Register, slot: int, incarnation: int | None = None) -> Seat:
        ledger = self._ledger
        before = ledger.state.seats.get(message.node)
        if incarnation is None:
            incarnation = self._next_incarnation(before)
        ledger.write(SeatGranted(message.node, slot, incarnation, message.session, message.process))
        seat = self._hold(message, before)
        self.welcome(seat)
        registered = ledger.present() + len(self.pending)
        world_size = max(ledger.policy.world_size, registered)
        named = 0 < len(ledger.absent) <= NAMED and not self.pending and ledger.state.final is None
        text = f"{registered}/{world_size} registered: worker {seat.node} ({seat.process}) has slot {slot}"
        if incarnation > 1:
            text += f", incarnation {incarnation}"
        ledger.ready.say(text + (f"; waiting for {ledger.names_of(ledger.absent)}" if named else ""))
        return seat

    def _next_incarnation(self, before: Seat | None) -> int:
        """Return an incarnation higher than any the node can have had, even according to a lost journal."""
        known = 0 if before is None else before.incarnation
        return 1 + max(known, highest_unheard_incarnation(self._ledger.state.term))

    def _has_room_for_spare(self, message: Register) -> bool:
        """Return whether there is room for one more spare, or a replacement takes a lost spare's place."""
        has_room = len(self._ledger.state.spares) < self._ledger.policy.spare_num
        return has_room or self._replacements.returns(message)

    def _admit_spare(self, message: Register, incarnation: int | None = None) -> Seat:
        ledger = self._ledger
        before = ledger.state.seats.get(message.node)
        if incarnation is None:
            incarnation = self._next_incarnation(before)
        ledger.write(SpareAdmitted(message.node, incarnation, message.session, message.process))
        seat = self._hold(message, before)
        ready = f"{len(ledger.state.spares)} of {ledger.policy.spare_num} (SPARE_NUM)"
        if root_of(seat.node) != seat.node:
            ready = f"in place of worker {root_of(seat.node)}"
        text = f"spare {seat.node} ({seat.process}) is here, {ready}"
        ledger.ready.say(text + (f", incarnation {incarnation}" if incarnation > 1 else ""))
        self._give_slots(seat)
        self.welcome(seat)
        return seat

    def _hold(self, message: Register, before: Seat | None) -> Seat:
        """Record that this session holds the granted seat."""
        ledger = self._ledger
        if before is not None:
            ledger.sessions.pop(before.session, None)
        seat = ledger.state.seats[message.node]
        ledger.sessions[seat.session] = seat.node
        self.pending.pop(self._pending_session.pop(seat.node, ""), None)  # drops another waiting process of this node
        if self._replacements.is_proven(message):
            ledger.write(ReplacementShown(seat.node))
        self._leases.begin(seat, heard=True)
        return seat

    def _refuse_spare(self, message: Register) -> None:
        policy, spares = self._ledger.policy, self._ledger.state.spares
        text = f"NODE_ID={message.node} names a spare, and "
        if policy.spare_num == 0:
            text += f"this job has none: the slots are 0..{policy.max_world_size - 1}"
            self._refuse(message, Refusal.FULL, text)
        else:
            text += f"all {policy.spare_num} (SPARE_NUM) are here: {', '.join(list(spares)[:NAMED])}"
            self._refuse(message, Refusal.FULL, text, policy.node_timeout_s)

    def welcome(self, seat: Seat) -> None:
        """Tell the session that it holds the seat."""
        ledger = self._ledger
        ledger.tell(
            seat.node,
            Admitted(
                session=seat.session,
                job=ledger.state.job,
                term=ledger.state.term,
                slot=seat.slot,
                incarnation=seat.incarnation,
                world_size=ledger.policy.world_size,
                finished=ledger.state.final,
                generation=ledger.state.generation_number,
            ),
        )

    def _refuse(self, message: Register, refusal: Refusal, text: str, retry_after_s: float = 0.0) -> None:
        ledger = self._ledger
        ledger.ready.send(message.session, ledger.refusal(message.session, refusal, text, retry_after_s))
        ledger.ready.say(f"refused {message.process} ({refusal.name}): {text}", Severity.WARNING)
        if retry_after_s > 0 and len(self.refused) < MAX_REFUSED + 2 * ledger.policy.world_size:
            self._wait(self.refused, message, retry_after_s + ledger.policy.node_timeout_s)

    def _refuse_cooling_down(self, message: Register, seat: Seat, what: str, wait_s: float) -> None:
        text = (
            f"the last process of {seat.title}, {seat.process}, was lost ({seat.reason}); "
            f"{what} in {wait_s:.1f} s (REGISTER_COOLDOWN={self._ledger.policy.cool_down_s:g})"
        )
        self._refuse(message, Refusal.COOLING_DOWN, text, max(wait_s, MIN_RETRY_S))

    def _wait(self, waiting: dict[str, Waiting], message: Register, for_s: float) -> None:
        until = self._ledger.now + for_s
        waiting[message.session] = Waiting(message, until, for_s)
        self.check_at = until if self.check_at is None else min(self.check_at, until)


def fenced_text(node: str, seat: Seat | None) -> str:
    """Return why a process that wrongly believes it holds the node's seat must exit."""
    if seat is None:
        holder = "unknown to this scheduler"
    elif seat.is_retired:
        holder = "taken away: another node has its slot, or the world continued without it"
    else:
        holder = f"now held by {seat.process}, incarnation {seat.incarnation}"
    return f"the seat of worker {node} is {holder}"


def _slot_named_by(node: str) -> int | None:
    """Return the slot that a numeric node ID stands for, or None. ``07`` is an ordinary name."""
    is_number = len(node) <= MAX_DIGITS and node.isascii() and node.isdigit()
    return int(node) if is_number and str(int(node)) == node else None


def _natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that puts 10.0.0.9 before 10.0.0.10."""
    parts = [part for part in re.split(rf"([0-9]{{1,{MAX_DIGITS}}})", text) if part]
    return tuple((0, int(part)) if part.isascii() and part.isdigit() else (1, part) for part in parts)
