"""Rounds and generations: how members gather and start together (docs/contributors/architecture.md).

Only one round is open at a time, and it covers every loss in the meantime. It closes when all expected members have
joined. The new generation is first written to the journal, then each member is sent its place. A generation's address
map is not durable: members repeat their part until their group is formed, so a restarted scheduler collects it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from samebits.core.ledger import Ledger
from samebits.core.membership.buddies import BuddyPlacement, buddy_placements
from samebits.core.membership.world import World, rank_of_slot
from samebits.core.messages import (
    AddressMap,
    GenerationStarted,
    Holdings,
    Join,
    Pairs,
    Publish,
    RankPosition,
    Refusal,
    Register,
    RoundId,
    RoundOpened,
)
from samebits.core.point import Point
from samebits.core.ready import Severity
from samebits.core.records import GenerationCommitted, SeatLeft
from samebits.core.restore import (
    Restore,
    choose_restore_point,
    differing,
    drop_doubtful_points,
    lost_progress,
    lost_steps,
    must_look,
)
from samebits.core.state import JobState, Seat, next_line
from samebits.core.values import replace
from samebits.printable import counted

LEAVE_TOGETHER_S = 1.0
"""Seconds that members have to leave a generation at a commit after the first member has left.

A member that has not left by then cannot reach its next commit.
"""

MOST_FAILURES = 8
"""Most generations in a row that the runtime's own error may end at one restore point.

A permanent error of this kind is not the fault of a network or host.
"""

RESTARTED_WITHIN_S = 10.0
"""Seconds in which a launcher usually brings a killed worker back."""

SHARDED_FIX = (
    "Fix: run `samebits recover` on the lost worker's host, or start that worker on another host; to train with fewer "
    "ranks, stop the job, export a step of all ranks with `samebits ckpt export SLOT/STEP DIR --format dcp`, and start "
    "a new job that calls samebits.elastic.load_dcp(state, DIR)"
)

CROSSING_S = 0.5
"""Seconds after inviting all members in which a heartbeat may have crossed the invitation."""


@dataclass(slots=True)
class Round:
    """An attempt to form a generation."""

    id: RoundId
    text: str
    opened_at: float
    blames_nobody: bool = False  # opened for a failed collective whose cause is not known yet
    joined: dict[str, Holdings] = field(default_factory=dict)
    came: set[str] = field(default_factory=set)  # nodes that joined, even if more is required of them now
    blobs: dict[str, tuple[bytes, RankPosition | None]] = field(default_factory=dict)
    """Each joined node's part of the address map and the place that it was made for."""
    look: bool = False  # memories do not hold enough: all must read their disks
    gently: bool = False  # the generation continues until its members leave at a commit
    leave_by: float | None = None  # deadline for the others, once a member has left
    told: dict[str, RankPosition | None] = field(default_factory=dict)  # in an elastic world: places as last sent
    version: int = -1  # the ledger's version when the places were sent
    told_at: float = 0.0  # when all were last invited
    invitations: Invitations | None = None  # cached invitations for the round's present state
    numerics: Pairs = ()  # of the member that joined last
    failed_with: dict[str, str] = field(default_factory=dict)  # by node: the runtime error that ended its generation
    is_explained: bool = False  # the remedy for a sharded world that lacks a member was announced


@dataclass(slots=True)
class Invitations:
    """Invitations to one round, cached because thousands of them are nearly identical."""

    alike: RoundOpened  # without incarnation and place
    made: dict[tuple[int, RankPosition | None], RoundOpened] = field(default_factory=dict)

    def to(self, incarnation: int, place: RankPosition | None) -> RoundOpened:
        """Return the invitation for this incarnation and place."""
        message = self.made.get((incarnation, place))
        if message is None:
            same = self.alike
            message = self.made[incarnation, place] = RoundOpened(
                same.job,
                same.term,
                incarnation,
                same.round,
                same.text,
                same.missing,
                place,
                same.look,
                same.gently,
                same.committed,
                same.back_to,
            )
        return message


