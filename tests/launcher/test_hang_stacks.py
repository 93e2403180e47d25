"""Stalls: which workers a follower examines, what it prints and saves, and which it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from samebits import config
from samebits.account.job_view import JOURNAL, JobView, PresenceState, StandstillView
from samebits.config import Settings
from samebits.core.hangs import Doing, ProcessState
from samebits.launcher.hang_stacks import FOLDER, LEAST_PATIENCE_S, LEAVING_S, MOST_BYTES, MOST_FILES, HangStacks
from samebits.service.stacks import NoStackReason, StackDump
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.views import process, view, worker

STALL = StandstillView(40, ("2",), (), ("0", "1"))
HERE = {str(node): process(100 + node) for node in range(3)}


def dump(line: int) -> str:
    folder = Path.cwd()
    return (
        "Thread 0x00007f (most recent call first):\n"
        '  File "/usr/lib/python3.12/threading.py", line 359 in wait\n\n'
        "Current thread 0x00007e (most recent call first):\n"
        f'  File "{folder}/train.py", line {line} in train\n  File "{folder}/train.py", line 90 in <module>\n'
    )


class Host:
    """The observable state of one host's processes; examinations are counted."""

    def __init__(self) -> None:
        self.answers: dict[int, StackDump] = {}
        self.sights: dict[int, ProcessState | None] = {}
        self.asked: list[int] = []

    def ask(self, identity: ProcessIdentity) -> StackDump:
        self.asked.append(identity.pid)
        return self.answers.get(identity.pid, StackDump(dump(46)))

    def see(self, identity: ProcessIdentity) -> ProcessState | None:
        return self.sights.get(identity.pid)


@pytest.fixture
def host() -> Host:
    return Host()


def settings_in(folder: Path, **environ: str) -> Settings:
    return config.read({"WORKER_NUM": "3", "LOG_DIR": str(folder), **environ}, role_required=False)[0]


def stalls_in(folder: Path, host: Host, **environ: str) -> HangStacks:
    return HangStacks(settings_in(folder, **environ), ask=host.ask, see=host.see)


def standing(stall: StandstillView | None = STALL, **presences: PresenceState) -> JobView:
    nodes = tuple(worker(node, presences.get(f"n{node}", PresenceState.ALIVE)) for node in range(3))
    return view(workers=nodes, stall=stall)


def looked(
    stalls: HangStacks, told: JobView, now: float = 0.0, *, may_end: bool = False
) -> tuple[list[str], list[int]]:
    stalls.look(told, HERE, now)
    stalls.wait()
    found = stalls.take(now, may_end=may_end)
    return found.lines, [identity.pid for identity in found.end]


def test_culprit_is_named_with_its_line_and_stacks_are_saved(tmp_path: Path, host: Host) -> None:
    lines, _ = looked(stalls_in(tmp_path, host), standing())
    file = tmp_path / FOLDER / "step-40-rank-2.txt"
    assert lines == [f"worker 2 (rank 2, pid 102) is in train.py:46 in train; its threads: {file}"]
    assert host.asked == [102, 100]
    assert dump(46) in file.read_text() and "rank 2, pid 102) at step 40" in file.read_text()
    assert dump(46) in (tmp_path / FOLDER / "step-40-rank-0.txt").read_text()
    assert {one.stat().st_mode & 0o777 for one in (tmp_path / FOLDER).iterdir()} == {0o600}
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700


def test_each_standstill_is_examined_once(tmp_path: Path, host: Host) -> None:
    stalls = stalls_in(tmp_path, host)
    assert len(looked(stalls, standing())[0]) == 1
    assert looked(stalls, standing()) == ([], [])
    looked(stalls, standing(None))
    assert len(looked(stalls, standing())[0]) == 1


