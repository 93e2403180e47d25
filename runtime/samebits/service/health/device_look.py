"""Monitor the worker's training device every few seconds, in a separate thread.

The thread combines the readings of the vendor's tool, faults in the kernel log, and the free memory measured by the
training thread. No thread of this process calls the driver for this, because a thread that is blocked in a hanging
driver cannot be ended. If a tool does not answer, its last readings stay in effect.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from samebits.config import Settings, SignPolicy
from samebits.core.reports import Ailment, Sign
from samebits.core.watch.health_limits import HealthReading, HealthWatch, Limit
from samebits.service import log as lines
from samebits.service.health.device_health import AscendTool, NvidiaTool, ToolReadings, fault_of

KERNEL_LOG = Path("/dev/kmsg")
MOST_RECORDS = 1000
"""The maximum number of records read in one round."""
OF_DEVICE = {
    48: "an uncorrected memory error",
    62: "its own processor halted",
    64: "its memory cannot be repaired",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    92: "many corrected memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "its own processor does not answer",
    120: "its own processor failed",
    140: "an unrecovered memory error",
    143: "it could not be set up",
}
_XID = re.compile(rb"NVRM: Xid \(PCI:([0-9A-Fa-f]{1,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})[^)]{0,16}\): (\d{1,4})\b")
_BUS = re.compile(r"([0-9A-Fa-f]{1,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\.?[0-9]?")
_RECORD_BYTES = 8192
Bus = tuple[int, ...]


class KernelLog:
    """NVIDIA's Xid errors, which report device faults, in the kernel log from its current end, if permitted.

    The kernel's messages remain even if a device has fallen off its bus and no tool reports it any more. Xids are
    explained in NVIDIA's "XID Errors"; those caused by programs (13, 31, 43, 45 and others) are ignored.
    """

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        self._log: int | None = None
        with contextlib.suppress(OSError):
            self._log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    @property
    def is_readable(self) -> bool:
        """Return whether this process may read the log; False after :meth:`close`."""
        return self._log is not None

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def faults(self) -> list[tuple[Bus, int]]:
        """Return new Xid errors that are device faults, each with the device's position on the bus."""
        found: list[tuple[Bus, int]] = []
        for _ in range(MOST_RECORDS if self._log is not None else 0):
            try:
                record = os.read(self._log, _RECORD_BYTES) if self._log is not None else b""
            except BrokenPipeError:
                continue  # unread records were overwritten; the next read continues after them
            except OSError:
                break
            if not record:
                break
            for domain, bus, slot, number in _XID.findall(record):
                if int(number) in OF_DEVICE:
                    found.append(((int(domain, 16), int(bus, 16), int(slot, 16)), int(number)))
        return found


def bus_of(text: str) -> Bus | None:
    """Parse ``00000000:65:00.0`` into the form that :meth:`KernelLog.faults` returns."""
    parts = _BUS.fullmatch(text)
    return None if parts is None else tuple(int(one, 16) for one in parts.groups())


OTHERS_SHARE = 0.1
"""Other processes with this share of a device's memory count as users, not as a driver's context."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory in bytes, as measured by the training thread at a commit."""

    total: int
    free: int
    held: int  # reserved by this process's allocator
    used: int  # part of ``held`` that is used by tensors


@dataclass(frozen=True, slots=True)
class WatchedDevice:
    """A device, as named by torch and the tools.

    Args:
        name: torch's name of the device.
        uuid: NVIDIA's UUID; "" if there is none.
        place: the position in Ascend's own list; None for other vendors.
        memory: returns the newest figures.
    """

    name: str
    uuid: str
    place: int | None
    memory: Callable[[], DeviceMemory | None]


def limits_of(settings: Settings) -> dict[Sign, Limit]:
    """Return the limits in the settings. A disabled check has none."""
    of = settings.health.of
    heat = of("device_heat")
    return limits_in(
        {
            Sign.DEVICE_MEMORY: of("device_memory"),
            Sign.DEVICE_HEAT: SignPolicy(heat.policy, heat.limit / 100),
            Sign.DEVICE_ERRORS: of("device_errors"),
            Sign.DEVICE_FAULT: of("device_errors"),
            Sign.DEVICE_SLOWED: of("device_slowed"),
            Sign.DEVICE_SHARED: of("device_shared"),
        }
    )


