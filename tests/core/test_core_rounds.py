"""Rounds: one for any number of losses, which members it waits for, and for how long."""

from __future__ import annotations

import pytest

from samebits.core.end_kinds import EndKind
from samebits.core.messages import (
    Activity,
    EndJob,
    GenerationStarted,
    Loan,
    Process,
    RankPosition,
    RoundId,
    RoundOpened,
    Sharding,
)
from samebits.core.point import Point
from samebits.core.records import GenerationCommitted, JobInterrupted
from samebits.core.rounds.rendezvous import MOST_FAILURES
from tests.core.house import NUMERICS, House, policy, training_house

# ---- rounds


def test_first_round_opens_when_all_have_registered() -> None:
    house = House(policy(2))
    house.register("0")
    assert house.core.phase() == "filling; waiting for 1"
    house.register("1")
    assert house.invited() == {"s0": RoundId(1, 1), "s1": RoundId(1, 1)}
    assert house.answer("s1", RoundOpened) == RoundOpened(
        job="job-1",
        term=1,
        incarnation=1,
        round=RoundId(1, 1),
        text="all 2 workers are registered",
        missing="",
        place=RankPosition(slot=1, rank=1, world_size=2),
    )
    assert house.core.phase() == "forming; waiting for 0, 1"


def test_last_join_commits_the_generation_and_notifies_all() -> None:
    house = House(policy(2)).fill()
    house.join("1")
    assert house.ready.records == [] and house.core.phase() == "forming; waiting for 0"
    house.join("0")
    assert house.ready.records == [
        GenerationCommitted(
            generation=1,
            round=RoundId(1, 1),
            members=(("0", 1), ("1", 1)),
            restore=None,
            line=(),
            numerics=NUMERICS,
            slots=(0, 1),
        )
    ]
    assert {send.session for send in house.ready.sends} == {"s0", "s1"}
    started = house.answer("s1", GenerationStarted)
    assert (started.term, started.incarnation, started.generation, started.round) == (1, 1, 1, RoundId(1, 1))
    assert (started.rank, started.world_size, started.restore, started.source) == (1, 2, None, 1)
    assert house.core.phase() == "training"


def test_local_ranks_count_the_ranks_of_one_host() -> None:
    house = House(policy(5))
    for slot, host in enumerate(["a", "b", "a", "c", "a"]):
        house.register(str(slot), process=Process(host, slot, 1, "cpu"))
    house.train()
    started = [house.start_of(str(slot)) for slot in range(5)]
    assert [(one.local_rank, one.local_world_size) for one in started] == [(0, 3), (0, 1), (1, 3), (0, 1), (2, 3)]


def test_buddies_are_on_other_hosts_and_both_ends_are_notified() -> None:
    house = House(policy(4))
    for slot, host in enumerate(["a", "a", "b", "b"]):
        house.register(str(slot), process=Process(host, slot, 1, "cpu"))
    house.train()
    started = [house.start_of(str(slot)) for slot in range(4)]
    assert [(one.buddy, one.is_apart, one.keeps) for one in started] == [
        (2, True, (2,)),
        (3, True, (3,)),
        (0, True, (0,)),
        (1, True, (1,)),
    ]


@pytest.mark.parametrize(("size", "buddy", "keeps"), [(1, None, ()), (2, 1, (1,))])
def test_buddy_on_a_single_host_is_the_next_rank_and_alone_there_is_none(
    size: int, buddy: int | None, keeps: tuple[int, ...]
) -> None:
    house = House(policy(size))
    for slot in range(size):
        house.register(str(slot), process=Process("a", slot, 1, "cpu"))
    house.train()
    started = house.start_of("0")
    assert (started.buddy, started.is_apart, started.keeps) == (buddy, False, keeps)


def test_copy_is_lent_by_the_member_that_brought_it() -> None:
    house = training_house(2)
    house.close("s0", gone=True)
    for _ in range(8):
        house.beat("1", Activity.WAITING)
        house.tick(4.0)
    house.register("0", "new")
    house.join("1", [(10, 1)], own_parts=True, copies=[(0, (10, 1))])
    house.join("0", own_parts=True)
    lender, borrower = house.start_of("1"), house.start_of("0")
    assert (lender.restore, lender.serves, lender.lends) == (Point(10, 1), (), (Loan(0, 0),))
    assert (borrower.source, borrower.lends) == (1, ())


def test_one_loss_makes_one_round() -> None:
    house = training_house(3)
    house.close("s2", gone=True)
    assert house.invited() == {"s0": RoundId(1, 2), "s1": RoundId(1, 2)}
    opened = house.answer("s0", RoundOpened)
    assert opened.text == "worker 2 (pid 1002 on host-a) is lost: its connection closed and its process is gone"
    assert opened.missing == "2"


