"""Query this machine's accelerators through the vendors' tools, ``nvidia-smi`` and ``npu-smi``.

A tool that is missing, hangs or gives unexpected output does not count as a fault of the device; only a fault that the
tool reports does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from samebits.service.health import vendor_tool
from samebits.service.health.vendor_tool import LATER_FIELDS, NVIDIA_FIELDS, ToolReadings, VendorTool

_NO_FAULT = {"", "OK", "NA", "UNKNOWN", "-"}
_NO_ACTION = {"", "NONE", "N/A", "[N/A]"}


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """One accelerator, with the tool's description and its problem, if any."""

    name: str
    found: str
    problem: str = ""


def devices() -> list[DeviceHealth]:
    """Return this machine's accelerators; an empty list without a tool."""
    told = [*(NvidiaTool().look() or []), *(AscendTool().look() or [])]
    return [DeviceHealth(one.name, _found(one), "; ".join(problems(one))) for one in told]


def problems(told: ToolReadings) -> list[str]:
    """Return the faults that the tool reports, regardless of limits."""
    found = []
    if told.errors:
        found.append(f"{told.errors:.0f} uncorrected memory errors since it was started")
    if fault := fault_of(told):
        found.append(fault)
    return found


def fault_of(told: ToolReadings) -> str:
    """Return a fault such as ``its health is Alarm`` or ``its driver asks for: Reset``.

    The text is empty if nothing is wrong.
    """
    if told.recovery.upper() not in _NO_ACTION:
        return f"its driver asks for: {told.recovery}"
    return "" if told.state.upper() in _NO_FAULT else f"its health is {told.state}"


class NvidiaTool:
    """The tool ``nvidia-smi``; only one thread may use an instance."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._tool = VendorTool("nvidia-smi", timeout_s)
        self._later = LATER_FIELDS

    def look(self, uuid: str = "") -> list[ToolReadings] | None:
        """Return the devices that the tool lists, or the one with this UUID; None without an answer."""
        which = (f"--id={uuid}",) if uuid else ()
        for later in self._later:
            fields = ",".join((*NVIDIA_FIELDS, *later))
            text = self._tool.ask(f"--query-gpu={fields}", *which, "--format=csv,noheader,nounits")
            if text is not None:
                self._later = (later,)  # the first set of fields that this driver knows
                return vendor_tool.nvidia(text)
        return None


class AscendTool:
    """The tool ``npu-smi``; only one thread may use an instance."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._tool = VendorTool("npu-smi", timeout_s)

    def look(self, wanted: Callable[[int], bool] = lambda place: True) -> list[ToolReadings] | None:
        """Return the devices whose position in the tool's list is wanted; None without an answer."""
        text = self._tool.ask("info")
        if text is None:
            return None
        told = [one for place, one in enumerate(vendor_tool.ascend(text)) if wanted(place)]
        return [replace(one, errors=self._errors(one.number)) for one in told]

    def _errors(self, number: str) -> float | None:
        text = self._tool.ask("info", "-t", "ecc", "-i", number)
        return None if text is None else vendor_tool.ascend_errors(text)


def _found(told: ToolReadings) -> str:
    parts = [told.model]
    if told.state:
        parts.append(f"health {told.state}")
    if told.celsius is not None:
        parts.append(f"{told.celsius:.0f} °C")
    if told.used_mib is not None and told.total_mib is not None:
        parts.append(f"{told.used_mib:.0f} of {told.total_mib:.0f} MiB taken")
    return ", ".join(parts)
