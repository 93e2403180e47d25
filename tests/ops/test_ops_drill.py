"""A drill's plan, its judgement of weights, its words; and one whole drill of the digits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from runtime.core.events import Event, Kind
from runtime.core.point import Point
from runtime.errors import UsageError
from runtime.ops.drill.command import ADVICE, lines_of, main, report
from runtime.ops.drill.compare import Compared, compare
from runtime.ops.drill.plan import Fault, Planned, drawn, faults_of
from runtime.ops.drill.rehearsal import Injected, Outcome, free_environment, trains_since
from runtime.store.checkpoint import PointHeader, TensorPart, write_point
from tests.store.points import LAYOUT, TREE, save

ROOT = Path(__file__).resolve().parents[2]


def test_a_plan_follows_from_its_seed_and_has_every_fault_equally_often() -> None:
    kinds = faults_of("kill, stop,scheduler")
    plan = drawn(kinds, 9, 10.0, seed=4)
    assert plan == drawn(kinds, 9, 10.0, seed=4) != drawn(kinds, 9, 10.0, seed=5)
    assert Counter(one.fault for one in plan) == {Fault.KILL: 3, Fault.STOP: 3, Fault.SCHEDULER: 3}
    assert all(5 <= one.after_s <= 15 and 0 <= one.draw < 1 for one in plan)


def test_a_target_is_one_of_the_members() -> None:
    members = ["worker_0", "worker_1", "worker_2"]
    assert [Planned(Fault.KILL, 1, draw).pick(members) for draw in (0, 0.4, 0.99999)] == members


@pytest.mark.parametrize("text", ["", ",", "kill,bitflip", "Kill", "kill scheduler"])
def test_an_unknown_fault_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected some of kill,segfault,.*Fix: --faults kill"):
        faults_of(text)


def test_equal_checkpoints_are_equal_at_every_common_step(tmp_path: Path) -> None:
    for rank in range(2):
        for step in (10, 20):
            save(tmp_path / "a", step, 1, rank=rank)
        save(tmp_path / "b", 20, 1, rank=rank)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found == Compared((20,), 2, 4)
    assert found.is_equal


def test_the_first_step_and_tensor_that_differ_are_named(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        save(tmp_path / folder, 10)
    save(tmp_path / "a", 20)
    header = PointHeader("another", Point(20, 3), 4, 0, 0, "0")
    wrong = [TensorPart("weight", "F32", (8, 3), bytes(96)), TensorPart("bias", "BF16", (3,), bytes(range(6)))]
    write_point(tmp_path / "b", header, wrong, TREE, LAYOUT)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.difference, found.is_equal) == ("tensor weight of rank 0 differs at step 20", False)


def test_nothing_in_common_is_no_equality(tmp_path: Path) -> None:
    save(tmp_path / "a", 10)
    assert not compare(tmp_path / "a", tmp_path / "b").is_equal
    save(tmp_path / "b", 20)
    assert compare(tmp_path / "a", tmp_path / "b").difference == "the two jobs have no checkpoint of the same step"
    save(tmp_path / "b", 10)
    assert compare(tmp_path / "a", tmp_path / "b").difference == "one job ended at step 10, the other at step 20"


def test_a_damaged_checkpoint_is_a_difference(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        save(tmp_path / folder, 10)
    (data,) = (tmp_path / "b").rglob("data.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.chmod(0o600)
    data.write_bytes(content)
    assert "step 10, rank 0: " in compare(tmp_path / "a", tmp_path / "b").difference


FINISHED = [Event(Kind.SCHEDULER, 1.0), Event(Kind.TRAINING, 2.0), Event(Kind.FINISHED, 9.0, step=50)]


def test_a_job_that_has_just_lost_a_member_does_not_train() -> None:
    training = FINISHED[:2]
    assert trains_since(training) == trains_since([*training, Event(Kind.LOST, 3.0, more={"spare": 1})]) == 2.0
    assert trains_since([*training, Event(Kind.LOST, 3.0)]) is None
    assert trains_since([*training, Event(Kind.SCHEDULER, 3.0)]) is None


def test_the_verdict_names_what_was_compared_and_advises_where_bits_differ(tmp_path: Path) -> None:
    good = Outcome(FINISHED, [Injected(Fault.KILL, "worker_1", 20, 4.0, 0.5)], 9.0)
    passed = report(Outcome(FINISHED), good, Compared((40, 50), 2, 24), seed=7)
    assert passed["passed"] and passed["advice"] == []
    assert "bits: equal in 24 tensors of 2 ranks, steps 40, 50; the last is 50" in lines_of(passed, tmp_path)
    failed = report(Outcome(FINISHED), good, Compared((50,), 2, 3, "step 50, rank 1: tensor x differs"), seed=7)
    assert not failed["passed"] and failed["advice"] == list(ADVICE)
    assert "bits: step 50, rank 1: tensor x differs" in lines_of(failed, tmp_path)
    lost = report(Outcome(FINISHED), Outcome(problem="it was stopped"), Compared((50,), 2, 3), seed=7)
    assert "survived: no: it was stopped" in lines_of(lost, tmp_path)
    json.dumps([passed, failed, lost])


def test_a_dry_run_says_what_would_be_done_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--dry-run", "--faults", "kill,all", "--kills", "2", "--", "train.py", "--kills", "9"]) == 0
    said = capsys.readouterr().out
    assert "train.py --kills 9 undisturbed, in drill/undisturbed" in said
    assert "kill -9 of a worker" in said and "kill -9 of every worker" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "drill").mkdir()
    with pytest.raises(UsageError, match="it is there already"):
        main(["--", "train.py"])
    with pytest.raises(UsageError, match="no such script"):
        main(["--", "other.py"])


def test_another_jobs_place_is_not_inherited() -> None:
    found = free_environment({"LOG_DIR": "/theirs", "MS_NODE_ID": "3", "HOME": "/home", "SCHED_PORT": "1"})
    assert found.keys() == {"HOME", "PYTHONPATH"}


@pytest.mark.system
@pytest.mark.thorough
def test_the_digits_survive_a_drill_with_equal_bits(tmp_path: Path) -> None:
    words = ["--faults", "kill,pause,scheduler", "--kills", "3", "--every", "3", "--seed", "2", "--json"]
    script = ["--", str(ROOT / "examples/digits/train.py"), "--steps", "2000"]
    done = subprocess.run(
        [sys.executable, "-m", "runtime", "drill", *words, *script],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    logs = "\n".join(log.read_text()[-2000:] for log in tmp_path.rglob("follower.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["survived"] and told["equal_bits"]
    assert [one["fault"] for one in told["faults"]] == [
        str(one.fault) for one in drawn(list(faults_of(words[1])), 3, 3, 2)
    ]
    for name in ("undisturbed", "disturbed"):
        assert sum(told[name]["buckets_s"].values()) == pytest.approx(told[name]["wall_s"], rel=0.005)
