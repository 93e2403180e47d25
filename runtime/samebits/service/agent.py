"""The worker's control thread: it keeps the seat while the main thread computes, and carries orders between the two.

The thread owns the connection and the agent's core; the main thread calls the methods below, which post an event and,
where they wait, sleep on one condition. Two things happen in the control thread itself, whatever the main thread is
blocked in: the group is broken when a round opens, and a process that must end and does not is ended.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from samebits.config import Settings, fixed_settings
from samebits.core.agent.agent import AgentCore, AgentPolicy
from samebits.core.agent.events import (
    Addressed,
    AgentEvent,
    AgentReady,
    Answered,
    AskedToLeave,
    Began,
    BreakGroup,
    Called,
    CommittedByAll,
    Completed,
    Connected,
    Disconnected,
    EnterAgain,
    Entered,
    Failed,
    FoundEqual,
    GaveUp,
    Heard,
    Invited,
    KeyAsk,
    LeaveGently,
    Leaving,
    Mapped,
    MustEnd,
    Notice,
    Observed,
    Over,
    Passed,
    RefusedByAll,
    SchedulerAway,
    SchedulerBack,
    Seated,
    ToldToWait,
    Trains,
    Waits,
)
from samebits.core.agent.failover import LookElsewhere
from samebits.core.agent.key_calls import MAX_OPEN_CALLS
from samebits.core.ends import EndKind
from samebits.core.messages import Admitted, GenerationStarted, Holdings, KeyAnswer, KeyOp, Place
from samebits.core.point import Point
from samebits.core.reports import (
    MAX_ANOMALY_CHARS,
    Anomaly,
    Digest,
    Digests,
    Figure,
    Figures,
    LastWords,
    PeerGone,
    Progress,
    Report,
    SavedPoints,
    StallReport,
    StepTiming,
)
from samebits.errors import (
    FencedError,
    GenerationEndedError,
    HostsUpdatedInterrupt,
    KeyValueError,
    KeyValueTimeoutError,
    SameBitsError,
    SecretError,
    StuckError,
)
from samebits.net.client import Client, Down, Got, PassedOver, ShutOut, TurnedAway, Up
from samebits.net.curve import cluster_keys
from samebits.printable import printable
from samebits.scheduler_hosts import names_one, shown
from samebits.service import clock, log
from samebits.service.health.device_look import WatchedDevice
from samebits.service.health.host_health import HealthLook
from samebits.service.health.preemption import PreemptionLook
from samebits.service.host import proof_for, this_process
from samebits.service.process_state import DeathWatch, LifeSign, Sightings, Whereabouts
from samebits.store.process_identity import ProcessIdentity

STDERR = 2  # whatever sys.stderr is at the moment, or is not
END_GRACE_S = 5.0  # from MustEnd to the end of a main thread that does not come out by itself
AT_ONCE_S = 0.25  # a seat that is free is given in a few ms
THREADS_S = 5.0  # how long a process may take to end after its script, before its threads are named
LONELY_S = 2.0  # how long a worker looks for its scheduler without a word
MOST_SAID = 64  # different reasons to leave an address, until a scheduler is found
COUNTDOWN_S = 5.0  # how often a process that waits for its seat says how long

_MEMBER_LOST = "a member was lost: this generation is over"

_Found = TypeVar("_Found")


class Agent:
    """One worker's link to its scheduler.

    Args:
        settings: role worker.
        job_name: what a fresh worker is compared by.
        device: device type, told to the scheduler.

    Attributes:
        step: completed optimizer steps; the main thread sets it, heartbeats report it.
        stalled_s: seconds that steps have waited for saves; the main thread adds to it, saved points report it.
        figures: what the script measures, the newest of each; the main thread sets them, heartbeats report them.
        observe: called in the control thread, oftener than it beats: where the main thread stands, if it stands still.
        pace: how long its last steps took; the main thread sets it, each window of steps is said once.
        on_break: called in the control thread when the present group must be left, with the reason.
        interrupted: a round is open (or the process must end): the present generation is over.
        committed_point: the newest restore point that every rank is known to hold on its disk.
        equal_point: the newest at which all ranks are known to have been equal, of those that they keep a copy of.
        keys: the cluster's, where there is a secret.
        is_addressed: the present generation was entered with the part of its address map that belongs there.
        life_sign: what others on this host see this process's death by; None where the kernel has no such thing.
        deaths: watches others; the scheduler is told.
    """

    def __init__(self, settings: Settings, job_name: str, device: str) -> None:
        self.node = settings.node_id or f"{uuid.uuid4().hex[:12]}"
        self.session = uuid.uuid4().hex
        self.step = 0
        self.stalled_s = 0.0
        self.figures: tuple[Figure, ...] = ()
        self._usage: tuple[Figure, ...] = ()
        self.observe: Callable[[], Progress | None] = lambda: None
        self.pace: StepTiming | None = None
        self._reported_pace: StepTiming | None = None
        self._reported_figures = Figures()
        self._observed_at = 0.0
        self.on_break: Callable[[str], None] = lambda _reason: None
        self.interrupted = False
        self._members_change = ""  # why this process is to leave its generation at its next commit
        self.must_end: SameBitsError | None = None
        self._settings = settings
        process = this_process(device)
        policy = AgentPolicy(
            node=self.node,
            session=self.session,
            process=process,
            job_name=job_name,
            settings=fixed_settings(settings),
            job=settings.job_id or "",
            proof=proof_for(settings, self.node, self.session),
            heartbeat_interval_s=settings.heartbeat_interval_s,
            first_beat_s=settings.heartbeat_interval_s * share_of(self.session),
            topo_timeout_s=settings.topo_timeout_s,
            elsewhere_s=None if names_one(settings.sched_host) else settings.node_timeout_s,
        )
        self._core = AgentCore(policy, clock.now_s())
        self._events: collections.deque[AgentEvent] = collections.deque()
        self._changed = threading.Condition()
        self._admitted: Admitted | None = None
        self._began: GenerationStarted | None = None
        self._map: Mapped | None = None
        self._again: EnterAgain | None = None
        self._tickets = itertools.count(1)
        self._key_answers: dict[int, KeyAnswer | None] = {}  # by the ticket of each call under way
        self._generation = 0  # the last that the main thread was told
        self.is_addressed = True
        self.committed_point: Point | None = None
        self.equal_point: Point | None = None
        self._over: Point | None = None
        self._left = False
        self._is_away = False  # the scheduler, since it was last heard
        self._is_invited = False
        self._is_dying = False
        self._closed = threading.Event()
        self._seat_at: float | None = None  # when this process may ask for its seat again
        self._say_at = 0.0
        self._said = ""
        self._said_elsewhere: set[str] = set()  # until a scheduler is found
        self._script_ended_at: float | None = None  # when the main thread was first seen to be over
        self._threads_said = False
        self._lonely_at: float | None = None  # when to say that no scheduler has answered yet
        self._end_at: float | None = None  # when a main thread that must end is not waited for any longer
        self.keys = cluster_keys(settings.cluster_secret, settings.cluster_secret_file)
        host, port = settings.sched_host, settings.sched_port
        self._client = Client(host, port, self.session, settings.node_timeout_s, keys=self.keys)
        self._deaths = DeathWatch(lambda session: self._report(PeerGone(session)))
        self._sightings = Sightings(settings.node_timeout_s)
        self._beside: dict[str, ProcessIdentity] = {}  # whom this process watches, by node
        self.life_sign = LifeSign.if_possible(process.host, self.session)
        self._health = HealthLook(settings, self._report, self._take_usage)
        self._preemption = PreemptionLook.of(settings)
        self._thread = threading.Thread(target=self._run, name="samebits-agent", daemon=True)

    @property
    def offered_place(self) -> Place | None:
        """What this process would be in the generation that the last round it was offered makes."""
        return self._core.offered_place

    @property
    def scheduler_peer(self) -> tuple[str, int] | None:
        """The other end of the connection to the scheduler, as the kernel has it."""
        return self._client.peer

    # ---- what the main thread calls

    def register(self, meanwhile: Callable[[], object] | None = None) -> Admitted:
        """Start, and wait for a seat, saying how long that will take.

        Args:
            meanwhile: called once where the seat is not to be had at once: what this process can do before it has one.

        Raises:
            SameBitsError: the one that says why there will be none.
        """
        self._thread.start()
        self._health.start()
        if self._preemption is not None:
            self._preemption.start()
        if meanwhile is not None:
            with self._changed:
                has_to_wait = not self._changed.wait_for(lambda: self._admitted or self.must_end, AT_ONCE_S)
            if has_to_wait:
                meanwhile()
        return self._wait(lambda: self._admitted)

    def wait_for_round(self) -> None:
        """Wait until the round of the job's first generation is open: everybody else has a seat as well.

        Raises:
            SameBitsError: the process has no place in the job any more.
        """
        self._wait(lambda: self._is_invited or None)

    def report_failure(self) -> None:
        """A collective failed: tell the scheduler at once, before anything slow."""
        self._post(Failed())

    def enter(
        self, holdings: Holdings, again: Callable[[EnterAgain], Holdings] | None = None
    ) -> GenerationStarted | Point:
        """Wait in the rendezvous for a generation; the final point where training is finished.

        Args:
            holdings: what this process brings.
            again: called where the round needs something else of it; not needed by who has looked at its disk.

        Raises:
            SameBitsError: the process has no place in the job any more.
        """
        seen = self._generation
        with self._changed:
            self._began = self._map = self._again = None
        while True:
            if self._over is None and self._began is None:  # else what was asked is settled meanwhile
                self._post(Entered(holdings, seen))
            self._wait(lambda: self._answer() is not None or None)
            answer = self._answer()
            assert answer is not None, "only this thread takes it away"
            if isinstance(answer, GenerationStarted):
                self._generation = answer.generation
            if not isinstance(answer, EnterAgain):
                return answer
            self._again = None
            holdings = holdings if again is None else again(answer)

    def _answer(self) -> Point | GenerationStarted | EnterAgain | None:
        return self._over or self._began or self._again

    def publish(self, generation: int, blob: bytes) -> None:
        """Give this rank's part of the generation's address map."""
        self._post(Addressed(generation, blob))

    def address_map(self, generation: int) -> Sequence[bytes]:
        """Wait for the generation's address map, in rank order.

        Raises:
            GenerationEndedError: the generation is over before it stood.
        """
        found = self._wait(
            lambda: self._map if self._map is not None and self._map.generation == generation else None,
            until_interrupted=True,
        )
        return found.blobs

    def watch_device(self, device: WatchedDevice) -> None:
        """Have this device's health looked at, and told with the host's."""
        self._health.watch_device(device)

    def trains(self, generation: int) -> None:
        """The group stands and the state is restored."""
        self._post(Trains(generation))

    def report_saved(self, points: Sequence[Point]) -> None:
        """Tell the scheduler which points this process's disk holds, rising."""
        self._report(SavedPoints.of(points, self.stalled_s))

    def report_digests(self, digests: Sequence[Digest]) -> None:
        """Tell the scheduler what this process's state was at its commits."""
        self._report(Digests.of(digests))

    def complete(self, generation: int, step: int, digests: Sequence[Digest]) -> Point:
        """The user's function returned and its last commit is durable: wait until that is so on every rank.

        Args:
            generation, step: where.
            digests: as in :meth:`report_digests`, with that of the end.

        Raises:
            GenerationEndedError: a member was lost meanwhile; this rank is needed again.
            UnequalError: the ranks do not end with the same state.
        """
        self.step = step
        self.report_digests(digests)
        self._post(Completed(generation, step))
        return self._wait(lambda: self._over, until_interrupted=True)

    def call_keys(self, ask: KeyAsk, timeout_s: float | None, *, is_wait: bool = False) -> KeyAnswer:
        """Have the scheduler's keys do this, and wait for the answer, however often the scheduler is away meanwhile.

        Args:
            ask: what.
            timeout_s: how long; None: TOPO_TIMEOUT.
            is_wait: it may take as long as others like, so the end of this process's generation ends it, too.

        Raises:
            KeyValueError: too many calls of this process are under way.
            KeyValueTimeoutError: no answer; whether a change was done is not known.
            GenerationEndedError: of a wait.
            SameBitsError: the process has no place in the job any more.
        """
        most_s = self._settings.topo_timeout_s if timeout_s is None else timeout_s
        ticket = next(self._tickets)

        def answer() -> KeyAnswer | None:
            if is_wait and self.interrupted:
                raise self._told_to_end() or GenerationEndedError(_MEMBER_LOST)
            return self._key_answers[ticket]

        with self._changed:
            if not self._thread.is_alive():
                raise KeyValueError(
                    "samebits.kv: this process has left its job, or was forked from a worker. Fix: call it in the "
                    "worker's own process, before it ends"
                )
            if len(self._key_answers) >= MAX_OPEN_CALLS:
                raise KeyValueError(
                    f"samebits.kv: {MAX_OPEN_CALLS} calls of this process are under way, the most there may be. Fix: "
                    "let fewer threads wait, or one for all"
                )
            self._key_answers[ticket] = None
        try:
            self._post(Called(ticket, ask))
            return self._wait(answer, ends_at=clock.now_s() + most_s)
        except TimeoutError:
            key = ask.key.decode(errors="replace")
            raise KeyValueTimeoutError(
                f"samebits.kv: no answer for key {key!r} within {most_s:g} s{_why_silent(ask)}"
            ) from None
        finally:
            with self._changed:
                is_answered = self._key_answers.pop(ticket) is not None
            if not is_answered:
                self._post(GaveUp(ticket))

    def report_oddity(self, step: int, text: str, *, is_verdict: bool = False, comes_again: bool = False) -> None:
        """Tell the scheduler of a number that training cannot have, or what was at fault, for everybody to see."""
        self._report(Anomaly(step, printable(text, MAX_ANOMALY_CHARS), is_verdict, comes_again))

    def watch(self, node: str, at: Whereabouts) -> bool:
        """Tell from now on when this worker of the same host dies, or stands still; false where it cannot be seen."""
        if not self._deaths.watch(at):
            return False
        identity = ProcessIdentity.of(at.pid)
        self._beside = {node: identity} if identity is not None and node and node.isprintable() else {}
        return True

    def speak_last(self, text: str) -> None:
        """Tell the scheduler what this process is about to die of."""
        self._is_dying = True
        self._report(LastWords(text))

    def leave(self, *, on_purpose: bool, text: str, status: int | None = 0) -> None:
        """Give the seat up and close the connection: the process ends now, with this status, None if not known."""
        if self._thread.is_alive():
            if self._over is not None:  # that this script is done must not be lost with a scheduler that is away
                with self._changed:
                    self._changed.wait_for(lambda: not self._is_away, 2 * self._settings.node_timeout_s)
            self._post(Leaving(on_purpose, text, None if status is None else status & 0xFF))
            self._closed.wait(timeout=1.0)

    def verdict(self, timeout_s: float) -> SameBitsError | None:
        """After a failed collective: what the scheduler says of it, a moment later; None where it is silent."""
        with self._changed:
            self._changed.wait_for(lambda: self.must_end is not None, timeout_s)
        return self._told_to_end()

    def wait_for_end_of_generation(self) -> NoReturn:
        """Wait until the scheduler ends this generation, or the job, and raise that; a difference leads to one."""
        self._wait(lambda: None, until_interrupted=True)
        raise AssertionError("nothing else ends that wait")

    def check(self) -> None:
        """Raise what ended this process's place in the job or its generation; else return at once."""
        if self.interrupted:
            raise self._told_to_end() or GenerationEndedError(_MEMBER_LOST)
        if self._members_change:
            raise HostsUpdatedInterrupt(self._members_change)

    def _wait(
        self, found: Callable[[], _Found | None], *, until_interrupted: bool = False, ends_at: float | None = None
    ) -> _Found:
        with self._changed:
            while True:
                error = self._told_to_end()
                if error is not None:
                    raise error
                value = found()
                if value is not None:
                    return value
                if until_interrupted:
                    self.check()
                left_s = None if ends_at is None else ends_at - clock.now_s()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError
                self._changed.wait(left_s)

    def _told_to_end(self) -> SameBitsError | None:
        """What the main thread is to raise. Once it has that in hand it ends by itself, in its own time."""
        if self.must_end is not None:
            self._end_at = None
            faulthandler.cancel_dump_traceback_later()
        return self.must_end

    # ---- the control thread

    def _post(self, event: AgentEvent) -> None:
        self._events.append(event)
        self._client.wake()

    def _report(self, body: Report) -> None:
        self._post(Observed(body))

    def _run(self) -> None:
        if self.life_sign is not None:
            self.life_sign.hold()
        try:
            self._keep_the_seat()
        except BaseException:
            # Without this thread nobody would ever leave a collective: better a process that ends and is replaced.
            with contextlib.suppress(OSError):  # nobody may be left to read it
                os.write(STDERR, traceback.format_exc().encode(errors="backslashreplace"))
            os._exit(1)

    def _keep_the_seat(self) -> None:
        self._lonely_at = clock.now_s() + LONELY_S
        wake_at = self._core.step(Passed(self.step), clock.now_s()).wake_at  # nobody may ever answer
        while not self._left:
            if self.life_sign is not None:
                self.life_sign.beat()
            self._client.wait(self._pause_s(wake_at))
            self._observe()
            for event in [self._passed(), *self._arrived()]:  # what it says is said of the present step
                self._carry_out(self._core.step(event, clock.now_s()))
                self._left = self._left or isinstance(event, Leaving)
            if not self._left:
                ready = self._core.step(self._passed(), clock.now_s())
                self._carry_out(ready)
                wake_at = ready.wake_at
                self._keep_time()
        if self.life_sign is not None:
            self.life_sign.beat_no_more()
        self._health.stop()
        if self._preemption is not None:
            self._preemption.stop()
        self._client.close()
        if self.life_sign is not None:
            self.life_sign.give_up()
        self._closed.set()

    def _take_usage(self, usage: tuple[Figure, ...]) -> None:
        self._usage = usage  # said with the next heartbeat

    def _observe(self) -> None:
        """Take what the sensors have found that do not report by themselves."""
        found: list[Report] = []
        now = clock.now_s()
        if now - self._observed_at >= self._settings.heartbeat_interval_s / 2:
            self._observed_at = now
            found.append(StallReport(self.observe()))
        pace = self.pace
        if pace is not None and pace is not self._reported_pace:
            self._reported_pace = pace
            found.append(pace)
        figures = Figures.of(self.figures + self._usage)
        if figures != self._reported_figures:
            self._reported_figures = figures
            found.append(figures)
        for body in found:
            self._carry_out(self._core.step(Observed(body), now))

    def _passed(self) -> Passed:
        return Passed(self.step)

    def _pause_s(self, wake_at: float | None) -> float:
        """Never longer than a heartbeat's interval: that Python runs here is to be seen (``LifeSign.beat``)."""
        deadlines = [wake_at, self._end_at, self._lonely_at, self._say_at if self._seat_at is not None else None]
        longest_at = clock.now_s() + self._settings.heartbeat_interval_s
        earliest = min((at for at in deadlines if at is not None), default=longest_at)
        return max(0.0, min(earliest, longest_at) - clock.now_s())

    def _arrived(self) -> list[AgentEvent]:
        events: list[AgentEvent] = []
        for incoming in self._client.drain():
            match incoming:
                case Up():
                    self._lonely_at = None
                    events.append(Connected())
                case Down():
                    events.append(Disconnected())
                case ShutOut(text):
                    self._shut_out(text)
                case TurnedAway(text):
                    log.warn(f"{text}; this worker waits and tries again")
                case PassedOver(text):
                    log.warn(text)
                case Got(message):
                    events.append(Heard(message))
        while self._events:
            events.append(self._events.popleft())
        return events

    def _carry_out(self, ready: AgentReady) -> None:
        for message in ready.sends:
            self._client.send(message)
        for notice in ready.notices:
            self._notice(notice)

    def _notice(self, notice: Notice) -> None:
        if self._is_dying and isinstance(notice, BreakGroup | Waits):
            return  # its last line is to be its own cause
        match notice:
            case Seated(admitted):
                self._seat_at = None
                with self._changed:
                    self._admitted = admitted
                    self._changed.notify_all()
            case ToldToWait():
                self._told_to_wait(notice)
            case LookElsewhere():
                self._look_elsewhere(notice)
            case BreakGroup(text):
                log.warn(text)
                self._interrupt(text)
            case EnterAgain():
                with self._changed:
                    self._again = notice
                    self._changed.notify_all()
            case LeaveGently(text):
                log.say(f"{text}: this worker leaves its generation at its next commit")
                self._members_change = text
            case Invited():
                with self._changed:
                    self._is_invited = True
                    self._changed.notify_all()
            case Waits(text):
                log.say(f"waiting in the rendezvous: {text}")
            case Began(started, is_addressed):
                self.is_addressed = is_addressed
                with self._changed:
                    self._began, self.interrupted, self._members_change = started, False, ""
                    if self.committed_point is not None and not _reaches(started.restore, self.committed_point):
                        self.committed_point = None
                    self._changed.notify_all()
            case Mapped():
                with self._changed:
                    self._map = notice
                    self._changed.notify_all()
            case Answered(ticket, answer):
                with self._changed:
                    if ticket in self._key_answers:
                        self._key_answers[ticket] = answer
                        self._changed.notify_all()
            case CommittedByAll(point):
                self.committed_point = point
            case FoundEqual(point):
                self.equal_point = point
            case Over(point):
                with self._changed:
                    self._over = point
                    self._changed.notify_all()
            case MustEnd(EndKind.FENCED, text, may_return):
                self._must_end(FencedError(text, may_return=may_return))
            case MustEnd(EndKind.STUCK, text):
                self._end_stuck(text)
            case MustEnd(reason, text):
                assert reason.error is not None, "a job that is finished ends by itself"
                self._must_end(reason.error(text))
            case AskedToLeave(text):
                log.say(f"asked to leave: {text}")
                os.kill(os.getpid(), signal.SIGTERM)  # the main thread knows when it may, and so does a plain script's
            case SchedulerAway():
                self._is_away = True
                log.warn(f"the scheduler is away (step {self.step}): training goes on, all else waits for it")
            case SchedulerBack(term, away_s):
                with self._changed:
                    self._is_away = False
                    self._changed.notify_all()
                self._said_elsewhere.clear()
                where = "" if names_one(self._settings.sched_host) else f", at {self._client.address}"
                log.say(f"the scheduler is back after {away_s:.1f} s, term {term}{where}")

    def _interrupt(self, reason: str) -> None:
        """Release the main thread: from what it waits for here first, then from its collectives."""
        with self._changed:
            self.interrupted = True
            self._changed.notify_all()
        self.on_break(reason)

    def _must_end(self, error: SameBitsError) -> None:
        self._end_at = clock.now_s() + END_GRACE_S
        # Needs no GIL: behind the grace, for a main thread that holds it in C code.
        faulthandler.dump_traceback_later(END_GRACE_S + 2, exit=True, file=STDERR)
        self.must_end = error  # last: a main thread that sees it takes both back
        self._interrupt(str(error))

    def _shut_out(self, text: str) -> None:
        """No secret in common. A process that ever had a seat knew it: then it is the scheduler that must be fixed."""
        if self._admitted is None:
            self._must_end(SecretError(text))
        else:
            log.warn(f"{text}; this worker keeps its seat and tries again")

    def _look_elsewhere(self, told: LookElsewhere) -> None:
        text = f"{self._client.address}: {told.text}; the next address of SCHED_HOST is tried"
        if text not in self._said_elsewhere and len(self._said_elsewhere) < MOST_SAID:
            self._said_elsewhere.add(text)
            log.warn(text)
        by_all = self._client.look_elsewhere(told.text if told.is_refusal else "")
        if by_all:
            fix = "Fix: name this job's own scheduler in SCHED_HOST"
            self._events.append(RefusedByAll(f"every address of SCHED_HOST refuses it: {by_all}. {fix}"))

    def _told_to_wait(self, told: ToldToWait) -> None:
        now = clock.now_s()
        if told.retry_after_s == 0:
            if told.text != self._said:
                log.say(told.text)
        else:
            log.warn(told.text)
            self._seat_at, self._say_at = now + told.retry_after_s, now + COUNTDOWN_S
        self._said = told.text

    def _keep_time(self) -> None:
        now = clock.now_s()
        if self._lonely_at is not None and self._lonely_at <= now:
            self._lonely_at = None
            settings = self._settings
            log.say(
                f"waiting for the scheduler at {shown(settings.sched_host, settings.sched_port)}; this worker leaves "
                f"after {settings.topo_timeout_s:g} s (TOPO_TIMEOUT)"
            )
        if self._seat_at is not None and self._say_at <= now:
            left_s = self._seat_at - now
            if left_s > 0:
                log.say(f"waits for its seat: {left_s:.0f} s left")
                self._say_at = now + min(COUNTDOWN_S, left_s)
            else:
                self._seat_at = None
        for seen in self._sightings.look(self._beside, now):
            self._client.send(seen)
        self._look_at_threads(now)
        end_at = self._end_at  # the main thread may take it back meanwhile
        if end_at is not None and end_at <= now:
            self._end_now()

    def _look_at_threads(self, now: float) -> None:
        """Name the threads for which Python waits, so that the process does not end, once the script has ended."""
        if threading.main_thread().is_alive():
            return
        self._script_ended_at = self._script_ended_at or now
        if self._threads_said or now - self._script_ended_at < THREADS_S:
            return
        self._threads_said = True
        frames = sys._current_frames()
        kept = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
        if kept:
            names = ", ".join(f"{one.name!r}{_place_of(frames.get(one.ident or 0))}" for one in kept)
            log.warn(
                f"the script of this worker has ended, and its process has not: Python waits for the thread {names}. "
                "The job ends when that has. Fix: end or join it in the script, or start it with daemon=True"
            )

    def _end_stuck(self, text: str) -> None:
        """The main thread holds the others up, and would not come out for a request either."""
        log.warn(f"{text}: this process gives up its seat. It is here:")
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        self._carry_out(self._core.step(Leaving(False, text), clock.now_s()))
        self._client.close()
        os._exit(StuckError.exit_code)

    def _end_now(self) -> None:
        """The main thread did not come out: say where it is, give up the seat, leave."""
        error = self.must_end
        assert error is not None
        log.warn(f"{error}; the main thread did not come out within {END_GRACE_S:g} s, it is here:")
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        self._carry_out(self._core.step(Leaving(True, "told to end"), clock.now_s()))
        self._client.close()
        os._exit(error.exit_code)


def _reaches(restore: Point | None, committed: Point) -> bool:
    """Whether a generation that starts there still has the committed point behind it."""
    return restore is not None and restore >= committed


def _why_silent(ask: KeyAsk) -> str:
    if ask.op is KeyOp.WAIT:
        return ". Fix: see why nobody writes it, or give a longer timeout_s"
    unknown = "; whether the change was done is not known" if ask.changes else ""
    return f"{unknown}. Fix: start a scheduler again (recover.sh), of this release: an older one has no keys"


def _place_of(frame: FrameType | None) -> str:
    """Return where a thread is, as `` (train.py:12)``: its outermost frame that is not Python's own threading."""
    found = ""
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            found = f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back
    return found


def share_of(session: str) -> float:
    """Another number for each session, above 0 and at most 1: the part of an interval after which it beats first."""
    return (int(session[:8], 16) + 1) / 16**8
