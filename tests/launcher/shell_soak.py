"""``python -m tests.launcher.shell_soak --jobs 30 [--seed 1]``: random kills around run.sh and recover.sh.

Each job is started by ``run.sh`` in its own folder. Its processes and the scripts that follow it are killed and stopped
at random times, and the job is allowed to finish at one of them. Whenever a process is missing, or no script follows,
``recover.sh`` is called. Workers have no torch (``tiny_worker``), since only starting, following and ending are under
test. In every case the job finishes, its last follower exits with 0, no finished job is called interrupted, no script
shows a traceback, and no process is left.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samebits.errors import JobInterruptedError, JobStoppedError
from samebits.launcher import job_spec
from samebits.launcher.processes import send_signal
from samebits.service.status import stored_view
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.shell_job import UNTIL_TOLD, Shell, ShellJob

CHAOS_S = (6.0, 14.0)
ENDS_WITHIN_S = 60.0  # after the faults have stopped
_LOOKS_EVERY_S = 0.02
_CALLS_EVERY_S = 1.0
MAY_END_WITH = {
    0: "the job finished",
    JobInterruptedError.exit_code: "it was interrupted",
    JobStoppedError.exit_code: "a user pressed Ctrl-C",
    -signal.SIGKILL: "killed",
    -signal.SIGHUP: "its terminal was closed",
}
BY_CTRL_C = {128 + signal.SIGINT, -signal.SIGINT}  # if nothing was started yet


def settings_of(seed: int) -> dict[str, str]:
    """Return the settings that this job's user has chosen."""
    rng = random.Random(f"settings of {seed}")
    return {
        "REGISTER_COOLDOWN": rng.choice(("0", "0.5")),
        "SPARE_NUM": rng.choice(("0", "1")),
        "MIN_WORKER_NUM": rng.choice(("2", "3")),
        "GRACE": rng.choice(("shrink=0", "shrink=1")),
    }


