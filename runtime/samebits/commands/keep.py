"""``samebits keep``: run one process of a job in a container, and restart it as long as a restart can help.

``core.causes.escalation`` decides at which level to try next. The exit status tells the container engine what to do:
restart this container, recreate the whole job (92), or do nothing.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from samebits import config
from samebits.config import Role, Settings
from samebits.core.causes.escalation import Escalation, EscalationStep, RestartScope, Tried, levels_of
from samebits.errors import LevelsSpentError, SameBitsError, StoreError, UsageError
from samebits.exit_codes import EXIT_CODES, Repeatable, codes_to_give_up_at
from samebits.launcher.interrupts import Signals
from samebits.service import log
from samebits.store import durable, private, probe_note
from samebits.store.child_processes import tied
from samebits.store.owner import read_owner
from samebits.store.process_identity import ProcessIdentity, launcher_of_session

_FINAL = frozenset((0, *codes_to_give_up_at()))
_WORTH_RETRYING = frozenset(one.code for one in EXIT_CODES if one.again is Repeatable.YES)
_LOOK_S = 1.0  # PROBE_FILE is written every second
_MAX_BYTES = 64
_STORE_S = 10.0  # torchrun's store is in a process of this machine
_UNKNOWN_COMMAND = 127  # as a shell reports it


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand. Return the process's last exit status, or 92 if the whole job must be restarted."""
    parser = argparse.ArgumentParser(
        prog="samebits keep",
        usage="%(prog)s [--stay] command ...",
        description="For containers: run a process of a job, forward SIGTERM and SIGINT to it, and restart it as "
        "long as its exit status shows that a restart can help (samebits explain exit-codes), within the limits of "
        "RECOVER_STRATEGY. Each attempt is printed here and recorded in the job's history.",
    )
    parser.add_argument(
        "--stay",
        action="store_true",
        help="if a restart cannot help, log that and wait for SIGTERM instead of exiting: for engines that restart a "
        "container after any exit status",
    )
    parser.add_argument("--torchrun", action="store_true", help=argparse.SUPPRESS)  # samebits.init() starts it
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("keep: no command was given. Fix: samebits keep python3 train.py")
    if options.torchrun:
        return _keep_rank(command)
    with Signals((signal.SIGCHLD,)) as signals:
        try:
            keeper = RestartLoop(command, signals)
            status = keeper.run()
        except SameBitsError as error:
            if not options.stay:
                raise
            _say(str(error))
            return _stay(error.exit_code, signals)
        return _stay(status, signals) if options.stay and status in _FINAL and not keeper.asked else status


def _stay(status: int, signals: Signals) -> int:
    """Wait until this process is asked to end, and return the status."""
    _say(f"ended with status {status}, not restarted. Fix: read the log above, then docs/reference/exit-codes.md")
    while all(name == signal.SIGCHLD.name for name in signals.take()):
        select.select([signals.fileno()], [], [])
    return 0


