"""Query this machine's accelerators through the vendors' tools, ``nvidia-smi`` and ``npu-smi``.

A driver that hangs blocks the calling process in the kernel, where not even SIGKILL ends it. So no worker calls a
driver itself. A tool that does not end is abandoned, and is not run again until it has ended. A tool that is missing,
hangs or gives unexpected output does not count as a fault of the device; only a fault that the tool reports does.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from samebits.printable import printable
from samebits.service import clock
from samebits.store.child_processes import end_group

MOST_DEVICES = 64
NVIDIA_FIELDS = (
    *("index", "name", "pci.bus_id", "temperature.gpu", "memory.used", "memory.total", "utilization.gpu"),
    "ecc.errors.uncorrected.volatile.total",
)
LATER_FIELDS: tuple[tuple[str, ...], ...] = (
    ("clocks_event_reasons.active", "gpu_recovery_action"),
    ("clocks_event_reasons.active",),
    ("clocks_throttle_reasons.active",),
    (),
)
"""Further fields by driver, newest first; a field that a driver does not know makes its tool fail."""
_SHOWN_CHARACTERS = 80
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, software and hardware thermal slowdown, power brake. Not idle (1) or power cap (4)."""


@dataclass(frozen=True, slots=True)
class ToolReadings:
    """A tool's readings of one device. Values that were not reported are None."""

    name: str
    model: str
    number: str = ""  # Ascend's number of the device
    bus: str = ""  # NVIDIA's bus id
    celsius: float | None = None
    used_mib: float | None = None
    total_mib: float | None = None
    busy: float | None = None  # a share
    errors: float | None = None  # uncorrected memory errors
    is_slowed: bool | None = None
    state: str = ""  # Ascend's health
    recovery: str = ""  # the action that NVIDIA's driver requests, such as Reset


def nvidia(text: str) -> list[ToolReadings]:
    """Parse the output of ``--query-gpu`` for NVIDIA_FIELDS and one of LATER_FIELDS.

    The output is CSV without header and units.
    """
    found = []
    for line in text.splitlines()[:MOST_DEVICES]:
        parts = [part.strip() for part in line.split(",")]
        if not 0 <= len(parts) - len(NVIDIA_FIELDS) <= len(LATER_FIELDS[0]) or not re.fullmatch("[0-9]{1,4}", parts[0]):
            continue
        index, model, bus, celsius, used, total, busy, errors, *later = parts
        used_mib, total_mib = _memory(used, total)
        percent = _number(busy, 100)
        found.append(
            ToolReadings(
                f"NVIDIA {index}",
                printable(model, _SHOWN_CHARACTERS),
                bus=bus,
                celsius=_number(celsius, 200),
                used_mib=used_mib,
                total_mib=total_mib,
                busy=None if percent is None else percent / 100,
                errors=_number(errors, 1e9),
                is_slowed=_is_slowed(later[0]) if later else None,
                recovery=printable(later[1], _SHOWN_CHARACTERS) if len(later) > 1 else "",
            )
        )
    return found