def limits_in(looks: Mapping[Sign, SignPolicy]) -> dict[Sign, Limit]:
    """Return the limit of each enabled check, and what happens if it is exceeded."""
    return {
        sign: Limit(look.limit, drains=look.policy in ("drain", "refuse"), refuses=look.policy == "refuse")
        for sign, look in looks.items()
        if look.policy != "off"
    }


class DeviceReadings:
    """Reads the state of one device. Only one thread may use an instance.

    Args:
        device: the device.
        log: the kernel's log; None to open it here.
        timeout_s: how long a tool may take; None for its default.
    """

    def __init__(self, device: WatchedDevice, log: KernelLog | None = None, timeout_s: float | None = None) -> None:
        self._device, self._log = device, KernelLog() if log is None else log
        self._nvidia, self._ascend = NvidiaTool(timeout_s), AscendTool(timeout_s)
        self._known: dict[Sign, HealthReading] = {}
        self._name = device.name
        self._bus = ""
        if device.uuid and not self._log.is_readable:
            lines.say(
                f"{device.name}: the kernel's log cannot be read here, as in most containers, so Xid errors are not "
                "seen; the recovery action that nvidia-smi reports is"
            )
        self._logged: dict[int, HealthReading] = {}

    def look(self) -> list[HealthReading]:
        """Take new readings, and return all known ones."""
        told = self._told()
        if told is not None:
            self._name, self._bus = told.name, told.bus or self._bus
            self._take(told)
        memory = self._device.memory()
        if memory is not None and memory.total > 0:
            taken = memory.total - memory.free - max(0, memory.held - memory.used)  # cached memory is available
            self._know(Sign.DEVICE_MEMORY, taken / memory.total)
        others = self._others(memory)
        if others is not None and told is not None and told.busy is not None:
            self._know(Sign.DEVICE_SHARED, told.busy if others >= OTHERS_SHARE else 0.0)
        bus = bus_of(self._bus)
        for place, number in self._log.faults():
            if place == bus:
                where = f"{self._name}: Xid {number} ({OF_DEVICE[number]})"
                self._logged[number] = HealthReading(Sign.DEVICE_FAULT, where, 1.0)
        return [*self._known.values(), *self._logged.values()]

    def close(self) -> None:
        """Close the kernel log."""
        self._log.close()

    def _told(self) -> ToolReadings | None:
        found: list[ToolReadings] | None = None
        if self._device.uuid:
            found = self._nvidia.look(self._device.uuid)
        elif self._device.place is not None:
            found = self._ascend.look(lambda place: place == self._device.place)
        return found[0] if found is not None and len(found) == 1 else None

    def _take(self, told: ToolReadings) -> None:
        if told.celsius is not None:
            self._know(Sign.DEVICE_HEAT, told.celsius / 100)
        if told.errors is not None:
            self._know(Sign.DEVICE_ERRORS, told.errors)
        if told.is_slowed is not None:
            self._know(Sign.DEVICE_SLOWED, float(told.is_slowed))
        if told.state or told.recovery:
            fault = fault_of(told)
            self._known.pop(Sign.DEVICE_FAULT, None)
            if fault:
                self._known[Sign.DEVICE_FAULT] = HealthReading(Sign.DEVICE_FAULT, f"{told.name}: {fault}", 1.0)

    def _others(self, memory: DeviceMemory | None) -> float | None:
        """Return the share of the device's memory that other processes use."""
        if memory is None or memory.total <= 0:
            return None
        return max(0, memory.total - memory.free - memory.held) / memory.total

    def _know(self, sign: Sign, share: float) -> None:
        self._known[sign] = HealthReading(sign, self._name, max(0.0, share))


class DeviceLook:
    """Monitors a device in a separate thread, at the interval of HEALTH.

    Args:
        settings: the limits.
        device: the device.
        told: called in that thread after each round, with the problems and whether they have changed.
    """

    def __init__(
        self, settings: Settings, device: WatchedDevice, told: Callable[[tuple[Ailment, ...], bool], object]
    ) -> None:
        self._interval_s = settings.health.every_s
        self._watch = HealthWatch(limits_of(settings))
        self._device, self._told = device, told
        self._over = threading.Event()

    def start(self) -> None:
        """Start a daemon thread."""
        threading.Thread(target=self._run, name="samebits-device", daemon=True).start()

    def stop(self) -> None:
        """Stop monitoring."""
        self._over.set()

    def _run(self) -> None:
        readings = DeviceReadings(self._device)
        while not self._over.wait(self._interval_s):
            has_changed = self._watch.look(readings.look())
            self._told(self._watch.ailments, has_changed)
        readings.close()
