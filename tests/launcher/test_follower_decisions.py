"""A follower's output, signals and conclusions, with a clock that the test sets."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from samebits.account.job_view import JOURNAL, JobView, PresenceState
from samebits.core.end_kinds import EndKind
from samebits.launcher.follower_decisions import Following, FollowResult
from samebits.launcher.job_outcome import (
    GATHER_OWN_S,
    GATHER_S,
    MOST_WAYS,
    NAMED,
    JobOutcome,
    WorkerExit,
    sentence,
    sentences,
)
from samebits.launcher.processes import Death
from samebits.store.process_identity import ProcessIdentity
from samebits.tracebacks import Failure
from tests.launcher.views import interruption, process, view, worker

KILLED = Death(signal=9)
SCHEDULER = process(99)
WORKERS = [process(100 + node) for node in range(3)]


class Scene:
    """A follower that has just found a running job of three workers; collects its orders."""

    def __init__(
        self,
        *,
        recovery: bool = True,
        restarts: bool = False,
        own: bool = True,
        linked: bool = True,
        shutdown_timeout_s: float = 10.0,
    ) -> None:
        self.now = 1000.0
        self.following = Following(
            recovery=recovery,
            node_timeout_s=5.0,
            recover="RECOVER",
            restarts=restarts,
            shutdown_timeout_s=shutdown_timeout_s,
            clock_time="{:.0f}".format,
        )
        self.lines: list[str] = []
        self.signals: list[tuple[int, signal.Signals]] = []
        self.stop_by: str | None = None
        self.following.found("scheduler", SCHEDULER, is_own=own)
        for node, identity in enumerate(WORKERS):
            self.following.found(f"worker_{node}", identity, is_own=own)
        if linked:
            self.following.linked()
            self.heard(view())
        self.settle()

    def settle(self, after_s: float = 0.0) -> None:
        self.now += after_s
        orders = self.following.passed(self.now)
        self.lines += orders.lines
        self.signals += [(identity.pid, number) for identity, number in orders.signals]
        self.stop_by = orders.stop_by or self.stop_by

    def heard(self, seen: JobView) -> None:
        self.following.heard(seen, self.now)
        self.settle()

    def dies(
        self,
        node: int,
        death: Death = KILLED,
        cause: Failure | str = "",
        identity: ProcessIdentity | None = None,
        *,
        alone: bool = True,
        has_joined: bool = True,
        follows: str = "",
    ) -> None:
        """Report a death. ``alone``: no other process dies while deaths are gathered."""
        is_done = self.following.view is not None and self.following.view.training_finished
        self.following.died(
            f"worker_{node}",
            identity or WORKERS[node],
            death,
            cause,
            self.now,
            is_done=is_done,
            has_joined=has_joined,
            follows=follows,
        )
        self.settle()
        if alone and self.following.result is None:
            self.settle(GATHER_S if death.signal is not None else GATHER_OWN_S)

    def all_die(self, death: Death = KILLED) -> None:
        for node in range(3):
            self.dies(node, death, alone=False)

    def scheduler_dies(self, death: Death = KILLED, stored: JobView | None = None, line: str = "") -> None:
        self.following.unlinked()
        self.following.died("scheduler", SCHEDULER, death, line, self.now)
        self.following.scheduler_gone(SCHEDULER, death, stored, line, self.now)
        self.settle()
        if self.following.result is None and not self.following.is_closing:
            self.settle(GATHER_S)

    def said(self) -> str:
        return "\n".join(self.lines)

    def result(self) -> FollowResult:
        assert self.following.result is not None, self.said()
        return self.following.result

    def outcome(self) -> tuple[EndKind | None, int]:
        return self.result().verdict.kind, self.result().verdict.exit_code


def ended(kind: EndKind, cause: str) -> JobView:
    return view(phase="ending", ended=interruption(cause, kind=kind))


def test_finished_job_ends_with_0_when_nothing_runs_any_more() -> None:
    scene = Scene()
    scene.heard(view(training_finished=True))
    for node in range(3):
        scene.dies(node, Death(status=0))
    scene.heard(view(job_finished=True))
    assert scene.following.result is None  # the scheduler still runs
    scene.scheduler_dies(Death(status=0))
    assert scene.outcome() == (None, 0)
    assert (scene.lines, scene.signals) == ([], [])


@pytest.mark.parametrize(("last", "outcome"), [(0, (None, 0)), (None, (EndKind.INTERRUPTED, 77))])
def test_follower_on_another_host_than_the_scheduler_recognises_a_finished_job(
    last: int | None, outcome: tuple[EndKind | None, int]
) -> None:
    """The follower has no journal, and the scheduler may exit right after it reported the end of training."""
    scene = Scene()
    scene.heard(view(training_finished=True))
    scene.scheduler_dies(Death())
    for node, status in enumerate((0, 0, last)):
        scene.dies(node, Death(status=status) if status is not None else KILLED)
    assert scene.outcome() == outcome


def test_killed_worker_is_named_with_signal_and_fix_and_following_continues() -> None:
    scene = Scene()
    scene.dies(2)
    assert scene.lines == [
        "worker 2 (pid 102) was killed by signal 9 (SIGKILL); the others wait for it until 2800 (TOPO_TIMEOUT=1800 s). "
        "Fix: RECOVER brings it back"
    ]
    scene.settle(3600)
    assert scene.following.result is None
    assert scene.following.wake_at() is None


def test_worker_that_exited_is_shown_with_its_status_and_last_words() -> None:
    scene = Scene()
    scene.dies(0, Death(status=1), "train.py: error: no number")
    assert "worker 0 (pid 100) ended with status 1: train.py: error: no number" in scene.said()


def test_end_of_a_process_of_another_parent_has_no_status() -> None:
    scene = Scene(own=False)
    scene.dies(1, Death())
    assert len(scene.lines) == 1
    assert scene.lines[0].startswith("worker 1 (pid 101) is gone; the others wait for it until")
    assert scene.lines[0].endswith(". Fix: RECOVER brings it back")


def test_replacement_started_by_another_follower_is_followed_too() -> None:
    scene = Scene()
    scene.dies(2)
    replacement = process(202)
    scene.following.found("worker_2", replacement, is_own=False)
    scene.settle()
    assert "worker 2 was started again (pid 202)" in scene.said()
    scene.dies(2, Death(), identity=replacement)
    assert "worker 2 (pid 202) is gone" in scene.said()


@pytest.mark.parametrize("is_found_first", [False, True])
def test_simultaneous_death_and_restart_are_reported_in_order(is_found_first: bool) -> None:
    """The successor's pid file may be read before the kernel reports the death."""
    scene = Scene()
    if not is_found_first:
        scene.dies(2, alone=False)
    scene.following.found("worker_2", process(202), is_own=False)
    scene.settle()
    if is_found_first:
        assert scene.lines == [], "its predecessor has not ended yet"
        scene.dies(2, alone=False)
    scene.settle(GATHER_S)
    assert scene.lines == [
        "worker 2 (pid 102) was killed by signal 9 (SIGKILL)",
        "worker 2 was started again (pid 202)",
    ]
    scene.dies(2, identity=process(202))
    assert "worker 2 (pid 202) was killed by signal 9 (SIGKILL); the others wait for it until" in scene.said()


