"""One trial of each contestant in the control plane benchmark: ours, the bare sockets, the peers.

The trials define the measured intervals and when the server's CPU clock is read. SameBits and the bare ROUTER talk to
the same clients with the same bytes in the same phases, so each of our intervals has a floor of the same name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.control_plane_stage import BARE, GRACE_S, SCHEDULER, WITHIN_S, Crowds, Scene, cpu_s, resident_kib
from benchmarks.processes import Stage, free_port, wait_until_listening, worker_module
from samebits.core import records
from samebits.core.state import JobState
from samebits.etcd_place import EtcdAccess
from samebits.service.scheduling.loop import seldom_collected
from samebits.store import journal_format
from samebits.store.etcd.etcd_journal import JOURNALS, read_etcd_journal
from samebits.store.etcd.gateway import EtcdGateway
from samebits.store.journal import JOURNAL_FILE, Journal, read_journal
from tests.store.etcd.etcd_cluster import EtcdCluster, cluster_in

STANDBY = "standby"
SETTLE_S = 1.5  # until the last messages of a formation are read and all have started their heartbeats
STEADY_S = 4.0  # until the effects of a formation have ended; after a storm of CURVE handshakes that takes some seconds
PAUSE_S = 0.05  # between two victims
LOOK_S = 0.005
SUSPENDED_S = 3.0  # longer than an election
# does not match the line about the round, which contains "is lost" too
LOSS = re.compile(rb"scheduler: worker \S+ \([^)]*\) is lost:")
IN_MODIFY = 2  # linux/inotify.h
INOTIFY_BYTES = 1 << 16
SECRET = "a secret of the benchmark, long enough"


@dataclass(frozen=True, slots=True)
class Served:
    """Measurements of one server: it formed a crowd, served it for a while, was killed, and took it back."""

    form_s: float
    admit_cpu_s: float  # until the last one received its seat or its first answer
    form_cpu_s: float
    resident_kib: float
    beats: int
    beats_s: float
    beats_cpu_s: float
    told_s: float = 0.0  # of a bare server: from its first message of a new round until the last worker has it
    back_s: float = 0.0  # from the new server's listening until the last worker has its answer; 0: not killed


@dataclass(frozen=True, slots=True)
class Kept:
    """The state that could be recovered from a killed scheduler's journal."""

    load_s: float
    seats: int
    resumed: int  # with the same slot and incarnation


@dataclass(frozen=True, slots=True)
class MassLoss:
    """Half of all workers lost at once."""

    lost: int
    all_seen_s: float  # beyond GRACE's reconnect, which each of them is given
    rounds: int


@dataclass(frozen=True, slots=True)
class Losses:
    """Single losses: from each kill to the scheduler's decision, and from the first decision until all are notified.

    ``death_s`` is the kernel's part: from each kill but the first, whose invitations to a round delay it, until an
    otherwise idle thread sees that the process is gone (pidfd_open(2)).
    """

    decision_s: list[float]
    death_s: list[float]
    told_s: float


# ---- ours and the bare ROUTER


def ours(workers: int, clients: int, beats_s: float) -> tuple[Served, Kept, MassLoss]:
    """Run a scheduler with a crowd; the time to read its journal is measured afterwards."""
    with Stage() as copies:
        served, resumed, mass = _live(workers, clients, beats_s, copies.folder / "recovery")
        load_s, seats = _load(copies.folder / "recovery")
    return served, Kept(load_s, seats, resumed), mass


