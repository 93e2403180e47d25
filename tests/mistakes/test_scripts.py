"""Mistakes in the script: what ``run.sh`` says of them, with the line, and what it leaves with."""

from __future__ import annotations

import pytest

from tests.mistakes.mistake import RECOVER, Mistake
from tests.ops.shell_job import ShellJob

pytestmark = pytest.mark.system

BEFORE_INIT = (
    Mistake(
        "a syntax error",
        "import runtime\n\n\ndef f(:\n    pass\n",
        (
            r"^samebits: workers 0, 1 failed at train\.py:4: SyntaxError: invalid syntax$",
            r"^samebits: the job was ended by its script: workers 0, 1 failed at train\.py:4: SyntaxError",
            r"^samebits: Fix: correct the script, then bash .*run\.sh .*train\.py'?$",
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
        "a script that trains alone and knows nothing of us",
        "print('Train Epoch: 3 [0/60000]  Loss: 2.29')\n",
        (
            r"^samebits: workers 0, 1 ended with status 0 and never called runtime\.init\(\)$",
            r"^samebits: the job was not trained: workers 0, 1 ended with status 0",
            r"^samebits: Fix: add `import runtime` and `runtime\.init\(\)` .*`@runtime\.elastic\.run`",
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


@pytest.mark.parametrize("mistake", BEFORE_INIT, ids=[one.name for one in BEFORE_INIT])
def test_before_the_script_has_joined(mistake: Mistake, job: ShellJob) -> None:
    shell = job.run(*mistake.arguments, worker=mistake.make(job))
    status = shell.end()
    mistake.judge(status, shell.text, job.tails())
    assert job.running() == []


def test_a_script_that_was_corrected_is_started_again_as_if_nothing_had_been(job: ShellJob) -> None:
    broken = BEFORE_INIT[0]
    shell = job.run(worker=broken.make(job))
    assert shell.end() == broken.status, shell.text
    again = job.run("--steps", "5")
    assert again.end() == 0, again.text
    assert "unfinished" not in again.text
    assert "job finished at step 5" in again.text