def test_death_with_another_workers_restart_leaves_the_restart_to_the_user() -> None:
    scene = Scene()
    scene.dies(1, alone=False)
    scene.dies(2, alone=False)
    scene.following.found("worker_2", process(202), is_own=False)
    scene.settle()
    assert scene.lines[0].startswith("workers 1, 2 were killed by signal 9 (SIGKILL); the others wait for them until")
    assert scene.lines[1] == "worker 2 was started again (pid 202)"


def test_death_and_restart_of_a_scheduler_are_reported_in_order() -> None:
    scene = Scene()
    scene.following.unlinked()
    scene.following.died("scheduler", SCHEDULER, KILLED, "", scene.now)
    scene.following.scheduler_gone(SCHEDULER, KILLED, view(source=JOURNAL), "", scene.now)
    scene.following.found("scheduler", process(199), is_own=False)
    scene.settle()
    assert scene.lines == [
        "the scheduler (pid 99) was killed by signal 9 (SIGKILL)",
        "the scheduler was started again (pid 199)",
    ]


def test_schedulers_death_ends_nothing() -> None:
    scene = Scene()
    scene.scheduler_dies(stored=view(source=JOURNAL))
    assert "the scheduler (pid 99) was killed by signal 9 (SIGKILL); the ranks go on" in scene.said()
    assert scene.following.result is None
    scene.following.found("scheduler", process(199), is_own=False)
    scene.following.linked()
    scene.heard(view(term=2))
    scene.heard(view(term=2, job_finished=True))
    scene.all_die(Death(status=0))
    scene.following.died("scheduler", process(199), Death(), "", scene.now)
    scene.settle()
    assert scene.outcome() == (None, 0)


