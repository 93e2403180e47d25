"""``python -m tests.launcher.side_by_side --faults 200 [--seed 1]``: two jobs on one host under attack.

Both are started at the same time on the default port with different arguments. Then faults and attacks are drawn for
either of them. Whenever an unfinished job has no follower, ``samebits recover`` is called in its folder. Three promises
are checked: no process or step of one job is ever part of the other, a job that ends with 0 has the bits of its
undisturbed run, and 60 s after a job's last command nothing of it is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.errors import JobInterruptedError
from samebits.launcher.processes import send_signal
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.shell_job import ROOT, Shell, ShellJob
from tests.system.job import PROBE

FAULTS_A_JOB = 2
WORKERS = 2
STEPS = (90, 130)
PAUSE_MS = 30
ENDS_WITHIN_S = 240.0
LEFT_AFTER_S = 60.0
GO_ON = (-signal.SIGKILL, JobInterruptedError.exit_code)
"""Exits of a follower after which the user calls `recover`."""
HERE = {"PYTHONPATH": str(ROOT)}
P_EARLY = 0.25  # share of faults that come before a job has trained
_LOOKS_EVERY_S = 0.1
_STEP = re.compile(r"^epoch \d+ step (\d+) ", re.MULTILINE)
_SEATED = re.compile(r" seated: .* job ([0-9a-f-]{36})")
_FINAL = re.compile(r"^final step=(\d+) sha256=(\w+)", re.MULTILINE)


def arguments(steps: int) -> tuple[str, ...]:
    """Return the probe's arguments for this number of steps."""
    return ("--steps", str(steps), "--pause-ms", str(PAUSE_MS))