class Rendezvous:
    """Opens and closes rounds, starts generations and distributes their address maps."""

    def __init__(self, ledger: Ledger, world: World) -> None:
        self._ledger = ledger
        self._world = world
        self._rounds_opened = 0
        self.round: Round | None = None
        self._restore: Restore | None = None  # of the last generation committed in this term
        self._blobs: dict[int, bytes] = {}
        self._placed: tuple[int, Sequence[BuddyPlacement]] = (0, ())  # generation, and its members' placements
        self.is_held = False  # a decision is pending that the open round has to wait for
        self.has_no_way_back = False  # no point is left that the members may return to
        self.points_lost = ""  # why training must not restart from step 0
        self._failures = 0  # generations in a row that the runtime's own errors ended
        self.in_vain = ""  # why another generation would fail in the same way; "": it may succeed

    # ---- rounds

    def open(self, reason: str, *, blames_nobody: bool = False, gently: bool = False) -> None:
        """Open a round and ask every live member to leave its generation and join."""
        ledger = self._ledger
        self._rounds_opened += 1
        self._restore, self._blobs, self._world.has_begun = None, {}, True
        round_id = RoundId(ledger.state.term, self._rounds_opened)
        self.round = Round(round_id, reason, ledger.now, blames_nobody, gently=gently)
        ledger.ready.say(f"round {self.round.id} opened: {reason}")
        self._invite_all()

    def is_urgent(self) -> bool:
        """Return whether a round is open for which members must leave their generation before its next commit."""
        return self.round is not None and not self.round.gently

    def blame(self, reason: str, *, breaks: bool) -> None:
        """Tell waiting members, once, about a loss. If it ``breaks`` the generation, tell training members, too."""
        if breaks:
            self.harden(reason)
        if self.round is not None and self.round.blames_nobody:
            self.round.text, self.round.blames_nobody = reason, False
            self._invite_all_again()

    def harden_if_stuck(self) -> None:
        """Make a gentle round urgent if other members wait in a collective for members that have left."""
        round_ = self.round
        if round_ is not None and round_.leave_by is not None and round_.leave_by <= self._ledger.now:
            self.harden("the others have left the generation at a commit")

    def harden(self, reason: str) -> None:
        """Make a gentle round urgent, because its generation cannot reach its next commit."""
        if self.round is not None and self.round.gently:
            self.round.text, self.round.gently, self.round.leave_by = reason, False, None
            self.round.opened_at = self._ledger.now
            self._ledger.ready.say(f"round {self.round.id} does not wait for a commit: {reason}")
            self._invite_all_again()

    def begin_again(self, reason: str) -> None:
        """Discard what members have reported in the open round, because all must roll back first."""
        round_ = self.round
        if round_ is None:
            return
        round_.joined.clear()
        round_.blobs.clear()
        if round_.gently:
            self.harden(reason)
        else:
            round_.text = reason
            self._invite_all_again()

    def _invite_all_again(self) -> None:
        """Invite all members now. In an elastic world, wait for ``refresh``, because the round may close."""
        if self.round is not None and self._ledger.policy.is_elastic:
            self.round.told.clear()
            self.round.version = -1
        else:
            self._invite_all()

    def _invite_all(self) -> None:
        if self.round is not None:
            self.round.version, self.round.told_at = self._ledger.version, self._ledger.now
            self._invite(self.round, self._ledger.live_seats())

    def refresh_at(self) -> float | None:
        """Return the current time if ``refresh`` is due, or None.

        Losses in one batch of messages are announced together.
        """
        ledger, round_ = self._ledger, self.round
        is_due = round_ is not None and round_.version != ledger.version and ledger.policy.is_elastic
        return ledger.now if is_due else None

    def refresh(self) -> None:
        """Close the round if all present members have joined; otherwise, send members their changed places."""
        ledger, round_ = self._ledger, self.round
        if round_ is None or self.refresh_at() is None:
            return
        round_.version = ledger.version
        if self._world.is_complete(round_.joined):
            self._close(round_)
            return
        seats = [(seat, self._world.place_of(seat.slot)) for seat in ledger.live_seats() if seat.slot is not None]
        # A worker whose shard group is incomplete has no place. It is sent the names of the missing workers.
        self._invite(round_, [seat for seat, place in seats if place is None or place != round_.told.get(seat.node)])

    def remind(self, seat: Seat) -> bool:
        """Invite a member that seems not to know of the round. Return False if it is too early to tell."""
        has_crossed = self.round is not None and self._ledger.now < self.round.told_at + CROSSING_S
        if not has_crossed:
            self.invite(seat)
        return not has_crossed

    def invite(self, seat: Seat) -> None:
        """Invite one member to the open round (again)."""
        if self.round is not None:
            self._invite(self.round, [seat])

    def _invite(self, round_: Round, seats: Sequence[Seat]) -> None:
        ledger, world = self._ledger, self._world
        invitations, is_elastic = self._invitations(round_), ledger.policy.is_elastic
        for seat in seats:
            if seat.slot is None or not world.is_awaited(seat.slot):
                continue
            # In a world of fixed size a former member's place does not change.
            place = world.place_of(seat.slot) if is_elastic or self.rank_of(seat) is None else None
            if is_elastic:
                round_.told[seat.node] = place
            ledger.tell_holder(seat, invitations.to(seat.incarnation, place))

    def _invitations(self, round_: Round) -> Invitations:
        state = self._ledger.state
        alike = RoundOpened(
            job=state.job,
            term=state.term,
            incarnation=0,
            round=round_.id,
            text=round_.text,
            missing=self._missing(),
            look=round_.look,
            gently=round_.gently,
            committed=state.committed_point if round_.look else None,
            back_to=state.back_to,
        )
        if round_.invitations is None or round_.invitations.alike != alike:
            round_.invitations = Invitations(alike)
        return round_.invitations

    def _missing(self) -> str:
        """Return a text with the missing nodes, and how long an elastic world waits for them."""
        ledger, policy = self._ledger, self._ledger.policy
        names = ledger.names_of(ledger.absent)
        if not (names and policy.is_elastic):
            return names
        return names + (self._world.shortage() or f", at most {policy.shrink_grace_s:g} s (shrink in GRACE)")

    def forget(self, node: str) -> None:
        """Remove a lost or departed node from the open round."""
        if self.round is not None:
            self.round.came.discard(node)
            self.round.told.pop(node, None)
            self.round.joined.pop(node, None)
            self.round.blobs.pop(node, None)

    def join(self, seat: Seat, message: Join) -> None:
        """Add a member to the open round. The last one to join completes the generation."""
        ledger, round_ = self._ledger, self.round
        if round_ is None or message.round != round_.id or seat.slot is None:
            self._join_late(seat, message)
            return
        committed, back_to = ledger.state.generation, ledger.state.back_to
        holdings = message.holdings
        if back_to is not None and holdings.back_to != back_to:
            return  # sent before the member knew of the rollback
        if committed is not None and committed.numerics and holdings.numerics != committed.numerics:
            self._refuse_numerics(seat, holdings.numerics, committed.numerics, "the job")
            return
        if holdings.numerics != round_.numerics:  # all send equal numerics: one copy is kept
            round_.numerics = holdings.numerics
        round_.came.add(seat.node)
        if holdings.failed_with:
            round_.failed_with[seat.node] = holdings.failed_with
        if holdings.blob:
            round_.blobs[seat.node] = (holdings.blob, holdings.place)
        round_.joined[seat.node] = replace(holdings, numerics=round_.numerics, blob=b"", failed_with="")
        if round_.gently and round_.leave_by is None and self.rank_of(seat) is not None:
            round_.leave_by = ledger.now + LEAVE_TOGETHER_S
        self._world.expect_now(seat.slot)
        self._world.learn_mesh(holdings.sharding)
        self._close_if_complete(round_)

    @property
    def joined(self) -> int:
        """Return how many members have joined the open round."""
        return 0 if self.round is None else len(self.round.joined)

    def waits_for(self) -> str:
        """Return a text with the nodes that the open round waits for."""
        ledger, round_ = self._ledger, self.round
        slots = {*self._world.members(), *ledger.absent}
        return ledger.names_of(
            {slot for slot in slots if round_ is None or ledger.state.by_slot.get(slot) not in round_.joined}
        )

    def shift(self, gap_s: float) -> None:
        """Extend the open round's deadlines by the length of a pause of the scheduler."""
        now, round_ = self._ledger.now, self.round
        if round_ is not None:
            round_.opened_at = min(round_.opened_at + gap_s, now)
            if round_.leave_by is not None:
                round_.leave_by = min(round_.leave_by + gap_s, now + LEAVE_TOGETHER_S)

    def explains_at(self) -> float | None:
        """Return when to explain why members wait for a lost rank of a sharded state, or None.

        Before that, its process may still be restarted without help from a user.
        """
        round_, policy = self.round, self._ledger.policy
        if round_ is None or round_.gently or round_.is_explained or not self._ledger.absent:
            return None
        if self._world.shrink_deadline() is not None:
            return None  # it continues without them
        return round_.opened_at + max(policy.cool_down_s, RESTARTED_WITHIN_S) if self.is_sharded else None

    def explain(self) -> None:
        """Announce, once per round, that a sharded state needs all its ranks, and what to do if one is missing."""
        due = self.explains_at()
        if self.round is None or due is None or due > self._ledger.now:
            return
        self.round.is_explained = True
        ledger, policy = self._ledger, self._ledger.policy
        ledger.announce(
            f"the state is sharded over {policy.world_size} ranks, so training continues only with worker "
            f"{ledger.names_of(ledger.absent)}. The others keep their state and wait at most "
            f"{policy.topo_timeout_s:g} s (TOPO_TIMEOUT). {SHARDED_FIX}"
        )

    @property
    def is_sharded(self) -> bool:
        """Return whether a member of the open round holds a part of a sharded state."""
        return self.round is not None and any(one.sharding is not None for one in self.round.joined.values())

    def timed_out(self) -> bool:
        """Return whether the open round has been waiting for TOPO_TIMEOUT."""
        deadline = self.deadline() if self.is_urgent() else None
        return deadline is not None and deadline <= self._ledger.now

    def deadline(self) -> float | None:
        """Return when the open round times out or becomes urgent, or None."""
        if self.round is None or (not self._ledger.policy.recovery and not self.round.joined):
            return None  # with recovery off, a script may never enter elastic.run
        if self.round.gently:
            return self.round.leave_by  # the generation trains and reaches its next commit in its own time
        return self.round.opened_at + self._ledger.policy.topo_timeout_s

    def _close_if_complete(self, round_: Round) -> None:
        if self._world.is_complete(round_.joined):
            self._close(round_)

    def _close(self, round_: Round) -> None:
        ledger, state = self._ledger, self._ledger.state
        if self.is_held:
            return
        slots = tuple(self._world.members())
        seats = [state.seats[state.by_slot[slot]] for slot in slots]
        by_rank = {rank: round_.joined[seat.node] for rank, seat in enumerate(seats)}
        if state.is_in_doubt:
            by_rank = drop_doubtful_points(by_rank, state.known_point)
        suspects: set[int] = set()
        if state.rolled_back is not None:
            by_rank = drop_doubtful_points(by_rank, state.rolled_back.to)
            named = set(state.rolled_back.suspects)
            suspects = {rank for rank, seat in enumerate(seats) if (seat.node, seat.incarnation) in named}
        if not self._same_numerics(seats, by_rank) or self._asks_disks(round_, seats, by_rank):
            return
        restore = choose_restore_point(by_rank, state.generation, slots, suspects)
        if restore.point is None and state.rolled_back is not None:
            self.has_no_way_back = True
            return
        self.points_lost = restore.lost or lost_progress(restore.point, state.known_point, by_rank)
        if self.points_lost:
            return
        if state.rolled_back is None and (less := lost_steps(restore.point, state.known_point)):
            ledger.announce(less)
        members = tuple((seat.node, seat.incarnation) for seat in seats)
        if self._is_in_vain(round_, members, restore.point):
            return
        generation, lost = next_generation(state, by_rank.values())
        if lost:
            ledger.announce(lost)
        if state.rolled_back is None:  # after a rollback all begin with equal state
            ledger.witnesses.begin(generation, members, restore.sources)
        ledger.write(
            GenerationCommitted(
                generation=generation,
                round=round_.id,
                members=members,
                restore=restore.point,
                line=next_line(state.generation, restore.point),
                numerics=by_rank[0].numerics,
                slots=slots,
                sharding=self._world.mesh,
            )
        )
        self.round, self._restore = None, restore
        self._blobs = {}
        for rank, seat in enumerate(seats):
            blob, made_for = round_.blobs.get(seat.node, (b"", None))
            if blob and self._is_in_place(made_for, RankPosition(slots[rank], rank, len(slots))):
                self._blobs[rank] = blob
        started = f"generation {state.generation_number} starts with {counted(len(seats), 'worker')}"
        ledger.ready.say(f"{started}; {restore.text}" if restore.text else started)
        self._start_all()
        self._tell_address_map([seat.node for seat in seats])

    def _is_in_vain(self, round_: Round, members: tuple[tuple[str, int], ...], restore: Point | None) -> bool:
        """Return whether too many generations in a row were ended by errors of SameBits itself.

        Only generations without a commit count. A lost process, a broken connection or a commit restarts the count,
        because external causes may pass.
        """
        committed, failed_with = self._ledger.state.generation, next(iter(round_.failed_with.items()), None)
        is_again = committed is not None and committed.members == members and committed.restore == restore
        self._failures = self._failures + 1 if failed_with is not None and is_again else 0
        if failed_with is None or self._failures < MOST_FAILURES:
            return False
        node, error = failed_with
        step = 0 if restore is None else restore.step
        self.in_vain = (
            f"{self._failures} generations in a row ended at step {step} with no process lost, the last by an error of "
            f"worker {node}: {error}"
        )
        return True

    def _is_in_place(self, made_for: RankPosition | None, place: RankPosition) -> bool:
        """Return whether an address that was made for ``made_for`` (None: a full world) is valid for ``place``."""
        default = RankPosition(place.slot, place.slot, self._ledger.policy.world_size)
        return (made_for or default) == place

    def _asks_disks(self, round_: Round, seats: Sequence[Seat], by_rank: dict[int, Holdings]) -> bool:
        """Ask members to read their disks if memories do not hold enough, and return whether any was asked."""
        state = self._ledger.state
        equal = None if state.rolled_back is None else state.rolled_back.to
        if not must_look(by_rank, state.generation, [seat.slot for seat in seats], equal):
            return False
        round_.look = True
        for rank, member in by_rank.items():
            if not member.looked:
                del round_.joined[seats[rank].node]
                round_.blobs.pop(seats[rank].node, None)
                self.invite(seats[rank])
        return True

    def _same_numerics(self, seats: Sequence[Seat], by_rank: dict[int, Holdings]) -> bool:
        same = True
        for rank, member in by_rank.items():
            if member.numerics != by_rank[0].numerics:
                self._refuse_numerics(seats[rank], member.numerics, by_rank[0].numerics, "rank 0")
                same = False
        return same

    def _refuse_numerics(self, seat: Seat, theirs: tuple[tuple[str, str], ...], ours: object, whose: str) -> None:
        ledger = self._ledger
        assert isinstance(ours, tuple)
        text = (
            f"worker {seat.node} would compute different bits than {whose}: {differing(theirs, ours)}. "
            "Start it with the same values"
        )
        ledger.tell(seat.node, ledger.refusal(seat.session, Refusal.NUMERICS, text))
        ledger.ready.say(text, Severity.WARNING)
        ledger.write(SeatLeft(seat.node, seat.incarnation))
        if seat.slot is not None:
            ledger.miss(seat.slot, at_once=True)
        self.forget(seat.node)

    # ---- generations

    def rank_of(self, seat: Seat) -> int | None:
        """Return the seat's rank in the last generation, or None if this incarnation is not a member."""
        committed = self._ledger.state.generation
        rank = None if committed is None or seat.slot is None else rank_of_slot(committed, seat.slot)
        if committed is None or rank is None or committed.members[rank] != (seat.node, seat.incarnation):
            return None
        return rank

    def can_tell(self) -> bool:
        """Return whether a missed GenerationStarted message can be sent again.

        This is not possible after a restart of the scheduler.
        """
        return self._restore is not None

    def start(self, seat: Seat) -> None:
        """Send one member its place in the last generation (again)."""
        rank = self.rank_of(seat)
        assert rank is not None
        self._start(rank, seat, self._places())
        self._tell_address_map([seat.node])

    def _start_all(self) -> None:
        committed = self._ledger.state.generation
        assert committed is not None
        places, seats = self._places(), self._ledger.state.seats
        for rank, (node, _) in enumerate(committed.members):
            self._start(rank, seats[node], places)

    def _places(self) -> Sequence[BuddyPlacement]:
        """Return the members' placements in the last generation, by rank."""
        committed = self._ledger.state.generation
        assert committed is not None
        if self._placed[0] != committed.generation:
            hosts = [self._ledger.process_of(node).host for node, _ in committed.members]
            self._placed = (committed.generation, buddy_placements(hosts))
        return self._placed[1]

    def _start(self, rank: int, seat: Seat, places: Sequence[BuddyPlacement]) -> None:
        ledger, restore, place = self._ledger, self._restore, places[rank]
        committed = ledger.state.generation
        assert committed is not None and restore is not None
        ledger.tell_holder(
            seat,
            GenerationStarted(
                job=ledger.state.job,
                term=ledger.state.term,
                incarnation=seat.incarnation,
                generation=committed.generation,
                round=committed.round,
                rank=rank,
                world_size=len(committed.members),
                local_rank=place.local_rank,
                local_world_size=place.local_world_size,
                restore=restore.point,
                source=restore.source_of(rank),
                serves=restore.served_by(rank),
                text=restore.text,
                slot=committed.slots[rank],
                lends=restore.lent_by(rank),
                watches=place.watches,
                by_page=rank in restore.by_page,
                page_loans=restore.page_loans,
                buddy=place.buddy,
                is_apart=place.is_apart,
                keeps=tuple(committed.slots[other] for other in place.keeps),
            ),
        )

    def _join_late(self, seat: Seat, message: Join) -> None:
        """Accept the address of a member whose earlier join, for a different place, has closed the round."""
        committed, rank = self._ledger.state.generation, self.rank_of(seat)
        if committed is None or rank is None or message.round != committed.round or not message.holdings.blob:
            return
        if self._is_in_place(message.holdings.place, RankPosition(committed.slots[rank], rank, len(committed.slots))):
            self.publish(seat, Publish(message.sender, committed.generation, message.holdings.blob))

    def publish(self, seat: Seat, message: Publish) -> None:
        """Store a member's address. When the last one has arrived, send the address map to all members."""
        committed = self._ledger.state.generation
        rank = self.rank_of(seat)
        if self.round is not None or committed is None or rank is None or message.generation != committed.generation:
            return
        is_new = self._blobs.get(rank) != message.blob
        self._blobs[rank] = message.blob
        self._tell_address_map([node for node, _ in committed.members] if is_new else [seat.node])

    def _tell_address_map(self, nodes: Sequence[str]) -> None:
        """Send these members the address map if it is complete."""
        ledger, committed = self._ledger, self._ledger.state.generation
        assert committed is not None
        if len(self._blobs) < len(committed.members):
            return
        blobs = tuple(self._blobs[rank] for rank in range(len(committed.members)))
        message = AddressMap(ledger.state.job, ledger.state.term, committed.generation, blobs)
        for node in nodes:
            ledger.tell(node, message)


