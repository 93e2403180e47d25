"""Make one job after another fail repeatedly, and judge what is recorded about each fault.

``faults`` has the faults and the judgement. A fault is over when all members train again. By then the journal has
everything that will ever be known about it, so nothing is timed.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from samebits.account.event_log import read_events
from samebits.account.events import EventKind, JobEvent
from samebits.commands.drill.rehearsal import free_environment, is_over, trains_since
from samebits.core.records import CauseFound, Record
from samebits.core.replacement_names import root_of
from samebits.launcher import job_spec
from samebits.launcher.processes import end, name_of, process_names, read_pid_files, send_signal
from samebits.service.job_journal import history_of
from samebits.service.status import stored_view
from samebits.store.journal import read_journal
from samebits.store.process_identity import ProcessIdentity
from tests.causes.faults import BY_NAME, FAULTS, PAIRS, WORKER, Fault, Said, wrong
from tests.system.processes import PATIENCE, free_port

WORKERS = 3
PATIENCE_S = 90.0 * PATIENCE
LOOK_S = 0.05
AHEAD_STEPS = 100  # some seconds: the events record a step a second later, and more on a busy machine
STEPS_FIRST = 6  # a generation's first steps have an allowance of their own
EVERYWHERE = "everywhere"
"""All workers meet the same error at one step: one is the cause, the others are consequences."""
SETTINGS = {
    "REGISTER_COOLDOWN": "0",
    "HEARTBEAT_INTERVAL": "0.5",
    "NODE_TIMEOUT": "5",
    "HANG": "end:3",
    "OMP_NUM_THREADS": "1",
}

Plan = tuple[str, ...]
"""The faults of one trial, each for another worker."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault or two at once; ``wrong`` is empty if everything recorded about it is right."""

    faults: Plan
    wrong: str
    took_s: float


def plan_of(count: int, seed: int, only: Sequence[str] = ()) -> list[Plan]:
    """Return this many trials, every kind equally often, in an order determined by the seed."""
    kinds: list[Plan] = [(fault.name,) for fault in FAULTS] + list(PAIRS) + [(EVERYWHERE,)]
    kinds = [kind for kind in kinds if not only or "+".join(kind) in only]
    rng = random.Random(seed)
    found: list[Plan] = []
    while len(found) < count:
        rng.shuffle(kinds)
        found += kinds
    return found[:count]