@dataclass(slots=True)
class ShellSoak:
    """One job in the shell with random faults.

    Args:
        job: not yet started, with :func:`settings_of` the seed.
    """

    job: ShellJob
    seed: int
    happened: Counter[str] = field(default_factory=Counter)
    _rng: random.Random = field(init=False)
    _began: float = field(init=False)
    _wakes_at: dict[ProcessIdentity | Shell, float] = field(default_factory=dict)
    _ended: list[Shell] = field(default_factory=list)
    _interrupted: set[Shell] = field(default_factory=set)
    _names: dict[Shell, str] = field(default_factory=dict)
    _calls_at: float | None = None
    _finishes_at: float = field(init=False)
    _said: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run through the faults to the job's end.

        Raises:
            AssertionError: a promise did not hold; the message has the story.
        """
        self._rng = random.Random(f"faults of {self.seed}")
        self._began = time.monotonic()
        chaos_ends = self._began + self._rng.uniform(*CHAOS_S)
        self._finishes_at = self._rng.choice((chaos_ends, self._rng.uniform(self._began + 3.0, chaos_ends)))
        self._run()
        self._disturb(chaos_ends)
        self._say("calm")
        deadline = time.monotonic() + ENDS_WITHIN_S
        while not (self._is_finished() and not (self._wakes_at or self._followers() or self.job.running())):
            self._require(time.monotonic() < deadline, "the job did not end in time")
            self._look_after()
            time.sleep(_LOOKS_EVERY_S)
        self._take_ended()
        last = self.job.recover_sh()  # by a user who has not seen it finish
        self._require(last.end() == 0, f"of the finished job recover.sh says {last.text!r}")
        for shell, name in self._names.items():  # a killed script may have left a waiting process that printed
            text = "\n".join(shell.all_lines())
            self._require("Traceback" not in text, f"{name} shows a traceback:\n{text}")

    def story(self) -> str:
        """Return what was done and when, in seconds since the start."""
        return "\n".join(self._said)

    def _say(self, what: str) -> None:
        self._said.append(f"{time.monotonic() - self._began:7.3f}  {what}")

    def _require(self, holds: bool, otherwise: str) -> None:
        assert holds, f"{otherwise}\n{self.story()}"

    # ---- faults

    def _disturb(self, until: float) -> None:
        rng = self._rng
        next_at = time.monotonic() + rng.uniform(0.0, 2.0)
        while time.monotonic() < until:
            if time.monotonic() >= next_at:
                (fault,) = rng.choices(list(FAULTS), list(FAULTS.values()))
                fault(self)
                next_at = time.monotonic() + rng.choice((rng.uniform(0.0, 0.3), rng.uniform(0.3, 2.0)))
            self._look_after()
            time.sleep(_LOOKS_EVERY_S)

    def _some(self, number: int, kind: str = "worker_") -> list[tuple[str, ProcessIdentity]]:
        alive = [
            (name, identity)
            for name, identity in self.job.identities().items()
            if name.startswith(kind) and identity.is_alive()
        ]
        return self._rng.sample(alive, min(number, len(alive)))

    def _send(self, number: signal.Signals, processes: list[tuple[str, ProcessIdentity]]) -> None:
        for name, identity in processes:
            self._note(number, name)
            send_signal(identity, number)

    def _note(self, number: signal.Signals, name: str) -> None:
        self._say(f"{number.name} to {name}")
        self.happened[f"{number.name} to {name.rstrip('_ 0123456789')}"] += 1

    def kill_a_worker(self) -> None:
        self._send(signal.SIGKILL, self._some(1))

    def kill_two_workers(self) -> None:
        self._send(signal.SIGKILL, self._some(2))

    def kill_the_scheduler(self) -> None:
        self._send(signal.SIGKILL, self._some(1, "scheduler"))

    def kill_everything(self) -> None:
        self._send(signal.SIGKILL, self._some(1, "scheduler") + self._some(9))

    def stop_a_process(self) -> None:
        for name, identity in self._some(1, self._rng.choice(("worker_", "scheduler"))):
            if identity not in self._wakes_at:
                self._send(signal.SIGSTOP, [(name, identity)])
                self._wakes_at[identity] = self._wake_at()

    def stop_a_follower(self) -> None:
        for shell in self._a_follower():
            if shell not in self._wakes_at:
                self._signal_follower(shell, signal.SIGSTOP)
                self._wakes_at[shell] = self._wake_at()

    def end_a_follower(self) -> None:
        for shell in self._a_follower():
            self._signal_follower(shell, self._rng.choice((signal.SIGKILL, signal.SIGHUP)))

    def press_ctrl_c(self) -> None:
        for shell in self._a_follower():
            self._interrupted.add(shell)
            self._signal_follower(shell, signal.SIGINT)

    def _wake_at(self) -> float:
        return time.monotonic() + self._rng.choice((self._rng.uniform(0.1, 1.0), 5.0))

    def _followers(self) -> list[Shell]:
        return [shell for shell in self.job.shells if shell.process.poll() is None]

    def _a_follower(self) -> list[Shell]:
        followers = self._followers()
        return self._rng.sample(followers, min(1, len(followers)))

    def _signal_follower(self, shell: Shell, number: signal.Signals) -> None:
        """Signal a follower as a terminal does: input and hang-up reach all that run in it."""
        self._note(number, self._names[shell])
        if number in (signal.SIGINT, signal.SIGHUP):
            os.killpg(shell.process.pid, number)
        else:
            shell.send(number)

    def _run(self) -> None:
        self._call("run.sh", self.job.run_sh(*UNTIL_TOLD))

    def _call(self, script: str, shell: Shell) -> None:
        self._names[shell] = f"{script} {len(self._names)}"
        self._say(f"{self._names[shell]} is called")

    # ---- the user

    def _look_after(self) -> None:
        now = time.monotonic()
        for sleeper in [sleeper for sleeper, when in self._wakes_at.items() if now >= when]:
            del self._wakes_at[sleeper]
            if not isinstance(sleeper, Shell):
                self._say(f"SIGCONT to {sleeper}")
                send_signal(sleeper, signal.SIGCONT)
            elif sleeper.process.poll() is None:
                self._signal_follower(sleeper, signal.SIGCONT)
        if now >= self._finishes_at and not (self.job.folder / UNTIL_TOLD[1]).exists():
            self._say("the job may finish")
            self.job.let_finish()
        self._take_ended()
        if self._calls_at is None and self._is_to_be_mended():
            self._calls_at = now + self._rng.choice((0.0, 0.0, self._rng.uniform(0.0, 3.0)))
        if self._calls_at is not None and now >= self._calls_at + _CALLS_EVERY_S:
            self._calls_at = None
            if not (self.job.log_dir / job_spec.START_FILE).exists():
                if not self._followers():
                    self._run()  # the first was killed before a job existed
            elif self._is_to_be_mended():
                self._call("recover.sh", self.job.recover_sh())

    def _is_to_be_mended(self) -> bool:
        """Return whether an unfinished job lacks a process or a follower."""
        identities = self.job.identities()
        is_whole = bool(identities) and all(identity.is_alive() for identity in identities.values())
        return not (is_whole and self._followers()) and not self._is_finished()

    def _is_finished(self) -> bool:
        stored = stored_view(self.job.folder / "recovery")
        return stored is not None and stored.job_finished

    def _take_ended(self) -> None:
        for shell in self.job.shells:
            if shell in self._ended or shell.process.poll() is None:
                continue
            self._ended.append(shell)
            status = shell.process.returncode
            self._say(f"{self._names[shell]} ended with {status}")
            may_end = status in MAY_END_WITH or (status in BY_CTRL_C and shell in self._interrupted)
            self._require(may_end, f"{self._names[shell]} ended with {status}")
            if status == JobInterruptedError.exit_code:
                self._require(not self._is_finished(), f"{self._names[shell]} calls a finished job interrupted")


FAULTS: Mapping[Callable[[ShellSoak], None], int] = {
    ShellSoak.kill_a_worker: 4,
    ShellSoak.kill_two_workers: 1,
    ShellSoak.kill_the_scheduler: 3,
    ShellSoak.kill_everything: 1,
    ShellSoak.stop_a_process: 2,
    ShellSoak.stop_a_follower: 2,
    ShellSoak.end_a_follower: 2,
    ShellSoak.press_ctrl_c: 1,
}
"""Possible faults and their relative frequencies."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.launcher.shell_soak", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--jobs", type=int, default=30, help="how many (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the first (default: 1)")
    options = parser.parse_args()
    happened: Counter[str] = Counter()
    failed = []
    for seed in range(options.seed, options.seed + options.jobs):
        folder = Path(tempfile.mkdtemp(prefix="samebits-shell-soak-"))
        soak = ShellSoak(ShellJob(folder, **settings_of(seed)), seed)
        problem = ""
        try:
            soak.run()
        except AssertionError as error:
            problem = str(error)
        left = soak.job.close()
        if left and not problem:
            problem = f"left behind: {left}"
        if problem:
            problem += f"\n{soak.job.tails()}"
        happened += soak.happened
        faults, took_s = soak.happened.total(), time.monotonic() - soak._began
        said = f"FAILED: {problem}\nits folder: {folder}" if problem else f"finished; {faults} signals"
        print(f"seed {seed}, {took_s:.1f} s: {said}", file=sys.stderr, flush=True)
        if problem:
            failed.append(seed)
        else:
            shutil.rmtree(folder)
    print("\n".join(f"{count:6} {what}" for what, count in happened.most_common()))
    print(f"{options.jobs} jobs, {len(failed)} failed{f': seeds {failed}' if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
