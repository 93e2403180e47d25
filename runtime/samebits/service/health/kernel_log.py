"""The Xids that NVIDIA's driver writes into the kernel's log, where this process may read it: a device's own faults.

Only reading and finding live here. The one idea: what the kernel has said is there whatever the device does now, so a
device that has fallen off its bus, and of which no tool says anything any more, is named all the same. What Xids mean:
NVIDIA, "XID Errors"; those that a program causes (13, 31, 43, 45 and others) are no fault of the device.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

LOG = Path("/dev/kmsg")
MOST_RECORDS = 1000
"""That are read in one look."""
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
    """What is written into it from now on."""

    def __init__(self, path: Path = LOG) -> None:
        self._log: int | None = None
        with contextlib.suppress(OSError):
            self._log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def close(self) -> None:
        """Read no further."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def faults(self) -> list[tuple[Bus, int]]:
        """The devices' own Xids since the last look: the device's place on the bus, and the number."""
        found: list[tuple[Bus, int]] = []
        for _ in range(MOST_RECORDS if self._log is not None else 0):
            try:
                record = os.read(self._log, _RECORD_BYTES) if self._log is not None else b""
            except BrokenPipeError:
                continue  # what was not read in time is overwritten: the next read goes on behind it
            except OSError:
                break
            if not record:
                break
            for domain, bus, slot, number in _XID.findall(record):
                if int(number) in OF_DEVICE:
                    found.append(((int(domain, 16), int(bus, 16), int(slot, 16)), int(number)))
        return found


def bus_of(text: str) -> Bus | None:
    """``00000000:65:00.0`` as :meth:`KernelLog.faults` has it."""
    parts = _BUS.fullmatch(text)
    return None if parts is None else tuple(int(one, 16) for one in parts.groups())
