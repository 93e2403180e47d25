"""One job of a drill: started as a user starts it, disturbed by signals, brought back as a user brings it back.

Processes and waiting live here. The one idea: the job's events say when it trains, so a fault is given only to a job
that trains, and is over when the job trains again; nothing is timed that an event can tell.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.core.events import Event, Kind
from runtime.errors import JournalDamagedError, StoreError
from runtime.ops import kept_start
from runtime.ops.drill.plan import Fault, Planned
from runtime.ops.job_view import stored_view
from runtime.ops.local_processes import SCHEDULER, end, name_of, process_names, read_pid_files, send_signal
from runtime.service.events import read_events
from runtime.store.process_identity import ProcessIdentity

LOOK_S = 0.1
PATIENCE_S = 240.0  # for a job to train again, or to end, while nothing new happens
REVIVE_AFTER_S = 3.0  # so long a follower has to bring back by itself what is gone
PAUSE_S = 1.0
GRACE_S = 10.0


@dataclass(slots=True)
class Injected:
    """A fault that was given; ``recovered_s`` until every member trained again, None where it never did."""

    fault: Fault
    node: str
    step: int
    at: float
    recovered_s: float | None = None

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "fault": str(self.fault)}


@dataclass(slots=True)
class Outcome:
    """How a job of the drill went; ``problem`` is empty where it finished."""

    events: list[Event] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    wall_s: float = 0.0
    problem: str = ""


class Rehearsal:
    """One job in a folder of its own.

    Args:
        folder: where; made here.
        start: the words of ``samebits run`` that start it.
        environment: of all its processes.
        size: how many workers and spares there are to be.
    """

    def __init__(self, folder: Path, start: Sequence[str], environment: Mapping[str, str], size: int) -> None:
        self._folder, self._start, self._environment, self._size = folder, start, environment, size
        self._followers: list[subprocess.Popen[bytes]] = []
        self._whole_at = 0.0

    def run(self, plan: Sequence[Planned]) -> Outcome:
        """Start it, give it the faults, and see it to its end; whatever still runs then is ended."""
        self._folder.mkdir(mode=0o700, parents=True)
        outcome, began = Outcome(), time.monotonic()
        try:
            self._follow(["run", *self._start])
            for planned in plan:
                if not self._wait_for_training(planned.after_s) or not self._inject(planned, outcome):
                    break
            self._wait(lambda events: _is_over(events))
        finally:
            outcome.wall_s = time.monotonic() - began
            self._end()
        outcome.events = self._events()
        outcome.problem = self._problem(outcome)
        return outcome

    def _problem(self, outcome: Outcome) -> str:
        if any(event.kind is Kind.FINISHED for event in outcome.events):
            return ""
        ends = [event.text for event in outcome.events if event.kind is Kind.INTERRUPTED]
        if ends:
            return ends[-1]
        stuck = [one for one in outcome.injected if one.recovered_s is None]
        if stuck:
            return f"it did not train again within {PATIENCE_S:g} s after {stuck[-1].fault.text}"
        said = (self._folder / "follower.log").read_text(errors="replace").strip().splitlines()
        return "it did not finish" + (f": {said[-1][:300]}" if said else "")

    # ---- waiting

    def _events(self) -> list[Event]:
        try:
            return read_events(self._folder / "recovery")
        except StoreError:
            return []

    def _wait(self, done: Any) -> bool:
        """Until ``done(events)``; False where the job is over, or nothing happens any more."""
        seen, deadline = 0, time.monotonic() + PATIENCE_S
        while True:
            events = self._events()
            if done(events):
                return True
            if _is_over(events):
                return False
            if len(events) != seen:
                seen, deadline = len(events), time.monotonic() + PATIENCE_S
            if time.monotonic() > deadline or (not events and all(one.poll() is not None for one in self._followers)):
                return False
            self._revive()
            time.sleep(LOOK_S)

    def _wait_for_training(self, for_s: float) -> bool:
        """Until it has trained for this long, without a break."""

        def has_trained(events: list[Event]) -> bool:
            since = trains_since(events)
            return since is not None and time.time() - since >= for_s and bool(self._running())

        return self._wait(has_trained)

    # ---- processes

    def _nodes(self) -> list[str]:
        log_dir = self._folder / "device"
        kept = kept_start.read(log_dir)
        return list(kept_start.nodes_of(log_dir, kept.settings())) if kept is not None else []

    def _running(self) -> dict[str, ProcessIdentity]:
        try:
            found = read_pid_files(self._folder / "device", process_names(self._nodes()))
        except (StoreError, OSError):
            return {}
        return {name: identity for name, identity in found.items() if identity.is_alive()}

    def _members(self, running: Mapping[str, ProcessIdentity]) -> list[str]:
        with contextlib.suppress(JournalDamagedError):
            view = stored_view(self._folder / "recovery")
            if view is not None:
                return [name for worker in view.workers if (name := name_of(worker.node)) in running]
        return []

    def _follow(self, words: Sequence[str]) -> None:
        with (self._folder / "follower.log").open("ab") as log:
            self._followers.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "runtime", *words],
                    cwd=self._folder,
                    env=dict(self._environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _revive(self) -> None:
        """Bring back what is gone, where no follower does so by itself."""
        now, running = time.monotonic(), self._running()
        if not self._events() or (SCHEDULER in running and len(running) > self._size):
            self._whole_at = now
        elif self._whole_at and now - self._whole_at > REVIVE_AFTER_S:
            self._whole_at = now + REVIVE_AFTER_S
            self._leave_followers()
            self._follow(["recover"])

    def _leave_followers(self) -> None:
        """A follower's end changes nothing for its job."""
        for one in self._followers:
            if one.poll() is None:
                one.kill()
            one.wait()
        self._followers.clear()

    def _end(self) -> None:
        deadline = time.monotonic() + GRACE_S
        for one in self._followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(max(0.1, deadline - time.monotonic()))
        self._leave_followers()
        for identity in self._running().values():
            end(identity, GRACE_S)

    # ---- faults

    def _inject(self, planned: Planned, outcome: Outcome) -> bool:
        """Give the fault, and wait until every member trains again."""
        running, events = self._running(), self._events()
        members = self._members(running)
        if not members:
            return not _is_over(events)
        fault = planned.fault
        name = SCHEDULER if fault in (Fault.SCHEDULER, Fault.EVERYTHING) else planned.pick(members)
        given = Injected(fault, "" if fault is Fault.ALL else name, max(event.step for event in events), time.time())
        outcome.injected.append(given)
        terms, losses = _count(events, Kind.SCHEDULER), _count(events, Kind.LOST)
        match fault:
            case Fault.KILL | Fault.SCHEDULER if name in running:
                send_signal(running[name], signal.SIGKILL)
            case Fault.SEGFAULT:
                send_signal(running[name], signal.SIGSEGV)
            case Fault.ALL | Fault.EVERYTHING:
                spared = {SCHEDULER} if fault is Fault.ALL else set()
                for one in running.keys() - spared:
                    send_signal(running[one], signal.SIGKILL)
            case Fault.PAUSE:
                send_signal(running[name], signal.SIGSTOP)
                time.sleep(PAUSE_S)
                send_signal(running[name], signal.SIGCONT)
            case Fault.STOP:
                send_signal(running[name], signal.SIGSTOP)
                self._wait(lambda found: _count(found, Kind.LOST) > losses)
                send_signal(running[name], signal.SIGCONT)

        def is_noticed(found: list[Event]) -> bool:
            is_restarted = _count(found, Kind.SCHEDULER) > terms
            is_lost = _count(found, Kind.LOST) > losses or _count(found, Kind.RETURNED) > 0
            needs = is_restarted if fault in (Fault.SCHEDULER, Fault.EVERYTHING) else is_lost
            return (needs or fault is Fault.PAUSE) and trains_since(found) is not None

        if self._wait(is_noticed):
            later = [event.at for event in self._events() if event.kind is Kind.TRAINING and event.at >= given.at]
            given.recovered_s = round(max(0.0, later[0] - given.at), 3) if later else 0.0
            return True
        if any(event.kind in (Kind.FINISHED, Kind.TRAINED) for event in self._events()):
            given.recovered_s = 0.0  # it came at the very end
        return False


