"""Run one job of a drill: start it, inject faults, and restart it, each as a user would.

Every rank waits at the commit that was chosen for a fault. Then the ranks may run up to the next commit, and the fault
strikes on the way there, as it would without a drill: between two lines of a step. A fault is over when the job's
events show that the job trains again. No fault is timed by a clock, so a drill works for jobs of any length and speed.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from samebits.account.event_log import read_events
from samebits.account.events import EventKind, JobEvent
from samebits.account.job_view import JobView
from samebits.commands.drill.faults import FaultContext, Tools, give
from samebits.commands.drill.orders import ImpossibleError
from samebits.commands.drill.plan import AwaitedEvent, DrillOutcome, Injected, NotInjected, Planned
from samebits.errors import JournalDamagedError, StoreError
from samebits.launcher import job_spec
from samebits.launcher.processes import SCHEDULER, end, name_of, process_names, read_pid_files
from samebits.printable import IN_LOGS, shortened
from samebits.service.status import stored_view
from samebits.store import private
from samebits.store.process_identity import ProcessIdentity
from samebits.store.text_log import EVENTS_FILE

LOOK_S = 0.1
SPAN_LOOK_S = 0.05
PATIENCE_S = 240.0  # how long to wait for a job to train again, or to end, while nothing new happens
REVIVE_AFTER_S = 3.0  # after this time without a follower, lost processes are restarted
FOLLOWER_MAY_TAKE_S = 60.0  # time for a follower to restart lost processes by itself
GRACE_S = 10.0
MOST_SAID, MAX_SAID = 20, 600
_OF_A_LINE = re.compile(r"^\S+ \S+ samebits worker [^:\n]+: ([\w./-]+\.py:\d+: .+)$", re.MULTILINE)


class EventsFileWatch:
    """Measures a job's duration by the drill's own clock, from its first to its last event on disk.

    The job's account is checked against a time that does not come from its events, so a thread watches the events file
    of this folder until it is closed.
    """

    def __init__(self, recovery_path: Path) -> None:
        self._path = recovery_path / EVENTS_FILE
        self._known = (0, 0)  # the file's size and inode
        self._first_s: float | None = None
        self._last_s = 0.0
        self._over = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="samebits-drill-span", daemon=True)
        self._thread.start()

    def close(self) -> float | None:
        """Return the seconds between the file's first and last change, or None if it never changed."""
        self._over.set()
        self._thread.join()
        self._look()
        return None if self._first_s is None else self._last_s - self._first_s

    def _run(self) -> None:
        while not self._over.wait(SPAN_LOOK_S):
            self._look()

    def _look(self) -> None:
        try:
            found = self._path.stat()
        except OSError:
            return
        if found.st_size and (found.st_size, found.st_ino) != self._known:
            self._known, self._last_s = (found.st_size, found.st_ino), time.monotonic()
            self._first_s = self._last_s if self._first_s is None else self._first_s