class RestartLoop:
    """Runs the process at one place in the job, and restarts it.

    Args:
        command: the command of each process; its first word is looked up in PATH.
        signals: SIGTERM and SIGINT, which are passed on, and SIGCHLD.

    Raises:
        SettingsError: a variable is invalid.
    """

    def __init__(self, command: Sequence[str], signals: Signals) -> None:
        self._command = list(command)
        self._signals = signals
        self._settings = config.read(role_required=False)[0]
        self._escalation = _escalation(self._settings)
        self._child = 0
        self._watched = [signals.fileno()]
        self.asked = False

    def run(self) -> int:
        """Run the process until a restart here cannot help or must be made at a higher level, and return the status.

        Raises:
            UsageError: there is no such program. If the program ran before, its absence counts as a death.
        """
        said = ""
        while True:
            status, held_s = self._once(said)
            if self.asked or self._is_final(status):
                return status
            step = self._escalation.died(held_s)
            self._remember()
            said = f"{self._who()}: {step.said}: {_what_follows(step)} after {_spoken(status)}"
            _say(said)
            if step.level is not RestartScope.PROCESS:
                self._tell(said)
                return self._status_above(step, status)
            if self._wait(step.wait_s):
                return status

    def _once(self, said: str) -> tuple[int, float]:
        """Run one process. Return its status as a shell reports it, and for how many seconds it held its seat."""
        try:
            self._child = self._spawn()
        except OSError as error:
            if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError) and not said:
                raise UsageError(
                    f"keep: {self._command[0]!r} cannot be started: {error.strerror}. Fix: give a program on PATH or "
                    "the path of an executable; put the interpreter before a script, as in "
                    "`samebits keep python3 train.py`"
                ) from None
            _say(f"{self._command[0]}: {error.strerror}")
            return _UNKNOWN_COMMAND, 0.0
        if said:
            self._tell(said)
        pid, started_at, held_since = self._child, time.monotonic(), None
        path = self._settings.probe_file
        while (status := self._reaped(pid)) is None:
            self._wait(None if path is None or held_since is not None else _LOOK_S)
            if held_since is None and path is not None and _holds_its_seat(path, pid):
                held_since = time.monotonic()
                self._seated()
        self._child = 0
        if path is None:
            held_since = started_at
        return status, 0.0 if held_since is None else time.monotonic() - held_since

    def _wait(self, timeout_s: float | None) -> bool:
        """Wait at most ``timeout_s`` seconds for a signal, and return whether this process is asked to end."""
        select.select(self._watched, [], [], timeout_s)
        for name in self._signals.take():
            if name != signal.SIGCHLD.name:
                self._end(signal.SIGTERM)
        return self.asked

    def _end(self, number: signal.Signals) -> None:
        self.asked = True
        if self._child:
            os.kill(self._child, number)

    def _is_final(self, status: int) -> bool:
        return status in _FINAL

    def _spawn(self) -> int:
        return os.posix_spawnp(self._command[0], self._command, config.whole_environment())

    def _seated(self) -> None:
        """Record that the child holds its seat."""

    def _remember(self) -> None:
        _remember(self._settings, self._escalation.tried)

    def _status_above(self, step: EscalationStep, status: int) -> int:
        """Return the exit status that requests the next level, or reports that there is none."""
        return status if step.level is RestartScope.POD else LevelsSpentError.exit_code

    def _reaped(self, pid: int) -> int | None:
        """Return the child's status once it has ended, otherwise None.

        As the first process of a container must, this also reaps orphans.
        """
        while True:
            try:
                found, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if not found:
                return None
            if found == pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code

    def _who(self) -> str:
        settings = self._settings
        return "scheduler" if settings.role is Role.SCHEDULER else f"worker {settings.node_id or '–'}"

    def _tell(self, said: str) -> None:
        """Record the decision in the job's history if a scheduler answers."""
        if self._settings.role is Role.SCHEDULER:
            return
        from samebits.launcher.scheduler_link import (
            decide_once,
        )  # ZeroMQ takes 15 MiB, which a process that only waits can save

        try:
            decide_once(self._settings, said)
        except SameBitsError as error:
            _say(f"not kept in the history: {error}")


