"""Read this process's device memory in the training thread, for the thread that checks the device's health.

Only the training thread calls the driver, rarely and at commits, and stores the numbers for the other thread. If a
driver hangs, it stops only the thread that it would stop anyway. The numbers are also written to LOG_DIR for the
process that replaces this one, because the driver frees a killed process's memory late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from samebits import strict_json
from samebits.errors import StoreError
from samebits.service import log
from samebits.service.health.device_look import DeviceMemory, WatchedDevice
from samebits.store import durable

FREED_WITHIN_S = 30.0
_LOOK_S = 0.1
_NOTED_AGAIN_AT = 1.05
_MOST_NOTE_BYTES = 1024


class HeldMemory(msgspec.Struct, frozen=True):
    """The device memory that a process held."""

    job: str
    host: str
    device: str
    held_bytes: int


def wait_for_memory(path: Path, job: str, host: str, device: torch.device, within_s: float = FREED_WITHIN_S) -> float:
    """Wait until the device memory of the previous process is free, and return the seconds waited.

    Args:
        path: the predecessor's note; without a note about this job, host and device, return at once.
        job: the job's id.
        host: this host's name.
        device: this process's device.
        within_s: maximum wait; after it, a warning says how much memory is missing.
    """
    try:
        with path.open("rb") as file:
            held = msgspec.convert(strict_json.loads(file.read(_MOST_NOTE_BYTES)), type=HeldMemory)
    except (OSError, ValueError, msgspec.ValidationError):
        return 0.0
    if (held.job, held.host, held.device) != (job, host, str(device)):
        return 0.0
    module, began_s = torch.get_device_module(device), time.monotonic()
    while (free := module.mem_get_info(device)[0]) < held.held_bytes:
        waited_s = time.monotonic() - began_s
        if waited_s >= within_s:
            log.warn(
                f"{device} has {free >> 20} MiB free after {waited_s:.1f} s, and the process before this one held "
                f"{held.held_bytes >> 20} MiB: this one may run out of memory. Fix: end leftover processes, which "
                "nvidia-smi lists"
            )
            return waited_s
        time.sleep(_LOOK_S)
    waited_s = time.monotonic() - began_s
    if waited_s >= _LOOK_S:
        log.say(f"waited {waited_s:.1f} s until {held.held_bytes >> 20} MiB of {device} were free again")
    return waited_s


class DeviceView:
    """Reads how much device memory one process uses.

    Args:
        device: the device.
        interval_s: minimum time between two readings.
        visible_npus: the value of ASCEND_RT_VISIBLE_DEVICES.
        clock: returns monotonic time in seconds.
        note: called with the number of bytes in use, at the first reading and whenever it has grown by 5 %.
    """

    def __init__(
        self,
        device: torch.device,
        interval_s: float,
        visible_npus: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[int], object] | None = None,
    ) -> None:
        self._note, self._noted_bytes = note, 0
        self._device, self._interval_s, self._clock = device, interval_s, clock
        self._visible_npus = visible_npus
        self._due_s = float("-inf") if device.type != "cpu" else float("inf")
        self._memory: DeviceMemory | None = None

    @staticmethod
    def noting(path: Path, job: str, host: str, device: torch.device) -> Callable[[int], None]:
        """Return a function that writes the note for :func:`wait_for_memory`, and warns if that fails."""

        def note(held_bytes: int) -> None:
            try:
                if path.parent.is_dir():
                    durable.replace_note(path, msgspec.json.encode(HeldMemory(job, host, str(device), held_bytes)))
            except StoreError as error:
                log.warn(f"the memory that this process holds on {device} could not be recorded: {error}")

        return note

    def watched(self) -> WatchedDevice | None:
        """Return what the health check needs, or None if the device is not an accelerator."""
        if self._device.type == "cpu":
            return None
        return WatchedDevice(str(self._device), self._uuid(), self._place(), lambda: self._memory)

    def committed(self) -> None:
        """Read the memory at a commit, if the interval has passed."""
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
        if self._note is not None and held > _NOTED_AGAIN_AT * self._noted_bytes:
            self._noted_bytes = held
            self._note(held)

    def _uuid(self) -> str:
        """Return NVIDIA's UUID of the device as nvidia-smi prints it, or "" if torch does not report one."""
        if self._device.type != "cuda":
            return ""
        found = getattr(torch.cuda.get_device_properties(self._device), "uuid", None)
        return f"GPU-{found}" if found is not None else ""

    def _place(self) -> int | None:
        """Return the device's index in ``npu-smi info``, which depends on ASCEND_RT_VISIBLE_DEVICES."""
        index = self._device.index or 0
        if self._device.type != "npu":
            return None
        if self._visible_npus is None:
            return index
        places = self._visible_npus.split(",")
        return int(places[index]) if index < len(places) and places[index].strip().isdigit() else None
