"""Which node ids may be added, and which can be removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from samebits.account.job_view import JobView, PresenceState
from samebits.commands.drain import Meant, meant_by, way_back
from samebits.commands.scale import check_removal, last_to_come, nodes_to_add, require_no_driver, standing
from samebits.config import Settings
from samebits.errors import UsageError
from samebits.launcher.job_spec import JobSpec
from tests.launcher.views import view, worker

HERE = ("0", "1", "2")
SPARED = view(spares=(worker(3, slot=None),))
ELASTIC = changed(view(), min_world_size=2, max_world_size=6)


def settings(most: int) -> Settings:
    return JobSpec(Path("/job"), "python", "train.py", (), {"WORKER_NUM": "3", "MAX_WORKER_NUM": str(most)}).settings()


def test_first_free_numbers_that_name_a_slot_are_used() -> None:
    assert nodes_to_add(settings(6), HERE, ELASTIC, 2) == ("3", "4")
    assert nodes_to_add(settings(6), ("0", "2", "6"), ELASTIC, 1) == ("3",), "worker 1 is on another machine"
    gone = changed(ELASTIC, workers=(worker(0), worker(2)), retired=(worker(1, PresenceState.LEFT, slot=None),))
    assert nodes_to_add(settings(6), ("0", "2"), gone, 2) == ("1", "3"), "it was removed"


@pytest.mark.parametrize(
    ("most", "count", "said"),
    [
        (3, 1, "MAX_WORKER_NUM=3: 0 node ids below it are free, but 1 are needed"),
        (5, 3, "MAX_WORKER_NUM=5: 2 node ids below it are free, but 3 are needed"),
        (5, 0, "0 workers to add: expected 1 or more"),
    ],
)
def test_no_more_are_added_than_fit(most: int, count: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        nodes_to_add(settings(most), HERE, ELASTIC, count)


@pytest.mark.parametrize(
    ("seen", "leaving"),
    [
        (ELASTIC, ["2"]),
        (SPARED, ["1"]),  # the spare takes its place
        (SPARED, ["3"]),
        (changed(view(), workers=(worker(0), worker(1), worker(2, PresenceState.LOST))), []),
    ],
)
def test_removable_workers(seen: JobView, leaving: list[str]) -> None:
    check_removal((*HERE, "3"), seen, leaving)


@pytest.mark.parametrize(
    ("seen", "leaving", "said"),
    [
        (view(), ["1"], "MIN_WORKER_NUM=3: without worker 1 the job has 2 workers and 0 spares, and would wait"),
        (ELASTIC, ["1", "2"], "MIN_WORKER_NUM=2: without worker 1, 2 the job has 1 worker and 0 spares"),
        (SPARED, ["1", "3"], "MIN_WORKER_NUM=3: without worker 1 the job has 2 workers and 0 spares"),
        (changed(SPARED, spares=(worker(3, PresenceState.LOST, slot=None),)), ["0"], "0 spares"),
        (ELASTIC, ["7"], "no worker 7 of this job runs here; expected one or more of 0, 1, 2, 3"),
    ],
)
def test_workers_that_cannot_be_removed(seen: JobView, leaving: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_removal((*HERE, "3"), seen, leaving)


def test_newest_workers_leave_first() -> None:
    assert last_to_come(["0", "1", "4"], 2) == ("1", "4")
    assert last_to_come(["0", "1"], 0) == ()
    with pytest.raises(
        UsageError, match=r"3 workers would have to leave, but only 2 of them run on this machine\. Fix: "
    ):
        last_to_come(["0", "1"], 3)


@pytest.mark.parametrize(
    ("nodes", "running", "there"),
    [
        (HERE, HERE, ["0", "1", "2"]),
        ((*HERE, "3", "4"), (*HERE, "3"), ["0", "1", "2", "3"]),  # 3 is starting, 4 was never started
        (("0",), HERE, ["0"]),  # 1 and 2 are leaving
        (("0",), ("0",), ["0", "1", "2"]),  # 1 and 2 run on another machine
        ((*HERE, "6"), (*HERE, "6"), ["0", "1", "2"]),  # a spare
    ],
)
def test_starting_workers_count_and_leaving_ones_do_not(
    nodes: tuple[str, ...], running: tuple[str, ...], there: list[str]
) -> None:
    assert standing(nodes, ELASTIC, running) == there


def test_restarted_worker_counts_as_starting() -> None:
    seen = changed(ELASTIC, workers=(worker(0), worker(1), worker(2, PresenceState.LOST)))
    assert standing(("0", "1", "2.1"), seen, ("0", "1", "2.1")) == ["0", "1", "2.1"]


@pytest.mark.parametrize("option", ["--add", "--remove"])
def test_add_and_remove_are_refused_with_discovered_hosts(option: str) -> None:
    kept = JobSpec(Path("/job"), "python", "train.py", (), {"WORKER_NUM": "3"})
    require_no_driver(kept, option)
    with pytest.raises(UsageError, match=rf"^samebits scale {option}: .* Fix: `samebits scale N`"):
        require_no_driver(replace(kept, hosts={"0": "b"}), option)


def test_a_replaced_worker_occupies_its_number() -> None:
    seen = changed(ELASTIC, workers=(worker(0), worker("1.1", pid=9, slot=1)))
    assert nodes_to_add(settings(4), ("0", "1.1"), seen, 2) == ("2", "3")


def test_drain_names_the_way_back() -> None:
    job = JobSpec(Path("/job"), "python", "train.py", (), {})
    discovered = replace(job, hosts={"3": "node-b"})
    assert way_back(Meant(("3",)), job) == "to bring it back, run `samebits scale --add` on the same machine"
    assert way_back(Meant(("3", "4")), job) == "to bring them back, run `samebits scale --add 2` on the same machine"
    assert way_back(Meant(("3",), ("node-b",)), discovered) == "to use node-b again, run `samebits drain --undo node-b`"
    assert way_back(Meant(("3",)), discovered) == "", "the follower starts another one if the job is too small"


def test_a_worker_is_drained_by_its_number_after_it_was_replaced() -> None:
    """Messages call 2.1 "worker 2 (second process)"."""
    job = JobSpec(Path("/job"), "python", "train.py", (), {})
    there = view(workers=(worker(0), worker(1), worker("2.1", pid=9, slot=2)))
    assert meant_by(["2", "0"], there, job).nodes == ("2.1", "0")
    both = changed(there, spares=(worker("1.1", pid=8, slot=None),))
    assert meant_by(["1", "1.1"], both, job).nodes == ("1", "1.1")
    with pytest.raises(UsageError, match="'3' is neither a live worker"):
        meant_by(["3"], there, job)
