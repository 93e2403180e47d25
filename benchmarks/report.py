"""The output of a benchmark: progress while it runs, a table for people, and one JSON object as its last line.

The module has the form of that object, its statistics, and the description of the machine. The form is checked whenever
a report is printed, so readers may rely on the keys of the last line and on a unit in the name of every figure.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

__all__ = ["MISSING", "SAFETENSORS_NEEDS", "Progress", "Report", "Spread", "median", "problems", "spread", "table"]

MISSING: Final = "missing"
"""Replaces the figures of a peer that is not installed."""

SAFETENSORS_NEEDS: Final = "safetensors, which `bash scripts/setup.sh --dev` installs"

KEYS: Final = ("benchmark", "machine", "versions", "floor", "peers", "ours", "ratios")
UNITS: Final = ("_s", "_ms", "_us", "_bytes", "_kib", "_per_s", "_steps", "_count")
COUNTED: Final = ("steps_", "hangs")
"""Prefix of a counting figure, whose name needs no unit at its end."""
PACKAGES: Final = ("samebits", "torch", "pyzmq", "msgpack", "numpy")

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample in the few numbers that a table has room for."""

    median: float
    lowest: float
    lower_quartile: float
    upper_quartile: float
    highest: float

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.lowest)}–{_short(self.highest)})"


def spread(values: Sequence[float]) -> Spread:
    """Summarise at least one value; quartiles by linear interpolation, ends included."""
    ordered = sorted(values)
    if len(ordered) == 1:
        return Spread(ordered[0], ordered[0], ordered[0], ordered[0], ordered[0])
    lower, middle, upper = statistics.quantiles(ordered, n=4, method="inclusive")
    return Spread(middle, ordered[0], lower, upper, ordered[-1])


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value, rounded to the digits that are meaningful on a shared machine."""
    return rounded(statistics.median(values))


def rounded(value: float) -> float:
    """Round to four significant digits."""
    return value if value == 0 or not math.isfinite(value) else float(f"{value:.4g}")


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


class Progress:
    """Progress lines with the seconds since the benchmark started; the first is printed at once.

    Args:
        begins: what will be measured.
        missing: what each absent peer needs.
    """

    def __init__(self, begins: str, missing: Mapping[str, str] = MappingProxyType({})) -> None:
        self._began_s = time.monotonic()
        self.say(begins)
        for peer, needs in missing.items():
            self.say(f"{peer} is missing and takes no part: it needs {needs}")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format columns as wide as their widest cell: the first left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


@dataclass(frozen=True, slots=True)
class Report:
    """One run of one benchmark.

    Args:
        benchmark: its name in ``python -m benchmarks.<name>``.
        floor: what the machine allows at best.
        peers: figures by peer; :data:`MISSING` for one that is not installed.
        ours: the figures of SameBits.
        ratios: ours ÷ a peer's or the floor's; without units.
    """

    benchmark: str
    floor: Figures = field(default_factory=dict)
    peers: Mapping[str, Figures | str] = field(default_factory=dict)
    ours: Figures = field(default_factory=dict)
    ratios: Figures = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the object of the last line.

        Raises:
            ValueError: it does not have the agreed form; the message lists the violations.
        """
        document = {
            "benchmark": self.benchmark,
            "machine": machine(),
            "versions": versions(),
            "floor": self.floor,
            "peers": self.peers,
            "ours": self.ours,
            "ratios": self.ratios,
        }
        found = problems(document)
        if found:
            raise ValueError(f"the report of benchmarks.{self.benchmark} is malformed: " + "; ".join(found))
        return document

    def print(self, people: str) -> None:
        """Print the table, then the object on the last line."""
        document = self.document()
        print(f"\n{people}\n", flush=True)
        print(json.dumps(document), flush=True)


def problems(document: Mapping[str, Any]) -> list[str]:
    """Return the violations of the agreed form, or an empty list."""
    found = [f"{key} is missing" for key in KEYS if key not in document]
    found += [f"{key} is unknown" for key in document if key not in KEYS]
    for section in ("floor", "peers", "ours"):
        for path, value in _leaves(document.get(section, {}), section):
            if value == MISSING and section == "peers" and path.count(".") == 1:
                continue
            if not _is_figure(value):
                found.append(f"{path} is {value!r}, expected a finite number, or null where nothing came of it")
            elif not any(_says_its_unit(part) for part in path.split(".")):
                found.append(f"{path} names no unit ({', '.join(UNITS)})")
    for path, value in _leaves(document.get("ratios", {}), "ratios"):
        if not _is_figure(value):
            found.append(f"{path} is {value!r}, expected a finite number, or null where nothing came of it")
        elif any(part.endswith(UNITS) for part in path.split(".")):
            found.append(f"{path} is a ratio and has no unit")
    return found


def _says_its_unit(name: str) -> bool:
    """Accept ``load_ms``, ``cpu_us_per_registration``, ``steps_lost``, and ``heartbeat_vs_bare``, which has no unit."""
    return (
        name.endswith(UNITS)
        or name.startswith(COUNTED)
        or f"_{name.partition('_per_')[0]}".endswith(UNITS)
        or "_vs_" in name
    )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    else:
        yield path, value


def _is_figure(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


def machine() -> dict[str, Any]:
    """Describe the machine and its load; on a machine with other work, only ratios are meaningful."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect the figures."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
