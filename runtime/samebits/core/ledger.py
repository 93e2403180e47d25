"""State shared by the parts of the scheduler's core: the durable state, the workers' liveness, and the step's Ready.

Only ``write`` changes durable state. It adds the record to the Ready and applies it at once, so the two cannot differ.
Only ``miss``, ``meet`` and ``clear_absent`` change which slots are missing. Values that every message needs, such as
the number of present slots, are updated incrementally, because counting ten thousand slots for each of ten thousand
messages would be too slow.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from samebits.core.causes.table import DEFAULT, CauseTable, LossDetection
from samebits.core.hangs import Hang, ProcessState
from samebits.core.messages import (
    Activity,
    Depart,
    FromScheduler,
    Pairs,
    Process,
    ProcessEnded,
    Refusal,
    Refused,
    RoundId,
)
from samebits.core.ready import Ready, Send, Severity
from samebits.core.records import GenerationCommitted, Record, SeatGranted, SeatRetired, SlotGiven
from samebits.core.reports import Figure
from samebits.core.state import JobState, Seat

Member: TypeAlias = tuple[str, int]
"""A node and its incarnation."""

MOST_GENERATIONS = 64
"""Number of recent generations that are remembered."""


class Witnesses:
    """Tracks which ranks copied their state from which other rank, since this scheduler started.

    A rank that has copied its state is not an independent witness of what the state should be. After a restart of the
    scheduler, every rank counts as independent.
    """

    def __init__(self) -> None:
        self._took: dict[int, Mapping[Member, Member]] = {}  # by generation: receiver → source

    def begin(self, generation: int, members: Sequence[Member], sources: Mapping[int, int]) -> None:
        """Record that a generation begins, and which ranks copy their state from another rank.

        Args:
            generation: the generation's number.
            members: the generation's members, by rank.
            sources: maps each rank that copies its state to the rank from which it copies.
        """
        self._took[generation] = {members[rank]: members[source] for rank, source in sources.items()}
        self._took.pop(generation - MOST_GENERATIONS, None)

    def origins(self, members: Sequence[Member], since: int) -> dict[int, Member]:
        """Return, for each rank, the member whose state it has.

        Only copies made after generation ``since`` count; a rank without such a copy has its own state.
        """
        origins: dict[Member, Member] = {}
        for _, took in sorted(one for one in self._took.items() if one[0] > since):
            origins |= {member: origins.get(source, source) for member, source in took.items()}
        return {rank: origins.get(member, member) for rank, member in enumerate(members)}


NAMED = 12  # most nodes that a sentence names; the others are only counted
MOST_NOTICES = 16
"""Most notices in a status. A follower that missed more finds the older ones in the history."""


class Trust(enum.Enum):
    """Which ranks are trusted if ranks that should be equal differ (CONSISTENCY)."""

    MAJORITY = "majority"
    LEADER = "leader"  # rank 0
    STOP = "stop"  # no rank: the job ends


@dataclass(frozen=True, slots=True)
class Policy:
    """The job's fixed settings on which decisions depend. Durations are in seconds.

    Without explicit limits, ``min_world_size`` and ``max_world_size`` equal ``world_size``, so the size is fixed.
    """

    world_size: int
    job_name: str
    settings: Pairs
    recovery: bool = True
    cool_down_s: float = 30.0
    node_timeout_s: float = 5.0
    heartbeat_interval_s: float = 1.0
    reconnect_grace_s: float = 0.5
    search_s: float = 0.0  # how long a worker may try other addresses of the scheduler before this one
    topo_timeout_s: float = 1800.0
    rebuild: bool = True  # an empty journal from live workers
    min_world_size: int = 0
    max_world_size: int = 0
    spare_num: int = 0
    start_grace_s: float = 30.0
    shrink_grace_s: float = 10.0
    reset_limit: int = 0  # generations beyond the first; 0: no limit
    job: str = ""  # the id that the launcher gave the job; "": this scheduler was started by hand
    token: bytes = field(default=b"", repr=False)  # the token of the job's launcher; b"": none, or unknown here
    restarts: bool = True  # whether the job's launcher restarts dead processes
    watches: bool = True  # whether to watch members for progress
    step_timeout_s: float | None = None  # the longest time without a step; None: learned
    ends_stuck: bool = True  # False: hung members are only reported
    straggler_factor: float | None = 1.2  # ratio to the median above which a worker is slow; None: no comparison
    swaps_stragglers: bool = False  # replaces them by spares; False: stragglers are only reported
    causes: CauseTable = field(default=DEFAULT, repr=False)
    trust: Trust = Trust.STOP  # which ranks are trusted if they differ

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_world_size", self.min_world_size or self.world_size)
        object.__setattr__(self, "max_world_size", self.max_world_size or self.world_size)

    @property
    def is_elastic(self) -> bool:
        """Return whether the world's size may change."""
        return self.min_world_size < self.max_world_size