@pytest.mark.parametrize(
    ("process_state", "answer", "said"),
    [
        (
            ProcessState(Doing.STOPPED),
            StackDump(silence=NoStackReason.STOPPED),
            "is stopped (SIGSTOP); its threads: {}. Fix: kill -CONT 102",
        ),
        (
            ProcessState(Doing.RUNS, 9.0),
            StackDump(dump(70)),
            "holds Python's lock (the GIL) in train.py:70 in train; its threads: {}",
        ),
        (
            ProcessState(Doing.DISK, 9.0),
            StackDump(silence=NoStackReason.NO_ANSWER),
            "waits in the kernel, most likely for a disk or a",
        ),
        (
            ProcessState(Doing.RUNS, 0.1),
            StackDump(dump(70)),
            "runs, but its messages do not arrive: the network between it and",
        ),
        (None, StackDump(silence=NoStackReason.NO_CHANNEL), "does not respond; its threads: {}"),
    ],
)
def test_silent_process_is_classified(
    process_state: ProcessState | None, answer: StackDump, said: str, tmp_path: Path, host: Host
) -> None:
    host.sights[102], host.answers[102] = process_state, answer
    (line,), _ = looked(stalls_in(tmp_path, host), standing(changed(STALL, silent=("2",))))
    assert line.startswith("worker 2 (rank 2, pid 102) " + said.format(tmp_path / FOLDER / "step-40-rank-2.txt"))


def test_processes_of_other_hosts_are_left_to_their_followers(tmp_path: Path, host: Host) -> None:
    stalls = stalls_in(tmp_path, host)
    stalls.look(standing(), {"2": process(999)}, 0.0)
    stalls.wait()
    assert host.asked == [] and stalls.take(0.0, may_end=True).lines == []


def test_files_are_few_and_short_and_others_in_the_folder_stay(tmp_path: Path, host: Host) -> None:
    (tmp_path / FOLDER).mkdir(mode=0o700)
    (tmp_path / FOLDER / "notes.txt").write_text("mine")
    stalls = stalls_in(tmp_path, host)
    host.answers[102] = StackDump("x" * (4 * MOST_BYTES))
    for step in range(20):
        looked(stalls, standing(changed(STALL, step=step)))
    kept = sorted((tmp_path / FOLDER).glob("step-*"))
    assert len(kept) == MOST_FILES and max(one.stat().st_size for one in kept) <= MOST_BYTES
    assert tmp_path / FOLDER / "step-19-rank-2.txt" in kept and (tmp_path / FOLDER / "notes.txt").read_text() == "mine"


def test_missing_folder_costs_the_file_but_not_the_message(tmp_path: Path, host: Host) -> None:
    (tmp_path / FOLDER).symlink_to("/nowhere")
    assert looked(stalls_in(tmp_path, host), standing())[0] == ["worker 2 (rank 2, pid 102) is in train.py:46 in train"]


@pytest.mark.parametrize("reason", ["silent for 5 s (NODE_TIMEOUT)", "its connection closed and stayed closed for 1 s"])
def test_lost_process_that_reported_no_cause_is_examined_soon(reason: str, tmp_path: Path, host: Host) -> None:
    nodes = [worker(0), worker(1), changed(worker(2, PresenceState.LOST), reason=reason)]
    lost = view(workers=tuple(nodes))
    stalls = stalls_in(tmp_path, host)
    assert looked(stalls, lost, 0.0) == ([], [])
    (line,) = looked(stalls, lost, 1.5)[0]
    assert "is lost" not in line


def test_process_whose_end_has_a_cause_may_take_longer_to_end_and_the_cause_comes_first(
    tmp_path: Path, host: Host
) -> None:
    nodes = [worker(0), worker(1), changed(worker(2, PresenceState.LOST), reason="failed at train.py:21: an error")]
    lost = view(workers=tuple(nodes))
    stalls = stalls_in(tmp_path, host)
    for now in (0.0, 2.0, LEAVING_S - 0.5):
        assert looked(stalls, lost, now) == ([], []), "Python may be releasing its memory"
    (line,) = looked(stalls, lost, LEAVING_S + 0.5)[0]
    cause, then = "failed at train.py:21: an error", "Its process has not ended, and does not respond; its threads"
    assert line.startswith(f"worker 2 (rank 2, pid 102) is lost: {cause}. {then}")


