"""``samebits status``: the lines above the table of workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from samebits import config
from samebits.account.events import EventKind, JobEvent
from samebits.account.history import line
from samebits.account.job_view import JOURNAL, Interruption, PresenceState
from samebits.commands.status import find, main, table
from samebits.core.end_kinds import EndKind
from samebits.core.messages import Activity
from samebits.dashboard.watching import _job
from samebits.errors import SchedulerUnreachableError, UsageError
from samebits.launcher.job_outcome import JobOutcome
from samebits.service import status
from samebits.store.process_identity import ProcessIdentity, host_id
from tests.core.house import training_house
from tests.core.test_core_shard_groups import form, lose, return_as_replacement, training
from tests.launcher.views import view, worker
from tests.system.processes import free_port

FULL = "host node-a: the disk of /data/ckpt is 93 % full (limit 90 %, HEALTH=disk)"


def test_unhealthy_host_is_named_above_the_workers() -> None:
    settings, _ = config.read({"WORKER_NUM": "3", "ROLE": "worker", "NODE_ID": "0"})
    lines = table(view(ailments=(FULL,)), settings).splitlines()
    assert FULL in lines[: lines.index(next(line for line in lines if line.startswith("slot")))]
    assert FULL not in table(view(), settings)


def test_workers_report_is_shown_once_by_name_without_resource_use() -> None:
    settings, _ = config.read({"WORKER_NUM": "3", "ROLE": "worker", "NODE_ID": "0"})
    told = [{"cpu": 0.5, "pace": 2.5}, {"queue": 12000.0, "memory": 0.5}, {"queue": 70.0}]
    workers = tuple(replace(worker(slot), figures=figures) for slot, figures in enumerate(told))
    lines = table(view(workers=workers), settings).splitlines()
    assert "reported: pace 2.5 (worker 0), queue 12,000 (worker 1)" in lines
    gone = (workers[0], replace(workers[1], presence=PresenceState.LOST), workers[2])
    assert "reported: pace 2.5 (worker 0), queue 70 (worker 2)" in table(view(workers=gone), settings)
    assert "reported" not in table(view(), settings)


@pytest.mark.parametrize("lost", [2, 3])
def test_worker_beside_a_lost_one_says_what_its_shard_group_waits_for(lost: int) -> None:
    settings, _ = config.read({"WORKER_NUM": "4", "ROLE": "worker", "NODE_ID": "0"})
    house, beside = training(), 5 - lost

    def row(slot: int = beside) -> str:
        lines = table(status.snapshot(house.core, whole=True), settings).splitlines()
        return next(line for line in lines if line.startswith(f"{slot} "))

    assert "joins" not in row()
    lose(house, str(lost))
    form(house, {0, 1, beside}, live=(5, 1))
    assert row().endswith(f"waiting, joins with its shard group when slot {lost} is filled")
    return_as_replacement(house, f"{lost}.1", Activity.SEATED)
    assert row().endswith(f"waiting, joins with its shard group when worker {lost}.1 is ready")
    assert row(lost).endswith("seated, joins at the next commit")
    house.beat(f"{lost}.1", Activity.WAITING, generation=0)
    assert row().endswith("waiting, joins at the next commit")
    assert "joins" not in row(0)


def test_plain_job_shows_no_step_because_only_its_script_counts_them() -> None:
    named = {"WORKER_NUM": "3", "ROLE": "worker", "NODE_ID": "0"}
    plain, ported = (table(view(), config.read({**named, "PLAIN": text})[0]) for text in "10")
    assert " · step " in ported.splitlines()[1] and " · step " not in plain.splitlines()[1]
    assert [line.split()[3] for line in plain.splitlines() if line.startswith(tuple("012"))] == ["–"] * 3


def test_schedulers_address_is_shown_if_it_may_move() -> None:
    settings, _ = config.read(
        {"WORKER_NUM": "3", "ROLE": "worker", "NODE_ID": "0", "SCHED_HOST": "10.0.0.1,10.0.0.2:9000"}
    )
    assert " · scheduler at 10.0.0.2:9000" in table(view(address="10.0.0.2:9000"), settings).splitlines()[1]
    assert "scheduler at" not in table(view(), settings)
    silent = table(view(source=JOURNAL), settings)
    assert "no scheduler answers at 10.0.0.1:8118 or 10.0.0.2:9000 (SCHED_HOST)" in silent


def test_status_of_a_killed_job_asks_the_kernel_which_processes_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A journal knows seats. Of three workers one runs, one was killed, and one is on another host."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCHED_PORT", str(free_port()))
    house = training_house(3)
    me = ProcessIdentity.current()
    here = {"host": host_id(), "pid": me.pid}
    first, second, third = status.snapshot(house.core, whole=True).workers
    second = replace(second, **here, started_at=me.started_at - 1)  # the pid is another process's by now
    workers = (replace(first, **here, started_at=me.started_at), second, third)
    content = replace(view(source=JOURNAL, phase="no scheduler", world_size=3), workers=workers)
    before = [node.presence for node in content.workers]
    monkeypatch.setattr("samebits.commands.status.find", lambda settings: content)
    assert main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert before == [PresenceState.ALIVE] * 3 and [node["state"] for node in told["workers"]] == [
        "alive",
        "gone",
        "unknown",
    ]
    assert told["alive"] == 1
    assert main([]) == 0
    said = capsys.readouterr().out
    assert " 1/3 workers " in said and "1 worker of it still runs, 1 is gone. Fix: `" in said and "recover" in said
    _, _, rows = said.partition("\nslot ")
    assert [line.split()[2] for line in rows.splitlines()[1:4]] == ["alive", "gone", "unknown"]
    content = replace(content, workers=(second,))
    assert main([]) == 0
    assert "no process of the job runs any more. Fix: `" in capsys.readouterr().out


def test_host_without_a_journal_names_its_live_workers_if_the_scheduler_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"WORKER_NUM": "3", "RECOVERY_PATH": str(tmp_path / "recovery"), "LOG_DIR": str(tmp_path)}
    settings, _ = config.read({**named, "ENABLE_RECOVERY": "1", "SCHED_PORT": "8119"}, role_required=False)
    monkeypatch.setattr("samebits.commands.status.ask_once", lambda settings, timeout_s: None)
    me = ProcessIdentity.current()
    (tmp_path / "worker_1.pid").write_text(me.to_line())
    (tmp_path / "worker_2.pid").write_text(ProcessIdentity(me.pid, me.started_at - 1).to_line())
    with pytest.raises(SchedulerUnreachableError) as found:
        find(settings)
    said = str(found.value)
    assert said.startswith("the scheduler at 127.0.0.1, port 8119 (SCHED_HOST, SCHED_PORT) does not answer")
    assert f"On this host, worker 1 ({me}) still runs." in said and "worker 2" not in said
    (tmp_path / "worker_1.pid").unlink()
    with pytest.raises(UsageError, match="there is no journal"):
        find(settings)


def test_superseded_scheduler_according_to_the_journal_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = config.read({"RECOVERY_PATH": str(tmp_path), "ENABLE_RECOVERY": "1"}, role_required=False)
    told = view(term=1)
    monkeypatch.setattr("samebits.commands.status.ask_once", lambda settings, timeout_s: told)
    for stored, is_believed in ((view(term=2), True), (view(term=1), False), (view(term=1, job="job-2"), True)):
        monkeypatch.setattr("samebits.commands.status.stored_view", lambda path, stored=stored: stored)
        assert find(settings) is (stored if is_believed else told)


def test_folder_without_a_job_says_whose_status_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SCHED_HOST", "SCHED_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("samebits.commands.status.find", lambda settings: view())
    said = f"no job was started in {tmp_path}; showing the job whose scheduler answers at 127.0.0.1"
    assert main([]) == 0 and capsys.readouterr().out.startswith(said)
    monkeypatch.setenv("SCHED_PORT", "8118")
    assert main([]) == 0 and said not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        (EndKind.SCRIPT_FAILED, 82, "failed"),
        (EndKind.SCRIPT_FAILED, 3, "was ended by its script"),
        (EndKind.UNEQUAL, 0, "failed"),
        (EndKind.STOPPED, 0, "was stopped"),
    ],
)
def test_all_readers_use_the_same_words_for_a_jobs_end(kind: EndKind, status: int, words: str) -> None:
    """The follower, ``status``, ``history`` and the dashboard."""
    settings, _ = config.read({"WORKER_NUM": "3", "ROLE": "worker", "NODE_ID": "0"})
    cause = "worker 1: train.py:3: it went wrong. Fix: correct line 3"
    ended = Interruption(kind.label, 9, cause, status)
    told = view(source=JOURNAL, ended=ended, first_cause=cause, phase="interrupted", workers=(), spares=())
    assert JobOutcome.unfinished(kind, cause, status).words == words
    lines = table(told, settings).splitlines()
    assert lines[1].startswith(f"{words} · step ") and lines[-1] == cause
    assert "Fix" not in lines[2] + lines[3] and lines[3].endswith("once the error below is corrected")
    shown = _job(told)
    assert shown is not None and shown["ended"] == {"words": words, "cause": cause}
    event = JobEvent(EventKind.INTERRUPTED, 1.0, text=cause, more={"end": kind.label, "status": status})
    assert line(event, step=9).endswith(f"  the job {words}: {cause}")
