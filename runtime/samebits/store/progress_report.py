"""Read and write a training script's progress, in one small file beside the worker's log.

A new report replaces the last one with a rename, without a sync, because it is only displayed. Readers ignore malformed
reports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from samebits import strict_json
from samebits.errors import StoreError
from samebits.store import durable, private

MOST_VALUES = 12
LONGEST_NAME = 24
_MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """One report of one rank.

    Attributes:
        step: completed steps at the time of the report.
        total_steps: planned steps; None if the script has not reported them.
        values: the reported values by name, in the order given; the first is usually the loss.
    """

    step: int
    total_steps: int | None
    values: Mapping[str, float]


_NOT_FINITE = {str(value): value for value in (math.nan, math.inf, -math.inf)}
"""Texts that represent the numbers that JSON lacks."""


def report_file(log_dir: Path, node: str) -> Path:
    """Return the path of the report for the worker with this node id."""
    return log_dir / f"worker_{node}.report"


def remove_reports(log_dir: Path) -> None:
    """Remove the reports of an earlier job, which would be shown as the next job's."""
    for path in log_dir.glob("worker_*.report"):
        path.unlink(missing_ok=True)


def write_report(log_dir: Path, node: str, report: ProgressReport) -> None:
    """Replace the report.

    Raises:
        StoreError: the disk reports an error.
    """
    values = {name: value if math.isfinite(value) else str(value) for name, value in report.values.items()}
    content = {"step": report.step, "total_steps": report.total_steps, "values": values}
    durable.replace_note(report_file(log_dir, node), json.dumps(content).encode())


def read_report(log_dir: Path, node: str) -> ProgressReport | None:
    """Return the newest report; None if there is none, or the file is not a report of this user."""
    try:
        data = private.read(report_file(log_dir, node), _MAX_FILE_BYTES)
    except StoreError:
        return None
    if data is None:
        return None
    try:
        content = strict_json.loads(data)
        step, total_steps = content["step"], content["total_steps"]
        values = {name: _NOT_FINITE.get(value, value) for name, value in content["values"].items() if is_name(name)}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if type(step) is not int or type(total_steps) not in (int, type(None)):
        return None
    if not all(type(value) in (int, float) for value in values.values()):
        return None
    if step < 0 or len(values) > MOST_VALUES or (total_steps is not None and total_steps < 1):
        return None
    return ProgressReport(step, total_steps, values)


def is_name(name: object) -> bool:
    """Return whether ``name`` is a valid name of a value.

    It must be short, and printable, so that it cannot move a terminal's cursor.
    """
    return isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable()
