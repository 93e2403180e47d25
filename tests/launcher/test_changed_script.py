"""A script edited since its job started is detected by its content, and reported with both times."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from samebits.launcher.job_spec import ScriptVersion, change, version_of
from tests.launcher.shell_job import ROOT, UNTIL_TOLD, WORKER, ShellJob


def test_only_different_content_is_a_change(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    assert version_of(script) is None
    script.write_text("lr = 0.1\n")
    before = version_of(script)
    assert before is not None
    os.utime(script, (1.0, 1.0))
    touched = version_of(script)
    assert touched == ScriptVersion(before.digest, 1.0)
    assert change("train.py", before, touched, others_run=False) == ""
    script.write_text("lr = 0.2\n")
    now = version_of(script)
    assert now is not None
    for others_run, words in ((True, "workers that run already keep the former"), (False, "all workers start with")):
        text = change("train.py", before, now, others_run=others_run)
        assert words in text
        assert len(re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text)) == 2
        assert "such as an optimizer's lr or a schedule, stays as it was" in text
    assert change("train.py", None, now, others_run=False) == ""
    assert change("train.py", before, None, others_run=False) == ""


@pytest.mark.system
def test_recover_sh_reports_that_the_script_or_a_variable_that_it_may_read_has_changed(job: ShellJob) -> None:
    script = job.folder / "mine.py"
    shutil.copy(WORKER, script)
    job.settings |= {"PYTHONPATH": str(ROOT), "STEPS": "900"}
    shell = job.run(*UNTIL_TOLD, worker=Path("mine.py"))
    job.wait_training()
    job.kill("worker_1")
    untouched = job.recover()
    untouched.wait_for("starting worker 1")
    job.wait_training(generation=2)
    assert "was edited" not in untouched.text
    untouched.wait_for("samebits: STEPS differs from the environment in which the job was started")
    script.write_text(script.read_text() + "# edited\n")
    job.kill("worker_2")
    first = job.recover()
    first.wait_for(r"mine.py was edited since the job started: written .* then, .* now; workers that run already keep")
    job.wait_training(generation=3)
    for one in (shell, untouched, first):
        one.send(signal.SIGINT)
    assert {one.end() for one in (shell, untouched, first)} == {78}
    job.let_finish()
    second = job.recover()
    assert second.end() == 0, second.text
    assert "mine.py was edited since the job started" in second.text
    assert "all workers start with the new one" in second.text
