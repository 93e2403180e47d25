"""What recover.sh starts, ends and leaves alone, as a table of remains of a job and their consequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from samebits import config
from samebits.account.job_view import JOURNAL, JobView, PresenceState, WorkerView
from samebits.core.end_kinds import EndKind
from samebits.core.point import Point
from samebits.errors import JobFailedError
from samebits.launcher.recovering import RecoveryPlan, Remains, plan_recovery, verified_candidate
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.views import HOST, interruption, process, view, worker
from tests.store.points import change_byte, save

ALIVE, LOST, LEFT = PresenceState.ALIVE, PresenceState.LOST, PresenceState.LEFT
SCHEDULER_PID = 99
NODES = ("0", "1", "2")
STARTED = {"scheduler": SCHEDULER_PID, "worker_0": 100, "worker_1": 101, "worker_2": 102}


def plan(
    seen: JobView | None,
    dead: tuple[int, ...] = (),
    *,
    serves: bool = True,
    holds: bool = False,
    recovery: bool = True,
    nodes: tuple[str, ...] = NODES,
    **started: int | None,
) -> RecoveryPlan:
    """Plan a recovery.

    ``dead``: pids that do not run; ``started``: pid files that differ from the usual ones, None: missing.
    """
    pids = {name: pid for name, pid in {**STARTED, **started}.items() if pid is not None}

    def is_alive(identity: ProcessIdentity) -> bool:
        return identity.pid not in dead

    return plan_recovery(
        Remains(
            nodes=nodes,
            recovery=recovery,
            cool_down_s=30.0,
            started={name: process(pid) for name, pid in pids.items()},
            view=seen,
            scheduler_serves=serves,
            scheduler_holds=holds,
            is_alive=is_alive,
            host=HOST,
        )
    )


@dataclass(frozen=True)
class Case:
    name: str
    recovery: RecoveryPlan
    start: tuple[str, ...] = ()
    end: tuple[int, ...] = ()


def workers(*presences: PresenceState) -> JobView:
    return view(workers=tuple(worker(node, presence) for node, presence in enumerate(presences)))


def spared(*spares: WorkerView, **changes: object) -> JobView:
    return view(spares=spares, **changes)


FOUR = (*NODES, "3")
TAKEN = view(workers=(worker(0), worker(3, slot=1), worker(2)), retired=(worker(1, LOST, slot=None),))

CASES = [
    Case("all workers are there", plan(view())),
    Case("a worker is gone and not yet counted lost", plan(view(), dead=(101,)), start=("worker_1",)),
    Case("a worker is gone and lost", plan(workers(ALIVE, LOST, ALIVE), dead=(101,)), start=("worker_1",)),
    Case("a lost one still exists", plan(workers(ALIVE, LOST, ALIVE)), start=("worker_1",), end=(101,)),
    Case("its replacement waits already", plan(workers(ALIVE, LOST, ALIVE), worker_1=201)),
    Case("its replacement waits, the old one is dead", plan(workers(ALIVE, LOST, ALIVE), dead=(101,), worker_1=201)),
    Case(
        "its replacement died too",
        plan(workers(ALIVE, LOST, ALIVE), dead=(101, 201), worker_1=201),
        start=("worker_1",),
    ),
    Case(
        "the replacement died, and who is lost is no process that a script started here",
        plan(workers(ALIVE, LOST, ALIVE), dead=(201,), worker_1=201),
        start=("worker_1",),
    ),
    Case(
        "left, according to a process that pretended to be another worker",
        plan(view(workers=(worker(0), worker(1, LEFT, pid=102), worker(2))), dead=(101,)),
        start=("worker_1",),
    ),
    Case(
        "lost, according to a process that pretended to be a worker without a pid file",
        plan(workers(ALIVE, LOST, ALIVE), worker_1=None),
        start=("worker_1",),
    ),
    Case("a seat holder that was started by hand", plan(view(), dead=(201,), worker_1=201)),
    Case(
        "left on purpose before training was finished",
        plan(workers(LEFT, LEFT, LEFT), dead=(99, 100, 101, 102), serves=False),
        start=("scheduler", "worker_0", "worker_1", "worker_2"),
    ),
    Case(
        "left on purpose, but its process hangs",
        plan(workers(ALIVE, LEFT, ALIVE)),
        start=("worker_1",),
        end=(101,),
    ),
    Case(
        "left on purpose after training was finished",
        plan(
            view(training_finished=True, workers=(worker(0, LEFT), worker(1, LOST), worker(2, ALIVE))), dead=(100, 101)
        ),
        start=("worker_1",),
    ),
    Case("the scheduler is gone", plan(view(), dead=(99,), serves=False), start=("scheduler",)),
    Case("the scheduler was started by hand", plan(view(), dead=(99,), serves=True)),
    Case("a scheduler holds the lock and does not answer", plan(view(), dead=(99,), serves=False, holds=True)),
    Case("a stopped scheduler does not answer", plan(view(), serves=False)),
    Case(
        "everything is gone",
        plan(view(), dead=(99, 100, 101, 102), serves=False),
        start=("scheduler", "worker_0", "worker_1", "worker_2"),
    ),
    Case(
        "nothing ever began",
        plan(None, dead=(99, 100), serves=False, worker_2=None),
        start=("scheduler", "worker_0", "worker_2"),
    ),
    Case("registering still", plan(view(workers=(worker(0),)), dead=()), start=()),
    Case(
        "its seat is held on another host",
        plan(view(workers=(worker(0), worker(1, host="there"), worker(2))), dead=(101,)),
    ),
    Case("a spare is there, and was never started here", plan(spared(worker(3, slot=None)))),
    Case(
        "a spare is gone",
        plan(spared(worker(3, LOST, slot=None)), dead=(103,), nodes=FOUR, worker_3=103),
        start=("worker_3",),
    ),
    Case(
        "a spare is gone after training was finished: it is of no use",
        plan(spared(worker(3, LOST, slot=None), training_finished=True), dead=(103,), nodes=FOUR, worker_3=103),
    ),
    Case(
        "a spare took the place of a dead worker",
        plan(TAKEN, dead=(101,), nodes=FOUR, worker_3=103),
        start=("worker_1",),
    ),
    Case(
        "a worker whose slot was given away still exists", plan(TAKEN, nodes=FOUR, worker_3=103), ("worker_1",), (101,)
    ),
    Case("it comes back already", plan(TAKEN, dead=(101,), nodes=FOUR, worker_3=103, worker_1=201)),
    Case(
        "after training was finished it has nothing to come back for",
        plan(replace(TAKEN, training_finished=True), dead=(101,), nodes=FOUR, worker_3=103),
    ),
    Case("a removed worker is not started again", plan(workers(ALIVE, LEFT, ALIVE), dead=(101,), nodes=("0", "2"))),
    Case("an added worker is started", plan(view(), nodes=FOUR), start=("worker_3",)),
    Case(
        "lost on another host: it comes back here, and nothing here is ended",
        plan(view(workers=(worker(0), worker(1, LOST, pid=500, host="there"), worker(2))), dead=(101,)),
        start=("worker_1",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exactly_the_missing_or_lost_processes_are_started(case: Case) -> None:
    assert case.recovery.start == case.start
    assert tuple(lost.identity.pid for lost in case.recovery.end) == case.end
    assert not case.recovery.over
    assert any("nothing to do" in line for line in case.recovery.lines) == (not case.start)


def test_process_named_only_by_the_scheduler_is_left_alone_and_reported() -> None:
    """A registering process can claim anything, including the pid of another process."""
    said = plan(view(workers=(worker(0), worker(1, LEFT, pid=777), worker(2))), dead=(101,))
    assert said.end == ()
    assert (
        "worker 1 last registered as pid 777, which no command started here; that process is left alone" in said.lines
    )


def test_finished_job_has_nothing_to_do() -> None:
    finished = view(job_finished=True, step=600, source=JOURNAL)
    over = plan(finished, dead=(99, 100, 101, 102), serves=False)
    assert over.over
    assert over.start == ()
    assert "is finished at step 600" in over.lines[0]
    assert not plan(finished, dead=(99, 100, 101), serves=False).over  # its last process is waited for


def test_nothing_is_restarted_with_recovery_off() -> None:
    assert plan(None, dead=(101,), recovery=False).start == ()
    with pytest.raises(JobFailedError, match="ENABLE_RECOVERY=0"):
        plan(None, dead=(99, 100, 101, 102), serves=False, recovery=False)


def test_wait_for_the_seat_is_explained_if_there_is_one() -> None:
    def said(seen: JobView | None, *dead: int) -> bool:
        return "30 s (REGISTER_COOLDOWN)" in "\n".join(plan(seen, dead).lines)

    assert said(workers(ALIVE, LOST, ALIVE), 101)
    assert not said(workers(ALIVE, ALIVE, ALIVE), 99)  # the scheduler waits for no worker
    assert not said(workers(ALIVE, LEFT, ALIVE), 101)
    assert not said(view(workers=()), 101)


def test_fate_of_a_worker_whose_slot_was_reassigned_is_reported() -> None:
    lines = "\n".join(plan(TAKEN, dead=(101,), nodes=FOUR, worker_3=103).lines)
    assert "starting worker 1\n" in lines
    assert "the slot of worker 1 was given away: it comes back as a spare" in lines
    elastic = replace(TAKEN, max_world_size=5)
    assert "it joins as a newcomer" in "\n".join(plan(elastic, dead=(101,), nodes=FOUR, worker_3=103).lines)
    full = replace(TAKEN, min_world_size=2)
    assert "it comes back as a spare" in "\n".join(plan(full, dead=(101,), nodes=FOUR, worker_3=103).lines)
    gone = plan(spared(worker(3, LOST, slot=None)), dead=(103,), nodes=FOUR, worker_3=103)
    assert "starting spare 3" in gone.lines


def causes(first: str, second: str, **second_changes: object) -> str:
    interruptions = (interruption(first), interruption(second, **second_changes))  # type: ignore[arg-type]
    return "\n".join(plan(view(interruptions=interruptions), dead=(99, 100, 101, 102), serves=False).lines)


def test_repeated_failure_is_reported_before_the_third_attempt() -> None:
    first = "no worker is left; first cause: worker 1 (pid 77 on vm): ValueError: a loss that is no number"
    again = "no worker is left; first cause: worker 0 (pid 99 on vm): ValueError: a loss that is no number"
    assert "failed twice at step 7" in causes(first, again)
    assert "a loss that is no number" in causes(first, again)
    assert "failed twice" not in causes(first, again.replace("ValueError", "KeyError"))
    assert "failed twice" not in causes(first, again, step=8)
    assert "failed twice" not in causes("stopped by Ctrl-C", "stopped by Ctrl-C", kind=EndKind.STOPPED)


def test_newest_point_whose_every_byte_is_right_is_taken_from_one_folder(tmp_path: Path) -> None:
    """A rank's equal point in another folder is of no use: the ranks load from one."""
    settings, _ = config.read({"CHECKPOINT_PATH": str(tmp_path)}, role_required=False)
    said: list[object] = []
    assert verified_candidate(settings, said.append) is None
    for folder, steps in ((tmp_path, (10, 20)), (tmp_path / "ckpt", (20, 30))):
        for step in steps:
            for rank in range(4):
                point = save(folder, step, rank=rank)
    change_byte(point.path / "data.safetensors", -5)

    found = verified_candidate(settings, said.append)
    assert found is not None and (found.point, found.world_size) == (Point(20, 1), 4)
    assert [entry.path.parent for entry in found.entries] == [tmp_path / str(rank) for rank in range(4)]
    assert len(said) == 1 and str(point.path) in str(said[0])
