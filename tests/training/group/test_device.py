"""The device a process gets, with simulated accelerators."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits.errors import GenerationEndedError, SettingsError
from samebits.training.group import device
from samebits.training.group.breaker import Breaker
from samebits.training.run import elastic_run
from samebits.training.run.elastic_run import ElasticRun


def found(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int = 0) -> None:
    """Let torch report ``count`` accelerators of a kind."""
    answer = torch.device(kind) if kind else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: answer)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Install a package ``torch_npu`` that runs ``source`` when it is imported."""
    (folder / "torch_npu.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)


def test_without_accelerators_the_cpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, None)
    assert device.choose_device(None, 3) == torch.device("cpu")
    assert device.choose_device("cpu", 3) == torch.device("cpu")


def test_accelerator_is_used_unless_the_cpu_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, "cuda", 2)
    assert device.choose_device(None, 3) == torch.device("cuda", 1)
    assert device.choose_device("cuda", 0) == torch.device("cuda", 0)
    assert device.choose_device("cpu", 0) == torch.device("cpu")


def test_accelerator_without_a_backend_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, "mps", 1)
    assert device.choose_device() == torch.device("cpu")


def test_missing_requested_accelerator_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, None)
    with pytest.raises(SettingsError, match=r"DEVICE='cuda'.*finds none.*export DEVICE=cpu"):
        device.choose_device("cuda", 0)


def test_unknown_device_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"DEVICE='gpu'.*cpu, cuda, npu"):
        device.choose_device("gpu", 0)


def test_missing_npu_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(SettingsError, match=r"DEVICE='npu' needs.*samebits\[npu\]"):
        device.choose_device("npu", 0)


@pytest.mark.parametrize("requested", ["npu", None])
def test_missing_cann_is_one_clear_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, requested: str | None
) -> None:
    installed(monkeypatch, tmp_path, "raise ImportError('libhccl.so: cannot open shared object file')")
    with pytest.raises(SettingsError, match=r"CANN \(libhccl\.so.*set_env\.sh.*TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        device.choose_device(requested, 0)
    assert device.choose_device("cpu", 0) == torch.device("cpu")


def test_working_npu_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path, "")
    found(monkeypatch, "cuda", 8)
    assert device.choose_device(None, 9) == torch.device("cuda", 1)


def test_device_of_another_package_is_used_with_its_registered_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found(monkeypatch, "privateuseone", 2)
    assert device.choose_device(None, 3) == torch.device("cpu")
    monkeypatch.setitem(torch.distributed.Backend.default_device_backend_map, "privateuseone", "theirs")
    assert device.choose_device(None, 3) == device.choose_device("privateuseone", 1) == torch.device("privateuseone", 1)
    assert device.backend_of(torch.device("privateuseone", 1)) == "theirs"


def test_each_device_has_its_backend() -> None:
    assert device.backend_of(torch.device("cpu")) == "gloo"
    assert device.backend_of(torch.device("cuda", 1)) == "nccl"
    with pytest.raises(SettingsError, match="'mps'"):
        device.backend_of(torch.device("mps"))


def test_gloo_is_used_for_a_gpu_shared_by_several_ranks() -> None:
    assert (
        device.backend_of(torch.device("cuda", 0), "gloo") == device.backend_of(torch.device("cpu"), "gloo") == "gloo"
    )
    with pytest.raises(SettingsError, match=r"takes no tensors of xpu; unset COLLECTIVE_BACKEND"):
        device.backend_of(torch.device("xpu", 0), "gloo")


# ---- before a step


class Collectives:
    """A group and an accelerator on which queued work has happened once it is waited for."""

    def __init__(self, *, is_broken: bool) -> None:
        self.breaker = Breaker("generation 3")
        self.calls: list[str] = []
        self._is_broken = is_broken

    is_quiet = True

    def launched(self) -> None:
        """Its backend does not count them."""

    def synchronize(self) -> None:
        self.calls.append("waited for")
        if self._is_broken:
            self.breaker.throw("worker 2 is lost")


def before_step(collectives: Collectives, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: collectives)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a torch without CUDA cannot tell
    process = SimpleNamespace(device=torch.device(kind), group=collectives)
    replay = SimpleNamespace(before_step=lambda: collectives.calls.append("logged"))
    names = ("require_shards_at_rest", "compare_if_not_finite", "finish_copy")
    points = SimpleNamespace(**dict.fromkeys(names, lambda **_: None))
    audits = SimpleNamespace(before_step=lambda: collectives.calls.append("audited"))
    parts = {
        "_process": process,
        "_points": points,
        "_audits": audits,
        "_replay": replay,
        "_uncommitted": 0,
        "_is_again": False,
    }
    parts |= {"_has_replicas": False, "_settled": None}
    parts |= {"_settle": lambda: ElasticRun._settle(run)}  # type: ignore[arg-type]
    run = SimpleNamespace(**parts, _require_equal=lambda: None)
    ElasticRun.before_step(run)  # type: ignore[arg-type]


