"""A few of the kills that ``python -m tests.checkpoint_kills`` makes by the hundred, and tests of its check."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.core.point import Point
from samebits.store.checkpoint import MemoryRoom, PointHeader, memory_buffer
from samebits.store.checkpoint.memory_room import RoomKind
from samebits.training.checkpoint.staging import Staging
from samebits.training.state import snapshot
from tests.checkpoint_kills import victim
from tests.checkpoint_kills.campaign import MOMENTS, VICTIMS, Campaign, Draw
from tests.checkpoint_kills.victim import Place
from tests.store.points import change_byte


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "points", tmp_path / "memory", tmp_path / "elsewhere")


@pytest.mark.system
def test_kills_at_random_times_leave_complete_points(tmp_path: Path, repository: Path) -> None:
    command = [sys.executable, "-m", "tests.checkpoint_kills", "--kills", "10", "--directory", str(tmp_path)]
    shown = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=240)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "10 kills, seed 1: 0 unloadable, 0 silently wrong, 0 lost, 0 other failures" in shown.stdout
    assert "never fewer than 0 " not in shown.stdout
    assert "\n0 times a copy" not in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_time_and_every_victim_is_drawn() -> None:
    chance = random.Random(1)
    draws = [Draw.of(chance) for _ in range(200)]
    assert {draw.moment for draw in draws} == set(MOMENTS)
    assert {draw.whom for draw in draws} == set(VICTIMS)
    assert {draw.life.is_async for draw in draws} == {True, False}


def saved(place: Place, steps: int, *, content_of: int | None = None) -> None:
    """Save points of the first steps on disk; ``content_of``: give all of them another step's content."""
    checkpoints = place.open(is_async=False)
    for step in range(1, steps + 1):
        tree, tensors = snapshot.take_apart(victim.state_of(content_of or step, 10), "state")
        assert checkpoints.save(checkpoints.header(Point(step, 1), 0, 1), tensors, tree, {})
    checkpoints.release()


def test_check_finds_a_damaged_point(place: Place) -> None:
    campaign = Campaign(place, seed=1)
    saved(place, 2)
    campaign._judge()
    assert campaign.found.problems == []
    change_byte(place.rank_folder / "step_0000000002_gen_000001" / "data.safetensors", -1)
    campaign._judge()
    assert len(campaign.found.unloadable) == 2, "the campaign's own check, and the rank's"


def test_check_finds_a_wrong_point(place: Place) -> None:
    campaign = Campaign(place, seed=1)
    saved(place, 1, content_of=9)
    campaign._judge()
    (problem,) = campaign.found.wrong
    assert "step 1" in problem


def test_check_finds_that_a_durable_point_is_gone(place: Place) -> None:
    campaign = Campaign(place, seed=1)
    saved(place, 2)
    campaign._durable = 3
    campaign._global = {1}
    campaign._judge()
    (problem,) = campaign.found.lost
    assert "step 3 was durable" in problem


def kept_elsewhere(place: Place, *steps: int, content_of: int | None = None) -> Path:
    """Keep copies of these steps as a keeper does; return the newest one's slot."""
    room = MemoryRoom(place.elsewhere, victim.JOB, victim.SLOT, kind=RoomKind.COPIED)
    staging = Staging(room)
    name = ""
    for step in steps:
        tree, tensors = snapshot.take_apart(victim.state_of(content_of or step, 10), "state")
        header = PointHeader(victim.JOB, Point(step, 1), 1, 0, victim.SLOT, "0")
        name, _ = staging.stage(header, tensors, tree, {})
        with memory_buffer.hashed(room.path / name, room.descriptor):
            """Hash the slot, as its writer does first."""
    room.close()
    return room.path / name


def test_check_finds_a_damaged_copy(place: Place) -> None:
    campaign = Campaign(place, seed=1)
    newest = kept_elsewhere(place, 1, 2)
    campaign._judge()
    assert (campaign.found.problems, campaign.found.copies) == ([], 2)
    change_byte(newest, newest.stat().st_size - 4096 + 10)
    campaign._judge()
    assert len(campaign.found.unloadable) == 1
    (problem,) = campaign.found.lost
    assert "step 2 was copied" in problem


def test_check_finds_a_wrong_copy(place: Place) -> None:
    campaign = Campaign(place, seed=1)
    kept_elsewhere(place, 1, content_of=9)
    campaign._judge()
    (problem,) = campaign.found.wrong
    assert "the copy" in problem


def test_check_finds_that_no_common_point_is_left(place: Place) -> None:
    campaign = Campaign(place, seed=1)
    saved(place, 2)
    campaign._global = {3}
    campaign._judge()
    (problem,) = campaign.found.lost
    assert "none is left" in problem
    assert campaign.found.least_verified == 0
