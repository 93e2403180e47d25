"""A point exported as a torch file: loadable with weights_only, under the names of the training script."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samebits.__main__ import main
from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import PointHeader
from samebits.training.state import snapshot
from samebits.training.state.torch_state import TorchState
from tests.training.commits import Net, bits_of, small_state, train_one_step

LAYOUT = {"outside/0": [[["a", "b"]], True]}


def save(root: Path, contents: Any) -> None:
    """Save the contents as the point 0/7."""
    tree, parts = snapshot.split(contents, "state")
    checkpoints.write_point(root, PointHeader("job", Point(7, 2), 4, 0, 0, "0"), parts, tree, LAYOUT)


def exported(tmp_path: Path, contents: Any, *words: str) -> Any:
    """Return what a user loads from ``ckpt export`` of the contents."""
    save(tmp_path / "ckpt", contents)
    file = tmp_path / "out.pt"
    assert main(["ckpt", "export", "0/7", str(file), "--folder", str(tmp_path / "ckpt"), *words]) == 0
    return torch.load(file, weights_only=True)


def test_model_and_optimizer_load_into_a_program_without_samebits(tmp_path: Path) -> None:
    state = small_state(epoch=3, rng="saved")
    train_one_step(state)
    found = exported(tmp_path, {**state.contents(), "commits": 9})
    assert set(found) == {"model", "optimizer", "sampler", "epoch", "samebits"}
    model = Net()
    model.load_state_dict(found["model"])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(found["optimizer"])
    assert bits_of(TorchState(model, optimizer)) == bits_of(state)
    assert found["epoch"] == 3
    origin = found["samebits"]
    assert (origin["job"], origin["step"], origin["generation"]) == ("job", 7, 2)
    assert (origin["rank"], origin["world_size"], origin["commits"]) == (0, 4, 9)
    assert (origin["steps"], origin["layout"]) == (state.completed_steps, LAYOUT)
    assert "rng" in origin["own"]


def shared(**values: Any) -> dict[str, Any]:
    return {"shared": {"steps": 7, "values": values}, "own": {}}


def test_every_kind_of_value_is_restored(tmp_path: Path) -> None:
    values = {
        "tensors": [torch.arange(6).reshape(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3)],
        "plain": (1, -(2**127), 2**2000, None, True, 0.1, "text", b"bytes", {3: ("x",), "y": []}),
    }
    found = exported(tmp_path, shared(**values), "--format", "torch")
    assert found["plain"] == values["plain"]
    for one, expected in zip(found["tensors"], values["tensors"], strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=0)


def test_unsupported_value_becomes_the_nearest_that_weights_only_reads(tmp_path: Path) -> None:
    values = {
        "kept": [Counter(a=1), OrderedDict(b=2), {1}, 1j, torch.ones(2, dtype=torch.complex128)],
        "near": [deque([1, 2], 3), defaultdict(list, a=[np.float64(0.1)]), frozenset({1}), range(2), np.int8(3)],
        "array": np.arange(3.0),
    }
    found = exported(tmp_path, shared(**values), "--format", "torch")
    assert [type(one) for one in found["kept"][:3]] == [Counter, OrderedDict, set]
    assert found["kept"][4].dtype is torch.complex128
    assert found["near"] == [[1, 2], {"a": [0.1]}, {1}, [0, 1], 3]
    assert found["array"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (shared(a={"b": [b""]}), r"state\.a\.b\.0: .* cannot read empty bytes"),
        (shared(a=-(2**2040)), r"state\.a: .* cannot read an integer of 2041 bits"),
        (shared(samebits=1), "a value called 'samebits'"),
        ({"weights": torch.ones(2)}, "does not hold a state saved by samebits.elastic"),
    ],
)
def test_value_torch_could_write_but_not_read_is_refused(
    tmp_path: Path, contents: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "ckpt", contents)
    words = ["ckpt", "export", "0/7", "--folder", str(tmp_path / "ckpt")]
    assert main([*words, str(tmp_path / "out.pt")]) == CheckpointError.exit_code
    told = capsys.readouterr().err
    assert re.search(reason, told), told
    assert "safetensors" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]
    assert main([*words, str(tmp_path / "out.safetensors")]) == 0
