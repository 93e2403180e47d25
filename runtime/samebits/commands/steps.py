"""``samebits steps``: print the step logs, and the first step at which two of them differ.

Ranks of one world share everything except rank and samples, so only the rest is compared. Two logs of one slot from two
runs are compared completely. Nothing is locked, so the job may be running.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samebits.commands.ckpt.wording import table
from samebits.errors import UsageError
from samebits.launcher import job_spec
from samebits.option_types import step_number
from samebits.store import durable
from samebits.store.checkpoint.folder import rank_directory, slots_in
from samebits.store.checkpoint.point_store import local_folder
from samebits.store.step_log import STEPS_FOLDER, FoundLog, read_step_log
from samebits.store.step_record import RecordDifference, StepRecord, difference

DIFFERENT = 1
SHOWN_SAMPLES = 6
SHOWN_DIGEST = 16


@dataclass(frozen=True, slots=True)
class RankLog:
    """The step log of one rank, restricted to the requested steps."""

    folder: Path
    found: FoundLog
    first: int
    last: int | None

    @property
    def slot(self) -> int | None:
        """The slot that the log names."""
        return None if self.found.header is None else self.found.header.slot

    @property
    def records(self) -> list[StepRecord]:
        """The records in the order of the log, with repeated steps."""
        return [one for one in self.found.history.records if self._is_asked_for(one.step)]

    @property
    def line(self) -> dict[int, StepRecord]:
        """The newest record of each step, without abandoned lines."""
        return {step: one for step, one in self.found.history.line.items() if self._is_asked_for(step)}

    def _is_asked_for(self, step: int) -> bool:
        return step >= self.first and (self.last is None or step <= self.last)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two logs side by side: the steps that both have, and the first step at which they differ."""

    one: RankLog
    other: RankLog
    shared: list[int]
    step: int | None
    differs: RecordDifference | None

    def __str__(self) -> str:
        names = f"{self.one.folder} and {self.other.folder}"
        if self.differs is not None:
            return (
                f"step {self.step} is the first that differs between {names}: {self.differs.what} {self.differs.one}, "
                f"and {self.differs.other}"
            )
        if not self.shared:
            return f"{names} have no step in common"
        return f"{names} agree in every step they share: {_span(self.shared)}"


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits steps",
        description="Show the step logs that CheckpointConfig(step_log=True) writes. FOLDER is one rank's checkpoint "
        "folder, or a job's, which holds all ranks'. Exits with 1 if two logs differ.",
    )
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="default: this job's CHECKPOINT_PATH")
    parser.add_argument("--from", dest="first", type=step_number, default=0, metavar="N", help="the first step")
    parser.add_argument("--to", dest="last", type=step_number, metavar="N", help="the last step")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another rank's folder to compare with")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    folder = options.folder or _folder_here()
    logs, empty = _read(folder, options.first, options.last)
    if options.against is not None:
        if len(logs) > 1:
            raise UsageError(
                f"{folder} holds the logs of {len(logs)} ranks. Fix: give one rank's folder to compare with --against, "
                f"for example {logs[0].folder}"
            )
        against, also_empty = _read(options.against, options.first, options.last)
        empty += also_empty
        comparisons = [compare(logs[0], one) for one in against]
    else:
        comparisons = [compare(logs[0], one) for one in logs[1:]]
    print(_as_json(logs, comparisons, empty) if options.json else _as_text(logs, comparisons, empty))
    return DIFFERENT if any(one.differs is not None for one in comparisons) else 0


def compare(one: RankLog, other: RankLog) -> Comparison:
    """Return the first step at which the two logs differ."""
    one_line, other_line = one.line, other.line
    shared = sorted(one_line.keys() & other_line.keys())
    for step in shared:
        found = difference(one_line[step], other_line[step], same_rank=one.slot == other.slot)
        if found is not None:
            return Comparison(one, other, shared, step, found)
    return Comparison(one, other, shared, None, None)


def _folder_here() -> Path:
    settings = job_spec.settings_here(only_looks=True)
    return local_folder(settings.checkpoint_path, settings.recovery_path)


def _folders(folder: Path) -> list[Path]:
    """Return the rank folders with a log: this folder itself, or its subfolders."""
    with durable.disk_errors(folder, "looking for step logs"):
        if (folder / STEPS_FOLDER).is_dir():
            return [folder]
        ranks = [rank_directory(folder, slot) for slot in slots_in(folder)]
        found = [one for one in ranks if (one / STEPS_FOLDER).is_dir()]
    if not found:
        raise UsageError(
            f"{folder} holds no step log. Fix: give a job's checkpoint folder or a rank's in it, or enable the log "
            "with samebits.CheckpointConfig(step_log=True)"
        )
    return found


def _read(folder: Path, first: int, last: int | None) -> tuple[list[RankLog], list[Path]]:
    """Return the logs of this rank folder, or of the rank folders in it, and the folders whose logs are empty."""
    logs, empty = [], []
    for one in _folders(folder):
        found = read_step_log(one)
        if found is None:
            empty.append(one / STEPS_FOLDER)
        else:
            logs.append(RankLog(one, found, first, last))
    if not logs:
        raise UsageError(f"{empty[0]} is empty: no step was logged there yet")
    return logs, empty


# ---- output


def _as_text(logs: Sequence[RankLog], comparisons: Sequence[Comparison], empty: Sequence[Path]) -> str:
    lines = [problem for one in logs for problem in one.found.problems]
    if empty:
        lines.append(f"left out, as no step was logged there yet: {', '.join(map(str, empty))}")
    if len(logs) == 1:
        head = ("step", "generation", "rank", "learning rate", "weights before", "samples")
        lines.append(table([head, *map(_row, logs[0].records)]))
    else:
        lines.append(table([("slot", "records", "steps", "folder"), *map(_summary, logs)]))
    return "\n".join([*lines, *map(str, comparisons)])


def _row(record: StepRecord) -> tuple[str, ...]:
    shown = " ".join(map(str, record.samples[:SHOWN_SAMPLES]))
    more = f" … ({len(record.samples)})" if len(record.samples) > SHOWN_SAMPLES else ""
    return (
        str(record.step),
        str(record.generation),
        f"{record.rank} of {record.world_size}",
        " ".join(f"{rate:g}" for rate in record.learning_rates),
        "–" if record.weights is None else record.weights[:SHOWN_DIGEST],
        f"{shown}{more}" or "–",
    )


def _summary(log: RankLog) -> tuple[str, ...]:
    records = log.records
    return ("?" if log.slot is None else str(log.slot), str(len(records)), _span(log.line), str(log.folder))


def _span(steps: Sequence[int] | dict[int, StepRecord]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "none"


def _as_json(logs: Sequence[RankLog], comparisons: Sequence[Comparison], empty: Sequence[Path]) -> str:
    return json.dumps(
        {
            "logs": [_log_as_json(one) for one in logs],
            "comparisons": [_comparison_as_json(one) for one in comparisons],
            "empty": [str(one) for one in empty],
        }
    )


def _log_as_json(log: RankLog) -> dict[str, Any]:
    header = log.found.header
    return {
        "folder": str(log.folder),
        "job": None if header is None else header.job,
        "slot": log.slot,
        "problems": log.found.problems,
        "steps": [asdict(record) for record in log.records],
    }


def _comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "folder": str(comparison.one.folder),
        "against": str(comparison.other.folder),
        "shared_steps": len(comparison.shared),
        "first_difference": None
        if comparison.differs is None
        else {"step": comparison.step, **asdict(comparison.differs)},
    }
