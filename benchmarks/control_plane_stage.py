"""The setup of the control plane benchmark: a crowd of clients and one server.

The module starts both, sends the crowd its commands, and reads the server's CPU time and memory. A server is judged by
its own CPU clock (clock_getcpuclockid(3)), which other work does not advance, and by the clients' timestamps on the
host's monotonic clock.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.moments import Moment
from benchmarks.processes import Job, Stage, free_port, wait_until_listening, worker_module

__all__ = ["BARE", "GRACE_S", "SCHEDULER", "Crowds", "Scene", "cpu_s", "descriptor_problem", "resident_kib"]

SCHEDULER, BARE = "scheduler", "bare"
WITHIN_S = 180.0
WITHIN_A_WORKER_S = 0.02
SPARE_DESCRIPTORS = 200
_ESTABLISHED = "01"  # in /proc/net/tcp
GRACE_S = 0.5  # the default of GRACE's reconnect


def cpu_s(pid: int) -> float:
    """Return the CPU seconds used by all threads of a process, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3), as glibc computes the id


def resident_kib(pid: int) -> int:
    """Return the process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise ProcessLookupError(f"process {pid} has no memory: it has ended")


def descriptor_problem(workers: int, clients: int) -> str | None:
    """Raise this process's limit, which its children inherit; if the hard limit is too low, return the problem.

    A simulated worker needs two descriptors in its client (its connection and ZeroMQ's own signal). A scheduler needs
    one per worker and leaves a quarter of its limit free.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    per_client = 2 * -(-workers // clients) + SPARE_DESCRIPTORS
    needed = max(per_client, workers * 4 // 3 + SPARE_DESCRIPTORS)
    if needed <= hard:
        return None
    more = "" if per_client <= hard else f", or --clients {-(-2 * workers // (hard - SPARE_DESCRIPTORS))} or more"
    return (
        f"{workers} workers need {needed} descriptors in one process, and the hard limit (`ulimit -Hn`) is {hard}: "
        f"raise it (`ulimit -n {needed}` as root, LimitNOFILE= in systemd, --ulimit nofile= in docker), "
        f"or measure fewer with --workers{more}"
    )


class Scene:
    """A server and its crowds for one measurement.

    Args:
        stage: where it runs.
        world_size: number of simulated workers, victims included.
        variables: the job's variables, besides the benchmark's own.
    """

    def __init__(self, stage: Stage, world_size: int, **variables: str) -> None:
        self.stage = stage
        self.world_size = world_size
        settings = {"NODE_TIMEOUT": "30", "GRACE": f"reconnect={GRACE_S}", **variables}
        self.job = Job(stage, "control_plane", world_size, **settings)
        self.port = int(self.job.variables["SCHED_PORT"])
        self._within_s = max(WITHIN_S, world_size * WITHIN_A_WORKER_S)

    def start_scheduler(self, fan_out: int = 0) -> float:
        """Start the scheduler; return when it was listening, on the host's monotonic clock.

        Args:
            fan_out: the most relays that it keeps at itself or below another; 0: as many as the product.
        """
        if fan_out:
            self.job.start_scheduler([*worker_module("control_plane"), "scheduler", str(fan_out)])
        else:
            self.job.start_scheduler()
        return time.monotonic()

    def start_bare(self, kind: str, world_size: int) -> float:
        """Start a bare ROUTER or PUB; with ``world_size`` 0 it never broadcasts. Return when it was listening."""
        command = [*worker_module("control_plane_bare"), kind, str(self.port), str(world_size)]
        self.bare = self.stage.start(BARE, command, self.job.variables, gated=True)
        wait_until_listening(self.port, self.stage)
        return time.monotonic()

    def start_relays(self, count: int, inner: int = 0) -> dict[str, int]:
        """Start this many relays; return the port of each by its name on the stage.

        Args:
            count: how many.
            inner: how many of them the others are placed below; 0: all connect to the scheduler.
        """
        ports = {f"relay_{number}": free_port() for number in range(count)}
        above = [f"relay:127.0.0.1:{port}," for port in [*ports.values()][:inner]]
        for number, (name, port) in enumerate(ports.items()):
            at = above[number % inner] if number >= inner > 0 else ""
            variables = {**self.job.variables, "SCHED_HOST": f"relay:127.0.0.1:{port},{at}127.0.0.1"}
            self.stage.start(name, [sys.executable, "-m", "samebits", "relay"], variables)
        for port in ports.values():
            wait_until_listening(port, self.stage)
        return ports

    def connections(self) -> int:
        """Return the number of connections to the server."""
        tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table]
        return sum(row[1].endswith(f":{self.port:04X}") and row[3] == _ESTABLISHED for row in rows)

    def wait_for_tree(self, most: int) -> None:
        """Wait until relays have connections to the server, and no more than ``most``."""
        deadline_s = time.monotonic() + self._within_s
        while not 0 < self.connections() <= most:
            self.stage.require_alive()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.connections()} relays are at the scheduler after {self._within_s:g} s")
            time.sleep(0.05)

    def tell_all(self) -> float:
        """Let the bare server open a round; return when it began to, on the host's monotonic clock."""
        assert self.bare.stdin is not None
        self.bare.stdin.write(b"now\n")
        self.bare.stdin.flush()
        (moment,) = self.wait_for("publishes", {self.bare.pid})
        return moment.at_s

    def start_crowds(
        self, kind: str, count: int, clients: int, *, blob_bytes: int = 0, relays: Sequence[int] = (), **more: float
    ) -> Crowds:
        """Start slots 0 to ``count`` - 1, dealt out to this many processes; return when all are ready.

        Slots are dealt out rather than split into blocks: a server that broadcasts in slot order would finish with one
        process before the next, and the first process's thousands of answers would delay the others.
        """
        return Crowds(self, kind, count, clients, {"blob_bytes": blob_bytes, "relays": list(relays), **more})

    def start_victims(self, count: int) -> subprocess.Popen[bytes]:
        """Start a process for each of the last ``count`` slots; return when all have been forked."""
        plan = {"kind": "victims", "first": self.world_size - count, "count": count}
        victims = self._start_clients("victims", plan, is_parent=True)
        self.wait_for("ready", {victims.pid})
        return victims

    def _start_clients(self, name: str, plan: dict[str, object], *, is_parent: bool = False) -> subprocess.Popen[bytes]:
        command = [*worker_module("control_plane"), json.dumps(plan)]
        variables = self.job.worker_variables(0)
        return self.stage.start(name, command, variables, gated=True, is_parent=is_parent)

    def wait_for(self, name: str, pids: set[int], *, since_s: float = 0.0) -> list[Moment]:
        """Wait for the event ``name`` of each of these processes, and return these events."""
        found: dict[int, Moment] = {}

        def all_there() -> bool:
            for moment in self.stage.channel.select(name, since_s=since_s, pids=frozenset(pids)):
                found.setdefault(moment.pid, moment)
            return len(found) == len(pids)

        self.stage.channel.wait_for(all_there, self._within_s, f"{name!r} in {len(pids)} processes")
        return [*found.values()]


class Crowds:
    """The client processes of a scene."""

    def __init__(self, scene: Scene, kind: str, count: int, clients: int, more: Mapping[str, object]) -> None:
        self._scene = scene
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for number in range(clients):
            its_count = len(range(number, count, clients))
            plan = {"kind": kind, "first": number, "count": its_count, "stride": clients, **more}
            self._processes[f"crowd_{number}"] = scene._start_clients(f"crowd_{number}", plan)
        scene.wait_for("ready", self.pids)

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._processes.values()}

    def tell(self, word: str) -> float:
        """Send a command; return the time on the host's monotonic clock."""
        now = time.monotonic()
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.write(word.encode() + b"\n")
            process.stdin.flush()
        return now

    def tell_one(self, word: str) -> float:
        """Send a command to the first process; return the time on the host's monotonic clock."""
        first = next(iter(self._processes.values()))
        assert first.stdin is not None
        now = time.monotonic()
        first.stdin.write(word.encode() + b"\n")
        first.stdin.flush()
        return now

    def ask(self, word: str, answer: str) -> int:
        """Send a command and return the sum of all answers."""
        since_s = self.tell(word)
        return sum(moment.step or 0 for moment in self.wait_for(answer, since_s))

    def wait_for(self, name: str, since_s: float = 0.0) -> list[Moment]:
        return self._scene.wait_for(name, self.pids, since_s=since_s)

    def last(self, name: str, since_s: float = 0.0) -> float:
        """Return when the last process reached that point."""
        return max(moment.at_s for moment in self.wait_for(name, since_s))

    def kill_one(self) -> float:
        """Kill -9 one process with all its workers; return the time on the host's monotonic clock."""
        name, _ = self._processes.popitem()
        now = time.monotonic()
        self._scene.stage.end(name)
        return now
