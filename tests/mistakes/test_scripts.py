"""Mistakes in the script: the messages of ``run.sh`` with the line, and its exit status."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

import pytest

from tests.launcher.shell_job import ShellJob
from tests.mistakes.mistake import RECOVER, Mistake
from tests.mistakes.told import Told
from tests.system.processes import WarmStarter

pytestmark = pytest.mark.system

BEFORE_INIT = (
    Mistake(
        "a syntax error",
        "import samebits\n\n\ndef f(:\n    pass\n",
        (
            r"^samebits: workers 0, 1 failed at train\.py:4: SyntaxError: invalid syntax$",
            r"^samebits: the job was ended by its script: workers 0, 1 failed at train\.py:4: SyntaxError",
            r"^samebits: Fix: correct the script, then ([A-Z_]+=[\w.]+ )+bash .*run\.sh .*train\.py'?$",
        ),
        87,
        never=(RECOVER, "was interrupted", "was stopped"),
    ),
    Mistake(
        "a package that is not installed",
        "import torhc\n",
        (r"^samebits: workers 0, 1 failed at train\.py:1: ModuleNotFoundError: No module named 'torhc'$",),
        87,
        never=(RECOVER,),
    ),
    Mistake(
        "the package's earlier name",
        "import runtime\n",
        (
            r"^samebits: workers 0, 1 failed at train\.py:1: .*'runtime'",
            r"^samebits: Fix: write `import samebits` in place",
        ),
        87,
        never=(RECOVER,),
    ),
    Mistake(
        "an error in a module of the user's",
        "import models.net\n",
        (r"^samebits: workers 0, 1 failed at models/net\.py:2: NameError: name 'nn' is not defined$",),
        87,
        never=(RECOVER,),
        files={"models/net.py": "\nLAYER = nn.Linear\n"},
    ),
    Mistake(
        "arguments that the script does not know",
        "import argparse\n\nargparse.ArgumentParser(prog='train.py').parse_args()\n",
        (r"^samebits: workers 0, 1 ended with status 2: train\.py: error: unrecognized arguments: --epoch",),
        87,
        never=(RECOVER,),
        arguments=("--epoch", "3"),
    ),
    Mistake(
        "torchrun's variables, read before init()",
        'import os\n\nrank = int(os.environ["RANK"])\n',
        (
            r"^samebits: workers 0, 1 failed at train\.py:3: KeyError: 'RANK'$",
            r"^samebits: Fix: call samebits\.init\(\) before that line, which sets RANK, LOCAL_RANK and WORLD_SIZE",
        ),
        87,
        never=(RECOVER,),
    ),
    Mistake(
        "a script that trains alone and knows nothing of us",
        "print('Train Epoch: 3 [0/60000]  Loss: 2.29')\n",
        (
            r"^samebits: workers 0, 1 ended with status 0 and never called samebits\.init\(\)$",
            r"^samebits: the job was not trained: workers 0, 1 ended with status 0",
            r"^samebits: Fix: add `import samebits` and `samebits\.init\(\)` .*`@samebits\.elastic\.run`",
        ),
        88,
        never=(RECOVER, "finished$", "Loss"),
    ),
    Mistake(
        "the same with ENABLE_RECOVERY=0",
        "print('Train Epoch: 3 [0/60000]  Loss: 2.29')\n",
        (r"^samebits: the job was not trained: workers 0, 1 ended with status 0",),
        88,
        never=(RECOVER, "finished$", "Loss"),
        settings={"ENABLE_RECOVERY": "0"},
    ),
)


MODEL = """\
import torch
from torch.utils.data import DataLoader, Dataset

import samebits

samebits.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = samebits.elastic.TorchState(model, optimizer, epoch=0, rng="per_step", seed=1)


"""
TRAIN = (
    MODEL
    + """\
@samebits.elastic.run
def train(state):
    for step in range({steps}):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        {line}
        state.commit()


train(state)
"""
)
DATASET = (
    MODEL
    + """\
