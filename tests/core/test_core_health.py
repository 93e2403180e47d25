"""Host health: limits with hysteresis, the messages, and moving one worker to a warm spare."""

from __future__ import annotations

import pytest

from samebits.core.messages import Activity, Depart, Process, ReportEnvelope
from samebits.core.reports import MAX_AILMENTS, Ailment, HealthReport, Sign
from samebits.core.watch.health_limits import HealthReading, HealthWatch, Limit, place_said, said, unfit
from tests.core.house import House, policy

DISK = Ailment(Sign.DISK, "/ckpt", 0.95, 0.9, drains=True)
CPU = Ailment(Sign.CPU, "", 1.0, 0.9, drains=False)
LOGS = Ailment(Sign.LOGS, "/job/device", 10.24, 4.0, drains=False)
WATCHED = {Sign.DISK: Limit(0.9, drains=True), Sign.CPU: Limit(0.9)}


def looks(watch: HealthWatch, *shares: float) -> list[bool]:
    """Return whether the disk counts as unhealthy after each of these samples."""
    found = []
    for share in shares:
        watch.look([HealthReading(Sign.DISK, "/ckpt", share)])
        found.append(bool(watch.ailments))
    return found


def test_two_samples_over_the_limit_start_a_problem_and_two_far_below_end_it() -> None:
    assert looks(HealthWatch(WATCHED), 0.95, 0.5, 0.95, 0.95) == [False, False, False, True]
    assert looks(HealthWatch(WATCHED), 0.9, 0.9, 0.88, 0.86, 0.88, 0.8, 0.9, 0.8, 0.8) == [
        *(False, True, True, True, True, True, True, True, False)
    ]


def test_change_is_reported_once() -> None:
    watch = HealthWatch(WATCHED)
    full = [HealthReading(Sign.DISK, "/ckpt", 0.95)]
    assert [watch.look(full) for _ in range(4)] == [False, True, False, False]
    assert watch.ailments == (DISK,)
    assert watch.look([]), "the folder no longer exists"
    assert watch.ailments == ()


def test_values_without_a_limit_are_skipped_and_long_lists_are_cut() -> None:
    watch = HealthWatch(WATCHED)
    many = [HealthReading(Sign.DISK, f"/{number}", 1.0) for number in range(100)]
    for _ in range(2):
        watch.look([HealthReading(Sign.MEMORY, "", 1.0), *many])
    assert len(watch.ailments) == MAX_AILMENTS
    assert {one.sign for one in watch.ailments} == {Sign.DISK}


@pytest.mark.parametrize(
    ("ailment", "text"),
    [
        (DISK, "the disk of /ckpt is 95 % full (limit 90 %, HEALTH=disk)"),
        (CPU, "its CPUs are 100 % busy (limit 90 %, HEALTH=cpu)"),
        (
            Ailment(Sign.MEMORY, "", 0.93, 0.9, False),
            "93 % of the memory it may use is taken (limit 90 %, HEALTH=memory)",
        ),
        (
            Ailment(Sign.DESCRIPTORS, "", 0.95, 0.9, False),
            "95 % of the descriptors a process may have are open (limit 90 %)",
        ),
        (
            LOGS,
            "the disk of /job/device has 100 MiB left for logs; once it is full, their lines are lost (limit 256 MiB, "
            "HEALTH=logs). Fix: free space there, or start the job with LOG_DIR on another disk",
        ),
    ],
)
def test_problem_is_described_in_words(ailment: Ailment, text: str) -> None:
    assert said(ailment) == text


# ---- the scheduler's side


def house_with_spares(spares: int = 1, **changes: bool) -> House:
    """Two workers train on one host each; the spares are warm."""
    house = House(policy(2, spare_num=3, **changes))
    for node in ("0", "1", *(f"{2 + number}" for number in range(spares))):
        house.register(node, process=Process(f"host-{node}", 100 + int(node), 1, "cpu"))
    house.train()
    for number in range(spares):
        house.beat(f"{2 + number}", Activity.WAITING)
    return house


def feels(house: House, node: str, *ailments: Ailment) -> list[str]:
    """Return the nodes that are asked to leave after this health report."""
    credential = house.credential(node)
    first = house.receive(credential.session, ReportEnvelope(credential, HealthReport(ailments)))
    second = house.tick(0.1)
    return [send.session for send in (*first.sends, *second.sends) if isinstance(send.message, Depart)]


def notes_on(house: House, word: str) -> list[str]:
    return [note for note in house.notes if word in note]