@dataclass(slots=True)
class Side:
    """One of the two jobs and what was done to it."""

    job: ShellJob
    steps: int
    rng: random.Random
    happened: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    stopped: list[tuple[float, ProcessIdentity]] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)
    asked: list[Shell] = field(default_factory=list)
    """Commands other than followers, each of which has to end on its own."""
    due: list[float | int] = field(default_factory=list)
    """When the next disturbance is due: seconds after the start, or a step (an int)."""

    def __post_init__(self) -> None:
        for _ in range(FAULTS_A_JOB):
            early = self.rng.random() < P_EARLY
            self.due.append(self.rng.uniform(0.5, 10.0) if early else self.rng.randint(2, self.steps - 10))

    @property
    def followers(self) -> list[Shell]:
        return [shell for shell in self.job.shells if shell not in self.asked]

    @property
    def is_followed(self) -> bool:
        return any(shell.process.poll() is None for shell in self.followers)

    @property
    def port(self) -> int:
        return int(self._kept().get("environment", {}).get("SCHED_PORT", 8118))

    def say(self, what: str) -> None:
        self.story.append(f"{time.monotonic() - self.began:7.2f}  {what}")

    def start(self) -> None:
        spares = self.rng.choice(("0", "1"))
        self.say(f"run, {spares} spares")
        self.run(self.steps, spares)

    def run(self, steps: int, spares: str = "0") -> Shell:
        """Call `samebits run` with the probe."""
        words = ("run", "-n", str(WORKERS), "--spares", spares, str(PROBE), *arguments(steps))
        return self.job.shell(str(ROOT / ".venv/bin/python"), "-P", "-m", "samebits", *words, **HERE)

    def living(self, kind: str = "") -> dict[str, ProcessIdentity]:
        found = self.job.identities() if self.job.log_dir.exists() else {}
        return {name: one for name, one in found.items() if name.startswith(kind) and one.is_alive()}

    def is_due(self, when: float | int) -> bool:
        return self.reached() >= when if isinstance(when, int) else time.monotonic() - self.began >= when

    def reached(self) -> int:
        """Return the last step in any worker's log."""
        logs = self.job.log_dir.glob("worker_*.log")
        return max((int(step) for log in logs for step in _STEP.findall(log.read_text(errors="replace"))), default=0)

    def look_after(self) -> None:
        """Apply the disturbances that are due, and act as an attentive user."""
        now = time.monotonic()
        for when in [when for when in self.due if self.is_due(when)]:
            self.due.remove(when)
            self.disturb()
        for entry in [entry for entry in self.stopped if entry[0] <= now]:
            self.stopped.remove(entry)
            send_signal(entry[1], signal.SIGCONT)
        if not self.is_followed and not self.is_over:
            self.say("recover")
            self.job.tool("recover")

    @property
    def is_over(self) -> bool:
        """Return whether the last follower ended with a verdict: finished, or beyond `recover`."""
        last = self.followers[-1].process.poll()
        return last is not None and last not in GO_ON

    # ---- faults

    def kill_a_worker(self) -> None:
        self._kill(self._some("worker"))

    def kill_all_workers(self) -> None:
        self._kill(self.living("worker"))

    def kill_the_scheduler(self) -> None:
        self._kill(self.living("scheduler"))

    def kill_the_follower(self) -> None:
        for shell in self.followers:
            if shell.process.poll() is None:
                shell.process.kill()
                shell.process.wait()

    def kill_everything(self) -> None:
        self.kill_the_follower()
        self._kill(self.living())

    def stop_a_worker(self) -> None:
        self._stop(self._some("worker"))

    def stop_the_scheduler(self) -> None:
        self._stop(self.living("scheduler"))

    def remove_recovery(self) -> None:
        shutil.rmtree(self.job.folder / "recovery", ignore_errors=True)

    def remove_claim(self) -> None:
        for claim in (self.job.folder / "recovery").glob("term.*"):
            claim.unlink(missing_ok=True)

    def remove_checkpoints(self) -> None:
        shutil.rmtree(self.job.folder / "ckpt_of_rank", ignore_errors=True)

    # ---- attacks

    def send_nonsense(self) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as one:
            one.sendall(self.rng.randbytes(4096))

    def hold_connections(self) -> None:
        with contextlib.suppress(OSError):
            self.sockets += [socket.create_connection(("127.0.0.1", self.port), 1.0) for _ in range(200)]

    def start_again(self) -> None:
        self.asked.append(self.run(self.steps + 7))

    def send_a_foreign_worker(self) -> None:
        """Start a worker of another launcher that knows everything of this job but its id."""
        told = {"ROLE": "worker", "NODE_ID": str(self.rng.randrange(4)), "WORKER_NUM": str(WORKERS)}
        told |= {"SCHED_PORT": str(self.port), "ENABLE_RECOVERY": "1", "JOB_ID": "foreign", "OMP_NUM_THREADS": "1"}
        told |= {"CHECKPOINT_PATH": "foreign", "LOG_DIR": "foreign-logs", "TOPO_TIMEOUT": "5"} | HERE
        python = str(ROOT / ".venv" / "bin" / "python")
        self.asked.append(self.job.shell(python, str(PROBE), *arguments(self.steps + 3), **told))

    def _some(self, kind: str) -> dict[str, ProcessIdentity]:
        living = self.living(kind)
        name = self.rng.choice(sorted(living)) if living else ""
        return {name: living[name]} if living else {}

    def _kill(self, processes: Mapping[str, ProcessIdentity]) -> None:
        for one in processes.values():
            send_signal(one, signal.SIGKILL)

    def _stop(self, processes: Mapping[str, ProcessIdentity]) -> None:
        for one in processes.values():
            send_signal(one, signal.SIGSTOP)
            self.stopped.append((time.monotonic() + self.rng.choice((0.5, 3.0, 9.0)), one))

    def disturb(self) -> None:
        fault = self.rng.choice(FAULTS)
        self.say(fault.__name__)
        self.happened[fault.__name__] += 1
        fault(self)

    # ---- the end

    @property
    def job_id(self) -> str:
        """Return the job's id, or an empty string."""
        return str(self._kept().get("job", ""))

    def _kept(self) -> dict[str, Any]:
        """Return how the job was started, or nothing if `run` was killed before it was saved."""
        try:
            return dict(json.loads((self.job.log_dir / "start.json").read_text()))
        except FileNotFoundError:
            return {}

    def seated_in(self) -> set[str]:
        """Return the jobs in which this folder's processes had a seat, according to their logs."""
        logs = self.job.log_dir.glob("*.log")
        return {job for log in logs for job in _SEATED.findall(log.read_text(errors="replace"))}

    def finals(self) -> set[tuple[int, str]]:
        """Return the last step and hash in each worker's log."""
        found = set()
        for log in self.job.log_dir.glob("worker_*.log"):
            said = _FINAL.findall(log.read_text(errors="replace"))
            found |= {(int(steps), digest) for steps, digest in said}
        return found


FAULTS: tuple[Callable[[Side], None], ...] = (
    *(Side.kill_a_worker, Side.kill_all_workers, Side.kill_the_scheduler, Side.kill_the_follower),
    *(Side.kill_everything, Side.stop_a_worker, Side.stop_the_scheduler),
    *(Side.remove_recovery, Side.remove_claim, Side.remove_checkpoints),
    *(Side.send_nonsense, Side.hold_connections, Side.start_again, Side.send_a_foreign_worker),
)


