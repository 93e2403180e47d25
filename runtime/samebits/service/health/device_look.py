"""Monitor the worker's training device every few seconds, in a separate thread.

The thread combines the readings of the vendor's tool, faults in the kernel log, and the free memory measured by the
training thread. No thread of this process calls the driver for this, because a thread that is blocked in a hanging
driver cannot be ended. If a tool does not answer, its last readings stay in effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from samebits.config import Settings, SignPolicy
from samebits.core.reports import Ailment, Sign
from samebits.core.watch.health_limits import HealthReading, HealthWatch, Limit
from samebits.service import log as lines
from samebits.service.health.device_health import AscendTool, NvidiaTool, fault_of
from samebits.service.health.kernel_log import OF_DEVICE, KernelLog, bus_of
from samebits.service.health.vendor_tool import ToolReadings

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
