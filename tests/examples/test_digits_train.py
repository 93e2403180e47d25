"""The model, the example's functions and its command line; the system tests run complete jobs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.digits.data import load_digits
from examples.digits.model import DigitsNet


@pytest.fixture
def train(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import ``train.py`` as a job does: with its own folder on the path."""
    monkeypatch.syspath_prepend(str(repository / "examples" / "digits"))
    yield importlib.import_module("train")
    for name in ("train", "data", "model"):
        sys.modules.pop(name)


@pytest.mark.parametrize("size", [4, 8, 28])
def test_net_accepts_squares_of_any_size(size: int) -> None:
    assert DigitsNet(size)(torch.zeros(3, 1, size, size)).shape == (3, 10)


def test_net_has_nothing_that_differs_between_ranks() -> None:
    net = DigitsNet(8)
    assert [name for name, _ in net.named_buffers()] == []
    assert any(isinstance(layer, nn.Conv2d) for layer in net.modules())


def test_net_learns_the_digits(train: ModuleType) -> None:
    digits = load_digits(None)
    torch.manual_seed(1)
    net = DigitsNet(digits.image_size)
    _, before = train.evaluate(net, digits.held_out, torch.device("cpu"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    images, labels = digits.train.tensors
    net.train()
    for _ in range(4):
        for batch in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
    loss, accuracy = train.evaluate(net, digits.held_out, torch.device("cpu"))
    assert before < 0.3
    assert accuracy > 0.9
    assert 0 < loss < 0.5


def test_hash_covers_every_bit_of_every_parameter_and_buffer(train: ModuleType) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(torch.bfloat16)
    hashes = {train.sha256_of(net)}
    assert train.sha256_of(net) in hashes
    for tensor in net.state_dict().values():
        tensor.reshape(-1).view(torch.uint8)[-1] ^= 1
        hashes.add(train.sha256_of(net))
    assert len(hashes) == 1 + len(net.state_dict())


def test_hash_does_not_depend_on_the_order_of_registration(train: ModuleType) -> None:
    one, other = nn.Module(), nn.Module()
    for net, names in ((one, "ab"), (other, "ba")):
        for name in names:
            net.register_parameter(name, nn.Parameter(torch.full((2,), float(ord(name)))))
    assert train.sha256_of(one) == train.sha256_of(other)


def test_help_names_every_option_and_its_default(repository: Path) -> None:
    command = [sys.executable, str(repository / "examples" / "digits" / "train.py"), "--help"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120, check=False)
    said = " ".join(done.stdout.split())
    assert (done.returncode, done.stderr) == (0, "")
    for option, default in (
        ("--steps", "600"),
        ("--batch-size", "32"),
        ("--save-checkpoint-steps", "50"),
        ("--keep-checkpoint-max", "5"),
        ("--seed", "1"),
    ):
        assert option in said
        assert f"(default: {default})" in said.partition(f"{option} {option[2:].replace('-', '_').upper()} ")[2]


@pytest.mark.parametrize("wrong", ["0", "-3", "many", "1.5"])
def test_invalid_number_is_reported_in_one_sentence(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", f"--steps={wrong}"])
    with pytest.raises(SystemExit, match="2"):
        train.parse_arguments()
    assert f"--steps: found '{wrong}', expected a whole number from 1 on" in capsys.readouterr().err