def undisturbed(folder: Path) -> dict[int, tuple[int, str]]:
    """Return the last step and hash of each job when run alone."""
    found = {}
    for steps in STEPS:
        (folder / str(steps)).mkdir()
        side = Side(ShellJob(folder / str(steps)), steps, random.Random(0))
        side.run(steps)
        assert side.followers[-1].end() == 0, side.job.tails()
        (found[steps],) = side.finals()
        assert not side.job.close()
    return found


def pair(folder: Path, seed: int, expected: Mapping[int, tuple[int, str]]) -> tuple[list[Side], list[str]]:
    """Run two jobs side by side; return them and the violations."""
    sides = []
    for steps in STEPS:
        (folder / f"of {steps}").mkdir()
        sides.append(Side(ShellJob(folder / f"of {steps}"), steps, random.Random(f"{seed}/{steps}")))
    for side in sides:
        side.start()
    deadline = time.monotonic() + ENDS_WITHIN_S
    problems: list[str] = []
    while not all(side.is_over for side in sides) and time.monotonic() < deadline:
        for side in sides:
            if not side.is_over:
                side.look_after()
        time.sleep(_LOOKS_EVERY_S)
    for side in sides:
        problems += [f"of {side.steps}: {problem}" for problem in judged(side, expected[side.steps])]
    return sides, problems


def judged(side: Side, expected: tuple[int, str]) -> list[str]:
    """Return the violations of a job that is over."""
    problems = []
    for one in side.sockets:
        one.close()
    if not side.is_over:
        problems.append("did not end in time")
    for shell in side.asked:
        if shell.process.poll() is None:
            with contextlib.suppress(Exception):
                shell.process.wait(LEFT_AFTER_S)
        if shell.process.poll() == 0:
            problems.append(f"a command of an attacker ended with 0: {shell.all_lines()[-3:]}")
    status = side.followers[-1].process.poll()
    side.happened[f"ended with {status}"] += 1
    wrong = side.finals() - {expected}
    if wrong:
        problems.append(f"other bits or another job's step: {sorted(wrong)}, expected {expected}")
    if status == 0 and not side.finals():
        problems.append("exit status 0, and no worker reached its end")
    foreign = side.seated_in() - {side.job_id}
    if foreign:
        problems.append(f"its workers were seated in job {foreign}, it is job {side.job_id}")
    if status not in (0, None):
        side.say("\n".join(side.followers[-1].all_lines()[-6:]))
    if status not in (0, None):  # a refused job may be left running: its user ends it
        side.job.tool("stop").process.wait(LEFT_AFTER_S)
    left = side.job.close(patience_s=LEFT_AFTER_S)
    return problems + ([f"left behind: {left}"] if left else [])


def main() -> int:
    first_words = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.launcher.side_by_side", description=first_words)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    happened: Counter[str] = Counter()
    failed: list[int] = []
    with tempfile.TemporaryDirectory(prefix="samebits-side-by-side-") as folder:
        expected = undisturbed(Path(folder))
    seed, given = options.seed, 0
    while given < options.faults:
        folder = tempfile.mkdtemp(prefix="samebits-side-by-side-")
        began = time.monotonic()
        sides, problems = pair(Path(folder), seed, expected)
        for side in sides:
            happened += side.happened
            given += sum(number for what, number in side.happened.items() if not what.startswith("ended"))
        took = f"seed {seed}, {time.monotonic() - began:.0f} s, {given}/{options.faults} faults"
        if problems:
            failed.append(seed)
            story = "\n".join(f"--- of {side.steps}\n" + "\n".join(side.story) for side in sides)
            tails = "\n".join(side.job.tails() for side in sides)
            print(f"{took}: FAILED: {problems}\n{story}\n{tails}\nfolder: {folder}", file=sys.stderr, flush=True)
        else:
            ended = [side.followers[-1].process.poll() for side in sides]
            print(f"{took}: ended with {ended}", file=sys.stderr, flush=True)
            for side in sides:
                if side.followers[-1].process.poll() != 0:
                    print("\n".join(side.story), file=sys.stderr, flush=True)
            shutil.rmtree(folder)
        seed += 1
    print("\n".join(f"{count:6} {what}" for what, count in happened.most_common()))
    print(f"{given} faults, {len(failed)} of {seed - options.seed} pairs failed{f': seeds {failed}' if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