def _is_over(events: Sequence[Event]) -> bool:
    """Whether the job is finished, or was ended and not started again."""
    for event in reversed(events):
        if event.kind in (Kind.FINISHED, Kind.INTERRUPTED):
            return True
        if event.kind is Kind.SCHEDULER:
            return False
    return False


def trains_since(events: Sequence[Event]) -> float | None:
    """Since when every member trains; None while they do not."""
    for event in reversed(events):
        if event.kind is Kind.TRAINING:
            return event.at
        if event.kind is Kind.LOST and not event.more.get("spare"):
            return None  # its round is about to open
        if event.kind in (Kind.ROUND, Kind.GENERATION, Kind.SCHEDULER, Kind.TRAINED, Kind.FINISHED, Kind.INTERRUPTED):
            return None
    return None


def _count(events: Sequence[Event], kind: Kind) -> int:
    return sum(event.kind is kind for event in events)


def free_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what names another job's place."""
    names = ("ROLE", "NODE_ID", "RECOVERY_PATH", "LOG_DIR", "CHECKPOINT_PATH", "SCHED_PORT", "SCHED_HOST", "JOB_NAME")
    drop = {prefix + name for name in names for prefix in ("", "MS_")}
    return {**{name: text for name, text in environ.items() if name not in drop}, "PYTHONPATH": _python_path(environ)}


def _python_path(environ: Mapping[str, str]) -> str:
    here = str(Path(__file__).resolve().parents[3])  # so that the job runs this very package
    return os.pathsep.join([here, *filter(None, [environ.get("PYTHONPATH", "")])])
