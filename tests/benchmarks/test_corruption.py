"""The corruption benchmark: its draws, what counts as located, and the form of its report."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks import parts
from benchmarks.corruption import HARMLESS, LOCATED, MISSED, REPAIRED, Clean, Found, Line, Log, Ran, main, report
from benchmarks.corruption_draws import (
    AUDIT_EVERY,
    COMPARED_EVERY,
    HASHED_AT,
    WINDOW,
    WORLD_SIZE,
    Kind,
    Place,
    corrupt,
    draw,
    window_of,
)
from benchmarks.report import problems
from samebits.core.watch.audits import roles
from samebits.settings_table import LEAST_AUDIT, VARIABLES

SEED = 5


def test_draws_are_reproducible_and_followed_by_a_comparison_in_their_window() -> None:
    for number in range(1, 500):
        one = draw(SEED, number, number)
        assert one == draw(SEED, number, number)
        assert window_of(one.step) == window_of(WINDOW * number + HASHED_AT) == number
        compared_at = WINDOW * (number + 1)
        assert compared_at % COMPARED_EVERY == 0 and one.step + one.place.is_at_rest <= compared_at
        who = roles(one.step, AUDIT_EVERY, WORLD_SIZE)
        if one.place.is_of_audited_step:
            assert who is not None and who.audited == one.victim
    assert LEAST_AUDIT == AUDIT_EVERY
    assert next(one.default for one in VARIABLES if one.name == "CONSISTENCY") == f"majority:{COMPARED_EVERY}"


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("kind", list(Kind))
def test_each_kind_changes_no_more_than_it_says(kind: Kind, item_bytes: int) -> None:
    most_bytes = {
        Kind.BITS: item_bytes,
        Kind.MANTISSA: 1,
        Kind.WARP: 32 * item_bytes,
        Kind.STUCK: 1024 * item_bytes,
        Kind.TILE: 2 * 256 * item_bytes,
        Kind.LINE: 64,
        Kind.PAGE: 4096,
    }[kind]
    changed = 0
    for seed in range(40):
        memory = np.random.default_rng(seed).integers(0, 256, 64 * 64 * item_bytes, dtype=np.uint8)
        before = memory.copy()
        is_changed = corrupt(memory, item_bytes, 64, kind, random.Random(seed))
        different = int((memory != before).sum())
        assert is_changed == (different > 0) and different <= most_bytes
        changed += is_changed
    assert changed > 30


DIFFERS = (
    "samebits scheduler: rank {rank} (worker 1, pid 7 on vm) differs from ranks 0 and 2 after step {step}, first in "
    "model.first.weight, since some step from 51 to 100: x (device); all ranks roll back to step 50"
)
AUDITED = (
    "samebits scheduler: worker 1 (rank 1, pid 7 on vm), step {step}: rank {rank}'s gradient of first.weight is not "
    "what rank 2 and rank 0 compute from the same inputs: most likely rank {rank}'s device is at fault; all ranks roll"
)
RIGHT, WRONG = dict.fromkeys("012", "right"), {**dict.fromkeys("012", "right"), "1": "wrong"}


def ran(window: int, line: str, hashes: dict[str, str]) -> Ran:
    return Ran({window: True}, {0: RIGHT, window: hashes}, Log.of(line), has_ended=True)


@pytest.mark.parametrize("line", [DIFFERS, AUDITED], ids=["replica", "audit"])
def test_only_its_own_rank_and_window_count_as_located(line: str) -> None:
    one = next(it for it in (draw(SEED, number, number) for number in range(1, 99)) if it.place is Place.WEIGHT)
    step = WINDOW * (one.window + 1)
    for rank, at, hashes, outcome in (
        (one.victim, step, RIGHT, REPAIRED),
        (one.victim, step, WRONG, LOCATED),
        ((one.victim + 1) % 3, step, RIGHT, MISSED),
        (one.victim, step + WINDOW, RIGHT, HARMLESS),
        (one.victim, step + WINDOW, WRONG, MISSED),
        (one.victim, step, {}, LOCATED),
    ):
        found = ran(one.window, line.format(rank=rank, step=at), hashes).judge(SEED, one)
        assert found is not None and found.outcome == outcome, (rank, at, hashes)
    ended = Ran({}, {0: RIGHT}, Log(), has_ended=False)
    assert ended.judge(SEED, one) is None, "the job had ended before it"


def test_report_separates_what_a_replica_or_an_audit_can_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = (
        (Place.WEIGHT, REPAIRED),
        (Place.MOMENT, HARMLESS),
        (Place.AUDITED_GRADIENT, REPAIRED),
        (Place.RECEIVED, MISSED),
        (Place.GRADIENT, MISSED),
    )
    found = [Found(SEED, number, "BITS", place.name, outcome, []) for number, (place, outcome) in enumerate(outcomes)]
    document = report(found, [Clean(1000, []), Clean(500, ["a line"])])[0].document()
    assert not problems(document)
    assert document["ratios"] == {
        "located_of_all_drawn_at_any_step": 0.25,
        "located_of_visible": 0.6667,
        "repaired_of_visible": 0.6667,
    }
    assert document["ours"]["clean"] == {"clean_steps": 1500, "false_alarm_count": 1}
    file = tmp_path / "corruption.jsonl"
    for one in found:
        parts.add(file, Line(found=one))
    assert main(["--of", str(file)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ratios"] == document["ratios"]
