"""Preemption: the worker of an announced machine leaves between two steps, and the others continue."""

from __future__ import annotations

import pytest

from tests.launcher.shell_job import UNTIL_TOLD, ShellJob

pytestmark = pytest.mark.system


def test_worker_of_a_preempted_machine_leaves_and_the_others_continue(job: ShellJob) -> None:
    asks = "sh -c 'test -e gone-$NODE_ID'"
    shell = job.run(*UNTIL_TOLD, WORKER_NUM="2", MIN_WORKER_NUM="1", MAX_RESTARTS="0", PREEMPTION_COMMAND=asks)
    job.wait_view(lambda view: (view.phase, view.alive) == ("training", 2) and view.step >= 3)
    (job.folder / "gone-1").touch()
    seen = job.wait_view(lambda view: view.phase == "training" and view.world_size == 1)
    assert [one.node for one in seen.workers if one.presence.value == "alive"] == ["0"]
    assert "asked to leave: this machine is about to be taken away (sh, PREEMPTION_COMMAND)" in job.log("worker_1")
    assert "asked to leave" not in job.log("worker_0")
    job.let_finish()
    assert shell.end() == 0, shell.text