def _live(workers: int, clients: int, beats_s: float, copy: Path) -> tuple[Served, int, MassLoss]:
    """Measure serving, the workers that returned unchanged, and the loss of half; the killed scheduler's files are
    copied to ``copy``.
    """
    with Stage() as stage:
        scene = Scene(stage, workers)
        scene.start_scheduler()
        crowds = scene.start_crowds("crowd", workers, clients)
        formed = _form(scene, crowds, SCHEDULER)
        beaten = _beat(scene, crowds, SCHEDULER, beats_s)
        _require(crowds.ask("check", "checked") == workers, "a worker has another slot or rank than its name says")
        stage.end(SCHEDULER)
        crowds.tell("away")
        crowds.wait_for("away")
        shutil.copytree(stage.folder / "recovery", copy)
        listening_s = scene.start_scheduler()
        back_s = crowds.last("resumed") - listening_s
        resumed = crowds.ask("check", "checked")
        return Served(*formed, *beaten, back_s=back_s), resumed, _lose_half(scene, crowds, workers // clients)


def encrypted(workers: int, clients: int, beats_s: float) -> Served:
    """Run a scheduler with a secret and measure the storm of handshakes and the steady state, up to the kill."""
    with Stage() as stage:
        scene = Scene(stage, workers, CLUSTER_SECRET=SECRET)
        scene.start_scheduler()
        crowds = scene.start_crowds("crowd", workers, clients)
        return Served(*_form(scene, crowds, SCHEDULER), *_beat(scene, crowds, SCHEDULER, beats_s))


def bare(workers: int, clients: int, beats_s: float) -> Served:
    """Measure the same as :func:`ours` with a ROUTER that decides nothing."""
    with Stage() as stage:
        scene = Scene(stage, workers)
        scene.start_bare("router", workers)
        crowds = scene.start_crowds("crowd", workers, clients)
        formed = _form(scene, crowds, BARE)
        beaten = _beat(scene, crowds, BARE, beats_s)
        told_s = _tell_all(scene, crowds)
        time.sleep(SETTLE_S)
        stage.end(BARE)
        crowds.tell("away")
        crowds.wait_for("away")
        listening_s = scene.start_bare("router", 0)
        return Served(*formed, *beaten, told_s, crowds.last("resumed") - listening_s)


def bare_encrypted(workers: int, clients: int, beats_s: float) -> Served:
    """Measure the bare ROUTER with a secret: the cost of CURVE itself."""
    with Stage() as stage:
        scene = Scene(stage, workers, CLUSTER_SECRET=SECRET)
        scene.start_bare("router", workers)
        crowds = scene.start_crowds("crowd", workers, clients)
        return Served(*_form(scene, crowds, BARE), *_beat(scene, crowds, BARE, beats_s))


@dataclass(frozen=True, slots=True)
class Formed:
    """A formation: seconds, the server's CPU seconds until all are admitted and formed, and those of all relays.

    ``connections`` are those to the server at the end.
    """

    form_s: float
    admit_cpu_s: float
    form_cpu_s: float
    relays_cpu_s: float = 0.0
    connections: int = 0


def formed(
    workers: int,
    clients: int,
    relays: int = 0,
    *,
    inner: int = 0,
    fan_out: int = 0,
    is_bare: bool = False,
    **variables: str,
) -> Formed:
    """Form a job with our scheduler, or the same crowd with a bare ROUTER.

    Args:
        relays: number of relays among which the crowd is dealt out; 0: every worker connects to the scheduler.
        inner: number of relays below which the others are placed; 0: none.
        fan_out: how many relays the scheduler keeps at itself or below another; 0: as many as the product.
        is_bare: whether the server is a bare ROUTER.
        variables: the job's variables.
    """
    with Stage() as stage:
        scene = Scene(stage, workers, **variables)
        if is_bare:
            scene.start_bare("router", workers)
        else:
            scene.start_scheduler(fan_out)
        ports = scene.start_relays(relays, inner)
        if fan_out or inner:
            scene.wait_for_tree(fan_out or inner)
        crowds = scene.start_crowds("crowd", workers, clients, relays=tuple(ports.values()))
        pids = [pid for name, pid in scene.stage.pids().items() if name in ports]
        before_s = sum(map(cpu_s, pids))
        form_s, admit_cpu_s, form_cpu_s, _ = _form(scene, crowds, BARE if is_bare else SCHEDULER)
        return Formed(form_s, admit_cpu_s, form_cpu_s, sum(map(cpu_s, pids)) - before_s, scene.connections())


def echo(workers: int, clients: int) -> float:
    """Measure one message and its answer for each worker: the bare minimum of a ROUTER."""
    with Stage() as stage:
        scene = Scene(stage, workers)
        scene.start_bare("router", 0)
        crowds = scene.start_crowds("echo", workers, clients)
        return -crowds.tell("begin") + crowds.last("admitted")


def _form(scene: Scene, crowds: Crowds, server: str) -> tuple[float, float, float, float]:
    pid = scene.stage.pids()[server]
    cpu_before_s, kib_before = cpu_s(pid), resident_kib(pid)
    began_s = crowds.tell("begin")
    crowds.wait_for("admitted")
    admit_cpu_s = cpu_s(pid) - cpu_before_s
    formed_s = crowds.last("formed")
    return formed_s - began_s, admit_cpu_s, cpu_s(pid) - cpu_before_s, resident_kib(pid) - kib_before


def _beat(scene: Scene, crowds: Crowds, server: str, beats_s: float) -> tuple[int, float, float]:
    pid = scene.stage.pids()[server]
    time.sleep(STEADY_S)
    sent, cpu_before_s, began_s = crowds.ask("count", "counted"), cpu_s(pid), time.monotonic()
    time.sleep(beats_s)
    used_s, lasted_s = cpu_s(pid) - cpu_before_s, time.monotonic() - began_s
    return crowds.ask("count", "counted") - sent, lasted_s, used_s


def _load(recovery: Path) -> tuple[float, int]:
    """Load the journal as a new scheduler does; return the seconds and the number of seats in it."""
    with seldom_collected():  # as the scheduler
        began_s = time.perf_counter()
        journal, payloads = Journal.open(recovery)
        state = JobState.replay(records.SCHEMA.unpack(payload, journal_format.MAX_BODY_BYTES) for payload in payloads)
        took_s = time.perf_counter() - began_s
    journal.close()
    return took_s, len(state.by_slot)


def _lose_half(scene: Scene, crowds: Crowds, lost: int) -> MassLoss:
    with _Log(scene) as log:
        killed_s = crowds.kill_one()
        all_seen_s = log.wait_for_losses(lost) - killed_s - GRACE_S
    crowds.wait_for("opened", since_s=killed_s)
    numbers = {moment.step for moment in scene.stage.channel.select("round", since_s=killed_s)}
    return MassLoss(lost, all_seen_s, len(numbers))


# ---- a journal in etcd


@dataclass(frozen=True, slots=True)
class Registered:
    """A crowd that registered, and the seats in the journal afterwards."""

    form_s: float
    journal_bytes: int
    lost: int
    doubled: int
    at_kill: int = 0  # bytes of the journal when etcd's leader was killed
    at_stop: int = 0  # when the next leader was suspended


def registered(workers: int, clients: int, *, etcd_kill_at: int | None = None) -> Registered:
    """Form a job and count the seats in its journal.

    Args:
        etcd_kill_at: bytes of the journal at which the leader of the three etcd servers that hold it is killed, and
            soon after it the next one suspended; None: the journal is a file.
    """
    with Stage() as stage, contextlib.ExitStack() as stack:
        journal = stage.folder / "recovery" / JOURNAL_FILE
        if etcd_kill_at is None:
            scene, cluster = Scene(stage, workers), None
        else:
            cluster = stack.enter_context(cluster_in(stage.folder / "etcd"))
            scene = Scene(stage, workers, RECOVERY_PATH=str(cluster.place()))
        scene.start_scheduler()
        crowds = scene.start_crowds("crowd", workers, clients)
        with ThreadPoolExecutor(1) as aside:
            lost = None if cluster is None else aside.submit(_lose_leaders, cluster, journal, etcd_kill_at or 0)
            form_s = _form(scene, crowds, SCHEDULER)[0]
            at_kill, at_stop = (0, 0) if lost is None else lost.result()
        size = journal.stat().st_size
        stage.end(SCHEDULER)
        if cluster is None:
            found = read_journal(journal.parent)
            payloads = [] if found is None else found.payloads
        else:
            payloads = read_etcd_journal(EtcdGateway(cluster.place(), EtcdAccess()), JOURNALS[0]) or []
        nodes = [one.node for one in map(_unpacked, payloads) if isinstance(one, records.SeatGranted)]
        return Registered(form_s, size, workers - len(set(nodes)), len(nodes) - len(set(nodes)), at_kill, at_stop)


def _unpacked(payload: bytes) -> records.Record:
    return records.SCHEMA.unpack(payload, journal_format.MAX_BODY_BYTES)


def _lose_leaders(cluster: EtcdCluster, journal: Path, at_bytes: int) -> tuple[int, int]:
    """Kill the leader once the journal's copy has ``at_bytes`` bytes, start it again, and suspend the next leader.

    Returns:
        The journal's size at the kill and at the suspension.
    """
    deadline_s = time.monotonic() + WITHIN_S
    while not journal.exists() or journal.stat().st_size < at_bytes:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the journal has not reached {at_bytes} bytes within {WITHIN_S:g} s")
        time.sleep(LOOK_S)
    first, at_kill = cluster.leader(), journal.stat().st_size
    assert first is not None
    cluster.signal(first, signal.SIGKILL)
    cluster.wait_ready()
    cluster.start(first)
    second, at_stop = cluster.leader(), journal.stat().st_size
    assert second is not None
    cluster.signal(second, signal.SIGSTOP)
    time.sleep(SUSPENDED_S)
    cluster.signal(second, signal.SIGCONT)
    return at_kill, at_stop


def takeover(workers: int, clients: int, lost_by: signal.Signals, lease_s: int) -> float:
    """Lose a scheduler whose journal is in etcd, and measure the seconds until the standby has continued its journal.

    Args:
        lost_by: SIGKILL closes the scheduler's connections, SIGSTOP keeps them.
        lease_s: NODE_TIMEOUT, after which a suspended scheduler is superseded.
    """
    with Stage() as stage, cluster_in(stage.folder / "etcd") as cluster:
        scene = Scene(stage, workers, RECOVERY_PATH=str(cluster.place()), NODE_TIMEOUT=str(lease_s))
        hosts = {"ROLE": "scheduler", "SCHED_HOST": f"127.0.0.1:{scene.port},127.0.0.1:{free_port()}"}
        stage.start(SCHEDULER, [sys.executable, "-m", "samebits", "scheduler"], scene.job.variables | hosts)
        wait_until_listening(scene.port, stage)
        crowds = scene.start_crowds("crowd", workers, clients)
        crowds.tell("begin")
        crowds.wait_for("formed")
        elsewhere = stage.folder / STANDBY
        elsewhere.mkdir()
        command = ["env", "--chdir", str(elsewhere), sys.executable, "-m", "samebits", "scheduler"]
        stage.start(STANDBY, command, scene.job.variables | hosts)
        _when_logged(stage, STANDBY, b"this scheduler stands by")
        time.sleep(SETTLE_S)
        stage.signal(SCHEDULER, lost_by)
        lost_s = time.monotonic()
        return _when_logged(stage, STANDBY, b"resumes, term 2") - lost_s


def _when_logged(stage: Stage, name: str, text: bytes) -> float:
    deadline_s = time.monotonic() + WITHIN_S
    while text not in (stage.folder / f"{name}.log").read_bytes():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{text!r} was not in {name}'s log within {WITHIN_S:g} s")
        time.sleep(LOOK_S)
    return time.monotonic()


# ---- single losses


def losses(workers: int, clients: int, victims: int) -> Losses:
    """Kill processes one by one; the scheduler broadcasts the first loss, and decides on each."""
    with Stage() as stage:
        scene = Scene(stage, workers)
        scene.start_scheduler()
        crowds = scene.start_crowds("crowd", workers - victims, clients)
        forker = scene.start_victims(victims)
        assert forker.stdin is not None
        crowds.tell("begin")
        forker.stdin.close()
        crowds.wait_for("formed")
        pids = sorted(_of_victims(scene, crowds, victims))
        time.sleep(SETTLE_S)
        decisions, deaths, told_s = [], [], 0.0
        with ThreadPoolExecutor(1) as aside, _Log(scene) as log:
            for number, pid in enumerate(pids):
                dead = aside.submit(_when_gone, os.pidfd_open(pid))
                killed_s = time.monotonic()
                os.kill(pid, 9)
                decided_s = log.wait_for_losses(number + 1)
                decisions.append(decided_s - killed_s)
                deaths.append(dead.result() - killed_s)
                if number == 0:
                    told_s = crowds.last("opened", since_s=killed_s) - decided_s
                    time.sleep(SETTLE_S)
                time.sleep(PAUSE_S)
        return Losses(decisions, deaths[1:], told_s)


def _when_gone(descriptor: int) -> float:
    select.select([descriptor], [], [])
    now = time.monotonic()
    os.close(descriptor)
    return now


def _of_victims(scene: Scene, crowds: Crowds, victims: int) -> set[int]:
    def found() -> set[int]:
        return {moment.pid for moment in scene.stage.channel.select("formed")} - crowds.pids

    scene.stage.channel.wait_for(lambda: len(found()) == victims, WITHIN_S, f"'formed' in {victims} victims")
    return found()


class _Log:
    """The scheduler's log from now on. A loss is logged once it is durable, just before all are notified.

    The kernel wakes the reader when a line is written (inotify(7)); polling would be late and take CPU time.
    """

    def __init__(self, scene: Scene) -> None:
        path = scene.stage.folder / f"{SCHEDULER}.log"
        libc = ctypes.CDLL(None, use_errno=True)
        self._written = os.fdopen(libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0)
        if libc.inotify_add_watch(self._written.fileno(), os.fsencode(path), IN_MODIFY) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", os.fspath(path))
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._unfinished = b""
        self._losses = 0

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._written.close()
        self._file.close()

    def wait_for_losses(self, count: int) -> float:
        """Wait until this many losses have been logged, and return the time."""
        deadline_s = time.monotonic() + WITHIN_S
        while True:
            woken_s = time.monotonic()
            *lines, self._unfinished = (self._unfinished + self._file.read()).split(b"\n")
            self._losses += sum(LOSS.search(line) is not None for line in lines)
            if self._losses >= count:
                return woken_s
            if woken_s > deadline_s:
                raise TimeoutError(f"{self._losses} losses were logged within {WITHIN_S:g} s, not {count}")
            select.select([self._written], [], [], 1.0)
            self._written.read(INOTIFY_BYTES)


def publish(workers: int, clients: int) -> float:
    """Measure how long a bare PUB's single message takes to reach the last subscriber."""
    with Stage() as stage:
        scene = Scene(stage, workers)
        scene.start_bare("pub", workers)
        crowds = scene.start_crowds("subscribers", workers, clients)
        crowds.tell("begin")
        scene.wait_for("subscribed", {scene.bare.pid})
        return _tell_all(scene, crowds)


def _tell_all(scene: Scene, crowds: Crowds) -> float:
    began_s = scene.tell_all()
    return crowds.last("opened", since_s=began_s) - began_s


# ---- peers


def peer(name: str, workers: int, clients: int) -> float:
    """Run ``tcpstore`` or ``grpc``; return seconds until the last client knows that all are in."""
    with Stage() as stage:
        port = free_port()

        def start(what: str, first: int, count: int) -> subprocess.Popen[bytes]:
            arguments = [what, *map(str, (port, workers, first, count))]
            return stage.start(f"{what}_{first}", [*worker_module("control_plane_peers"), *arguments], {}, gated=True)

        start(f"serve_{name}", 0, workers)
        crowd = []
        for number in range(clients):
            first, end = workers * number // clients, workers * (number + 1) // clients
            crowd.append(start(f"join_{name}", first, end - first))

        def wait_for(moment: str, processes: int) -> float:
            found = stage.channel.select
            stage.channel.wait_for(lambda: len(found(moment)) == processes, WITHIN_S, f"{moment!r} of {name}")
            return max(each.at_s for each in found(moment))

        wait_until_listening(port, stage)
        wait_for("ready", clients)
        for client in crowd:
            assert client.stdin is not None
            client.stdin.write(b"begin\n")
            client.stdin.flush()
        formed_s = wait_for("formed", clients)
        return formed_s - min(moment.at_s for moment in stage.channel.select("begins"))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
