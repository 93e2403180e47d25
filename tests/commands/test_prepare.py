"""Preparing a start: refused with a reason and a fix, or the moves that clear the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samebits.commands.run.prepare import NAMED, Former, Move, StartConditions, StartPlan, plan_start
from samebits.errors import ForeignFolderError, ListenError, LockedError, SameBitsError, StoreError
from samebits.store.durable import aside_id, aside_path
from tests.launcher.views import HOST, JOB, interruption, view

OTHER = "99999999-0000-4000-8000-000000000000"
RECOVERY, CHECKPOINTS, LOGS = Path("/job/recovery"), Path("/job/ckpt_of_rank"), Path("/job/device")
FINISHED = view(job_finished=True)
UNFINISHED = view(step=250)
FORMER = Former("llama", Path("/former/recovery"), view(job=OTHER, name="llama"))


def found(**changes: Any) -> StartConditions:
    values: dict[str, Any] = {
        "name": "digits",
        "recovery_path": RECOVERY,
        "checkpoint_path": CHECKPOINTS,
        "log_dir": LOGS,
        "recover": "bash scripts/recover.sh",
        "fresh": "bash scripts/run.sh --fresh",
    }
    return StartConditions(**{**values, **changes})


REFUSED: list[tuple[str, StartConditions, bool, type[SameBitsError], list[str]]] = [
    ("a running job", found(view=UNFINISHED, running=("worker 0 (pid 77)",)), False, LockedError, [JOB, "pid 77"]),
    ("a running job, fresh", found(view=UNFINISHED, running=("worker 0 (pid 77)",)), True, LockedError, ["pid 77"]),
    ("a held lock", found(holder="scheduler on port 8118 (pid 5 on vm)"), True, LockedError, ["pid 5", "SCHED_PORT"]),
    ("a used port", found(port_problem="held by pid 12"), True, ListenError, ["pid 12"]),
    (
        "an unfinished job",
        found(view=UNFINISHED, newest_step=300),
        False,
        StoreError,
        [JOB, "train.py", "step 300", "3 workers", "bash scripts/recover.sh", "run.sh --fresh"],
    ),
    (
        "a job that stopped at step 0, of which a memory holds a later point",
        found(view=view(step=0, generation=0), newest_step=3, host=HOST),
        False,
        StoreError,
        ["step 3"],
    ),
    (
        "a job at step 0 of which it is unknown how it ended",
        found(view=view(step=0), host=HOST),
        False,
        StoreError,
        ["step 0"],
    ),
    (
        "a job at step 0 with workers on other hosts",
        found(view=view(step=0, interruptions=(interruption("SyntaxError", 0),)), host="another"),
        False,
        StoreError,
        ["step 0"],
    ),
    ("a damaged journal", found(damage="byte 70: wrong checksum"), False, StoreError, ["byte 70"]),
    (
        "another job's log folder, running",
        found(former=Former("llama", Path("/former/recovery"), FORMER.view, ("the scheduler (pid 8)",))),
        True,
        ForeignFolderError,
        ["/former/recovery", "llama", "pid 8", "digits", "/job/recovery"],
    ),
    (
        "another job's log folder, unfinished",
        found(former=FORMER),
        False,
        ForeignFolderError,
        ["/former/recovery", OTHER, "llama", "digits", "/job/recovery", "LOG_DIR"],
    ),
    (
        "another job's checkpoints",
        found(checkpoint_jobs=frozenset({OTHER})),
        False,
        ForeignFolderError,
        [OTHER, "digits", "CHECKPOINT_PATH"],
    ),
    (
        "another job's checkpoints beside a finished job",
        found(view=FINISHED, checkpoint_jobs=frozenset({JOB, OTHER})),
        False,
        ForeignFolderError,
        [OTHER],
    ),
    (
        "the checkpoints of another job that runs, fresh",
        found(checkpoint_jobs=frozenset({OTHER}), live_jobs=frozenset({OTHER})),
        True,
        LockedError,
        [OTHER, "is running and saves there", "CHECKPOINT_PATH"],
    ),
    (
        "the checkpoints of another job that runs, where this folder's jobs left none",
        found(checkpoint_jobs=frozenset({OTHER}), past_jobs=frozenset({OTHER}), live_jobs=frozenset({OTHER})),
        False,
        LockedError,
        [OTHER, "is running and saves there"],
    ),
]


@pytest.mark.parametrize(("name", "seen", "fresh", "error", "words"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_start_names_what_is_there_and_what_to_type(
    name: str, seen: StartConditions, fresh: bool, error: type[SameBitsError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        plan_start(seen, fresh=fresh)
    assert type(caught.value) is error
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(("running", "said"), [(NAMED, ", worker 5. "), (NAMED + 1, ", worker 5 and 1 more. ")])
def test_named_running_processes_are_bounded_and_the_rest_counted(running: int, said: str) -> None:
    names = tuple(f"worker {number}" for number in range(running))
    with pytest.raises(LockedError) as caught:
        plan_start(found(view=UNFINISHED, running=names), fresh=False)
    assert said in str(caught.value)


MARKER = LOGS / "start.json"
ALLOWED: list[tuple[str, StartConditions, bool, list[Move]]] = [
    ("an empty folder", found(), False, []),
    ("an empty folder, fresh", found(), True, []),
    (
        "a finished job",
        found(view=FINISHED, checkpoint_jobs=frozenset({JOB})),
        False,
        [Move(RECOVERY, JOB), Move(MARKER, JOB), Move(CHECKPOINTS, JOB)],
    ),
    (
        "an unfinished job, fresh",
        found(view=UNFINISHED, checkpoint_jobs=frozenset({JOB})),
        True,
        [Move(RECOVERY, JOB), Move(MARKER, JOB), Move(CHECKPOINTS, JOB)],
    ),
    (
        "a damaged journal, fresh: the checkpoints tell its job",
        found(damage="byte 70", checkpoint_jobs=frozenset({JOB})),
        True,
        [Move(RECOVERY, JOB), Move(MARKER, JOB), Move(CHECKPOINTS, JOB)],
    ),
    (
        "a job that never got past step 0",
        found(view=view(step=0, interruptions=(interruption("SyntaxError", 0),)), host=HOST),
        False,
        [Move(RECOVERY, JOB), Move(MARKER, JOB)],
    ),
    (
        "a job that was stopped while it formed",
        found(view=view(step=0, generation=0, workers=()), checkpoint_jobs=frozenset({JOB}), host=HOST),
        False,
        [Move(RECOVERY, JOB), Move(MARKER, JOB), Move(CHECKPOINTS, JOB)],
    ),
    ("another job's checkpoints, fresh", found(checkpoint_jobs=frozenset({OTHER})), True, [Move(CHECKPOINTS, OTHER)]),
    (
        "an interrupted move is finished",
        found(checkpoint_jobs=frozenset({JOB}), past_jobs=frozenset({JOB})),
        False,
        [Move(CHECKPOINTS, JOB)],
    ),
    ("another job's log folder, fresh", found(former=FORMER), True, [Move(MARKER, OTHER)]),
    (
        "the log folder of another job that is finished",
        found(former=Former("llama", Path("/former/recovery"), FINISHED)),
        False,
        [],
    ),
    ("the log folder of a job that kept nothing", found(former=Former("llama", Path("/x"), None)), False, []),
]


@pytest.mark.parametrize(("name", "seen", "fresh", "moves"), ALLOWED, ids=[case[0] for case in ALLOWED])
def test_obstacles_are_moved_aside(name: str, seen: StartConditions, fresh: bool, moves: list[Move]) -> None:
    plan = plan_start(seen, fresh=fresh)
    assert list(plan.moves) == moves
    assert bool(plan.why) == bool(moves)


def test_nothing_is_printed_if_nothing_is_moved() -> None:
    assert plan_start(found(), fresh=False) == StartPlan()


def test_names_of_moved_folders() -> None:
    first, second = aside_path(RECOVERY, JOB, 1), aside_path(RECOVERY, JOB, 2)
    assert (first.name, second.name) == ("recovery.1a2b3c4d.aside", "recovery.1a2b3c4d.2.aside")
    assert {aside_id(path.name, "recovery") for path in (first, second)} == {"1a2b3c4d"}
    assert aside_id("recovery", "recovery") is None
    assert aside_id("ckpt_of_rank.1a2b3c4d.aside", "recovery") is None


def test_log_folder_stays_and_only_changes_its_owner() -> None:
    plan = plan_start(found(view=FINISHED, log_job=JOB), fresh=False)
    assert plan.moves[-1] == Move(LOGS / "owner.json", JOB)
    assert LOGS not in {move.path for move in plan.moves}
