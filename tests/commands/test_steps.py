"""``samebits steps``: the log of one rank, of all ranks, and the first difference between two."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from samebits import config
from samebits.__main__ import main
from samebits.commands.steps import SHOWN_SAMPLES
from samebits.errors import StoreError, UsageError
from samebits.store.step_log import StepLogWriter
from samebits.store.step_record import LateSamples, LogHeader, NewLine, StepEntry, StepRecord
from tests.store.disk_faults import closed

EVERY_STEP = range(1, 6)


def record(step: int, slot: int = 0, **values: object) -> StepRecord:
    samples = tuple(range(10 * slot, 10 * slot + 8))
    base = StepRecord(step, 1, 2, slot, 5, (0.01,), samples, f"{step:032x}")
    return replace(base, **values)  # type: ignore[arg-type]


def write(root: Path, slot: int, entries: Iterable[StepEntry]) -> Path:
    """Return the rank's folder with these entries in its log."""
    writer = StepLogWriter.open(root / str(slot), LogHeader("job-1", slot, f"worker-{slot}"))
    for entry in entries:
        writer.append([entry])
    writer.close()
    return root / str(slot)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a job's checkpoints with the equal logs of two ranks."""
    for slot in (0, 1):
        write(tmp_path, slot, [record(step, slot) for step in EVERY_STEP])
    return tmp_path


def test_ranks_log_is_a_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, 1, [record(6, 1, samples=(), weights=None), LateSamples(6, (7, 8))])
    assert main(["steps", str(root / "1"), "--from", "5"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["step", "generation", "rank", "learning", "rate", "weights", "before", "samples"],
        ["5", "1", "1", "of", "2", "0.01", "0" * 16, "10", "11", "12", "13", "14", "15", "…", "(8)"],
        ["6", "1", "1", "of", "2", "0.01", "–", "7", "8"],
    ]


def test_samples_are_shown_completely_if_they_fit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, 1, [record(6, 1, samples=tuple(range(SHOWN_SAMPLES)))])
    assert main(["steps", str(root / "1"), "--from", "6"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-SHOWN_SAMPLES:] == [*map(str, range(SHOWN_SAMPLES))]


def test_all_ranks_have_a_line_each_and_are_compared(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", str(root), "--to", "4"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:5] for line in out.splitlines()[1:3]] == [[slot, "4", "1", "to", "4"] for slot in ("0", "1")]
    assert out.splitlines()[3] == f"{root}/0 and {root}/1 agree in every step they share: 1 to 4"


def test_first_step_at_which_two_ranks_differ_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path, 0, [record(step) for step in EVERY_STEP])
    other = write(tmp_path, 1, [record(step, 1, weights=f"{step + (step >= 3):032x}") for step in EVERY_STEP])
    for words in ([str(one), "--against", str(other)], [str(tmp_path)]):
        assert main(["steps", *words]) == 1
        assert capsys.readouterr().out.splitlines()[-1] == (
            f"step 3 is the first that differs between {one} and {other}: weights before it {3:032x}, and {4:032x}"
        )
    assert main(["steps", str(one), "--against", str(other), "--to", "2"]) == 0
    assert main(["steps", str(one), "--against", str(other), "--from", "4", "--json"]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["comparisons"] == [
        {
            "folder": str(one),
            "against": str(other),
            "shared_steps": 2,
            "first_difference": {
                "step": 4,
                "what": "weights before it",
                "one": f"{4:032x}",
                "other": f"{5:032x}",
            },
        }
    ]


def test_two_runs_of_one_rank_are_compared_including_their_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "one", 0, [record(step) for step in EVERY_STEP])
    other = write(tmp_path / "other", 0, [record(step, samples=(step,) * 8) for step in EVERY_STEP])
    assert main(["steps", str(one), "--against", str(other)]) == 1
    assert "step 1 is the first that differs" in capsys.readouterr().out


def test_abandoned_line_is_shown_but_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path, 0, [*(record(step, seed=9) for step in (3, 4, 5)), NewLine(2, "why"), record(3)])
    other = write(tmp_path, 1, [record(step, 1) for step in EVERY_STEP])
    assert main(["steps", str(one), "--against", str(other)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:-1]] == ["3", "4", "5", "3"]
    assert "agree in every step they share: 3 to 3" in out[-1]


def test_folder_defaults_to_the_current_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in config.kept_environment():
        if name not in ("PATH", "PYTHONPATH"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "ckpt_of_rank", 1, [record(7, 1)])
    assert main(["steps"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("7 ")


def test_logs_without_a_common_step_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path, 0, [record(1)]), write(tmp_path, 1, [record(2, 1)])
    assert main(["steps", str(one), "--against", str(other)]) == 0
    assert "have no step in common" in capsys.readouterr().out


def test_json_has_every_complete_record(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", str(root), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(log["job"], log["slot"], log["problems"]) for log in said["logs"]] == [("job-1", 0, []), ("job-1", 1, [])]
    first = said["logs"][0]["steps"][0]
    assert (first["step"], first["samples"], first["weights"]) == (1, list(range(8)), f"{1:032x}")


def test_damage_is_shown_above_the_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (segment,) = (root / "0" / "steps").glob("*_from_*")
    damaged = bytearray(segment.read_bytes())
    damaged[damaged.index(f"{2:032x}".encode())] ^= 1
    segment.write_bytes(damaged)
    assert main(["steps", str(root / "0")]) == 0
    assert "was changed after it was written" in capsys.readouterr().out.splitlines()[0]
    assert segment.read_bytes() == damaged


def test_rank_without_a_log_is_left_out(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "2" / "steps"
    empty.mkdir(parents=True)
    assert main(["steps", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"left out, as no step was logged there yet: {empty}"
    assert [line.split()[0] for line in lines[1:4]] == ["slot", "0", "1"]
    assert main(["steps", str(root / "1"), "--against", str(root)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == lines[0]
    assert main(["steps", str(root), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert ([log["slot"] for log in said["logs"]], said["empty"]) == ([0, 1], [str(empty)])
    assert main(["steps", str(empty.parent)]) == UsageError.exit_code
    assert f"{empty} is empty: no step was logged there yet" in capsys.readouterr().err


def test_job_without_any_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for slot in "01":
        (tmp_path / slot / "steps").mkdir(parents=True)
    assert main(["steps", str(tmp_path)]) == UsageError.exit_code
    assert f"{tmp_path / '0' / 'steps'} is empty" in capsys.readouterr().err


def test_unreadable_folder_is_an_error_with_a_fix(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closed(root.parent):
        assert main(["steps", str(root)]) == StoreError.exit_code
    assert f"{root}: looking for step logs failed: Permission denied (EACCES)" in capsys.readouterr().err


def test_folder_without_a_log_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["steps", str(tmp_path / "empty")]) == UsageError.exit_code
    assert "step_log=True" in capsys.readouterr().err
    assert main(["steps", str(root), "--against", str(root / "1")]) == UsageError.exit_code
    assert f"for example {root / '0'}" in capsys.readouterr().err
