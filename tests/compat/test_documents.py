"""The names, defaults and snippets of the five documents that specified the system."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import samebits
from samebits.commands.run.options import parse
from samebits.errors import CheckpointError, UnequalError, UsageError
from tests.system.processes import REPOSITORY, environment_of_tests

DOCUMENTS = REPOSITORY.parent / "shared" / "documents"
FOLDER_IS_THERE = DOCUMENTS.is_dir()


class Node:
    def __init__(self, state: object) -> None:
        self.state = state

    def get_state(self) -> object:
        return self.state

    def set_state(self, state: object) -> None:
        self.state = state


# ---- CANN


def test_number_of_returned_failed_nodes_is_bounded() -> None:
    clock = SimpleNamespace(now=0.0)
    detector = samebits.HeartbeatDetector(capacity=10, timeout=30, clock=lambda: clock.now)
    for node_id in range(4):
        detector.send_heartbeat(node_id=node_id)
    clock.now = 20.0
    detector.send_heartbeat(node_id=3)
    assert detector.detect_failure(max_nodes=10) == []
    clock.now = 40.0
    assert detector.detect_failure(max_nodes=2) == [0, 1]
    assert detector.detect_failure(max_nodes=10) == [0, 1, 2]


def test_health_check_keeps_the_status_of_its_node(tmp_path: Path) -> None:
    healthy = samebits.HealthChecker(2, cpu_limit=1, memory_limit=1, disk_limit=1, paths=[tmp_path])
    assert [healthy.get_health_status(node_id) for node_id in (0, 1, 2, -1)] == [0, 0, 0, 0]
    assert healthy.perform_health_check(1) == 1
    assert [healthy.get_health_status(node_id) for node_id in (0, 1)] == [0, 1]
    assert (healthy.perform_health_check(2), healthy.get_health_status(2)) == (1, 0), "2 exceeds the capacity"
    full = samebits.HealthChecker(capacity=2, cpu_limit=1, memory_limit=1, disk_limit=1e-6, paths=[tmp_path])
    assert (full.perform_health_check(1), full.get_health_status(1)) == (0, 0)
    with pytest.raises(UsageError, match="expected 0 or more"):
        full.perform_health_check(-1)


def test_state_is_synchronized_by_its_version_and_survives_serialization() -> None:
    one, two = samebits.StateSynchronization(), samebits.StateSynchronization()
    assert (one.get_state("lr"), one.version) == (None, 0)
    one.update_state("lr", 0.1)
    for lr in (0.2, 0.3):
        two.update_state("lr", lr)
    two.update_state("epoch", 4)
    newer, older = {**two.state, "version": two.version}, {**one.state, "version": one.version}
    two.sync_state(older)
    assert (two.get_state("lr"), two.version) == (0.3, 3), "an older state changes nothing"
    one.sync_state(newer)
    assert (one.state, one.version) == ({"lr": 0.3, "epoch": 4}, 3)
    one.update_state("lr", 0.4)
    one.sync_state(newer)
    assert one.get_state("lr") == 0.4, "a change after a synchronization is newer"
    other = samebits.StateSynchronization()
    other.update_state("gone", 1)
    other.deserialize_state(one.serialize_state())
    assert (other.state, other.version) == (one.state, 4)
    with pytest.raises(UsageError, match=r"'version' is None.* Fix: "):
        one.sync_state({"lr": 1})


@pytest.mark.parametrize("lie", [b"", b"\xc1", b"\x01", b"\x92\x01\x02", b"\x92\xff\xc4\x00", b"\x92\x01\xc4\x01\xc1"])
def test_other_bytes_are_not_accepted_as_a_state(lie: bytes) -> None:
    state = samebits.StateSynchronization()
    state.update_state("a", 1)
    with pytest.raises(UsageError, match="these are not the bytes"):
        state.deserialize_state(lie)
    assert (state.state, state.version) == ({"a": 1}, 1)


def test_sequence_numbers_show_whether_nodes_are_consistent() -> None:
    protocol = samebits.ConsistencyProtocol(2)
    assert (protocol.get_sequence_number(0), protocol.check_consistency()) == (0, True)
    assert [protocol.update_sequence_number(node_id, 7) for node_id in (0, 1, 2, -1)] == [0, 0, -1, -1]
    assert protocol.check_consistency()
    protocol.update_sequence_number(1, 8)
    assert (protocol.get_sequence_number(1), protocol.check_consistency()) == (8, False)


def test_nodes_are_brought_to_one_state() -> None:
    recovery = samebits.ConsistencyRecovery()
    assert recovery.recovery_strategy == "majority"
    nodes = [Node({"step": step}) for step in (4, 5, 5)]
    assert recovery.recover_consistency(nodes) is True
    assert [node.state for node in nodes] == [{"step": 5}] * 3
    assert nodes[0].state is not nodes[1].state, "a later change of one is not the others'"
    apart = [Node(1), Node(2)]
    with pytest.raises(UnequalError, match="no majority"):
        recovery.recover_consistency(apart)
    recovery.recovery_strategy = "leader"
    recovery.recover_consistency(apart)
    assert [node.state for node in apart] == [1, 1]
    with pytest.raises(UsageError, match="expected majority, leader, default"):
        recovery.recovery_strategy = "vote"


def test_recovery_saves_finds_and_loads_its_checkpoints(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recovery = samebits.CheckpointRecovery(checkpoint_dir=tmp_path / "checkpoints")
    assert (recovery.checkpoint_interval, recovery.current_step) == (100, 0)
    assert recovery.recover_from_failure(model, optimizer) is None
    for step in (0, *range(100, 800, 100)):
        recovery.save_checkpoint(model, optimizer, step)
    latest = recovery.find_latest_checkpoint()
    assert latest is not None and recovery.current_step == 700
    assert len([one for one in latest.parent.iterdir() if one.is_dir()]) == 8, "none is removed"
    loaded = recovery.load_checkpoint(latest)
    assert (set(loaded), loaded["step"]) == ({"model", "optimizer", "step"}, 700)
    assert torch.equal(loaded["model"]["weight"], model.weight)
    with pytest.raises(CheckpointError, match=r"no checkpoint is there\. Fix: "):
        recovery.load_checkpoint(latest.parent / "none")


def test_step_0_is_distinguished_from_no_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    recovery = samebits.CheckpointRecovery(tmp_path)
    recovery.save_checkpoint(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    assert recovery.recover_from_failure(model) == 0


# ---- MindSpore

PORTED = """
import torch
import samebits
samebits.init()
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import samebits as train
from samebits import get_rank
torch.manual_seed(1)
data = TensorDataset(torch.randn(256, 4), torch.randint(0, 3, (256,)))
data_set = DataLoader(data, batch_size=32, sampler=train.ElasticSampler(data), generator=torch.Generator())
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
loss_fn = nn.CrossEntropyLoss()
loss_cb = train.LossMonitor(20)
ckpt_config = train.CheckpointConfig(save_checkpoint_steps=100, keep_checkpoint_max=5)
ckpoint_cb = train.ModelCheckpoint(prefix='train', directory="./ckpt_of_rank/"+str(get_rank()), config=ckpt_config)
model = train.Model(net, loss_fn=loss_fn, optimizer=optimizer)
model.train(10, data_set, callbacks=[loss_cb, ckpoint_cb])
"""


def test_mindspores_training_script_runs_with_a_pytorch_network(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PORTED)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment_of_tests() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"epoch (\d+) step (\d+) loss \d", done.stdout + done.stderr)
    assert said == [("3", "20"), ("5", "40"), ("8", "60"), ("10", "80")], done.stderr
    latest = samebits.CheckpointRecovery(tmp_path / "ckpt_of_rank").find_latest_checkpoint()
    assert latest is not None, "the job has saved in its own folder"
    assert samebits.CheckpointRecovery(tmp_path / "ckpt_of_rank").load_checkpoint(latest)["step"] == 80


def test_model_checkpoint_takes_its_numbers_from_a_config(tmp_path: Path) -> None:
    config = samebits.CheckpointConfig(save_checkpoint_steps=100, keep_checkpoint_max=2)
    saves = samebits.ModelCheckpoint(prefix="train", directory=tmp_path, config=config)
    model = torch.nn.Linear(2, 1)
    kept = [saves.step_end(step, model) for step in (50, 100, 200, 300)]
    assert kept[0] is None and [one.is_dir() for one in kept[1:] if one is not None] == [False, True, True]
    assert samebits.CheckpointRecovery(tmp_path / "train").find_latest_checkpoint() == kept[-1]
    with pytest.raises(UsageError, match="expected the name of one folder"):
        samebits.ModelCheckpoint(prefix="../x", directory=tmp_path)


# ---- the documents' own text

needs_documents = pytest.mark.skipif(
    not FOLDER_IS_THERE, reason="the folder shared/documents is not beside this checkout: its snippets are not run"
)
REFERENCE = REPOSITORY / "docs" / "reference"
NAMES = (REFERENCE / "names-from-other-guides.md", REFERENCE / "names-from-other-guides.zh-CN.md")


def text_of(number: int) -> str:
    (path,) = DOCUMENTS.glob(f"{number:03}_*.txt")
    return path.read_text()


@needs_documents
def test_examples_of_canns_library_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = re.findall(
        r"(?:detector|failed_nodes|recovery|step)?=?(?:comm|detector|recovery)\.\w+\([^()]*\)", text_of(0)
    )
    calls = [call for call in calls if "=" in call]
    model = torch.nn.Linear(2, 1)
    known = {"comm": samebits, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec("\n".join(calls), known)
    assert len(calls) == 5 and (known["failed_nodes"], known["step"]) == ([], None)


@needs_documents
def test_canns_classes_have_the_printed_methods_with_their_arguments() -> None:
    checked = 0
    for name, body in re.findall(r"class(\w+):(.*?)(?=class\w+:|\n|$)", text_of(0)):
        for method, printed in re.findall(r"def(\w+)\(self,?([^)]*)\)", body):
            if method in ("majority_recovery", "leader_recovery", "default_recovery"):
                continue  # ConsistencyRecovery's strategies
            ours = inspect.signature(getattr(getattr(samebits, name), method)).parameters
            for argument in filter(None, printed.split(",")):
                key, _, default = argument.partition("=")
                assert key in ours, f"{name}.{method}({printed})"
                assert not default or ours[key].default == ast.literal_eval(default), f"{name}.{method}({printed})"
            checked += 1
    assert checked == 13


@needs_documents
def test_training_of_mindspores_document_is_what_runs_here() -> None:
    """The document's lines are those of PORTED, except for torch's own names."""
    lines = [line for line in text_of(3).splitlines() if re.match(r"(loss_|ckp|model)\w*[. =]", line)]
    translated = [line.replace("ms.Model", "train.Model") for line in lines]
    assert len(lines) == 6 and [line for line in translated if line not in PORTED.splitlines()] == []


@needs_documents
def test_tested_run_sh_exports_only_what_the_documents_do() -> None:
    ours = (REPOSITORY / "tests" / "system" / "original" / "run.sh").read_text()
    exported = r"^\s*export (\w+)="
    assert set(re.findall(exported, ours, re.M)) <= set(re.findall(exported, text_of(3), re.M))


@needs_documents
def test_horovods_command_lines_are_accepted() -> None:
    lines = re.findall(r"^horovodrun (.*)$", text_of(2), re.M)
    asked = [parse(line.split(), {}, devices=0) for line in lines]
    assert [one.script for one in asked] == ["train.py"] * 2
    bounds = [(one.environment["MIN_WORKER_NUM"], one.environment["MAX_WORKER_NUM"]) for one in asked]
    assert bounds == [("18", "18"), ("4", "12")]


@needs_documents
@pytest.mark.parametrize("page", NAMES, ids=lambda page: page.name)
def test_every_printed_name_has_a_row(page: Path) -> None:
    everything = "\n".join(map(text_of, range(5)))
    printed = {
        *re.findall(r"export ([A-Z]\w+)=", everything),
        *re.findall(r"--(?:enable|min|max|host)(?:-[a-z]+)+", everything),
        *re.findall(r"hvd\.(?:elastic\.)?\w+", text_of(2)),
        *re.findall(r"def(\w+)\(self", text_of(0)),
        *re.findall(r"(?:train|ms)\.[A-Z]\w+", text_of(3)),
        *("torch_npu_run", "hccl.json", "HPA", "YARN", "Mesos", "HOROVOD_ELASTIC_TIMEOUT", "Keras"),
    }
    row = {"HPA": "HorizontalPodAutoscaler", "hvd.elastic": "hvd.elastic.run"}
    not_ours = {"__init__", "hvd.local_rank", "hvd.size"}  # in the table of migrate-horovod.md
    told = page.read_text()
    assert len(printed) >= 50
    assert sorted(one for one in printed - not_ours if row.get(one, one) not in told) == []
