"""Inject a fault: by a signal, an order to the process itself, a cut connection, or a preloaded library.

A fault's record names the process, byte or limit, so that the report lists what happened and not what was planned.
Signals are sent only to processes in the job's own pid files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from samebits.account.events import EventKind, JobEvent
from samebits.commands.drill.orders import DrillOrders, ImpossibleError, Preloaded
from samebits.commands.drill.partition import INSIDE, PortForward
from samebits.commands.drill.plan import DrillFault, Planned, host_of
from samebits.launcher.processes import SCHEDULER, send_signal
from samebits.printable import counted
from samebits.store import checkpoint
from samebits.store.checkpoint import EntryState
from samebits.store.checkpoint.memory_room import room_path
from samebits.store.process_identity import ProcessIdentity

PAUSE_S = 1.0
SLOW_S, RUNS_S, RESTS_S = 5.0, 0.05, 0.15
AHEAD_S, JUMP_S = 3600, 3.0
FULL_S = 30.0
HOLD_LONGER_S = 4  # beyond the lease
GONE_S = 20.0
_LOOK_S = 0.05
RLIMIT_AS = "RLIMIT_AS"
LEFT_BYTES = 64 << 20
_NOT_SAVED = "was not saved"
_DATA = "data.safetensors"


@dataclass(slots=True)
class Tools:
    """What the faults of a plan need besides signals. ``impossible`` names faults that this machine does not allow."""

    orders: DrillOrders | None = None
    line: PortForward | None = None
    preloaded: Preloaded | None = None
    environment: dict[str, str] = field(default_factory=dict)
    impossible: dict[DrillFault, str] = field(default_factory=dict)

    @classmethod
    def made(cls, folder: Path, faults: set[DrillFault], port: int, environment: Mapping[str, str]) -> Tools:
        """Create the tools for these faults in a job's folder, with the variables that the job's environment needs."""
        tools = cls()
        if faults:
            tools.orders = DrillOrders(folder / "inside")
            tools.environment["PYTHONPATH"] = _before(str(tools.orders.folder), environment.get("PYTHONPATH"))
        if DrillFault.PARTITION in faults:
            tools.line = PortForward(port)
            tools.environment["SCHED_BIND"] = INSIDE
        if faults & BY_LIBRARY:
            try:
                tools.preloaded = Preloaded(folder, folder / "ckpt_of_rank")
                tools.environment.update(tools.preloaded.environment)
                library = tools.environment["LD_PRELOAD"]
                tools.environment["LD_PRELOAD"] = _before(library, environment.get("LD_PRELOAD"))
            except ImpossibleError as error:
                tools.impossible.update({fault: str(error) for fault in faults & BY_LIBRARY})
        return tools

    def close(self) -> None:
        """Close the tools when the job is over."""
        if self.line is not None:
            self.line.close()
        if self.preloaded is not None:
            self.preloaded.close()


def _before(first: str, others: str | None) -> str:
    return f"{first}:{others}" if others else first


BY_LIBRARY = {DrillFault.DISK_FULL, DrillFault.DISK_ERROR, DrillFault.CLOCK_JUMP}


@dataclass(frozen=True, slots=True)
class FaultContext:
    """The job at the moment when a fault is due.

    ``members`` are the names of the training workers in slot order, and ``slots`` has each one's slot. All of them wait
    at a commit until ``let_go`` is called after the fault was injected. ``events`` are the job's events so far.
    ``wait`` returns True once they satisfy a condition, and False if they never will. ``leave`` ends the followers,
    which would otherwise restart lost processes at once.
    """

    folder: Path
    job: str
    lease_s: float
    running: Mapping[str, ProcessIdentity]
    members: Sequence[str]
    slots: Mapping[str, int]
    planned: Planned
    tools: Tools
    events: Callable[[], list[JobEvent]]
    wait: Callable[[Callable[[list[JobEvent]], bool]], bool]
    leave: Callable[[], None]
    let_go: Callable[[], None]

    @property
    def target(self) -> str:
        """The worker that the fault strikes."""
        return self.planned.pick(self.members)

    @property
    def identity(self) -> ProcessIdentity:
        """The target's process."""
        return self.running[self.target]


@dataclass(frozen=True, slots=True)
class Given:
    """An injected fault. ``damaged`` are the checkpoints that it made unusable."""

    node: str
    did: str
    damaged: tuple[Path, ...] = ()


def give(scene: FaultContext) -> Given:
    """Inject the fault that is due.

    Raises:
        ImpossibleError: the fault could not be injected, and nothing was done.
    """
    fault = scene.planned.fault
    if fault in scene.tools.impossible:
        raise ImpossibleError(scene.tools.impossible[fault])
    return _GIVERS[fault](scene)