class FailingJob:
    """A job of three workers in its own folder, whose follower restarts dead workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "device" / "scheduler.log"
        self._screen = folder / "follower.log"
        words = [
            "run",
            "-n",
            str(WORKERS),
            "--spares",
            "0",
            "--max-restarts",
            "100000",
            "--sched-port",
            str(free_port()),
        ]
        script = folder / WORKER.name  # so that its lines are named from there
        shutil.copy(WORKER, script)
        with self._screen.open("ab") as screen:
            self._follower = subprocess.Popen(
                [sys.executable, "-P", "-m", "samebits", *words, script.name],
                cwd=folder,
                env={**free_environment(os.environ), **SETTINGS},
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )

    def end(self) -> None:
        """End what is left of it."""
        self._follower.kill()
        self._follower.wait()
        for identity in self._running().values():
            end(identity, 0.1)

    # ---- records

    def _events(self) -> list[JobEvent]:
        return read_events(self._folder / "recovery")

    def _records(self) -> list[Record]:
        found = read_journal(self._folder / "recovery")
        return [] if found is None else history_of(self._folder / "recovery", found.payloads)

    def _running(self) -> dict[str, ProcessIdentity]:
        log_dir = self._folder / "device"
        kept = job_spec.read(log_dir)
        if kept is None:
            return {}
        found = read_pid_files(log_dir, process_names(job_spec.nodes_of(log_dir, kept.settings())))
        return {name: identity for name, identity in found.items() if identity.is_alive()}

    @property
    def is_over(self) -> bool:
        """Return whether it has ended."""
        return is_over(self._events())

    def wait_until(self, is_so: Callable[[list[JobEvent]], bool], what: str) -> None:
        """Wait until the job's events show it.

        Raises:
            TimeoutError: they do not.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not is_so(self._events()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come: {self._screen.read_text(errors='replace')[-2000:]}")
            time.sleep(LOOK_S)

    def _wait_for_training(self) -> dict[str, ProcessIdentity]:
        """Wait until all have made some steps; return the members' processes by node, in slot order."""

        def trains(events: list[JobEvent]) -> bool:
            if trains_since(events) is None or len(self._running()) <= WORKERS:
                return False
            began = next(event.step for event in reversed(events) if event.kind is EventKind.TRAINING)
            return max(event.step for event in events) >= began + STEPS_FIRST

        self.wait_until(trains, "training")
        view = stored_view(self._folder / "recovery")
        assert view is not None
        running = self._running()
        nodes = sorted((one.slot, one.node) for one in view.workers if one.slot is not None)
        return {node: running[name_of(node)] for _, node in nodes}

    # ---- faults

    def fail(self, plan: Plan, rng: random.Random) -> str:
        """Inject these faults; return what is wrong with the records about them."""
        members = self._wait_for_training()
        if plan == (EVERYWHERE,):
            given = dict.fromkeys(members, BY_NAME["exception"])
        else:
            nodes = rng.sample(sorted(members), len(plan))
            given = {node: BY_NAME[name] for node, name in zip(nodes, plan, strict=True)}
        before, records = self._events(), len(self._records())
        log_at, screen_at = self._log.stat().st_size, self._screen.stat().st_size
        self._give(given, members)
        generation = max(event.generation for event in before)

        def is_made_good(events: list[JobEvent]) -> bool:
            if all(fault.goes_on for fault in given.values()):
                return not wrong(given, Said((), _since(self._log, log_at).splitlines()))
            trains = trains_since(events) is not None and max(event.generation for event in events) > generation
            return trains or is_over(events)

        self.wait_until(is_made_good, f"the end of {plan}")
        if is_over(self._events()) and plan != (EVERYWHERE,):  # which may end a job whose workers start slowly
            return f"the job ended: {_since(self._screen, screen_at)[-1000:]}"
        causes = {one.node: one.text for one in self._records()[records:] if isinstance(one, CauseFound)}
        if plan == (EVERYWHERE,) and causes:  # whichever was first: the others met the same error
            given = {node: given[node] for node in list(causes)[:1]}
        said = wrong(given, Said(tuple(causes.items()), _since(self._log, log_at).splitlines()))
        if said:
            return said
        for node in (node for node, fault in given.items() if fault.ends):
            named = re.compile(rf"worker.* {re.escape(node)}\b")
            self.wait_until(
                lambda _, named=named: named.search(_since(self._screen, screen_at)) is not None,
                f"worker {node} on the screen",
            )
        return ""

    def _give(self, given: Mapping[str, Fault], members: Mapping[str, ProcessIdentity]) -> None:
        """Inject one at once; several are due at one later step, each by its own order."""
        step = 0 if len(given) == 1 else max(event.step for event in self._events()) + AHEAD_STEPS
        for node, fault in given.items():
            if fault.sent and len(given) == 1:
                assert send_signal(members[node], fault.sent), f"worker {node} had ended before"
                continue
            order = self._folder / f"order-{root_of(node)}.unfinished"
            order.write_text(f"{fault.name} {step}")
            order.rename(self._folder / f"order-{root_of(node)}")


def _since(log: Path, at: int) -> str:
    """Return what was written there from this byte on."""
    with log.open("rb") as file:
        file.seek(at)
        return file.read().decode(errors="replace")


@contextmanager
def failing_job(folder: Path) -> Iterator[FailingJob]:
    """Return a job that is ended with all its processes."""
    folder.mkdir(parents=True)
    job = FailingJob(folder)
    try:
        yield job
    finally:
        job.end()


def run(folder: Path, plans: Sequence[Plan], seed: int) -> Iterator[Trial]:
    """Run all these trials, in as few jobs as they leave alive."""
    left, rng, number = list(plans), random.Random(seed), 0
    while left:
        number += 1
        with failing_job(folder / f"job-{number}") as job:
            while left:
                plan, began_s = left.pop(0), time.monotonic()
                try:
                    said, goes_on = job.fail(plan, rng), not job.is_over
                except TimeoutError as error:
                    said, goes_on = str(error), False
                yield Trial(plan, said, time.monotonic() - began_s)
                if not goes_on:
                    break