def ascend(text: str) -> list[ToolReadings]:
    """Parse ``npu-smi info``, which has two lines per chip: the NPU's and the chip's."""
    found: list[ToolReadings] = []
    first: tuple[str, ...] | None = None
    for line in text.splitlines():
        cells = [cell.split() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or len(found) == MOST_DEVICES:
            first = None
        elif first is None and len(cells[0]) == 2 and cells[0][0].isdigit() and len(cells[1]) == 1 and cells[2]:
            first = (cells[0][0], cells[0][1], cells[1][0], cells[2][1] if len(cells[2]) > 1 else "")
        elif first is not None and cells[0] and all(one.isdigit() for one in cells[0]):
            number, model, state, celsius = first
            first = None
            busy = _number(cells[2][0], 100) if cells[2] else None
            pairs = re.findall(r"([0-9]+) */ *([0-9]+)", " ".join(cells[2][1:]))  # Memory-Usage, then HBM-Usage
            used_mib, total_mib = next((_memory(*pair) for pair in reversed(pairs) if pair[1] != "0"), (None, None))
            found.append(
                ToolReadings(
                    f"Ascend {number}" if cells[0][0] == "0" else f"Ascend {number} chip {cells[0][0]}",
                    printable(model, _SHOWN_CHARACTERS),
                    number=number,
                    celsius=_number(celsius, 200),
                    used_mib=used_mib,
                    total_mib=total_mib,
                    busy=None if busy is None else busy / 100,
                    state=printable(state, _SHOWN_CHARACTERS),
                )
            )
    return found


def ascend_errors(text: str) -> float | None:
    """Parse ``npu-smi info -t ecc``, and return the number of uncorrected memory errors."""
    counts = re.findall(r"^\s*(?:HBM|DDR) Double Bit Error Count\s*:\s*([0-9]{1,9})\s*$", text, re.MULTILINE)
    return float(sum(map(int, counts))) if counts else None


def _memory(used: str, total: str) -> tuple[float | None, float | None]:
    found = _number(used, 1e9), _number(total, 1e9)
    if found[0] is None or not found[1] or found[0] > found[1]:
        return None, None
    return found


def _number(text: str, most: float) -> float | None:
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text):
        return None
    value = float(text)
    return value if value <= most else None


def _is_slowed(mask: str) -> bool | None:
    return bool(int(mask, 16) & _SLOWED) if re.fullmatch("0x[0-9A-Fa-f]{1,16}", mask) else None


TIMEOUT_S = 10.0
MOST_BYTES = 1 << 20
_ENDS_IN_S = 1.0
_PART = 1 << 16


class VendorTool:
    """One program; only one thread may use an instance.

    Args:
        name: the program, searched in PATH at each call.
        timeout_s: how long an answer may take.
    """

    def __init__(self, name: str, timeout_s: float | None = None) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._left: subprocess.Popen[bytes] | None = None  # killed but still running

    def ask(self, *arguments: str) -> str | None:
        """Return the program's output; None if it is missing, fails, hangs or prints too much."""
        path = shutil.which(self._name)
        if path is None or (self._left is not None and self._left.poll() is None):
            return None
        self._left = None
        try:
            process = subprocess.Popen(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=Path("/"),
                start_new_session=True,
            )
        except OSError:
            return None
        assert process.stdout is not None
        with process.stdout as pipe:
            text = _all_of(pipe.fileno(), clock.now_s() + (self._timeout_s or TIMEOUT_S))
        end_group(process, 0.0 if text is None else _ENDS_IN_S)
        try:
            status = process.wait(_ENDS_IN_S)
        except subprocess.TimeoutExpired:
            self._left = process
            return None
        return text.decode(errors="replace") if text is not None and status == 0 else None


def _all_of(pipe: int, until_s: float) -> bytes | None:
    """Return all data from the pipe, or None if there is too much or it takes too long."""
    parts: list[bytes] = []
    size = 0
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while (left_s := until_s - clock.now_s()) > 0 and size <= MOST_BYTES:
        if not poll.poll(1000 * left_s):
            continue
        part = os.read(pipe, _PART)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    return None


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
                return nvidia(text)
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
        told = [one for place, one in enumerate(ascend(text)) if wanted(place)]
        return [replace(one, errors=self._errors(one.number)) for one in told]

    def _errors(self, number: str) -> float | None:
        text = self._tool.ask("info", "-t", "ecc", "-i", number)
        return None if text is None else ascend_errors(text)


def _found(told: ToolReadings) -> str:
    parts = [told.model]
    if told.state:
        parts.append(f"health {told.state}")
    if told.celsius is not None:
        parts.append(f"{told.celsius:.0f} °C")
    if told.used_mib is not None and told.total_mib is not None:
        parts.append(f"{told.used_mib:.0f} of {told.total_mib:.0f} MiB taken")
    return ", ".join(parts)
