"""A job whose processes are killed, stopped and asked to leave at random times, and a user who restarts them.

A seed determines one job's settings and one sequence of faults. Whatever the interleaving with the processes' own
actions, the job must end with the undisturbed run's bits and leave nothing behind. The kill list covers the times that
are known to matter.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from samebits.store.process_identity import ProcessIdentity
from tests.system.job import Job, is_writer
from tests.system.probe import gate_of
from tests.system.processes import Running, signal_process

SCHEDULER = "scheduler"
CALM_STEPS = 240  # the last gate comes after these: a job that outruns its faults waits there
CHAOS_S = (10.0, 25.0)
ENDS_WITHIN_S = 90.0  # after the last fault
LEAVES_WITHIN_S = 5.0  # after the scheduler
SPARE = 10
_LOOKS_EVERY_S = 0.01


def trained(seed: int, calm_steps: int = CALM_STEPS) -> tuple[str, ...]:
    """Return the probe's arguments that decide the bits."""
    rng = random.Random(f"model of {seed}")
    model, kept = rng.choice(("ddp", "batch-norm", "by-hand")), rng.choice(("per_step", "saved"))
    return ("--steps", str(calm_steps + 20), "--interval", "20", "--model", model, "--rng", kept)


def disturbed(seed: int, calm_steps: int = CALM_STEPS) -> tuple[str, ...]:
    """Return the same plus the arguments that allow disturbances."""
    return (*trained(seed, calm_steps), "--gates", str(calm_steps), "--pause-ms", "20")


def settings_of(seed: int) -> dict[str, str]:
    """Return the settings that this job's user has chosen."""
    rng = random.Random(f"settings of {seed}")
    return {
        "NODE_TIMEOUT": "3",
        "HEARTBEAT_INTERVAL": "0.5",
        "REGISTER_COOLDOWN": rng.choice(("0", "1")),
        "SPARE_NUM": rng.choice(("", "1")),
    }


