"""Hang classification: silent processes by what their host shows of them, and the message for each."""

from __future__ import annotations

import pytest

from samebits.core.hangs import SILENT_KINDS, Doing, Hang, ProcessState, classify_hang, fix_of
from samebits.core.messages import GiveUp, ProcessSeen
from samebits.core.scheduler import Seen
from tests.core.house import House
from tests.core.test_core_hang_judge import WAITS, report, training_for_a_while


@pytest.mark.parametrize(
    ("process_state", "hang"),
    [
        (None, Hang.SILENT),
        (ProcessState(Doing.RUNS), Hang.SILENT),  # unknown whether its Python code runs
        (ProcessState(Doing.RUNS, 0.3), Hang.CUT_OFF),
        (
            ProcessState(Doing.DISK, 0.3),
            Hang.CUT_OFF,
        ),  # its first thread waits for a disk, which does not explain the silence
        (ProcessState(Doing.RUNS, 5.9), Hang.LOCKED),
        (ProcessState(Doing.DISK, 5.9), Hang.DISK),
        (ProcessState(Doing.DISK), Hang.DISK),
        (ProcessState(Doing.STOPPED, 5.9), Hang.STOPPED),
        (ProcessState(Doing.STOPPED, 0.1), Hang.STOPPED),  # just stopped
        (ProcessState(Doing.TRACED), Hang.TRACED),
    ],
)
def test_silent_processes_are_classified(process_state: ProcessState | None, hang: Hang) -> None:
    assert classify_hang(process_state, 6.0) is hang and hang in SILENT_KINDS


def test_each_hang_but_the_unknown_one_has_a_fix() -> None:
    assert {hang for hang in SILENT_KINDS if not fix_of(hang, 4711)} == {Hang.SILENT}
    assert fix_of(Hang.STOPPED, 4711) == "kill -CONT 4711"


def silent_house(node_timeout_s: float = 20.0) -> House:
    """Worker 1 has been silent for 11 s, and worker 0 waits for it."""
    house = training_for_a_while(2, step_timeout_s=6.0, node_timeout_s=node_timeout_s)
    for second in range(1, 11):
        house.tick(1.0)
        report(house, "0", WAITS._replace(still_s=float(second)))
    house.now += 1.0
    return house


def test_shell_learns_which_process_to_examine_and_the_message_gives_the_result() -> None:
    house = silent_house()
    assert [seat.node for seat in house.core.silent(house.now)] == ["1"]
    house.step(Seen("s1", ProcessState(Doing.STOPPED, 11.0)))
    report(house, "0", WAITS._replace(still_s=11.0))
    house.tick()
    (said,) = house.notes
    assert "worker 1 has not been heard from for 11 s: it is stopped (SIGSTOP), worker 0 waits for it in" in said
    assert house.core.found is not None and [hang for _, hang in house.core.found.culprits] == [Hang.STOPPED]


def test_unexamined_process_is_only_reported_as_silent() -> None:
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


def test_loss_records_the_observation_durably_and_its_line_gives_the_fix() -> None:
    house = training_for_a_while(2)
    assert lose(house, ProcessState(Doing.STOPPED, 6.0)) == "silent for 5 s (NODE_TIMEOUT): it is stopped (SIGSTOP)"
    assert house.notes[0].endswith("it is stopped (SIGSTOP). Fix: kill -CONT 1001")
    house.crash()
    assert "it is stopped (SIGSTOP)" in house.core.first_cause


@pytest.mark.parametrize("process_state", [None, ProcessState(Doing.RUNS)])
def test_loss_without_an_observation_guesses_nothing(process_state: ProcessState | None) -> None:
    assert lose(training_for_a_while(2), process_state) == "silent for 5 s (NODE_TIMEOUT)"


def test_observation_is_forgotten_once_the_process_speaks_again() -> None:
    house = training_for_a_while(2)
    house.now += 3.0
    house.step(Seen("s1", ProcessState(Doing.STOPPED, 3.0)))
    house.beat("1", step=10)
    assert lose(house, None) == "silent for 5 s (NODE_TIMEOUT)"


def test_observation_of_a_stranger_or_a_live_worker_changes_nothing() -> None:
    house = training_for_a_while(2)
    for session in ("nobody", "s0", "s1"):
        ready = house.step(Seen(session, ProcessState(Doing.STOPPED, 9.0)))
        assert not (ready.records or ready.sends or ready.notes)
    house.beat("0", step=10)
    house.beat("1", step=10)
    house.tick(1.0)
    assert house.notes == [] and not any(isinstance(one, GiveUp) for sent in house.sent.values() for one in sent)


def test_asking_which_to_examine_changes_nothing_and_skips_live_workers() -> None:
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


def test_observation_of_a_follower_on_the_host_counts_like_the_schedulers() -> None:
    house = training_for_a_while(2)
    house.now += 4.0
    house.step(told())
    assert house.ready.is_empty, "it is informational, and used only if the worker is lost"
    house.now -= 4.0
    assert lose(house, None) == "silent for 5 s (NODE_TIMEOUT): it is stopped (SIGSTOP)"


@pytest.mark.parametrize("liar", [told(host="host-b"), told(pid=7), told(started_at=2)])
def test_observation_of_another_process_is_ignored(liar: ProcessSeen) -> None:
    house = training_for_a_while(2)
    house.now += 4.0
    house.step(liar)
    house.now -= 4.0
    assert lose(house, None) == "silent for 5 s (NODE_TIMEOUT)"


def test_followers_observation_is_forgotten_once_the_process_speaks_again() -> None:
    house = training_for_a_while(2)
    house.now += 3.0
    house.step(told())
    house.beat("1", step=10)
    assert lose(house, None) == "silent for 5 s (NODE_TIMEOUT)"