@pytest.mark.parametrize("lost", [2, 40, 999])
def test_many_losses_make_one_round(lost: int) -> None:
    house = training_house(1000)
    for slot in range(lost):
        house.close(f"s{slot}", gone=True)
    rounds = {message.round for messages in house.sent.values() for message in messages if type(message) is RoundOpened}
    assert rounds == {RoundId(1, 1), RoundId(1, 2)}
    assert house.core.phase().startswith("forming; waiting for 0, 1")
    assert ("2, 3" in house.core.phase()) == (lost > 2), "a live worker only has to arrive"


def test_many_silent_at_once_are_one_round_with_their_number() -> None:
    house = training_house(4)
    house.now += 5
    house.beat("3")
    house.tick()
    assert [note for note in house.notes if note.startswith("round")][-1] == (
        "round 1.2 opened: worker 0 (pid 1000 on host-a) is lost: silent for 5 s (NODE_TIMEOUT) (and 2 more)"
    )


def test_round_includes_later_losses() -> None:
    house = training_house(3, cool_down_s=0.0)
    house.close("s2", gone=True)
    house.join("0")
    house.join("1")
    assert house.core.phase() == "forming; waiting for 2"
    assert house.core.ready == 2
    house.close("s1", gone=True)
    assert house.core.phase() == "forming; waiting for 1, 2"
    house.register("1", session="one")
    house.register("2", session="two")
    assert house.invited() == {"two": RoundId(1, 2)}
    house.join("2")
    assert house.core.phase() == "forming; waiting for 1", "what the dead process brought is void"
    house.join("1")
    assert house.committed().members == (("0", 1), ("1", 2), ("2", 2))
    assert house.committed().round == RoundId(1, 2)


def test_member_that_is_lost_and_returns_joins_again() -> None:
    house = training_house(3, cool_down_s=0.0)
    house.close("s2", gone=True)
    house.join("0")
    house.close("s0")
    house.beat("1")
    house.tick(0.5)
    assert house.seat("0").is_lost
    house.register("0", incarnation=1, job="job-1")
    assert house.invited() == {"s0": RoundId(1, 2)}
    house.register("2", session="two")
    house.join("1")
    house.join("2")
    assert house.core.phase() == "forming; waiting for 0"
    house.join("0")
    assert house.committed().members == (("0", 1), ("1", 1), ("2", 2))


def test_member_that_missed_the_invitation_is_invited_after_its_next_heartbeat() -> None:
    house = training_house(3)
    house.close("s2", gone=True)
    house.beat("1", Activity.TRAINING)
    assert house.invited() == {}, "it was sent before the invitation can have arrived"
    house.tick(1.0)
    house.beat("1", Activity.TRAINING)  # identical, yet not without effect
    assert house.invited() == {"s1": RoundId(1, 2)}
    house.join("1")
    house.beat("1", Activity.WAITING)
    assert house.invited() == {}, "a member that has joined is left alone"


def test_join_of_another_round_is_ignored() -> None:
    house = House(policy(2)).fill()
    house.join("0", round_id=RoundId(1, 7))
    house.join("1", round_id=RoundId(0, 1))
    assert house.core.phase() == "forming; waiting for 0, 1"


def test_join_after_the_round_is_ignored() -> None:
    house = training_house()
    house.join("0", [(100, 1)])
    assert house.ready.records == [] and house.core.phase() == "training"


def test_second_join_replaces_the_first() -> None:
    house = House(policy(2)).fill().train()
    house.close("s1", gone=True)
    house.join("0", [(5, 1)])
    house.join("0", [(5, 1), (10, 1)])
    house.register("1", incarnation=1, job="job-1", session="s1")
    house.now += 30
    house.register("1", session="new")
    house.join("1")
    assert house.committed().restore == Point(10, 1)


def test_failed_collective_without_a_loss_opens_a_round() -> None:
    house = training_house()
    house.beat("0", Activity.WAITING)
    assert house.invited().keys() == {"s0", "s1"}
    house.train()
    assert house.core.state.generation_number == 2


def test_cause_of_a_failed_collective_is_sent_once_it_is_known() -> None:
    house = training_house(3)
    house.beat("0", Activity.WAITING)
    assert house.answer("s1", RoundOpened).text == "a collective of generation 1 failed at worker 0"
    house.close("s2", gone=True)
    opened = house.answer("s1", RoundOpened)
    assert (opened.round, opened.missing) == (RoundId(1, 2), "2")
    assert opened.text == "worker 2 (pid 1002 on host-a) is lost: its connection closed and its process is gone"


def test_round_waits_topo_timeout() -> None:
    house = training_house(topo_timeout_s=60.0)
    house.close("s1", gone=True)
    opened = house.now
    for _ in range(59):
        house.now += 1
        house.beat("0", Activity.WAITING)
        house.tick()
    wake_at = house.core.wake_at()
    assert wake_at is not None and wake_at <= opened + 60
    assert house.ended is None
    house.now += 1
    house.beat("0", Activity.WAITING)
    house.tick()
    text = "the round waited 60 s (TOPO_TIMEOUT) for worker 0, 1"
    assert house.records(JobInterrupted) == [JobInterrupted(EndKind.FORMATION_TIMEOUT, 0, text, generation=1)]
    assert house.answer("s0", EndJob) == EndJob("job-1", 1, EndKind.FORMATION_TIMEOUT, text)