def test_lost_process_that_still_runs_is_examined_shortly_after(tmp_path: Path, host: Host) -> None:
    stalls, lost = stalls_in(tmp_path, host), standing(None, n2=PresenceState.LOST)
    host.sights[102] = ProcessState(Doing.STOPPED)
    assert looked(stalls, lost, 0.0) == ([], []), "it may be ending"
    lines, _ = looked(stalls, lost, 1.5)
    assert len(lines) == 1 and "is stopped (SIGSTOP)" in lines[0]
    assert looked(stalls, lost, 3.0) == ([], [])


@pytest.mark.parametrize(
    ("process_state", "ends"),
    [
        (ProcessState(Doing.STOPPED), True),
        (ProcessState(Doing.RUNS, 60.0), True),
        (ProcessState(Doing.RUNS, 0.1), False),  # cut off: a replacement here would be, too
        (ProcessState(Doing.DISK, 60.0), False),  # no signal reaches it
        (ProcessState(Doing.TRACED), False),  # a debugger is attached
        (ProcessState(Doing.RUNS), False),
        (None, False),
    ],
)
def test_process_that_cannot_end_is_ended_after_the_timeout(
    process_state: ProcessState | None, ends: bool, tmp_path: Path, host: Host
) -> None:
    stalls, lost = stalls_in(tmp_path, host), standing(None, n2=PresenceState.LOST)
    host.sights[102] = process_state
    for now in (0.0, 2.0, LEAST_PATIENCE_S - 1):
        assert looked(stalls, lost, now, may_end=True)[1] == []
    assert looked(stalls, lost, LEAST_PATIENCE_S + 1, may_end=True)[1] == ([102] if ends else [])
    assert looked(stalls, lost, LEAST_PATIENCE_S + 9, may_end=True)[1] == [], "once"


def test_step_timeout_sets_the_timeout(tmp_path: Path, host: Host) -> None:
    stalls, lost = stalls_in(tmp_path, host, HANG="end:2"), standing(None, n2=PresenceState.LOST)
    host.sights[102] = ProcessState(Doing.STOPPED)
    looked(stalls, lost, 0.0, may_end=True)
    looked(stalls, lost, 2.0, may_end=True)
    lines, ended = looked(stalls, lost, 4.5, may_end=True)
    assert ended == [102] and lines == [
        "worker 2 (pid 102) is stopped (SIGSTOP), 4 s after it was lost: it is ended (HANG=end)"
    ]


@pytest.mark.parametrize(("changes", "may_end"), [({"HANG": "tell"}, True), ({}, False)])
def test_process_that_would_not_be_replaced_is_not_ended(
    changes: dict[str, str], may_end: bool, tmp_path: Path, host: Host
) -> None:
    stalls, lost = stalls_in(tmp_path, host, **changes), standing(None, n2=PresenceState.LOST)
    host.sights[102] = ProcessState(Doing.STOPPED)
    for now in (0.0, 2.0, 1000.0):
        assert looked(stalls, lost, now, may_end=may_end)[1] == []


def test_process_that_resumes_or_is_replaced_meanwhile_is_left_alone(tmp_path: Path, host: Host) -> None:
    stalls, lost = stalls_in(tmp_path, host), standing(None, n2=PresenceState.LOST)
    host.sights[102] = ProcessState(Doing.STOPPED)
    looked(stalls, lost, 0.0, may_end=True)
    looked(stalls, lost, 2.0, may_end=True)
    host.sights[102] = ProcessState(Doing.RUNS, 0.1)
    assert looked(stalls, lost, 100.0, may_end=True)[1] == []
    host.sights[102] = ProcessState(Doing.STOPPED)
    looked(stalls, standing(None), 101.0, may_end=True)
    assert looked(stalls, lost, 102.0, may_end=True)[1] == [], "its timeout starts over"


def test_journal_or_nothing_reports_no_stall(tmp_path: Path, host: Host) -> None:
    stalls = stalls_in(tmp_path, host)
    stalls.look(None, HERE, 0.0)
    stalls.look(changed(standing(), source=JOURNAL), HERE, 0.0)
    stalls.wait()
    assert host.asked == []
