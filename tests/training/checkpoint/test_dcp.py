"""torch.distributed.checkpoint directories: exported states are restored in a world of any size, never as code."""

from __future__ import annotations

import os
import pickle
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from samebits.__main__ import main
from samebits.core.point import Point
from samebits.errors import CheckpointError, UsageError
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import PointHeader
from samebits.training import elastic
from samebits.training.checkpoint.dcp import read_dcp
from samebits.training.state import snapshot
from tests.training.commits import Commits, bits_of, small_state, train_one_step
from tests.training.sharding import worlds

MESSAGE = "torch.distributed is disabled"
pytestmark = pytest.mark.filterwarnings(f"ignore:{MESSAGE}")


def save(root: Path, contents: Any, rank: int = 0, world_size: int = 1) -> None:
    tree, parts = snapshot.split(contents, "state")
    header = PointHeader("job", Point(7, 2), world_size, rank, rank, str(rank))
    checkpoints.write_point(root, header, parts, tree, {})


def export(tmp_path: Path, point: str = "0/7", name: str = "out") -> int:
    words = ["--format", "dcp", "--folder", str(tmp_path / "ckpt")]
    return main(["ckpt", "export", point, str(tmp_path / name), *words])


@pytest.mark.parametrize("steps", [0, 2])
def test_state_is_restored_completely(tmp_path: Path, steps: int) -> None:
    history = [1, (2.5, "x"), None]
    state = small_state(
        epoch=3,
        history=history,
        mean=torch.tensor([1.0, 2.0]),
        table={1: "a", 2: torch.ones(1)},
        none={},
        seen=Counter(a=2),
        last=deque([1], 3),
    )
    for number in range(steps):
        train_one_step(state, number)
    save(tmp_path / "ckpt", {**state.contents(), "commits": 9})
    assert export(tmp_path) == 0
    other = small_state(
        epoch=0,
        history=[],
        mean=torch.zeros(2),
        table={1: "", 2: torch.zeros(1)},
        none={"a": 1},
        seen=Counter(),
        last=deque(maxlen=3),
    )
    train_one_step(other, 9)
    before = torch.get_rng_state()
    elastic.load_dcp(other, tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), before)
    assert bits_of(other) == bits_of(state)
    assert (other.epoch, other.history, other.mean.tolist()) == (3, history, [1.0, 2.0])
    assert (repr(other.seen), repr(other.last)) == ("Counter({'a': 2})", "deque([1], maxlen=3)")
    assert (other.table, other.none) == ({1: "a", 2: torch.ones(1)}, {})
    assert other.completed_steps == 1, "a job's steps are its own"


def test_sharded_state_is_exported_from_all_ranks_into_any_world(tmp_path: Path) -> None:
    with worlds.world():
        state = worlds.sharded_state(epoch=4)
        worlds.train_one_step(state)
        expected = worlds.wholes_of(state)
        tree = snapshot.split(state.contents(), "state")
    for rank in range(worlds.RANKS):
        with worlds.world():
            one = worlds.sharded_state(seed=rank, epoch=0)
            content = snapshot.join(tree[0], {part.name: part for part in tree[1]})
            one.load(content, own=False)
        with worlds.world(rank, worlds.RANKS):
            one.enter_group()
            save(tmp_path / "ckpt", one.contents(), rank, worlds.RANKS)
    assert export(tmp_path, "1/7") == 0
    with worlds.world():
        other = worlds.sharded_state(seed=8, epoch=0)
        elastic.load_dcp(other, tmp_path / "out")
        assert all(torch.equal(one, two) for one, two in zip(worlds.wholes_of(other), expected, strict=True))
        assert other.epoch == 4
    with worlds.world(1, 2):
        other.enter_group()
        assert torch.equal(worlds.locals_of(other.model)[0], expected[0].chunk(2)[1])


def test_export_is_read_into_a_model_sharded_by_torch(tmp_path: Path) -> None:
    """With ENABLE_RECOVERY=0 the model is sharded before the state is made, and there are no moments yet."""
    with worlds.world():
        state = worlds.sharded_state()
        worlds.train_one_step(state)
        expected = worlds.wholes_of(state)
        save(tmp_path / "ckpt", state.contents())
    assert export(tmp_path) == 0
    with worlds.world(1, worlds.RANKS):
        other = worlds.sharded_state(seed=8)
        elastic.load_dcp(other, tmp_path / "out")
        for one, whole in zip(worlds.wholes_of(other), expected, strict=True):
            assert torch.equal(one, whole.chunk(worlds.RANKS)[1])