@dataclass(slots=True)
class Liveness:
    """Volatile facts about a seated node."""

    lease_until: float
    heard_at: float | None = None  # None: no message in this term
    closed_at: float | None = None  # when the connection closed; None while it is open
    grace_until: float | None = None  # deadline for the node to connect again
    activity: Activity = Activity.SEATED
    generation: int = 0
    round: RoundId | None = None
    step: int = 0
    last_words: str = ""
    ended: ProcessEnded | None = None  # its launcher's report of its end, if no message has arrived since
    noticed_by: LossDetection | None = None  # how its loss was noticed, if nothing else is known about it
    status_by: float | None = None  # after its script has left: deadline for its launcher to report the exit status
    is_gone: bool = False  # it announced its end or its process was seen dead: messages that still arrive are outdated
    process_state: ProcessState | None = None  # the process state seen while it was silent
    seen_at: float = 0.0
    figures: tuple[Figure, ...] = ()  # its measurements
    hang: Hang | None = None  # why it has to give up its seat
    avoids_host: bool = False  # its loss or departure is the fault of its host or device

    def hear(self, now: float, policy: Policy) -> None:
        """Renew the lease when a message of this session is accepted."""
        self.heard_at, self.lease_until = now, now + policy.node_timeout_s

    def current_process_state(self) -> ProcessState | None:
        """Return the process state that was observed after the last message, or None."""
        return self.process_state if self.seen_at > (self.heard_at or 0.0) else None


