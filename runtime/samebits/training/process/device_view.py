"""What the training thread knows of its device's memory, left for the thread that looks at the device's health.

Here live the reading and the device's name among its vendor's. Never here: what follows (``service.device_look``). The
one idea: only the thread that trains asks the driver, at commits and seldom, and leaves the figures; a driver that
hangs stops that thread anyway, and no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from samebits.service.health.device_look import DeviceMemory, WatchedDevice

__all__ = ["DeviceView"]


class DeviceView:
    """Of one process's device.

    Args:
        device: which.
        interval_s: how often it is read at most.
        visible_npus: ASCEND_RT_VISIBLE_DEVICES.
        clock: seconds that only rise.
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
        """For who looks at its health; None where it is no accelerator."""
        if self._device.type == "cpu":
            return None
        return WatchedDevice(str(self._device), self._uuid(), self._place(), lambda: self._memory)

    def committed(self) -> None:
        """The training thread has committed: read the memory, where it is time to."""
        if self._clock() < self._due_s:
            return
        self._due_s = self._clock() + self._interval_s
        module = torch.get_device_module(self._device)
        try:
            free, total = module.mem_get_info(self._device)
            used = module.memory_allocated(self._device)
            held = module.memory_reserved(self._device)
        except (AttributeError, NotImplementedError, RuntimeError):
            self._due_s = float("inf")  # this device does not tell
            return
        self._memory = DeviceMemory(total, free, held, used)

    def _uuid(self) -> str:
        """NVIDIA's name for it; MIG's slices have one that its tool is not asked about."""
        if self._device.type != "cuda":
            return ""
        found = getattr(torch.cuda.get_device_properties(self._device), "uuid", None)
        return f"GPU-{found}" if found is not None else ""

    def _place(self) -> int | None:
        """Ascend's place of it in ``npu-smi info``, where ASCEND_RT_VISIBLE_DEVICES chooses among those."""
        index = self._device.index or 0
        if self._device.type != "npu":
            return None
        if self._visible_npus is None:
            return index
        places = self._visible_npus.split(",")
        return int(places[index]) if index < len(places) and places[index].strip().isdigit() else None
