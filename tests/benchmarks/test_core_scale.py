"""The core benchmark's stories reach their intended end, and a steep one is named. Without timing."""

from __future__ import annotations

import pytest

from benchmarks.core_scale import STORIES, Cost, Told, people, report

WORKERS = 64


@pytest.mark.parametrize(
    ("story", "generation", "members"),
    [
        ("repeated_heartbeats", 1, 64),
        ("first_start", 1, 64),
        ("start_with_spares", 1, 64),
        ("elastic_start", 1, 64),
        ("one_lost", 2, 64),
        ("half_lost", 2, 64),
        ("all_lost", 2, 64),
        ("shrink_and_grow", 3, 64),
        ("scheduler_restarted", 1, 64),
        ("journal_lost", 1, 64),
    ],
)
def test_story_ends_in_training(story: str, generation: int, members: int) -> None:
    core = STORIES[story](WORKERS).core
    assert core.phase() == "training"
    assert core.state.generation is not None
    assert (core.state.generation_number, len(core.state.generation.members)) == (generation, members)
    assert core.state.job == "job"


def test_last_story_ends_the_job() -> None:
    assert STORIES["finish"](WORKERS).core.state.finished


def test_every_story_is_tested() -> None:
    assert len(STORIES) == 11


def test_story_with_more_than_linear_cost_is_named() -> None:
    linear, steep = Told(Cost(1.0, 0.1), Cost(4.0, 0.4)), Told(Cost(1.0, 0.1), Cost(16.0, 0.4))
    found = {"repeated_heartbeats": linear, "half_lost": steep}
    assert people(found, 4000).splitlines()[-1].startswith("steeper than linear: half lost (")
    assert people(dict.fromkeys(found, linear), 4000).splitlines()[-1].startswith("every story is linear (")
    made = report(found, 4000)
    assert made.ratios == {"repeated_heartbeats_growth": 1.0, "half_lost_growth": 4.0}
    assert made.floor == {"repeated_heartbeat_us": 1000.0}
    assert made.ours["half_lost_longest_step_ms"] == 400.0
