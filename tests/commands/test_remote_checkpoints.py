"""A URL as CHECKPOINT_PATH: messages of run, doctor and ckpt."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from samebits.commands import doctor
from samebits.commands.ckpt.command import main as ckpt
from samebits.commands.run import prepare
from samebits.commands.run.prepare import StartConditions, _checkpoints
from samebits.errors import ForeignFolderError, UsageError
from samebits.store.checkpoint.remote_points import RemotePointStore
from tests.store.checkpoint.remote.remote_points import save
from tests.store.points import JOB


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/job"


def found_in(url: str) -> StartConditions:
    jobs, _, newest_step = _checkpoints(url)
    return StartConditions(
        name="digits",
        recovery_path=Path("/job/recovery"),
        checkpoint_path=url,
        log_dir=Path("/job/device"),
        recover="recover.sh",
        fresh="run.sh --fresh",
        checkpoint_jobs=jobs,
        newest_step=newest_step,
    )


def test_empty_place_is_no_obstacle(url: str) -> None:
    assert prepare.plan_start(found_in(url), fresh=False).moves == ()


@pytest.mark.parametrize("fresh", [False, True])
def test_place_with_points_is_refused_because_nothing_is_moved_there(url: str, fresh: bool) -> None:
    save(RemotePointStore(url, 0, job=JOB, job_name="former"), 40)
    found = found_in(url)
    assert found.newest_step == 40
    with pytest.raises(
        ForeignFolderError,
        match=rf"belongs to job {JOB}, .* export another CHECKPOINT_PATH for 'digits', such as {url}-2",
    ):
        prepare.plan_start(found, fresh=fresh)


def test_doctor_lists_the_place_or_says_why_not(url: str) -> None:
    save(RemotePointStore(url, 3, job=JOB, job_name="former"), 40, rank=3)
    listed = doctor.folder("CHECKPOINT_PATH", url)
    assert (listed.found, listed.fix) == (f"{url} can be listed, 1 ranks have saved there", "")
    assert "the package for gs:// is not" in doctor.folder("CHECKPOINT_PATH", "gs://bucket/job").found


def test_ckpt_reads_only_local_folders(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHECKPOINT_PATH", url)
    with pytest.raises(UsageError, match="reads local folders only"):
        ckpt(["ls"])
