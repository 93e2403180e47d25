"""Read this process's device memory in the training thread, for the thread that checks the device's health.

Only the training thread calls the driver, rarely and at commits, and leaves the figures for the other. A driver that
hangs then stops only the thread that it would stop anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from samebits.service.health.device_look import DeviceMemory, WatchedDevice

__all__ = ["DeviceView"]


class DeviceView:
    """The view of one process's device.

    Args:
        device: the device.
        interval_s: minimum time between two readings.
        visible_npus: ASCEND_RT_VISIBLE_DEVICES.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        device: torch.device,
        interval_s: float,
        visible_npus: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device, self._interval_s, self._clock = device, interval_s, clock
        self._visible_npus = visible_npus
        self._due_s = float("-inf") if device.type != "cpu" else float("inf")
        self._memory: DeviceMemory | None = None

    def watched(self) -> WatchedDevice | None:
        """Return what the health check needs; None if the device is not an accelerator."""
        if self._device.type == "cpu":
            return None
        return WatchedDevice(str(self._device), self._uuid(), self._place(), lambda: self._memory)

    def committed(self) -> None:
        """Read the memory at a commit, if it is time."""
        if self._clock() < self._due_s:
            return
        self._due_s = self._clock() + self._interval_s
        module = torch.get_device_module(self._device)
        try:
            free, total = module.mem_get_info(self._device)
            used = module.memory_allocated(self._device)
            held = module.memory_reserved(self._device)
        except (AttributeError, NotImplementedError, RuntimeError):
            self._due_s = float("inf")  # this device cannot report it
            return
        self._memory = DeviceMemory(total, free, held, used)

    def _uuid(self) -> str:
        """Return NVIDIA's name of the device; MIG slices have other names, which nvidia-smi is not queried for."""
        if self._device.type != "cuda":
            return ""
        found = getattr(torch.cuda.get_device_properties(self._device), "uuid", None)
        return f"GPU-{found}" if found is not None else ""

    def _place(self) -> int | None:
        """Return the device's index in ``npu-smi info``, resolving ASCEND_RT_VISIBLE_DEVICES."""
        index = self._device.index or 0
        if self._device.type != "npu":
            return None
        if self._visible_npus is None:
            return index
        places = self._visible_npus.split(",")
        return int(places[index]) if index < len(places) and places[index].strip().isdigit() else None
