"""Asking nodes to leave: which are asked, what the history keeps, and that a worker is asked once."""

from __future__ import annotations

from samebits.account.events import Chronicle, EventKind
from samebits.core.messages import Depart, OperatorDecision
from tests.core.desk import Desk, training
from tests.core.house import House, training_house

WHY = "worker 1 leaves at the next commit: host b is gone"


def asked(house: House) -> dict[str, str]:
    return {
        session: message.text for session, sent in house.sent.items() for message in sent if isinstance(message, Depart)
    }


def test_living_nodes_are_asked_and_the_reason_is_logged() -> None:
    house = training_house(3)
    ready = house.step(OperatorDecision(WHY, ("1", "1", "7")))
    assert asked(house) == {house.seat("1").session: WHY}
    assert [note.text for note in ready.notes] == [WHY]
    assert not ready.records, "the worker decides when to leave"


def test_lost_or_departed_node_is_not_asked() -> None:
    house = training_house(3)
    house.leave("0")
    house.close(house.seat("2").session, gone=True)
    house.step(OperatorDecision(WHY, ("0", "2")))
    assert asked(house) == {}


def test_repeated_request_is_not_logged_again() -> None:
    house = training_house(2)
    ready = house.step(OperatorDecision("", ("1",)))
    assert (len(asked(house)), ready.notes) == (1, [])


def test_history_keeps_the_decision() -> None:
    house = training_house(2)
    chronicle = Chronicle(house.core.state, lambda _node: 7, 1000.0)
    chronicle.decided(WHY, ("1",), house.now)
    chronicle.decided("", ("1",), house.now)
    (event,) = chronicle.take([], [], [], house.now)
    assert (event.kind, event.text, event.step, event.more) == (EventKind.DECIDED, WHY, 7, {"drain": ["1"]})


def depart(job: str = "job-1", term: int = 1, incarnation: int = 1) -> Depart:
    return Depart(job, term, incarnation, WHY)


def test_worker_accepts_the_request_once_and_only_from_its_own_scheduler() -> None:
    desk: Desk = training()
    for other in (depart(job="job-2"), depart(term=0), depart(incarnation=2)):
        desk.hear(other)
        assert desk.told(Depart) == []
    desk.hear(depart())
    assert desk.told(Depart) == [depart()]
    desk.hear(depart())
    assert desk.told(Depart) == [], "a second signal would kill it while it leaves"