# ---- signals


def _signal(scene: FaultContext, names: Sequence[str], number: signal.Signals) -> str:
    hit = [name for name in names if name in scene.running and send_signal(scene.running[name], number)]
    if not hit:
        raise ImpossibleError(f"{', '.join(names)} had ended before the signal")
    scene.let_go()
    return f"{number.name} to {', '.join(f'{name} (pid {scene.running[name].pid})' for name in hit)}"


def _sent(number: signal.Signals) -> Callable[[FaultContext], Given]:
    return lambda scene: Given(scene.target, _signal(scene, [scene.target], number))


def _scheduler(scene: FaultContext) -> Given:
    return Given(SCHEDULER, _signal(scene, [SCHEDULER], signal.SIGKILL))


def _all(scene: FaultContext) -> Given:
    return Given("", _signal(scene, [name for name in scene.running if name != SCHEDULER], signal.SIGKILL))


def _everything(scene: FaultContext) -> Given:
    return Given(SCHEDULER, _signal(scene, list(scene.running), signal.SIGKILL))


def _pause(scene: FaultContext) -> Given:
    return _stopped(scene, lambda: time.sleep(PAUSE_S), f"for {PAUSE_S:g} s")


def _stop(scene: FaultContext) -> Given:
    return _stopped(scene, _until_loss(scene), "until it was lost")


def _stopped(scene: FaultContext, meanwhile: Callable[[], object], text: str) -> Given:
    did = _signal(scene, [scene.target], signal.SIGSTOP)
    try:
        meanwhile()
    finally:
        send_signal(scene.identity, signal.SIGCONT)
    return Given(scene.target, f"{did} {text}, then SIGCONT")


def _slow_rank(scene: FaultContext) -> Given:
    _signal(scene, [scene.target], signal.SIGSTOP)
    until, stops = time.monotonic() + SLOW_S, 1
    try:
        while time.monotonic() < until:
            time.sleep(RESTS_S)
            send_signal(scene.identity, signal.SIGCONT)
            time.sleep(RUNS_S)
            stops += send_signal(scene.identity, signal.SIGSTOP)
    finally:
        send_signal(scene.identity, signal.SIGCONT)
    return Given(scene.target, f"pid {scene.identity.pid} was stopped {stops} times within {SLOW_S:g} s")


def _host(scene: FaultContext) -> Given:
    lost = host_of(scene.members, scene.planned.draw)
    has_gone_on = _grown(scene, EventKind.TRAINING)
    scene.leave()
    did = _signal(scene, lost, signal.SIGKILL)
    return Given(lost[0], f"{did}; {_forget_memory(scene, lost, has_gone_on)}")


def _until_loss(scene: FaultContext) -> Callable[[], bool]:
    is_lost = _grown(scene, EventKind.LOST)
    return lambda: scene.wait(is_lost)


def _grown(scene: FaultContext, kind: EventKind) -> Callable[[list[JobEvent]], bool]:
    """Return a function that checks whether there are more events of this kind than now."""

    def count(events: list[JobEvent]) -> int:
        return sum(event.kind is kind for event in events)

    before = count(scene.events())
    return lambda events: count(events) > before


def _forget_memory(scene: FaultContext, names: Sequence[str], is_too_late: Callable[[list[JobEvent]], bool]) -> str:
    """Remove these workers' memory, because /dev/shm is empty after a machine has lost power.

    The memory can be freed once the processes are gone. After the recovery, a replacement holds the lost worker's
    memory with its own points, so it may be too late.
    """
    deadline = time.monotonic() + GONE_S
    rooms = {slot: room_path(checkpoint.SHARED_MEMORY, scene.job, slot) for slot in map(scene.slots.__getitem__, names)}
    left = {slot for slot, path in rooms.items() if path.exists()}
    count = len(left)
    while left and time.monotonic() < deadline and not is_too_late(scene.events()):
        left = {slot for slot in left if not checkpoint.remove_room(checkpoint.SHARED_MEMORY, scene.job, slot)}
        time.sleep(_LOOK_S)
    return f"points of {count - len(left)} ranks in /dev/shm removed" + (f" ({len(left)} were held)" if left else "")


# ---- orders to the process itself


def _held_gil(scene: FaultContext) -> Given:
    lost = _until_loss(scene)
    did = _orders(scene).give(scene.identity, "hold", seconds=round(scene.lease_s + HOLD_LONGER_S))
    scene.let_go()
    lost()
    return Given(scene.target, f"pid {scene.identity.pid} {did}")


