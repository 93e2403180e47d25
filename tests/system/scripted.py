"""A job that a user starts and recovers in its own folder: calls, Ctrl-C, kills, output and pid files.

``run_sh`` calls the script as in the README. ``run`` and ``recover`` start the commands behind the scripts in a forked
process that has imported torch; ``recover`` without any of the job's environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from samebits.store.process_identity import ProcessIdentity, read_pid_file
from tests.launcher.shell_job import RUN_SH
from tests.system.job import FINISH_S, PROBE, WAIT_S, JobFolder
from tests.system.processes import Command, Forked, WarmStarter, environment_of_tests, lines_of, signal_process

SCHEDULER = "scheduler"


class Called:
    """One call of a script or command, in its own session as in a terminal of its own."""

    def __init__(self, child: subprocess.Popen[bytes] | Forked, output: Path) -> None:
        self._child = child
        self.output = output

    @classmethod
    def script(cls, words: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path) -> Called:
        """Call a script."""
        with output.open("ab") as out:
            child = subprocess.Popen(
                ["bash", *words],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return cls(child, output)

    @property
    def pid(self) -> int:
        return self._child.pid

    def lines(self) -> Sequence[str]:
        """Return its output, standard output and error together."""
        return lines_of(self.output)

    def text(self) -> str:
        return "\n".join(self.lines())

    def is_running(self) -> bool:
        return self._child.poll() is None

    def wait(self, timeout_s: float = FINISH_S) -> int:
        """Return its exit status, or minus the signal that ended it."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.output.stem} still runs after {timeout_s:g} s:\n{self.text()}") from None

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the foreground process group, as a terminal does."""
        os.killpg(self._child.pid, signal.SIGINT)

    def kill(self) -> None:
        """kill -9 the script alone, not the processes it has started."""
        self._child.kill()
        self._child.wait(WAIT_S)


class ScriptJob(JobFolder):
    """A job through the scripts.

    Args:
        starter: forks ``samebits`` and the job's processes; ``run_sh`` needs none.
        script: what is trained; None: the default of ``run_sh``.
        args: the script's.
    """

    def __init__(
        self,
        folder: Path,
        starter: WarmStarter | None = None,
        *,
        script: Path | None = PROBE,
        args: Sequence[str] = (),
        workers: int = 4,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, workers=workers, settings=settings)
        self._starter = starter
        marks = ("--marks", str(folder)) if script == PROBE else ()
        self._words = [] if script is None else [str(script), *args, *marks]
        self._calls = 0

    def run_sh(self, *options: str, **more: str) -> Called:
        """Call ``run.sh`` with the job's environment."""
        words = [str(RUN_SH), *options, *self._words]
        return Called.script(words, self.folder, self.environment(**more), self._output("run"))

    def run(self, *options: str, **more: str) -> Called:
        """Start the command behind ``run.sh`` with the job's environment."""
        environment = {"MAX_RESTARTS": "0", "SPARE_NUM": "0", **self.environment(**more)}
        return self._call(["run", *options, "--", *self._words], environment)

    def recover(self) -> Called:
        """Start the command behind ``recover.sh`` with a plain shell environment."""
        return self._call(["recover"], environment_of_tests())

    def _call(self, words: Sequence[str], environment: Mapping[str, str]) -> Called:
        assert self._starter is not None, "only run_sh needs no starter"
        output = self._output(words[0])
        running = self._starter.start(Command(None, tuple(words), environment, self.folder, output))
        return Called(Forked(running, list(words)), output)

    def _output(self, command: str) -> Path:
        self._calls += 1
        return self.folder / f"{self._calls}-{command}.out"

    # ---- processes

    def process(self, name: str | int) -> ProcessIdentity:
        """Return the process that runs, or ran last, under this name: the scheduler, or a worker by its rank."""
        stem = f"worker_{name}" if isinstance(name, int) else name
        identity = read_pid_file(self.log_dir / f"{stem}.pid")
        assert identity is not None, f"there is no pid file of {name}\n{self.tails()}"
        return identity

    def pids(self) -> dict[str | int, ProcessIdentity]:
        return {name: self.process(name) for name in (SCHEDULER, *self.ranks)}

    def kill(self, *names: str | int) -> None:
        """kill -9 these processes at once; return when they are gone."""
        identities = [self.process(name) for name in names]
        for identity in identities:
            signal_process(identity, signal.SIGKILL)
        for name, identity in zip(names, identities, strict=True):
            assert identity.wait_for_exit(WAIT_S), f"{name} outlives kill -9"

    def kill_everything(self) -> None:
        self.kill(SCHEDULER, *self.ranks)
        self.wait_for_writers()

    def wait_said(self, called: Called, pattern: str, timeout_s: float = WAIT_S) -> str:
        """Return the first line of a script's output that contains the text."""
        return self.wait_until(
            lambda: next((line for line in called.lines() if pattern in line), None),
            f"{pattern!r} from {called.output.stem}",
            timeout_s,
        )

    def finished(self, called: Called, timeout_s: float = FINISH_S) -> str:
        """Return the job's sha256, once the script has exited with 0."""
        status = called.wait(timeout_s)
        assert status == 0, f"{called.output.stem} left with {status}\n{self.tails()}"
        return self.sha256()
