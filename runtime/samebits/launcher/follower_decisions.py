"""Decide for a follower what to print, which processes to signal, and when and how the job is over.

This module does no I/O; ``samebits.launcher.follower`` has the clock, the descriptors and the terminal. The scheduler
decides how a job ended, or its journal if the scheduler is gone. If there is no scheduler to wait for, the exits of the
processes decide.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from samebits.account.job_view import JobView, PresenceState, WorkerView, names_spare
from samebits.core.causes.restarts import NO_WORKER_LEFT
from samebits.core.end_kinds import EndKind
from samebits.core.replacement_names import replaces, title_of
from samebits.launcher.job_outcome import (
    FINISHED,
    MISSING_LINES,
    Deaths,
    JobOutcome,
    WorkerExit,
    advice,
    has_no_slot,
    sentence,
    verdict_of_all,
    what_others_do,
)
from samebits.launcher.processes import SCHEDULER, Death, name_of, node_of, spoken
from samebits.printable import counted, listed
from samebits.store.process_identity import ProcessIdentity
from samebits.tracebacks import Failure


def changes(before: JobView | None, now: JobView) -> list[str]:
    """Return a sentence for each slot that has a different worker than before, once the job has begun."""
    if before is None or before.job != now.job or not (before.nodes and now.nodes) or before.generation == 0:
        return []
    lines = [_taken(before, old, new) for old, new in _successions(before, now)]
    given_up = _given_up(before, now)
    if given_up:
        lines.append(f"the job continues without {_workers(given_up)}: {_size(now)}")
    left_out = _left_out(before, now)
    if left_out:
        verb = "wait" if len(left_out) > 1 else "waits"
        lines.append(f"{_workers(left_out)} {verb} until the shard group is complete: {_size(now)}")
    joined = _joined(before, now)
    if joined:
        lines.append(f"{_workers(joined)} joined: {_size(now)}")
    lines += [f"worker {node} is back as a spare" for node in _spared(before, now)]
    return lines


def _successions(before: JobView, now: JobView) -> list[tuple[WorkerView, WorkerView]]:
    holders = {worker.slot: worker for worker in before.workers}
    pairs = [(holders[worker.slot], worker) for worker in now.workers if worker.slot in holders]
    return [(old, new) for old, new in pairs if old.node != new.node]


def _taken(before: JobView, old: WorkerView, new: WorkerView) -> str:
    is_replacement = replaces(new.node, old.node)
    is_spare = not is_replacement and before.is_spare(new.node)
    text = f"{'spare' if is_spare else 'worker'} {new.node} (pid {new.identity.pid}) took the place of "
    if is_replacement:
        return f"{text}pid {old.identity.pid}"
    later = f"; worker {old.node} becomes a spare once it is restarted" if is_spare and before.has_one_size else ""
    return f"{text}worker {old.node}{later}"


def _workers(nodes: Sequence[str]) -> str:
    """Return ``worker 1`` or ``workers 1 and 2``, without a verb."""
    return f"worker{'s' if len(nodes) > 1 else ''} {listed(map(title_of, nodes))}"


def _given_up(before: JobView, now: JobView) -> list[str]:
    held = {worker.slot for worker in now.workers}
    return [one.node for one in before.workers if not one.is_joining and one.slot not in held]


def _left_out(before: JobView, now: JobView) -> list[str]:
    members = {worker.slot: worker.node for worker in before.workers if not worker.is_joining}
    return [one.node for one in now.workers if one.is_joining and members.get(one.slot) == one.node]


def _joined(before: JobView, now: JobView) -> list[str]:
    members = {worker.slot for worker in before.workers if not worker.is_joining}
    return [one.node for one in now.workers if not one.is_joining and one.slot not in members]


def _spared(before: JobView, now: JobView) -> list[str]:
    known = {one.node for one in before.workers + before.retired}
    return [one.node for one in now.spares if one.node in known and one.presence is PresenceState.ALIVE]


def _size(view: JobView) -> str:
    return counted(view.world_size, "worker")


NEW_PROCESS = "a new process is started in its place"
NEW_PROCESSES = "new processes are started in their places"
_AS_SPARE, _AS_SPARES = "a new process is started as a spare", "new processes are started as spares"
_SPARE, _SPARES = f"a spare takes its place, and {_AS_SPARE}", f"spares take their places, and {_AS_SPARES}"
LEAVE_SHARE = 0.6  # share of the shutdown time of GRACE that a worker has to exit before SIGTERM
LEAVE_AFTER_FINISH_S = 30.0  # the program may still have results to write
AFTER_SCHEDULER_S = 1.0  # the scheduler waits for all workers that it knows, so one that still runs was unknown to it
FAILED_LEAVE_S, FAILED_KILL_S = 5.5, 8.5  # ENABLE_RECOVERY=0: everything ends within 10 s of the first death

TERM = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class FollowResult:
    """How a follower's run ended.

    ``call_again`` is true if processes of the job wait for a scheduler that gave the job up too early.
    """

    verdict: JobOutcome
    call_again: bool = False


@dataclass(slots=True)
class _Local:
    identity: ProcessIdentity
    is_own: bool
    runs: bool = True
    end: WorkerExit | None = None  # the end of a worker or spare


@dataclass(slots=True)
class FollowOrders:
    """Actions that the caller must carry out in this order."""

    lines: list[str] = field(default_factory=list)
    stop_by: str | None = None
    stop_status: int = 0  # exit code of a process whose error every retry would repeat, so that the job ends
    signals: list[tuple[ProcessIdentity, signal.Signals]] = field(default_factory=list)


class Following:
    """One follower's decisions; ``now`` is in monotonic seconds in every method.

    Args:
        recovery: ENABLE_RECOVERY.
        node_timeout_s: NODE_TIMEOUT.
        recover: the command with which a user restarts missing processes.
        restarts: whether this follower has just started the missing processes, and may be called again to do so.
        max_world_size: MAX_WORKER_NUM; node numbers from it on name spares.
        topo_timeout_s, shrink_grace_s: TOPO_TIMEOUT, and GRACE's shrink.
        shutdown_timeout_s: shutdown in GRACE, from the first request to end until SIGKILL.
        clock_time: returns the user's clock time for a value of ``now``.
    """

    def __init__(
        self,
        *,
        recovery: bool,
        node_timeout_s: float,
        recover: str,
        restarts: bool = False,
        max_world_size: int = 0,
        topo_timeout_s: float = 1800.0,
        shrink_grace_s: float = 10.0,
        shutdown_timeout_s: float = 10.0,
        clock_time: Callable[[float], str] = "{:g}".format,
    ) -> None:
        self.view: JobView | None = None
        self.is_linked = False
        self.is_closing = False
        self.result: FollowResult | None = None
        self.supervised = False  # whether dead processes are restarted
        self.restarting = False  # whether a restart is pending
        self._recovery = recovery
        self._patience_s = 2 * node_timeout_s + 1
        self._recover = recover
        self._restarts = restarts
        self._max_world_size = max_world_size
        self._topo_timeout_s = topo_timeout_s
        self._shrink_grace_s = shrink_grace_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._leave_s = LEAVE_SHARE * shutdown_timeout_s
        self._clock_time = clock_time
        self._deaths = Deaths()
        self._scheduler_why = ""  # how the scheduler ended, until this is reported
        self._failed_with = ""  # how the last started scheduler ended, if it never served
        self._fails_alike = False  # whether its predecessor ended in the same way, so nothing is reported again
        self._local: dict[str, _Local] = {}
        self._replaced: list[_Local] = []  # their ends may be reported after those of their replacements
        self._again: list[tuple[str, _Local]] = []  # names that were restarted, with the process they named before
        self._is_trained = False  # whether training is finished, according to the processes' ends
        self._was_linked = False
        self._scheduler_gone = False
        self._first_death = self._first_cause = ""
        self._is_judged_here = False  # judged by the processes' messages; the scheduler only carries out the end
        self._verdict: JobOutcome | None = None
        self._stop_by: str | None = None
        self._has_signalled = False
        self._starts_again = restarts  # at the end, when a supervisor has already released the folder
        self._targets: list[_Local] = []
        self._nobody_tells_at: float | None = None  # when to signal workers unknown to the gone scheduler
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._deserted_at: float | None = None  # when the last worker was gone
        self._orders = FollowOrders()

    # ---- events from the caller

    def found(self, name: str, identity: ProcessIdentity, *, is_own: bool) -> None:
        """Record a live process with this name, which may replace an older one."""
        before = self._local.get(name)
        self._local[name] = _Local(identity, is_own)
        if name == SCHEDULER:
            self._scheduler_gone = False
        if before is not None and not self.is_closing:
            self._replaced.append(before)
            self._again.append((name, before))

    def died(
        self,
        name: str,
        identity: ProcessIdentity,
        death: Death,
        cause: Failure | str,
        now: float,
        *,
        is_done: bool = False,
        is_trained: bool = False,
        was_removed: bool = False,
        has_joined: bool = True,
        follows: str = "",
    ) -> None:
        """Record the end of a process.

        ``cause`` is the error in its log, or "". ``is_trained``: training is finished. ``is_done``: the worker was
        expected to exit for that reason. ``was_removed``: the worker was told to leave. ``has_joined``: the worker had
        called ``samebits.init()``. ``follows``: what the launcher does in response.
        """
        self._is_trained = self._is_trained or is_trained
        known = (*self._local.values(), *self._targets, *self._replaced)
        local = next((one for one in known if one.identity == identity), None)
        if local is None:
            return
        local.runs = False
        if was_removed and not self.is_closing:
            self._say(f"{self._title(name)} (pid {identity.pid}), which was removed, {death}")
        elif name != SCHEDULER and (death.is_bad or not is_done):
            end = WorkerExit(node_of(name) or "", identity.pid, death, cause, self._is_spare(name), has_joined, follows)
            self._worker_died(local, end, now)

    def forget(self, name: str) -> None:
        """Drop this name, because its dead process is replaced by a process with another name."""
        self._local.pop(name, None)

    def give_up(self, verdict: JobOutcome, now: float) -> None:
        """End the job, because its processes are no longer restarted."""
        self._stop_for(verdict)
        self._close(verdict, now, self._leave_s)

    def never_joined(self, names: list[str], after_s: float) -> None:
        """Report that these processes have not called ``samebits.init()``, ``after_s`` after being found."""
        nodes = [node_of(name) or "" for name in names if name in self._local and self._local[name].runs]
        if nodes and not self.is_closing:
            who = f"workers {', '.join(nodes)} have" if len(nodes) > 1 else f"worker {nodes[0]} has"
            self._say(
                f"{who} run for {after_s:.0f} s without calling samebits.init(), with which a worker joins the "
                f"job. Fix: if the script never calls it, add {MISSING_LINES}"
            )

    def linked(self) -> None:
        """Record that the scheduler can be reached."""
        if (self._scheduler_gone or self._fails_alike) and not self.is_closing:
            self._say("the scheduler is reachable again")
        self._failed_with, self._fails_alike = "", False
        self.is_linked = self._was_linked = True
        self._scheduler_gone = False

    def unlinked(self) -> None:
        """Record that the scheduler can no longer be reached."""
        self.is_linked = False

    def heard(self, view: JobView, now: float) -> None:
        """Handle a snapshot from the scheduler."""
        if not view.nodes and self.view is not None and self.view.job == view.job:
            # Only the first snapshot of a large job names all workers.
            view = view.with_nodes_of(self.view)
        changed = [] if self.is_closing else changes(self.view, view)
        if changed:  # report deaths before their consequences
            self._say_deaths(now)
        self._orders.lines += changed
        before = self.view.standstill if self.view is not None else ""
        if view.standstill != before and not self.is_closing:
            self._orders.lines.append(view.standstill or "the job makes progress again")
        self.view = view
        if view.phase == "training" and view.alive == view.world_size:
            self._first_death = ""  # the job has recovered, so this is not the cause of later events
        self._judge_by(view, now)

    def scheduler_gone(
        self, identity: ProcessIdentity | None, death: Death, stored: JobView | None, last_line: str, now: float
    ) -> None:
        """Record that no scheduler of this job is running.

        ``stored`` is the state of the job in its journal.
        """
        self._scheduler_gone = True
        if stored is not None and (self.view is None or stored.job_finished or stored.ended is not None):
            self.view = stored
        if self._verdict is None and stored is not None:
            self._judge_by(stored, now)
        if self._verdict is None and death.status is not None:
            self._judge_by_status(death.status, last_line, now)
        if self.is_closing:
            self._nobody_tells_at = now + AFTER_SCHEDULER_S
            return
        who = "the scheduler" + (f" (pid {identity.pid})" if identity else "")
        why = f"{who} {death}" + (f": {last_line}" if death.status is not None and last_line else "")
        if not self._recovery:
            self._first_death = self._first_death or why
            self._close(JobOutcome.unfinished(EndKind.FAILED, f"{why} (ENABLE_RECOVERY=0: the job ends)"), now, 0.0)
        elif self._workers_run():
            self._first_death = self._first_death or why
            how = f"{death}: {last_line}" if death.status is not None and last_line else ""
            self._fails_alike, self._failed_with = bool(how) and how == self._failed_with, how
            self._scheduler_why = "" if self._fails_alike else why
            self._deaths.hold(now)

    def stop_asked(self, by: str, now: float) -> None:
        """Handle the user's request to end the job. A second request ends it at once."""
        if self._stop_by is not None:
            self._say("ending what is left at once")
            self._kill_at = now
            return
        self._stop_by = self._orders.stop_by = by
        self._say(f"{by}: ending the job")
        at_once = self.is_closing or self._scheduler_gone
        self._close(self._verdict, now, self._leave_s)
        if at_once and self._term_at is not None:
            self._term_at = now

    def passed(self, now: float) -> FollowOrders:
        """Return the actions that are due. Call this after all events have been reported."""
        if self._workers_run():
            self._deserted_at = None
        elif self._deserted_at is None:
            self._deserted_at = now
        if not self.is_closing:
            self._judge_by_processes(now)
        due_at = self._deaths.due_at()
        if due_at is not None and (due_at <= now or not self._workers_run()):
            self._say_deaths(now)
        self._say_again(now)
        if self.is_closing:
            self._send_due_signals(now)
            self._judge_end()
        orders, self._orders = self._orders, FollowOrders()
        return orders

    def wake_at(self) -> float | None:
        """Return when ``passed`` must be called even if nothing happens, or None."""
        deadlines = (self._nobody_tells_at, self._term_at, self._kill_at, self._deserted_by(), self._deaths.due_at())
        return min((at for at in deadlines if at is not None), default=None)

    def has_left(self, name: str) -> bool:
        """Return whether this worker has left the job on purpose."""
        known = None if self.view is None else self.view.node(node_of(name))
        return known is not None and known.presence is PresenceState.LEFT

    def running(self) -> int:
        """Return how many workers run on this machine, not counting processes that are known to be spares."""
        return sum(local.runs for name, local in self._local.items() if name != SCHEDULER and not self._is_spare(name))

    def is_own(self, name: str) -> bool:
        """Return whether this follower started the process with this name."""
        return name in self._local and self._local[name].is_own

    def scheduler_runs(self) -> bool:
        """Return whether the scheduler that this follower started is running."""
        return SCHEDULER in self._local and self._local[SCHEDULER].runs

    # ---- deaths

    def _worker_died(self, local: _Local, end: WorkerExit, now: float) -> None:
        if self.is_closing:
            # The scheduler reported this before the kernel did; a signal from elsewhere is the cause of its report.
            if end.death.signal is not None and not self._has_signalled and self._stop_by is None:
                self._first_death = self._first_death or str(end)
            is_script = bool(end.death.status) and not has_no_slot(end, self.view)
            if self._verdict == FINISHED and is_script and not self._has_signalled and self._stop_by is None:
                # The exit status came too late for the scheduler, which considered the script finished.
                self._verdict = JobOutcome.unfinished(EndKind.SCRIPT_FAILED, str(end), end.death.status or 0)
            if end.is_of_the_script and self._stop_by is None and not self._has_signalled:
                self._deaths.add(end, now)
            return
        local.end = end
        if (end.death.is_bad or end.is_failure or end.is_stranger) and not self._first_death:
            self._first_death = str(end)
            self._first_cause = end.cause.error if isinstance(end.cause, Failure) else end.cause
        if self._recovery or end.is_stranger:
            self._deaths.add(end, now)
        elif end.death.is_bad:  # the scheduler knows whether any other end was intended
            self._say(f"{end} (ENABLE_RECOVERY=0: the job ends)")
            self._close(JobOutcome.unfinished(EndKind.FAILED, str(end)), now, FAILED_LEAVE_S)

    def _say_deaths(self, now: float) -> None:
        for alike in self._deaths.take():
            if self._verdict is not None and self._verdict.is_permanent and str(alike[0].cause) in self._verdict.cause:
                continue  # the follower's last line names this cause
            self._say(sentence(alike) + self._what_follows(alike, now))
        if self._scheduler_why and not self.is_closing and self._workers_run():
            view = self.view
            trains = view is not None and (view.phase == "training" or (view.from_journal and view.generation > 0))
            continues = "the ranks go on until one of them is lost" if trains else "its workers wait for it"
            is_back = self.scheduler_runs()
            why, _, first = self._scheduler_why.partition(". Fix: ")
            then = "" if self.supervised else f"{self._recover} brings it back"
            fix = "; then ".join(part for part in (first, then) if part)
            self._say(self._scheduler_why if is_back else f"{why}; {continues}" + (f". Fix: {fix}" if fix else ""))
        self._scheduler_why = ""

    def _say_again(self, now: float) -> None:
        """Report restarted processes, once the ends of their predecessors have been reported."""
        due = [] if self.is_closing else [(name, before) for name, before in self._again if not before.runs]
        if due:
            self._say_deaths(now)
        for name, before in due:
            self._again.remove((name, before))
            self._replaced.remove(before)
            if name != SCHEDULER or not self._fails_alike:
                self._say(f"{self._title(name)} was started again (pid {self._local[name].identity.pid})")

    def _what_follows(self, alike: list[WorkerExit], now: float) -> str:
        """Return how the other workers continue and what the user can do, or "" if the job ends."""
        if self.is_closing or not self._workers_run() or all(self._is_started_again(end) for end in alike):
            return ""
        meanwhile = ""
        if alike[0].has_own_advice:
            return ""
        if self.supervised:
            return self._starts_again_said(alike) if alike[0].follows else ""
        if self._recovery and self.running() and not all(has_no_slot(end, self.view) for end in alike):
            until = self._clock_time(now + self._topo_timeout_s)
            meanwhile = what_others_do(
                len(alike),
                self.view,
                waiting=f"until {until} (TOPO_TIMEOUT={self._topo_timeout_s:g} s)",
                shrinking=f"after {self._shrink_grace_s:g} s (shrink in GRACE)",
            )
        return meanwhile + advice(alike, self._recover)

    def _starts_again_said(self, alike: list[WorkerExit]) -> str:
        """Return how these processes are replaced: by spares as long as there are any, then by new processes."""
        if not alike[0].is_spare and all(has_no_slot(end, self.view) for end in alike):  # the slots are taken already
            return f"; {_AS_SPARE if len(alike) == 1 else _AS_SPARES}"
        spares = self.view.spares_alive if self.view is not None else 0
        if alike[0].is_spare or len(alike) > spares:
            return f"; {alike[0].follows if len(alike) == 1 else NEW_PROCESSES}"
        return f"; {_SPARE if len(alike) == 1 else _SPARES}"

    def _is_started_again(self, end: WorkerExit) -> bool:
        """Return whether a new process has been started under this process's name."""
        local = self._local.get(name_of(end.node))
        return local is not None and local.identity.pid != end.pid

    # ---- how the job ended

    def _judge_by(self, view: JobView, now: float) -> None:
        if self._is_judged_here:
            return
        if view.job_finished:
            self._verdict = FINISHED
            self._close(FINISHED, now, LEAVE_AFTER_FINISH_S)
        elif view.ended is not None:
            self._verdict = JobOutcome.unfinished(view.ended.kind, view.ended.cause, view.ended.status)
            self._close(self._verdict, now, self._leave_s)

    def _judge_by_status(self, status: int, last_line: str, now: float) -> None:
        if (kind := EndKind.of_exit_code(status)) is not None:
            self._close(JobOutcome.unfinished(kind, last_line), now, self._leave_s)
        elif status == 0 and not self._recovery:
            self._close(FINISHED, now, LEAVE_AFTER_FINISH_S)
        elif status != 0 and not self._was_linked and not self._restarts:
            # The scheduler never served, so the workers that were started with it wait in vain.
            self._close(JobOutcome(EndKind.FAILED, f"the scheduler could not start: {last_line}", status), now, 0.0)

    def _judge_by_processes(self, now: float) -> None:
        if self._workers_run():
            return
        ends = [local.end for name, local in self._local.items() if name != SCHEDULER and local.end is not None]
        verdict = verdict_of_all(ends, self.view, is_trained=self._is_trained)
        has_trained = self.view is not None and self.view.generation > 0
        if self.restarting and (verdict is None or has_trained):
            return  # another attempt may succeed
        if verdict is not None:
            self._stop_for(verdict)
            self._close(verdict, now, self._leave_s)
        elif self._scheduler_gone and self._has_trained_here(ends):
            self._close(FINISHED, now, LEAVE_AFTER_FINISH_S)  # the journal is on another host
        elif self._scheduler_gone:
            gone = "every process of the job is gone"
            self._close(JobOutcome.unfinished(EndKind.INTERRUPTED, self._first_death or gone), now, 0.0)
        elif (due := self._deserted_by()) is not None and due <= now:
            cause = f"no worker is left, and none has registered; first cause: {self._first_death or 'unknown'}"
            self._is_judged_here, self._orders.stop_by = True, cause
            self._close(JobOutcome.unfinished(EndKind.INTERRUPTED, cause), now, self._leave_s)

    def _stop_for(self, verdict: JobOutcome) -> None:
        """Ask the scheduler to end the job with this outcome."""
        self._is_judged_here, self._orders.stop_by = True, verdict.cause
        self._orders.stop_status = verdict.exit_code if verdict.is_permanent else 0

    def _has_trained_here(self, ends: list[WorkerExit]) -> bool:
        """Return whether training was reported as finished and every process here ended without an error."""
        return self.view is not None and self.view.training_finished and all(end.death.status == 0 for end in ends)

    def _deserted_by(self) -> float | None:
        """Return when to give up a job that has no workers left, for which the scheduler would wait forever."""
        if self._deserted_at is None or self.view is None or self.view.workers or self.is_closing or self.restarting:
            return None
        return self._deserted_at + self._patience_s

    # ---- closing

    def _close(self, verdict: JobOutcome | None, now: float, leave_s: float) -> None:
        """End the job or record its end, and give the remaining processes ``leave_s`` seconds to exit."""
        self._verdict = self._verdict or verdict
        if self.is_closing:
            return
        self.is_closing = True
        self._starts_again = self._restarts or self.supervised
        self._targets = [local for local in self._local.values() if local.runs and not self._is_spared(local)]
        self._term_at = now + leave_s
        is_long = leave_s > self._leave_s
        self._kill_at = now + (leave_s + self._shutdown_timeout_s / 2 if is_long else self._shutdown_timeout_s)
        if verdict is not None and verdict.kind is EndKind.FAILED:
            self._kill_at = now + min(FAILED_KILL_S, self._shutdown_timeout_s)

    def _is_spared(self, local: _Local) -> bool:
        """Return whether this worker is left running although the scheduler has ended the job.

        This is a worker that the scheduler did not know, so it waits for the next scheduler. If another follower
        started it, that follower looks after it. If this follower started it, this follower is called again, provided
        that the job was given up only because no worker was left.
        """
        verdict = self._verdict
        if self._stop_by is not None or verdict is None or verdict.kind is not EndKind.INTERRUPTED:
            return False
        is_called_again = self._starts_again and verdict.cause.startswith(NO_WORKER_LEFT)
        return (is_called_again or not local.is_own) and not self._is_known(local)

    def _is_known(self, local: _Local) -> bool:
        """Return whether this process is the scheduler, or a worker that the scheduler knows."""
        if self._local.get(SCHEDULER) is local:
            return True
        return self.view is not None and local.identity in {one.identity for one in self.view.nodes}

    def _send_due_signals(self, now: float) -> None:
        if self._nobody_tells_at is not None and self._nobody_tells_at <= now:
            self._nobody_tells_at = None
            has_told = self._verdict is not None
            self._signal([one for one in self._targets if one.runs and not (has_told and self._is_known(one))], TERM)
        if self._kill_at is not None and self._kill_at <= now:
            self._kill_at = self._term_at = self._nobody_tells_at = None
            self._signal([local for local in self._targets if local.runs], signal.SIGKILL)
        elif self._term_at is not None and self._term_at <= now:
            self._term_at = None
            self._signal([local for local in self._targets if local.runs], TERM)

    def _signal(self, locals_: list[_Local], number: signal.Signals) -> None:
        self._has_signalled = self._has_signalled or bool(locals_)
        self._orders.signals += [(local.identity, number) for local in locals_]

    def _judge_end(self) -> None:
        if any(local.runs for local in self._targets):
            return
        verdict = self._verdict or JobOutcome.unfinished(EndKind.STOPPED, f"stopped by {self._stop_by or 'its user'}")
        waiting = any(local.runs and self._is_spared(local) for local in self._local.values())
        self.result = FollowResult(verdict, call_again=self._starts_again and waiting)

    # ---- helpers

    def first_death(self, cause: str) -> str:
        """Return the first process that ended, and why; "" if there is none or if ``cause`` already names it."""
        is_told = self._first_death in cause or (self._first_cause and self._first_cause in cause)
        return "" if is_told else self._first_death

    def _workers_run(self) -> bool:
        """Return whether a worker runs on this machine, or a spare that may become one."""
        return any(local.runs for name, local in self._local.items() if name != SCHEDULER)

    def _is_spare(self, name: str) -> bool:
        node = node_of(name)
        return names_spare(node, self._max_world_size) if self.view is None else self.view.is_spare(node)

    def _title(self, name: str) -> str:
        return f"spare {node_of(name)}" if self._is_spare(name) else spoken(name)

    def _say(self, text: str) -> None:
        self._orders.lines.append(text)
