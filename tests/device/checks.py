"""The checks on a device: one function per promise, which returns its figures and whether it holds.

A check that needs something this device lacks reports "not on this device", which counts as neither passed nor failed.
"""

from __future__ import annotations

import enum
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.core.causes.table import DEFAULT, Observation
from samebits.errors import AbortHungError, StuckError
from tests.device import jobs
from tests.device.here import Here

FOLDER = Path(__file__).resolve().parent
DESCRIPTORS_GROWN, THREADS_GROWN = 2, 2
KIB_GROWN_PER_CYCLE = 64
CARD_KIB_GROWN = 64 * 1024
"""The card's memory also has other users; a communicator that leaks takes several MiB in each cycle."""
TWO_RANKS_IN_A_PROCESS = ("trial", "cuda")
"""Devices on which a second rank can exist without answering: it only gives its address and touches no device."""
GIVES_UP = (AbortHungError.exit_code, StuckError.exit_code)
SPARE_HOLDS = "a warm spare's memory of the device"
MOST_BLOCKED = 1.15
"""÷ the device-to-host copy."""
LEFT_WITHIN_S = 5.0
WITHIN_S = 600.0


class Verdict(enum.Enum):
    """The result of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_HERE = "not on this device"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True)
class Found:
    """One check's result.

    Attributes:
        text: for people; the reason if it failed.
        figures: by name, with the unit at its end.
        backend: of the groups that it used, as its processes have printed it; empty if none was used or it failed.
    """

    check: str
    verdict: Verdict
    text: str
    figures: dict[str, float] = field(default_factory=dict)
    backend: str = ""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is done."""

    cycles: int
    megabytes: int
    rounds: int


QUICK, WHOLE, CARD = Extent(20, 16, 3), Extent(100, 512, 9), Extent(20, 256, 3)


def grown(told: Mapping[str, Any], cycles: int) -> list[str]:
    """Return what a process of ``groups.py`` held more of after its cycles than chance explains."""
    most = {
        "descriptors": DESCRIPTORS_GROWN,
        "threads": THREADS_GROWN,
        "anonymous_kib": KIB_GROWN_PER_CYCLE * cycles,
        "device_bytes": 0,
        "card_kib": CARD_KIB_GROWN,
        "names": 0,
    }
    by = {name: told["after"][name] - told["before"][name] for name in most}
    return [f"{value} {name}" for name, value in by.items() if value > most[name]]


