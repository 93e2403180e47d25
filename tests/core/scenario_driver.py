"""The commands of a scenario: what each line of text does to the stage.

``Scenario.run`` takes one command line (README.md beside the scenarios explains them) and returns its trace. The stage
and its cores make all decisions; ``scenario_words.py`` words the trace.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from samebits.core.agent.agent_core import AgentCore, AgentPolicy
from samebits.core.agent.agent_events import Completed, Failed, Leaving, Observed, Passed
from samebits.core.ledger import Policy
from samebits.core.messages import PROTOCOL, Activity, Process, StopJob
from samebits.core.point import Point
from samebits.core.reports import FINAL, Digest, Digests, LastWords
from samebits.core.scheduler import Closed, SchedulerCore, SchedulerPaused
from samebits.core.state import JobState
from tests.core.scenario_stage import HERE, SCRIPT, Stage, Worker
from tests.core.scenario_trace import Trace
from tests.core.scenario_words import seconds

HEARTBEAT_INTERVAL_S = 1.0
SETTINGS: dict[str, tuple[str, Callable[[str], float | bool]]] = {
    "ENABLE_RECOVERY": ("recovery", lambda text: text == "1"),
    "MAX_WORKER_NUM": ("max_world_size", int),
    "MIN_WORKER_NUM": ("min_world_size", int),
    "GRACE:reconnect": ("reconnect_grace_s", float),
    "GRACE:shrink": ("shrink_grace_s", float),
    "GRACE:start": ("start_grace_s", float),
    "NODE_TIMEOUT": ("node_timeout_s", float),
    "REGISTER_COOLDOWN": ("cool_down_s", float),
    "SPARE_NUM": ("spare_num", int),
    "TOPO_TIMEOUT": ("topo_timeout_s", float),
}


class ScenarioError(Exception):
    """The scenario asks for something impossible; the message names it."""


class Scenario(Stage):
    """One scenario whose commands are run in order."""

    # ---- one command

    def run(self, command: str) -> list[str]:
        """Carry out one line and return its trace."""
        self._trace, self._repeats = Trace(), 0
        is_quiet = command.startswith("quietly ")
        line = command.removeprefix("quietly ")
        for pattern, method in _COMMANDS:
            match = re.fullmatch(pattern, line)
            if match is not None:
                method(self, *match.groups(default=""))
                break
        else:
            raise ScenarioError(f"no such command: {line!r}; tests/core/scenarios/README.md lists them")
        self._settle()
        if is_quiet or line.startswith("job "):
            return []
        self._note("s", self._standing())
        return self._trace.lines()

    def _standing(self) -> str:
        repeats = f"; {self._repeats} repeat{'s' * (self._repeats > 1)} changed nothing" if self._repeats else ""
        if self._core is None:
            return f"(no scheduler){repeats}"
        if self._frozen_since is not None:
            return f"(frozen){repeats}"
        deadline = "none" if self._wake_at is None else seconds(self._wake_at)
        return f"({self._core.phase()}; next deadline {deadline}{repeats})"

    # ---- commands: the job and its scheduler

    def _job(self, world_size: str, settings: str) -> None:
        changes: dict[str, object] = {}
        for setting in filter(None, settings.split(", ")):
            name, _, value = setting.partition("=")
            if name == "--fresh":
                changes["rebuild"] = False
            elif name in SETTINGS:
                field_name, convert = SETTINGS[name]
                changes[field_name] = convert(value)
            else:
                raise ScenarioError(f"no such setting: {setting!r}; there are {', '.join(SETTINGS)} and --fresh")
        policy = Policy(int(world_size), SCRIPT, (("WORKER_NUM", world_size),))
        self._policy = replace(policy, **changes)  # type: ignore[arg-type]

    def _start_scheduler(self) -> None:
        if self._core is not None:
            raise ScenarioError("the scheduler runs already")
        state = JobState.replay(self._journal)
        if state.finished:
            self._note("s", f"does not start: the journal holds {state.job}, which is finished")
            return
        if not state.job:
            self._jobs += 1
        self._core = SchedulerCore(self._policy, state, now=self._now, boot_id="boot-1", new_job_id=f"job-{self._jobs}")
        ready = self._core.start()
        self._take([ready, *(self._core.step(closed, self._now) for closed in self._dead_at_load(state))])
        self._connect_everybody()

    def _dead_at_load(self, state: JobState) -> list[Closed]:
        """Return the journal's seats whose process on this host no longer exists."""
        held = [seat for seat in state.seats.values() if seat.process.host == HERE and seat.is_held]
        return [Closed(seat.session, gone=True) for seat in held if not self._workers[seat.session].is_alive]

    def _crash_scheduler(self) -> None:
        self._core_or_complain()
        self._scheduler_gone()

    def _freeze_scheduler(self) -> None:
        self._core_or_complain()
        self._frozen_since = self._now

    def _thaw_scheduler(self) -> None:
        if self._frozen_since is None:
            raise ScenarioError("the scheduler is not frozen")
        gap_s, self._frozen_since = self._now - self._frozen_since, None
        if gap_s > HEARTBEAT_INTERVAL_S:
            self._arrivals.appendleft(("", SchedulerPaused(gap_s)))
        self._connect_everybody()

    def _wipe_journal(self) -> None:
        if self._core is not None:
            raise ScenarioError("crash the scheduler first")
        self._journal.clear()

    def _show_journal(self) -> None:
        state = JobState.replay(self._journal)
        over = ", finished" if state.finished else ""
        self._note("journal", f"{state.job}, term {state.term}, generation {state.generation_number}{over}")
        for seat in state.seats.values():
            kind = seat.state.value
            what = f"slot {seat.slot}" if seat.slot is not None else "a spare's seat" if seat.is_spare else "no seat"
            text = f"{what} is {kind} by worker {seat.node}, incarnation {seat.incarnation}"
            self._note("journal", text)

    def _stop_job(self, by: str) -> None:
        self._core_or_complain()
        self._arrivals.append(("", StopJob(by)))

    def _stop_job_at_commit(self, by: str) -> None:
        self._core_or_complain()
        self._arrivals.append(("", StopJob(by, at_commit=True)))

    # ---- commands: workers

    def _start_workers(self, names: str, host: str, script: str, world_size: str, protocol: str) -> None:
        for first in names.split():
            name = first
            while name in self._workers:
                name += "'"
            node, count = first.removeprefix("w"), name.count("'") + 1
            pid = 100 * count + int(node)
            process = Process(host or HERE, pid, count, "cpu")
            settings = (("WORKER_NUM", world_size),) if world_size else self._policy.settings
            topo_timeout_s = self._policy.topo_timeout_s
            policy = AgentPolicy(
                node, name, process, script or SCRIPT, settings, HEARTBEAT_INTERVAL_S, topo_timeout_s=topo_timeout_s
            )
            spoken = int(protocol) if protocol else PROTOCOL
            worker = self._workers[name] = Worker(name, node, process, AgentCore(policy, self._now), spoken)
            if name != first:
                self._trace.add(self._now, "worker", name, f"starts, pid {pid}")
            self._tell(worker, Passed(0))
            self._connect(worker)

    def _kill(self, names: str) -> None:
        for worker in self._named(names):
            self._exit(worker)

    def _freeze(self, names: str) -> None:
        for worker in self._named(names):
            worker.is_frozen = True

    def _thaw(self, names: str) -> None:
        for worker in self._named(names):
            worker.is_frozen = False
            worker.inbox.append(Passed(worker.step))
            self._connect(worker)

    def _cut(self, names: str) -> None:
        for worker in self._named(names):
            worker.is_cut = True
            if worker.is_connected:
                self._arrive(worker, Closed(worker.name, gone=False))
            self._disconnect(worker)

    def _mend(self, names: str) -> None:
        for worker in self._named(names):
            worker.is_cut = False
            self._connect(worker)

    def _save(self, step: str, names: str) -> None:
        chosen = self._named(names) if names else [one for one in self._workers.values() if one.runs]
        for worker in chosen:
            if worker.agent.activity is Activity.TRAINING:
                worker.step = int(step)
                self._points.setdefault(worker.node, []).append(Point(worker.step, worker.agent.generation))
                worker.is_coming = worker.is_coming or worker.is_leaving
                worker.commits += 1
                self._stop_if_there(worker)

    def _fail(self, names: str) -> None:
        for worker in self._named(names):
            self._tell(worker, Failed())
            worker.is_coming = True

    def _raise(self, text: str, names: str) -> None:
        for worker in self._named(names):
            self._tell(worker, Observed(LastWords(f"{text} at {SCRIPT}:41")))
            self._tell(worker, Leaving(False, text))
            self._exit(worker)

    def _finish(self, names: str) -> None:
        for worker in self._named(names):
            final = Digest(Point(worker.step, worker.agent.generation), FINAL, b"same")
            self._tell(worker, Observed(Digests.of((final,))))
            self._tell(worker, Completed(worker.agent.generation, worker.step))

    # ---- commands: time and the wire

    def _pass_time(self, text: str) -> None:
        until = self._now + float(text)
        self._settle()
        while (at := self._next_deadline()) is not None and at <= until:
            self._now = max(self._now, at)
            for worker in self._workers.values():
                if worker.runs and worker.wake_at is not None and worker.wake_at <= self._now:
                    self._tell(worker, Passed(worker.step))
            if self._wake_at is not None and self._wake_at <= self._now and self._frozen_since is None:
                self._scheduler_pass()
            self._settle()
        self._now = until

    def _next_deadline(self) -> float | None:
        deadlines = [worker.wake_at for worker in self._workers.values() if worker.runs]
        if self._frozen_since is None:
            deadlines.append(self._wake_at)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _hold(self, wire: str) -> None:
        self._held[wire] = []

    def _deliver(self, wire: str) -> None:
        for _, arrive in self._kept_back(wire):
            arrive()

    def _drop(self, wire: str) -> None:
        counted = Counter(name for name, _ in self._kept_back(wire))
        self._note(wire, "lost: " + (", ".join(f"{count} {name}" for name, count in counted.items()) or "nothing"))

    def _kept_back(self, wire: str) -> list[tuple[str, Callable[[], None]]]:
        if wire not in self._held:
            raise ScenarioError(f"nothing is held on {wire}")
        return self._held.pop(wire)

    # ---- names

    def _named(self, names: str) -> list[Worker]:
        found = [self._workers[name] for name in names.split() if name in self._workers]
        if len(found) != len(names.split()) or not all(worker.is_alive for worker in found):
            raise ScenarioError(f"not all of {names!r} are running processes")
        return found

    def _core_or_complain(self) -> SchedulerCore:
        if self._core is None:
            raise ScenarioError("no scheduler runs")
        return self._core


