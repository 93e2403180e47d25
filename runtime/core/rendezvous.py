"""Rounds and generations (DESIGN section 6): when the members meet, and what they are told when all are in.

One round is open at a time and takes in every loss that happens meanwhile. It closes when each slot's present holder
has joined; then the generation is written, and only then is anybody told its place. The address map of a generation is
volatile: members repeat their part until their group stands, so a restarted scheduler collects it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.core.ledger import Ledger
from runtime.core.messages import (
    AddressMap,
    GenerationStarted,
    Join,
    Publish,
    Refusal,
    Refused,
    RoundId,
    RoundOpened,
)
from runtime.core.ready import Level
from runtime.core.records import GenerationCommitted, SeatLeft
from runtime.core.restore import Joined, Restore, choose, differing, must_look
from runtime.core.state import Seat, next_line


@dataclass(slots=True)
class Round:
    """An attempt to form a generation."""

    id: RoundId
    text: str
    opened_at: float
    blames_nobody: bool = False  # opened because a collective failed, before it was known whose fault that is
    joined: dict[str, Joined] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)  # of those who joined with their part of the address map
    look: bool = False  # memories do not hold enough: everybody is asked what its disk holds


class Rendezvous:
    """Opens and closes rounds; starts generations and hands out their address maps."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rounds_opened = 0
        self.round: Round | None = None
        self._restore: Restore | None = None  # of the last generation this term committed
        self._blobs: dict[int, bytes] = {}
        self._placed: tuple[int, dict[str, tuple[int, int]]] = (0, {})  # the generation whose places these are

    # ---- rounds

    def open(self, reason: str, *, blames_nobody: bool = False) -> None:
        """A new round: every live member is told to leave its generation and join."""
        ledger = self._ledger
        self._rounds_opened += 1
        self._restore, self._blobs = None, {}
        self.round = Round(RoundId(ledger.state.term, self._rounds_opened), reason, ledger.now, blames_nobody)
        ledger.ready.say(f"round {self.round.id} opened: {reason}")
        self._invite_everybody()

    def blame(self, reason: str) -> None:
        """The cause of the open round is known now: tell those who wait, once."""
        if self.round is not None and self.round.blames_nobody:
            self.round.text, self.round.blames_nobody = reason, False
            self._invite_everybody()

    def _invite_everybody(self) -> None:
        for seat in self._ledger.live_seats():
            self.invite(seat)

    def invite(self, seat: Seat) -> None:
        """Tell one member about the open round (again)."""
        ledger, round_ = self._ledger, self.round
        if round_ is None:
            return
        missing = ledger.names_of(ledger.absent)
        message = RoundOpened(ledger.state.term, seat.incarnation, round_.id, round_.text, missing, look=round_.look)
        ledger.tell(seat.node, message)

    def forget(self, node: str) -> None:
        """The node was lost or left: what it brought into the open round is void."""
        if self.round is not None:
            self.round.joined.pop(node, None)
            self.round.blobs.pop(node, None)

    def join(self, seat: Seat, message: Join) -> None:
        """A member joins the open round; with the last one the generation is committed."""
        ledger, round_ = self._ledger, self.round
        if round_ is None or message.round != round_.id:
            return
        committed = ledger.state.generation
        if committed is not None and committed.numerics and message.numerics != committed.numerics:
            self._refuse_numerics(seat, message.numerics, committed.numerics, "the job")
            return
        round_.joined[seat.node] = Joined(
            seat.incarnation, message.points, message.own_parts, message.numerics, message.live, message.looked
        )
        if message.blob:
            round_.blobs[seat.node] = message.blob
        if len(round_.joined) == ledger.policy.world_size and not ledger.absent:
            self._close(round_)

    def waits_for(self) -> str:
        """Whom the open round waits for."""
        ledger, round_ = self._ledger, self.round
        missing = {
            slot
            for slot in range(ledger.policy.world_size)
            if round_ is None or ledger.state.by_slot.get(slot) not in round_.joined
        }
        return ledger.names_of(missing)

    def timed_out(self) -> bool:
        """Whether the open round has waited TOPO_TIMEOUT."""
        deadline = self.deadline()
        return deadline is not None and deadline <= self._ledger.now

    def deadline(self) -> float | None:
        """When the open round has waited long enough."""
        if self.round is None or (not self._ledger.policy.recovery and not self.round.joined):
            return None  # with recovery off a script may never enter elastic.run: nobody waits in this round
        return self.round.opened_at + self._ledger.policy.topo_timeout_s

    def _close(self, round_: Round) -> None:
        ledger, state = self._ledger, self._ledger.state
        by_rank = {slot: round_.joined[node] for slot, node in sorted(state.by_slot.items())}
        if not self._same_numerics(by_rank) or self._asks_disks(round_, by_rank):
            return
        restore = choose(by_rank, state.generation)
        members = tuple((node, state.seats[node].incarnation) for _, node in sorted(state.by_slot.items()))
        ledger.write(
            GenerationCommitted(
                generation=state.generation_number + 1,
                round=round_.id,
                members=members,
                restore=restore.point,
                line=next_line(state.generation, restore.point),
                numerics=by_rank[0].numerics,
            )
        )
        self.round, self._restore = None, restore
        self._blobs = {rank: round_.blobs[node] for rank, (node, _) in enumerate(members) if node in round_.blobs}
        ledger.ready.say(f"generation {state.generation_number} starts with {len(members)} workers; {restore.text}")
        self._start_everybody()
        self._tell_address_map([node for node, _ in members])

    def _asks_disks(self, round_: Round, by_rank: dict[int, Joined]) -> bool:
        """Where memories do not hold enough, the round goes on with those who have looked at their disks."""
        if not must_look(by_rank, self._ledger.state.generation):
            return False
        round_.look = True
        for rank, member in by_rank.items():
            if not member.looked:
                seat = self._ledger.state.seat_of_slot(rank)
                assert seat is not None, "every rank of a closing round is seated"
                self.forget(seat.node)
                self.invite(seat)
        return True

    def _same_numerics(self, by_rank: dict[int, Joined]) -> bool:
        same = True
        for rank, member in by_rank.items():
            if member.numerics != by_rank[0].numerics:
                seat = self._ledger.state.seat_of_slot(rank)
                assert seat is not None, "every rank of a closing round is seated"
                self._refuse_numerics(seat, member.numerics, by_rank[0].numerics, "rank 0")
                same = False
        return same

    def _refuse_numerics(self, seat: Seat, theirs: tuple[tuple[str, str], ...], ours: object, whose: str) -> None:
        ledger = self._ledger
        assert isinstance(ours, tuple)
        text = (
            f"worker {seat.node} would compute other bits than {whose}: {differing(theirs, ours)}. "
            "Start it with the same values"
        )
        ledger.tell(seat.node, Refused(seat.session, Refusal.NUMERICS, 0.0, text))
        ledger.ready.say(text, Level.WARNING)
        ledger.write(SeatLeft(seat.node, seat.incarnation))
        if seat.slot is not None:
            ledger.absent.add(seat.slot)
        self.forget(seat.node)

    # ---- generations

    def rank_of(self, seat: Seat) -> int | None:
        """The seat's rank in the last committed generation; None where this incarnation is no member."""
        committed = self._ledger.state.generation
        if committed is None or seat.slot is None or seat.slot >= len(committed.members):
            return None
        return seat.slot if committed.members[seat.slot] == (seat.node, seat.incarnation) else None

    def can_tell(self) -> bool:
        """Whether a member that missed its GenerationStarted can still be told; not after a scheduler restart."""
        return self._restore is not None

    def start(self, seat: Seat) -> None:
        """Tell one member its place in the last committed generation (again)."""
        self._start(seat.node, self._places())
        self._tell_address_map([seat.node])

    def _start_everybody(self) -> None:
        committed = self._ledger.state.generation
        assert committed is not None
        places = self._places()
        for node, _ in committed.members:
            self._start(node, places)

    def _places(self) -> dict[str, tuple[int, int]]:
        """(local rank, local world size) of every node: ranks of one host in rank order."""
        committed = self._ledger.state.generation
        assert committed is not None
        if self._placed[0] == committed.generation:
            return self._placed[1]
        hosts = [self._ledger.process_of(node).host for node, _ in committed.members]
        sizes, seen = Counter(hosts), Counter[str]()
        places = {}
        for (node, _), host in zip(committed.members, hosts, strict=True):
            places[node] = (seen[host], sizes[host])
            seen[host] += 1
        self._placed = (committed.generation, places)
        return places

    def _start(self, node: str, places: dict[str, tuple[int, int]]) -> None:
        ledger, restore = self._ledger, self._restore
        committed = ledger.state.generation
        assert committed is not None and restore is not None
        seat = ledger.state.seats[node]
        rank, world_size = self.rank_of(seat), len(committed.members)
        assert rank is not None
        ledger.tell(
            node,
            GenerationStarted(
                term=ledger.state.term,
                incarnation=seat.incarnation,
                generation=committed.generation,
                round=committed.round,
                rank=rank,
                world_size=world_size,
                local_rank=places[node][0],
                local_world_size=places[node][1],
                restore=restore.point,
                source=restore.source_of(rank),
                serves=restore.served_by(rank),
                text=restore.text,
            ),
        )

    def publish(self, seat: Seat, message: Publish) -> None:
        """A member's part of the address map; with the last one everybody gets the whole."""
        committed = self._ledger.state.generation
        rank = self.rank_of(seat)
        if self.round is not None or committed is None or rank is None or message.generation != committed.generation:
            return
        is_new = self._blobs.get(rank) != message.blob
        self._blobs[rank] = message.blob
        self._tell_address_map([node for node, _ in committed.members] if is_new else [seat.node])

    def _tell_address_map(self, nodes: Sequence[str]) -> None:
        """Give these members the whole map, if every part is in."""
        ledger, committed = self._ledger, self._ledger.state.generation
        assert committed is not None
        if len(self._blobs) < len(committed.members):
            return
        blobs = tuple(self._blobs[rank] for rank in range(len(committed.members)))
        for node in nodes:
            ledger.tell(node, AddressMap(ledger.state.term, committed.generation, blobs))