def groups(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """The device's own collectives: a group of one, formed and broken repeatedly."""
    name = f"a group is formed and broken {extent.cycles} times"
    told = _told(here, folder, FOLDER / "groups.py", str(extent.cycles), COLLECTIVE_BACKEND="")
    if isinstance(told, str):
        yield Found(name, Verdict.FAILED, told)
    else:
        leaks, before, after = grown(told, extent.cycles), told["before"], told["after"]
        held = ", ".join(f"{name} {before[name]} → {after[name]}" for name in before)
        text = f"{told['each_s'] * 1000:.1f} ms each; {held}; grown by {', '.join(leaks) or 'nothing'}"
        figures = {"cycle_s": float(told["each_s"])}
        figures |= {f"{name}_{when}": float(told[when][name]) for when in ("before", "after") for name in before}
        yield Found(name, Verdict.FAILED if leaks else Verdict.PASSED, text, figures, told["backend"])
    yield left(here, folder)


def left(here: Here, folder: Path) -> Found:
    """Return whether a rank leaves a peer that is gone before it has connected."""
    name = "a group is broken while it connects to a peer that is gone"
    if here.kind not in TWO_RANKS_IN_A_PROCESS:
        return Found(name, Verdict.NOT_HERE, f"not tried on {here.kind}")
    ran = _ran(here, folder, FOLDER / "groups.py", "connecting", COLLECTIVE_BACKEND="")
    if isinstance(ran, str):
        return Found(name, Verdict.FAILED, ran)
    if ran.returncode in GIVES_UP:
        return Found(name, Verdict.PASSED, f"the process gave up its seat with status {ran.returncode}, as documented")
    told = _parsed(ran)
    if isinstance(told, str):
        return Found(name, Verdict.FAILED, told)
    left_s = float(told["left_s"])
    verdict = Verdict.PASSED if left_s <= LEFT_WITHIN_S else Verdict.FAILED
    return Found(name, verdict, f"left {left_s * 1000:.1f} ms after the break", {"left_s": left_s}, told["backend"])


def peer(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """The device's own collectives: one that waits for a killed peer is aborted, and the next group adds up."""
    name = "a collective that waits for a killed peer is aborted"
    if here.pair is None:
        yield Found(name, Verdict.NOT_HERE, f"{here.kind} takes one rank a device, and there is one device")
        return
    told = _killed_peer(here.pair, folder)
    if isinstance(told, str):
        yield Found(name, Verdict.FAILED, told)
        return
    figures = {one: float(told[one]) for one in ("left_s", "again_s")}
    text = f"left {told['left_s'] * 1000:.1f} ms after the break; the next group added up after {told['again_s']:.2f} s"
    verdict = Verdict.PASSED if told["left_s"] <= LEFT_WITHIN_S else Verdict.FAILED
    yield Found(name, verdict, text, figures, told["backend"])


def _killed_peer(told: Mapping[str, str], folder: Path) -> dict[str, Any] | str:
    """Kill rank 1 of ``peer.py`` once rank 0 waits for it; return what rank 0 has printed, or what went wrong."""
    (meeting := folder / "meeting").mkdir(parents=True)
    environment = {name: value for name, value in (os.environ | told).items() if name != "COLLECTIVE_BACKEND"}
    logs = [folder / f"rank_{rank}.log" for rank in range(2)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(FOLDER / "peer.py"), str(rank), str(meeting)]
            with log.open("w") as file:
                ranks.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=file, stderr=file))
        until_s = time.monotonic() + WITHIN_S
        while not (meeting / "waiting").exists() and time.monotonic() < until_s:
            if any(one.poll() is not None for one in ranks):
                break
            time.sleep(0.01)
        ranks[1].kill()
        (meeting / "killed").touch()
        status = ranks[0].wait(WITHIN_S)
    except subprocess.TimeoutExpired:
        return f"rank 0 has not ended within {WITHIN_S:g} s\n{logs[0].read_text(errors='replace')[-2000:]}"
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    said = logs[0].read_text(errors="replace")
    if status:
        return f"rank 0 has ended with status {status}: " + "\n".join(said.splitlines()[-15:])
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def kills(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """Several ranks on the device, disturbed: the bits of the undisturbed run."""
    try:
        wanted = jobs.run(here, folder / "undisturbed", jobs.undisturbed)
    except AssertionError as error:
        yield Found("a job of several ranks on one device", Verdict.FAILED, str(error))
        return
    for disturb, spares in jobs.DISTURBED:
        yield _compared(here, folder, f"{disturb.__name__}, same bits", wanted.sha256, disturb, spares)


def rides(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """Each variant of a step; a spare takes over with the same bits."""
    for ride in (amp, compiled, graphs):
        yield from ride(here, folder / ride.__name__, extent)


def amp(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """Mixed precision."""
    yield _rides(here, folder, "DDP with AMP (autocast and GradScaler)", ["--amp"])


def compiled(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """A compiled module."""
    compiler = "inductor" if "inductor" in here.has else "aot_eager"
    if compiler != "inductor":
        yield Found("torch.compile (inductor) rides", Verdict.NOT_HERE, f"inductor writes no code for {here.kind}")
    yield _rides(here, folder, f"torch.compile ({compiler})", ["--compile", compiler])


def graphs(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """A module's passes as CUDA graphs."""
    name = "CUDA graphs of a module's forward and backward"
    if "graphs" in here.has:
        yield _rides(here, folder, name, ["--graphs"])
    else:
        yield Found(f"{name} ride", Verdict.NOT_HERE, f"{here.kind} has none")


def kill(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """One rank killed, a spare in its place: the bits of an undisturbed run, and the spare's memory."""
    name = "DDP: kill -9 with a spare, same bits"
    try:
        undisturbed, ran = jobs.run_beside(here, folder)
    except AssertionError as error:
        yield Found(name, Verdict.FAILED, str(error))
        return
    yield _as_undisturbed(name, ran, undisturbed.sha256)
    yield _held(ran)


def overhead(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """Measure the cost of a commit after every step, without collectives."""
    name = "steps/s with a commit after each, against plain steps"
    told = _told(here, folder, FOLDER / "overhead.py", str(extent.rounds), COLLECTIVE_BACKEND="")
    if isinstance(told, str):
        yield Found(name, Verdict.FAILED, told)
        return
    share, commit_s = told["plain"] / told["commit"], told["commit"] - told["plain"]
    text = f"{share:.3f} × plain; a step takes {told['plain'] * 1000:.2f} ms, a commit {commit_s * 1000:.2f} ms more"
    figures = {"plain_s": told["plain"], "with_commit_s": told["commit"], "commit_s": commit_s, "share": share}
    yield Found(name, Verdict.PASSED, text, figures)


def digests(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """What comparing all ranks' state, and recomputing a gradient, cost a job of two ranks."""
    name = "step time with digests and with the audit"
    took: dict[str, float] = {}
    for way, settings in (("plain", {"CONSISTENCY": "majority:0"}), ("digests", {}), ("audit", {"AUDIT": "50"})):
        try:
            took[f"{way}_s"], backend = jobs.step_s(here, folder / way, settings)
        except AssertionError as error:
            yield Found(name, Verdict.FAILED, f"{way}: {error}", took)
            return
    text = ", ".join(f"{way.removesuffix('_s')} {1000 * one:.2f} ms" for way, one in took.items())
    yield Found(name, Verdict.PASSED, text, took, backend)


def spare_memory(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """A warm spare holds no more of the device than a worker with a built state."""
    try:
        yield _held(jobs.run(here, folder / "spare", jobs.kill_with_a_spare, spares=1))
    except AssertionError as error:
        yield Found(SPARE_HOLDS, Verdict.FAILED, str(error))


def _held(ran: jobs.Ran) -> Found:
    worker, spare = ran.held_bytes.get(0), ran.held_bytes.get(jobs.SPARE)
    if worker is None or spare is None:
        return Found(SPARE_HOLDS, Verdict.FAILED, f"only nodes {sorted(ran.held_bytes)} have printed what they hold")
    verdict = Verdict.PASSED if spare <= worker else Verdict.FAILED
    figures = {"spare_bytes": float(spare), "worker_bytes": float(worker)}
    return Found(SPARE_HOLDS, verdict, f"{spare} bytes, a worker's {worker}", figures, ran.backend)


def saving(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """The cost of saving and restoring a state on the device, against copying it."""
    name = f"{extent.megabytes} MiB are saved and restored, same bits"
    ran = _told(here, folder, FOLDER / "saving.py", str(extent.megabytes), str(extent.rounds), COLLECTIVE_BACKEND="")
    if isinstance(ran, str):
        yield Found(name, Verdict.FAILED, ran)
        return
    told, backend = ran["seconds"], ran["backend"]
    gigabytes, stall_s = (extent.megabytes << 20) / 1e9, told["saving"] - told["plain"]
    rates = {f"{way}_gb_s": gigabytes / told[way] for way in ("durable", "restore", "fetch", "put")}
    text = (
        f"a step stalls {stall_s * 1000:.1f} ms; saved to disk at {rates['durable_gb_s']:.2f} GB/s, restored at "
        f"{rates['restore_gb_s']:.2f} GB/s; copies: {rates['fetch_gb_s']:.2f} GB/s to the host, "
        f"{rates['put_gb_s']:.2f} GB/s to the device"
    )
    figures = {f"{way}_s": seconds for way, seconds in told.items()} | rates | {"stall_s": stall_s}
    yield Found(name, Verdict.PASSED, text, figures, backend)
    name = f"saving {extent.megabytes} MiB blocks at most {MOST_BLOCKED} × the copy from the device"
    blocked, restored = stall_s / told["fetch"], told["restore"] / told["put"]
    text = f"blocked {blocked:.2f} × the copy to the host, restored {restored:.2f} × the copy to the device"
    figures = {"blocked": blocked, "restored": restored}
    if "pinning" not in here.has:
        yield Found(name, Verdict.NOT_HERE, f"{here.kind} has no engine that copies by itself; here {text}", figures)
    else:
        yield Found(name, Verdict.PASSED if blocked <= MOST_BLOCKED else Verdict.FAILED, text, figures, backend)


def full(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """A full device is named, and so is the process that failed."""
    name = "a full device is named"
    job = jobs.DeviceJob(here, folder / "full", "--fill", str(jobs.GATE // 2))
    try:
        job.open_gates(0, jobs.GATE)
        job.start()
        said = job.wait_for("scheduler", r"worker 1 \(.*is lost: (.*out of memory.*)")[1]
        backend = job.backend()
    except AssertionError as error:
        yield Found(name, Verdict.FAILED, str(error))
        return
    finally:
        job.end()
    fault = DEFAULT.of(Observation(1, None, said, is_failure=True)).fault
    holds = fault == "an accelerator's memory is full" and re.search(r"(GPU|NPU|[Dd]evice) 0", said) is not None
    yield Found(name, Verdict.PASSED if holds else Verdict.FAILED, f"{said!r}: {fault}", backend=backend)


SHARING = ("kill", "kills", "rides", "amp", "compiled", "graphs", "digests", "spare_memory", "full")
"""Those that need several ranks on one device."""
Check = Callable[[Here, Path, Extent], Iterator[Found]]
CHECKS: dict[str, Check] = {one.__name__: one for one in (groups, kills, rides, spare_memory, saving, full)}
CARD_CHECKS: dict[str, Check] = {
    one.__name__: one for one in (groups, peer, kill, saving, overhead, full, amp, graphs, compiled, digests)
}
"""In the order of what the first minutes with a card are to show."""


def _compared(
    here: Here, folder: Path, name: str, wanted: str, disturb: Callable[[jobs.DeviceJob], None], spares: int
) -> Found:
    try:
        ran = jobs.run(here, folder / disturb.__name__, disturb, spares=spares)
    except AssertionError as error:
        return Found(name, Verdict.FAILED, str(error))
    return _as_undisturbed(name, ran, wanted)


def _rides(here: Here, folder: Path, name: str, args: Sequence[str]) -> Found:
    try:
        undisturbed, ran = jobs.run_beside(here, folder, args)
    except AssertionError as error:
        return Found(f"{name} rides", Verdict.FAILED, str(error))
    return _as_undisturbed(f"{name} rides", ran, undisturbed.sha256)


def _as_undisturbed(name: str, ran: jobs.Ran, wanted: str) -> Found:
    if ran.sha256 != wanted:
        return Found(name, Verdict.FAILED, f"sha256 {ran.sha256}, undisturbed {wanted}", backend=ran.backend)
    return Found(name, Verdict.PASSED, f"sha256 {wanted[:16]}… as undisturbed", backend=ran.backend)


def _told(here: Here, folder: Path, script: Path, *args: str, **more: str) -> dict[str, Any] | str:
    """Run a script and parse its last line; return what went wrong if there is no such line."""
    ran = _ran(here, folder, script, *args, **more)
    return ran if isinstance(ran, str) else _parsed(ran)


def _ran(here: Here, folder: Path, script: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str] | str:
    """Run a script in a folder of its own; return what went wrong if it does not end."""
    place = folder / f"{script.stem}-{args[0]}"
    place.mkdir(parents=True)
    environment = {name: value for name, value in (os.environ | here.environment | more).items() if value}
    try:
        return subprocess.run(
            [sys.executable, str(script), *args],
            env=environment,
            cwd=place,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        return f"{script.name} did not end within {WITHIN_S:g} s: " + "\n".join(said.splitlines()[-15:])


def _parsed(ran: subprocess.CompletedProcess[str]) -> dict[str, Any] | str:
    if ran.returncode:
        return f"status {ran.returncode}: " + "\n".join((ran.stdout + ran.stderr).splitlines()[-15:])
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told
