"""A truncated or outdated journal: workers know later facts than it does, and that is logged."""

from __future__ import annotations

from samebits.core.messages import MemberRecord, RoundId
from samebits.core.records import GenerationCommitted, SeatGranted
from tests.core.house import House, policy, training_house


def said(house: House) -> list[str]:
    return [note.text for note in house.ready.notes if "last records are gone" in note.text]


def cut_before(house: House, kind: type) -> None:
    """Restart the scheduler with the records before the last one of this kind."""
    house.crash(keep=max(index for index, record in enumerate(house.journal) if isinstance(record, kind)))


def standing(generation: int, rank: int) -> MemberRecord:
    return MemberRecord(1, generation, RoundId(1, generation), rank, 2, None, None, rank)


def test_worker_with_a_later_generation_is_reported_once() -> None:
    house = training_house()
    cut_before(house, GenerationCommitted)
    house.register("0", job="job-1", incarnation=1, standing=standing(1, 0))
    (text,) = said(house)
    assert text.startswith("worker 0 (pid ")
    assert "knows of generation 1, and the journal of generation 0" in text
    assert "Fix: " in text
    house.register("1", job="job-1", incarnation=1, standing=standing(1, 1))
    assert said(house) == []


def test_worker_with_a_later_incarnation_is_reported() -> None:
    house = House(policy(2)).fill()
    house.crash(after_s=40.0)
    house.tick(6.0)
    house.tick(31.0)
    house.register("1", session="second")
    assert house.admission("second").incarnation == 2
    cut_before(house, SeatGranted)
    house.register("1", session="second", job="job-1", incarnation=2)
    (text,) = said(house)
    assert "knows of its incarnation 2, and the journal of incarnation 1 of it" in text


def test_worker_that_knows_no_more_or_is_of_another_job_is_not_reported() -> None:
    house = training_house()
    house.crash()
    house.register("0", job="job-1", incarnation=1, standing=standing(1, 0))
    assert said(house) == []
    house.register("0", session="stranger", job="another", incarnation=9, standing=standing(9, 0))
    house.register("0", session="stranger", incarnation=9, standing=standing(9, 0))
    house.register("0", session="stranger", job="job-1", incarnation=2**62, standing=standing(2**62, 0))
    assert said(house) == []


def test_generation_number_is_not_reused_if_its_record_is_lost() -> None:
    """With the same number, the lost generation's points would pass for those of the new one."""
    house = training_house()
    cut_before(house, GenerationCommitted)
    for node in ("0", "1"):
        house.register(node)
    house.train(n0=[(20, 1), (10, 1)], n1=[(10, 1)])
    assert house.committed().generation == 2
    assert house.committed().restore is None, "the line of its points is unknown"


def test_points_of_an_unknown_generation_are_reported() -> None:
    house = training_house()
    cut_before(house, GenerationCommitted)
    for node in ("0", "1"):
        house.register(node)
    house.join("0", [(20, 1)])
    house.join("1")
    (text,) = said(house)
    assert text.startswith("there are points of generation 1, and the journal ends before it")


def test_absurd_generation_number_has_no_effect() -> None:
    house = House(policy(2)).fill()
    house.train(n0=[(20, 2**62)])
    assert house.committed().generation == 1
