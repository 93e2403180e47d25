"""A process before the first generation: its place, and a warning about an untested torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import samebits
from samebits import config
from samebits.errors import JobStoppedError
from samebits.training.group import calling_place
from samebits.training.process import context
from samebits.training.process.torchrun_calls import TorchrunCalls
from samebits.training.torch_private import not_tried
from tests.system.processes import free_port


def seated(monkeypatch: pytest.MonkeyPatch, *, slot: int | None, node: str = "x", on: str = "cpu") -> None:
    """Give this process a seat, with this device."""
    place = {"generation": None, "admitted": SimpleNamespace(slot=slot, world_size=8)}
    process = SimpleNamespace(**place, agent=SimpleNamespace(node=node), device=torch.device(on))
    monkeypatch.setattr(context, "_process", process)


@pytest.mark.parametrize(
    ("slot", "node", "on", "before", "inside"),
    [
        (0, "0", "cpu", 0, 6),
        (5, "5", "cpu", 5, 6),
        (None, "9", "cpu", 9, 6),
        (None, "9.2", "cpu", 9, 6),
        (0, "0", "cuda:0", 0, 0),
        (5, "5", "cuda:1", 1, 1),
        (None, "2", "cuda:2", 2, 2),
    ],
)
def test_local_rank_selects_the_device_of_this_process(
    slot: int | None, node: str, on: str, before: int, inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seated(monkeypatch, slot=slot, node=node, on=on)
    assert samebits.get_local_rank() == before
    monkeypatch.setattr(context.current("the test"), "generation", SimpleNamespace(local_rank=6))
    assert samebits.get_local_rank() == inside


@pytest.mark.parametrize(("installed", "is_told"), [(None, False), ("2.99.1+cu140", True), ("1.13.1", True)])
def test_init_warns_once_about_an_untested_torch_and_continues(
    installed: str | None, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    taken: list[object] = []
    for name, value in {"ROLE": "worker", "WORKER_NUM": "2", "SCHED_PORT": "9", "NODE_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    if installed is not None:
        monkeypatch.setattr(torch, "__version__", installed)
    monkeypatch.setattr(context._Ending, "install", lambda _: None)
    monkeypatch.setattr(context.log, "set_up", lambda _: None)
    monkeypatch.setattr(context.log, "warn", said.append)
    monkeypatch.setattr(context, "_take_seat", lambda settings, *_: taken.append(settings))
    samebits.init()
    assert said == ([not_tried(installed or "")] if is_told else [])
    assert len(taken) == 1, "it was refused"


def test_calling_line_is_never_inside_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package is in site-packages, unlike in a checkout."""
    monkeypatch.setattr(calling_place, "_INSTALLED", (f"{os.sep}samebits{os.sep}",))
    calls = TorchrunCalls(lambda: None, lambda: False)
    calls._say("it does nothing")
    (said,) = calls._said
    assert said.startswith("test_context.py:") and "through" not in said


MOVES = """
import os, sys
if "samebits" in sys.argv:  # a launcher passes on the folder in which it was started
    os.makedirs("outputs/run")
    os.chdir("outputs")
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
import samebits

if "samebits" not in sys.argv:
    os.makedirs("outputs/run")
    os.chdir("outputs")  # as Hydra does before main(), and once more below
samebits.init()
os.chdir("run")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
checkpoint = samebits.CheckpointConfig(save_checkpoint_steps=1)
state = samebits.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint=checkpoint)

@samebits.elastic.run
def train(state):
    while state.completed_steps < 2:
        model(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        state.commit()

train(state)
"""


@pytest.mark.parametrize("launcher", [[], ["-m", "samebits", "run", "-n", "1"]], ids=["python", "samebits run"])
def test_relative_folders_are_resolved_at_the_start(tmp_path: Path, launcher: list[str]) -> None:
    (tmp_path / "train.py").write_text(MOVES)
    environment = {name: text for name, text in os.environ.items() if name not in config.kept_environment()}
    environment["PATH"] = os.environ["PATH"]
    environment |= {"SCHED_PORT": str(free_port())} if launcher else {}
    words = [sys.executable, *launcher, "train.py", *launcher[1:2]]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    made = {one.name for one in tmp_path.iterdir()}
    assert made - {"device"} == {"ckpt_of_rank", "outputs", "recovery", "train.py"}
    assert list((tmp_path / "outputs").rglob("*")) == [tmp_path / "outputs" / "run"]


def test_error_that_follows_another_ranks_is_later_for_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cause may have no error file: torchrun then takes the time at which it sees the process end."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    told = JobStoppedError("stopped by rank 1")
    context._record_for_torchrun(told, None, is_first=True)
    first = ProcessFailure(0, 1, 87, str(path))
    context._record_for_torchrun(told, None, is_first=False)
    follower, cause = ProcessFailure(0, 1, 87, str(path)), ProcessFailure(1, 2, 3, str(tmp_path / "none"))
    assert first.timestamp <= cause.timestamp < follower.timestamp
    assert ChildFailedError("train.py", {0: follower, 1: cause}).get_first_failure()[0] == 1
    assert "stopped by rank 1" in str(follower.message)
