"""Follow a job to its end: show its progress, restart dead processes, and end everything on Ctrl-C.

A single ``poll`` waits for messages from the scheduler, exits of processes, signals and deadlines. Decisions are made
in ``follower_decisions``. Only logs are read on a timer, because a script that never commits gives no other sign of
progress. The job continues if this process is killed or loses its terminal.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from samebits.account.history import RecoveryFeed, recovery_line
from samebits.account.job_view import JobView
from samebits.config import Settings
from samebits.core.causes.restarts import Sort, loss_of
from samebits.core.causes.table import Observation
from samebits.core.messages import OperatorDecision
from samebits.errors import ForeignFolderError, JournalDamagedError, SameBitsError, StoreError
from samebits.launcher import end_summary, job_spec
from samebits.launcher.follower_decisions import NEW_PROCESS, Following, FollowResult
from samebits.launcher.hang_stacks import HangStacks, UnjoinedProcesses
from samebits.launcher.interrupts import CTRL_C, Asking, InterruptAnswer, Signals
from samebits.launcher.job_outcome import JobOutcome, verdict_of
from samebits.launcher.processes import (
    OUT_OF_MEMORY,
    SCHEDULER,
    Death,
    MemoryKills,
    is_own_child,
    last_line,
    node_of,
    process_names,
    read_pid_files,
    reap,
    resident_bytes,
    send_signal,
    spoken,
    watch,
)
from samebits.launcher.progress_line import LOOK_S, JsonScreen, Screen, Showing
from samebits.launcher.relay_process import KeptRelay, end_relay
from samebits.launcher.scheduler_link import Linked, SchedulerLink, Unlinked, is_listening, own_job
from samebits.launcher.supervising import Dead, Supervisor
from samebits.launcher.worker_logs import LogEnds
from samebits.service import cause_file, status
from samebits.service.process_state import ProcessObserver
from samebits.service.status import stored_view
from samebits.spelling import spelled
from samebits.store import durable
from samebits.store.owner import claim_folder
from samebits.store.process_identity import ProcessIdentity
from samebits.tracebacks import Failure


class HeldFolder:
    """A handle on the folder at ``path``, or on the first folder that is created there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.is_there()

    def is_there(self) -> bool:
        """Return whether the path still leads to this folder, or True if that cannot be determined."""
        try:
            if self._descriptor is None:
                with contextlib.suppress(FileNotFoundError):
                    self._descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                return True
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Release the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


REPORTS_A_LEASE = 4
NAMED = 6
MOST_UNDELIVERED = 256  # decisions kept until a scheduler answers; older ones are dropped
NEWS_S = 1.0  # how long a report that training is finished may take to arrive after the exit of a worker

LEFT = JobOutcome(None, "left running", 0)


