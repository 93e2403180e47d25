"""The first cause of a generation's end: named, durable, doubled if two died at once, forgotten after recovery."""

from __future__ import annotations

from typing import Any

import pytest

from samebits.core.causes.table import DEFAULT, CauseClass
from samebits.core.ledger import Liveness
from samebits.core.messages import Activity, Process, ProcessEnded, ReportEnvelope
from samebits.core.records import CauseFound, JobInterrupted, SeatLost
from samebits.core.reports import LastWords
from samebits.core.rounds.first_losses import Causes, observed, sentence
from samebits.core.state import JobState
from tests.core.house import House, training_house

DIED = "its connection closed and its process is gone"


def cause(rank: int, at: float = 10.0, *, step: int = 412, text: str = DIED, generation: int = 1) -> CauseFound:
    return CauseFound(generation, rank, str(rank), Process(f"h{rank}#boot", 4700 + rank, 1, "cpu"), step, at, text)


def test_sentence() -> None:
    first = cause(3, text="failed at train.py:88: RuntimeError: no")
    text = "rank 3 (node 3, host h3, pid 4703) failed first, at step 412: failed at train.py:88: RuntimeError: no"
    assert sentence([first]) == text
    assert sentence([first], [2, 0, 1]) == f"{text}; ranks 0–2 followed"
    assert sentence([first], [5]) == f"{text}; rank 5 followed"
    assert sentence([first], [0, 2]) == f"{text}; ranks 0 and 2 followed"
    assert sentence([first], list(range(0, 40, 2))).endswith("; ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more followed")
    assert "at step" not in sentence([cause(0, step=0)])


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("global rank 1 (pid 8893) was killed by signal 9", CauseClass.NODE),
        ("global rank 1 (pid 8893) was killed by signal 11", CauseClass.SOFTWARE),
        ("global rank 1 (pid 8893) ended with status 1, failed at train.py:7: KeyError: 'x'", CauseClass.SOFTWARE),
        ("failed: a text about rank 1 (pid 1) that was killed by signal 9", CauseClass.SOFTWARE),
    ],
)
def test_killed_worker_that_its_launcher_reports_is_not_a_script_error(words: str, kind: CauseClass) -> None:
    assert DEFAULT.of(observed(Liveness(0.0), words, 5.0)).cause is kind


def test_two_simultaneous_silent_deaths_are_two_causes() -> None:
    causes = Causes()
    assert causes.take(cause(1, 10.0), spoke=False) and causes.take(cause(2, 10.3), spoke=False)
    assert causes.first == (
        f"2 failed at once: rank 1 (node 1, host h1, pid 4701), at step 412: {DIED}; "
        f"rank 2 (node 2, host h2, pid 4702), at step 412: {DIED}"
    )


@pytest.mark.parametrize(("at", "spoke"), [(10.6, False), (10.1, True)])
def test_later_death_or_error_is_a_consequence(at: float, spoke: bool) -> None:
    causes = Causes()
    causes.take(cause(1, 10.0), spoke=True)
    assert not causes.take(cause(0, at), spoke=spoke)
    assert causes.first.startswith("rank 1 ") and causes.first.endswith("; rank 0 followed")


def test_two_simultaneous_errors_are_two_causes_but_a_broken_connection_is_none() -> None:
    causes = Causes()
    words = ("failed at a.py:1: KeyError: 'x' (software fault; y)", "failed at a.py:2: ValueError: z (data fault; y)")
    assert causes.take(cause(1, 10.0, text=words[0]), spoke=True)
    assert causes.take(cause(2, 10.1, text=words[1]), spoke=True)
    assert not causes.take(cause(0, 10.1, text=words[1].replace("; y", "; n")), spoke=True), "met together"
    assert not causes.take(cause(3, 10.1, text="failed: Connection closed by peer"), spoke=True, is_echo=True)
    assert causes.first.startswith("2 failed at once: rank 1 ") and causes.first.endswith("; ranks 0 and 3 followed")


def test_number_of_simultaneous_causes_is_bounded() -> None:
    causes = Causes()
    assert [causes.take(cause(rank), spoke=False) for rank in range(6)] == [True] * 4 + [False] * 2
    assert causes.first.startswith("4 failed at once: ") and causes.first.endswith("; ranks 4–5 followed")


