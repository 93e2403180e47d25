"""``samebits ps`` and ``samebits logs``: their rows and lines."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from samebits.__main__ import main
from samebits.commands import logs
from samebits.commands.ps import rows_of
from samebits.launcher.worker_logs import LogLines
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.views import process, view, worker


def test_each_process_has_a_row_with_its_own_slot() -> None:
    me = ProcessIdentity.current()
    seen = view(
        workers=(replace(worker(0), pid=me.pid, started_at=me.started_at), worker(1)),
        spares=(worker(2, slot=None),),
        max_world_size=2,
    )
    started = {"scheduler": process(99), "worker_0": me, "worker_1": process(777), "worker_2": process(102)}
    rows = [(row["node"], row["slot"], row["role"], row["state"]) for row in rows_of(started, seen, 2)]
    assert rows == [
        (None, None, "scheduler", "gone"),
        ("0", 0, "worker", "runs"),
        ("1", None, "worker", "gone"),  # its seat was another process's
        ("2", None, "spare", "gone"),
    ]
    by_number = rows_of(started, None, 2)
    assert [row["role"] for row in by_number] == ["scheduler", "worker", "worker", "spare"]
    assert [row["slot"] for row in by_number] == [None] * 4


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a log folder with two logs, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOG_DIR", str(tmp_path))
    monkeypatch.setenv("WORKER_NUM", "2")
    monkeypatch.setenv("SCHED_PORT", "1")
    for name in ("worker_0", "worker_1"):
        (tmp_path / f"{name}.log").write_text("".join(f"{name} line {number}\n" for number in range(30)))
    return tmp_path


def test_ps_lists_the_processes_started_here(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "worker_1.pid").write_text(ProcessIdentity.current().to_line())
    assert main(["ps"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["node", "slot", "role", "pid", "state"]
    assert row.split() == ["1", "–", "worker", str(ProcessIdentity.current().pid), "runs"]


def test_ends_of_all_logs_with_names_or_of_one_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "-n", "1"]) == 0
    assert capsys.readouterr().out == "[worker_0]  worker_0 line 29\n[worker_1]  worker_1 line 29\n"
    assert main(["logs", "1", "-n", "2"]) == 0
    assert capsys.readouterr().out == "worker_1 line 28\nworker_1 line 29\n"
    assert main(["logs", "scheduler"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["logs", "7"]) == 80
    assert "no log of worker '7' here: expected scheduler, or one of 0, 1" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_planted_log_is_neither_shown_nor_waited_for(here: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    log, secret = here / "worker_0.log", here / "secret"
    secret.write_text("a secret\n")
    log.unlink()
    if kind == "link":
        log.symlink_to(secret)
    else:
        os.mkfifo(log)
    assert main(["logs", "0"]) != 0
    said = capsys.readouterr()
    assert "a secret" not in said.out
    assert "not a plain file" in said.err


def test_log_of_a_replaced_worker_with_its_error_is_shown(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs.job_spec, "nodes_of", lambda *_: ("0.10", "1"))
    (here / "worker_0.2.log").write_text("an error\n")
    (here / "worker_0.10.log").touch()
    (here / "worker_2.log").write_text("of a line that is gone\n")
    assert main(["logs", "-n", "1"]) == 0
    assert capsys.readouterr().out == "[worker_1]    worker_1 line 29\n[worker_0.2]  an error\n"
    (here / "worker_0.10.log").write_text("the next error\n")
    for asked in ("0", "worker_0"):
        assert main(["logs", asked, "-n", "1"]) == 0
        said = capsys.readouterr().out
        lines = ["[worker_0]    worker_0 line 29", "[worker_0.2]  an error", "[worker_0.10] the next error"]
        assert said.splitlines() == lines
    assert main(["logs", "-n", "1"]) == 0
    assert capsys.readouterr().out == "[worker_0.10] the next error\n[worker_1]    worker_1 line 29\n"
    assert main(["logs", "0.2"]) == 0
    assert capsys.readouterr().out == "an error\n"


def test_follow_shows_new_lines_only(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    news = iter(("one\ntw", "o\nthree\n"))

    def write(_: float) -> None:
        piece = next(news, None)
        if piece is None:
            raise KeyboardInterrupt
        with (here / "worker_0.log").open("a") as file:
            file.write(piece)

    monkeypatch.setattr(logs.time, "sleep", write)
    assert main(["logs", "-f", "0", "-n", "0"]) == 130
    assert shown.getvalue().splitlines() == ["one", "two", "three"]


def test_line_is_printed_once_complete_and_a_truncated_log_is_read_again(here: Path) -> None:
    lines = LogLines(here, ["worker_0", "worker_9"])
    assert list(lines.take()) == []
    with (here / "worker_0.log").open("ab") as file:
        file.write(b"half")
        file.flush()
        assert list(lines.take()) == []
        file.write(b" a line\n\xff\n")
        file.flush()
    (here / "worker_9.log").write_text("late\n")
    assert list(lines.take()) == [("worker_0", "half a line"), ("worker_0", "\ufffd"), ("worker_9", "late")]
    (here / "worker_0.log").write_text("anew\n")
    assert list(lines.take()) == [("worker_0", "anew")]
    with (here / "worker_0.log").open("ab") as file:
        file.write(b"x" * 3_000_000)
    got = [line for _ in range(4) for _, line in lines.take()]
    assert len("".join(got)) == 3_000_000, "a line without an end is printed in pieces, never held back"
