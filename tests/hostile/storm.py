"""A real job of a few workers while every kind of stranger comes at once: it notices nothing.

``python -m tests.hostile.storm --seconds 60`` runs it without and with a secret, each beside an undisturbed run, says
how it stands every few seconds, and prints one JSON object as its last line. Here live the storm's phases and what must
hold; who comes is in ``besiegers``. The one idea: nothing of the job may tell that it was there. Its processes are the
same, its last weights those of the undisturbed run, nobody else was signalled, and its steps are about as fast. Then,
still in the storm, a worker is killed and started again, and takes its seat.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runtime import config
from runtime.net.address import _inode_of
from runtime.store.process_identity import ProcessIdentity
from tests.hostile.besiegers import Target
from tests.system.job import Job
from tests.system.probe import gate_of
from tests.system.processes import REPOSITORY, Starter, WarmStarter, environment_of_tests

SECRET = "correct-horse-battery-staple"
PAUSE_MS = 30
STEPS_A_SECOND = 25  # about what that pause allows
CALM_S = 5.0
WANTED_SPEED = 0.95
MOST_GROWTH_MIB = 128.0
"""Of the scheduler: far above what a thousand connections hold, and far below what grows without bound."""
TELL_S = 5.0
MODES: Mapping[str, Mapping[str, str]] = {"open": {}, "secret": {"CLUSTER_SECRET": SECRET}}


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured and found."""

    mode: str
    seconds: float
    workers: int
    speed: float  # steps/s during ÷ before
    scheduler_mib: int  # the most it held
    scheduler_mib_before: int
    worker_mib: int
    came: Mapping[str, int]
    ports: int  # that the other processes listen on

    def shown(self) -> dict[str, object]:
        """For the last line."""
        return {name: getattr(self, name) for name in self.__match_args__}


def run(
    mode: str,
    seconds: float,
    workers: int,
    folder: Path,
    starter: Starter,
    say: Callable[[str], object] = str,
    *,
    calm_s: float = CALM_S,
) -> Result:
    """One job through a storm.

    Args:
        mode: of ``MODES``.
        seconds: how long the storm lasts.
        folder: empty.
        say: told how it stands.
        calm_s: how long it is watched before.

    Raises:
        AssertionError: the job noticed.
    """
    steps = int(STEPS_A_SECOND * (seconds + 2 * calm_s))
    args = ("--steps", str(steps), "--interval", "50", "--pause-ms")
    settings = {"LOG_DIR": "device", **MODES[mode]}
    (folder / "calm").mkdir()
    (folder / "storm").mkdir()
    calm = Job(folder / "calm", starter, args=(*args, "0"), workers=workers, settings=settings)
    say(f"{mode}: an undisturbed run of {steps} steps, to compare with")
    try:
        calm.start()
        expected = calm.wait_finished(600.0)
    finally:
        calm.end()
    job = Job(
        folder / "storm", starter, args=(*args, str(PAUSE_MS), "--gates", str(steps - 5)), workers=workers,
        settings=settings,
    )  # fmt: skip
    try:
        with witness() as bystander:
            result = _besiege(job, mode, seconds, steps, bystander, say, calm_s)
        found = job.wait_finished(600.0)
        assert found == expected, f"the storm changed the weights: {found}, undisturbed {expected}"
    finally:
        left = job.end()
    assert not left, f"left behind: {left}"
    return result


def _besiege(
    job: Job,
    mode: str,
    seconds: float,
    steps: int,
    bystander: ProcessIdentity,
    say: Callable[[str], object],
    calm_s: float,
) -> Result:
    gate_of(job.folder, 0).touch()
    job.start()
    job.wait_for_step(20)
    before_s = (time.monotonic(), time.monotonic() + calm_s)
    time.sleep(calm_s)
    processes = [job.scheduler.identity, *(job.worker(rank).identity for rank in job.ranks)]
    watched = [resident_mib(identity.pid) for identity in processes]
    others = sorted({port for rank in job.ranks for port in ports_of(job.worker(rank).pid)} - {job.port})
    target = _target_of(job, others, [*processes, bystander])
    most = list(watched)
    with besieged(target) as came:
        begin_s = time.monotonic()
        told_s = begin_s
        while time.monotonic() < begin_s + seconds:
            time.sleep(0.1)
            gone = [identity.pid for identity in processes if not identity.is_alive()]
            assert not gone, f"processes {gone} ended in the storm\n{job.tails()}"
            most = [max(pair) for pair in zip(most, map(resident_mib, (one.pid for one in processes)), strict=True)]
            if time.monotonic() >= told_s + TELL_S:
                told_s = time.monotonic()
                where = f"step {job.steps(0)[-1].number}/{steps}, {rate(job, told_s - TELL_S, told_s):.1f} steps/s"
                say(f"{mode}: {told_s - begin_s:.0f}/{seconds:g} s, {where}, the scheduler has {most[0]:.0f} MiB")
        end_s = time.monotonic()
        assert not job.matches("scheduler", "generation 2"), f"the job noticed\n{job.tails()}"
        lose_one(job, say)
    assert processes[0].is_alive()
    assert_unsignalled(bystander)
    assert most[0] - watched[0] <= MOST_GROWTH_MIB, f"the scheduler grew from {watched[0]:.0f} to {most[0]:.0f} MiB"
    gate_of(job.folder, steps - 5).touch()
    speed = rate(job, begin_s, end_s) / max(rate(job, *before_s), 0.1)
    return Result(
        mode,
        seconds,
        job.workers,
        speed=round(speed, 3),
        scheduler_mib=round(most[0]),
        scheduler_mib_before=round(watched[0]),
        worker_mib=round(max(most[1:])),
        came=came,
        ports=len(others),
    )