@pytest.mark.parametrize("death", [Death(status=0), Death()])
def test_worker_may_leave_after_training_but_not_be_killed(death: Death) -> None:
    scene = Scene()
    scene.heard(view(training_finished=True))
    scene.dies(0, death)
    assert scene.lines == []
    scene.dies(1, KILLED)
    assert "worker 1 (pid 101) was killed by signal 9" in scene.said()


def test_unknown_exit_with_recovery_off_is_left_to_the_scheduler() -> None:
    scene = Scene(recovery=False, own=False)
    scene.dies(0, Death())
    scene.settle(60)
    assert (scene.lines, scene.signals, scene.following.is_closing) == ([], [], False)


def test_journal_gives_the_last_step_if_the_last_push_was_missed() -> None:
    scene = Scene()
    scene.all_die(Death(status=0))
    scene.scheduler_dies(Death(), stored=view(source=JOURNAL, job_finished=True, step=600))
    assert scene.outcome() == (None, 0)
    assert scene.following.view is not None
    assert scene.following.view.step == 600


def test_job_with_everything_gone_is_interrupted_by_the_first_death() -> None:
    scene = Scene()
    scene.dies(1)
    scene.dies(0)
    scene.dies(2)
    assert scene.following.result is None
    scene.scheduler_dies(stored=view(source=JOURNAL))
    assert scene.outcome() == (EndKind.INTERRUPTED, 77)
    assert "worker 1 (pid 101) was killed by signal 9" in scene.result().verdict.cause


@pytest.mark.parametrize(
    ("kind", "code"),
    [(EndKind.INTERRUPTED, 77), (EndKind.STOPPED, 78), (EndKind.FORMATION_TIMEOUT, 70), (EndKind.FAILED, 76)],
)
@pytest.mark.parametrize("source", ["push", "journal", "status"])
def test_schedulers_verdict_decides_however_it_is_known(kind: EndKind, code: int, source: str) -> None:
    scene = Scene()
    if source == "push":
        scene.heard(ended(kind, "its reason"))
    scene.all_die(Death(status=code))
    if source == "journal":
        scene.scheduler_dies(Death(), stored=ended(kind, "its reason"))
    else:
        scene.scheduler_dies(Death(status=code), line="its reason", stored=view(source=JOURNAL))
    assert scene.outcome() == (kind, code)
    assert scene.result().verdict.cause == "its reason"


def test_process_that_does_not_leave_after_the_end_is_signalled() -> None:
    scene = Scene()
    scene.heard(ended(EndKind.INTERRUPTED, "no worker is left"))
    scene.dies(0)
    scene.settle(6.0)
    assert scene.signals == [(99, signal.SIGTERM), (101, signal.SIGTERM), (102, signal.SIGTERM)]
    scene.dies(1)
    scene.scheduler_dies(Death(status=77))
    scene.settle(5.0)
    assert scene.signals[3:] == [(102, signal.SIGKILL)]
    scene.dies(2)
    assert scene.outcome() == (EndKind.INTERRUPTED, 77)


def test_ctrl_c_asks_the_scheduler_first_and_says_so() -> None:
    scene = Scene()
    scene.following.stop_asked("Ctrl-C", scene.now)
    scene.settle()
    assert (scene.stop_by, scene.signals) == ("Ctrl-C", [])
    scene.heard(ended(EndKind.STOPPED, "stopped by Ctrl-C"))
    scene.all_die(Death(status=78))
    scene.scheduler_dies(Death(status=78))
    assert scene.outcome() == (EndKind.STOPPED, 78)
    assert scene.lines == ["Ctrl-C: ending the job"]  # no advice to restart what was stopped on purpose


