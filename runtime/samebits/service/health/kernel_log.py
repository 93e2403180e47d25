"""Read NVIDIA's Xid errors, which report device faults, from the kernel log if permitted.

The kernel's messages remain even if a device has fallen off its bus and no tool reports it any more. Xids are explained
in NVIDIA's "XID Errors"; those caused by programs (13, 31, 43, 45 and others) are ignored.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

LOG = Path("/dev/kmsg")
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
    """The kernel log, read from its current end."""

    def __init__(self, path: Path = LOG) -> None:
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
