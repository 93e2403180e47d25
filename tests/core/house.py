"""A scheduler core with a clock that the test sets, for the tests of this folder.

``House`` passes events to a real :class:`SchedulerCore`, keeps every record as a journal would (so that the core can be
restarted from it) and sorts sent messages by session. Nothing is simulated: every message is written in the test.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from samebits.core.ledger import NAMED, Policy
from samebits.core.messages import (
    PROTOCOL,
    Activity,
    Admitted,
    Copy,
    Credential,
    FromScheduler,
    FromWorker,
    GenerationStarted,
    Heartbeat,
    Holdings,
    Join,
    Leave,
    Pairs,
    Process,
    Publish,
    RankPosition,
    Refused,
    Register,
    ReportEnvelope,
    RoundId,
    RoundOpened,
    Sharding,
    StopJob,
)
from samebits.core.point import Point
from samebits.core.ready import JobEnded, Ready
from samebits.core.records import GenerationCommitted, Record
from samebits.core.reports import FINAL, Digest, Digests, LastWords, SavedPoints
from samebits.core.scheduler import Closed, Received, SchedulerCore, SchedulerEvent, SchedulerPaused, Tick
from samebits.core.state import JobState, Seat

JOB_NAME = "train.py"
SETTINGS: Pairs = (("WORKER_NUM", "2"),)
NUMERICS: Pairs = (("threads", "1"), ("torch", "2.13.0"))

M = TypeVar("M")


def policy(world_size: int = 2, **changes: float | bool | str | bytes | Pairs) -> Policy:
    """Return the defaults of docs/reference/variables.md."""
    return Policy(world_size, JOB_NAME, SETTINGS, **changes)  # type: ignore[arg-type]


@dataclass
class House:
    """A scheduler whose journal survives :meth:`crash` and whose clock only moves forward."""

    policy: Policy = field(default_factory=policy)
    now: float = 100.0
    boot_id: str = "boot-1"
    new_job_id: str = "job-1"
    journal: list[Record] = field(default_factory=list)
    core_type: type[SchedulerCore] = SchedulerCore
    ready: Ready = field(default_factory=Ready)
    sent: dict[str, list[FromScheduler]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ended: JobEnded | None = None

    def __post_init__(self) -> None:
        self.load()

    # ---- the scheduler process

    def load(self) -> Ready:
        """Start the scheduler from its journal."""
        state = JobState.replay(self.journal)
        self.core = self.core_type(self.policy, state, now=self.now, boot_id=self.boot_id, new_job_id=self.new_job_id)
        ready = self.core.start()
        return self._take(_both(ready, self.core.step(Tick(), self.now)) if self._is_due() else ready)

    def crash(self, after_s: float = 0.0, *, keep: int | None = None, boot_id: str | None = None) -> Ready:
        """Kill the scheduler and restart it ``after_s`` later with the first ``keep`` records of the journal."""
        del self.journal[len(self.journal) if keep is None else keep :]
        self.now += after_s
        self.boot_id = boot_id or self.boot_id
        return self.load()

    def step(self, event: SchedulerEvent) -> Ready:
        """Apply one event and the Tick that becomes due, as every shell does: rounds open in the Tick."""
        was_due = self._is_due()
        ready = self.core.step(event, self.now)
        return self._take(_both(ready, self.core.step(Tick(), self.now)) if self._is_due() and not was_due else ready)

    def _is_due(self) -> bool:
        wake_at = self.core.wake_at()
        return wake_at is not None and wake_at <= self.now

    def tick(self, after_s: float = 0.0) -> Ready:
        self.now += after_s
        return self.step(Tick())

    def stall(self, gap_s: float) -> Ready:
        """Stop the scheduler for ``gap_s`` while its queue is empty."""
        self.now += gap_s
        self.step(SchedulerPaused(gap_s))
        return self.step(Tick())

    def stop(self, by: str = "the user") -> Ready:
        return self.step(StopJob(by))

    def _take(self, ready: Ready) -> Ready:
        self.ready = ready
        self._compare_counts()
        self.journal += ready.records
        for send in ready.sends:
            self.sent.setdefault(send.session, []).append(send.message)
        self.notes += [note.text for note in ready.notes]
        self.ended = ready.ended or self.ended
        return ready

    def _compare_counts(self) -> None:
        """Check the ledger's incremental counts against a recount."""
        ledger = self.core._ledger
        by_slot, absent = ledger.state.by_slot, ledger.absent
        assert ledger.vacated == absent.keys() & by_slot.keys()
        assert [slot for slot in ledger._in_order if slot in absent] == sorted(absent)
        first = ", ".join(by_slot.get(slot, str(slot)) for slot in sorted(absent)[:NAMED])
        assert ledger.names_of(absent) == first + (f" and {len(absent) - NAMED} more" if len(absent) > NAMED else "")

    # ---- workers

    def receive(self, session: str, message: FromWorker) -> Ready:
        return self.step(Received(session, message))

    def close(self, session: str, *, gone: bool = False) -> Ready:
        return self.step(Closed(session, gone))

    def register(self, node: str, session: str = "", **changes: object) -> Ready:
        """Send a Register for this node's session (by default ``s<node>``) with the job's settings."""
        session = session or f"s{node}"
        values: dict[str, object] = {
            "protocol": PROTOCOL,
            "job": "",
            "job_name": JOB_NAME,
            "node": node,
            "session": session,
            "incarnation": 0,
            "process": Process("host-a", 1000 + len(self.sent), 1, "cpu"),
            "settings": SETTINGS,
        }
        return self.receive(session, Register(**(values | changes)))  # type: ignore[arg-type]

    def credential(self, node: str) -> Credential:
        """Return the credential of the process that holds the node's seat."""
        seat = self.seat(node)
        return Credential(self.core.state.job, node, seat.session, seat.incarnation)

    def beat(
        self,
        node: str,
        activity: Activity = Activity.TRAINING,
        *,
        generation: int | None = None,
        step: int = 0,
        term: int | None = None,
    ) -> Ready:
        """Send a heartbeat of the node's holder, by default for this term and the last generation.

        A worker that is done has reported its digest before.
        """
        state = self.core.state
        number = state.generation_number if generation is None else generation
        credential = self.credential(node)
        if activity is Activity.DONE:
            self.told(node, (step, number), commits=FINAL)
        beat = Heartbeat(credential, state.term if term is None else term, activity, number, None, step)
        return self.receive(credential.session, beat)

    def join(
        self,
        node: str,
        points: Iterable[tuple[int, int]] = (),
        *,
        own_parts: bool = False,
        numerics: Pairs = NUMERICS,
        round_id: RoundId | None = None,
        blob: bytes = b"",
        place: RankPosition | None = None,
        live: tuple[int, int] | None = None,
        looked: bool = True,
        copies: Iterable[tuple[int, tuple[int, int]]] = (),
        failed_with: str = "",
        sharding: Sharding | None = None,
    ) -> Ready:
        credential = self.credential(node)
        asked = round_id or self.last(credential.session, RoundOpened).round
        held = tuple(Point(step, generation) for step, generation in points)
        in_memory = None if live is None else Point(*live)
        kept = tuple(Copy(slot, Point(*point)) for slot, point in copies)
        holdings = Holdings(
            *(held, own_parts, numerics, blob, place, in_memory, looked),
            copies=kept,
            failed_with=failed_with,
            sharding=sharding,
        )
        return self.receive(credential.session, Join(credential, asked, holdings))

    def publish(self, node: str, blob: bytes, generation: int = 1) -> Ready:
        credential = self.credential(node)
        return self.receive(credential.session, Publish(credential, generation, blob))

    def saved(self, node: str, *points: tuple[int, int]) -> Ready:
        """Report that the node's disk holds these (step, generation), with the same digest as on every rank."""
        self.told(node, *points)
        credential = self.credential(node)
        return self.receive(
            credential.session, ReportEnvelope(credential, SavedPoints(tuple(Point(*point) for point in points)))
        )

    def told(self, node: str, *points: tuple[int, int], shared: bytes = b"same", commits: int = 1) -> Ready:
        """Report the digest of the node's state at these (step, generation)."""
        credential = self.credential(node)
        digests = tuple(Digest(Point(*point), commits, shared) for point in points)
        return self.receive(credential.session, ReportEnvelope(credential, Digests(digests)))

    def leave(self, node: str, *, on_purpose: bool = True, text: str = "status 0", status: int | None = 0) -> Ready:
        credential = self.credential(node)
        return self.receive(credential.session, Leave(credential, on_purpose, text, status=status))

    def say_last(self, node: str, text: str, status: int = 0) -> Ready:
        """Send an error of the script as last words, with the exit code of an error of this package."""
        credential = self.credential(node)
        return self.receive(credential.session, ReportEnvelope(credential, LastWords(text, status)))

    # ---- results

    def seat(self, node: str) -> Seat:
        return self.core.state.seats[node]

    def answer(self, session: str, kind: type[M]) -> M:
        """Return the only message of this kind that the last step sent to the session."""
        (found,) = [
            send.message for send in self.ready.sends if send.session == session and isinstance(send.message, kind)
        ]
        return found

    def last(self, session: str, kind: type[M]) -> M:
        """Return the last message of this kind that was sent to the session."""
        return [message for message in self.sent.get(session, []) if isinstance(message, kind)][-1]

    def refusal(self, session: str) -> Refused:
        return self.answer(session, Refused)

    def admission(self, session: str) -> Admitted:
        return self.answer(session, Admitted)

    def records(self, kind: type[M]) -> list[M]:
        """Return the records of this kind that the last step wrote."""
        return [record for record in self.ready.records if isinstance(record, kind)]

    def start_of(self, node: str) -> GenerationStarted:
        return self.last(self.seat(node).session, GenerationStarted)

    def committed(self) -> GenerationCommitted:
        generation = self.core.state.generation
        assert generation is not None
        return generation

    def invited(self) -> dict[str, RoundId]:
        """Return the round of each session that the last step invited."""
        return {send.session: send.message.round for send in self.ready.sends if isinstance(send.message, RoundOpened)}

    # ---- common starting points

    def fill(self) -> House:
        """Register a node for every slot, named by digits."""
        for slot in range(self.policy.world_size):
            self.register(str(slot))
        return self

    def train(self, **points: Iterable[tuple[int, int]]) -> House:
        """Form the next generation of all seated nodes; ``n0=[(step, generation)]`` are node 0's points."""
        nodes = [node for _, node in sorted(self.core.state.by_slot.items())]
        for node in nodes:
            self.join(node, points.get(f"n{node}", ()))
        for node in nodes:
            self.beat(node)
        return self


def training_house(world_size: int = 2, **changes: float | bool | str | bytes | Pairs) -> House:
    """Return a scheduler in its first generation, with nodes named by digits."""
    return House(policy(world_size, **changes)).fill().train()


def _both(first: Ready, second: Ready) -> Ready:
    """Combine two results, as one pass of a shell's loop does."""
    return Ready(
        first.records + second.records,
        first.sends + second.sends,
        first.notes + second.notes,
        first.ended or second.ended,
        first.key_records + second.key_records,
    )
