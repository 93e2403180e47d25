"""One job of a drill: started as a user starts it, disturbed, brought back as a user brings it back.

Processes and waiting live here. The one idea: the job's events say when it trains, so a fault is given only to a job
that trains, and is over when the job trains again; nothing is timed that an event can tell.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.core.events import Event, Kind
from samebits.errors import JournalDamagedError, StoreError
from samebits.ops import kept_start
from samebits.ops.drill.faults import Scene, Tools, give
from samebits.ops.drill.impossible import ImpossibleError
from samebits.ops.drill.plan import Fault, Notice, Planned
from samebits.ops.drill.span import Span
from samebits.ops.job_view import JobView, stored_view
from samebits.ops.local_processes import SCHEDULER, end, name_of, process_names, read_pid_files
from samebits.service.events import read_events
from samebits.store import private
from samebits.store.process_identity import ProcessIdentity

LOOK_S = 0.1
PATIENCE_S = 240.0  # for a job to train again, or to end, while nothing new happens
REVIVE_AFTER_S = 3.0  # so long a follower has to bring back by itself what is gone
GRACE_S = 10.0
MOST_SAID, MAX_SAID = 20, 600
_OF_A_LINE = re.compile(r"^\S+ \S+ samebits worker [^:\n]+: ([\w./-]+\.py:\d+: .+)$", re.MULTILINE)


@dataclass(slots=True)
class Injected:
    """A fault that was given, and what was done; ``recovered_s`` until every member trained again, None: never."""

    fault: Fault
    node: str
    step: int
    at: float
    recovered_s: float | None = None
    did: str = ""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "fault": str(self.fault)}


@dataclass(frozen=True, slots=True)
class NotInjected:
    """A planned fault that was not given, and why."""

    fault: Fault
    why: str


@dataclass(slots=True)
class Outcome:
    """How a job of the drill went; ``problem`` is empty where it finished.

    ``damaged`` are checkpoints in which the drill has changed a bit; ``said`` what its workers have warned of;
    ``seen_s`` how long it lasted from its first event to its last, by the drill's own clock (None: there was none).
    """

    events: list[Event] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    not_injected: list[NotInjected] = field(default_factory=list)
    damaged: set[Path] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    seen_s: float | None = None
    problem: str = ""


class Rehearsal:
    """One job in a folder of its own.

    Args:
        folder: where; made here.
        start: the words of ``samebits run`` that start it, but for its port.
        environment: of all its processes.
        size: how many workers and spares there are to be.
        port: where its scheduler is to be reached.
    """

    def __init__(
        self, folder: Path, start: Sequence[str], environment: Mapping[str, str], size: int, port: int
    ) -> None:
        self._folder, self._environment, self._size = folder, dict(environment), size
        self._start, self._port = ["--sched-port", str(port), *start], port
        self._followers: list[subprocess.Popen[bytes]] = []
        self._whole_at = 0.0
        self._answered = 0  # ends of the job after which the drill brings it back
        self._tools = Tools()

    def run(self, plan: Sequence[Planned]) -> Outcome:
        """Start it, give it the faults, and see it to its end; whatever still runs then is ended."""
        self._folder.mkdir(mode=0o700, parents=True)
        outcome, began = Outcome(), time.monotonic()
        kinds = {planned.fault for planned in plan}
        self._tools = Tools.made(self._folder, kinds, self._port, self._environment)
        self._environment.update(self._tools.environment)
        span = Span(self._folder / "recovery")
        try:
            self._follow(["run", *self._start])
            for planned in plan:
                if not self._wait_for_training(planned.after_s) or not self._inject(planned, outcome):
                    break
            late = plan[len(outcome.injected) + len(outcome.not_injected) :]
            outcome.not_injected += [NotInjected(one.fault, "the job was over before it was due") for one in late]
            self._wait(self._is_over)
        finally:
            outcome.wall_s = time.monotonic() - began
            self._end()
            self._tools.close()
            outcome.seen_s = span.close()
        outcome.events = self._events()
        outcome.said = warnings_in(self._folder / "device")
        outcome.problem = self._problem(outcome)
        return outcome

    def _problem(self, outcome: Outcome) -> str:
        if any(event.kind is Kind.FINISHED for event in outcome.events):
            return ""
        ends = [event.text for event in outcome.events if event.kind is Kind.INTERRUPTED]
        if len(ends) > self._answered:
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

    def _is_over(self, events: Sequence[Event]) -> bool:
        """Whether the job is finished, or was ended by something that the drill has not meant to end it."""
        ends = [event.kind for event in events if event.kind in (Kind.FINISHED, Kind.INTERRUPTED)]
        return is_over(events) and (ends[-1] is Kind.FINISHED or ends.count(Kind.INTERRUPTED) > self._answered)

    def _wait(self, done: Callable[[list[Event]], bool]) -> bool:
        """Until ``done(events)``; False where the job is over, or nothing happens any more."""
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

    def _view(self) -> JobView | None:
        with contextlib.suppress(JournalDamagedError):
            return stored_view(self._folder / "recovery")
        return None

    def _slots(self, running: Mapping[str, ProcessIdentity]) -> dict[str, int]:
        """Of the workers that run, by name."""
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
        while any(one.poll() is None for one in self._followers) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._leave_followers()
        for identity in self._running().values():
            end(identity, GRACE_S)

    # ---- faults

    def _scene(self, planned: Planned) -> Scene | None:
        """The job as the fault finds it; None where nobody trains."""
        running = self._running()
        slots = self._slots(running)
        kept = kept_start.read(self._folder / "device")
        view = self._view()
        if not slots or kept is None or view is None:
            return None
        lease_s = kept.settings().node_timeout_s
        members = sorted(slots, key=slots.__getitem__)
        return Scene(
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
        )

    def _inject(self, planned: Planned, outcome: Outcome) -> bool:
        """Give the fault, and wait until every member trains again."""
        scene, events = self._scene(planned), self._events()
        if scene is None:
            outcome.not_injected.append(NotInjected(planned.fault, "nobody trained at the moment when it was due"))
            return not self._is_over(events)
        at, step = time.time(), max(event.step for event in events)
        before = {kind: _count(events, kind) for kind in Kind}
        try:
            what = give(scene)
        except ImpossibleError as error:
            outcome.not_injected.append(NotInjected(planned.fault, str(error)))
            return True
        given = Injected(planned.fault, what.node, step, at, did=what.did)
        outcome.injected.append(given)
        outcome.damaged.update(what.damaged)
        notice = planned.fault.notice

        def is_noticed(found: list[Event]) -> bool:
            grown = {kind for kind, count in before.items() if _count(found, kind) > count}
            if notice is Notice.END:
                return bool(grown & {Kind.INTERRUPTED, Kind.LOST, Kind.FINISHED})
            wanted = {Notice.LOSS: {Kind.LOST, Kind.RETURNED}, Notice.TERM: {Kind.SCHEDULER}, Notice.NOTHING: set(Kind)}
            return bool(grown & wanted[notice] or notice is Notice.NOTHING) and trains_since(found) is not None

        is_met = self._wait(is_noticed)
        if is_met and notice is Notice.END:
            is_met = self._bring_back()
        if is_met:
            later = [event.at for event in self._events() if event.kind is Kind.TRAINING and event.at >= given.at]
            given.recovered_s = round(max(0.0, later[0] - given.at), 3) if later else 0.0
            return True
        if any(event.kind in (Kind.FINISHED, Kind.TRAINED) for event in self._events()):
            given.recovered_s = 0.0  # it came at the very end
        return False

    def _bring_back(self) -> bool:
        """The job has ended with its cause, as it should; a user calls ``recover``, and so does the drill."""
        events = self._events()
        if not is_over(events):
            return self._wait(lambda found: trains_since(found) is not None)
        if events[-1].kind is Kind.FINISHED:
            return False
        self._end()
        self._answered = _count(events, Kind.INTERRUPTED)
        self._follow(["recover"])
        return self._wait(lambda found: trains_since(found) is not None)


def is_over(events: Sequence[Event]) -> bool:
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


def warnings_in(log_dir: Path) -> list[str]:
    """What the workers' logs say of a line of the script, each once: the runtime names files as ``train.py:46: …``."""
    found: dict[str, None] = {}
    for log in sorted(log_dir.glob("worker_*.log")):
        for text in _OF_A_LINE.findall(log.read_text(errors="replace")):
            found.setdefault(text[:MAX_SAID])
    return list(found)[:MOST_SAID]


def free_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what names another job's place."""
    names = ("ROLE", "NODE_ID", "RECOVERY_PATH", "LOG_DIR", "CHECKPOINT_PATH", "SCHED_PORT", "SCHED_HOST", "JOB_NAME")
    drop = {prefix + name for name in names for prefix in ("", "MS_")}
    return {**{name: text for name, text in environ.items() if name not in drop}, "PYTHONPATH": _python_path(environ)}


def _python_path(environ: Mapping[str, str]) -> str:
    here = str(Path(__file__).resolve().parents[3])  # so that the job runs this very package
    return os.pathsep.join([here, *filter(None, [environ.get("PYTHONPATH", "")])])
