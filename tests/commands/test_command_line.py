"""The command line: subcommands, errors with exit codes, and the output of the small commands."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from samebits import __main__ as command_line
from samebits import __version__, config
from samebits.__main__ import RENAMED, SUBCOMMANDS, Subcommand, main
from samebits.account.event_log import line_of
from samebits.account.events import EventKind, JobEvent
from samebits.account.job_view import JobView, PresenceState
from samebits.commands import doctor
from samebits.commands.run import prepare
from samebits.commands.run.options import parse
from samebits.commands.scale import view_of
from samebits.core import records
from samebits.core.end_kinds import EndKind
from samebits.core.messages import Process, RoundId
from samebits.core.point import Point
from samebits.errors import SameBitsError, UsageError
from samebits.launcher import job_spec
from samebits.service.status import stored_view
from samebits.store.journal import Journal
from samebits.store.owner import claim_folder
from samebits.store.process_identity import ProcessIdentity, host_id
from samebits.store.text_log import EventLog
from tests.launcher.views import JOB
from tests.store.disk_faults import closed
from tests.system.processes import free_port

HERE = host_id()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder of the test, with no job setting in the environment but a free port."""
    for name in config.kept_environment():
        if name not in ("PATH", "PYTHONPATH"):
            monkeypatch.delenv(name)
    for name in ("ROLE", "NODE_ID", "MS_ROLE", "MS_NODE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SCHED_PORT", str(free_port()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_journal(folder: Path, *more: records.Record) -> None:
    """Write the journal of a job of two workers that trained from step 50; ``more`` follows."""
    history: list[records.Record] = [
        records.JobCreated(JOB, "train.py", (("WORKER_NUM", "2"),)),
        records.TermStarted(1, "boot", 1.0),
        records.SeatGranted("0", 0, 1, "session-0", Process(HERE, 2**22 + 1, 5, "cpu")),
        records.SeatGranted("1", 1, 1, "session-1", Process(HERE, 2**22 + 2, 5, "cpu")),
        records.SeatLost("1", 1, 2.0, "its connection closed"),
        *more,
    ]
    with Journal.open(folder)[0] as journal:
        journal.append([records.SCHEMA.pack(record) for record in history])


FINISHED = records.JobFinished()
STOPPED = records.JobInterrupted(EndKind.STOPPED, 120, "stopped by Ctrl-C")


@pytest.mark.parametrize("name", [subcommand.name for subcommand in SUBCOMMANDS])
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: samebits {name}" in capsys.readouterr().out


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("word", ["--help", "explain variables"])
def test_closed_pipe_is_no_error(word: str, unbuffered: str) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    said = run_command(word, writable, unbuffered)
    os.close(writable)
    assert (said.returncode, said.stderr) == (128 + signal.SIGPIPE, "")


def run_command(word: str, output: int, unbuffered: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "samebits", *word.split()]
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False, env=environment)


@pytest.mark.parametrize("command", ["status", "ps", "history", "steps"])
@pytest.mark.parametrize("option", [(), ("--json",)])
def test_folder_without_a_job_is_one_error_with_and_without_json(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, option: tuple[str, ...]
) -> None:
    assert main([command, *option]) == UsageError.exit_code
    output, error = capsys.readouterr()
    assert output == "" and error.startswith("samebits: ") and "Fix: " in error


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"samebits {__version__}\n", "")


