"""Keep a scheduler running for a job whose processes another launcher, such as torchrun, starts.

Such a job has no folder to recover from; its processes know only an address. Each process on the machine with that
address tries to listen on it, and passes the socket to a scheduler that it starts. It does so again whenever the
scheduler is gone. The kernel gives the address to only one process, so there are never two schedulers.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from samebits import config
from samebits.config import Settings
from samebits.core.end_kinds import EndKind
from samebits.errors import ListenError, SameBitsError, SchedulerUnreachableError
from samebits.launcher import job_spec
from samebits.launcher.scheduler_link import at_address, decide_once, stop_once
from samebits.launcher.spawning import execute
from samebits.net.address import close_all, listen, may_be_a_scheduler
from samebits.net.address_book import addresses_now
from samebits.printable import printable
from samebits.scheduler_hosts import NotHostsError, names_one
from samebits.service import log
from samebits.service.scheduler_address import listening_place
from samebits.service.status import stored_view
from samebits.store import durable, private

LOG_NAME = "scheduler.log"
RETRY_S, LONGEST_RETRY_S = 0.5, 10.0
HELD_S = 5.0  # how long a process that may be about to start a scheduler may hold the address without an answer there
_SHOWN_BYTES = 4096


class KeptScheduler:
    """Keeps a scheduler running at the job's address, if that is an address of this machine.

    Args:
        settings: settings of one of the job's processes.
        environment: environment of the scheduler's process.
        may_start: whether this object may start the scheduler; False if it is started by other means.
        moves: another folder of the job, which is moved aside together with RECOVERY_PATH once the job is finished.

    Attributes:
        on_failure: called in this object's thread with the reason, if no scheduler can serve before the job begins.

    Raises:
        SettingsError: a secret is required to listen on the address.
        ListenError: this user may not listen on the port, or a program that is no scheduler holds it.
        StoreError: RECOVERY_PATH cannot be used.
    """

    def __init__(
        self, settings: Settings, environment: Mapping[str, str], may_start: bool = True, *, moves: Path | None = None
    ) -> None:
        self.on_failure: Callable[[SameBitsError], object] = lambda _error: None
        self._settings = settings
        self._environment = environment
        self._may_start = may_start
        self._folder = Path.cwd()
        self._recovery_path = self._folder / settings.recovery_path
        self._moves = moves
        self._job = ""  # set once a process here has a seat
        self._is_up = False
        self._is_over = False  # whether the job is over, or this object is closed
        self._said = ""  # the last warning
        self._taken_since: float | None = None  # since when another process holds the address
        self._child: tuple[int, int] | None = None  # pid and pidfd of the scheduler started here
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pipe_lock, self._has_pipe = threading.Lock(), True
        self._start_if_possible()
        self._thread = threading.Thread(target=self._run, name="samebits-kept-scheduler", daemon=True)
        self._thread.start()

    def link(self, job: str, *, is_up: bool) -> None:
        """Record whether the job's scheduler can be reached. May be called from any thread."""
        self._job, self._is_up = job, is_up
        self._wake()

    def stop_job(self, by: str) -> bool:
        """Ask the scheduler to end the job for all processes, and return whether it received the request."""
        return stop_once(self._settings, by)

    def record(self, text: str) -> bool:
        """Send a decision of this launcher to the scheduler's history, and return whether it was received."""
        return decide_once(self._settings, text)

    def let_go(self) -> None:
        """Stop starting schedulers; callable from any thread."""
        self._is_over = True
        self._wake()

    def close(self) -> None:
        """Stop watching.

        A running scheduler ends with its job, or now if this process never had a seat in the job.
        """
        self.let_go()
        self._thread.join()
        if self._child is not None and not self._job:
            signal.pidfd_send_signal(
                self._child[1], signal.SIGTERM
            )  # others that wait for a seat start another scheduler
        with self._pipe_lock:
            if self._has_pipe:
                self._has_pipe = False
                os.close(self._readable)
                os.close(self._writable)
        if self._child is not None:
            os.close(self._child[1])
            self._child = None

    def _wake(self) -> None:
        with self._pipe_lock, contextlib.suppress(BlockingIOError):  # the thread has not read the earlier bytes yet
            if self._has_pipe:
                os.write(self._writable, b"w")

    def _run(self) -> None:
        retry_s = RETRY_S
        start_at = time.monotonic() + retry_s
        while not self._is_over:
            self._wait(start_at)
            now = time.monotonic()
            if self._is_up:
                retry_s, start_at = RETRY_S, now
            elif self._child is None and start_at <= now and not self._is_over:
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
                start_at = now + retry_s
                try:
                    self._start_if_possible()
                except SameBitsError as error:
                    self._failed(error)

    def _wait(self, start_at: float) -> None:
        """Wait until the connection changes, the scheduler that was started here ends, or the next start is due."""
        child, timeout_s = self._child, None
        if child is None and not self._is_up:
            timeout_s = max(0.0, start_at - time.monotonic())
        select.select([self._readable, *([] if child is None else [child[1]])], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._readable, 4096)
        if child is not None:
            self._reap(child)

    # ---- one scheduler process

    def _start_if_possible(self) -> None:
        """Start a scheduler, unless the address is in use or belongs to another machine."""
        if not self.is_here or not self._is_ours_to_start():
            return
        addresses, port = listening_place(self._settings)
        try:
            sockets = listen(addresses, port)
        except ListenError as error:
            if not error.is_taken or self._is_held_by_a_stranger(addresses, port):
                raise
            return
        self._taken_since = None
        try:
            if self._make_way():
                self._start([one.fileno() for one in sockets])
        finally:
            close_all(sockets)

    def _is_held_by_a_stranger(self, addresses: Sequence[str], port: int) -> bool:
        """Return whether a program holds the port that is no scheduler, and no process of a job that starts one."""
        now = time.monotonic()
        self._taken_since = now if self._taken_since is None else self._taken_since
        return not may_be_a_scheduler(addresses[0], port, now - self._taken_since < HELD_S)

    def _is_ours_to_start(self) -> bool:
        """Return whether no other machine can have a scheduler of this job.

        Within a machine, the kernel gives the address to one process. If there are several addresses, the machine with
        the first one starts the scheduler. Another machine only takes over a job that it finds in a shared
        RECOVERY_PATH, where a lock decides.
        """
        settings = self._settings
        if names_one(settings.sched_host):
            return True
        stored = stored_view(self._recovery_path) if self._job else None
        if stored is not None and stored.job == self._job:
            return True
        try:
            first = addresses_now(settings.sched_host, settings.sched_port)[0]
            listening_place(at_address(settings, first))
        except (ListenError, NotHostsError):
            return False
        return True

    def _make_way(self) -> bool:
        """Move an earlier job's folder aside if that job is finished, and return whether a scheduler is needed.

        No other process can do so at the same time, because this process holds the address.
        """
        stored = stored_view(self._recovery_path)
        if stored is None:
            return True
        if stored.job == self._job and (stored.job_finished or stored.ended):
            self._is_over = True
            return False
        if not stored.job_finished:
            if not self._job and _is_started_by_a_person():
                name = stored.name or stored.job
                log.say(
                    f"this continues job {name}, which {self._recovery_path} holds unfinished. To start over, stop "
                    f"this command and move that folder away: mv {shlex.quote(str(self._recovery_path))} "
                    f"{shlex.quote(f'{self._recovery_path}.old')}"
                )
            return True
        # Move RECOVERY_PATH last, so that the moves are repeated if this process is killed in between.
        for folder in (*([] if self._moves is None else [self._folder / self._moves]), self._recovery_path):
            aside = durable.move_aside(folder, stored.job)
            if aside is not None:
                log.say(f"job {stored.job} is finished; its folder is moved aside, to {aside}")
        return True

    @property
    def is_here(self) -> bool:
        """Whether a scheduler that this process may start would listen on this machine."""
        if not self._may_start:
            return False
        try:
            listening_place(self._settings)
        except ListenError:
            return False
        return True

    def _start(self, sockets: list[int]) -> None:
        private.make_folder(self._recovery_path, "RECOVERY_PATH")
        words = [sys.executable, "-P", "-m", "samebits", "scheduler"]
        output = private.open_to_append(self._log)
        try:
            pid = execute(words, self._environment, self._folder, output, sockets)
        finally:
            os.close(output)
        self._child = pid, os.pidfd_open(pid)
        job_spec.keep_address(self._recovery_path, self._environment)
        log.say(f"started the job's scheduler here: pid {pid}, log {self._log}")

    @property
    def _log(self) -> Path:
        return self._recovery_path / LOG_NAME

    def _reap(self, child: tuple[int, int]) -> None:
        pid, descriptor = child
        found, how = os.waitpid(pid, os.WNOHANG)
        if not found:
            return
        os.close(descriptor)
        self._child, self._is_up = None, False
        code = os.waitstatus_to_exitcode(how)
        if code == 0 or EndKind.of_exit_code(code) is not None:
            self._is_over = True  # the job is over too
        elif code > 0:
            ended = f"the job's scheduler, which this process started, ended with status {code}"
            self._failed(SchedulerUnreachableError(f"{ended}: {self._last_line()}"))
        else:
            log.warn(f"the job's scheduler (pid {pid}) was killed by signal {-code}; restarting it")

    def _failed(self, error: SameBitsError) -> None:
        """Report why no scheduler runs. This is only a warning once the job has begun, which can train without one."""
        if self._job and str(error) != self._said:
            self._said = str(error)
            log.warn(f"no scheduler can be started here for now: {error}")
        elif not self._job:
            self.on_failure(error)

    def _last_line(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _SHOWN_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"its log {self._log} cannot be read: {error.strerror}"
        return printable(lines[-1].removeprefix("samebits: ") if lines else "it has said nothing", _SHOWN_BYTES)


def _is_started_by_a_person() -> bool:
    """Return whether a terminal is attached and torchrun has not restarted this process."""
    try:
        has_terminal = sys.stdin.isatty()
    except (ValueError, AttributeError):  # closed, or none
        has_terminal = False
    return has_terminal and not config.is_restarted_by_torchrun()