def lost_house() -> House:
    house = training_house(3)
    house.beat("1", step=41)
    house.close("s1", gone=True)
    return house


def test_cause_is_journaled_before_it_is_sent_and_survives_the_scheduler() -> None:
    house = lost_house()
    first = "rank 1 (node 1, host host-a, pid 1001) failed first, at step 41"
    said = f"{first}: {DIED} (node fault; the others wait for it)"
    assert house.core.first_cause == said
    house.crash(1.0)
    assert house.core.first_cause == said
    house.crash(1.0)
    assert house.core.first_cause == said, "and a second one"


def test_worker_that_reports_its_error_is_the_cause_before_its_seat_is_lost() -> None:
    house = training_house(3)
    house.receive(
        "s1", ReportEnvelope(house.credential("1"), LastWords("failed at train.py:88: RuntimeError: no"), step=41)
    )
    assert house.ready.notes[-1].text.endswith(" ends: failed at train.py:88: RuntimeError: no")
    assert [record.node for record in house.records(CauseFound)] == ["1"] and not house.seat("1").is_lost
    house.receive(
        "s0", ReportEnvelope(house.credential("0"), LastWords("failed at train.py:88: RuntimeError: no"), step=41)
    )
    assert house.ready.notes == [], "one sentence, however many ranks meet the same error"
    house.crash(0.2)
    house.leave("1", on_purpose=False, text="failed at train.py:88: RuntimeError: no")
    house.leave("0", on_purpose=False, text="failed at train.py:88: RuntimeError: no")
    assert house.core.first_cause.startswith("rank 1 (node 1, ") and "train.py:88" in house.core.first_cause
    assert house.core.first_cause.endswith("; rank 0 followed"), "each once, and the scheduler's end lost nothing"
    assert house.seat("1").is_lost and house.seat("0").is_lost
    assert len(house.core.state.causes) == 1


@pytest.mark.parametrize("after_s", [0.1, 2.0])
def test_a_broken_connection_that_is_reported_first_is_not_the_cause(after_s: float) -> None:
    """A script may wrap the error of its collective in its own before the peer's death is seen."""
    house = training_house(3)
    house.say_last("0", "failed at train.py:9: Failed: pair.cc:534] Connection closed by peer")
    assert "Connection closed by peer" in house.core.first_cause
    house.now += after_s
    house.close("s1", gone=True)
    assert house.core.first_cause.startswith("rank 1 (node 1, ") and "pair.cc" not in house.core.first_cause
    assert house.core.first_cause.endswith("; rank 0 followed")


def test_every_later_message_names_the_cause_after_a_restart() -> None:
    house = lost_house()
    house.crash(1.0)
    for node in ("0", "2"):
        house.beat(node)
    for session in ("s0", "s2"):
        house.close(session, gone=True)
    for _ in range(40):
        house.tick(1.0)
    assert house.ended is not None
    assert f"first cause: rank 1 (node 1, host host-a, pid 1001) failed first, at step 41: {DIED}" in house.ended.text


@pytest.mark.parametrize("by", [DIED, f"worker 1 (pid 1001) {DIED}; {DIED}", "no worker is left; first cause: unknown"])
def test_end_names_the_first_cause_once_whoever_asks_for_it(by: str) -> None:
    house = lost_house()
    house.stop(by)
    assert house.records(JobInterrupted)[-1].cause == f"stopped by {by}", "it states the cause already"
    other = lost_house()
    other.stop("Ctrl-C")
    (end,) = other.records(JobInterrupted)
    assert end.cause.count("first cause") == end.cause.count(DIED) == 1
    assert "wait for" not in end.cause, "nothing is done about it any more"


def test_restarted_scheduler_does_not_name_a_cause_that_was_recovered() -> None:
    house = training_house(2, cool_down_s=0.0)
    house.close("s1", gone=True)
    house.register("1", session="new")
    house.train()
    assert house.core.first_cause == ""
    house.crash(1.0)
    assert house.core.first_cause == ""