def test_ctrl_c_is_no_error_either(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(words: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "SUBCOMMANDS", (Subcommand("slow", "", interrupted),))
    assert main(["slow"]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


def test_table_of_subcommands_is_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for one in SUBCOMMANDS:
        assert (f"  {one.name} " in text and one.summary in text) == one.is_shown
    assert main([]) == 2
    assert main(["fly"]) == 2
    assert "there is no subcommand 'fly'\nusage: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"), [("stauts", "status"), ("statu", "status"), ("recovr", "recover"), ("explian", "explain")]
)
def test_misspelt_subcommand_gets_a_suggestion(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    said = f"samebits: there is no subcommand {typed!r}: did you mean {meant}? Fix: samebits --help lists all\n"
    assert capsys.readouterr().err == said


def test_each_problem_is_one_sentence_with_its_exit_code(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCHED_PORT", "99999")
    monkeypatch.setenv("WORKER_NUM", "0")
    assert main(["scheduler"]) == 64
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("samebits: ") for line in lines)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"ROLE": "worker", "WORKER_NUM": "2"}, "ROLE=worker: this command is the scheduler's"),
        ({}, "WORKER_NUM is not set"),
    ],
)
def test_scheduler_command_sets_its_role(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    text: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["scheduler"]) == 64
    assert text in capsys.readouterr().err
    assert not (here / "recovery").exists()


def test_old_variable_name_is_refused_with_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    for earlier, now in RENAMED.items():
        assert main([earlier, "2"]) == 2
        assert f"Fix: samebits {now} 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", [entry.name for entry in SUBCOMMANDS])
def test_words_that_a_subcommand_does_not_know_end_it_with_2(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--no-such-option"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ")


