"""A follower's messages about membership: one sentence for each slot that changed hands."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from samebits.account.job_view import JobView, PresenceState
from samebits.launcher.follower_decisions import changes
from tests.launcher.views import view, worker

LOST = PresenceState.LOST
BEFORE = view(spares=(worker(3, slot=None),))
WORKERS = BEFORE.workers
ELASTIC = replace(BEFORE, min_world_size=1, max_world_size=5, spares=(worker(5, slot=None),))
NEWCOMER = worker(4, joining=True)
GROWN = (*WORKERS, worker(4))

CASES: list[tuple[str, JobView | None, JobView, list[str]]] = [
    ("the first look", None, BEFORE, []),
    ("nothing", BEFORE, replace(BEFORE, step=8), []),
    ("another job", BEFORE, replace(BEFORE, job="another", workers=WORKERS[1:]), []),
    ("the house fills", replace(BEFORE, generation=0, workers=WORKERS[:1]), BEFORE, []),
    ("no worker is named", BEFORE, replace(BEFORE, workers=(), spares=()), []),
    ("a worker is lost", BEFORE, replace(BEFORE, workers=(worker(0), worker(1, LOST), worker(2))), []),
    (
        "a spare takes its place",
        BEFORE,
        view(workers=(worker(0), worker(3, slot=1), worker(2)), retired=(worker(1, LOST, slot=None),)),
        ["spare 3 (pid 103) took the place of worker 1; worker 1 becomes a spare once it is restarted"],
    ),
    (
        "a spare takes its place in an elastic world",
        ELASTIC,
        replace(ELASTIC, workers=(worker(0), worker(5, slot=1), worker(2)), spares=()),
        ["spare 5 (pid 105) took the place of worker 1"],
    ),
    (
        "a worker whose slot was given away takes the next",
        view(workers=(worker(0), worker(3, slot=1), worker(2)), retired=(worker(1, LOST, slot=None),)),
        view(workers=(worker(1, slot=0), worker(3, slot=1), worker(2)), retired=(worker(0, LOST, slot=None),)),
        ["worker 1 (pid 101) took the place of worker 0"],
    ),
    (
        "the dead one is back",
        view(workers=(worker(0), worker(3, slot=1), worker(2)), retired=(worker(1, LOST, slot=None),)),
        view(workers=(worker(0), worker(3, slot=1), worker(2)), spares=(worker(1, slot=None),)),
        ["worker 1 is back as a spare"],
    ),
    ("a spare dies", BEFORE, replace(BEFORE, spares=(worker(3, LOST, slot=None),)), []),
    ("a spare is back", replace(BEFORE, spares=(worker(3, LOST, slot=None),)), BEFORE, []),
    (
        "the world shrinks",
        ELASTIC,
        replace(ELASTIC, workers=WORKERS[:1], world_size=1, retired=(worker(1, slot=None), worker(2, slot=None))),
        ["the job continues without workers 1 and 2: 1 worker"],
    ),
    (
        "a shard group lacks a worker",
        ELASTIC,
        replace(ELASTIC, workers=(worker(0), worker(1, joining=True)), world_size=1, generation=2),
        ["the job continues without worker 2: 1 worker", "worker 1 waits until the shard group is complete: 1 worker"],
    ),
    (
        "it is complete again",
        replace(ELASTIC, workers=(worker(0), worker(1, joining=True), worker(2, joining=True)), world_size=1),
        replace(ELASTIC, generation=3),
        ["workers 1 and 2 joined: 3 workers"],
    ),
    ("a worker is about to join", ELASTIC, replace(ELASTIC, workers=(*WORKERS, NEWCOMER)), []),
    (
        "a worker that was about to join has left",
        replace(ELASTIC, workers=(*WORKERS, NEWCOMER)),
        replace(ELASTIC, retired=(worker(4, slot=None),)),
        [],
    ),
    (
        "it joins",
        replace(ELASTIC, workers=(*WORKERS, NEWCOMER)),
        replace(ELASTIC, workers=GROWN, world_size=4, generation=2),
        ["worker 4 joined: 4 workers"],
    ),
]


@pytest.mark.parametrize(("before", "now", "lines"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_change_is_one_sentence(before: JobView | None, now: JobView, lines: list[str]) -> None:
    assert changes(before, now) == lines
