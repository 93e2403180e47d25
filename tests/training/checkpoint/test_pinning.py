"""Pinned memory: the calls to torch for accelerator tensors and their order, without an accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.core.point import Point
from samebits.store.checkpoint import MemoryRoom, PointHeader, memory_buffer
from samebits.training.checkpoint import staging
from samebits.training.checkpoint.staging import PinnedMemory, Staging

DEVICE = torch.device("cuda", 0)
JOB = "a-job"


class Driver:
    """The part of NVIDIA's runtime in use: page-locked ranges by address."""

    def __init__(self, error: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.error = error
        self.current: list[torch.device] = []

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.current.append(device)
        yield
        self.current.pop()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert flags == 0 and self.current == [DEVICE], "another device would get a context"
        if not self.error:
            self.pinned[address] = size_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", driver.on)
    return driver


def test_memory_is_pinned_until_it_is_released(driver: Driver) -> None:
    memory = torch.zeros(8192, dtype=torch.uint8)
    pinned = PinnedMemory(memory, DEVICE)
    assert driver.pinned == {memory.data_ptr(): 8192}
    pinned.release()
    pinned.release()
    assert driver.pinned == {}


def test_only_nvidias_driver_is_used(driver: Driver) -> None:
    PinnedMemory(torch.zeros(8192, dtype=torch.uint8), torch.device("xpu", 0))
    PinnedMemory(torch.zeros(0, dtype=torch.uint8), DEVICE)
    assert driver.pinned == {}


def test_driver_that_refuses_is_reported_and_copies_stay_unpinned(
    driver: Driver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error stays CUDA's last one until a launch is checked, which must not be the script's."""
    driver.error = 2
    launched: list[torch.device] = []

    def ones(size: int, *, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    memory = torch.zeros(8192, dtype=torch.uint8)
    monkeypatch.setattr(torch, "ones", ones)
    PinnedMemory(memory, DEVICE).release()
    assert "8192 bytes could not be pinned (cudaHostRegister: error 2)" in caplog.text and launched == [DEVICE]


class OnDevice:
    """A tensor that appears to be on an accelerator."""

    is_cpu = False
    device = DEVICE

    def __init__(self, content: torch.Tensor) -> None:
        self.content = content
        self.dtype, self.shape, self.layout = content.dtype, content.shape, content.layout
        self.numel, self.element_size = content.numel, content.element_size


class Target:
    """A view of the slot that records calls."""

    def __init__(self, told: list[str]) -> None:
        self.nbytes = 4
        self._told = told

    def data_ptr(self) -> int:
        return 0

    def copy_(self, source: OnDevice, *, non_blocking: bool) -> None:
        self._told.append(f"copy, non_blocking={non_blocking}")


class Stream:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def wait_stream(self, other: str) -> None:
        self._told.append(f"wait for {other}")

    def __enter__(self) -> None:
        self._told.append("enter")

    def __exit__(self, *_: object) -> None:
        self._told.append("leave")

    def synchronize(self) -> None:
        self._told.append("synchronize")


def test_tensors_are_fetched_on_their_own_stream_and_all_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(staging, "_stream_of", lambda device: Stream(told))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"what {device} computes")
    sources: list[Any] = [OnDevice(torch.zeros(1)) for _ in range(2)]
    targets: list[Any] = [Target(told) for _ in sources]
    staging.copy(targets, sources)
    copies = ["copy, non_blocking=True"] * 2
    assert told == ["wait for what cuda:0 computes", "enter", *copies, "leave", "synchronize"]


@pytest.fixture
def room(tmp_path: Path) -> Iterator[MemoryRoom]:
    room = MemoryRoom(tmp_path, JOB, 0)
    yield room
    room.close()


def test_slot_is_pinned_while_it_is_filled(room: MemoryRoom, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []

    def fetch(targets: list[torch.Tensor], sources: list[OnDevice]) -> None:
        (target,), (source,) = targets, sources
        assert any(begin <= target.data_ptr() < begin + size for begin, size in driver.pinned.items())
        target.copy_(source.content)
        filled.append(target.nbytes)

    monkeypatch.setattr(staging, "fetch", fetch)
    filling = Staging(room)

    def stage(step: int, count: int) -> None:
        tensors: Any = [("weight", OnDevice(torch.full((count,), float(step))))]
        name, _ = filling.stage(PointHeader(JOB, Point(step, 1), 1, 0, 0, "0"), tensors, {}, {})
        with memory_buffer.hashed(room.path / name, room.descriptor):
            pass  # what its writer does; the next point uses the other slot

    for step in (1, 2, 3):
        stage(step, 1000)
    assert len(driver.pinned) == 2
    before = set(driver.pinned)
    stage(4, 1_000_000)
    assert len(driver.pinned) == 2 and len(before & set(driver.pinned)) == 1
    with contextlib.closing(filling):
        assert filled == [4000, 4000, 4000, 4_000_000]
    assert driver.pinned == {}
