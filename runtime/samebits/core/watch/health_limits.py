"""Compare a host's and device's readings with limits (with hysteresis), and phrase the messages. Pure.

A reading is a share: a disk at 0.95 is 95 % full. Each worker checks its own host and reports only problems, so ten
thousand healthy workers send nothing. The scheduler decides which workers leave (``core.watch.health_judge``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from samebits.core.reports import MAX_AILMENTS, MAX_PLACE_CHARS, Ailment, Sign
from samebits.printable import printable

CALM_SHARE = 0.05
"""How far below its limit a share must fall for its place to count as healthy again."""
LOOKS = 2
"""Readings in a row that must agree on a change."""


@dataclass(frozen=True, slots=True)
class HealthReading:
    """One measured number: a share of the total, or a value in the unit of what is measured."""

    sign: Sign
    where: str  # a path, a device or ""
    share: float


@dataclass(frozen=True, slots=True)
class Limit:
    """The value from which there is a problem, and whether the worker must then leave or not start."""

    share: float
    drains: bool = False
    refuses: bool = False


@dataclass(slots=True)
class _Seen:
    """State of one sign at one place."""

    is_over: bool = False
    looks: int = 0  # readings in a row that contradict ``is_over``
    share: float = 0.0


class HealthWatch:
    """Checks the host of one process.

    Args:
        limits: by sign; signs without a limit are ignored.
    """

    def __init__(self, limits: Mapping[Sign, Limit]) -> None:
        self._limits = dict(limits)
        self._seen: dict[tuple[Sign, str], _Seen] = {}

    @property
    def ailments(self) -> tuple[Ailment, ...]:
        """Return the present problems."""
        found = tuple(
            Ailment(sign, printable(where, MAX_PLACE_CHARS), min(seen.share, 1e6), limit.share, limit.drains)
            for (sign, where), seen in sorted(self._seen.items())
            if seen.is_over
            for limit in (self._limits[sign],)
        )
        return found[:MAX_AILMENTS]

    def look(self, readings: Iterable[HealthReading]) -> bool:
        """Process new readings, and return whether a problem has appeared or ended.

        A resource without a reading is forgotten.
        """
        before = {place for place, seen in self._seen.items() if seen.is_over}
        read: dict[tuple[Sign, str], _Seen] = {}
        for one in readings:
            limit, place = self._limits.get(one.sign), (one.sign, one.where)
            if limit is not None:
                read[place] = _judged(self._seen.get(place, _Seen()), one.share, limit.share)
        self._seen = read
        return before != {place for place, seen in read.items() if seen.is_over}


def _judged(seen: _Seen, share: float, limit: float) -> _Seen:
    differs = share < limit - CALM_SHARE if seen.is_over else share >= limit
    looks = seen.looks + 1 if differs else 0
    if looks >= LOOKS:
        return _Seen(not seen.is_over, 0, share)
    return _Seen(seen.is_over, looks, share)


def unfit(limits: Mapping[Sign, Limit], readings: Iterable[HealthReading]) -> list[Ailment]:
    """Return the problems that keep a process from asking for a seat."""
    found = [(one, limits[one.sign]) for one in readings if one.sign in limits]
    return [
        Ailment(one.sign, printable(one.where, MAX_PLACE_CHARS), min(one.share, 1e6), limit.share, limit.drains)
        for one, limit in found
        if limit.refuses and one.share >= limit.share
    ]


_WORDS = {
    Sign.CPU: "its CPUs are {share} busy",
    Sign.MEMORY: "{share} of the memory it may use is taken",
    Sign.DISK: "the disk of {where} is {share} full",
    Sign.DESCRIPTORS: "{share} of the descriptors a process may have are open",
    Sign.DEVICE_MEMORY: "{share} of the memory of {where} is taken",
    Sign.DEVICE_HEAT: "{where} is {celsius:.0f} °C hot",
    Sign.DEVICE_ERRORS: "{where} has uncorrected memory errors, {count:.0f} since it was started",
    Sign.DEVICE_FAULT: "the driver reports of {where}",
    Sign.DEVICE_SLOWED: "{where} is slowed down, for heat or power",
    Sign.DEVICE_SHARED: "others use {where} as well, and it is {share} busy",
    Sign.LOGS: "the disk of {where} has {mib:.0f} MiB left for logs; once it is full, their lines are lost",
}
_LIMITS = {
    **dict.fromkeys(Sign, "limit {share}, HEALTH={sign}"),
    **dict.fromkeys((Sign.DESCRIPTORS, Sign.DEVICE_SHARED), "limit {share}"),
    Sign.DEVICE_HEAT: "limit {celsius:.0f} °C, HEALTH={sign}",
    Sign.DEVICE_ERRORS: "HEALTH=device_errors",
    Sign.DEVICE_FAULT: "HEALTH=device_errors",
    Sign.DEVICE_SLOWED: "HEALTH=device_slowed",
    Sign.LOGS: "limit {mib:.0f} MiB, HEALTH=logs",
}
_FIXES = {Sign.LOGS: "Fix: free space there, or start the job with LOG_DIR on another disk"}
SHOWN_AT_ONCE = frozenset((Sign.LOGS,))
"""Signs shown to followers even if no worker leaves, because the scheduler's own log may not show them."""


def said(ailment: Ailment) -> str:
    """Return a text such as ``the disk of /ckpt is 95 % full (limit 90 %, HEALTH=disk)``."""
    what = _filled(_WORDS[ailment.sign], ailment, ailment.share)
    fix = f". {_FIXES[ailment.sign]}" if ailment.sign in _FIXES else ""
    return f"{what} ({_filled(_LIMITS[ailment.sign], ailment, ailment.limit)}){fix}"


def _filled(text: str, ailment: Ailment, value: float) -> str:
    share = f"{value:.0%}".replace("%", " %")
    return text.format(
        share=share,
        where=ailment.where,
        celsius=100 * value,
        count=value,
        mib=1024 / max(value, 1e-6),
        sign=ailment.sign.name.lower(),
    )


def place_said(sign: Sign, where: str) -> str:
    """Return the name of the resource that is healthy again."""
    return {
        Sign.CPU: "its CPUs",
        Sign.MEMORY: "its memory",
        Sign.DISK: f"the disk of {where}",
        Sign.DESCRIPTORS: "its descriptors",
        Sign.DEVICE_MEMORY: f"the memory of {where}",
        Sign.DEVICE_HEAT: f"the heat of {where}",
        Sign.DEVICE_ERRORS: f"the memory of {where}",
        Sign.DEVICE_FAULT: where,
        Sign.DEVICE_SLOWED: f"the clock of {where}",
        Sign.DEVICE_SHARED: f"{where}, which no other process keeps busy",
        Sign.LOGS: f"the space for logs on the disk of {where}",
    }[sign]
