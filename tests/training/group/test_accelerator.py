"""Ending a wait on an accelerator: which calls of its backend and device, in which order. No device runs."""

from __future__ import annotations

import mmap
import os
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits.errors import GenerationEndedError
from samebits.training import torch_private
from samebits.training.group import accelerator, gloo
from samebits.training.group.accelerator import AcceleratorLink, remove_left_over
from samebits.training.group.breaker import Breaker

DEVICE = torch.device("cuda", 1)


class Backend:
    """The backend of one group; ``calls`` is shared."""

    def __init__(self, name: str, calls: list[str], *names: str) -> None:
        self.name = name
        for one in names:
            setattr(self, one, lambda *_, one=one: calls.append(f"{name}.{one}"))


class Group:
    """The part of a process group that a link uses."""

    def __init__(self, backend: Backend, calls: list[str]) -> None:
        self.backend, self.calls, self.bound_device_id = backend, calls, None
        self.fails = False
        self.together: threading.Barrier | None = None

    def abort(self) -> None:
        self.calls.append(f"{self.backend.name}.abort")
        if self.together is not None:
            self.together.wait(10)
        if self.fails:
            raise RuntimeError("NCCL Abort failed")

    def _get_backend(self, device: torch.device) -> Backend:
        assert device == DEVICE
        return self.backend


class World:
    """A default group with one subgroup, a device that may be stoppable, and the calls made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *methods: str, stops: bool = False) -> None:
        self.calls: list[str] = []
        self.default = Group(Backend("default", self.calls, *methods), self.calls)
        self.sub = Group(Backend("sub", self.calls, *methods), self.calls)
        device = SimpleNamespace()
        if stops:
            device.stop_device = lambda index: self.calls.append(f"stop {index}")
            device.restart_device = lambda index: self.calls.append(f"restart {index}")
        monkeypatch.setattr(torch, "get_device_module", lambda _: device)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda one: self.calls.append(f"on {one.index}"))
        monkeypatch.setattr(torch_private, "subgroups_of", lambda _: [self.sub])
        monkeypatch.setattr(gloo, "cut", lambda _: self.calls.append("keys cut"))
        self.breaker = Breaker("generation 3")
        store: Any = SimpleNamespace(meet=dict)
        self.link = AcceleratorLink(DEVICE, (0, 2), self.breaker, store, "p", gloo.Endpoints(), timedelta(seconds=1))

    def connect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def init_process_group(backend: str, **options: Any) -> None:
            assert "device_id" not in options, "it would connect where it cannot be ended"
            self.calls.append(f"init {backend}")

        monkeypatch.setattr(accelerator.dist, "init_process_group", init_process_group)
        monkeypatch.setattr(accelerator, "PrefixStore", lambda *_: None)
        monkeypatch.setattr(accelerator, "_prepare", lambda _: None)  # it would stay for all tests of this process
        monkeypatch.setattr(torch_private, "uninstall_default_group", lambda _: self.calls.append("uninstalled"))
        monkeypatch.setattr(accelerator.distributed_c10d, "_get_default_group", lambda: self.default)
        self.link.connect()


CONNECTED = ("init nccl", "on 1", "default.eager_connect_single_device")
NCCL = ("eager_connect_single_device", "_group_start", "_group_end")
HCCL = ("eager_connect_single_device", "abort_hccl_comm")
ABORTED_BY_REASON = ["default.abort_hccl_comm", "on 1", "on 1", "sub.abort_hccl_comm"]


def test_nvidia_communicators_are_aborted_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, *NCCL)
    world.connect(monkeypatch)
    assert world.default.bound_device_id == DEVICE
    world.default.together = world.sub.together = meeting = threading.Barrier(2)  # each waits for the other's kernel
    world.link.cut()
    world.link.end(cuts=False)
    assert not meeting.broken and world.calls[:4] == [*CONNECTED, "keys cut"]
    assert sorted(world.calls[4:]) == ["default.abort", "on 1", "on 1", "sub.abort"]


def test_failed_abort_spares_no_group(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world = World(monkeypatch, *NCCL)
    world.connect(monkeypatch)
    world.sub.fails = True
    world.link.cut()
    world.link.end(cuts=False)
    assert {"sub.abort", "default.abort"} <= set(world.calls)
    assert "aborting generation 3 failed: NCCL Abort failed" in caplog.text


def test_backend_that_leaves_pairs_open_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator._warn_once.cache_clear()
    World(monkeypatch, *NCCL).connect(monkeypatch)
    assert "sends and receives" not in caplog.text
    for _ in range(2):
        World(monkeypatch, "eager_connect_single_device").connect(monkeypatch)
    assert caplog.text.count("does not abort sends and receives") == 1


def test_ascend_device_is_stopped_until_the_group_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, *HCCL, stops=True)
    world.connect(monkeypatch)
    world.link.cut()
    world.link.end(cuts=False)
    assert (world.calls[:5], world.calls[-1]) == ([*CONNECTED, "keys cut", "stop 1"], "restart 1")
    assert sorted(world.calls[5:-1]) == ABORTED_BY_REASON


def test_idle_group_is_dropped_and_its_device_keeps_running(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, *HCCL, stops=True)
    world.connect(monkeypatch)
    world.link.end(cuts=True)
    assert world.calls[:4] == [*CONNECTED, "keys cut"]
    assert sorted(world.calls[4:]) == ABORTED_BY_REASON


def test_late_break_does_not_stop_the_next_generations_device(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, *HCCL, stops=True)
    world.connect(monkeypatch)
    world.link.end(cuts=False)  # the thread that breaks it has triggered the breaker and nothing more yet
    world.link.cut()
    assert world.calls == [*CONNECTED, "keys cut"]


def test_break_before_the_group_is_formed_is_seen_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, *NCCL)
    world.link.begin().result()
    world.breaker.throw("worker 1 is lost")
    world.link.cut()
    with pytest.raises(GenerationEndedError, match="worker 1 is lost"):
        world.connect(monkeypatch)
    assert world.calls == ["keys cut", "init nccl", "uninstalled"]


def test_only_segments_that_no_process_needs_are_removed(tmp_path: Path) -> None:
    for name in ("nccl-killed", "nccl-mapped", "nccl-1minut", "nccl-of-my-own"):
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
        if name != "nccl-1minut":
            os.utime(tmp_path / name, (0, 0))
    (tmp_path / "nccl-linked").symlink_to(tmp_path / "nccl-of-my-own")
    (tmp_path / "nccl-folder").mkdir()
    os.utime(tmp_path / "nccl-folder", (0, 0))
    with (tmp_path / "nccl-mapped").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        os.utime(tmp_path / "nccl-mapped", (0, 0))
        assert remove_left_over(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("nccl-1minut", "nccl-folder", "nccl-linked", "nccl-mapped", "nccl-of-my-own")
    ]
    assert remove_left_over(tmp_path) == 1, "its process has ended"
