"""Silent processes told apart by what is seen of them from their host, and what is said of each."""

from __future__ import annotations

import pytest

from samebits.core.hangs import SILENT_KINDS, Doing, Hang, ProcessState, classify_hang, fix_of
from samebits.core.messages import GiveUp, ProcessSeen
from samebits.core.scheduler import Seen
from tests.core.house import House
from tests.core.test_core_progress import WAITS, report, training_for_a_while


@pytest.mark.parametrize(
    ("process_state", "hang"),
    [
        (None, Hang.SILENT),
        (ProcessState(Doing.RUNS), Hang.SILENT),  # nobody can tell whether its Python runs
        (ProcessState(Doing.RUNS, 0.3), Hang.CUT_OFF),
        (
            ProcessState(Doing.DISK, 0.3),
            Hang.CUT_OFF,
        ),  # its first thread waits for a disk, and that is not why it is silent
        (ProcessState(Doing.RUNS, 5.9), Hang.LOCKED),
        (ProcessState(Doing.DISK, 5.9), Hang.DISK),
        (ProcessState(Doing.DISK), Hang.DISK),
        (ProcessState(Doing.STOPPED, 5.9), Hang.STOPPED),
        (ProcessState(Doing.STOPPED, 0.1), Hang.STOPPED),  # only just
        (ProcessState(Doing.TRACED), Hang.TRACED),
    ],
)
def test_silent_ones_are_told_apart(process_state: ProcessState | None, hang: Hang) -> None:
    assert classify_hang(process_state, 6.0) is hang and hang in SILENT_KINDS


def test_each_silent_kind_has_a_fix_but_the_unknown_one() -> None:
    assert {hang for hang in SILENT_KINDS if not fix_of(hang, 4711)} == {Hang.SILENT}
    assert fix_of(Hang.STOPPED, 4711) == "kill -CONT 4711"


def silent_house(node_timeout_s: float = 20.0) -> House:
    """Worker 1 has not been heard from for 11 s; worker 0 waits for it."""
    house = training_for_a_while(2, step_timeout_s=6.0, node_timeout_s=node_timeout_s)
    for second in range(1, 11):
        house.tick(1.0)
        report(house, "0", WAITS._replace(still_s=float(second)))
    house.now += 1.0
    return house


def test_the_shell_is_told_whom_to_look_at_and_the_sentence_says_what_was_seen() -> None:
    house = silent_house()
    assert [seat.node for seat in house.core.silent(house.now)] == ["1"]
    house.step(Seen("s1", ProcessState(Doing.STOPPED, 11.0)))
    report(house, "0", WAITS._replace(still_s=11.0))
    house.tick()
    (said,) = house.notes
    assert "worker 1 has not been heard from for 11 s: it is stopped (SIGSTOP), worker 0 waits for it in" in said
    assert house.core.found is not None and [hang for _, hang in house.core.found.culprits] == [Hang.STOPPED]


def test_where_nobody_looks_it_is_only_said_to_be_silent() -> None:
    house = silent_house()
    report(house, "0", WAITS._replace(still_s=11.0))
    house.tick()
    assert "worker 1 has not been heard from for 11 s, worker 0 waits for it" in house.notes[0]


def lose(house: House, process_state: ProcessState | None) -> str:
    house.now += 6.0
    house.beat("0", step=10)
    assert [seat.node for seat in house.core.silent(house.now)] == ["1"]
    if process_state is not None:
        house.step(Seen("s1", process_state))
    house.tick()
    assert house.seat("1").is_lost
    return house.seat("1").reason


def test_the_loss_says_what_was_seen_durably_and_its_line_how_to_mend_it() -> None:
    house = training_for_a_while(2)
    assert lose(house, ProcessState(Doing.STOPPED, 6.0)) == "silent for 5 s (NODE_TIMEOUT): it is stopped (SIGSTOP)"
    assert house.notes[0].endswith("it is stopped (SIGSTOP). Fix: kill -CONT 1001")
    house.crash()
    assert "it is stopped (SIGSTOP)" in house.core.first_cause


@pytest.mark.parametrize("process_state", [None, ProcessState(Doing.RUNS)])
def test_a_loss_of_which_nothing_was_seen_guesses_nothing(process_state: ProcessState | None) -> None:
    assert lose(training_for_a_while(2), process_state) == "silent for 5 s (NODE_TIMEOUT)"


def test_what_was_seen_before_it_spoke_again_is_forgotten() -> None:
    house = training_for_a_while(2)
    house.now += 3.0
    house.step(Seen("s1", ProcessState(Doing.STOPPED, 3.0)))
    house.beat("1", step=10)
    assert lose(house, None) == "silent for 5 s (NODE_TIMEOUT)"


def test_a_sight_of_a_stranger_or_of_one_who_speaks_changes_nothing() -> None:
    house = training_for_a_while(2)
    for session in ("nobody", "s0", "s1"):
        ready = house.step(Seen(session, ProcessState(Doing.STOPPED, 9.0)))
        assert not (ready.records or ready.sends or ready.notes)
    house.beat("0", step=10)
    house.beat("1", step=10)
    house.tick(1.0)
    assert house.notes == [] and not any(isinstance(one, GiveUp) for sent in house.sent.values() for one in sent)


def test_asking_whom_to_look_at_changes_nothing_and_leaves_out_those_who_speak() -> None:
    house = training_for_a_while(3)
    house.now += 6.0
    house.beat("0", step=10)
    house.beat("2", step=10)
    for _ in range(3):
        assert [seat.node for seat in house.core.silent(house.now)] == ["1"]
    assert len(house.core._leases._deadlines) <= 6
    house.tick()
    assert house.seat("1").is_lost and house.core.silent(house.now) == []


def told(host: str = "host-a", pid: int = 1001, started_at: int = 1) -> ProcessSeen:
    return ProcessSeen("1", host, pid, started_at, Doing.STOPPED, 3.0)


def test_what_a_follower_on_its_host_has_seen_counts_as_if_the_scheduler_had() -> None:
    house = training_for_a_while(2)
    house.now += 4.0
    house.step(told())
    assert house.ready.is_empty, "only words follow from it, and only where it is lost"
    house.now -= 4.0
    assert lose(house, None) == "silent for 5 s (NODE_TIMEOUT): it is stopped (SIGSTOP)"


@pytest.mark.parametrize("liar", [told(host="host-b"), told(pid=7), told(started_at=2)])
def test_what_is_told_of_another_process_is_nothing(liar: ProcessSeen) -> None:
    house = training_for_a_while(2)
    house.now += 4.0
    house.step(liar)
    house.now -= 4.0
    assert lose(house, None) == "silent for 5 s (NODE_TIMEOUT)"


def test_what_was_told_before_it_spoke_again_is_forgotten() -> None:
    house = training_for_a_while(2)
    house.now += 3.0
    house.step(told())
    house.beat("1", step=10)
    assert lose(house, None) == "silent for 5 s (NODE_TIMEOUT)"