def test_no_step_is_queued_behind_an_accelerator_collective_that_may_be_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Collectives(is_broken=False)
    before_step(whole, "cuda", monkeypatch)
    assert whole.calls == ["waited for", "audited", "logged"]
    broken = Collectives(is_broken=True)
    with pytest.raises(GenerationEndedError, match="worker 2 is lost"):
        before_step(broken, "cuda", monkeypatch)
    assert broken.calls == ["waited for"], "the step is neither audited nor logged"


def test_collective_that_the_script_has_not_waited_for_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(elastic_run.devices, "settle", waits.append)
    breaker = SimpleNamespace(check=lambda: None)
    group = SimpleNamespace(launched=lambda: 7, is_quiet=False, breaker=breaker)
    process: Any = SimpleNamespace(device=torch.device("cuda"), group=group)
    settled = elastic_run._settle_device(process, None)  # before the optimizer's step
    group.is_quiet = True
    settled = elastic_run._settle_device(process, settled)  # at the commit: the script has waited in between
    assert elastic_run._settle_device(process, settled) == 7
    assert len(waits) == 2, "nothing was launched since"


def test_collective_result_on_a_cpu_is_available_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = Collectives(is_broken=False)
    before_step(collectives, "cpu", monkeypatch)
    assert collectives.calls == ["audited", "logged"]


def test_a_queue_of_steps_that_nothing_waited_for_may_take_as_long_as_they() -> None:
    run = SimpleNamespace(_process=SimpleNamespace(device=torch.device("cuda")), _longest_step_s=0.0)
    run._committed_s, run._settled_s = 100.0, 99.5
    longest = ElasticRun._longest_queue_s
    assert longest(run) == 60.0, "no step was measured yet"  # type: ignore[arg-type]
    run._longest_step_s = 3.0
    assert longest(run) == 6.0, "it is waited for in each step"  # type: ignore[arg-type]
    run._settled_s = 60.0
    assert longest(run) == 80.0, "the host is forty seconds ahead"  # type: ignore[arg-type]
    run._process.device = torch.device("cpu")
    assert longest(run) == 0.0  # type: ignore[arg-type]


# ---- a device of its own for each process of a job

ALL_IN_USE = r"no cuda device is left.*use all 2 on this host.*A spare needs a device of its own.*Fix: start fewer"


@contextmanager
def in_use(path: Path, *indices: int, host: str = "here") -> Iterator[int]:
    """Let another process reserve these CUDA devices, until it is killed at the end of the block."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        found = [device.claim(torch.device("cuda", index), path, host, "nccl") for index in indices]
        os.write(writing, b"%d" % all(one is not None for one in found))
        signal.pause()
        os._exit(1)
    try:
        assert os.read(reading, 1) == b"1"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("taken", "preferred", "expected"),
    [((), 1, 1), ((1,), 1, 2), ((2,), 1, 1), ((1, 2), 1, 0), ((2,), 2, 0)],
)
def test_process_gets_a_device_that_no_other_process_uses(
    taken: tuple[int, ...], preferred: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, "cuda", 3)
    with in_use(tmp_path / "devices.lock", *taken):
        claimed = device.claim(torch.device("cuda", preferred), tmp_path / "devices.lock", "here", "nccl")
    assert claimed == torch.device("cuda", expected)


@pytest.mark.parametrize(
    ("backend", "count", "refuses", "warnings"),
    [("gloo", 2, True, 0), ("nccl", 1, True, 1), ("nccl", 2, False, 1)],
    ids=["gloo shares", "MPS may share", "a replacement must not end the job"],
)
def test_process_without_a_device_of_its_own_is_not_always_refused(
    backend: str, count: int, refuses: bool, warnings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(device.log, "warn", said.append)
    found(monkeypatch, "cuda", count)
    path, first = tmp_path / "devices.lock", torch.device("cuda", 0)
    with in_use(path, *range(count)):
        assert device.claim(first, path, "here", backend, refuses=refuses, within_s=0.0) is None
    assert len(said) == warnings


def test_process_without_a_device_of_its_own_is_refused_until_one_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, "cuda", 2)
    path, first = tmp_path / "devices.lock", torch.device("cuda", 0)
    with in_use(path, 0, 1) as pid:
        assert device.claim(first, path, "another host", "nccl") == first
        with pytest.raises(SettingsError, match=ALL_IN_USE):
            device.claim(first, path, "here", "nccl", within_s=0.0)
        os.kill(pid, signal.SIGKILL)
        assert device.claim(first, path, "here", "nccl") == first


def test_reservation_is_of_the_card_and_not_of_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, "cuda", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with in_use(tmp_path / "devices.lock", 1):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
        claimed = device.claim(torch.device("cuda", 0), tmp_path / "devices.lock", "here", "nccl")
    assert claimed == torch.device("cuda", 1), "index 0 of this process is the card in use"


def test_no_device_is_reserved_without_a_folder_or_on_a_cpu(tmp_path: Path) -> None:
    assert device.claim(torch.device("cuda", 0), tmp_path / "none" / "devices.lock", "here", "nccl") is None
    assert device.claim(torch.device("cpu"), tmp_path / "devices.lock", "here", "gloo") is None
    assert not any(tmp_path.iterdir())
