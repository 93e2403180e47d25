"""Twenty real hosts that come and go, each with its own address, pids and memory, found by a script.

The driver and the scheduler run on host ``a``. Workers of the others are started by a template that enters the host as
ssh would, without passing signals on. One host is lost as in a power cut.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.account.job_view import PresenceState
from samebits.launcher import job_spec
from samebits.service.status import stored_view
from tests.clusters.hosts import SECRET
from tests.clusters.namespaces import Switch
from tests.launcher.shell_job import ROOT, WAIT_S, Shell, ShellJob
from tests.system.samples_probe import SAMPLES

pytestmark = pytest.mark.system

PROBE = Path(__file__).parents[1] / "system" / "samples_probe.py"
EPOCHS, MOST = 60, 5
ON_HOST = """\
#!/bin/sh
exec nsenter --target "$(cat "pid-of-$1")" --net --uts --mount --pid -- sh -c "$2"
"""
LINE = re.compile(
    r"generation (?P<generation>\d+): rank \d+ of \d+ (?:begins at|continues from) step"
    r"|^epoch (?P<epoch>\d+) step (?P<step>\d+) of (?P<size>\d+) lr \S+ samples (?P<samples>\S+)",
    re.MULTILINE,
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ShellJob]:
    (tmp_path / "a job").mkdir()
    made = ShellJob(tmp_path / "a job")
    yield made
    left = made.close()
    assert not left, f"left behind: {left}\n{made.tails()}"


def drive(job: ShellJob, switch: Switch) -> Shell:
    """Start ``samebits run`` on the first host."""
    (job.folder / "on-host.sh").write_text(ON_HOST)
    (job.folder / "on-host.sh").chmod(0o700)
    (job.folder / "secret").write_text(SECRET)
    (job.folder / "secret").chmod(0o600)
    for host in switch.hosts:
        (job.folder / f"pid-of-{host.name}").write_text(str(host.pid))
    first = switch.hosts[0]
    settings = {name: text for name, text in job.settings.items() if name != "WORKER_NUM"}
    settings |= {
        "SCHED_HOST": first.address(),
        "CLUSTER_SECRET_FILE": str(job.folder / "secret"),
        "PYTHONPATH": str(ROOT),
        "GRACE": "shrink=0.5",
        "NODE_TIMEOUT": "5",
        "HANG": "tell:4",
    }
    found = (
        "--host-discovery-script",
        "cat hosts",
        "--launch",
        "./on-host.sh {host} {command}",
        "--nnodes",
        f"1:{MOST}",
    )
    script = (str(PROBE), "--epochs", str(EPOCHS), "--gate", str(EPOCHS - 1), "--pause-ms", "20")
    enter = ("nsenter", "--target", str(first.pid), "--net", "--uts")
    return job.shell(*enter, sys.executable, "-P", "-m", "samebits", "run", *found, *script, **settings)


def say(job: ShellJob, hosts: dict[str, int]) -> None:
    (job.folder / "hosts.new").write_text("".join(f"{name}:{slots}\n" for name, slots in hosts.items()))
    (job.folder / "hosts.new").rename(job.folder / "hosts")


def stands(job: ShellJob, hosts: dict[str, int]) -> bool:
    """Return whether exactly one worker trains in each slot, according to the driver's record and the journal."""
    kept = job_spec.read(job.log_dir)
    view = stored_view(job.folder / "recovery")
    if kept is None or view is None or kept.nodes is None:
        return False
    members = {one.node for one in view.workers if one.presence is PresenceState.ALIVE and not one.is_joining}
    placed = Counter(kept.hosts.values())
    return members == set(kept.nodes) == kept.hosts.keys() and placed == Counter({k: v for k, v in hosts.items() if v})


def until_stands(shell: Shell, job: ShellJob, hosts: dict[str, int]) -> None:
    until(shell, lambda: stands(job, hosts))


def until(shell: Shell, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert shell.process.poll() is None and time.monotonic() < deadline, "\n".join(shell.all_lines()[-40:])
        time.sleep(0.05)


@pytest.mark.thorough  # → the shell's own test of discovery, and two hundred random ones
def test_twenty_host_changes_lose_and_repeat_no_sample(job: ShellJob, new_switch: Callable[..., Switch]) -> None:
    switch, draw = new_switch("a", "b", "c", "d"), random.Random(11)
    hosts = {"a": 1, "b": 1}
    say(job, hosts)
    shell = drive(job, switch)
    until(shell, lambda: stands(job, hosts))
    changes = 0
    while changes < 20:
        drawn = {"a": 1, **{host.name: draw.randint(0, 2) for host in switch.hosts[1:] if draw.random() < 0.7}}
        if sum(drawn.values()) > MOST or drawn == hosts:
            continue
        hosts = {name: slots for name, slots in drawn.items() if slots}
        if changes == 10 and "c" in {host.name for host in switch.hosts}:
            (lost,) = [host for host in switch.hosts if host.name == "c"]
            lost.lose()
            switch.hosts.remove(lost)
            hosts.pop("c", None)
        say(job, hosts)
        until_stands(shell, job, hosts)
        changes += 1
    (job.folder / f"gate-{EPOCHS - 1}").touch()
    assert shell.end() == 0, shell.text
    require_each_sample_once(job)


def require_each_sample_once(job: ShellJob) -> None:
    """Check what each step's last generation used, apart from an epoch's padding. All end equal."""
    by_step: dict[int, list[tuple[int, int, int, list[int]]]] = defaultdict(list)
    finals = set()
    for log in job.log_dir.glob("worker_*.log"):
        text, generation = log.read_text(), 0
        for found in LINE.finditer(text):
            if found["generation"]:
                generation = int(found["generation"])
            else:
                samples = [int(sample) for sample in found["samples"].split(",")]
                by_step[int(found["step"])].append((generation, int(found["epoch"]), int(found["size"]), samples))
        finals |= set(re.findall(r"final step=\d+ sha256=\w+", text))
    assert len(finals) == 1, finals
    assert sorted(by_step) == list(range(1, len(by_step) + 1))
    epochs: dict[int, Counter[int]] = defaultdict(Counter)
    sizes = set()
    for step, told in by_step.items():
        last = max(generation for generation, *_ in told)
        kept = [one for one in told if one[0] == last]
        assert {size for _, _, size, _ in kept} == {len(kept)}, f"step {step}: {kept}"
        sizes.add(len(kept))
        for _, epoch, _, samples in kept:
            epochs[epoch].update(samples)
    assert sorted(epochs) == list(range(EPOCHS)) and len(sizes) >= 4
    for epoch, seen in epochs.items():
        assert set(seen) == set(range(SAMPLES)), f"epoch {epoch} left out {set(range(SAMPLES)) - set(seen)}"
        assert seen.total() - SAMPLES < MOST, f"epoch {epoch} repeats {seen.most_common(MOST)}"
