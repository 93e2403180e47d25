"""The kills that the campaign on device meshes draws."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.foreign.mesh_kills.campaign import MESHES, SAVE_POINTS, MeshKills, Target


def test_every_mesh_and_target_is_drawn_and_ranks_can_die_together() -> None:
    starter: Any = SimpleNamespace()
    campaign = MeshKills(Path(), starter, list(MESHES))
    kills = list(itertools.islice(campaign.draws(random.Random(7)), 2000))
    assert {(one.mesh, one.target) for one in kills} == set(itertools.product(MESHES, Target))
    for one in kills:
        if one.point in SAVE_POINTS and one.number == 0 and 0 in one.ranks:
            assert len(one.ranks) == 1, "rank 0 saves step 0 before the others have anything to save"
