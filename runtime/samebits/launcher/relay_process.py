"""Start, restart and end the relay of this host for its launcher (``service.relay``).

A relay is not part of the job: it has no seat, does not count as a restart, and cannot end the job. It has a pid file
and a log in LOG_DIR, and ends with the job. If no launcher is left, it exits after ``LINGER_S`` seconds without a
worker.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Sequence
from pathlib import Path

from samebits import config
from samebits.config import Settings
from samebits.core.causes.restarts import Backoff
from samebits.errors import SameBitsError
from samebits.launcher import job_spec
from samebits.launcher.processes import SCHEDULER, end, reap
from samebits.launcher.spawning import Program, execute, launch, reserved
from samebits.net.address import close_all, listen, loopback, port_of
from samebits.printable import counted
from samebits.scheduler_hosts import SchedulerAddress, split_relay
from samebits.store.process_identity import ProcessIdentity, read_pid_file

RELAY = "relay"
MOST_DIRECT_RANKS = 256
"""A job of several hosts with more ranks uses relays unless SCHED_HOST begins with ``relay:off``."""
LINGER_S = 30.0
STEADY_S = 60.0
TERM_GRACE_S = 2.0
_LISTENS, _STANDS = "0A", "01"  # states of a socket in /proc/net/tcp


def wants_relay(settings: Settings, *, has_other_hosts: bool, discovers_hosts: bool) -> bool:
    """Return whether this host's launcher should start a relay; discovered hosts have no launcher of their own."""
    if discovers_hosts or settings.relay is not None:
        return False
    if settings.starts_relay is not None:
        return settings.starts_relay
    return has_other_hosts and settings.max_worker_num > MOST_DIRECT_RANKS


def listen_for_relay() -> tuple[SchedulerAddress, socket.socket]:
    """Listen on a free port of this host, so that workers that start early can already connect.

    Raises:
        ListenError: no port can be listened on.
    """
    (one,) = listen([loopback()], 0)
    return SchedulerAddress(loopback(), port_of([one])), one


def relay_of(log_dir: Path) -> ProcessIdentity | None:
    """Return this folder's relay, or None if none runs."""
    identity = read_pid_file(log_dir / f"{RELAY}.pid")
    return identity if identity is not None and identity.is_alive() else None


def start_relay(log_dir: Path, program: Program, listening: Sequence[int]) -> ProcessIdentity:
    """Start this folder's relay, and return its process.

    The relay inherits the descriptors ``listening``.

    Raises:
        StoreError: its log or pid file cannot be written.
    """
    started: list[ProcessIdentity] = []
    with reserved(log_dir, [RELAY]) as berths:
        launch(berths, program, started, functools.partial(_spawn, listening))
    return started[0]


def restart_relay(log_dir: Path, program: Program) -> ProcessIdentity:
    """Return this folder's relay process; if it is gone, start a new one at the same address.

    Raises:
        ListenError: another process has the relay's port.
        StoreError: its log or pid file cannot be written.
    """
    present = relay_of(log_dir)
    if present is not None:
        return present
    address = split_relay(program.environment["SCHED_HOST"]).relay
    assert address is not None, "the job's start has chosen it"
    sockets = listen([address.host], address.port)
    try:
        return start_relay(log_dir, program, [one.fileno() for one in sockets])
    finally:
        close_all(sockets)


def _spawn(listening: Sequence[int], program: Program, _name: str, log: int) -> int:
    words = [program.interpreter, "-P", "-m", "samebits", "relay", "--linger", f"{LINGER_S:g}"]
    environment = {name: text for name, text in program.environment_of(SCHEDULER).items() if name != "ROLE"}
    return execute(words, environment, program.folder, log, listening)


def end_relay(log_dir: Path) -> None:
    """End this folder's relay, if there is one. Its workers then connect to the scheduler directly."""
    identity = relay_of(log_dir)
    if identity is not None:
        end(identity, TERM_GRACE_S)
        reap(identity)
    (log_dir / f"{RELAY}.pid").unlink(missing_ok=True)


def served_by(identity: ProcessIdentity) -> int:
    """Return how many workers and other relays are connected to the relay; 0 if it is gone."""
    own = set()
    rows: list[tuple[str, str, str]] = []  # local port, state, inode
    process = Path(f"/proc/{identity.pid}")
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                own.add(str(descriptor.readlink()))
        for table in ("tcp", "tcp6"):
            for line in (process / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                rows.append((fields[1].rpartition(":")[2], fields[3], fields[9]))
    mine = [(port, state) for port, state, inode in rows if f"socket:[{inode}]" in own]
    ports = {port for port, state in mine if state == _LISTENS}
    return sum(state == _STANDS and port in ports for port, state in mine)


def relay_line(log_dir: Path) -> str:
    """Return a sentence about this folder's relay, or "" if none is running."""
    identity = relay_of(log_dir)
    if identity is None:
        return ""
    return f"this host's relay ({identity}) serves {counted(served_by(identity), 'connection')}"


class KeptRelay:
    """Restarts a job's relay whenever it is gone.

    Args:
        log_dir: the job's LOG_DIR.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._backoff = Backoff()
        self._retry_at = self._started_at = 0.0

    def look(self, now: float) -> str:
        """Restart the relay if it is gone and an attempt is due. Return a sentence about that, or ""."""
        found = read_pid_file(self._log_dir / f"{RELAY}.pid")
        death = None if found is None else reap(found)
        if found is not None and death is None:
            if now - self._started_at >= STEADY_S:
                self._backoff.succeeded()
            return ""
        kept = job_spec.read(self._log_dir)
        if now < self._retry_at or kept is None:
            return ""
        is_first, self._retry_at = not self._backoff.has_failed, self._backoff.failed(now)
        self._started_at = now
        what = "the relay" + ("" if found is None else f" ({found}) {death or 'is gone'}")
        try:
            present = config.whole_environment()
            program = job_spec.program_of(kept, present, job_spec.secrets_for(kept, present))
            started = restart_relay(self._log_dir, program)
        except SameBitsError as error:
            return f"{what}, and cannot be restarted for now: {error}" if is_first else ""
        return f"{what}; it was restarted ({started}), and no step is lost" if is_first else ""