class Broken(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise ValueError(f"sample {index} cannot be read")


@samebits.elastic.run
def train(state):
    for batch in DataLoader(Broken(), num_workers=1):
        state.commit()


train(state)
"""
)
HANGING = "import ctypes\n\n" + DATASET.replace("num_workers=1", "num_workers=2").replace(
    "        raise",
    """\
        mutex = ctypes.create_string_buffer(64)
        while index:
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
        raise""",
)
AFTER_INIT = (
    Mistake(
        "an error that every rank meets",
        TRAIN.format(steps=10, line="assert step < 3, 'the loss is nan'"),
        (
            r"^samebits: workers 0, 1 failed at train\.py:18: AssertionError: the loss is nan$",
            r"^samebits: the job was ended by its script at step 3: .*train\.py:18: AssertionError: the loss is nan",
            r"^samebits: Fix: correct the script, then bash .*recover\.sh continues from there$",
        ),
        87,
        never=("was interrupted", "brings (it|them) back"),
    ),
    Mistake(
        "an error in a DataLoader's worker process",
        DATASET,
        (
            r"^samebits: workers? [01].* failed at train\.py:17: ValueError: sample 0 cannot be read",
            r"^samebits: the job was ended by its script: .*train\.py:17: ValueError: sample 0 cannot be read",
        ),
        87,
        never=("was interrupted", "Caught ValueError"),
    ),
    Mistake(
        "a script that calls init() and trains alone",
        "import samebits\n\nsamebits.init()\nprint('Train Epoch: 3 [0/60000]  Loss: 2.29')\n",
        (
            r"^samebits: workers 0, 1 ended with status 88: trained alone: samebits\.elastic\.run was never called",
            r"^samebits: the job was not trained: every worker left before training began: its script never called",
            r"^samebits: Fix: write `@samebits\.elastic\.run` above the training function",
        ),
        88,
        never=("finished$", "Loss", RECOVER),
    ),
)


# The scripts import torch here. Others are in tests/launcher (with workers that need no torch: an error in every
# worker, a worker that is lost) and tests/system/test_exits.py.
IN_DEFAULT = "an error in a DataLoader's worker process"
LISTED = [
    pytest.param(one, id=one.name, marks=[] if one.name == IN_DEFAULT else [pytest.mark.thorough]) for one in AFTER_INIT
]


@pytest.mark.parametrize("mistake", LISTED)
def test_mistake_after_the_script_has_joined(mistake: Mistake, job: ShellJob, told: Told, warm: WarmStarter) -> None:
    job.starter = warm
    shell = job.run(*mistake.arguments, worker=mistake.make(job))
    status = shell.end()
    mistake.judge(status, shell.text, job.tails())
    told.note(mistake.name, shell, mistake.says[0])
    assert job.running() == []


@pytest.mark.thorough
def test_dataloader_worker_that_hangs_in_a_library_ends_with_its_rank(job: ShellJob, told: Told) -> None:
    """Beside one that fails; the fixture detects remaining processes."""
    shell = job.run(worker=Mistake("", HANGING, (), 87).make(job))
    said = shell.wait_for(r"samebits: workers? [01].* failed at .*\n")[0]
    assert "ValueError: sample 0 cannot be read" in said
    told.note("the same beside one that hangs in a library", shell, "failed at")
    assert shell.end() == 87, shell.text


@pytest.mark.thorough  # → test_follower_decisions; a worker whose script fails: test_run_sh
def test_error_of_one_rank_says_where_and_how_long_the_others_wait(job: ShellJob, told: Told) -> None:
    line = "assert samebits.get_rank() != 1 or step < 3, 'the loss is nan'"
    mistake = Mistake("", TRAIN.format(steps=10, line=line), (), 0)
    mistake = replace(mistake, settings={"WORKER_NUM": "3", "TOPO_TIMEOUT": "900"})
    shell = job.run(worker=mistake.make(job))
    said = shell.wait_for(r"samebits: worker 1 \(pid \d+\) failed at .*\n")[0]
    assert re.search(
        r"failed at train\.py:18: AssertionError: the loss is nan; the others wait for it until \d\d:\d\d:\d\d "
        r"\(TOPO_TIMEOUT=900 s\)\. Fix: correct the script, then bash .*recover\.sh",
        said,
    )
    told.note("an error of one rank", shell, "failed at")
    shell.send(signal.SIGINT)
    assert shell.end() == 78, shell.text


def test_forgotten_commit_is_reported_while_the_job_trains(job: ShellJob, told: Told, warm: WarmStarter) -> None:
    job.starter = warm
    script = TRAIN.format(steps=100_000_000, line="").replace("        state.commit()\n", "")
    assert "commit" not in script
    shell = job.run(worker=Mistake("", script, (), 0, settings={"WORKER_NUM": "1"}).make(job))
    said = shell.wait_for(r"samebits: worker 0: .*commit.*\n")[0]
    assert "100 optimizer steps and no state.commit()" in said
    assert "Fix: call state.commit() after every optimizer.step()" in said
    told.note("a forgotten state.commit()", shell, "no state.commit()")
    shell.send(signal.SIGINT)
    assert shell.end() == 78, shell.text


def test_process_that_never_calls_init_is_named_while_it_runs(job: ShellJob, told: Told) -> None:
    mistake = Mistake("", "import time\n\nprint('Loss: 2.29')\ntime.sleep(600)\n", (), 0)
    shell = job.run(worker=mistake.make(job))
    shell.wait_for("2 workers and a scheduler .* started")
    told.fact("the workers' start")
    said = shell.wait_for(r"samebits: workers 0, 1 have run for 15 s .*\n")[0]
    assert "without calling samebits.init()" in said
    assert "Fix: if the script never calls it, add `import samebits` and `samebits.init()`" in said
    told.note("a process that runs and never calls samebits.init()", shell, "without calling")
    shell.send(signal.SIGINT)
    assert shell.end() == 78, shell.text
    assert job.running() == []


@pytest.mark.parametrize("mistake", BEFORE_INIT, ids=[one.name for one in BEFORE_INIT])
def test_mistake_before_the_script_has_joined(mistake: Mistake, job: ShellJob, told: Told) -> None:
    shell = job.run(*mistake.arguments, worker=mistake.make(job))
    status = shell.end()
    mistake.judge(status, shell.text, job.tails())
    told.note(mistake.name, shell, mistake.says[0])
    assert job.running() == []


def test_corrected_script_is_started_again_normally(job: ShellJob) -> None:
    broken = BEFORE_INIT[0]
    shell = job.run(worker=broken.make(job))
    assert shell.end() == broken.status, shell.text
    again = job.run("--steps", "5")
    assert again.end() == 0, again.text
    assert "unfinished" not in again.text
    assert "job finished at step 5" in again.text