def test_a_sharded_state_that_lacks_a_rank_is_explained_once_and_again_at_the_end() -> None:
    house = training_house(topo_timeout_s=60.0)
    house.close("s1", gone=True)
    house.join("0", live=(3, 1), sharding=Sharding((2,), (False,)))
    opened, explained_s = house.now, set()
    for waited_s in range(60):
        wake_at = house.core.wake_at()
        assert wake_at is not None and wake_at <= opened + (30 if waited_s < 30 else 60)
        if house.core.notices:
            explained_s.add(waited_s)
        house.now += 1
        house.beat("0", Activity.WAITING)
        house.tick()
    fix = "Fix: run `samebits recover` on the lost worker's host, or start that worker on another host; to train with "
    ((_, said),) = house.core.notices
    assert min(explained_s) == 30  # REGISTER_COOLDOWN
    assert said.startswith(
        "the state is sharded over 2 ranks, so training continues only with worker 1. The others keep their state and "
        f"wait at most 60 s (TOPO_TIMEOUT). {fix}"
    )
    (ended,) = house.records(JobInterrupted)
    assert ended.cause.startswith(f"the round waited 60 s (TOPO_TIMEOUT) for worker 1. {fix}")


def test_a_lost_rank_is_not_explained_if_every_rank_holds_the_whole_state() -> None:
    house = training_house(topo_timeout_s=60.0)
    house.close("s1", gone=True)
    house.join("0", live=(3, 1))
    for _ in range(59):
        house.now += 1
        house.beat("0", Activity.WAITING)
        house.tick()
    assert house.core.notices == []


def test_new_round_has_a_new_deadline() -> None:
    house = training_house(topo_timeout_s=60.0, cool_down_s=0.0)
    house.close("s1", gone=True)
    house.now += 50
    house.register("1", session="new")
    house.join("0")
    house.join("1")
    house.now += 50
    for node in "01":
        house.beat(node)
    house.tick()
    assert house.ended is None and house.core.phase() == "training"
    house.close("new", gone=True)
    house.tick(4.0)
    assert house.ended is None


def test_scheduler_pause_prolongs_the_round() -> None:
    house = training_house(topo_timeout_s=60.0)
    house.close("s1", gone=True)
    house.now += 30
    house.beat("0", Activity.WAITING)
    house.stall(45.0)
    house.beat("0", Activity.WAITING)
    assert house.core.phase().startswith("forming")
    for _ in range(30):
        house.now += 1
        house.beat("0", Activity.WAITING)
        house.tick()
    assert house.core.phase() == "ending"


def test_job_that_never_fills_up_ends_too() -> None:
    house = House(policy(3, topo_timeout_s=60.0))
    house.tick(10.0)
    house.register("0")
    for _ in range(60):
        assert house.core.phase() == "filling; waiting for 1, 2"
        house.now += 1
        house.beat("0", Activity.SEATED)
        house.tick()
    assert house.records(JobInterrupted) == [
        JobInterrupted(EndKind.FORMATION_TIMEOUT, 0, "waited 60 s (TOPO_TIMEOUT) for worker 1, 2")
    ]


def test_departed_node_is_waited_for() -> None:
    house = training_house()
    house.leave("1", text="SIGTERM")
    assert house.invited().keys() == {"s0"}
    assert house.answer("s0", RoundOpened).text == "worker 1 left before training was finished: SIGTERM"


# ---- failed generations


def failed_again(house: House, live: tuple[int, int] = (5, 1), error: str = "it cannot be loaded") -> None:
    """Member 0 leaves its generation with a runtime error; both members join with this commit."""
    house.beat("0", activity=Activity.WAITING)
    house.join("0", live=live, failed_with=error)
    house.join("1", live=live)


def test_restore_that_always_fails_ends_the_job_with_its_error() -> None:
    house = training_house()
    for _ in range(MOST_FAILURES):
        failed_again(house)
        assert house.ended is None
    failed_again(house)
    end = house.answer("s1", EndJob)
    assert end.kind is EndKind.INTERRUPTED
    assert end.text == (
        "8 generations in a row ended at step 5 with no process lost, the last by an error of worker 0: it cannot be "
        "loaded"
    )


@pytest.mark.parametrize("what", ["commits", "losses", "collectives"])
def test_external_failures_are_retried_forever(what: str) -> None:
    house = training_house()
    for count in range(4 * MOST_FAILURES):
        if what == "losses":  # a kill at each attempt
            house.close("s1", gone=True)
            house.now += house.policy.cool_down_s
            house.register("1", session=f"again-{count}")
            house.sent["s1"] = house.sent[f"again-{count}"]
        live = (count, house.core.state.generation_number) if what == "commits" else (5, 1)
        failed_again(house, live, error="" if what == "collectives" else "an error")
        assert house.ended is None and house.core.phase() == "training"
