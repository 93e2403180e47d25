"""What the vendors' own tools say of this machine's accelerators: ``nvidia-smi`` and ``npu-smi``, where they are there.

Here lives what is asked, and which answer is a fault. Never here: torch, or what follows. The one idea: a tool that is
not there, hangs or says something else is no fault of the device; only what its tool calls one is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from samebits.service.health import vendor_tool
from samebits.service.health.vendor_tool import NVIDIA_FIELDS, SLOWED_FIELDS, Told, VendorTool

_NO_FAULT = {"OK", "NA", "UNKNOWN", "-"}


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: what its tool says of it, and what is wrong with it, if anything."""

    name: str
    found: str
    problem: str = ""


def devices() -> list[Device]:
    """Those of this machine; none where no tool is there."""
    told = [*(NvidiaTool().look() or []), *(AscendTool().look() or [])]
    return [Device(one.name, _found(one), "; ".join(problems(one))) for one in told]


def problems(told: Told) -> list[str]:
    """What its tool calls a fault of it, whatever the limits are."""
    found = []
    if told.errors:
        found.append(f"{told.errors:.0f} uncorrected memory errors since it was started")
    if fault := fault_of(told):
        found.append(fault)
    return found


def fault_of(told: Told) -> str:
    """``its health is Alarm``, or nothing."""
    return "" if told.state.upper() in _NO_FAULT or not told.state else f"its health is {told.state}"


class NvidiaTool:
    """``nvidia-smi``, asked by one thread."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._tool = VendorTool("nvidia-smi", timeout_s)
        self._slowed: tuple[str, ...] = SLOWED_FIELDS

    def look(self, uuid: str = "") -> list[Told] | None:
        """Its devices, or the one with this UUID; None where it gives no answer."""
        which = (f"--id={uuid}",) if uuid else ()
        for fields in (*((*NVIDIA_FIELDS, one) for one in self._slowed), NVIDIA_FIELDS):
            text = self._tool.ask(f"--query-gpu={','.join(fields)}", *which, "--format=csv,noheader,nounits")
            if text is not None:
                self._slowed = fields[len(NVIDIA_FIELDS) :]  # the first that this driver knows
                return vendor_tool.nvidia(text)
        return None


class AscendTool:
    """``npu-smi``, asked by one thread."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._tool = VendorTool("npu-smi", timeout_s)

    def look(self, wanted: Callable[[int], bool] = lambda place: True) -> list[Told] | None:
        """Its devices whose place in its list is wanted; None where it gives no answer."""
        text = self._tool.ask("info")
        if text is None:
            return None
        told = [one for place, one in enumerate(vendor_tool.ascend(text)) if wanted(place)]
        return [replace(one, errors=self._errors(one.number)) for one in told]

    def _errors(self, number: str) -> float | None:
        text = self._tool.ask("info", "-t", "ecc", "-i", number)
        return None if text is None else vendor_tool.ascend_errors(text)


def _found(told: Told) -> str:
    parts = [told.model]
    if told.state:
        parts.append(f"health {told.state}")
    if told.celsius is not None:
        parts.append(f"{told.celsius:.0f} °C")
    if told.used_mib is not None and told.total_mib is not None:
        parts.append(f"{told.used_mib:.0f} of {told.total_mib:.0f} MiB taken")
    return ", ".join(parts)