@dataclass(slots=True)
class Soak:
    """One job and its faults.

    Args:
        job: a job of the probe, with :func:`disturbed` and :func:`settings_of` the seed, not yet started.
        calm_steps: as there.
        chaos_s: bounds on how long it is disturbed.
    """

    job: Job
    seed: int
    calm_steps: int = CALM_STEPS
    chaos_s: tuple[float, float] = CHAOS_S
    happened: Counter[str] = field(default_factory=Counter)
    _rng: random.Random = field(init=False)
    _began: float = field(init=False)
    _nodes: tuple[int, ...] = field(init=False)
    _starts_at: dict[str | int, float] = field(default_factory=dict)
    _wakes_at: dict[str | int, float] = field(default_factory=dict)
    _said: list[str] = field(default_factory=list)

    def run(self) -> str:
        """Run through faults and calm to the job's end; return its sha256.

        Raises:
            AssertionError: it did not end in time; with the faults in order and the logs' last lines.
        """
        job, self._rng = self.job, random.Random(f"faults of {self.seed}")
        has_spare = job.settings["SPARE_NUM"] == "1"
        self._nodes = (*job.ranks, SPARE) if has_spare else tuple(job.ranks)
        self._began = time.monotonic()
        gate_of(job.folder, 0).touch()
        job.start()
        if has_spare:
            job.start_worker(SPARE)
        self._disturb(until=self._began + self._rng.uniform(*self.chaos_s))
        gate_of(job.folder, self.calm_steps).touch()
        self._say("calm")
        self._wait_until(lambda: self._is_trained() and not job.scheduler.is_alive())
        self._leave()
        return job.sha256()

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ENDS_WITHIN_S
        while not is_so():
            assert time.monotonic() < deadline, f"the job did not end in time\n{self.story()}\n{self.job.tails()}"
            self._look_after()
            time.sleep(_LOOKS_EVERY_S)

    def story(self) -> str:
        """Return what was done to the job and when, in seconds since its start."""
        return "\n".join(self._said)

    def _say(self, what: str) -> None:
        self._said.append(f"{time.monotonic() - self._began:7.3f}  {what}")

    # ---- faults

    def _disturb(self, until: float) -> None:
        rng = self._rng
        next_at = time.monotonic() + rng.uniform(0.0, 3.0)
        while time.monotonic() < until:
            if time.monotonic() >= next_at:
                (fault,) = rng.choices(list(FAULTS), list(FAULTS.values()))
                fault(self)
                next_at = time.monotonic() + rng.choice((rng.uniform(0.0, 0.3), rng.uniform(0.3, 3.0)))
            self._look_after()
            time.sleep(_LOOKS_EVERY_S)

    def _some_workers(self, number: int) -> list[int]:
        alive = [node for node in self._nodes if self.job.worker(node).is_alive()]
        return self._rng.sample(alive, min(number, len(alive)))

    def _send(self, number: signal.Signals, name: str | int) -> None:
        self._say(f"{number.name} to {name}")
        self.happened[f"{number.name} to {'a worker' if isinstance(name, int) else name}"] += 1
        self._process(name).signal(number)

    def kill_a_worker(self) -> None:
        for node in self._some_workers(1):
            self._send(signal.SIGKILL, node)

    def kill_two_workers(self) -> None:
        for node in self._some_workers(2):
            self._send(signal.SIGKILL, node)

    def kill_the_scheduler(self) -> None:
        self._send(signal.SIGKILL, SCHEDULER)

    def kill_everything(self) -> None:
        self._send(signal.SIGKILL, SCHEDULER)
        for node in self._nodes:
            self._send(signal.SIGKILL, node)

    def kill_a_writer(self) -> None:
        writers = sorted(filter(is_writer, self.job.processes()), key=lambda writer: writer.pid)
        if writers:
            writer: ProcessIdentity = self._rng.choice(writers)
            self._say(f"SIGKILL to the checkpoint writer {writer.pid}")
            self.happened["SIGKILL to a writer"] += 1
            signal_process(writer, signal.SIGKILL)

    def ask_a_worker_to_leave(self) -> None:
        for node in self._some_workers(1):
            self._send(signal.SIGTERM, node)

    def stop_a_worker(self) -> None:
        for node in self._some_workers(1):
            self._stop(node)

    def stop_the_scheduler(self) -> None:
        self._stop(SCHEDULER)

    def _stop(self, name: str | int) -> None:
        if name not in self._wakes_at:
            self._send(signal.SIGSTOP, name)
            self._wakes_at[name] = time.monotonic() + self._rng.choice((self._rng.uniform(0.1, 1.0), 5.0))

    # ---- the user

    @property
    def _everybody(self) -> tuple[str | int, ...]:
        return (SCHEDULER, *self._nodes)

    def _process(self, name: str | int) -> Running:
        return self.job.worker(name) if isinstance(name, int) else self.job.scheduler

    def _look_after(self) -> None:
        """Wake processes stopped long enough; restart those that have ended before the job's end."""
        now = time.monotonic()
        for name in [name for name, when in self._wakes_at.items() if now >= when]:
            del self._wakes_at[name]
            self._send(signal.SIGCONT, name)
        for name in self._everybody:
            if name not in self._starts_at and not self._process(name).is_alive():
                self._say(f"{name} ended with {self._process(name).wait()}")
                self._starts_at[name] = now + self._rng.choice((0.0, 0.0, self._rng.uniform(0.0, 3.0)))
            if now >= self._starts_at.get(name, math.inf) and not self._is_trained():
                self._start(name)

    def _start(self, name: str | int) -> None:
        del self._starts_at[name]
        self._wakes_at.pop(name, None)
        self._say(f"{name} is started again")
        if isinstance(name, int):
            self.job.start_worker(name)
        else:
            self.job.start_scheduler()

    def _is_trained(self) -> bool:
        """Return whether a process has the final weights: a process started from now on may find the job finished."""
        return any(self.job.finals_of(self.job.log(node)) for node in self._nodes)

    def _leave(self) -> None:
        """End leftovers as ``run.sh`` does after the job: processes that came too late to be notified."""
        for node in self._nodes:
            try:
                self.job.worker(node).wait(LEAVES_WITHIN_S)
            except TimeoutError:
                self._send(signal.SIGTERM, node)
        self._wait_until(lambda: not any(self._process(name).is_alive() for name in self._everybody))


FAULTS: Mapping[Callable[[Soak], None], int] = {
    Soak.kill_a_worker: 4,
    Soak.kill_two_workers: 1,
    Soak.kill_the_scheduler: 2,
    Soak.kill_everything: 1,
    Soak.kill_a_writer: 1,
    Soak.ask_a_worker_to_leave: 1,
    Soak.stop_a_worker: 2,
    Soak.stop_the_scheduler: 1,
}
"""Possible faults and their relative frequencies."""
