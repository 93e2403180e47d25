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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.core.causes.table import DEFAULT, Observation
from tests.device import jobs
from tests.device.here import Here

FOLDER = Path(__file__).resolve().parent
DESCRIPTORS_GROWN, THREADS_GROWN = 2, 2
KIB_GROWN_PER_CYCLE = 64
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
    """

    check: str
    verdict: Verdict
    text: str
    figures: dict[str, float] = field(default_factory=dict)


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
        "names": 0,
    }
    return [f"{value} {name}" for name, value in told["grown"].items() if value > most[name]]


def groups(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """The device's own collectives: a group of one, formed and broken repeatedly."""
    name = f"a group is formed and broken {extent.cycles} times"
    told = _told(here, folder, FOLDER / "groups.py", str(extent.cycles), COLLECTIVE_BACKEND="")
    if isinstance(told, str):
        yield Found(name, Verdict.FAILED, told)
        return
    leaks = grown(told, extent.cycles)
    text = f"{told['each_s'] * 1000:.1f} ms each; grown by {', '.join(leaks) or 'nothing'}"
    figures = {"cycle_s": told["each_s"]} | {name: float(value) for name, value in told["grown"].items()}
    yield Found(name, Verdict.FAILED if leaks else Verdict.PASSED, text, figures)
    name, left_s = "a group is broken while it connects to a peer that is gone", told["left_s"]
    if left_s is None:
        yield Found(name, Verdict.NOT_HERE, f"not tried on {here.kind}")
        return
    verdict = Verdict.PASSED if left_s <= LEFT_WITHIN_S else Verdict.FAILED
    yield Found(name, verdict, f"left {left_s * 1000:.1f} ms after the break", {"left_s": left_s})


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
    """Variants of a step; a spare takes over with the same bits."""
    compiler = "inductor" if "inductor" in here.has else "aot_eager"
    ways = [("AMP (autocast and GradScaler)", ["--amp"]), (f"torch.compile ({compiler})", ["--compile", compiler])]
    if "graphs" in here.has:
        ways.append(("CUDA graphs of a module's forward and backward", ["--graphs"]))
    else:
        yield Found("CUDA graphs ride", Verdict.NOT_HERE, f"{here.kind} has none")
    if "inductor" not in here.has:
        yield Found("torch.compile (inductor) rides", Verdict.NOT_HERE, f"inductor writes no code for {here.kind}")
    for name, args in ways:
        place = folder / re.sub(r"\W+", "-", name)
        try:
            wanted = jobs.run(here, place / "undisturbed", jobs.undisturbed, args).sha256
        except AssertionError as error:
            yield Found(f"{name} rides", Verdict.FAILED, str(error))
            continue
        yield _compared(here, place, f"{name} rides", wanted, jobs.kill_with_a_spare, 1, args)


