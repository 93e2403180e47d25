"""Restart dead processes of a job on this machine (the supervisor).

A folder's job has one supervisor at a time, which holds a lock that is released when it dies. Everything that a
supervisor needs is in the folder (job spec, pid files, token), so the next one can continue. A replacement is a new
node, so it need not wait for a cool-down. Workers are forked from a zygote, a process that has already imported torch.
If a worker needs settings other than the zygote's, it is started as a separate process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samebits import config
from samebits.account.job_view import names_spare
from samebits.config import Settings
from samebits.core.causes.restarts import Backoff, Loss, Never, RestartAt, Restarts
from samebits.core.replacement_names import may_be_replaced, root_of, successor_of
from samebits.errors import SameBitsError
from samebits.launcher import job_spec
from samebits.launcher.job_spec import JobSpec, program_of
from samebits.launcher.processes import SCHEDULER, name_of, node_of, read_pid_files
from samebits.launcher.spawning import (
    OF_ONE_PROCESS,
    BusyError,
    Listener,
    Program,
    Spawn,
    StartLock,
    Way,
    execute,
    launch,
    listen_for,
    reserved,
    spawn,
)
from samebits.service import fork_orders
from samebits.service.fork_orders import ForkResult, Order
from samebits.store import private
from samebits.store.checkpoint.memory_buffer import available_bytes
from samebits.store.owner import read_owner, read_token
from samebits.store.process_identity import ProcessIdentity, lock_holder

NAME = "zygote"
ANSWER_S = 10.0  # a fork takes milliseconds, so one that takes longer is not waited for
SPARE_MEMORY = 2  # multiple of a rank's memory that must be available for a spare that the user did not request
_PR_SET_CHILD_SUBREAPER = 36


class Zygote:
    """The zygote process of a supervisor, which ends with the supervisor.

    Args:
        log_dir: the folder for the zygote's log.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log = log_dir / f"{NAME}.log"
        self._link: socket.socket | None = None
        self._pid = 0
        self._like: Program | None = None
        self._is_ready = False

    def start(self, program: Program) -> None:
        """Start the zygote for this program's workers, unless it is running. It needs seconds to get ready."""
        if self._link is not None or not _is_forkable(program):
            return
        ours, its = fork_orders.pair()
        words = [program.interpreter, "-P", "-m", "samebits.training.zygote", str(its.fileno())]
        log = private.open_to_append(self._log)
        its.set_inheritable(True)
        try:
            self._pid = execute(words, shared(program.environment), program.folder, log)
        finally:
            os.close(log)
            its.close()
        self._link, self._like, self._is_ready = ours, program, False

    def spawn(self, program: Program, name: str, log: int) -> int:
        """Fork a process from the zygote if that is equivalent to a normal start; otherwise call ``spawning.spawn``."""
        is_here = node_of(name) not in program.elsewhere
        pid = self._forked(program, name, log) if is_here and self._serves(program) else 0
        return pid or spawn(program, name, log)

    def end(self) -> None:
        """End the zygote. The processes that it has forked continue."""
        if self._link is not None:
            self._link.close()
            self._link = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # an unreaped child of this process, so the pid is still valid
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    def _serves(self, program: Program) -> bool:
        like = self._like
        if self._link is None or like is None:
            return False
        is_like = (program.interpreter, program.folder, program.way) == (like.interpreter, like.folder, like.way)
        return is_like and shared(program.environment) == shared(like.environment) and self._answers(0.0)

    def _answers(self, timeout_s: float) -> bool:
        """Return whether the zygote has reported that it is ready."""
        if not self._is_ready and self._link is not None and _is_readable(self._link, timeout_s):
            answer = fork_orders.receive_answer(self._link)
            self._is_ready = answer is not None and answer.text == fork_orders.READY
            if not self._is_ready:
                self.end()
        return self._is_ready

    def _forked(self, program: Program, name: str, log: int) -> int:
        """Fork a worker that is this process's child and leads its own session; return its pid, or 0."""
        order = Order(
            str(program.folder), program.interpreter, program.script, program.args, program.environment_of(name)
        )
        answer: ForkResult | None = None
        assert self._link is not None
        try:
            with _as_subreaper():
                fork_orders.send_order(self._link, order, log)
                if _is_readable(self._link, ANSWER_S):
                    answer = fork_orders.receive_answer(self._link)
        except OSError:
            answer = None
        if answer is None:
            self.end()  # a late answer would mean a second process with this name
        return 0 if answer is None else answer.pid