def _oom(scene: FaultContext) -> Given:
    orders, limit = _orders(scene), MemoryLimit(scene.identity.pid)
    try:
        did = orders.give(scene.identity, "eat", limit=limit.name)
        scene.let_go()
        scene.identity.wait_for_exit(GONE_S)
    finally:
        limit.close()
    return Given(scene.target, f"pid {scene.identity.pid} {did}")


def _hang(scene: FaultContext) -> Given:
    lost = _until_loss(scene)
    given = _ordered("hang")(scene)
    scene.let_go()
    lost()
    return given


def _ordered(do: str, **more: object) -> Callable[[FaultContext], Given]:
    def give(scene: FaultContext) -> Given:
        did = _orders(scene).give(scene.identity, do, draw=scene.planned.draw, **more)
        if not did:
            raise ImpossibleError(f"{scene.target} has nothing that could be found to do this to")
        return Given(scene.target, f"pid {scene.identity.pid}: {did}")

    return give


def _orders(scene: FaultContext) -> DrillOrders:
    assert scene.tools.orders is not None, "a plan with such a fault has them"
    return scene.tools.orders


# ---- the connection, and the library


def _partition(scene: FaultContext) -> Given:
    line = scene.tools.line
    assert line is not None, "a plan with such a fault has one"
    lost = _until_loss(scene)
    try:
        count = line.cut(scene.identity.pid)
        if not count:
            raise ImpossibleError(f"no connection of {scene.target} to the scheduler was found")
        scene.let_go()
        lost()
    finally:
        line.mend()
    connections = counted(count, "connection")
    return Given(
        scene.target,
        f"cut {connections} between pid {scene.identity.pid} and the scheduler until the worker counted as lost",
    )


def _disk_refuses(error: int) -> Callable[[FaultContext], Given]:
    return lambda scene: _refuse_saves(scene, error)


def _refuse_saves(scene: FaultContext, error: int) -> Given:
    library = scene.tools.preloaded
    assert library is not None, "else it is impossible"
    refused, said = library.refused, _said(scene.folder, _NOT_SAVED)
    library.set(error=error)
    scene.let_go()
    try:
        until = time.monotonic() + FULL_S
        while time.monotonic() < until and _said(scene.folder, _NOT_SAVED) == said:
            time.sleep(_LOOK_S)
    finally:
        library.set()
    count = library.refused - refused
    if not count:
        raise ImpossibleError(f"no checkpoint was written within {FULL_S:g} s. Fix: save more often")
    return Given("", f"{errno.errorcode[error]} for {count} writes into {scene.folder.name}/ckpt_of_rank")


def _said(folder: Path, text: str) -> int:
    logs = (folder / "device").glob("worker_*.log")
    return sum(log.read_text(errors="replace").count(text) for log in logs)


def _clock_jump(scene: FaultContext) -> Given:
    library = scene.tools.preloaded
    assert library is not None, "else it is impossible"
    ahead_s = AHEAD_S if scene.planned.draw < 0.5 else -AHEAD_S
    library.set(ahead_s=ahead_s)
    try:
        read = float(_orders(scene).give(scene.identity, "clock"))
        seen_s = read - time.time()
        if abs(seen_s - ahead_s) > 60:
            raise ImpossibleError(f"{scene.target} reads the true time: the library has no effect there")
        scene.let_go()
        time.sleep(JUMP_S)
    finally:
        library.set()
    return Given(
        "",
        f"set CLOCK_REALTIME {ahead_s:+d} s off in every process for {JUMP_S:g} s; {scene.target} read {seen_s:+.0f} s",
    )


# ---- a stored checkpoint


def _damaged(damage: Callable[[Path, float], str]) -> Callable[[FaultContext], Given]:
    return lambda scene: _damage_newest(scene, damage)


def _damage_newest(scene: FaultContext, damage: Callable[[Path, float], str]) -> Given:
    """Damage a rank's newest point after ending every process.

    Otherwise, a newer point could be saved and read instead.

    Args:
        damage: called with the point's folder and a number in [0, 1); returns a description of what it did.
    """
    slot, root = scene.slots[scene.target], scene.folder / "ckpt_of_rank"
    scene.leave()
    did = _signal(scene, list(scene.running), signal.SIGKILL)
    for identity in scene.running.values():
        identity.wait_for_exit(GONE_S)
    memory = _forget_memory(scene, scene.members, lambda _: False)
    entries = [one for one in checkpoint.survey(root) if one.slot == slot and one.state is EntryState.WHOLE]
    if not entries:
        return Given(SCHEDULER, f"{did}; {memory}; rank {slot} had saved nothing that could be damaged")
    path = entries[0].path
    text = f"{damage(path, scene.planned.draw)} {path.relative_to(scene.folder)}; {memory}"
    return Given(SCHEDULER, f"{did}; {text}", (path,))


