"""A job as its user sees it (folder, port, logs, pids), and a job whose processes the test starts itself.

``JobFolder`` is common to all jobs: reading logs, waiting for lines, the final sha256, and the check that nothing is
left. ``Job`` starts, kills and restarts single processes; ``scripted`` does so through the scripts. Tests wait for a
line of output, never for a time, and a wait that fails shows the last lines of all logs.
"""

from __future__ import annotations

import contextlib
import re
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import filelock

from samebits import config
from samebits.launcher.scheduler_link import SchedulerLink
from samebits.store.checkpoint import SHARED_MEMORY
from samebits.store.checkpoint.memory_room import room_path
from samebits.store.owner import read_owner
from samebits.store.process_identity import ProcessIdentity
from tests.last_look import last_look
from tests.system.processes import (
    PATIENCE,
    REPOSITORY,
    Command,
    FairClock,
    Running,
    Starter,
    environment_of_tests,
    found_below,
    free_port,
    lines_of,
    signal_process,
)

PROBE = REPOSITORY / "tests" / "system" / "probe.py"
RIDER = PROBE.with_name("rider.py")
BETWEEN = PROBE.with_name("between_script.py")
MARKED = (
    PROBE,
    RIDER,
    BETWEEN,
    PROBE.with_name("on_host.py"),
    PROBE.with_name("few_descriptors.py"),
    PROBE.with_name("narrow_tree.py"),
)
"""Scripts that take the paths of their job's marks and gates."""
Value = TypeVar("Value")

POLL_S = 0.01
LOOK_S = 0.5
SHOWN_LINES = 12
WAIT_S = 60.0 * PATIENCE
FINISH_S = 150.0 * PATIENCE
"""A timeout for a whole job, longer because on a busy machine it is the sum of many waits."""