def _is_forkable(program: Program) -> bool:
    """Return whether the workers' command has the form `python script args` and can be run in a forked process.

    A module, another program, and the wrapper process of a plain script cannot be forked.
    """
    return program.worker_words() == Way.SCRIPT.words(program.interpreter, program.script, program.args)


def shared(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are equal for all workers, including those that libraries read when loaded."""
    return {name: text for name, text in environment.items() if name not in OF_ONE_PROCESS}


@contextlib.contextmanager
def _as_subreaper() -> Iterator[None]:
    """Adopt orphaned descendants inside the block (PR_SET_CHILD_SUBREAPER)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _is_readable(link: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()  # select(2) accepts no descriptor above 1023
    poll.register(link, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


LOCK_FILE = "supervisor.lock"
BUSY_RETRY_S = 0.1  # delay before retrying while another process starts processes here


@dataclass(frozen=True, slots=True)
class Dead:
    """A process that has ended, and a description of how."""

    name: str
    identity: ProcessIdentity
    said: str
    status: int | None
    loss: Loss


@dataclass(frozen=True, slots=True)
class Started:
    """A started process. ``new_name`` differs from ``name`` if it replaces that process as another node."""

    name: str
    new_name: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A dead process that will not be replaced, so the job must end."""

    dead: Dead
    why: str


def supervisor_for(settings: Settings) -> Supervisor | None:
    """Return a supervisor if the job allows restarts (MAX_RESTARTS) and recovery (ENABLE_RECOVERY), otherwise None."""
    wanted = settings.max_restarts > 0 and settings.enable_recovery
    return Supervisor(settings, Zygote(settings.log_dir)) if wanted else None


def supervisor_of(log_dir: Path) -> ProcessIdentity | None:
    """Return the process that holds the folder's supervisor lock, or None if no such process is visible here.

    The kernel's table of locks is read (proc_locks(5)), because the folder may be read-only.
    """
    try:
        lock = (log_dir / LOCK_FILE).stat()
    except OSError:
        return None
    holder = lock_holder(lock)
    return holder if holder is not None and holder.is_alive() else None


class Supervisor:
    """Restarts processes for one follower. All methods take ``now`` in monotonic seconds.

    Args:
        settings: the job's settings, with absolute folders.
        zygote: starts workers' processes faster than a normal start.
        spawn_worker: starts workers' processes if there is no zygote.
    """

    def __init__(self, settings: Settings, zygote: Zygote | None = None, spawn_worker: Spawn | None = None) -> None:
        self._settings = settings
        self._zygote = zygote
        self._spawn_worker = spawn_worker if zygote is None else zygote.spawn
        self._restarts = Restarts(settings.max_restarts)
        self._due: dict[str, tuple[float, ProcessIdentity | None]] = {}  # None: the process was never started
        self._given_up: GivenUp | None = None
        self._lock = -1
        self._start_backoff = Backoff()
        self._told_why_no_spare = False

    # ---- taking charge of the folder

    @property
    def spawn_worker(self) -> Spawn | None:
        """The function that starts workers' processes; None: ``spawning.spawn``."""
        return self._spawn_worker

    @property
    def holds(self) -> bool:
        """Whether this object is the folder's supervisor."""
        return self._lock >= 0

    def try_to_hold(self) -> bool:
        """Become the folder's supervisor, or return False if another process already is."""
        if self.holds:
            return True
        lock = private.open_to_append(self._settings.log_dir / LOCK_FILE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def let_go(self) -> None:
        """Stop being the folder's supervisor."""
        if self.holds:
            os.close(self._lock)
            self._lock = -1
        self._due.clear()
        if self._zygote is not None:
            self._zygote.end()

    def get_ready(self) -> None:
        """Start the zygote once there are workers, so that restarts are fast."""
        kept = job_spec.read(self._settings.log_dir) if self._zygote is not None and self.holds else None
        if kept is not None and self._zygote is not None:
            self._zygote.start(_program(kept))

    def add_spares(self, rank_bytes: int, now: float) -> str:
        """Schedule this machine's unstarted spares if there is enough memory for them.

        If the user has not requested a spare, ``samebits run`` starts one only if it slows neither the start nor
        training: once the job trains, and while twice a rank's memory is available.

        Args:
            rank_bytes: resident memory of this machine's largest rank.
            now: the current time.

        Returns:
            Why no spare is started; "" if one is started, or if the reason was returned before.
        """
        if not self.holds:
            return ""
        log_dir, settings = self._settings.log_dir, self._settings
        nodes = job_spec.nodes_of(log_dir, settings)
        spares = [name_of(node) for node in nodes if names_spare(node, settings.max_worker_num)]
        started = read_pid_files(log_dir, spares)
        missing = [name for name in spares if name not in started and name not in self._due]
        available = available_bytes() if missing else None
        if available is None:
            return ""
        if available >= SPARE_MEMORY * rank_bytes:
            self._due.update((name, (now, None)) for name in missing)
            return ""
        if self._told_why_no_spare:
            return ""
        self._told_why_no_spare = True
        return (
            f"no spare is kept, because {available >> 20} MiB of memory are available and a rank uses "
            f"{rank_bytes >> 20} MiB: a lost worker is restarted instead. Fix: --spares 1 keeps a spare in any case"
        )

    # ---- deaths

    def died(self, dead: Dead, now: float) -> bool:
        """Record the loss of a process that the job still needs, and return whether it will be restarted."""
        if not self.holds or self._given_up is not None:
            return False
        match self._restarts.died(_place_of(dead.name), dead.loss, now):
            case RestartAt(at):
                self._due[dead.name] = (at, dead.identity)
                return True
            case Never(why, ends_job=True):
                self._given_up = GivenUp(dead, why)
            case Never():
                pass
        return False

    def is_at_it(self) -> bool:
        """Return whether a restart is pending."""
        return bool(self._due)

    def given_up(self) -> GivenUp | None:
        """Return the process because of which the job must end, or None."""
        return self._given_up

    def wake_at(self, *, but: Sequence[str] = ()) -> float | None:
        """Return when ``start_due`` must be called even if nothing happens, or None."""
        return min((at for name, (at, _) in self._due.items() if name not in but), default=None)

    def start_due(self, now: float, *, job: Callable[[], str], but: Sequence[str] = ()) -> list[Started]:
        """Start the processes that are due, except the names in ``but``, which stay due.

        ``job`` returns the id of the job, or an empty string if it is unknown.

        A start that fails is retried at increasing intervals, with fewer messages, until it succeeds.

        Raises:
            ListenError: another process has the scheduler's port; like StoreError, raised only once.
            StoreError: for example, the disk is full; raised at the first of several failures in a row.
        """
        due = [name for name, (at, _) in self._due.items() if at <= now and name not in but]
        if not due:
            return []
        try:
            with StartLock(self._settings.log_dir, wait=False):
                started = self._start(due, job())
        except BusyError:
            self._due.update((name, (now + BUSY_RETRY_S, self._due[name][1])) for name in due)
            return []
        except SameBitsError:
            is_first, at = not self._start_backoff.has_failed, self._start_backoff.failed(now)
            self._due.update((name, (at, self._due[name][1])) for name in due)
            if is_first:
                raise
            return []
        self._start_backoff.succeeded()
        for name in due:
            del self._due[name]
        return started

    def _start(self, due: list[str], job: str) -> list[Started]:
        settings = self._settings
        log_dir = settings.log_dir
        kept = job_spec.read(log_dir)
        if kept is None:
            return []  # the folder was moved away, along with its processes
        nodes = job_spec.nodes_of(log_dir, settings)
        there = read_pid_files(log_dir, due)
        wanted = [
            name
            for name in due
            if there.get(name) in (None, self._due[name][1]) and (name == SCHEDULER or node_of(name) in nodes)
        ]
        listener = listen_for(settings) if SCHEDULER in wanted else Listener()
        try:
            return start_in_place(
                wanted,
                first=[name for name in wanted if self._due[name][1] is None],
                kept=kept,
                settings=settings,
                job=job,
                program=replace(_program(kept), job=kept.job or job, listening=listener.descriptors),
                spawn_worker=self._spawn_worker,
            )
        finally:
            listener.close()


def _program(kept: JobSpec) -> Program:
    present = config.whole_environment()
    return program_of(kept, present, job_spec.secrets_for(kept, present))


def can_replace(settings: Settings, job: str) -> bool:
    """Return whether a replacement process can prove that it belongs to this job, so that it need not wait.

    Before the first worker is admitted, the folder is unclaimed and no seat has a cool-down.
    """
    owner = read_owner(settings.log_dir)
    return owner is not None and owner.job == job and bool(read_token(settings.log_dir))


def start_in_place(
    names: Sequence[str],
    *,
    kept: JobSpec,
    settings: Settings,
    job: str,
    program: Program,
    spawn_worker: Spawn | None = None,
    first: Sequence[str] = (),
) -> list[Started]:
    """Start a replacement for each of these dead processes, as a new node if possible.

    The caller holds a StartLock.

    Args:
        names: the processes' names.
        kept: the job's spec.
        settings: the job's settings.
        job: the job's id; empty if unknown.
        program: the program to run.
        spawn_worker: starts workers' processes; None means ``spawning.spawn``.
        first: those of ``names`` that were never started, and so keep their names.

    Raises:
        StoreError: for example, no space for a pid file; processes that were already started keep running.
    """
    log_dir, replaces = settings.log_dir, can_replace(settings, job)
    started = [Started(name, _new_name(name) if replaces and name not in first else name) for name in names]
    nodes = job_spec.nodes_of(log_dir, settings)
    with reserved(log_dir, [one.new_name for one in started]) as berths:
        _rename(kept, log_dir, nodes, started)  # first, so that the next supervisor finds them if this process dies
        running: list[ProcessIdentity] = []
        renamed = _new_nodes(started)
        elsewhere = {renamed.get(node, node): host for node, host in program.elsewhere.items()}
        try:
            launch(berths, replace(program, elsewhere=elsewhere), running, spawn_worker)
        except Exception:
            if _new_nodes(started):
                job_spec.keep(log_dir, kept)
            _rename(kept, log_dir, nodes, started[: len(running)])
            raise
    for one in started:
        if one.name != one.new_name:
            (log_dir / f"{one.name}.pid").unlink(missing_ok=True)
    return started


def _rename(kept: JobSpec, log_dir: Path, nodes: Sequence[str], started: Sequence[Started]) -> None:
    """Replace this machine's dead nodes by the new ones in the job spec."""
    renamed = _new_nodes(started)
    if renamed:
        hosts = {renamed.get(node, node): host for node, host in kept.hosts.items()}
        names = tuple(renamed.get(node, node) for node in nodes)
        job_spec.keep(log_dir, replace(kept, nodes=names, hosts=hosts))


def _new_nodes(started: Sequence[Started]) -> dict[str, str]:
    """Return the new name of each node that was renamed."""
    pairs = ((node_of(one.name), node_of(one.new_name)) for one in started if one.name != one.new_name)
    return {old: new for old, new in pairs if old is not None and new is not None}


def _place_of(name: str) -> str:
    """Return the key under which restarts are counted, which a process shares with its replacements."""
    node = node_of(name)
    return SCHEDULER if node is None else root_of(node)


def _new_name(name: str) -> str:
    node = node_of(name)
    return name if node is None or not may_be_replaced(node) else name_of(successor_of(node))