@dataclass(slots=True)
class Ledger:
    """State shared by the parts of one scheduler core. ``ready`` and ``now`` are new in every step."""

    policy: Policy
    state: JobState
    boot_id: str
    loaded_at: float
    now: float
    ready: Ready = field(default_factory=Ready)
    presences: dict[str, Liveness] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)  # session → node, for seats
    absent: dict[int, float] = field(default_factory=dict)
    """Expected slots without a live holder → the time until which an elastic world waits for one."""
    vacated: set[int] = field(default_factory=set)
    """Slots in ``absent`` with a holder that is not believed to be alive."""
    witnesses: Witnesses = field(default_factory=Witnesses)
    notices: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=MOST_NOTICES))
    """The latest warnings for followers, each with its number in this term, from 1."""
    version: int = 0  # version of the set of present slots; incremented at every change
    _in_order: list[int] = field(default_factory=list)  # ``absent``, ascending, possibly with stale slots
    _absent_names: tuple[tuple[int, int], str] = ((-1, -1), "")  # cached for this version and record count
    _written: int = 0

    def write(self, record: Record) -> None:
        """Record a decision in the Ready, which makes it durable, and apply it."""
        self.ready.records.append(record)
        if isinstance(record, GenerationCommitted):
            for node in self.state.superseded(record):
                self.presences.pop(node, None)
                self.sessions.pop(self.state.seats[node].session, None)
        self.state.apply(record)
        self._written += 1
        if isinstance(record, (SeatGranted, SlotGiven, SeatRetired)):
            self._update_vacated(record.slot)

    def announce(self, text: str) -> None:
        """Log a warning and show it once to each follower of the job."""
        self.ready.say(text, Severity.WARNING)
        self.show(text)

    def show(self, text: str) -> None:
        """Show a warning once to each follower of the job."""
        self.notices.append((self.notices[-1][0] + 1 if self.notices else 1, text))

    def tell(self, node: str, message: FromScheduler) -> None:
        """Send a message to the session that holds the node's seat."""
        self.tell_holder(self.state.seats[node], message)

    def tell_holder(self, seat: Seat, message: FromScheduler) -> None:
        """Send a message to the session that holds this seat."""
        if seat.session:  # a seat rebuilt without a report of its holder has no session
            self.ready.sends.append(Send(seat.session, message))

    def refusal(self, session: str, refusal: Refusal, text: str, retry_after_s: float = 0.0) -> Refused:
        """Return the refusal for a session. With ``retry_after_s`` 0, waiting cannot help."""
        return Refused(session, refusal, retry_after_s, text, self.state.job, self.state.term)

    def miss(self, slot: int, *, at_once: bool = False) -> None:
        """Mark an expected slot as missing. With ``at_once``, an elastic world does not wait for it."""
        self.absent[slot] = self.now + (0.0 if at_once else self.policy.shrink_grace_s)
        self.version += 1
        self._update_vacated(slot)
        at = bisect_left(self._in_order, slot)
        if self._in_order[at : at + 1] != [slot]:
            self._in_order.insert(at, slot)

    def meet(self, slot: int) -> None:
        """Mark a slot as held by a live node, or as no longer expected."""
        self.absent.pop(slot, None)
        self._update_vacated(slot)
        if not self.absent:
            self.clear_absent()  # a cleared dict keeps its size, and every invitation would walk it
        self.version += 1

    def clear_absent(self) -> None:
        """Mark no slot as missing."""
        self.absent.clear()
        self.vacated.clear()
        self._in_order.clear()

    def _update_vacated(self, slot: int) -> None:
        if slot in self.absent and slot in self.state.by_slot:
            self.vacated.add(slot)
        else:
            self.vacated.discard(slot)

    def present(self) -> int:
        """Return how many slots have a holder that is considered alive."""
        if not self.policy.is_elastic:
            return self.policy.world_size - len(self.absent)
        return len(self.state.by_slot) - len(self.vacated)

    def is_present(self, node: str) -> bool:
        """Return whether the node has a slot and is considered alive."""
        slot = self.state.seats[node].slot
        return slot is not None and slot not in self.absent

    def live_seats_and_spares(self) -> list[Seat]:
        """Return members and spares that are considered alive."""
        return self.live_seats() + [self.state.seats[node] for node in self.state.spares]

    def live_seats(self) -> list[Seat]:
        """Return the seats whose holder is considered alive, in slot order."""
        by_slot = self.state.by_slot
        return [self.state.seats[by_slot[slot]] for slot in sorted(by_slot) if slot not in self.absent]

    def names_of(self, slots: Collection[int]) -> str:
        """Return the names of the slots' holders for a message, such as ``2, 5, 7``."""
        if slots is not self.absent:
            return self._named(heapq.nsmallest(NAMED, slots), len(slots))
        state = (self.version, self._written)
        if self._absent_names[0] != state:  # cached: after a large loss thousands of messages contain it
            self._absent_names = (state, self._named(self._first_absent(), len(self.absent)))
        return self._absent_names[1]

    def _first_absent(self) -> list[int]:
        """Return the lowest absent slots, and drop outdated entries before them."""
        found: list[int] = []
        passed = 0
        for slot in self._in_order:
            if len(found) == NAMED:
                break
            passed += 1
            if slot in self.absent:
                found.append(slot)
        self._in_order[:passed] = found
        return found

    def _named(self, first: Collection[int], count: int) -> str:
        shown = [self.state.by_slot.get(slot, str(slot)) for slot in first]
        return ", ".join(shown) + (f" and {count - NAMED} more" if count > NAMED else "")

    def process_of(self, node: str) -> Process:
        """Return where the node's present session runs."""
        return self.state.seats[node].process


def ask_to_leave(ledger: Ledger, nodes: Sequence[str], text: str) -> None:
    """Ask the given nodes that hold a live seat to leave, and log ``text`` if it is not empty.

    A worker leaves at its next commit. Requests are not written to the journal. The requester repeats them until the
    node has left, so a request that is lost with a scheduler is only delayed.
    """
    state = ledger.state
    for node in dict.fromkeys(nodes):
        seat = state.seats.get(node)
        if seat is not None and seat.is_held:
            ledger.tell_holder(seat, Depart(state.job, state.term, seat.incarnation, text or "it was asked before"))
    if text:
        ledger.ready.say(text)