class RankKeeper(RestartLoop):
    """The child of a torchrun agent that runs a ported script (``service.torchrun_seat``).

    Its own child holds the rank's seat. A child that is killed, or ends with a status at which a restart helps, is
    replaced here. Any other end is also this process's end, so that torchrun's agent decides what follows.
    """

    def __init__(self, command: Sequence[str], signals: Signals) -> None:
        from samebits.launcher.kept_scheduler import KeptScheduler  # loads ZeroMQ, as above

        super().__init__(command, signals)
        settings = self._settings
        most = levels_of({"process": settings.recover_strategy.attempts.get("process")})
        self._escalation = Escalation({RestartScope.PROCESS: most[RestartScope.PROCESS]})
        self._signal = 0  # the signal that ended the last child
        self._failure: SameBitsError | None = None
        private.make_folder(settings.log_dir)
        self._agent = _open(launcher_of_session())
        self._watched.append(self._agent)
        points = settings.checkpoint_path if isinstance(settings.checkpoint_path, Path) else None
        self._scheduler = KeptScheduler(settings, config.scheduler_environment(), moves=points)
        self._scheduler.on_failure = self._fail

    def run(self) -> int:
        """Keep the rank running. Return the status of the last child, or end by the same signal.

        Raises:
            SameBitsError: no scheduler of the job can run here.
        """
        try:
            status = super().run()
        finally:
            self._scheduler.close()
        if self._failure is not None:
            raise self._failure
        path = config.torchrun_error_file()
        if self.asked and self._signal == signal.SIGTERM and path is not None and path.exists():
            return 1  # the script had failed before torchrun asked, but another rank that lost this one was seen first
        if self._signal:
            signal.signal(self._signal, signal.SIG_DFL) if self._signal != signal.SIGKILL else None
            os.kill(os.getpid(), self._signal)
        return status

    def _is_final(self, status: int) -> bool:
        return not self._signal and status not in _WORTH_RETRYING

    def _spawn(self) -> int:
        if (path := config.torchrun_error_file()) is not None:
            path.unlink(missing_ok=True)  # left by the previous child, whose end is handled
        words = tied(self._command)
        # A separate process group, so that SIGTERM for torchrun's worker is passed on only once.
        return os.posix_spawn(words[0], words, config.whole_environment(), setpgroup=0)

    def _wait(self, timeout_s: float | None) -> bool:
        super()._wait(timeout_s)
        if self._failure is not None:
            self._end(signal.SIGTERM)
        if self._agent in select.select([self._agent], [], [], 0)[0]:
            self._end(signal.SIGKILL)  # no process of a lost node may train beside the ranks that replace it
        return self.asked

    def _reaped(self, pid: int) -> int | None:
        found, how = os.waitpid(pid, os.WNOHANG)
        if not found:
            return None
        code = os.waitstatus_to_exitcode(how)
        self._signal = max(0, -code)
        return code if code >= 0 else 128 - code

    def _seated(self) -> None:
        owner = read_owner(self._settings.recovery_path)
        if owner is not None:  # on the scheduler's machine, restart only a scheduler of this job
            self._scheduler.link(owner.job, is_up=False)

    def _remember(self) -> None:
        """Do nothing, because restarts by torchrun start a new record of attempts."""

    def _status_above(self, step: EscalationStep, status: int) -> int:
        return status

    def _fail(self, error: SameBitsError) -> None:
        self._failure = error
        self._scheduler.let_go()
        os.kill(os.getpid(), signal.SIGCHLD)  # wakes the main thread


def _keep_rank(command: Sequence[str]) -> int:
    log.set_up("keeper")
    with Signals((signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT)) as signals:
        status = RankKeeper(command, signals).run()
        # This process now has its own exit status, which a late request must not replace.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
        return status


def _open(agent: ProcessIdentity | None) -> int:
    """Return a descriptor that becomes readable once torchrun's agent is gone.

    If the agent ended before this process looked up its parent, another process has adopted this one, and the agent's
    store does not answer any more.

    Raises:
        UsageError: the agent is gone.
    """
    gone = UsageError("keep: torchrun, which started this process, has exited. Fix: start torchrun again")
    if agent is None:
        raise gone
    try:
        descriptor = os.pidfd_open(agent.pid)
        if (store := config.torchrun_store()) is not None:
            socket.create_connection(store, _STORE_S).close()
    except OSError:
        raise gone from None
    return descriptor


def _escalation(settings: Settings) -> Escalation:
    levels = levels_of(
        settings.recover_strategy.attempts, process=settings.process_recover, pod=settings.pod_rescheduling
    )
    data = None if settings.probe_file is None else private.read(_notes(settings.probe_file), _MAX_BYTES)
    tried = Tried.read(data.decode("ascii", "replace")) if data else None
    return Escalation(levels, tried)


def _remember(settings: Settings, tried: Tried | None) -> None:
    """Store the attempts for the next container of this pod."""
    if settings.probe_file is not None:
        durable.replace_note(_notes(settings.probe_file), str(tried or "").encode())


def _notes(probe_file: Path) -> Path:
    return probe_file.with_name(f"{probe_file.name}.tried")


def _holds_its_seat(path: Path, pid: int) -> bool:
    try:
        note = probe_note.read(path)
    except StoreError:
        return False
    return note is not None and note.identity.pid == pid and note.state is probe_note.ProbeState.READY


def _what_follows(step: EscalationStep) -> str:
    match step.level:
        case RestartScope.PROCESS:
            return "started again in its place"
        case RestartScope.POD:
            return "its container has to start again"
        case RestartScope.JOB:
            return f"the whole job has to start again (status {LevelsSpentError.exit_code})"
    return f"given up (status {LevelsSpentError.exit_code})"


def _spoken(status: int) -> str:
    if status > 128 and status - 128 in {one.value for one in signal.Signals}:
        return signal.Signals(status - 128).name
    return f"status {status}"


def _say(text: str) -> None:
    print(f"samebits keep: {text}", file=sys.stderr, flush=True)