def test_process_without_an_order_to_stop_is_ended_soon_after_the_scheduler_left() -> None:
    """Worker 2 had not registered yet. The others got the request, and may take their time to leave."""
    scene = Scene()
    scene.heard(view(workers=(worker(0), worker(1))))
    scene.following.stop_asked("Ctrl-C", scene.now)
    scene.scheduler_dies(Death(status=78))
    scene.settle(1.0)
    assert scene.signals == [(102, signal.SIGTERM)]
    scene.settle(5.0)
    assert scene.signals[1:] == [(100, signal.SIGTERM), (101, signal.SIGTERM), (102, signal.SIGTERM)]


def test_follower_stops_the_workers_if_the_scheduler_was_killed_before_it_could() -> None:
    scene = Scene()
    scene.following.stop_asked("Ctrl-C", scene.now)
    scene.scheduler_dies(KILLED, stored=view(source=JOURNAL))
    scene.settle(1.0)
    assert scene.signals == [(100, signal.SIGTERM), (101, signal.SIGTERM), (102, signal.SIGTERM)]


@pytest.mark.parametrize(("timeout_s", "term_at_s", "kill_at_s"), [(10.0, 6.0, 10.0), (2.0, 1.2, 2.0)])
def test_process_that_does_not_leave_is_killed_within_the_shutdown_timeout(
    timeout_s: float, term_at_s: float, kill_at_s: float
) -> None:
    scene = Scene(shutdown_timeout_s=timeout_s)
    scene.following.stop_asked("Ctrl-C", scene.now)
    for at_s, number in ((term_at_s, signal.SIGTERM), (kill_at_s - term_at_s, signal.SIGKILL)):
        before = len(scene.signals)
        scene.settle(at_s - 0.01)
        assert len(scene.signals) == before
        scene.settle(0.01)
        assert [sent for _, sent in scene.signals[before:]] == [number] * 4


def test_finished_script_has_time_to_write_its_results() -> None:
    scene = Scene()
    scene.heard(view(training_finished=True, job_finished=True))
    scene.scheduler_dies(Death(status=0))
    scene.settle(29)
    assert scene.signals == []
    scene.settle(1)
    assert [number for _, number in scene.signals] == [signal.SIGTERM] * 3
    impatient = Scene()
    impatient.heard(view(training_finished=True, job_finished=True))
    impatient.following.stop_asked("Ctrl-C", impatient.now)
    impatient.settle()
    assert [number for _, number in impatient.signals] == [signal.SIGTERM] * 4


def test_late_exit_status_counts_only_for_a_worker_with_a_slot() -> None:
    """A worker that left for a smaller world exits with 143 after the others have finished. That is no failure."""
    members = (worker(0, PresenceState.LEFT), worker(1, PresenceState.LEFT), worker(2, PresenceState.LEFT, slot=None))
    for late, outcome in ((2, (None, 0)), (1, (EndKind.SCRIPT_FAILED, 143))):
        scene = Scene()
        scene.heard(view(training_finished=True, job_finished=True, workers=members[:2], retired=members[2:]))
        for node in range(3):
            scene.dies(node, Death(status=143 if node == late else 0), alone=False)
        scene.scheduler_dies(Death(status=0))
        assert scene.outcome() == outcome


def test_ctrl_c_without_a_scheduler_signals_the_processes_at_once() -> None:
    scene = Scene()
    scene.scheduler_dies(stored=view(source=JOURNAL))
    scene.following.stop_asked("Ctrl-C", scene.now)
    scene.settle()
    assert [number for _, number in scene.signals] == [signal.SIGTERM] * 3
    scene.all_die(Death(signal=15))
    assert scene.outcome() == (EndKind.STOPPED, 78)


def test_second_ctrl_c_kills() -> None:
    scene = Scene()
    scene.following.stop_asked("Ctrl-C", scene.now)
    scene.settle()
    scene.following.stop_asked("Ctrl-C", scene.now)
    scene.settle()
    assert [number for _, number in scene.signals] == [signal.SIGKILL] * 4


