"""The stage of a scenario: real cores, a network that delivers on command, and a manual clock.

This module has the wire, the two loops and a minimal main thread for each worker; ``scenario_driver.py`` has the
commands. After each command all processes run until none has anything left to send. Each pass works like the real
loops: the scheduler takes in all that has arrived, writes once, then sends; then every worker reads its messages; then
the main threads act.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from samebits.core.agent.agent_core import AgentCore
from samebits.core.agent.agent_events import (
    AgentEvent,
    AgentNotice,
    Began,
    BreakGroup,
    Connected,
    Disconnected,
    EnterAgain,
    Entered,
    Heard,
    LeaveGently,
    Leaving,
    MustEnd,
    Observed,
    Over,
    Passed,
    Trains,
)
from samebits.core.ledger import Policy
from samebits.core.messages import (
    Activity,
    AddressMap,
    Admitted,
    FromWorker,
    Heartbeat,
    Holdings,
    Pairs,
    Process,
    Register,
    ReportEnvelope,
    StopAt,
)
from samebits.core.point import Point
from samebits.core.ready import JobEnded, Ready, Send
from samebits.core.records import Record
from samebits.core.reports import Digests, StopsAfter
from samebits.core.scheduler import Closed, Received, SchedulerCore, SchedulerEvent, Tick
from samebits.core.values import replace
from tests.core.scenario_trace import Trace
from tests.core.scenario_words import notice_line, order_line, record_line, report_line

SCRIPT = "train.py"
HERE = "host-a"  # the scheduler's own host: only there can it see that a process is dead
NUMERICS: Pairs = (("torch", "2.13.0"),)
MOST_PASSES = 100_000  # in one command; beyond that, two processes answer each other forever


@dataclass(eq=False)
class Worker:
    """One process: its agent and the state of its main thread."""

    name: str  # w2 is the first process of node 2, w2' its second; also used as the session
    node: str
    process: Process
    agent: AgentCore
    protocol: int
    is_alive: bool = True
    is_frozen: bool = False
    is_connected: bool = False
    is_cut: bool = False  # off the network
    is_coming: bool = False  # its main thread is about to enter the rendezvous
    is_leaving: bool = False  # it was asked to leave its generation at its next commit
    step: int = 0
    commits: int = 0  # in its generation
    stops_after: int = 0  # the commit after which it stops, or its next one; 0: it was not asked
    is_stop_agreed: bool = False
    addresses: tuple[str, ...] = ()  # the members of the group it builds or trains in
    inbox: deque[AgentEvent] = field(default_factory=deque)
    wake_at: float | None = None
    last_said: dict[type, tuple[object, ...]] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return self.is_alive and not self.is_frozen

    @property
    def can_connect(self) -> bool:
        return self.runs and not self.is_cut and not self.is_connected

    def repeats(self, message: FromWorker) -> bool:
        """Return whether this message repeats the last heartbeat or question."""
        match message:
            case Heartbeat(activity=activity, generation=generation):
                said: tuple[object, ...] = (activity, generation)
            case Register() | ReportEnvelope(_, Digests()):
                said = (message,)
            case _:
                return False
        before = self.last_said.get(type(message), (Activity.SEATED, 0))
        self.last_said[type(message)] = said
        return said == before


class Stage:
    """A scheduler, its journal, its workers by name, and the wire between them."""

    def __init__(self) -> None:
        self._policy = Policy(1, SCRIPT, ())
        self._now = 0.0
        self._journal: list[Record] = []
        self._jobs = 0
        self._core: SchedulerCore | None = None
        self._frozen_since: float | None = None  # applies to the scheduler
        self._wake_at: float | None = None
        self._arrivals: deque[tuple[str, SchedulerEvent]] = deque()  # at the scheduler
        self._workers: dict[str, Worker] = {}
        self._points: dict[str, list[Point]] = {}  # node → points on its disk
        self._held: dict[str, list[tuple[str, Callable[[], None]]]] = {}  # "w2->s" → deliveries held back there
        self._trace = Trace()
        self._repeats = 0

    def _scheduler_gone(self) -> None:
        self._core, self._frozen_since, self._wake_at = None, None, None
        self._arrivals.clear()
        for worker in self._workers.values():
            self._disconnect(worker)

    def _note(self, who: str, text: str) -> None:
        """Add a line of its own to the trace."""
        self._trace.add(self._now, "", who, text)

    # ---- the network

    def _connect_everybody(self) -> None:
        for worker in self._workers.values():
            self._connect(worker)

    def _connect(self, worker: Worker) -> None:
        if self._core is not None and self._frozen_since is None and worker.can_connect:
            worker.is_connected = True
            worker.inbox.append(Connected())

    def _disconnect(self, worker: Worker) -> None:
        if worker.is_alive and worker.is_connected:
            worker.is_connected = False
            worker.inbox.append(Disconnected())

    def _up(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, Register):
            message = replace(message, protocol=worker.protocol)
        if worker.is_connected:
            self._arrive(worker, Received(worker.name, message))

    def _arrive(self, worker: Worker, event: Received | Closed) -> None:
        def arrive() -> None:
            if self._core is not None:
                self._arrivals.append((worker.name, event))

        self._carry(f"{worker.name}->s", event.message if isinstance(event, Received) else event, arrive)

    def _down(self, send: Send) -> None:
        worker = self._workers.get(send.session)
        reaches = worker is not None and worker.is_alive and worker.is_connected
        lost = "" if reaches else " (not delivered)"
        wire = f"s->{send.session}"
        held = " (held)" if wire in self._held else ""
        self._trace.add(self._now, "down", send.session, order_line(send.message) + lost + held)
        if worker is not None and reaches:
            self._carry(wire, send.message, lambda: worker.inbox.append(Heard(send.message)))

    def _carry(self, wire: str, what: object, arrive: Callable[[], None]) -> None:
        if wire in self._held:
            self._held[wire].append((type(what).__name__, arrive))
        else:
            arrive()

    # ---- the loops

    def _settle(self) -> None:
        for _ in range(MOST_PASSES):
            self._trace.next_pass()
            listeners = [worker for worker in self._workers.values() if worker.runs and worker.inbox]
            if self._core is not None and self._frozen_since is None and self._arrivals:
                self._scheduler_pass()
            elif listeners:
                for worker in listeners:
                    for _ in range(len(worker.inbox)):
                        if worker.runs:
                            self._tell(worker, worker.inbox.popleft())
            elif coming := [worker for worker in self._workers.values() if worker.runs and worker.is_coming]:
                for worker in coming:
                    self._enter(worker)
            else:
                return
        raise RuntimeError("the messages of this command never end")

    def _scheduler_pass(self) -> None:
        """Read all messages, judge deadlines, write, send."""
        assert self._core is not None
        readies = []
        while self._arrivals:
            name, event = self._arrivals.popleft()
            ready = self._core.step(event, self._now)
            self._show_arrival(name, event, ready)
            readies.append(ready)
        self._take(readies)

    def _show_arrival(self, name: str, event: SchedulerEvent, ready: Ready) -> None:
        match event:
            case Received(_, message):
                repeats = self._workers[name].repeats(message)
                if repeats and not (ready.records or ready.sends or ready.notes):
                    self._repeats += 1
                else:
                    self._trace.add(self._now, "up", name, report_line(message))
            case Closed(_, gone):
                self._trace.add(self._now, "up", name, "connection closed" + (", process gone" if gone else ""))

    def _take(self, readies: list[Ready]) -> None:
        assert self._core is not None
        last = self._core.step(Tick(), self._now)
        readies.append(last)
        self._wake_at = self._core.wake_at()
        for record in (record for ready in readies for record in ready.records):
            self._journal.append(record)
            self._note("disk", record_line(record))
        for send in (send for ready in readies for send in ready.sends):
            self._down(send)
        for note in (note for ready in readies for note in ready.notes):
            self._note("log", note.text)
        ended = next((ready.ended for ready in readies if ready.ended is not None), None)
        if ended is not None:
            self._leave(ended)

    def _leave(self, ended: JobEnded) -> None:
        self._note("s", f"leaves ({ended.kind.name}): {ended.text}")
        self._scheduler_gone()

    # ---- a worker's process

    def _tell(self, worker: Worker, event: AgentEvent) -> None:
        if not isinstance(event, Passed) and worker.agent.step_count != worker.step:
            self._tell(worker, Passed(worker.step))  # its messages carry the current step
        ready = worker.agent.step(event, self._now)
        worker.wake_at = ready.wake_at
        for message in ready.sends:
            self._up(worker, message)
        for notice in ready.notices:
            text = notice_line(notice)
            if text is not None:
                self._trace.add(self._now, "worker", worker.name, text)
            self._obey(worker, notice)

    def _obey(self, worker: Worker, notice: AgentNotice) -> None:
        match notice:
            case Admitted() | BreakGroup() | EnterAgain():
                worker.is_coming = True
            case LeaveGently():
                worker.is_leaving = True
            case StopAt(commits=commits):
                worker.stops_after = commits or worker.stops_after or worker.commits + 1
                worker.is_stop_agreed = worker.is_stop_agreed or commits > 0
                if not commits:
                    self._tell(worker, Observed(StopsAfter(worker.stops_after)))
                self._stop_if_there(worker)
            case Began(started):
                worker.is_leaving, worker.commits = False, 0
                worker.stops_after, worker.is_stop_agreed = 0, False
                worker.step = started.restore.step if started.restore else 0
            case AddressMap(blobs=blobs):
                worker.addresses = tuple(blob.decode() for blob in blobs)
                self._form(worker.addresses)
            case Over():
                self._tell(worker, Leaving(True, "its program ended with status 0"))
                self._exit(worker)
            case MustEnd():
                self._tell(worker, Leaving(True, "told to end"))
                self._exit(worker)

    def _stop_if_there(self, worker: Worker) -> None:
        """Report that it waits after the agreed commit, if it has made that commit."""
        if worker.is_stop_agreed and worker.commits >= worker.stops_after:
            self._tell(worker, Observed(StopsAfter(worker.stops_after, is_there=True)))

    def _enter(self, worker: Worker) -> None:
        worker.is_coming, worker.addresses = False, ()
        points = tuple(self._points.get(worker.node, ())[-2:])
        self._tell(worker, Entered(Holdings(points, False, NUMERICS, worker.name.encode(), worker.agent.offered_place)))

    def _form(self, addresses: tuple[str, ...]) -> None:
        """Form the group once every member has the same addresses."""
        members = [self._workers[name] for name in addresses]
        if all(member.runs and member.addresses == addresses for member in members):
            for member in members:
                self._tell(member, Trains(member.agent.generation))

    def _exit(self, worker: Worker) -> None:
        """End the process; the close of its connection is the last event."""
        if worker.is_connected:
            self._arrive(worker, Closed(worker.name, gone=worker.process.host == HERE))
        worker.is_alive = worker.is_connected = False
        worker.inbox.clear()
