"""Recovery with real ranks: one is killed and replaced, and the bits are those of torch alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.processes import Starter, WarmStarter
from tests.training.group.ddp_ranks import VARIANTS
from tests.training.hub import hub

SCRIPT = Path(__file__).with_name("ddp_ranks.py")
RANKS = [0, 1, 2, 3]
AFTERWARDS = [0, 1, 9, 3]  # a new process has the killed one's rank
STEPS = 9
NAMES = list(VARIANTS)

Shas = dict[str, str]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm: WarmStarter) -> Iterator[Shas]:
    """Return the final weights of each variant with torch alone."""
    folder = tmp_path_factory.mktemp("stock")
    with hub(SCRIPT, folder, warm) as ranks:
        for rank in RANKS:
            ranks.start(rank, "stock", folder=str(folder), rank=rank, world_size=len(RANKS), steps=STEPS, names=NAMES)
        finals = ranks.await_events("final", RANKS)
        ranks.tell(RANKS, "end")
    yield _same(finals)


def _same(finals: list[dict[str, Any]]) -> Shas:
    shas: Shas = finals[0]["shas"]
    assert all(final["shas"] == shas for final in finals), "the ranks differ"
    return shas


def recovered(folder: Path, starter: Starter, **arguments: Any) -> Shas:
    """Return the final weights if rank 2 is killed after its restore point and replaced."""
    arguments = {"folder": str(folder), "steps": STEPS, "names": NAMES, "inside": False, "forget": False, **arguments}
    with hub(SCRIPT, folder, starter) as ranks:
        for rank in RANKS:
            ranks.start(rank, "riding", **arguments)
        ranks.await_events("hello", RANKS)
        ranks.plan(0, RANKS)
        saved = ranks.await_events("saved", RANKS)
        assert all(one["layouts"] == saved[0]["layouts"] for one in saved), "the ranks' layouts differ"
        ranks.kill(2)
        ranks.start(9, "riding", **arguments)
        ranks.await_event("hello", 9)
        ranks.plan(1, AFTERWARDS)
        ranks.await_events("left", [0, 1, 3], generation=0)
        finals = ranks.await_events("final", AFTERWARDS)
        ranks.tell(AFTERWARDS, "end")
        assert [ranks.exit_code(node) for node in AFTERWARDS] == [0] * 4, ranks.logs()
    return _same(finals)


def test_killed_rank_changes_no_bit(undisturbed: Shas, tmp_path: Path, warm: WarmStarter) -> None:
    assert recovered(tmp_path, warm, saved_at=4) == undisturbed


@pytest.mark.parametrize(
    "arguments",
    [
        {"saved_at": 4, "inside": True},  # the wrapper is rebuilt in each generation
        {"saved_at": 1},  # the final layout is known but not built
        {"saved_at": 0},  # back to the first layout
    ],
    ids=str,
)
def test_killed_rank_changes_no_bit_at_other_points(
    undisturbed: Shas, tmp_path: Path, warm: WarmStarter, arguments: dict[str, Any]
) -> None:
    assert recovered(tmp_path, warm, names=["plain"], **arguments) == {"plain": undisturbed["plain"]}


def test_lost_layout_would_change_bits(undisturbed: Shas, tmp_path: Path, warm: WarmStarter) -> None:
    """The broken build that the tests above must catch: all ranks agree, but on different weights."""
    shas = recovered(tmp_path, warm, saved_at=4, names=["plain", "unused"], forget=True)
    assert shas["plain"] != undisturbed["plain"]
    assert shas["unused"] == undisturbed["unused"]  # it never changes its layout