def test_stop_after_the_last_step_finds_a_finished_job() -> None:
    scene = Scene()
    scene.following.stop_asked("Ctrl-C", scene.now)
    scene.heard(view(job_finished=True))
    scene.all_die(Death(status=0))
    scene.scheduler_dies(Death(status=0))
    assert scene.outcome() == (None, 0)


def test_death_with_recovery_off_ends_the_job_within_ten_seconds() -> None:
    scene = Scene(recovery=False)
    began = scene.now
    scene.dies(1)
    assert "worker 1 (pid 101) was killed by signal 9 (SIGKILL) (ENABLE_RECOVERY=0: the job ends)" in scene.said()
    while scene.following.result is None and (wake_at := scene.following.wake_at()) is not None:
        scene.settle(wake_at - scene.now)
        if any(number is signal.SIGKILL for _, number in scene.signals):
            break
    assert scene.now - began < 10
    assert {pid for pid, number in scene.signals if number is signal.SIGKILL} == {99, 100, 102}
    scene.heard(ended(EndKind.FAILED, "worker 1 (pid 101 on vm) is lost: its process is gone"))
    scene.dies(0)
    scene.dies(2)
    scene.scheduler_dies(KILLED)
    assert scene.outcome() == (EndKind.FAILED, 76)
    assert "is lost: its process is gone" in scene.result().verdict.cause
    assert "signal 9 (SIGKILL)" in scene.following.first_death(scene.result().verdict.cause)
    assert scene.following.first_death(scene.following.first_death("")) == ""


def test_signal_is_known_even_if_the_scheduler_reported_the_death_first() -> None:
    scene = Scene(recovery=False)
    scene.heard(ended(EndKind.FAILED, "worker 1 (pid 101 on vm) is lost"))
    scene.dies(0, Death(status=76), "the job ends")
    scene.dies(1)
    scene.settle(6.0)
    scene.dies(2, Death(signal=15))
    scene.scheduler_dies(Death(status=76))
    assert "worker 1 (pid 101) was killed by signal 9" in scene.following.first_death("")


def test_schedulers_death_with_recovery_off_ends_the_job_too() -> None:
    scene = Scene(recovery=False)
    scene.scheduler_dies()
    assert [pid for pid, _ in scene.signals] == [100, 101, 102]
    scene.all_die(Death(signal=15))
    assert scene.outcome() == (EndKind.FAILED, 76)
    assert "the scheduler (pid 99) was killed by signal 9" in scene.result().verdict.cause


def test_schedulers_exit_status_with_recovery_off_shows_the_finished_job() -> None:
    scene = Scene(recovery=False)
    scene.all_die(Death(status=0))
    scene.scheduler_dies(Death(status=0))
    assert scene.outcome() == (None, 0)


def test_scheduler_that_cannot_start_ends_its_workers() -> None:
    scene = Scene(linked=False)
    scene.scheduler_dies(Death(status=75), line="samebits: SCHED_PORT=8118 cannot be listened on")
    assert [pid for pid, _ in scene.signals] == [100, 101, 102]
    scene.all_die(Death(signal=15))
    assert scene.result().verdict.exit_code == 75
    assert "SCHED_PORT=8118 cannot be listened on" in scene.result().verdict.cause


def test_restarted_scheduler_that_cannot_start_leaves_training_alone() -> None:
    scene = Scene(linked=False, restarts=True)
    scene.scheduler_dies(Death(status=75), line="SCHED_PORT=8118 cannot be listened on", stored=view(source=JOURNAL))
    assert scene.signals == []
    assert "the ranks go on until one of them is lost" in scene.said()


NOBODY = view(workers=(), generation=0, alive=0, phase="filling; waiting for 0, 1, 2")
TYPO = Failure("ModuleNotFoundError: No module named 'torhc'", "train.py:1")


def starting() -> Scene:
    scene = Scene(linked=False)
    scene.following.linked()
    scene.heard(NOBODY)
    return scene


def test_script_that_cannot_start_ends_the_job_with_one_line_for_all() -> None:
    scene = starting()
    for node in range(3):
        scene.dies(node, Death(status=1), TYPO, alone=False, has_joined=False)
    words = "workers 0, 1, 2 failed at train.py:1: ModuleNotFoundError: No module named 'torhc'"
    assert scene.lines == [words]
    assert scene.stop_by == words
    scene.heard(ended(EndKind.STOPPED, f"stopped by {words}"))
    scene.scheduler_dies(Death(status=78))
    assert scene.outcome() == (EndKind.SCRIPT_FAILED, 87)
    assert scene.result().verdict.cause == words