def _flip_in(point: Path, draw: float) -> str:
    place, bit = flip_bit(point / _DATA, draw)
    return f"bit {bit} of byte {place} changed in"


def _truncate(point: Path, _: float) -> str:
    path = point / _DATA
    size, mode = path.stat().st_size, path.stat().st_mode
    path.chmod(0o600)
    os.truncate(path, size // 2)
    path.chmod(mode & 0o777)
    return f"{size - size // 2} bytes cut off in"


def _remove(point: Path, _: float) -> str:
    shutil.rmtree(point)
    return "removed"


def flip_bit(path: Path, draw: float) -> tuple[int, int]:
    """Flip one bit of the file, and return the byte's offset and the bit's number."""
    size, mode = path.stat().st_size, path.stat().st_mode
    place, bit = int(draw * size), int(draw * 8191) % 8
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(place)
        (found,) = file.read(1)
        file.seek(place)
        file.write(bytes([found ^ 1 << bit]))
    with contextlib.suppress(OSError):
        path.chmod(mode & 0o777)
    return place, bit


_GIVERS: dict[DrillFault, Callable[[FaultContext], Given]] = {
    DrillFault.KILL: _sent(signal.SIGKILL),
    DrillFault.SEGFAULT: _sent(signal.SIGSEGV),
    DrillFault.ABORT: _sent(signal.SIGABRT),
    DrillFault.TERMINATE: _sent(signal.SIGTERM),
    DrillFault.INTERRUPT: _sent(signal.SIGINT),
    DrillFault.EXCEPTION: _ordered("raise", pending=False),
    DrillFault.ASYNC_EXCEPTION: _ordered("raise", pending=True),
    DrillFault.HANG: _hang,
    DrillFault.STOP: _stop,
    DrillFault.PAUSE: _pause,
    DrillFault.SLOW_RANK: _slow_rank,
    DrillFault.HELD_GIL: _held_gil,
    DrillFault.OOM: _oom,
    DrillFault.HOST: _host,
    DrillFault.SCHEDULER: _scheduler,
    DrillFault.ALL: _all,
    DrillFault.EVERYTHING: _everything,
    DrillFault.PARTITION: _partition,
    DrillFault.DISK_FULL: _disk_refuses(errno.ENOSPC),
    DrillFault.DISK_ERROR: _disk_refuses(errno.EIO),
    DrillFault.CLOCK_JUMP: _clock_jump,
    DrillFault.BITFLIP: _damaged(_flip_in),
    DrillFault.TRUNCATED: _damaged(_truncate),
    DrillFault.MISSING: _damaged(_remove),
    DrillFault.BITFLIP_MEMORY: _ordered("flip"),
    DrillFault.BITFLIP_GRADIENT: _ordered("gradient"),
    DrillFault.STALE_MEMORY: _ordered("stale"),
    DrillFault.DRIFT: _ordered("drift"),
    DrillFault.UNREDUCED: _ordered("unreduced"),
    DrillFault.DESYNC: _ordered("collective"),
}


class MemoryLimit:
    """A memory limit for one process: its own control group if this user may create one, otherwise RLIMIT_AS.

    Control groups of version 2 (the kernel's ``admin-guide/cgroup-v2``) are folders. Their files show whether a group
    can be created and whether it counts memory.

    Args:
        pid: the process.
        proc: the ``/proc`` folder; a different one in tests.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        above = group_above(pid, proc)
        self._group = self._made(above, pid) if above is not None else None
        self.name = RLIMIT_AS if self._group is None else f"memory.max of {self._group}"

    def _made(self, above: Path, pid: int) -> Path | None:
        group = above / f"samebits-drill-{pid}"
        try:
            group.mkdir()
            (group / "memory.max").write_text(str(LEFT_BYTES))
            with contextlib.suppress(OSError):  # a kernel without swap has no such file
                (group / "memory.swap.max").write_text("0")
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            return None
        return group

    def close(self) -> None:
        """Remove the group, unless it still contains a process."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.rmdir()


def group_above(pid: int, proc: Path = Path("/proc")) -> Path | None:
    """Return the control group below which a group for this process can be created, or None."""
    try:
        rows = [line.split() for line in (proc / "self/mounts").read_text().splitlines()]
        own = next(line for line in (proc / f"{pid}/cgroup").read_text().splitlines() if line.startswith("0::/"))
        root = next(Path(row[1]) for row in rows if row[2] == "cgroup2")
        group = root / own.removeprefix("0::/").strip()
        above = group if group == root else group.parent
        counted = (above / "cgroup.subtree_control").read_text().split()
    except (OSError, StopIteration, IndexError):
        return None
    may = os.access(above, os.W_OK) and os.access(above / "cgroup.procs", os.W_OK)
    return above if "memory" in counted and may else None
