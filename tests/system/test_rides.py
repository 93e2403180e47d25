"""Common additions to a training step survive a kill anywhere with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system.job import BETWEEN, RIDER, Job
from tests.system.kill_list import replace

pytestmark = pytest.mark.system

STEPS = 30
MIDDLE = 14

TOGETHER: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # several at once if possible; if one fails, the rides below tell which
    "accumulation, not reduced inside a window; two optimizers; weights changed by hand": (
        ("--accumulate", "4", "--no-sync", "--two-optimizers", "--clamp"),
        ("1:micro:49", "0:micro:75"),
    ),
    "a commit every ten steps; a collective between step and commit; gradients as views of buckets": (
        ("--commit-every", "10", "--reduce-after", "--bucket-view"),
        (f"1:stepped:{MIDDLE}", "2:stepped:25"),
    ),
    "mixed precision and batch norm, cut off inside the scaler's step; unused parameters": (
        ("--amp", "--batch-norm", "--find-unused"),
        (f"1:micro:{MIDDLE}", f"0:micro:{MIDDLE + 6}"),
    ),
    "a static graph": (("--static-graph",), (f"1:committed:{MIDDLE}",)),
}
RIDES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # name: (arguments, kills), each of another rank, one after the other
    "accumulation": (("--accumulate", "4"), ("1:micro:49", "2:micro:62", "0:micro:75", "3:micro:88")),
    "accumulation, not reduced inside a window": (
        ("--accumulate", "4", "--no-sync"),
        ("1:micro:49", "2:micro:62", "0:micro:75", "3:micro:88"),
    ),
    "a commit every ten steps": (("--commit-every", "10"), (f"1:stepped:{MIDDLE}", "2:stepped:25")),
    "a collective between step and commit": (("--reduce-after",), (f"1:stepped:{MIDDLE}",)),
    "weights changed by hand": (("--clamp",), (f"1:stepped:{MIDDLE}", f"0:committed:{MIDDLE + 5}")),
    "mixed precision": (("--amp",), (f"1:committed:{MIDDLE}", f"2:micro:{MIDDLE + 7}")),
    "mixed precision and batch norm, cut off inside the scaler's step": (
        ("--amp", "--batch-norm"),
        (f"1:micro:{MIDDLE}", f"0:micro:{MIDDLE + 6}"),
    ),
    "two optimizers": (("--two-optimizers",), (f"1:committed:{MIDDLE}",)),
    "batch norm": (("--batch-norm",), (f"0:committed:{MIDDLE}", f"1:stepped:{MIDDLE + 5}")),
    "gradients as views of buckets": (("--bucket-view",), ("2:committed:1", f"1:committed:{MIDDLE}")),
    "unused parameters are looked for": (("--find-unused",), (f"1:committed:{MIDDLE}",)),
    "a compiled module": (("--compile",), (f"1:committed:{MIDDLE}",)),
}


LISTED = [
    *(pytest.param(*ride, id=name) for name, ride in TOGETHER.items()),
    *(pytest.param(*ride, id=name, marks=pytest.mark.thorough) for name, ride in RIDES.items()),
]


@pytest.mark.parametrize(("arguments", "kills"), LISTED)
def test_addition_survives_kills(
    arguments: tuple[str, ...],
    kills: tuple[str, ...],
    new_job: Callable[..., Job],
    undisturbed: Callable[..., str],
) -> None:
    trained = ("--steps", str(STEPS), *arguments)
    expected = undisturbed(*trained, script=RIDER)
    job = new_job(*trained, *(word for kill in kills for word in ("--kill", kill)), script=RIDER)
    replace(*(int(kill.partition(":")[0]) for kill in kills))(job)
    assert job.wait_finished() == expected


BETWEEN_COMMITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # of two ranks, with a generator and a discriminator, parts of which are frozen for a while
    "weights swapped by .data.copy_, eval mode and a hook behind a commit": (
        ("--swap", "copy", "--behind"),
        ("1:evaluates:5", "0:frozen:12"),
    ),
    "weights swapped by .data = between a step and its commit": (
        ("--swap", "set"),
        ("1:evaluates:9", "0:frozen:14"),
    ),
    "weights swapped by .data = behind a commit": (("--swap", "set", "--behind"), ("0:evaluates:10",)),
    "weights swapped through aliases from the start": (("--swap", "early", "--behind"), ("1:evaluates:10",)),
    "weights swapped by load_state_dict(assign=True)": (("--swap", "assign", "--behind"), ("1:evaluates:10",)),
    "weights swapped by .data.copy_ between a step and its commit": (("--swap", "copy"), ("0:evaluates:14",)),
}


@pytest.mark.parametrize(
    ("arguments", "kills"),
    [
        pytest.param(*ride, id=name, marks=[pytest.mark.thorough] if number > 1 else [])
        for number, (name, ride) in enumerate(BETWEEN_COMMITS.items())
    ],
)
def test_changes_between_commits_are_undone(
    arguments: tuple[str, ...],
    kills: tuple[str, ...],
    new_job: Callable[..., Job],
    undisturbed: Callable[..., str],
) -> None:
    expected = undisturbed(*arguments, script=BETWEEN, workers=2)
    job = new_job(*arguments, *(word for kill in kills for word in ("--kill", kill)), script=BETWEEN, workers=2)
    replace(*(int(kill.partition(":")[0]) for kill in kills))(job)
    assert job.wait_finished() == expected