def test_sharded_state_is_not_exported_without_all_ranks_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with worlds.world():
        state = worlds.sharded_state()
    for rank in (0, 2):
        with worlds.world(0, worlds.RANKS):
            state.enter_group()
            save(tmp_path / "ckpt", state.contents(), rank, worlds.RANKS)
    assert export(tmp_path) == CheckpointError.exit_code
    assert (
        "for rank 1 of 3. The state is sharded, so the checkpoints of all ranks are needed" in capsys.readouterr().err
    )
    words = ["ckpt", "export", "0/7", str(tmp_path / "out.pt"), "--folder", str(tmp_path / "ckpt")]
    assert main(words) == CheckpointError.exit_code
    assert "--format dcp, which takes all ranks' points" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def test_checkpoint_saved_by_torch_is_read(tmp_path: Path) -> None:
    state = small_state()
    train_one_step(state)
    dcp.save(
        {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()},
        checkpoint_id=tmp_path / "theirs",
        no_dist=True,
    )
    other = small_state()
    with pytest.raises(CheckpointError, match=r"lacks sampler\. .*names=\['model', 'optimizer'\]"):
        elastic.load_dcp(other, tmp_path / "theirs")
    elastic.load_dcp(other, tmp_path / "theirs", names=["model", "optimizer"])
    assert bits_of(other) == bits_of(state)


def test_directory_records_its_origin_but_nothing_of_this_machine(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", small_state().contents(), 2, 4)
    assert export(tmp_path, "2/7") == 0
    origin = read_dcp(tmp_path / "out")["samebits"]
    assert origin.pop("values") == ["model", "optimizer", "sampler"]
    assert origin == {"job": "job", "step": 7, "generation": 2, "world_size": 4}
    for file in (tmp_path / "out").iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()


# --- refusals ---------------------------------------------------------------------------------------------------------


class Code:
    """An object whose unpickling makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_the_index_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"\.metadata is not an index .*: it names posix\.mkdir"):
        read_dcp(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["torch.load", "torch.hub", "builtins.eval", "torch.serialization.load"])
def test_no_other_name_is_allowed(tmp_path: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(b"\x80\x04c" + f"{module}\n{attribute}\n".encode() + b".")
    with pytest.raises(CheckpointError, match=f"it names {name}"):
        read_dcp(tmp_path)


def test_code_among_the_values_is_not_run(tmp_path: Path) -> None:
    dcp.save({"model": torch.ones(2), "epoch": Code(tmp_path / "ran")}, checkpoint_id=tmp_path / "bad", no_dist=True)
    with pytest.raises(CheckpointError, match="epoch is neither a tensor nor plain data"):
        read_dcp(tmp_path / "bad")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [None, b"", b"\x80\x04.", pickle.dumps({"a": 1}), b"no pickle"])
def test_invalid_directory_is_reported(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_dcp(tmp_path)


def test_truncated_file_is_reported(tmp_path: Path) -> None:
    dcp.save({"model": torch.ones(200)}, checkpoint_id=tmp_path / "cut", no_dist=True)
    (file,) = (tmp_path / "cut").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cut cannot be read"):
        read_dcp(tmp_path / "cut")


def test_nothing_is_overwritten_and_no_partial_export_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "ckpt", small_state().contents())
    (tmp_path / "out").write_text("mine")
    assert export(tmp_path) != 0
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"
    save(tmp_path / "ckpt2", {"shared": {"steps": 1, "values": {"a": b""}}, "own": {}})
    words = ["--format", "dcp", "--folder", str(tmp_path / "ckpt2")]
    assert main(["ckpt", "export", "0/7", str(tmp_path / "new"), *words]) == CheckpointError.exit_code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "ckpt2", "out"]


def test_state_of_another_program_is_reported(tmp_path: Path) -> None:
    dcp.save({"model": {"first.weight": torch.ones(4, 4)}}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(CheckpointError, match=r"theirs holds another program's state: .*last\.bias"):
        elastic.load_dcp(small_state(), tmp_path / "theirs", names=["model"])


def test_load_is_called_before_the_job_starts_with_names_of_the_state(tmp_path: Path) -> None:
    state = small_state()
    with pytest.raises(UsageError, match="the state has no weights"):
        elastic.load_dcp(state, tmp_path, names=["weights"])
    Commits(state)
    with pytest.raises(UsageError, match=r"call it before samebits\.elastic\.run"):
        elastic.load_dcp(state, tmp_path)
