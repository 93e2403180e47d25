"""A supervised job killed in every part: only the supervisor is restarted by hand, and the bits are the same."""

from __future__ import annotations

import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.launcher.processes import send_signal
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.shell_job import ROOT, WAIT_S, Shell, ShellJob
from tests.system.probe import gate_of

pytestmark = pytest.mark.system

PROBE = Path(__file__).with_name("probe.py")
GATE = 400
TRAINED = ("--steps", "410", "--interval", "20", "--pause-ms", "5")
WORKERS = 4
SETTINGS = {
    "WORKER_NUM": str(WORKERS),
    "MAX_RESTARTS": "1000",
    "REGISTER_COOLDOWN": "3600",
    "PYTHONPATH": str(ROOT),
}


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[ShellJob]:
    job = ShellJob(tmp_path, **SETTINGS)
    yield job
    left = job.close()
    assert not left, f"left behind: {left}\n{job.tails()}"


def zygote_of(shell: Shell) -> ProcessIdentity | None:
    """Return the zygote of the supervisor that runs in this shell."""
    children = Path(f"/proc/{shell.process.pid}/task/{shell.process.pid}/children").read_text().split()
    for pid in map(int, children):
        if b"samebits.training.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes() and not _has_a_log_of_a_worker(pid):
            return ProcessIdentity.of(pid)
    return None


def _has_a_log_of_a_worker(pid: int) -> bool:
    return Path(f"/proc/{pid}/fd/1").readlink().name.startswith("worker_")


def kill_something(job: ShellJob, shell: Shell, chance: random.Random, what: str) -> Shell:
    """kill -9 one part; return the current supervisor."""
    if what == "supervisor":
        shell.process.kill()
        shell.process.wait(WAIT_S)
        return job.recover()
    if what == "zygote":
        zygote = zygote_of(shell)
        if zygote is not None:
            send_signal(zygote, signal.SIGKILL)
        return shell
    names = [name for name in job.running() if name != "scheduler"] if what == "worker" else ["scheduler"]
    job.kill(chance.choice(names))
    return shell


@pytest.mark.thorough  # the decisions and a job of tiny workers: tests/launcher/test_supervised_sh.py
@pytest.mark.parametrize("kills", [pytest.param(2, id="two"), pytest.param(24, id="many")])
def test_bits_are_the_same_whatever_is_killed(
    kills: int, supervised: ShellJob, undisturbed: Callable[..., str]
) -> None:
    job, chance = supervised, random.Random(27)
    gate_of(job.folder, 0).touch()
    shell = job.run(*TRAINED, "--gates", str(GATE), worker=PROBE)
    happened: Counter[str] = Counter()
    for number in range(kills):
        terms = 1 + happened["scheduler"]
        job.wait_view(
            lambda view: (
                (view.phase, view.alive) == ("training", WORKERS) and view.step >= 3 and view.term == terms  # noqa: B023
            )
        )
        what = "worker" if number == 0 else chance.choice(("worker", "worker", "scheduler", "supervisor", "zygote"))
        happened[what] += 1
        shell = kill_something(job, shell, chance, what)
    print(dict(happened))
    gate_of(job.folder, GATE).touch()
    assert shell.end() == 0, shell.text
    finals = {
        found[1]
        for log in job.log_dir.glob("worker_*.log")
        if (found := re.search(r"final step=\d+ .*sha256=(\w+)", log.read_text()))
    }
    assert finals == {undisturbed(*TRAINED)}