def test_snapshot_keeps_the_cause_and_an_old_journal_has_none() -> None:
    house = lost_house()
    state = JobState.replay(house.core.state.snapshot())
    assert state.causes == house.core.state.causes and len(state.causes) == 1
    old = JobState.replay(record for record in house.journal if not isinstance(record, CauseFound))
    assert old.causes == ()


def ended(node: int, text: str = "was killed by signal 11 (SIGSEGV)", **more: Any) -> ProcessEnded:
    return ProcessEnded(str(node), "host-a", 1000 + node, 1, text, **{"signal": 11, **more})


def test_launchers_exit_report_is_added_to_the_cause_durably() -> None:
    house = lost_house()
    house.step(ended(1))
    said = (
        "rank 1 (node 1, host host-a, pid 1001) failed first, at step 41: was killed by signal 11 (SIGSEGV) "
        "(software fault; the others wait for it)"
    )
    assert house.core.first_cause == said
    assert [note.text for note in house.ready.notes] == [
        "worker 1 (pid 1001 on host-a) was killed by signal 11 (SIGSEGV) (software fault; the others wait for it)"
    ]
    house.step(ended(1))
    assert house.ready.notes == [] and house.ready.records == [], "a repeated report changes nothing"
    house.crash(1.0)
    assert house.core.first_cause == said


def test_exit_report_is_accepted_after_training_has_resumed() -> None:
    """A spare takes over in a tenth of a second; the launcher of the lost process may be slower."""
    house = training_house(2, spare_num=1)
    house.register("9")
    house.beat("9", Activity.WAITING, generation=0)
    house.close("s1", gone=True)
    done = house.records(CauseFound)[0].text.rpartition("; ")[2]
    assert done == "a spare on its host takes its place)"
    house.train()
    house.step(ended(1))
    (cause,) = house.records(CauseFound)
    assert (cause.generation, cause.text) == (1, f"was killed by signal 11 (SIGSEGV) (software fault; {done}")
    assert house.core.first_cause == ""
    house.step(ended(1))
    assert house.ready.records == [], "a repeated report changes nothing"
    house.crash(1.0)
    assert house.core.first_cause == "" and house.core.state.causes == ()


def test_exit_report_is_accepted_before_the_loss_is_seen() -> None:
    house = training_house(3)
    house.step(ended(1))
    assert house.ready.records == [] and not house.seat("1").is_lost, "it is informational only"
    house.close("s1", gone=True)
    assert house.records(SeatLost)[0].reason == "was killed by signal 11 (SIGSEGV)"
    assert "(SIGSEGV) (software fault; the others wait for it)" in house.core.first_cause


def test_false_exit_report_is_dropped_when_the_worker_speaks() -> None:
    house = training_house(3)
    house.step(ended(1))
    house.beat("1", step=7)
    house.close("s1", gone=True)
    assert DIED in house.core.first_cause and "SIGSEGV" not in house.core.first_cause


@pytest.mark.parametrize("who", [ProcessEnded("1", "host-b", 1001, 1, "x"), ended(7), ended(0)])
def test_exit_report_of_another_process_changes_nothing(who: ProcessEnded) -> None:
    house = lost_house()
    before = house.core.first_cause
    house.step(who)
    assert house.ready.records == [] and house.ready.notes == [] and house.core.first_cause == before


def test_exit_report_does_not_override_last_words_or_a_hang() -> None:
    house = training_house(3)
    house.receive(
        "s1", ReportEnvelope(house.credential("1"), LastWords("failed at train.py:88: RuntimeError: no"), step=41)
    )
    house.close("s1", gone=True)
    house.step(ended(1, "ended with status 1", signal=None, status=1))
    assert "train.py:88" in house.core.first_cause
    silent = training_house(3)
    silent.now += 4
    silent.beat("0")
    silent.beat("2")
    silent.now += 2
    silent.tick()
    assert silent.seat("1").is_lost
    silent.close("s1", gone=True)
    silent.step(ended(1, "was killed by signal 9 (SIGKILL)", signal=9))
    assert "silent for 5 s" in silent.core.first_cause, "it was killed because it was silent"