def kill(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """One rank killed, a spare in its place: the bits of the undisturbed run."""
    try:
        wanted = jobs.run(here, folder / "undisturbed", jobs.undisturbed)
    except AssertionError as error:
        yield Found("a job of several ranks on one device", Verdict.FAILED, str(error))
        return
    yield _compared(here, folder, "kill -9 with a spare, same bits", wanted.sha256, jobs.kill_with_a_spare, 1)


def overhead(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """What a commit after every step costs."""
    name = "steps/s with a commit after each, against plain steps"
    told = _told(here, folder, FOLDER / "overhead.py", str(extent.rounds))
    if isinstance(told, str):
        yield Found(name, Verdict.FAILED, told)
        return
    share = told["plain"] / told["commit"]
    figures = {"plain_s": told["plain"], "commit_s": told["commit"], "share": share}
    yield Found(name, Verdict.PASSED, f"{share:.3f} × plain", figures)


def digests(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """What comparing all ranks' state, and recomputing a gradient, cost a job of two ranks."""
    name = "step time with digests and with the audit"
    took: dict[str, float] = {}
    for way, settings in (("plain", {"CONSISTENCY": "majority:0"}), ("digests", {}), ("audit", {"AUDIT": "50"})):
        try:
            took[f"{way}_s"] = jobs.step_s(here, folder / way, settings)
        except AssertionError as error:
            yield Found(name, Verdict.FAILED, f"{way}: {error}", took)
            return
    text = ", ".join(f"{way.removesuffix('_s')} {1000 * one:.2f} ms" for way, one in took.items())
    yield Found(name, Verdict.PASSED, text, took)


def spare_memory(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """A warm spare holds no more of the device than a worker with a built state."""
    name = "a warm spare's memory of the device"
    try:
        held = jobs.run(here, folder / "spare", jobs.kill_with_a_spare, spares=1).held_bytes
    except AssertionError as error:
        yield Found(name, Verdict.FAILED, str(error))
        return
    worker, spare = held[0], held[jobs.SPARE]
    verdict = Verdict.PASSED if spare <= worker else Verdict.FAILED
    yield Found(name, verdict, f"{spare} bytes, a worker's {worker}", {"spare_bytes": spare, "worker_bytes": worker})


def saving(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """The cost of saving and restoring a state on the device, against copying it."""
    name = f"saving {extent.megabytes} MiB blocks at most {MOST_BLOCKED} × the copy from the device"
    told = _told(here, folder, FOLDER / "saving.py", str(extent.megabytes), str(extent.rounds))
    if isinstance(told, str):
        yield Found(name, Verdict.FAILED, told)
        return
    blocked = (told["saving"] - told["plain"]) / told["fetch"]
    restored = told["restore"] / told["put"]
    figures = {f"{way}_s": seconds for way, seconds in told.items()} | {"blocked": blocked, "restored": restored}
    text = f"blocked {blocked:.2f} × the copy to the host, restored {restored:.2f} × the copy to the device"
    if "pinning" not in here.has:
        yield Found(name, Verdict.NOT_HERE, f"{here.kind} has no engine that copies by itself; here {text}", figures)
    else:
        yield Found(name, Verdict.PASSED if blocked <= MOST_BLOCKED else Verdict.FAILED, text, figures)


def full(here: Here, folder: Path, extent: Extent) -> Iterator[Found]:
    """A full device is named, and so is the process that failed."""
    name = "a full device is named"
    job = jobs.DeviceJob(here, folder / "full", "--fill", str(jobs.GATE // 2))
    try:
        job.open_gates(0, jobs.GATE)
        job.start()
        said = job.wait_for("scheduler", r"worker 1 \(.*is lost: (.*out of memory.*)")[1]
    except AssertionError as error:
        yield Found(name, Verdict.FAILED, str(error))
        return
    finally:
        job.end()
    fault = DEFAULT.of(Observation(1, None, said, is_failure=True)).fault
    holds = fault == "an accelerator's memory is full" and re.search(r"(GPU|NPU|[Dd]evice) 0", said) is not None
    yield Found(name, Verdict.PASSED if holds else Verdict.FAILED, f"{said!r}: {fault}")


SHARING = ("kill", "kills", "rides", "digests", "spare_memory", "full")
"""Those that need several ranks on one device."""
Check = Callable[[Here, Path, Extent], Iterator[Found]]
CHECKS: dict[str, Check] = {one.__name__: one for one in (groups, kills, rides, spare_memory, saving, full)}
CARD_CHECKS: dict[str, Check] = {
    one.__name__: one for one in (groups, kill, saving, overhead, full, rides, digests, spare_memory)
}
"""In the order of what the first minutes with a card are to show."""


def _compared(
    here: Here,
    folder: Path,
    name: str,
    wanted: str,
    disturb: Callable[[jobs.DeviceJob], None],
    spares: int,
    args: Sequence[str] = (),
) -> Found:
    try:
        ran = jobs.run(here, folder / disturb.__name__, disturb, args, spares)
    except AssertionError as error:
        return Found(name, Verdict.FAILED, str(error))
    if ran.sha256 != wanted:
        return Found(name, Verdict.FAILED, f"sha256 {ran.sha256}, undisturbed {wanted}")
    return Found(name, Verdict.PASSED, f"sha256 {wanted[:16]}… as undisturbed")


def _told(here: Here, folder: Path, script: Path, *args: str, **more: str) -> dict[str, Any] | str:
    """Parse the script's last line; otherwise return the end of its output."""
    place = folder / script.stem
    place.mkdir(parents=True)
    environment = {name: value for name, value in (os.environ | here.environment | more).items() if value}
    try:
        ran = subprocess.run(
            [sys.executable, str(script), *args],
            env=environment,
            cwd=place,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{script.name} did not end within {WITHIN_S:g} s"
    if ran.returncode:
        return f"status {ran.returncode}: " + "\n".join((ran.stdout + ran.stderr).splitlines()[-15:])
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told
