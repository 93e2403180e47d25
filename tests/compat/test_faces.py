"""The compat classes, under names of other frameworks: each usable alone, bounded, robust to false input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import samebits
from samebits.errors import CheckpointError, ForeignFolderError, UnequalError, UsageError
from samebits.store.checkpoint import rank_directory
from samebits.store.owner import claim_folder


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


# ---- heartbeats


def test_silent_node_is_found_and_one_that_speaks_again_recovers() -> None:
    clock = Clock()
    detector = samebits.HeartbeatDetector(capacity=3, timeout=5.0, clock=clock)
    for node in ("a", "b"):
        detector.send_heartbeat(node)
    clock.now += 4
    detector.send_heartbeat("b")
    assert detector.detect_failure() == []
    clock.now += 2
    assert detector.detect_failure() == ["a"]
    detector.send_heartbeat("a")
    assert detector.detect_failure() == []
    clock.now += 4
    assert detector.detect_failure() == ["b"]
    detector.forget("b")
    assert detector.detect_failure() == []


def test_pause_of_the_monitor_counts_as_no_nodes_silence() -> None:
    clock = Clock()
    detector = samebits.HeartbeatDetector(capacity=3, timeout=5.0, clock=clock)
    detector.send_heartbeat("a")
    clock.now += 3600
    assert detector.detect_failure() == []
    clock.now += 5
    assert detector.detect_failure() == ["a"]


def test_more_nodes_than_the_capacity_are_refused() -> None:
    detector = samebits.HeartbeatDetector(capacity=1, timeout=5.0)
    detector.send_heartbeat("a")
    detector.send_heartbeat("a")
    with pytest.raises(UsageError, match=r"exceeds the capacity of 1 nodes\. Fix: "):
        detector.send_heartbeat("b")
    for capacity, timeout in ((0, 1.0), (1, 0.0), (1, float("inf"))):
        with pytest.raises(UsageError, match="expected a capacity of 1 or more"):
            samebits.HeartbeatDetector(capacity, timeout)


# ---- health


def test_disk_over_its_limit_is_reported_after_two_checks(tmp_path: Path) -> None:
    checker = samebits.HealthChecker(cpu_limit=1, memory_limit=1, disk_limit=1e-6, paths=[tmp_path / "not there"])
    assert checker.check() == [] and checker.is_healthy
    (told,) = [text for text in checker.check() if "disk" in text]
    assert told.startswith(f"the disk of {tmp_path} is ") and not checker.is_healthy
    with pytest.raises(UsageError, match="limits are shares"):
        samebits.HealthChecker(disk_limit=90)


# ---- consistency


def test_merging_in_any_order_loses_no_newer_value() -> None:
    one, two = samebits.StateSynchronization(), samebits.StateSynchronization()
    one.update("epoch", 3)
    for epoch in (1, 2):
        two.update("epoch", epoch)
    two.update("best", {"loss": 0.5, 7: [1, b"x"]})
    first, second = one.export(), two.export()
    one.merge(second)
    two.merge(first)
    assert one.get("epoch") == two.get("epoch") == 2, "the second change is the newer"
    assert one.get("best") == {"loss": 0.5, 7: [1, b"x"]}
    assert one.update("epoch", 9) == 3
    tied = samebits.StateSynchronization()
    tied.update("epoch", 1)
    one_way, other_way = samebits.StateSynchronization(), samebits.StateSynchronization()
    for merges, into in (((first, tied.export()), one_way), ((tied.export(), first), other_way)):
        for exported in merges:
            into.merge(exported)
    assert one_way.get("epoch") == other_way.get("epoch")


@pytest.mark.parametrize(
    "lie",
    [
        b"",
        b"\xc1",
        b"\x01",
        b"\x81\xa1a\x01",
        b"\x81\xa1a\x92\xa1v\x00",
        b"\x81\xa1a\x92\xa1v\xa1x",
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_invalid_export_changes_nothing(lie: bytes) -> None:
    state = samebits.StateSynchronization()
    state.update("a", 1)
    before = state.export()
    with pytest.raises(UsageError, match="not the bytes of an export"):
        state.merge(lie)
    assert state.export() == before


def test_replicas_are_judged_and_named() -> None:
    protocol = samebits.ConsistencyProtocol()
    assert protocol.check({0: {"a": 1, "b": 2}, 1: {"b": 2, "a": 1}}).is_equal
    protocol.require_equal({0: [1], 1: [1]})
    with pytest.raises(UnequalError, match="rank 1 differs from ranks 0 and 2"):
        protocol.require_equal({0: [1], 1: [2], 2: [1]})
    with pytest.raises(UsageError, match=r"the state of rank 0: .* Fix: give plain values"):
        protocol.check({0: object()})


@pytest.mark.parametrize(
    ("strategy", "states", "chosen"),
    [
        ("majority", {0: "a", 1: "b", 2: "b"}, "b"),
        ("default", {0: "a", 1: "b", 2: "b"}, "b"),
        ("default", {0: "a", 1: "b"}, "a"),
        ("leader", {0: "a", 1: "b", 2: "b"}, "a"),
        ("majority", {0: "a", 1: "b"}, UnequalError),
        ("leader", {}, UsageError),
    ],
)
def test_state_is_chosen_by_the_strategy(strategy: str, states: dict[int, str], chosen: str | type[Exception]) -> None:
    recovery = samebits.ConsistencyRecovery(strategy)
    if isinstance(chosen, str):
        assert recovery.recover(states) == chosen
    else:
        with pytest.raises(chosen):
            recovery.recover(states)


def test_unknown_strategy_and_missing_leader_are_refused() -> None:
    with pytest.raises(UsageError, match=r"expected majority, leader, default\. Fix: "):
        samebits.ConsistencyRecovery("vote")
    with pytest.raises(UsageError, match="rank 7, the leader, has given no state"):
        samebits.ConsistencyRecovery("leader", leader=7).recover({0: 1, 1: 2})


# ---- checkpoints


def model_and_optimizer(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    moments = [one for state in optimizer.state.values() for one in state.values()]
    return [one.detach().numpy().tobytes() for one in (*model.state_dict().values(), *moments)]


def test_saved_point_is_restored_to_the_bit(tmp_path: Path) -> None:
    saves = samebits.ModelCheckpoint(tmp_path, save_checkpoint_steps=5, keep_checkpoint_max=2)
    model, optimizer = model_and_optimizer(1)
    assert saves.step_end(4, model, optimizer) is None
    for step in (5, 10, 15):
        path = saves.step_end(step, model, optimizer, epoch=1)
    recovery = samebits.CheckpointRecovery(tmp_path)
    assert recovery.find_latest_checkpoint() == path
    other, its_optimizer = model_and_optimizer(2)
    assert bits(other, its_optimizer) != bits(model, optimizer)
    assert recovery.recover_from_failure(other, its_optimizer) == 15
    assert bits(other, its_optimizer) == bits(model, optimizer)
    points = [entry.name for entry in rank_directory(tmp_path, 0).iterdir() if entry.is_dir()]
    assert len(points) == 2, "the oldest is gone"


def test_damaged_point_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves = samebits.ModelCheckpoint(tmp_path)
    model, optimizer = model_and_optimizer(1)
    first = saves.save(1, model, optimizer)
    second = saves.save(2, model, optimizer)
    data = next(second.glob("*.safetensors"))
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    recovery = samebits.CheckpointRecovery(tmp_path)
    assert recovery.find_latest_checkpoint() == first
    assert recovery.recover_from_failure(*model_and_optimizer(2)) == 1
    assert "skipped" in caplog.text


def test_without_a_point_nothing_is_changed(tmp_path: Path) -> None:
    recovery = samebits.CheckpointRecovery(tmp_path / "none")
    model, optimizer = model_and_optimizer(1)
    before = bits(model, optimizer)
    assert (recovery.find_latest_checkpoint(), recovery.recover_from_failure(model, optimizer)) == (None, None)
    assert bits(model, optimizer) == before
    assert list(tmp_path.iterdir()) == []


def test_other_model_and_a_jobs_folder_are_refused(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(1)
    samebits.ModelCheckpoint(tmp_path).save(1, model, optimizer)
    with pytest.raises(CheckpointError, match="was not saved from this model and optimizer"):
        samebits.CheckpointRecovery(tmp_path).recover_from_failure(torch.nn.Linear(9, 9))
    claim_folder(rank_directory(tmp_path / "job", 0), "another-job", "train.py")
    with pytest.raises(ForeignFolderError):
        samebits.ModelCheckpoint(tmp_path / "job").save(1, model)
    with pytest.raises(CheckpointError, match="cannot be saved"):
        samebits.ModelCheckpoint(tmp_path).save(2, model, thing=object())
    with pytest.raises(UsageError):
        samebits.ModelCheckpoint(tmp_path, keep_checkpoint_max=1)


# ---- losses


def test_loss_is_reported_and_a_nan_named(caplog: pytest.LogCaptureFixture) -> None:
    monitor = samebits.LossMonitor(per_print_times=2)
    with caplog.at_level("INFO", logger="samebits"):
        assert [monitor.step_end(step, torch.tensor(step / 4)) for step in (1, 2)] == [True, True]
        assert not monitor.step_end(3, float("nan"), epoch=1)
    assert [record.getMessage() for record in caplog.records] == ["step 2 loss 0.5", "epoch 1 step 3: the loss is nan"]


def test_no_class_loads_torch_before_it_is_needed() -> None:
    program = (
        "import sys, samebits\n"
        "samebits.HeartbeatDetector(1, 1.0), samebits.HealthChecker(), samebits.StateSynchronization()\n"
        "samebits.ConsistencyRecovery(), samebits.CheckpointRecovery().find_latest_checkpoint()\n"
        "samebits.LossMonitor()\n"
        "samebits.ModelCheckpoint('x')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
