"""What the parts of the scheduler's core share during one step: the durable state, the volatile one, and the Ready.

``write`` is the only way to change durable state: the record goes to the Ready and into the state in one breath, so the
two cannot differ. ``miss``, ``meet`` and ``miss_nobody`` are the only way to change who is missing. What is asked at
every message, as how many are here or who is missing first, is kept up to date instead of being counted: ten thousand
that come back after a loss of all would else be walked through ten thousand times.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from samebits.core.causes.table import DEFAULT, CauseTable, Notice
from samebits.core.hangs import Hang, Sight
from samebits.core.messages import Activity, FromScheduler, Pairs, Process, ProcessEnded, Refusal, Refused, RoundId
from samebits.core.ready import Level, Ready, Send
from samebits.core.records import GenerationCommitted, Record, SeatGranted, SeatRetired, SlotGiven
from samebits.core.reports import Figure
from samebits.core.state import JobState, Seat

Member: TypeAlias = tuple[str, int]
"""A node and its incarnation."""

MOST_GENERATIONS = 64
"""Of the last ones, so many are remembered."""


class Witnesses:
    """Of one scheduler start; one that has just started takes everybody at its own word."""

    def __init__(self) -> None:
        self._took: dict[int, Mapping[Member, Member]] = {}  # by generation: who → from whom

    def begin(self, generation: int, members: Sequence[Member], sources: Mapping[int, int]) -> None:
        """A generation begins, and these ranks become what others send them.

        Args:
            generation: its number.
            members: by rank.
            sources: rank → the rank whose state it takes.
        """
        self._took[generation] = {members[rank]: members[source] for rank, source in sources.items()}
        self._took.pop(generation - MOST_GENERATIONS, None)

    def origins(self, members: Sequence[Member], since: int) -> dict[int, Member]:
        """By rank: whose state it holds, as it was before the first generation behind ``since`` began."""
        origins: dict[Member, Member] = {}
        for _, took in sorted(one for one in self._took.items() if one[0] > since):
            origins |= {member: origins.get(source, source) for member, source in took.items()}
        return {rank: origins.get(member, member) for rank, member in enumerate(members)}


NAMED = 12  # how many nodes a sentence names before it counts the rest
MOST_NOTICES = 16
"""Notices that a status carries; a follower that is away for longer finds the older ones in the history."""


class Mend(enum.Enum):
    """Who is believed where ranks that were equal are not any more (CONSISTENCY)."""

    MAJORITY = "majority"
    LEADER = "leader"  # rank 0
    STOP = "stop"  # nobody: the job ends


@dataclass(frozen=True, slots=True)
class Policy:
    """The job's fixed settings, as far as decisions depend on them. Durations in seconds.

    The bounds of the world are ``world_size`` itself where they are not given: then nothing shrinks or grows.
    """

    world_size: int
    job_name: str
    settings: Pairs
    recovery: bool = True
    cool_down_s: float = 30.0
    node_timeout_s: float = 5.0
    heartbeat_interval_s: float = 1.0
    reconnect_grace_s: float = 0.5
    search_s: float = 0.0  # how long a worker may look for its scheduler at other addresses before it comes here
    topo_timeout_s: float = 1800.0
    rebuild: bool = True  # from living workers, where the journal is empty
    min_world_size: int = 0
    max_world_size: int = 0
    spare_num: int = 0
    start_grace_s: float = 30.0
    shrink_grace_s: float = 10.0
    reset_limit: int = 0  # generations beyond the first; 0: no limit
    job: str = ""  # the id that the launcher gave the job; "": this scheduler was started by hand
    token: bytes = field(default=b"", repr=False)  # of the job's launcher; b"": it has none, or none is known here
    watches: bool = True  # whether members come on
    step_timeout_s: float | None = None  # without a step; None: learned
    ends_stuck: bool = True  # else it is only said who they are
    straggler_factor: float | None = 1.2  # slower than so often the median is slow; None: nobody compares
    swaps_stragglers: bool = False  # for a spare; else it is only said who they are
    causes: CauseTable = field(default=DEFAULT, repr=False)
    mends: Mend = Mend.STOP  # who is believed where the ranks are not equal any more

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_world_size", self.min_world_size or self.world_size)
        object.__setattr__(self, "max_world_size", self.max_world_size or self.world_size)

    @property
    def is_elastic(self) -> bool:
        """Whether the world may have more than one size."""
        return self.min_world_size < self.max_world_size


@dataclass(slots=True)
class Presence:
    """What is known about a seated node and not worth writing down."""

    lease_until: float
    heard_at: float | None = None  # None: not heard in this term
    closed_at: float | None = None  # the connection is closed and has not come back
    grace_until: float | None = None  # until when it may come back
    activity: Activity = Activity.SEATED
    generation: int = 0
    round: RoundId | None = None
    step: int = 0
    last_words: str = ""
    ended: ProcessEnded | None = None  # who started it says how it has ended, and it was not heard since
    noticed_by: Notice | None = None  # of its loss, where nothing tells more of it than that
    status_by: float | None = None  # its script has left, and its launcher has until then to tell the exit status
    is_gone: bool = False  # it said that it ends, or its process was seen dead: what still arrives is old
    sight: Sight | None = None  # what was seen of its process when nothing came from it
    seen_at: float = 0.0
    figures: tuple[Figure, ...] = ()  # that it measures
    hang: Hang | None = None  # for which it was told to give up its seat
    avoids_host: bool = False  # what it is lost of, or leaves for, is its host's or device's

    def hear(self, now: float, policy: Policy) -> None:
        """A message of its session was accepted: its lease begins anew."""
        self.heard_at, self.lease_until = now, now + policy.node_timeout_s

    def sight_now(self) -> Sight | None:
        """What was seen of its process since it was heard last; None where nobody has looked."""
        return self.sight if self.seen_at > (self.heard_at or 0.0) else None


@dataclass(slots=True)
class Ledger:
    """Shared by the parts of one scheduler core; ``ready`` and ``now`` are renewed at every step."""

    policy: Policy
    state: JobState
    boot_id: str
    loaded_at: float
    now: float
    ready: Ready = field(default_factory=Ready)
    presences: dict[str, Presence] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)  # session → node, for seats
    absent: dict[int, float] = field(default_factory=dict)
    """Slots that are expected and have no live holder → until when an elastic world waits for one."""
    vacated: set[int] = field(default_factory=set)
    """Those of ``absent`` that somebody holds, though nobody who is believed alive."""
    witnesses: Witnesses = field(default_factory=Witnesses)
    notices: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=MOST_NOTICES))
    """The latest warnings for followers, each with its number in this term, which starts at 1."""
    version: int = 0  # of who is present: every change counts
    _in_order: list[int] = field(default_factory=list)  # ``absent``, rising, among some that are not absent any more
    _absent_names: tuple[tuple[int, int], str] = ((-1, -1), "")  # of this version and so many records
    _written: int = 0

    def write(self, record: Record) -> None:
        """Decide something durable."""
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
        """Log a warning, and show it once to each follower of the job."""
        self.ready.say(text, Level.WARNING)
        self.notices.append((self.notices[-1][0] + 1 if self.notices else 1, text))

    def tell(self, node: str, message: FromScheduler) -> None:
        """Send to the session that holds the node's seat."""
        self.tell_holder(self.state.seats[node], message)

    def tell_holder(self, seat: Seat, message: FromScheduler) -> None:
        """As :meth:`tell`, where the seat is at hand."""
        if seat.session:  # else the seat was rebuilt without a word of its holder
            self.ready.sends.append(Send(seat.session, message))

    def refusal(self, session: str, refusal: Refusal, text: str, retry_after_s: float = 0.0) -> Refused:
        """What a session is told that is not admitted, or not any more; ``retry_after_s`` 0: waiting cannot help."""
        return Refused(session, refusal, retry_after_s, text, self.state.job, self.state.term)

    def miss(self, slot: int, *, at_once: bool = False) -> None:
        """The slot is expected to be held and is not; ``at_once``: an elastic world need not wait for its holder."""
        self.absent[slot] = self.now + (0.0 if at_once else self.policy.shrink_grace_s)
        self.version += 1
        self._update_vacated(slot)
        at = bisect_left(self._in_order, slot)
        if self._in_order[at : at + 1] != [slot]:
            self._in_order.insert(at, slot)

    def meet(self, slot: int) -> None:
        """The slot has a live holder, or is not expected any more."""
        self.absent.pop(slot, None)
        self._update_vacated(slot)
        if not self.absent:
            self.miss_nobody()  # an emptied dict is still walked at its greatest size, for every invitation
        self.version += 1

    def miss_nobody(self) -> None:
        """Nobody is missing."""
        self.absent.clear()
        self.vacated.clear()
        self._in_order.clear()

    def _update_vacated(self, slot: int) -> None:
        if slot in self.absent and slot in self.state.by_slot:
            self.vacated.add(slot)
        else:
            self.vacated.discard(slot)

    def present(self) -> int:
        """How many slots have a holder who is believed alive."""
        if not self.policy.is_elastic:
            return self.policy.world_size - len(self.absent)
        return len(self.state.by_slot) - len(self.vacated)

    def is_present(self, node: str) -> bool:
        """Whether the node holds a slot and is believed alive."""
        slot = self.state.seats[node].slot
        return slot is not None and slot not in self.absent

    def everybody(self) -> list[Seat]:
        """Members and spares who are believed alive."""
        return self.live_seats() + [self.state.seats[node] for node in self.state.spares]

    def live_seats(self) -> list[Seat]:
        """Seats with a slot whose holder is believed alive, by slot."""
        by_slot = self.state.by_slot
        return [self.state.seats[by_slot[slot]] for slot in sorted(by_slot) if slot not in self.absent]

    def names_of(self, slots: Collection[int]) -> str:
        """The slots' holders, for messages: ``2, 5, 7``."""
        if slots is not self.absent:
            return self._named(heapq.nsmallest(NAMED, slots), len(slots))
        state = (self.version, self._written)
        if self._absent_names[0] != state:  # else thousands are told of thousands, worked out for each
            self._absent_names = (state, self._named(self._first_absent(), len(self.absent)))
        return self._absent_names[1]

    def _first_absent(self) -> list[int]:
        """The lowest slots that are absent; who is passed on the way and is not any more is left out from now on."""
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
        """Where the node's present session runs."""
        return self.state.seats[node].process
