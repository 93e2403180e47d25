"""Exit code 0 means that every rank reached the end of its script, in real processes.

tests/core/test_core_end.py covers which ends lead to which status of the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.launcher.shell_job import ROOT, ShellJob
from tests.system.processes import WarmStarter

pytestmark = pytest.mark.system

SCRIPT = """\
import hashlib
import os
import signal
import time
from pathlib import Path

import torch

import samebits

samebits.init()
rank_at_the_top = os.environ["RANK"]
torch.manual_seed(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
every = samebits.CheckpointConfig(save_checkpoint_steps={every})
state = samebits.elastic.TorchState(model, optimizer, epoch=0, rng="per_step", seed=1, checkpoint=every)


@samebits.elastic.run
def train(state):
    while state.completed_steps < 5:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        state.commit()
    state.epoch += 1
{tail}

train(state)
{after}
if rank_at_the_top == "0":
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    Path("model.sha256").write_text(f"{{hashlib.sha256(weights).hexdigest()}} of epoch {{state.epoch}}")
"""
HALVES = """\
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(0.5)
"""
DIES_IN_TRAINING = f"""\
{HALVES}
    if rank_at_the_top == "1" and not Path("died").exists():
        folder = Path("ckpt_of_rank")
        while not [*folder.glob(".final/0/*/manifest.msgpack"), *folder.glob("0/{{first}}/manifest.msgpack")]:
            time.sleep(0.05)  # until rank 0 has returned and saved its final state
        Path("died").touch()
        {{before_it}}
        os.kill(os.getpid(), signal.SIGKILL)
"""
KILLS_THE_OTHERS = """for one in ("scheduler", "worker_0"):
            os.kill(int(Path(f"device/{one}.pid").read_text().split()[0]), signal.SIGKILL)"""
REDUCES = """
if rank_at_the_top == "1":
    os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.all_reduce(torch.ones(1))
"""
DIES = """\
if rank_at_the_top == "0" and not Path("died").exists():
    Path("died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
SETTINGS = {"WORKER_NUM": "2", "NODE_TIMEOUT": "3", "HEARTBEAT_INTERVAL": "0.5", "PYTHONPATH": str(ROOT)}
NOT_DONE = r"training is finished at step 5, but worker 0 \(pid \d+ on \S+\) did not reach the end of its script: "


@pytest.fixture
def job(tmp_path: Path, warm: WarmStarter) -> Iterator[ShellJob]:
    one = ShellJob(tmp_path, warm, **SETTINGS)
    yield one
    left = one.close()
    assert not left, f"left behind: {left}\n{one.tails()}"


def ends(
    job: ShellJob, after: str, settings: Mapping[str, str] = SETTINGS, *, tail: str = "", every: int = 5
) -> tuple[int, str]:
    """Run the script with these lines after training or at its end; return its exit code and output."""
    script = job.folder / "train.py"
    script.write_text(SCRIPT.format(after=after, tail=tail, every=every))
    job.settings = {**job.settings, **settings}
    shell = job.run(worker=script)
    return shell.end(), f"{shell.text}\n{job.tails()}"


def test_rank_killed_after_training_is_replaced_for_the_rest_of_its_script(job: ShellJob, tmp_path: Path) -> None:
    """The replacement gets the final state, including changes after the last commit that was saved."""
    status, text = ends(job, "")
    assert status == 0, text
    undisturbed = (tmp_path / "model.sha256").read_text()
    (tmp_path / "model.sha256").unlink()
    status, text = ends(job, DIES, {"MAX_RESTARTS": "3", "REGISTER_COOLDOWN": "60"})
    assert status == 0, text
    assert (tmp_path / "died").exists()
    assert (tmp_path / "model.sha256").read_text() == undisturbed, text


@pytest.mark.parametrize(("every", "first"), [(5, "none"), (1000, "step_0000000005*")], ids=["saved", "unsaved"])
def test_changes_after_the_last_commit_happen_once_though_a_rank_dies_there(
    job: ShellJob, tmp_path: Path, every: int, first: str
) -> None:
    status, text = ends(job, "", tail=HALVES, every=every)
    assert status == 0, text
    undisturbed = (tmp_path / "model.sha256").read_text()
    (tmp_path / "model.sha256").unlink()
    tail = DIES_IN_TRAINING.format(first=first, before_it="")
    status, text = ends(job, "", {"MAX_RESTARTS": "3", "REGISTER_COOLDOWN": "60"}, tail=tail, every=every)
    assert status == 0, text
    assert (tmp_path / "died").exists()
    assert (tmp_path / "model.sha256").read_text() == undisturbed, text


def test_a_value_that_a_function_changes_after_its_last_commit_is_changed_once_though_all_die_there(
    job: ShellJob, tmp_path: Path
) -> None:
    dies = DIES_IN_TRAINING.removeprefix(HALVES).format(first="step_0000000005*", before_it=KILLS_THE_OTHERS)
    status, text = ends(job, "", {"REGISTER_COOLDOWN": "0.5"}, tail=dies, every=4)
    assert status != 0, text
    assert (tmp_path / "died").exists()
    assert not (tmp_path / "model.sha256").exists()
    shell = job.recover()
    assert shell.end() == 0, f"{shell.text}\n{job.tails()}"
    assert (tmp_path / "model.sha256").read_text().endswith(" of epoch 1"), f"{shell.text}\n{job.tails()}"


@pytest.mark.parametrize(
    ("after", "expected", "told"),
    [
        ("raise SystemExit(3)", 3, r"the job was ended by its script at step 5: .*ended with status 3"),
        (REDUCES, 80, NOT_DONE + r"failed at train\.py:34: .*: a collective after .* has failed: another rank is lost"),
        *(
            pytest.param(*row, marks=pytest.mark.thorough)
            for row in [
                (
                    "if rank_at_the_top == '0':\n    open('/nonexistent/model')",
                    1,
                    NOT_DONE + r"failed at train\.py:32: F",
                ),
                ("train(state)", 80, NOT_DONE + r"failed at .*: samebits\.elastic\.run was called a second time"),
                (DIES, 77, NOT_DONE + "was killed by signal 9"),
            ]
        ),
    ],
    ids=["exits", "reduces", "raises", "trains again", "is killed and nobody starts it again"],
)
def test_script_that_does_not_reach_its_end_determines_the_jobs_status_and_rank(
    job: ShellJob, tmp_path: Path, after: str, expected: int, told: str
) -> None:
    status, text = ends(job, after, {"MAX_RESTARTS": "0", "REGISTER_COOLDOWN": "0"})
    assert status == expected, text
    assert re.search(told, text), text
    assert "job finished" not in text
    assert not (tmp_path / "model.sha256").exists()
