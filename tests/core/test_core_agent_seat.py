"""The worker's side: registering, being told to wait, and a scheduler that is unreachable."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast, get_args

import pytest

from samebits.core.agent.agent_events import (
    AgentReady,
    Connected,
    Disconnected,
    MustEnd,
    Observed,
    SchedulerAway,
    SchedulerBack,
    ToldToWait,
    Trains,
)
from samebits.core.end_kinds import EndKind
from samebits.core.messages import (
    PROTOCOL,
    Activity,
    AddressMap,
    Admitted,
    CommittedPoint,
    Depart,
    EndJob,
    EqualPoint,
    Explain,
    Fenced,
    Finished,
    FromScheduler,
    GiveUp,
    Heartbeat,
    KeyAnswer,
    KeyOutcome,
    Pending,
    RankPosition,
    Refusal,
    Refused,
    Register,
    RoundId,
    RoundOpened,
    StopAt,
)
from samebits.core.point import Point
from samebits.core.reports import Body, Delivery, Report
from samebits.core.values import replace
from tests.core.desk import CREDENTIAL, ME, STAGES, Desk, done, finished, forming, seated, started, training, waiting
from tests.core.house import JOB_NAME, SETTINGS

# ---- registering


LAUNCHED = "job-of-the-launcher"


def launched() -> Desk:
    """Return a worker without a seat whose launcher named the job."""
    desk = Desk(job=LAUNCHED)
    desk.step(Connected())
    return desk


def test_worker_registers_with_the_job_its_launcher_named() -> None:
    desk = launched()
    assert [message.job for message in desk.said(Register)] == [LAUNCHED]
    desk.hear(Admitted("mine", LAUNCHED, 1, 3, 1, 4, None))
    assert desk.agent.seated


@pytest.mark.parametrize(
    "message",
    [
        Admitted("mine", "job-1", 1, 3, 1, 4, None),
        EndJob("job-1", 1, EndKind.FINISHED, "over"),
        EndJob("job-1", 1, EndKind.STOPPED, "stopped"),
    ],
    ids=["admitted", "finished", "stopped"],
)
def test_worker_ignores_the_scheduler_of_another_launcher(message: FromScheduler) -> None:
    desk = launched()
    desk.hear(message)
    assert (desk.ready.sends, desk.ready.notices) == ([], [])
    assert not desk.agent.seated


def test_worker_registers_on_every_connection() -> None:
    desk = Desk()
    desk.step(Connected())
    assert desk.ready.sends == [Register(PROTOCOL, "", JOB_NAME, "3", "mine", 0, ME, SETTINGS)]
    desk.admitted()
    desk.step(Disconnected())
    assert desk.ready.sends == []
    desk.step(Connected())
    assert desk.ready.sends == [Register(PROTOCOL, "job-1", JOB_NAME, "3", "mine", 1, ME, SETTINGS, term=1)]


class Warmth(Body, frozen=True, tag=999):
    """A kind of report that the agent does not know by name."""

    degrees: int
    delivery: ClassVar[Delivery] = Delivery.KEPT


def test_every_kept_report_is_sent_on_every_connection() -> None:
    warm = cast(Report, Warmth(40))
    desk = Desk()
    desk.step(Observed(warm))
    assert not desk.reported(Warmth), "nothing can be sent before the admission"
    desk.step(Connected())
    desk.admitted()
    assert [said.body for said in desk.reported(Warmth)] == [warm]
    desk.step(Disconnected())
    desk.step(Connected())
    desk.admitted()
    assert [said.body for said in desk.reported(Warmth)] == [warm]
    desk.passes(1.0)
    assert not desk.reported(Warmth), "once on each connection"


def test_worker_registers_again_until_it_is_answered() -> None:
    desk = Desk()
    desk.step(Connected())
    assert desk.ready.wake_at == desk.now + 1
    desk.passes(0.9)
    assert desk.ready.sends == []
    for _ in range(3):
        desk.passes(1.0)
        assert len(desk.said(Register)) == 1
    desk.admitted()
    desk.passes(1.0)
    assert desk.said(Register) == []


def test_worker_sends_nothing_without_a_connection() -> None:
    desk = Desk()
    for _ in range(5):
        desk.passes(10.0)
        assert desk.ready.sends == []


def test_seat_is_announced_once_and_kept_by_heartbeats() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.admitted()
    assert desk.told(Admitted) == [Admitted("mine", "job-1", 1, 3, 1, 4, None)]
    assert desk.said(Heartbeat) == [], "its Register has reported everything"
    desk.admitted()
    assert desk.told(Admitted) == []
    desk.passes(1.0)
    assert desk.said(Heartbeat) == [Heartbeat(CREDENTIAL, 1, Activity.SEATED, 0, None, 0)]


def test_heartbeats_spread_out_after_an_event_common_to_all() -> None:
    desk = Desk(first_beat_s=0.25)

    def beats_after(after_s: float) -> None:
        assert desk.ready.wake_at == desk.now + after_s
        assert desk.passes(after_s).sends == desk.said(Heartbeat) != []

    desk.step(Connected())
    desk.admitted()
    beats_after(0.25)
    beats_after(1.0)
    desk.enters()
    beats_after(0.25)
    desk.opens()
    desk.enters()
    beats_after(0.25)
    desk.starts()
    beats_after(0.25)
    beats_after(1.0)
    desk.step(Trains(1))
    beats_after(0.25)
    desk.step(Disconnected())
    desk.step(Connected())
    desk.admitted()
    beats_after(0.25)
    beats_after(1.0)
    beats_after(1.0)


def test_admission_read_after_the_connection_closed_is_ignored() -> None:
    """A process that was stopped reads of the close first, then what had arrived before it."""
    desk = Desk()
    desk.step(Connected())
    desk.admitted()
    desk.step(Disconnected())
    desk.step(Connected())
    desk.step(Disconnected())
    desk.admitted(term=2)
    desk.passes(1800.0)
    assert [type(notice) for notice in desk.ready.notices] == [MustEnd]


def test_admission_by_another_job_is_ignored() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.admitted()
    desk.hear(Admitted("mine", "job-2", 9, 0, 1, 4, None))
    assert (desk.agent.job, desk.agent.term) == ("job-1", 1)


_ANOTHER_JOB = (  # A path that was wiped: its first term and this worker's first incarnation there are 1 as well.
    RoundOpened("job-0", 1, 1, RoundId(1, 2), "because", "", RankPosition(1, 1, 4)),
    replace(started(2, number=1), job="job-0"),
    AddressMap("job-0", 1, 1, (b"a", b"b")),
    CommittedPoint("job-0", 1, 1, Point(10, 1)),
    Finished("job-0", 1, Point(60, 1)),
    Fenced("job-0", "mine", 1, "the seat is held by another"),
    EndJob("job-0", 1, EndKind.STOPPED, "a user asked"),
)


@pytest.mark.parametrize("stage", STAGES.values(), ids=[stage.name for stage in STAGES])
@pytest.mark.parametrize("message", _ANOTHER_JOB, ids=lambda message: type(message).__name__)
def test_late_message_of_another_jobs_scheduler_is_ignored(stage: Callable[[], Desk], message: FromScheduler) -> None:
    desk = stage()
    before = desk.agent.slot, desk.agent.offered_place
    desk.hear(message)
    assert desk.ready.notices == [] and desk.ready.sends == []
    assert (desk.agent.slot, desk.agent.offered_place) == before


_EARLIER = (  # Sent in this job by a scheduler that was superseded and may still be alive.
    Admitted("mine", "job-1", 1, 3, 1, 4, None),
    Refused("mine", Refusal.NUMERICS, 0.0, "text", "job-1", 1),
    Refused("mine", Refusal.OTHER_SETTINGS, 0.0, "text", "job-1", 1),
    Refused("mine", Refusal.ALIVE, 9.0, "text", "job-1", 1),
    Fenced("job-1", "mine", 1, "the seat is held by another", term=1),
    RoundOpened("job-1", 1, 1, RoundId(1, 9), "because", "", RankPosition(1, 1, 4)),
    replace(started(9, number=9), term=1, round=RoundId(1, 9)),
    AddressMap("job-1", 1, 1, (b"a", b"b")),
    CommittedPoint("job-1", 1, 9, Point(10, 9)),
    EqualPoint("job-1", 1, 9, Point(10, 9)),
    Explain("job-1", 1, Point(10, 1), 1),
    GiveUp("job-1", 1, 1, "text"),
    Depart("job-1", 1, 1, "text"),
    StopAt("job-1", 1, 9, 3),
    KeyAnswer("mine", 1, 1, KeyOutcome.DONE),
    EndJob("job-1", 1, EndKind.STOPPED, "a user asked"),
)


@pytest.mark.parametrize("stage", STAGES.values(), ids=[stage.name for stage in STAGES])
@pytest.mark.parametrize("message", _EARLIER, ids=lambda message: type(message).__name__)
def test_message_of_an_earlier_term_is_ignored(stage: Callable[[], Desk], message: FromScheduler) -> None:
    desk = stage()
    desk.admitted(term=2)
    before = desk.agent.term, desk.agent.slot, desk.agent.offered_place, desk.agent.offered, desk.agent.generation
    desk.hear(message)
    assert desk.ready.notices == [] and desk.ready.sends == []
    after = desk.agent.term, desk.agent.slot, desk.agent.offered_place, desk.agent.offered, desk.agent.generation
    assert after == before


def test_every_message_but_two_carries_a_term() -> None:
    """A message without a term is accepted from any scheduler. A new one must get a term or be listed here."""
    without = {kind.__name__ for kind in get_args(FromScheduler) if "term" not in kind.__struct_fields__}
    assert without == {"Status"}, "Status is never sent to a worker"
    assert {type(message).__name__ for message in _EARLIER} == {kind.__name__ for kind in get_args(FromScheduler)} - {
        "Status",
        "Finished",
        "Pending",
    }, "Finished is true in any term; Pending is for a worker without a seat"


def test_admission_of_another_session_is_ignored() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.hear(Admitted("other", "job-1", 1, 3, 1, 4, None))
    assert not desk.agent.seated and desk.ready.notices == []


def test_pending_is_announced() -> None:
    desk = Desk()
    desk.step(Connected())
    desk.hear(Pending("mine", 1, 3, 8))
    assert desk.ready.notices == [ToldToWait("3/8 registered; waiting for the others", 0.0)]
    desk.passes(1.0)
    assert desk.said(Register), "asking again keeps it known"


# ---- refusals


def refused(desk: Desk, refusal: Refusal, retry_after_s: float, session: str = "mine") -> AgentReady:
    return desk.hear(Refused(session, refusal, retry_after_s, "text"))


@pytest.mark.parametrize("refusal", [Refusal.ALIVE, Refusal.COOLING_DOWN, Refusal.FULL])
def test_worker_that_must_wait_retries_at_the_given_time(refusal: Refusal) -> None:
    desk = Desk()
    desk.step(Connected())
    refused(desk, refusal, 12.5)
    assert desk.ready.notices == [ToldToWait("text", 12.5)]
    assert desk.ready.wake_at == pytest.approx(desk.now + 12.5)
    desk.passes(12.4)
    assert desk.ready.sends == []
    desk.passes(0.1)
    assert len(desk.said(Register)) == 1


def test_new_connection_asks_at_once() -> None:
    desk = Desk()
    desk.step(Connected())
    refused(desk, Refusal.COOLING_DOWN, 30.0)
    desk.step(Disconnected())
    desk.step(Connected())
    assert len(desk.said(Register)) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal.FULL,
        Refusal.OTHER_JOB,
        Refusal.OTHER_SETTINGS,
        Refusal.PROTOCOL,
        Refusal.RECOVERY_OFF,
        Refusal.STOPPING,
    ],
)
def test_process_ends_if_waiting_cannot_help(refusal: Refusal) -> None:
    desk = Desk()
    desk.step(Connected())
    refused(desk, refusal, 0.0)
    assert desk.ready.notices == [MustEnd(EndKind.REFUSED, "text")]
    assert desk.ready.wake_at is None
    desk.passes(100.0)
    assert desk.ready.sends == [] and desk.ready.notices == []


@pytest.mark.parametrize("stage", [seated, waiting, forming, training])
def test_differing_settings_end_the_process_in_every_stage(stage: Callable[[], Desk]) -> None:
    desk = stage()
    refused(desk, Refusal.NUMERICS, 0.0)
    assert desk.ready.notices == [MustEnd(EndKind.NUMERICS, "text")]


def test_refusal_of_another_session_is_ignored() -> None:
    desk = Desk()
    desk.step(Connected())
    refused(desk, Refusal.OTHER_JOB, 0.0, session="other")
    assert desk.ready.notices == []


def test_refusal_overtaken_by_the_admission_is_ignored() -> None:
    desk = seated()
    refused(desk, Refusal.ALIVE, 30.0)
    assert desk.ready.notices == []
    desk.passes(1.0)
    assert len(desk.said(Heartbeat)) == 1


def test_duplicate_gives_up_after_topo_timeout() -> None:
    desk = Desk(topo_timeout_s=60.0)
    desk.step(Connected())
    for _ in range(11):
        refused(desk, Refusal.ALIVE, 5.0)
        desk.passes(5.0)
        assert desk.told(MustEnd) == []
    refused(desk, Refusal.ALIVE, 5.0)
    desk.passes(5.0)
    assert desk.ready.notices == [
        MustEnd(EndKind.DUPLICATE, "worker 3: its seat is still held after 60 s (TOPO_TIMEOUT)")
    ]


def test_patience_of_a_duplicate_restarts_once_the_holder_is_lost() -> None:
    desk = Desk(topo_timeout_s=60.0)
    desk.step(Connected())
    refused(desk, Refusal.ALIVE, 30.0)
    desk.passes(30.0)
    refused(desk, Refusal.COOLING_DOWN, 28.0)
    desk.passes(28.0)
    refused(desk, Refusal.ALIVE, 30.0)
    desk.passes(30.0)
    assert desk.told(MustEnd) == []


def test_worker_waiting_for_any_seat_gives_up_after_topo_timeout() -> None:
    desk = Desk(topo_timeout_s=60.0)
    desk.step(Connected())
    for _ in range(12):
        refused(desk, Refusal.FULL, 5.0)
        desk.passes(5.0)
    assert desk.ready.notices == [
        MustEnd(EndKind.REFUSED, "worker 3: every seat is still held after 60 s (TOPO_TIMEOUT)")
    ]


def test_stranger_at_the_schedulers_address_does_not_stop_training() -> None:
    desk = training()
    desk.step(Disconnected())
    desk.step(Connected())
    refused(desk, Refusal.OTHER_JOB, 0.0)
    assert desk.told(MustEnd) == []
    assert desk.ready.notices == [ToldToWait("text", 5.0)]
    desk.passes(4.9)
    assert desk.ready.sends == []
    desk.passes(0.1)
    assert len(desk.said(Register)) == 1
    desk.passes(100_000.0)
    assert desk.told(MustEnd) == []


# ---- an unreachable scheduler


@pytest.mark.parametrize("stage", STAGES.values(), ids=[one.name for one in STAGES])
def test_loss_and_return_of_the_scheduler_are_announced_once(stage: Callable[[], Desk]) -> None:
    desk = stage()
    desk.step(Disconnected())
    assert desk.ready.notices == [SchedulerAway()]
    desk.step(Disconnected())
    assert desk.ready.notices == []
    desk.now += 3.0
    desk.step(Connected())
    desk.now += 0.5
    desk.admitted(term=2)
    assert desk.ready.notices == [SchedulerBack(2, 3.5)]
    assert desk.agent.term == 2


def test_repeated_admission_does_not_count_as_a_return() -> None:
    desk = seated()
    desk.admitted()
    assert desk.ready.notices == []


@pytest.mark.parametrize("stage", [seated, waiting, forming, done])
def test_idle_worker_waits_topo_timeout_for_a_scheduler(stage: Callable[[], Desk]) -> None:
    desk = stage()
    desk.step(Disconnected())
    desk.passes(1799.9)
    assert desk.ready.notices == []
    assert desk.ready.wake_at == pytest.approx(desk.now + 0.1)
    desk.passes(0.1)
    assert desk.ready.notices == [
        MustEnd(EndKind.UNREACHABLE, "worker 3: no scheduler answered after 1800 s (TOPO_TIMEOUT)")
    ]
    desk.passes(1.0)
    assert desk.ready.notices == []


@pytest.mark.parametrize("stage", [training, finished])
def test_training_or_finished_worker_does_not_wait_for_a_scheduler(stage: Callable[[], Desk]) -> None:
    desk = stage()
    desk.step(Disconnected())
    desk.passes(1e6)
    assert desk.ready.notices == []


def test_worker_that_never_found_a_scheduler_gives_up_too() -> None:
    desk = Desk(topo_timeout_s=60.0)
    assert desk.passes(59.9).notices == []
    desk.passes(0.1)
    assert desk.told(MustEnd)[0].reason is EndKind.UNREACHABLE


def test_unanswered_connection_does_not_count_as_a_scheduler() -> None:
    desk = Desk(topo_timeout_s=60.0)
    desk.step(Connected())
    for _ in range(59):
        assert desk.passes(1.0).notices == []
    desk.passes(1.0)
    assert desk.told(MustEnd)[0].reason is EndKind.UNREACHABLE


def test_pending_process_does_not_time_out() -> None:
    """The scheduler ends a job that never fills up. Until then its answers count as contact."""
    desk = Desk(topo_timeout_s=60.0)
    desk.step(Connected())
    for _ in range(40):
        desk.passes(1.0)
        desk.hear(Pending("mine", 1, 1, 8))
    desk.passes(30.0)
    assert desk.told(MustEnd) == []


def test_admission_of_an_older_term_is_ignored() -> None:
    desk = seated()
    desk.step(Disconnected())
    desk.step(Connected())
    desk.admitted(term=3)
    desk.admitted(term=2)
    assert desk.agent.term == 3 and desk.ready.sends == []
