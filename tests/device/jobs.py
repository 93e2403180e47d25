"""Jobs on one device: several ranks disturbed midway, with the bits of an undisturbed run.

All ranks wait at a gate in the middle of training until they were disturbed, so the device's speed does not matter.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.device.here import Here
from tests.system.elastic_job import ElasticJob
from tests.system.processes import ColdStarter

SCRIPT = Path(__file__).with_name("script.py")
WORKERS = 2
LOST = 1
SPARE = WORKERS
STEPS = 24
GATE = 12
TIMED_STEPS = 160
GOES_ON = r"generation \d+: rank \d+ of \d+ continues from step ([1-9]\d*)"
OVER = r"^LOCAL_RANK \d+ on \S+ over (\S+)$"
HOLDS = re.compile(r"device (\S+) holds (\d+) bytes")


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of one job.

    Attributes:
        sha256: the hash of its weights.
        backend: the backend of its groups, as its processes have printed it.
        held_bytes: the device memory held when its state was built, by node, as torch counts it.
    """

    sha256: str
    backend: str
    held_bytes: dict[int, int] = field(default_factory=dict)


class DeviceJob(ElasticJob):
    """Two workers and the requested number of spares on one device."""

    def __init__(
        self, here: Here, folder: Path, *args: str, spares: int = 0, settings: dict[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True)
        super().__init__(
            folder,
            ColdStarter(),
            workers=WORKERS,
            spares=spares,
            script=SCRIPT,
            args=("--steps", str(STEPS), "--gates", str(GATE), "--marks", str(folder), *args),
            settings={**here.environment, "REGISTER_COOLDOWN": "0", **(settings or {})},
        )

    def backend(self) -> str:
        """Return the backend of its groups; several with commas."""
        return ",".join(sorted({one[1] for node in self.ranks for one in self.matches(node, OVER)}))

    def held_bytes(self) -> dict[int, int]:
        """Return the held memory by node."""
        found = ((node, self.matches(node, HOLDS.pattern)) for node in (*self.ranks, *self.spares))
        return {node: int(matches[0][2]) for node, matches in found if matches}


def undisturbed(job: DeviceJob) -> None:
    job.open_gates(0, GATE)
    job.start()


def kill_with_a_spare(job: DeviceJob) -> None:
    job.open_gates(0)
    job.start()
    job.wait_for(SPARE, "this spare is warm")
    job.wait_for_step(GATE)
    job.kill(LOST)
    job.wait_for(SPARE, GOES_ON)
    job.open_gates(GATE)


def kill_with_a_restart(job: DeviceJob) -> None:
    job.open_gates(0)
    job.start()
    job.wait_for_step(GATE)
    job.kill(LOST)
    job.start_worker(LOST)
    job.wait_for(LOST, GOES_ON)
    job.open_gates(GATE)


def kill_everything(job: DeviceJob) -> None:
    job.open_gates(0)
    job.start()
    for rank in job.ranks:
        job.wait_for_step(GATE, rank)
    job.kill_everything()
    job.open_gates(GATE)
    job.start()


DISTURBED: tuple[tuple[Callable[[DeviceJob], None], int], ...] = (
    (kill_with_a_spare, 1),
    (kill_with_a_restart, 0),
    (kill_everything, 0),
)
"""Each with the number of spares it takes."""


def run(
    here: Here, folder: Path, disturb: Callable[[DeviceJob], None], args: Sequence[str] = (), spares: int = 0
) -> Ran:
    """Run one job to its end.

    Raises:
        AssertionError: it ended otherwise than it should; the message has the ends of all logs.
    """
    job = DeviceJob(here, folder, *args, spares=spares)
    try:
        disturb(job)
        return _result(job)
    finally:
        _end(job)


def run_beside(here: Here, folder: Path, args: Sequence[str] = ()) -> tuple[Ran, Ran]:
    """Run an undisturbed job and, at the same time, one whose lost rank is replaced by a spare; return both results.

    Raises:
        AssertionError: as :func:`run`.
    """
    plain = DeviceJob(here, folder / undisturbed.__name__, *args)
    killed = DeviceJob(here, folder / kill_with_a_spare.__name__, *args, spares=1)
    try:
        undisturbed(plain)
        kill_with_a_spare(killed)
        return _result(plain), _result(killed)
    finally:
        _end(plain)
        _end(killed)


def _result(job: DeviceJob) -> Ran:
    statuses = job.wait_ended()
    failed = {name: status for name, status in statuses.items() if status and name not in job.gone}
    assert not failed, f"exit statuses {failed}\n{job.tails()}"
    return Ran(job.sha256(), job.backend(), job.held_bytes())


def _end(job: DeviceJob) -> None:
    if left := job.end():
        print(f"{job.folder.name} left {left}", flush=True)


def step_s(here: Here, folder: Path, settings: dict[str, str]) -> tuple[float, str]:
    """Return the median seconds of a step of an undisturbed job, its first half left out, and the job's backend.

    Raises:
        AssertionError: it did not end as it should.
    """
    job = DeviceJob(here, folder, "--steps", str(TIMED_STEPS), "--gates", "0", settings=settings)
    try:
        job.start()
        statuses = job.wait_ended()
        assert not any(statuses.values()), f"exit statuses {statuses}\n{job.tails()}"
        backend = job.backend()
        at_s = [float(one[1]) for one in job.matches(0, r"^epoch \d+ step \d+ .* at ([\d.]+)$")]
    finally:
        job.end()
    return statistics.median(after - before for before, after in itertools.pairwise(at_s[len(at_s) // 2 :])), backend