def test_workers_killed_before_they_joined_are_waited_for() -> None:
    scene = starting()
    scene.all_die()
    due = scene.following.wake_at()
    assert due == scene.now + 11  # twice NODE_TIMEOUT plus a moment
    scene.settle(10.9)
    assert scene.stop_by is None
    scene.settle(0.1)
    assert scene.stop_by is not None
    assert "was killed by signal 9" in scene.stop_by
    scene.heard(ended(EndKind.STOPPED, f"stopped by {scene.stop_by}"))
    scene.scheduler_dies(Death(status=78))
    assert scene.outcome() == (EndKind.INTERRUPTED, 77)


def test_script_that_never_joins_is_not_finished() -> None:
    scene = starting()
    scene.dies(0, Death(status=0), has_joined=False)
    assert "worker 0 (pid 100) ended with status 0 and never called samebits.init()" in scene.lines[0]
    assert "Fix: add `import samebits` and `samebits.init()`" in scene.lines[0]
    assert "RECOVER" not in scene.said()
    for node in (1, 2):
        scene.dies(node, Death(status=0), alone=False, has_joined=False)
    scene.scheduler_dies(Death(status=78))
    assert scene.outcome() == (EndKind.UNTRAINED, 88)


def test_silent_process_is_named_with_the_lines_its_script_lacks() -> None:
    scene = starting()
    scene.following.never_joined(["worker_0", "worker_2"], 15.0)
    scene.settle()
    assert scene.lines[0].startswith("workers 0, 2 have run for 15 s without calling samebits.init()")
    assert "`@samebits.elastic.run`" in scene.lines[0]


def test_runtime_error_in_every_worker_is_the_jobs_exit_status() -> None:
    scene = starting()
    for node in range(3):
        scene.dies(node, Death(status=85), "another CLUSTER_SECRET. Fix: compare", alone=False, has_joined=False)
    scene.scheduler_dies(Death(status=78))
    assert scene.result().verdict.exit_code == 85


def test_exception_in_one_rank_says_what_the_others_do() -> None:
    scene = Scene()
    scene.dies(2, Death(status=1), Failure("ValueError: the loss is nan", "train.py:88"))
    assert scene.lines == [
        "worker 2 (pid 102) failed at train.py:88: ValueError: the loss is nan; the others wait for it until 2802 "
        "(TOPO_TIMEOUT=1800 s). Fix: correct the script, then RECOVER"
    ]


def test_failed_worker_with_a_spare_or_a_smaller_world_is_not_waited_for() -> None:
    scene = Scene()
    scene.heard(view(spares=(worker(3, slot=None),), spares_alive=1))
    scene.dies(2)
    assert "; a spare takes its place. Fix: RECOVER brings it back" in scene.lines[0]
    scene = Scene()
    scene.heard(view(min_world_size=2))
    scene.dies(2)
    assert "; the others continue without it after 10 s (shrink in GRACE)." in scene.lines[0]


def test_equal_simultaneous_deaths_are_one_line() -> None:
    scene = Scene()
    scene.following.found("worker_3", process(103), is_own=True)
    scene.dies(0, alone=False)
    assert scene.lines == [], "others may follow"
    scene.dies(2, alone=False)
    scene.settle(GATHER_S)
    assert len(scene.lines) == 1
    assert scene.lines[0].startswith("workers 0, 2 were killed by signal 9 (SIGKILL); the others wait for them until")
    assert scene.lines[0].endswith("Fix: RECOVER brings them back")


@pytest.mark.parametrize(("count", "more"), [(NAMED, ""), (NAMED + 1, " and 1 more")])
def test_named_deaths_are_bounded_and_the_rest_counted(count: int, more: str) -> None:
    alike = [WorkerExit(str(number), 100 + number, Death(signal=9)) for number in reversed(range(count))]
    names = ", ".join(map(str, range(NAMED)))
    assert sentence(alike) == f"workers {names}{more} were killed by signal 9 (SIGKILL)"


