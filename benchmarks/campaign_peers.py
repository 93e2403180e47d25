"""The peers' jobs of ``benchmarks.campaign``: their launchers, one fault from outside, and the digests at the end.

Every peer trains the benchmarks' model to the same last step, on four ranks, with a checkpoint as its documentation
recommends. A fault is a signal to one worker, an order that the worker carries out (``samebits.commands.drill.inside``,
which needs nothing of SameBits in the job), or damage to the stored checkpoint followed by kill -9 of every worker.

A torchrun job that is restarted from its checkpoint ends with other bits even if nothing fails: DDP reduces the first
step after a start in its initial buckets and later ones in rebuilt buckets, which add the ranks' values in another
order. If the buckets are rebuilt before the checkpoint is loaded, the bits are those of the undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.campaign_kinds import Kind
from benchmarks.launchers import with_modules
from benchmarks.processes import REPOSITORY, Stage, free_port, worker_module, worker_name
from benchmarks.recovery_peers import TORCHFT, TORCHRUN, start_torchft, torchft_needs, torchrun_needs
from benchmarks.recovery_trials import WORLD_SIZE
from benchmarks.workers.paced import INTERVAL, LAST_STEP
from samebits.commands.drill.faults import RLIMIT_AS, flip_bit
from samebits.commands.drill.orders import DrillOrders, ImpossibleError
from samebits.store.process_identity import ProcessIdentity

__all__ = ["PEERS", "Ended", "needs", "run"]

STEPS, FAULT_AT, CHECKPOINT_EVERY = 400, 150, 20
BEGINS_WITHIN_S, QUIET_S, LOOK_S = 300.0, 60.0, 0.05
RESTARTS = 5
_CHECKPOINT = "checkpoint.safetensors"
_SHOWN = 200
PEERS = (TORCHRUN, TORCHFT, "NVRx", "lm-resiliency")
_BACKENDS = {TORCHRUN: "c10d", "NVRx": "c10d", "lm-resiliency": "lm_resiliency"}
_MODULES = {"NVRx": "nvidia_resiliency_ext.fault_tolerance.launcher"}
_ORDERS: Mapping[str, tuple[str, dict[str, object]]] = {
    "raise": ("raise", {"pending": False}),
    "pending": ("raise", {"pending": True}),
    "hold": ("hold", {"seconds": 3600}),
    "eat": ("eat", {"limit": RLIMIT_AS}),
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a peer's job ended: its ranks' digests, or a description if the job ended early or stood still."""

    digests: frozenset[str] = frozenset()
    ended: str = ""
    hung: str = ""
    seconds: float | None = None
    did: str = ""


def needs(peer: str, python: str) -> str:
    """Return what prevents a peer from taking part, or an empty string."""
    match peer:
        case "torchrun":
            return torchrun_needs()
        case "torchft":
            return torchft_needs(python)
        case "NVRx":
            return with_modules(python, _MODULES[peer])
        case _:
            return with_modules(python, "lm_resiliency.integrations.torchrun")


