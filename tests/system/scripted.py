"""A job that a user starts with ``run.sh`` and brings back with ``recover.sh``, in a folder of his own.

Here lives what he does (call a script, press Ctrl-C, kill a pid) and what he sees (the scripts' output, pid files). The
one idea: both scripts are called as the README says, in the job's folder; ``recover.sh`` without arguments and without
any of the job's environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from samebits.store.process_identity import ProcessIdentity, read_pid_file
from tests.system.job import FINISH_S, PROBE, WAIT_S, JobFolder
from tests.system.processes import REPOSITORY, environment_of_tests, lines_of, signal_process

RUN = REPOSITORY / "scripts" / "run.sh"
RECOVER = REPOSITORY / "scripts" / "recover.sh"
SCHEDULER = "scheduler"


class Called:
    """One call of a script, in a session of its own as in a terminal of its own."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path) -> None:
        self.output = output
        with output.open("ab") as out:
            self._child = subprocess.Popen(
                ["bash", *words],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    def lines(self) -> Sequence[str]:
        """What it has said, standard output and error together."""
        return lines_of(self.output)

    def text(self) -> str:
        return "\n".join(self.lines())

    def is_running(self) -> bool:
        return self._child.poll() is None

    def wait(self, timeout_s: float = FINISH_S) -> int:
        """Its exit status, or minus the signal that ended it."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.output.stem} still runs after {timeout_s:g} s:\n{self.text()}") from None

    def press_ctrl_c(self) -> None:
        """What a terminal does: SIGINT to the foreground process group."""
        os.killpg(self._child.pid, signal.SIGINT)

    def kill(self) -> None:
        """kill -9 of the script alone, not of what it has started."""
        self._child.kill()
        self._child.wait(WAIT_S)


class ScriptJob(JobFolder):
    """A job through the scripts.

    Args:
        script: what is trained; None: the scripts' own default.
        args: the script's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        script: Path | None = PROBE,
        args: Sequence[str] = (),
        workers: int = 4,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, workers=workers, settings=settings)
        marks = ("--marks", str(folder)) if script == PROBE else ()
        self._words = [] if script is None else [str(script), *args, *marks]
        self._calls = 0

    def run(self, *options: str, **more: str) -> Called:
        """``run.sh`` with the job's environment."""
        return self._call([str(RUN), *options, *self._words], self.environment(**more))

    def recover(self) -> Called:
        """``recover.sh``, with nothing but a shell's own environment."""
        return self._call([str(RECOVER)], environment_of_tests())

    def _call(self, words: Sequence[str], environment: Mapping[str, str]) -> Called:
        self._calls += 1
        output = self.folder / f"{self._calls}-{Path(words[0]).stem}.out"
        return Called(words, self.folder, environment, output)

    # ---- processes

    def process(self, name: str | int) -> ProcessIdentity:
        """Who runs, or ran last, under this name: the scheduler, or a worker by its rank."""
        stem = f"worker_{name}" if isinstance(name, int) else name
        identity = read_pid_file(self.log_dir / f"{stem}.pid")
        assert identity is not None, f"there is no pid file of {name}\n{self.tails()}"
        return identity

    def pids(self) -> dict[str | int, ProcessIdentity]:
        return {name: self.process(name) for name in (SCHEDULER, *self.ranks)}

    def kill(self, *names: str | int) -> None:
        """kill -9 these processes at once; returns when they are gone."""
        identities = [self.process(name) for name in names]
        for identity in identities:
            signal_process(identity, signal.SIGKILL)
        for name, identity in zip(names, identities, strict=True):
            assert identity.wait_for_exit(WAIT_S), f"{name} outlives kill -9"

    def kill_everything(self) -> None:
        self.kill(SCHEDULER, *self.ranks)
        self.wait_for_writers()

    def wait_said(self, called: Called, pattern: str, timeout_s: float = WAIT_S) -> str:
        """The first line of a script's output with the text in it."""
        return self.wait_until(
            lambda: next((line for line in called.lines() if pattern in line), None),
            f"{pattern!r} from {called.output.stem}",
            timeout_s,
        )

    def finished(self, called: Called, timeout_s: float = FINISH_S) -> str:
        """The job's sha256, once the script has left with status 0."""
        status = called.wait(timeout_s)
        assert status == 0, f"{called.output.stem} left with {status}\n{self.tails()}"
        return self.sha256()
