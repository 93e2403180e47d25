"""A worker's measurements: the newest of each, sent with a heartbeat, repeated if they may be lost."""

from __future__ import annotations

from samebits.core.agent.agent_events import Connected, Disconnected, Heard, Observed, Passed
from samebits.core.messages import Activity, Admitted, Heartbeat, ReportEnvelope
from samebits.core.reports import MAX_FIGURES, Figure, Figures
from samebits.core.values import replace
from tests.core.desk import Desk
from tests.core.house import House, policy, training_house

QUEUE = (Figure("queue", 7.0),)
ADMITTED = Admitted("mine", "job-1", 1, 3, 1, 4, None)


def seated() -> Desk:
    desk = Desk()
    desk.step(Connected())
    desk.hear(ADMITTED)
    return desk


def told(desk: Desk, *figures: Figure, after_s: float = 1.0) -> list[Figures]:
    """Report figures as a shell does, which sends only changed ones."""
    if figures != desk.figures:
        desk.figures = figures
        desk.step(Observed(Figures.of(figures)))
    desk.now += after_s
    desk.step(Passed(3))
    return [said.body for said in desk.reported(Figures)]


def test_newest_figures_go_with_a_heartbeat_and_only_once() -> None:
    desk = seated()
    assert told(desk, *QUEUE) == [Figures(QUEUE)]
    assert told(desk, *QUEUE) == []
    assert told(desk, Figure("queue", 8.0), after_s=0.1) == [], "between two heartbeats"
    assert told(desk, Figure("queue", 9.0)) == [Figures((Figure("queue", 9.0),))]
    assert told(desk) == [Figures(())]
    assert told(desk) == []


def test_no_figures_are_sent_without_a_scheduler() -> None:
    desk = seated()
    assert [told(desk) for _ in range(3)] == [[], [], []]


def test_figures_are_sent_again_on_a_new_connection() -> None:
    desk = seated()
    told(desk, *QUEUE)
    desk.step(Disconnected())
    assert told(desk, *QUEUE) == []
    desk.step(Connected())
    desk.step(Heard(replace(ADMITTED, term=2)))
    assert told(desk, *QUEUE) == [Figures(QUEUE)]


def test_figures_are_bounded() -> None:
    many = tuple(Figure(f"x{number}", 1.0) for number in range(MAX_FIGURES + 3))
    (message,) = told(seated(), *many)
    assert message.figures == many[:MAX_FIGURES]


# ---- the scheduler's side


def test_figures_belong_to_the_seat_and_change_nothing_else() -> None:
    house = House(policy(2)).fill().train()
    credential = house.credential("1")
    ready = house.receive(credential.session, ReportEnvelope(credential, Figures(QUEUE)))
    assert ready.is_empty
    found = [house.core.presence(node) for node in ("0", "1")]
    assert [one.figures for one in found if one is not None] == [(), QUEUE]


def test_figures_of_a_replaced_process_are_ignored() -> None:
    house = House(policy(2)).fill().train()
    credential = house.credential("1")
    house.receive(credential.session, ReportEnvelope(replace(credential, incarnation=7), Figures(QUEUE)))
    found = house.core.presence("1")
    assert found is not None and found.figures == ()


def test_figures_do_not_make_a_repeated_heartbeat_new() -> None:
    house = training_house()
    credential, state = house.credential("1"), house.core.state
    beat = Heartbeat(credential, state.term, Activity.TRAINING, state.generation_number, None, 7)
    assert house.receive("s1", beat).is_empty
    house.receive("s1", ReportEnvelope(credential, Figures(QUEUE)))
    assert house.core.repeats("s1", beat, house.now)