_STEP = re.compile(r"epoch (\d+) step (\d+) loss (\S+) at (\S+)(?: queued (\S+))?")
_FINAL = re.compile(r"final step=(\d+) .*?sha256=([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the probe: a committed step and its time (monotonic seconds).

    ``queued_s``: how long the process's threads have waited for a CPU so far, if the probe was asked for it.
    """

    number: int
    at_s: float
    queued_s: float


def is_writer(identity: ProcessIdentity, of: bytes = b"") -> bool:
    """Return whether this is a worker's checkpoint writer, which ends by itself when its worker is gone.

    Args:
        of: what else its command names, such as a folder.
    """
    try:
        command = Path(f"/proc/{identity.pid}/cmdline").read_bytes()
    except OSError:
        return False  # gone
    return b"writer_process" in command and of in command


class JobFolder:
    """A job's folder and settings, its logs, and what may be left of it at the end.

    Args:
        folder: for this job alone, empty.
        workers: WORKER_NUM.
        settings: environment variables besides those below, or replacing them; an empty value removes one.
    """

    def __init__(self, folder: Path, *, workers: int = 4, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.workers = workers
        self.port = free_port()
        self.settings = {
            "WORKER_NUM": str(workers),
            "SCHED_PORT": str(self.port),
            "ENABLE_RECOVERY": "1",
            "REGISTER_COOLDOWN": "1",
            "OMP_NUM_THREADS": "1",
            **(settings or {}),
        }
        self.log_dir = folder / "device"
        self.checkpoints = folder / "ckpt_of_rank"
        self.recovery = folder / "recovery"

    @property
    def ranks(self) -> range:
        return range(self.workers)

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process of this job."""
        wanted = environment_of_tests() | self.settings | more
        return {name: value for name, value in wanted.items() if value}

    # ---- logs

    def log(self, name: str | int) -> Path:
        """Return the lines of ``scheduler``, or of a worker by its rank."""
        return self.log_dir / (f"worker_{name}.log" if isinstance(name, int) else f"{name}.log")

    def lines(self, name: str | int) -> Sequence[str]:
        return lines_of(self.log(name))

    def count(self, name: str | int) -> int:
        """Return the number of lines: a position in the log to search from later."""
        return len(self.lines(name))

    def matches(self, name: str | int, pattern: str, since: int = 0) -> list[re.Match[str]]:
        """Return every line that matches the pattern."""
        found = (re.search(pattern, line) for line in self.lines(name)[since:])
        return [match for match in found if match is not None]

    def wait_for(self, name: str | int, pattern: str, *, since: int = 0, timeout_s: float = WAIT_S) -> re.Match[str]:
        """Return the first line that matches the pattern as soon as it is there."""
        return self._wait_for_line(
            name, lambda line: re.search(pattern, line), f"{pattern!r} in {name}'s log", since, timeout_s
        )

    def wait_for_step(self, step: int, rank: int = 0, *, since: int = 0, timeout_s: float = WAIT_S) -> None:
        """Wait until this rank has printed a step from ``step`` on."""

        def reached(line: str) -> re.Match[str] | None:
            match = _STEP.search(line)
            return match if match is not None and int(match[2]) >= step else None

        self._wait_for_line(rank, reached, f"step {step} of rank {rank}", since, timeout_s)

    def _wait_for_line(
        self, name: str | int, found: Callable[[str], Value | None], what: str, since: int, timeout_s: float
    ) -> Value:
        """Wait for a line, examining each line once: long logs are polled a hundred times a second."""
        path, seen, size = self.log(name), since, -1

        def look() -> Value | None:
            nonlocal seen, size
            now = path.stat().st_size if path.exists() else -1
            if now == size:
                return None
            lines = self.lines(name)
            new, seen, size = lines[seen:], len(lines), now
            return next((value for line in new if (value := found(line)) is not None), None)

        return self.wait_until(look, what, timeout_s)

    def wait_until(self, found: Callable[[], Value | None], what: str, timeout_s: float = WAIT_S) -> Value:
        """Return the function's result once it is not None; time in which the job gets no core does not count."""
        clock, look_s = FairClock(self._awaited), 0.0
        while (value := found()) is None:
            if time.monotonic() >= look_s:
                assert clock.passed_s() < timeout_s, f"no {what} within {timeout_s:g} s\n{self.tails()}"
                look_s = time.monotonic() + LOOK_S
            time.sleep(POLL_S)
        return value

    def _awaited(self) -> Iterable[int]:
        """Return the processes that a wait is for, ended ones included; none: every second counts."""
        return ()

    def steps(self, rank: int) -> list[Step]:
        """Return everything the probe printed, repeated steps included."""
        return [Step(int(one[2]), float(one[4]), float(one[5] or 0)) for one in self.matches(rank, _STEP.pattern)]

    def seatings(self, rank: int) -> int:
        """Return how many processes this worker's seat has had."""
        return len(self.matches(rank, r"seated: slot \d+ of"))

    def sha256(self, ranks: int | None = None) -> str:
        """Return the common hash in the last lines of this many processes (by default WORKER_NUM)."""
        finals = {log.name: self.finals_of(log) for log in sorted(self.log_dir.rglob("worker_*.log"))}
        hashes = {name: found[-1] for name, found in finals.items() if found}
        assert len(hashes) >= (ranks or self.workers), f"only {sorted(hashes)} printed a final line\n{self.tails()}"
        assert len(set(hashes.values())) == 1, f"the ranks end with different weights: {hashes}\n{self.tails()}"
        return next(iter(hashes.values()))

    @staticmethod
    def finals_of(log: Path) -> list[str]:
        """Return every hash in a worker's log."""
        return [found[2] for line in lines_of(log) if "final" in line and (found := _FINAL.search(line))]

    def tails(self) -> str:
        """Return the end of every log."""
        logs = sorted(self.log_dir.rglob("*.log")) + sorted(self.folder.glob("*.out"))
        return "\n".join(f"--- {log.name}\n" + "\n".join(lines_of(log)[-SHOWN_LINES:]) for log in logs)

    def last_look(self) -> str:
        """Return what no log shows: the job's state and the processes still running."""
        return last_look(self.folder, self.environment())

    # ---- gates

    def open_gates(self, *steps: int) -> None:
        """Let the probe continue past the gates (``--gates``) at these steps."""
        for step in steps:
            (self.folder / f"gate-{step}").touch()

    def end_at(self, step: int) -> None:
        """Let the probe's training end with this step, which no rank may have reached yet."""
        new = self.folder / "last-step.new"
        new.write_text(str(step))
        new.rename(self.folder / "last-step")  # every rank reads it in every step

    # ---- memory

    def wait_for_writers(self) -> None:
        """Wait until every checkpoint writer of a killed worker has finished its work."""
        self.wait_until(lambda: None if any(map(is_writer, self.processes())) else True, "end of the writers")

    def memory_rooms(self) -> list[Path]:
        """Return the folders of the ranks' slots in shared memory."""
        owners = [read_owner(folder) for folder in self.checkpoints.glob("[0-9]*") if folder.is_dir()]
        jobs = {owner.job for owner in owners if owner is not None}
        return [room for job in jobs for room in room_path(SHARED_MEMORY, job, 0).parent.glob("*")]

    def forget_memory(self) -> None:
        """Erase shared memory as a power failure does; call when no process of the job is left."""
        for room in self.memory_rooms():
            shutil.rmtree(room)

    # ---- remains

    def processes(self) -> Iterable[ProcessIdentity]:
        """Return every live process of this job, by whatever parent."""
        return found_below(self.folder)

    def end(self) -> list[str]:
        """End whatever still runs; return what that was, and any lock or port that stayed held after it."""
        left = []
        for identity in self.processes():
            try:
                command = Path(f"/proc/{identity.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it has ended by itself meanwhile
            left.append(f"process {identity.pid}: {command}")
            signal_process(identity, signal.SIGKILL)
            identity.wait_for_exit(WAIT_S)
        for path in self.folder.rglob("lock"):
            try:
                filelock.FileLock(path, timeout=0).acquire().lock.release()
            except filelock.Timeout:
                left.append(f"lock {path}")
        self.forget_memory()
        with socket.socket() as caller:
            if caller.connect_ex(("127.0.0.1", self.port)) == 0:
                left.append(f"port {self.port}")
        return left


class Job(JobFolder):
    """A job whose scheduler and workers all run one script, started by the test.

    Args:
        starter: how a process is started.
        script, args: what the processes run.
        relay_starter: starts a relay for the workers before the first process; None: no relay.
    """

    def __init__(
        self,
        folder: Path,
        starter: Starter,
        *,
        script: Path = PROBE,
        args: Sequence[str] = (),
        workers: int = 4,
        settings: Mapping[str, str] | None = None,
        relay_starter: Starter | None = None,
    ) -> None:
        super().__init__(folder, workers=workers, settings=settings)
        self._starter = starter
        self._relay_starter = None if "SCHED_HOST" in self.settings else relay_starter
        self._relay: Running | None = None
        if self._relay_starter is not None:
            self.settings["SCHED_HOST"] = f"relay:127.0.0.1:{free_port()},127.0.0.1"
        self._script = script
        self._args = tuple(args) if script not in MARKED else (*args, "--marks", str(folder))
        self._workers: dict[int, Running] = {}
        self._scheduler: Running | None = None
        self.restarted: set[int] = set()
        self.log_dir.mkdir(parents=True)

    # ---- processes

    def use_arguments(self, *args: str) -> None:
        """Pass these arguments to every process that is started from now on."""
        self._args = args

    def _awaited(self) -> Iterable[int]:
        started = (*self._workers.values(), self._scheduler)
        return [one.pid for one in started if one is not None]

    @property
    def scheduler(self) -> Running:
        assert self._scheduler is not None, "the scheduler was not started"
        return self._scheduler

    def worker(self, rank: int) -> Running:
        return self._workers[rank]

    def start(self) -> None:
        """Start everything: for the first time, or after all of it was killed."""
        self.start_scheduler()
        for rank in self.ranks:
            self.start_worker(rank)

    def start_scheduler(self, **more: str) -> None:
        self._scheduler = self._start("scheduler", {"ROLE": "scheduler", **more})

    def start_worker(self, rank: int, **more: str) -> None:
        if rank in self._workers:
            self.restarted.add(rank)
        self._workers[rank] = self._start(rank, {"ROLE": "worker", "NODE_ID": str(rank), **more})

    def end_relay(self) -> None:
        """End the relay, if the job has one."""
        if self._relay is not None:
            self._relay.kill()
            self._relay = None

    def _start(self, name: str | int, more: Mapping[str, str]) -> Running:
        if self._relay_starter is not None and self._relay is None:
            relay = Command(None, ("relay",), self.environment(), self.folder, self.log("relay"))
            self._relay = self._relay_starter.start(relay)
        environment = self.environment(**more)
        return self._starter.start(Command(self._script, self._args, environment, self.folder, self.log(name)))

    def kill(self, *ranks: int) -> None:
        """kill -9 these workers at once; return when they are gone."""
        for rank in ranks:
            self.worker(rank).signal(signal.SIGKILL)
        for rank in ranks:
            self.wait_killed(rank)

    def kill_everything(self) -> None:
        """kill -9 the scheduler and every worker."""
        self.scheduler.signal(signal.SIGKILL)
        self.kill(*self.ranks)
        self.scheduler.wait(WAIT_S)
        self.wait_for_writers()

    def wait_killed(self, rank: int, timeout_s: float = WAIT_S) -> None:
        """Wait until kill -9 has ended this worker: the test's, or its own (``--kill``)."""
        try:
            status = self.worker(rank).wait(timeout_s)
        except TimeoutError as error:
            raise AssertionError(f"worker {rank}: {error}\n{self.tails()}") from None
        assert status == -signal.SIGKILL, f"worker {rank} ended with {status}\n{self.tails()}"

    def stop(self) -> dict[str | int, int]:
        """Stop the job as Ctrl-C does; return the exit status of every process."""
        settings, _ = config.read({**self.settings, "ROLE": "scheduler"})
        with contextlib.closing(SchedulerLink(settings)) as follower:
            assert select.select([follower], [], [], WAIT_S)[0] and follower.take(), "the scheduler has answered"
            follower.ask_to_stop("Ctrl-C")
            return self.wait_ended()

    def wait_ended(self, timeout_s: float = FINISH_S) -> dict[str | int, int]:
        """Return the exit status of every process, once all have ended."""
        running: dict[str | int, Running] = {**self._workers, "scheduler": self.scheduler}

        def are_over() -> bool | None:
            return None if any(one.is_alive() for one in running.values()) else True

        self.wait_until(are_over, "end of all processes", timeout_s)
        return {name: one.wait() for name, one in running.items()}

    def wait_finished(self, timeout_s: float = FINISH_S) -> str:
        """Return the job's sha256, once every process has exited with 0 and no survivor was replaced."""
        statuses = self.wait_ended(timeout_s)
        failed = {name: status for name, status in statuses.items() if status}
        assert not failed, f"exit statuses {failed}\n{self.tails()}"
        replaced = [rank for rank in self.ranks if rank not in self.restarted and self.seatings(rank) != 1]
        assert not replaced, f"survivors {replaced} were seated again\n{self.tails()}"
        return self.sha256()
