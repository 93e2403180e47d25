"""Recovery from checkpoints after the loss of RECOVERY_PATH: on request only, and to the same bits."""

from __future__ import annotations

import fcntl
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.shell_job import ROOT, ShellJob
from tests.system.processes import WarmStarter

pytestmark = pytest.mark.system

DIGITS = ROOT / "examples" / "digits" / "train.py"
INTERVAL = 10
STEPS = ("--steps", "160", "--save-checkpoint-steps", str(INTERVAL))


def everything_killed_after(job: ShellJob, step: int) -> None:
    shell = job.run(*STEPS, worker=DIGITS)
    job.wait_view(lambda view: view.step >= step)
    shell.send(signal.SIGKILL)
    shell.process.wait()
    for name in job.identities():
        job.kill(name)
    for lock in job.folder.glob("ckpt_of_rank/*/lock"):  # a rank's writer outlives it briefly and removes points
        with lock.open("r+b") as held:
            fcntl.flock(held, fcntl.LOCK_EX)


def final_hash(job: ShellJob) -> str:
    found = re.findall(r"sha256[=: ]+([0-9a-f]{64})", job.log("worker_0"))
    assert found, job.log("worker_0")
    return str(found[-1])


def contents(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.name != "start.lock")


def test_job_resumes_from_its_checkpoints_to_the_same_bits(new_job: Callable[..., ShellJob], warm: WarmStarter) -> None:
    undisturbed = new_job("undisturbed", starter=warm, WORKER_NUM="2")
    assert undisturbed.run(*STEPS, worker=DIGITS).end() == 0
    job = new_job("job", starter=warm, WORKER_NUM="2")
    everything_killed_after(job, 30)
    shutil.rmtree(job.folder / "recovery")
    before = contents(job.folder)

    refused = job.recover()
    assert refused.end() == 71, refused.text
    step = re.search(r"The newest point that all 2 ranks hold on disk is step (\d+), of job \S+\. Fix: ", refused.text)
    assert step is not None, refused.text
    assert int(step.group(1)) >= 20
    assert "recover.sh --from-checkpoints` continues from there" in refused.text
    assert contents(job.folder) == before
    assert job.running() == []

    # The newest one is damaged: the one before it is used, with a message.
    newest = f"step_{int(step.group(1)):010}_gen_000001"
    (data,) = [path for path in (job.folder / "ckpt_of_rank" / "1" / newest).iterdir() if path.suffix == ".safetensors"]
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    (job.folder / "ckpt_of_rank" / "0" / "owner.json").unlink()
    recover = job.recover("--from-checkpoints")
    assert recover.end() == 0, recover.text
    assert f"not used: {data.parent}" in recover.text
    assert (
        f"continues from step {int(step.group(1)) - INTERVAL}, which all 2 ranks have on disk (every byte was verified)"
        in recover.text
    )
    assert re.search(rf"restore point: step {int(step.group(1)) - INTERVAL} of generation 1", job.log("scheduler"))
    assert final_hash(job) == final_hash(undisturbed)
    again = job.recover()
    assert again.end() == 0, again.text
    assert "is finished at step 160" in again.text


def test_job_with_a_journal_resumes_as_usual(job: ShellJob) -> None:
    shell = job.run("--steps", "100000")
    job.wait_training()
    shell.send(signal.SIGINT)
    assert shell.end() == 78
    refused = job.recover("--from-checkpoints")
    assert refused.end() == 80, refused.text
    assert "holds a journal" in refused.text
    shutil.rmtree(job.folder / "recovery")
    for words in ((), ("--from-checkpoints",)):
        refused = job.recover(*words)
        assert refused.end() == 71, refused.text
        assert "complete for all ranks. Fix: " in refused.text
        assert re.search(r"run\.sh --fresh \S*tiny_worker\.py .*` starts over", refused.text)
    assert not (job.folder / "recovery").exists()