class Rehearsal:
    """One job of the drill in its own folder.

    Args:
        folder: the job's folder, created here.
        start: the words of ``samebits run`` that start the job, without its port.
        environment: the environment of all its processes.
        size: the intended number of workers and spares.
        port: the port at which its scheduler is reached.
        say: called with a sentence for each fault, as soon as the fault is over.
    """

    def __init__(
        self,
        folder: Path,
        start: Sequence[str],
        environment: Mapping[str, str],
        size: int,
        port: int,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._environment, self._size = folder, dict(environment), size
        self._say = say
        self._start, self._port = ["--sched-port", str(port), *start], port
        self._followers: list[subprocess.Popen[bytes]] = []
        self._whole_at = 0.0
        self._answered = 0  # number of ends after which the drill restarted the job
        self._tools = Tools()
        self._damaged: set[Path] = set()

    def run(self, plan: Sequence[Planned] = (), steps: Sequence[int] = (), step_s: float = 0.0) -> DrillOutcome:
        """Start the job, inject the faults at these steps, and wait for its end; then end remaining processes.

        Args:
            step_s: approximate duration of a step, in seconds.
        """
        self._folder.mkdir(mode=0o700, parents=True)
        outcome, began = DrillOutcome(), time.monotonic()
        kinds = {planned.fault for planned in plan}
        self._tools = Tools.made(self._folder, kinds, self._port, self._environment)
        self._environment.update(self._tools.environment)
        span = EventsFileWatch(self._folder / "recovery")
        try:
            goes_on = True
            self._hold_at(steps[0] if steps else 0)
            self._follow(["run", *self._start])
            for number, (planned, step) in enumerate(zip(plan, steps, strict=True), 1):
                goes_on = goes_on and self._wait(self._all_wait)
                one = self._inject(planned, [*steps, 0][number], step_s) if goes_on else self._missed(planned, step)
                goes_on = goes_on and (isinstance(one, NotInjected) or one.recovered_s is not None)
                outcome.add(one)
                self._say(f"fault {number} of {len(plan)}, {one}")
            self._hold_at(0)
            self._wait(self._is_over)
        finally:
            outcome.wall_s = time.monotonic() - began
            self._end()
            self._tools.close()
            outcome.seen_s = span.close()
        outcome.events, outcome.damaged = self._events(), self._damaged
        outcome.said = warnings_in(self._folder / "device")
        outcome.problem = self._problem(outcome)
        return outcome

    def _problem(self, outcome: DrillOutcome) -> str:
        if any(event.kind is EventKind.FINISHED for event in outcome.events):
            return ""
        ends = [event.text for event in outcome.events if event.kind is EventKind.INTERRUPTED]
        if len(ends) > self._answered:
            return ends[-1]
        stuck = [one for one in outcome.injected if one.recovered_s is None]
        if stuck:
            return f"it did not train again within {PATIENCE_S:g} s after fault {stuck[-1]}"
        said = (self._folder / "follower.log").read_text(errors="replace").strip().splitlines()
        return "it did not finish" + (f": {shortened(said[-1], MAX_SAID, IN_LOGS)}" if said else "")

    # ---- waiting

    def _events(self) -> list[JobEvent]:
        try:
            return read_events(self._folder / "recovery")
        except StoreError:
            return []

    def _is_over(self, events: Sequence[JobEvent]) -> bool:
        """Return whether the job is finished, or was ended by something other than the drill."""
        ends = [event.kind for event in events if event.kind in (EventKind.FINISHED, EventKind.INTERRUPTED)]
        return is_over(events) and (
            ends[-1] is EventKind.FINISHED or ends.count(EventKind.INTERRUPTED) > self._answered
        )

    def _wait(self, done: Callable[[list[JobEvent]], bool]) -> bool:
        """Wait until ``done(events)``. Return False if the job is over, or nothing happens any more."""
        seen, deadline = 0, time.monotonic() + PATIENCE_S
        while True:
            events = self._events()
            if done(events):
                return True
            if self._is_over(events):
                return False
            if len(events) != seen:
                seen, deadline = len(events), time.monotonic() + PATIENCE_S
            if time.monotonic() > deadline or (not events and all(one.poll() is not None for one in self._followers)):
                return False
            self._revive()
            time.sleep(LOOK_S)

    def _hold_at(self, step: int) -> None:
        """Make the ranks wait from this step on; 0: they do not wait."""
        if self._tools.orders is not None:
            self._tools.orders.hold_at(step)

    def _held_at(self) -> int:
        """Return the step at which every member waits, or 0 if any of them does not."""
        running = self._running()
        pids = {running[name].pid for name in self._slots(running)}
        orders = self._tools.orders
        found = {} if orders is None else orders.held(pids)
        return min(found.values()) if found and len(found) == len(pids) else 0

    def _all_wait(self, events: list[JobEvent]) -> bool:
        return trains_since(events) is not None and self._held_at() > 0

    def _missed(self, planned: Planned, step: int) -> NotInjected:
        """Return why no fault could be injected at this step."""
        is_ended = is_over(self._events())
        when = "before the job ended" if is_ended else f"while nothing happened for {PATIENCE_S:g} s"
        return NotInjected(planned.fault, f"its ranks did not all commit step {step} {when}")

    # ---- processes

    def _nodes(self) -> list[str]:
        log_dir = self._folder / "device"
        kept = job_spec.read(log_dir)
        return list(job_spec.nodes_of(log_dir, kept.settings())) if kept is not None else []

    def _running(self) -> dict[str, ProcessIdentity]:
        try:
            found = read_pid_files(self._folder / "device", process_names(self._nodes()))
        except (StoreError, OSError):
            return {}
        return {name: identity for name, identity in found.items() if identity.is_alive()}

    def _view(self) -> JobView | None:
        with contextlib.suppress(JournalDamagedError):
            return stored_view(self._folder / "recovery")
        return None

    def _slots(self, running: Mapping[str, ProcessIdentity]) -> dict[str, int]:
        """Return the running workers by name."""
        view = self._view()
        workers = () if view is None else view.workers
        found = {name_of(one.node): one.slot for one in workers}
        return {name: slot for name, slot in found.items() if slot is not None and name in running}

    def _follow(self, words: Sequence[str]) -> None:
        with os.fdopen(private.open_to_append(self._folder / "follower.log"), "ab") as log:
            self._followers.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "samebits", *words],
                    cwd=self._folder,
                    env=dict(self._environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _revive(self) -> None:
        """Restart lost processes if no follower does so by itself.

        A follower that is still starting them is left alone: on a busy machine, its imports alone may take long.
        """
        now, running = time.monotonic(), self._running()
        is_followed = any(one.poll() is None for one in self._followers)
        if not self._events() or (SCHEDULER in running and len(running) > self._size):
            self._whole_at = now
        elif self._whole_at and now - self._whole_at > (FOLLOWER_MAY_TAKE_S if is_followed else REVIVE_AFTER_S):
            self._whole_at = now + REVIVE_AFTER_S
            self._leave_followers()
            self._follow(["recover"])

    def _leave_followers(self) -> None:
        """End the job's followers, which changes nothing for the job."""
        for one in self._followers:
            if one.poll() is None:
                one.kill()
            one.wait()
        self._followers.clear()

    def _end(self) -> None:
        deadline = time.monotonic() + GRACE_S
        while any(one.poll() is None for one in self._followers) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._leave_followers()
        for identity in self._running().values():
            end(identity, GRACE_S)

    # ---- faults

    def _scene(self, planned: Planned, next_step: int) -> FaultContext | None:
        """Return the job's current members and events for a fault, or None if no rank trains."""
        running = self._running()
        slots = self._slots(running)
        kept = job_spec.read(self._folder / "device")
        view = self._view()
        if not slots or kept is None or view is None:
            return None
        lease_s = kept.settings().node_timeout_s
        members = sorted(slots, key=slots.__getitem__)
        return FaultContext(
            self._folder,
            view.job,
            lease_s,
            running,
            members,
            slots,
            planned,
            self._tools,
            self._events,
            self._wait,
            self._leave_followers,
            lambda: self._hold_at(0 if planned.fault.needs_steps else next_step),
        )

    def _inject(self, planned: Planned, next_step: int, step_s: float) -> Injected | NotInjected:
        """Inject the fault while all ranks wait, wait until they train again, and stop them at ``next_step``."""
        try:
            return self._inject_after(self._held_at(), planned, next_step, step_s)
        finally:
            self._hold_at(next_step)

    def _inject_after(self, step: int, planned: Planned, next_step: int, step_s: float) -> Injected | NotInjected:
        scene, before = self._scene(planned, next_step), self._events()
        if scene is None or not step:
            return NotInjected(planned.fault, "a rank was lost just before it was due")
        self._hold_at(step + 1)  # the fault strikes there at the latest
        time.sleep(planned.moment * step_s)
        at = time.time()
        try:
            what = give(scene)
        except ImpossibleError as error:
            return NotInjected(planned.fault, str(error))
        scene.let_go()
        self._damaged.update(what.damaged)
        given = Injected(planned.fault, what.node, step, at, did=what.did)
        is_met = self._wait(lambda events: _is_noticed(planned.fault.notice, before, events))
        if is_met and planned.fault.notice is AwaitedEvent.END:
            is_met = self._bring_back()
        later = [event for event in self._events() if event.at >= at]
        if is_met or any(event.kind in (EventKind.FINISHED, EventKind.TRAINED) for event in later):
            again = [event.at for event in later if event.kind in (EventKind.TRAINING, EventKind.TRAINED)]
            given.recovered_s = round(again[0] - at, 3) if again else 0.0
            given.trained_on = not any(_stops_training(event) for event in later)
        return given

    def _bring_back(self) -> bool:
        """Wait until the job trains again. If the fault ended it, restart it with ``recover`` as a user would."""
        if self._wait(lambda found: trains_since(found) is not None):
            return True
        events = self._events()
        if not is_over(events) or events[-1].kind is EventKind.FINISHED:
            return False
        self._end()
        self._answered = _count(events, EventKind.INTERRUPTED)
        self._follow(["recover"])
        return self._wait(lambda found: trains_since(found) is not None)


def is_over(events: Sequence[JobEvent]) -> bool:
    """Return whether the job is finished, or was ended and not restarted."""
    for event in reversed(events):
        if event.kind in (EventKind.FINISHED, EventKind.INTERRUPTED):
            return True
        if event.kind is EventKind.SCHEDULER:
            return False
    return False


def trains_since(events: Sequence[JobEvent]) -> float | None:
    """Return the time since which every member trains; None if some member does not."""
    for event in reversed(events):
        if event.kind is EventKind.TRAINING:
            return event.at
        if event.kind in (EventKind.LOST, EventKind.LEFT) and not event.more.get("spare"):
            return None  # a round for it is about to open
        if event.kind in (
            EventKind.ROLLED_BACK,
            EventKind.ROUND,
            EventKind.GENERATION,
            EventKind.SCHEDULER,
            EventKind.TRAINED,
            EventKind.FINISHED,
            EventKind.INTERRUPTED,
        ):
            return None
    return None


def _stops_training(event: JobEvent) -> bool:
    """Return whether training stops at this event, until the next event in which every member trains."""
    is_loss = event.kind is EventKind.LOST and not event.more.get("spare")
    is_round = event.kind is EventKind.ROUND and not event.more.get("gently")
    return is_loss or is_round or event.kind in (EventKind.GENERATION, EventKind.INTERRUPTED)


def _is_noticed(notice: AwaitedEvent, before: Sequence[JobEvent], events: Sequence[JobEvent]) -> bool:
    """Return whether the events since ``before`` show that the fault affected the job and that it trains again."""
    grown = {kind for kind in EventKind if _count(events, kind) > _count(before, kind)}
    match notice:
        case AwaitedEvent.END:
            ends = {EventKind.INTERRUPTED, EventKind.LOST, EventKind.ROLLED_BACK, EventKind.FINISHED}
            return bool(grown & ends)
        case AwaitedEvent.LOSS:
            is_met = bool(grown & {EventKind.LOST, EventKind.LEFT, EventKind.RETURNED})
        case AwaitedEvent.TERM:
            is_met = EventKind.SCHEDULER in grown
        case AwaitedEvent.NOTHING:
            is_met = True
    return is_met and trains_since(events) is not None


def _count(events: Sequence[JobEvent], kind: EventKind) -> int:
    return sum(event.kind is kind for event in events)


def warnings_in(log_dir: Path) -> list[str]:
    """Return each warning with a line of the script (``train.py:46: …``) in the workers' logs, without repetitions."""
    found: dict[str, None] = {}
    for log in sorted(log_dir.glob("worker_*.log")):
        for text in _OF_A_LINE.findall(log.read_text(errors="replace")):
            found.setdefault(shortened(text, MAX_SAID, IN_LOGS))
    return list(found)[:MOST_SAID]


def free_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that point to another job."""
    names = ("ROLE", "NODE_ID", "RECOVERY_PATH", "LOG_DIR", "CHECKPOINT_PATH", "SCHED_PORT", "SCHED_HOST", "JOB_NAME")
    drop = {prefix + name for name in names for prefix in ("", "MS_")}
    return {**{name: text for name, text in environ.items() if name not in drop}, "PYTHONPATH": _python_path(environ)}


def _python_path(environ: Mapping[str, str]) -> str:
    here = str(Path(__file__).resolve().parents[3])  # so that the job uses this copy of the package
    return os.pathsep.join([here, *filter(None, [environ.get("PYTHONPATH", "")])])
