"""The kills that the campaign on device meshes draws."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.foreign.mesh_kills.campaign import GATE, MESHES, SAVE_POINTS, MeshKills, Recovery, Target


def test_every_mesh_and_target_is_drawn_and_ranks_can_die_together() -> None:
    starter: Any = SimpleNamespace()
    campaign = MeshKills(Path(), starter, list(MESHES))
    kills = list(itertools.islice(campaign.draws(random.Random(7)), 2000))
    assert {(one.mesh, one.target) for one in kills} == set(itertools.product(MESHES, Target))
    for one in kills:
        if one.point in SAVE_POINTS and one.number == 0 and 0 in one.ranks:
            assert len(one.ranks) == 1, "rank 0 saves step 0 before the others have anything to save"


def test_jobs_that_shrink_lose_ranks_of_one_shard_group_before_the_gate() -> None:
    starter: Any = SimpleNamespace()
    kills = list(itertools.islice(MeshKills(Path(), starter, shrinks=True).draws(random.Random(7)), 500))
    assert {one.target for one in kills} == {Target.RANK, Target.TWO, Target.ZERO, Target.SCHEDULER}
    groups = MESHES["hsdp"].shard_groups()
    for one in kills:
        assert one.recovery is Recovery.SHRINK and one.number < GATE
        assert any(set(one.ranks) <= set(group) for group in groups)
        assert (one.first is not None) == (one.target is Target.SCHEDULER)
        assert one.point != "saved" or len(one.ranks) == 1, "the ranks would wait for each other"