_NAMES = r"(w\d+'*(?: w\d+'*)*)"
_WIRE = r"(s->w\d+'*|w\d+'*->s)"
_START = rf"start {_NAMES}(?: on (\S+))?(?: as (\S+\.py))?(?: with WORKER_NUM=(\d+))?(?: speaking protocol (\d+))?"
_COMMANDS: list[tuple[str, Callable[..., None]]] = [
    (r"job of (\d+) workers?(?:, (.+))?", Scenario._job),
    (r"start scheduler", Scenario._start_scheduler),
    (r"crash scheduler", Scenario._crash_scheduler),
    (r"freeze scheduler", Scenario._freeze_scheduler),
    (r"thaw scheduler", Scenario._thaw_scheduler),
    (r"wipe journal", Scenario._wipe_journal),
    (r"show journal", Scenario._show_journal),
    (r"stop job at a commit by (.+)", Scenario._stop_job_at_commit),
    (r"stop job by (.+)", Scenario._stop_job),
    (_START, Scenario._start_workers),
    (rf"kill {_NAMES}", Scenario._kill),
    (rf"freeze {_NAMES}", Scenario._freeze),
    (rf"thaw {_NAMES}", Scenario._thaw),
    (rf"cut {_NAMES}", Scenario._cut),
    (rf"mend {_NAMES}", Scenario._mend),
    (rf"save step (\d+)(?: at {_NAMES})?", Scenario._save),
    (rf"fail {_NAMES}", Scenario._fail),
    (rf"raise (.+) in {_NAMES}", Scenario._raise),
    (rf"finish {_NAMES}", Scenario._finish),
    (r"\+([\d.]+)s", Scenario._pass_time),
    (rf"hold {_WIRE}", Scenario._hold),
    (rf"deliver {_WIRE}", Scenario._deliver),
    (rf"drop {_WIRE}", Scenario._drop),
]