def run(peer: str, python: str, kind: Kind | None, rng: random.Random) -> Ended:
    """Run one job, with this kind of fault or undisturbed, until it ends or stands still.

    Raises:
        ImpossibleError: the fault could not be injected.
    """
    stage = Stage()
    try:
        job = _Job(stage, peer, python)
        try:
            job.start()
        except TimeoutError as error:
            return Ended(hung=str(error))
        if kind is None:
            return job.end()
        if not job.wait_for(FAULT_AT):
            return job.end()
        highest, at_s, did = job.highest(), time.monotonic(), ""
        for turn in range(kind.times):
            if turn and not job.wait_for(FAULT_AT + turn * (STEPS - FAULT_AT) // kind.times):
                break
            highest, at_s = job.highest(), time.monotonic()
            did = job.give(kind, rng)
        ended = job.end()
        return Ended(ended.digests, ended.ended, ended.hung, job.again_s(highest, at_s), did)
    finally:
        stage.close()


class _Job:
    def __init__(self, stage: Stage, peer: str, python: str) -> None:
        self._stage, self._peer = stage, peer
        self._python = sys.executable if peer == TORCHRUN else python
        self._orders = DrillOrders(stage.folder / "inside")
        self._restart: Callable[[int], int] | None = None
        self._restarts, self._stopped = 0, list[int]()

    def start(self) -> None:
        path = os.pathsep.join(map(str, (self._orders.folder, REPOSITORY, REPOSITORY / "runtime")))
        variables = {"PYTHONPATH": path, INTERVAL: str(CHECKPOINT_EVERY), LAST_STEP: str(STEPS)}
        if self._peer == TORCHFT:
            self._restart = start_torchft(self._stage, self._python, variables)
            for rank in range(WORLD_SIZE):
                self._restart(rank)
            return
        flags = [f"--nproc-per-node={WORLD_SIZE}", f"--max-restarts={RESTARTS}", "--rdzv-id=campaign"]
        flags += [f"--rdzv-backend={_BACKENDS[self._peer]}", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
        module = _MODULES.get(self._peer, "torch.distributed.run")
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [self._python, "-m", module, *flags, *worker_module(TORCHRUN)[1:]]
        self._stage.start(self._peer, command, variables, is_parent=True)

    def highest(self) -> int:
        """Return the greatest step of any rank."""
        self._stage.channel.drain()
        return max(self._stage.channel.reached.values(), default=0)

    def wait_for(self, step: int) -> bool:
        """Wait until a rank has reached this step; return False if the job is over or stands still."""
        return not self._wait(lambda: self.highest() >= step)

    def give(self, kind: Kind, rng: random.Random) -> str:
        """Inject the fault into one of the workers that train."""
        recent = {one.pid for one in self._stage.channel.moments[-8 * WORLD_SIZE :] if one.name == "stepped"}
        alive = sorted(pid for pid in recent if Path(f"/proc/{pid}").exists())
        if not alive:
            raise ImpossibleError("no worker trains")
        victim = rng.choice(alive)
        if kind.damages:
            did = self._damage(kind.damages, rng)
            for pid in alive:
                _kill(pid)
            return f"{did}, then SIGKILL to every worker"
        if kind.by_signal is not None:
            os.kill(victim, kind.by_signal)
            if kind.by_signal == signal.SIGSTOP:
                self._stopped.append(victim)
            return f"{kind.by_signal.name} to pid {victim}"
        identity = ProcessIdentity.of(victim)
        if identity is None:
            raise ImpossibleError(f"pid {victim} has ended")
        do, more = _ORDERS.get(kind.by_order, (kind.by_order, {}))
        self._stopped += [victim] if do in ("hold", "hang", "collective") else []
        did = self._orders.give(identity, do, draw=rng.random(), **more)
        if not did:
            raise ImpossibleError(f"pid {victim} has nothing that could be found to do this to")
        return f"pid {victim} {did}"

    def end(self) -> Ended:
        """Wait for the end of the job; a worker that would not end is killed."""
        problem = self._wait(lambda: len(self._finals()) == WORLD_SIZE)
        for pid in self._stopped:
            _kill(pid)
        if not problem:
            return Ended(frozenset(self._finals().values()))
        return Ended(ended=problem) if problem.startswith("ended") else Ended(hung=problem)

    def again_s(self, highest: int, since_s: float) -> float | None:
        """Return the seconds from the fault until all ranks have finished a step that none had finished before."""
        firsts: dict[str, float] = {}
        for one in self._stage.channel.select("stepped", since_s=since_s):
            if (one.step or 0) > highest:
                firsts.setdefault(one.who, one.at_s)
        return max(firsts.values()) - since_s if len(firsts) == WORLD_SIZE else None

    def _finals(self) -> dict[str, str]:
        return {one.who: one.text or "" for one in self._stage.channel.select("ended")}

    def _damage(self, how: str, rng: random.Random) -> str:
        path = self._stage.folder / _CHECKPOINT
        if not path.exists():
            raise ImpossibleError("there is no stored checkpoint")
        match how:
            case "flip":
                place, bit = flip_bit(path, rng.random())
                return f"bit {bit} of byte {place} of {path.name} changed"
            case "truncate":
                os.truncate(path, path.stat().st_size // 2)
                return f"second half of {path.name} cut off"
            case _:
                shutil.move(path, path.with_suffix(".removed"))
                return f"{path.name} removed"

    def _wait(self, done: Callable[[], bool]) -> str:
        """Wait until ``done()``; if the job is over or stands still before that, return a description, else ""."""
        seen, allowed_s, quiet_s = 0, BEGINS_WITHIN_S, time.monotonic() + BEGINS_WITHIN_S
        while True:
            self._stage.channel.drain()
            if done():
                return ""
            count = len(self._stage.channel.moments)
            if count != seen:
                allowed_s = QUIET_S if self.highest() else BEGINS_WITHIN_S
                seen, quiet_s = count, time.monotonic() + allowed_s
            if problem := self._over():
                return problem
            if time.monotonic() > quiet_s:
                return f"no step for {allowed_s:g} s"
            time.sleep(LOOK_S)

    def _over(self) -> str:
        """Return why the job is over; restart a lost worker if the peer leaves restarts to the user's launcher."""
        for name, status in self._stage.ended().items():
            if self._restart is None:
                self._stage.channel.drain()
                if len(self._finals()) == WORLD_SIZE:
                    return ""
                return f"ended with status {status}: {_last_error(self._stage)}"
            if any(one.who == name for one in self._stage.channel.select("ended")):
                continue
            self._restarts += 1
            if self._restarts > RESTARTS:
                return f"ended: {name} ended with status {status} for the {self._restarts}th time"
            self._stage.end(name)
            self._restart(int(name.removeprefix(worker_name(0)[:-1])))
        return ""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _last_error(stage: Stage) -> str:
    lines = [line.strip() for line in stage.logs().splitlines() if "Error" in line or "error:" in line]
    return lines[-1][:_SHOWN] if lines else "no error in its logs"