@pytest.mark.parametrize(
    ("words", "expected", "told"),
    [
        (["run", "--check", "missing.py"], 80, "there is no script 'missing.py'"),
        (["run", "-n", "2", "."], 80, "'.' is a folder: expected a script"),
        (["drill", "--kills", "0", "--", "train.py"], 2, "expected a whole number from 1"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_made(
    words: list[str],
    expected: int,
    told: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    before = sorted(here.iterdir())
    try:
        status = main(words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert (status, told in capsys.readouterr().err) == (expected, True)
    assert sorted(here.iterdir()) == before


def test_a_folder_in_which_nothing_can_be_made_is_refused_before_anything_is_started(
    scheduler_role: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (scheduler_role / "train.py").touch()
    monkeypatch.setenv("RECOVERY_PATH", "/proc/recovery")
    assert main(["run", "--dry-run", "train.py"]) == 64
    assert "RECOVERY_PATH: /proc cannot be written (" in capsys.readouterr().err


def test_a_job_that_only_an_address_names_is_not_followed_if_nothing_answers(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCHED_PORT", str(free_port()))
    monkeypatch.setattr("samebits.commands.follow.ANSWER_TIMEOUT_S", 0.1)
    assert main(["follow"]) == 80
    assert f"no job was started in {here}, and no scheduler answers at" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["stop", "follow", "history --follow", "logs -f"])
def test_folder_without_a_job_does_not_show_the_job_on_the_default_port(
    word: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SCHED_PORT", raising=False)
    monkeypatch.setattr(
        "samebits.commands.stop.is_listening", lambda settings: pytest.fail("asked a stranger's scheduler")
    )
    assert main(word.split()) == 80
    assert f"no job was started in {here}" in capsys.readouterr().err


def test_single_exit_code_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "94"]) == 0
    assert "PointsLost" in capsys.readouterr().out
    assert main(["explain", "3"]) == 80
    assert "is not a SameBits exit code" in capsys.readouterr().err
    assert json.loads(explained("variables", capsys))[0]["name"] == "ROLE"


def test_single_variable_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "node_timeout"]) == 0
    assert "NODE_TIMEOUT  default: 5; value: seconds" in capsys.readouterr().out
    assert [one["name"] for one in json.loads(explained("NODE_TIMEOUT", capsys))] == ["NODE_TIMEOUT"]


def explained(topic: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["explain", topic, "--json"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["explain", "variables"], ["explain", "variables", "--zh"]])
def test_variables_match_the_documented_table(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    expected = config.environment_table_zh() if "--zh" in arguments else config.environment_table()
    assert capsys.readouterr().out == expected + "\n"


def test_status_from_the_journal_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 80
    write_journal(here / "recovery", STOPPED)
    assert main(["status"]) == 0
    text = capsys.readouterr().out
    assert f"job {JOB} (train.py)" in text
    assert "was stopped · step 120 · 0/2 workers" in text
    assert "this is what the journal in" in text
    assert "lost" in text
    assert "its connection closed" in text
    assert main(["status", "--json"]) == 0
    view = msgspec.convert(json.loads(capsys.readouterr().out), JobView)
    assert (view.from_journal, view.step, view.world_size) == (True, 120, 2)
    with contextlib.closing(EventLog(here / "recovery", lambda lines: "", print)) as kept:
        kept.append([line_of(JobEvent(EventKind.LEFT, 9.0, 1, 1, 122, "0", "left on purpose"))])
    assert main(["status"]) == 0
    assert "was stopped · step 122 ·" in capsys.readouterr().out, "the end summary names the same step"


@pytest.mark.parametrize("words", [["ps"], ["logs"], ["logs", "scheduler"]])
def test_folder_without_a_job_shows_no_job(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 80
    said = capsys.readouterr()
    assert not said.out and str(here / "device") in said.err
    assert "Fix: change to the folder the job was started in" in said.err


def test_stop_without_a_running_job(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop"]) == 80
    assert "no job is running here" in capsys.readouterr().err


def test_commands_on_a_finished_job_say_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_journal(here / "recovery", STOPPED)
    assert main(["stop"]) == 80
    said = capsys.readouterr().err
    assert f"nothing to stop: job {JOB} (train.py) is unfinished at step 120, but no process of it runs here" in said
    assert "Fix: `" in said and "recover" in said.partition("Fix: ")[2]
    shutil.rmtree(here / "recovery")
    write_journal(here / "recovery", FINISHED)
    assert main(["stop"]) == 0
    assert f"nothing to stop: job {JOB} (train.py) is finished at step" in capsys.readouterr().out
    with pytest.raises(UsageError, match=rf"job {JOB} \(train\.py\) is finished at step .*, and has no workers left"):
        view_of(replace(job_spec.settings_here(), enable_recovery=True))


def test_end_of_the_last_term_does_not_apply_to_an_earlier_one(tmp_path: Path) -> None:
    assert stored_view(tmp_path) is None
    write_journal(tmp_path, STOPPED, records.TermStarted(2, "boot", 3.0))
    seen = stored_view(tmp_path)
    assert seen is not None
    assert (seen.ended, seen.term, len(seen.interruptions)) == (None, 2, 1)
    assert [worker.presence for worker in seen.workers] == [PresenceState.ALIVE, PresenceState.LOST]
    with Journal.open(tmp_path)[0] as journal:
        journal.append([records.SCHEMA.pack(record) for record in (records.TrainingFinished(Point(600, 3)),)])
        journal.append([records.SCHEMA.pack(record) for record in (records.JobFinished(),)])
    seen = stored_view(tmp_path)
    assert seen is not None
    assert (seen.job_finished, seen.training_finished, seen.step, seen.phase) == (True, True, 600, "finished")


def write_elastic_journal(folder: Path) -> None:
    """Write a journal of four workers: a spare replaced 1, 2 was given up, 4 is about to join; a spare is lost."""
    process = Process(HERE, 2**22 + 9, 5, "cpu")
    members = (("0", 1), ("6", 1), ("3", 1))
    settings = (("WORKER_NUM", "4"), ("MIN_WORKER_NUM", "2"), ("MAX_WORKER_NUM", "6"), ("SPARE_NUM", "2"))
    history: list[records.Record] = [
        records.JobCreated(JOB, "train.py", settings),
        records.TermStarted(1, "boot", 1.0),
        *(records.SeatGranted(str(node), node, 1, f"session-{node}", process) for node in range(4)),
        records.SpareAdmitted("6", 1, "session-6", process),
        records.SpareAdmitted("7", 1, "session-7", process),
        records.SeatLost("1", 1, 2.0, "its connection closed"),
        records.SeatRetired("1", 1),
        records.SlotGiven("6", 1),
        records.SeatLeft("2", 1),
        records.SeatRetired("2", 2),
        records.GenerationCommitted(2, RoundId(1, 2), members, Point(50, 1), (), (), (0, 1, 3)),
        records.SeatGranted("4", 4, 1, "session-4", process),
        records.SeatLost("7", 1, 3.0, "silent"),
    ]
    with Journal.open(folder)[0] as journal:
        journal.append([records.SCHEMA.pack(record) for record in history])


def test_status_of_an_elastic_world_with_spares(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_elastic_journal(here / "recovery")
    assert main(["status"]) == 0
    text = capsys.readouterr().out
    assert "no scheduler · step 50 · 0/3 workers (4 wanted), 1 joining · term 1 · generation 2" in text
    rows = [line.split()[:3] for line in text[text.index("slot ") :].splitlines()[1:]]
    assert rows == [
        ["0", "0", "gone"],
        ["1", "6", "gone"],
        ["3", "3", "gone"],
        ["4", "4", "gone"],
        ["spare", "7", "lost"],
        ["–", "1", "lost"],
        ["–", "2", "left"],
    ]
    assert main(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["world_size"], told["wanted_size"], told["alive"], told["joining"], told["spares_alive"]) == (
        (3, 4, 0, 1, 0)
    )
    seen = stored_view(here / "recovery")
    assert seen is not None
    assert [worker.node for worker in seen.workers if worker.is_joining] == ["4"]
    assert seen.is_spare("7")
    assert not seen.is_spare("6"), "it has a slot now"
    assert seen.is_spare("8"), "by its number"


# ---- prepare


def prepare_here(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Prepare a start as ``run`` does; return the error and its exit status as the command line shows them."""
    status, text = 0, ""
    try:
        request = parse(["train.py", "--help", "--", "x"], config.whole_environment())
        ready = prepare.read_start(request)
        ready.listener.close()
        prepare.prepare(ready, fresh="--fresh" in options)
    except SameBitsError as error:
        status, text = error.exit_code, str(error)
    captured = capsys.readouterr()
    return status, captured.out + captured.err + text


@pytest.fixture
def scheduler_role(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (here / "train.py").touch()
    monkeypatch.setenv("ROLE", "scheduler")
    monkeypatch.setenv("WORKER_NUM", "2")
    monkeypatch.setenv("ENABLE_RECOVERY", "1")
    return here


def test_prepare_saves_the_job_spec(scheduler_role: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_here(capsys) == (0, "")
    kept = json.loads((scheduler_role / "device" / "start.json").read_text())
    assert (kept["script"], kept["args"]) == ("train.py", ["--help", "--", "x"])
    assert not (scheduler_role / "recovery").exists()  # the scheduler makes it


def test_start_removes_the_pid_files_of_dead_workers(scheduler_role: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_dir = scheduler_role / "device"
    log_dir.mkdir(mode=0o700)
    me = ProcessIdentity.current()
    pid_was_reused = replace(me, started_at=me.started_at - 1)
    (log_dir / "worker_1.1.pid").write_text(pid_was_reused.to_line())
    assert prepare_here(capsys) == (0, "")
    assert not list(log_dir.glob("worker_*.pid"))


def test_prepare_refuses_an_unfinished_job_with_its_newest_step(
    scheduler_role: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_journal(scheduler_role / "recovery", STOPPED)
    (scheduler_role / "ckpt_of_rank" / "1" / "step_0000000300_gen_000002").mkdir(parents=True)
    claim_folder(scheduler_role / "ckpt_of_rank" / "1", JOB, "train.py")
    status, text = prepare_here(capsys)
    assert status == 71
    assert f"{JOB} (train.py), unfinished at step 300 with 2 workers" in text
    status, text = prepare_here(capsys, "--fresh")
    assert status == 0
    assert sorted(entry.name for entry in scheduler_role.iterdir()) == [
        "ckpt_of_rank.1a2b3c4d.aside",
        "device",
        "recovery.1a2b3c4d.aside",
        "train.py",
    ]


def test_interrupted_move_is_completed(scheduler_role: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_journal(scheduler_role / "recovery.1a2b3c4d.aside", records.JobFinished())
    claim_folder(scheduler_role / "ckpt_of_rank" / "0", JOB, "train.py")
    assert prepare_here(capsys)[0] == 0
    assert (scheduler_role / "ckpt_of_rank.1a2b3c4d.aside" / "0" / "owner.json").exists()
    assert not (scheduler_role / "ckpt_of_rank").exists()


def test_points_below_a_prefix_belong_to_the_job_as_well(
    scheduler_role: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim_folder(scheduler_role / "ckpt_of_rank" / "big" / "0", JOB, "train.py")
    (scheduler_role / "ckpt_of_rank" / "big" / "0" / "step_0000000070_gen_000001").mkdir()
    status, text = prepare_here(capsys)
    assert status == 72
    assert JOB in text
    write_journal(scheduler_role / "recovery.1a2b3c4d.aside", records.JobFinished())
    assert prepare_here(capsys)[0] == 0
    assert (scheduler_role / "ckpt_of_rank.1a2b3c4d.aside" / "big" / "0" / "owner.json").exists()


def test_names_of_moved_folders_are_numbered_if_taken(scheduler_role: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (scheduler_role / "recovery.1a2b3c4d.aside").mkdir()
    write_journal(scheduler_role / "recovery", records.JobFinished())
    assert prepare_here(capsys)[0] == 0
    assert (scheduler_role / "recovery.1a2b3c4d.2.aside" / "journal").exists()


def test_damaged_journal_is_kept_and_moved_only_on_request(
    scheduler_role: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (scheduler_role / "recovery").mkdir()
    (scheduler_role / "recovery" / "journal").write_bytes(b"no journal of ours" * 20)
    status, text = prepare_here(capsys)
    assert status == 71
    assert "samebits run --fresh" in text
    assert prepare_here(capsys, "--fresh")[0] == 0
    assert (scheduler_role / "recovery.unknown.aside" / "journal").read_bytes() == b"no journal of ours" * 20


def test_worker_running_without_its_scheduler_blocks_a_start(
    scheduler_role: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    me = ProcessIdentity.current()
    write_journal(
        scheduler_role / "recovery", records.SeatGranted("1", 1, 2, "s", Process(HERE, me.pid, me.started_at, "cpu"))
    )
    for options in ((), ("--fresh",)):
        status, text = prepare_here(capsys, *options)
        assert status == 73
        assert f"worker 1 (pid {me.pid})" in text


def test_log_folder_with_running_processes_names_both_jobs(
    scheduler_role: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JOB_NAME", "first")
    assert prepare_here(capsys)[0] == 0
    (scheduler_role / "device" / "worker_0.pid").write_text(ProcessIdentity.current().to_line())
    monkeypatch.setenv("JOB_NAME", "second")
    monkeypatch.setenv("RECOVERY_PATH", "other")
    status, text = prepare_here(capsys, "--fresh")
    assert status == 72
    assert all(word in text for word in ("'first'", "'second'", "/recovery,", "/other"))


def test_two_log_folders_of_one_folder_are_distinguished(
    scheduler_role: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare_here(capsys)[0] == 0
    monkeypatch.setenv("LOG_DIR", "logs")
    monkeypatch.setenv("RECOVERY_PATH", "other")
    status, text = prepare_here(capsys)
    assert status == 0
    assert re.search(rf"type LOG_DIR={scheduler_role / 'logs'} \S*samebits recover\n", text)


def test_run_without_a_script_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--fresh"])
    assert "which script?" in capsys.readouterr().err


# ---- doctor


def test_doctor_approves_of_this_machine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for what in (
        "python",
        "torch",
        "import samebits",
        "setsid",
        "flock",
        "RECOVERY_PATH",
        "SCHED_PORT",
        "open to",
        "open files",
    ):
        assert f"ok     {what}" in text
    assert "wrong" not in text


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "this host's users, at 127.0.0.1: the scheduler accepts every process (no CLUSTER_SECRET); gloo's ports"),
        (
            {"CLUSTER_SECRET": "s" * 32},
            "this host's users, at 127.0.0.1: the scheduler accepts every process with the secret; gloo",
        ),
        (
            {"SCHED_HOST": "192.0.2.1", "CLUSTER_INSECURE": "1"},
            "anyone who reaches this host's network, at 192.0.2.1: the scheduler accepts every process (no",
        ),
    ],
    ids=["loopback", "secret", "network"],
)
def test_doctor_reports_the_exposure_of_the_jobs_ports(environment: dict[str, str], said: str) -> None:
    settings, _ = config.read({"WORKER_NUM": "2", **environment}, role_required=False)
    finding = doctor.reach(settings)
    assert finding.found.startswith(said)
    assert not finding.fix


def test_doctor_reports_problems_with_their_fix(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "file").write_text("")
    (here / "samebits.py").write_text("")
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setenv("RECOVERY_PATH", str(here / "file" / "recovery"))
    monkeypatch.setenv("WORKER_NUM", "100000")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        monkeypatch.setenv("SCHED_PORT", str(holder.getsockname()[1]))
        monkeypatch.setattr(doctor, "ANSWER_TIMEOUT_S", 0.1)
        assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "wrong  RECOVERY_PATH" in text
    assert "wrong  SCHED_PORT" in text
    assert f"move {here / 'samebits.py'} away" in text


def test_doctor_names_an_unreadable_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "others").mkdir()
    monkeypatch.setenv("CHECKPOINT_PATH", str(here / "others" / "ckpt"))
    with closed(here / "others"):
        assert main(["doctor"]) == 1
    found = f"CHECKPOINT_PATH: {here / 'others' / 'ckpt'} cannot be looked at (Permission denied)"
    assert f"wrong  {found}\n       Fix: export CHECKPOINT_PATH=<a folder of yours>" in capsys.readouterr().out


def test_doctor_and_prepare_name_the_variable_of_the_listening_address(
    scheduler_role: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCHED_BIND", "192.0.2.1")  # TEST-NET-1 (RFC 5737): belongs to no host
    monkeypatch.setenv("CLUSTER_INSECURE", "1")
    monkeypatch.setattr(doctor, "ANSWER_TIMEOUT_S", 0.1)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert ": SCHED_BIND=192.0.2.1 resolves to 192.0.2.1, and none of these" in out
    assert "Fix: start the scheduler on that host, or set SCHED_BIND" in out
    status, text = prepare_here(capsys)
    assert status == 75
    assert "SCHED_BIND=192.0.2.1 resolves to 192.0.2.1, and none of these" in text


def test_doctor_shows_every_wrong_setting(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCHED_PORT", "0")
    monkeypatch.setenv("NODE_TIMEOUT", "soon")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.count("wrong  environment") == 2


def test_exit_codes_as_json_and_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "exit-codes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["code"]: row["again"] for row in rows if row["code"] in (0, 64, 77)} == {0: "–", 64: "no", 77: "yes"}
    assert main(["explain", "exit-codes"]) == 0
    text = capsys.readouterr().out
    assert all(f"{row['code']:>4}  {row['name']}" in text for row in rows)
    for option, word in (("--markdown", "| code | name |"), ("--zh", "| 退出码 |")):
        assert main(["explain", "exit-codes", option]) == 0
        assert capsys.readouterr().out.startswith(word)