@contextlib.contextmanager
def naming_what_runs_on(settings: Settings) -> Iterator[None]:
    """Context manager that adds a line about the job's live processes to an error that ends this command."""
    try:
        yield
    except ForeignFolderError:  # the folder now belongs to another job, and the message names the processes
        raise
    except SameBitsError as error:
        error.args = (f"{error}{_running_on(settings)}",)
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise StoreError(f"{where}{durable.reason_of(error)}{_running_on(settings)}") from error
    except Exception as error:  # even after an internal error, the user must learn which processes still run
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = f"this command failed: {type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno})"
        for line in f"{text}{_running_on(settings)}".splitlines():
            print(f"samebits: {line}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def _running_on(settings: Settings) -> str:
    """Return a line about the live processes of the folder's job, or "" if there are none."""
    names = process_names(job_spec.nodes_of(settings.log_dir, settings))
    alive = [(name, one) for name, one in read_pid_files(settings.log_dir, names).items() if one.is_alive()]
    if not alive:
        return ""
    named = ", ".join(f"{spoken(name)} ({identity})" for name, identity in alive[:NAMED])
    more = f" and {len(alive) - NAMED} more" if len(alive) > NAMED else ""
    return (
        f"\nthe job runs on without this command, which starts nothing again any more: {named}{more}. Fix: "
        f"`{spelled('recover')}` follows it and restarts what dies, `{spelled('stop')}` ends it"
    )


@dataclass(slots=True)
class Turn:
    """The result of a driver's turn: lines to print, decisions for the job's history, and started workers."""

    lines: list[str] = field(default_factory=list)
    decisions: list[OperatorDecision] = field(default_factory=list)
    started: list[str] = field(default_factory=list)


class Driver(Protocol):
    """Interface of objects that start and drain workers as hosts come and go. ``now`` is in monotonic seconds."""

    @property
    def is_started(self) -> bool:
        """Whether ``start`` was called."""

    def start(self, folder: Path) -> int:
        """Start looking for hosts, and return a descriptor that becomes readable when there is a result."""

    def wake_at(self, now: float) -> float | None:
        """Return when ``turn`` must be called even if nothing happens, or None."""

    def takes(self, name: str, identity: ProcessIdentity, status: int | None, now: float, *, has_joined: bool) -> bool:
        """Return whether the driver handles the end of this worker, so that nothing else restarts it."""

    def turn(self, view: JobView | None, now: float) -> Turn:
        """Start and drain the workers that are due."""

    def close(self) -> None:
        """Stop looking for hosts."""


class Follower:
    """One run of a follower, which ends when the job does."""

    def __init__(
        self,
        settings: Settings,
        signals: Signals,
        *,
        restarts: bool = False,
        logs: LogEnds | None = None,
        supervisor: Supervisor | None = None,
        driver: Driver | None = None,
        tee: Sequence[str] = (),
        as_json: bool = False,
        foreign_job: str = "",
    ) -> None:
        self._settings = settings
        self._signals = signals
        self._logs = logs or LogEnds(settings.log_dir)
        self._supervisor, self._driver = supervisor, driver
        self._undelivered: deque[status.ForHistory] = deque(maxlen=MOST_UNDELIVERED)
        self._look_at = 0.0  # when to check next whether the folder has a supervisor
        self._report_restarts_at = 0.0  # when to report again to the scheduler that replacements are starting
        self._start_failed = False  # whether a start failed and this was reported
        self._silence = UnjoinedProcesses()
        self._memory_kills = MemoryKills()
        self._causes = cause_file.table_of(settings)
        self._stalls = HangStacks(settings, self._causes)
        self._observer = ProcessObserver(settings.node_timeout_s)
        self._screen = JsonScreen(sys.stdout) if as_json else Screen(sys.stdout)
        kept = job_spec.read(settings.log_dir)
        self._has_scheduler = kept is None or kept.has_scheduler
        self._relay = KeptRelay(settings.log_dir) if kept is not None and kept.has_relay else None
        script = Path(kept.script if kept is not None else settings.job_name or "train.py").name
        self._showing = Showing(settings, self._screen, script, tee, is_served=is_listening(settings))
        self._recoveries = RecoveryFeed(settings.recovery_path) if settings.enable_recovery else None
        self._has_left = False
        self._link = SchedulerLink(settings)
        self._folder = HeldFolder(settings.log_dir)
        self._names: list[str] = []
        self._watched: dict[int, tuple[str, ProcessIdentity]] = {}
        self._ended: dict[int, tuple[Death, float]] = {}  # ends that are not judged yet, and until when to wait
        self._known: dict[str, ProcessIdentity] = {}
        self._missing: list[tuple[str, ProcessIdentity]] = []  # processes that ended before they could be watched
        self._scheduler_death, self._scheduler_judged = Death(), False
        self._is_ours: bool | None = None  # whether this job's scheduler answers; None before any answer
        self._foreign_jobs = {foreign_job}  # other jobs that were reported to answer in its place
        self._address = self._told_address = ""  # if SCHED_HOST names several: the current and the last reported one
        self._stop_by: str | None = None
        self._stop_status, self._stop_asked = 0, False  # whether the current connection was asked to stop the job
        self._poll = select.poll()
        self._asking = Asking(self._poll, self._screen.say, may_leave=not settings.die_with_me)
        self._following = Following(
            recovery=settings.enable_recovery,
            node_timeout_s=settings.node_timeout_s,
            recover=job_spec.command_to_continue(settings.log_dir),
            restarts=restarts,
            max_world_size=settings.max_worker_num,
            topo_timeout_s=settings.topo_timeout_s,
            shrink_grace_s=settings.grace.shrink_s,
            shutdown_timeout_s=settings.grace.shutdown_s,
            clock_time=_clock_time,
        )

    def run(self, *, stop_by: str | None = None) -> FollowResult:
        """Follow the job to its end.

        On return, everything has been reported, and all processes that had to end have ended. If ``stop_by`` is given,
        the job is asked to stop at once.

        Raises:
            ForeignFolderError: LOG_DIR now belongs to another job.
        """
        self._settle_recoveries()
        try:
            self._follow(stop_by)
        finally:
            self._asking.end()
            self._link.close()
            self._folder.close()
            if self._driver is not None:
                self._driver.close()
            if self._supervisor is not None:
                self._supervisor.let_go()
        result = self._following.result
        if result is None:
            self._screen.close()
            self._screen.say("the job continues without this command; `samebits follow` follows it again")
            return FollowResult(LEFT)
        end_relay(self._settings.log_dir)
        end_summary.say(result, self._following, self._settings, self._screen)
        if result.verdict.kind is None and not self._has_scheduler:
            job_spec.keep_end(self._settings.log_dir)
        return result

    def _follow(self, stop_by: str | None) -> None:
        for source in (self._signals.fileno(), self._link.fileno()):
            self._poll.register(source, select.POLLIN)
        following = self._following
        self._look_for_processes()
        following.is_linked = not following.scheduler_runs() and is_listening(self._settings)
        if stop_by is not None:
            following.stop_asked(stop_by, time.monotonic())
        self._supervise()
        self._carry_out()
        while following.result is None and not self._has_left:
            ready = {descriptor for descriptor, _ in self._poll.poll(self._timeout_ms())}
            self._take_news()
            self._look_for_processes()
            self._take_deaths(ready)
            self._memory_kills.look(time.monotonic())
            for by in self._signals.take():
                self._take_signal(by)
            self._has_left = self._asking.answer(ready, time.monotonic()) is InterruptAnswer.LEAVE
            self._supervise()
            self._carry_out()

    def _timeout_ms(self) -> int:
        now = time.monotonic()
        supervisor = self._supervisor
        start_at = supervisor.wake_at(but=self._not_yet()) if supervisor is not None else None
        look_at = self._look_at if supervisor is not None else None
        asked_at = self._asking.wake_at()
        drive_at = None if self._driver is None else self._driver.wake_at(now)
        supervised_ats = (start_at, look_at, drive_at, self._report_restarts_at or None)
        judge_at = min((until for _, until in self._ended.values()), default=None)
        ats = (self._following.wake_at(), self._silence.wake_at(), asked_at, judge_at, *supervised_ats, now + LOOK_S)
        return max(0, math.ceil((min(at for at in ats if at is not None) - now) * 1000))

    # ---- the user's requests

    def _take_signal(self, by: str) -> None:
        now = time.monotonic()
        if by == CTRL_C and not self._following.is_closing and self._asking.asks(now):
            return
        self._asking.end()
        self._following.stop_asked(by, now)

    # ---- events

    def _take_news(self) -> None:
        for told in self._link.take():
            match told:
                case Linked(address):
                    self._is_ours, self._stop_asked = None, False
                    self._address = address
                case Unlinked():
                    self._following.unlinked()
                case JobView():
                    self._take_view(told)

    def _take_view(self, view: JobView) -> None:
        if self._is_ours is None:
            self._is_ours = self._is_of_this_job(view)
            if self._is_ours:
                self._following.linked()
                self._scheduler_judged = False
                if self._address != self._told_address:
                    self._told_address = self._address
                    self._screen.say(f"the scheduler is at {self._address}, term {view.term}")
            else:
                if view.job not in self._foreign_jobs:
                    where = self._address or f"SCHED_PORT={self._settings.sched_port}"
                    self._screen.say(f"the scheduler at {where} runs another job: {view}")
                    self._foreign_jobs.add(view.job)
                self._following.unlinked()
                self._link.look_elsewhere()
        if self._is_ours:
            self._following.heard(view, time.monotonic())

    def _is_of_this_job(self, view: JobView) -> bool:
        """Return whether the scheduler that sent this view belongs to this job.

        Its job id must equal the one in the journal. A host without the scheduler has no journal: there, LOG_DIR is
        claimed for the first job that answers.
        """
        stored = self._stored_view()
        own = stored.job if stored is not None else own_job(self._settings)
        if own not in ("", view.job):
            return False
        if self._settings.enable_recovery and not self._has_scheduler:
            claim_folder(self._settings.log_dir, view.job, view.name)  # there is no journal here to identify the job
        return True

    def _stored_view(self) -> JobView | None:
        if not self._settings.enable_recovery:
            return None
        try:
            return stored_view(self._settings.recovery_path)
        except JournalDamagedError as error:
            self._screen.say(str(error))  # the ends of the processes then decide how the job ended
            return None

    def _look_for_processes(self) -> None:
        """Find the processes that were started since the last check."""
        settings = self._settings
        self._names = process_names(job_spec.nodes_of(settings.log_dir, settings))  # nodes may be added or removed
        started = read_pid_files(settings.log_dir, self._names)
        if not self._folder.is_there():  # the processes named there belong to another job
            self._leave_the_folder()
            return
        for name, identity in started.items():
            if self._known.get(name) == identity:
                continue
            self._known[name] = identity
            descriptor = watch(identity)
            if name == SCHEDULER:  # even one that has already ended, since its journal has newer facts
                self._scheduler_death, self._scheduler_judged = Death(), False
            if descriptor is None:
                if name != SCHEDULER:
                    self._missing.append((name, identity))
                continue
            self._watched[descriptor] = (name, identity)
            self._poll.register(descriptor, select.POLLIN)
            is_own = is_own_child(identity)
            self._following.found(name, identity, is_own=is_own)
            self._memory_kills.watch(name, identity.pid)
            if is_own and name != SCHEDULER:
                self._silence.began(name, identity, time.monotonic())

    def _leave_the_folder(self) -> None:
        if self._following.is_closing:
            return
        running = ", ".join(f"{spoken(name)} ({identity})" for name, identity in self._watched.values())
        raise ForeignFolderError(
            f"LOG_DIR={self._settings.log_dir} was moved or deleted, so this command can no longer follow the job. "
            f"Still running: {running or 'no processes'}. Fix: move it back and run `samebits follow`, or end these "
            "processes"
        )

    def _take_deaths(self, ready: set[int]) -> None:
        now = time.monotonic()
        for descriptor in ready & self._watched.keys():
            if (death := reap(self._watched[descriptor][1])) is not None:
                self._poll.unregister(descriptor)
                self._ended[descriptor] = death, now + NEWS_S
        for descriptor, (death, until) in list(self._ended.items()):
            if now >= until or not self._awaits_news(*self._watched[descriptor], death):
                del self._ended[descriptor]
                self._take_death(descriptor, death)

    def _awaits_news(self, name: str, identity: ProcessIdentity, death: Death) -> bool:
        """Return whether the scheduler may be about to report that training is finished.

        On another host than the scheduler's, a worker's exit may be seen before that report. Such a worker must not be
        restarted: there would soon be no scheduler to tell it that the job is over.
        """
        is_possible = death.status == 0 and name != SCHEDULER and name in self._names and self._following.is_linked
        return (
            is_possible
            and self._settings.enable_recovery
            and not self._following.is_closing
            and self._has_joined(name, identity)
            and not self._training_is_finished()
        )

    def _take_death(self, descriptor: int, death: Death) -> None:
        name, identity = self._watched[descriptor]
        now, is_trained = time.monotonic(), self._training_is_finished()
        is_done = is_trained and not death.is_bad
        was_removed, has_joined = name not in self._names, self._has_joined(name, identity)
        cause = self._cause(name, death)
        is_lost = not (is_done or was_removed or (death.status == 0 and not has_joined))
        follows = self._lost(name, identity, death, cause) if is_lost else ""
        del self._watched[descriptor]
        os.close(descriptor)
        self._following.died(
            name,
            identity,
            death,
            cause,
            now,
            is_done=is_done,
            is_trained=is_trained,
            was_removed=was_removed,
            has_joined=has_joined,
            follows=follows,
        )
        is_asked_for = death.status is not None and is_trained  # the script cannot always report this itself
        if name != SCHEDULER and (death.is_bad or is_asked_for):
            said = str(cause) if isinstance(cause, Failure) else f"{death}: {cause}" if cause else str(death)
            self._undelivered.append(
                status.process_ended(node_of(name) or "", identity, _observation(death, cause), said)
            )
        self._logs.begin(name)  # for the process that replaces it
        if name == SCHEDULER:
            self._scheduler_death = death

    def _cause(self, name: str, death: Death) -> Failure | str:
        if death.signal == signal.SIGKILL:
            return self._memory_kills.cause(name)
        return self._logs.cause(name, death, Path.cwd())

    def _has_joined(self, name: str, identity: ProcessIdentity) -> bool:
        """Return whether the process has called ``samebits.init()``.

        This is assumed of processes that this follower did not start.
        """
        return not self._following.is_own(name) or self._has_registered(name, identity)

    def _look_for_silence(self, now: float) -> None:
        due = self._silence.due(now).items()
        silent = {name: waited_s for name, (one, waited_s) in due if not self._has_joined(name, one)}
        self._following.never_joined(list(silent), max(silent.values(), default=0.0))

    def _training_is_finished(self) -> bool:
        """Return whether training is finished, according to the scheduler or the journal.

        The journal contains this record before any worker exits.
        """
        view = self._following.view
        if view is not None and view.training_finished:
            return True
        stored = self._stored_view()
        return stored is not None and stored.training_finished

    def _judge_scheduler(self) -> None:
        """Read the job's state from its journal after the scheduler is gone."""
        following = self._following
        if self._scheduler_judged or following.is_linked or following.scheduler_runs():
            return
        self._scheduler_judged = True
        following.scheduler_gone(
            self._known.get(SCHEDULER),
            self._scheduler_death,
            self._stored_view(),
            last_line(self._settings.log_dir / f"{SCHEDULER}.log"),
            time.monotonic(),
        )

    # ---- restarts

    def _lost(self, name: str, identity: ProcessIdentity, death: Death, cause: Failure | str) -> str:
        """Handle the loss of a process that the job still needs, and return a description of the reaction."""
        view, is_failure = self._following.view, isinstance(cause, Failure)
        if self._supervisor is None or self._following.is_closing:
            return ""
        if name != SCHEDULER and death.status is not None and self._training_is_finished():
            return ""  # the script ended itself, so the job ends and the process is not restarted
        known = view.node(node_of(name)) if view is not None else None
        step = 0 if view is None else view.step if known is None else known.step
        seen = _observation(death, cause)
        loss = loss_of(seen, step, self._causes)
        if name == SCHEDULER and loss.sort is Sort.OWN:
            loss = replace(loss, sort=Sort.OUTSIDE)  # not the script's program, and training continues
        said = f"{spoken(name)} ({identity}) {cause if is_failure else death}"
        said += f": {cause}" if cause and not is_failure else ""
        if self._driver is not None and self._supervisor.holds and name != SCHEDULER:
            has_joined = self._has_joined(name, identity)
            is_outside = loss.sort is Sort.OUTSIDE or (loss.sort is Sort.OWN and not (has_joined or is_failure))
            now = time.monotonic()
            if is_outside and self._driver.takes(name, identity, death.status, now, has_joined=has_joined):
                return ""  # the decision about its host is shown next
        is_again = self._supervisor.died(Dead(name, identity, said, death.status, loss), time.monotonic())
        return NEW_PROCESS if is_again else ""

    def _supervise(self) -> None:
        """Restart the processes that are due, if this process is the folder's supervisor."""
        supervisor, following, now = self._supervisor, self._following, time.monotonic()
        if supervisor is None:
            return
        if self._look_at <= now:  # a fallback for changes without an event
            self._look_at = now + LOOK_S
            if not supervisor.holds and supervisor.try_to_hold():
                self._missing += [(name, one) for name, one in self._known.items() if not one.is_alive()]
            if following.view is not None and following.view.phase == "training" and following.running():
                supervisor.get_ready()
                if why := supervisor.add_spares(self._rank_bytes(), now):
                    self._screen.say(why)
        following.supervised = supervisor.holds
        if following.is_closing:
            supervisor.let_go()
        elif (given_up := supervisor.given_up()) is not None:
            following.give_up(verdict_of(given_up), now)
        else:
            self._start_due(supervisor, now)
            if self._relay is not None and supervisor.holds and (line := self._relay.look(now)):
                self._screen.say(line)
            if self._driver is not None and supervisor.holds:
                self._drive(self._driver, now)
        following.restarting = supervisor.is_at_it()
        self._report_restarts(supervisor, now)

    def _rank_bytes(self) -> int:
        """Return the resident memory of the largest worker on this machine."""
        return max(resident_bytes(identity) for identity in self._workers_here().values())

    def _report_restarts(self, supervisor: Supervisor, now: float) -> None:
        """Keep the scheduler from giving up the job while replacement processes start, which may take long."""
        if not (supervisor.holds and self._is_ours and self._following.is_linked):
            self._report_restarts_at = 0.0
        elif self._report_restarts_at <= now:
            self._report_restarts_at = now + self._settings.node_timeout_s / REPORTS_A_LEASE
            workers = (one for one in self._watched.values() if one[0] != SCHEDULER)
            if supervisor.is_at_it() or not all(self._has_registered(*one) for one in workers):
                self._link.tell(status.restarting())

    def _has_registered(self, name: str, identity: ProcessIdentity) -> bool:
        """Return whether this worker has joined the job.

        It has if the scheduler knows it, or if its log shows ``samebits.init()``.
        """
        view = self._following.view
        is_known = view is not None and any(node.identity == identity for node in view.nodes)
        return is_known or self._logs.has_spoken(name)

    def _drive(self, driver: Driver, now: float) -> None:
        """Start and drain workers as hosts come and go, and send each decision to the scheduler."""
        if not driver.is_started:
            self._poll.register(driver.start(Path.cwd()), select.POLLIN)
        turn = driver.turn(self._following.view, now)
        for line in turn.lines:
            self._screen.say(line)
        self._undelivered += [status.decision(one.text, one.drain) for one in turn.decisions]
        for name in turn.started:
            self._logs.begin(name)
        if turn.started:
            self._look_for_processes()

    def _not_yet(self) -> tuple[str, ...]:
        """Return the names of processes that must not be started yet.

        These include the scheduler, until its journal shows that it did not end the job.
        """
        return () if self._scheduler_judged else (SCHEDULER,)

    def _present_job(self) -> str:
        """Return the id of the job; empty if unknown.

        The journal comes first. A scheduler that finds none begins under a new id before it rebuilds the job from its
        workers, and the last view may still show that id.
        """
        view = self._stored_view() or self._following.view
        return "" if view is None else view.job

    def _start_due(self, supervisor: Supervisor, now: float) -> None:
        try:
            started = supervisor.start_due(now, job=self._present_job, but=self._not_yet())
        except SameBitsError as error:
            self._screen.say(f"{error}; it is retried until it succeeds")
            self._start_failed = True
            return
        for one in started:
            self._logs.begin(one.new_name)
            if one.new_name != one.name:
                self._following.forget(one.name)
                self._known.pop(one.name, None)
        if started:
            if self._start_failed:
                self._start_failed = False
                self._screen.say("processes can be started again")
            self._look_for_processes()

    def _deliver(self) -> None:
        """Send pending decisions for the job's history once the scheduler answers."""
        while self._undelivered and self._is_ours and self._following.is_linked:
            self._link.tell(self._undelivered.popleft())

    # ---- reactions

    def _tell_of_missing(self) -> None:
        """Report processes that had already ended when this follower started, unless the job is over."""
        following = self._following
        if following.view is None or following.is_closing:
            return
        while self._missing:
            name, identity = self._missing.pop()
            if self._known.get(name) == identity and not following.has_left(name):
                following.found(name, identity, is_own=False)
                follows = self._lost(name, identity, Death(), "")
                following.died(name, identity, Death(), "", time.monotonic(), follows=follows)

    def _carry_out(self) -> None:
        self._judge_scheduler()
        self._tell_of_missing()
        self._deliver()
        following, now = self._following, time.monotonic()
        self._look_at_workers(now)
        self._look_for_silence(now)
        orders = following.passed(now)
        for line in orders.lines:
            self._screen.say(line)
        if orders.stop_by is not None:
            self._stop_by, self._stop_status = orders.stop_by, orders.stop_status
        if self._stop_by is not None and self._is_ours and not self._stop_asked:
            self._link.ask_to_stop(self._stop_by, self._stop_status)
            self._stop_asked = True
        for identity, number in orders.signals:
            send_signal(identity, number)
        if not following.is_closing:
            self._look_at_stalls(now)
            self._report_recoveries()
            is_linked, running = following.is_linked, following.running()
            self._showing.show(following.view, is_linked=is_linked, running=running, now=now)
        else:
            self._showing.show_lines()
            self._showing.show_notices(following.view)

    def _report_recoveries(self) -> None:
        """Print each completed recovery, with the figures from the job's history."""
        view, feed = self._following.view, self._recoveries
        if feed is None or view is None or view.phase != "training" or feed.trained >= view.generation:
            return
        for row in feed.new():
            self._screen.say(recovery_line(row, has_steps=not self._settings.plain))
        self._settle_recoveries()

    def _settle_recoveries(self) -> None:
        """Show the number and cost of recoveries from the job's history, so that they match the history's numbers."""
        if self._recoveries is not None and self._recoveries.trained:
            self._showing.settle(len(self._recoveries.over), self._recoveries.lost_s)

    def _look_at_workers(self, now: float) -> None:
        """Report local workers that do not respond although their scheduler does."""
        if self._is_ours and self._following.is_linked and not self._following.is_closing:
            for seen in self._observer.look(self._workers_here(), now):
                self._link.tell(seen)

    def _workers_here(self) -> dict[str, ProcessIdentity]:
        """Return this machine's living workers, by node."""
        return {node: identity for name, identity in self._watched.values() if (node := node_of(name)) is not None}

    def _look_at_stalls(self, now: float) -> None:
        """Inspect local processes if the job is stuck, and kill the ones that cannot exit by themselves."""
        following = self._following
        self._stalls.look(following.view if following.is_linked else None, self._workers_here(), now)
        found = self._stalls.take(now, may_end=following.supervised and following.is_linked)
        for line in found.lines:
            self._screen.say(line)
        for identity in found.end:
            send_signal(identity, signal.SIGKILL)


def _observation(death: Death, cause: Failure | str) -> Observation:
    """Return what a process's exit status and log reveal about its end."""
    if isinstance(cause, Failure):
        return Observation(death.status, death.signal, cause.error, is_failure=True)
    is_out_of_memory = cause.startswith(OUT_OF_MEMORY)
    return Observation(death.status, death.signal, cause or str(death), is_out_of_memory=is_out_of_memory)


def _clock_time(at: float) -> str:
    """Convert a monotonic time to wall-clock time."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + at - time.monotonic()))