def lose_one(job: Job, say: Callable[[str], object]) -> None:
    """A worker is killed and comes back, while strangers have every place that they can get."""
    rank, before = job.workers - 1, job.count(job.workers - 1)
    begin_s = time.monotonic()
    job.kill(rank)
    job.start_worker(rank)
    job.wait_for(rank, r"seated: slot \d+ of", since=before)
    job.wait_for("scheduler", r"generation 2 starts")
    say(f"worker {rank} was killed and has its seat again after {time.monotonic() - begin_s:.1f} s")


def _target_of(job: Job, others: list[int], processes: list[ProcessIdentity]) -> Target:
    settings, _ = config.read(job.environment(ROLE="worker", NODE_ID="0"))
    begun = job.wait_for("scheduler", r"job ([0-9a-f-]{36}) begins")
    pids = [(identity.pid, identity.started_at) for identity in processes]
    return Target(job.port, others, begun[1], config.fixed_settings(settings), pids)


@contextmanager
def besieged(target: Target) -> Iterator[dict[str, int]]:
    """The besiegers at work; how often they came is known afterwards."""
    came: dict[str, int] = {}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.besiegers", target.text()],
        cwd=REPOSITORY, env=environment_of_tests(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield came
        process.stdin.close()
        came.update(json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def witness() -> Iterator[ProcessIdentity]:
    """A process that is nobody's business, whose pid the besiegers give for theirs; it blocks every signal it can."""
    process = subprocess.Popen(
        ["sleep", "100000"], preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    )
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    try:
        yield identity
    finally:
        process.kill()
        process.wait()


def assert_unsignalled(bystander: ProcessIdentity) -> None:
    """It lives, and no signal waits for it (proc(5), ShdPnd and SigPnd)."""
    assert bystander.is_alive(), "a process that is not the job's was killed"
    status = Path(f"/proc/{bystander.pid}/status").read_text()
    pending = [line for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    assert len(pending) == 2
    assert all(int(line.split()[1], 16) == 0 for line in pending), f"it was signalled: {pending}"


def rate(job: Job, begin_s: float, end_s: float) -> float:
    """Steps a second of rank 0 between two moments, as far as it was training."""
    at = [step.at_s for step in job.steps(0) if begin_s <= step.at_s <= end_s]
    return (len(at) - 1) / (at[-1] - at[0]) if len(at) > 1 else 0.0


def resident_mib(pid: int) -> float:
    """What a process holds in memory (proc(5), statm); 0 where it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * resource.getpagesize() / (1 << 20)


def ports_of(pid: int) -> list[int]:
    """The TCP ports that a process listens on; each is bound to loopback alone, or the test's job is too open."""
    inodes = {_inode_of(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    for table, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for fields in (line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                assert address == loopback, f"port {int(port, 16)} of pid {pid} is bound to {address}"
                found.append(int(port, 16))
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.storm", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each storm")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mode", choices=[*MODES, "both"], default="both", help="without a secret, with one, or both")
    given = parser.parse_args()
    starter = WarmStarter()
    tell = functools.partial(print, flush=True)
    results = []
    try:
        for mode in MODES if given.mode == "both" else [given.mode]:
            with tempfile.TemporaryDirectory(prefix="samebits-storm-") as folder:
                place = Path(folder).resolve()
                results.append(run(mode, given.seconds, given.workers, place, starter, tell))
    finally:
        starter.close()
    is_fast = all(one.speed >= WANTED_SPEED for one in results)
    print(json.dumps({"storm": [one.shown() for one in results], "wanted_speed": WANTED_SPEED, "is_fast": is_fast}))


if __name__ == "__main__":
    main()