def test_death_is_reported_before_its_consequence() -> None:
    scene = Scene()
    scene.following.found("worker_3", process(103), is_own=True)
    scene.heard(view(spares=(worker(3, slot=None),), spares_alive=1))
    scene.dies(1, alone=False)
    taken = (worker(0), worker(3, slot=1), worker(2))
    scene.heard(view(workers=taken, retired=(worker(1, PresenceState.LOST, slot=None),)))
    assert "worker 1 (pid 101) was killed" in scene.lines[0] and "; a spare takes its place" in scene.lines[0]
    assert "took the place of worker 1" in scene.lines[1]
    scene = Scene()
    scene.following.found("worker_3", process(103), is_own=True)
    scene.heard(view(workers=taken, retired=(worker(1, PresenceState.LOST, slot=None),)))
    scene.dies(1)
    assert "wait for it" not in scene.said(), "the scheduler reported it first"


def test_continuous_deaths_are_not_gathered_forever() -> None:
    scene = Scene()
    for node in range(3, 30):
        scene.following.found(f"worker_{node}", process(100 + node), is_own=True)
    for node in range(3, 18):
        scene.following.died(f"worker_{node}", process(100 + node), KILLED, "", scene.now)
        scene.settle(0.2)
    assert len(scene.lines) == 1


def test_worker_that_exited_with_0_is_not_to_be_restarted() -> None:
    scene = Scene()
    scene.dies(1, Death(status=0))
    assert "worker 1 (pid 101) ended with status 0 before training was finished" in scene.lines[0]
    assert "Fix" not in scene.said()


def test_training_does_not_start_without_a_scheduler() -> None:
    scene = starting()
    scene.scheduler_dies(stored=view(source=JOURNAL, phase="no scheduler", generation=0, alive=0))
    assert "; its workers wait for it. Fix: RECOVER brings it back" in scene.said()
    assert "the ranks go on" not in scene.said()


def test_replacements_still_starting_when_the_scheduler_gave_up_are_not_ended() -> None:
    """Each follower leaves them alone. The one that started them will start the scheduler as well."""
    stranger, starter = Scene(), Scene(restarts=True)
    for scene, own in ((stranger, False), (starter, True)):
        scene.all_die(KILLED)
        for node in range(3):
            scene.following.found(f"worker_{node}", process(200 + node), is_own=own)
        lost = tuple(worker(node, PresenceState.LOST) for node in range(3))
        scene.heard(view(ended=interruption("no worker is left"), workers=lost, phase="ending"))
        assert scene.following.result is None
        scene.scheduler_dies(Death(status=77))
        scene.settle(60)
        assert scene.signals == []
        assert scene.outcome() == (EndKind.INTERRUPTED, 77)
    assert not stranger.result().call_again
    assert starter.result().call_again


@pytest.mark.parametrize(
    "cause", ["no worker is left; first cause: unknown", "training restarted 1 times (RESET_LIMIT)"]
)
def test_supervisor_continues_with_its_replacements_or_ends_them(cause: str) -> None:
    scene = Scene()
    scene.following.supervised = True
    scene.all_die(KILLED)
    for node in range(3):
        scene.following.found(f"worker_{node}", process(200 + node), is_own=True)
    lost = tuple(worker(node, PresenceState.LOST) for node in range(3))
    scene.heard(view(ended=interruption(cause), workers=lost, phase="ending"))
    scene.following.supervised = False  # it stops supervising once the job is over
    scene.scheduler_dies(Death(status=77))
    scene.settle(60)
    if cause.startswith("no worker"):
        assert scene.signals == []
        assert scene.result().call_again
    else:
        assert {pid for pid, _ in scene.signals} == {200, 201, 202}
        assert scene.following.result is None


def test_start_is_announced_only_for_restarted_processes() -> None:
    scene = Scene()
    scene.following.supervised = True
    scene.dies(0, KILLED, alone=False, follows="a new process is started in its place")
    scene.dies(1, KILLED)
    assert [line.partition("(SIGKILL)")[2] for line in scene.lines] == ["; a new process is started in its place", ""]


