"""``samebits clean``: shows and frees what a dead job left, and nothing of any other job."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits import config
from samebits.__main__ import main
from samebits.commands import clean
from samebits.core import records
from samebits.core.end_kinds import EndKind
from samebits.launcher.job_spec import JobSpec, keep
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import MemoryRoom
from samebits.store.journal import Journal
from samebits.store.lock import DirectoryLock
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.shell_job import free_port
from tests.store.points import JOB, save
from tests.store.slots import fill_and_hash

FORMER, STRANGER = "1a2b3c4d-former", "99999999-stranger"
SOMEBODY = 54321  # no user has this number


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path / "shm"
    base.mkdir()
    monkeypatch.setattr(checkpoints, "SHARED_MEMORY", base)
    return base


@pytest.fixture
def here(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a stopped job's folder with one set aside, memory of both, and memory of a foreign job."""
    for name in config.kept_environment():
        if name not in ("PATH", "PYTHONPATH"):
            monkeypatch.delenv(name)
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.chdir(folder)
    environment = {"WORKER_NUM": "2", "ENABLE_RECOVERY": "1", "SCHED_PORT": str(free_port())}
    keep(folder / "device", JobSpec(folder, "python", "train.py", (), environment))
    journal(folder / "recovery", JOB, records.JobInterrupted(EndKind.STOPPED, 7, "stopped by Ctrl-C"))
    journal(folder / "recovery.1a2b3c4d.aside", FORMER, records.JobInterrupted(EndKind.STOPPED, 9, "x"))
    (folder / "ckpt_of_rank.1a2b3c4d.aside" / "0").mkdir(parents=True)
    (folder / "ckpt_of_rank.1a2b3c4d.aside" / "0" / "data").write_bytes(bytes(300_000))
    (folder / "ckpt_of_rank" / "0").mkdir(parents=True)
    (folder / "device" / "start.json.1a2b3c4d.aside").write_text("{}")
    for job in (JOB, FORMER, STRANGER):
        room = MemoryRoom(memory, job, 0)
        fill_and_hash(room, 7)
        room.close()
    yield folder


def journal(folder: Path, job: str, *more: records.Record) -> None:
    opened, _ = Journal.open(folder)
    with opened:
        created = records.JobCreated(job, "train.py", ())
        opened.append([records.SCHEMA.pack(record) for record in (created, *more)])


def everything(*folders: Path) -> list[Path]:
    found = [path for folder in folders for path in folder.rglob("*")]
    return sorted(path for path in found if path.name not in ("start.lock", "lock", "lock.holder"))


def test_dry_run_shows_everything_and_removes_nothing(
    here: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(here, memory)
    assert main(["clean", "--dry-run"]) == 0
    text = capsys.readouterr().out
    user = memory / f"samebits-{os.geteuid()}"
    for path in (user / JOB / "0", user / FORMER / "0", here / "recovery.1a2b3c4d.aside"):
        assert f"{path} (" in text
    assert f"{here / 'ckpt_of_rank.1a2b3c4d.aside'} (moved aside)" in text
    assert "is unfinished, and its memory holds step 7; without it" in text
    assert STRANGER not in text
    assert everything(here, memory) == before


@pytest.mark.parametrize(
    ("on_disk", "text"),
    [
        (5, r"its memory holds step 7, which is not on disk; without it `\S*samebits recover` continues from step 5"),
        (9, r"`\S*samebits recover` continues from step 9 also without that memory: the step is on disk"),
    ],
)
def test_memory_is_compared_with_the_disk(
    here: Path, capsys: pytest.CaptureFixture[str], on_disk: int, text: str
) -> None:
    for rank in range(4):
        save(here / "ckpt_of_rank", on_disk, rank=rank, job=JOB)
    assert main(["clean", "--dry-run"]) == 0
    assert re.search(f"is unfinished, and {text}\n", capsys.readouterr().out)


def test_nothing_is_removed_without_a_terminal_to_ask(
    here: Path, memory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(here, memory)
    with Path(os.devnull).open() as nobody:
        monkeypatch.setattr("sys.stdin", nobody)
        assert main(["clean"]) == 80
    assert "samebits clean --yes" in capsys.readouterr().err
    assert everything(here, memory) == before


@pytest.mark.parametrize(("answer", "is_removed"), [("", False), ("n", False), ("yes", True)])
def test_user_at_the_terminal_is_asked(
    here: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, answer: str, is_removed: bool
) -> None:
    before = everything(here, memory)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    assert main(["clean"]) == 0
    assert (everything(here, memory) != before) == is_removed


def test_exactly_what_was_shown_is_removed(here: Path, memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "recovery.somebody.aside").symlink_to(memory)
    if os.geteuid() == 0:
        (here / "recovery.ffffffff.aside").mkdir()
        os.chown(here / "recovery.ffffffff.aside", SOMEBODY, SOMEBODY)
    (here / "other.1a2b3c4d.aside").mkdir()
    assert main(["clean", "--yes"]) == 0
    assert "are free again" in capsys.readouterr().out
    left = {path.name for path in here.iterdir()}
    assert {"recovery", "ckpt_of_rank", "device", "other.1a2b3c4d.aside", "recovery.somebody.aside"} <= left
    assert "recovery.1a2b3c4d.aside" not in left
    assert "ckpt_of_rank.1a2b3c4d.aside" not in left
    assert ("recovery.ffffffff.aside" in left) == (os.geteuid() == 0)
    assert not (here / "device" / "start.json.1a2b3c4d.aside").exists()
    assert (here / "device" / "start.json").exists()
    assert [path.name for path in (memory / f"samebits-{os.geteuid()}").iterdir()] == [STRANGER]
    assert main(["clean", "--yes"]) == 0
    assert "there is nothing to free in this folder" in capsys.readouterr().out


def test_nothing_is_removed_while_a_process_of_the_job_lives(
    here: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(here, memory)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as worker:
        identity = ProcessIdentity.of(worker.pid)
        assert identity is not None
        (here / "device" / "worker_1.pid").write_text(identity.to_line())
        assert main(["clean", "--yes"]) == 73
        assert f"worker 1 (pid {worker.pid})" in capsys.readouterr().err
        worker.kill()
    (here / "device" / "worker_1.pid").unlink()
    with DirectoryLock(here / "recovery", "scheduler"):
        assert main(["clean", "--yes"]) == 73
    room = MemoryRoom(memory, JOB, 0)
    assert main(["clean", "--yes"]) == 73
    assert "the job in this folder is still running: the process that holds" in capsys.readouterr().err
    room.close()
    assert everything(here, memory) == before


def test_copied_folder_frees_nothing(here: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = here.parent / "copy"
    (copy / "device").mkdir(parents=True, mode=0o700)
    (copy / "device" / "start.json").write_bytes((here / "device" / "start.json").read_bytes())
    (copy / "device" / "start.json").chmod(0o600)
    monkeypatch.chdir(copy)
    before = everything(here, memory)
    assert main(["clean", "--yes"]) == 80
    assert everything(here, memory) == before


def test_memory_use_of_a_job_is_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert "its checkpoints take " in capsys.readouterr().out
    assert clean.memory_line("no-such-job") == ""


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB"), (5 << 50, "5120.0 TiB")],
)
def test_sizes_in_words(size_bytes: int, text: str) -> None:
    assert clean.spoken_size(size_bytes) == text