def test_only_an_exceeded_limit_that_refuses_keeps_a_process_from_a_seat() -> None:
    limits = {Sign.DISK: Limit(0.9, drains=True, refuses=True), Sign.CPU: Limit(0.9, drains=True)}
    found = [
        HealthReading(Sign.DISK, "/ckpt", 0.95),
        HealthReading(Sign.DISK, "/logs", 0.89),
        HealthReading(Sign.CPU, "", 1.0),
    ]
    assert unfit(limits, [*found, HealthReading(Sign.MEMORY, "", 1.0)]) == [DISK]


def test_every_sign_has_words_a_limit_and_a_place() -> None:
    for sign in Sign:
        told = said(Ailment(sign, "/place", 0.95, 0.9, drains=False))
        assert "{" not in told and place_said(sign, "/place")


def test_followers_are_told_of_a_log_disk_that_fills_although_no_worker_leaves() -> None:
    house = house_with_spares()
    assert feels(house, "0", CPU, LOGS) == []
    (told,) = [text for _, text in house.core.notices]
    assert told.startswith("host host-0 (worker 0): the disk of /job/device has 100 MiB left")


def test_unhealthy_host_is_reported_once_and_so_is_its_recovery() -> None:
    house = house_with_spares()
    for _ in range(3):
        assert feels(house, "0", CPU) == [], "no worker leaves for its CPUs"
    assert house.core.ailments == ["host host-0: its CPUs are 100 % busy (limit 90 %, HEALTH=cpu)"]
    feels(house, "0")
    assert notes_on(house, "host-0 ") == [
        "host host-0 (worker 0): its CPUs are 100 % busy (limit 90 %, HEALTH=cpu)",
        "host host-0 is healthy again: its CPUs",
    ]
    assert house.core.ailments == []


def test_workers_of_one_host_report_it_once() -> None:
    house = House(policy(2)).fill().train()
    feels(house, "0", CPU)
    feels(house, "1", CPU)
    feels(house, "0")
    assert len(notes_on(house, "busy")) == 1 and notes_on(house, "well again") == []
    house.leave("1")
    assert house.core.ailments == []


def test_one_worker_leaves_for_a_warm_spare_and_is_asked_until_it_has() -> None:
    house = house_with_spares()
    assert feels(house, "1", DISK) == ["s1"]
    assert feels(house, "1", DISK) == ["s1"], "the first request may be lost"
    assert feels(house, "0", DISK) == [], "one at a time"
    assert (
        len(
            notes_on(house, "is asked to leave at its next commit, and warm spare 2 takes its place: the disk of /ckpt")
        )
        == 1
    )
    house.leave("1", text="it was asked to (SIGTERM)")
    assert house.core.state.by_slot[1] == "2", "the spare has its slot"
    assert feels(house, "0", DISK) == [], "no spare is left"


@pytest.mark.parametrize("well", [True, pytest.param(False, id="whose host is full, too")])
def test_worker_on_an_unhealthy_host_is_replaced_from_another_host(well: bool) -> None:
    """On a healthy host, a spare on the same host is preferred, then the first to arrive."""
    house = house_with_spares(2)
    house.register("4", process=Process("host-1", 104, 1, "cpu"))
    house.beat("4", Activity.WAITING)
    if not well:
        assert feels(house, "2", DISK) == []
    assert feels(house, "1", DISK) == ["s1"]
    assert notes_on(house, f"warm spare {2 if well else 3} takes its place")
    house.leave("1", text="it was asked to (SIGTERM)")
    assert house.core.state.by_slot[1] == ("2" if well else "3")


@pytest.mark.parametrize(
    "why", ["no spare", "spare is cold", "spare is unhealthy too", "a round is open", "no recovery"]
)
def test_no_worker_leaves_otherwise(why: str) -> None:
    house = house_with_spares(0 if why == "no spare" else 1, recovery=why != "no recovery")
    if why == "spare is cold":
        house.beat("2", Activity.SEATED)
    if why == "spare is unhealthy too":
        feels(house, "2", DISK)
    if why == "a round is open":
        house.beat("0", Activity.WAITING)
    assert feels(house, "1", DISK) == []


def test_status_lists_a_few_problems() -> None:
    house = house_with_spares()
    feels(house, "0", *(Ailment(Sign.DISK, f"/{number}", 1.0, 0.9, False) for number in range(30)))
    assert len(house.core.ailments) == 17
    assert house.core.ailments[-1] == "14 more such readings"
