"""Device memory readings by the training thread: rare, and never repeated on a device without them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits.service.health.device_look import DeviceMemory
from samebits.training.process.device_view import DeviceView

NPU = torch.device("privateuseone", 1)


class Asked:
    """A device module that counts calls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.times, self.error = 0, error

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        self.times += 1
        if self.error is not None:
            raise self.error
        return 30, 100

    def memory_allocated(self, device: Any) -> int:
        return 40

    def memory_reserved(self, device: Any) -> int:
        return 60


def view_of(monkeypatch: pytest.MonkeyPatch, module: object) -> tuple[DeviceView, SimpleNamespace]:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    clock = SimpleNamespace(now=100.0)
    return DeviceView(NPU, 10.0, clock=lambda: clock.now), clock


def test_memory_is_read_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    view, clock = view_of(monkeypatch, asked)
    watched = view.watched()
    assert watched is not None and watched.memory() is None
    for clock.now in (100.0, 101.0, 109.9, 110.0, 111.0):
        view.committed()
    assert asked.times == 2
    assert watched.memory() == DeviceMemory(total=100, free=30, held=60, used=40)


@pytest.mark.parametrize("module", [Asked(NotImplementedError()), Asked(RuntimeError("no")), SimpleNamespace()])
def test_device_without_readings_is_asked_once(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    view, clock = view_of(monkeypatch, module)
    for clock.now in (100.0, 200.0, 300.0):
        view.committed()
    watched = view.watched()
    assert watched is not None and watched.memory() is None
    assert getattr(module, "times", 1) == 1


def test_cpu_does_not_count_as_a_device() -> None:
    view = DeviceView(torch.device("cpu"), 10.0)
    view.committed()
    assert view.watched() is None


@pytest.mark.parametrize(
    ("visible", "place"), [(None, 1), ("4,6", 6), ("4", None), ("", None), ("0-3", None), ("a,b", None)]
)
def test_ascend_index_counts_the_visible_devices(visible: str | None, place: int | None) -> None:
    view = DeviceView(torch.device("cpu"), 10.0, visible)
    view._device = SimpleNamespace(type="npu", index=1)  # type: ignore[assignment]  # torch knows none here
    assert view._place() == place
