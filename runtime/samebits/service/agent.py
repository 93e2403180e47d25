"""The worker's control thread, which keeps the seat while the main thread computes.

The thread owns the connection and the agent's core. The methods of ``Agent`` are called in the main thread: they post
an event and, if they wait, sleep on one condition variable. The control thread itself does two things, whatever blocks
the main thread: it breaks the group when a round opens, and it ends a process that must end but does not.
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

from samebits import config
from samebits.config import Settings, fixed_settings
from samebits.core.agent.agent_core import AgentCore, AgentPolicy
from samebits.core.agent.agent_events import (
    Addressed,
    AgentEvent,
    AgentNotice,
    AgentReady,
    Answered,
    Began,
    BreakGroup,
    Called,
    Completed,
    Connected,
    Disconnected,
    EnterAgain,
    Entered,
    Failed,
    GaveUp,
    Heard,
    Invited,
    KeyAsk,
    LeaveGently,
    Leaving,
    MustEnd,
    Observed,
    Over,
    Passed,
    RefusedByAll,
    SchedulerAway,
    SchedulerBack,
    ToldToWait,
    Trains,
    Waits,
)
from samebits.core.agent.failover import TryNextAddress
from samebits.core.agent.key_calls import MAX_OPEN_CALLS
from samebits.core.end_kinds import EndKind
from samebits.core.messages import (
    AddressMap,
    Admitted,
    CommittedPoint,
    Depart,
    EqualPoint,
    GenerationStarted,
    Holdings,
    KeyAnswer,
    KeyOp,
    RankPosition,
    StopAt,
)
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
    StopsAfter,
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
from samebits.service.health.host_sensor import HealthLook
from samebits.service.health.preemption import PreemptionLook
from samebits.service.host import proof_for, this_process
from samebits.service.process_state import DeathWatch, LifeSign, ProcessObserver, Whereabouts
from samebits.store.process_identity import ProcessIdentity

STDERR = 2  # independent of sys.stderr
END_GRACE_S = 5.0  # from MustEnd until a main thread that has not left is ended
AT_ONCE_S = 0.25  # a free seat is assigned within a few ms
THREADS_S = 5.0  # how long a process may take to exit after its script, before its threads are logged
LONELY_S = 2.0  # how long a worker looks for its scheduler before it logs this
MOST_SAID = 64  # different reasons to leave an address, until a scheduler is found
WITHOUT_SCHEDULER = "ranks that train go on until one of them is lost; everything else waits for the scheduler"
COUNTDOWN_S = 5.0  # how often a process that waits for its seat logs the remaining time

_MEMBER_LOST = "a member was lost: this generation is over"

_Found = TypeVar("_Found")


class Agent:
    """The connection of one worker to its scheduler.

    Args:
        settings: role worker.
        job_name: the job's name; must match the scheduler's.
        device: device type, sent to the scheduler.

    Attributes:
        step: completed optimizer steps; set by the main thread, sent in heartbeats.
        commits: commits in the current generation; counted by the main thread.
        stalled_s: seconds that steps have waited for saves; set by the main thread, sent with saved points.
        figures: the newest value of each of the script's figures; set by the main thread, sent with heartbeats.
        observe: called in the control thread more often than once per heartbeat; returns the main thread's position if
            that thread makes no progress.
        pace: duration of the last steps; set by the main thread, sent once per window of steps.
        on_break: called in the control thread, with the reason, when this process must leave the current group.
        on_link: called in the control thread when the scheduler becomes reachable (True) or unreachable (False).
        interrupted: the current generation is over, because a round is open or the process must end.
        committed_point: the newest restore point that every rank is known to have on disk.
        equal_point: the newest copied point at which all ranks are known to have been equal.
        keys: the cluster's keys, if there is a secret.
        is_addressed: this process entered the current generation with the right part of its address map.
        life_sign: shows this process's death to others on this host; None without kernel support.
    """

    def __init__(self, settings: Settings, job_name: str, device: str) -> None:
        self.node = settings.node_id or config.random_node_id()
        self.session = uuid.uuid4().hex
        self.step = 0
        self.commits = 0
        self._stops = False  # whether all members are to stop after the same commit
        self._stops_after = 0  # the number of that commit; until agreed, the next commit's; 0: unknown
        self._is_stop_agreed = False
        self.stalled_s = 0.0
        self.figures: tuple[Figure, ...] = ()
        self._usage: tuple[Figure, ...] = ()
        self.observe: Callable[[], Progress | None] = lambda: None
        self.pace: StepTiming | None = None
        self._reported_pace: StepTiming | None = None
        self._reported_figures = Figures()
        self._observed_at = 0.0
        self.on_break: Callable[[str], object] = lambda _reason: None
        self.on_link: Callable[[bool], object] = lambda _is_up: None
        self.interrupted = False
        self._members_change = ""  # why this process must leave its generation at its next commit
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
            failover_s=None if names_one(settings.sched_host) else settings.node_timeout_s,
        )
        self._core = AgentCore(policy, clock.now_s())
        self._events: collections.deque[AgentEvent] = collections.deque()
        self._changed = threading.Condition()
        self._admitted: Admitted | None = None
        self._began: GenerationStarted | None = None
        self._map: AddressMap | None = None
        self._again: EnterAgain | None = None
        self._tickets = itertools.count(1)
        self._key_answers: dict[int, KeyAnswer | None] = {}  # by ticket, for each open call
        self._generation = 0  # the last generation that the main thread knows
        self.is_addressed = True
        self.committed_point: Point | None = None
        self.equal_point: Point | None = None
        self._over: Point | None = None
        self._left = False
        self._is_away = False  # whether the scheduler is away
        self._is_invited = False
        self._is_dying = False
        self._closed = threading.Event()
        self._seat_at: float | None = None  # when this process may ask for its seat again
        self._say_at = 0.0
        self._said = ""
        self._said_elsewhere: set[str] = set()  # reset when a scheduler is found
        self._script_ended_at: float | None = None  # when the main thread's end was first noticed
        self._threads_said = False
        self._lonely_at: float | None = None  # when to log that no scheduler has answered yet
        self._end_at: float | None = None  # when a main thread that must end is ended
        self.keys = cluster_keys(settings.cluster_secret, settings.cluster_secret_file)
        host, port = settings.sched_host, settings.sched_port
        self._client = Client(host, port, self.session, settings.node_timeout_s, keys=self.keys, relay=settings.relay)
        self._deaths = DeathWatch(lambda session: self._report(PeerGone(session)))
        self._observer = ProcessObserver(settings.node_timeout_s)
        self._beside: dict[str, ProcessIdentity] = {}  # the watched peer, by node
        self.life_sign = LifeSign.if_possible(process.host, self.session)
        self._health = HealthLook(settings, self._report, self._take_usage)
        self._preemption = PreemptionLook.of(settings)
        self._thread = threading.Thread(target=self._run, name="samebits-agent", daemon=True)

    @property
    def offered_place(self) -> RankPosition | None:
        """Return this process's place in the generation that the last round offered."""
        return self._core.offered_place

    @property
    def scheduler_peer(self) -> tuple[str, int] | None:
        """Return the remote address of the connection to the scheduler."""
        return self._client.peer

    def register(self, meanwhile: Callable[[], object] | None = None) -> Admitted:
        """Start, and wait for a seat. The log shows how long that will take.

        Args:
            meanwhile: called once if no seat is free at once, for work that needs no seat.

        Raises:
            SameBitsError: the process gets no seat; the message says why.
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
        """Wait until all workers have seats and the round of the first generation is open.

        Raises:
            SameBitsError: the process no longer has a place in the job.
        """
        self._wait(lambda: self._is_invited or None)

    def report_failure(self) -> None:
        """Report a failed collective to the scheduler at once, before anything slow."""
        self._post(Failed())

    def enter(
        self, holdings: Holdings, again: Callable[[EnterAgain], Holdings] | None = None
    ) -> GenerationStarted | Point:
        """Wait in a round for a generation. Return its start, or the final point if training is finished.

        Args:
            holdings: the points and other state that this process has.
            again: returns further holdings that the round needs; unnecessary if the disk has been read.

        Raises:
            SameBitsError: the process no longer has a place in the job.
        """
        seen = self._generation
        with self._changed:
            self._began = self._map = self._again = None
        while True:
            if self._over is None and self._began is None:  # otherwise it was answered meanwhile
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
        """Send this rank's part of the generation's address map."""
        self._post(Addressed(generation, blob))

    def address_map(self, generation: int) -> Sequence[bytes]:
        """Wait for the generation's address map, in rank order.

        Raises:
            GenerationEndedError: the generation ended before its group was formed.
        """
        found = self._wait(
            lambda: self._map if self._map is not None and self._map.generation == generation else None,
            until_interrupted=True,
        )
        return found.blobs

    def watch_device(self, device: WatchedDevice) -> None:
        """Monitor this device's health and report it with the host's."""
        self._health.watch_device(device)

    def trains(self, generation: int) -> None:
        """Report that the group is formed and the state is restored."""
        self._post(Trains(generation))

    def report_saved(self, points: Sequence[Point]) -> None:
        """Tell the scheduler which points this process has on disk, in ascending order."""
        self._report(SavedPoints.of(points, self.stalled_s))

    def report_digests(self, digests: Sequence[Digest]) -> None:
        """Send the scheduler the digests of this process's commits."""
        self._report(Digests.of(digests))

    def complete(self, generation: int, step: int, digests: Sequence[Digest]) -> Point:
        """Wait until every rank's function has returned and its last commit is durable.

        This rank's last commit is durable already.

        Args:
            generation, step: the last commit's generation and step.
            digests: as in :meth:`report_digests`, including the final digest.

        Raises:
            GenerationEndedError: a member was lost meanwhile; this rank is needed again.
            UnequalError: the ranks' final states differ.
        """
        self.step = step
        self.report_digests(digests)
        self._post(Completed(generation, step))
        return self._wait(lambda: self._over, until_interrupted=True)

    def call_keys(self, ask: KeyAsk, timeout_s: float | None, *, is_wait: bool = False) -> KeyAnswer:
        """Call ``samebits.kv`` and wait for the answer, even if the scheduler is temporarily away.

        Args:
            ask: the call.
            timeout_s: the time limit; None for TOPO_TIMEOUT.
            is_wait: the answer depends on other processes, so the end of this process's generation ends the wait too.

        Raises:
            KeyValueError: this process has too many open calls.
            KeyValueTimeoutError: there was no answer; it is unknown whether a change was made.
            GenerationEndedError: only with ``is_wait``.
            SameBitsError: the process no longer has a place in the job.
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
                    f"samebits.kv: this process already has {MAX_OPEN_CALLS} unfinished calls, the maximum. Fix: "
                    "let fewer threads wait"
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

    def report_anomaly(self, step: int, text: str, *, is_verdict: bool = False, comes_again: bool = False) -> None:
        """Report an implausible number, or the fault behind one, to the scheduler."""
        self._report(Anomaly(step, printable(text, MAX_ANOMALY_CHARS), is_verdict, comes_again))

    def watch(self, node: str, at: Whereabouts) -> bool:
        """Watch a worker on the same host for its death or a hang; return False if its process is not visible."""
        if not self._deaths.watch(at):
            return False
        identity = ProcessIdentity.of(at.pid)
        self._beside = {node: identity} if identity is not None and node and node.isprintable() else {}
        return True

    def speak_last(self, text: str, status: int = 0) -> None:
        """Report this process's fatal error, with its exit code if the error is from this package."""
        self._is_dying = True
        self._report(LastWords(text, status))

    def leave(self, *, on_purpose: bool, text: str, status: int | None = 0) -> None:
        """Give up the seat and close the connection, because the process exits.

        ``status`` is the process's exit status, or None if unknown.
        """
        if self._thread.is_alive():
            if self._over is not None:  # the scheduler must learn of a completed script, even if it is away now
                with self._changed:
                    self._changed.wait_for(lambda: not self._is_away, 2 * self._settings.node_timeout_s)
            self._post(Leaving(on_purpose, text, None if status is None else status & 0xFF))
            self._closed.wait(timeout=1.0)

    def verdict(self, timeout_s: float) -> SameBitsError | None:
        """Wait up to ``timeout_s`` for the scheduler's verdict on a failed collective, and return it or None."""
        with self._changed:
            self._changed.wait_for(lambda: self.must_end is not None, timeout_s)
        return self._told_to_end()

    def end(self, error: SameBitsError) -> None:
        """Make the main thread raise this error. May be called from any thread."""
        self._must_end(error)

    def wait_for_end_of_generation(self) -> NoReturn:
        """Wait until the scheduler ends this generation or the job, and raise the error.

        The scheduler does so, for example, after a difference between ranks.
        """
        self._wait(lambda: None, until_interrupted=True)
        raise AssertionError("nothing else ends that wait")

    @property
    def stops_here(self) -> bool:
        """Return whether the main thread must call :meth:`stop_together` before it continues."""
        return self._stops and self.commits >= self._stops_after

    def stop_together(self) -> None:
        """Wait, after a commit, until the job ends or all ranks agree on a later commit to stop at.

        Raises:
            GenerationEndedError: a member was lost meanwhile; this rank is needed again.
            SameBitsError: the job ends.
        """
        self._wait(lambda: self._is_stop_agreed or None, until_interrupted=True)
        if self.commits >= self._stops_after:
            log.say(f"stopped at step {self.step}, after the same commit as every other worker")
            self._report(StopsAfter(self._stops_after, is_there=True))
            self._wait(lambda: None, until_interrupted=True)

    def check(self) -> None:
        """Raise the error that ended this process's generation or its place in the job, if there is one."""
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
        """Return the error that the main thread must raise, and cancel the forced end of the process."""
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
            # Without this thread, the main thread would never leave a collective, so exit and be replaced.
            with contextlib.suppress(OSError):  # stderr may be closed
                os.write(STDERR, traceback.format_exc().encode(errors="backslashreplace"))
            os._exit(1)

    def _keep_the_seat(self) -> None:
        self._lonely_at = clock.now_s() + LONELY_S
        wake_at = self._core.step(Passed(self.step), clock.now_s()).wake_at  # needed in case no scheduler ever answers
        while not self._left:
            if self.life_sign is not None:
                self.life_sign.beat()
            self._client.wait(self._pause_s(wake_at))
            self._observe()
            for event in [self._passed(), *self._arrived()]:  # its messages belong to the current step
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
        self._usage = usage  # sent with the next heartbeat

    def _observe(self) -> None:
        """Collect and report the results of sensors that do not report on their own."""
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
        """Return how many seconds to sleep, at most a heartbeat's interval.

        The limit lets ``LifeSign.beat`` show that Python runs.
        """
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

    def _notice(self, notice: AgentNotice) -> None:
        if self._is_dying and isinstance(notice, BreakGroup | Waits):
            return  # the last line of this process's log must be its own error
        match notice:
            case Admitted():
                self._seat_at = None
                with self._changed:
                    self._admitted = notice
                    self._changed.notify_all()
                self.on_link(True)
            case ToldToWait():
                self._told_to_wait(notice)
            case TryNextAddress():
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
                with self._changed:
                    self._members_change = text
                    self._changed.notify_all()
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
                    self.commits, self._stops, self._stops_after, self._is_stop_agreed = 0, False, 0, False
                    if self.committed_point is not None and not _reaches(started.restore, self.committed_point):
                        self.committed_point = None
                    self._changed.notify_all()
            case AddressMap():
                with self._changed:
                    self._map = notice
                    self._changed.notify_all()
            case Answered(ticket, answer):
                with self._changed:
                    if ticket in self._key_answers:
                        self._key_answers[ticket] = answer
                        self._changed.notify_all()
            case CommittedPoint():
                self.committed_point = notice.point
            case EqualPoint():
                self.equal_point = notice.point
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
            case Depart():
                log.say(f"asked to leave: {notice.text}")
                os.kill(os.getpid(), signal.SIGTERM)  # the main thread, or a plain script, decides when it may leave
            case StopAt():
                self._stop_after(notice.commits)
            case SchedulerAway():
                self._is_away = True
                at = f" (step {self.step})" if self.step else ""  # a spare, or torchrun's agent, counts none
                log.warn(f"the scheduler is unreachable{at}: {WITHOUT_SCHEDULER}")
                self.on_link(False)
            case SchedulerBack(term, away_s):
                with self._changed:
                    self._is_away = False
                    self._changed.notify_all()
                self._said_elsewhere.clear()
                where = "" if names_one(self._settings.sched_host) else f", at {self._client.address}"
                log.say(f"the scheduler is reachable again after {away_s:.1f} s, term {term}{where}")
                self.on_link(True)

    def _stop_after(self, agreed: int) -> None:
        """Stop after the agreed commit. With 0, propose the next commit and do not go beyond it."""
        with self._changed:
            before = self._stops_after
            if not self._stops:
                self._stops = True  # set first: a main thread that has not seen this has already counted its commit
                self._stops_after = self.commits + 1
            if agreed and not self._is_stop_agreed:
                self._stops_after, self._is_stop_agreed = agreed, True
                self._changed.notify_all()
        if not before:
            self._report(StopsAfter(self._stops_after))

    def _interrupt(self, reason: str) -> None:
        """Interrupt the main thread's waits: first those in this object, then its collectives."""
        with self._changed:
            self.interrupted = True
            self._changed.notify_all()
        self.on_break(reason)

    def _must_end(self, error: SameBitsError) -> None:
        self._end_at = clock.now_s() + END_GRACE_S
        # Needs no GIL, so it also works if the main thread holds the GIL in C code beyond the grace period.
        faulthandler.dump_traceback_later(END_GRACE_S + 2, exit=True, file=STDERR)
        self.must_end = error  # set last: a main thread that sees it cancels both
        self._interrupt(str(error))

    def _shut_out(self, text: str) -> None:
        """Handle a rejected secret. This is fatal only before the first seat.

        After that, the scheduler must be at fault.
        """
        if self._admitted is None:
            self._must_end(SecretError(text))
        else:
            log.warn(f"{text}; this worker keeps its seat and tries again")

    def _look_elsewhere(self, told: TryNextAddress) -> None:
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
                log.say(f"waiting for its seat: {left_s:.0f} s left")
                self._say_at = now + min(COUNTDOWN_S, left_s)
            else:
                self._seat_at = None
        for seen in self._observer.look(self._beside, now):
            self._client.send(seen)
        self._look_at_threads(now)
        end_at = self._end_at  # the main thread may reset it meanwhile
        if end_at is not None and end_at <= now:
            self._end_now()

    def _look_at_threads(self, now: float) -> None:
        """Log non-daemon threads that keep the process alive after its script has ended."""
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
                f"this worker's script has ended, but its process has not: Python waits for the thread {names}. "
                "The job waits for this process. Fix: end or join the thread in the script, or start it with "
                "daemon=True"
            )

    def _end_stuck(self, text: str) -> None:
        """End a process whose main thread blocks the other ranks and would not react to a request."""
        log.warn(f"{text}: this process gives up its seat. It is here:")
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        self._carry_out(self._core.step(Leaving(False, text), clock.now_s()))
        self._client.close()
        os._exit(StuckError.exit_code)

    def _end_now(self) -> None:
        """End a process whose main thread did not exit in time: log its stack and give up the seat."""
        error = self.must_end
        assert error is not None
        log.warn(f"{error}; the main thread did not return within {END_GRACE_S:g} s. Its stack:")
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        self._carry_out(self._core.step(Leaving(True, "told to end"), clock.now_s()))
        self._client.close()
        os._exit(error.exit_code)


def _reaches(restore: Point | None, committed: Point) -> bool:
    """Return whether a generation that starts from ``restore`` includes the committed point."""
    return restore is not None and restore >= committed


def _why_silent(ask: KeyAsk) -> str:
    if ask.op is KeyOp.WAIT:
        return ". Fix: find out why no process writes it, or pass a longer timeout_s"
    unknown = "; it is unknown whether the change was made" if ask.changes else ""
    return f"{unknown}. Fix: restart the scheduler with `samebits recover`, in this release: earlier ones have no keys"


def _place_of(frame: FrameType | None) -> str:
    """Return where a thread is, as a text such as `` (train.py:12)``.

    This is the outermost frame outside ``threading``.
    """
    found = ""
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            found = f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back
    return found


def share_of(session: str) -> float:
    """Return the share of an interval, in (0, 1], that a session waits before its first heartbeat."""
    return (int(session[:8], 16) + 1) / 16**8