# ---- a journal that has lost its last records, which only the job's workers can reveal
#
# A journal that was cut at the end of a record looks intact. But generations and incarnations only increase, and a
# worker learns a number only after it is durable. A worker that knows a higher number than the journal therefore proves
# that records are missing. They are not restored, but the next generation gets an unused number.

MOST_NUMBER = 2**40
"""Upper limit for generations and incarnations that a job can reach."""
_LOST = (
    "the journal's last records are gone (its file was cut at a record's end, or an older one was put back); what it "
    "does not know of is left behind"
)
_FIX = (
    "Fix: while these workers live, end the scheduler, move the file `journal` out of RECOVERY_PATH and start the "
    "scheduler again: a majority of them brings the job back"
)


def told_more(message: Register, state: JobState) -> str:
    """Return a warning if a worker knows of more than the journal contains, otherwise ""."""
    if not message.job or message.job != state.job:
        return ""
    seat, standing = state.seats.get(message.node), message.standing
    if standing is not None and state.generation_number < standing.generation < MOST_NUMBER:
        knows, holds = f"generation {standing.generation}", f"generation {state.generation_number}"
    elif seat is not None and seat.incarnation < message.incarnation < MOST_NUMBER:
        knows, holds = f"its incarnation {message.incarnation}", f"incarnation {seat.incarnation} of it"
    else:
        return ""
    return f"worker {message.node} ({message.process}) knows of {knows}, and the journal of {holds}: {_LOST}. {_FIX}"


def next_generation(state: JobState, joined: Iterable[Holdings]) -> tuple[int, str]:
    """Return an unused generation number, and a warning if the journal lacks generations.

    If a number were reused, points of a generation missing from the journal could be mistaken for points of the new
    one, and ranks could load different points.
    """
    held = {point.generation for one in joined for point in (*one.points, *(copy.point for copy in one.copies))}
    held |= {kept.point.generation for one in joined for kept in one.kept}
    held |= {one.live.generation for one in joined if one.live is not None}
    newest = max((number for number in held if number < MOST_NUMBER), default=0)
    if newest < state.next_generation:
        return state.next_generation, ""
    return newest + 1, f"there are points of generation {newest}, and the journal ends before it: {_LOST}"