def test_different_failures_of_workers_are_all_named_up_to_a_bound() -> None:
    scene = Scene()
    lost = tuple(worker(node, PresenceState.LOST) for node in range(3))
    scene.heard(view(generation=0, phase="filling", alive=0, workers=lost))
    for node, place in enumerate(("train.py:3", "train.py:9", "train.py:3")):
        scene.dies(node, Death(status=1), Failure("ValueError: x", place), alone=False)
    assert scene.stop_by == (
        "workers 0, 2 failed at train.py:3: ValueError: x; worker 1 (pid 101) failed at train.py:9: ValueError: x"
    )
    many = [WorkerExit(str(node), node, Death(status=node)) for node in range(1, MOST_WAYS + 3)]
    assert sentences(many).endswith(
        f"worker {MOST_WAYS} (pid {MOST_WAYS}) ended with status {MOST_WAYS}; 2 more ended in other ways"
    )


def test_ctrl_c_ends_replacements_as_well() -> None:
    scene = Scene(own=False)
    scene.all_die(Death())
    scene.following.found("worker_1", process(201), is_own=False)
    scene.following.stop_asked("Ctrl-C", scene.now)
    scene.settle(6.0)
    assert (201, signal.SIGTERM) in scene.signals


def test_workers_of_a_large_jobs_first_snapshot_are_remembered() -> None:
    scene = Scene()
    scene.heard(view(workers=(), step=8))
    assert scene.following.view is not None
    assert len(scene.following.view.workers) == 3
    assert scene.following.view.step == 8


def test_promotion_of_a_spare_is_reported_and_a_dead_spare_is_called_one() -> None:
    scene = Scene()
    scene.following.found("worker_3", process(103), is_own=True)
    scene.heard(view(spares=(worker(3, slot=None),), spares_alive=1))
    assert scene.following.running() == 3
    scene.dies(1)
    taken = (worker(0), worker(3, slot=1), worker(2))
    scene.heard(view(workers=taken, retired=(worker(1, PresenceState.LOST, slot=None),), generation=1))
    assert (
        scene.lines[-1] == "spare 3 (pid 103) took the place of worker 1; worker 1 becomes a spare once it is restarted"
    )
    assert scene.following.running() == 3
    again = Scene()
    again.following.found("worker_3", process(103), is_own=True)
    again.heard(view(spares=(worker(3, slot=None),), spares_alive=1))
    again.dies(3, identity=process(103))
    assert again.lines == ["spare 3 (pid 103) was killed by signal 9 (SIGKILL). Fix: RECOVER brings it back"]


def test_running_spare_does_not_delay_the_end() -> None:
    scene = Scene()
    scene.following.found("worker_3", process(103), is_own=True)
    scene.heard(view(spares=(worker(3, slot=None),), spares_alive=1))
    scene.all_die()
    assert scene.following.running() == 0
    scene.scheduler_dies()
    assert scene.following.result is None
    scene.dies(3, identity=process(103))
    assert scene.outcome() == (EndKind.INTERRUPTED, 77)


def test_spare_is_ended_with_the_job() -> None:
    scene = Scene()
    scene.following.found("worker_3", process(103), is_own=True)
    scene.heard(view(spares=(worker(3, slot=None),), spares_alive=1))
    scene.following.stop_asked("Ctrl-C", scene.now)
    scene.settle(6.0)
    assert (103, signal.SIGTERM) in scene.signals


def test_deaths_in_words() -> None:
    words: dict[str, Any] = {
        "ended with status 3": Death(status=3),
        "was killed by signal 11 (SIGSEGV)": Death(signal=11),
        "was killed by signal 40": Death(signal=40),
        "is gone": Death(),
    }
    assert {text: str(death) for text, death in words.items()} == {text: text for text in words}


@pytest.mark.parametrize(("exit_code", "told"), [(64, 64), (EndKind.INTERRUPTED.exit_code, 0)])
def test_scheduler_learns_the_code_of_an_error_that_every_retry_repeats(exit_code: int, told: int) -> None:
    scene = Scene(restarts=True)
    scene.following.give_up(JobOutcome(EndKind.INTERRUPTED, "worker 1 ended with status 64", exit_code), scene.now)
    orders = scene.following.passed(scene.now)
    assert (orders.stop_by, orders.stop_status) == ("worker 1 ended with status 64", told)
