"""What a failing test shows besides its logs: the job's state and the processes still running."""

from __future__ import annotations

import pytest

from tests.last_look import last_look
from tests.launcher.shell_job import ENDLESS, ShellJob


@pytest.mark.system
def test_job_state_and_running_processes_are_shown(job: ShellJob) -> None:
    run = job.run(*ENDLESS)
    job.wait_training()
    environment = job.bare_environment() | job.settings
    pids = {name: str(identity.pid) for name, identity in job.identities().items()}
    look = last_look(job.folder, environment)
    assert "training · step" in look and "3/3 workers" in look
    running = look.partition("--- still running\n")[2].splitlines()
    assert {line.split()[0] for line in running} >= {*pids.values(), str(run.process.pid)}
    assert all(line.split()[1] in "RSDZ" for line in running)
    assert str(run.process.pid) in "\n".join(running) and "tiny_worker.py" in look
    job.kill_everything(run)
    look = last_look(job.folder, environment)
    assert "this is what the journal in" in look and look.endswith("--- still running\nnothing")
